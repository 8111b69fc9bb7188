"""Rules for answers and evidence that a user supplies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlhf_data import QARecord, UserError, import_object
from rlhf_minmax.config.run import MinMaxConfig
from rlhf_minmax.formats import TextRules


def load_rules(config: MinMaxConfig) -> TextRules:
    """The rules of rows from files: the user's, or those for any text.

    Raises:
        UserError: the user's cannot be imported or made, or are no `TextRules`.
    """
    named, words = config.data.rules, config.constraint.min_evidence_words
    if named is None:
        return TextRules(words)
    found = import_object(named, what="data.rules")
    if isinstance(found, type) and issubclass(found, TextRules):
        try:
            found = found(words)
        except Exception as error:  # a class of the user's, which fails as it likes
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
    return found


def check_validator(rules: TextRules, config: MinMaxConfig) -> None:
    """Refuse a validator where nothing says what evidence refutes."""
    judges = {"judge_model": config.judge_model, "held_out.judge": config.held_out.judge}
    wanted = [name for name, judge in judges.items() if judge is not None and judge.kind == "validator"]
    if wanted and not _validates(rules):
        raise UserError(
            f"{wanted[0]}.kind is validator, and the rules of this data do not say when evidence refutes an "
            "answer; give data.rules with a method refutes(record, evidence, claim)",
            code="no_validator",
            key=f"{wanted[0]}.kind",
        )


def _validates(rules: TextRules) -> bool:
    return type(rules).refutes is not TextRules.refutes


def check_rules(rules: TextRules, named: str | None, records: Sequence[QARecord]) -> None:
    """Ask the user's rules everything about the first record, so that their errors come before the run."""
    if named is None or not records:
        return
    record = records[0]
    asked: list[tuple[str, tuple[Any, ...]]] = [
        ("sentences", (record,)),
        ("claim", (record, record.answer_text)),
        ("correct_evidence", (record,)),
        ("possible_evidence", (record,)),
        ("evidence_holds", (record, record.story)),
        ("rival", (record,)),
        ("rival_evidence", (record,)),
        ("is_hack", (record, record.answer_text)),
        ("supports", (record.story, record.answer_text)),
    ]
    if _validates(rules):
        asked.append(("refutes", (record, record.story, record.answer_text)))
    for method, arguments in asked:
        try:
            getattr(rules, method)(*arguments)
        except Exception as error:  # code of the user's, which fails as it likes
            raise UserError(
                f"data.rules {named}: {method} fails on the row at {record.where or 'the start'} "
                f"({type(error).__name__}: {error}); fix it",
                code="rules_failed",
            ) from error
