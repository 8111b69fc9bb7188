"""What a story teller forgets as it learns sums, and what holds it back: gain and forgetting of each way.

    uv run python benchmarks/forgetting.py --model ../shared/data/stories260k
        --output benchmarks/results/forgetting.json --figure docs/images/forgetting.png

A pretrained model learns sums by SFT.  The gain is its accuracy on held-out sums; what it forgets is
KL(before || after) per token of stories that it wrote before, an estimate of how much worse it tells them.
Ways to hold it: rows of the earlier task among the new ones (stories of its own: replay needs no old data),
elastic weight consolidation, L2-SP, LoRA, and the mean of the weights before and after.  Controls that need
nothing: fewer steps, a lower learning rate.  Settings of a way span from weak to strong; every point is a
mean over seeds with a 95% interval.  Prints JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import AutoPeftModelForCausalLM

from rlhf_algos import METHODS, TrainingJob
from rlhf_data import RunFolder
from rlhf_eval import stats
from rlhf_infer import SamplingParams, TransformersEngine
from rlhf_models import load_causal_lm, load_tokenizer

STEPS, RATE, BATCH = 600, 1e-3, 32
LARGEST, LENGTH = 20, 64
ARMS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "fewer steps": [(f"{steps} steps", {"max_steps": steps}) for steps in (150, 300)],
    "lower rate": [("rate 3e-4", {"learning_rate": 3e-4})],
    "replay": [(f"{share:.0%} stories", {"replay": share}) for share in (0.1, 0.5)],
    "EWC": [(f"λ = {strength:g}", {"ewc_strength": strength, "ewc": True}) for strength in (0.01, 0.1, 1)],
    "L2-SP": [(f"λ = {strength:g}", {"ewc_strength": strength}) for strength in (0.01, 0.1, 1)],
    "LoRA": [("rank 16", {"use_peft": True, "lora_r": 16, "lora_alpha": 32})],
    "mean of weights": [(f"{share:.0%} after", {"mean": share}) for share in (0.25, 0.5, 0.75)],
}
"""Ways and their settings: `replay`, `ewc` and `mean` are this file's, the others `rlhf-train sft`'s."""


def all_sums(seed: int) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Sums to learn and held-out ones."""
    rows = [
        {"prompt": f"{a} + {b} =", "completion": f" {a + b}"} for a in range(LARGEST) for b in range(LARGEST)
    ]
    random.Random(seed).shuffle(rows)
    return rows[100:], rows[:100]


class Teller:
    """The pretrained model, stories that it wrote, and how well others know both tasks.

    Args:
        folder: the model.
        stories: to replay, and as many to measure on.
    """

    def __init__(self, folder: str, stories: int) -> None:
        self.folder, self.tokenizer = folder, load_tokenizer(folder)
        engine = TransformersEngine(load_causal_lm(folder), self.tokenizer)
        starts = self.tokenizer("Once upon a time")["input_ids"]
        [rollouts] = engine.generate([starts], 2 * stories, SamplingParams(LENGTH, seed=1))
        self.held_out = [[*starts, *each.completion_ids] for each in rollouts[:stories]]
        texts = [self.tokenizer.decode(each.completion_ids[:32]) for each in rollouts[stories:]]
        self.rows = [{"prompt": "Once upon a time", "completion": text} for text in texts]
        self.before = self.logps(load_causal_lm(folder))

    def logps(self, model: Any) -> np.ndarray:
        """Log-probs of the held-out stories' tokens, one after another."""
        found = TransformersEngine(model, self.tokenizer).prompt_logps(self.held_out, 0)
        return np.concatenate([each.logps[-LENGTH:] for each in found])

    def measure(self, model: Any, sums: list[dict[str, str]]) -> dict[str, float]:
        """Accuracy on sums, and KL(before || after) per token of a story, in nats."""
        engine = TransformersEngine(model, self.tokenizer)
        prompts = [self.tokenizer(row["prompt"])["input_ids"] for row in sums]
        groups = engine.generate(prompts, 1, SamplingParams(6, temperature=0))
        ids = [group[0].completion_ids for group in groups]
        texts: list[Any] = [self.tokenizer.decode(each, skip_special_tokens=True) for each in ids]
        right = [text.strip() == row["completion"].strip() for text, row in zip(texts, sums, strict=True)]
        return {"gain": float(np.mean(right)), "forgotten": float(np.mean(self.before - self.logps(model)))}


def trained(teller: Teller, folder: Path, seed: int, settings: dict[str, Any]) -> Any:
    """The model after SFT on sums, held as the settings say."""
    settings = dict(settings)
    share, with_fisher = settings.pop("replay", 0.0), settings.pop("ewc", False)
    steps = settings.get("max_steps", STEPS)
    rng, (sums, _) = random.Random(seed), all_sums(seed)
    rows = [
        rng.choice(teller.rows) if rng.random() < share else rng.choice(sums) for _ in range(steps * BATCH)
    ]
    folder.mkdir(parents=True)
    for name, lines in (("train", rows), ("stories", teller.rows)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    values = {
        "model_name_or_path": teller.folder,
        "train_data": str(folder / "train.jsonl"),
        "eval_fraction": 0,
        "max_steps": steps,
        "learning_rate": RATE,
        "per_device_train_batch_size": BATCH,
        "stage_samples": 0,
        "ref_kl_rows": 0,
        "logging_steps": 100,
        "seed": seed,
        **({"ewc_data": str(folder / "stories.jsonl")} if with_fisher else {}),
        **settings,
    }
    job = TrainingJob("sft", METHODS["sft"].resolve(values), RunFolder.create(folder / "run"))
    with contextlib.redirect_stdout(sys.stderr):
        job.train()
    final = str(folder / "run/final")
    if settings.get("use_peft"):
        return AutoPeftModelForCausalLM.from_pretrained(final).merge_and_unload()
    return load_causal_lm(final)


def between(teller: Teller, after: Any, share: float) -> Any:
    """The mean of the weights before and after."""
    model = load_causal_lm(teller.folder)
    with torch.no_grad():
        for one, other in zip(model.parameters(), after.parameters(), strict=True):
            one.lerp_(other, share)
    return model


def run_seed(teller: Teller, seed: int, work: Path) -> dict[str, dict[str, dict[str, float]]]:
    """All ways with one seed."""
    _, held_out = all_sums(seed)
    plain = trained(teller, work / "plain", seed, {})
    found = {"plain": {f"{STEPS} steps": teller.measure(plain, held_out)}}
    for way, points in ARMS.items():
        found[way] = {}
        for name, settings in points:
            if "mean" in settings:
                model = between(teller, plain, settings["mean"])
            else:
                model = trained(teller, work / f"{way}-{name}".replace(" ", "_"), seed, settings)
            found[way][name] = teller.measure(model, held_out)
            print(f"{seed} {way} {name}: {found[way][name]} {time.process_time():.0f} s", file=sys.stderr)
    return found


def summary(seeds: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means over the seeds with 95% intervals, point by point."""
    rows = []
    for way, points in seeds[0].items():
        for name in points:
            row: dict[str, Any] = {"way": way, "setting": name}
            for measure in ("gain", "forgotten"):
                values = np.array([seed[way][name][measure] for seed in seeds])
                interval = stats.mean_interval(values, unit="seed")
                row[measure] = [round(x, 4) for x in (values.mean(), interval.low, interval.high)]
            rows.append(row)
    return rows


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Gain against forgetting, each way a line from weak to strong."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7.5, 5))
    for way in dict.fromkeys(row["way"] for row in rows):
        points = sorted((row for row in rows if row["way"] == way), key=lambda row: row["forgotten"][0])
        x, y = ([row[measure] for row in points] for measure in ("forgotten", "gain"))
        errors = [[[v[0] - v[1] for v in values], [v[2] - v[0] for v in values]] for values in (x, y)]
        axes.errorbar(
            [v[0] for v in x],
            [v[0] for v in y],
            xerr=errors[0],
            yerr=errors[1],
            marker="*" if way == "plain" else "o",
            markersize=11 if way == "plain" else 5,
            capsize=2,
            linewidth=1,
            label=way,
        )
    axes.set_xscale("symlog", linthresh=0.01)
    axes.set_xlabel("forgotten: KL per token of a story (nats)")
    axes.set_ylabel("gain: accuracy on held-out sums")
    axes.set_title("Learning sums, forgetting stories (upper left is best)")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Run every seed, print the summary."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="folder of a pretrained model that writes stories")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--stories", type=int, default=256)
    parser.add_argument("--output", type=Path, help="file for the results; they are printed too")
    parser.add_argument("--figure", type=Path)
    options = parser.parse_args()
    teller = Teller(options.model, options.stories)
    found = []
    with tempfile.TemporaryDirectory() as name:
        for seed in options.seeds:
            found.append(run_seed(teller, seed, Path(name) / str(seed)))
    rows = summary(found)
    report = {"steps": STEPS, "learning_rate": RATE, "seeds": options.seeds, "points": rows, "by_seed": found}
    text = json.dumps(report, indent=1)
    if options.output:
        options.output.write_text(text + "\n", encoding="utf-8")
    if options.figure:
        draw(rows, options.figure)
    print(text)


if __name__ == "__main__":
    main()
