"""Rated answers become pairs: the best against the worst, whatever the order of the rows."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from files import read_json, read_lines, write_lines
from raises import raises_error
from rlhf_data import load_records, pair_ratings

ROWS = [
    {"prompt": "a", "response": "good", "helpfulness": 4, "correctness": 4},
    {"prompt": "b", "response": "only", "helpfulness": 1, "correctness": 1},
    {"prompt": "a", "response": "bad", "helpfulness": 0, "correctness": 3},
    {"prompt": "c", "response": "one", "helpfulness": 2, "correctness": 0},
    {"prompt": "c", "response": "two", "helpfulness": 2, "correctness": 1},
    {"prompt": "a", "response": "fair", "helpfulness": 3, "correctness": 0},
    {"prompt": "d", "response": "same", "helpfulness": 1, "correctness": 2},
    {"prompt": "d", "response": "same", "helpfulness": 3, "correctness": 2},
]


def _read(folder: Path) -> list[dict[str, Any]]:
    return read_lines(folder / "pairs.jsonl")


def test_the_best_against_the_worst(tmp_path: Path) -> None:
    """By helpfulness: a is good (4) against bad (0); b has one answer, c is even, d is twice one text."""
    file = write_lines(tmp_path / "rows.jsonl", ROWS)
    counts = pair_ratings([file], ["helpfulness"], tmp_path / "out")
    expected = {"rows": 8, "bad_rows": 0, "prompts": 4, "single": 1, "ties": 2, "pairs": 1}
    assert counts == expected == read_json(tmp_path / "out" / "report.json")
    [pair] = _read(tmp_path / "out")
    assert pair == {
        **{"prompt": "a", "chosen": "good", "rejected": "bad", "chosen_rating": 4.0, "rejected_rating": 0.0},
        "rows": [f"{file}, line 1", f"{file}, line 3"],
    }
    [record] = load_records(tmp_path / "out" / "pairs.jsonl", "preference").records
    assert (record.prompt, record.chosen, record.rejected) == ("a", "good", "bad")


def test_the_mean_of_several_ratings_and_a_gap(tmp_path: Path) -> None:
    """Means: a has 4, 1.5, 1.5 (a tie of two worst, decided by a hash), c has 1 and 1.5."""
    file = write_lines(tmp_path / "rows.jsonl", ROWS)
    pair_ratings([file], ["helpfulness", "correctness"], tmp_path / "out")
    ratings = {p["prompt"]: (p["chosen_rating"], p["rejected_rating"]) for p in _read(tmp_path / "out")}
    assert ratings == {"a": (4.0, 1.5), "c": (1.5, 1.0)}
    pair_ratings([file], ["helpfulness", "correctness"], tmp_path / "gap", min_gap=0.5)
    assert [p["prompt"] for p in _read(tmp_path / "gap")] == ["a"]


def test_the_order_of_rows_and_files_does_not_matter(tmp_path: Path) -> None:
    rows = [
        {"prompt": f"p{i % 20}", "response": f"r{i}", "score": random.Random(i).randint(0, 4)}
        for i in range(100)
    ]
    pair_ratings([write_lines(tmp_path / "a.jsonl", rows)], ["score"], tmp_path / "a")
    random.Random(1).shuffle(rows)
    files = [write_lines(tmp_path / "b.jsonl", rows[:30]), write_lines(tmp_path / "c.jsonl", rows[30:])]
    pair_ratings(files, ["score"], tmp_path / "b")
    first, second = (
        sorted((p["prompt"], p["chosen"], p["rejected"]) for p in _read(tmp_path / name)) for name in "ab"
    )
    assert first == second and len(first) > 15


def test_bad_input(tmp_path: Path) -> None:
    file = write_lines(
        tmp_path / "rows.jsonl", [*ROWS, {"prompt": "a", "response": "x", "helpfulness": "much"}]
    )
    with raises_error("not_a_number", where=f"{file}, line 9, field helpfulness"):
        pair_ratings([file], ["helpfulness"], tmp_path / "out")
    assert pair_ratings([file], ["helpfulness"], tmp_path / "out", on_bad_row="skip")["bad_rows"] == 1
    with raises_error("folder_not_empty"):
        pair_ratings([file], ["helpfulness"], tmp_path / "out")
    with raises_error("no_rating"):
        pair_ratings([file], [], tmp_path / "none")
    with raises_error("missing_column", column="quality"):
        pair_ratings([file], ["quality"], tmp_path / "none")
    single = write_lines(tmp_path / "single.jsonl", ROWS[:2])
    with raises_error("no_row_left"):
        pair_ratings([single], ["helpfulness"], tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_ratings_may_be_written_as_text_but_not_as_true_or_false(tmp_path: Path) -> None:
    """CSV files have nothing but texts; 10^400 is a number that no float holds."""
    rows = [{"prompt": "a", "response": "x", "score": "2"}, {"prompt": "a", "response": "y", "score": 1.5}]
    pair_ratings([write_lines(tmp_path / "texts.jsonl", rows)], ["score"], tmp_path / "out")
    assert [p["chosen_rating"] for p in _read(tmp_path / "out")] == [2.0]
    for number, value in enumerate((True, False, "two", 10**400)):
        file = write_lines(tmp_path / f"{number}.jsonl", [*rows, {**rows[0], "score": value}])
        with raises_error("not_a_number", where=f"{file}, line 3, field score"):
            pair_ratings([file], ["score"], tmp_path / "none")
