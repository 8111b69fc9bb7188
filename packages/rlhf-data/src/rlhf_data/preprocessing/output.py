"""Records as rows of the columns that `load_records` reads them from again."""

from __future__ import annotations

import dataclasses
from typing import Any

from rlhf_data.records.kind import Record

_NO_COLUMNS = {"template", "where", "is_chat", "columns"}


def as_row(record: Record) -> dict[str, Any]:
    """Return the row of a record; read again, it gives an equal record."""
    names = [field.name for field in dataclasses.fields(record) if field.name not in _NO_COLUMNS]
    row: dict[str, Any] = {name: getattr(record, name) for name in names}
    row |= getattr(record, "columns", {})
    if row.get("margin", 0) is None:
        del row["margin"]
    if row.get("prompt") == []:
        del row["prompt"]  # messages that start with the completion, as they are read
    if record.is_chat and isinstance(row.get("prompt"), str):
        # An instruction is known by its column's name, and stays one so.
        row = {"instruction" if name == "prompt" else name: value for name, value in row.items()}
    template = dict(record.template or {})
    if "tools" in template:
        row["tools"] = template.pop("tools")
    if template:
        row["chat_template_kwargs"] = template
    return row
