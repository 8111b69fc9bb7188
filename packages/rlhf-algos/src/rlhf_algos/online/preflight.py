"""Pre-flight checks of a first sample of completions and rewards, before training.

Every check looks for something that makes online training learn nothing, or the wrong thing, without any
error: completions that never end, rewards that are all the same, rewards that prefer wrong answers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from rlhf_data import TokenSequence, pack

if TYPE_CHECKING:
    from rlhf_infer import RewardScores, Rollout

_MANY = 0.5
"""Share of completions or groups from which a warning is given."""
_NOISE = 1e-6
"""Differences of rewards up to this share of their size are rounding of fp32."""
_LEAST_REFERENCES = 4
_REPEATED = 1.5
"""Ratio to the tokens of prompts computed once from which repeating them gives a warning."""
_STANDARD_ERRORS = 2.0
"""A mean difference this many standard errors below 0 is not due to chance."""


@dataclass(frozen=True)
class Finding:
    """Something about a run that its user should know.

    Args:
        level: "error" for what leaves nothing to learn, or the wrong thing; "warning" for what may be meant.
        name: its fixed identifier.
        text: one sentence: observation, consequence, advice.
    """

    level: Literal["error", "warning"]
    name: str
    text: str


@dataclass(frozen=True)
class ReferenceRewards:
    """Total rewards of R reference answers that the data hold.

    Args:
        groups: R indices of the groups whose prompts they answer.
        own: (R,) rewards of the answers to their own prompts.
        shuffled: (R,) rewards of other prompts' answers put under the same prompts.
    """

    groups: Sequence[int]
    own: torch.Tensor
    shuffled: torch.Tensor


def preflight(
    rollouts: Sequence[Sequence[Rollout]],
    scores: RewardScores,
    *,
    eos_token_ids: Collection[int],
    max_completion_length: int,
    references: ReferenceRewards | None = None,
    relative_to_group: bool = True,
    mask_truncated: bool = False,
) -> list[Finding]:
    """Look for causes of a run that learns nothing.

    Args:
        rollouts: P groups of G sampled completions, all groups of one size.
        scores: their rewards, B = P·G, group by group.
        eos_token_ids: the tokens that end a completion.
        max_completion_length: tokens after which a completion is cut off.
        references: rewards of reference answers; None if the data have none.
        relative_to_group: whether advantages compare completions of one prompt (GRPO, RLOO), so that a group
            of equal rewards teaches nothing; otherwise (PPO) only all completions together must differ.
        mask_truncated: whether completions that are cut off are left out of the loss.

    Returns:
        Findings, errors first; empty if nothing is wrong.

    Raises:
        ValueError: no groups, groups of different sizes, or rewards for a different number of completions.
    """
    sizes = {len(group) for group in rollouts}
    count = sum(len(group) for group in rollouts)
    if len(sizes) != 1 or not count or scores.total.shape != (count,):
        raise ValueError(
            f"expected groups of one size with a reward for each completion, got sizes {sorted(sizes)} and "
            f"{tuple(scores.total.shape)} rewards"
        )
    total = scores.total.view(len(rollouts), -1)
    dead = mask_truncated or not _differs(total, relative_to_group).any()
    found = [
        *_endings(rollouts, eos_token_ids, max_completion_length, dead=dead, masked=mask_truncated),
        *_variance(rollouts, total, relative_to_group),
        *_functions(scores),
        *(_signs(references, total) if references is not None else ()),
    ]
    return sorted(found, key=lambda finding: finding.level != "error")


def repeated_prompts(rollouts: Sequence[Sequence[Rollout]], max_tokens: int | None) -> list[Finding]:
    """A finding if a token budget for batches makes prompts be computed several times.

    `max_tokens` is the setting `max_tokens_per_batch`.
    """
    sequences = [
        TokenSequence([*rollout.prompt_ids, *rollout.completion_ids], len(rollout.prompt_ids))
        for group in rollouts
        for rollout in group
    ]
    least, cut = (sum(batch.num_tokens for batch in pack(sequences, budget)) for budget in (None, max_tokens))
    if cut < _REPEATED * least:
        return []
    needed = max(
        len(group[0].prompt_ids) + sum(len(rollout.completion_ids) for rollout in group) for group in rollouts
    )
    text = (
        f"max_tokens_per_batch {max_tokens} holds few completions beside their prompt, which is computed "
        f"again for the others: {cut / least:.1f} times the tokens, and as many times the seconds; raise it "
        f"to {needed} if memory allows"
    )
    return [Finding("warning", "repeated_prompts", text)]


def _endings(
    rollouts: Sequence[Sequence[Rollout]],
    eos_token_ids: Collection[int],
    limit: int,
    *,
    dead: bool,
    masked: bool,
) -> Iterator[Finding]:
    """Completions that are cut off, have no end token, or are empty."""
    flat = [rollout for group in rollouts for rollout in group]
    cut = sum(rollout.finish_reason == "length" for rollout in flat)
    ended = sum(any(i in eos_token_ids for i in rollout.completion_ids[-1:]) for rollout in flat)
    if cut == len(flat):
        consequence = "all are masked, so that there is no loss" if masked else "ending is never learned"
        yield Finding(
            "error" if dead else "warning",
            "truncated",
            f"all {cut} sampled completions were cut off at max_completion_length {limit}; nothing they end "
            f"with can be rewarded, and {consequence}: raise max_completion_length, or start from a model "
            "that ends its completions",
        )
    elif cut >= _MANY * len(flat):
        yield Finding(
            "warning",
            "truncated",
            f"{cut} of {len(flat)} sampled completions were cut off at max_completion_length {limit}; what "
            "they would have ended with is not rewarded: raise max_completion_length",
        )
    if not ended:
        ids = ", ".join(map(str, sorted(eos_token_ids))) or "none"
        yield Finding(
            "error" if dead and cut == len(flat) else "warning",
            "no_eos",
            f"none of {len(flat)} sampled completions has an end token (ids {ids}); either the model was not "
            "trained to write one, or it ends with another token: fine-tune it on completions that end, or "
            "correct eos_token_id of its generation config",
        )
    if all(set(rollout.completion_ids) <= set(eos_token_ids) for rollout in flat):
        yield Finding(
            "error",
            "empty",
            f"all {len(flat)} sampled completions are empty: the model ends at once, and there is nothing to "
            "reward; check that prompts have the form it was trained on, its chat template for instance",
        )


def _variance(
    rollouts: Sequence[Sequence[Rollout]], total: torch.Tensor, relative_to_group: bool
) -> Iterator[Finding]:
    """Rewards that are all the same, where they are compared."""
    differs = _differs(total, relative_to_group)
    size, count = total.shape[1], len(differs)
    equal = count - int(differs.sum())
    if equal == count:
        low, high = float(total.min()), float(total.max())
        everywhere = high - low <= _NOISE * max(1.0, abs(high), abs(low))
        value = f"{high:g} everywhere" if everywhere else f"from {low:g} to {high:g} across prompts"
        what = f"in each of the {count} groups of {size}" if relative_to_group else f"of all {total.numel()}"
        yield Finding(
            "error",
            "zero_variance",
            f"the rewards {what} sampled completions are equal ({value}), so that every advantage is 0 and "
            f"nothing is learned: {_remedy(rollouts)}",
        )
    elif equal >= _MANY * count:
        yield Finding(
            "warning",
            "zero_variance",
            f"in {equal} of {count} groups all {size} sampled completions have equal rewards, and teach "
            f"nothing: {_remedy(rollouts)}",
        )


def _remedy(rollouts: Sequence[Sequence[Rollout]]) -> str:
    if len(rollouts[0]) == 1:
        return "sample more than one completion a prompt, or check the reward function"
    if all(len({tuple(rollout.completion_ids) for rollout in group}) == 1 for group in rollouts):
        return "all completions of a prompt are the same text, raise the temperature"
    return (
        "check the reward function, take prompts that the model sometimes gets right, give partial credit, "
        "or fine-tune the model on demonstrations first"
    )


def _differs(total: torch.Tensor, relative_to_group: bool) -> torch.Tensor:
    """Whether rewards differ in each group (P,), or among all of them (1,)."""
    rows = total if relative_to_group else total.view(1, -1)
    scale = rows.abs().amax(1).clamp(min=1.0)
    return rows.amax(1) - rows.amin(1) > _NOISE * scale


def _functions(scores: RewardScores) -> Iterator[Finding]:
    """Single reward functions that never apply, or give all completions the same reward."""
    for name, row in zip(scores.names, scores.rewards, strict=True):
        known = row[~row.isnan()]
        if not len(known):
            yield Finding(
                "warning",
                "never_applicable",
                f"the reward function {name} returned None for all {len(row)} sampled completions, so it has "
                "no part in the reward: check that the data have the columns it reads, or leave it out",
            )
        elif len(scores.names) > 1 and len(known) > 1 and not _differs(known[None], True).any():
            yield Finding(
                "warning",
                "constant_reward",
                f"the reward function {name} gave {float(known[0]):g} to all {len(known)} sampled "
                "completions that it applies to, so it teaches nothing now: check that it reads what it "
                "should",
            )


def _signs(references: ReferenceRewards, total: torch.Tensor) -> Iterator[Finding]:
    """Rewards that are lower for reference answers than for others, or the same for all."""
    own, shuffled = references.own.double(), references.shuffled.double()
    if len(own) < _LEAST_REFERENCES:
        return
    sampled = total.double()[list(references.groups)].mean(1)
    if _below(own, shuffled):
        yield Finding(
            "error",
            "wrong_sign",
            f"reference answers are rewarded {float(own.mean()):.4g} on average and other prompts' answers "
            f"in their place {float(shuffled.mean()):.4g}; the reward prefers wrong answers, so its sign is "
            "probably wrong: check the reward function and the sign of its weight",
        )
    elif _below(own, sampled):
        yield Finding(
            "warning",
            "wrong_sign",
            f"reference answers are rewarded {float(own.mean()):.4g} on average, less than what the model "
            f"writes, {float(sampled.mean()):.4g}; if the reward is to favour them, its sign is wrong: check "
            "the reward function, the sign of its weight, and what it asks for that the references lack",
        )
    elif _unread(own, shuffled, total):
        yield Finding(
            "warning",
            "references_unread",
            f"every reference answer is rewarded {float(own[0]):g}, as low as the worst sampled completion, "
            "under its own prompt and under others; the reward may be unable to read right answers: check "
            "the form it expects of them",
        )


def _below(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether paired values are lower on average, by more than chance explains."""
    difference = first - second
    error = difference.std(correction=1) / len(difference) ** 0.5
    return bool(difference.mean() < -_STANDARD_ERRORS * error - _NOISE)


def _unread(own: torch.Tensor, shuffled: torch.Tensor, total: torch.Tensor) -> bool:
    low, high = float(total.min()), float(total.max())
    constant = not _differs(torch.cat([own, shuffled])[None], True).any()
    return constant and high > low and float(own[0]) <= low + _NOISE * max(1.0, abs(low))
