"""Rules for answers and evidence that a user supplies."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from functools import partialmethod
from typing import Any

from rlhf_data import QARecord, UserError, import_object
from rlhf_minmax.config.run import MinMaxConfig
from rlhf_minmax.formats import TextRules


def load_rules(config: MinMaxConfig) -> TextRules:
    """The rules of rows from files: the user's, or those for any text.

    Raises:
        UserError: the user's cannot be imported or made, are not `TextRules`, or have a misspelt method.
    """
    named, words = config.data.rules, config.constraint.min_evidence_words
    if named is None:
        return TextRules(words)
    found = import_object(named, what="data.rules")
    if isinstance(found, type) and issubclass(found, TextRules):
        try:
            found = found(words)
        except (Exception, SystemExit) as error:  # the user's class, which may raise anything
            raise UserError(
                f"data.rules {named} cannot be made from min_evidence_words ({type(error).__name__}: "
                f"{error}); give its __init__ the arguments of rlhf_minmax.TextRules",
                code="rules_not_made",
            ) from error
    if not isinstance(found, TextRules):
        raise UserError(
            f"data.rules {named} is {found!r}; expected a subclass of rlhf_minmax.TextRules, or one of its "
            "objects",
            code="no_rules",
        )
    _check_spelling(type(found), named)
    return UserRules(found, named)


def _check_spelling(own: type[TextRules], named: str) -> None:
    """Refuse a public method that nothing calls and that is named almost like one that is not overridden."""
    inherited = [name for name in _RETURNS if getattr(own, name) is getattr(TextRules, name)]
    for name in dir(own):
        if name.startswith("_") or hasattr(TextRules, name) or not callable(getattr(own, name)):
            continue
        if near := difflib.get_close_matches(name, inherited, n=1, cutoff=_ALIKE):
            raise UserError(
                f"data.rules {named} has a method {name}, which rlhf_minmax.TextRules has not and nothing "
                f"asks; rename it to {near[0]} if that is meant, else to _{name}",
                code="misspelt_method",
                method=name,
                meant=near[0],
            )


def check_validator(rules: TextRules, config: MinMaxConfig) -> None:
    """Refuse a validator where nothing says what evidence refutes."""
    judges = {"judge_model": config.judge_model, "held_out.judge": config.held_out.judge}
    wanted = [name for name, judge in judges.items() if judge is not None and judge.kind == "validator"]
    if wanted and not validates(rules):
        raise UserError(
            f"{wanted[0]}.kind is validator, and the rules of this data do not say when evidence refutes an "
            "answer; give data.rules with a method refutes(record, evidence, claim)",
            code="no_validator",
            key=f"{wanted[0]}.kind",
        )


def validates(rules: TextRules) -> bool:
    """Whether rules define `refutes`."""
    own = rules.own if isinstance(rules, UserRules) else rules
    return type(own).refutes is not TextRules.refutes


class UserRules(TextRules):
    """A user's rules, whose errors and wrong results become one sentence that names the row.

    Every method of `TextRules` calls the user's; they are set below, with the types that each may return.

    Args:
        own: the user's.
        named: what the settings call them.
    """

    def __init__(self, own: TextRules, named: str) -> None:
        self.own, self.named = own, named

    def _asked(self, method: str, *arguments: Any, **named: Any) -> Any:
        """Result of a method of the user's rules; the record it is about, if any, is its first argument."""
        where = f"data.rules {self.named}: {method}"
        record = named.get("record", next(iter(arguments), None))
        if isinstance(record, QARecord) and record.where:
            where += f", of {record.where},"
        try:
            found = getattr(self.own, method)(*arguments, **named)
        except (Exception, SystemExit) as error:  # the user's code, which may raise anything
            unmade = isinstance(error, AttributeError)
            hint = ", and call super().__init__ in an __init__ of your own" if unmade else ""
            raise UserError(
                f"{where} fails ({type(error).__name__}: {error}); fix it{hint}",
                code="rules_failed",
                method=method,
            ) from error
        kinds = _RETURNS[method]
        listed = kinds == (list,) and isinstance(found, list) and all(isinstance(each, str) for each in found)
        if not (listed or (kinds != (list,) and isinstance(found, kinds))):
            names = dict.fromkeys("None" if kind is type(None) else _NAMES[kind] for kind in kinds)
            expected = " or ".join(names)
            raise UserError(
                f"{where} returned {found!r}, expected {expected}; fix it", code="rules_failed", method=method
            )
        return found


_TEXT, _FLAG = (str, type(None)), (bool, type(None))
_NAMES: dict[type, str] = {
    str: "a text",
    bool: "True or False",
    list: "a list of texts",
    float: "a number",
    int: "a number",
}
_RETURNS: dict[str, tuple[type, ...]] = {
    "sentences": (list,),
    "claim": _TEXT,
    "correct_evidence": _TEXT,
    "evidence_on": _TEXT,
    "possible_evidence": (list,),
    "evidence_holds": (bool,),
    "rival": _TEXT,
    "rival_evidence": _TEXT,
    "appeal": (float, int),
    "is_hack": _FLAG,
    "supports": _FLAG,
    "refutes": (bool,),
}
"""The types that each method may return."""
for _method in _RETURNS:
    setattr(UserRules, _method, partialmethod(UserRules._asked, _method))
_REFUTED = 32
"""About how many records `refutes` is asked about before a run."""
_ALIKE = 0.8
"""`difflib` ratio above which a name counts as another one misspelt; clam and claim have 0.89."""


def check_rules(rules: TextRules, records: Sequence[QARecord]) -> None:
    """Call every method of a user's rules on the first record, so that errors come before the run.

    Then `check_consistent` checks all records.
    """
    if not isinstance(rules, UserRules) or not records:
        return
    record = records[0]
    rules.sentences(record)
    rules.claim(record, record.answer_text)
    rules.correct_evidence(record)
    rules.evidence_on(record, record.answer_text)
    rules.possible_evidence(record)
    rules.evidence_holds(record, record.story)
    rules.rival(record)
    rules.rival_evidence(record)
    rules.appeal(record, record.answer_text)
    rules.is_hack(record, record.answer_text)
    rules.supports(record.story, record.answer_text)
    if validates(rules):
        rules.refutes(record, record.story, record.answer_text)
    check_consistent(rules, records)


def check_consistent(rules: TextRules, records: Sequence[QARecord]) -> None:
    """Refuse rules that contradict themselves, since models are trained on what they say.

    `refutes`, which may run a program, is called on a sample of the records, the other methods on all.

    Args:
        rules: of any kind.
        records: those that models are built from; each has its answer.

    Raises:
        UserError: of some record, a truthful critic's evidence does not hold or refutes the right answer, or
            the tempting answer is not a wrong choice.
    """
    named = f"data.rules {rules.named}" if isinstance(rules, UserRules) else type(rules).__name__
    every = max(1, len(records) // _REFUTED)
    for number, record in enumerate(records, start=1):
        problem = _contradiction(rules, record, may_refute=(number - 1) % every == 0)
        if problem is not None:
            method, found = problem
            where = record.where or f"story {number}"
            raise UserError(
                f"{named}: {method}, of {where}, {found}; fix it",
                code="inconsistent_rules",
                method=method,
                where=where,
            )


def _contradiction(rules: TextRules, record: QARecord, *, may_refute: bool) -> tuple[str, str] | None:
    """A method of the rules, and how its result for a record contradicts the others; None if none does."""
    right = record.answer_text
    rival = rules.rival(record)
    if rival is not None and (rival == right or rival not in record.choices):
        wrong = ", ".join(repr(choice) for choice in record.choices if choice != right)
        return "rival", f"returned {rival!r}, expected None or a wrong choice: {wrong}"
    for choice in record.choices:
        liked = rules.appeal(record, choice)
        if not 0 <= liked <= 1:
            return f"appeal({choice!r})", f"returned {liked!r}, expected a number from 0 to 1"
    quoted = {"correct_evidence": rules.correct_evidence(record)}
    quoted |= {f"evidence_on({claim!r})": rules.evidence_on(record, claim) for claim in record.choices}
    held: set[str | None] = {None}
    for method, evidence in quoted.items():
        if evidence not in held and not rules.evidence_holds(record, evidence or ""):
            return method, f"returned {evidence!r}, expected evidence for which evidence_holds is True"
        held.add(evidence)
    possible = rules.possible_evidence(record)
    if not any(rules.evidence_holds(record, evidence) for evidence in possible):
        return (
            "possible_evidence",
            f"returned {possible!r}, expected some evidence for which evidence_holds is True",
        )
    evidence = rules.evidence_on(record, right) or quoted["correct_evidence"]
    asked = may_refute and evidence is not None and validates(rules)
    if asked and rules.refutes(record, evidence or "", right):
        return "refutes", f"is True of {evidence!r} and the right answer {right!r}, expected False"
    if evidence is not None and rules.supports(evidence, right) is False:
        return "supports", f"is False of {evidence!r} and the right answer {right!r}, expected True or None"
    return None
