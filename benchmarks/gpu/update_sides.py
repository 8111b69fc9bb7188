"""The sides of `update_step.py`: what each does with the rows that it is given."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast


@dataclass(frozen=True)
class Task:
    """One job of one side.

    Attributes:
        folder: with `model` and `rows.json`.
        method: dpo or grpo.
        side: one of `SIDES[method]`.
        group: completions of a prompt, 2 for DPO.
        steps: of the training, warm-up included.
        prompts_per_step: prompts in a step.
        new_tokens: of the longest completion.
        rows_per_pass: rows that TRL takes at a time.
        tokens_per_pass: tokens that a tree has at most.
        checkpointing: whether activations are computed again.
        optim: name of the optimizer, which both libraries take from transformers; None for each one's own.
    """

    folder: str
    method: str
    side: str
    group: int
    steps: int
    prompts_per_step: int
    new_tokens: int
    rows_per_pass: int
    tokens_per_pass: int
    checkpointing: bool
    optim: str | None

    def rows(self) -> list[dict[str, Any]]:
        """Prompts with their completions, as token ids."""
        return json.loads(Path(self.folder, "rows.json").read_text(encoding="utf-8"))

    def step_rows(self, step: int) -> list[dict[str, Any]]:
        """Those of one step; all steps have the same number of tokens."""
        return self.rows()[step * self.prompts_per_step :][: self.prompts_per_step]


def text_of(ids: list[int]) -> str:
    """The text of token ids: token 7 is the word w7."""
    return " ".join(f"w{i}" for i in ids)


def reward(completions: Any, completion_ids: Any, **_: Any) -> list[float]:
    """A reward that differs between completions: the share of tokens that three divides."""
    return [sum(i % 3 == 0 for i in ids) / len(ids) for ids in completion_ids]


class Unavailable(Exception):
    """A side cannot run on this machine."""


def _cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _now() -> float:
    """The time in seconds, after synchronising the device."""
    if _cuda():
        import torch

        torch.cuda.synchronize()
    return time.perf_counter()


def _ours(task: Task, **own: Any) -> tuple[dict[str, Any], Any, Any]:
    """Settings, model and tokenizer of our side."""
    from rlhf_models import load_causal_lm, load_tokenizer

    settings = {
        "max_tokens_per_batch": task.tokens_per_pass,
        "gradient_checkpointing": task.checkpointing,
        "max_steps": task.steps,
        "learning_rate": 1e-6,
        "lr_scheduler_type": "constant",
        "shuffle": False,
        "save_steps": None,
        "bf16": _cuda(),
        **own,
        **({"optim": task.optim} if task.optim else {}),
    }
    model: Any = load_causal_lm(f"{task.folder}/model", dtype="float32")
    return settings, model.to("cuda") if _cuda() else model, load_tokenizer(f"{task.folder}/model")


def _timed(trainer: Any, step: Callable[[], dict[str, float]]) -> dict[str, float]:
    """A step of our side, measured."""
    before, started = trainer.num_tokens, _now()
    metrics = step()
    seconds, tokens = _now() - started, trainer.num_tokens - before
    return {"seconds": seconds, "tokens": tokens, "loss": metrics["loss"], "grad_norm": metrics["grad_norm"]}


def dpo_ours(task: Task) -> list[dict[str, float]]:
    """Our `DPOTrainer`."""
    from rlhf_algos import DPOConfig, DPOTrainer
    from rlhf_data import PreferenceDataset, PreferenceRecord

    count = task.prompts_per_step
    settings, model, tokenizer = _ours(
        task, precompute_ref_log_probs=True, per_device_train_batch_size=count, max_length=None
    )
    records = [PreferenceRecord(**row) for row in _pairs(task)]
    trainer = DPOTrainer(model, DPOConfig(**settings), PreferenceDataset(records, tokenizer, max_length=None))
    trainer.prepare()
    examples = trainer.examples
    return [
        _timed(trainer, lambda at=at: trainer.train_step([examples[at * count + i] for i in range(count)]))
        for at in range(task.steps)
    ]


def _pairs(task: Task) -> list[dict[str, Any]]:
    """The rows as texts, the first completion chosen; the tokenizer adds the end tokens."""
    return [
        {
            "prompt": text_of(row["prompt"]),
            "chosen": " " + text_of(row["completions"][0][:-1]),
            "rejected": " " + text_of(row["completions"][1][:-1]),
        }
        for row in task.rows()
    ]


def grpo_ours(task: Task) -> list[dict[str, float]]:
    """Our `GRPOTrainer` from the completions on."""
    import torch

    from rlhf_algos import GRPOConfig, GRPOTrainer
    from rlhf_data import PromptExample
    from rlhf_infer import Rollout
    from rlhf_infer.rewards import RewardFunctions

    settings, model, tokenizer = _ours(
        task,
        beta=0.0,
        num_generations=task.group,
        per_device_train_batch_size=task.prompts_per_step * task.group,
        max_completion_length=task.new_tokens,
    )
    prompts = [PromptExample(text_of(row["prompt"]), tuple(row["prompt"]), {}) for row in task.rows()]
    trainer = GRPOTrainer(
        model, GRPOConfig(**settings), prompts, rewards=RewardFunctions([reward]), tokenizer=tokenizer
    )
    trainer.prepare()

    def rollout(prompt: list[int], ids: list[int]) -> Rollout:
        """A completion as the engine gives it, with its log-probs where the trainer uses them."""
        if not trainer.engine_is_exact:
            return Rollout(prompt, ids, [0.0] * len(ids), "stop")
        with torch.no_grad():
            logits = model(torch.tensor([prompt + ids], device=model.device)).logits[0, len(prompt) - 1 : -1]
        targets = torch.tensor(ids, device=model.device)[:, None]
        return Rollout(prompt, ids, logits.log_softmax(-1).gather(1, targets)[:, 0].tolist(), "stop")

    def step(at: int, rollouts: list[list[Rollout]]) -> dict[str, float]:
        first = at * task.prompts_per_step
        step_prompts = prompts[first : first + task.prompts_per_step]
        completions, table = trainer.score(step_prompts, rollouts, task.group)
        metrics = trainer.compute_advantages(completions, table)
        trainer.scorer.train()  # in evaluation mode no activations are recomputed
        return metrics | trainer.update(completions, len(step_prompts))

    found = []
    for at in range(task.steps):
        given = [[rollout(row["prompt"], ids) for ids in row["completions"]] for row in task.step_rows(at)]
        found.append(_timed(trainer, lambda at=at, given=given: step(at, given)))
    return found


def _peer_settings(task: Task, rows: int) -> dict[str, Any]:
    """Settings of TRL's trainers.

    Args:
        task: what is trained.
        rows: of a step, in the trainer's own units.
    """
    per_pass = min(rows, max(1, task.rows_per_pass * rows // (task.prompts_per_step * task.group)))
    return {
        "output_dir": f"{task.folder}/trl",
        "use_cpu": not _cuda(),
        "bf16": _cuda(),
        "gradient_checkpointing": task.checkpointing,
        "per_device_train_batch_size": per_pass,
        "gradient_accumulation_steps": rows // per_pass,
        "learning_rate": 1e-6,
        "lr_scheduler_type": "constant",
        "max_steps": task.steps,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        **({"optim": task.optim} if task.optim else {}),
    }


def _stopwatch(task: Task, found: list[dict[str, float]]) -> Any:
    """A callback that keeps what was measured of every step."""
    from transformers import TrainerCallback

    longest = task.rows()[0]
    padded = len(longest["prompt"]) + max(map(len, longest["completions"]))
    tokens = task.prompts_per_step * task.group * padded

    class Stopwatch(TrainerCallback):
        started = 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.started = _now()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            found.append({"seconds": _now() - self.started, "tokens": tokens})

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if "grad_norm" in logs:
                found[-1] |= {"loss": logs["loss"], "grad_norm": logs["grad_norm"]}

    return Stopwatch()


def dpo_trl(task: Task) -> list[dict[str, float]]:
    """TRL's `DPOTrainer`; its padding-free path is switched off in 1.16."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl.trainer.dpo_config import DPOConfig
    from trl.trainer.dpo_trainer import DPOTrainer

    from rlhf_models import load_tokenizer

    config = DPOConfig(
        **_peer_settings(task, task.prompts_per_step),
        precompute_ref_log_probs=True,
        max_length=None,
        train_sampling_strategy="sequential",
    )
    found: list[dict[str, float]] = []
    trainer = DPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(f"{task.folder}/model", dtype="float32"),
        args=config,
        processing_class=load_tokenizer(f"{task.folder}/model"),
        train_dataset=Dataset.from_list(_pairs(task)),
        callbacks=[_stopwatch(task, found)],
    )
    trainer.get_train_dataloader()  # computes the reference's log-probs
    trainer.train()
    return found


def grpo_trl(task: Task) -> list[dict[str, float]]:
    """TRL's `GRPOTrainer`, given the completions."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    from rlhf_models import load_tokenizer

    completions = {tuple(row["prompt"]): row["completions"] for row in task.rows()}

    class Trainer(GRPOTrainer):
        def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
            turns: dict[tuple[int, ...], int] = {}
            given = []
            for prompt in map(tuple, prompt_ids):
                turns[prompt] = turns.get(prompt, -1) + 1
                given.append(completions[prompt][turns[prompt]])
            return given, None

    config = GRPOConfig(
        **_peer_settings(task, task.prompts_per_step * task.group),
        beta=0.0,
        num_generations=task.group,
        max_completion_length=task.new_tokens,
        shuffle_dataset=False,
    )
    found: list[dict[str, float]] = []
    trainer = Trainer(
        model=AutoModelForCausalLM.from_pretrained(f"{task.folder}/model", dtype="float32"),
        reward_funcs=cast(Any, reward),
        args=config,
        processing_class=load_tokenizer(f"{task.folder}/model"),
        train_dataset=Dataset.from_list([{"prompt": text_of(row["prompt"])} for row in task.rows()]),
        callbacks=[_stopwatch(task, found)],
    )
    trainer.train()
    return found


def grpo_trl_trees(task: Task) -> list[dict[str, float]]:
    """The prefix trees of TRL's AsyncGRPO with its loss, its trainer's queue and server left out."""
    import torch
    from transformers import AutoModelForCausalLM
    from trl.experimental.async_grpo import packing

    try:
        packing._flash_attn()
    except Exception as error:  # whatever a download, a missing package or another GPU raises
        raise Unavailable(f"no FlashAttention 3 kernel: {type(error).__name__}: {error}") from error
    packing.register_tree_attention()
    model: Any = AutoModelForCausalLM.from_pretrained(
        f"{task.folder}/model", dtype="float32", attn_implementation=packing.TREE_ATTENTION
    )
    model.to("cuda")
    if task.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0, fused=True)
    found: list[dict[str, float]] = []
    for at in range(task.steps):
        started = _now()
        rows = _tree_rows(packing.TreeRow, task.step_rows(at), task.tokens_per_pass)
        terms = sum(row.trained for row in rows)
        loss = sum(_tree_loss(model, row.pack(), terms) for row in rows)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
        optimizer.step()
        optimizer.zero_grad()
        step = {"seconds": _now() - started, "tokens": sum(len(row.tokens) for row in rows)}
        found.append(step | {"loss": loss, "grad_norm": norm})
    return found


def _tree_rows(kind: Any, rows: list[dict[str, Any]], budget: int) -> list[Any]:
    """The samples of a step in trees of at most `budget` tokens, with their advantages."""
    import torch

    packed = [kind()]
    for number, row in enumerate(rows):
        scores = torch.tensor(reward(None, row["completions"]))
        advantages = (scores - scores.mean()) / (scores.std() + 1e-4)
        for ids, advantage in zip(row["completions"], advantages.tolist(), strict=True):
            length = len(row["prompt"])
            sample = {
                "input_ids": torch.tensor(row["prompt"] + ids),
                "completion_mask": torch.tensor([0] * length + [1] * len(ids)),
                "old_log_probs": torch.zeros(length + len(ids)),
                "advantage": advantage,
                "group_id": number,
            }
            if packed[-1].samples and not packed[-1].fits(sample, budget):
                packed.append(kind())
            packed[-1].add(sample)
    return packed


def _tree_loss(model: Any, row: dict[str, Any], terms: int) -> float:
    """Forward and backward pass of a tree; its share of the loss, with the ratios 1 as after sampling."""
    import torch

    row = {name: each.to("cuda") for name, each in row.items()}
    longest = row["tree_max_seqlens"].tolist()
    tree = {key: row[key] for key in ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")}
    with torch.autocast("cuda", torch.bfloat16):
        hidden = model.model(
            input_ids=row["input_ids"][None],
            position_ids=row["position_ids"][None],
            tree_max_seqlen_q=longest[0],
            tree_max_seqlen_k=longest[1],
            **tree,
        ).last_hidden_state[0]
        logits = model.lm_head(hidden[row["token_index"]]).float()
    targets = row["shift_labels"][row["token_index"]]
    logps = -torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    ratio = (logps - logps.detach()).exp()
    loss = -(ratio * row["advantages"]).sum() / terms
    loss.backward()
    return loss.item()


RUN: dict[tuple[str, str], Callable[[Task], list[dict[str, float]]]] = {
    ("dpo", "ours"): dpo_ours,
    ("dpo", "trl"): dpo_trl,
    ("grpo", "ours"): grpo_ours,
    ("grpo", "trl"): grpo_trl,
    ("grpo", "trl-trees"): grpo_trl_trees,
}
