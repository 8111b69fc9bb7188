"""Best-of-N on the real engine: rounds equal one draw, stopping and budgets save, costs are counted."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest

from lively import lively
from raises import raises_error
from rlhf_infer import (
    AdaptiveComputeAllocator,
    BestOfNSampler,
    ConfidenceBasedStopping,
    SamplingCost,
    SamplingParams,
    Selected,
    TransformersEngine,
    select,
)
from rlhf_infer.engines.stop_strings import until_stop
from rlhf_infer.rewards import RewardFunctions
from rlhf_models import RewardModel

PROMPTS: list[Any] = ["where is mary ?", "where is ball ?", "mary went to kitchen .", "so"]
PARAMS = SamplingParams(6, seed=3)
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def engine(tiny_llama: Any, byte_tokenizer: Any) -> TransformersEngine:
    return TransformersEngine(lively(tiny_llama, 3.0), byte_tokenizer)


@pytest.fixture
def reward(tiny_llama: Any, byte_tokenizer: Any) -> RewardModel:
    return RewardModel.from_backbone(tiny_llama, byte_tokenizer)


def letters(completions: list[str]) -> list[float]:
    """Scores of which several completions have the same."""
    return [float(sum(letter in text for letter in "aeiou")) for text in completions]


def sampler(engine: TransformersEngine, scorer: Any, **settings: Any) -> BestOfNSampler:
    settings = {"n": 8, "params": PARAMS} | settings
    return BestOfNSampler(engine, scorer, engine.tokenizer, **settings)


def seen(selected: list[Selected]) -> list[Any]:
    """Candidates and ranking, without the last bits of scores."""
    return [
        (s.prompt, [(c.index, c.text, c.rollout.completion_ids) for c in s.candidates], s.ranking)
        for s in selected
    ]


@pytest.mark.parametrize("certain", [False, True])
def test_weighted_votes_are_probabilities_where_a_reward_says_so(
    engine: TransformersEngine, certain: bool
) -> None:
    def rarely(completions: list[str]) -> list[float]:
        return [(len(text) % 7 / 6) ** 4 for text in completions]

    rarely.is_probability = certain  # pyright: ignore[reportFunctionMemberAccess]
    results = sampler(engine, rarely, selection="weighted", extract=lambda text: text[:1]).sample(PROMPTS)
    by_kind = [
        [select(each.candidates, "weighted", probabilities=kind) for each in results]
        for kind in (False, True)
    ]
    assert by_kind[0] != by_kind[1] and [each.ranking for each in results] == by_kind[certain]


def test_candidates_scores_and_ranking(engine: TransformersEngine, reward: RewardModel) -> None:
    from rlhf_infer.rewards import RewardFunctionFactory

    scorer = RewardFunctions([RewardFunctionFactory.from_model(reward), letters], weights=[2.0, 0.1])
    results = sampler(engine, scorer).sample(PROMPTS)
    assert [s.prompt for s in results] == PROMPTS
    groups = engine.generate([engine.tokenizer(p)["input_ids"] for p in PROMPTS], 8, PARAMS)
    for prompt, selected, rollouts in zip(PROMPTS, results, groups, strict=True):
        assert [c.rollout.completion_ids for c in selected.candidates] == [r.completion_ids for r in rollouts]
        texts = [c.text for c in selected.candidates]
        alone = reward.score([prompt] * 8, texts).tolist()
        expected = [2 * model + 0.1 * rule for model, rule in zip(alone, letters(texts), strict=True)]
        assert [c.score for c in selected.candidates] == pytest.approx(expected, abs=1e-4)
        assert selected.candidates[0].scores == pytest.approx(
            {"reward_model": alone[0], "letters": letters(texts)[0]}, abs=1e-4
        )
        assert selected.best.score == max(c.score or 0.0 for c in selected.candidates)


def test_rounds_that_never_stop_are_one_draw(engine: TransformersEngine, reward: RewardModel) -> None:
    from rlhf_infer.rewards import RewardFunctionFactory

    scorer = RewardFunctionFactory.from_model(reward)
    whole = sampler(engine, scorer).sample(PROMPTS)
    never = ConfidenceBasedStopping(min_samples=2, batch=3, probability=0.0)
    rounds = sampler(engine, scorer, adaptive=never).sample(PROMPTS)
    assert seen(rounds) == seen(whole)
    for ours, theirs in zip(rounds, whole, strict=True):
        for a, b in zip(ours.candidates, theirs.candidates, strict=True):
            assert a.score == pytest.approx(b.score, abs=1e-5)
    # A budget of equal shares too, whatever the order in which it is given out.
    equal = AdaptiveComputeAllocator(min_samples=3, max_samples=8, batch=5)
    given = sampler(engine, scorer, adaptive=equal).sample(PROMPTS)
    assert seen(given) == seen(whole)


def test_stopping_leaves_prompts_early(engine: TransformersEngine) -> None:
    rule = ConfidenceBasedStopping(min_samples=4, batch=2, probability=0.4, highest=3.0)
    whole = sampler(engine, letters, n=16).sample(PROMPTS)
    stopped = sampler(engine, letters, n=16, adaptive=rule).sample(PROMPTS)
    drawn = [s.cost.samples for s in stopped]
    assert min(drawn) < 16 and len(set(drawn)) > 1
    for ours, theirs in zip(stopped, whole, strict=True):
        count = ours.cost.samples
        assert ours.cost.saved_samples == 16 - count
        assert [c.text for c in ours.candidates] == [c.text for c in theirs.candidates[:count]]
        before = [c.score for c in ours.candidates]
        assert count == 4 or max(s for s in before[: count - 2] if s is not None) < 3
    total = SamplingCost.total(s.cost for s in stopped)
    assert total.saved_share == pytest.approx(1 - sum(drawn) / 64)


def test_an_allocator_spends_its_budget_where_scores_spread(engine: TransformersEngine) -> None:
    def flat_for_so(prompts: list[str], completions: list[str]) -> list[float]:
        scores = [float(sum(map(ord, text)) % 97) for text in completions]
        return [90.0 if prompt == "so" else s for prompt, s in zip(prompts, scores, strict=True)]

    results = sampler(engine, flat_for_so, adaptive=AdaptiveComputeAllocator(batch=4)).sample(
        PROMPTS, budget=40
    )
    counts = [s.cost.samples for s in results]
    assert sum(counts) == 40 and counts[-1] == min(counts) == 4
    assert sum(s.cost.saved_samples for s in results) == 4 * 8 - 40


def test_costs_and_repeated_completions(engine: TransformersEngine) -> None:
    calls: list[list[str]] = []

    def counted(completions: list[str]) -> list[float]:
        calls.append(completions)
        return letters(completions)

    # One token that is nearly always the same: completions repeat, and are scored once.
    params = SamplingParams(1, temperature=0.3, seed=1)
    (selected,) = sampler(engine, counted, params=params).sample(["so"])
    distinct = {tuple(c.rollout.completion_ids) for c in selected.candidates}
    assert len(calls) == 1 and len(calls[0]) == len(distinct) < 8
    assert all(c.score is not None and c.scores for c in selected.candidates)
    length = len(engine.tokenizer("so")["input_ids"])
    assert selected.cost == SamplingCost(8, length, 8, length + len(distinct), 0)
    rule = ConfidenceBasedStopping(min_samples=4, batch=4, probability=0.0)
    (rounds,) = sampler(engine, counted, params=params, adaptive=rule).sample(["so"])
    assert rounds.cost.prompt_tokens == 2 * length and sum(map(len, calls[1:])) == len(distinct)
    assert all(c.score is not None and c.scores for c in rounds.candidates)


def test_what_is_scored_ends_before_the_stop_text(engine: TransformersEngine) -> None:
    heard: list[str] = []

    def counted(completions: list[str]) -> list[float]:
        heard.extend(completions)
        return letters(completions)

    for least in (0, 4):
        params = SamplingParams(12, seed=3, min_new_tokens=least)
        (plain,) = sampler(engine, letters, params=params).sample(["so"])
        drawn = "".join(c.text for c in plain.candidates)
        stop = max(filter(str.isascii, drawn), key=drawn.count)
        params = replace(params, stop=(stop,))
        (selected,) = sampler(engine, counted, params=params).sample(["so"])
        for each, before in zip(selected.candidates, plain.candidates, strict=True):
            start = engine.tokenizer.decode(before.rollout.completion_ids[:least], skip_special_tokens=True)
            assert each.text == until_stop(before.text, [stop], len(start))
        assert {c.text for c in selected.candidates} == set(heard)
        assert sum(c.rollout.finish_reason == "stop" for c in selected.candidates) > 1
        heard.clear()


def test_conversations_columns_and_rewards_that_do_not_apply(engine: TransformersEngine) -> None:
    engine.tokenizer = copy.deepcopy(engine.tokenizer)
    engine.tokenizer.chat_template = TEMPLATE
    heard: list[Any] = []

    def wanted(prompts: Any, completions: Any, letter: list[str]) -> list[float]:
        heard.extend([*prompts, *completions])
        return [float(each in c[0]["content"]) for c, each in zip(completions, letter, strict=True)]

    def never(completions: Any) -> list[None]:
        return [None] * len(completions)

    prompts = [[{"role": "user", "content": "hi"}], [{"role": "user", "content": "ho"}]]
    results = sampler(engine, [wanted, never], n=4).sample(prompts, {"letter": ["a", "e"]})
    for selected, letter in zip(results, "ae", strict=True):
        assert selected.best.rollout.prompt_ids[-3:] == tuple(
            engine.tokenizer("<assistant>")["input_ids"][-3:]
        )
        for each in selected.candidates:
            assert (
                each.scores == {"wanted": float(letter in each.text)} and each.score == each.scores["wanted"]
            )
    assert heard[0] == prompts[0] and heard[-1][0]["role"] == "assistant"
    with raises_error("wrong_column_length", column="letter"):
        sampler(engine, wanted).sample(prompts, {"letter": ["a"]})


def test_a_majority_needs_no_scorer(engine: TransformersEngine) -> None:
    def first_letter(text: str) -> str | None:
        return text[:1] or None

    (selected,) = sampler(
        engine,
        None,
        n=12,
        params=SamplingParams(2, temperature=0.7),
        selection="majority",
        extract=first_letter,
    ).sample(["so"])
    answers = [c.answer for c in selected.candidates]
    votes = {answer: answers.count(answer) for answer in answers if answer}
    assert votes[selected.best.answer or ""] == max(votes.values()) and len(votes) > 1
    assert selected.cost.scored_tokens is None and selected.best.score is None
    assert sampler(engine, letters).sample([]) == []


@pytest.mark.parametrize(
    ("settings", "code", "key"),
    [
        ({"n": 0}, "invalid_value", "n"),
        ({"params": SamplingParams(6, temperature=0)}, "invalid_value", "temperature"),
        ({"selection": "majority"}, "missing_extract", None),
        ({"selection": "first"}, "invalid_value", "selection"),
        (
            {"selection": "majority", "extract": str, "adaptive": ConfidenceBasedStopping()},
            "invalid_value",
            "selection",
        ),
    ],
)
def test_settings_that_do_not_go_together(
    engine: TransformersEngine, settings: Any, code: str, key: str | None
) -> None:
    with raises_error(code, key=key):
        sampler(engine, letters, **settings)
    with raises_error("missing_scorer"):
        sampler(engine, None)


def test_one_candidate_needs_no_scorer(engine: TransformersEngine) -> None:
    for selected in sampler(engine, None, n=1).sample(PROMPTS):
        assert selected.ranking == (0,) and selected.best.score is None
    with raises_error("missing_scorer"):
        sampler(engine, None, n=1, adaptive=ConfidenceBasedStopping())


def test_a_budget_goes_with_an_allocator_only(engine: TransformersEngine) -> None:
    for adaptive in (None, ConfidenceBasedStopping()):
        with raises_error("missing_allocator"):
            sampler(engine, letters, adaptive=adaptive).sample(PROMPTS, budget=9)


def test_a_scorer_that_fails_is_named(engine: TransformersEngine) -> None:
    def broken(completions: list[str]) -> list[float]:
        raise ZeroDivisionError("no")

    with raises_error("reward_failed"):
        sampler(engine, broken).sample(["so"])


@pytest.mark.parametrize("rounds", [False, True])
def test_what_nothing_could_score_comes_last_and_is_tried_once(
    engine: TransformersEngine, rounds: bool
) -> None:
    asked: list[tuple[str, str]] = []

    def total(text: str) -> int:
        return sum(map(ord, text))

    def even(prompts: list[str], completions: list[str]) -> list[float | None]:
        asked.extend(zip(prompts, completions, strict=True))
        return [float(total(text)) if total(text) % 2 == 0 else None for text in completions]

    # As of a judge, whose None training replaces by the mean of the others.
    even.may_leave_out = True  # pyright: ignore[reportFunctionMemberAccess]
    rule = ConfidenceBasedStopping(min_samples=2, batch=3, probability=0.0) if rounds else None
    for selected in sampler(engine, even, adaptive=rule).sample(PROMPTS[:2]):
        ranked = selected.top(8)
        known = [each.score for each in ranked if each.score is not None]
        assert 0 < len(known) < 8 and known == sorted(known, reverse=True)
        for each in ranked[: len(known)]:
            assert each.scores == {"even": each.score} and each.score == total(each.text)
        for each in ranked[len(known) :]:
            assert total(each.text) % 2 == 1 and (each.score, each.scores) == (None, {})
    assert len(asked) == len(set(asked))


def test_a_prompt_of_which_nothing_was_scored_is_refused(engine: TransformersEngine) -> None:
    def some_prompts(prompts: list[str], completions: list[str]) -> list[float | None]:
        return [None if prompt == "so" else 1.0 for prompt in prompts]

    with raises_error("no_applicable_reward"):
        sampler(engine, some_prompts).sample(PROMPTS)
    sampler(engine, some_prompts).sample(PROMPTS[:3])
