"""The kind "preference": two completions of one prompt, of which one is better."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from rlhf_data.errors import UserError
from rlhf_data.records.encode import Builder, TokenSequence
from rlhf_data.records.kind import Record, RecordKind, Text, register
from rlhf_data.records.row import Row, usual_columns
from rlhf_data.records.truncation import Truncation


@dataclass(frozen=True, slots=True)
class PreferenceRecord(Record):
    """Two completions of one prompt, `chosen` the better by `margin` (None: not annotated)."""

    prompt: Text
    chosen: Text
    rejected: Text
    margin: float | None = None


class PreferencePair(NamedTuple):
    """Two completions of one prompt, the first preferred to the second.

    Attributes:
        chosen: prompt and preferred completion; the completion's tokens are scored.
        rejected: prompt and other completion; the completion's tokens are scored.
        margin: by how much the chosen one is better, in units of reward; 0 where it is not annotated.
        ref_chosen_logps: log π_ref(chosen | prompt), where known.
        ref_rejected_logps: log π_ref(rejected | prompt), where known.
    """

    chosen: TokenSequence
    rejected: TokenSequence
    margin: float = 0.0
    ref_chosen_logps: float | None = None
    ref_rejected_logps: float | None = None


def _parse(row: Row) -> tuple[Record, ...]:
    """`chosen, rejected`, with or without `prompt` and `margin`."""
    margin = row.number("margin") if row.has("margin") and row.get("margin")[0] != "" else None
    return (PreferenceRecord(*row.pair(), margin, **row.common()),)


def pair_from_row(
    row: dict[str, Any], where: str, columns: Mapping[str, str] | None = None
) -> PreferenceRecord:
    """The pair of a row without checks, also where a completion is empty or both are equal.

    Args:
        row: columns as `load_records` reads them for "preference".
        where: the row's place, for errors.
        columns: the file's name of a column, by its usual name.

    Raises:
        UserError: a column is missing, or holds neither text nor messages.
    """
    columns = columns or {}
    values, is_chat = usual_columns(row, "preference", columns, where)
    parts = Row(dict(values), columns, where).unchecked_pair()
    return PreferenceRecord(*parts, where=where, is_chat=is_chat and isinstance(parts[0], str))


class PreferenceBuilder(Builder):
    """Preferences become pairs of sequences whose completions are scored.

    Args:
        tokenizer: see `Builder`.
        max_length: tokens of a sequence at most; None for no limit.
        overlong: "truncate" cuts longer sequences at their end (as TRL's DPO), "drop" leaves their pairs out
            (as TRL's reward training).
        truncation: see `Builder`; it has precedence over `overlong`.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        max_length: int | None = 1024,
        overlong: Literal["truncate", "drop"] = "truncate",
        truncation: Truncation | None = None,
    ) -> None:
        if overlong not in ("truncate", "drop"):
            raise UserError(
                f"overlong must be truncate or drop, got {overlong!r}", code="invalid_value", key="overlong"
            )
        super().__init__(tokenizer, max_length, truncation or ("drop" if overlong == "drop" else "right"))

    def build(self, record: PreferenceRecord) -> PreferencePair:
        """Return the pair, each sequence cut at `max_length`."""
        both, start = self.encoder.completions(*record.parts(), record.template)
        if self.is_too_long(longest := max(map(len, both))):
            return self.build(self.shortened(record, longest))
        self.check_prompt(start)
        chosen, rejected = (TokenSequence(ids[: self.max_length], start) for ids in both)
        return PreferencePair(chosen, rejected, record.margin or 0.0)


register(
    RecordKind(
        "preference",
        (PreferenceRecord,),
        ("prompt", "messages", "chosen", "rejected", "margin"),
        _parse,
        PreferenceBuilder,
        (PreferencePair,),
    )
)
