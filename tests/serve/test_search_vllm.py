"""Commands over files and searches of the server with a real vLLM, against our own engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from files import read_lines
from rlhf_infer import read_trees

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

ROOT = Path(__file__).parents[2]
SOURCES = [*ROOT.glob("packages/*/src"), *ROOT.glob("apps/*/src")]
PROMPTS = ["where is mary ?", "so"]
SURE = ["--set", "top_k=1"]
"""One token to draw in each place, so that engines with other random numbers draw the same."""


@pytest.fixture
def run(folders: Path, tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    python = os.environ.get("VLLM_PYTHON")
    if not python:
        pytest.skip("VLLM_PYTHON, the Python of an environment with vLLM, is not set")
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": prompt, "answer": "x"}) + "\n" for prompt in PROMPTS))
    vllm = ["--dtype", "float32", "--set", "gpu_memory_utilization=0.1"]
    vllm += ["--set", "vllm_options={enforce_eager: true, kv_cache_memory_bytes: 134217728}"]

    def rows_of(backend: str, verb: str, *more: str) -> list[dict[str, Any]]:
        output, own = tmp_path / f"{backend}.jsonl", vllm if backend == "vllm" else []
        command = [python if own else sys.executable, "-m", "rlhf_serve", verb, "--input", str(rows)]
        command += ["--output", str(output), "--model", str(folders / "policy"), "--backend", backend]
        env = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
        env["PYTHONPATH"] = os.pathsep.join(map(str, SOURCES))
        done = subprocess.run(
            [*command, "--max-tokens", "8", *own, *more], env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-5000:]
        return read_lines(output)

    return rows_of


def test_a_file_is_searched_as_with_our_own_engine(
    run: Callable[..., list[dict[str, Any]]], folders: Path, tmp_path: Path
) -> None:
    more = ["--reward", str(folders / "reward"), "--search", "mcts", "--search-width", "4"]
    more += ["--search-budget-tokens", "24", "--set", 'search.separator=" "', *SURE]
    paths = {name: tmp_path / f"{name}.tree" for name in ("vllm", "transformers")}
    found, expected = (run(name, "generate", *more, "--search-tree", str(paths[name])) for name in paths)
    for row, own in zip(found, expected, strict=True):
        for name in ("score", "scores"):
            assert row.pop(name) == pytest.approx(own.pop(name), abs=1e-4)
        assert row == own and row["completion_tokens"] == 24
    drawn, known = ([tree.nodes for tree in read_trees(path)] for path in paths.values())
    steps = [
        [[(n.parent, n.token_ids, n.visits, n.draws) for n in t] for t in each] for each in (drawn, known)
    ]
    assert steps[0] == steps[1]


@pytest.mark.parametrize(
    ("verb", "more"),
    [
        ("generate", ["--n", "3", "--reward", "length:maximum=20"]),
        ("label-steps", ["--solutions", "2", "--reward", "exact"]),
    ],
)
def test_best_of_n_and_labels_have_rows(
    run: Callable[..., list[dict[str, Any]]], verb: str, more: list[str]
) -> None:
    assert {row["prompt"] for row in run("vllm", verb, *more)} == set(PROMPTS)


def test_a_server_searches_as_with_our_own_engine(start: Callable[..., Any], folders: Path) -> None:
    search = {"strategy": "beam", "width": 4, "branch": 2, "budget_tokens": 48, "separator": " "}
    body = {"model": "policy", "prompt": PROMPTS, "max_tokens": 8, "seed": 5, "search": search}
    servers = [
        start("--reward-model", str(folders / "reward"), backend=name) for name in ("vllm", "transformers")
    ]
    texts = []
    for server in servers:
        status, answer, _ = server.fetch("/v1/completions", body | {"top_k": 1, "return_candidates": True})
        assert status == 200, answer
        texts.append([[each["text"] for each in answer[name]] for name in ("choices", "candidates")])
        assert answer["usage"]["completion_tokens"] <= answer["usage"]["search_budget_tokens"] == 96
    assert texts[0] == texts[1]
    drawn = [servers[0].fetch("/v1/completions", body)[1]["choices"] for _ in range(2)]
    # Which steps are scored together depends on time, and with it a score's last digits.
    scores = [[choice.pop("score") for choice in each] for each in drawn]
    assert scores[0] == pytest.approx(scores[1], abs=1e-5)
    assert drawn[0] == drawn[1]
