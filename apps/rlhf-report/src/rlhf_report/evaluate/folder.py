"""The folder of an evaluation, which continues where it stopped."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from rlhf_data import RunFolder, UserError, absolute_path, alone_in

_NOT_COMPARED = ("output_dir", "env_file", "gen_batch_size", "vllm_gpu_memory_utilization")
"""Options that change no number."""


def _has_results(folder: Path) -> bool:
    """Whether more is there than the options of an evaluation that was refused."""
    return any(each.name != "config.json" and not each.name.startswith(".") for each in folder.iterdir())


def evaluation_folder(given: Mapping[str, Any]) -> RunFolder:
    """The folder of this evaluation; one with the same options continues where it stopped."""
    options = {key: value for key, value in given.items() if key not in _NOT_COMPARED}
    for key in ("prompts", "pairs", "judge_labels"):
        options[key] = options[key] and absolute_path(options[key])
    options = json.loads(json.dumps(options))
    path = Path(given["output_dir"]) if given["output_dir"] else None
    known = path is not None and (path / "config.json").is_file()
    run = RunFolder.create(path, job="evaluate", resume=known)
    if known:
        before = run.read_config()
        if before.get("job") != "evaluate":
            raise UserError(
                f"{run.path} is not the folder of an evaluation; give another --output-dir",
                code="wrong_folder",
            )
        changed = sorted(key for key in options if before.get(key) != options[key])
        if changed and not _has_results(run.path):
            with alone_in(run.path):  # it may be another's that has just begun
                run.write_config({"job": "evaluate", **options})
            return run
        if changed:
            raise UserError(
                f"{run.path} holds an evaluation with another {changed[0].replace('_', '-')}; give the same "
                "options to go on with it, or another --output-dir",
                code="different_config",
            )
        click.echo(f"continuing {run.path}", err=True)
    else:
        run.write_config({"job": "evaluate", **options})
    return run
