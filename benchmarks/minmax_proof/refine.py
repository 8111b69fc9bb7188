"""Rewriting after critiques against sampling more: the same policy, the same tokens, held-out stories.

    uv run python benchmarks/minmax_proof/refine.py --output benchmarks/results/refine.json

A game of `rlhf-train minmax` trains a monitor for every seed. The policy is the game's base, before the game.
It drafts, a critic criticises, it rewrites, for three rounds; the critic is the trained monitor, the policy
itself, or the monitor about another prompt's draft, which is the control. The base was never shown a rewrite,
so a second policy is taught it: by SFT on `draft, critique of the monitor -> right answer`, and to draft as
before. `labels` is the base after SFT on those right answers alone, which is what the labels are worth by
themselves. Best-of-N takes the winner of a reward model: the game's flawed one, or a sound one without its
flaw, trained four times as long; `picked` takes the first of N drafts that the monitor calls right. An arm is
compared with the best-of-N of each that generates at least as many tokens. Prints JSON: accuracy, generated
tokens per prompt, and paired differences with 95% intervals.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import statistics
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from cells import provenance

from rlhf_algos import METHODS, TrainingJob
from rlhf_data import QARecord, RunFolder, atomic_write_json, atomic_write_text
from rlhf_eval.evaluation import load_policy
from rlhf_eval.stats import paired_difference
from rlhf_infer import (
    BestOfNSampler,
    EngineCritic,
    IterativeRefiner,
    RefinerRules,
    RefinerTemplates,
    RewardFunctions,
    Rollout,
    SamplingCost,
    SamplingParams,
    TransformersEngine,
    load_scorer,
)
from rlhf_minmax import MinMaxConfig, MinMaxJob
from rlhf_minmax.demo.builder import demo_models
from rlhf_minmax.game.stories import Stories, load_stories
from rlhf_models import load_tokenizer

ROUNDS, MOST = 3, 12
"""Rewrites at most, and the largest N of best-of-N."""
RIGHT = re.compile(r"\bso right\b")
TEMPLATES = RefinerTemplates(
    critique="{prompt}{answer}\ncritique:", refine="{prompt}{answer}\ncritique: {critique}\nanswer:"
)
REWARDS: dict[str, dict[str, Any]] = {
    "flawed": {},
    "sound": {"flawed_reward": False, "reward_steps": 2000},
}
"""Settings of the reward models, where they are not the game's."""
_SFT = {"max_steps": 300, "per_device_train_batch_size": 64, "learning_rate": 1e-3, "report_to": "none"}


@dataclasses.dataclass
class Arm:
    """What one way to spend tokens gives: (prompts,) 1 for a right answer, and generated tokens."""

    right: list[float]
    tokens: list[int]

    @property
    def summary(self) -> dict[str, float]:
        """Accuracy, and tokens per prompt."""
        return {"accuracy": statistics.fmean(self.right), "tokens": statistics.fmean(self.tokens)}


class Elsewhere(EngineCritic):
    """The control: every draft gets the critique of the next prompt's draft."""

    def criticise(self, *given: Any, **options: Any) -> list[tuple[str, SamplingCost] | None]:
        """Critiques of other drafts, at their cost."""
        found = super().criticise(*given, **options)
        return [*found[1:], *found[:1]]


class Models:
    """The policies and the monitor of one seed, and the stories."""

    def __init__(self, seed: int, work: Path, quick: bool) -> None:
        small = {"eval_stories": 48, "train_stories": 128} if quick else {}
        training = {"training": {"max_steps": 4}} if quick else {}
        self.config = MinMaxConfig.from_dict({"seed": seed, "baseline": False, "data": small, **training})
        self.work, self.seed, self.quick = work / str(seed), seed, quick
        run = RunFolder(self.work / "game")
        if not (run.path / "final").exists():
            MinMaxJob(self.config, RunFolder.create(run.path, job="minmax")).play()
        self.stories: Stories = load_stories(self.config)
        prompts = self.stories.prompts
        self.monitor, self.rewards = run.path / "final" / "monitor", dict[str, Path]()
        for name, settings in REWARDS.items():
            demo = self.config.demo.from_dict({**self.config.demo.to_dict(), **({} if quick else settings)})
            built = demo_models(self.stories.building, prompts, demo, seed=seed)
            self.rewards[name] = built.reward
            if name == "flawed":
                self.base = built.base
        self.tokenizer = load_tokenizer(self.base)
        self._engines: dict[Path, TransformersEngine] = {}

    def engine(self, path: Path) -> TransformersEngine:
        """The engine of a model, loaded once."""
        if path not in self._engines:
            self._engines[path] = TransformersEngine(load_policy(str(path)).model, self.tokenizer)
        return self._engines[path]

    def scorer(self, *names: str) -> RewardFunctions:
        """Reward models by their names."""
        return load_scorer([f"model:path={self.rewards[name]},name={name}" for name in names])

    def params(self, seed: int, *, critic: bool = False) -> SamplingParams:
        """As the game samples."""
        player = self.config.monitor_model if critic else self.config.policy_model
        return SamplingParams(player.max_new_tokens, player.temperature, seed)

    def critic(self, path: Path, seed: int, kind: type[EngineCritic] = EngineCritic) -> EngineCritic:
        """A model as a critic, asked as the game asks its monitor."""
        return kind(self.engine(path), self.tokenizer, self.params(seed, critic=True), TEMPLATES)

    def text(self, rollout: Rollout) -> str:
        """A completion in words."""
        return str(self.tokenizer.decode(rollout.completion_ids, skip_special_tokens=True))

    def right(self, record: QARecord, text: str) -> float:
        """1 if an answer claims the right choice."""
        return float(self.stories.prompts.rules.claim(record, text) == record.answer_text)

    def taught(self, name: str, rows: Iterable[dict[str, str]]) -> Path:
        """The base after SFT on rows."""
        folder = self.work / name
        if not (folder / "final").exists():
            data = self.work / f"{name}.jsonl"
            atomic_write_text(data, "".join(json.dumps(row) + "\n" for row in rows))
            steps = {"max_steps": 4} if self.quick else {}
            settings = {"model_name_or_path": str(self.base), "train_data": str(data), "seed": self.seed}
            config = METHODS["sft"].resolve({**_SFT, **settings, **steps})
            TrainingJob("sft", config, RunFolder.create(folder, job="sft")).train()
        return folder / "final"


def rewriter_and_labels(models: Models) -> tuple[Path, Path]:
    """A policy that was taught to rewrite, and one that was taught the same answers."""
    prompts = models.stories.prompts
    asked = [prompts.policy(record) for record in models.stories.train]
    drafts = [
        group[0]
        for group in models.engine(models.base).generate(
            [models.tokenizer(text)["input_ids"] for text in asked], 1, models.params(models.seed + 1000)
        )
    ]
    texts = [models.text(each) for each in drafts]
    critiques = models.critic(models.monitor, models.seed + 2000)(asked, texts)
    gold = [prompts.made_up(record.answer_text) for record in models.stories.train]
    again = [
        {
            "prompt": TEMPLATES.refine.format(prompt=prompt, answer=draft, critique=critique),
            "completion": answer,
        }
        for prompt, draft, critique, answer in zip(asked, texts, critiques, gold, strict=True)
    ]
    first = [{"prompt": prompt, "completion": draft} for prompt, draft in zip(asked, texts, strict=True)]
    right = [{"prompt": prompt, "completion": answer} for prompt, answer in zip(asked, gold, strict=True)]
    return models.taught("rewriter", [*again, *first]), models.taught("labels", right)


def best_of(
    models: Models, policy: Path, seed: int, records: Sequence[QARecord]
) -> dict[str, dict[int, Arm]]:
    """The winner of each reward model among the first N samples, N = 1 to `MOST`."""
    sampler = BestOfNSampler(
        models.engine(policy),
        models.scorer(*REWARDS),
        models.tokenizer,
        n=MOST,
        params=models.params(seed),
        selection="none",
    )
    drawn = sampler.sample([models.stories.prompts.policy(record) for record in records])
    arms: dict[str, dict[int, Arm]] = {reward: {} for reward in REWARDS}
    for reward, curve in arms.items():
        for n in range(1, MOST + 1):
            winners = [max(each.candidates[:n], key=lambda one: one.scores[reward]) for each in drawn]
            curve[n] = Arm(
                [models.right(*pair) for pair in zip(records, (each.text for each in winners), strict=True)],
                [sum(len(one.rollout.completion_ids) for one in each.candidates[:n]) for each in drawn],
            )
    return arms


def picked(models: Models, policy: Path, seed: int, records: Sequence[QARecord]) -> Arm:
    """The first of `ROUNDS` + 1 drafts that the monitor calls right, or the last one."""
    critic = models.critic(models.monitor, seed)
    again = _Again(models, policy, seed)
    asked = [models.stories.prompts.policy(record) for record in records]
    texts, tokens, open_ = [""] * len(asked), [0] * len(asked), list(range(len(asked)))
    for round in range(ROUNDS + 1):
        for place, (text, count) in zip(open_, again([asked[i] for i in open_], round), strict=True):
            texts[place], tokens[place] = text, tokens[place] + count
        if round < ROUNDS:
            found = critic.criticise([asked[i] for i in open_], [texts[i] for i in open_], round=round)
            left = []
            for place, each in zip(open_, found, strict=True):
                critique, cost = each or ("", SamplingCost())
                tokens[place] += cost.completion_tokens
                if not RIGHT.search(critique):
                    left.append(place)
            open_ = left
    return Arm([models.right(*pair) for pair in zip(records, texts, strict=True)], tokens)


class _Again:
    """New drafts of prompts, each round from other random numbers."""

    def __init__(self, models: Models, policy: Path, seed: int) -> None:
        self.models, self.engine, self.seed = models, models.engine(policy), seed

    def __call__(self, asked: Sequence[str], round: int) -> list[tuple[str, int]]:
        if not asked:
            return []
        params = self.models.params(self.seed * 100 + round)
        ids = [self.models.tokenizer(text)["input_ids"] for text in asked]
        rollouts = [group[0] for group in self.engine.generate(ids, 1, params)]
        return [(self.models.text(each), len(each.completion_ids)) for each in rollouts]


def refined(
    models: Models, policy: Path, critic: EngineCritic, keep: str, seed: int, records: Sequence[QARecord]
) -> Arm:
    """Draft, critique, rewrite; the best by the reward, or the last, until a critique finds no fault."""
    until_accepted = RefinerRules(ROUNDS, until="verdict", keep="last", verdict=RIGHT.pattern)
    refiner = IterativeRefiner(
        models.engine(policy),
        models.tokenizer,
        params=models.params(seed),
        critic=critic,
        scorer=models.scorer(keep) if keep in REWARDS else None,
        rules=RefinerRules(ROUNDS) if keep in REWARDS else until_accepted,
        templates=TEMPLATES,
    )
    found = refiner.refine([models.stories.prompts.policy(record) for record in records])
    return Arm(
        [models.right(record, each.final.text) for record, each in zip(records, found, strict=True)],
        [each.cost.completion_tokens for each in found],
    )


def run(seed: int, work: Path, quick: bool) -> dict[str, Any]:
    """Every arm of one seed."""
    models = Models(seed, work, quick)
    records = models.stories.held_out
    rewriter, labels = rewriter_and_labels(models)
    arms: dict[str, Arm] = {}
    best = {
        "base": best_of(models, models.base, seed, records),
        "taught": best_of(models, rewriter, seed, records),
    }
    for name, policy in (("base", models.base), ("taught", rewriter)):
        critics = {
            "monitor": models.critic(models.monitor, seed),
            "itself": models.critic(policy, seed),
            "elsewhere": models.critic(models.monitor, seed, Elsewhere),
        }
        for critic, asked in critics.items():
            for keep in (*REWARDS, "verdict"):
                arms[f"{name}, {critic}, by {keep}"] = refined(models, policy, asked, keep, seed, records)
        arms[f"{name}, picked by the monitor"] = picked(models, policy, seed, records)
    arms["labels"] = best_of(models, labels, seed, records)["flawed"][1]
    rows = {
        name: arm.summary | _against(arm, best[name.partition(",")[0]])
        for name, arm in arms.items()
        if name != "labels"
    }
    return {
        "seed": seed,
        "prompts": len(records),
        "best_of_n": {
            name: {
                reward: {str(n): arm.summary for n, arm in curve.items()} for reward, curve in curves.items()
            }
            for name, curves in best.items()
        },
        "labels": arms["labels"].summary,
        "arms": rows,
    }


def _against(arm: Arm, best: dict[str, dict[int, Arm]]) -> dict[str, Any]:
    """The difference to the best-of-N of each reward model with at least as many tokens."""
    found = {}
    for reward, curve in best.items():
        n = next((n for n, each in curve.items() if each.summary["tokens"] >= arm.summary["tokens"]), MOST)
        difference = paired_difference(arm.right, curve[n].right)
        found[reward] = {"n": n} | {name: getattr(difference, name) for name in ("estimate", "low", "high")}
    return {"against": found}


def main() -> None:
    """Run every seed, and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--output", type=Path, help="file for the results; they are printed too")
    parser.add_argument("--work", type=Path, help="folder that keeps games; by default a temporary one")
    parser.add_argument("--quick", action="store_true", help="tiny, to see that it runs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        work = options.work or Path(temporary)
        found = [run(seed, work, options.quick) for seed in options.seeds]
    results = {**provenance(), "rounds": ROUNDS, "runs": found}
    if options.output:
        atomic_write_json(options.output, results)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
