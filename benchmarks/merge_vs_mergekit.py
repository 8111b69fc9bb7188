"""Merging with `rlhf-merge run` and with mergekit's `mergekit-yaml`: time and memory of whole processes.

A base and three fine-tunes are made (220 million parameters, bfloat16), and each method is merged by ours, by
mergekit with default options (`default`) and by mergekit with the options that could lower its memory
(`low memory`, see `WAYS`): a process each, in turn, from the same config, with the threads that they take by
themselves and the models in the page cache. After each round mergekit's results are compared with ours; where
they do not agree the ratios are left out. Then linear against a plain copy of the same bytes. Prints JSON.

Both sides have a venv of their own with the same CPU build of torch. Without --ours and --mergekit the venvs
are made, by uv. Ours waits until its result is on the disk, mergekit does not: `speedup_with_sync` adds to
mergekit's time what it takes to force its result there.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from merge_models import SHAPES, parameter_count
from merge_process import (
    CommandFailed,
    machine,
    make_environment,
    measure,
    read_through,
    run_json,
    versions,
)

from rlhf_data import atomic_write_json

HERE = Path(__file__).parent
WEIGHTS = (0.5, 0.3, 0.2)
METHODS = ("ties", "dare_ties", "task_arithmetic", "linear", "slerp")
WAYS: dict[str, list[str]] = {"default": [], "low memory": ["--lazy-unpickle", "--out-shard-size", "20M"]}
"""Flags of mergekit's command. Its others about memory are for GPUs. `--lazy-unpickle` changes only how
`pytorch_model.bin` is read, which these models are not; a result in small files is not held until the end."""
IMPORTS = {"ours": "rlhf_merge.cli.commands", "mergekit": "mergekit.scripts.run_yaml"}
"""What each command imports before it can merge."""

AGREE: dict[str, Callable[[dict[str, Any]], bool]] = {
    # Both compute in float32 and round once. Sums half way between two numbers of bfloat16, which are many,
    # go either way; sums that cancel to nearly nothing may be many of their own tiny spacings apart.
    "linear": lambda found: found["differing"] < 0.02 and found["over_one_ulp"] < 1e-4,
    "slerp": lambda found: found["differing"] < 0.02 and found["over_one_ulp"] < 1e-4,
    # mergekit computes in bfloat16: its rounding is a few percent of these small changes.
    "task_arithmetic": lambda found: found["relative"] < 0.1,
    "ties": lambda found: found["over_one_ulp"] < 0.1,
    "dare_ties": lambda found: _close(found["changed"], 0.01) and _close(found["mean_change"], 0.02),
}
"""Whether two merges did the same, by what `merge_inside.compare` found."""


@dataclass(frozen=True)
class Bench:
    """Where everything is.

    Args:
        folder: for models and results.
        pythons: of the two sides.
    """

    folder: Path
    pythons: dict[str, Path]

    def model(self, name: str) -> Path:
        """Folder of a model."""
        return self.folder / "models" / name

    def command(self, who: str, config: Path, out: Path) -> list[str]:
        """The command that merges: ours, or mergekit's in one of its `WAYS`."""
        if who == "ours":
            return [str(self.pythons["ours"].parent / "rlhf-merge"), "run", str(config), str(out)]
        return [str(self.pythons["mergekit"].parent / "mergekit-yaml"), str(config), str(out), *WAYS[who]]

    def inside(self, side: str, *arguments: Any) -> Any:
        """What `merge_inside.py` prints, under the Python of a side."""
        return run_json([str(self.pythons[side]), str(HERE / "merge_inside.py"), *map(str, arguments)])


def config_of(bench: Bench, method: str) -> dict[str, Any]:
    """A config of mergekit's schema, which both read."""
    if method == "slerp":
        first, second = str(bench.model("ft0")), str(bench.model("ft1"))
        models: list[dict[str, Any]] = [{"model": first}, {"model": second}]
        fields: dict[str, Any] = {"base_model": first, "parameters": {"t": 0.4}}
    else:
        density = {"density": 0.5} if method in ("ties", "dare_ties") else {}
        models = [
            {"model": str(bench.model(f"ft{i}")), "parameters": {"weight": weight, **density}}
            for i, weight in enumerate(WEIGHTS)
        ]
        fields = {} if method == "linear" else {"base_model": str(bench.model("base"))}
    return {"merge_method": method, "models": models, "dtype": "bfloat16", **fields}


def compare_method(bench: Bench, method: str, rounds: int) -> dict[str, Any]:
    """Merge by all, in turn, and compare mergekit's results with ours."""
    config = bench.folder / f"{method}.yaml"
    config.write_text(json.dumps(config_of(bench, method), indent=2))  # JSON is YAML too
    reference = bench.model("ft0" if method in ("linear", "slerp") else "base")
    runs: dict[str, list[dict[str, float]]] = {who: [] for who in ("ours", *WAYS)}
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for turn in range(rounds):
        order = list(runs)
        for who in order[turn % len(order) :] + order[: turn % len(order)]:  # who begins takes turns too
            runs[who].append(_merge_once(bench, who, config))
        for way in WAYS:
            results = (bench.folder / "ours", bench.folder / way)
            found[way].append(bench.inside("mergekit", "compare", *results, reference))
        for who in runs:
            shutil.rmtree(bench.folder / who)
    row: dict[str, Any] = {"method": method, "ours": _medians(runs["ours"]), "mergekit": {}}
    for way in WAYS:
        agree = all(AGREE[method](one) for one in found[way])
        ratios = _ratios(runs["ours"], runs[way]) if agree else {}
        own = _medians(runs[way])
        row["mergekit"][way] = {**own, "agree": agree, "differences": found[way][0], **ratios}
    return row


def _merge_once(bench: Bench, who: str, config: Path) -> dict[str, float]:
    out = bench.folder / who
    os.sync()  # what was written before must not be written during the merge
    result = measure(bench.command(who, config, out), bench.folder / f"{who}.log")
    started = time.perf_counter()
    for path in out.iterdir():
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
    return result | {"sync_seconds": time.perf_counter() - started}


def _medians(runs: list[dict[str, float]]) -> dict[str, Any]:
    medians = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
    return medians | {"all_seconds": [run["seconds"] for run in runs]}


def _ratios(own: list[dict[str, float]], peer: list[dict[str, float]]) -> dict[str, float]:
    """Medians of the rounds' ratios: mergekit's time over ours, our memory over mergekit's."""
    pairs = list(zip(own, peer, strict=True))
    synced = [_with_sync(theirs) / _with_sync(ours) for ours, theirs in pairs]
    return {
        "speedup": statistics.median(theirs["seconds"] / ours["seconds"] for ours, theirs in pairs),
        "speedup_with_sync": statistics.median(synced),
        **{
            f"{kind}_share": statistics.median(ours[kind] / theirs[kind] for ours, theirs in pairs)
            for kind in ("peak_rss_mb", "peak_anonymous_mb")
            if all(theirs[kind] for _, theirs in pairs)
        },
    }


def _with_sync(run: dict[str, float]) -> float:
    return run["seconds"] + run["sync_seconds"]


def _close(pair: list[float], bound: float) -> bool:
    return abs(pair[0] - pair[1]) <= bound * pair[1]


def import_seconds(bench: Bench, rounds: int) -> dict[str, float]:
    """Time of a process that imports what a side's command imports; the first one is not counted."""
    log = bench.folder / "import.log"
    found = {}
    for side, module in IMPORTS.items():
        command = [str(bench.pythons[side]), "-c", f"import {module}"]
        runs = [measure(command, log) for _ in range(rounds + 1)]
        found[side] = statistics.median(run["seconds"] for run in runs[1:])
    return found


def against_copy(bench: Bench, linear: dict[str, Any] | None, rounds: int) -> dict[str, Any]:
    """Linear as a share of the speed of a plain copy, in a running process and as a whole process."""
    config = bench.folder / "linear.yaml"
    config.write_text(json.dumps(config_of(bench, "linear"), indent=2))
    models = [bench.model(f"ft{i}") for i in range(len(WEIGHTS))]
    found = bench.inside("ours", "copy", config, bench.folder, *models, "--rounds", rounds)
    medians = {name: statistics.median(seconds) for name, seconds in found["seconds"].items()}
    shares = {"in_process": medians["copy"] / medians["merge"]}
    shares["in_process_unsynced"] = medians["copy_unsynced"] / medians["merge_unsynced"]
    if linear is not None:
        shares["whole_process"] = medians["copy"] / linear["ours"]["seconds"]
    return {"share_of_copy_speed": shares, "median_seconds": medians, **found}


def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Everything; see benchmarks/README.md for the result's keys."""
    given = {"ours": options.ours, "mergekit": options.mergekit}
    pythons = {side: python or make_environment(folder / side, side) for side, python in given.items()}
    bench = Bench(folder / "work", {side: python.absolute() for side, python in pythons.items()})
    bench.folder.mkdir()
    make = [str(bench.pythons["ours"]), str(HERE / "merge_models.py"), str(bench.folder / "models")]
    run_json([*make, "--shape", options.shape, "--fine-tunes", str(len(WEIGHTS))])
    for path in (bench.folder / "models").rglob("*.safetensors"):
        read_through(path)
    packages = {"ours": ("rlhf-merge",), "mergekit": ("mergekit", "transformers", "safetensors")}
    common = ("torch", "numpy")
    result: dict[str, Any] = {
        "benchmark": "merge_vs_mergekit",
        "parameters": parameter_count(options.shape),
        "rounds": options.rounds,
        "flags": WAYS,
        **machine(),
        "versions": {side: versions(bench.pythons[side], (*common, *packages[side])) for side in packages},
        "import_seconds": import_seconds(bench, options.rounds),
        "methods": [],
    }
    for method in options.methods:
        result["methods"].append(compare_method(bench, method, options.rounds))
        print(json.dumps(result["methods"][-1], indent=2), file=sys.stderr, flush=True)
    linear = next((row for row in result["methods"] if row["method"] == "linear"), None)
    result["linear_against_copy"] = against_copy(bench, linear, options.rounds)
    return result


def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ours", type=Path, metavar="PYTHON", help="of a venv with rlhf-merge")
    parser.add_argument("--mergekit", type=Path, metavar="PYTHON", help="of a venv with mergekit")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--rounds", type=int, default=3, help="merges of each (default %(default)s)")
    parser.add_argument("--shape", choices=SHAPES, default="220M")
    parser.add_argument("--folder", type=Path, help="for models and results (default: a temporary one)")
    parser.add_argument("--output", type=Path, help="write the JSON to this file too")
    options = parser.parse_args(arguments)
    try:
        with tempfile.TemporaryDirectory(dir=options.folder) as name:
            result = run(options, Path(name))
    except CommandFailed as error:
        sys.exit(f"error: {error}")
    if options.output:
        atomic_write_json(options.output, result)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
