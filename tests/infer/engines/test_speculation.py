"""Guesses change the number of passes and nothing else: tokens are the plain engine's, one by one."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from scipy.stats import chisquare

from drafted import assert_same, close_to
from letters import LetterTokenizer
from proofs import by_default
from raises import raises_error
from rlhf_infer import (
    Constraint,
    ContinuousBatcher,
    DraftModel,
    NgramDrafter,
    PreviousCompletions,
    Rollout,
    SamplingParams,
    SpeculativeDecoder,
    TransformersEngine,
)
from rlhf_infer.engines.sampler import race
from rlhf_infer.engines.speculation import Payoff
from rlhf_models.loading.tiny import TINY_ARCHITECTURES

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [5, 6, 7, 20], [30, 31], [5, 6, 7, 8, 5, 6, 7]]
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "plain": {},
    "cold": {"temperature": 0.5, "coupled": True},
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.7, "temperature": 1.3},
    "min-p": {"min_p": 0.1, "min_new_tokens": 9, "coupled": True},
    "stops": {"stop": ("qq", "a"), "stop_token_ids": (7, 8), "min_new_tokens": 3},
    "reported": {"temperature": 0.7, "top_logprobs": 3, "raw_logprobs": True, "logit_bias": ((9, 2.0),)},
}


class _Always:
    """A drafter whose guesses are asked for in every pass, whether they pay or not."""

    measured = couples = False

    def __init__(self, drafter: Any) -> None:
        self.begin = drafter.begin


def half_right(engine: TransformersEngine, n: int, params: SamplingParams) -> PreviousCompletions:
    """Guesses of which every second completion is right to its end, and the others up to a third token."""
    groups = engine.generate(PROMPTS, n, params)
    previous = PreviousCompletions(least=0)
    for group in groups:
        for rollout in group[::2]:
            rollout.completion_ids[2:] = [token ^ 1 for token in rollout.completion_ids[2:]]
    previous.keep(groups)
    previous.keep(groups)
    return previous


def drafter_of(kind: str, engine: TransformersEngine, params: SamplingParams) -> Any:
    if kind == "previous":
        return half_right(engine, 3, params)
    if kind == "ngram":
        return _Always(NgramDrafter())
    return _Always(DraftModel(close_to(engine.model), LetterTokenizer(), guesses=3, alternatives=3))


@pytest.mark.parametrize("settings", by_default(SETTINGS, "top-p", "stops"))
@pytest.mark.parametrize("kind", ["previous", "ngram", "model"])
def test_tokens_are_those_of_the_plain_engine(kind: str, settings: str, lively_model: Any) -> None:
    engine = TransformersEngine(lively_model(), LetterTokenizer())
    params = SamplingParams(24, seed=4, **SETTINGS[settings])
    expected = engine.generate(PROMPTS, 3, params)
    speculative = SpeculativeDecoder(engine.model, LetterTokenizer(), drafter_of(kind, engine, params))
    assert_same(speculative.generate(PROMPTS, 3, params), expected)


def test_with_a_draft_model_samples_are_coupled_ones(lively_model: Any) -> None:
    engine, params = TransformersEngine(lively_model(), LetterTokenizer()), SamplingParams(24, seed=4)
    expected = engine.generate(PROMPTS, 2, replace(params, coupled=True))
    decoder = SpeculativeDecoder(
        engine.model, LetterTokenizer(), DraftModel(close_to(engine.model), LetterTokenizer())
    )
    assert_same(decoder.generate(PROMPTS, 2, params), expected)


@pytest.mark.parametrize("name", by_default(TINY_ARCHITECTURES, "gpt2", "gemma2"))
def test_every_architecture_takes_guesses(name: str, lively_model: Any) -> None:
    engine = TransformersEngine(lively_model(name), LetterTokenizer())
    params = SamplingParams(20, seed=1)
    expected = engine.generate(PROMPTS, 3, params)
    for kind in ("previous", "model"):
        speculative = SpeculativeDecoder(engine.model, LetterTokenizer(), drafter_of(kind, engine, params))
        assert_same(speculative.generate(PROMPTS, 3, params), expected)


def test_right_guesses_save_passes_and_wrong_ones_cost_none(
    lively_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = TransformersEngine(lively_model(max_position_embeddings=512), LetterTokenizer())
    engine.eos_token_ids = [10**6]  # none ends
    params = SamplingParams(100, seed=1)
    expected = engine.generate(PROMPTS, 2, params)
    passes = []
    monkeypatch.setattr(
        TransformersEngine,
        "_forward",
        lambda self, *a, _f=TransformersEngine._forward: passes.append(1) or _f(self, *a),
    )
    previous = PreviousCompletions()
    previous.keep(expected)
    speculative = SpeculativeDecoder(engine.model, LetterTokenizer(), previous)
    speculative.eos_token_ids = engine.eos_token_ids
    assert_same(speculative.generate(PROMPTS, 2, params), expected)
    assert len(passes) == 100  # a prefill and 99 tokens: how far epochs agree is not known yet
    previous.keep(expected)
    assert previous.agreement == 100
    passes.clear()
    assert_same(speculative.generate(PROMPTS, 2, params), expected)
    # The first token comes with the prompt; then passes of 32 guesses bring 33 tokens each: 1 + 3 * 33.
    assert len(passes) == 1 + 3
    passes.clear()
    other = SamplingParams(100, seed=2)
    assert_same(speculative.generate(PROMPTS, 2, other), engine.generate(PROMPTS, 2, other))
    assert len(passes) == 2 * 100
    fresh = PreviousCompletions()
    fresh.keep(expected)
    fresh.keep(speculative.generate(PROMPTS, 2, other))
    assert fresh.agreement is not None and fresh.agreement < 8
    assert fresh.begin([tuple(PROMPTS[0])], range(2), params, None) is None


def test_what_guesses_save_goes_by_the_row_that_goes_on_alone_for_longest() -> None:
    def kept(*agreed: int) -> PreviousCompletions:
        previous = PreviousCompletions()
        old = [Rollout([5], [7] * 64, [0.0] * 64, "length") for _ in agreed]
        new = [Rollout([5], [7] * same + [8] * (64 - same), [0.0] * 64, "length") for same in agreed]
        previous.keep([old])
        previous.keep([new])
        return previous

    # A pass is 100 rows, 1.2 times that where rows differ: (6400 + 128) / (120 * 64 / 32 + 128).
    assert kept(64, 64).saving == pytest.approx(6528 / 368)
    # One row draws 60 tokens alone, and 32 guesses of two rows were for nothing.
    assert kept(64, 4).saving == pytest.approx(6528 / (120 * 62 + 128 + 64))
    assert kept(64, 4).agreement == 34


def test_the_state_of_previous_completions_is_all_there_is(lively_model: Any) -> None:
    engine = TransformersEngine(lively_model(), LetterTokenizer())
    params = SamplingParams(12, seed=1)
    previous, again = half_right(engine, 3, params), PreviousCompletions(least=0)
    again.load_state(previous.state())
    assert again.state() == previous.state()
    one, other = (SpeculativeDecoder(engine.model, LetterTokenizer(), each) for each in (previous, again))
    assert one.generate(PROMPTS, 3, params) == other.generate(PROMPTS, 3, params)


@pytest.mark.slow
@pytest.mark.parametrize("settings", ["plain", "cold", "top-k", "top-p", "min-p", "biased"])
def test_what_is_drawn_has_the_targets_distribution(settings: str, lively_model: Any) -> None:
    """50,000 second tokens after guesses that are always the same ones, against their exact probabilities.

    A rule that took a guess x more or less often than p(x) would show, as the guess is the likeliest token.
    """
    model = lively_model(vocab_size=40)
    options = {"biased": {"logit_bias": ((9, 1.5), (11, -1.0))}} | SETTINGS
    prompt, rounds, n = tuple(PROMPTS[0]), 5, 10_000
    engine = TransformersEngine(model, LetterTokenizer())
    engine.eos_token_ids = [10**6]
    firsts = [[first] for first in range(40)]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*prompt, *first] for first in firsts])).logits[:, -1]
        start = model(input_ids=torch.tensor([prompt])).logits[0, -1]
    params = SamplingParams(3, **{**options[settings], "min_new_tokens": 0})

    def law(row: torch.Tensor) -> torch.Tensor:
        return exact_law(row, params)

    expected = (law(start)[:, None] * torch.stack([law(row) for row in logits])).flatten()
    guess = [int(law(start).argmax())]
    guess.append(int(law(logits[guess[0]]).argmax()))
    previous = PreviousCompletions(least=0)
    for _ in range(2):
        previous.keep([[Rollout(prompt, [*guess, 0], [0.0] * 3, "length")] * n])
    decoder = SpeculativeDecoder(model, LetterTokenizer(), previous)
    decoder.eos_token_ids = engine.eos_token_ids
    counts = torch.zeros(1600)
    for seed in range(rounds):
        (group,) = decoder.generate([prompt], n, replace(params, seed=seed))
        pairs = torch.tensor([each.completion_ids[:2] for each in group])
        counts += (pairs[:, 0] * 40 + pairs[:, 1]).bincount(minlength=1600)
    assert counts[expected == 0].sum() == 0
    for took, p in (
        (counts.view(40, 40)[guess[0]].sum(), expected.view(40, 40)[guess[0]].sum()),
        (counts[guess[0] * 40 + guess[1]], expected[guess[0] * 40 + guess[1]]),
    ):  # four standard errors of a share
        assert abs(float(took / counts.sum() - p)) < 4 * math.sqrt(float(p * (1 - p)) / (rounds * n))
    often = expected * rounds * n >= 5
    observed = [*counts[often].tolist(), counts[~often].sum().item()]
    wanted = [*expected[often].tolist(), expected[~often].sum().item()]
    total = rounds * n / sum(wanted)
    kept = [(o, w * total) for o, w in zip(observed, wanted, strict=True) if w * total >= 1]
    rest = rounds * n - sum(w for _, w in kept)
    found, law_of = zip(*kept, strict=True)
    scale = sum(found) / (rounds * n - rest)
    assert chisquare(found, [w * scale for w in law_of]).pvalue > 1e-3


def exact_law(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """(V,) probabilities, with loops over the tokens instead of the engine's tensors."""
    logits = logits.double().clone()
    for token, bias in params.logit_bias:
        logits[token] += bias
    probs = (logits / params.temperature).softmax(-1)
    order = probs.argsort(descending=True).tolist()
    if params.top_k:
        order = order[: params.top_k]
    if params.top_p < 1:
        kept, mass, whole = [], 0.0, float(probs[order].sum())
        for token in order:
            if mass < params.top_p * whole:
                kept.append(token)
            mass += float(probs[token])
        order = kept
    order = [token for token in order if probs[token] >= params.min_p * probs[order[0]]]
    law = torch.zeros_like(probs)
    law[order] = probs[order]
    return law / law.sum()


def test_races_draw_by_probability_and_couple_nearly_as_well_as_can_be() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(100, generator=generator)  # more tokens than have noise of their own
    p, q = logits.log_softmax(-1), (logits + 0.1 * torch.randn(100, generator=generator)).log_softmax(-1)
    numbers = torch.rand(100_000, dtype=torch.float64, generator=generator)
    ones, others = (
        torch.cat([race(x.expand(1000, -1), part) for part in numbers.split(1000)]) for x in (p, q)
    )
    wanted = p.double().exp() * len(numbers)
    often = wanted >= 5
    counts = ones.bincount(minlength=100).double()
    found = torch.cat([counts[often], counts[~often].sum()[None]])
    law = torch.cat([wanted[often], wanted[~often].sum()[None]])
    kept = law >= 1
    assert chisquare(found[kept], law[kept] * (found[kept].sum() / law[kept].sum())).pvalue > 1e-3
    distance = 0.5 * float((p.exp() - q.exp()).abs().sum())
    differ = float((ones != others).double().mean())
    assert distance * 0.9 < differ < 2 * distance / (1 + distance) * 1.1


def test_a_race_is_a_function_of_place_and_token() -> None:
    # SplitMix64's finaliser, written out for the place 0.5 and two tokens with ln p = -1 and -0.5.
    def noise(token: int) -> float:
        word = (1 << 64) - 1
        state = ((1 << 52) * 0x9E3779B97F4A7C15 + token * 0xD1342543DE82EF95) & word
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & word
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & word
        return (((state ^ (state >> 31)) >> 11) + 0.5) / (1 << 53)

    from rlhf_infer.engines.sampler import _hashed

    found = _hashed(torch.tensor([0.5], dtype=torch.float64), torch.tensor([[0, 1, 77]]))
    assert found[0].tolist() == [noise(0), noise(1), noise(77)]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(10, repetition_penalty=1.3),
        SamplingParams(10, frequency_penalty=0.5),
        SamplingParams(10, logits_processors=(lambda ids, logits: logits,)),
    ],
)
def test_what_needs_tokens_one_by_one_is_decoded_plainly(params: SamplingParams, lively_model: Any) -> None:
    engine = TransformersEngine(lively_model(), LetterTokenizer())
    decoder = SpeculativeDecoder(engine.model, LetterTokenizer(), half_right(engine, 2, SamplingParams(10)))
    assert_same(decoder.generate(PROMPTS, 2, params), engine.generate(PROMPTS, 2, params))


def test_a_sliding_window_is_decoded_plainly(lively_model: Any) -> None:
    model = lively_model("mistral", sliding_window=8)
    engine, params = TransformersEngine(model, LetterTokenizer()), SamplingParams(16, seed=2)
    decoder = SpeculativeDecoder(model, LetterTokenizer(), half_right(engine, 2, params))
    assert_same(decoder.generate(PROMPTS, 2, params), engine.generate(PROMPTS, 2, params))


def test_a_draft_model_with_other_tokens_is_refused(lively_model: Any) -> None:
    class Other(LetterTokenizer):
        @staticmethod
        def get_vocab() -> dict[str, int]:
            return {"b": 0}

    draft = DraftModel(lively_model(), LetterTokenizer())
    draft.check_tokenizer(LetterTokenizer())
    with raises_error("tokenizers_differ"):
        draft.check_tokenizer(Other())


@pytest.mark.parametrize("kind", by_default(["ngram", "model"], "model"))
def test_the_batcher_hands_over_every_token(kind: str, lively_model: Any) -> None:
    engine = TransformersEngine(lively_model(), LetterTokenizer())
    asked = [
        (PROMPTS[0], 3, SamplingParams(24, seed=1)),
        (PROMPTS[1], 2, SamplingParams(9, temperature=0)),
        (PROMPTS[3], 3, SamplingParams(24, seed=9, stop=("a",))),
        (PROMPTS[3], 1, SamplingParams(24, 0, repetition_penalty=1.2)),
    ]
    expected = [engine.generate([prompt], n, params) for prompt, n, params in asked]
    decoder = SpeculativeDecoder(engine.model, LetterTokenizer(), drafter_of(kind, engine, asked[0][2]))
    batcher = ContinuousBatcher(decoder)
    told: list[dict[int, list[int]]] = [{} for _ in asked]
    futures = [
        batcher.submit(
            prompt,
            n,
            params,
            on_token=lambda sample, token, *_, of=i: told[of].setdefault(sample, []).append(token),
        )
        for i, (prompt, n, params) in enumerate(asked)
    ]
    found = [[future.result()] for future in futures]
    batcher.close()
    for mine, plain, heard in zip(found, expected, told, strict=True):
        assert_same(mine, plain)
        assert [heard[i] for i in range(len(heard))] == [each.completion_ids for each in mine[0]]


def test_guesses_stop_where_they_cost_more_than_they_save() -> None:
    def run(payoff: Payoff, rows: int, cost: float, gain: float, passes: int = 1000) -> float:
        guessed = 0
        for _ in range(passes):
            guess = payoff.pays(rows)
            guessed += guess
            payoff.gained(rows, guess, int(100 * rows * (gain if guess else 1)))
            payoff.took(rows, guess, cost if guess else 1.0)
        return guessed / passes

    assert run(Payoff(), 1, cost=1.4, gain=1.1) < 0.05
    assert run(Payoff(), 1, cost=1.4, gain=3.0) > 0.95
    assert run(Payoff(), 32, cost=2.7, gain=1.1) < 0.03
    assert run(Payoff(), 32, cost=1.2, gain=3.0) > 0.85
    payoff = Payoff()
    run(payoff, 1, cost=1.4, gain=1.1)
    assert run(payoff, 1, cost=1.4, gain=3.0, passes=3000) > 0.5  # a text that has begun to repeat itself


def test_constraints_are_decoded_plainly(lively_model: Any) -> None:
    from rlhf_infer.engines.sampler import remembers

    assert remembers(SamplingParams(4, constraint=Constraint("regex", "a+")))
    assert not remembers(SamplingParams(4, top_k=3, min_new_tokens=2))
