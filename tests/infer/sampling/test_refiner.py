"""Rounds of critique and rewriting, on the real engine and on one whose answers are written here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from raises import raises_error
from rlhf_infer import (
    Draft,
    EngineCritic,
    IterativeRefiner,
    Refinement,
    RefinerRules,
    RefinerTemplates,
    Rollout,
    SamplingCost,
    SamplingParams,
    TransformersEngine,
    preference_rows,
)
from rlhf_infer.rewards import RewardFunctions

PARAMS = SamplingParams(8, seed=3)
LAST = RefinerRules(2, keep="last")
PROMPTS = ["where is mary ?", "where is ball ?", "so"]


class Scripted:
    """An engine that says what a function makes of what it reads, and remembers what it read."""

    def __init__(self, tokenizer: Any, says: Any) -> None:
        self.tokenizer, self.says, self.read, self.seeds = tokenizer, says, [], []
        self.eos_token_ids: list[int] = []

    def generate(self, prompts: Sequence[Sequence[int]], n: int, params: SamplingParams, **_: Any) -> Any:
        texts = [self.tokenizer.decode(ids) for ids in prompts]
        self.read.append(texts)
        self.seeds.append(params.seed)
        found = []
        for ids, text in zip(prompts, texts, strict=True):
            said = self.tokenizer(self.says(text), add_special_tokens=False)["input_ids"]
            found.append([Rollout(ids, said, [0.0] * len(said), "stop")] * n)
        return found


def counting(text: str) -> str:
    """Drafts x0, xx1, xxx2: longer by one in each rewrite; a critique names the draft."""
    if text.endswith("critique:"):
        return f" too short: {text.count('x')} "
    return f" {'x' * (text.count('x') + 1)}"


TEMPLATES = RefinerTemplates(
    critique="{prompt}{answer} critique:", refine="{prompt}{answer} because {critique} rewrite:"
)


def length(completions: Sequence[str]) -> list[float]:
    return [float(len(text.strip())) for text in completions]


def shortness(completions: Sequence[str]) -> list[float]:
    return [-value for value in length(completions)]


def refiner(tokenizer: Any, says: Any = counting, scorer: Any = length, **options: Any) -> Any:
    engine = Scripted(tokenizer, says)
    options = {"rules": RefinerRules(2), "templates": TEMPLATES, "params": PARAMS} | options
    scorer = None if scorer is None else RewardFunctions([scorer])
    return IterativeRefiner(engine, tokenizer, scorer=scorer, **options), engine  # pyright: ignore


def test_each_round_reads_the_draft_and_its_critique(byte_tokenizer: Any) -> None:
    refine, engine = refiner(byte_tokenizer)
    (found,) = refine.refine(["q"])
    assert [draft.text for draft in found.drafts] == [" x", " xx", " xxx"]
    assert [draft.critique for draft in found.drafts] == ["", "too short: 1", "too short: 2"]
    assert [texts[0] for texts in engine.read] == [
        "q",
        "q x critique:",
        "q x because too short: 1 rewrite:",
        "q xx critique:",
        "q xx because too short: 2 rewrite:",
    ]
    # A draft and its critique have one seed, each round another.
    assert engine.seeds == [3, 4, 4, 5, 5]
    assert found.kept == 2 and found.final.score == 3.0
    read = sum(len(byte_tokenizer(text)["input_ids"]) for (text,) in engine.read)
    assert (found.cost.samples, found.cost.prompt_tokens) == (5, read)


def test_the_best_draft_is_kept_and_never_worse_than_the_first(byte_tokenizer: Any) -> None:
    for rules, kept in ((RefinerRules(2), 0), (RefinerRules(2, keep="last"), 2)):
        refine, _ = refiner(byte_tokenizer, scorer=shortness, rules=rules)
        (found,) = refine.refine(["q"])
        assert (found.kept, len(found.drafts)) == (kept, 3)
    # A gain of 1 is none where more than 1 counts, of equal drafts the first is kept.
    refine, _ = refiner(byte_tokenizer, rules=RefinerRules(2, min_gain=1.0))
    assert refine.refine(["q"])[0].kept == 2  # by 2 better than the first
    refine, _ = refiner(byte_tokenizer, rules=RefinerRules(2, min_gain=2.0))
    assert refine.refine(["q"])[0].kept == 0


@pytest.mark.parametrize(
    ("until", "says", "drafts"),
    [
        ("score", lambda text: counting(text) if "xx" not in text else " x", 3),
        ("no_change", lambda text: counting(text) if "xx" not in text else " xx", 3),
        ("verdict", lambda text: counting(text) if "xx" not in text else " No problems. ", 2),
        ("never", counting, 6),
    ],
)
def test_rounds_end(byte_tokenizer: Any, until: Any, says: Any, drafts: int) -> None:
    refine, _ = refiner(byte_tokenizer, says, rules=RefinerRules(5, until=until))
    assert len(refine.refine(["q"])[0].drafts) == drafts


def test_nothing_is_asked_after_the_last_prompt_has_ended(byte_tokenizer: Any) -> None:
    refine, engine = refiner(byte_tokenizer, lambda text: " x", rules=RefinerRules(1000, until="score"))
    assert len(refine.refine(["q"])[0].drafts) == 2
    assert len(engine.read) == 3  # draft, critique, and one rewrite without a gain


def test_prompts_end_by_themselves_and_their_columns_go_with_them(byte_tokenizer: Any) -> None:
    def says(text: str) -> str:
        return " no problem" if text.endswith("critique:") and text.startswith("a") else counting(text)

    def by_column(completions: Sequence[str], bonus: Sequence[float]) -> list[float]:
        return [own + more for own, more in zip(length(completions), bonus, strict=True)]

    refine, engine = refiner(byte_tokenizer, says, scorer=by_column, rules=RefinerRules(2, until="verdict"))
    found = refine.refine(["a", "b"], {"bonus": [10, 20]})
    assert [[draft.score for draft in each.drafts] for each in found] == [[11], [21, 22, 23]]
    assert [len(texts) for texts in engine.read] == [2, 2, 1, 1, 1]


def test_principles_take_turns(byte_tokenizer: Any) -> None:
    templates = RefinerTemplates(critique="{prompt}{answer} {principle} critique:", refine=TEMPLATES.refine)
    refine, engine = refiner(
        byte_tokenizer, principles=["be short", "be kind"], templates=templates, rules=RefinerRules(3)
    )
    (found,) = refine.refine(["q"])
    assert [draft.principle for draft in found.drafts] == ["", "be short", "be kind", "be short"]
    asked = [texts[0] for texts in engine.read if texts[0].endswith("critique:")]
    assert asked[0] == "q x be short critique:" and asked[1] == "q xx be kind critique:"


def test_a_critic_of_ones_own(byte_tokenizer: Any) -> None:
    def critic(prompts: Sequence[Any], drafts: Sequence[str]) -> list[str]:
        return [f"{prompt}/{draft.strip()}" for prompt, draft in zip(prompts, drafts, strict=True)]

    refine, engine = refiner(byte_tokenizer, critic=critic, rules=RefinerRules(1))
    (found,) = refine.refine(["q"])
    assert found.drafts[1].critique == "q/x" and len(engine.read) == 2

    other = Scripted(byte_tokenizer, lambda text: f"seen {len(text)}")
    critic_engine: Any = EngineCritic(other, byte_tokenizer, PARAMS, TEMPLATES)  # pyright: ignore
    refine, engine = refiner(byte_tokenizer, critic=critic_engine, rules=RefinerRules(1))
    assert refine.refine(["q"])[0].drafts[1].critique == f"seen {len('q x critique:')}"
    assert len(engine.read) == 2 and critic_engine(["q"], [" x"]) == [f"seen {len('q x critique:')}"]


def test_rounds_end_where_the_context_does(tiny_llama: Any, byte_tokenizer: Any) -> None:
    engine = TransformersEngine(tiny_llama, byte_tokenizer)
    limit = tiny_llama.config.max_position_embeddings
    long = "so " * limit
    ids = byte_tokenizer(long)["input_ids"]
    long = byte_tokenizer.decode(ids[: limit - PARAMS.max_new_tokens - 4])
    made = IterativeRefiner(engine, byte_tokenizer, params=PARAMS, rules=LAST).refine([long, PROMPTS[0]])
    assert [len(each.drafts) for each in made] == [1, 3]
    alone = IterativeRefiner(engine, byte_tokenizer, params=PARAMS, rules=LAST).refine([PROMPTS[0]])
    assert alone[0].drafts == made[1].drafts
    with raises_error("context_too_short"):
        IterativeRefiner(engine, byte_tokenizer, params=PARAMS, rules=LAST).refine(["so " * limit])


def test_chats_go_on_from_the_draft() -> None:
    chat = [{"role": "user", "content": "q"}]
    asked = RefinerTemplates().ask("refine", chat, "x", critique="too short")
    assert [turn["role"] for turn in asked] == ["user", "assistant", "user"]  # pyright: ignore
    assert asked[1]["content"] == "x" and "too short" in asked[2]["content"]  # pyright: ignore


def test_the_real_engine_gives_the_same_again_and_for_prompts_alone(
    tiny_llama: Any, byte_tokenizer: Any
) -> None:
    engine = TransformersEngine(tiny_llama, byte_tokenizer)

    def refine(prompts: Sequence[Any]) -> list[Refinement]:
        return IterativeRefiner(engine, byte_tokenizer, params=PARAMS, rules=LAST).refine(prompts)

    found = refine(PROMPTS)
    assert [[draft.text for draft in each.drafts] for each in refine(PROMPTS)] == [
        [draft.text for draft in each.drafts] for each in found
    ]
    alone = [refine([prompt])[0] for prompt in PROMPTS]
    assert [each.drafts for each in alone] == [each.drafts for each in found]
    assert refine([]) == []


def test_pairs_are_of_drafts_that_became_better() -> None:
    def made(kept: int, *scores: float | None) -> Refinement:
        drafts = tuple(Draft(f"draft {score}", score=score) for score in scores)
        return Refinement("q", drafts, kept, SamplingCost())

    found = [made(1, 1.0, 2.0), made(0, 1.0, 0.0), made(1, 1.0, 1.5), made(1, None, None)]
    rows = preference_rows(found, min_gap=0.5)
    assert rows == [{"prompt": "q", "chosen": "draft 2.0", "rejected": "draft 1.0"}]
    assert len(preference_rows(found)) == 2
    assert preference_rows([Refinement("q", (Draft("a"), Draft("b")), 1, SamplingCost())])


def test_what_does_not_go_together_is_refused(byte_tokenizer: Any) -> None:
    with raises_error("missing_scorer"):
        refiner(byte_tokenizer, scorer=None)
    with raises_error("invalid_template", key="refine"):
        RefinerTemplates(refine="{question}")
    wrong: list[tuple[str, Any]] = [
        ("until", "tired"),
        ("keep", "first"),
        ("max_rounds", -1),
        ("verdict", "("),
    ]
    for key, value in wrong:
        with raises_error("invalid_value", key=key):
            RefinerRules(**{key: value})
