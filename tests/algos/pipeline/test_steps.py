"""Choosing completions, measures of texts and signs of collapse, references and digests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from raises import raises_error
from rlhf_algos.pipeline.measured import check_ratings, collapse_alarms, scores_of, text_measures
from rlhf_algos.pipeline.references import Digests, Reference, named_files, references_in, replaced
from rlhf_algos.pipeline.steps import choose

ROWS = [
    {
        "prompt": "p",
        "answer": "gold",
        "completion": "best",
        "score": 2.0,
        "candidates": [
            {"text": "best", "score": 2.0},
            {"text": "mid", "score": 1.0},
            {"text": "bad", "score": 0.0},
        ],
    },
    {
        "prompt": "q",
        "answer": "x",
        "completion": "x",
        "score": 0.5,
        "candidates": [{"text": "x", "score": 0.5}],
    },
]


@pytest.fixture
def chosen(tmp_path: Path):
    rows = tmp_path / "in.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))

    def run(**settings: Any) -> list[dict[str, Any]]:
        choose(tmp_path, {"rows": str(rows), **settings})
        return [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]

    return run


def test_pairs_are_best_against_worst_or_against_a_column(chosen: Any) -> None:
    assert chosen(to="pairs") == [{"prompt": "p", "answer": "gold", "chosen": "best", "rejected": "bad"}]
    with raises_error("no_rows_left"):
        chosen(to="pairs", min_gap=2.5)
    spin = chosen(to="pairs", chosen="answer")  # the second row's completion is its answer: no pair
    assert [(row["chosen"], row["rejected"]) for row in spin] == [("gold", "bad")]
    with raises_error("missing_column", column="gold"):
        chosen(to="pairs", chosen="gold")


def test_demonstrations_are_the_best_and_labels_follow_the_score(chosen: Any) -> None:
    assert [row["completion"] for row in chosen(to="sft")] == ["best", "x"]
    assert [row["completion"] for row in chosen(to="sft", min_score=1.0)] == ["best"]
    assert [row["completion"] for row in chosen(to="sft", top_share=0.5)] == ["best"]
    # the mean of 2, 1, 0, 0.5 is 0.875
    assert [row["label"] for row in chosen(to="kto")] == [True, True, False, False]
    assert [row["label"] for row in chosen(to="kto", min_score=0.5)] == [True, True, False, True]


def test_what_nothing_scored_is_neither_better_nor_worse(tmp_path: Path) -> None:
    """Scores of reward models are often negative, and a reward may not apply to a completion."""
    candidates = [("mid", -1.0), ("low", -3.0), ("unscored", None)]
    row = {"prompt": "p", "completion": "mid", "score": -1.0, "candidates": None}
    row["candidates"] = [{"text": text, "score": score} for text, score in candidates]
    lost = {"prompt": "q", "completion": "unscored", "score": None, "candidates": None}
    (tmp_path / "in.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(lost) + "\n")

    def made(**settings: Any) -> list[dict[str, Any]]:
        choose(tmp_path, {"rows": str(tmp_path / "in.jsonl"), **settings})
        return [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]

    assert made(to="pairs") == [{"prompt": "p", "chosen": "mid", "rejected": "low"}]
    assert made(to="sft") == [{"prompt": "p", "completion": "mid"}]
    # the mean of -1 and -3 is -2
    assert [(each["completion"], each["label"]) for each in made(to="kto")] == [("mid", True), ("low", False)]
    (tmp_path / "in.jsonl").write_text(json.dumps(lost) + "\n")
    assert made(to="sft") == [{"prompt": "q", "completion": "unscored"}]  # as all that was drawn
    for settings in ({"to": "kto"}, {"to": "sft", "min_score": 0.0}, {"to": "sft", "top_share": 0.5}):
        with raises_error("unscored_rows"):
            made(**settings)
    with raises_error("no_rows_left"):
        made(to="pairs")


def test_collapse_is_told_against_the_first_round() -> None:
    varied = [{"completion": f"{a} {b} and so on"} for a in "abcd" for b in "efgh"]
    same = [{"completion": "yes yes yes yes yes yes yes yes yes yes yes yes"}] * 16
    first, last = text_measures(varied), text_measures(same)
    assert (last["unique"], last["words"]) == (1 / 16, 12)
    assert collapse_alarms([first, first]) == []
    alarms = collapse_alarms([first, first, last])
    assert len(alarms) == 3 and all(alarm.startswith("round 3:") for alarm in alarms)
    cut = text_measures([{"completion": str(i), "finish_reason": "length"} for i in range(4)])
    assert any("cut off" in alarm for alarm in collapse_alarms([{**cut, "truncated": 0.0}, cut]))


def test_scores_of_reports(tmp_path: Path) -> None:
    (tmp_path / "completions").mkdir()
    rows = [
        {"prompt": "p", "reward": r, "length": 3, "finish_reason": f} for r, f in ((1, "stop"), (2, "length"))
    ]
    (tmp_path / "completions/policy.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    accuracy = {"by": "reward", "pairs": 4, "accuracy": {"estimate": 0.75}}
    (tmp_path / "results.json").write_text(json.dumps({"reward_accuracy": [accuracy]}))
    found = scores_of(tmp_path)
    assert found.suites == found.unpaired == ()
    assert found.metrics["reward"] == {"p": 1.5} and found.metrics["truncated"] == {"p": 0.5}
    accuracies = found.metrics["reward_accuracy"].values()
    assert sum(accuracies) == 3 and len(accuracies) == 4
    with raises_error("no_evaluation"):
        scores_of(tmp_path / "completions")


def test_a_file_of_ratings_has_one_metric_which_pairs_with_none(tmp_path: Path) -> None:
    ratings = tmp_path / "ratings.jsonl"
    ratings.write_text('{"prompt": "p", "completion": "c", "label": true}\n{"label": false}\n')
    found = scores_of(ratings)
    assert list(found.metrics["rating"].values()) == [1.0, 0.0] and found.unpaired == ("rating",)
    ratings.write_text('{"prompt": "p", "completion": "c", "label": "up"}\n')
    with raises_error("missing_value", path=str(ratings)):
        scores_of(ratings)
    with raises_error("missing_value", path=str(ratings)):
        check_ratings({"measured": ["${after.report}", str(ratings)]})
    ratings.write_text("")  # nobody has rated yet
    assert scores_of(ratings).metrics == {"rating": {}}


def test_references_are_found_and_replaced() -> None:
    settings = {"a": "${sft.final}", "b": ["x:${reward.final},n=1", "${loop-2-draw}"], "c": 1}
    found = references_in(settings)
    assert found == [Reference("sft", "final"), Reference("reward", "final"), Reference("loop-2-draw", None)]
    assert replaced(settings, lambda each: f"<{each.stage}>") == {
        "a": "<sft>",
        "b": ["x:<reward>,n=1", "<loop-2-draw>"],
        "c": 1,
    }
    with raises_error("invalid_reference", reference="${sft final}"):
        references_in("${sft final}")


def test_digests_follow_the_content(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "weights").write_text("1")
    cache = tmp_path / "digests.json"

    def digest() -> str:
        digests = Digests(cache)
        found = digests.of(str(folder))
        digests.save()
        return found

    first = digest()
    assert digest() == first
    (folder / "weights").write_text("22")
    assert digest() != first
    assert named_files({"model": str(folder), "reward": [f"judge:path={folder},n=2", "length"]}) == [
        str(folder)
    ]
