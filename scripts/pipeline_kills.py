"""Kill a pipeline of six stages at random moments, run it again each time, and compare with one left alone.

Usage: python scripts/pipeline_kills.py [KILLS] [--seed N] [--folder DIR]. Prints each kill, then whether
the manifest and every file that a result is made of are the same bytes as undisturbed, the time of a rerun
with nothing changed, and what runs again after one setting changed. Exit code 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

_MODEL = {
    "architecture": "llama",
    "vocab_size": 300,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 2,
    "intermediate_size": 64,
    "max_seq_length": 512,
}
_SHORT = {"save_steps": 2, "per_device_train_batch_size": 8, "stage_samples": 0}
STAGES: dict[str, Any] = {
    "data": {"config": {"rows": 64}},
    "sft": {
        "config": {
            "train_data": "${data.sft}",
            "model_config": "model.yaml",
            "max_steps": 12,
            "learning_rate": 5.0e-3,
            **_SHORT,
        },
        "promotes": "policy",
    },
    "reward": {
        "config": {
            "train_data": "${data.preference}",
            "model_name_or_path": "${sft.final}",
            "max_steps": 8,
            **{key: value for key, value in _SHORT.items() if key != "stage_samples"},
        }
    },
    "draw": {
        "kind": "generate",
        "config": {
            "model": "${current.policy}",
            "prompts": "${data.prompts}",
            "reward": "${reward.final}",
            "n": 2,
            "keep": 2,
            "max_tokens": 12,
        },
    },
    "pairs": {"kind": "filter", "config": {"rows": "${draw.rows}", "to": "pairs"}},
    "dpo": {
        "config": {
            "train_data": "${pairs.rows}",
            "model_name_or_path": "${current.policy}",
            "max_steps": 8,
            **_SHORT,
        }
    },
}
"""Six stages: data, training, generation, choosing, training on what was chosen."""


def start(work: Path, root: Path) -> subprocess.Popen[bytes]:
    """Start the pipeline, in the background."""
    command = [sys.executable, "-m", "rlhf_train", "pipeline", "--config", "pipeline.yaml"]
    with open(work / "pipeline.log", "ab") as log:
        return subprocess.Popen(
            [*command, "--output-dir", str(root)], cwd=work, stdout=log, stderr=log, start_new_session=True
        )


def finish(work: Path, root: Path) -> float:
    """Run the pipeline to its end; seconds."""
    began = time.monotonic()
    if start(work, root).wait():
        raise SystemExit(f"the pipeline failed:\n{(work / 'pipeline.log').read_text()[-2000:]}")
    return time.monotonic() - began


def contents(root: Path) -> dict[str, bytes]:
    """The manifest, and every file that the results are made of."""
    manifest = json.loads((root / "pipeline.json").read_text())
    found = {"pipeline.json": (root / "pipeline.json").read_bytes()}
    for entry in manifest["stages"].values():
        for name in entry["outputs"]:
            found[f"{entry['folder']}/{name}"] = (root / entry["folder"] / name).read_bytes()
    return found


def kill_at(work: Path, root: Path, seconds: float) -> str | None:
    """Run, and kill the pipeline's process after some seconds; the stage it was in, None if it had ended."""
    process = start(work, root)
    time.sleep(seconds)
    if process.poll() is not None:
        return None
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    history = root / "history.jsonl"
    lines = history.read_text().splitlines() if history.exists() else []
    return json.loads(lines[-1])["stage"] if lines else "the start"


def write(work: Path, stages: Mapping[str, Any]) -> None:
    """Write the config and the model's shape."""
    (work / "pipeline.yaml").write_text(yaml.safe_dump({"stages": dict(stages)}, sort_keys=False))
    (work / "model.yaml").write_text(yaml.safe_dump(_MODEL))


def events(root: Path, since: int) -> list[str]:
    """Stages that were started after so many lines of the history."""
    rows = [json.loads(line) for line in (root / "history.jsonl").read_text().splitlines()[since:]]
    return [row["stage"] for row in rows if row["event"] == "started"]


def run(work: Path, kills: int, seed: int, stages: Mapping[str, Any] = STAGES) -> bool:
    """The whole comparison; whether everything is as it should be."""
    root, rng = work / "pipeline", random.Random(seed)
    write(work, stages)
    whole = finish(work, root)
    undisturbed = contents(root)
    print(f"undisturbed: {whole:.1f} s, {len(undisturbed)} files", flush=True)
    shutil.rmtree(root)
    done = 0
    while done < kills:
        after = rng.uniform(0.5, 0.7 * whole)  # many stages end before it, so that every stage is hit
        where = kill_at(work, root, after)
        if where is None:  # it came to its end: from the beginning
            good = contents(root) == undisturbed
            said = "the same" if good else "NOT the same"
            print(f"  came to its end, {said}; from the beginning", flush=True)
            if not good:
                return False
            shutil.rmtree(root)
            continue
        done += 1
        print(f"  kill {done} after {after:.1f} s in {where}", flush=True)
    finish(work, root)
    found = contents(root)
    different = sorted(name for name in undisturbed if found.get(name) != undisturbed[name])
    same = not different and found.keys() == undisturbed.keys()
    print(f"after {kills} kills: {'the same manifest and bytes' if same else f'DIFFERENT: {different}'}")
    rows = len((root / "history.jsonl").read_text().splitlines())
    seconds = finish(work, root)
    print(f"nothing changed: {seconds:.1f} s, ran {events(root, rows) or 'nothing'}")
    reward = {**stages["reward"], "config": {**stages["reward"]["config"], "seed": 1}}
    write(work, {**stages, "reward": reward})
    finish(work, root)
    again = events(root, rows)
    print(f"the reward's seed changed: ran {', '.join(again)}")
    return same and again == ["reward", "draw", "pairs", "dpo"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kills", type=int, nargs="?", default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        place = given.folder or Path(temporary)
        place.mkdir(parents=True, exist_ok=True)
        sys.exit(not run(place.resolve(), given.kills, given.seed))
