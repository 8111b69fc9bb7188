"""The settings of a MinMax run's stories."""

from __future__ import annotations

import re
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from rlhf_data import (
    BaseConfig,
    LocalPath,
    QADatasetConfig,
    ReportWorldConfig,
    StoryWorldConfig,
    SumWorldConfig,
    absolute_path,
)

_SECTION_OF = {"stories": "story_world", "sums": "sum_world", "reports": "report_world"}
"""The settings of each world."""


def _first_changed(section: BaseConfig) -> str | None:
    """The first setting of a section that is not at its default."""
    fields = type(section).model_fields.items()
    return next((name for name, field in fields if getattr(section, name) != field.default), None)


class DataConfig(BaseConfig):
    """Source of the stories: files of question-answering rows, or a procedural world."""

    train_data: LocalPath | None = None
    """File of training rows (.json, .jsonl, .jsonl.gz, .csv, .parquet); null draws from `world`."""
    on_bad_row: Literal["error", "skip"] = "error"
    """Stop at a row of a file that cannot be used or is too long, or skip and count it."""
    eval_data: LocalPath | None = None
    """File of held-out rows; null holds out the rows of train_data whose text hashes to 0-2 of 10."""
    columns: QADatasetConfig = QADatasetConfig()
    """Columns of the rows, and the template that turns a row into a prompt."""
    rules: str | None = None
    """Rules of your own for answers and evidence of `train_data`: FILE.py:NAME or MODULE:NAME of a subclass
    of `rlhf_minmax.TextRules` or of one of its objects; null looks choices up in the text."""
    world: Literal["stories", "sums", "reports"] = "stories"
    """The world that stories are drawn from: who is where, how many there are, or where everybody is."""
    story_world: StoryWorldConfig = StoryWorldConfig()
    """The world of `stories`."""
    sum_world: SumWorldConfig = SumWorldConfig()
    """The world of `sums`."""
    report_world: ReportWorldConfig = ReportWorldConfig()
    """The world of `reports`."""
    train_stories: int = Field(default=2048, ge=1)
    """Stories drawn for training; of a file, the maximum number of rows used."""
    eval_stories: int = Field(default=512, ge=1)
    """Held-out stories; of a file, the maximum number of rows used."""
    label_share: float = Field(default=1.0, gt=0, le=1)
    """Share of the training stories whose right answers are used; those of the others are hidden from the
    game and from a judge that is built, chosen by the seed. Held-out stories keep theirs."""
    probe_stories: int = Field(default=256, ge=1)
    """Training stories on which score scales and the break-even weight are measured."""

    @model_validator(mode="after")
    def _no_other_world_is_set(self) -> Self:
        """A world's settings are those of the world that stories are drawn from, or the defaults."""
        for world, name in _SECTION_OF.items():
            key = _first_changed(getattr(self, name))
            if key is None or (self.train_data is None and self.world == world):
                continue
            source, choice = f"are drawn from the world {self.world}", f", or set world to {world}"
            if self.train_data is not None:
                source, choice = "come from train_data", ""
            raise ValueError(f"{name}.{key} is set, but the stories {source}; leave {name} out{choice}")
        return self

    @field_validator("rules")
    @classmethod
    def _absolute_rules(cls, rules: str | None) -> str | None:
        if rules is not None and not re.fullmatch(r".+:[^:]+|[\w.]+\.(?!py$)\w+", rules):
            raise ValueError(f"{rules!r} names no class, expected FILE.py:CLASS or MODULE:CLASS")
        file, colon, name = (rules or "").rpartition(":")
        return f"{absolute_path(file)}:{name}" if colon and file.endswith(".py") else rules
