"""The stories of a run: from files, or drawn from a procedural world."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rlhf_data import (
    QADatasetConfig,
    QARecord,
    UserError,
    generate_reports,
    generate_stories,
    generate_sums,
    json_hash,
    load_qa,
    split_of,
)
from rlhf_minmax.config.data import DataConfig
from rlhf_minmax.config.run import MinMaxConfig
from rlhf_minmax.formats import MONITOR_TEMPLATE, POLICY_TEMPLATE, TextRules
from rlhf_minmax.game.prompts import Prompts
from rlhf_minmax.game.report_rules import ReportRules
from rlhf_minmax.game.story_rules import StoryRules
from rlhf_minmax.game.sum_rules import SumRules
from rlhf_minmax.game.user_rules import check_rules, check_validator, load_rules

WORLD_TEMPLATE = "{story}\n{question}\n"
"""The worlds' prompt: places and numbers need no list of choices."""


@dataclass(frozen=True)
class Stories:
    """Records for training, for evaluation and to build models from, and the prompts made of them.

    Training stories may lack the right answer; held-out ones and those to build from have it.

    Raises:
        UserError: no training story has its right answer, or one of the others lacks it.
    """

    train: list[QARecord]
    held_out: list[QARecord]
    building: list[QARecord]
    prompts: Prompts
    skipped: tuple[str, ...] = ()
    """A message for every row of a file that was left out."""
    label_share: float = 1.0
    """Below 1, answers of training stories are hidden from the game; see `hide_answers`."""

    def __post_init__(self) -> None:
        if self.train and not self.labelled:
            raise _no_labels(len(self.train), self.prompts.dataset)
        for what, part in (("held_out", self.held_out), ("building", self.building)):
            lacking = next((i for i, record in enumerate(part) if record.answer is None), None)
            if lacking is not None:
                where = part[lacking].where or f"story {lacking + 1} of {what}"
                raise UserError(
                    f"{where} has no answer, and all stories of {what} need one; leave it out",
                    code="no_labels",
                    where=where,
                )

    @property
    def labelled(self) -> list[QARecord]:
        """The training stories whose right answer is known."""
        return [record for record in self.train if record.answer is not None]

    @property
    def judged(self) -> list[QARecord] | None:
        """Stories that a built judge learns from; None for all of `building`, where no answer is hidden."""
        return self.labelled if self.label_share < 1 else None

    def without(self, left_out: Mapping[str, str]) -> Stories:
        """These stories but for records of some places, with a message for each of those."""
        train, held_out, building = (
            [record for record in part if record.where not in left_out]
            for part in (self.train, self.held_out, self.building)
        )
        skipped = (*self.skipped, *left_out.values())
        for what, part in (("training", train), ("held-out", held_out)):
            if not part:
                raise UserError(
                    f"all {what} rows are left out; the first that was: {skipped[0]}", code="no_row_left"
                )
        return replace(self, train=train, held_out=held_out, building=building, skipped=skipped)


def load_stories(config: MinMaxConfig) -> Stories:
    """Read or draw the stories of a run; training and held-out stories never overlap.

    Raises:
        UserError: a file or `data.rules` cannot be used, or a file leaves no training row, no held-out row,
            or no training row with its answer.
    """
    data = config.data
    if data.train_data is None:
        if data.rules is not None:
            raise UserError(
                "data.rules is set without data.train_data, and the worlds have rules of their own; give "
                "--train-data too",
                code="missing_key",
                key="data.train_data",
            )
        if data.eval_data is not None:
            raise UserError(
                "data.eval_data is set without data.train_data; give --train-data too",
                code="missing_key",
                key="data.train_data",
            )
        count = max(data.train_stories, config.demo.num_stories)
        draw, rules = _world(data)
        building = draw(count, split="train", seed=config.seed)
        held_out = draw(data.eval_stories, split="eval", seed=config.seed)
        prompts = _prompts(config, _world_columns(data), rules)
        train = hide_answers(building[: data.train_stories], data.label_share, seed=config.seed)
        return Stories(train, held_out, building, prompts, label_share=data.label_share)
    rules = load_rules(config)
    check_validator(rules, config)
    skipped: list[str] = []
    train, held_out = _from_files(data, data.train_data, rules, skipped)
    train = train[: data.train_stories]
    building = [record for record in train if record.answer is not None]
    train = hide_answers(train, data.label_share, seed=config.seed)
    check_rules(rules, building)
    prompts = _prompts(config, data.columns, rules)
    held_out = held_out[: data.eval_stories]
    return Stories(train, held_out, building, prompts, tuple(skipped), data.label_share)


def _no_labels(count: int, columns: QADatasetConfig) -> UserError:
    return UserError(
        f"none of the {count} training rows has an answer (field {columns.answer_column}: missing), and the "
        "monitor learns the truth from those that do; give some, or map another column to it "
        "(data.columns.answer_column)",
        code="no_labels",
    )


def hide_answers(records: Sequence[QARecord], share: float, *, seed: int) -> list[QARecord]:
    """The records, with the right answers of only a share kept: round(share · count), at least one.

    Which are kept depends on the seed and on the records' texts alone, so that a larger share keeps the
    answers of a smaller one. Records without an answer count as hidden first.
    """
    labelled = [index for index, record in enumerate(records) if record.answer is not None]
    labelled.sort(key=lambda index: json_hash([seed, records[index].story, records[index].question]))
    kept = set(labelled[: max(1, round(share * len(records)))])
    return [record if index in kept else replace(record, answer=None) for index, record in enumerate(records)]


def _world(data: DataConfig) -> tuple[Callable[..., list[QARecord]], TextRules]:
    """The generator of the chosen world's stories, and its rules."""
    if data.world == "sums":
        return partial(generate_sums, data.sum_world), SumRules()
    if data.world == "reports":
        return partial(generate_reports, data.report_world), ReportRules()
    return partial(generate_stories, data.story_world), StoryRules()


def _world_columns(data: DataConfig) -> QADatasetConfig:
    """The worlds' template, unless the config sets one."""
    if data.columns.prompt_template != QADatasetConfig().prompt_template:
        return data.columns
    return data.columns.model_copy(update={"prompt_template": WORLD_TEMPLATE})


def _prompts(config: MinMaxConfig, columns: QADatasetConfig, rules: TextRules) -> Prompts:
    policy = config.policy_model.prompt_template or POLICY_TEMPLATE
    monitor = config.monitor_model.prompt_template or MONITOR_TEMPLATE
    return Prompts(columns, rules, policy, monitor, config.game.answer_template)


def _load(
    data: DataConfig, path: str, rules: TextRules, skipped: list[str], *, needs_answer: bool
) -> list[QARecord]:
    """The rows of a file; refuses marked evidence that the rules do not accept."""

    def check(record: QARecord) -> None:
        if record.evidence is not None and not rules.evidence_holds(record, record.evidence):
            raise UserError(
                f"{record.where}, field {data.columns.evidence_column}: {record.evidence!r} cannot be a "
                "critic's evidence, which is a whole sentence or enough words of one "
                "(constraint.min_evidence_words); quote the sentence, or leave the cell empty",
                code="unfit_evidence",
                where=record.where,
            )

    more: Any = {"on_bad_row": data.on_bad_row, "skipped": skipped, "check": check}
    return load_qa(path, data.columns, needs_answer=needs_answer, **more)


def _check_marked(rows: Sequence[QARecord], column: str | None, path: str) -> None:
    if column is not None and all(row.evidence is None for row in rows):
        raise UserError(
            f"none of the {len(rows)} rows of {path} has a text in {column} (data.columns.evidence_column); "
            "name the column that quotes the story, or leave the setting out",
            code="missing_column",
            column=column,
        )


def _from_files(
    data: DataConfig, train_data: str, rules: TextRules, skipped: list[str]
) -> tuple[list[QARecord], list[QARecord]]:
    rows = _load(data, train_data, rules, skipped, needs_answer=False)
    _check_marked(rows, data.columns.evidence_column, train_data)
    if all(row.answer is None for row in rows):
        raise _no_labels(len(rows), data.columns)
    if data.eval_data is not None:
        held_out = _load(data, data.eval_data, rules, skipped, needs_answer=True)
        how = "(stories of --eval-data are not trained on)"
    else:
        held_out = [row for row in rows if row.answer is not None and split_of(row.story) == "eval"]
        how = "(rows with an answer are held out by a hash of the story)"
    stories = {record.story for record in held_out}
    train = [record for record in rows if record.story not in stories]
    for what, part in (("training", train), ("held-out", held_out)):
        if not part:
            raise UserError(
                f"{train_data} leaves no {what} row of its {len(rows)} "
                f"{how}; give --eval-data with other stories",
                code="no_row_left",
            )
    return train, held_out
