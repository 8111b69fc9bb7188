"""PPO iterations with this toolkit against the last TRL that had a trainer for it: time and memory.

Policy, value model, reference and reward model on both sides, four passes over each rollout; the value model
starts from the reward model. Both sides have a process each and do an iteration in turn. Every completion has
the same number of tokens. Before ratios are given both sides take one iteration, four updates, on the same
completions, from a policy that is not its reference: rewards, losses and the gradients of all updates must
agree.

TRL's side needs an environment of its own: --trl-python names its Python, otherwise one is made, by uv.
TRL's trainer knows no groups: it gets each prompt as often as it has completions. `default` is TRL as it
comes, fp32, no gradient checkpointing and a temperature of 1 apart; `best` takes 4 completions in a pass,
prompts of like length together. Prints JSON.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from merge_process import CommandFailed, versions
from offline_vs_trl import describe, read_pairs
from online_compare import add_options, compare, make_models, programs, publish, write_rows
from online_pace import Task

from rlhf_data import UserError
from rlhf_models import load_tokenizer

TRL = "1.12.0"
"""The last release with a `PPOTrainer`."""
PEERS: dict[str, dict[str, Any]] = {
    "default": {},
    "best": {"per_device_train_batch_size": 4},
}
BOTH = {"temperature": 1.0, "num_ppo_epochs": 4, "num_mini_batches": 1, "kl_coef": 0.05}
"""Settings of both sides; TRL's own temperature is 0.7."""
COLUMNS = ("prompts", "group", "TRL")
PAIRS = 300
"""Rows of the data that prompts, completions and the tokenizer are made of."""
QUICK = {"shape": "tiny", "steps": 2, "new_tokens": 8, "completions": 8, "groups": [4], "data": None}


def comparisons(options: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """All comparisons that were asked for.

    Args:
        options: of the command line.
        folder: for models and rows.

    Raises:
        UserError: the peer's environment cannot be made, or a side fails.
    """
    python = str(options.trl_python or make_environment(folder / "venv"))
    peer_versions = versions(Path(python), ("torch", "transformers", "trl"))
    if peer_versions["trl"] != TRL:
        raise UserError(f"--trl-python has TRL {peer_versions['trl']}; expected {TRL}, which still has PPO")
    pairs = read_pairs(options.data, PAIRS)
    make_models(folder, options.shape, pairs)
    ours = {"max_tokens_per_batch": options.max_tokens_per_batch}
    for group, peer in itertools.product(options.groups, options.peers):
        size = options.completions // group
        write_rows(
            folder / "rows.json",
            pairs,
            load_tokenizer(folder / "policy"),
            count=size * options.steps,
            replayed=size,
            completions=[options.new_tokens] * group,
            grouped=peer == "best",
        )
        task = Task(
            folder=str(folder),
            prompts_per_step=size,
            num_generations=group,
            new_tokens=options.new_tokens,
            steps=options.steps,
            threads=options.threads,
            settings=BOTH,
        )
        case = {"shape": options.shape, "prompts": size, "group": group, "TRL": peer}
        found = compare(programs("ppo_sides.py", task, ours=ours, trl=PEERS[peer], trl_python=python))
        yield case | {"trl_versions": peer_versions} | found


def make_environment(folder: Path) -> Path:
    """Make a venv with the peer and the rest as it is here, by uv; its Python.

    Raises:
        UserError: uv failed.
    """
    python = folder / "bin" / "python"
    same = [f"{name}=={version(name)}" for name in ("torch", "transformers", "accelerate", "datasets")]
    links = os.environ.get("PIP_FIND_LINKS")
    find = ["--find-links", links] if links and version("torch").endswith("+cpu") else []
    for command in (
        ["uv", "venv", "--quiet", "--no-config", "--python", sys.executable, str(folder)],
        [
            "uv",
            "pip",
            "install",
            "--quiet",
            "--no-config",
            "--python",
            str(python),
            *find,
            f"trl=={TRL}",
            *same,
        ],
    ):
        done = subprocess.run(command, cwd=folder.parent, capture_output=True, text=True)
        if done.returncode:
            raise UserError(f"TRL {TRL} cannot be installed: {' '.join(command)}: {done.stderr[-2000:]}")
    return python


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["shape"], -row["group"], list(PEERS).index(row["TRL"])


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--groups", nargs="+", type=int, default=[8], help="completions per prompt (default 8)"
    )
    parser.add_argument("--completions", type=int, default=32, help="of an iteration (default %(default)s)")
    parser.add_argument("--trl-python", type=Path, help=f"Python of a venv with TRL {TRL}")
    add_options(parser, list(PEERS), steps=3)
    options = parser.parse_args(arguments)
    if options.quick:
        vars(options).update(QUICK)
    if wrong := [group for group in options.groups if group < 1 or options.completions % group]:
        parser.error(f"--groups {wrong[0]}: expected a divisor of --completions {options.completions}")
    if options.trl_python and not options.trl_python.is_file():
        parser.error(f"--trl-python {options.trl_python}: there is no such file")
    return options


def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    options = parse(arguments)
    head = {"benchmark": "ppo_vs_trl", "data": "hh-rlhf" if options.data else "synthetic"}
    head |= {
        name: getattr(options, name)
        for name in ("completions", "new_tokens", "threads", "max_tokens_per_batch")
    }
    try:
        with tempfile.TemporaryDirectory() as folder:
            rows = comparisons(options, Path(folder))
            publish(rows, options, head | describe(), key=_key, columns=COLUMNS)
    except (UserError, CommandFailed) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
