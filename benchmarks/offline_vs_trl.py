"""Offline training with this toolkit against TRL: the same rows, steps and losses; time and memory.

Each comparison trains one method on both sides, in a process each, one step here and one there in turn.
Against TRL as it comes (fp32, no gradient checkpointing, its own defaults otherwise), and against TRL with
its best settings here: rows of like length together, reference log-probs precomputed (by both), no padding
where it can do without. Where the losses do not agree the ratios are void. Prints JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from offline_sides import METHODS, Task, print_to_stderr, work

from rlhf_data import (
    StoryWorldConfig,
    UserError,
    atomic_write_json,
    generate_stories,
    load_records,
)

ROOT = Path(__file__).parents[1]
HH_DATA = ROOT.parent / "shared/data/hh-rlhf/harmless-base-1500.jsonl.gz"
SHAPES: dict[str, dict[str, int]] = {
    "9M": {"hidden_size": 256, "num_layers": 8, "num_heads": 4, "intermediate_size": 768},
    "110M": {"hidden_size": 768, "num_layers": 12, "num_heads": 12, "intermediate_size": 2048},
    "tiny": {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "intermediate_size": 64},
}
VOCABULARY = {"9M": 8192, "110M": 32000, "tiny": 8192}
TOKENS = 8192
"""Size of the tokenizer that is trained on the rows; the largest model has spare embeddings."""
MAX_LOSS_DIFFERENCE = 1e-3
"""Relative difference of a step's losses above which the two sides do not do the same."""
Pair = dict[str, str]


def read_pairs(path: Path | None, count: int) -> list[Pair]:
    """Prompt, chosen and rejected completion of the first rows of a file; of made-up texts without one."""
    if path is not None:
        records = load_records(path, "preference", subset_size=count).records
        return [{"prompt": r.prompt, "chosen": r.chosen, "rejected": r.rejected} for r in records]
    rng = random.Random(0)
    texts = [story.story for story in generate_stories(StoryWorldConfig(), 16, split="train", seed=0)]

    def draw(count: int) -> str:
        return " " + " ".join(rng.choices(texts, k=count))

    return [
        {"prompt": f"Human:{draw(3)}\n\nAssistant:", "chosen": draw(1), "rejected": draw(2)}
        for _ in range(count)
    ]


def by_length(pairs: list[Pair], batch_size: int) -> list[Pair]:
    """Batches of rows of like length, in random order: what grouping by length amounts to."""
    rows = sorted(pairs, key=lambda p: len(p["prompt"]) + max(len(p["chosen"]), len(p["rejected"])))
    batches = [rows[at : at + batch_size] for at in range(0, len(rows), batch_size)]
    random.Random(0).shuffle(batches)
    return [row for batch in batches for row in batch]


def method_rows(method: str, pairs: list[Pair]) -> list[dict[str, Any]]:
    """The rows of a method. For KTO every prompt comes once, with its chosen or its rejected completion."""
    if method == "sft":
        return [{"prompt": p["prompt"], "completion": p["chosen"]} for p in pairs]
    if method == "kto":
        sides = itertools.cycle([("chosen", True), ("rejected", False)])
        return [
            {"prompt": p["prompt"], "completion": p[side], "label": label}
            for p, (side, label) in zip(pairs, sides, strict=False)
        ]
    return [dict(p) for p in pairs]


def write_models(folder: Path, shape: str, pairs: list[Pair]) -> None:
    """A random Llama, and one with a scalar head, with a tokenizer trained on the rows; needs a process."""
    print_to_stderr()
    from rlhf_models import RewardModel, build_tiny_llama, train_byte_tokenizer

    texts = (text for pair in pairs for text in pair.values())
    tokenizer: Any = train_byte_tokenizer(texts, TOKENS)
    tokenizer.bos_token = None  # TRL's CPO trainer would put it in front of every prompt, the others not
    tokenizer.split_special_tokens = False  # TRL writes the end token as text
    model = build_tiny_llama(
        VOCABULARY[shape],
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        max_positions=2048,
        **SHAPES[shape],
    )
    model.save_pretrained(folder / "policy")
    tokenizer.save_pretrained(folder / "policy")
    scorer = RewardModel.from_backbone(model, tokenizer)
    scorer.append_eos = True
    scorer.save_pretrained(folder / "reward")


def compare(ours: Task, trl: Task, steps: int) -> dict[str, Any]:
    """Train both sides, a step each in turn, and measure them."""
    context = get_context("spawn")
    pipes, processes = {}, []
    for task in (ours, trl):
        pipes[task.side], end = context.Pipe()
        process = context.Process(target=work, args=(task, end), daemon=True)
        process.start()
        end.close()
        processes.append(process)
    start = {side: pipe.recv() for side, pipe in pipes.items()}
    reports: dict[str, list[dict[str, float]]] = {side: [] for side in pipes}
    for step in range(steps):
        for side in sorted(pipes, reverse=step % 2 == 1):
            pipes[side].send("step")
            reports[side].append(pipes[side].recv())
    for pipe in pipes.values():  # neither side cleans up while the other one trains
        pipe.send("end")
    for process in processes:
        process.join(60)
    tokens = start["ours"]["tokens"]
    sides = {side: _measures(reports[side], start[side], tokens) for side in pipes}
    return {
        "method": ours.method,
        "tuning": "lora" if ours.lora else "full",
        "peer": "best" if ours.best else "default",
        "steps": steps,
        **sides,
        **_verdict(sides),
        "trl_config": start["trl"]["config"],
    }


def _measures(reports: list[dict[str, float]], start: dict[str, Any], tokens: list[int]) -> dict[str, Any]:
    seconds = [report["seconds"] for report in reports]
    return {
        "seconds_per_step": statistics.median(seconds),
        "seconds": seconds,
        "tokens_per_second": sum(tokens) / sum(seconds),
        "peak_memory_mb": reports[-1]["memory_mb"],
        "memory_before_training_mb": start["memory_mb"],
        "losses": [report["loss"] for report in reports],
    }


def _verdict(sides: dict[str, Any]) -> dict[str, Any]:
    """Ratios TRL / ours of time and memory; None where the losses do not agree."""
    ours, trl = sides["ours"], sides["trl"]
    losses = zip(ours["losses"], trl["losses"], strict=True)
    difference = max(abs(a - b) / abs(b) for a, b in losses)
    same = difference <= MAX_LOSS_DIFFERENCE
    each = [b / a for a, b in zip(ours["seconds"], trl["seconds"], strict=True)]
    return {
        "max_relative_loss_difference": difference,
        "losses_agree": same,
        "speedup": statistics.median(each) if same else None,
        "speedup_of_all_steps": sum(trl["seconds"]) / sum(ours["seconds"]) if same else None,
        "memory_share": ours["peak_memory_mb"] / trl["peak_memory_mb"] if same else None,
    }


def comparisons(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """All comparisons that were asked for."""
    pairs = read_pairs(options.data, options.steps * options.batch_size)
    orders = {"default": pairs, "best": by_length(pairs, options.batch_size)}
    for shape in options.shapes:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            writer = get_context("spawn").Process(target=write_models, args=(folder, shape, pairs))
            writer.start()
            writer.join()
            if writer.exitcode:
                raise UserError(f"the {shape} model could not be made; see the messages above")
            for tuning, method, peer in itertools.product(options.tunings, options.methods, options.peers):
                rows = folder / f"{method}-{peer}-{tuning}.jsonl"
                lines = (json.dumps(row) for row in method_rows(method, orders[peer]))
                rows.write_text("\n".join(lines), encoding="utf-8")
                ours, trl = (
                    Task(
                        side=side,
                        method=method,
                        lora=tuning == "lora",
                        best=peer == "best",
                        model=str(folder / ("reward" if method == "reward" else "policy")),
                        rows=str(rows),
                        batch_size=options.batch_size,
                        threads=options.threads,
                        max_tokens_per_batch=options.max_tokens_per_batch,
                    )
                    for side in ("ours", "trl")
                )
                yield {"shape": shape} | compare(ours, trl, options.steps)


def merge(old: dict[str, Any], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The old comparisons, those measured again replaced, in a fixed order."""
    rows = {_key(row): row for row in [*old.get("comparisons", []), *new]}
    return [rows[key] for key in sorted(rows)]


def _key(row: dict[str, Any]) -> tuple[int, ...]:
    orders = (list(SHAPES), ["full", "lora"], list(METHODS), ["default", "best"])
    return tuple(o.index(row[k]) for o, k in zip(orders, ("shape", "tuning", "method", "peer"), strict=True))


def table(rows: list[dict[str, Any]]) -> str:
    """The results as a Markdown table."""
    head = "| model | training | method | TRL | s per step | tokens/s | faster | peak MB | memory |"
    lines = [head, "|---|---|---|---|---|---|---|---|---|"]
    for row in rows:
        ours, trl = row["ours"], row["trl"]
        ratios = ["void", "void"]
        if row["losses_agree"]:
            ratios = [f"**{row['speedup_of_all_steps']:.1f}x**", f"{row['memory_share']:.2f}x"]
        cells = [
            *(row["shape"], row["tuning"], row["method"], row["peer"]),
            f"{ours['seconds_per_step']:.2f} / {trl['seconds_per_step']:.2f}",
            f"{ours['tokens_per_second']:.0f} / {trl['tokens_per_second']:.0f}",
            ratios[0],
            f"{ours['peak_memory_mb']:.0f} / {trl['peak_memory_mb']:.0f}",
            ratios[1],
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def describe() -> dict[str, Any]:
    """Where figures come from: the commit (`-dirty`: with changes beside it), the machine, the versions."""
    packages = ("torch", "transformers", "trl", "peft", "accelerate")
    info = Path("/proc/cpuinfo")
    names = [line for line in info.read_text().splitlines() if "model name" in line] if info.exists() else []
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    commit = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return {
        "commit": commit.stdout.strip() or None,
        "cpu": names[0].partition(": ")[2] if names else platform.processor(),
        "cpus": os.cpu_count(),
        "versions": {"python": platform.python_version()} | {name: version(name) for name in packages},
    }


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["9M"])
    parser.add_argument("--tunings", nargs="+", choices=["full", "lora"], default=["full", "lora"])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--peers", nargs="+", choices=["default", "best"], default=["default", "best"])
    parser.add_argument("--steps", type=int, default=12, help="optimizer steps (default %(default)s)")
    parser.add_argument("--batch-size", type=int, default=8, help="rows in a step (default %(default)s)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="torch threads (%(default)s)")
    parser.add_argument(
        "--max-tokens-per-batch", type=int, default=1024, help="our token budget (default %(default)s)"
    )
    parser.add_argument("--data", type=Path, default=HH_DATA, help="preference pairs (default %(default)s)")
    parser.add_argument("--synthetic", action="store_true", help="made-up texts in place of --data")
    parser.add_argument("--output", type=Path, help="merge the JSON into this file too")
    options = parser.parse_args(arguments)
    if options.synthetic:
        options.data = None
    return options


def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    options = parse(arguments)
    new: list[dict[str, Any]] = []
    head = {"benchmark": "offline_vs_trl", "data": "hh-rlhf" if options.data else "synthetic"}
    head |= {"batch_size": options.batch_size, "threads": options.threads}
    head |= {"max_tokens_per_batch": options.max_tokens_per_batch, **describe()}
    try:
        for row in comparisons(options):
            print(json.dumps(row, indent=2), flush=True)
            new.append(row)
            if options.output:
                old = json.loads(options.output.read_text()) if options.output.exists() else {}
                atomic_write_json(options.output, head | {"comparisons": merge(old, new)})
    except (UserError, EOFError) as error:
        message = str(error) or "a side's process stopped; see the messages above"
        sys.exit(f"error: {message}")
    print(table(new), file=sys.stderr)


if __name__ == "__main__":
    main()
