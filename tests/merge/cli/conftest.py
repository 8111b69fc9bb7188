"""Commands in this process."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from click.testing import CliRunner, Result

from rlhf_merge.cli.main import main

Run = Callable[..., Result]


@pytest.fixture(autouse=True)
def same_signals() -> Iterator[None]:
    """The command handles SIGTERM; the tests' own process must not."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="session")
def run() -> Run:
    """A command that must succeed."""

    def run(*arguments: Any) -> Result:
        result = CliRunner().invoke(main, [str(argument) for argument in arguments])
        assert result.exit_code == 0, result.output
        return result

    return run


@pytest.fixture(scope="session")
def refused() -> Callable[..., str]:
    """A command that must fail with one sentence; the sentence."""

    def refused(*arguments: Any) -> str:
        result = CliRunner().invoke(main, [str(argument) for argument in arguments])
        assert isinstance(result.exception, SystemExit), result.exception
        assert result.exit_code == 2 and result.stdout == ""
        *before, error = result.stderr.strip().splitlines()
        before = [line for line in before if line.strip() and "━" not in line]  # a bar, perhaps
        assert all(line.startswith(("Usage:", "Try ")) for line in before), result.stderr
        assert error.startswith("Error: ")
        return error.removeprefix("Error: ")

    return refused
