"""The command `rlhf-report`: finds its commands, one module each."""

from __future__ import annotations

import importlib
import io
import os
import pkgutil
import sys

import click

from rlhf_report import commands


class _Commands(click.Group):
    """The modules of `rlhf_report.commands`, `_` read as `-`; each has a click command named `command`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of all commands."""
        return sorted(module.name.replace("_", "-") for module in pkgutil.iter_modules(commands.__path__))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of a name; None if there is none."""
        if cmd_name not in self.list_commands(ctx):
            return None
        return importlib.import_module(f"{commands.__name__}.{cmd_name.replace('-', '_')}").command


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="rlhf-report")
def main() -> None:
    """Say whether a model got better, by how much, and whether that is more than luck."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # rows may hold what the terminal cannot show
