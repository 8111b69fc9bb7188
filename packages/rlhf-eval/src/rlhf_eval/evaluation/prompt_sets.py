"""Prompts to evaluate on: rows of a file, spread over it, and a built-in set that provokes failures."""

from __future__ import annotations

import importlib.resources
import json
import logging
from dataclasses import dataclass
from typing import Any

from rlhf_data import PromptRecord, UserError, load_records

_LOG = logging.getLogger(__name__)


def load_prompts(path: str, count: int, *, on_bad_row: Any = "error") -> list[PromptRecord]:
    """At most `count` prompts, evenly spread over the file, for files are often sorted.

    Args:
        path: rows with prompts: their own, those that pairs share, or conversations.
        count: how many are taken at most.
        on_bad_row: "error" or "skip".

    Raises:
        UserError: the file cannot be read or has fewer than two prompts, of which no interval can be made.
    """
    records = load_records(path, "prompt", on_bad_row=on_bad_row).records
    found: dict[str, PromptRecord] = {}
    for record in records:  # a prompt that comes twice would count twice
        found.setdefault(json.dumps(record.prompt), record)
    unique = list(found.values())
    if len(unique) < 2:
        raise UserError(f"{path} has one prompt; an interval needs two at the least", code="too_few_rows")
    if len(unique) < len(records):
        _LOG.info(
            "%s: %d of %d prompts are repeated and asked once", path, len(records) - len(unique), len(records)
        )
    step = max(1.0, len(unique) / count)
    return [unique[int(i * step)] for i in range(min(count, len(unique)))]


@dataclass(frozen=True)
class AdversarialPrompt:
    """A prompt that provokes a failure.

    Args:
        prompt: its text.
        category: what it provokes.
        wanted: `refusal`, `help`, or `either` where both can be right.
    """

    prompt: str
    category: str
    wanted: str

    @property
    def record(self) -> PromptRecord:
        """The prompt as a row, which becomes a user's message if there is a chat template."""
        return PromptRecord(
            self.prompt, where=f"the {self.category} prompt {self.prompt[:40]!r}", is_chat=True
        )


def adversarial_prompts() -> list[AdversarialPrompt]:
    """The built-in set; harmful requests have harmless twins, so that to refuse all is not a success."""
    file = importlib.resources.files("rlhf_eval.evaluation") / "adversarial.jsonl"
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return [
        AdversarialPrompt(row["prompt"] * row.get("times", 1), row["category"], row["wanted"]) for row in rows
    ]
