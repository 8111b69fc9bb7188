"""Texts and conversations become token ids, as TRL makes them.

A prompt and its completion are read as one text, because tokens may merge where they meet; the completion
starts where the token ids of the prompt alone and of both together part. A completion in plain text ends with
the end token; what ends a conversation is the chat template's choice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from rlhf_data.errors import UserError
from rlhf_data.records.kind import Message, Text, common_prefix
from rlhf_data.records.truncation import Truncation, shorten_prompt, token_borders

Template = Mapping[str, Any] | None
"""Keyword arguments for the chat template."""
_MARKER = "␟"
"""Appended to a message to find where its content ends; not part of any chat template."""
_QUIET = {"verbose": False}
"""Without the warning that a text is too long for the model: what reads the ids cuts it or leaves it out."""
_UNCLEAR_TURNS = (
    "the chat template does not show where the assistant's turns start and end; mark them there with "
    "{% generation %}"
)
_GENERATION = re.compile(r"\{%-?\s*generation\b")


@dataclass(frozen=True)
class TokenSequence:
    """One sequence of token ids and where its scored part starts.

    Args:
        input_ids: token ids of the whole sequence, prompt first; at least one.
        score_from: index of the first token that is scored. Token 0 has no prediction and is never scored;
            `score_from == len(input_ids)` scores nothing (a scalar head may still read the last token).
        score_mask: one entry per token; if it is given, only tokens marked true are scored, as in a
            conversation of which only the assistant's turns are learned.
    """

    input_ids: Sequence[int]
    score_from: int
    score_mask: Sequence[bool] | None = None

    def scored(self) -> list[int]:
        """Indices of the scored tokens, ascending."""
        indices = range(max(self.score_from, 1), len(self.input_ids))
        return list(indices) if self.score_mask is None else [i for i in indices if self.score_mask[i]]


class RowDropped(Exception):
    """A good row that leaves nothing to learn, with the reason."""


class Builder:
    """Turns records of a kind into examples.

    Args:
        tokenizer: a Hugging Face tokenizer.
        max_length: tokens of a sequence at most; None for no limit.
        truncation: what happens to longer ones. "left" and "middle" shorten their prompts by whole turns
            (see `shorten_prompt`), and leave out those whose completions do not fit; "right" cuts them at
            their end; "drop" leaves them out. None for what is usual for the kind.

    Attributes:
        encoder: what encodes the records' texts.
    """

    def __init__(self, tokenizer: Any, max_length: int | None, truncation: Truncation | None = None) -> None:
        if truncation not in (None, "left", "right", "middle", "drop"):
            raise UserError(
                f"truncation must be left, right, middle or drop, got {truncation!r}",
                code="invalid_value",
                key="truncation",
            )
        if max_length is not None and max_length < 2:
            raise UserError(
                f"max_length must be at least 2 tokens, got {max_length}",
                code="invalid_value",
                key="max_length",
            )
        self.encoder = Encoder(tokenizer)
        self.max_length = max_length
        self.truncation = truncation

    def build(self, record: Any) -> Any:
        """Return what is kept of a record, in most kinds its example.

        Raises:
            RowDropped: nothing of it is left to learn.
            UserError: it cannot be encoded.
        """
        raise NotImplementedError

    def example(self, item: Callable[[int], Any], index: int, count: int) -> Any:
        """Return example `index` of `count`, where `item(i)` is what `build` made of record i.

        Of a bad row that stays on disk, `item` gives None.

        Kinds whose examples take something of their neighbours override this.
        """
        return item(index)

    def check_count(self, count: int) -> None:
        """Raise `UserError` where `count` records are too few; one is enough for most kinds."""

    def is_too_long(self, length: int) -> bool:
        """Whether a sequence of this length is shortened or left out before it is cut at its end."""
        cut = self.truncation in (None, "right")
        return not cut and self.max_length is not None and length > self.max_length

    def shortened(self, record: Any, length: int) -> Any:
        """The record with its prompt shortened, so that no sequence is too long.

        Raises:
            RowDropped: it is left out instead, or its completions do not fit.
        """
        limit = cast(int, self.max_length)
        if self.truncation == "left" or self.truncation == "middle":
            prompt, completions = record.parts()
            shorter = self.encoder.shorten(prompt, completions, record.template, limit, self.truncation)
            if shorter is not None:
                return record.with_prompt(shorter)
        raise RowDropped(f"{length} tokens, max_length is {limit}")

    def check_prompt(self, length: int) -> None:
        """Raise `RowDropped` where the prompt leaves no room for a completion."""
        if self.max_length is not None and length >= self.max_length:
            raise RowDropped(f"the prompt alone has {length} tokens, max_length is {self.max_length}")


class Encoder:
    """Encodes texts and conversations with one tokenizer.

    Args:
        tokenizer: a Hugging Face tokenizer, or an object with the same methods and attributes.

    Attributes:
        tokenizer: the tokenizer.
        moved_starts: completions encoded so far that start before the prompt's last token, because tokens
            merge where they meet or the chat template shows a prompt by itself otherwise.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.moved_starts = 0
        # Such a tokenizer reads `<eos>` in a text as letters; only the template's own special tokens count.
        self._literal = bool(getattr(tokenizer, "split_special_tokens", False))

    def text(self, text: str, *, start: bool = True) -> list[int]:
        """Token ids of a text, at its start with the special tokens that the tokenizer adds."""
        return list(self.tokenizer(text, add_special_tokens=start, **_QUIET)["input_ids"])

    def ended_text(self, text: str) -> list[int]:
        """Token ids of a text and the end token, which is not repeated where the text ends with it.

        Raises:
            UserError: the tokenizer has no end token.
        """
        end = self.tokenizer.eos_token
        if end is None:
            raise UserError(
                "the tokenizer has no end token, which completions end with; set its eos_token",
                code="no_end_token",
            )
        if self._literal:
            ids = self.text(text)
            return ids if ids[-1:] == [self.tokenizer.eos_token_id] else [*ids, self.tokenizer.eos_token_id]
        return self.text(text if text.endswith(end) else text + end)

    def prompt(self, prompt: Text, template: Template = None) -> list[int]:
        """Token ids of a prompt, messages up to where the assistant's next turn starts."""
        if isinstance(prompt, str):
            return self.text(prompt)
        return self._chat_ids(self._render(prompt, template, answer=True))

    def completions(
        self, prompt: Text, completions: Sequence[Text], template: Template = None
    ) -> tuple[list[list[int]], int]:
        """Token ids of a prompt with each of its completions, and where the completions start.

        Args:
            prompt: text or messages.
            completions: texts, or messages where the prompt is messages.
            template: keyword arguments for the chat template.

        Returns:
            One list per completion, and the number of leading tokens that belong to the prompt alone.

        Raises:
            UserError: the tokenizer has no end token, or the chat template is missing or fails.
        """
        start = self.prompt(prompt, template)
        both = [self._joint(prompt, completion, template) for completion in completions]
        length = min(common_prefix(start, ids) for ids in both)
        self.moved_starts += length < len(start)
        return both, length

    def lengths(self, prompt: Text, completions: Sequence[Text], template: Template = None) -> list[int]:
        """Tokens of a prompt with each of its completions, or of the prompt alone if there is none."""
        if not completions:
            return [len(self.prompt(prompt, template))]
        return [len(self._joint(prompt, completion, template)) for completion in completions]

    def shorten(
        self,
        prompt: Text,
        completions: Sequence[Text],
        template: Template,
        max_length: int,
        keep: Literal["left", "middle"],
    ) -> Text | None:
        """The prompt as `shorten_prompt` has it, so that every completion fits; None if that cannot be."""
        return shorten_prompt(
            prompt,
            lambda shorter: max(self.lengths(shorter, completions, template)) <= max_length,
            keep=keep,
            borders=token_borders(self.tokenizer),
        )

    def conversation(
        self, messages: list[Message], template: Template = None, *, assistant_only: bool
    ) -> tuple[list[int], list[bool] | None]:
        """Token ids of a conversation, and which the assistant says (None if not `assistant_only`).

        The chat template's `{% generation %}` marks decide. In a template without them, a turn of the
        assistant starts where the template's generation prompt ends, and ends with what the template writes
        after it.

        Raises:
            UserError: the chat template is missing or fails, or does not show what the assistant says.
        """
        if not assistant_only:
            return self._chat_ids(self._render(messages, template)), None
        if _GENERATION.search(self._template_text(template)):
            ids, mask = self._marked(messages, template)
        else:
            ids, mask = self._by_turns(messages, template)
        if not any(mask):
            raise UserError(
                "the chat template shows nothing that the assistant says; choose another template",
                code="no_assistant_turn",
            )
        return ids, mask

    def _joint(self, prompt: Text, completion: Text, template: Template) -> list[int]:
        if isinstance(prompt, str) and isinstance(completion, str):
            return self.ended_text(prompt + completion)
        if isinstance(prompt, list) and isinstance(completion, list):
            return self._chat_ids(self._render([*prompt, *completion], template))
        raise UserError(
            "a text and messages in one row; write prompt and completion alike",
            code="mixed_text_and_messages",
        )

    def _template_text(self, template: Template) -> str:
        if not getattr(self.tokenizer, "chat_template", None):
            raise UserError(
                "the tokenizer has no chat template, which messages need; name a model that has one (to "
                "train, chat_template_path names a template), or give texts",
                code="no_chat_template",
            )
        return self.tokenizer.get_chat_template(tools=(template or {}).get("tools"))

    def _render(self, messages: list[Message], template: Template, *, answer: bool = False) -> str:
        """Text of a conversation; with `answer`, up to where the assistant's next turn starts."""
        return self._apply(messages, template, tokenize=False, add_generation_prompt=answer)

    def _marked(self, messages: list[Message], template: Template) -> tuple[list[int], list[bool]]:
        """Token ids, and what the template marks as the assistant's."""
        marks: dict[str, Any] = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        marks["tokenizer_kwargs"] = _QUIET | ({"split_special_tokens": False} if self._literal else {})
        result = self._apply(messages, template, **marks)
        return list(result["input_ids"]), [bool(marked) for marked in result["assistant_masks"]]

    def _apply(self, messages: list[Message], template: Template, **options: Any) -> Any:
        self._template_text(template)
        try:
            return self.tokenizer.apply_chat_template(messages, **(options | dict(template or {})))
        except Exception as error:  # a template is a program of the user's, and fails as it likes
            raise UserError(
                f"the chat template refuses the conversation ({error}); correct either",
                code="template_refuses",
            ) from error

    def _chat_ids(self, text: str) -> list[int]:
        options = _QUIET | ({"split_special_tokens": False} if self._literal else {})
        return list(self.tokenizer(text, add_special_tokens=False, **options)["input_ids"])

    def _by_turns(self, messages: list[Message], template: Template) -> tuple[list[int], list[bool]]:
        """Token ids, and the assistant's turns, found by rendering the conversation up to each."""
        whole = self._render(messages, template)
        ids = self._chat_ids(whole)
        mask = [False] * len(ids)
        for turn, message in enumerate(messages):
            if message["role"] == "assistant":
                start = self._turn_start(whole, messages, turn, template)
                end = self._turn_end(whole, messages, turn, template)
                first, last = (common_prefix(self._chat_ids(whole[:at]), ids) for at in (start, end))
                mask[first:last] = [True] * (last - first)
        return ids, mask

    def _turn_start(self, whole: str, messages: list[Message], turn: int, template: Template) -> int:
        """Index in the whole conversation's text at which a turn of the assistant starts."""
        if not turn:
            return 0
        prompt = self._render(messages[:turn], template, answer=True)
        start = common_prefix(whole, prompt)
        if start < len(prompt) and start < self._content_end(whole, messages, turn - 1, template):
            raise UserError(_UNCLEAR_TURNS, code="unclear_turns")
        return start

    def _turn_end(self, whole: str, messages: list[Message], turn: int, template: Template) -> int:
        """Index in the whole conversation's text at which a turn ends, what closes it included."""
        until = self._render(messages[: turn + 1], template)
        if whole.startswith(until):
            return len(until)
        # The template shows an earlier turn otherwise than the last one, for instance without its thoughts.
        end = self._content_end(whole, messages, turn, template)
        for closing in self._closings(until, messages[: turn + 1], template):
            if whole.startswith(closing, end):
                return end + len(closing)
        raise UserError(_UNCLEAR_TURNS, code="unclear_turns")

    def _closings(self, text: str, messages: list[Message], template: Template) -> Iterator[str]:
        """Texts that may close the last turn of `messages` (as text: `text`) before another one."""
        last = len(messages) - 1
        closing = text[self._content_end(text, messages, last, template) :]
        yield closing
        # Some close the conversation's last turn by another token (GPT-OSS); before a generation prompt the
        # turn is closed as an earlier one.
        before, prompt = (self._render(messages[:-1], template, answer=answer) for answer in (False, True))
        followed = self._render(messages, template, answer=True)
        generation = prompt.removeprefix(before)
        if generation != prompt and followed.endswith(generation):
            marked = self._content_end(followed, messages, last, template, answer=True)
            yield followed[marked : len(followed) - len(generation)]
        # Some append an end token to the whole conversation (Phi-3).
        end = self.tokenizer.eos_token
        if end and closing.endswith(end) and closing != end:
            yield closing.removesuffix(end)

    def _content_end(
        self, text: str, messages: list[Message], turn: int, template: Template, *, answer: bool = False
    ) -> int:
        """Index in the conversation's text just after the content of a message."""
        marked = [*messages]
        marked[turn] = {**messages[turn], "content": f"{messages[turn].get('content', '')}{_MARKER}"}
        return common_prefix(text, self._render(marked, template, answer=answer))
