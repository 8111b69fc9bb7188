"""Random faults in 20-step runs on a Ray cluster, each compared byte for byte with an undisturbed run.

    uv run scripts/ray_faults.py --faults 100 --seed 0

Faults are SIGKILL, SIGTERM, SIGSEGV and SIGSTOP (a hang) of a worker that idles, of one that samples and of
the weights actor, SIGKILL of the driver, which is resumed with another number of workers, and of a whole
machine of the cluster (its raylet). Prints a JSON line per run, and a summary. Exit code 1: bytes differ.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from ray_faults import FaultyRuns, assert_same, draw, lost, ray_cluster, train_server

_ROLES = ("idle worker", "serving worker", "weights", "driver", "machine")


def main() -> None:
    """Parse the options, and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--per-run", type=int, default=4, help="faults in a run of 20 steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--methods", nargs="+", default=["grpo", "ppo"])
    parser.add_argument("--roles", nargs="+", default=_ROLES, choices=_ROLES)
    parser.add_argument("--staleness", nargs="+", type=int, default=[0, 2])
    options = parser.parse_args()
    rng, done, different, total = random.Random(options.seed), 0, 0, Counter[str]()
    with tempfile.TemporaryDirectory() as name, train_server() as server, ray_cluster() as cluster:
        wholes: dict[tuple[str, int], Path] = {}
        while done < options.faults:
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
            run = runs.disturbed(f"run-{done}", faults, workers=workers, staleness=staleness, rng=rng)
            row = {
                "method": method,
                "staleness": staleness,
                "workers": workers,
                "faults": list(map(str, faults)),
            }
            row |= {"seconds": round(time.monotonic() - started, 1), "lost": len(lost(run))}
            try:
                assert_same(run, wholes[method, staleness])
                row["same"] = True
            except AssertionError as error:
                row |= {"same": False, "difference": str(error)[:500]}
                different += 1
            print(json.dumps(row), flush=True)
            total.update(f"{fault.how} of {fault.role}" for fault in faults)
            done += len(faults)
    print(json.dumps({"faults": done, "runs_that_differ": different, "kinds": dict(total)}), flush=True)
    sys.exit(1 if different else 0)


if __name__ == "__main__":
    main()
