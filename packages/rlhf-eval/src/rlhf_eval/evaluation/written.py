"""Parts of an evaluation: settings, folder, completions, and the rewards' view of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from rlhf_data import BaseConfig, Encoder, PromptRecord, Text, UserError, as_messages
from rlhf_eval.scoring import as_text

Progress = Callable[[int, str], AbstractContextManager[Callable[[int], None]]]
"""Given how much there is to do and what, a context whose value is called with what has been done."""


class EvalConfig(BaseConfig):
    """How completions are drawn and measured."""

    max_new_tokens: int = Field(default=256, ge=1)
    """Longest completion, in tokens."""
    temperature: float = Field(default=1.0, ge=0)
    """Of sampling; 0 takes the most likely token. The KL of completions is unbiased at 1."""
    num_samples: int = Field(default=1, ge=1)
    """Completions of each prompt."""
    seed: int = 0
    """Of sampling."""
    gen_batch_size: int = Field(default=16, ge=1)
    """Prompts whose completions are drawn at a time."""
    max_tokens_per_batch: int = Field(default=16_384, ge=1)
    """Tokens of a forward pass that scores."""


@dataclass(frozen=True)
class Written:
    """One completion.

    Args:
        text: what was written, without an end token.
        ids: its token ids; None if it comes from a file.
        truncated: whether it was cut at its longest; None if that is not known.
    """

    text: str
    ids: list[int] | None = None
    truncated: bool | None = None


@contextmanager
def no_progress(total: int, what: str) -> Iterator[Callable[[int], None]]:
    """Says nothing."""
    del total, what
    yield lambda count: None


@dataclass(frozen=True)
class Place:
    """Name and folder of an evaluation.

    Args:
        name: what errors and progress call the policy.
        folder: where completions and numbers are kept as they are made; an evaluation that was interrupted
            continues from it. None keeps them in memory.
        progress: is shown what is being done.
    """

    name: str = "policy"
    folder: Path | None = None
    progress: Progress = no_progress


def as_read(reads_chat: bool, prompt: Text, completion: Text) -> tuple[Text, Text]:
    """Prompt and completion as a reward reads them: both messages, or both texts.

    With `reads_chat`, for a reward whose tokenizer has a chat template, transcripts become messages.
    """
    if reads_chat:
        record: Any = as_messages(PromptRecord(prompt))
        if not isinstance(record.prompt, str):
            said = (
                [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
            )
            return record.prompt, said
    if isinstance(prompt, str):
        return prompt, as_text(completion) if isinstance(completion, list) else completion
    turns = "\n".join(f"{message['role']}: {message.get('content') or ''}" for message in prompt)
    said_last = completion if isinstance(completion, str) else completion[-1].get("content") or ""
    return f"{turns}\nassistant:", said_last


def prompt_ids(tokenizer: Any, model: Any, record: PromptRecord, max_new_tokens: int) -> list[int]:
    """Token ids of a prompt as a model reads it: in its chat template, if it has one.

    Args:
        tokenizer: the model's tokenizer.
        model: the model, or its config, whose context must hold the prompt and its completion.
        record: the prompt.
        max_new_tokens: the longest completion.

    Raises:
        UserError: it does not fit, or is messages and there is no chat template.
    """
    from rlhf_models import check_prompt_fits

    read: Any = as_messages(record) if tokenizer.chat_template else record
    if not isinstance(read.prompt, str) and not tokenizer.chat_template:
        raise UserError(
            f"{record.where}: the prompt is messages, and a model has no chat template to read them by; give "
            "prompts as plain texts",
            code="no_chat_template",
        )
    ids = Encoder(tokenizer).prompt(read.prompt, read.template)
    check_prompt_fits(model, len(ids) + max_new_tokens, f"{record.where}, with its completion,")
    return ids


def row_of(written: Written) -> dict[str, Any]:
    """A completion as JSON values."""
    return {"text": written.text, "ids": written.ids, "truncated": written.truncated}


def written_of(row: Mapping[str, Any]) -> Written:
    """The completion of such a row."""
    return Written(row["text"], row.get("ids"), row.get("truncated"))
