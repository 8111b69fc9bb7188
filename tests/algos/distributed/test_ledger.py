"""The ledger keeps finished groups to the bit, and drops what a kill or a bad disk left of a line."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from raises import raises_error
from rlhf_algos.distributed.ledger import GroupKey, Ledger, request_hash
from rlhf_infer import Rollout, SamplingParams

_PROMPTS = [[3, 4], [5]]
_GROUPS = [
    [Rollout([3, 4], [7, 8], [-0.1, -2.5e-8], "stop"), Rollout([3, 4], [9], [-1 / 3], "length")],
    [Rollout([5], [1], [-0.0], "stop"), Rollout([5], [], [], "stop")],
]
_KEY = GroupKey(3, 0, "r", "w")


Open = Callable[[Path], Ledger]


@pytest.fixture
def open_ledger() -> Iterator[Open]:
    with contextlib.ExitStack() as stack:
        yield lambda path: stack.enter_context(contextlib.closing(Ledger(path)))


def _filled(ledger: Ledger, steps: int = 3) -> Ledger:
    for step in range(steps):
        for number in range(2):
            ledger.append(GroupKey(step, number, "r", "w"), _GROUPS)
    ledger.sync()
    return ledger


def test_a_finished_group_comes_back_to_the_bit(tmp_path: Path, open_ledger: Open):
    path = tmp_path / "run" / "ledger"
    first = open_ledger(path)
    assert first.find(_KEY, _PROMPTS) is None
    first.append(_KEY, _GROUPS)
    assert first.find(_KEY, _PROMPTS) == _GROUPS
    first.close()
    again = open_ledger(path)
    assert again.num_groups == 1 and again.find(_KEY, _PROMPTS) == _GROUPS


def test_a_group_of_other_weights_or_another_request_does_not_count(tmp_path: Path, open_ledger: Open):
    ledger = _filled(open_ledger(tmp_path / "ledger"))
    key = GroupKey(1, 0, "r", "w")
    assert ledger.find(key, _PROMPTS)
    for other in (replace(key, weights="x"), replace(key, request="x"), replace(key, number=5)):
        assert ledger.find(other, _PROMPTS) is None


def test_a_torn_end_is_dropped_and_the_file_goes_on(tmp_path: Path, open_ledger: Open):
    path = tmp_path / "ledger"
    _filled(open_ledger(path)).close()
    whole = path.read_bytes()
    line = len(whole) // 6
    for cut in (1, 5, line // 2, line - 1):
        path.write_bytes(whole[:-cut])
        ledger = open_ledger(path)
        assert ledger.num_groups == 5
        assert ledger.find(GroupKey(2, 1, "r", "w"), _PROMPTS) is None
        ledger.append(GroupKey(2, 1, "r", "w"), _GROUPS)
        ledger.close()
        assert path.read_bytes() == whole


def test_a_damaged_line_costs_its_group_only(tmp_path: Path, open_ledger: Open):
    path = tmp_path / "ledger"
    _filled(open_ledger(path)).close()
    lines = path.read_bytes().splitlines(keepends=True)
    lines[2] = lines[2].replace(b"7,8", b"7,9")
    path.write_bytes(b"".join(lines))
    ledger = open_ledger(path)
    assert ledger.num_groups == 5
    assert ledger.find(GroupKey(1, 0, "r", "w"), _PROMPTS) is None
    assert ledger.find(GroupKey(2, 1, "r", "w"), _PROMPTS) == _GROUPS


def test_steps_that_no_checkpoint_needs_go(tmp_path: Path, open_ledger: Open):
    path = tmp_path / "ledger"
    ledger = _filled(open_ledger(path))
    size = path.stat().st_size
    ledger.drop_before(2)
    assert path.stat().st_size == size // 3
    assert ledger.find(GroupKey(2, 1, "r", "w"), _PROMPTS) == _GROUPS
    ledger.append(GroupKey(3, 0, "r", "w"), _GROUPS)
    ledger.close()
    assert open_ledger(path).num_groups == 3


def test_a_place_that_cannot_be_written_is_said(tmp_path: Path, open_ledger: Open):
    (tmp_path / "file").touch()
    with raises_error("unwritable"):
        open_ledger(tmp_path / "file" / "ledger")


def test_the_request_is_all_that_is_asked():
    params = SamplingParams(4, seed=1)
    asked = request_hash(_PROMPTS, 2, params)
    assert asked == request_hash([(3, 4), (5,)], 2, SamplingParams(4, seed=1))
    others = [
        request_hash(_PROMPTS[::-1], 2, params),
        request_hash(_PROMPTS, 3, params),
        request_hash(_PROMPTS, 2, SamplingParams(4, seed=2)),
    ]
    assert len({asked, *others}) == 4
