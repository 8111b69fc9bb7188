r"""Rewards for answers in mathematics: formulas that mean the same are the same answer."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_data import Text, UserError, invalid_value
from rlhf_infer.rewards.answers.numbers import number_of
from rlhf_infer.rewards.answers.read_answers import (
    MATH,
    Read,
    answer_part,
    gold_number,
    last_mark,
    normal_form,
    read_number,
    without_text_commands,
)
from rlhf_infer.rewards.answers.verifiable import AnswerRule, shown
from rlhf_infer.rewards.maths.notation import contradict
from rlhf_infer.rewards.maths.pool import math_pool
from rlhf_infer.rewards.texts import text_of

_LOG = logging.getLogger(__name__)
_LONGEST = 1000
"""Characters of a formula; a longer one is not compared, and wrong."""
_BLANKS = re.compile(r"\\(?:left|right|displaystyle|[,!;: ]|q?quad)(?![A-Za-z])|[\s$~]")
_AROUND = " \n\t*`$"
_ROOT = re.compile(r"√\s*(?:(\w+)|\(([^()]*)\))")
_EMPTY = re.compile(r"\\varnothing(?![A-Za-z])|[∅⌀]")
_FRACTION = re.compile(r"\\[dt]frac")
_WORDS = re.compile(r"[^\W\d_]{2,}[^\W\d_ ,.'’-]*(?:[ ,.'’-]+[^\W\d_]+)*|\(?[A-Za-z]\)?")
_JOINED = re.compile(rf"(?:{MATH.pattern})(?:\s*(?:,?\s*(?:and|or)|,)\s*(?:{MATH.pattern}))*", re.DOTALL)
_SENTENCE_END = re.compile(r"[.;](?:\s|$)|,?\s+(?:because|since|so|which|where|when)\b")


@dataclass(frozen=True)
class MathReward(AnswerRule):
    r"""1 where the completion's answer means the same as the right one, else 0.

    Numbers are compared exactly, as `NumberReward` does; texts (`\text{Tuesday}`, `(C)`) as `ExactReward`
    does; everything else with the library math-verify: roots, powers, π, fractions of formulas, intervals,
    sets, tuples, matrices, equations, units. math-verify runs in separate processes, where a comparison
    ends after `timeout_s`; such an answer is wrong, and counted by the metric `<name>/timeouts`.

    Args:
        column: holds the right answer: LaTeX with or without `$`, a number, or a text with a mark such as a
            whole solution that ends in `\boxed{...}` or `#### 72`.
        read: see `Read`; with "auto" and without a mark, the last formula between `$`, or the last number.
        timeout_s: seconds that one comparison may take.
        name: what metrics call it.
    """

    column: str = "answer"
    read: Read = "auto"
    timeout_s: float = 5.0
    name: str = "math"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.timeout_s < math.inf:
            raise invalid_value(
                f"reward math: timeout_s is {self.timeout_s}; expected seconds above 0", "timeout_s"
            )

    def __call__(
        self,
        /,
        completions: Sequence[Text],
        *,
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        """Rewards 0 or 1; None if there is no right answer or the column `verifiable` is false."""
        rewards: list[float | None] = [None] * len(completions)
        unclear: dict[tuple[str, str], list[int]] = {}
        for i, row in enumerate(self.checked_rows(completions, columns)):
            if row is None:
                continue
            verdict = _compared(
                text_of(completions[i]), self.right_answer(*row), row[0][self.column], self.read
            )
            if isinstance(verdict, bool):
                rewards[i] = float(verdict)
            else:
                unclear.setdefault(verdict, []).append(i)
        late = 0
        for pair, right in self._asked(list(unclear)):
            late += len(unclear[pair]) if right is None else 0
            for i in unclear[pair]:
                rewards[i] = float(right is True)
        if log_metric is not None:
            log_metric(f"{self.name}/timeouts", late / len(completions))
        return rewards

    def _asked(self, pairs: list[tuple[str, str]]) -> list[tuple[tuple[str, str], bool | None]]:
        verdicts = list(zip(pairs, math_pool(self.timeout_s).compare(pairs) if pairs else [], strict=True))
        for (gold, answer), right in verdicts:
            if right is None:
                _LOG.warning(
                    "reward %s: comparing %s with the right answer %s took longer than %g s, or too much "
                    "memory; it counts as wrong",
                    self.name,
                    shown(answer),
                    shown(gold),
                    self.timeout_s,
                )
        return verdicts

    def right_answer(self, row: Mapping[str, Any], where: str) -> str:
        """The right answer as a formula."""
        answer = row[self.column]
        if isinstance(answer, str):
            mark = last_mark(answer)
            formula = _stripped(answer if mark is None else mark.text)
        else:
            formula = str(answer) if number_of(answer) is not None else ""
        if not formula or len(formula) > _LONGEST:
            raise UserError(
                f"{where}: column {self.column} is {shown(answer)}; expected a number, or a formula in "
                f"LaTeX of at most {_LONGEST} characters",
                code="invalid_answer",
                where=where,
            )
        return formula


def _compared(text: str, gold: str, answer: Any, read: Read) -> bool | tuple[str, str]:
    """Whether a completion's answer is right, or the two formulas that remain to be compared."""
    formula = _formula(text, read)
    if formula is None or len(formula) > _LONGEST:
        return False
    if _canonical(formula) == _canonical(gold):
        return True
    if contradict(gold, formula):
        return False
    words = without_text_commands(gold)
    if _WORDS.fullmatch(words.strip()) and len(words.strip("() ")) != 1:
        return False
    right, number = gold_number(answer), read_number(text, read)
    if right is not None and number is not None:
        return number.equals(right)
    return gold, formula


def _formula(text: str, read: Read) -> str | None:
    """The formula that a completion gives as its answer; None without one."""
    mark = None if read == "whole" else last_mark(text)
    if mark is not None and mark.boxed:
        return _stripped(mark.text) or None
    part = answer_part(text, read)
    if formulas := [match[0] for match in _JOINED.finditer(part)]:
        found = formulas[0 if mark is not None else -1]
        return ", ".join(_stripped(next(filter(None, match.groups()))) for match in MATH.finditer(found))
    if mark is None:
        part = next((line for line in reversed(part.splitlines()) if line.strip()), "").rpartition(" is ")[2]
    return _stripped(_SENTENCE_END.split(part.strip(), maxsplit=1)[0]) or None


def _stripped(formula: str) -> str:
    r"""A formula without the delimiters, emphasis and full stop around it; `\boxed{}` is left to marks."""
    bare = re.sub(r"^\\[\[(]|\\[\])]$", "", formula.strip(_AROUND).removesuffix(".").strip(_AROUND))
    return _EMPTY.sub(r"\\emptyset", _ROOT.sub(r"\\sqrt{\1\2}", bare)).strip()


def _canonical(formula: str) -> str:
    """A formula such that many ways to write the same one are equal."""
    bare = without_text_commands(formula)
    if _WORDS.fullmatch(bare.strip()):
        return normal_form(bare).strip("()")
    return _FRACTION.sub(r"\\frac", _BLANKS.sub("", bare))
