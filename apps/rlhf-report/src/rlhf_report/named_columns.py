"""`--columns NAME=COLUMN`, which says what the files call a column."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_data import UserError


def named_columns(given: Sequence[str], known: Sequence[str] = ()) -> dict[str, str]:
    """Columns of the files by their usual names.

    Args:
        given: the values of the option.
        known: usual names that the command reads; empty leaves the check to what reads the rows.

    Raises:
        UserError: a value is malformed, has an unknown name, or repeats one.
    """
    found: dict[str, str] = {}
    for entry in given:
        name, equals, column = entry.partition("=")
        if not (name and equals and column) or (known and name not in known):
            among = f" with one of {', '.join(known)}" if known else ""
            raise UserError(
                f"--columns {entry}: expected NAME=COLUMN{among}, such as chosen=better",
                code="unknown_column" if name and equals and column else "invalid_option",
                column=name,
            )
        if column.startswith("["):
            raise UserError(
                f"--columns {entry}: expected one column; a training's setting columns can join several",
                code="unknown_column",
                column=name,
            )
        if name in found:
            raise UserError(
                f"--columns names {name} twice, {found[name]} and {column}; leave one out",
                code="repeated_name",
                name=name,
            )
        found[name] = column
    return found
