"""Rollouts of one step: sampling, scoring and metrics, for every online method."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rlhf_algos.advantages import zero_std_fraction
from rlhf_data import PromptExample, TokenSequence, as_completion
from rlhf_infer import Rollout, Samples, goes_on_after, space_between

_LENGTH, _TRUNCATED, _EOS = 0, 1, 2
_FACTS = 3


@dataclass
class Completion:
    """A sampled completion with its training data.

    Args:
        prompt: what it completes.
        rollout: how it was sampled.
        index: its place among the completions of the step, over all processes.
        text: the completion as its reward functions see it.
        tokens: (T,) tensors on the CPU, one entry per completion token: `old_logps`, `advantages`, ...
        weight: what each of its tokens counts in the loss; 0 leaves it out.
    """

    prompt: PromptExample
    rollout: Rollout
    index: int
    text: Any = ""
    tokens: dict[str, Tensor] = field(default_factory=dict)
    weight: float = 1.0

    @property
    def sequence(self) -> TokenSequence:
        """Prompt and completion, the completion scored."""
        ids = (*self.rollout.prompt_ids, *self.rollout.completion_ids)
        return TokenSequence(ids, len(self.rollout.prompt_ids))

    @property
    def length(self) -> int:
        """Tokens of the completion."""
        return len(self.rollout.completion_ids)

    @property
    def truncated(self) -> bool:
        """Whether it was truncated at the maximum length."""
        return self.rollout.finish_reason == "length"

    def facts(self, eos_token_ids: Sequence[int]) -> list[float]:
        """Facts in the step's table in addition to rewards."""
        ended = bool(self.rollout.completion_ids) and self.rollout.completion_ids[-1] in eos_token_ids
        return [float(self.length), float(self.truncated), float(ended)]


def completion_text(tokenizer: Any, prompt: PromptExample, rollout: Rollout) -> Any:
    """A completion for reward functions: a text, or the assistant's message after a chat.

    A text begins with the space between prompt and completion, so that both together are what was sampled.
    """
    text = tokenizer.decode(rollout.completion_ids, skip_special_tokens=True)
    after = goes_on_after(prompt.prompt, rollout.prompt_ids)
    if text:
        text = space_between(tokenizer, after, rollout.completion_ids) + text
    return as_completion(prompt.prompt, text)


def completions_of(
    prompts: Sequence[PromptExample],
    groups: Sequence[Sequence[Rollout]],
    tokenizer: Any,
    *,
    rank: int = 0,
    world: int = 1,
) -> list[Completion]:
    """Completions with their texts; a group for each of the prompts that are the share of process `rank`."""
    return [
        Completion(
            prompts[at], rollout, at * len(group) + number, completion_text(tokenizer, prompts[at], rollout)
        )
        for at, group in zip(range(rank, len(prompts), world), groups, strict=True)
        for number, rollout in enumerate(group)
    ]


def idle_completion(prompt: PromptExample, token: int, fields: Iterable[str]) -> Completion:
    """A completion of one token with weight 0, for a process that has none."""
    idle = Completion(prompt, Rollout(prompt.prompt_ids, [token], [0.0], "stop"), 0, weight=0.0)
    idle.tokens = dict.fromkeys(fields, torch.zeros(1))
    return idle


def column_names(prompts: Iterable[PromptExample]) -> list[str]:
    """Names of the extra columns of the prompts."""
    return sorted({name for prompt in prompts for name in prompt.columns})


def samples_of(completions: Sequence[Completion], step: int, columns: Sequence[str] | None = None) -> Samples:
    """Completions as the input of reward functions.

    Args:
        completions: B of them, with their texts.
        step: steps done.
        columns: the columns that they see; None: those that any of their prompts has. None stands for a
            value that a prompt lacks.
    """
    names = column_names(each.prompt for each in completions) if columns is None else columns
    return Samples(
        [each.prompt.prompt for each in completions],
        [each.text for each in completions],
        [each.rollout.completion_ids for each in completions],
        {name: [each.prompt.columns.get(name) for each in completions] for name in names},
        step,
    )


def in_parts(samples: Samples, size: int) -> list[Samples]:
    """Split samples into parts of this size; the last one may be smaller."""
    count = len(samples.completions)
    return [samples.part(range(at, min(at + size, count))) for at in range(0, count, size)]


@dataclass(frozen=True)
class StepTable:
    """The completions of a step over all processes, in the order of the prompts, those of a prompt together.

    Args:
        names: F reward functions.
        rewards: (F, B) of each function, NaN where it does not apply.
        total: (B,) their weighted sum.
        facts: (3, B) tokens, whether cut off, whether ended by an end token.
        num_generations: completions per prompt.
    """

    names: tuple[str, ...]
    rewards: Tensor
    total: Tensor
    facts: Tensor
    num_generations: int

    @classmethod
    def of(cls, names: tuple[str, ...], values: Tensor, num_generations: int) -> StepTable:
        """From (B, F + 1 + 3) values, one row per completion."""
        functions = len(names)
        columns = values.T
        return cls(names, columns[:functions], columns[functions], columns[functions + 1 :], num_generations)

    @property
    def groups(self) -> Tensor:
        """(B,) index of each completion's prompt."""
        return torch.arange(len(self.total)) // self.num_generations

    @property
    def lengths(self) -> Tensor:
        """(B,) tokens of each completion."""
        return self.facts[_LENGTH]

    @property
    def truncated(self) -> Tensor:
        """(B,) bool, truncated at the maximum length."""
        return self.facts[_TRUNCATED] > 0

    @property
    def ended(self) -> Tensor:
        """(B,) bool, ended by an end token."""
        return self.facts[_EOS] > 0


def table_row(rewards: Tensor, total: Tensor, facts: Sequence[Sequence[float]]) -> Tensor:
    """(b, F + 1 + 3) rows of a step's table: rewards (F, b), their sums (b,), facts of each completion."""
    return torch.cat([rewards.T, total[:, None], torch.tensor(facts).view(len(facts), _FACTS)], 1)


def flat(name: str, completions: Sequence[Completion], device: torch.device) -> Tensor:
    """(M,) values of `Completion.tokens[name]`, concatenated."""
    return torch.cat([completion.tokens[name] for completion in completions]).to(device)


def keep_tokens(name: str, values: Tensor, completions: Sequence[Completion], real: bool) -> None:
    """Set `Completion.tokens[name]` from (M,) values; does nothing for a batch that is not `real`."""
    if not real:
        return
    parts = values.detach().cpu().split([completion.length for completion in completions])
    for completion, part in zip(completions, parts, strict=True):
        completion.tokens[name] = part


def spread(values: Sequence[float], completions: Sequence[Completion], device: torch.device) -> Tensor:
    """(M,) one value per completion, repeated over its tokens."""
    lengths = torch.tensor([completion.length for completion in completions], dtype=torch.long)
    return torch.tensor(values, dtype=torch.float32).repeat_interleave(lengths).to(device)


def rollout_metrics(table: StepTable) -> dict[str, float]:
    """Rewards and lengths of a step's completions, under TRL's names.

    `reward`; `reward_std` (mean over groups) and `frac_reward_zero_std` (share of groups with equal rewards),
    both left out for groups of one; `rewards/<function>/mean` and `/std`; `completions/mean_length`,
    `min_length`, `max_length`, `clipped_ratio` (cut off), `mean_terminated_length` (of those that were not).
    """
    metrics = {"reward": float(table.total.mean())}
    if table.num_generations > 1:
        by_prompt = table.total.view(-1, table.num_generations)
        metrics["reward_std"] = float(by_prompt.std(1).mean())
        groups = torch.arange(len(table.total), device=table.total.device) // table.num_generations
        metrics["frac_reward_zero_std"] = float(zero_std_fraction(table.total, groups))
    for name, values in zip(table.names, table.rewards, strict=True):
        known = values[~values.isnan()]
        if len(known):
            metrics[f"rewards/{name}/mean"] = float(known.mean())
        if len(known) > 1:
            metrics[f"rewards/{name}/std"] = float(known.std())
    lengths = table.lengths
    metrics["completions/mean_length"] = float(lengths.mean())
    metrics["completions/min_length"] = float(lengths.min())
    metrics["completions/max_length"] = float(lengths.max())
    metrics["completions/clipped_ratio"] = float(table.truncated.float().mean())
    if not bool(table.truncated.all()):
        metrics["completions/mean_terminated_length"] = float(lengths[~table.truncated].mean())
    return metrics
