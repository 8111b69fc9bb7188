"""Guesses by a small model, which draws by the random numbers of the large one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from rlhf_data import UserError, invalid_value
from rlhf_infer.engines.protocol import SamplingParams
from rlhf_infer.engines.sampler import Sampler
from rlhf_infer.engines.speculative_batch import Guesses, RaggedRows, RowDrafts
from rlhf_infer.engines.transformers_engine import TransformersEngine
from rlhf_infer.kv.decode_attention import RaggedAttention, laid_out
from rlhf_infer.kv.prompt_cache import PromptCache
from rlhf_models import generation_length, prepare_for_packing


def first_layers(model: Any, count: int) -> Any:
    """A causal LM made of a model's first layers, its final norm and its output layer.

    All modules are shared, so it uses no memory and follows updates of the weights. In a `DraftModel` its
    guesses are good if the model was trained for early exit, as in LayerSkip (Elhoushi et al. 2024,
    arXiv:2404.16710).

    Args:
        model: a transformers decoder.
        count: number of layers, fewer than the model has.

    Raises:
        UserError: `count` is out of range, or the model has no list of layers.
    """
    total = model.config.get_text_config().num_hidden_layers
    if not 0 < count < total:
        raise invalid_value(
            f"draft_layers is {count}, but the model has {total} layers; choose fewer, and at least 1",
            "draft_layers",
        )
    lists = (
        name for name, each in model.named_modules() if isinstance(each, nn.ModuleList) and len(each) == total
    )
    path = next(lists, None)
    if path is None:
        raise UserError(
            f"{type(model).__name__} has no list of layers to take the first ones from; leave out draft",
            code="unsupported_model",
        )
    prepare_for_packing(model)  # attention modules read the implementation from the original config
    config = copy.deepcopy(model.config)
    text = config.get_text_config()
    text.num_hidden_layers = count
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:count]
    *parents, last = path.split(".")
    whole = part = _with_own_children(model, config)
    for name in parents:
        child = _with_own_children(part.get_submodule(name), text)
        part.add_module(name, child)
        part = child
    layers = part.get_submodule(last)
    assert isinstance(layers, nn.ModuleList)
    part.add_module(last, layers[:count])
    return whole


def _with_own_children(module: nn.Module, config: PreTrainedConfig) -> nn.Module:
    """A shallow copy with its own table of children and its own config."""
    found = copy.copy(module)
    found._modules = dict(module._modules)
    if hasattr(found, "config"):
        found.__dict__["config"] = config  # the typed setter of modules takes tensors and modules only
    return found


class DraftModel(TransformersEngine):
    """Guesses the tokens that a smaller model draws, several in a row for each pass of the large model.

    Args:
        model: the small causal LM; it stays in eval mode.
        tokenizer: its tokenizer, the same as the large model's.
        guesses: tokens that it draws for a pass.
        alternatives: places in which the token that came second is a guess too, those where it lost by the
            least; so guesses form a tree, all of which is computed in the same pass. 0: they are a chain.
    """

    measured = couples = True

    def __init__(self, model: Any, tokenizer: Any, *, guesses: int = 4, alternatives: int = 2) -> None:
        super().__init__(model.eval(), tokenizer)
        self.guesses, self.alternatives = guesses, min(alternatives, guesses)

    def check_tokenizer(self, tokenizer: Any) -> None:
        """Refuse a large model's tokenizer that is another one.

        Raises:
            UserError: they have different tokens.
        """
        if tokenizer.get_vocab() != self.tokenizer.get_vocab():
            raise UserError(
                "the draft model has another tokenizer than the model; choose one of the same family",
                code="tokenizers_differ",
            )

    def begin(
        self, prompts: Sequence[tuple[int, ...]], samples: range, params: SamplingParams, seeds: Any
    ) -> RowDrafts | None:
        """See `Drafter.begin`; none where prompt and completion do not fit the small model's context."""
        limit = generation_length(self.model)
        if limit is not None and max(map(len, prompts)) + params.max_new_tokens > limit:
            return None
        known = [tuple(min(token, self.vocab_size - 1) for token in prompt) for prompt in prompts]
        plain = replace(params, top_logprobs=0, raw_logprobs=False)
        # The random numbers are a hash of the prompts as the large model has them.
        sampler = self._sampler(prompts, samples, plain, seeds)
        return _ModelDrafts(self, self._prefill(known), sampler, len(samples), params.max_new_tokens)

    def draw_after(
        self,
        ids: np.ndarray,
        positions: Tensor,
        attention: RaggedAttention,
        draw: Callable[..., tuple[Tensor, Tensor, Tensor]],
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Draws of `draw` by this model after it has computed tokens (N,) at positions (N,)."""
        tokens = torch.from_numpy(np.minimum(ids, self.vocab_size - 1)).to(positions.device)
        first, second, margin = draw(self._head, self._forward(tokens, positions, attention))
        return first.cpu().numpy(), second.cpu().numpy(), margin.cpu().numpy()


class _ModelDrafts:
    """The small model's own keys and values of the rows, and what it draws after them."""

    def __init__(
        self,
        model: DraftModel,
        prefilled: tuple[PromptCache, Tensor],
        sampler: Sampler,
        samples: int,
        most: int,
    ) -> None:
        cache, _ = prefilled
        self._model, self._sampler, self._most = model, sampler, most
        self._attention = RaggedAttention(cache, np.repeat(np.arange(len(cache.lengths)), samples), most)
        self._starts = cache.lengths.repeat_interleave(samples)
        rows = len(self._starts)
        self._chain = np.full((rows, 1), -1)
        """(B, K) the last guesses, and (B,) the tokens that the rows had before them."""
        self._before = np.zeros(rows, dtype=np.int64)

    def propose(self, rows: RaggedRows) -> Guesses:
        """See `RowDrafts.propose`; what the rows drew since the last time is computed along."""
        lengths = rows.lengths
        left = self._most - 1 - int(lengths[rows.alive].min())  # the last token needs no guess
        count = max(1, min(self._model.guesses, left))
        tokens = rows.tokens[rows.place]
        held = self._held(tokens, lengths)
        every = np.arange(int(lengths.max()))
        newer = (every >= held[:, None]) & (every < lengths[:, None])
        drawn = [self._next(tokens[:, : len(every)][newer], held, lengths - held)]
        for number in range(1, count):
            # A row at its end writes over its last place, after which nothing is drawn.
            held = np.minimum(lengths + number - 1, self._most - 1)
            drawn.append(self._next(drawn[-1][0], held, np.ones_like(held)))
        self._chain, others, margins = (np.stack(each, 1) for each in zip(*drawn, strict=True))
        self._before = lengths
        return self._tree(others, np.where(others < 0, np.inf, margins))

    def _held(self, tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """(B,) how many of the rows' tokens (B, T) the model has computed; at least one each is new."""
        at = self._before[:, None] + np.arange(self._chain.shape[1] - 1)  # the last guess is not computed
        drawn = np.take_along_axis(tokens, np.minimum(at, self._most - 1), 1)
        agrees = (self._chain[:, :-1] == drawn) & (at < lengths[:, None])
        return np.minimum(self._before + np.cumprod(agrees, 1).sum(1), lengths - 1)

    def _tree(self, others: np.ndarray, margins: np.ndarray) -> Guesses:
        """The chain, and of the tokens (B, K) that came second those that lost by the least (B, K)."""
        count = min(self._model.alternatives, self._chain.shape[1])
        if not count:
            return Guesses(self._chain)
        closest = np.argsort(margins, 1)[:, :count]
        second = np.take_along_axis(np.where(np.isinf(margins), -1, others), closest, 1)
        chain = np.tile(np.arange(self._chain.shape[1]) - 1, (len(closest), 1))
        return Guesses(np.hstack([self._chain, second]), np.hstack([chain, closest - 1]))

    def _next(self, ids: np.ndarray, held: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, ...]:
        """The tokens after `counts` (B,) tokens of each row, of which the model has `held` (B,) others.

        With those in second place, and how far behind they are.
        """
        device = self._starts.device
        rows, place = laid_out(counts)
        at = torch.from_numpy(held[rows] + place).to(device)
        positions = self._starts[torch.from_numpy(rows).to(device)] + at
        steps = torch.from_numpy(np.minimum(held + counts, self._most - 1)).to(device)
        last = torch.from_numpy(np.cumsum(counts) - 1).to(device)
        every = torch.arange(len(counts), device=device)
        return self._model.draw_after(
            ids,
            positions,
            self._attention.at_rows(held, counts),
            lambda head, hidden: self._sampler.draw_two_at(head, hidden[last], every, steps),
        )

    def keep(self, kept: np.ndarray, prompts: np.ndarray) -> None:
        """See `RowDrafts.keep`."""
        index = torch.from_numpy(kept).to(self._starts.device)
        self._starts = self._starts[index]
        self._chain, self._before = self._chain[kept], self._before[kept]
        self._sampler.keep(index)
        self._attention.keep_rows(index, prompts)
