"""The settings of a `ContextCompressor`, which are known to be right before torch is loaded."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rlhf_data import BaseConfig, UserError


class CompressionSettings(BaseConfig):
    """How a `ContextCompressor` chooses, and how much it keeps."""

    method: Literal["surprisal", "question", "contrastive"] = "question"
    """surprisal: what the model predicts worst. question: what makes the question likeliest. contrastive:
    what the question makes likelier than it is by itself."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Tokens to keep at most."""
    ratio: float | None = Field(default=None, ge=1)
    """Keep one in `ratio` tokens, rounded down; exactly one of this and max_tokens."""
    units: Literal["sentence", "token"] = "sentence"
    """Unit of ranking: whole sentences, the last of which is cut to fit, or single tokens."""
    keep_first: int = Field(default=0, ge=0)
    """First tokens of a text, which are kept."""
    keep_last: int = Field(default=0, ge=0)
    """Last tokens of a text, which are kept."""
    batch_tokens: int | None = Field(default=16384, ge=1)
    """Tokens of one forward pass, shared prefixes counted once; null for all texts at once."""

    def check(self, *, asked: bool = True) -> None:
        """Refuse what does not go together.

        Args:
            asked: whether texts come with questions.

        Raises:
            UserError: not exactly one of max_tokens and ratio, single tokens by the method of sentences, or
                no questions where the method wants them.
        """
        if (self.max_tokens is None) == (self.ratio is None):
            raise UserError(
                "a compressor needs max_tokens or ratio, "
                + ("and neither is given" if self.ratio is None else "and both are given; leave one out"),
                code="invalid_value",
                key="max_tokens",
            )
        if self.units == "token" and self.method == "question":
            raise UserError(
                'method "question" scores whole sentences; take units "sentence" or method "contrastive"',
                code="invalid_value",
                key="units",
            )
        if not asked and self.method != "surprisal":
            raise UserError(
                f'method "{self.method}" needs a question to every text; name the column that has it '
                '(question_key), or take method "surprisal"',
                code="no_question",
            )
