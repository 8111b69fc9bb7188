"""Reading shuffled rows from disk: this package beside `datasets` and MosaicML Streaming, in turn.

    uv run benchmarks/streaming.py --gb 0.2
    uv run benchmarks/streaming.py --gb 10 --mosaic-python path/to/venv/bin/python

Writes synthetic preference pairs as shards of JSON lines, Parquet and (where the given Python has MosaicML
Streaming) MDS. Each side reads shuffled rows as dicts in a process of its own, without tokenising, `--rounds`
times in turn. Prints JSON: time of the index; time from opening to the first 256 rows at a tenth of the size
and at the whole; rows per second (medians); memory at a tenth of the pass and at its end; and rows per second
of our tokenised pairs with 0, 1 and 2 threads, alone and beside a step that waits as for a GPU.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

SHARDS = 8
BATCH = 256
BUFFER = 10_000
SIDES = ("ours-jsonl", "ours-parquet", "datasets-jsonl", "datasets-parquet", "mosaic-mds")


def pairs(count: int, seed: int) -> Iterator[dict[str, str]]:
    """Pairs of about 1 kB."""
    rng = random.Random(seed)
    words = [f"{rng.randrange(10**6):x}" for _ in range(5000)]

    def text(size: int) -> str:
        return " ".join(rng.choices(words, k=size))

    pool = [text(45) for _ in range(2000)]
    for i in range(count):
        first, second, third = rng.sample(pool, k=3)
        yield {"prompt": f"{seed} {i} {first}", "chosen": second, "rejected": third}


def write(folder: Path, gigabytes: float, mosaic: str | None) -> dict[str, Any]:
    """Write the shards; their sizes."""
    from rlhf_data import write_shards

    lines = folder / "jsonl"
    lines.mkdir(parents=True)
    rows = int(gigabytes * 1e9 / SHARDS / 935)
    for shard in range(SHARDS):
        with open(lines / f"{shard:02}.jsonl", "w") as file:
            file.writelines(json.dumps(row) + "\n" for row in pairs(rows, shard))
    write_shards([lines], folder / "parquet", rows_per_shard=max(1, rows))
    if mosaic:
        subprocess.run([mosaic, "-P", __file__, "--write-mds", lines, folder / "mds"], check=True)
    size = sum(path.stat().st_size for path in lines.iterdir())
    return {"rows": rows * SHARDS, "jsonl_gb": round(size / 1e9, 3)}


def write_mds(lines: Path, folder: Path) -> None:
    """Write MosaicML's shards (in its Python)."""
    writer_of = importlib.import_module("streaming").MDSWriter  # of MosaicML, not this file
    with writer_of(out=str(folder), columns=dict.fromkeys(("prompt", "chosen", "rejected"), "str")) as writer:
        for path in sorted(lines.iterdir()):
            with open(path) as file:
                for line in file:
                    writer.write(json.loads(line))


def rows_of(side: str, data: Path) -> Iterator[Any]:
    """Shuffled rows of a side, one by one."""
    library, kind = side.split("-")
    folder = data / kind
    if library == "ours":
        from rlhf_data.streaming.rows import ShardedRows

        rows = ShardedRows(folder)
        order = rows.order(0, seed=1)
        for start in range(0, len(rows), BATCH):
            yield from (fields for _, fields in rows.read(order[start : start + BATCH]))
    elif library == "datasets":
        import datasets

        name, pattern = ("json", "*.jsonl") if kind == "jsonl" else ("parquet", "*.parquet")
        made = datasets.load_dataset(name, data_files=f"{folder}/{pattern}", split="train", streaming=True)
        yield from made.shuffle(seed=1, buffer_size=BUFFER)
    else:
        importlib.import_module("streaming.base.util").clean_stale_shared_memory()
        yield from importlib.import_module("streaming").StreamingDataset(
            local=str(folder), shuffle=True, batch_size=BATCH
        )


def megabytes() -> float:
    """Peak memory of this process so far."""
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)


def read(side: str, data: Path, count: int) -> dict[str, float]:
    """Read rows of a side; seconds to the first ones, rows per second after them, memory."""
    started = time.perf_counter()
    rows = rows_of(side, data)
    list(islice(rows, BATCH))
    first = time.perf_counter()
    number, early = 0, 0.0
    for number, _ in enumerate(islice(rows, count), start=1):
        if number == count // 10:
            early = megabytes()
    took = time.perf_counter() - first
    return {
        "first_batch_s": round(first - started, 3),
        "rows_per_s": round(number / took),
        "mb_at_tenth": early,
        "mb_at_end": megabytes(),
    }


def tokenised(data: Path, workers: int, wait: float) -> dict[str, float]:
    """Tokenised pairs a second, with a step that waits after each batch."""
    from rlhf_data import StreamingPreferenceDataset
    from rlhf_models import train_byte_tokenizer

    tokenizer = train_byte_tokenizer([row["prompt"] for row in pairs(500, 0)], vocab_size=2000)
    examples = StreamingPreferenceDataset(data / "jsonl", tokenizer)
    steps = examples.steps(32, seed=1, workers=workers)
    next(steps)
    started = time.perf_counter()
    done = sum(len(found) + 0 * (time.sleep(wait) or 0) for _, found in islice(steps, 40))
    return {"rows_per_s": round(done / (time.perf_counter() - started))}


def alone(arguments: list[Any], cache: Path, python: str = sys.executable) -> dict[str, float]:
    """Run this file in a process of its own; what it printed."""
    environment = os.environ | {"XDG_CACHE_HOME": str(cache), "TOKENIZERS_PARALLELISM": "false"}
    environment |= {"HF_DATASETS_OFFLINE": "1", "HF_DATASETS_CACHE": str(cache / "datasets")}
    # -P: else `import streaming` would find this file
    run = [python, "-P", __file__, *map(str, arguments)]
    found = subprocess.run(run, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(found.stdout.splitlines()[-1])


def index(data: Path) -> dict[str, float]:
    """Seconds to open a folder of lines and of Parquet that was never opened, and again."""
    from rlhf_data.streaming.rows import ShardedRows

    found = {}
    for kind in ("jsonl", "parquet"):
        for name in ("cold", "cached"):
            started = time.perf_counter()
            ShardedRows(data / kind)
            found[f"{kind}_{name}_s"] = round(time.perf_counter() - started, 3)
    return found


def compare(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Everything, at both sizes."""
    mosaic, cache = options.mosaic_python, folder / "cache"
    os.environ["XDG_CACHE_HOME"] = str(cache)
    result: dict[str, Any] = {
        "cores": os.cpu_count(),
        "batch": BATCH,
        "buffer_of_datasets": BUFFER,
        "rows_read": options.rows,
    }
    sides = [side for side in SIDES if mosaic or not side.startswith("mosaic")]
    for name, gigabytes in (("small", options.gb / 10), ("large", options.gb)):
        data = folder / name
        sizes = write(data, gigabytes, mosaic)
        found = {"index": alone(["--index", data], folder / f"{name}-cache")}
        count = min(options.rows, sizes["rows"] - 2 * BATCH)
        rounds: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
        for _ in range(options.rounds):
            for side in sides:
                python = mosaic if side.startswith("mosaic") else sys.executable
                rounds[side].append(alone(["--side", side, "--data", data, "--count", count], cache, python))
        for side, values in rounds.items():
            found[side] = {key: statistics.median(value[key] for value in values) for key in values[0]}
        result[name] = sizes | found
    result["tokenised"] = {
        f"{workers} threads, step waits {wait} s": alone(
            ["--workers", workers, "--wait", wait, "--data", folder / "small"], cache
        )
        for wait in (0.0, 0.1)
        for workers in (0, 1, 2)
    }
    return result


def main() -> None:
    """Read the options, print the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gb", type=float, default=0.2, help="gigabytes of JSON lines of the larger set")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=10**9, help="rows that a side reads at most")
    parser.add_argument("--mosaic-python", help="Python that has mosaicml-streaming")
    parser.add_argument("--folder", type=Path, help="where the shards go; default a temporary folder")
    for name in ("--side", "--count", "--workers", "--wait"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    for name in ("--data", "--index"):
        parser.add_argument(name, type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--write-mds", nargs=2, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.write_mds:
        write_mds(*options.write_mds)
    elif options.index:
        print(json.dumps(index(options.index)))
    elif options.side:
        print(json.dumps(read(options.side, options.data, int(options.count))))
    elif options.workers:
        print(json.dumps(tokenised(options.data, int(options.workers), float(options.wait))))
    else:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            print(json.dumps(compare(options, Path(folder)), indent=2))


if __name__ == "__main__":
    main()
