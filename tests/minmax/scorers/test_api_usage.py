"""What judges behind an API were asked for, as a run tells it."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rlhf_minmax.scorers.api_usage
from rlhf_data import RunFolder
from rlhf_infer import APIUsage, RuleJudge
from rlhf_minmax import Events, MinMaxJob
from rlhf_minmax.scorers.api_usage import api_usage, total_usage
from rlhf_minmax.scorers.distributed import ScoredByFirst, ScoredInParts

PRICES = ("prompt_price=2", "completion_price=500")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The API that tests of the judge itself ask."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "infer"))
    return importlib.import_module("judge_server")


@pytest.fixture
def server(fake: Any) -> Iterator[Any]:
    """A server that replies with 100 prompt tokens and one completion token."""
    with fake.serve(fake.certain) as running:
        yield running


def test_processes_are_added_up() -> None:
    first = APIUsage(requests=10, retries=2, cached=3, prompt_tokens=1000, completion_tokens=10, cost=0.5)
    second = APIUsage(requests=1, retries=0, cached=4, prompt_tokens=100, completion_tokens=1, cost=0.25)
    # 10 + 1, 2 + 0, 3 + 4, 1000 + 100, 10 + 1, 0.5 + 0.25
    assert total_usage([first, second]) == APIUsage(11, 2, 7, 1100, 11, 0.75)
    assert total_usage([APIUsage(1, 0, 0, 5, 1, None)] * 2) == APIUsage(2, 0, 0, 10, 2, None)


@pytest.mark.parametrize("share", [lambda judge: judge, ScoredByFirst, ScoredInParts])
def test_a_judge_that_processes_share_is_found(
    fake: Any, server: Any, share: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = fake.judge(server, prompt_price=2.0, completion_price=500.0, api_key_env=None)
    judge.score(["q", "q", "q"], ["a", "a", "b"], [None, None, None])
    other = APIUsage(requests=5, retries=1, cached=2, prompt_tokens=500, completion_tokens=5, cost=0.0035)
    monkeypatch.setattr(rlhf_minmax.scorers.api_usage, "all_gather", lambda own: [*own, other])
    # Two texts: 200 prompt tokens at 2 and 2 completion tokens at 500 a million are 0.0014; the other process
    # adds 5 requests for 0.0035.
    assert api_usage(RuleJudge(), share(judge)) == {
        "held_out_judge": {
            "requests": 7,
            "retries": 1,
            "cached": 2,
            "prompt_tokens": 700,
            "completion_tokens": 7,
            "cost": pytest.approx(0.0049),
            "unread": 0,
        }
    }
    assert api_usage(RuleJudge()) == {}


@pytest.mark.slow
def test_a_run_tells_what_it_asked(server: Any, make_config: Any, demo_cache: Path, tmp_path: Path) -> None:
    settings = ("kind=api", f"base_url={server.url}", "api_key_env=null", "cache=false")
    config = make_config(
        "baseline=false",
        "training.max_steps=1",
        *(f"judge_model.{each}" for each in (*settings, *PRICES, "model_name=m")),
        *(f"held_out.judge.{each}" for each in (*settings, "model_name=other")),
    )
    run = RunFolder.create(tmp_path / "run")
    results = MinMaxJob(config, run, Events(), cache_folder=demo_cache).play()
    asked = [request["body"]["model"] for request in server.requests]
    for name, model in (("judge", "m"), ("held_out_judge", "other")):
        count = asked.count(model)
        assert count > 0
        assert results["api_usage"][name] == {
            "requests": count,
            "retries": 0,
            "cached": 0,
            "prompt_tokens": 100 * count,
            "completion_tokens": count,
            # 100 · 2 + 1 · 500 = 700 a million requests
            "cost": pytest.approx(count * 7e-4) if model == "m" else None,
            "unread": 0,
        }
    written = run.read_results()
    assert written is not None and written["api_usage"] == json.loads(json.dumps(results["api_usage"]))
    page = (run.path / "report.html").read_text(encoding="utf-8")
    assert "Judges behind an API" in page and f"{asked.count('m'):,}</td>" in page

    before = len(server.requests)
    evaluated = MinMaxJob(config, run, Events(), cache_folder=demo_cache).evaluate_only()
    counts = evaluated["api_usage"]
    assert sum(usage["requests"] for usage in counts.values()) == len(server.requests) - before
