"""Streaming a set that is larger than is comfortable: what of it grows with the size, and what does not.

    uv run benchmarks/streaming_scale.py --gb 10 --folder /data/tmp

Writes pairs of about 1 kB as JSON lines and the same rows as Parquet, at a tenth of the size and at the
whole. Each measurement is a process of its own, some after the files' pages were dropped from the system's
cache (where the system lets that be done). Prints JSON: seconds to index the files (`threads` count lines at
a time), to open them again, and from there to the first 256 rows; from the settings of a DPO job to its first
32 tokenised pairs, 512 held-out ones among what comes before; and memory at ten points of a whole pass, of
the rows as dicts and of short tokenised rows, in one process and in each of two at a time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

ROW_BYTES = 1000
SHARD_BYTES = 1 << 30
ROW_GROUP = 4096
BATCH = 256


def write(folder: Path, gigabytes: float) -> dict[str, Any]:
    """Write the pairs as JSON lines, and as Parquet, where they are not yet; their sizes."""
    import pyarrow.json
    import pyarrow.parquet

    rng = np.random.default_rng(0)
    words = [f"{word:x}" for word in rng.integers(0, 10**6, 5000)]
    pool = [" ".join(rng.choice(words, 53)) for _ in range(4000)]
    rows, shards = int(gigabytes * 1e9 / ROW_BYTES), max(2, round(gigabytes * 1e9 / SHARD_BYTES))
    for kind in ("jsonl", "parquet"):
        (folder / kind).mkdir(parents=True, exist_ok=True)
    for shard in range(len(list((folder / "parquet").iterdir())), shards):
        path = folder / "jsonl" / f"{shard:03}.jsonl"
        first, behind = rows * shard // shards, rows * (shard + 1) // shards
        picked = rng.integers(0, len(pool), (behind - first, 3)).tolist()
        with open(path, "w") as file:
            for number, texts in enumerate(picked, start=first):
                prompt, chosen, rejected = (pool[text] for text in texts)
                file.write(f'{{"prompt": "{number} {prompt}", "chosen": "1 {chosen}", ')
                file.write(f'"rejected": "2 {rejected}"}}\n')
        table = pyarrow.json.read_json(path)
        to = folder / "parquet" / f"{shard:03}.parquet"
        pyarrow.parquet.write_table(table, to, compression="zstd", row_group_size=ROW_GROUP)
    sizes = {f"{kind}_gb": _gigabytes(folder / kind) for kind in ("jsonl", "parquet")}
    return {"rows": rows, "shards": shards, **sizes}


def write_short(path: Path, rows: int) -> None:
    """Write short texts to tokenise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        file.writelines(f'{{"prompt": "{n}+{n % 7}=", "completion": "{n + n % 7}"}}\n' for n in range(rows))


def _gigabytes(folder: Path) -> float:
    return round(sum(path.stat().st_size for path in folder.iterdir()) / 1e9, 3)


def drop_from_cache(folder: Path) -> None:
    """Let the system forget the files' pages, where it can be asked to."""
    for path in folder.rglob("*"):
        if path.is_file() and hasattr(os, "posix_fadvise"):
            with open(path, "rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def megabytes(key: str = "VmRSS") -> float:
    """Memory of this process now, or at its peak (VmHWM)."""
    status = Path("/proc/self/status").read_text()
    return round(int(status.split(f"{key}:")[1].split()[0]) / 1024, 1)


def opening(data: Path) -> dict[str, float]:
    """Seconds to open a set, and from there to its first shuffled rows, imports aside."""
    from rlhf_data.streaming.rows import ShardedRows

    started = time.perf_counter()
    rows = ShardedRows(data)
    opened = time.perf_counter()
    rows.read(rows.order(0, seed=1)[:BATCH])
    return {"open_s": _since(started, opened), "first_256_rows_s": _since(opened)}


def job(data: Path, before: Path) -> dict[str, float]:
    """Seconds from the settings of a DPO job to its first tokenised step, after one of a few other rows."""
    import rlhf_algos.jobs.data as jobs
    from rlhf_algos import METHODS

    tokenizer, method = _tokenizer(), METHODS["dpo"]
    started = busy = 0.0
    for path in (before, data):  # the first imports and sets up what any job needs
        started, busy = time.perf_counter(), time.process_time()
        config = method.resolve({"train_data": str(path), "streaming": True, "eval_fraction": 0.1})
        rows = jobs.load_rows(method, config)
        train: Any = jobs.build_sets(method, config, rows, tokenizer, max_length=None)[0]
        next(train.steps(32, seed=1))
    busy = round(time.process_time() - busy, 3)
    return {"dpo_first_step_s": _since(started), "dpo_first_step_cpu_s": busy}


def _tokenizer() -> Any:
    from rlhf_models import train_byte_tokenizer

    return train_byte_tokenizer(["0123456789abcdef +="], vocab_size=300)


def steps(data: Path, tokenised: bool, rank: int, world_size: int) -> Iterator[int]:
    """Rows of each step of a pass, of which this process takes its share."""
    if tokenised:
        from rlhf_data import StreamingSFTDataset

        examples = StreamingSFTDataset(data, _tokenizer())
        shares = examples.steps(BATCH * world_size, seed=1, rank=rank, world_size=world_size)
        yield from (len(found) for _, found in shares)
        return
    from rlhf_data.streaming.rows import ShardedRows

    rows = ShardedRows(data)
    order = rows.order(0, seed=1)
    for start in range(rank * BATCH, len(rows), BATCH * world_size):
        yield len(rows.read(order[start : start + BATCH]))


def whole_pass(data: Path, tokenised: bool, rank: int, world_size: int, rows: int) -> dict[str, Any]:
    """Memory at ten points of a pass over `rows` rows of all processes; rows per second."""
    memory, share = list[float](), rows // world_size
    counts = steps(data, tokenised, rank, world_size)
    first = done = next(counts)
    started = time.perf_counter()
    for count in counts:
        if done >= share:
            break
        done += count
        if done >= share * (len(memory) + 1) / 10 and len(memory) < 10:
            memory.append(megabytes())
    took = time.perf_counter() - started
    return {
        "rows": done,
        "rows_per_s": round((done - first) / took),
        "mb": memory,
        "mb_peak": megabytes("VmHWM"),
    }


def _since(started: float, until: float | None = None) -> float:
    return round((until or time.perf_counter()) - started, 3)


def started(cache: Path, *arguments: Any) -> subprocess.Popen[str]:
    """Start this file in a process of its own."""
    environment = os.environ | {"XDG_CACHE_HOME": str(cache), "TOKENIZERS_PARALLELISM": "false"}
    run = [sys.executable, "-P", __file__, *map(str, arguments)]
    return subprocess.Popen(run, env=environment, stdout=subprocess.PIPE, text=True)


def result_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    """What a process printed."""
    out, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"a measurement failed with exit code {process.returncode}")
    return json.loads(out.splitlines()[-1])


def measure(data: Path, cache: Path, before: Path, rows: int) -> dict[str, Any]:
    """A set's times to open it and to its first rows, from a cold disk and warm, and its whole pass."""
    found: dict[str, Any] = {}
    for name in ("index_cold_disk", "again_cold_disk", "again"):
        if name.endswith("cold_disk"):
            drop_from_cache(data)
        found[name] = result_of(started(cache, "--open", data))
    drop_from_cache(data)
    found |= result_of(started(cache, "--job", data, "--before", before))
    return found | {"pass": passes(data, cache, rows, tokenised=False)}


def passes(data: Path, cache: Path, rows: int, *, tokenised: bool) -> dict[str, Any]:
    """A pass in one process, and in two at a time."""
    found: dict[str, Any] = {}
    for world_size in (1, 2):
        options = ["--pass", data, "--world-size", world_size, "--rows", rows, "--tokenised", int(tokenised)]
        running = [started(cache, *options, "--rank", rank) for rank in range(world_size)]
        found[f"{world_size} processes"] = [result_of(process) for process in running]
    return found


def everything(gigabytes: float, short_rows: int, pass_rows: int, folder: Path) -> dict[str, Any]:
    """Both sizes, both formats, and short tokenised rows."""
    from rlhf_data.streaming.line_index import _THREADS

    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    result: dict[str, Any] = {"commit": commit.stdout.strip(), "cores": os.cpu_count(), "threads": _THREADS}
    before = folder / "before"
    write(before, 0.0005)
    for size in (gigabytes / 10, gigabytes):
        data = folder / f"{size:g}"
        found = write(data, size)
        for kind in ("jsonl", "parquet"):
            found[kind] = measure(
                data / kind, folder / "cache", before / "jsonl", min(pass_rows, found["rows"])
            )
        result[f"{size:g} GB"] = found
        print(json.dumps(found), file=sys.stderr)
    short = folder / "short" / "short.jsonl"
    write_short(short, short_rows)
    result["tokenised"] = {"rows": short_rows} | passes(short, folder / "cache", short_rows, tokenised=True)
    return result


def main() -> None:
    """Read the options, print the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gb", type=float, default=0.2, help="gigabytes of JSON lines of the larger set")
    parser.add_argument("--short-rows", type=int, default=20_000, help="short rows that are tokenised")
    parser.add_argument("--pass-rows", type=int, default=10**12, help="rows at which a pass is cut short")
    parser.add_argument("--folder", type=Path, help="where the sets go; default the system's")
    parser.add_argument(
        "--keep", action="store_true", help="keep the sets in --folder, and take what is there"
    )
    for name in ("--open", "--job", "--before", "--pass"):
        parser.add_argument(name, type=Path, help=argparse.SUPPRESS)
    for name in ("--tokenised", "--rank", "--world-size", "--rows"):
        parser.add_argument(name, type=int, default=0, help=argparse.SUPPRESS)
    options = vars(parser.parse_args())
    if options["open"]:
        found = opening(options["open"])
    elif options["job"]:
        found = job(options["job"], options["before"])
    elif options["pass"]:
        names = ("tokenised", "rank", "world_size", "rows")
        found = whole_pass(options["pass"], *(options[name] for name in names))
    else:
        sizes = options["gb"], options["short_rows"], options["pass_rows"]
        with contextlib.ExitStack() as stack:
            folder = options["folder"]
            if not options["keep"]:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder)))
            print(json.dumps(everything(*sizes, folder), indent=2))
        return
    print(json.dumps(found))


if __name__ == "__main__":
    main()
