"""The tests pass as a background job of a shell too, which ignores Ctrl-C."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_ctrl_c_arrives_in_tests_that_run_in_the_background() -> None:
    run = (
        "import signal, subprocess, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); "
        "sys.exit(subprocess.run([sys.executable, '-m', 'pytest', '-q', '-p', 'no:cacheprovider', "
        "'tests/repo/test_background.py', '-k', 'default_here']).returncode)"
    )
    done = subprocess.run([sys.executable, "-c", run], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_ctrl_c_is_not_ignored_here_nor_in_children_default_here() -> None:
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    child = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    printed = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, check=True)
    assert printed.stdout.strip() == "True"
