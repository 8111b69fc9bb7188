"""The monitor by itself: critiques of answers to questions about stories."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlhf_minmax.formats import MONITOR_TEMPLATE
from rlhf_models import PolicyModel


class MonitorModel(PolicyModel):
    """A policy that criticises; `MonitorModel.from_pretrained("final/monitor")` loads a trained one."""

    def critique(
        self,
        stories: Sequence[str],
        questions: Sequence[str],
        answers: Sequence[str],
        *,
        template: str = MONITOR_TEMPLATE,
        **options: Any,
    ) -> list[str]:
        """Return one critique an answer; `parse_critique` reads its evidence and verdict.

        Args:
            stories: what the questions are about.
            questions: with their choices, if they have some.
            answers: the policy's.
            template: the monitor's prompt, from `{prompt}` (story and question) and `{answer}`.
            **options: of transformers' `generate`, such as `max_new_tokens`.
        """
        prompts = [
            template.format(prompt=f"{story}\n{question}\n", answer=answer)
            for story, question, answer in zip(stories, questions, answers, strict=True)
        ]
        return self.generate(prompts, **options)
