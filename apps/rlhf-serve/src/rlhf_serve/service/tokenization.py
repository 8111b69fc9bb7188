"""Between texts and tokens: prompts, completions without their stop texts, and text token by token."""

from __future__ import annotations

import bisect
import copy
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from rlhf_data import Encoder, Text, UserError
from rlhf_infer import until_stop
from rlhf_serve.errors import invalid_request, refused
from rlhf_serve.service.chat_templates import check_switches, switches_of
from rlhf_serve.service.token_bytes import TokenBytes
from rlhf_serve.service.worker_threads import Workers

_BROKEN = "\N{REPLACEMENT CHARACTER}"


class ChatTokenizer:
    """Reads prompts and writes completions with one tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.workers = Workers()
        """Threads in which prompts are rendered and tokenised."""
        self.compilers = Workers(1, most_abandoned=2)
        """A thread in which constraints are compiled, so that a slow one delays no other request."""
        self._encoder = self._chats = Encoder(tokenizer)
        if getattr(tokenizer, "split_special_tokens", False):
            # Chats need another setting, which a thread must not change while another one uses the tokenizer.
            own = copy.deepcopy(tokenizer)
            own("", split_special_tokens=False)
            self._chats = Encoder(own)
        self._switches = switches_of(tokenizer)
        self.token_bytes = TokenBytes(tokenizer)
        """The text of the policy's tokens."""

    def check_template(self, template: Mapping[str, Any] | None) -> None:
        """Refuse arguments for the chat template that are not its switches.

        Raises:
            APIError: 400; the argument is named.
        """
        check_switches(template or {}, self._switches)

    def token_ids(self, text: str, *, start: bool = False) -> list[int]:
        """Token ids of a text, with `start` after the special tokens that begin one."""
        return self._encoder.text(text, start=start)

    def prompt_ids(self, prompt: Text, template: Mapping[str, Any] | None = None) -> list[int]:
        """Token ids of a text, or of messages up to where the assistant's answer starts.

        Raises:
            APIError: 400, where the chat template is missing or refuses the messages.
        """
        if isinstance(prompt, str):
            return self._encoder.prompt(prompt)
        self._check_template_exists()
        try:
            return self._chats.prompt(prompt, template)
        except UserError as error:
            raise refused(error, "messages") from error

    def rendered(self, prompt: Text, template: Mapping[str, Any] | None = None) -> str:
        """The text that a model reads for a prompt.

        Raises:
            APIError: as `prompt_ids`.
        """
        if isinstance(prompt, str):
            return prompt
        self._check_template_exists()
        try:
            options = {"tokenize": False, "add_generation_prompt": True, **(template or {})}
            return self.tokenizer.apply_chat_template(prompt, **options)
        except Exception as error:  # a template is a program, and may raise anything
            raise invalid_request(
                f"the chat template refuses the conversation ({error})", "messages"
            ) from error

    def _check_template_exists(self) -> None:
        if self.tokenizer.chat_template is None:
            raise invalid_request(
                "the model's tokenizer has no chat template; use /v1/completions, or start the server with "
                "--chat-template",
                "messages",
            )

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """The text of token ids, without special tokens unless `special`."""
        options = {"skip_special_tokens": not special, "clean_up_tokenization_spaces": False}
        return self.tokenizer.decode(list(ids), **options)


def give_template(tokenizer: Any, template: str | None) -> None:
    """Set a tokenizer's chat template; None leaves it unchanged."""
    if template is not None:
        tokenizer.chat_template = template


class IncrementalDetokenizer:
    """The text of a completion as its tokens come; what may turn out to be a stop text is held back.

    Args:
        chat_tokenizer: decodes.
        stops: texts that end the completion.
        min_tokens: tokens at its start in which no stop text may end.
    """

    def __init__(self, chat_tokenizer: ChatTokenizer, stops: Sequence[str], min_tokens: int = 0) -> None:
        self._chat_tokenizer, self._stops, self._min_tokens = chat_tokenizer, tuple(stops), min_tokens
        self._unstopped = 0  # characters of the first `min_tokens` tokens
        self._ids: list[int] = []
        self._start, self._read = 0, 0
        self._text, self._sent = "", 0
        self.ends: list[int] = []
        """Characters of the text after each token; they grow with a character's last token, whether or not it
        finishes the character, and never with a special token."""

    def add(self, token: int) -> str:
        """The text that is certain now and was not before."""
        self._ids.append(token)
        self.ends.append(len(self._text))
        known, text = self._decoded(self._read), self._decoded(len(self._ids))
        if len(text) > len(known) and not text.endswith(_BROKEN):
            self._take(known, text)
            self._start, self._read = self._read, len(self._ids)
        if self._stops and len(self._ids) <= self._min_tokens:
            self._unstopped = len(self._chat_tokenizer.decode(self._ids).rstrip(_BROKEN))
        return self._send(self._certain())

    def rest(self) -> str:
        """The remaining text when the completion has ended."""
        self._take(self._decoded(self._read), self._decoded(len(self._ids)))
        self._start = self._read = len(self._ids)
        return self._send(self._end(len(self._text)))

    @property
    def sent_tokens(self) -> int:
        """The number of tokens that the text handed out comes from, without ends and stop texts."""
        return bisect.bisect_left(self.ends, self._sent) + 1 if self._sent else 0

    def _decoded(self, end: int) -> str:
        return self._chat_tokenizer.decode(self._ids[self._start : end])

    def _take(self, known: str, text: str) -> None:
        """Append what `text` has after `known`, and set where each of the unread tokens ends in it.

        Bytes of a character that is never finished are replaced in the text; the last of them ends that.
        """
        lasts = {}
        for place in range(self._read, len(self._ids)):
            if self._ids[place] not in self._chat_tokenizer.token_bytes.special:
                so_far = text if place + 1 == len(self._ids) else self._decoded(place + 1)
                if text.startswith(so_far):  # else a later token finishes its last character
                    lasts[len(so_far)] = place
        for length, place in lasts.items():
            self.ends[place] = len(self._text) - len(known) + length
        self.ends[self._read :] = accumulate(self.ends[self._read :], max)
        self._text += text[len(known) :]

    def _send(self, end: int) -> str:
        piece = self._text[self._sent : max(end, self._sent)]
        self._sent += len(piece)
        return piece

    def _certain(self) -> int:
        """How far no stop text can begin that is not complete."""
        end = len(self._text)
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(self._text)), 0, -1):
                if self._text.endswith(stop[:length]):
                    end = min(end, len(self._text) - length)
                    break
        return self._end(end)

    def _end(self, end: int) -> int:
        return min(end, len(until_stop(self._text, self._stops, self._unstopped)))
