"""A system without POSIX's calls: the package can be imported, and says what it lacks on reading a file."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

_PROGRAM = """
import os, pkgutil, importlib, sys
sys.modules["fcntl"] = sys.modules["resource"] = None
for name in ("preadv", "pwrite", "O_CLOEXEC", "sched_getaffinity"):
    if hasattr(os, name):
        delattr(os, name)
import torch
import rlhf_merge
for module in pkgutil.iter_modules(rlhf_merge.__path__):
    importlib.import_module(f"rlhf_merge.{module.name}")
assert rlhf_merge.linear([torch.zeros(1), torch.ones(1)]) == 0.5
import pytest

from rlhf_merge.cli.main import main
main(["linear", "--model", sys.argv[1], "--model", sys.argv[1], sys.argv[2]])
"""


@pytest.mark.slow
def test_without_the_calls_of_posix(workshop: Any):
    model = workshop.save("a", workshop.tensors())
    command = [sys.executable, "-c", _PROGRAM, model, str(workshop.root / "out")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert "preadv" in done.stderr and "Traceback" not in done.stderr
