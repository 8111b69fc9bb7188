"""Writes the tables of docs/benchmarks.md and the README from the committed results.

A table stands between the lines `<!-- name -->` and `<!-- end -->`; `TABLES` says for each name which file of
benchmarks/results it is made of, and how. `--check` writes nothing, names the tables that would change, and
exits with 1 if there are any.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import grpo_vs_trl
import offline_vs_trl
import online_compare
import ppo_vs_trl

from rlhf_data import UserError, atomic_write_text

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (ROOT / "docs" / "benchmarks.md", ROOT / "README.md")
MERGES = {
    "ties": "TIES",
    "dare_ties": "DARE-TIES",
    "task_arithmetic": "task arithmetic",
    "linear": "linear",
    "slerp": "SLERP (two models)",
}
PARITY = {
    "linear": "linear",
    "slerp": "SLERP",
    "task_arithmetic": "task arithmetic",
    "ties": "TIES",
    "breadcrumbs": "breadcrumbs",
    "model_stock": "model stock",
    "nearswap": "NearSwap",
    "karcher": "spherical mean",
}
Result = Any
"""What a file of results holds."""
END = "<!-- end -->"


def markdown(head: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    first, *others = ("|" + "".join(f" {cell} |" if cell else " |" for cell in row) for row in (head, *rows))
    return "\n".join([first, "|---" * len(head) + "|", *others])


def roofline(result: Result) -> str:
    """The speed of a DPO step beside that of its matrix products."""
    speeds = {
        "the step, counting only matrix products": result["step_gflops_per_second"],
        "its products alone, each with the faster library": result["matmul_gflops_per_second"],
        "its products alone, with `torch.mm`": result["torch_mm_gflops_per_second"],
    }
    share = f"**{result['share']:.0%}** ({result['share_of_torch_mm']:.0%} of `torch.mm`)"
    rows = [(name, f"{speed:.0f} GFLOP/s") for name, speed in speeds.items()]
    return markdown(["", ""], [*rows, ("share of the limit", share)])


def minmax_speed(result: Result) -> str:
    """An iteration of the game and its parts, ours and padded."""
    ours, padded = result["seconds"]["ours"], result["seconds"]["padded"]

    def row(name: str, a: float, b: float, ratio: float, digits: int = 2) -> list[str]:
        return [name, f"{a:.{digits}f} / {b:.{digits}f}", f"{ratio:.1f}x"]

    rows = [
        row("an iteration, s", ours["median"], padded["median"], result["speedup"]),
        row("processor time, s", ours["cpu_median"], padded["cpu_median"], result["cpu_speedup"], 1),
    ]
    rows[0][-1] = f"**{rows[0][-1]}**"
    names = {
        "answers": "answers",
        "critiques": "critiques",
        "scoring": "scores of reward model and judge",
        "monitor updates": "5 updates of the monitor",
        "policy update": "1 update of the policy",
    }
    for part, name in names.items():
        rows.append(row(name, ours["parts"][part], padded["parts"][part], result["speedup_of_parts"][part]))
    return markdown(["", "ours / padded", "faster"], rows)


def minmax_memory(result: Result) -> str:
    """The game's memory beside that of the padded game and of PPO."""
    names = {
        "players": ("both players and their references", "without a reward model"),
        "players and scorers": ("also reward model and judge, as models", "with its reward model"),
        "scorers on the backbone": (
            "also both, as adapters on the players' backbone",
            "without a reward model",
        ),
    }
    rows = []
    for key, (name, ppo) in names.items():
        found = result["peak_memory_mb"][key]
        share = f"{found['ours_of_padded']:.2f}x"
        share = share if rows else f"**{share}**"
        rows.append((name, f"{found['ours']:,.0f}", share, f"{found['ours_of_ppo']:.2f}x, {ppo}"))
    return markdown(["loaded", "ours, MB", "relative to the padded game", "relative to PPO"], rows)


def serve(result: Result) -> str:
    """The server on each engine, beside the engine alone."""
    columns = [_served(each) for each in result["backends"]]
    rows = [(name, *(column[name] for column in columns)) for name in columns[0]]
    return markdown(["", *(each["backend"] for each in result["backends"])], rows)


def _served(found: dict[str, Any]) -> dict[str, str]:
    through, over, soak = found["throughput"], found["overhead"], found["soak"]
    queue, engine = found["overload"], found.get("asynchronous_engine")
    first, median, last = (f"{each:.0f}".replace("-", "−") for each in over["overhead_quartiles_ms"])
    answered = soak["statuses"].get("200", 0)
    crowd, flood = f"{soak['clients']} clients for a minute", f"{queue['requests']} requests at once"
    flood = f"{flood} on a queue of {queue['queue']}: served / refused with 429"
    memory = soak["memory_mb"]
    served, refused = (queue["statuses"].get(status, 0) for status in ("200", "429"))
    return {
        "requests a second": f"{through['requests_per_second']:.1f}",
        "generating and scoring alone, one after the other": f"{through['alone_requests_per_second']:.1f}",
        "share": f"**{through['share_of_alone']:.2f}**",
        "share of vLLM's asynchronous engine, alone, of the synchronous one": (
            f"{engine['share_of_synchronous']:.2f}" if engine else ""
        ),
        "one unscored completion: through HTTP / engine alone, ms": (
            f"{over['request_ms']:.0f} / {over['engine_ms']:.0f}"
        ),
        "difference of neighbours: median (quartiles), ms": f"{median} ({first}, {last})",
        "of it vLLM's asynchronous engine, alone, ms": f"{engine['over_ms']:.0f}" if engine else "",
        "of it outside of generation, ms": f"{over['outside_generation_ms']:.1f}",
        f"{crowd}: answered, errors": f"{answered}, {soak['requests'] - answered}",
        "p50 / p99, s": f"{soak['p50_seconds']:.1f} / {soak['p99_seconds']:.1f}",
        "memory of its processes after 3 s / at the end, MB": f"{memory[1]} / {memory[-1]}",
        flood: f"{served} / {refused}",
    }


def merge_vs_mergekit(result: Result) -> str:
    """Merges, ours and mergekit's in each of its ways."""
    rows = []
    for found in result["methods"]:
        ours = found["ours"]
        for way, theirs in found["mergekit"].items():
            ratios = ["void"] * 3
            if theirs["agree"]:
                shares = (theirs["peak_rss_mb_share"], theirs["peak_anonymous_mb_share"])
                ratios = [f"**{theirs['speedup']:.1f}x**", *(f"{share:.2f}x" for share in shares)]
            seconds = f"{ours['seconds']:.1f} / {theirs['seconds']:.1f}"
            peaks = f"{ours['peak_rss_mb']:.0f} / {theirs['peak_rss_mb']:.0f}"
            rows.append((MERGES[found["method"]], way, seconds, ratios[0], peaks, *ratios[1:]))
    return markdown(["method", "mergekit", "s", "faster", "peak MB", "memory", "without files"], rows)


def merge_copy(result: Result) -> str:
    """Imports of both sides, and linear beside a copy."""
    imports, share = result["import_seconds"], result["linear_against_copy"]["share_of_copy_speed"]
    rows = [
        ("imports, s: ours / mergekit's", f"{imports['ours']:.1f} / {imports['mergekit']:.1f}"),
        (
            "share of the copy's speed after the imports, both flushed to disk",
            f"**{share['in_process']:.0%}**",
        ),
        ("without flushing", f"{share['in_process_unsynced']:.0%}"),
        ("as a whole process", f"{share['whole_process']:.0%}"),
    ]
    return markdown(["", ""], rows)


def merge_parity(result: Result) -> str:
    """Errors of merges in bfloat16, ours and mergekit's."""
    rows = []
    for method, name in PARITY.items():
        found = result[f"bfloat16: {method}"]
        left_out = f" ({found['left_out']:.0%} left out)" if found["left_out"] else ""
        sides = (
            " / ".join(f"{e:.1e}".replace("e-0", "e-") for e in found[side]) for side in ("ours", "theirs")
        )
        rows.append((name + left_out, *sides))
    return markdown(["bfloat16, error against float64", "ours", "mergekit"], rows)


def merge_memory(result: Result) -> str:
    """Peaks of merges over the size of the models."""
    sizes: dict[str, dict[str, str]] = {}
    for row in result["merges"]:
        name = f"{row['parameters'] / 1e9:.2f}B"
        sizes.setdefault(name, {})[row["method"]] = f"{row['peak_rss_mb']:.0f}"
    rows = [(size, peaks["ties"], peaks["linear"]) for size, peaks in sizes.items()]
    return markdown(["parameters", "TIES, peak MB", "linear, peak MB"], rows)


def startup(result: Result) -> str:
    """Seconds of each command."""
    rows = [(f"`{name}`", f"{each['median_seconds']:.2f}") for name, each in result["commands"].items()]
    return markdown(["command", "s"], rows)


def trl_in_short(result: Result) -> str:
    """The README's table: the 9M model, full training."""
    methods = {"dpo": "DPO", "simpo": "SimPO", "kto": "KTO", "sft": "SFT", "reward": "reward model"}
    found = {
        (row["method"], row["peer"]): row
        for row in result["comparisons"]
        if row["shape"] == "9M" and row["tuning"] == "full"
    }

    def cells(peer: str, key: str, digits: int) -> list[str]:
        values = [found[method, peer][key] for method in methods]
        return ["void" if value is None else f"{value:.{digits}f}x" for value in values]

    rows = [
        ["faster than TRL with default settings", *cells("default", "speedup_of_all_steps", 1)],
        ["faster than TRL's best settings", *cells("best", "speedup_of_all_steps", 1)],
        ["memory relative to TRL with default settings", *cells("default", "memory_share", 2)],
    ]
    return markdown(["", *methods.values()], rows)


def _grpo(result: Result) -> str:
    rows = [row for row in result["comparisons"] if row["prompts"] == "hh"]
    return online_compare.table(rows, grpo_vs_trl.COLUMNS)


TABLES: dict[str, tuple[str, Callable[[Result], str]]] = {
    "offline_vs_trl": ("offline_vs_trl", lambda result: offline_vs_trl.table(result["comparisons"])),
    "trl_in_short": ("offline_vs_trl", trl_in_short),
    "roofline": ("roofline", roofline),
    "grpo_vs_trl": ("grpo_vs_trl", _grpo),
    "ppo_vs_trl": (
        "ppo_vs_trl",
        lambda result: online_compare.table(result["comparisons"], ppo_vs_trl.COLUMNS),
    ),
    "minmax_speed": ("minmax_speed", minmax_speed),
    "minmax_memory": ("minmax_speed", minmax_memory),
    "serve": ("serve", serve),
    "merge_vs_mergekit": ("merge_vs_mergekit", merge_vs_mergekit),
    "merge_equal_matrices": ("merge_vs_mergekit_218M", merge_vs_mergekit),
    "merge_copy": ("merge_vs_mergekit", merge_copy),
    "merge_parity": ("merge_parity", merge_parity),
    "merge_memory": ("merge_memory", merge_memory),
    "startup": ("startup", startup),
}
"""The tables by the names of their marks: the file of results, and what makes the table of it."""


def fill(text: str, name: str, table: str) -> str:
    """A page's text with a table put between its lines `<!-- name -->` and `<!-- end -->`.

    Raises:
        UserError: the text has no such lines.
    """
    start = f"<!-- {name} -->"
    before, found, rest = text.partition(start)
    old, ended, after = rest.partition(END)
    if not (found and ended) or "<!--" in old:
        raise UserError(f"the markers {start} and {END} are missing")
    return f"{before}{start}\n\n{table}\n\n{END}{after}"


def marks(text: str) -> list[str]:
    """Names of a page's tables, in its order."""
    lines = [line for line in text.splitlines() if line.startswith("<!-- ")]
    names = [line.removeprefix("<!-- ").removesuffix(" -->") for line in lines]
    return [name for name in names if name != "end"]


def renew(text: str, results: Path = RESULTS) -> tuple[str, list[str]]:
    """A page's text with all its tables made anew, and the names of those that changed.

    Raises:
        UserError: nothing makes a table of a page.
    """
    changed = []
    for name in marks(text):
        if name not in TABLES:
            raise UserError(f"nothing makes the table {name!r}; there are {', '.join(TABLES)}")
        file, make = TABLES[name]
        new = fill(text, name, make(json.loads((results / f"{file}.json").read_text(encoding="utf-8"))))
        if new != text:
            changed.append(name)
        text = new
    return text, changed


def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a table is old")
    options = parser.parse_args(arguments)
    stale = False
    for page in PAGES:
        try:
            text, changed = renew(page.read_text(encoding="utf-8"))
        except UserError as error:
            sys.exit(f"error: {page.relative_to(ROOT)}: {error}")
        if changed and not options.check:
            atomic_write_text(page, text)
        if changed:
            word = "would change" if options.check else "written"
            print(f"{page.relative_to(ROOT)}: {word}: {', '.join(changed)}")
        stale = stale or bool(changed)
    if options.check and stale:
        sys.exit(1)


if __name__ == "__main__":
    main()
