"""One search: the library, `rlhf-serve generate` and the server draw, score and choose the same."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from proofs import by_default
from rlhf_infer import BestOfNSampler, SamplingParams, TransformersEngine, load_scorer
from rlhf_infer.sampling.answers import extractor
from rlhf_models import load_causal_lm, load_tokenizer
from rlhf_serve.cli.main import main

PROMPTS = ["where is mary ?", "so"]
# Low enough that completions repeat; the letter is one that many of these completions have.
DRAW: dict[str, Any] = {"max_tokens": 10, "temperature": 0.4, "stop": "a"}
SEED, N = 5, 12


@pytest.fixture(scope="module")
def reward(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward function in a file that writes down what it scores.

    Weighted votes by these probabilities have another winner than votes by their sigmoids.
    """
    path = tmp_path_factory.mktemp("reward") / "letters.py"
    path.write_text(
        "import json\n"
        "def letters(completions):\n"
        f"    with open({str(path.with_suffix('.seen'))!r}, 'a') as file:\n"
        "        file.write(''.join(json.dumps(text) + '\\n' for text in completions))\n"
        "    return [0.9 if sum(map(ord, text)) % 3 == 2 else len(text) / 999 for text in completions]\n"
        "letters.is_probability = True\n"
    )
    return path


@pytest.fixture(scope="module")
def scoring_server(start: Callable[..., Any], reward: Path) -> Iterator[Any]:
    yield start("--reward-model", f"{reward}:letters")


def scored(reward: Path) -> list[str]:
    """What was scored since the last call, sorted."""
    path = reward.with_suffix(".seen")
    lines = path.read_text().splitlines()
    path.write_text("")
    return sorted(json.loads(line) for line in lines)


def by_library(folders: Path, reward: Path, selection: Any) -> list[Any]:
    engine = TransformersEngine(
        load_causal_lm(str(folders / "policy"), device="cpu"), load_tokenizer(str(folders / "policy"))
    )
    params = SamplingParams(10, temperature=0.4, seed=SEED, stop=("a",))
    sampler = BestOfNSampler(
        engine,
        load_scorer([f"{reward}:letters"]),
        engine.tokenizer,
        n=N,
        params=params,
        selection=selection,
        extract=extractor("text"),
    )
    return [[(c.text, c.score) for c in each.top(N)] for each in sampler.sample(PROMPTS)]


def by_command(folders: Path, reward: Path, tmp_path: Path, selection: str) -> list[Any]:
    rows, output = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    rows.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    command = ["generate", "--input", str(rows), "--output", str(output), "--model", str(folders / "policy")]
    command += ["--reward-model", f"{reward}:letters", "--n", str(N), "--top-k-candidates", str(N)]
    command += ["--max-tokens", "10", "--temperature", "0.4", "--stop", "a", "--sampling-seed", str(SEED)]
    done = CliRunner().invoke(main, [*command, "--selection", selection])
    assert done.exit_code == 0, done.output
    found = [json.loads(line) for line in output.read_text().splitlines()]
    for row in found:
        assert (row["completion"], row["score"]) == (
            row["candidates"][0]["text"],
            row["candidates"][0]["score"],
        )
    return [[(each["text"], each["score"]) for each in row["candidates"]] for row in found]


def by_server(server: Any, selection: str) -> list[Any]:
    found = []
    for prompt in PROMPTS:
        body = DRAW | {
            "model": "policy",
            "prompt": prompt,
            "seed": SEED,
            "best_of": N,
            "selection": selection,
        }
        status, answer, _ = server.fetch("/v1/completions", body | {"return_candidates": True})
        assert status == 200, answer
        ranked = sorted(answer["candidates"], key=lambda each: each["rank"])
        assert answer["choices"][0]["text"] == ranked[0]["text"]
        found.append([(each["text"], each["score"]) for each in ranked])
    return found


@pytest.mark.parametrize("selection", by_default(["best", "majority", "weighted"], "weighted"))
def test_three_doors_to_one_search(
    folders: Path, reward: Path, scoring_server: Any, tmp_path: Path, selection: str
) -> None:
    library = by_library(folders, reward, selection)
    calls = scored(reward)
    distinct = {(i, text) for i, found in enumerate(library) for text, _ in found}
    assert len(calls) < 2 * N  # repeats are scored once
    assert set(calls) == {text for _, text in distinct} and not any("a" in text for text in calls)
    assert by_command(folders, reward, tmp_path, selection) == library
    assert scored(reward) == calls
    assert by_server(scoring_server, selection) == library
    assert scored(reward) == calls


def test_stop_texts_count_behind_the_least_tokens(scoring_server: Any) -> None:
    def ask(**fields: Any) -> Any:
        body = {"model": "policy", "prompt": "so", "best_of": 1, "max_tokens": 24, "seed": 1, **fields}
        status, answer, _ = scoring_server.fetch("/v1/completions", body)
        assert status == 200, answer
        return answer

    plain = ask(min_tokens=24)["choices"][0]["text"]
    stop = plain[2]
    first = ask(min_tokens=0, stop=stop)
    assert first["choices"][0]["text"] == plain[: plain.index(stop)]
    later = ask(min_tokens=8, stop=stop, logprobs=0)
    [choice] = later["choices"]
    # What is billed is what the text has, and at most the token of the stop text more.
    assert choice["text"].startswith(plain[:3]) and later["usage"]["completion_tokens"] > 8
    assert len(choice["logprobs"]["tokens"]) >= 8
    status, text, _ = scoring_server.fetch(
        "/v1/completions",
        {"model": "policy", "prompt": "so", "best_of": 1, "max_tokens": 24, "seed": 1}
        | {"min_tokens": 8, "stop": stop, "stream": True},
    )
    assert status == 200
    chunks = [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n")[:-2]]
    streamed = "".join(each["text"] for chunk in chunks for each in chunk["choices"])
    assert streamed == choice["text"]
