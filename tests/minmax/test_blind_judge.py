"""What the game tells a judge behind an API: question, answer and critique, and nothing of who wrote them."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlhf_infer.judges.settings import FENCED_TEMPLATE, fill
from rlhf_minmax.demo.teachers import answer_text
from rlhf_minmax.evaluation.break_even import measure_break_even

SIDES = ("policy", "monitor", "player", "adapter", "tampered", "made", "sampled", "gold", "label")
"""Words that would tell who wrote a text, or whether it is true; none is in the stories."""


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The API that tests of the judge itself ask."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "infer"))
    return importlib.import_module("judge_server")


@pytest.fixture
def played(fake: Any, make_game: Any) -> Iterator[Any]:
    """(server, pipeline, stories) of a game whose judge is behind an API."""
    with fake.serve(fake.certain) as server:
        settings = ("kind=api", "model_name=m", f"base_url={server.url}", "api_key_env=null", "cache=false")
        pipeline, stories = make_game(
            *(f"judge_model.{each}" for each in settings), "judge_model.concurrency=1"
        )
        yield server, pipeline, stories


def test_no_request_tells_who_wrote_what(played: Any) -> None:
    server, pipeline, stories = played
    batch = stories.train[:4]
    output = pipeline.forward_pass(batch, seed=1)
    judged = [(output.judged[critique.answer], critique) for critique in output.critiques]
    expected = {
        fill(
            FENCED_TEMPLATE,
            batch[answer.story].question,
            answer.text,
            critique.text if critique.parsed else None,
            no_critique="none",
        )
        for answer, critique in judged
    }
    assert {answer.rollout is None for answer, _ in judged} == {True, False}  # made-up ones and the policy's
    assert sorted(server.texts) == sorted(expected)
    for request in server.requests:
        said = json.dumps([request["body"], request["path"], request["headers"]]).lower()
        assert not [word for word in SIDES if word in said]


def test_the_right_answer_changes_neither_what_is_asked_nor_its_order(played: Any) -> None:
    server, pipeline, stories = played
    batch = stories.train[:4]
    turned = [replace(record, answer=(record.answer + 1) % len(record.choices)) for record in batch]
    output = pipeline.forward_pass(batch, seed=1)
    asked = []
    for records in (batch, turned):
        server.requests.clear()
        pipeline.judge._order.seed(0)
        pipeline.judge_scores(records, output.judged, output.critiques)
        asked.append(server.texts)
    assert asked[0] == asked[1] and len(asked[0]) > 4


def test_the_break_even_check_asks_about_right_and_wrong_answers_in_one_call(
    played: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, pipeline, stories = played
    batch, calls = stories.train[:8], []
    score = type(pipeline.judge).score

    def noted(judge: Any, questions: Any, answers: Any, critiques: Any) -> Any:
        calls.append((list(questions), list(answers), list(critiques)))
        return score(judge, questions, answers, critiques)

    monkeypatch.setattr(type(pipeline.judge), "score", noted)
    measure_break_even(pipeline, batch, seed=1)
    right = {answer_text(record.answer_text) for record in batch}
    assert len(calls) == 2  # with the monitor's critiques, and with truthful ones
    for questions, answers, _ in calls:
        half = len(answers) // 2
        assert questions[:half] == questions[half:] and {*answers[:half]} <= right
        assert all(a != b for a, b in zip(answers[:half], answers[half:], strict=True))
    _, answers, truthful = calls[1]
    verdicts = [critique.split()[-1] for critique in truthful]
    assert verdicts == ["right"] * (len(answers) // 2) + ["wrong"] * (len(answers) // 2)
