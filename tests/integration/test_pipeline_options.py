"""Stages know the options of the commands that they run."""

from __future__ import annotations

import importlib

import click
import pytest

from rlhf_algos.pipeline.kinds import EVALUATE_KEYS, PREPARE_KEYS

OF_THE_STAGE = {"out", "output_dir", "overwrite", "config", "dry_run", "kl", "env_file"}
"""Where results go and what the stage decides; keys of an API come from the environment."""


@pytest.mark.parametrize(("command", "keys"), [("prepare", PREPARE_KEYS), ("evaluate", EVALUATE_KEYS)])
def test_a_stage_takes_the_options_of_its_command(command: str, keys: tuple[str, ...]) -> None:
    main = importlib.import_module("rlhf_report.cli").main
    found = main.get_command(click.Context(main), command)
    options = {
        name.removeprefix("--").replace("-", "_")
        for option in found.params
        if isinstance(option, click.Option)
        for name in (*option.opts, *option.secondary_opts)
    }
    assert options - OF_THE_STAGE == set(keys)
    assert len(keys) == len(set(keys))
