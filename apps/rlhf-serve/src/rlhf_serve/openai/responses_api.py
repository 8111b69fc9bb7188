"""Answers of `/v1/responses`, whole and as streams of events."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhf_infer import Candidate
from rlhf_serve.errors import APIError
from rlhf_serve.openai.logprobs import Piece, completion_pieces
from rlhf_serve.openai.responses import usage
from rlhf_serve.openai.responses_schema import ResponsesRequest
from rlhf_serve.openai.tool_calls import Part, ToolCallParser
from rlhf_serve.openai.tools import ToolUse
from rlhf_serve.service.best_of_n import GenerationResult
from rlhf_serve.service.requests import GenerationRequest, Timing
from rlhf_serve.service.tokenization import ChatTokenizer


@dataclass
class ResponseStream:
    """One response while it is written: its output so far, and the number of its next event."""

    body: dict[str, Any]
    number: int = 0
    output: list[dict[str, Any]] = field(default_factory=list)

    def event(self, kind: str, **fields: Any) -> str:
        """A server-sent event."""
        body = {"type": kind, "sequence_number": self.number, **fields}
        self.number += 1
        return f"event: {kind}\ndata: {json.dumps(body, ensure_ascii=False)}\n\n"


@dataclass(frozen=True)
class ResponseFormat:
    """How one request to `/v1/responses` is answered; the same calls as `responses.Format`."""

    request: ResponsesRequest
    model: str
    chat_tokenizer: ChatTokenizer
    tools: ToolUse | None

    def whole(self, results: Sequence[GenerationResult], timing: Timing) -> dict[str, Any]:
        """The response to a request that is not streamed."""
        del timing
        stream = self.stream_head()
        [each] = results[0].chosen
        choice = self.choice(stream, 0)
        choice.piece(Piece(each.text))
        choice.closing(each)
        return self._ended(stream, results)

    def stream_head(self) -> ResponseStream:
        """The response before its first event."""
        request = self.request
        return ResponseStream(
            {
                "id": f"resp_{uuid.uuid4().hex}",
                "object": "response",
                "created_at": int(time.time()),
                "model": self.model,
                "error": None,
                "incomplete_details": None,
                "instructions": request.instructions,
                "max_output_tokens": request.max_output_tokens,
                "metadata": {},
                "parallel_tool_calls": request.parallel_tool_calls is not False,
                "previous_response_id": None,
                "store": False,
                "temperature": request.temperature,
                "text": request.text or {"format": {"type": "text"}},
                "tool_choice": request.tool_choice or "auto",
                "tools": request.tools or [],
                "top_p": request.top_p,
                "truncation": request.truncation or "disabled",
            }
        )

    def before(self, request: GenerationRequest) -> Sequence[int]:
        """Nothing: an answer's text stands by itself."""
        del request
        return ()

    def id_of(self, head: ResponseStream) -> str:
        """The answer's id."""
        return head.body["id"]

    def chunks(self, head: ResponseStream, results: Sequence[GenerationResult]) -> Iterator[str]:
        """The winner, piece by piece."""
        [result] = results
        choice = self.choice(head, 0)
        yield choice.opening()
        for each in result.chosen:
            for piece in completion_pieces(self.chat_tokenizer, result.request.params, each.rollout):
                yield choice.piece(piece)
            yield choice.closing(each)

    def choice(self, head: ResponseStream, index: int) -> ResponseChoice:
        """The answer as a stream."""
        del index
        return ResponseChoice(head, self.tools)

    def ending(
        self, head: ResponseStream, results: Sequence[GenerationResult], timing: Timing, *, with_usage: bool
    ) -> str:
        """The last event, with the whole response."""
        del timing, with_usage
        body = self._ended(head, results)
        return head.event(f"response.{body['status']}", response=body)

    def error(self, head: ResponseStream | None, error: APIError) -> str:
        """The event of an error in a stream that has begun."""
        stream = head or ResponseStream({})
        return stream.event("error", code=error.code, message=error.message, param=error.param)

    def _ended(self, stream: ResponseStream, results: Sequence[GenerationResult]) -> dict[str, Any]:
        [each] = results[0].chosen
        cut = each.rollout.finish_reason == "length"
        found = usage(results)
        counts = {
            "input_tokens": found["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": found["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": found["total_tokens"],
        }
        body = stream.body | {"status": "incomplete" if cut else "completed", "output": stream.output}
        body["incomplete_details"] = {"reason": "max_output_tokens"} if cut else None
        return body | {"usage": counts, "score": each.score}


class ResponseChoice:
    """The items of an answer, text and calls, one after the other."""

    def __init__(self, stream: ResponseStream, tools: ToolUse | None) -> None:
        self._stream = stream
        self._parser = None if tools is None else ToolCallParser(tools.format)
        self._open: dict[str, Any] | None = None
        self._written = ""

    def opening(self) -> str:
        """The events before the first item."""
        body = self._stream.body | {"status": "in_progress", "output": [], "usage": None}
        kinds = ("response.created", "response.in_progress")
        return "".join(self._stream.event(kind, response=body) for kind in kinds)

    def piece(self, piece: Piece) -> str:
        """The events of a piece of the text."""
        parts = [Part(piece.text)] if self._parser is None else self._parser.add(piece.text)
        return "".join(map(self._part, parts))

    def closing(self, candidate: Candidate) -> str:
        """The events after the last piece."""
        rest = "" if self._parser is None else "".join(map(self._part, self._parser.rest()))
        if self._open is None and not self._stream.output:
            rest += self._begin_message()
        return rest + self._end("incomplete" if candidate.rollout.finish_reason == "length" else "completed")

    def _part(self, part: Part) -> str:
        if part.call is None:
            begun = ""
            if self._open is None or self._open["type"] != "message":
                begun = self._end("completed") + self._begin_message()
            self._written += part.content
            place = self._place() | {"content_index": 0}
            return begun + self._event("response.output_text.delta", **place, delta=part.content, logprobs=[])
        begun = ""
        if part.name:
            call = {"type": "function_call", "call_id": f"call_{uuid.uuid4().hex[:24]}", "name": part.name}
            begun = self._end("completed") + self._begin("fc", call | {"arguments": ""})
        self._written += part.arguments
        if not part.arguments:
            return begun
        kind = "response.function_call_arguments.delta"
        return begun + self._event(kind, **self._place(), delta=part.arguments)

    def _begin_message(self) -> str:
        begun = self._begin("msg", {"type": "message", "role": "assistant", "content": []})
        place = self._place() | {"content_index": 0}
        return begun + self._event("response.content_part.added", **place, part=_text(""))

    def _begin(self, prefix: str, item: dict[str, Any]) -> str:
        self._open = {"id": f"{prefix}_{uuid.uuid4().hex}", "status": "in_progress", **item}
        self._written = ""
        return self._event(
            "response.output_item.added", output_index=len(self._stream.output), item=self._open
        )

    def _end(self, status: str) -> str:
        """The events that end the open item."""
        if self._open is None:
            return ""
        item, place = self._open | {"status": status}, self._place()
        if item["type"] == "message":
            item["content"], within = [_text(self._written)], place | {"content_index": 0}
            kind = "response.output_text.done"
            events = self._event(kind, **within, text=self._written, logprobs=[])
            events += self._event("response.content_part.done", **within, part=_text(self._written))
        else:
            item["arguments"], kind = self._written, "response.function_call_arguments.done"
            events = self._event(kind, **place, arguments=self._written, name=item["name"])
        events += self._event("response.output_item.done", output_index=place["output_index"], item=item)
        self._stream.output.append(item)
        self._open = None
        return events

    def _place(self) -> dict[str, Any]:
        assert self._open is not None
        return {"item_id": self._open["id"], "output_index": len(self._stream.output)}

    def _event(self, kind: str, **fields: Any) -> str:
        return self._stream.event(kind, **fields)


def _text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
