"""A training that goes back once, without a measurement, and a check of what it scores."""

from __future__ import annotations

from typing import Any

from rlhf_algos.safeguards.capability import CapabilityGuard


class RolledBack(CapabilityGuard):
    """Takes a training back once, after step `at` to the checkpoint of step `to`, without measuring."""

    def __init__(self, trainer: Any, *, at: int, to: int) -> None:
        self._trainer, self._config, self._event = trainer, trainer.config, (at, to)
        self._run, self._checkpoints = trainer.run, trainer.checkpoints
        self.rollbacks = 0
        self.lost = self.saves = False

    def begin(self) -> None: ...

    def look(self) -> dict[str, float]:
        at, to = self._event
        self.lost = not self.rollbacks and self._trainer.step == at
        if self.lost:
            self._note({"step": at, "to": to, "reasons": ["a test"]})
        return {}


def check_prompts(trainer: Any) -> None:
    """Have a trainer check that the completions it scores are of the prompts it scores them with."""
    score: Any = trainer.score

    def scored(prompts: Any, rollouts: Any, *rest: Any) -> Any:
        assert [list(group[0].prompt_ids) for group in rollouts] == [
            list(each.prompt_ids) for each in prompts
        ]
        return score(prompts, rollouts, *rest)

    trainer.score = scored
