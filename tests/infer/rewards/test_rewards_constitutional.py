"""Constitutions: each principle a row of its own, judges asked together, files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from raises import raises_error
from rlhf_infer import PromptedJudge
from rlhf_infer.rewards import (
    PRINCIPLE_TEMPLATE,
    ConstitutionalRewardWrapper,
    Principle,
    RewardFunctions,
    load_principles,
    normalised,
)
from rlhf_infer.rewards import RewardFunctionFactory as Factory
from rlhf_models import JudgeModel

PROMPTS: list[Any] = ["p0", "p1", "p2"]
COMPLETIONS: list[Any] = ["you idiot", "thank you", "an Idiot's  thank  you"]


def base(completions: Any, **kwargs: Any) -> list[float]:
    return [1.0, 2.0, 3.0]


def score(*functions: Any, weights: Any = None) -> Any:
    together = RewardFunctions(functions, weights=weights)
    return together(PROMPTS, COMPLETIONS, completion_ids=[[1]] * 3, columns={"answer": [1, 2, 3]})


INSULTS = Principle.keywords("no_insults", ["idiot", "fool"], weight=2.0)
THANKS = Principle.pattern("thanks", r"thank\s+you", found=1.0, absent=-0.25, weight=0.5)


class CountingJudge:
    """P(true) from the text's length; remembers how it was asked."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[str], list[str], list[str | None]]] = []

    def score(
        self, questions: Sequence[str], answers: Sequence[str], critiques: Sequence[str | None]
    ) -> torch.Tensor:
        self.calls.append((list(questions), list(answers), list(critiques)))
        return torch.tensor(
            [len(a) / 100 + (c == "Be kind.") / 2 for a, c in zip(answers, critiques, strict=True)]
        )


def test_every_principle_is_a_row_and_the_total_is_their_weighted_sum() -> None:
    wrapper = ConstitutionalRewardWrapper(base, [INSULTS, THANKS])
    scores = score(wrapper)
    assert scores.names == ("base", "constitution/no_insults", "constitution/thanks")
    assert scores.rewards.tolist() == [[1, 2, 3], [-1, 0, -1], [-0.25, 1, 1]]
    # 1 - 2·1 - .5·.25; 2 + .5; 3 - 2·1 + .5.
    assert scores.total.tolist() == [-1.125, 2.5, 1.5]
    twice = score(wrapper, lambda completions: [1, 1, 1], weights=[2.0, 10.0])
    assert twice.total.tolist() == [10 - 2.25, 15.0, 13.0]
    assert wrapper(PROMPTS, COMPLETIONS) == scores.total.tolist()


def test_without_a_base_and_with_functions_that_are_asynchronous_or_say_none() -> None:
    async def later(completions: Any) -> list[float | None]:
        return [None, 1.0, 2.0]

    wrapper = ConstitutionalRewardWrapper(None, [INSULTS, Principle.function("later", later, weight=3.0)])
    scores = score(wrapper)
    assert scores.names == ("constitution/no_insults", "constitution/later")
    assert scores.total.tolist() == [-2.0, 3.0, 4.0]
    assert wrapper.name == "constitution" and wrapper(PROMPTS, COMPLETIONS) == [-2.0, 3.0, 4.0]


def test_a_judge_s_principles_are_put_to_it_together() -> None:
    judge = CountingJudge()
    kind = Principle.judged("kind", "Be kind.", judge, weight=2.0)
    short = Principle.judged("short", "Be short.", judge, weight=-1.0)
    scores = score(ConstitutionalRewardWrapper(base, [kind, THANKS, short]))
    assert len(judge.calls) == 1
    questions, answers, texts = judge.calls[0]
    assert questions == PROMPTS * 2 and answers == COMPLETIONS * 2
    assert texts == ["Be kind."] * 3 + ["Be short."] * 3
    assert set(scores.names) == {"base", "constitution/kind", "constitution/thanks", "constitution/short"}
    rows = dict(zip(scores.names, scores.rewards.tolist(), strict=True))
    assert rows["constitution/kind"] == pytest.approx([0.59, 0.59, 0.72])
    assert rows["constitution/short"] == pytest.approx([0.09, 0.09, 0.22])
    # 1 + 2·.59 - .5·.25 - .09 and so on.
    assert scores.total.tolist() == pytest.approx([1.965, 2 + 1.18 + 0.5 - 0.09, 3 + 1.44 + 0.5 - 0.22])
    doubled = score(ConstitutionalRewardWrapper(base, [kind, THANKS, short]), weights=[2.0])
    torch.testing.assert_close(doubled.total, 2 * scores.total)


def test_prompted_judges_and_judge_models(tiny_llama: Any, byte_tokenizer: Any) -> None:
    prompted = PromptedJudge(tiny_llama, byte_tokenizer, template=PRINCIPLE_TEMPLATE)
    scores = score(ConstitutionalRewardWrapper(base, [Principle.judged("kind", "Be kind.", prompted)]))
    expected = prompted.score(PROMPTS, COMPLETIONS, ["Be kind."] * 3)
    assert torch.equal(scores.rewards[1], expected) and ((expected > 0) & (expected < 1)).all()

    head = JudgeModel.from_backbone(tiny_llama, byte_tokenizer)
    scores = score(ConstitutionalRewardWrapper(base, [Principle.judged("kind", "Be kind.", head)]))
    texts = [f"Question: {p}\nAnswer: {c}\nPrinciple:" for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]
    torch.testing.assert_close(scores.rewards[1], head.score(texts, [" Be kind."] * 3))
    assert scores.rewards[1].std() > 1e-4


def test_a_wrapper_inside_others_keeps_states_and_metrics() -> None:
    def logs(completions: Any, log_metric: Any) -> list[float]:
        log_metric("seen", float(len(completions)))
        return [0.0, 1.0, 2.0]

    inner = normalised(logs)
    wrapper = ConstitutionalRewardWrapper(inner, [INSULTS])
    outer = RewardFunctions([normalised(wrapper)])
    scores = outer(PROMPTS, COMPLETIONS, completion_ids=[[1]] * 3, columns={})
    assert scores.metrics == {"seen": 3.0} and scores.names == ("logs",)
    assert outer.state()["logs"]["function"]["logs"]["normaliser"]["count"] == 3.0
    assert RewardFunctions([wrapper]).state()["logs"]["normaliser"]["mean"] == 1.0
    fresh = RewardFunctions([normalised(ConstitutionalRewardWrapper(normalised(logs), [INSULTS]))])
    fresh.load_state(json.loads(json.dumps(outer.state())))
    assert fresh.state() == outer.state()


def test_keywords_are_whole_words() -> None:
    principle = Principle.keywords("k", ["as an AI", "C++"])
    assert principle.score is not None
    texts = ["As  an\nai model", "basan AIs", "as an AIs", "C++ code", "C+", "AC++"]
    assert principle.score(texts) == [-1, 0, 0, -1, 0, 0]


FILE = {
    "principles": [
        {"name": "no_insults", "keywords": ["idiot", "fool"], "weight": 2.0},
        {"name": "thanks", "pattern": "thank\\s+you", "found": 1.0, "absent": -0.25, "weight": 0.5},
        {"name": "short", "function": "length:maximum=10,unit=characters"},
        {"name": "kind", "text": "Be kind.", "weight": 3},
    ]
}
YAML = r"""
principles:
  - {name: no_insults, keywords: [idiot, fool], weight: 2.0}
  - {name: thanks, pattern: 'thank\s+you', found: 1.0, absent: -0.25, weight: 0.5}
  - {name: short, function: "length:maximum=10,unit=characters"}
  - {name: kind, text: Be kind., weight: 3}
"""


@pytest.mark.parametrize("name", ["rules.json", "rules.yaml"])
def test_principles_from_files(name: str, tmp_path: Any) -> None:
    path = tmp_path / name
    path.write_text(json.dumps(FILE) if name.endswith("json") else YAML)
    principles = load_principles(path, judge=CountingJudge())
    assert [(p.name, p.weight) for p in principles] == [
        ("no_insults", 2.0),
        ("thanks", 0.5),
        ("short", 1.0),
        ("kind", 3.0),
    ]
    scores = score(Factory.constitutional(base, principles))
    assert scores.rewards[1:4, 0].tolist() == [-1.0, -0.25, 1.0]
    with raises_error("missing_judge"):
        load_principles(path)


@pytest.mark.parametrize(
    ("entry", "code"),
    [
        ({"name": "a", "keyword": ["b"]}, "unknown_key"),
        ({"keywords": ["b"]}, "missing_key"),
        ({"name": "a", "keywords": ["b"], "pattern": "c"}, "invalid_principle"),
        ({"name": "a", "keywords": []}, "invalid_value"),
        ({"name": "a", "keywords": [" "]}, "invalid_value"),
        ({"name": "a", "pattern": "("}, "invalid_pattern"),
        ({"name": "a", "function": "lenght"}, "unknown_reward"),
        ({"name": "a", "function": "non_empty", "found": 2}, "unused_option"),
        ({"name": "a", "text": "b", "absent": 2}, "unused_option"),
        ({"name": "", "pattern": "a"}, "invalid_principle"),
        ({"name": "a"}, "missing_judge"),
        ("kind", "not_a_mapping"),
    ],
)
def test_malformed_files(entry: Any, code: str, tmp_path: Any) -> None:
    path = tmp_path / "rules.json"
    path.write_text(json.dumps({"principles": [entry]}))
    with raises_error(code):
        load_principles(path)


def test_missing_and_empty_files(tmp_path: Any) -> None:
    with raises_error("file_not_found"):
        load_principles(tmp_path / "none.json")
    for text in ('{"principles": []}', '{"principles": {}}', "{}", '{"principles": [1], "judge": 2}'):
        (tmp_path / "rules.json").write_text(text)
        with raises_error("no_principles"):
            load_principles(tmp_path / "rules.json")


def test_refusals() -> None:
    with raises_error("invalid_names"):
        ConstitutionalRewardWrapper(base, [])
    with raises_error("invalid_names"):
        ConstitutionalRewardWrapper(base, [THANKS, THANKS])
    with raises_error("invalid_value", key="weight"):
        Principle.pattern("a", "b", weight=float("inf"))
    with raises_error("invalid_value", key="text"):
        Principle.judged("a", " ", CountingJudge())
    with raises_error("invalid_value", key="judge"):
        Principle.judged("a", "b", 3)
    with raises_error("repeated_name", name="constitution/thanks"):
        wrapper = ConstitutionalRewardWrapper(base, [THANKS])
        RewardFunctions([wrapper, wrapper])


def test_from_a_line_with_a_judge_of_either_kind(
    tmp_path: Any, tiny_model_folder: Any, tiny_llama: Any, byte_tokenizer: Any
) -> None:
    path = tmp_path / "rules.json"
    path.write_text(json.dumps(FILE))
    JudgeModel.from_backbone(tiny_llama, byte_tokenizer).save_pretrained(tmp_path / "judge")
    for judge in (tiny_model_folder, tmp_path / "judge"):
        wrapper = Factory.from_spec(f"constitutional:principles={path},base=length:target=5,judge={judge}")
        scores = score(wrapper)
        assert scores.names[0] == "length" and "constitution/kind" in scores.names
        kind = scores.rewards[scores.names.index("constitution/kind")]
        assert ((kind > 0) & (kind < 1)).all()
