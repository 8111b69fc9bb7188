"""Responses in OpenAI's format, whole and as streams of events."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_infer import Candidate
from rlhf_serve.errors import APIError
from rlhf_serve.openai.logprobs import (
    Piece,
    TokenRow,
    chat_logprobs,
    completion_logprobs,
    completion_pieces,
    echoed,
    prompt_logprobs,
)
from rlhf_serve.openai.tool_calls import Part, ToolCallParser
from rlhf_serve.openai.tools import ToolUse
from rlhf_serve.service.best_of_n import GenerationResult
from rlhf_serve.service.requests import GenerationRequest, Timing
from rlhf_serve.service.tokenization import ChatTokenizer

DONE = "data: [DONE]\n\n"
WAITING = ": waiting\n\n"
"""A comment, which clients pass over, so that no proxy takes a stream for dead."""


@dataclass(frozen=True, kw_only=True)
class Format:
    """How one request is answered.

    `logprobs` counts alternatives to each token, None for no log-probs; with another `fingerprint` the same
    seed may be answered otherwise; `echo` puts prompts before their completions.
    """

    chat: bool
    model: str
    chat_tokenizer: ChatTokenizer
    logprobs: int | None
    candidates: bool
    fingerprint: str | None = None
    tools: ToolUse | None = None
    echo: bool = False

    def whole(self, results: Sequence[GenerationResult], timing: Timing) -> dict[str, Any]:
        """The response to a request that is not streamed."""
        choices = []
        for result in results:
            for each in result.chosen:
                body, reason = self._answer(result, each)
                body = {"index": len(choices), **body, "logprobs": self.logprobs_of(self._rows(result, each))}
                choices.append(body | {"finish_reason": reason, "score": each.score})
        response = self._head("chat.completion" if self.chat else "text_completion")
        response |= {"choices": choices, "usage": usage(results), "timing": timing.to_dict()}
        if self.chat and (found := prompt_logprobs(self.chat_tokenizer.token_bytes, results[0])) is not None:
            response["prompt_logprobs"] = found
        if self.candidates:
            response["candidates"] = listed(results)
        return response

    def _answer(self, result: GenerationResult, candidate: Candidate) -> tuple[dict[str, Any], str]:
        """A choice's text or message, and why it ended."""
        if self.chat:
            answer = answer_of(candidate, self.tools)
            message = {"role": "assistant", "content": answer.content, "refusal": None}
            if answer.calls:
                message["tool_calls"] = answer.calls
            return {"message": message}, answer.finish_reason
        text = f"{result.request.prompt}{candidate.text}" if self.echo else candidate.text
        body: dict[str, Any] = {"text": text}
        if (found := prompt_logprobs(self.chat_tokenizer.token_bytes, result)) is not None and not self.echo:
            body["prompt_logprobs"] = found
        return body, candidate.rollout.finish_reason

    def before(self, request: GenerationRequest) -> Sequence[int]:
        """Tokens that the text of a request's completion continues; a chat's stands by itself."""
        return () if self.chat else request.prompt_ids

    def stream_head(self) -> dict[str, Any]:
        """Fields that all chunks of a stream share."""
        return self._head("chat.completion.chunk" if self.chat else "text_completion")

    def id_of(self, head: dict[str, Any]) -> str:
        """The answer's id."""
        return head["id"]

    def chunks(self, head: dict[str, Any], results: Sequence[GenerationResult]) -> Iterator[str]:
        """The winners, piece by piece."""
        index = 0
        for result in results:
            for each in result.chosen:
                choice = self.choice(head, index)
                yield choice.opening()
                for piece in self._pieces(result, each):
                    yield choice.piece(piece)
                yield choice.closing(each)
                index += 1

    def choice(self, head: dict[str, Any], index: int) -> ChoiceStream:
        """A choice of a stream."""
        return ChoiceStream(self, head, index)

    def error(self, head: Any, error: APIError) -> str:
        """The event of an error in a stream that has begun."""
        del head
        return event(error.body())

    def ending(
        self, head: dict[str, Any], results: Sequence[GenerationResult], timing: Timing, *, with_usage: bool
    ) -> str:
        """The candidates and the usage if requested, and the end of the stream."""
        last: dict[str, Any] = {}
        if self.candidates:
            last |= {"candidates": listed(results), "timing": timing.to_dict()}
        if with_usage:
            last["usage"] = usage(results)
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

    def _rows(self, result: GenerationResult, candidate: Candidate) -> list[TokenRow]:
        """The tokens of a candidate's text, if log-probs are requested."""
        if self.logprobs is None:
            return []
        if self.echo:
            return echoed(self.chat_tokenizer, result, candidate.rollout, self.logprobs)
        return [row for piece in self._pieces(result, candidate) for row in piece.rows]

    def _pieces(self, result: GenerationResult, candidate: Candidate) -> Iterator[Piece]:
        request = result.request
        return completion_pieces(self.chat_tokenizer, request.params, candidate.rollout, self.before(request))

    def logprobs_of(self, rows: Sequence[TokenRow]) -> dict[str, Any] | None:
        """`logprobs` of some tokens, if requested."""
        if self.logprobs is None:
            return None
        return (chat_logprobs if self.chat else completion_logprobs)(self.chat_tokenizer.token_bytes, rows)


class ChoiceStream:
    """One choice of a stream: chunks with its pieces of text, and its calls of tools."""

    def __init__(self, style: Format, head: dict[str, Any], index: int) -> None:
        self._style, self._head, self._index = style, head, index
        self._parser = None if style.tools is None else ToolCallParser(style.tools.format)
        self._rows: list[TokenRow] = []

    def opening(self) -> str:
        """The first chunk of a chat's choice; nothing for completions."""
        return self._chunk({"role": "assistant", "content": ""}) if self._style.chat else ""

    def piece(self, piece: Piece) -> str:
        """Chunks with a piece of the text, and the log-probs of its tokens if requested."""
        self._rows += piece.rows
        if self._parser is None:
            return self._chunk({"content": piece.text})
        return "".join(self._part(part) for part in self._parser.add(piece.text))

    def closing(self, candidate: Candidate) -> str:
        """The last chunk: why the choice ended, and its score."""
        rest = "" if self._parser is None else "".join(map(self._part, self._parser.rest()))
        calls = self._parser is not None and self._parser.calls > 0
        reason = finish_reason(candidate, calls=calls)
        logprobs = {} if self._rows else {"logprobs": None}  # a part of a call that nothing has been sent of
        return rest + self._chunk({}, finish_reason=reason, score=candidate.score, **logprobs)

    def _part(self, part: Part) -> str:
        return self._chunk({"content": part.content} if part.call is None else call_delta(part))

    def _chunk(self, delta: dict[str, Any], **more: Any) -> str:
        body: dict[str, Any] = {"index": self._index, "finish_reason": None}
        if self._style.chat:
            body["delta"] = delta
        else:
            body["text"] = delta.get("content", "")
        if "role" not in delta:
            body["logprobs"] = self._style.logprobs_of(self._rows)
            self._rows = []
        return event(self._head | {"choices": [body | more]})


@dataclass(frozen=True)
class Answer:
    """A chat's answer: its text, None beside calls of tools, the calls, and why it ended."""

    content: str | None
    calls: list[dict[str, Any]]
    finish_reason: str


def answer_of(candidate: Candidate, tools: ToolUse | None) -> Answer:
    """A candidate as an answer that may call tools."""
    if tools is None:
        return Answer(candidate.text, [], candidate.rollout.finish_reason)
    parser = ToolCallParser(tools.format)
    parts = [*parser.add(candidate.text), *parser.rest()]
    content = "".join(part.content for part in parts)
    calls: list[dict[str, Any]] = []
    for part in parts:
        if part.name:
            calls.append(call_delta(part)["tool_calls"][0])
            calls[-1].pop("index")
        elif part.call is not None:
            calls[part.call]["function"]["arguments"] += part.arguments
    reason = finish_reason(candidate, calls=bool(calls))
    return Answer(content if content or not calls else None, calls, reason)


def finish_reason(candidate: Candidate, *, calls: bool) -> str:
    """Why an answer ended: with `tool_calls` if it calls tools and was not cut off."""
    reason = candidate.rollout.finish_reason
    return "tool_calls" if calls and reason == "stop" else reason


def call_delta(part: Part) -> dict[str, Any]:
    """A part of a call as a stream has it."""
    call: dict[str, Any] = {"index": part.call}
    if part.name:
        call |= {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function"}
        call["function"] = {"name": part.name, "arguments": part.arguments}
    else:
        call["function"] = {"arguments": part.arguments}
    return {"tool_calls": [call]}


def event(body: dict[str, Any]) -> str:
    """A server-sent event."""
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"


def usage(results: Sequence[GenerationResult]) -> dict[str, Any]:
    """Tokens of prompts, once for each round of drawing, and of all candidates, also of those that lost.

    Of searches also the tokens that they might draw, of all prompts.
    """
    prompt = sum(result.selected.cost.prompt_tokens for result in results)
    completion = sum(result.selected.cost.completion_tokens for result in results)
    found = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "candidates": sum(len(result.selected.candidates) for result in results),
    }
    searches = [each.request.search for each in results if each.request.search is not None]
    if searches:
        found["search_budget_tokens"] = sum(search.budget_tokens for search in searches)
    return found


def listed(results: Sequence[GenerationResult]) -> list[dict[str, Any]]:
    """All candidates in the order in which they were drawn."""
    rows = []
    for prompt, result in enumerate(results):
        rank = {place: i for i, place in enumerate(result.selected.ranking)}
        for place, each in enumerate(result.selected.candidates):
            row = {
                "index": each.index,
                "text": each.text,
                "score": each.score,
                "scores": dict(each.scores),
                "answer": each.answer,
            }
            row |= {"finish_reason": each.rollout.finish_reason, "tokens": len(each.rollout.completion_ids)}
            row |= {"rank": rank[place], "selected": rank[place] < result.request.n}
            rows.append(row | ({"prompt": prompt} if len(results) > 1 else {}))
    return rows
