"""GRPO iterations with this toolkit against TRL: rollout, rewards and update; time and memory.

Both sides train the same model from the same weights on the same prompts with the same reward function, in a
process each, one iteration here and one there in turn. Every completion has the same number of tokens on
both sides. Samples differ, so before ratios are given both sides take one step on the same completions, of
different lengths, from a policy that is not its reference: rewards, loss and gradient must agree.

`default` is TRL as it comes, fp32 and no gradient checkpointing apart; `best` takes 4 completions in a pass,
prompts of like length together. Prompts are those of HH-RLHF (`hh`), or cut to a length in tokens, for the
curves. Prints JSON.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from offline_vs_trl import SHAPES, describe, read_pairs
from online_compare import add_options, compare, make_models, programs, publish, write_rows
from online_pace import Task

from rlhf_data import UserError
from rlhf_models import load_tokenizer

PEERS: dict[str, dict[str, Any]] = {"default": {}, "best": {"per_device_train_batch_size": 4}}
COLUMNS = ("prompts", "group", "beta", "TRL")
PAIRS = 300
"""Rows of the data that prompts, completions and the tokenizer are made of."""
QUICK = {"shape": "tiny", "steps": 2, "new_tokens": 8, "prompts_per_step": 2, "groups": [4], "data": None}


def comparisons(options: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """All comparisons that were asked for.

    Args:
        options: of the command line.
        folder: for models and rows.

    Raises:
        UserError: a side fails, or there are too few prompts.
    """
    pairs = read_pairs(options.data, PAIRS)
    make_models(folder, options.shape, pairs)
    ours = {"max_tokens_per_batch": options.max_tokens_per_batch}
    cases = itertools.product(options.prompts, options.groups, options.betas, options.peers)
    for prompts, group, beta, peer in cases:
        longest = options.new_tokens
        write_rows(
            folder / "rows.json",
            pairs,
            load_tokenizer(folder / "policy"),
            count=options.prompts_per_step * options.steps,
            replayed=options.prompts_per_step,
            prompt_length=None if prompts == "hh" else int(prompts),
            completions=[longest - i % max(longest // 2, 1) for i in range(group)],
            grouped=peer == "best",
        )
        task = Task(
            folder=str(folder),
            prompts_per_step=options.prompts_per_step,
            num_generations=group,
            new_tokens=longest,
            steps=options.steps,
            threads=options.threads,
            settings={"beta": beta},
        )
        case = {"shape": options.shape, "prompts": prompts, "group": group, "beta": beta, "TRL": peer}
        yield case | compare(programs("grpo_sides.py", task, ours=ours, trl=PEERS[peer]))


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the ratios over the length of the prompts, a line for each group size.

    Raises:
        UserError: nothing was measured on prompts of a given length.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    curve = [row for row in rows if row["prompts"] != "hh" and row["same"]]
    if not curve:
        raise UserError("there is nothing to draw; measure with --prompts 100 250 500 1000 first")
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    panels = {"speedup": "whole iteration", "rollout_speedup": "generation alone"}
    for axes, (name, title) in zip(figure.subplots(1, 2), panels.items(), strict=True):
        for group in sorted({row["group"] for row in curve}):
            line = sorted((int(row["prompts"]), row[name]) for row in curve if row["group"] == group)
            axes.plot(*zip(*line, strict=True), marker="o", label=f"{group} completions per prompt")
        axes.axhline(1, color="grey", linewidth=0.8)
        axes.set(title=title, xlabel="tokens of the prompt", ylabel="times faster than TRL", ylim=(0, None))
        axes.grid(alpha=0.3)
        axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    length = 0 if row["prompts"] == "hh" else int(row["prompts"])
    return list(SHAPES).index(row["shape"]), length, row["group"], row["beta"], list(PEERS).index(row["TRL"])


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", nargs="+", default=["hh"], help="hh, or lengths in tokens (default hh)")
    parser.add_argument(
        "--groups", nargs="+", type=int, default=[8], help="completions per prompt (default 8)"
    )
    parser.add_argument("--betas", nargs="+", type=float, default=[0.0, 0.04], help="KL weights (0 0.04)")
    parser.add_argument("--prompts-per-step", type=int, default=4, help="default %(default)s")
    parser.add_argument("--picture", type=Path, help="draw the curves of --output's results into this PNG")
    add_options(parser, list(PEERS), steps=6)
    options = parser.parse_args(arguments)
    for length in options.prompts:
        if length != "hh" and not (length.isdecimal() and int(length) > 0):
            parser.error(f"--prompts {length}: expected hh or a number of tokens above 0")
    if options.picture and not options.output:
        parser.error("--picture shows what is in --output; give it too")
    if options.quick:
        vars(options).update(QUICK)
    return options


def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    options = parse(arguments)
    head = {"benchmark": "grpo_vs_trl", "data": "hh-rlhf" if options.data else "synthetic"}
    head |= {name: getattr(options, name) for name in ("prompts_per_step", "new_tokens", "threads")}
    try:
        with tempfile.TemporaryDirectory() as folder:
            rows = comparisons(options, Path(folder))
            kept = publish(rows, options, head | describe(), key=_key, columns=COLUMNS)
        if options.picture:
            draw(kept, options.picture)
    except UserError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
