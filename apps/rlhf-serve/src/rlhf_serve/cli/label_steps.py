"""`rlhf-serve label-steps`: rows for `rlhf-train prm` from prompts and a rule that checks answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rlhf_data import UserError, atomic_write_json, invalid_value
from rlhf_infer import StepLabeller, check_columns
from rlhf_serve.cli.display import Display
from rlhf_serve.cli.files import open_engine, prompt_rows, sampling_params
from rlhf_serve.cli.load import load_parts
from rlhf_serve.cli.output import Output, Work, write_rows
from rlhf_serve.settings import LabelSettings


def label_steps(settings: LabelSettings) -> None:
    """Write labelled solutions of every prompt, after those of the prompts that are done."""
    _check(settings)
    labellers: list[StepLabeller] = []
    prompts = prompt_rows(settings)

    def load(display: Display, done: int) -> tuple[Work, Callable[[], None]]:
        parts = load_parts(settings, display.say, display.building)
        engine, close = open_engine(settings, parts, prompts, done)
        params = sampling_params(settings)
        labellers.append(StepLabeller(engine, parts.rewards, engine.tokenizer, params, settings.labels))
        return partial(_labelled, labellers[0], parts.rewards), close

    found = write_rows(settings, load, _Labels, prompts)
    if found:
        solutions = [each for group in found for each in group]
        labels = [label for each in solutions for label in each.labels]
        right = f", {sum(labels) / len(labels):.0%} of them right" if labels else ""
        Display().say(
            f"{len(found)} prompts, {len(solutions)} solutions, {len(labels)} steps{right}, "
            f"{labellers[0].generated_tokens} tokens now; written to {settings.output_path}"
        )


def _check(settings: LabelSettings) -> None:
    if settings.model is None or not settings.reward:
        raise UserError(
            "step labels need a policy and a reward that knows the right answers; give --model and --reward, "
            "such as --reward number for rows with a column answer",
            code="missing_scorer",
        )
    if settings.temperature == 0 and settings.labels.solutions * settings.labels.completions > 1:
        raise invalid_value(
            "temperature is 0, so that all completions of a step are the same; raise it", "temperature"
        )


def _labelled(
    labeller: StepLabeller,
    rewards: Any,
    rows: Sequence[dict[str, Any]],
    columns: dict[str, list[Any]],
) -> list[tuple[list[dict[str, Any]], Any]]:
    check_columns({each.name: each.function for each in rewards.sources}, columns)
    found = labeller.label([row["prompt"] for row in rows], columns)
    return [([each.row() for each in group], group) for group in found]


class _Labels(Output):
    """The output, whose marks also say how many prompts are done and how long it was then."""

    noun, marks_suffix = "prompts", ".progress.json"

    def mark(self, done: int) -> None:
        """Write the marks."""
        size = self.path.stat().st_size
        atomic_write_json(self.marks, {"prompts": done, "bytes": size, "settings": self.settings})

    def done(self) -> tuple[int, int]:
        """As the marks say it; a prompt may have any number of lines."""
        marks = self.check_settings(lambda marks: marks["settings"])
        if marks["prompts"] > len(self.rows):
            raise UserError(
                f"{self.path} is of {marks['prompts']} prompts, the input has {len(self.rows)}; choose "
                "another --output, or --overwrite",
                code="different_config",
            )
        return marks["prompts"], marks["bytes"]
