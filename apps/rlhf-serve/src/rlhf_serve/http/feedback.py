"""Ratings of answers by those who read them, kept as rows to train on."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, BinaryIO

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from rlhf_data import UserError, as_completion
from rlhf_infer.rewards.texts import text_of
from rlhf_serve.errors import already_rated, feedback_failed, invalid_request, unknown_answer
from rlhf_serve.http.telemetry import record_of
from rlhf_serve.openai.other_schemas import FeedbackRequest
from rlhf_serve.service.best_of_n import GenerationResult
from rlhf_serve.service.worker_threads import Workers

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

FEEDBACK = "/v1/feedback"
_REMEMBERED = 4096
"""Answers that can be rated, the newest."""
_CHUNK = 1 << 16
_LOG = logging.getLogger(__name__)


@dataclass
class _Answer:
    """An answer that can be rated: who got it, and its choices as rows."""

    key: str | None
    choices: list[dict[str, Any]]
    rated: set[int] = field(default_factory=set)


def check_feedback(path: str | Path) -> None:
    """Make the file ready to be appended to: create it, or repair its end.

    A last line that a killed server left torn is cut off, and the log says so; a whole one gets a line break.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():
            raise UserError(f"{path} is not a file; name another for --feedback", code="unwritable")
        with open(path, "ab+") as file:
            _lock(file)
            file.seek(0)
            first = file.readline()
            if not first:
                return
            if not {"prompt", "completion", "label"} <= _row(first).keys():
                raise UserError(
                    f"{path} exists and does not begin with a rating of an answer; name another file for "
                    "--feedback",
                    code="file_exists",
                )
            end = file.seek(0, os.SEEK_END)
            last = _last_line(file, end)
            if _row(last):
                file.write(b"\n")
            elif last:
                _LOG.warning("%s: cut off the last line, which was not whole (%d bytes)", path, len(last))
                file.truncate(end - len(last))
    except OSError as error:
        raise UserError(
            f"feedback file {path} cannot be written ({error.strerror or error}); name another",
            code="unwritable",
        ) from error


def _lock(file: IO[bytes]) -> None:
    """Keep other servers from a file of ratings until it is closed, where the system can."""
    if fcntl is not None:
        fcntl.flock(file, fcntl.LOCK_EX)


def _row(line: bytes) -> dict[str, Any]:
    """A line as a row; empty if it is not one."""
    try:
        row = json.loads(line)
    except ValueError:
        return {}
    return row if isinstance(row, dict) else {}


def _last_line(file: BinaryIO, end: int) -> bytes:
    """The bytes after the last line break of a file of `end` bytes."""
    tail, start = b"", end
    while start and b"\n" not in tail:
        step = min(_CHUNK, start)
        start -= step
        file.seek(start)
        tail = file.read(step) + tail
    return tail.rpartition(b"\n")[2]


class FeedbackLog:
    """Remembers the newest answers, and appends a row for `rlhf-train kto` when a choice is rated.

    Rows have the served model's name, and its folder: a link such as a pipeline's
    `current/policy` leads to another model later.
    """

    def __init__(self, path: str | Path, model: str, folder: str | None = None) -> None:
        self.path, self.model = Path(path), model
        self.folder = os.path.realpath(folder) if folder and os.path.isdir(folder) else None
        self._answers: OrderedDict[str, _Answer] = OrderedDict()
        self._lock = threading.Lock()
        check_feedback(self.path)

    def remember(self, answer: str, key: str | None, results: Sequence[GenerationResult]) -> None:
        """Let the choices of an answer be rated by its id, with the API key that asked for it."""
        choices = [
            {
                "prompt": result.request.prompt,
                "completion": as_completion(result.request.prompt, each.text),
                "score": each.score,
            }
            for result in results
            for each in result.chosen
        ]
        self._answers[answer] = _Answer(key, choices)
        while len(self._answers) > _REMEMBERED:
            self._answers.popitem(last=False)

    def rate(self, body: FeedbackRequest, key: str | None) -> None:
        """Append the row of a rated choice.

        Raises:
            APIError: 404, the answer is not known, or has no such choice; 409, the choice is rated already;
                400, it is empty; 500, the file cannot be written.
        """
        answer = self._answers.get(body.id)
        if answer is None or answer.key != key or body.index >= len(answer.choices):
            raise unknown_answer(body.id, body.index, _REMEMBERED)
        choice = answer.choices[body.index]
        if not text_of(choice["completion"]).strip():
            raise invalid_request(
                "the answer is empty, and nothing can be learnt from it", "id", "empty_answer"
            )
        row = choice | {"label": body.rating == "up", "comment": body.comment}
        row |= {"id": body.id, "index": body.index, "model": self.model, "folder": self.folder}
        with self._lock:
            if body.index in answer.rated:
                raise already_rated(body.id, body.index)
            self._append(json.dumps(row, ensure_ascii=False).encode() + b"\n")
            answer.rated.add(body.index)

    def _append(self, line: bytes) -> None:
        """Append all of a line or nothing; other servers may append to the same file."""
        try:
            # Unbuffered: a buffer that could not be written would be written again when the file is closed.
            with open(self.path, "ab", buffering=0) as file:
                _lock(file)
                end, left = file.seek(0, os.SEEK_END), memoryview(line)
                try:
                    while left:
                        left = left[file.write(left) :]
                    os.fsync(file.fileno())
                except OSError:
                    file.truncate(end)
                    raise
        except OSError as error:
            raise feedback_failed() from error


def add_feedback(app: FastAPI, log: FeedbackLog, workers: Workers) -> None:
    """Add the route for ratings."""

    @app.post(FEEDBACK)
    async def feedback(body: FeedbackRequest, request: Request) -> Response:
        """Rate a choice of an answer that this server gave."""
        await workers.run(lambda: log.rate(body, record_of(request).key))
        found = {"object": "feedback", "id": body.id, "index": body.index, "rating": body.rating}
        return JSONResponse(found)
