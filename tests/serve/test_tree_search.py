"""The field `search` of requests: the trees of `rlhf-serve generate --search`, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from files import read_lines
from proofs import by_default
from rlhf_serve.cli.main import main
from rlhf_serve.errors import APIError
from rlhf_serve.openai.schema import Generation
from rlhf_serve.openai.search import search_of

PROMPTS = ["where is mary ?", "so"]
BODY: dict[str, Any] = {"model": "policy", "max_tokens": 8, "seed": 5}
SEARCH: dict[str, Any] = {"width": 4, "budget_tokens": 24, "separator": " "}


@pytest.fixture(scope="module")
def server(start: Callable[..., Any], folders: Path) -> Iterator[Any]:
    yield start("--reward-model", str(folders / "reward"))


def ask(server: Any, search: Any, prompt: Any = PROMPTS[0], **fields: Any) -> tuple[int, Any]:
    body = BODY | {"prompt": prompt, "search": search, **fields}
    status, answer, _ = server.fetch("/v1/completions", body)
    return status, answer


@pytest.mark.parametrize(
    "strategy", by_default(["mcts", "beam", "dvts", "best-first", "best-of-n", "ab-mcts"], "mcts", "beam")
)
def test_a_request_searches_the_tree_of_the_command(
    server: Any, folders: Path, tmp_path: Path, strategy: str
) -> None:
    rows, output = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    rows.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    command = ["generate", "--input", str(rows), "--output", str(output), "--model", str(folders / "policy")]
    command += ["--reward-model", str(folders / "reward"), "--max-tokens", "8", "--sampling-seed", "5"]
    command += ["--search", strategy, "--search-width", "4", "--search-budget-tokens", "24"]
    command += ["--top-k-candidates", "9", "--set", 'search.separator=" "']
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 0, done.output
    status, answer = ask(server, SEARCH | {"strategy": strategy}, PROMPTS, return_candidates=True)
    assert status == 200, answer
    expected = read_lines(output)
    assert [each["text"] for each in answer["choices"]] == [row["completion"] for row in expected]
    spent = sum(row["completion_tokens"] for row in expected)
    assert answer["usage"]["completion_tokens"] == spent <= 48
    for i, row in enumerate(expected):
        own = [each for each in answer["candidates"] if each["prompt"] == i]
        found = [each["text"] for each in sorted(own, key=lambda each: each["rank"])]
        assert found[:9] == [each["text"] for each in row["candidates"]]
        scores = [each["score"] for each in sorted(own, key=lambda each: each["rank"])]
        assert scores[:9] == pytest.approx([each["score"] for each in row["candidates"]], abs=1e-5)


def test_requests_beside_it_change_no_search(server: Any) -> None:
    _, alone = ask(server, SEARCH | {"strategy": "mcts"})
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: ask(server, SEARCH | {"strategy": "mcts"})[1], range(4)))
    assert [each["choices"][0]["text"] for each in found] == [alone["choices"][0]["text"]] * 4


def test_a_chat_and_a_stream_get_the_winner(server: Any) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}], "search": SEARCH | {"budget_tokens": 64}, "n": 2}
    status, whole, _ = server.fetch("/v1/chat/completions", BODY | chat)
    assert status == 200 and len(whole["choices"]) == 2
    assert whole["choices"][0]["score"] >= whole["choices"][1]["score"]
    status, text, _ = server.fetch("/v1/chat/completions", BODY | chat | {"n": 1, "stream": True})
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    said = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
    assert status == 200 and said == whole["choices"][0]["message"]["content"]


def test_a_default_budget_above_the_bound_is_lowered_and_said(server: Any) -> None:
    # Two tokens of 64 candidates; the default is 2048. A budget that is named has its own test below.
    status, answer = ask(server, "best-of-n", PROMPTS, max_tokens=2)
    assert status == 200, answer
    assert answer["usage"]["search_budget_tokens"] == answer["usage"]["completion_tokens"] == 2 * 128
    chat = BODY | {"messages": [{"role": "user", "content": "hi"}], "search": SEARCH, "stream": True}
    _, text, _ = server.fetch("/v1/chat/completions", chat | {"stream_options": {"include_usage": True}})
    assert '"search_budget_tokens": 24' in text
    _, plain, _ = server.fetch("/v1/completions", BODY | {"prompt": "so", "n": 1})
    assert "search_budget_tokens" not in plain["usage"]


def test_defaults_fit_any_bound() -> None:
    found = search_of(Generation(model="policy", search="mcts"), True, 4)
    assert found is not None and (found.budget_tokens, found.width) == (4, 8)
    for named in ({"budget_tokens": 5}, {"width": 8}):
        with pytest.raises(APIError):
            search_of(Generation(model="policy", search=named), True, 4)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"search": "widest"}, "search"),
        ({"search": {"strategy": "mcts", "width": 0}}, "search"),
        ({"search": {"width": 4, "branch": 3}}, "search"),
        ({"search": {"colour": 1}}, "search"),
        ({"search": {"budget_tokens": 10**9}}, "search"),
        ({"search": {"width": 10**9}}, "search"),
        ({"search": {"selection": "majority"}}, "search"),
        ({"search": {"aggregate": "min"}}, "search"),
        ({"search": {"separator": "a b"}, "stop": "a"}, "search"),
        ({"search": "mcts", "stop": "\n"}, "search"),
        ({"search": "mcts", "selection": "none"}, "selection"),
        ({"search": "mcts", "best_of": 4}, "best_of"),
        ({"search": "mcts", "stop_early": True}, "stop_early"),
        ({"search": "mcts", "budget": 4}, "budget"),
        ({"search": "mcts", "logprobs": 1}, "logprobs"),
        ({"search": "mcts", "temperature": 0}, "temperature"),
        ({"search": "mcts", "min_tokens": 2}, "min_tokens"),
        ({"search": "mcts", "presence_penalty": 1}, "presence_penalty"),
        ({"search": "mcts", "ignore_eos": True}, "ignore_eos"),
        ({"search": "mcts", "guided_regex": "a+"}, "guided_regex"),
        ({"search": "mcts", "structured_outputs": {"regex": "a+"}}, "structured_outputs"),
        ({"search": "mcts", "response_format": {"type": "json_object"}}, "response_format"),
        ({"search": "mcts", "max_tokens": 0, "echo": True, "logprobs": 1}, "search"),
    ],
)
def test_refusals_name_the_field(server: Any, fields: dict[str, Any], field: str) -> None:
    status, answer = ask(server, **fields)
    assert (status, answer["error"]["param"]) == (400, field)


def test_a_server_without_reward_refuses(start: Callable[..., Any]) -> None:
    status, answer = ask(start(), "mcts")
    assert (status, answer["error"]["param"]) == (400, "search")
