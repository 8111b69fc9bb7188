"""Peak memory of merging models of 0.2, 1 and 2 billion parameters under one bound.

For each size a base and two fine-tunes are made (bfloat16; 16 GB with the result for the largest, removed
before the next), and `rlhf-merge run` merges them with TIES and linear. Prints JSON. Without --python a venv
with the CPU build of torch is made, by uv.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from merge_models import SHAPES, parameter_count
from merge_process import CommandFailed, machine, make_environment, measure, run_json, versions

from rlhf_data import atomic_write_json

HERE = Path(__file__).parent
METHODS = ("ties", "linear")
MODELS = ("ft0", "ft1")


def config_of(method: str, models: Path) -> dict[str, Any]:
    """A config of our own schema."""
    each = {"weight": 0.5, **({"density": 0.5} if method == "ties" else {})}
    base = {"base": str(models / "base")} if method == "ties" else {}
    entries = [{"model": str(models / name), **each} for name in MODELS]
    return {"method": method, "models": entries, **base}


def measure_size(python: Path, shape: str, max_memory_mb: int, folder: Path) -> list[dict[str, Any]]:
    """Make models of a size, merge them, remove them.

    Raises:
        CommandFailed: the disk is too small, or a merge failed.
    """
    parameters = parameter_count(shape)
    needed = 2 * parameters * (len(MODELS) + 2)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise CommandFailed(f"{shape} needs {needed / 1e9:.1f} GB and {folder} has {free / 1e9:.1f} GB free")
    models, out, config = folder / "models", folder / "merged", folder / "config.yaml"
    make = [str(python), str(HERE / "merge_models.py"), str(models), "--shape", shape]
    rows = []
    try:
        run_json([*make, "--fine-tunes", str(len(MODELS))])
        for method in METHODS:
            config.write_text(json.dumps(config_of(method, models), indent=2))  # JSON is YAML too
            command = [str(python.parent / "rlhf-merge"), "run", str(config), str(out)]
            found = measure([*command, "--max-memory", f"{max_memory_mb}MB"], folder / "log.txt")
            rows.append({"shape": shape, "parameters": parameters, "method": method, **found})
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
            shutil.rmtree(out)
    finally:
        shutil.rmtree(models, ignore_errors=True)
        shutil.rmtree(out, ignore_errors=True)
    return rows


def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Everything; see benchmarks/README.md for the result's keys."""
    python = (options.python or make_environment(folder / "ours", "ours")).absolute()
    rows = [
        row for shape in options.shapes for row in measure_size(python, shape, options.max_memory_mb, folder)
    ]
    peaks = {method: [r["peak_rss_mb"] for r in rows if r["method"] == method] for method in METHODS}
    return {
        "benchmark": "merge_memory",
        "max_memory_mb": options.max_memory_mb,
        **machine(),
        "versions": versions(python, ("torch", "numpy", "rlhf-merge")),
        "merges": rows,
        "within_bound": all(row["peak_rss_mb"] <= options.max_memory_mb for row in rows),
        "largest_over_smallest_peak": {method: max(peak) / min(peak) for method, peak in peaks.items()},
    }


def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", type=Path, help="of a venv with rlhf-merge and a CPU build of torch")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["220M", "1B", "2B"])
    parser.add_argument("--max-memory-mb", type=int, default=500, help="of a merge (default %(default)s)")
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
