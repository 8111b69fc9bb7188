"""Rows lost and repeated when a shuffled stream is killed and resumed twice: `datasets` and this package.

    uv run benchmarks/resume_rows.py --output benchmarks/results/resume_rows.json

Writes numbered rows as 8 shards of JSON lines. Each process of a run writes the rows of every step and the
state from which to resume, and is killed (SIGKILL) after a step; the next processes resume from the states
written last. `datasets` is used as its documentation recommends: `shuffle`, `split_dataset_by_node`,
`state_dict` after a step, `load_state_dict` on a fresh data set; with two processes throughout, since a state
belongs to one process. This package runs with two processes throughout, and with one, then three, then two.
Prints JSON: rows lost and repeated in an epoch, and the share of steps with the same rows as in a run without
a stop. Takes about a minute.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Iterator
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

import datasets
from datasets.distributed import split_dataset_by_node

from rlhf_data import StreamingSFTDataset
from rlhf_models import train_byte_tokenizer

SHARDS = 8
_FORK = multiprocessing.get_context("fork")
STEP = 24
"""Rows of a step over all processes: a multiple of 1, 2 and 3."""
SEED = 0
STOPS = ((0.05, 0.5), (0.2, 0.4), (0.6, 0.9))
"""Where a run is killed, in parts of the epoch's steps."""
Step = tuple[list[int], Any]
"""Rows of a step of one process, and the state after it."""


def write_rows(folder: Path, count: int) -> None:
    """Write the numbered rows."""
    folder.mkdir()
    for shard in range(SHARDS):
        rows = ({"prompt": str(number), "completion": " x"} for number in range(shard, count, SHARDS))
        (folder / f"{shard}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@functools.cache
def byte_tokenizer() -> Any:
    """A tokenizer of digits."""
    return train_byte_tokenizer(["0123456789 x"], vocab_size=300)


def ours(data: Path, rank: int, world: int, state: Any) -> Iterator[Step]:
    """Steps of a process of this package."""
    tokenizer = byte_tokenizer()
    stream = StreamingSFTDataset(data, tokenizer)
    steps = stream.steps(STEP, seed=SEED, position=state or 0, rank=rank, world_size=world, workers=1)
    for position, examples in steps:
        texts = [tokenizer.decode(example.input_ids, skip_special_tokens=True) for example in examples]
        yield [int(text.split()[0]) for text in texts], position + STEP


def of_datasets(data: Path, rank: int, world: int, state: Any, buffer: int) -> Iterator[Step]:
    """Steps of a process of `datasets`; a buffer of 0 stands for no shuffling."""
    stream = datasets.load_dataset("json", data_files=f"{data}/*.jsonl", split="train", streaming=True)
    if buffer:
        stream = stream.shuffle(seed=SEED, buffer_size=buffer)
    stream = split_dataset_by_node(stream, rank=rank, world_size=world)
    if state is not None:
        stream.load_state_dict(state)
    rows = iter(stream)
    while step := [int(row["prompt"]) for row in islice(rows, STEP // world)]:
        yield step, stream.state_dict()


def work(side: str, data: Path, rank: int, world: int, state: Any, stop: int | None, log: Path) -> None:
    """Take steps, write each to the log, and be killed after `stop` of them."""
    kind, _, buffer = side.partition(" ")
    if kind == "ours":
        steps = ours(data, rank, world, state)
    else:
        steps = of_datasets(data, rank, world, state, int(buffer))
    with open(log, "w") as file:
        for step in islice(steps, stop):
            file.write(json.dumps(step) + "\n")
    if stop is not None:
        os.kill(os.getpid(), signal.SIGKILL)


def run(side: str, data: Path, worlds: tuple[int, ...], stops: list[int], folder: Path) -> list[list[int]]:
    """Rows of every step, of runs of these numbers of processes, each killed but the last."""
    steps: list[list[int]] = []
    states: list[Any] = []
    for world, stop in zip(worlds, [*stops, None], strict=True):
        logs = [folder / f"{rank}.log" for rank in range(world)]
        count = None if stop is None else stop - len(steps)
        if side == "ours":  # its state is the same in every process
            states = [states[0] if states else None] * world
        started = [
            _FORK.Process(target=work, args=(side, data, rank, world, state, count, log))
            for rank, (state, log) in enumerate(zip(states or [None] * world, logs, strict=True))
        ]
        for process in started:
            process.start()
        for process in started:
            process.join()
            if process.exitcode != (0 if stop is None else -signal.SIGKILL):
                raise SystemExit(f"a process of {side} ended with {process.exitcode}")
        found = [[json.loads(line) for line in log.read_text().splitlines()] for log in logs]
        if stop is not None and not all(found):
            raise SystemExit(f"{side}: the rows ended before step {stop}; take more --rows")
        states = [lines[-1][1] for lines in found if lines]
        for parts in zip_longest(*found, fillvalue=([], None)):
            steps.append([row for rows, _ in parts for row in rows])
    return steps


def compare(side: str, worlds: tuple[int, ...], data: Path, count: int, folder: Path) -> dict[str, Any]:
    """What a side loses and repeats at each pair of stops."""
    whole = run(side, data, worlds[:1], [], folder)
    stopped = []
    for parts in STOPS:
        stops = [round(part * count / STEP) for part in parts]
        steps = run(side, data, worlds, stops, folder)
        rows = [row for step in steps for row in step]
        same = sum(sorted(a) == sorted(b) for a, b in zip(steps, whole, strict=False))
        stopped.append(
            {
                "after_steps": stops,
                "lost": count - len(set(rows)),
                "repeated": len(rows) - len(set(rows)),
                "same_steps": round(same / len(whole), 3),
            }
        )
    without = [row for step in whole for row in step]
    return {
        "processes": worlds,
        "without_a_stop": {"lost": count - len(set(without)), "repeated": len(without) - len(set(without))},
        "stopped": stopped,
        "lost_share": [round(each["lost"] / count, 3) for each in stopped],
    }


def main() -> None:
    """Write the rows, run every side, print the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=12_000)
    parser.add_argument("--output", type=Path, help="file for the JSON")
    options = parser.parse_args()
    byte_tokenizer()  # once, before processes are forked
    result: dict[str, Any] = {"datasets": datasets.__version__, "rows": options.rows, "shards": SHARDS}
    result["rows_per_step"] = STEP
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ |= {"XDG_CACHE_HOME": name, "HF_DATASETS_CACHE": name, "TOKENIZERS_PARALLELISM": "false"}
        write_rows(folder / "rows", options.rows)
        for title, side, worlds in (
            ("ours", "ours", (2, 2, 2)),
            ("ours, other numbers of processes", "ours", (1, 3, 2)),
            ("datasets, not shuffled", "datasets 0", (2, 2, 2)),
            ("datasets, buffer of 100", "datasets 100", (2, 2, 2)),
            ("datasets, buffer of 1000 (its default)", "datasets 1000", (2, 2, 2)),
        ):
            result[title] = compare(side, worlds, folder / "rows", options.rows, folder)
    text = json.dumps(result, indent=2)
    print(text)
    if options.output:
        options.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
