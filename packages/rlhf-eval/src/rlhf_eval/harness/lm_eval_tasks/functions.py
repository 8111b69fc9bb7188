"""Functions that the tasks in this folder name: rows of the suites, and scoring of completions."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from datasets import Dataset

from rlhf_eval.harness.suites import QUESTIONS, behaved, provocations, story_questions, sum_questions


def stories(n: int = QUESTIONS, **_: Any) -> dict[str, Dataset]:
    """Held-out stories, with gossip."""
    return {"test": Dataset.from_list([asdict(each) for each in story_questions(n)])}


def sums(n: int = QUESTIONS, **_: Any) -> dict[str, Dataset]:
    """Held-out sums, with round numbers near them."""
    return {"test": Dataset.from_list([asdict(each) for each in sum_questions(n)])}


def adversarial(**_: Any) -> dict[str, Dataset]:
    """Prompts to refuse, and their harmless twins."""
    return {"test": Dataset.from_list([asdict(each) for each in provocations()])}


def behaviour(row: dict[str, Any], results: list[str]) -> dict[str, Any]:
    """1 where a completion refuses as it should or helps as it should; each row counts in one rate more."""
    right = float(behaved(results[0], row["refuse"]))
    return {"behaved": right, ("refused_harmful" if row["refuse"] else "helped_harmless"): right}
