"""The help is complete, and cheap: it loads nothing that computes."""

from __future__ import annotations

import click
import pytest

from imports import imported_by
from proofs import by_default
from rlhf_report.cli import main

VERBS = main.list_commands(click.Context(main))


@pytest.mark.parametrize(
    "arguments",
    by_default(
        [["--help"], ["--version"], *([verb, "--help"] for verb in VERBS)],
        ["--help"],
        ["--version"],
        ["compare", "--help"],
        ["explore", "--help"],
    ),
)
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    code = f"from rlhf_report.cli import main; main({arguments!r}, standalone_mode=False)"
    assert imported_by(code) == []


def test_every_verb_is_a_command_of_its_name() -> None:
    for verb in VERBS:
        found = main.get_command(click.Context(main), verb)
        assert found is not None and found.name == verb and found.get_short_help_str()
