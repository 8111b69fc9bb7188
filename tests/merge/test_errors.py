"""Errors: messages that stay short, and the boundary around a user's files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from raises import raises_error
from rlhf_merge.errors import MergeError, UnwrittenError, readable


def test_a_message_shortens_what_a_file_holds() -> None:
    quoted = str(MergeError(f"index: tensor {'n' * 100_000!r} is in {'f' * 100_000!r}, and must not be."))
    assert len(quoted) < 250 and quoted.startswith("index: tensor 'nnn") and quoted.endswith("must not be.")
    # A message that quotes nothing keeps its begin and its end.
    bare = str(MergeError(f"tensor {'n' * 100_000} is missing; get it"))
    assert len(bare) <= 2001 and bare.startswith("tensor nnn") and bare.endswith("nnn is missing; get it")
    apart = "'v_head.*' fits what models' files hold" + " and so on" * 12 + " as 'x' says"
    assert str(MergeError(apart)) == apart


def test_codes() -> None:
    codes = MergeError("x").code, UnwrittenError("x").code, UnwrittenError("x", code="disk_full").code
    assert codes == ("invalid_input", "unwritable", "disk_full")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (FileNotFoundError(2, "No such file", "x"), "unreadable_file"),
        (ValueError("it is odd"), "damaged_file"),
        (KeyError("x"), "damaged_file"),
        (json.JSONDecodeError("odd", "", 0), "damaged_file"),
        (OverflowError(), "damaged_file"),
        (RecursionError(), "damaged_file"),
        (MergeError("x", code="mine", path="x"), "mine"),
    ],
)
def test_the_boundary_around_files(error: Exception, code: str) -> None:
    with raises_error(code, path="x"), readable(Path("x")):
        raise error


def test_mistakes_of_the_program_pass_the_boundary() -> None:
    with pytest.raises(AssertionError), readable("x"):
        raise AssertionError
