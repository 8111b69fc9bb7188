"""Models with one score per text: reward and judge."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from transformers import AutoModelForSequenceClassification, PreTrainedConfig

from rlhf_data import Encoder, PackedBatch, Text
from rlhf_models.heads.scalar_model import HeadModel, scores_of
from rlhf_models.language_model.encoding import encode_completion, encode_prompt


class ScalarModel(HeadModel):
    """A sequence classifier with one label, and its tokenizer: score(x) = head(h_last(x)).

    A linear head is w · h without bias. Saved folders with one load with
    `AutoModelForSequenceClassification`, and give the same scores there.
    """

    auto_class: ClassVar[Any] = AutoModelForSequenceClassification

    @property
    def append_eos(self) -> bool:
        """Whether `encode` reads texts as `rlhf_data.PreferenceDataset` does; stored with the model.

        Then prompt and completion are read as one text, which ends with the end token. Set it on a model
        that was trained on such a data set, and so on one that TRL trained.
        """
        return bool(getattr(self.config, "append_eos", False))

    @append_eos.setter
    def append_eos(self, value: bool) -> None:
        self.config.append_eos = value

    def forward(self, batch: PackedBatch) -> torch.Tensor:
        """Raw scores (Q,) in fp32, one per sequence of the batch, read at its last token.

        As in transformers, that is the last token that is not the padding token; where the end token is
        used for padding, it is the token before the end.
        """
        return self._head(self._hidden(batch)[read_positions(batch, self.config, self.tokenizer)])

    @torch.no_grad()
    def score_tokens(
        self, sequences: Sequence[Sequence[int]], *, max_tokens: int | None = None
    ) -> torch.Tensor:
        """Raw scores (B,) in fp32 on the CPU, without gradients; prefixes that sequences share run once.

        Args:
            sequences: B lists of token ids, none empty.
            max_tokens: budget in tokens for one forward pass; None runs all at once.

        Raises:
            UserError: a sequence is longer than the context.
        """
        what = f"a text to be scored by {type(self).__name__}"
        return scores_of(self, self.model, sequences, max_tokens=max_tokens, what=what)

    def score(
        self, prompts: Sequence[Text], completions: Sequence[Text], *, max_tokens: int | None = None
    ) -> torch.Tensor:
        """Scores (B,) of B completions after their prompts, fp32 on the CPU, without gradients.

        Args:
            prompts: B prompts, read by `encode`.
            completions: B completions.
            max_tokens: see `score_tokens`.
        """
        pairs = zip(prompts, completions, strict=True)
        return self.score_tokens(
            [self.encode(prompt, completion) for prompt, completion in pairs], max_tokens=max_tokens
        )

    def encode(self, prompt: Text, completion: Text) -> list[int]:
        """Token ids of a prompt and its completion.

        Texts are tokenised apart and no end token is added, unless `append_eos` says otherwise. Messages go
        through the tokenizer's chat template, which ends a conversation as it likes.

        Raises:
            UserError: a text next to messages, messages without a chat template, or a text that the tokenizer
                has no tokens for.
        """
        return encode_scored(self.tokenizer, prompt, completion, append_eos=self.append_eos)


class RewardModel(ScalarModel):
    """Scores how good a completion is, in the arbitrary unit its preferences gave it."""


class JudgeModel(ScalarModel):
    """Scores whether a statement is true; the raw score of `forward` is the logit of P(true)."""

    def score(
        self, prompts: Sequence[Text], completions: Sequence[Text], *, max_tokens: int | None = None
    ) -> torch.Tensor:
        """P(true) (B,) in [0, 1] for B completions after their prompts, without gradients."""
        return torch.sigmoid(super().score(prompts, completions, max_tokens=max_tokens))


def encode_scored(tokenizer: Any, prompt: Text, completion: Text, *, append_eos: bool) -> list[int]:
    """Token ids of a text to be scored; see `ScalarModel.encode`."""
    if isinstance(prompt, str) and isinstance(completion, str) and not append_eos:
        return encode_prompt(tokenizer, prompt) + encode_completion(tokenizer, completion)
    [ids], _ = Encoder(tokenizer).completions(prompt, [completion])
    return ids


def read_positions(batch: PackedBatch, config: PreTrainedConfig, tokenizer: Any) -> torch.Tensor:
    """Stream positions (Q,) at which the sequences' scores are read: their last tokens that are not padding.

    Args:
        batch: the stream.
        config: the model's, whose `pad_token_id` transformers skips.
        tokenizer: the model's; a text can end with the padding token only where that is its end token.
    """
    last = batch.last_positions
    if config.pad_token_id is None or config.pad_token_id != tokenizer.eos_token_id:
        return last
    parents = batch.segment_parent.clamp(min=0)
    above = batch.segment_start[parents] + batch.segment_length[parents] - 1
    above = torch.where(batch.segment_parent < 0, batch.segment_start, above)
    while True:
        segment = torch.searchsorted(batch.segment_start, last, right=True) - 1
        before = torch.where(last > batch.segment_start[segment], last - 1, above[segment])
        earlier = torch.where(batch.input_ids[last] == config.pad_token_id, before, last)
        if torch.equal(earlier, last):
            return last
        last = earlier
