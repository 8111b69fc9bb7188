"""Scores of prompts with several completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from rlhf_data import PromptRecord, Text, as_messages
from rlhf_eval.evaluation.written import as_read
from rlhf_eval.reward_errors import ScoredCandidates
from rlhf_eval.scoring import Scorer, as_text
from rlhf_report.errors.rows import Candidates
from rlhf_report.options import progress


def score_candidates(
    scorer: Scorer | None, rows: Sequence[Candidates], groups: Mapping[str, Sequence[Any]]
) -> ScoredCandidates:
    """The rows with a model's scores; of an ensemble, the members' mean.

    Without a `scorer` the rows have their own scores.
    """
    scores = [each.scores for each in rows] if scorer is None else _scored(scorer, rows)
    return ScoredCandidates(
        [as_text(each.prompt) for each in rows],
        [each.completions for each in rows],
        [each.num_correct for each in rows],
        [each for each in scores if each is not None],
        [each.subset for each in rows],
        [each.name for each in rows],
        groups,
    )


def _scored(scorer: Scorer, rows: Sequence[Candidates]) -> list[np.ndarray]:
    read = [
        as_read(scorer.reads_chat, _prompt(scorer, row.prompt), text)
        for row in rows
        for text in row.completions
    ]
    with progress(len(read), f"scoring by {scorer.name}") as done:
        flat = scorer([prompt for prompt, _ in read], [text for _, text in read], done=done).mean(0)
    ends = list(accumulate((len(row.completions) for row in rows), initial=0))
    return [flat[start:end] for start, end in pairwise(ends)]


def _prompt(scorer: Scorer, prompt: Text) -> Text:
    """A plain text is what a user says, as RewardBench 2 has it, where the model reads chats."""
    if not scorer.reads_chat or not isinstance(prompt, str):
        return prompt
    transcript: Any = as_messages(PromptRecord(prompt))
    said: Any = as_messages(PromptRecord(prompt, is_chat=True))
    return said.prompt if isinstance(transcript.prompt, str) else transcript.prompt
