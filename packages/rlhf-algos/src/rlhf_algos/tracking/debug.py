"""Switches for finding out why a training does not learn: gradients, activations, samples, bad batches.

What is recorded goes to a `.jsonl` file of the run folder, one line per recorded step, and from there into a
PNG next to it.  Nothing here changes what is trained: no random number is drawn, no tensor of the training is
touched.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_data import RunFolder, TokenSequence
from rlhf_models import evaluating

_GRADIENTS, _ACTIVATIONS = "gradient_flow", "activations"
_DECADES = (-6, 5)
"""Powers of ten of the smallest and the largest edge; magnitudes beyond fall into the outermost bins."""
_BINS_PER_DECADE = 4
_SHOWN_ROWS = 20


class GradientFlow:
    """Records the norm of every parameter's gradient and draws it: `gradient_flow.jsonl` and `.png`.

    Covered: whole gradients, also those that FSDP2 shards.  Not covered: DeepSpeed, which keeps gradients to
    itself; nothing is recorded there.

    Args:
        model: whose parameters are watched.
        run: where the files go; None on processes that write none (they must call `record` all the same).
        every: steps between records.
    """

    def __init__(self, model: nn.Module, run: RunFolder | None, *, every: int) -> None:
        self.model, self.run, self.every = model, run, every

    def record(self, step: int, *, scale: float = 1.0) -> None:
        """Record the gradients of a step if it is due; to be called before they are clipped.

        Args:
            step: counted from 1.
            scale: what the loss was multiplied by, as in fp16; gradients are divided by it.

        Raises:
            DiskFullError: nothing can be added to the disk.
        """
        if step % self.every:
            return
        named = [(name, p.grad) for name, p in self.model.named_parameters() if p.grad is not None]
        if not named:
            return
        norms = [torch.linalg.vector_norm(gradient.detach(), dtype=torch.float32) for _, gradient in named]
        whole = [norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in norms]
        values = (torch.stack([norm.cpu() for norm in whole]) / scale).tolist()
        if self.run is not None:
            names = [name for name, _ in named]
            row = {"step": step, "norms": dict(zip(names, values, strict=True))}
            self.run.append_lines(f"{_GRADIENTS}.jsonl", [row])

    def draw(self) -> None:
        """Draw what was recorded so far as `gradient_flow.png`; nothing if nothing was."""
        from rlhf_eval import can_draw, gradient_flow_figure

        rows = self.run.read_lines(f"{_GRADIENTS}.jsonl") if self.run else []
        if self.run is not None and rows and can_draw():
            gradient_flow_figure(rows, self.run.path / f"{_GRADIENTS}.png")


class ActivationHistograms:
    """Records histograms of decoder layers' outputs and plots them: `activations.jsonl` and `.png`.

    Hooks are on the layers during a recorded step only.  The bins are of magnitudes, four to a power of ten,
    so that vanishing and exploding values both show.  Not covered: layers compiled by torch.compile before
    the hooks were registered, whose hooks never run; gradient checkpointing counts every value twice.

    Args:
        model: with a list of like layers, as every transformers decoder has.
        run: where the files go; None on processes that write none.
        every: steps between records.
    """

    def __init__(self, model: nn.Module, run: RunFolder | None, *, every: int) -> None:
        self.layers, self.run, self.every = decoder_layers(model), run, every
        self.edges = torch.logspace(*_DECADES, (_DECADES[1] - _DECADES[0]) * _BINS_PER_DECADE + 1)
        self._hooks: list[Any] = []
        self._sums: list[dict[str, Tensor]] = []

    def before_step(self, step: int) -> None:
        """Begin to count if this step (counted from 1) is due."""
        if self.run is None or step % self.every:
            return
        self._sums = [{} for _ in self.layers]
        self._hooks = [
            layer.register_forward_hook(lambda module, args, output, i=i: self._count(i, output))
            for i, layer in enumerate(self.layers)
        ]

    def after_step(self, step: int) -> None:
        """Stop counting and write the counts; does nothing if `before_step` did nothing.

        Raises:
            DiskFullError: nothing can be added to the disk.
        """
        if not self._hooks:
            return
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        layers = [_layer_row(sums) for sums in self._sums if sums]
        if self.run is not None and layers:
            row = {"step": step, "edges": self.edges.tolist(), "layers": layers}
            self.run.append_lines(f"{_ACTIVATIONS}.jsonl", [row])

    def draw(self) -> None:
        """Draw what was recorded so far as `activations.png`; nothing if nothing was."""
        from rlhf_eval import activation_figure, can_draw

        rows = self.run.read_lines(f"{_ACTIVATIONS}.jsonl") if self.run else []
        if self.run is not None and rows and can_draw():
            activation_figure(rows, self.run.path / f"{_ACTIVATIONS}.png")

    @torch.no_grad()
    def _count(self, layer: int, output: Any) -> None:
        values = (output if isinstance(output, Tensor) else output[0]).detach().float().flatten()
        finite = values[values.isfinite()]
        magnitudes = finite.abs()
        bins = torch.bucketize(magnitudes, self.edges.to(finite.device)[1:-1])
        found = {
            "counts": torch.bincount(bins, minlength=len(self.edges) - 1),
            "sum": finite.double().sum(),
            "squares": finite.double().square().sum(),
            "nonfinite": torch.tensor(len(values) - len(finite)),
            "absmax": magnitudes.max() if len(finite) else torch.tensor(0.0),
        }
        sums = self._sums[layer]
        for name, value in found.items():
            value = value.cpu()
            if name in sums:
                value = torch.maximum(value, sums[name]) if name == "absmax" else value + sums[name]
            sums[name] = value


class Sampler:
    """Writes the model's greedy answers to a few prompts into `samples.jsonl` during training.

    Args:
        model: a transformers causal LM, or a PeftModel around one.
        tokenizer: the model's tokenizer.
        prompts: token ids; equal ones are taken once, and those too long for the model's context left out.
        run: where the samples go.
        every: steps between samples.
        max_new_tokens: longest answer in tokens.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        prompts: Sequence[Sequence[int]],
        run: RunFolder,
        *,
        every: int,
        max_new_tokens: int = 64,
    ) -> None:
        self.model, self.tokenizer, self.run, self.every = model, tokenizer, run, every
        limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or math.inf
        self.max_new_tokens = max_new_tokens
        fitting = [tuple(prompt) for prompt in prompts if 0 < len(prompt) <= limit - max_new_tokens]
        self.prompts = list(dict.fromkeys(fitting))

    @classmethod
    def prompts_of(cls, sequences: Sequence[TokenSequence], count: int = 4) -> list[tuple[int, ...]]:
        """The first `count` different prompts of sequences: what comes before the first scored token."""
        starts = [(s.input_ids, s.scored()[:1]) for s in sequences]
        return list(dict.fromkeys(tuple(ids[: start[0]]) for ids, start in starts if start))[:count]

    def after_step(self, step: int) -> None:
        """Write samples if this step (counted from 1) is due.

        Raises:
            DiskFullError: nothing can be added to the disk.
        """
        if step % self.every == 0:
            self.run.append_samples(self.sample(step))

    def sample(self, step: int) -> list[dict[str, Any]]:
        """One row per prompt: `step`, `prompt` and `completion` as text, `finish_reason`."""
        from rlhf_infer import SamplingParams, TransformersEngine

        with evaluating(self.model):
            params = SamplingParams(max_new_tokens=self.max_new_tokens, temperature=0.0)
            drawn = TransformersEngine(self.model, self.tokenizer).generate(self.prompts, 1, params)
        return [
            {
                "step": step,
                "prompt": prompt_text(self.tokenizer, rollout.prompt_ids),
                "completion": self.tokenizer.decode(rollout.completion_ids, skip_special_tokens=True),
                "finish_reason": rollout.finish_reason,
            }
            for (rollout,) in drawn
        ]


def prompt_text(tokenizer: Any, ids: Sequence[int]) -> str:
    """A prompt as its samples show it: without the start token, with the special tokens of a chat template.

    A start token that comes again is one of the template's, which opens every turn with it.
    """
    start, *rest = ids or (None,)
    return tokenizer.decode(rest if start == tokenizer.bos_token_id and start not in rest else list(ids))


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The longest list of modules of one class within a model: its decoder layers.

    Raises:
        ValueError: the model has no such list.
    """
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module)]
    like = [layers for layers in lists if len({type(layer) for layer in layers}) == 1]
    if not like:
        raise ValueError(f"{type(model).__name__} has no list of like layers to watch")
    return list(max(like, key=len))


def nonfinite_message(
    metrics: dict[str, float],
    *,
    step: int,
    rows: Sequence[int],
    checkpoint: Path | None,
    learning_rate: float,
) -> str:
    """The sentence for a loss or gradient that is NaN or infinite.

    Steps count from 1, rows from 0.
    """
    names = {"loss": "loss", "grad_norm": "gradient norm"}
    values = ", ".join(f"{text} {metrics[name]}" for name, text in names.items() if name in metrics)
    shown = ", ".join(map(str, rows[:_SHOWN_ROWS])) + (", ..." if len(rows) > _SHOWN_ROWS else "")
    place = f"the last good checkpoint is {checkpoint}" if checkpoint else "there is no checkpoint yet"
    return (
        f"step {step} gave {values} at learning rate {learning_rate:g} on the {len(rows)} training examples "
        f"{shown} (counted from 0); look at them or lower learning_rate; {place}"
    )


def _layer_row(sums: dict[str, Tensor]) -> dict[str, Any]:
    count = int(sums["counts"].sum())
    mean = float(sums["sum"]) / max(count, 1)
    variance = max(0.0, float(sums["squares"]) / max(count, 1) - mean * mean)
    return {
        "counts": sums["counts"].tolist(),
        "mean": mean,
        "std": math.sqrt(variance),
        "absmax": float(sums["absmax"]),
        "nonfinite": int(sums["nonfinite"]),
    }
