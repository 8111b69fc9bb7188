"""The routes of a running server, on both backends, through the official client and by hand."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from rlhf_infer.rewards.remote import RemoteReward
from rlhf_serve.backends.protocol import GAUGES

MODEL = "policy"
MESSAGES: list[Any] = [{"role": "user", "content": "where is mary ?"}]
ASK: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 12, "seed": 7}


def ask(server: Any, **fields: Any) -> dict[str, Any]:
    status, body, _ = server.fetch("/v1/chat/completions", ASK | fields)
    assert status == 200, body
    return body


def events(server: Any, **fields: Any) -> list[dict[str, Any]]:
    status, text, headers = server.fetch("/v1/chat/completions", ASK | {"stream": True} | fields)
    assert status == 200 and headers["content-type"].startswith("text/event-stream"), text
    lines = [line for line in text.split("\n\n") if line and not line.startswith(":")]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_the_best_of_eight_comes_back(client: Any, server: Any) -> None:
    answer = client.chat.completions.create(**ASK, extra_body={"return_candidates": True})
    candidates = answer.candidates
    assert [each["index"] for each in candidates] == list(range(8))
    assert len({each["text"] for each in candidates}) > 1
    best = max(candidates, key=lambda each: each["score"])
    [choice] = answer.choices
    assert (choice.message.content, choice.score) == (best["text"], best["score"])
    assert [each["selected"] for each in candidates] == [each is best for each in candidates]
    assert best["rank"] == 0 and sorted(each["rank"] for each in candidates) == list(range(8))
    tokens = sum(each["tokens"] for each in candidates)
    assert answer.usage.completion_tokens == tokens > best["tokens"]
    assert answer.usage.candidates == 8
    assert answer.usage.total_tokens == tokens + answer.usage.prompt_tokens


def test_scores_are_those_of_the_reward_model(server: Any, folders: Path) -> None:
    from rlhf_models import RewardModel

    body = ask(server, return_candidates=True)
    texts = [each["text"] for each in body["candidates"]]
    # The reward model has no chat template: it reads what the policy reads.
    prompt = "user: where is mary ?\nassistant:"
    expected = RewardModel.from_pretrained(folders / "reward").score([prompt] * 8, texts).tolist()
    assert [each["score"] for each in body["candidates"]] == pytest.approx(expected, abs=1e-4)
    status, scored, _ = server.fetch("/v1/score", {"text_1": prompt, "text_2": texts})
    assert status == 200
    assert [each["score"] for each in scored["data"]] == pytest.approx(expected, abs=1e-4)
    remote = RemoteReward(server.url + "/get_reward")
    assert asyncio.run(remote([prompt] * 8, texts)) == pytest.approx(expected, abs=1e-4)
    # Messages go as messages, as the server says that it is our own.
    messages = [[{"role": "assistant", "content": text}] for text in texts]
    assert asyncio.run(remote([MESSAGES] * 8, messages)) == pytest.approx(expected, abs=1e-4)
    assert remote.protocol == "columns"


def test_more_candidates_begin_with_the_fewer(server: Any) -> None:
    few, many = (
        [each["text"] for each in ask(server, best_of=n, return_candidates=True)["candidates"]]
        for n in (3, 6)
    )
    assert many[:3] == few
    other = ask(server, best_of=3, return_candidates=True, seed=8)["candidates"]
    assert [each["text"] for each in other] != few
    unseeded = [ask(server, seed=None)["choices"][0]["message"]["content"] for _ in range(3)]
    assert len(set(unseeded)) > 1


def test_several_choices_come_best_first(client: Any) -> None:
    answer = client.chat.completions.create(**ASK, n=3, extra_body={"best_of": 6})
    scores = [choice.score for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert scores == sorted(scores, reverse=True) and answer.usage.candidates == 6


def test_without_selection_candidates_come_as_they_are(server: Any) -> None:
    drawn = ask(server, best_of=3, return_candidates=True)["candidates"]
    plain = ask(server, n=3, selection="none")["choices"]
    assert [c["message"]["content"] for c in plain] == [each["text"] for each in drawn]
    assert [c["score"] for c in plain] == [None] * 3
    single = ask(server, best_of=1)
    assert single["usage"]["candidates"] == 1
    assert single["choices"][0]["message"]["content"] == drawn[0]["text"]


def test_a_majority_counts_answers(server: Any) -> None:
    # Nearly greedy: most candidates are alike, whatever their score.
    fields = {"temperature": 0.3, "best_of": 16, "max_tokens": 3, "return_candidates": True}
    body = ask(server, selection="majority", **fields)
    answers = [each["answer"] for each in body["candidates"]]
    winner = max(answers, key=answers.count)
    assert answers.count(winner) > 1
    chosen = next(each for each in body["candidates"] if each["selected"])
    assert chosen["answer"] == winner
    alike = [each["score"] for each in body["candidates"] if each["answer"] == winner]
    assert chosen["score"] == max(alike)


def test_drawing_stops_early_where_it_pays(server: Any) -> None:
    sure = {"best_of": 64, "temperature": 0.05, "max_tokens": 4}
    early = ask(server, **sure, stop_early=True)["usage"]
    assert 4 <= early["candidates"] < 64
    assert ask(server, budget=64, temperature=0.05, max_tokens=4)["usage"] == early  # the former name
    unsure: dict[str, Any] = {"best_of": 16, "temperature": 2, "max_tokens": 12}
    drawn = {
        name: ask(server, **unsure, stop_early=rule)["usage"]
        for name, rule in {
            "never": {"probability": 0},
            "all are best": {"highest": -1000},
            "no gain is worth it": {"tolerance": 1000, "min_samples": 6},
            "little is expected": {
                "population": {"mean": -1000, "within": 0.01, "between": 0, "prior_samples": 100}
            },
        }.items()
    }
    counts = {name: usage["candidates"] for name, usage in drawn.items()}
    assert counts == {"never": 16, "all are best": 4, "no gain is worth it": 6, "little is expected": 4}
    # The prompt is computed anew in each round: of 4, 4, 4 and 4, and of all at once.
    whole = ask(server, **unsure)["usage"]["prompt_tokens"]
    assert drawn["never"]["prompt_tokens"] == 4 * whole
    assert drawn["all are best"]["prompt_tokens"] == whole


@pytest.mark.parametrize("fields", [{}, {"best_of": 1}, {"n": 2, "best_of": 4}])
def test_streams_say_what_the_whole_response_says(server: Any, fields: dict[str, Any]) -> None:
    whole = ask(server, **fields)
    chunks = events(server, **fields, stream_options={"include_usage": True})
    assert chunks[-1]["usage"] == whole["usage"] and chunks[-1]["choices"] == []
    assert len({chunk["id"] for chunk in chunks}) == 1
    for choice in whole["choices"]:
        own = [each for chunk in chunks for each in chunk["choices"] if each["index"] == choice["index"]]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        text = "".join(each["delta"].get("content", "") for each in own)
        assert text == choice["message"]["content"] and len(own) > 4
        assert own[-1]["finish_reason"] == choice["finish_reason"]
        assert own[-1]["score"] == pytest.approx(choice["score"])
        assert all(each["finish_reason"] is None for each in own[:-1])


def test_the_official_client_reads_streams(client: Any) -> None:
    with client.chat.completions.stream(**ASK) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
    assert text == client.chat.completions.create(**ASK).choices[0].message.content


def test_stop_texts_end_completions_and_are_no_part_of_them(server: Any) -> None:
    text = ask(server, best_of=1, max_tokens=24)["choices"][0]["message"]["content"]
    stop = text[3:5]
    expected = text[: text.index(stop)]
    for stream in (False, True):
        if stream:
            chunks = events(server, best_of=1, max_tokens=24, stop=[stop])
            own = [each for chunk in chunks for each in chunk["choices"]]
            found, reason = "".join(e["delta"].get("content", "") for e in own), own[-1]["finish_reason"]
        else:
            [choice] = ask(server, best_of=1, max_tokens=24, stop=stop)["choices"]
            found, reason = choice["message"]["content"], choice["finish_reason"]
        assert (found, reason) == (expected, "stop")


def test_log_probs_of_tokens_and_of_others(server: Any) -> None:
    body = ask(server, best_of=1, logprobs=True, top_logprobs=3, temperature=0, seed=None)
    content = body["choices"][0]["logprobs"]["content"]
    # The end is no part of the content.
    ended = body["choices"][0]["finish_reason"] == "stop"
    assert len(content) == body["usage"]["completion_tokens"] - ended
    for entry in content:
        tops = [each["logprob"] for each in entry["top_logprobs"]]
        # Greedy: the token is the likeliest one.
        assert len(tops) == 3 and tops == sorted(tops, reverse=True)
        assert entry["logprob"] == pytest.approx(tops[0], abs=1e-5) and entry["logprob"] < 0
        assert "\N{REPLACEMENT CHARACTER}" not in entry["token"]
    text = body["choices"][0]["message"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode(errors="replace") == text
    status, body, _ = server.fetch(
        "/v1/completions",
        {"model": MODEL, "prompt": "where", "max_tokens": 4, "best_of": 1, "logprobs": 1, "seed": 1},
    )
    found = body["choices"][0]["logprobs"]
    assert status == 200 and len(found["tokens"]) == len(found["token_logprobs"]) == len(
        found["top_logprobs"]
    )
    assert found["text_offset"][0] == 0 and found["text_offset"] == sorted(found["text_offset"])


def test_log_probs_are_those_of_the_model_whatever_the_temperature(server: Any, folders: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    fields = {"model": MODEL, "prompt": "where", "max_tokens": 1, "best_of": 1, "logprobs": 3, "seed": 1}
    tokenizer = AutoTokenizer.from_pretrained(folders / "policy")
    model = AutoModelForCausalLM.from_pretrained(folders / "policy")
    with torch.no_grad():
        logits = model(torch.tensor([tokenizer("where")["input_ids"]])).logits[0, -1]
    expected = logits.log_softmax(-1).topk(3).values.tolist()
    for changes in ({"temperature": 1.0}, {"temperature": 0.5}, {"temperature": 2, "repetition_penalty": 3}):
        _, body, _ = server.fetch("/v1/completions", fields | changes)
        [tops] = body["choices"][0]["logprobs"]["top_logprobs"]
        assert sorted(tops.values(), reverse=True) == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("fields", [{"best_of": 1}, {}, {"best_of": 1, "stop": ["e"], "max_tokens": 24}])
def test_log_probs_come_with_the_chunk_of_their_tokens(server: Any, fields: dict[str, Any]) -> None:
    fields = fields | {"logprobs": True, "top_logprobs": 2, "temperature": 1.5}
    whole = ask(server, **fields)["choices"][0]
    chunks = [each for chunk in events(server, **fields) for each in chunk["choices"]]
    told = [entry for each in chunks for entry in (each.get("logprobs") or {"content": []})["content"]]
    assert [entry["token"] for entry in told] == [e["token"] for e in whole["logprobs"]["content"]]
    for mine, other in zip(told, whole["logprobs"]["content"], strict=True):
        assert mine["logprob"] == pytest.approx(other["logprob"], abs=1e-4)
        assert [top["token"] for top in mine["top_logprobs"]] == [t["token"] for t in other["top_logprobs"]]
    assert chunks[-1]["logprobs"] is None and sum(bool(each.get("logprobs")) for each in chunks) > 1
    # Every chunk's tokens spell its text, but for what goes on behind it.
    for each in chunks[1:-1]:
        said = [entry for entry in each["logprobs"]["content"] if entry["token"] != "<pad>"]  # not text
        spelled = b"".join(bytes(entry["bytes"]) for entry in said)
        assert spelled.decode(errors="replace").startswith(each["delta"]["content"])


def test_the_official_client_reads_log_probs_of_a_stream(client: Any) -> None:
    stream = client.chat.completions.create(
        **ASK, stream=True, logprobs=True, top_logprobs=1, extra_body={"best_of": 1}
    )
    with stream:
        choices = [choice for chunk in stream for choice in chunk.choices]
    text = "".join(choice.delta.content or "" for choice in choices)
    told = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content or ()]
    assert b"".join(bytes(entry.bytes) for entry in told).decode(errors="replace") == text


def test_completions_of_texts_and_of_tokens(client: Any, byte_tokenizer: Any) -> None:
    options: dict[str, Any] = {"model": MODEL, "max_tokens": 6, "seed": 3}
    texts = ["mary went to", "ball moved to the shed ."]
    together = client.completions.create(prompt=texts, **options)
    assert [choice.index for choice in together.choices] == [0, 1] and together.usage.candidates == 16
    timing: Any = together.model_extra["timing"]  # pyright: ignore[reportOptionalSubscript]
    assert len(timing["prompts"]) == 2
    for part in ("generate_s", "score_s"):
        assert sum(each[part] for each in timing["prompts"]) == pytest.approx(timing[part], abs=1e-3)
    assert together.system_fingerprint and together.system_fingerprint.startswith("fp_")
    for text, choice in zip(texts, together.choices, strict=True):
        alone = client.completions.create(prompt=text, **options)
        assert alone.choices[0].text == choice.text
        ids = byte_tokenizer(text)["input_ids"]
        assert client.completions.create(prompt=ids, **options).choices[0].text == choice.text


def test_what_the_server_tells_about_itself(client: Any, server: Any, request: pytest.FixtureRequest) -> None:
    [model] = client.models.list().data
    assert model.id == MODEL and client.models.retrieve(MODEL).id == MODEL
    assert server.fetch("/health")[0] == server.fetch("/ready")[0] == 200
    assert re.fullmatch(r"\d+\.\d+\.\d+", server.fetch("/version")[1]["version"])
    info = server.fetch("/page/info")[1]
    assert info["model"] == MODEL and info["reward_model"] == "reward" and info["default_n"] == 8
    ask(server)
    text = server.fetch("/metrics")[1]
    values = dict(re.findall(r"^(rlhf_serve_[a-z_]+(?:\{[^}]*\})?) ([0-9.e+-]+)$", text, re.MULTILINE))
    assert float(values["rlhf_serve_candidates_total"]) >= 8
    assert float(values["rlhf_serve_running_requests"]) == float(values["rlhf_serve_queue_depth"]) == 0
    memory = {name: float(values[key]) for name in GAUGES if (key := f"rlhf_serve_{name}") in values}
    if "vllm" in request.node.name:
        assert memory == {}, "vLLM manages its own"
        return
    assert memory.pop("kv_tokens_limit") > 0
    assert memory == {"kv_tokens": 0, "paused_cohorts": 0, "preemptions": 0}


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"model": "other"}, "model", "'other' is not served here"),
        ({"best_off": 3}, "best_off", "did you mean best_of?"),
        ({"tools": [{"type": "function"}]}, "tools[0]", "must be"),
        ({"n": 3, "best_of": 2}, "best_of", "n is 3 and best_of is 2"),
        ({"best_of": 65}, "best_of", "allows up to 64"),
        ({"best_of": 2, "budget": 2}, "budget", "budget alone"),
        ({"stop_early": True, "selection": "majority"}, "stop_early", "selection best"),
        ({"stop_early": {"tolerence": 1}}, "stop_early.tolerence", "did you mean tolerance?"),
        ({"stop_early": {"probability": 2}}, "stop_early.probability", "less than or equal to 1"),
        ({"temperature": 0, "best_of": 2}, "temperature", "all candidates are the same"),
        ({"max_tokens": 250}, "max_tokens", "context of 256"),
        ({"max_tokens": 10**18}, "max_tokens", "context of 256"),
        ({"min_tokens": 13}, "min_tokens", "at most max_tokens, 12"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "must be a text"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role", "must be one of"),
        ({"messages": [{"role": "user", "content": "x" * 900}]}, "prompt", "shorten it"),
        ({"stop": ["a"] * 17}, "stop", "up to 16 texts"),
        ({"seed": 0.5}, "seed", "seed"),
        ({"top_logprobs": 3}, "top_logprobs", "needs logprobs"),
        ({"stream_options": {"usage": 1}}, "stream_options.usage", "not a field"),
        ({"stop": ["a", 3]}, "stop.1", "valid string"),
    ],
)
def test_bad_requests_are_told_why(server: Any, fields: dict[str, Any], param: str | None, says: str) -> None:
    status, body, _ = server.fetch("/v1/chat/completions", ASK | fields)
    assert status == (404 if "model" in fields else 400)
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert says in body["error"]["message"] and body["error"]["param"] == param


def test_a_wrong_token_id_is_told_as_one(server: Any) -> None:
    status, body, _ = server.fetch("/v1/completions", {"model": MODEL, "prompt": [-1]})
    assert status == 400 and body["error"]["param"] == "prompt"
    assert body["error"]["code"] == "unknown_token" and "token id" in body["error"]["message"]
