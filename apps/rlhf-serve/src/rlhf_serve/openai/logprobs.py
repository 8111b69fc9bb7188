"""Log-probs of tokens in OpenAI's two formats, and the pieces of a completion that they belong to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhf_infer import Rollout, SamplingParams, space_between
from rlhf_serve.service.best_of_n import GenerationResult
from rlhf_serve.service.token_bytes import TokenBytes
from rlhf_serve.service.tokenization import ChatTokenizer, IncrementalDetokenizer


@dataclass(frozen=True)
class TokenRow:
    """One token of a completion.

    Args:
        token: its id.
        logp: its log-prob; None for the first of a prompt.
        top: the likeliest tokens and their log-probs, likeliest first.
        offset: characters of the completion before it.
    """

    token: int
    logp: float | None
    top: Sequence[tuple[int, float]] = ()
    offset: int = 0


@dataclass(frozen=True)
class Piece:
    """A piece of a completion's text, and the tokens that it comes from."""

    text: str
    rows: list[TokenRow] = field(default_factory=list)


class CompletionStream:
    """Streams a completion's text with the tokens it came from.

    Tokens are reported with the piece that their text is in; those of a stop text belong to none, nor do
    special tokens, such as the end, which the text leaves out.

    Args:
        chat_tokenizer: decodes.
        params: how the completion is drawn.
        prompt: tokens that the text continues; none where it stands by itself.
    """

    def __init__(
        self, chat_tokenizer: ChatTokenizer, params: SamplingParams, prompt: Sequence[int] = ()
    ) -> None:
        self._chat_tokenizer, self._prompt, self._space = chat_tokenizer, prompt, ""
        self._detokenizer = IncrementalDetokenizer(chat_tokenizer, params.stop, params.min_new_tokens)
        self._special, self._stops = chat_tokenizer.token_bytes.special, params.stop_token_ids
        self._rows: list[tuple[int, float, Sequence[tuple[int, float]]]] = []
        self._sent = 0

    def add(self, token: int, logp: float = 0.0, top: Sequence[tuple[int, float]] = ()) -> Piece | None:
        """The piece that is certain now and was not before."""
        if token in self._stops:
            return None
        if not self._rows and self._prompt:
            self._space = space_between(self._chat_tokenizer.tokenizer, self._prompt, [token])
        self._rows.append((token, logp, top))
        return self._piece(self._detokenizer.add(token))

    def rest(self) -> Piece | None:
        """The remaining tokens when the completion has ended."""
        return self._piece(self._detokenizer.rest())

    def _piece(self, text: str) -> Piece | None:
        if not text:
            return None
        first, self._sent = self._sent, self._detokenizer.sent_tokens
        starts = [0, *(len(self._space) + end for end in self._detokenizer.ends)]
        places = (i for i in range(first, self._sent) if self._rows[i][0] not in self._special)
        rows = [TokenRow(*self._rows[i], starts[i]) for i in places]
        return Piece(text if first else self._space + text, rows)


def completion_pieces(
    chat_tokenizer: ChatTokenizer, params: SamplingParams, rollout: Rollout, prompt: Sequence[int] = ()
) -> Iterator[Piece]:
    """All pieces of a completion; see `CompletionStream`."""
    stream = CompletionStream(chat_tokenizer, params, prompt)
    logps = rollout.raw_logps or rollout.logps or [0.0] * len(rollout.completion_ids)
    tops = rollout.top_logps or [()] * len(rollout.completion_ids)
    for token, logp, top in zip(rollout.completion_ids, logps, tops, strict=True):
        if piece := stream.add(token, logp, top):
            yield piece
    if piece := stream.rest():
        yield piece


def echoed(
    chat_tokenizer: ChatTokenizer, result: GenerationResult, rollout: Rollout, top: int
) -> list[TokenRow]:
    """All tokens of a prompt and its completion, special ones included, with the `top` likeliest."""
    prompt, drawn = result.prompt, len(rollout.completion_ids)
    assert prompt is not None
    ids = [*result.request.prompt_ids, *rollout.completion_ids]
    logps = [None, *prompt.logps, *(rollout.raw_logps or rollout.logps)]
    tops = [(), *prompt.tops, *(rollout.top_logps or [()] * drawn)]
    detokenizer = IncrementalDetokenizer(chat_tokenizer, ())
    for token in ids:
        detokenizer.add(token)
    detokenizer.rest()
    rows = zip(ids, logps, tops, [0, *detokenizer.ends[:-1]], strict=True)
    return [TokenRow(token, logp, likeliest[:top], start) for token, logp, likeliest, start in rows]


def prompt_logprobs(tokens: TokenBytes, result: GenerationResult) -> list[dict[str, Any] | None] | None:
    """`prompt_logprobs` as vLLM has them, by token ids; None where they are not requested."""
    prompt, count = result.prompt, result.request.prompt_logprobs
    if prompt is None or count is None:
        return None
    found: list[dict[str, Any] | None] = [None]
    for place, token in enumerate(result.request.prompt_ids[1:]):
        likeliest = {other: (logp, i + 1) for i, (other, logp) in enumerate(prompt.tops[place][:count])}
        entries = {token: (prompt.logps[place], prompt.ranks[place])} | likeliest
        found.append(
            {
                str(other): {"logprob": logp, "rank": rank, "decoded_token": tokens.text(other)}
                for other, (logp, rank) in entries.items()
            }
        )
    return found


def chat_logprobs(tokens: TokenBytes, rows: Sequence[TokenRow]) -> dict[str, Any]:
    """`logprobs` of a chat's choice, or of one of its chunks."""

    def entry(token: int, logp: float | None) -> dict[str, Any]:
        return {"token": tokens.text(token), "logprob": logp, "bytes": list(tokens.of(token))}

    content = [
        entry(row.token, row.logp) | {"top_logprobs": [entry(*other) for other in row.top]} for row in rows
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(tokens: TokenBytes, rows: Sequence[TokenRow]) -> dict[str, Any]:
    """`logprobs` of a completion, or of one of its chunks."""
    return {
        "tokens": [tokens.text(row.token) for row in rows],
        "token_logprobs": [row.logp for row in rows],
        "top_logprobs": [_by_text(tokens, row) or None for row in rows]
        if any(row.top for row in rows)
        else None,
        "text_offset": [row.offset for row in rows],
    }


def _by_text(tokens: TokenBytes, row: TokenRow) -> dict[str, float]:
    """Log-probs by the tokens' texts; of two with the same text the less likely one by its id."""
    found: dict[str, float] = {}
    for token, logp in row.top:
        text = tokens.text(token)
        found[f"token_id:{token}" if text in found else text] = logp
    return found
