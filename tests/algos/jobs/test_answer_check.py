"""Right answers that a reward cannot read are refused before anything is trained, with file and row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from raises import raises_error
from rlhf_algos import METHODS
from rlhf_algos.jobs.data import Rows, build_sets, load_rows, tell_left_out


def read(path: Path, rows: list[Any], *reward: str, **settings: Any) -> Rows:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = {"train_data": str(path), "reward": list(reward), "eval_fraction": 0.0, **settings}
    return load_rows(METHODS["grpo"], METHODS["grpo"].resolve(given))


GOOD = [{"prompt": f"{i} + 1 =", "answer": f"#### {i + 1}"} for i in range(500)]


@pytest.mark.slow
@pytest.mark.parametrize("gold", [r"2\sqrt{3}", r"2\pi", "x^2", "(3, 4)", "[0, 1)", "north", "3 or 4", True])
def test_a_gold_that_is_not_one_number_is_refused_over_all_rows(tmp_path: Path, gold: Any) -> None:
    rows = [*GOOD, {"prompt": "p", "answer": gold}]
    with raises_error("invalid_answer", where=f"{tmp_path}/rows.jsonl, line 501"):
        read(tmp_path / "rows.jsonl", rows, "number")
    with raises_error("invalid_answer", where=f"{tmp_path}/rows.jsonl, line 501"):
        read(tmp_path / "rows.jsonl", rows, "length:target=9", "number")
    with raises_error("invalid_answer", where=f"{tmp_path}/eval.jsonl, line 2"):
        (tmp_path / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [rows[0], rows[-1]]))
        read(tmp_path / "rows.jsonl", GOOD, "number", eval_data=str(tmp_path / "eval.jsonl"))
    if gold is not True:
        read(tmp_path / "rows.jsonl", rows, "math")


def test_rows_that_are_not_trained_on_or_not_checked_may_hold_anything(tmp_path: Path) -> None:
    bad = {"prompt": "p", "answer": "north"}
    read(tmp_path / "rows.jsonl", [*GOOD, bad], "number", subset_size=500)
    read(tmp_path / "rows.jsonl", [*GOOD, {**bad, "verifiable": False}], "number", "length:target=9")
    read(tmp_path / "rows.jsonl", [*GOOD, bad], "length:target=9")
    read(tmp_path / "rows.jsonl", [{"prompt": "p", "gold": 5, "answer": "north"}], "number:column=gold")


def test_a_row_that_no_reward_applies_to_is_refused(tmp_path: Path) -> None:
    rows = [*GOOD, {"prompt": "p", "answer": "5", "verifiable": False}]
    with raises_error("missing_answer"):
        read(tmp_path / "rows.jsonl", rows, "number")
    with raises_error("missing_column", column="answer"):
        read(tmp_path / "rows.jsonl", [{"prompt": "p", "gold": 5}], "number")


def test_a_column_that_is_nowhere_is_refused(tmp_path: Path) -> None:
    with raises_error("missing_column", column="answer"):
        read(tmp_path / "rows.jsonl", [{"prompt": "p", "gold": 5}], "choice", "length:target=9")


def test_on_bad_row_skip_leaves_out_and_counts_rows_whose_answers_cannot_be_read(tmp_path: Path) -> None:
    path, skip = tmp_path / "rows.jsonl", {"on_bad_row": "skip"}
    bad = [{"prompt": "p", "answer": "north"}, {"prompt": "q"}, {"answer": "5"}]
    rows = read(path, [*bad, *GOOD], "number", **skip)
    assert len(rows.train) == 500 and rows.skipped == 3
    rows = read(path, [*bad, *GOOD], "number", "length:target=9", **skip)
    assert len(rows.train) == 501 and rows.skipped == 2  # the row without an answer has its length
    with raises_error("no_row_left"):
        read(path, bad[:1], "number", **skip)


def test_streamed_rows_whose_answers_cannot_be_read_are_met_when_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, byte_tokenizer: Any
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path, settings = tmp_path / "rows.jsonl", {"streaming": True, "on_bad_row": "skip", "max_steps": 1}
    rows = [{"prompt": "p", "answer": "north"}, {"prompt": "q"}, {"answer": "5"}, *GOOD[:9]]
    method = METHODS["grpo"]
    given = {"train_data": str(path), "reward": ["number"], "eval_fraction": 0.0, **settings}
    found = read(path, rows, "number", **settings)
    train: Any = build_sets(method, method.resolve(given), found, byte_tokenizer, max_length=None)[0]
    assert [each.columns["answer"] for each in train] == [row["answer"] for row in GOOD[:9]]
    assert train.bad.numbers == {0, 1, 2} and tell_left_out(train) == {"bad_rows": 3, "dropped_rows": 0}
    with raises_error("missing_column", column="answer"):
        read(path, [{"prompt": "p", "gold": 5}], "number", **settings)
