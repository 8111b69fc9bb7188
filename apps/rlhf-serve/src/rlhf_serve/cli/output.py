"""The rows of a run over a file, and its output, which an interrupted run continues."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rlhf_data import UserError, atomic_write_json
from rlhf_infer import SamplingCost
from rlhf_serve.cli.display import Display
from rlhf_serve.cli.files import prompt_rows
from rlhf_serve.settings import FileSettings

NOT_COMPARED = (
    "batch_size",
    "device",
    "input_path",
    "max_batch_tokens",
    "output_path",
    "overwrite",
    "prefix_cache_tokens",
    "search_tree",
)
"""Settings that change no completion."""
Work = Callable[[Sequence[dict[str, Any]], dict[str, list[Any]]], list[tuple[dict[str, Any], SamplingCost]]]
"""Gives what is added to each row of a batch, and its cost; from the rows, and their other columns."""


def write_rows(
    settings: FileSettings, load: Callable[[Display, int], tuple[Work, Callable[[], None]]]
) -> list[SamplingCost]:
    """Write each row of the input with what is made of it, after those that the output has already.

    Args:
        settings: the run's settings.
        load: loads what makes it, given the number of rows that are done; also gives what closes that. It is
            called only if a row is left.

    Returns:
        What each row cost that was written now.

    Raises:
        UserError: the output is another run's, or the work refuses a row.
    """
    display, rows = Display(), prompt_rows(settings)
    done = Output(settings, rows).resume()
    if done == len(rows):
        display.say(f"{settings.output_path} has all {done} rows already; --overwrite starts over")
        return []
    if done:
        display.say(f"{settings.output_path} has {done} of {len(rows)} rows; continuing")
    work, close = load(display, done)
    costs = []
    try:
        with open(settings.output_path, "ab") as file:
            for start in range(done, len(rows), settings.batch_size):
                batch = rows[start : start + settings.batch_size]
                names = sorted({name for row in batch for name in row} - {"prompt"})
                columns = {name: [row.get(name) for row in batch] for name in names}
                try:
                    made = work(batch, columns)
                except UserError as error:
                    where = f"{settings.input_path}, rows {start + 1} to {start + len(batch)}"
                    raise UserError(f"{where}: {error}", code=error.code, **error.fields) from error
                for row, (added, cost) in zip(batch, made, strict=True):
                    file.write(json.dumps(row | added, ensure_ascii=False).encode() + b"\n")
                    costs.append(cost)
                file.flush()
                os.fsync(file.fileno())
                display.step("prompts", start + len(batch), len(rows))
    finally:
        display.finish()
        close()
    return costs


class Output:
    """The output file of a run, and what of it there is."""

    def __init__(self, settings: FileSettings, rows: Sequence[dict[str, Any]]) -> None:
        self.path = Path(settings.output_path)
        self.marks = self.path.with_name(self.path.name + ".settings.json")
        self.overwrite, self.rows = settings.overwrite, rows
        self.settings = {k: v for k, v in settings.to_dict().items() if k not in NOT_COMPARED}

    def resume(self) -> int:
        """How many rows it has; an incomplete last line goes."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.overwrite or not self.path.exists() or not self.path.stat().st_size:
                self.path.write_bytes(b"")
                atomic_write_json(self.marks, self.settings)
                return 0
            lines = self.path.read_bytes().split(b"\n")
            self._check_settings()
            self._check_rows(lines[:-1])
            with open(self.path, "rb+") as file:
                file.truncate(sum(len(line) + 1 for line in lines[:-1]))
        except OSError as error:
            raise UserError(
                f"{self.path} cannot be written ({error.strerror or error})", code="unwritable"
            ) from error
        return len(lines) - 1

    def _check_settings(self) -> None:
        try:
            before = json.loads(self.marks.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
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

    def _check_rows(self, lines: Sequence[bytes]) -> None:
        if len(lines) > len(self.rows):
            raise UserError(
                f"{self.path} has {len(lines)} rows, the input {len(self.rows)}; choose another --output, or "
                "--overwrite",
                code="different_config",
            )
        for number, (line, row) in enumerate(zip(lines, self.rows, strict=False), 1):
            try:
                same = json.loads(line).get("prompt") == row["prompt"]
            except (ValueError, AttributeError):
                same = False
            if not same:
                raise UserError(
                    f"{self.path}, line {number}: the prompt is not that of the input's row; choose another "
                    "--output, or --overwrite",
                    code="different_config",
                )
