"""A fingerprint of a run's models at its start, with which a resumed run checks that they are the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from rlhf_data import QARecord, TokenSequence, UserError, pack
from rlhf_minmax.game.forward_pass import MinMaxPipeline
from rlhf_models import encode_completion, encode_prompt

_STORIES = 8
_TOLERANCE = 0.2
"""Standard deviations of a score, and nats of an answer's mean log-prob: wide, as another device or dtype
rounds otherwise."""

Marks = dict[str, list[float]]


def marks_of(pipeline: MinMaxPipeline, records: Sequence[QARecord]) -> Marks:
    """The models' scores of right answers to the first labelled stories; all processes must call it.

    By answer the scores of the reward model and of a judge that is a model here, in standard deviations and
    without a critique; and the players' mean log-probs over its tokens, unless the players are sharded.
    """
    known = [record for record in records if record.answer is not None][:_STORIES]
    made_up = pipeline.prompts.made_up
    answers = [pipeline.read_answer(known, i, made_up(r.answer_text)) for i, r in enumerate(known)]
    marks = {"reward_model": pipeline.rewards(known, answers).tolist()}
    if pipeline.config.judge_model.kind in ("head", "prompted"):
        marks["judge_model"] = pipeline.judged(known, answers, [None] * len(known)).tolist()
    if pipeline.shared is not None:
        return marks
    for role in ("policy", "monitor"):
        player, sequences = getattr(pipeline.players, role), []
        for record, answer in zip(known, answers, strict=True):
            start = encode_prompt(player.tokenizer, pipeline.prompts.policy(record))
            end = encode_completion(player.tokenizer, answer.text)
            sequences.append(TokenSequence([*start, *end], len(start)))
        found: dict[int, float] = {}
        for packed in pack(sequences, pipeline.config.training.max_tokens_per_batch):
            batch = packed.to(player.device)
            with torch.no_grad():
                logps = player(batch).logps.float()
            means = batch.sequence_sums(logps) / batch.sequence_lengths()
            found |= dict(zip(batch.sequence_ids.tolist(), means.tolist(), strict=True))
        marks[f"{role}_model"] = [found[number] for number in range(len(sequences))]
    return marks


def check_same_models(now: Marks, before: Mapping[str, Sequence[float]], run: Path) -> None:
    """Refuse models whose fingerprints differ from those of the run's start by more than rounding.

    Raises:
        UserError: a model is not the same.
    """
    for role, values in now.items():
        former = before.get(role, ())
        if len(former) != len(values):  # an earlier version's, or with other sharding
            continue
        if any(abs(a - b) > _TOLERANCE for a, b in zip(values, former, strict=True)):
            raise UserError(
                f"{role} is another model than when the run in {run} began, and its start was measured with "
                "the former one; put that back, or begin another run with the new one",
                code="different_model",
                role=role,
            )
