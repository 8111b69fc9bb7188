"""Prompt and completion together are what was sampled, also where a text by itself loses its first space."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from first_space import llama2_like_tokenizer
from rlhf_data import Encoder
from rlhf_infer import (
    BestOfNSampler,
    IterativeRefiner,
    RefinerRules,
    SamplingParams,
    SearchSettings,
    StepLabeller,
    StepLabelSettings,
    TransformersEngine,
    TreeSearch,
    completion_text,
    goes_on_after,
)
from rlhf_infer.rewards import RewardFunctions
from rlhf_models import tiny_model

PROMPT = "a cat"
MESSAGES = [{"role": "user", "content": PROMPT}]
PARAMS = SamplingParams(5, temperature=2.0, seed=3)


@pytest.fixture(scope="module")
def llama2_like() -> Any:
    return llama2_like_tokenizer()


@pytest.fixture(scope="module")
def engine(llama2_like: Any) -> TransformersEngine:
    return TransformersEngine(tiny_model("llama", vocab_size=len(llama2_like), eos_token_id=1), llama2_like)


class Seen:
    """A reward that keeps what it is given."""

    def __init__(self) -> None:
        self.texts: list[Any] = []

    def __call__(self, completions: list[Any], **columns: Any) -> list[float]:
        self.texts += completions
        return [float(len(str(completion))) for completion in completions]


def best_of_n(engine: TransformersEngine, seen: Seen, prompt: Any) -> list[Any]:
    scorer = RewardFunctions([seen])
    [found] = BestOfNSampler(engine, scorer, engine.tokenizer, n=6, params=PARAMS).sample([prompt])
    return [(each.text, each.rollout.completion_ids) for each in found.candidates]


def tree_search(engine: TransformersEngine, seen: Seen, prompt: Any) -> list[Any]:
    settings = SearchSettings(strategy="beam", width=2, branch=2, max_step_tokens=2, budget_tokens=16)
    [found] = TreeSearch(engine, RewardFunctions([seen]), engine.tokenizer, settings, PARAMS).run([prompt])
    return [(each.text, each.rollout.completion_ids) for each in found.selected.candidates]


def refine(engine: TransformersEngine, seen: Seen, prompt: Any) -> list[Any]:
    scorer = RewardFunctions([seen])
    refiner = IterativeRefiner(engine, engine.tokenizer, params=PARAMS, scorer=scorer, rules=RefinerRules(0))
    [found] = refiner.refine([prompt])
    ids = Encoder(engine.tokenizer).prompt(prompt)
    [[drawn]] = engine.generate([ids], 1, PARAMS)
    return [(found.final.text, drawn.completion_ids)]


@pytest.mark.parametrize("door", [best_of_n, tree_search, refine])
def test_rewards_and_candidates_have_the_space(
    door: Callable[..., list[Any]], engine: TransformersEngine, llama2_like: Any
) -> None:
    seen = Seen()
    found = door(engine, seen, PROMPT)
    ids = llama2_like(PROMPT)["input_ids"]
    for text, completion in found:
        assert PROMPT + text == llama2_like.decode([*ids, *completion], skip_special_tokens=True)
    assert {text for text, _ in found} <= set(seen.texts)
    assert any(text.startswith(" ") for text, _ in found)


@pytest.mark.parametrize("door", [best_of_n, tree_search, refine])
def test_an_answer_to_messages_stands_by_itself(
    door: Callable[..., list[Any]], engine: TransformersEngine, llama2_like: Any
) -> None:
    for text, completion in door(engine, Seen(), MESSAGES):
        assert text == llama2_like.decode(completion, skip_special_tokens=True)


def test_labelled_solutions_have_the_space(engine: TransformersEngine, llama2_like: Any) -> None:
    seen, settings = Seen(), StepLabelSettings(solutions=3, completions=2)
    labeller = StepLabeller(engine, seen, llama2_like, PARAMS, settings)
    [found] = labeller.label([PROMPT])
    whole = ["".join(each.completions) for each in found]
    assert set(whole) <= set(seen.texts)
    assert any(text.startswith(" ") for text in whole)


def test_a_stop_text_is_left_out_with_the_space_before_the_completion_kept(llama2_like: Any) -> None:
    ids = llama2_like.convert_tokens_to_ids(["▁sat", "s", "▁dog"])
    after = goes_on_after(PROMPT, llama2_like(PROMPT)["input_ids"])
    params = SamplingParams(5, stop=(" dog",))
    assert completion_text(llama2_like, ids, params, after) == " sats"
    assert completion_text(llama2_like, ids, params, goes_on_after(MESSAGES, [2, 3])) == "sats"
    assert completion_text(llama2_like, [1], params, after) == ""
    everything = SamplingParams(5, stop=("sat",))
    assert completion_text(llama2_like, ids, everything, after) == ""
