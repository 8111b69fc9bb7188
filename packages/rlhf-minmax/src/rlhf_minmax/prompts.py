"""How records are put to the players and the judge, as text."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_data import QADatasetConfig, QARecord, render_prompt
from rlhf_minmax.texts import MONITOR_TEMPLATE, POLICY_TEMPLATE, TextRules


@dataclass(frozen=True)
class Prompts:
    """The templates of one run, and the rules of its data set.

    Args:
        dataset: the data set's own template.
        rules: what can be said of its answers and evidence.
        policy_template: prompt of the policy, from `{prompt}`.
        monitor_template: prompt of the monitor, from `{prompt}` and `{answer}` (with its leading blank).
    """

    dataset: QADatasetConfig
    rules: TextRules
    policy_template: str = POLICY_TEMPLATE
    monitor_template: str = MONITOR_TEMPLATE

    def policy(self, record: QARecord) -> str:
        """What the policy reads."""
        return self.policy_template.format(prompt=render_prompt(record, self.dataset))

    def monitor(self, record: QARecord, answer: str) -> str:
        """What the monitor reads."""
        return self.monitor_template.format(prompt=render_prompt(record, self.dataset), answer=answer)

    def judge(self, question: str, answer: str) -> str:
        """What the judge reads before the critique: never the story."""
        return f"{question}\nanswer:{answer}\ncritique:"

    def drill(self, answer: str) -> str:
        """The monitor's prompt without a story."""
        return self.monitor_template.format(prompt="", answer=answer)

    def fingerprint(self) -> list[str]:
        """What distinguishes these prompts from others, for cache keys."""
        return [
            self.dataset.prompt_template,
            self.dataset.choice_separator,
            type(self.rules).__name__,
            self.policy_template,
            self.monitor_template,
        ]
