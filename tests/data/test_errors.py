"""How command lines end."""

from __future__ import annotations

import errno
import pickle

import pytest

from rlhf_data import UserError, exit_cleanly
from rlhf_data.runs.atomic import DiskFullError


def test_an_error_has_a_code_and_fields():
    error = UserError("line 3 has no prompt", code="missing_column", column="prompt")
    assert (str(error), error.code) == ("line 3 has no prompt", "missing_column")
    assert error.fields == {"column": "prompt"}
    assert UserError("n is 0").code == "invalid_input" and DiskFullError("full").code == "disk_full"
    assert pickle.loads(pickle.dumps(error)).fields == error.fields


class Terminated(KeyboardInterrupt):
    exit_code = 143


def noted() -> KeyboardInterrupt:
    stop = Terminated()
    stop.add_note("step 3 is saved")
    stop.add_note("continue with: again")
    return stop


_NO_MEMORY = "there is not enough memory ({}); free some, or make batches or models smaller"
_FROM_TORCH = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (UserError("n is 0; give 1"), 2, "Error: n is 0; give 1\n"),
        (
            OSError(errno.EROFS, "Read-only file system", "ro/out"),
            2,
            "Error: ro/out cannot be written: read-only file system; name another place\n",
        ),
        (MemoryError(), 2, f"Error: {_NO_MEMORY.format('MemoryError')}\n"),
        (OSError(errno.ENOMEM, "No room"), 2, f"Error: {_NO_MEMORY.format('[Errno 12] No room')}\n"),
        (RuntimeError(_FROM_TORCH), 2, f"Error: {_NO_MEMORY.format(_FROM_TORCH)}\n"),
        (KeyboardInterrupt(), 130, "nothing was done\n"),
        (Terminated(), 143, "nothing was done\n"),
        (noted(), 143, "Stopped; step 3 is saved; continue with: again\n"),
    ],
)
def test_what_stops_a_job_is_one_sentence_and_an_exit_code(
    error: BaseException, code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def job() -> None:
        raise error

    with pytest.raises(SystemExit) as left:
        exit_cleanly(job, stopped="nothing was done")
    assert left.value.code == code and capsys.readouterr() == ("", says)


def test_a_job_that_comes_to_its_end_and_a_mistake_of_ours_pass() -> None:
    exit_cleanly(lambda: None)
    with pytest.raises(ZeroDivisionError):
        exit_cleanly(lambda: print(1 / 0))


def test_notes_of_a_mistake_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    def job() -> None:
        error = UserError("the judge does not reply")
        error.add_note("continue with: rlhf-train minmax --resume run")
        raise error

    with pytest.raises(SystemExit) as end:
        exit_cleanly(job)
    assert end.value.code == 2
    expected = "Error: the judge does not reply\ncontinue with: rlhf-train minmax --resume run\n"
    assert capsys.readouterr().err == expected
