"""Two checkouts of this repository against each other: the same commands, the same rows, seconds and memory.

    git worktree add ../before COMMIT
    uv run python benchmarks/paired.py ../before --output benchmarks/results/paired.json

Each job runs with the sources of both checkouts in turn, on the libraries of this environment, in processes
of their own; who begins changes. Of a training, the median step is taken, the first ones left out, and the
process's peak memory; of a merge, the whole command. Prints medians of the ratios (before / now: above 1 is
faster, or smaller, now) as JSON, with the largest difference between the losses of both.
"""

from __future__ import annotations

import argparse
import gzip
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhf_data import atomic_write_json

HERE = Path(__file__).resolve().parents[1]
HH_DATA = HERE.parent / "shared/data/hh-rlhf/harmless-base-1500.jsonl.gz"
_WARM_UP = 2
"""First steps, which are left out."""
_REWARD = "def letters(completions, **columns):\n    return [text.count('e') / 10 for text in completions]\n"
_GAME = (
    "policy_model.lr_scheduler_type=constant",
    "game.break_even_factor=1.75",
    "training.monitor_warmup_steps=8",
    "demo.pretrain_steps=300",
)
"""Settings of the game whose defaults changed since e87ed37: with them, both checkouts play the same game."""
_MERGE = """
merge_method: ties
base_model: model
models:
  - {model: other, parameters: {weight: 0.5, density: 0.5}}
  - {model: model, parameters: {weight: 0.5, density: 0.5}}
dtype: float32
"""


def jobs(steps: int) -> dict[str, list[str]]:
    """The commands, to be run where `prepare` put their files."""
    common = ["--model", "model", "--max-steps", str(steps), "--output-dir", "run"]
    pairs = ["--train-data", "pairs.jsonl", *common]
    short = ["--set", "max_length=384"]
    online = ["--train-data", "prompts.jsonl", "--reward", "reward:letters", *common]
    found = {
        method: ["rlhf-train", method, *pairs, *short] for method in ("sft", "dpo", "simpo", "kto", "reward")
    }
    for method in ("grpo", "ppo"):
        found[method] = ["rlhf-train", method, *online, "--set", "max_completion_length=48"]
    game = [part for setting in _GAME for part in ("--set", setting)]
    found["minmax"] = ["rlhf-train", "minmax", "--max-steps", str(steps), "--output-dir", "run", *game]
    found["merge"] = ["rlhf-merge", "run", "merge.yaml", "run"]
    return found


def prepare(folder: Path, quick: bool) -> None:
    """Two random Llamas of 9 million parameters (tiny if quick), pairs and prompts of HH-RLHF, a reward."""
    from rlhf_models import build_tiny_llama, train_byte_tokenizer

    with gzip.open(HH_DATA, "rt", encoding="utf-8") as file:
        rows = [json.loads(next(file)) for _ in range(200)]
    texts = [row["chosen"] for row in rows]
    tokenizer = train_byte_tokenizer(texts, vocab_size=300 if quick else 8192)
    width, layers = (32, 2) if quick else (256, 8)
    sizes = {
        "hidden_size": width,
        "num_layers": layers,
        "intermediate_size": 4 * width,
        "max_positions": 2048,
    }
    for name, seed in (("model", 0), ("other", 1)):
        build_tiny_llama(len(tokenizer), eos_token_id=2, seed=seed, **sizes).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = [{"prompt": text[: text.rfind("\n\nAssistant:") + 12]} for text in texts]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    (folder / "reward.py").write_text(_REWARD)
    (folder / "merge.yaml").write_text(_MERGE)


def entry(checkout: Path, command: str) -> str:
    """The code that a command of a checkout is: what its package names in `project.scripts`."""
    for file in checkout.glob("*/*/pyproject.toml"):
        scripts = tomllib.loads(file.read_text(encoding="utf-8"))["project"].get("scripts", {})
        if command in scripts:
            module, function = scripts[command].split(":")
            return f"from {module} import {function} as main; main(prog_name={command!r})"
    raise SystemExit(f"{checkout} has no command {command}")


def run(checkout: Path, command: Sequence[str], inputs: Path) -> dict[str, Any]:
    """Run a command in a folder of its own: seconds of a step or of all, peak memory in MiB, losses."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for path in inputs.iterdir():
            (folder / path.name).symlink_to(path)
        sources = [str(each) for part in ("packages", "apps") for each in checkout.glob(f"{part}/*/src")]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        environment["PYTHONPATH"] = os.pathsep.join((name, *sources))
        start = time.perf_counter()
        program = [sys.executable, "-c", entry(checkout, command[0]), *command[1:]]
        process = subprocess.Popen(
            program, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert process.stdout is not None
        said = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        taken = time.perf_counter() - start
        if status:
            raise SystemExit(f"{' '.join(command)} of {checkout} failed:\n{said[-2000:]}")
        metrics = folder / "run" / "metrics.jsonl"
        rows = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
        steps = [row for row in rows if "step_time" in row]
        return {
            "seconds": statistics.median(row["step_time"] for row in steps[_WARM_UP:]) if steps else taken,
            "memory": usage.ru_maxrss / 1024,
            "losses": [row["loss"] for row in steps if "loss" in row],
        }


def compare(before: Path, command: Sequence[str], inputs: Path, repeats: int) -> dict[str, Any]:
    """One job, as often in both checkouts."""
    sides: dict[str, list[dict[str, Any]]] = {"before": [], "now": []}
    places = {"before": before, "now": HERE}
    for turn in range(repeats):
        for name in sorted(sides, reverse=bool(turn % 2)):
            sides[name].append(run(places[name], command, inputs))
    found: dict[str, Any] = {}
    for what in ("seconds", "memory"):
        values = {name: [each[what] for each in sides[name]] for name in sides}
        ratios = [a / b for a, b in zip(values["before"], values["now"], strict=True)]
        found[what] = {name: statistics.median(each) for name, each in values.items()}
        found[what] |= {"ratio": statistics.median(ratios), "ratios": ratios}
    losses = zip(sides["before"][0]["losses"], sides["now"][0]["losses"], strict=True)
    found["largest_difference_of_losses"] = max((abs(a - b) for a, b in losses), default=None)
    return found


def main() -> int:
    """Run the jobs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path, help="the other checkout")
    parser.add_argument("--jobs", nargs="*", choices=sorted(jobs(1)), default=list(jobs(1)))
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="tiny models")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    before = options.before.resolve()
    commit = ["git", "-C", str(before), "rev-parse", "--short", "HEAD"]
    result: dict[str, Any] = {
        "before": subprocess.run(commit, capture_output=True, text=True, check=True).stdout.strip(),
        "steps": options.steps,
        "repeats": options.repeats,
        "jobs": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        # Not in this process: the peak memory of a child is at least that of the process that starts it.
        maker = multiprocessing.get_context("spawn").Process(
            target=prepare, args=(Path(folder), options.quick)
        )
        maker.start()
        maker.join()
        assert not maker.exitcode
        for name in options.jobs:
            print(f"{name} ...", file=sys.stderr, flush=True)
            result["jobs"][name] = compare(before, jobs(options.steps)[name], Path(folder), options.repeats)
            if options.output:
                atomic_write_json(options.output, result)
    print(json.dumps(result, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
