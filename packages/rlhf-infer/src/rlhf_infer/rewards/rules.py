"""Rewards for the form of a completion only: length, repetition, format."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from rlhf_data import Text, UserError, check_choice, invalid_value
from rlhf_data.records.kind import is_empty
from rlhf_infer.rewards.texts import text_of

LengthUnit = Literal["tokens", "characters"]
NgramUnit = Literal["words", "tokens"]

_THOUGHT = r"<think>\s*+(?!</think>)(?:(?!</?think>|</?answer>).)*+</think>"
_ANSWER = r"<answer>\s*+(?!</answer>)(?:(?!</?think>|</?answer>).)*+</answer>"
FORMATS = {
    "think": rf"{_THOUGHT}(?!.*</?think>)\s*+\S.*",
    "think_answer": rf"{_THOUGHT}\s*{_ANSWER}",
}
"""Presets of the format rule: a thought and then something, or a thought and then an answer
(DeepSeek-R1, arXiv:2501.12948, table 1). Each tag appears once and nothing is empty."""


@dataclass(frozen=True)
class LengthReward:
    """How near a length is to a target or a range: s / (s + d), d being the distance to it.

    1 inside the range, 1/2 at the distance s, and never flat, so that completions far off still differ.

    Args:
        target: the length that is wanted; None if there is a range.
        minimum: the least length that is wanted; None for no least.
        maximum: the greatest length that is wanted; None for no greatest.
        unit: "tokens" of the policy, its end token included, or "characters".
        scale: s, in the unit; None takes the target or the greater given end of the range, at least 1.
        name: what metrics call it.
    """

    target: int | None = None
    minimum: int | None = None
    maximum: int | None = None
    unit: LengthUnit = "tokens"
    scale: float | None = None
    name: str = "length"

    def __post_init__(self) -> None:
        check_choice("reward length: unit", self.unit, get_args(LengthUnit))
        ends = [end for end in (self.minimum, self.maximum) if end is not None]
        if (self.target is None) == (not ends):
            raise invalid_value("reward length: give either target, or minimum, maximum or both", "target")
        if min(*ends, self.target or 0, 0) < 0 or ends != sorted(ends):
            raise invalid_value(
                f"reward length: target {self.target}, minimum {self.minimum}, maximum {self.maximum}; "
                "expected lengths >= 0, the minimum not above the maximum",
                "range",
            )
        if self.scale is not None and not self.scale > 0:
            raise invalid_value(f"reward length: scale is {self.scale}; expected a number above 0", "scale")

    def __call__(
        self,
        /,
        completions: Sequence[Text],
        completion_ids: Sequence[Sequence[int]] | None = None,
        **columns: Any,
    ) -> list[float]:
        """Rewards in (0, 1]."""
        del columns
        counted = (
            _token_ids(completion_ids, self.name) if self.unit == "tokens" else map(text_of, completions)
        )
        return [self._reward(len(items)) for items in counted]

    def _reward(self, length: int) -> float:
        low = self.target if self.target is not None else self.minimum or 0
        high = self.target if self.target is not None else self.maximum
        over = 0 if high is None else max(length - high, 0)
        scale = self.scale or max(low, high or 0, 1)
        return scale / (scale + max(low - length, 0) + over)


@dataclass(frozen=True)
class RepetitionReward:
    """A penalty for repeating oneself: w · (1 - distinct n-grams / n-grams), 0 if there are fewer than n.

    The n-gram penalty of arXiv:2502.03373, appendix B.

    Args:
        ngram_size: n, in units.
        max_penalty: w, at most 0: the limit of the reward for a long completion of a single repeated n-gram.
        unit: "words" between white space, case ignored, or "tokens" of the policy.
        name: what metrics call it.
    """

    ngram_size: int = 3
    max_penalty: float = -1.0
    unit: NgramUnit = "words"
    name: str = "repetition"

    def __post_init__(self) -> None:
        check_choice("reward repetition: unit", self.unit, get_args(NgramUnit))
        if self.ngram_size < 1 or not self.max_penalty <= 0:
            raise invalid_value(
                f"reward repetition: ngram_size {self.ngram_size}, max_penalty {self.max_penalty}; expected "
                "a size of at least 1 and a penalty of at most 0",
                "repetition",
            )

    def __call__(
        self,
        /,
        completions: Sequence[Text],
        completion_ids: Sequence[Sequence[int]] | None = None,
        **columns: Any,
    ) -> list[float]:
        """Rewards in [w, 0]."""
        del columns
        if self.unit == "tokens":
            return [self._reward(ids) for ids in _token_ids(completion_ids, self.name)]
        return [self._reward(text_of(completion).casefold().split()) for completion in completions]

    def _reward(self, units: Sequence[Any]) -> float:
        count = len(units) - self.ngram_size + 1
        if count < 1:
            return 0.0
        distinct = len({tuple(units[i : i + self.ngram_size]) for i in range(count)})
        return self.max_penalty * (1 - distinct / count) or 0.0


@dataclass(frozen=True)
class FormatReward:
    """1 if the whole completion, stripped of white space, matches a regular expression, else 0.

    Args:
        pattern: the expression; its dot matches line ends too. None takes the preset's.
        preset: one of `FORMATS`; None for "think_answer" if there is no pattern.
        name: what metrics call it.
    """

    pattern: str | None = None
    preset: str | None = None
    name: str = "format"
    _compiled: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.pattern is not None and self.preset is not None:
            raise invalid_value("reward format: give either pattern or preset, not both", "pattern")
        preset = self.preset or "think_answer"
        check_choice("reward format: preset", preset, FORMATS)
        pattern = FORMATS[preset] if self.pattern is None else self.pattern
        object.__setattr__(self, "_compiled", compiled("reward format", pattern, re.DOTALL))

    def __call__(self, /, completions: Sequence[Text], **columns: Any) -> list[float]:
        """Rewards 0 or 1."""
        del columns
        texts = [text_of(completion).strip() for completion in completions]
        return [float(self._compiled.fullmatch(text) is not None) for text in texts]


@dataclass(frozen=True)
class NonEmptyReward:
    """1 for any text, 0 where a completion is white space only."""

    name: str = "non_empty"

    def __call__(self, /, completions: Sequence[Text], **columns: Any) -> list[float]:
        """Rewards 0 or 1."""
        del columns
        return [float(not is_empty(text_of(completion))) for completion in completions]


RULES: dict[str, type] = {
    "length": LengthReward,
    "repetition": RepetitionReward,
    "format": FormatReward,
    "non_empty": NonEmptyReward,
}
"""Rules by their names in `RewardFunctionFactory.from_spec`."""


def compiled(where: str, pattern: str, flags: int = 0) -> re.Pattern[str]:
    """A regular expression that a user wrote."""
    try:
        return re.compile(pattern, flags)
    except re.error as error:
        raise UserError(
            f"{where}: {pattern!r} is not a regular expression ({error}); correct it", code="invalid_pattern"
        ) from error


def _token_ids(completion_ids: Sequence[Sequence[int]] | None, name: str) -> Sequence[Sequence[int]]:
    if completion_ids is None:
        raise UserError(
            f"reward {name} counts tokens, but no completion_ids were given; take another unit",
            code="missing_completion_ids",
        )
    return completion_ids
