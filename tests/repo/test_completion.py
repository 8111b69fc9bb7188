"""Shells complete every command, as docs/guide.md says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORDS = {
    "rlhf-train": ("dp", "dpo"),
    "rlhf-serve": ("--reward-m", "--reward-model"),
    "rlhf-report": ("expl", "explore"),
    "rlhf-merge": ("tie", "ties"),
}
EACH = pytest.mark.parametrize("program", WORDS)


def _variable(program: str) -> str:
    return f"_{program.upper().replace('-', '_')}_COMPLETE"


def _run(*command: str, **environment: str) -> str:
    folder = Path(sys.executable).parent
    env = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"} | environment
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout


@EACH
def test_bash_completes_a_word(program: str):
    """In a Bash that has run the guide's line, through the function that it then has."""
    begun, whole = WORDS[program]
    guide = (ROOT / "docs" / "guide.md").read_text()
    line = re.search(rf'^eval "\$\({_variable(program)}=bash_source {program}\)"$', guide, re.M)
    assert line is not None
    function = f"_{program.replace('-', '_')}_completion"
    script = f"""{line[0]}
complete -p {program} | grep -q {function}
COMP_WORDS=({program} {begun}); COMP_CWORD=1; {function} {program}
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    assert whole in _run("bash", "-euc", script).split()


@EACH
@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_have_a_script(program: str, shell: str):
    script = _run(program, **{_variable(program): f"{shell}_source"})
    assert f"{_variable(program)}={shell}_complete" in script
