"""Run folders as the commands treat them: what an end that was not wished for says of going on."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_algos import CheckpointManager
from rlhf_data import RunFolder, UserError
from rlhf_train.runs import resumable


def _checkpoint(run: RunFolder, step: int) -> None:
    with CheckpointManager(run, keep=2).writing(step, {}):
        pass


@pytest.mark.parametrize(
    ("error", "begun", "before", "after", "told"),
    [
        (KeyboardInterrupt, True, 0, 0, True),
        (KeyboardInterrupt, False, 0, 0, False),
        (UserError, True, 0, 3, True),
        (UserError, True, 2, 3, True),
        (
            UserError,
            True,
            2,
            2,
            False,
        ),  # such as other data for a resumed run: the same command will not help
        (UserError, True, 0, 0, False),
    ],
)
def test_an_end_says_how_to_go_on(
    tmp_path: Path, error: type[BaseException], begun: bool, before: int, after: int, told: bool
) -> None:
    run = RunFolder.create(tmp_path / "run")
    if begun:
        (run.path / "config.json").write_text("{}")
    if before:
        _checkpoint(run, before)
    with pytest.raises(error) as raised, resumable(run, "minmax"):
        if after > before:
            _checkpoint(run, after)
        raise error("no reply")
    expected = [f"continue with: rlhf-train minmax --resume {run.path}"] if told else []
    assert getattr(raised.value, "__notes__", []) == expected
