"""Guesses that form a tree: computed in one pass, and the right branch goes on as if it had been alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafted import assert_same, close_to
from letters import LetterTokenizer
from proofs import by_default
from rlhf_infer import DraftModel, Rollout, SamplingParams, SpeculativeDecoder, TransformersEngine
from rlhf_infer.engines.sampler import race, race_two
from rlhf_infer.engines.speculative_batch import Guesses, RaggedRows
from rlhf_infer.kv.decode_attention import RaggedAttention
from rlhf_infer.kv.part_attention import mix
from rlhf_infer.kv.prompt_cache import PromptCache
from rlhf_models import AttentionOptions

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [5, 6, 7, 20], [30, 31]]
Plant = Callable[[list[int], int], tuple[list[int], list[int]]]


class Planted:
    """A drafter that knows what every row will draw, and plants it in a tree of other tokens."""

    measured = couples = False

    def __init__(self, known: list[list[Rollout]], plant: Plant) -> None:
        self.known = [rollout.completion_ids for group in known for rollout in group]
        self.plant = plant

    def begin(self, prompts: Any, samples: range, params: SamplingParams, seeds: Any) -> Any:
        return self

    def propose(self, rows: RaggedRows) -> Guesses:
        trees = [
            self.plant(self.known[place][rows.drawn(int(place)) :], int(place)) if alive else ([], [])
            for place, alive in zip(rows.place, rows.alive, strict=True)
        ]
        width = max(len(tokens) for tokens, _ in trees)
        tokens, parents = (
            np.array([each[part] + [-1] * (width - len(each[part])) for each in trees], dtype=np.int64)
            for part in (0, 1)
        )
        return Guesses(tokens.reshape(len(trees), width), parents.reshape(len(trees), width))

    def keep(self, kept: np.ndarray, prompts: np.ndarray) -> None:
        """Goes by place."""


def in_second_branch(rest: list[int], place: int) -> tuple[list[int], list[int]]:
    """Two wrong tokens, and behind them the next three of a row, which begin at its newest token too."""
    del place
    right = rest[:3]
    wrong = [token ^ 1 for token in right[:2]]
    parents = [*range(-1, len(wrong) - 1), *([-1, *range(len(wrong), len(wrong) + 2)][: len(right)])]
    return wrong + right, parents


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    counted: list[int] = []
    plain = TransformersEngine._forward
    monkeypatch.setattr(
        TransformersEngine, "_forward", lambda self, *a: counted.append(len(a[0])) or plain(self, *a)
    )
    return counted


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("architecture", by_default(["llama", "gemma2", "gpt2"], "llama", "gemma2"))
def test_the_right_branch_of_a_tree_is_taken_whole(
    architecture: str, n: int, lively_model: Any, passes: list[int]
) -> None:
    options = {"sliding_window": 64} if architecture == "gemma2" else {}
    engine = TransformersEngine(lively_model(architecture, **options), LetterTokenizer())
    engine.eos_token_ids = [10**6]
    params = SamplingParams(25, seed=3, top_logprobs=2, raw_logprobs=True, temperature=0.8)
    expected = engine.generate(PROMPTS, n, params)
    decoder = SpeculativeDecoder(engine.model, LetterTokenizer(), Planted(expected, in_second_branch))
    decoder.eos_token_ids = engine.eos_token_ids
    passes.clear()
    assert_same(decoder.generate(PROMPTS, n, params), expected)
    # The first token comes with the prompt, and three right guesses of five make four tokens a pass: 21 after
    # five. Then three guesses fit, of which one is right, then a wrong one, then none: 23, 24 and 25.
    assert passes[1:] == [len(PROMPTS) * n * tokens for tokens in (6, 6, 6, 6, 6, 4, 2, 1)]


@st.composite
def plants(draw: st.DrawFn) -> Plant:
    """Trees of up to 8 guesses in random order, a random part of which is right."""
    seed = draw(st.integers(0, 10**6))

    def plant(rest: list[int], place: int) -> tuple[list[int], list[int]]:
        rng = np.random.default_rng((seed, place, len(rest)))
        tokens, parents, depths, right = [], list[int](), list[int](), [-1]
        children: dict[int, set[int]] = {}
        for at in range(int(rng.integers(0, 9))):
            parent = int(rng.integers(-1, at))
            depth = 1 + depths[parent] if parent >= 0 else 0
            true = parent in right and depth < len(rest) and rest[depth] not in children.get(parent, set())
            if true and rng.random() < 0.6:
                token = rest[depth]
                right.append(at)
            else:
                free = set(range(40)) - children.get(parent, set()) - set(rest[depth : depth + 1])
                token = int(rng.choice(sorted(free)))
            children.setdefault(parent, set()).add(token)
            tokens.append(token)
            parents.append(parent)
            depths.append(depth)
        return tokens, parents

    return plant


@pytest.fixture(scope="module")
def plain(lively_model: Any) -> Callable[..., Any]:
    """An engine, and what it draws without guesses: `(engine, params, rollouts)`."""
    engine = TransformersEngine(lively_model(), LetterTokenizer())

    @cache
    def drawn(n: int, stop: tuple[str, ...]) -> Any:
        params = SamplingParams(20, seed=n, stop=stop)
        return engine, params, engine.generate(PROMPTS, n, params)

    return drawn


@settings(max_examples=25, deadline=None)
@given(plant=plants(), n=st.integers(1, 3), stop=st.sampled_from([(), ("a",)]))
def test_no_tree_changes_a_token(
    plant: Plant, n: int, stop: tuple[str, ...], plain: Callable[..., Any]
) -> None:
    engine, params, expected = plain(n, stop)
    decoder = SpeculativeDecoder(engine.model, LetterTokenizer(), Planted(expected, plant))
    assert_same(decoder.generate(PROMPTS, n, params), expected)


def test_a_preempted_cohort_gives_its_guesses_up(lively_model: Any) -> None:
    engine = TransformersEngine(lively_model(), LetterTokenizer())
    params = SamplingParams(20, seed=1, ignore_eos=True)
    expected = engine.generate(PROMPTS, 2, params)
    decoder = SpeculativeDecoder(engine.model, LetterTokenizer(), Planted(expected, in_second_branch))
    cohort = decoder.start([tuple(prompt) for prompt in PROMPTS], range(2), params)
    rounds = 0
    while not cohort.finished:
        decoder.advance([cohort])
        rounds += 1
        if not cohort.finished and rounds % 2:
            cohort.forget()
            decoder.resume(cohort)
    assert_same(cohort.rows.rollouts(), expected)
    assert rounds < 20


def test_a_draft_models_second_tokens_save_passes(lively_model: Any, passes: list[int]) -> None:
    engine = TransformersEngine(lively_model(), LetterTokenizer())
    engine.eos_token_ids = [10**6]
    model, params = engine.model, SamplingParams(60, seed=2)
    taken = {}
    for alternatives in (0, 4):
        draft = DraftModel(close_to(model, 0.3), LetterTokenizer(), guesses=4, alternatives=alternatives)
        draft.measured = False
        decoder = SpeculativeDecoder(model, LetterTokenizer(), draft)
        decoder.eos_token_ids = engine.eos_token_ids
        passes.clear()
        found = decoder.generate(PROMPTS[:1], 1, params)
        taken[alternatives] = [rollout.completion_ids for rollout in found[0]], len(passes)
    assert taken[4][0] == taken[0][0]
    assert taken[4][1] < taken[0][1]


def test_who_comes_second_in_a_race_wins_without_the_winner() -> None:
    generator = torch.Generator().manual_seed(0)
    logps = (2 * torch.randn(500, 100, generator=generator)).log_softmax(-1)
    numbers = torch.rand(500, dtype=torch.float64, generator=generator)
    first, second, margin = race_two(logps, numbers)
    assert torch.equal(first, race(logps, numbers)) and (margin >= 0).all()
    without = logps.scatter(-1, first[:, None], -torch.inf)
    assert torch.equal(second, race(without, numbers))
    alone = torch.full((3, 10), -torch.inf)
    alone[:, 4] = 0
    assert [x.tolist() for x in race_two(alone, numbers[:3])[:2]] == [[4] * 3, [-1] * 3]


def test_tokens_of_a_tree_see_their_ancestors_only() -> None:
    """Against attention over each branch by itself: a prompt of 3, 2 tokens held, new ones 0-1-2 and 0-3."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    cache = PromptCache([3], torch.device("cpu"))
    cache.store(0, torch.tensor([0]), (random(1, 1, 3, 4), random(1, 1, 3, 4)))
    prompt_key, prompt_value = (x[0, 0].clone() for x in cache.layers[0])
    attention, options = RaggedAttention(cache, np.array([0]), 16), AttentionOptions(1.0)
    held = [random(2, 1, 4) for _ in range(3)]
    attention.at_rows(np.array([0]), np.array([2]))
    attention.attend(0, held[0], held[1], held[2], options)
    new = [random(4, 1, 4) for _ in range(3)]
    attention.at_rows(np.array([2]), np.array([4]), np.array([[0, 0, 1, 0]]))
    found = attention.attend(0, new[0], new[1], new[2], options)
    for token, branch in ((0, [0]), (1, [0, 1]), (2, [0, 1, 2]), (3, [0, 3])):
        key, value = (
            torch.cat([prompt, old[:, 0], fresh[branch, 0]])
            for prompt, old, fresh in zip((prompt_key, prompt_value), held[1:], new[1:], strict=True)
        )
        expected, _ = mix(new[0][token], key, value, None)
        torch.testing.assert_close(found[token], expected, atol=1e-6, rtol=0)
    attention.move(np.array([0]), np.array([5]), np.array([3]))
    own_key, _ = attention._own[0]
    torch.testing.assert_close(own_key[0, :, 3], new[1][3])


def test_no_more_is_guessed_than_a_completion_has_left(lively_model: Any, passes: list[int]) -> None:
    engine = TransformersEngine(lively_model(), LetterTokenizer())
    params = SamplingParams(12, seed=2, ignore_eos=True, coupled=True)
    expected = engine.generate(PROMPTS, 2, params)
    draft = DraftModel(engine.model, LetterTokenizer(), guesses=10_000)
    draft.measured = False
    decoder = SpeculativeDecoder(engine.model, LetterTokenizer(), draft)
    passes.clear()
    assert_same(decoder.generate(PROMPTS, 2, params), expected)
    # Both models compute the prompts. The draft model guesses 10 tokens in as many passes, all of them right;
    # the last of 12 is drawn after them.
    assert len(passes) == 2 + 10 + 1
    assert decoder.tally.right == len(PROMPTS) * 2 * 10
    assert decoder.tally.guesses >= decoder.tally.right
