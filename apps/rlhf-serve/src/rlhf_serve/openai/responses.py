"""Responses in OpenAI's format, whole and as streams of events."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_infer import Candidate
from rlhf_serve.openai.logprobs import Piece, TokenRow, chat_logprobs, completion_logprobs, unfolded
from rlhf_serve.service.best_of_n import Outcome, Timing
from rlhf_serve.service.tokenization import Texts

DONE = "data: [DONE]\n\n"
WAITING = ": waiting\n\n"
"""A comment, which clients pass over, so that no proxy takes a stream for dead."""


@dataclass(frozen=True)
class Format:
    """How one request is answered.

    Args:
        chat: whether it is a chat, or a completion.
        model: name of the model.
        texts: decodes.
        logprobs: alternatives beside each token; None for no log-probs.
        candidates: whether all candidates come back.
        fingerprint: of what serves; another one may answer the same seed otherwise.
    """

    chat: bool
    model: str
    texts: Texts
    logprobs: int | None
    candidates: bool
    fingerprint: str | None = None

    def whole(self, outcomes: Sequence[Outcome], timing: Timing) -> dict[str, Any]:
        """The response to a request that is not streamed."""
        choices = []
        for outcome in outcomes:
            for each in outcome.chosen:
                body: dict[str, Any] = {"index": len(choices)}
                if self.chat:
                    body["message"] = {"role": "assistant", "content": each.text, "refusal": None}
                else:
                    body["text"] = each.text
                body["logprobs"] = self._logprobs(self._rows(outcome, each))
                body["finish_reason"] = each.rollout.finish_reason
                choices.append(body | {"score": each.score})
        response = self._head("chat.completion" if self.chat else "text_completion")
        response |= {"choices": choices, "usage": usage(outcomes), "timing": timing.to_dict()}
        if self.candidates:
            response["candidates"] = listed(outcomes)
        return response

    def stream_head(self) -> dict[str, Any]:
        """What all chunks of one stream begin with."""
        return self._head("chat.completion.chunk" if self.chat else "text_completion")

    def chunks(self, head: dict[str, Any], outcomes: Sequence[Outcome]) -> Iterator[str]:
        """The winners, piece by piece."""
        index = 0
        for outcome in outcomes:
            for each in outcome.chosen:
                yield from self._opening(head, index)
                for piece in unfolded(self.texts, outcome.order.params, each.rollout):
                    yield self.piece(head, index, piece)
                yield self.closing(head, index, each)
                index += 1

    def _opening(self, head: dict[str, Any], index: int) -> Iterator[str]:
        if self.chat:
            delta = {"role": "assistant", "content": ""}
            yield event(head | {"choices": [{"index": index, "delta": delta, "finish_reason": None}]})

    def opening(self, head: dict[str, Any], index: int) -> str:
        """The first chunk of a choice; nothing for completions."""
        return "".join(self._opening(head, index))

    def piece(self, head: dict[str, Any], index: int, piece: Piece) -> str:
        """A chunk with a piece of a choice's text, and the log-probs of its tokens if asked for."""
        body: dict[str, Any] = {"index": index, "finish_reason": None}
        body["logprobs"] = self._logprobs(piece.rows)
        body |= {"delta": {"content": piece.text}} if self.chat else {"text": piece.text}
        return event(head | {"choices": [body]})

    def closing(self, head: dict[str, Any], index: int, candidate: Candidate) -> str:
        """The last chunk of a choice: why it ended, and its score."""
        body: dict[str, Any] = {"index": index, "finish_reason": candidate.rollout.finish_reason}
        body |= {"delta": {}} if self.chat else {"text": ""}
        body |= {"logprobs": None, "score": candidate.score}
        return event(head | {"choices": [body]})

    def ending(
        self, head: dict[str, Any], outcomes: Sequence[Outcome], timing: Timing, *, with_usage: bool
    ) -> str:
        """The candidates and the usage if asked for, and the end of the stream."""
        last: dict[str, Any] = {}
        if self.candidates:
            last |= {"candidates": listed(outcomes), "timing": timing.to_dict()}
        if with_usage:
            last["usage"] = usage(outcomes)
        return (event(head | {"choices": []} | last) if last else "") + DONE

    def _head(self, kind: str) -> dict[str, Any]:
        name = "chatcmpl" if self.chat else "cmpl"
        return {
            "id": f"{name}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }

    def _rows(self, outcome: Outcome, candidate: Candidate) -> list[TokenRow]:
        """The tokens of a candidate's text, where log-probs are asked for."""
        if self.logprobs is None:
            return []
        pieces = unfolded(self.texts, outcome.order.params, candidate.rollout)
        return [row for piece in pieces for row in piece.rows]

    def _logprobs(self, rows: Sequence[TokenRow]) -> dict[str, Any] | None:
        if self.logprobs is None:
            return None
        return (chat_logprobs if self.chat else completion_logprobs)(self.texts.token_bytes, rows)


def event(body: dict[str, Any]) -> str:
    """A server-sent event."""
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"


def usage(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Tokens of prompts, once for each round of drawing, and of all candidates, also of those that lost."""
    prompt = sum(outcome.selected.cost.prompt_tokens for outcome in outcomes)
    completion = sum(outcome.selected.cost.completion_tokens for outcome in outcomes)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "candidates": sum(len(outcome.selected.candidates) for outcome in outcomes),
    }


def listed(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """All candidates in the order in which they were drawn."""
    rows = []
    for prompt, outcome in enumerate(outcomes):
        rank = {place: i for i, place in enumerate(outcome.selected.ranking)}
        for place, each in enumerate(outcome.selected.candidates):
            row = {
                "index": each.index,
                "text": each.text,
                "score": each.score,
                "scores": dict(each.scores),
                "answer": each.answer,
            }
            row |= {"finish_reason": each.rollout.finish_reason, "tokens": len(each.rollout.completion_ids)}
            row |= {"rank": rank[place], "selected": rank[place] < outcome.order.n}
            rows.append(row | ({"prompt": prompt} if len(outcomes) > 1 else {}))
    return rows
