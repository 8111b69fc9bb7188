"""The command `rlhf-report`: finds its commands, one module each."""

from __future__ import annotations

import importlib
import io
import os
import pkgutil
import sys
from collections.abc import Sequence
from typing import Any

import click

from rlhf_data import output_written
from rlhf_eval.html import written_by
from rlhf_report import commands


class _Commands(click.Group):
    """The modules below `rlhf_report.commands`, `_` read as `-`; each has a click command named `command`."""

    def main(self, args: Sequence[str] | None = None, *rest: Any, **extra: Any) -> Any:
        """Run the command line; output that cannot be written ends it with a sentence."""
        given = sys.argv[1:] if args is None else args
        with output_written(), written_by(["rlhf-report", *given]):
            return super().main(args, *rest, **extra)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of all commands."""
        return sorted(self._modules())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of a name; None if there is none."""
        module = self._modules().get(cmd_name)
        return None if module is None else importlib.import_module(module).command

    @staticmethod
    def _modules() -> dict[str, str]:
        """The module of each command."""
        found = pkgutil.walk_packages(commands.__path__, f"{commands.__name__}.")
        return {each.name.rpartition(".")[2].replace("_", "-"): each.name for each in found if not each.ispkg}


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="rlhf-report")
def main() -> None:
    """Say whether a model got better, by how much, and whether that is more than luck."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # rows may hold what the terminal cannot show
