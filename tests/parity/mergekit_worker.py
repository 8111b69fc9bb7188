"""Merges as mergekit does, for the tests; runs under the Python of a venv that has it.

The first line it prints is mergekit's version. Then each line it reads is a JSON list of a config file and a
folder to write, and each line it prints is null, or what went wrong.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import sys
from typing import Any


def merge(modules: list[Any], config_file: str, out: str) -> None:
    """Do what the command `mergekit-yaml --random-seed 0 CONFIG OUT` does."""
    yaml, config, merging, options = modules
    with open(config_file, encoding="utf-8") as file:
        source = file.read()
    parsed = config.MergeConfiguration.model_validate(yaml.safe_load(source))
    chosen = options.MergeOptions(quiet=True, random_seed=0)
    merging.run_merge(parsed, out, options=chosen, config_source=source)


def main() -> None:
    """Serve until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what mergekit prints must not look like an answer

    names = ("yaml", "mergekit.config", "mergekit.merge", "mergekit.options")
    modules = [importlib.import_module(name) for name in names]  # after mergekit's messages were turned away
    print(json.dumps(importlib.metadata.version("mergekit")), file=answers, flush=True)
    for line in sys.stdin:
        try:
            merge(modules, *json.loads(line))
            answer = None
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
