"""Step labels by Monte Carlo: worked by hand, and rows that `rlhf-train prm` reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import pytest

from rlhf_data import StepBuilder, StepExample, load_records
from rlhf_infer import (
    SamplingParams,
    SearchSettings,
    StepLabeller,
    StepLabelSettings,
    TreeSearch,
    tree_step_labels,
)
from scripted_search import Script, Table

# After the prompt a solution of three steps; of the completions after its first step one of two is right
# ("b" is the answer), after the second none; and one whose only step is the answer.
STEPS = {
    ">": ("a\na\nc\0", "b\0", "b\0"),
    ">a\n": ("b\0", "c\0"),
    ">a\na\n": ("c\0", "d\0"),
}


def ends_with_b(completions: list[str]) -> list[float]:
    return [float(text.endswith("b")) for text in completions]


@pytest.mark.parametrize(("estimation", "first"), [("hard", (1.0, 0.0, 0.0)), ("soft", (0.5, 0.0, 0.0))])
def test_labels_equal_those_worked_by_hand(estimation: Any, first: tuple[float, ...]) -> None:
    engine = Script(STEPS)
    settings = StepLabelSettings(solutions=3, completions=2, estimation=estimation)
    labeller = StepLabeller(engine, ends_with_b, engine.tokenizer, SamplingParams(12), settings)
    [[long, short]] = labeller.label([">"])
    assert (long.completions, long.labels) == (("a", "a", "c"), first)
    assert (short.completions, short.labels) == (("b",), (1.0,))
    # 6 + 2 + 2 tokens of solutions, 4 · 2 of completions; one call for the solutions, one for the rest.
    assert (labeller.generated_tokens, engine.calls) == (18, 2)


def test_rows_are_read_for_training(tmp_path: Path) -> None:
    engine = Script(STEPS)
    settings = StepLabelSettings(solutions=3, completions=2, estimation="soft")
    labeller = StepLabeller(engine, ends_with_b, engine.tokenizer, SamplingParams(12), settings)
    path = tmp_path / "steps.jsonl"
    rows = [each.row() for group in labeller.label([">"]) for each in group]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    records = load_records(path, "steps").records
    assert [record.labels for record in records] == [(0.5, 0.0, 0.0), (1.0,)]
    example = StepBuilder(engine.tokenizer).build(records[0])
    assert isinstance(example, StepExample)
    assert [example.sequence.input_ids[end] for end in example.step_ends] == [1, 1, 1]


def test_trees_give_labels_too() -> None:
    engine = Script({">": ("a\n", "c\0"), ">a\n": ("b\0", "c\0")})
    scores = Table({"a\n": 0.9})
    search = TreeSearch(
        engine,
        scores,
        engine.tokenizer,
        SearchSettings(strategy="beam", width=2, branch=2, max_step_tokens=2, budget_tokens=8),
        SamplingParams(8),
        verifier=ends_with_b,
    )
    [result] = search.run([">"])
    expected: tuple[tuple[Literal["hard", "soft"], float], ...] = (("hard", 1.0), ("soft", 0.5))
    for estimation, first in expected:
        settings = StepLabelSettings(estimation=estimation)
        rows = tree_step_labels(result.tree, engine.tokenizer, search.waves.params, settings)
        assert [(row.completions, row.labels) for row in rows] == [
            (("c",), (0.0,)),
            (("a", "b"), (first, 1.0)),
            (("a", "c"), (first, 0.0)),
        ]
