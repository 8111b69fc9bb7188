"""Completions of a comparison's policies on the same held-out prompts, and their scores."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_data import PromptRecord, RunFolder, atomic_write_lines, finite, remove_folder
from rlhf_train.comparison.plan import ComparisonPlan

if TYPE_CHECKING:
    from rlhf_eval.evaluation import RLHFEvaluator

POLICY_LOG = "policy.jsonl"
"""Of a run: its policy's measurements, a row with `step` each; `rlhf-report compare` reads it."""


def is_measured(run: RunFolder, steps: Sequence[int]) -> bool:
    """Whether a run's policies are measured after all these steps."""
    return {row["step"] for row in run.read_lines(POLICY_LOG)} >= {0, *steps}


class PolicyMeter:
    """Measures policies on one set of prompts, each against the model that all of them start from.

    Every policy can read and complete the prompts; `folder` keeps completions and scores of the start.
    """

    def __init__(
        self, plan: ComparisonPlan, prompts: Sequence[PromptRecord], folder: Path, progress: Any
    ) -> None:
        from rlhf_eval.evaluation import EvalConfig
        from rlhf_eval.scoring import load_scorer

        self.plan, self.prompts, self.progress = plan, prompts, progress
        self.config = EvalConfig(max_new_tokens=plan.max_new_tokens, temperature=plan.temperature)
        self.reward = load_scorer(plan.reward[0])
        self.held_out_reward = load_scorer(plan.held_out_reward) if plan.held_out_reward else None
        self.start = self._evaluator(plan.model, "start", folder, None)

    def measure_start(self) -> dict[str, float]:
        """Measure the model that all runs start from; its completions and scores are kept."""
        return {**self._numbers(self.start), "eval_policy/kl": 0.0}

    def measure_run(self, run: RunFolder, steps: Sequence[int]) -> None:
        """Measure a finished run's start, its checkpoints and its end, and write its log.

        What was measured before is not measured again.  Checkpoints before the last one are removed then,
        that of an interruption too.

        The policy is measured after each of `steps`; the last one is the end of the run.
        """
        rows = {row["step"]: row for row in run.read_lines(POLICY_LOG)}
        places = {step: run.checkpoint_path(step) for step in steps[:-1]} | {steps[-1]: run.path / "final"}
        if 0 not in rows:
            rows[0] = {"step": 0, **self.measure_start()}
        for step, folder in places.items():
            if step in rows:
                continue
            name = f"{run.path.parent.name}, {run.path.name}, step {step}"
            evaluator = self._evaluator(str(folder), name, run.path / "policy" / f"step-{step}", self.start)
            rows[step] = {"step": step, **self._numbers(evaluator)}
            atomic_write_lines(run.path / POLICY_LOG, [rows[each] for each in sorted(rows)])
        for step, folder in run.checkpoints():
            if step < steps[-1]:
                remove_folder(folder)

    def _evaluator(
        self, model: str, name: str, folder: Path, reference: RLHFEvaluator | None
    ) -> RLHFEvaluator:
        from rlhf_eval.evaluation import Place, RLHFEvaluator, load_policy

        folder.mkdir(parents=True, exist_ok=True)
        return RLHFEvaluator(
            load_policy(model),
            reference,
            self.reward,
            self.prompts,
            config=self.config,
            held_out_reward=self.held_out_reward,
            place=Place(name, folder, self.progress),
        )

    def _numbers(self, evaluator: RLHFEvaluator) -> dict[str, float]:
        """Means over the completions of a policy, under the names that its log gets."""
        from rlhf_eval.evaluation import measure_policy

        found = measure_policy(evaluator)
        means: dict[str, Any] = {
            kind: found[kind]["mean"]["estimate"] for kind in evaluator.rewards if kind in found
        }
        means |= {key: found[key]["estimate"] for key in ("tokens", "truncated", "refusals") if key in found}
        means |= {key: found["diversity"][key] for key in ("distinct_2", "repeated_4grams")}
        if "kl" in found:
            means |= {"kl": found["kl"]["kl"]["estimate"], "entropy": found["kl"]["entropy_per_token"]}
        return {f"eval_policy/{key}": value for key, value in finite(means).items() if value is not None}
