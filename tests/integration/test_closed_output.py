"""Commands whose output nobody reads: runs go on, nothing ends with a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from proofs import by_default

TRAIN = ("rlhf_train", "sft", "--max-steps=1", "--subset-size=8", "--output-dir=run")


def call(words: tuple[str, ...], folder: Path, *, closed: bool) -> subprocess.CompletedProcess[str]:
    """Run a command with a pipe that nobody reads, or with no standard output at all."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        return subprocess.run(
            [sys.executable, "-m", *words],
            cwd=folder,
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
            preexec_fn=(lambda: os.close(1)) if closed else None,
        )
    finally:
        os.close(writing)


@pytest.mark.slow
@pytest.mark.parametrize("closed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_training_goes_on(tmp_path: Path, closed: bool) -> None:
    assert call(("rlhf_train", "settings", "sft"), tmp_path, closed=closed).returncode == 0
    done = call(TRAIN, tmp_path, closed=closed)
    assert done.returncode == 0 and done.stderr == ""
    assert (tmp_path / "run" / "results.json").exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is Linux's")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    "words",
    by_default(
        [
            ("rlhf_train", "--help"),
            ("rlhf_train", "sft", "--help"),
            ("rlhf_train", "settings", "sft"),
            ("rlhf_train", "schema", "sft"),
            ("rlhf_merge", "--version"),
            ("rlhf_merge", "ties", "--help"),
            ("rlhf_report", "explore", "--help"),
            ("rlhf_serve", "--help"),
            ("rlhf_serve", "generate", "--help"),
        ],
        ("rlhf_train", "--help"),
        ("rlhf_train", "settings", "sft"),
        ("rlhf_merge", "--version"),
        ("rlhf_serve", "generate", "--help"),
    ),
)
def test_output_on_a_full_disk_is_said_in_one_sentence(words: tuple[str, ...], unbuffered: str) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", *words],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
        )
    assert done.returncode == 2
    assert done.stderr.startswith("Error: standard output cannot be written: no space left on device; ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize(
    "words",
    [
        ("rlhf_train", "--help"),
        ("rlhf_merge", "--help"),
        ("rlhf_report", "--help"),
        ("rlhf_serve", "--help"),
    ],
)
def test_a_command_that_prints_ends_quietly(tmp_path: Path, words: tuple[str, ...], closed: bool) -> None:
    done = call(words, tmp_path, closed=closed)
    assert done.returncode == (0 if closed else 1) and done.stderr == ""
