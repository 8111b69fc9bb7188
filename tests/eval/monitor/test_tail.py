"""A log that grows, is cut, is half written, is a million lines long."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from rlhf_eval.monitor import tail
from rlhf_eval.monitor.tail import Tail


def line(step: int, **values: Any) -> str:
    return json.dumps({"step": step, **values}) + "\n"


def steps(found: Tail) -> list[int]:
    return [row["step"] for row in found.rows]


def test_a_half_written_line_is_read_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    found = Tail(path)
    assert not found.poll() and found.written is None
    path.write_text(line(1) + line(2)[:5])
    assert found.poll() and steps(found) == [1]
    assert not found.poll()
    with path.open("a") as file:
        file.write(line(2)[5:])
    assert found.poll() and steps(found) == [1, 2]


def test_a_file_that_was_cut_is_read_anew_also_where_it_has_grown_since(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text("".join(line(i) for i in range(1, 6)))
    found = Tail(path)
    found.poll()
    path.write_text("".join(line(i) for i in (1, 2)))
    assert found.poll() and steps(found) == [1, 2]
    with path.open("r+") as file:  # the same file, cut and longer than before when it is looked at again
        file.truncate(len(line(1)))
        file.seek(0, 2)
        file.write("".join(line(i, loss=0.5) for i in range(2, 9)))
    assert found.poll() and steps(found) == list(range(1, 9)) and "loss" in found.rows[1]
    path.unlink()
    assert found.poll() and not found.rows


def test_damaged_lines_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(line(1).encode() + b"{broken\n[1]\n\xff\xfe\n\n" + line(2).encode())
    found = Tail(path)
    assert found.poll() and steps(found) == [1, 2] and found.damaged == 3


def test_a_long_file_is_sampled_and_its_end_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tail, "_TAIL_BYTES", 2000)
    monkeypatch.setattr(tail, "_SAMPLES", 20)
    path = tmp_path / "m.jsonl"
    count = 20_000
    rows = [line(i, **({"eval_reward": i} if i % 700 == 0 else {})) for i in range(1, count + 1)]
    path.write_text("".join(rows))
    found = Tail(path)
    assert found.poll()
    assert steps(found) == sorted(set(steps(found))) and steps(found)[-1] == count
    last = 0
    while sum(map(len, rows[-last - 1 :])) <= 1900:
        last += 1
    assert steps(found)[-last:] == list(range(count - last + 1, count + 1))
    sampled = steps(found)[: -last - 5]
    assert len(sampled) >= 20 and max(b - a for a, b in itertools.pairwise(sampled)) < count / 10
    assert sum("eval_reward" in row for row in found.rows) >= 15
    assert found.skipped + len(found.rows) == pytest.approx(count, rel=0.05)
    with path.open("a") as file:
        file.write(line(count + 1))
    assert found.poll() and steps(found)[-1] == count + 1
