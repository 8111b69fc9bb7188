"""Random faults in 20-step runs on a Ray cluster, each compared byte for byte with an undisturbed run.

    uv run scripts/ray_faults.py --faults 100 --seed 0

Faults are SIGKILL, SIGTERM, SIGSEGV and SIGSTOP (a hang) of a rollout or reward worker that idles, of one
that samples or scores, and of the weights actor, SIGKILL of the driver, which is resumed with another number
of workers, and of a whole machine of the cluster (its raylet). Prints a JSON line per run, and a summary with
the median seconds from a fault to the end of the second step after it, by role: the driver's is a restart
from the last checkpoint, after which steps are trained again. Exit code 1: bytes differ, or a run ended with
an error. Ctrl-C ends it with the summary of what was done.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from ray_faults import ROLES, FaultyRuns, Recovery, assert_same, draw, lost, ray_cluster, train_server


def main() -> None:
    """Parse the options, and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--per-run", type=int, default=4, help="faults in a run of 20 steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--methods", nargs="+", default=["grpo", "ppo"])
    parser.add_argument("--roles", nargs="+", default=ROLES, choices=ROLES)
    parser.add_argument("--staleness", nargs="+", type=int, default=[0, 2])
    options = parser.parse_args()
    found: list[tuple[dict[str, Any], list[Recovery]]] = []
    with contextlib.suppress(KeyboardInterrupt):
        for row, recoveries in disturbed_runs(options):
            print(json.dumps(row), flush=True)
            found.append((row, recoveries))
    different = sum(not row["same"] for row, _ in found)
    struck = [each.fault for _, recoveries in found for each in recoveries]
    summary = {
        "runs": len(found),
        "runs_that_differ": different,
        "faults": len(struck),
        "kinds": dict(Counter(f"{fault.how} of {fault.role}" for fault in struck)),
        "recovery": recovery_by_role([each for _, recoveries in found for each in recoveries]),
    }
    print(json.dumps(summary), flush=True)
    sys.exit(1 if different else 0)


def disturbed_runs(options: argparse.Namespace) -> Iterator[tuple[dict[str, Any], list[Recovery]]]:
    """Facts of one run after the other, and of its faults, up to the number that the options give."""
    rng, done = random.Random(options.seed), 0
    with tempfile.TemporaryDirectory() as name, train_server() as server, ray_cluster() as cluster:
        wholes: dict[tuple[str, int], Path] = {}
        for number in itertools.count():
            if done >= options.faults:
                return
            method, staleness = rng.choice(options.methods), rng.choice(options.staleness)
            folder = Path(name, method)
            folder.mkdir(exist_ok=True)
            runs = FaultyRuns(server, cluster, folder, method)
            if (method, staleness) not in wholes:
                workers = 1 if staleness else 0  # for K = 0 a run without Ray
                wholes[method, staleness] = runs.whole(
                    f"whole-{staleness}", workers=workers, staleness=staleness
                )
            faults = draw(rng, options.per_run, tuple(options.roles))
            workers, started = rng.randint(1, 3), time.monotonic()
            row: dict[str, Any] = {"method": method, "staleness": staleness, "workers": workers, "same": True}
            run = folder / f"run-{number}"
            try:
                runs.disturbed(run.name, faults, workers=workers, staleness=staleness, rng=rng)
                assert_same(run, wholes[method, staleness])
            except AssertionError as error:
                row |= {"same": False, "difference": str(error)[-2000:]}
            row["faults"] = [str(each.fault) for each in runs.recoveries]
            row["recovered_s"] = [each.seconds for each in runs.recoveries]
            row |= {"seconds": round(time.monotonic() - started, 1), "lost": len(lost(run))}
            done += len(faults)
            yield row, runs.recoveries


def recovery_by_role(recoveries: list[Recovery]) -> dict[str, dict[str, float]]:
    """Median seconds to recover and mean steps that were trained again; hangs are apart."""
    found: dict[str, list[Recovery]] = {}
    for each in recoveries:
        how = "hang of " if each.fault.how == "hang" else ""
        found.setdefault(how + each.fault.role, []).append(each)
    return {
        role: {
            "faults": len(rows),
            "median_s": statistics.median(row.seconds for row in rows),
            "steps_again": statistics.fmean(row.steps_again for row in rows),
        }
        for role, rows in sorted(found.items())
    }


if __name__ == "__main__":
    main()
