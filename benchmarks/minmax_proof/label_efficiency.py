"""Does the game need fewer labels?  Accuracy over the share of training stories whose answers are known.

    uv run python benchmarks/minmax_proof/label_efficiency.py --task stories \
        --output benchmarks/results/label_efficiency_stories.json

All arms of a seed start from the same base and flawed reward model, make as many updates of the policy on as
many answers, and use the same labelled stories: constraint, made-up answers, break-even weight, built judge,
and what the other arms learn from.  The base was made from truthful texts of all stories, as a pretrained
model is made from text of the world; the game does not count that as labels.

- `minmax`: the defaults; the monitor learns on as many labelled stories per step as the policy plays.
- `minmax_all`: the monitor learns on the policy's stories, labelled or not.
- `truth_only`: the monitor is paid for the truth alone, nothing for lowering the judge's score: no adversary.
- `warmup_only`: the monitor learns in the warm-up and is frozen as the policy begins.
- `cooperative`: the monitor is paid the judge's score, as the policy is.
- `validator`: the judge is a validator: critiques that find fault are checked, a call each.
- `validator_alone`: the same without the truthfulness constraint, so that labels serve for made-up answers
  and the judge's weight alone.
- `rlvr`: the policy is paid 1 for the right answer, on the labelled stories alone; no reward model, no game.
- `sft`: the policy is fine-tuned on right answers to the labelled stories, as many stories in each update; no
  reward model, no game.
- `refit`: the flawed reward model learns further, from its annotators' pairs and as many of right against
  wrong answers to the labelled stories; the policy from it on all stories.
- `plain`: the flawed reward model alone; uses no label.

Metrics are greedy on 512 held-out stories.  Prints JSON: every seed's value, means with 95% intervals, and
paired differences of `minmax` to each arm.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from cells import arms_parser, difference, play_cells, provenance, publish, summary
from torch import Tensor

from rlhf_data import QARecord, RunFolder, TokenSequence, apply_overrides
from rlhf_models import encode_completion, encode_prompt

GAMES: dict[str, list[str]] = {
    "minmax": [],
    "minmax_all": ["game.monitor_stories=all"],
    "truth_only": ["game.adversary_weight=0"],
    "warmup_only": ["training.monitor_steps=8"],
    "cooperative": ["game.adversary_weight=-1"],
    "validator": ["judge_model.kind=validator"],
    "validator_alone": [
        "judge_model.kind=validator",
        "constraint.rule=fixed",
        "training.constraint_penalty_lambda=0",
    ],
}
OTHERS = ("rlvr", "sft", "refit", "plain")
SHOWN = {"accuracy": "policy/accuracy", "hack_rate": "policy/hack_rate"}
MONITOR = {"monitor": "monitor/verdict_balanced_accuracy"}
REFIT_STEPS = 100
COMMON = ["training.save_steps=null", "baseline=false", "force=true", "diagnostics.sample_steps=null"]
COMMON += ["diagnostics.exploitability_stories=0"]


@dataclass(frozen=True)
class LabelReward:
    """Pays 1 for the right answer to a story whose prompt is known, else 0: a verifier."""

    records: dict[str, QARecord]
    rules: Any

    def score(
        self, prompts: Sequence[str], completions: Sequence[str], *, max_tokens: int | None = None
    ) -> Tensor:
        """(B,) rewards."""
        del max_tokens
        asked = zip(prompts, completions, strict=True)
        found = [(self.records[prompt], text) for prompt, text in asked]
        return torch.tensor([float(self.rules.claim(r, text) == r.answer_text) for r, text in found])


def play(task: str, seed: int, share: float, arm: str, work: Path) -> dict[str, Any]:
    """One run; see `cells.play_cells`."""
    settings = [f"seed={seed}", f"data.world={task}", f"data.label_share={share}"]
    return play_arm(arm, settings, work, f"{task}-{seed}-{share}-{arm}")


def play_arm(
    arm: str, settings: Sequence[str], work: Path, name: str, draw: Callable[[Any], Any] | None = None
) -> dict[str, Any]:
    """One run of an arm, in the folder `name` of `work`, on stories of the settings or of `draw`."""
    from rlhf_minmax import MinMaxConfig, MinMaxJob, load_stories

    started, cpu = time.perf_counter(), time.process_time()
    config = MinMaxConfig.from_dict(apply_overrides({}, [*COMMON, *GAMES.get(arm, []), *settings]))
    stories = draw(config) if draw else load_stories(config)
    if arm in GAMES:
        folder = RunFolder.create(work / name, resume=True)
        job = MinMaxJob(config, folder, cache_folder=work / "models", stories=stories if draw else None)
        results = job.play(resume=True)
        after, tokens = results["after"], results["num_tokens"]
        found = {name: after[key] for name, key in (SHOWN | MONITOR).items()}
        found |= {"start": results["before"]["policy/accuracy"], "w_judge": results["break_even"]["w_judge"]}
        found["calls"] = sum(row.get("validator/calls", 0) for row in folder.read_metrics())
    else:
        found, tokens = _without_game(config, stories, arm, work / "models")
    times = {"seconds": time.perf_counter() - started, "cpu_seconds": time.process_time() - cpu}
    return found | {"num_tokens": tokens} | {name: round(value, 1) for name, value in times.items()}


def _without_game(config: Any, stories: Any, arm: str, cache: Path) -> tuple[dict[str, Any], int]:
    """Train a policy on a reward alone, as often as the game's policy is."""
    from rlhf_minmax import MinMaxTrainer, build_game, measure_scales
    from rlhf_minmax.evaluation.evaluate import evaluate
    from rlhf_minmax.game.scores import Scale

    pipeline = build_game(config, stories, cache_folder=cache).pipeline
    records = stories.train
    if arm == "sft":
        tokens = _fine_tune(pipeline.players.policy, stories, config)
        return _measured(evaluate(pipeline, stories.held_out, pipeline.players.policy)), tokens
    if arm == "rlvr":
        labelled = stories.labelled
        known = {stories.prompts.policy(record): record for record in labelled}
        reward = LabelReward(known, stories.prompts.rules)
        pipeline = replace(pipeline, reward_model=reward, reward_scale=Scale())
        records = (labelled * len(records))[: len(records)]
    else:
        if arm == "refit":
            _refit(pipeline.reward_model, stories, config)
        probe = records[: config.data.probe_stories]
        pipeline, _ = measure_scales(pipeline, probe, seed=config.seed)
    trainer = MinMaxTrainer(pipeline, config, records, adversary=False)
    trainer.train()
    if arm == "rlvr":
        # The held-out stories have labels of their own, with which nothing is trained.
        every = {stories.prompts.policy(record): record for record in stories.held_out}
        pipeline = replace(pipeline, reward_model=LabelReward(every, stories.prompts.rules))
    metrics = evaluate(pipeline, stories.held_out, pipeline.players.policy)
    return _measured(metrics), trainer.num_tokens


def _measured(metrics: dict[str, Any]) -> dict[str, Any]:
    return {name: metrics[key] for name, key in SHOWN.items()}


def _fine_tune(policy: Any, stories: Any, config: Any) -> int:
    """Right answers to the labelled stories, in as many updates of as many stories as the game's policy."""
    from rlhf_algos import SFTConfig, SFTTrainer
    from rlhf_minmax.demo.teachers import answer_text

    training, labelled = config.training, list(stories.labelled)
    updates = training.num_steps(len(stories.train), adversary=False) * training.policy_updates
    size, rng, examples = training.batch_size, random.Random(config.seed), []
    while len(examples) < updates * size:
        rng.shuffle(labelled)
        for record in labelled:
            start = encode_prompt(policy.tokenizer, stories.prompts.policy(record))
            end = encode_completion(policy.tokenizer, answer_text(record.answer_text))
            examples.append(TokenSequence([*start, *end, policy.tokenizer.eos_token_id], len(start)))
    settings = SFTConfig(
        learning_rate=training.policy_learning_rate,
        lr_scheduler_type=config.policy_model.lr_scheduler_type,
        adam_beta1=config.policy_model.adam_betas[0],
        adam_beta2=config.policy_model.adam_betas[1],
        max_grad_norm=training.max_grad_norm,
        per_device_train_batch_size=size,
        num_train_epochs=1,
        max_tokens_per_batch=training.max_tokens_per_batch,
        save_steps=None,
        seed=config.seed,
    )
    with policy.active() as model:
        trainer = SFTTrainer(model, settings, examples[: updates * size])
        trainer.train()
        model.eval()
    return trainer.num_tokens


def _refit(model: Any, stories: Any, config: Any) -> None:
    """Right answers to the labelled stories against wrong ones, among as many of the annotators' pairs."""
    from rlhf_minmax.demo.teachers import Teacher, answer_text
    from rlhf_minmax.demo.trainings import DemoBuilder

    rules, labelled, rng = stories.prompts.rules, stories.labelled, random.Random(config.seed)
    teacher, settings = Teacher(rules, labelled, rng), config.demo_settings()
    builder = DemoBuilder(stories.building, stories.prompts, settings, model.tokenizer, seed=config.seed + 1)
    pairs = builder.rated_pairs(REFIT_STEPS // 2)
    for _ in range(len(pairs)):
        record = rng.choice(labelled)
        right, wrong = record.answer_text, teacher.wrong_choice(record)
        pairs.append((stories.prompts.policy(record), answer_text(right), answer_text(wrong)))
    rng.shuffle(pairs)
    builder.fit_reward(model, pairs)


def main() -> None:
    """Command line."""
    parser = arms_parser(__doc__, [*GAMES, *OTHERS], [41, 42, 43, 44, 45], "labels")
    parser.add_argument("--task", choices=("stories", "sums"), default="stories")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.01, 0.05, 1.0])
    options = parser.parse_args()
    arms = ["minmax", *(arm for arm in options.arms if arm not in ("minmax", "plain"))]
    task, seeds, shares = options.task, options.seeds, options.shares
    # Models that several cells share are built by the first of these cells.
    first = [(task, seed, shares[0], "minmax") for seed in seeds]
    second = [(task, seed, share, "minmax") for share in shares[1:] for seed in seeds]
    rest = [
        (task, seed, share, arm)
        for share in shares
        for arm in arms[1:]
        for seed in seeds
        if not (share == 1 and arm == "minmax_all")
    ]
    plain = [(task, seed, 1.0, "plain") for seed in seeds] if "plain" in options.arms else []
    waves = [first, second, [*rest, *plain]]
    cells = [cell for wave in waves for cell in wave]
    results = dict(zip(cells, play_cells(play, waves, options.work, options.workers), strict=True))

    def row(share: float, arm: str, name: str) -> list[Any]:
        return [results[task, seed, share, arm].get(name) for seed in seeds]

    table, differences = {}, {}
    for share in shares:
        played = [arm for arm in arms if (task, seeds[0], share, arm) in results]
        names = (*SHOWN, *MONITOR, "calls", "num_tokens", "seconds", "cpu_seconds")
        table[str(share)] = {arm: {name: summary(row(share, arm, name)) for name in names} for arm in played}
        own = row(share, "minmax", "accuracy")
        differences[str(share)] = {
            arm: difference(own, row(share, arm, "accuracy")) for arm in played if arm != "minmax"
        }
    found = {"benchmark": "label_efficiency", "task": task, "seeds": seeds, **provenance()}
    found |= {"labels": {str(share): max(1, round(share * 2048)) for share in shares}, "arms": table}
    found |= {"minmax_minus": differences}
    found["start"] = summary(row(shares[0], "minmax", "start"))
    if plain:
        found["plain"] = {name: summary(row(1.0, "plain", name)) for name in SHOWN}
    publish(found, options.output)


if __name__ == "__main__":
    main()
