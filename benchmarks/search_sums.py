"""Tree search on sums of five numbers, with a process reward model trained from Monte Carlo labels.

    uv run python benchmarks/search_sums.py --work work --output benchmarks/results/search_sums.json

A tiny policy is trained on worked sums (`rlhf-train sft`), its own solutions are labelled step by step
(`StepLabeller`, no annotator), a process reward model is trained from these labels (`rlhf-train prm`), and on
held-out sums every arm may generate the same number of tokens. Prints JSON: accuracy by arm and budget, the
mean over sampling seeds, each arm minus best-of-N on the same sums with a 95% interval, and how many times
fewer tokens the process reward model computes in packed prefix trees. What the work folder has is not done
again.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from search import ARMS, compared

from rlhf_data import atomic_write_json
from rlhf_infer import (
    SamplingParams,
    SearchSettings,
    StepLabeller,
    StepLabelSettings,
    TransformersEngine,
    TreeSearch,
)
from rlhf_models import ProcessRewardModel, load_causal_lm, load_tokenizer

PARAMS = SamplingParams(64, seed=0)
NUMBERS = 5


def sums(count: int, seed: int) -> list[dict[str, str]]:
    """Sums, their worked solutions and answers."""
    rng = random.Random(f"sums/{seed}")
    rows = []
    for _ in range(count):
        numbers = [rng.randint(2, 19) for _ in range(NUMBERS)]
        total, steps = numbers[0], []
        for number in numbers[1:]:
            steps.append(f"{total} + {number} = {total + number}")
            total += number
        prompt = " + ".join(map(str, numbers)) + " :\n"
        rows.append({"prompt": prompt, "completion": "\n".join(steps), "answer": str(total)})
    return rows


def answer_of(text: str) -> str:
    """What a solution ends with."""
    return text.rsplit("=", 1)[-1].strip()


def is_right(completions: list[str], answer: list[str]) -> list[float]:
    """The verifier, which knows the answers."""
    return [float(answer_of(text) == own) for text, own in zip(completions, answer, strict=True)]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    """JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def train(method: str, data: Path, run: Path, steps: int, *more: str) -> Path:
    """Run `rlhf-train`, unless its model is there."""
    if not (run / "final").exists():
        command = [sys.executable, "-m", "rlhf_train", method, "--train-data", str(data)]
        command += ["--output-dir", str(run), "--max-steps", str(steps), *more]
        command += ["--set", "per_device_train_batch_size=32", "--set", "eval_steps=1000"]
        subprocess.run(command, check=True, stdout=sys.stderr)
    return run / "final"


def labelled(work: Path, policy: Path, prompts: int) -> tuple[Path, dict[str, Any]]:
    """Rows for `rlhf-train prm`, and how they came about."""
    path, about = work / "steps.jsonl", work / "labels.json"
    if not about.exists():
        engine = TransformersEngine(load_causal_lm(policy), load_tokenizer(policy))
        rows = sums(prompts, seed=2)
        settings = StepLabelSettings(solutions=4, completions=4)
        labeller = StepLabeller(engine, is_right, engine.tokenizer, PARAMS, settings)
        answers = {"answer": [row["answer"] for row in rows]}
        found = [one for group in labeller.label([row["prompt"] for row in rows], answers) for one in group]
        write(path, [one.row() for one in found])
        labels = [label for one in found for label in one.labels]
        made = {"solutions": len(found), "steps": len(labels), "right": sum(labels) / len(labels)}
        atomic_write_json(about, made | {"generated_tokens": labeller.generated_tokens})
    return path, json.loads(about.read_text())


def measured(policy: Path, process: Path, options: argparse.Namespace) -> dict[str, Any]:
    """All arms on held-out sums."""
    engine = TransformersEngine(load_causal_lm(policy), load_tokenizer(policy))
    scorer = ProcessRewardModel.from_pretrained(process)
    rows = sums(options.prompts, seed=3)
    prompts, answers = [row["prompt"] for row in rows], [row["answer"] for row in rows]
    ids = [engine.tokenizer(prompt)["input_ids"] for prompt in prompts]
    greedy = engine.generate(ids, 1, SamplingParams(64, temperature=0))
    texts = [engine.tokenizer.decode(group[0].completion_ids, skip_special_tokens=True) for group in greedy]
    right = is_right(texts, answers)
    tokens = sum(len(group[0].completion_ids) for group in greedy) / len(rows)
    found: dict[str, Any] = {"greedy": {"accuracy": sum(right) / len(right), "tokens": tokens}, "budgets": {}}
    for budget in options.budgets:
        outcomes: dict[str, list[float]] = {}
        spent: dict[str, float] = {}
        factors: dict[str, float] = {}
        for arm, chosen in ARMS.items():
            settings = SearchSettings(
                budget_tokens=budget, width=8, branch=4, max_step_tokens=24, aggregate="min", **chosen
            )
            outcomes[arm], spent[arm] = [0.0] * len(rows), 0.0
            for seed in range(options.seeds):
                search = TreeSearch(
                    engine,
                    scorer,
                    engine.tokenizer,
                    settings,
                    SamplingParams(64, seed=seed),
                    extract=answer_of,
                )
                results = search.run(prompts)
                scores = is_right([result.best.text for result in results], answers)
                outcomes[arm] = [a + b / options.seeds for a, b in zip(outcomes[arm], scores, strict=True)]
                spent[arm] += search.cost.generated_tokens / len(rows) / options.seeds
                factors[arm] = search.cost.scoring_factor
        found["budgets"][str(budget)] = compared(outcomes, spent)
        for arm, factor in factors.items():
            found["budgets"][str(budget)][arm]["scoring_factor"] = factor
        print(f"sums, {budget} tokens: {time.process_time():.0f} s", file=sys.stderr, flush=True)
    return found


def main() -> int:
    """Train, label, train, search."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="folder of the models")
    parser.add_argument("--steps", type=int, nargs=2, default=[250, 100], help="of policy and process reward")
    parser.add_argument("--labelled", type=int, default=100, help="sums whose solutions are labelled")
    parser.add_argument("--prompts", type=int, default=64, help="held-out sums")
    parser.add_argument("--budgets", type=int, nargs="+", default=[128])
    parser.add_argument("--seeds", type=int, default=3, help="of sampling")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    rows = [{k: row[k] for k in ("prompt", "completion")} for row in sums(4000, seed=1)]
    data = write(options.work / "sft.jsonl", rows)
    policy = train("sft", data, options.work / "sft", options.steps[0], "--set", "learning_rate=3e-3")
    steps, labels = labelled(options.work, policy, options.labelled)
    process = train(
        *("prm", steps, options.work / "prm", options.steps[1]),
        *("--model", str(policy), "--set", "learning_rate=1e-3"),
    )
    result = {"prompts": options.prompts, "seeds": options.seeds, "labels": labels}
    result |= measured(policy, process, options)
    if options.output:
        atomic_write_json(options.output, result)
    print(json.dumps(result, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
