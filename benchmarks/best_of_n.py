"""Best-of-N on the embedded story task: what more samples bring, with flawed and sound reward models.

Reward and true accuracy of the winner against N, and what adaptive sampling needs to equal a fixed N.
The constants of the adaptive rules are chosen on training prompts and reported on held-out ones.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from best_of_n_replay import Samples, expected_winner, mean_of, over_orders

from rlhf_data import QARecord, atomic_write_json
from rlhf_infer import (
    AdaptiveComputeAllocator,
    BestOfNSampler,
    ConfidenceBasedStopping,
    SamplingCost,
    SamplingParams,
    ScorePopulation,
    TransformersEngine,
    load_scorer,
)
from rlhf_minmax import MinMaxConfig
from rlhf_minmax.config.run import DemoSettings
from rlhf_minmax.demo.builder import DemoModels, demo_models
from rlhf_minmax.game.stories import Stories, load_stories
from rlhf_minmax.game.story_rules import StoryRules
from rlhf_models import load_causal_lm, load_tokenizer

REWARDS = ("flawed", "hasty", "sound")
"""The demonstration's reward model, with its planted flaw; one without, trained as long; and four times."""
_RULES = StoryRules()
_STEPS = {"hasty": 500, "sound": 2000}
_COLOURS = {"flawed": "#c8553d", "hasty": "#c9a227", "sound": "#1b6ca8"}
_MARKERS = {"stopping": "s", "allocation": "^"}
_TUNING_ORDERS, _ORDERS = 4, 8
"""Orders of the same samples that adaptive rules are replayed on, to choose their constants and to report."""
_SHARE = 0.6
"""Share of a fixed number of samples that an adaptive rule may need."""


def draw(
    records: Sequence[QARecord], stories: Stories, base: Path, rewards: dict[str, Path], count: int
) -> list[Samples]:
    """`count` samples of each record by the demo's policy, with the scores of all reward models."""
    results = _sampler(base, rewards, n=count, seed=0).sample([stories.prompts.policy(r) for r in records])
    return [
        Samples(
            tuple(float(_RULES.claim(record, c.text) == record.answer_text) for c in selected.candidates),
            {name: tuple(c.scores[name] for c in selected.candidates) for name in rewards},
            tuple(c.confidence for c in selected.candidates),
        )
        for record, selected in zip(records, results, strict=True)
    ]


def _sampler(base: Path, rewards: dict[str, Path], *, seed: int, **settings: Any) -> BestOfNSampler:
    tokenizer = load_tokenizer(base)
    player = MinMaxConfig().policy_model
    params = SamplingParams(player.max_new_tokens, player.temperature, seed)
    engine = TransformersEngine(load_causal_lm(base), tokenizer)
    lines = [f"model:path={path},name={name}" for name, path in rewards.items()]
    return BestOfNSampler(engine, load_scorer(lines), tokenizer, params=params, **settings)


def candidates(n: int, most: int, population: ScorePopulation | None) -> dict[str, list[dict[str, Any]]]:
    """The settings that are tried on training prompts in place of a fixed n, for at most `most` samples."""
    return {
        "stopping": [
            {"min_samples": first, "max_samples": top, "batch": 2, "probability": p, "population": prior}
            for first in (2, 4)
            for top in sorted({n, min(2 * n, most), most})
            for p in (0.02, 0.05, 0.1, 0.2)
            for prior in (None, population)
            if first <= top
        ],
        "allocation": [
            {"min_samples": first, "max_samples": most, "mean": share * n}
            for first in (2, 4)
            for share in (0.3, 0.4, 0.5, 0.6)
            if first <= share * n
        ],
    }


def choose(prompts: Sequence[Samples], reward: str, n: int, kind: str) -> dict[str, Any]:
    """Of the settings that need at most the stated share of n samples, those with the best reward.

    All on the given prompts; rewards that differ by less than a thousandth of what n samples gain over one
    are alike, and then the fewest samples decide, as they do where no settings need so few.
    """
    one, fixed = (mean_of([expected_winner(p, reward, count) for p in prompts]).reward for count in (1, n))
    population = ScorePopulation.fit([p.rewards[reward] for p in prompts])
    tried = []
    for settings in candidates(n, len(prompts[0].true), population)[kind]:
        result = mean_of(over_orders(prompts, reward, kind, settings, _TUNING_ORDERS))
        few = result.samples <= _SHARE * n
        gain = round((result.reward - one) / (fixed - one), 3) if few else 0.0
        tried.append((few, gain, -result.samples, settings))
    return max(tried, key=lambda each: each[:3])[3]


def compare(
    prompts: Sequence[Samples], reward: str, n: int, kind: str, settings: dict[str, Any]
) -> dict[str, Any]:
    """An adaptive search against a fixed n on the same prompts, with 95% intervals over prompts."""
    fixed = [expected_winner(p, reward, n) for p in prompts]
    ones = [expected_winner(p, reward, 1) for p in prompts]
    adaptive = over_orders(prompts, reward, kind, settings, _ORDERS)
    gain = mean_of(fixed).reward - mean_of(ones).reward
    differences = [(a.reward - f.reward) / gain for a, f in zip(adaptive, fixed, strict=True)]
    accuracies = [a.accuracy - f.accuracy for a, f in zip(adaptive, fixed, strict=True)]
    shown = {key: value for key, value in settings.items() if key != "population"}
    return {
        "n": n,
        "settings": shown | ({"population": asdict(p)} if (p := settings.get("population")) else {}),
        "mean_samples": mean_of(adaptive).samples,
        "share": mean_of(adaptive).samples / n,
        "reward": mean_of(adaptive).reward,
        "fixed_reward": mean_of(fixed).reward,
        "reward_difference": _interval(differences),
        "accuracy": mean_of(adaptive).accuracy,
        "fixed_accuracy": mean_of(fixed).accuracy,
        "accuracy_difference": _interval(accuracies),
    }


def _interval(values: Sequence[float], draws: int = 1000) -> dict[str, float]:
    """Mean and its 95% interval by bootstrap over prompts."""
    rng = random.Random(0)
    means = sorted(statistics.fmean(rng.choices(values, k=len(values))) for _ in range(draws))
    return {"mean": statistics.fmean(values), "low": means[draws // 40], "high": means[-draws // 40 - 1]}


def curve(prompts: Sequence[Samples], reward: str, numbers: Sequence[int]) -> dict[str, Any]:
    """Reward of the winner, in standard deviations of single samples over their mean, and its accuracy."""
    single = [value for p in prompts for value in p.rewards[reward]]
    mean, std = statistics.fmean(single), statistics.pstdev(single)
    results = [[expected_winner(p, reward, n) for p in prompts] for n in numbers]
    return {
        "n": list(numbers),
        "reward": [_interval([(r.reward - mean) / std for r in each]) for each in results],
        "accuracy": [_interval([r.accuracy for r in each]) for each in results],
    }


def end_to_end(
    prompts: Sequence[str],
    records: Sequence[QARecord],
    base: Path,
    reward: Path,
    n: int,
    chosen: dict[str, Any],
) -> dict[str, Any]:
    """The sampler itself on held-out prompts: fixed, stopping and allocation; samples, seconds, accuracy."""
    rule = ConfidenceBasedStopping(**chosen["stopping"])
    shares = chosen["allocation"]
    allocator = AdaptiveComputeAllocator(shares["min_samples"], shares["max_samples"])
    settings: dict[str, tuple[int, Any, int | None]] = {
        "fixed": (n, None, None),
        "stopping": (rule.max_samples, rule, None),
        "allocation": (n, allocator, round(shares["mean"] * len(prompts))),
    }
    found = {}
    for kind, (samples, adaptive, budget) in settings.items():
        sampler = _sampler(base, {"sound": reward}, seed=1, n=samples, adaptive=adaptive)
        started = time.perf_counter()
        results = sampler.sample(prompts, budget=budget)
        right = [
            float(_RULES.claim(record, selected.best.text) == record.answer_text)
            for record, selected in zip(records, results, strict=True)
        ]
        found[kind] = {
            "seconds": time.perf_counter() - started,
            "reward": statistics.fmean(s.best.score or 0.0 for s in results),
            "accuracy": statistics.fmean(right),
            "cost": asdict(SamplingCost.total(s.cost for s in results)),
        }
    return found


def reward_models(stories: Stories, seed: int, quick: bool) -> tuple[Path, dict[str, Path]]:
    """The demonstration's policy, and the reward models by name, from the cache or built now."""
    small = {"pretrain_steps": 20, "sft_steps": 20, "judge_steps": 1, "num_stories": 64} if quick else {}
    built: dict[str, DemoModels] = {}
    for name in REWARDS:
        # A model trained for a few steps has no flaw that would pass the demonstration's own check.
        settings: dict[str, Any] = {"flawed_reward": name == "flawed" and not quick}
        if quick or name in _STEPS:
            settings["reward_steps"] = 20 if quick else _STEPS[name]
        demo = DemoSettings.from_dict(small | settings)
        built[name] = demo_models(stories.building, stories.prompts, demo, seed=seed, force=quick)
    return built["flawed"].base, {name: models.reward for name, models in built.items()}


def run(seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Everything for the models of one seed."""
    quick = options.quick
    data = {"train_stories": 64, "eval_stories": 8} if quick else {}
    stories = load_stories(MinMaxConfig.from_dict({"seed": seed, "data": data}))
    base, rewards = reward_models(stories, seed, quick)
    count, fixed = (16, 8) if quick else (64, options.n)
    numbers = [n for n in (1, 2, 4, 8, 16, 32, 64) if n <= count]
    held_out = draw(stories.held_out, stories, base, rewards, count)
    tuning = draw(stories.train[: 32 if quick else 256], stories, base, rewards, count)
    results: dict[str, Any] = {"seed": seed, "prompts": len(held_out), "curves": {}, "adaptive": {}}
    chosen: dict[str, Any] = {}
    for reward in REWARDS:
        results["curves"][reward] = curve(held_out, reward, numbers)
        chosen = {kind: choose(tuning, reward, fixed, kind) for kind in ("stopping", "allocation")}
        results["adaptive"][reward] = {
            kind: compare(held_out, reward, fixed, kind, settings) for kind, settings in chosen.items()
        }
    prompts = [stories.prompts.policy(record) for record in stories.held_out]
    assert REWARDS[-1] == "sound", "its rules were chosen last"
    results["end_to_end"] = end_to_end(prompts, stories.held_out, base, rewards["sound"], fixed, chosen)
    return results


def summary(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of every reward model and kind of search the worst seed: share of samples, reward, accuracy."""

    def worst(reward: str, kind: str) -> dict[str, float]:
        found = [each["adaptive"][reward][kind] for each in runs]
        return {
            "largest_share": max(point["share"] for point in found),
            "reward_difference": min(point["reward_difference"]["mean"] for point in found),
            "accuracy_difference": min(point["accuracy_difference"]["mean"] for point in found),
        }

    return {reward: {kind: worst(reward, kind) for kind in _MARKERS} for reward in REWARDS}


def plot(runs: Sequence[dict[str, Any]], path: Path) -> None:
    """Reward and accuracy against N, and adaptive sampling beside the fixed numbers."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(12, 3.7), layout="constrained")
    for reward in REWARDS:
        curves = [each["curves"][reward] for each in runs]
        numbers = curves[0]["n"]
        for axis, key in zip(axes, ("reward", "accuracy"), strict=False):
            rows = [[point["mean"] for point in each[key]] for each in curves]
            means = [statistics.fmean(values) for values in zip(*rows, strict=True)]
            axis.plot(numbers, means, "o-", ms=4, color=_COLOURS[reward], label=reward)
            axis.fill_between(
                numbers,
                [min(v) for v in zip(*rows, strict=True)],
                [max(v) for v in zip(*rows, strict=True)],
                color=_COLOURS[reward],
                alpha=0.18,
                lw=0,
            )
        _plot_adaptive(axes[2], runs, reward)
    axes[0].set(ylabel="reward of the winner\n(sd of one sample)", title="What is selected for")
    axes[1].set(ylabel="true accuracy of the winner", title="What is wanted", ylim=(0, 1.02))
    axes[2].set(ylabel="gain in reward, share of N = " + str(_fixed(runs)), title="Adaptive")
    for axis in axes:
        axis.set_xscale("log", base=2)
        axis.set_xticks(runs[0]["curves"]["sound"]["n"], [str(n) for n in runs[0]["curves"]["sound"]["n"]])
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_xlabel("N")
    axes[1].set_xlabel("N")
    axes[2].set_xlabel("samples per prompt (mean)")
    axes[0].legend(frameon=False, title="reward model")
    axes[2].plot([], [], "-", color="0.4", label="fixed N")
    for kind, marker in _MARKERS.items():
        axes[2].plot([], [], marker, color="0.4", label=kind)
    axes[2].legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _fixed(runs: Sequence[dict[str, Any]]) -> int:
    return runs[0]["adaptive"]["sound"]["stopping"]["n"]


def _plot_adaptive(axis: Any, runs: Sequence[dict[str, Any]], reward: str) -> None:
    """The gain of fixed numbers as a curve, of adaptive searches as points, of every seed."""
    fixed = _fixed(runs)
    for each in runs:
        own = each["curves"][reward]
        values = [point["mean"] for point in own["reward"]]
        one, top = values[0], values[own["n"].index(fixed)]
        gains = [(value - one) / (top - one) for value in values]
        axis.plot(own["n"], gains, "-", lw=1, color=_COLOURS[reward], alpha=0.6)
        for kind, marker in _MARKERS.items():
            point = each["adaptive"][reward][kind]
            gain = 1 + point["reward_difference"]["mean"]
            style = {"ms": 7, "color": _COLOURS[reward], "mec": "white", "mew": 0.6, "zorder": 3}
            axis.plot(point["mean_samples"], gain, marker, **style)


def main() -> None:
    """Run everything and print the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds of models and stories")
    parser.add_argument("--n", type=int, default=16, help="fixed number that adaptive sampling is to equal")
    parser.add_argument("--output", type=Path, help="write the results to this file too")
    parser.add_argument("--figure", type=Path, help="draw the curves into this file")
    parser.add_argument(
        "--quick", action="store_true", help="tiny models and few prompts, to see that it runs"
    )
    options = parser.parse_args()
    runs = []
    for seed in options.seeds[:1] if options.quick else options.seeds:
        started = time.perf_counter()
        runs.append(run(seed, options))
        print(f"seed {seed}: {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
    results = {"runs": runs, "summary": summary(runs)}
    if options.output:
        atomic_write_json(options.output, results)
    if options.figure:
        plot(runs, options.figure)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
