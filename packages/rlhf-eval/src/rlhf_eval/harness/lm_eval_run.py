"""lm-eval's own command line, with the model `rlhf` and our tasks known to it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from lm_eval._cli import HarnessCLI
from lm_eval.utils import setup_logging

from rlhf_data import UserError
from rlhf_eval.harness import lm_eval_model as lm_eval_model  # which registers the model `rlhf`

TASKS = Path(__file__).with_name("lm_eval_tasks")
"""The folder of our tasks, for `--include_path` or lm-eval's `TaskManager`."""
_WITH_TASKS = ("run", "ls", "validate")


def run(arguments: Sequence[str]) -> None:
    """Run lm-eval with these arguments; our tasks are known unless they name another `--include_path`."""
    given = list(arguments)
    if given and given[0].startswith("-") and given[0] not in ("-h", "--help"):
        given.insert(0, "run")
    help_asked = {"-h", "--help"} & set(given)
    named = any(each.split("=")[0] == "--include_path" for each in given)
    if given and given[0] in _WITH_TASKS and not help_asked and not named:
        given += ["--include_path", str(TASKS)]
    sys.argv = ["lm-eval", *given]
    setup_logging()
    cli = HarnessCLI()
    try:
        cli.execute(cli.parse_args())
    except ValueError as error:
        if "Tasks not found" not in str(error):
            raise
        raise UserError(" ".join(str(error).split()), code="unknown_task") from error
