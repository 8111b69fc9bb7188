"""The help is complete, and cheap: it loads nothing that computes."""

from __future__ import annotations

import subprocess
import sys

import click
import pytest

from rlhf_report.cli import main

VERBS = main.list_commands(click.Context(main))


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], *([verb, "--help"] for verb in VERBS)])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    program = (
        "import sys\n"
        "from rlhf_report.cli import main\n"
        f"main({arguments!r}, standalone_mode=False)\n"
        "print(sorted({'torch', 'transformers', 'pydantic', 'rich', 'yaml', 'numpy'} & set(sys.modules)))\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "[]"


def test_every_verb_is_a_command_of_its_name() -> None:
    for verb in VERBS:
        found = main.get_command(click.Context(main), verb)
        assert found is not None and found.name == verb and found.get_short_help_str()
