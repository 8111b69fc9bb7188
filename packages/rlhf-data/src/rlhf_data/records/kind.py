"""Record kinds: how rows are read, and what becomes of them; each is one object in a module of this room."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rlhf_data.errors import UserError

if TYPE_CHECKING:
    from rlhf_data.records.encode import Builder
    from rlhf_data.records.row import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What every record knows beside its texts.

    Attributes:
        template: keyword arguments for the chat template, such as `tools`.
        where: the record's place in its file; not compared.
        is_chat: whether its texts are turns of a chat, as an instruction and its answer are; see
            `as_messages`.
    """

    template: Mapping[str, Any] | None = field(default=None, hash=False)
    where: str = field(default="", compare=False)
    is_chat: bool = False


@dataclass(frozen=True)
class RecordKind:
    """A kind of record: how rows are read, and how records become examples.

    Args:
        name: what `load_records`, `Method.records` and error messages call it.
        records: the classes of its records.
        columns: what a row may have, beside `tools` and `chat_template_kwargs`.
        parse: turns a row into its records; raises `UserError` for a bad row, naming the field.
        builder: turns records into examples; its keyword arguments are the options of the data sets.
        examples: the classes of its examples.
    """

    name: str
    records: tuple[type[Record], ...]
    columns: tuple[str, ...]
    parse: Callable[[Row], tuple[Record, ...]]
    builder: Callable[..., Builder]
    examples: tuple[type, ...]

    @property
    def options(self) -> tuple[inspect.Parameter, ...]:
        """The builder's keyword arguments."""
        parameters = inspect.signature(self.builder).parameters.values()
        return tuple(each for each in parameters if each.kind is each.KEYWORD_ONLY)


RECORD_KINDS: dict[str, RecordKind] = {}
"""The kinds by name, complete after the first `record_kind`; `register` adds one."""


def register(kind: RecordKind) -> None:
    """Make a kind known to readers, data sets and training methods."""
    RECORD_KINDS[kind.name] = kind


def record_kind(name: str) -> RecordKind:
    """Return a kind by its name.

    Raises:
        UserError: no kind of that name is registered.
    """
    package = importlib.import_module("rlhf_data.records")
    for module in pkgutil.iter_modules(package.__path__, "rlhf_data.records."):
        importlib.import_module(module.name)
    if name not in RECORD_KINDS:
        raise UserError(f"kind of records must be one of {', '.join(sorted(RECORD_KINDS))}, got {name!r}")
    return RECORD_KINDS[name]
