"""Speculative decoding: several draft tokens (guesses) of every row are verified in one pass."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from rlhf_infer.engines.decode_batch import Cohort
from rlhf_infer.engines.drafts import Drafter
from rlhf_infer.engines.prefill import within_window
from rlhf_infer.engines.protocol import SamplingParams, ends_of
from rlhf_infer.engines.sampler import remembers
from rlhf_infer.engines.speculative_batch import RaggedRows, SpeculativeCohort, Tally
from rlhf_infer.engines.transformers_engine import TransformersEngine
from rlhf_infer.kv.decode_attention import RaggedAttention
from rlhf_infer.kv.prompt_cache import PromptCache

_ROWS_ON_CPU = 8
"""Most rows for which guesses can save time on a CPU."""
_TRIAL = 4
"""Passes after which the speed with or without guesses counts as measured."""
_PATIENCE = 64
"""Passes after which the slower way is tried again, and twice as many each time after that."""
_FADE = 0.9
"""Decay of a pass's weight per further pass."""


class SpeculativeDecoder(TransformersEngine):
    """A `TransformersEngine` that verifies guesses of the next tokens (draft tokens) along with the last one.

    A token is always drawn from the model's distribution by the random number that belongs to its place, as
    without speculation; a guess that turns out to be that token has saved a pass, any other changes nothing.
    So completions are those of the plain engine token for token, greedy or sampled, whatever the guesses;
    only rounding differs (log-probs by 1e-5, and a token where two are equally likely). A fixed guess x is
    right with the probability p(x), as in the rule of Leviathan et al. 2023 (arXiv:2211.17192) for a draft
    that is certain of x. A draft model draws by the same random numbers, which makes its guesses right nearly
    as often as that rule would (Daliri, Musco and Suresh 2024, arXiv:2408.07978); for it all samples are
    drawn with `SamplingParams.coupled`, so they are other ones than without, of the same distribution.

    Guesses that cost more time than they save are left out, by measurement where the drafter does not know;
    on CPUs it then makes none for more than 8 rows.

    Samples with penalties, logits processors or a constraint, and models with a sliding window shorter than
    prompt and completion, are decoded plainly.

    Args:
        model: as in `TransformersEngine`.
        tokenizer: as in `TransformersEngine`.
        drafter: makes the guesses.
        **options: those of `TransformersEngine`.
    """

    def __init__(self, model: Any, tokenizer: Any, drafter: Drafter, **options: Any) -> None:
        super().__init__(model, tokenizer, **options)
        self.drafter = drafter
        self.tally = Tally()
        self._payoff = Payoff()

    def advance(self, cohorts: Sequence[Cohort], *, row_sizes: Sequence[int] = ()) -> None:
        """See `TransformersEngine.advance`; its time is what decides about guesses."""
        before = [(each, _guessed(each), len(each.rows.live()), each.rows.total) for each in cohorts]
        started = time.perf_counter()
        super().advance(cohorts, row_sizes=row_sizes)
        seconds = time.perf_counter() - started
        for each, guessed, rows, tokens in before:
            self._payoff.gained(rows, guessed, each.rows.total - tokens)
            self._payoff.took(rows, _guessed(each), seconds)

    def _cohort(
        self,
        prompts: list[tuple[int, ...]],
        samples: range,
        params: SamplingParams,
        prefilled: tuple[PromptCache, torch.Tensor],
        seeds: Sequence[int] | None = None,
    ) -> Cohort:
        cache, hidden = prefilled
        fits = within_window(self.model, cache.longest + params.max_new_tokens)
        drafts = None
        if self.drafter.couples:
            params = replace(params, coupled=True)
        rows, measured = len(prompts) * len(samples), self.drafter.measured
        wanted = self._payoff.pays if measured else _always
        few = not measured or hidden.device.type != "cpu" or rows <= _ROWS_ON_CPU
        if fits and few and not remembers(params) and wanted(rows):
            drafts = self.drafter.begin(prompts, samples, params, seeds)
        if drafts is None:
            return super()._cohort(prompts, samples, params, prefilled, seeds)
        return SpeculativeCohort(
            ragged := RaggedRows(prompts, samples, params.max_new_tokens, raw=params.raw_logprobs),
            self._sampler(prompts, samples, params, seeds),
            RaggedAttention(cache, ragged.prompt, params.max_new_tokens),
            drafts=drafts,
            wanted=wanted,
            tally=self.tally,
            lengths=cache.lengths,
            hidden=hidden,
            params=params,
            ends=ends_of(params, self.eos_token_ids),
            stops=self._stop_texts(params),
        )


def _guessed(cohort: Cohort) -> bool:
    return isinstance(cohort, SpeculativeCohort) and cohort.guessed


def _always(rows: int) -> bool:
    del rows
    return True


@dataclass
class _Way:
    """Decayed sums of tokens and seconds of passes, and the number of passes."""

    tokens: float = 0.0
    seconds: float = 0.0
    passes: int = 0

    @property
    def pace(self) -> float:
        return self.tokens / max(self.seconds, 1e-9)


@dataclass
class _Ways:
    """Passes over similar numbers of rows: `ways[1]` with guesses, `ways[0]` without."""

    ways: tuple[_Way, _Way] = field(default_factory=lambda: (_Way(), _Way()))
    wait: int = _PATIENCE
    left: int = _PATIENCE


class Payoff:
    """Decides pass by pass whether to guess, separately for each power of two of rows, by measured speed."""

    def __init__(self) -> None:
        self._known: dict[int, _Ways] = {}

    def pays(self, rows: int) -> bool:
        """Whether to guess in the next pass over `rows` rows: the faster way, now and then the other."""
        known = self._of(rows)
        plain, guessing = known.ways
        if guessing.passes < _TRIAL:
            return True
        if plain.passes < _TRIAL:
            return False
        better = guessing.pace > plain.pace
        known.left -= 1
        if known.left > 0:
            return better
        if known.left <= -_TRIAL:
            known.wait *= 2
            known.left = known.wait
        return not better

    def gained(self, rows: int, guessed: bool, tokens: int) -> None:
        """Count tokens that a pass brought."""
        self._of(rows).ways[guessed].tokens += tokens

    def took(self, rows: int, guessed: bool, seconds: float) -> None:
        """Count the time of a pass."""
        way = self._of(rows).ways[guessed]
        way.tokens, way.seconds = _FADE * way.tokens, _FADE * way.seconds + seconds
        way.passes += 1

    def _of(self, rows: int) -> _Ways:
        return self._known.setdefault(max(rows, 1).bit_length(), _Ways())
