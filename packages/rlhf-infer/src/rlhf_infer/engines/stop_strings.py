"""Stop strings: detecting one after each new token, and removing it from the text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlhf_data import Text
from rlhf_infer.engines.protocol import SamplingParams

_BROKEN = "\N{REPLACEMENT CHARACTER}"
"""The replacement character, which decoding puts in place of an incomplete UTF-8 sequence."""
_MOST_BYTES = 4
"""Maximum number of bytes of a character in UTF-8."""


class StopTexts:
    """Finds stop texts in completions that grow token by token.

    A text may be spread over tokens, and a token may extend beyond it. Nearly all tokens cannot end a stop
    text whatever came before, which is remembered token by token; only for the others the completion's last
    tokens are decoded.
    """

    def __init__(self, tokenizer: Any, texts: Sequence[str]) -> None:
        self.texts = tuple(texts)
        self._tokenizer = tokenizer
        # Completions are shown without special tokens, so `top` is not found in <|stop|>; a stop text that
        # spells one out still ends with it.
        self._hidden = {
            i
            for i, token in tokenizer.added_tokens_decoder.items()
            if token.special and not any(token.content in text for text in self.texts)
        }
        # Each token of a text spells at least one of its bytes.
        self._reach = max(len(text.encode()) for text in self.texts)
        self._candidates: dict[int, bool] = {}

    def end(self, prompt: Sequence[int], completion: Sequence[int] | np.ndarray) -> bool:
        """Whether a stop text within the completion (token ids) ends in its last token.

        Args:
            prompt: token ids before the completion; how a token reads may depend on the one before it.
            completion: token ids, at least one.
        """
        if int(completion[-1]) in self._hidden or not self._may_end(int(completion[-1])):
            return False
        first = max(0, len(completion) - self._reach - 1)
        # Some tokenizers decode nothing of bytes that begin within a character.
        for _ in range(_MOST_BYTES - 1):
            if first and self._decode(completion[first:]).startswith(_BROKEN):
                first -= 1
        context = prompt[-1:] if first == 0 else []
        tail = [*context, *completion[first:]]
        text, before = self._decode(tail), self._decode(tail[:-1]).rstrip(_BROKEN)
        start = len(self._decode(context))
        return any(
            (at := text.rfind(stop, start)) >= 0 and at + len(stop) > len(before) for stop in self.texts
        )

    def _may_end(self, token: int) -> bool:
        """Whether the token can be the last one of a stop text."""
        if token not in self._candidates:
            alone, twice = self._decode([token]), self._decode([token, token])
            self._candidates[token] = (
                not alone
                or _BROKEN in alone
                or not twice.startswith(alone)
                or any(_overlaps(stop, read) for stop in self.texts for read in (alone, twice[len(alone) :]))
            )
        return self._candidates[token]

    def _decode(self, ids: Sequence[int] | np.ndarray) -> str:
        shown = [token for token in map(int, ids) if token not in self._hidden]
        return self._tokenizer.decode(shown, clean_up_tokenization_spaces=False)


def _overlaps(stop: str, read: str) -> bool:
    """Whether a token's text contains a stop text, or begins with an ending of it."""
    return stop in read or any(read.startswith(stop[-n:]) for n in range(1, len(stop) + 1))


def goes_on_after(prompt: Text, prompt_ids: Sequence[int]) -> Sequence[int]:
    """Tokens that the text of a completion goes on after; none after messages, where it stands by itself."""
    return prompt_ids if isinstance(prompt, str) else ()


def space_between(tokenizer: Any, before: Sequence[int], completion: Sequence[int]) -> str:
    """Text between that of some tokens and that of their completion, each decoded by itself.

    Some tokenizers, such as those of Llama 2 and those of words, leave out a space at the start of a text.
    """
    last, first = _plain(tokenizer, before[-1:]), _plain(tokenizer, completion[:1])
    whole = _plain(tokenizer, [*before[-1:], *completion[:1]])
    space = whole.removeprefix(last).removesuffix(first)
    return space if whole == last + space + first and space.isspace() else ""


def completion_text(
    tokenizer: Any, ids: Sequence[int], params: SamplingParams, after: Sequence[int] = ()
) -> str:
    """The text of a completion, without special tokens and without the stop string or token that ended it.

    Args:
        tokenizer: the transformers tokenizer.
        ids: tokens of the completion.
        params: how it was drawn; stop texts within its first `min_new_tokens` tokens belong to the text.
        after: tokens that it goes on after, of which it has the space between; see `goes_on_after`.
    """
    if len(ids) and ids[-1] in params.stop_token_ids:
        ids = ids[:-1]
    text = _plain(tokenizer, ids)
    if params.stop:
        text = until_stop(text, params.stop, text_before_stops(tokenizer, ids, params))
    return space_between(tokenizer, after, ids) + text if text and len(after) else text


def text_before_stops(tokenizer: Any, ids: Sequence[int], params: SamplingParams) -> int:
    """Characters of a completion's first `min_new_tokens` tokens, in which no stop text may end."""
    least = params.min_new_tokens
    return len(_plain(tokenizer, ids[:least]).rstrip(_BROKEN)) if least else 0


def until_stop(text: str, stops: Sequence[str], start: int = 0) -> str:
    """A text up to the stop text that is complete first after its first `start` characters."""
    found = [(text.find(stop, max(0, start - len(stop) + 1)), stop) for stop in stops]
    ends = [(place + len(stop), place) for place, stop in found if place >= 0]
    return text[: min(ends)[1]] if ends else text


def _plain(tokenizer: Any, ids: Sequence[int]) -> str:
    return tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
