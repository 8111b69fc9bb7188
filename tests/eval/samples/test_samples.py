"""Completions side by side: read, matched, selected, written."""

from __future__ import annotations

import csv
import io
import json
import random
from pathlib import Path
from typing import Any

import pytest

from files import write_lines
from raises import raises_error
from rlhf_eval.samples import FORMATS, matched, read_source, select_cases
from rlhf_eval.samples.sources import Case, Completion

HOSTILE = [
    "=HYPERLINK(1)",
    "+1",
    "-1+2",
    "@SUM(1)",
    "\t=1",
    "  =1",
    "</pre><script>alert(1)</script>",
    "```\n# not a heading\n````",
    "| a | b |\n[x](javascript:alert(1))",
    "\ud800 lone",
    'a,b\n"c"',
    "",
]


def cases(scores: list[float | None], spread: float = 0.0) -> list[Case]:
    return [
        Case(
            f"prompt {i}",
            {
                "a": Completion("x" * i, score),
                "b": Completion("y", None if score is None else score + spread * i),
            },
        )
        for i, score in enumerate(scores)
    ]


def test_a_runs_stages_are_two_models_and_what_lies_between_is_left_out(tmp_path: Path) -> None:
    rows = [{"stage": "start", "step": 0, "prompt": "p", "completion": "before", "reward": 1.0}]
    rows += [{"step": 3, "prompt": "p", "completion": "between", "reward": 9.0, "advantage": 0.1}]
    rows += [{"stage": "end", "step": 5, "prompt": "p", "completion": "after", "reward": 2.0}]
    write_lines(tmp_path / "run" / "samples.jsonl", rows)
    (case,) = matched(read_source(str(tmp_path / "run")))
    assert {name: (each.text, each.score) for name, each in case.completions.items()} == {
        "run start": ("before", 1.0),
        "run end": ("after", 2.0),
    }
    assert set(read_source(f"mine={tmp_path / 'run'}")) == {"mine start", "mine end"}


def test_only_prompts_of_all_models_are_compared(tmp_path: Path) -> None:
    one = write_lines(tmp_path / "one.jsonl", [{"instruction": p, "output": p.upper()} for p in "abc"])
    two = write_lines(tmp_path / "two.jsonl", [{"prompt": p, "response": p * 2, "score": 1} for p in "cbd"])
    found = matched(read_source(str(one)) | read_source(str(two)))
    assert [case.prompt for case in found] == ["b", "c"]
    with raises_error("no_common_prompt"):
        matched(read_source(str(one)) | {"none": {"z": Completion("z")}})


@pytest.mark.parametrize(
    ("row", "code"),
    [
        ({"prompt": "p"}, "invalid_value"),
        ({"completion": "c"}, "invalid_value"),
        ({"prompt": "p", "completion": "c", "score": "x"}, "not_a_number"),
    ],
)
def test_rows_that_cannot_be_read_are_refused(tmp_path: Path, row: dict[str, Any], code: str) -> None:
    with raises_error(code):
        read_source(str(write_lines(tmp_path / "rows.jsonl", [row])))


def test_a_model_folder_is_told_apart_from_completions(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with raises_error("is_a_model"):
        read_source(str(tmp_path))


@pytest.mark.parametrize("how", ["stratified", "random", "best", "worst", "disagree"])
def test_a_selection_does_not_depend_on_the_order(how: Any) -> None:
    many = cases([((i * 37) % 101) / 10 for i in range(100)], spread=0.1)
    chosen = select_cases(many, how, 20, seed=3)
    shuffled = random.Random(0).sample(many, len(many))
    assert [case.prompt for case in select_cases(shuffled, how, 20, seed=3)] == [
        case.prompt for case in chosen
    ]
    assert len(chosen) == len({case.prompt for case in chosen}) == 20


def test_stratified_takes_one_of_each_quantile() -> None:
    many = cases([float(i) for i in range(100)])
    scores = [case.completions["b"].score for case in select_cases(many, "stratified", 20)]
    assert [int(score or 0) // 5 for score in scores] == list(range(20))
    other = [case.completions["b"].score for case in select_cases(many, "stratified", 20, seed=1)]
    assert other != scores


def test_best_and_worst_and_disagreement() -> None:
    many = cases([float(i) for i in range(10)], spread=-2.0)  # a: i, b: i - 2 i; the mean is 0
    assert [case.prompt for case in select_cases(many, "disagree", 2)] == ["prompt 9", "prompt 8"]
    many = cases([float(i) for i in range(10)])
    assert [case.prompt for case in select_cases(many, "best", 2)] == ["prompt 9", "prompt 8"]
    assert [case.prompt for case in select_cases(many, "worst", 2)] == ["prompt 0", "prompt 1"]


@pytest.mark.parametrize("how", ["best", "worst", "disagree"])
def test_without_scores_there_is_nothing_to_rank(how: Any) -> None:
    with raises_error("unscored_rows"):
        select_cases(cases([None, None]), how, 1)


def test_more_is_asked_for_than_there_is() -> None:
    assert len(select_cases(cases([1.0, 2.0, 3.0]), "stratified", 20)) == 3


def test_nothing_that_is_written_runs_or_is_markup() -> None:
    hostile = [Case(each, {"m|<b>": Completion(each, -1.5)}) for each in HOSTILE]
    written = {name: render(hostile, "t <i>", "note") for name, render in FORMATS.items()}
    for row in list(csv.reader(io.StringIO(written["csv"])))[1:]:
        assert not any(cell.lstrip(" ").startswith(("=", "+", "@", "\t", "\r")) for cell in row[:2])
        assert not row[0].lstrip(" ").startswith("-") and row[2] == "-1.5"
    assert "<script>" not in written["html"] and "<i>" not in written["html"]
    for line in written["md"].splitlines():
        assert not line.startswith("````\n")
    inside = written["md"].split("`````text\n")[1].split("\n`````")[0]
    assert inside == HOSTILE[7]
    kept = [json.loads(line)["prompt"] for line in written["jsonl"].splitlines()]
    assert kept == HOSTILE
    for text in written.values():
        text.encode("utf-8")
