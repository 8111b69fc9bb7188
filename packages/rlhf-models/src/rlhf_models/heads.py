"""Models with one scalar per token: reward, judge and value, all a backbone and a `score` head."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from rlhf_data import PackedBatch, TokenSequence, UserError, pack
from rlhf_models.attention import prepare_for_packing
from rlhf_models.loading import (
    check_prompt_fits,
    check_tokenizer_fits,
    encode_completion,
    encode_prompt,
    load_model,
    load_tokenizer,
    quantization_config,
    save_model,
)
from rlhf_models.logps import hidden_states


class ScalarModel(nn.Module):
    """A sequence classifier with one label, and its tokenizer: score(x) = w · h_last(x), no bias.

    Saved folders load with `AutoModelForSequenceClassification`, and give the same scores there.

    Args:
        model: a transformers sequence classifier with `num_labels == 1` and its head named `score`.
        tokenizer: its tokenizer.

    Raises:
        UserError: the model has another number of labels or no `score` head, or the tokenizer does not fit.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Any) -> None:
        super().__init__()
        if model.config.num_labels != 1 or not hasattr(model, "score"):
            raise UserError(
                f"{type(model).__name__} with {model.config.num_labels} labels gives no single score; "
                "expected a sequence classification model with num_labels 1 and a head named score"
            )
        check_tokenizer_fits(model, tokenizer)
        self.model = prepare_for_packing(model)
        self.tokenizer = tokenizer

    @classmethod
    def from_backbone(cls, causal_lm: PreTrainedModel, tokenizer: Any, *, seed: int = 0) -> Self:
        """Copy a decoder's trunk under a new head, w ~ N(0, 1 / (hidden + 1)) (arXiv:2009.01325).

        Args:
            causal_lm: the decoder, not quantised and without adapters; it is left as it is.
            tokenizer: its tokenizer.
            seed: of the head's weights; the global random state is left as it was.

        Raises:
            UserError: transformers has no sequence classifier for the architecture.
        """
        config = type(causal_lm.config).from_dict(causal_lm.config.to_dict())
        config.num_labels = 1
        config.pad_token_id = tokenizer.pad_token_id
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            try:
                model = AutoModelForSequenceClassification.from_config(config, dtype=causal_lm.dtype)
            except ValueError as error:
                raise UserError(f"{type(causal_lm).__name__} has no variant with a scalar head") from error
            nn.init.normal_(model.score.weight, std=(model.score.in_features + 1) ** -0.5)
        model.base_model.load_state_dict(causal_lm.base_model.state_dict())
        return cls(model.to(causal_lm.device).eval(), tokenizer)

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        *,
        dtype: str | torch.dtype = "auto",
        load_in_8bit: bool = False,
        load_in_4bit: bool = False,
        device: str | torch.device | None = None,
    ) -> Self:
        """Load model and tokenizer from one folder or hub name; arguments as in `load_causal_lm`.

        Raises:
            UserError: it cannot be loaded, or is not a model with one score (a plain language model is not).
        """
        tokenizer = load_tokenizer(name_or_path)
        model = load_model(
            AutoModelForSequenceClassification,
            name_or_path,
            dtype=dtype,
            quantization=quantization_config(load_in_8bit, load_in_4bit, device=device),
            device=device,
        )
        return cls(model, tokenizer)

    @property
    def device(self) -> torch.device:
        """Where the model runs."""
        return self.model.device

    def forward(self, batch: PackedBatch) -> torch.Tensor:
        """Raw scores (Q,) in fp32, one per sequence of the batch, read at its last token."""
        return self._head(hidden_states(self.model, batch)[batch.last_positions])

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
        for ids in sequences:
            check_prompt_fits(self.model, len(ids), f"a text to be scored by {type(self).__name__}")
        scores = torch.empty(len(sequences))
        for batch in pack([TokenSequence(ids, len(ids)) for ids in sequences], max_tokens):
            scores[batch.sequence_ids] = self(batch.to(self.device)).cpu()
        return scores

    def score(
        self, prompts: Sequence[str], completions: Sequence[str], *, max_tokens: int | None = None
    ) -> torch.Tensor:
        """Scores (B,) of B completions after their prompts, fp32 on the CPU, without gradients.

        A text is read at its last token; no end token is added.

        Args:
            prompts: B prompts.
            completions: B completions.
            max_tokens: see `score_tokens`.
        """
        pairs = zip(prompts, completions, strict=True)
        return self.score_tokens(
            [self.encode(prompt, completion) for prompt, completion in pairs], max_tokens=max_tokens
        )

    def encode(self, prompt: str, completion: str) -> list[int]:
        """Token ids of a prompt and its completion, tokenised apart so that prompts are shared exactly."""
        return encode_prompt(self.tokenizer, prompt) + encode_completion(self.tokenizer, completion)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write model and tokenizer in Hugging Face format, atomically; an existing folder is replaced."""
        save_model(self.model, self.tokenizer, folder)

    def _head(self, hidden: torch.Tensor) -> torch.Tensor:
        head: Any = self.model.score
        return head(hidden)[:, 0].float()


class RewardModel(ScalarModel):
    """Scores how good a completion is, in the arbitrary unit its preferences gave it."""


class JudgeModel(ScalarModel):
    """Scores whether a statement is true; the raw score of `forward` is the logit of P(true)."""

    def score(
        self, prompts: Sequence[str], completions: Sequence[str], *, max_tokens: int | None = None
    ) -> torch.Tensor:
        """P(true) (B,) in [0, 1] for B completions after their prompts, without gradients."""
        return torch.sigmoid(super().score(prompts, completions, max_tokens=max_tokens))


class ValueModel(ScalarModel):
    """Predicts the return from every position; may start from a reward model's folder."""

    def values(self, batch: PackedBatch) -> torch.Tensor:
        """V (M,) in fp32: the value of the state in which each scored token is about to be chosen."""
        return self._head(hidden_states(self.model, batch)[batch.score_positions])
