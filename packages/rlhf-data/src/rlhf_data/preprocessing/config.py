"""Config of the preparation of data before training."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from rlhf_data.config import BaseConfig
from rlhf_data.preprocessing.rules import TIE_SIMILARITY


class PreprocessConfig(BaseConfig):
    """Rules for the rows of a data set; each leaves out rows for one reason, or changes or divides them."""

    ties: Literal["drop", "keep", "margin0"] = "drop"
    """Pairs whose completions say nearly the same: leave them out, keep them, or give them margin 0.
    Completions that differ in case and white space only are left out always."""
    tie_similarity: float = Field(default=TIE_SIMILARITY, gt=0, le=1)
    """Dice's index of the completions' word 3-grams from which a pair is a tie."""
    min_words: int = Field(default=1, ge=0)
    """Words that a completion must have at least."""
    min_tokens: int = Field(default=1, ge=0)
    """Tokens that a completion must have at least; more than 1 needs a tokenizer."""
    duplicate_rows: Literal["none", "exact", "near"] = "exact"
    """Rows of which one is kept: none, those with equal texts, or those with nearly equal texts."""
    duplicate_prompts: Literal["none", "exact", "near"] = "none"
    """Prompts of which one row is kept; by default a prompt may have many."""
    contradictions: Literal["drop", "majority", "keep"] = "drop"
    """Equal texts with opposite labels: leave all out, keep the label that most have, or keep all."""
    contamination_words: int = Field(default=13, ge=2)
    """Words in a row that, shared with an evaluation file, make a row contaminated."""
    max_length: int | None = Field(default=None, ge=2)
    """Tokens of prompt and completion at most, or words without a tokenizer; null for no limit."""
    truncation: Literal["left", "middle", "drop", "right"] = "left"
    """Treatment of longer rows: left takes out the prompt's first turns, middle those in between, and
    drop leaves the rows out; completions stay whole.  Right is refused: it is for training."""
    eval_fraction: float = Field(default=0.1, ge=0, lt=1)
    """Share of the rows that is held out."""
    stratify_by: Literal["length", "source", "both", "none"] = "length"
    """Property whose distribution is the same among held-out rows as among all rows."""
    strata: int = Field(default=10, ge=1)
    """Quantile bins of the length of prompt and longest completion."""
    group_prompts: Literal["exact", "near"] = "exact"
    """Which rows stay on one side of the split: those of equal, or of nearly equal prompts."""
    margins: Literal["keep", "ratings", "similarity"] = "keep"
    """Margins of pairs: those of the rows, the difference of their two ratings, or 1 - similarity."""
    convert: Literal["none", "messages"] = "none"
    """Turn transcripts and instructions into chat messages."""
    near_threshold: float = Field(default=0.8, gt=0, le=1)
    """Jaccard index of shingles from which texts are nearly equal."""
    near_unit: Literal["words", "characters"] = "words"
    """Unit of shingles; characters for languages that are written without spaces."""
    near_size: int = Field(default=5, ge=1)
    """Words or characters of a shingle."""
    seed: int = Field(default=42, ge=0)
    """Of the choice of held-out rows and of near duplicates' hashes."""

    @model_validator(mode="after")
    def _completions_stay_whole(self) -> Self:
        if self.truncation == "right":
            raise ValueError(
                "truncation right cuts completions, and training on such rows learns that they end there; "
                "choose left, middle or drop, or set truncation=right where you train"
            )
        return self

    @model_validator(mode="after")
    def _margins_agree(self) -> Self:
        if self.ties == "margin0" and self.margins == "similarity":
            raise ValueError("ties is margin0 and margins is similarity, which sets those too; choose one")
        return self

    @model_validator(mode="after")
    def _has_a_use(self) -> Self:
        near = ("near_threshold", "near_unit", "near_size")
        if not (self.needs_near_rows or self.needs_near_prompts) and (unused := self._changed(*near)):
            raise ValueError(
                f"{unused} has no use where nothing near is sought; set duplicate_rows, duplicate_prompts "
                "or group_prompts to near, or leave it out"
            )
        if self.max_length is None and self._changed("truncation"):
            raise ValueError("truncation has no use without max_length; set that too, or leave it out")
        return self

    def _changed(self, *names: str) -> str | None:
        """The first of some settings that is not its default."""
        fields = type(self).model_fields
        return next((name for name in names if getattr(self, name) != fields[name].default), None)

    @property
    def needs_near_rows(self) -> bool:
        """Whether nearly equal rows are looked for."""
        return self.duplicate_rows == "near"

    @property
    def needs_near_prompts(self) -> bool:
        """Whether nearly equal prompts are looked for."""
        return "near" in (self.duplicate_prompts, self.group_prompts)
