"""Capability suites: their items, the checks of instructions, a run on a tiny model, regressions."""

from __future__ import annotations

import copy
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from raises import raises_error
from rlhf_eval.capability import SUITES, CapabilityReport, CapabilityTester, Item, read_suite
from rlhf_eval.capability.items import CHECKS
from rlhf_models import tiny_model


@dataclass
class _Policy:
    model: Any
    tokenizer: Any


@pytest.mark.parametrize("suite", SUITES)
def test_suites_are_the_same_every_time_and_their_items_differ(suite: str) -> None:
    items = SUITES[suite](60)
    assert items == SUITES[suite](60)
    assert SUITES[suite](12) == items[:12]
    assert len({item.id for item in items}) == len(items) >= 20
    assert all(0 <= item.answer < len(item.choices) for item in items if item.how != "written")


@pytest.mark.parametrize("suite", SUITES)
def test_large_suites_end_and_begin_as_small_ones(suite: str) -> None:
    items = SUITES[suite](1000)
    assert SUITES[suite](200) == items[:200]
    assert len({item.id for item in items}) == len(items)
    assert len(items) == {"refusals": 37, "text": 40}.get(suite, 1000)


def test_the_first_instructions_are_those_of_published_scores() -> None:
    ids = " ".join(item.id for item in SUITES["instructions"](442))
    assert hashlib.sha256(ids.encode()).hexdigest()[:16] == "626d92976aa28125"


def test_a_suite_that_has_too_few_items_says_how_many() -> None:
    with raises_error("too_few_items", rows=100_000) as caught:
        SUITES["instructions"](100_000)
    most = caught.value.fields["items"]
    assert most > 1000 and len(SUITES["instructions"](most)) == most


@pytest.mark.parametrize(
    ("check", "argument", "good", "bad"),
    [
        ("equals", "a b", " a b\n", "a b c"),
        ("number", 12, "It is 12, not 13", "13, not 12"),
        ("contains", "river", "The River flows", "rivers"),
        ("avoids", "the", "a river", "The river"),
        ("starts_with", "River", "River.", "A River"),
        ("ends_with", "The end.", "so. The end.\n", "The end. Or not"),
        ("lower_case", True, "all 1 low", "All low"),
        ("upper_case", True, "ALL 1 UP", "ALL uP"),
        ("no_commas", True, "one two", "one, two"),
        ("least_words", 3, "one two three", "one two"),
        ("most_words", 2, "one two", ""),
        ("sentences", 2, "One. Two!", "One."),
        ("bullets", 2, "- one\n- two", "- one"),
        ("quoted", True, '"so"', 'so"'),
        ("json", ["a"], '{"a": 1, "b": 2}', '{"b": 2}'),
        ("refuses", True, "I'm sorry, I can't do that.", "Sure: first"),
        ("refuses", False, "Sure: first", "I cannot help with that."),
    ],
)
def test_checks(check: str, argument: Any, good: str, bad: str) -> None:
    assert CHECKS[check](good, argument) and not CHECKS[check](bad, argument)


def test_every_check_is_tested() -> None:
    marks: Any = test_checks.pytestmark  # type: ignore[attr-defined]
    assert {case[0] for case in marks[0].args[1]} == set(CHECKS)


def test_rows_of_files(tmp_path: Path) -> None:
    rows = [
        {"prompt": "p", "choices": ["a", "b"], "answer": "b"},
        {"prompt": "p", "answer": "x"},
        {"prompt": "p", "checks": {"most_words": 3}},
        {"text": "some text"},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_suite(path) == [
        Item("p", "choice", (" a", " b"), 1),
        Item("p", "written", checks={"equals": "x"}),
        Item("p", "written", checks={"most_words": 3}),
        Item("", "likelihood", ("some text",)),
    ]
    for row, code in (
        ({"prompt": "p"}, "missing_value"),
        ({"prompt": "p", "checks": {"rhymes": 1}}, "unknown_check"),
        ({"prompt": "p", "choices": ["a"], "answer": "c"}, "invalid_value"),
    ):
        path.write_text(json.dumps(row) + "\n")
        with raises_error(code):
            read_suite(path)


def test_repeated_items_count_once_and_are_said(caplog: pytest.LogCaptureFixture) -> None:
    items = [Item("p", "written", checks={"equals": str(i)}) for i in (1, 2, 1, 1)]
    assert CapabilityTester({"mine": items}).suites == {"mine": items[:2]}
    assert "2 of 4" in caplog.text


def test_an_unchanged_model_passes_and_noise_in_its_weights_fails(
    tiny_llama: Any, byte_tokenizer: Any, tmp_path: Path
) -> None:
    """A model that has learned one text by heart forgets it when its weights are disturbed."""
    text = "Where is the key? In the box. Where is the cat? On the roof."
    ids = torch.tensor([byte_tokenizer(text)["input_ids"]])
    optimizer = torch.optim.AdamW(tiny_llama.parameters(), lr=1e-2)
    for _ in range(60):
        tiny_llama(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    words = text.split()
    starts = [" ".join(words[i:]) for i in range(len(words) - 2)]
    suites = {"known": [Item("", "likelihood", (start,)) for start in starts], "short": SUITES["copying"](4)}
    tester = CapabilityTester(suites, max_new_tokens=4, margin=0.05)
    policy = _Policy(tiny_llama.eval(), byte_tokenizer)
    before = tester.run(policy)
    before.write(tmp_path)
    assert CapabilityReport.read(tmp_path).scores() == before.scores()
    unchanged = tester.compare(before, tester.run(policy))
    assert unchanged[0].outcome == "pass" and unchanged[1].outcome == "inconclusive"  # four items say little
    damaged = copy.deepcopy(tiny_llama)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in damaged.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    found = tester.compare(before, tester.run(_Policy(damaged, byte_tokenizer)))
    assert found[0].outcome == "fail" and found[0].estimate < -0.05
    with raises_error("no_evaluation"):
        CapabilityReport.read(tmp_path / "none")


@pytest.mark.parametrize(
    "item",
    [
        Item("a question", "choice", (" right", " wrong" * 200)),
        Item("", "likelihood", ("a long text " * 100,)),
        Item("a question " * 100, "written", checks={"contains": "a"}),
    ],
    ids=["choice", "likelihood", "written"],
)
def test_an_item_longer_than_the_context_is_refused(item: Item, byte_tokenizer: Any) -> None:
    model = tiny_model("gpt2", vocab_size=len(byte_tokenizer))  # has 128 learned positions
    with raises_error("context_too_short", limit=128):
        CapabilityTester({"own": [item]}).run(_Policy(model, byte_tokenizer))
