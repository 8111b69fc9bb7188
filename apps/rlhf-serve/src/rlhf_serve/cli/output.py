"""The rows of a run over a file, and its output, which an interrupted run continues."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rlhf_data import UserError, atomic_write_json
from rlhf_serve.cli.display import Display
from rlhf_serve.cli.files import prompt_rows
from rlhf_serve.settings import RowsSettings

NOT_COMPARED = (
    "batch_size",
    "batch_tokens",
    "device",
    "gpu_memory_utilization",
    "input_path",
    "max_batch_tokens",
    "max_model_len",
    "output_path",
    "overwrite",
    "prefix_cache_tokens",
    "search_tree",
)
"""Settings that change no row."""
_PROMPT = re.compile(r"prompt (\d+)\b")
Work = Callable[[Sequence[dict[str, Any]], dict[str, list[Any]]], list[tuple[list[dict[str, Any]], Any]]]
"""The rows to write for each row of a batch, and what is known of it, such as its cost; from the rows, and
their columns other than the prompt."""


def write_rows(
    settings: RowsSettings,
    load: Callable[[Display, int], tuple[Work, Callable[[], None]]],
    kind: type[Output] | None = None,
    rows: Sequence[dict[str, Any]] | None = None,
) -> list[Any]:
    """Write what is made of each row of the input, after what the output has already.

    `load` gives the work and what closes it, knowing how many rows are done; called only if a row is left.
    `rows` are those of the input, if they are not prompts.

    Returns:
        What the work said of each row that was done now.
    """
    display, rows = Display(), prompt_rows(settings) if rows is None else rows
    output = (kind or Output)(settings, rows)
    done = output.resume()
    if done == len(rows):
        display.say(f"{output.path} has all {done} {output.noun} already; --overwrite starts over")
        return []
    if done:
        display.say(f"{output.path} has {done} of {len(rows)} {output.noun}; continuing")
    work, close = load(display, done)
    found = []
    try:
        for start in range(done, len(rows), settings.batch_size):
            batch = rows[start : start + settings.batch_size]
            names = sorted({name for row in batch for name in row} - {"prompt"})
            columns = {name: [row.get(name) for row in batch] for name in names}
            try:
                made = work(batch, columns)
            except UserError as error:
                text = f"{settings.input_path}, {_where(str(error), start, len(batch))}"
                raise UserError(text, code=error.code, **error.fields) from error
            output.add([line for lines, _ in made for line in lines], start + len(batch))
            found += [each for _, each in made]
            display.step(output.unit, start + len(batch), len(rows))
    finally:
        display.finish()
        close()
    return found


def _where(message: str, start: int, count: int) -> str:
    """The message with its rows; a prompt that it names by its place in the batch is a row."""
    named = _PROMPT.match(message)
    if named is None:
        return f"rows {start + 1} to {start + count}: {message}"
    return f"row {start + int(named[1]) + 1}: the prompt{message[named.end() :]}"


class Output:
    """The output file of a run, and beside it the settings that made it.

    Nothing is written, and nothing that is there is lost, before the first rows are made.
    """

    noun, unit, marks_suffix = "rows", "prompts", ".settings.json"

    def __init__(self, settings: RowsSettings, rows: Sequence[dict[str, Any]]) -> None:
        self.path = Path(settings.output_path)
        self.marks = self.path.with_name(self.path.name + self.marks_suffix)
        self.overwrite, self.rows, self.begun = settings.overwrite, rows, False
        self.settings = {k: v for k, v in settings.to_dict().items() if k not in NOT_COMPARED}

    def resume(self) -> int:
        """How many rows of the input are done; what was written after them goes."""
        try:
            check_writable(self.path)
            if self.overwrite or not self.path.exists() or not self.path.stat().st_size:
                return 0
            done, size = self.done()
            with open(self.path, "rb+") as file:
                file.truncate(size)
        except OSError as error:
            raise UserError(
                f"{self.path} cannot be written ({error.strerror or error})", code="unwritable"
            ) from error
        self.begun = True
        return done

    def add(self, rows: Sequence[dict[str, Any]], done: int) -> None:
        """Append the rows of a batch, after which `done` rows of the input are done."""
        try:
            if not self.begun:
                self._begin()
            with open(self.path, "ab") as file:
                file.writelines(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise UserError(
                f"{self.path} cannot be written ({error.strerror or error}); make room and run the command "
                "again, which goes on after the rows that are there",
                code="unwritable",
            ) from error
        self.mark(done)

    def _begin(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_bytes(b"")
        self.mark(0)
        self.begun = True

    def mark(self, done: int) -> None:
        """Write the marks; these have nothing that changes after the start."""
        if not done:
            atomic_write_json(self.marks, self.settings)

    def done(self) -> tuple[int, int]:
        """How many rows of the input are done, and the bytes that belong to them; each has a line here."""
        *lines, _ = self.path.read_bytes().split(b"\n")
        self.check_settings(lambda marks: marks)
        self._check_rows(lines)
        return len(lines), sum(len(line) + 1 for line in lines)

    def check_settings(self, settings_of: Callable[[Any], dict[str, Any]]) -> Any:
        """Return the marks; `UserError` if the file was made with other settings than the present ones."""
        try:
            marks = json.loads(self.marks.read_text(encoding="utf-8"))
            before = settings_of(marks)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{self.path} exists, and {self.marks.name} beside it does not say how it was made; choose "
                "another --output, or --overwrite",
                code="file_exists",
            ) from error
        for name, value in self.settings.items():
            if before.get(name) != value:
                raise UserError(
                    f"{self.path} was made with {name}={before.get(name)!r}, now it is {value!r}; give the "
                    "same settings, another --output, or --overwrite",
                    code="different_config",
                )
        return marks

    def _check_rows(self, lines: Sequence[bytes]) -> None:
        if len(lines) > len(self.rows):
            raise UserError(
                f"{self.path} has {len(lines)} rows, the input {len(self.rows)}; choose another --output, or "
                "--overwrite",
                code="different_config",
            )
        for number, (line, row) in enumerate(zip(lines, self.rows, strict=False), 1):
            try:
                same = self.is_of(json.loads(line), row)
            except (ValueError, AttributeError):
                same = False
            if not same:
                raise UserError(
                    f"{self.path}, line {number}: it was made from another row than the input's; choose "
                    "another --output, or --overwrite",
                    code="different_config",
                )

    def is_of(self, written: dict[str, Any], row: dict[str, Any]) -> bool:
        """Whether a row of the output was made from a row of the input."""
        return written.get("prompt") == row["prompt"]


def check_writable(path: Path) -> None:
    """Raise `OSError` where the file cannot be written, or its folder not be made; writes nothing."""
    there = next(each for each in (path, *path.absolute().parents) if each.exists())
    if there == path and path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if there != path and not there.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    if not os.access(there, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
