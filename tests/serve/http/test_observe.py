import logging
import math
import re

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.requests import Request

from rlhf_serve.backends.protocol import GAUGES
from rlhf_serve.http.limits import Admission
from rlhf_serve.http.telemetry import OTHER, AccessLog, Metrics, RequestRecord, record_of, status_of


def samples(metrics: Metrics) -> dict[str, float]:
    """All samples, as `name{label=value}`."""
    text, content_type = metrics.render()
    assert content_type.startswith("text/plain")
    found = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def best_of_eight() -> RequestRecord:
    return RequestRecord(
        key="alice",
        prompt_tokens=5,
        completion_tokens=7,
        candidate_tokens=50,
        candidates=8,
        saved_candidates=2,
        queue_s=0.3,
        generate_s=1.5,
        score_s=0.02,
        rewards=[-3.0, 0.25, math.nan, math.inf],
        selected_rewards=[0.25],
    )


def test_a_request_is_counted() -> None:
    metrics = Metrics(key_names=["alice", "bob"])
    for _ in range(2):
        metrics.observe("POST", "/v1/chat/completions", 200, 1.9, best_of_eight())
    found = samples(metrics)
    route = "route=/v1/chat/completions"
    assert found[f"rlhf_serve_requests_total{{method=POST,{route},status=200}}"] == 2
    assert found[f"rlhf_serve_request_seconds_count{{{route}}}"] == 2
    assert found[f"rlhf_serve_request_seconds_sum{{{route}}}"] == pytest.approx(3.8)
    assert found["rlhf_serve_queue_seconds_sum"] == pytest.approx(0.6)
    assert found["rlhf_serve_generate_seconds_bucket{le=1.0}"] == 0
    assert found["rlhf_serve_generate_seconds_bucket{le=2.5}"] == 2
    assert found["rlhf_serve_score_seconds_count"] == 2
    assert found["rlhf_serve_prompt_tokens_total"] == 10
    assert found["rlhf_serve_completion_tokens_total"] == 14
    assert found["rlhf_serve_candidate_tokens_total"] == 100
    assert found["rlhf_serve_candidates_total"] == 16
    assert found["rlhf_serve_saved_candidates_total"] == 4
    assert found["rlhf_serve_reward_count{of=candidates}"] == 4  # what is not finite has no place in a sum
    assert found["rlhf_serve_reward_bucket{le=-2.0,of=candidates}"] == 2
    assert found["rlhf_serve_reward_bucket{le=0.0,of=candidates}"] == 2
    assert found["rlhf_serve_reward_bucket{le=0.5,of=candidates}"] == 4
    assert found["rlhf_serve_reward_bucket{le=0.0,of=selected}"] == 0
    assert found["rlhf_serve_reward_count{of=selected}"] == 2
    assert found["rlhf_serve_key_requests_total{key=alice}"] == 2
    assert found["rlhf_serve_key_tokens_total{key=alice}"] == 110
    assert found["rlhf_serve_cancelled_requests_total"] == 0


def test_what_did_not_happen_is_not_observed() -> None:
    metrics = Metrics()
    metrics.observe("GET", "/health", 200, 0.001, RequestRecord(key="alice"))
    found = samples(metrics)
    for name in ("queue", "generate", "score"):
        assert found[f"rlhf_serve_{name}_seconds_count"] == 0
    assert not any("key" in name for name in found)


def test_errors_and_clients_that_left_are_counted() -> None:
    metrics = Metrics()
    metrics.observe("POST", "/v1/completions", 429, 0.1, RequestRecord(error="queue_full"))
    metrics.observe("POST", "/v1/completions", 499, 0.1, RequestRecord(cancelled=True))
    found = samples(metrics)
    assert found["rlhf_serve_errors_total{code=queue_full}"] == 1
    assert found["rlhf_serve_cancelled_requests_total"] == 1


def test_label_values_are_bounded() -> None:
    names = [f"key-{number}" for number in range(33)]
    metrics = Metrics(key_names=names)
    for number in range(50):
        metrics.observe(f"X{number}", OTHER, 404, 0.1, RequestRecord(key=names[number % 33]))
    found = samples(metrics)
    assert found["rlhf_serve_requests_total{method=other,route=other,status=404}"] == 50
    assert not any("key=" in name for name in found)


def test_the_queue_is_shown_as_it_is_now() -> None:
    metrics = Metrics()
    admission = Admission(2, 2)
    metrics.watch(admission)
    assert samples(metrics)["rlhf_serve_running_requests"] == 0
    admission.running = 2
    found = samples(metrics)
    assert (found["rlhf_serve_running_requests"], found["rlhf_serve_queue_depth"]) == (2, 0)


def test_memory_is_shown_as_it_is_now() -> None:
    metrics, now = Metrics(), {"kv_tokens": 0.0, "preemptions": 3.0}
    metrics.watch_memory(lambda: now, GAUGES)
    now["kv_tokens"] = 128.0
    found = samples(metrics)
    assert (found["rlhf_serve_kv_tokens"], found["rlhf_serve_preemptions"]) == (128, 3)
    Metrics().watch_memory(dict, GAUGES)  # a backend with metrics of its own


def test_several_servers_in_a_process_do_not_mix() -> None:
    first, second = Metrics(build={"version": "0.1.0", "backend": "transformers"}), Metrics()
    first.observe("GET", "/health", 200, 0.1, RequestRecord())
    assert "rlhf_serve_build_info{backend=transformers,version=0.1.0}" in samples(first)
    assert not any(name.startswith("rlhf_serve_requests") for name in samples(second))


def test_names_say_what_they_count() -> None:
    metrics = Metrics()
    metrics.watch(Admission(1, 1))
    metrics.observe("GET", "/health", 200, 0.1, RequestRecord(error="timeout"))
    for family in metrics.registry.collect():
        assert re.fullmatch(r"rlhf_serve_[a-z_]+", family.name)
        assert family.documentation
        if family.type == "histogram":
            assert family.name == "rlhf_serve_reward" or family.name.endswith("_seconds")


def test_the_openmetrics_format_is_given_to_who_prefers_it() -> None:
    text, content_type = Metrics().render("application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert text.endswith(b"# EOF\n")


def line_of(caplog: pytest.LogCaptureFixture, log: AccessLog, record: RequestRecord, method: str) -> str:
    caplog.set_level(logging.INFO, "rlhf_serve.access")
    log.write(method, "/v1/chat/completions", 200, 0.12345, record)
    (entry,) = caplog.records
    assert (entry.name, entry.levelno) == ("rlhf_serve.access", logging.INFO)
    return entry.getMessage()


def test_a_request_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    record = best_of_eight()
    record.id, record.prompt = "r-1", "a secret"
    line = line_of(caplog, AccessLog(), record, "POST")
    assert line == (
        "POST /v1/chat/completions 200 ms=123.5 key=alice prompt_tokens=5 completion_tokens=7 candidates=8 "
        "candidate_tokens=50 id=r-1"
    )


def test_prompts_are_logged_only_if_asked(caplog: pytest.LogCaptureFixture) -> None:
    record = RequestRecord(id="r-2", prompt="two\nlines \u2028", error="timeout", cancelled=True)
    line = line_of(caplog, AccessLog(log_prompts=True), record, "BREW")
    assert line == (
        "other /v1/chat/completions 200 ms=123.5 key=- error=timeout cancelled=yes id=r-2 "
        'prompt="two\\nlines \\u2028"'
    )


def test_the_record_of_a_request_is_one() -> None:
    scope = {"type": "http", "headers": []}
    record = record_of(scope)
    assert record_of(Request(scope)) is record and Request(scope).state.record is record
    assert record_of({"type": "http", "headers": []}).id != record.id


def test_the_status_that_is_told() -> None:
    assert status_of(200, RequestRecord()) == 200
    assert status_of(200, RequestRecord(cancelled=True)) == 499
    assert status_of(None, RequestRecord()) == 500
