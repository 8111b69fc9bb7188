"""Ratings of answers: rows to train on, one for each choice, for whoever got the answer."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from files import read_lines
from raises import raises_error
from rlhf_data import load_records
from rlhf_serve.errors import APIError
from rlhf_serve.http import feedback as module
from rlhf_serve.http.feedback import FeedbackLog, check_feedback
from rlhf_serve.openai.other_schemas import FeedbackRequest

BODY: dict[str, Any] = {"model": "policy", "max_tokens": 6, "seed": 1}
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def rate(server: Any, answer: str, **fields: Any) -> tuple[int, Any]:
    status, found, _ = server.fetch("/v1/feedback", {"id": answer, "rating": "up"} | fields)
    return status, found


def streamed_id(text: str) -> str:
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    return next(event["id"] for event in events if "id" in event)


def test_ratings_become_rows_that_kto_reads(start: Callable[..., Any], folders: Path, tmp_path: Path) -> None:
    path = tmp_path / "new" / "feedback.jsonl"
    server = start("--reward-model", str(folders / "reward"), "--feedback", str(path))
    _, chat, _ = server.fetch("/v1/chat/completions", BODY | CHAT | {"n": 2, "best_of": 3})
    _, plain, _ = server.fetch("/v1/completions", BODY | {"prompt": ["so", "and"]})
    _, stream, _ = server.fetch("/v1/completions", BODY | {"prompt": "so", "best_of": 1, "stream": True})
    asked = {"model": "policy", "input": "hi", "max_output_tokens": 8}
    answers = (server.fetch("/v1/responses", asked)[1] for _ in range(50))
    whole = next(each for each in answers if each["output"][0]["content"][0]["text"].strip())
    assert rate(server, chat["id"], index=1, rating="down", comment="too short")[0] == 200
    assert rate(server, plain["id"], index=1)[1] == {
        "object": "feedback",
        "id": plain["id"],
        "index": 1,
        "rating": "up",
    }
    assert rate(server, streamed_id(stream))[0] == rate(server, whole["id"])[0] == 200
    rows = read_lines(path)
    assert [row["label"] for row in rows] == [False, True, True, True]
    assert rows[0]["completion"] in (
        chat["choices"][1]["message"]["content"],
        [{"role": "assistant", "content": chat["choices"][1]["message"]["content"]}],
    )
    assert rows[0]["score"] == chat["choices"][1]["score"] and rows[0]["comment"] == "too short"
    assert rows[1]["prompt"] == "and" and rows[1]["completion"] == plain["choices"][1]["text"]
    assert {row["model"] for row in rows} == {"policy"}
    assert {row["folder"] for row in rows} == {str((folders / "policy").resolve())}
    records = load_records(path, "kto").records
    assert [record.label for record in records] == [False, True, True, True]


def test_what_cannot_be_rated(start: Callable[..., Any], tmp_path: Path) -> None:
    server = start("--feedback", str(tmp_path / "feedback.jsonl"))
    _, found, _ = server.fetch("/v1/completions", BODY | {"prompt": "so"})
    assert rate(server, "cmpl-unknown")[0] == 404
    status, body = rate(server, found["id"], index=1)
    assert (status, body["error"]["code"]) == (404, "answer_not_found")
    assert rate(server, found["id"], rating="great")[0] == 400
    assert rate(server, found["id"])[0] == 200
    status, body = rate(server, found["id"], rating="down")
    assert (status, body["error"]["code"]) == (409, "already_rated")
    assert len(read_lines(tmp_path / "feedback.jsonl")) == 1
    assert start().fetch("/v1/feedback", {"id": "x", "rating": "up"})[0] == 404  # without --feedback


def test_only_who_asked_may_rate(start: Callable[..., Any], tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("ann ann-0123456789abcdef\nbob bob-0123456789abcdef\n")
    server = start("--feedback", str(tmp_path / "feedback.jsonl"), "--api-keys-file", str(keys))
    ann, bob = ({"authorization": f"Bearer {name}-0123456789abcdef"} for name in ("ann", "bob"))
    _, found, _ = server.fetch("/v1/completions", BODY | {"prompt": "so"}, ann)
    rating = {"id": found["id"], "rating": "up"}
    assert [server.fetch("/v1/feedback", rating, who)[0] for who in ({}, bob, ann)] == [401, 404, 200]


def test_a_torn_line_goes_and_other_files_stay(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "feedback.jsonl"
    whole = b'{"prompt": "a", "completion": "b", "label": true}\n'
    for left, end, cut in (
        (b'{"prompt": "a", "comp', b"", True),
        (b'{"prompt": "' + b"x" * (3 << 16), b"", True),
        (b"", b"", False),
        (whole[:-1], whole, False),  # as an editor without a last line break leaves it
    ):
        caplog.clear()
        path.write_bytes(whole + left)
        check_feedback(path)
        assert path.read_bytes() == whole + end
        assert bool(caplog.records) == cut
    path.write_bytes(whole[:-1])
    check_feedback(path)
    assert path.read_bytes() == whole
    others = (b"weights", b'{"prompt": "a"}\n', b'{"prompt": "a"}', b"name,label\n", b'{"prompt": "a", "comp')
    for other in (*others, b'["label"]\n'):
        path.write_bytes(other)
        with raises_error("file_exists"):
            check_feedback(path)
        assert path.read_bytes() == other
    for place in (tmp_path, Path("/dev/full"), path / "below"):
        with raises_error("unwritable"):
            check_feedback(place)


def test_a_full_disk_leaves_no_part_of_a_row(tmp_path: Path) -> None:
    log = FeedbackLog(tmp_path / "feedback.jsonl", "policy")
    choice = {"prompt": "so", "completion": "wrong", "score": None}
    for answer in "abc":
        log._answers[answer] = module._Answer(None, [choice])
    log.rate(FeedbackRequest(id="a", rating="up"), None)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (log.path.stat().st_size + 20, before[1]))
    try:
        with pytest.raises(APIError) as refused:
            log.rate(FeedbackRequest(id="b", rating="up"), None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert refused.value.code == "feedback_failed"
    for answer in "cb":  # what was refused may be rated again
        log.rate(FeedbackRequest(id=answer, rating="down"), None)
    assert [row["id"] for row in read_lines(log.path)] == ["a", "c", "b"]


def test_an_empty_answer_cannot_be_rated(tmp_path: Path) -> None:
    log = FeedbackLog(tmp_path / "feedback.jsonl", "policy")
    log._answers["a"] = module._Answer(None, [{"prompt": "so", "completion": " ", "score": None}])
    with pytest.raises(APIError) as refused:
        log.rate(FeedbackRequest(id="a", rating="up"), None)
    assert refused.value.code == "empty_answer" and not log.path.read_text()


def test_only_the_newest_answers_are_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_REMEMBERED", 2)
    log = FeedbackLog(tmp_path / "feedback.jsonl", "policy")
    for name in ("a", "b", "c"):
        log.remember(name, None, [])
    assert list(log._answers) == ["b", "c"]
