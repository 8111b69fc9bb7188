"""`rlhf-serve label-steps`: rows for `rlhf-train prm` from prompts and a rule that checks answers."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhf_data import UserError, atomic_write_json
from rlhf_infer import StepLabeller, check_columns
from rlhf_serve.cli.display import Display
from rlhf_serve.cli.files import open_engine, prompt_rows, sampling_params
from rlhf_serve.cli.load import load_parts
from rlhf_serve.cli.output import NOT_COMPARED
from rlhf_serve.settings import LabelSettings


def label_steps(settings: LabelSettings) -> None:
    """Write labelled solutions of every prompt, after those of the prompts that are done."""
    display = Display()
    _check(settings)
    rows = prompt_rows(settings)
    progress = _Progress(settings)
    done = progress.resume(len(rows))
    if done == len(rows):
        display.say(f"{settings.output_path} has all {done} prompts already; --overwrite starts over")
        return
    if done:
        display.say(f"{settings.output_path} has {done} of {len(rows)} prompts; continuing")
    parts = load_parts(settings, display.say, display.building)
    engine, close = open_engine(settings, parts)
    try:
        labeller = StepLabeller(
            engine, parts.rewards, engine.tokenizer, sampling_params(settings), settings.labels
        )
        solutions, labels = 0, []
        for start in range(done, len(rows), settings.batch_size):
            batch = rows[start : start + settings.batch_size]
            found = [
                each for group in _labelled(labeller, parts.rewards, batch, settings, start) for each in group
            ]
            progress.add([each.row() for each in found], start + len(batch))
            solutions += len(found)
            labels += [label for each in found for label in each.labels]
            display.step("prompts", start + len(batch), len(rows))
    finally:
        display.finish()
        close()
    right = f", {sum(labels) / len(labels):.0%} of them right" if labels else ""
    display.say(
        f"{len(rows) - done} prompts, {solutions} solutions, {len(labels)} steps{right}, "
        f"{labeller.generated_tokens} tokens; written to {settings.output_path}"
    )


def _check(settings: LabelSettings) -> None:
    if settings.model is None or not settings.reward:
        raise UserError(
            "step labels need a policy and a reward that knows the right answers; give --model and --reward, "
            "such as --reward number for rows with a column answer",
            code="missing_scorer",
        )
    if "n" in settings.model_fields_set:
        raise UserError(
            "n counts the candidates of best-of-N; give --solutions and --completions",
            code="conflicting_options",
        )
    if settings.temperature == 0 and settings.labels.solutions * settings.labels.completions > 1:
        raise UserError(
            "temperature is 0, so that all completions of a step are the same; raise it",
            code="invalid_value",
            key="temperature",
        )


def _labelled(
    labeller: StepLabeller,
    rewards: Any,
    batch: Sequence[dict[str, Any]],
    settings: LabelSettings,
    start: int,
) -> list[Any]:
    names = sorted({name for row in batch for name in row} - {"prompt"})
    columns = {name: [row.get(name) for row in batch] for name in names}
    try:
        check_columns({each.name: each.function for each in rewards.sources}, columns)
        return labeller.label([row["prompt"] for row in batch], columns)
    except UserError as error:
        where = f"{settings.input_path}, rows {start + 1} to {start + len(batch)}"
        raise UserError(f"{where}: {error}", code=error.code) from error


class _Progress:
    """The output, and beside it a file with how many prompts are done and how long the output was then."""

    def __init__(self, settings: LabelSettings) -> None:
        self.path = Path(settings.output_path)
        self.marks = self.path.with_name(self.path.name + ".progress.json")
        self.overwrite = settings.overwrite
        self.settings = {k: v for k, v in settings.to_dict().items() if k not in NOT_COMPARED}

    def resume(self, rows: int) -> int:
        """How many prompts are done; what was written after that goes."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.overwrite or not self.path.exists() or not self.path.stat().st_size:
                self.path.write_bytes(b"")
                self._mark(0)
                return 0
            marks = self._marks()
            with open(self.path, "rb+") as file:
                file.truncate(marks["bytes"])
        except OSError as error:
            raise UserError(
                f"{self.path} cannot be written ({error.strerror or error})", code="unwritable"
            ) from error
        if marks["prompts"] > rows:
            raise UserError(
                f"{self.path} is of {marks['prompts']} prompts, the input has {rows}; choose another "
                "--output, or --overwrite",
                code="different_config",
            )
        return marks["prompts"]

    def _marks(self) -> dict[str, Any]:
        try:
            marks = json.loads(self.marks.read_text(encoding="utf-8"))
            before = marks["settings"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{self.path} exists, and {self.marks.name} beside it does not say how it was made; choose "
                "another --output, or --overwrite",
                code="file_exists",
            ) from error
        now = json.loads(json.dumps(self.settings))
        for name, value in now.items():
            if before.get(name) != value:
                raise UserError(
                    f"{self.path} was made with {name}={before.get(name)!r}, now it is {value!r}; give the "
                    "same settings, another --output, or --overwrite",
                    code="different_config",
                )
        return marks

    def add(self, rows: Sequence[dict[str, Any]], done: int) -> None:
        """Append the rows of a batch, after which `done` prompts are done."""
        with open(self.path, "ab") as file:
            for row in rows:
                file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self._mark(done)

    def _mark(self, done: int) -> None:
        size = self.path.stat().st_size
        atomic_write_json(self.marks, {"prompts": done, "bytes": size, "settings": self.settings})
