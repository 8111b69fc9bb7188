"""Rewards shaped by principles, each with its own weight and row in the scores."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from rlhf_data import Text, UserError, invalid_value
from rlhf_infer.rewards.conventions import RewardFunction, Samples, function_name
from rlhf_infer.rewards.rules import compiled
from rlhf_infer.rewards.texts import text_of

PRINCIPLE_TEMPLATE = (
    "Question: {question}\nAnswer: {answer}\nPrinciple: {critique}\n"
    "Does the answer follow the principle? Reply yes or no:"
)
"""Template for a `PromptedJudge` of principles; `{critique}` is the principle's text."""

_HEAD_PROMPT = "Question: {question}\nAnswer: {answer}\nPrinciple:"
"""Prefix of the principle's text for a judge with a scalar head."""
_PREFIX = "constitution/"


@dataclass(frozen=True)
class Principle:
    """Something a completion should do or not do: a reward function, or a text that a judge decides on.

    Make one with `keywords`, `pattern`, `function` or `judged`.

    Args:
        name: what metrics call it, after `constitution/`.
        weight: weight of its score in the total.
        text: the principle's wording.
        score: gives a score per completion; None if a judge does.
        judge: gives P(the completion follows the text), in [0, 1]; see `judged`.
    """

    name: str
    weight: float
    text: str
    score: RewardFunction | None = None
    judge: Any = None

    def __post_init__(self) -> None:
        if not self.name or (self.score is None) == (self.judge is None):
            raise ValueError("a principle has a name, and either a score or a judge")
        if isinstance(self.weight, bool) or not math.isfinite(self.weight):
            raise invalid_value(
                f"principle {self.name}: weight is {self.weight}; expected a finite number", "weight"
            )

    @classmethod
    def keywords(
        cls,
        name: str,
        words: Sequence[str],
        *,
        found: float = -1.0,
        absent: float = 0.0,
        weight: float = 1.0,
        text: str = "",
    ) -> Self:
        """Scores `found` where any of the words or phrases appears, whole and in any case, else `absent`.

        Raises:
            UserError: no words, or an empty one.
        """
        if isinstance(words, str) or not words or not all(word.strip() for word in words):
            raise invalid_value(
                f"principle {name}: keywords are {words!r}; expected a list of words or phrases", "keywords"
            )
        alternatives = "|".join(r"\s+".join(map(re.escape, word.split())) for word in words)
        pattern = rf"(?<!\w)(?:{alternatives})(?!\w)"
        return cls.pattern(name, pattern, found=found, absent=absent, weight=weight, text=text)

    @classmethod
    def pattern(
        cls,
        name: str,
        pattern: str,
        *,
        found: float = -1.0,
        absent: float = 0.0,
        weight: float = 1.0,
        text: str = "",
    ) -> Self:
        """Scores `found` where a regular expression matches anywhere, in any case, else `absent`.

        Raises:
            UserError: it cannot be compiled.
        """
        expression = compiled(f"principle {name}", pattern, re.IGNORECASE)
        return cls(name, weight, text, score=_PatternScore(expression, found, absent))

    @classmethod
    def function(cls, name: str, score: RewardFunction, *, weight: float = 1.0, text: str = "") -> Self:
        """Scored by a reward function of any convention."""
        return cls(name, weight, text, score=score)

    @classmethod
    def judged(cls, name: str, text: str, judge: Any, *, weight: float = 1.0) -> Self:
        """Scored by P(the completion follows the principle), which a judge gives.

        Args:
            name: see `Principle`.
            text: the principle, put to the judge.
            judge: a `rlhf_models.JudgeModel`, which reads question, answer and principle as one text; or
                anything with `rlhf_infer.Judge`'s method `score`, which gets the principle as its
                critique: a `PromptedJudge` with `PRINCIPLE_TEMPLATE` as its template.
            weight: see `Principle`.

        Raises:
            UserError: the text is empty, or the judge has no method `score`.
        """
        if not text.strip():
            raise invalid_value(f"principle {name} has no text for its judge; say what is expected", "text")
        if not callable(getattr(judge, "score", None)):
            raise invalid_value(
                f"principle {name}: {type(judge).__name__} is not a judge; it has no method score", "judge"
            )
        return cls(name, weight, text, judge=judge)


class ConstitutionalRewardWrapper:
    """A reward function with additional principles: total = r + Σ_p w_p · s_p.

    In `RewardFunctions` the base and every principle, as `constitution/<name>`, have separate rows.
    Called by itself it is a reward function that gives the total. A judge's principles are put to it
    together, so that question and answer are computed once for all of them.

    Args:
        base: what is shaped; None for the principles alone.
        principles: at least one, their names all different.
        name: what metrics call the base where it is None or the total by itself; None takes the base's name.

    Raises:
        UserError: no principle, or two of one name.
    """

    def __init__(
        self, base: RewardFunction | None, principles: Sequence[Principle], *, name: str | None = None
    ) -> None:
        names = [principle.name for principle in principles]
        if not names or len(set(names)) < len(names):
            raise UserError(
                f"the constitution has the principles {', '.join(names) or '(none)'}; expected at least one, "
                "their names all different",
                code="invalid_names",
            )
        self.base, self.principles = base, tuple(principles)
        self.name = name or ("constitution" if base is None else function_name(base))

    def components(self, name: str) -> list[tuple[RewardFunction, float, str]]:
        """The functions that this one combines, with weights and names; see `RewardFunctions`.

        Args:
            name: the base's.
        """
        parts: list[tuple[RewardFunction, float, str]] = []
        if self.base is not None:
            parts.append((self.base, 1.0, name))
        judged: dict[int, list[Principle]] = {}
        for principle in self.principles:
            if principle.score is not None:
                parts.append((principle.score, principle.weight, _PREFIX + principle.name))
            else:
                judged.setdefault(id(principle.judge), []).append(principle)
        for group in judged.values():
            parts.append((_JudgedScores(group), 1.0, f"{_PREFIX}{group[0].name}"))
        return parts

    def __call__(
        self,
        /,
        prompts: Sequence[Text],
        completions: Sequence[Text],
        completion_ids: Sequence[Sequence[int]] | None = None,
        **columns: Any,
    ) -> list[float]:
        """Totals of B completions."""
        from rlhf_infer.rewards.combine import RewardFunctions

        samples = Samples.from_call(prompts, completions, completion_ids, columns)
        scores = RewardFunctions([self]).score(samples)
        for name, value in scores.metrics.items():
            samples.log_metric(name, value)
        for name, values in scores.extras.items():
            samples.log_extra(name, values)
        return scores.total.tolist()

    def state(self) -> dict[str, Any]:
        """The states of base and principles, see `RewardFunctions.state`."""
        from rlhf_infer.rewards.combine import RewardFunctions

        return RewardFunctions([self]).state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        """See `RewardFunctions.load_state`."""
        from rlhf_infer.rewards.combine import RewardFunctions

        RewardFunctions([self]).load_state(state)


@dataclass(frozen=True)
class _PatternScore:
    expression: re.Pattern[str]
    found: float
    absent: float

    def __call__(self, /, completions: Sequence[Text], **columns: Any) -> list[float]:
        del columns
        texts = map(text_of, completions)
        return [self.found if self.expression.search(text) else self.absent for text in texts]


class _JudgedScores:
    """Scores of one judge for several principles, a row for each."""

    def __init__(self, principles: Sequence[Principle]) -> None:
        self.principles = principles
        self.judge = principles[0].judge
        self.row_names = [_PREFIX + principle.name for principle in principles]
        self.row_weights = [principle.weight for principle in principles]

    def __call__(
        self, /, prompts: Sequence[Text], completions: Sequence[Text], **columns: Any
    ) -> Mapping[str, list[float]]:
        del columns
        pairs = [(text_of(p), text_of(c)) for p, c in zip(prompts, completions, strict=True)]
        rows = [(*pair, principle.text) for principle in self.principles for pair in pairs]
        questions, answers, texts = (list(part) for part in zip(*rows, strict=True))
        scores = _ask(self.judge, questions, answers, texts)
        size = len(pairs)
        return {name: scores[i * size : (i + 1) * size] for i, name in enumerate(self.row_names)}


def _ask(judge: Any, questions: list[str], answers: list[str], texts: list[str]) -> list[float]:
    """P(the answer follows the principle) for each row."""
    from rlhf_infer.rewards.models import MAX_TOKENS
    from rlhf_models import JudgeModel

    if not isinstance(judge, JudgeModel):
        return judge.score(questions, answers, texts).tolist()
    prompts = [_HEAD_PROMPT.format(question=q, answer=a) for q, a in zip(questions, answers, strict=True)]
    return judge.score(prompts, [f" {text}" for text in texts], max_tokens=MAX_TOKENS).tolist()
