"""Between texts and tokens: prompts, completions without their stop texts, and texts that grow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_data import Encoder, UserError
from rlhf_data.transcripts import Message, Text
from rlhf_infer.stops import until_stop
from rlhf_serve.errors import invalid_request

_BROKEN = "\N{REPLACEMENT CHARACTER}"
_ROLES = ("assistant", "developer", "system", "tool", "user")


class Texts:
    """Reads prompts and writes completions with one tokenizer.

    Args:
        tokenizer: of the policy.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._encoder = Encoder(tokenizer)

    def prompt_ids(self, prompt: Text, template: Mapping[str, Any] | None = None) -> list[int]:
        """Token ids of a text, or of messages up to where the assistant's answer starts.

        Raises:
            APIError: 400, where the chat template is missing or refuses the messages.
        """
        if not isinstance(prompt, str) and self.tokenizer.chat_template is None:
            raise invalid_request(
                "the model's tokenizer has no chat template; use /v1/completions, or start the server with "
                "--chat-template",
                "messages",
            )
        try:
            return self._encoder.prompt(prompt, template)
        except UserError as error:
            raise invalid_request(str(error), "prompt" if isinstance(prompt, str) else "messages") from error

    def rendered(self, prompt: Text, template: Mapping[str, Any] | None = None) -> str:
        """The text that a model reads for a prompt."""
        if isinstance(prompt, str):
            return prompt
        return self.tokenizer.apply_chat_template(
            prompt, tokenize=False, add_generation_prompt=True, **(template or {})
        )

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, without special tokens."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """What each token adds to the text; joined they are `decode(ids)`."""
        growing = GrowingText(self, ())
        pieces = [growing.add(token) for token in ids]
        if pieces:
            pieces[-1] += growing.rest()
        return pieces


def give_template(tokenizer: Any, template: str | None) -> None:
    """Have a tokenizer use a chat template; None leaves it its own."""
    if template is not None:
        tokenizer.chat_template = template


class GrowingText:
    """The text of a completion as its tokens come; what may turn out to be a stop text is held back.

    Args:
        texts: decodes.
        stops: texts that end the completion.
        min_tokens: tokens at its start in which no stop text may end.
    """

    def __init__(self, texts: Texts, stops: Sequence[str], min_tokens: int = 0) -> None:
        self._texts, self._stops, self._min_tokens = texts, tuple(stops), min_tokens
        self._unstopped = 0  # characters of the first `min_tokens` tokens
        self._ids: list[int] = []
        self._start, self._read = 0, 0
        self._text, self._sent = "", 0

    def add(self, token: int) -> str:
        """The text that is certain now and was not before."""
        self._ids.append(token)
        known = self._texts.decode(self._ids[self._start : self._read])
        text = self._texts.decode(self._ids[self._start :])
        if len(text) > len(known) and not text.endswith(_BROKEN):
            self._text += text[len(known) :]
            self._start, self._read = self._read, len(self._ids)
        if self._stops and len(self._ids) <= self._min_tokens:
            self._unstopped = len(self._texts.decode(self._ids).rstrip(_BROKEN))
        return self._send(self._certain())

    def rest(self) -> str:
        """What is left when the completion has ended."""
        known = self._texts.decode(self._ids[self._start : self._read])
        self._text += self._texts.decode(self._ids[self._start :])[len(known) :]
        self._start = self._read = len(self._ids)
        return self._send(self._end(len(self._text)))

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


def checked_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Messages with plain texts, as chat templates read them.

    Raises:
        APIError: 400, for a message without role or text; it is named.
    """
    found = []
    for i, message in enumerate(messages):
        role = message.get("role")
        if role not in _ROLES:
            raise invalid_request(
                f"messages[{i}].role must be one of {', '.join(_ROLES)}", f"messages[{i}].role"
            )
        content = message.get("content")
        if isinstance(content, list):
            content = _joined(content, f"messages[{i}].content")
        if not isinstance(content, str):
            raise invalid_request(
                f"messages[{i}].content must be a text, or a list of parts of type text",
                f"messages[{i}].content",
            )
        found.append({**message, "role": "system" if role == "developer" else role, "content": content})
    return found


def _joined(parts: Sequence[Any], where: str) -> str:
    texts = []
    for part in parts:
        text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise invalid_request(f"{where} has a part that is no text; only text is understood", where)
        texts.append(text)
    return "".join(texts)
