"""The best completions of a file of prompts, by best-of-N or tree search, row by row, resumable."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhf_data import UserError, atomic_write_json
from rlhf_infer import (
    AdaptiveComputeAllocator,
    BestOfNSampler,
    ConfidenceBasedStopping,
    SamplingCost,
    Selected,
    extractor,
)
from rlhf_infer.sampling.candidates import VOTES
from rlhf_serve.cli.display import Display
from rlhf_serve.cli.files import open_engine, prompt_rows, sampling_params
from rlhf_serve.cli.load import Parts, load_parts
from rlhf_serve.cli.search import TreeSampler, check_search, is_by_tree, tree_sampler
from rlhf_serve.settings import BatchSettings

Sampler = BestOfNSampler | TreeSampler
_NOT_COMPARED = (
    *("batch_size", "device", "input_path", "max_batch_tokens", "output_path", "overwrite", "search_tree"),
)
"""Settings that change no completion."""


def generate(settings: BatchSettings) -> None:
    """Write the best completion of every prompt, after those that the output has already."""
    display = Display()
    check_search(settings)
    rows = prompt_rows(settings)
    done = _Output(settings, rows).resume()
    if done == len(rows):
        display.say(f"{settings.output_path} has all {done} rows already; --overwrite starts over")
        return
    if done:
        display.say(f"{settings.output_path} has {done} of {len(rows)} rows; continuing")
    parts = load_parts(settings, display.say, display.building)
    sampler, close = _sampler(settings, parts, done)
    costs = []
    try:
        with open(settings.output_path, "ab") as file:
            for start in range(done, len(rows), settings.batch_size):
                batch = rows[start : start + settings.batch_size]
                found = _sample(settings, sampler, batch, start)
                for row, selected in zip(batch, found, strict=True):
                    file.write(_line(row, selected, settings))
                file.flush()
                os.fsync(file.fileno())
                costs += [selected.cost for selected in found]
                display.step("prompts", start + len(batch), len(rows))
    finally:
        display.finish()
        close()
    display.say(_summary(SamplingCost.total(costs), len(costs), settings))


class _Output:
    """The output file of a run, and what of it there is."""

    def __init__(self, settings: BatchSettings, rows: Sequence[dict[str, Any]]) -> None:
        self.path = Path(settings.output_path)
        self.marks = self.path.with_name(self.path.name + ".settings.json")
        self.overwrite, self.rows = settings.overwrite, rows
        self.settings = {k: v for k, v in settings.to_dict().items() if k not in _NOT_COMPARED}

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


def _sampler(settings: BatchSettings, parts: Parts, done: int) -> tuple[Sampler, Any]:
    """The sampler, and the function that closes it."""
    if is_by_tree(settings):
        return tree_sampler(settings, parts, done)
    adaptive = _adaptive(settings)
    engine, close = open_engine(settings, parts)
    sampler = BestOfNSampler(
        engine,
        parts.rewards,
        engine.tokenizer,
        n=settings.n if settings.budget is None else settings.budget,
        params=sampling_params(settings),
        selection=settings.selection,
        extract=extractor(settings.answer) if settings.selection in VOTES else None,
        adaptive=adaptive,
    )
    return sampler, close


def _adaptive(settings: BatchSettings) -> ConfidenceBasedStopping | AdaptiveComputeAllocator | None:
    """The rule for the number of candidates; initial ones take at most half of a budget."""
    budget = settings.budget
    if budget is None:
        return settings.stopping.rule(settings.n) if settings.stop_early else None
    if settings.stop_early:
        raise UserError(
            "stop_early and budget both decide how much is sampled; give one of them",
            code="conflicting_options",
        )
    if budget > settings.n:
        raise UserError(
            f"the budget is {budget} samples per prompt and n, the most of one prompt, {settings.n}; lower "
            "the budget or raise n"
        )
    return AdaptiveComputeAllocator(min_samples=max(1, min(4, budget // 2)), max_samples=settings.n)


def _sample(
    settings: BatchSettings, sampler: Sampler, batch: Sequence[dict[str, Any]], start: int
) -> list[Selected]:
    names = sorted({name for row in batch for name in row} - {"prompt"})
    columns = {name: [row.get(name) for row in batch] for name in names}
    try:
        return sampler.sample([row["prompt"] for row in batch], columns)
    except UserError as error:
        where = f"{settings.input_path}, rows {start + 1} to {start + len(batch)}"
        raise UserError(f"{where}: {error}") from error


def _line(row: dict[str, Any], selected: Selected, settings: BatchSettings) -> bytes:
    best, cost = selected.best, selected.cost
    found = row | {
        "completion": best.text,
        "score": best.score,
        "scores": dict(best.scores),
        "answer_found": best.answer,
        "finish_reason": best.rollout.finish_reason,
        "samples": cost.samples,
        "completion_tokens": cost.completion_tokens,
    }
    if settings.keep is not None:
        found["candidates"] = [
            {
                "text": each.text,
                "score": each.score,
                "finish_reason": each.rollout.finish_reason,
            }
            for each in selected.top(settings.keep)
        ]
    return json.dumps(found, ensure_ascii=False).encode() + b"\n"


def _summary(cost: SamplingCost, prompts: int, settings: BatchSettings) -> str:
    drawn = "steps" if is_by_tree(settings) else "candidates"
    text = f"{prompts} prompts, {cost.samples} {drawn}, {cost.completion_tokens} tokens"
    if cost.saved_samples:
        text += f"; {cost.saved_share:.0%} of the candidates saved"
    return f"{text}; written to {settings.output_path}"
