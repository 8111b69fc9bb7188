"""The chain that a user walks with a model that was really pretrained, in two working directories."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from openai import OpenAI
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM, AutoTokenizer

SHARED = Path(__file__).parents[3] / "shared/data"
STORIES, HH = SHARED / "stories260k", SHARED / "hh-rlhf/harmless-base-1500.jsonl.gz"
STARTS = ("Once upon a time, there was a little", "One day, a boy named Tim", "Lily and her mom went to the")
STARTS += ("The dog was", "A big bear", "Sam had a", "There was a", "In the park,")
REWARD = '''"""Happiness of a text, from 0 to 1."""
from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

_ANALYZER = SentimentIntensityAnalyzer()


def happy(completions, **columns):
    return [(_ANALYZER.polarity_scores(text)["compound"] + 1) / 2 for text in completions]
'''
SMALL = ("--max-steps=3", "--on-bad-row=skip", "--subset-size=48", "--set=max_length=256")
ONLINE = ("--set=max_completion_length=48", "--set=per_device_train_batch_size=8")
Run = Callable[..., str]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not STORIES.exists(), reason="needs ../shared/data, which is missing"),
]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Calls `rlhf-train` or `rlhf-merge` in a folder of the test's own, expecting it to succeed."""
    from rlhf_merge.cli.main import main as merge
    from rlhf_train.cli import main as train

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def call(folder: str, tool: str, *arguments: str) -> str:
        work = tmp_path / folder
        work.mkdir(exist_ok=True)
        monkeypatch.chdir(work)
        result = CliRunner().invoke(merge if tool == "rlhf-merge" else train, list(arguments))
        assert result.exit_code == 0, (arguments, result.output, result.exception)
        return result.output

    return call


@pytest.fixture
def serve() -> Iterator[Callable[..., str]]:
    """Starts `rlhf-serve` in a folder; its address."""
    processes: list[subprocess.Popen[bytes]] = []

    def start(folder: Path, *arguments: str) -> str:
        command = [sys.executable, "-m", "rlhf_serve", "--port", "0", "--backend", "transformers", *arguments]
        log = folder / "serve.log"
        with log.open("w") as file:
            processes.append(subprocess.Popen(command, cwd=folder, stdout=file, stderr=subprocess.STDOUT))
        while processes[-1].poll() is None:
            if found := re.search(r"open (http://\S+)/ for the page", log.read_text()):
                return found[1]
            time.sleep(0.1)
        raise AssertionError(log.read_text())

    yield start
    for process in processes:
        process.send_signal(signal.SIGTERM)
        process.wait()


def test_from_pairs_to_a_server_across_two_folders(
    run: Run, serve: Callable[..., str], tmp_path: Path
) -> None:
    (tmp_path / "made here").mkdir()
    model, rows = (os.path.relpath(path, tmp_path / "made here") for path in (STORIES, HH))
    lora = "--set=use_peft=true"
    run("made here", "sft", "sft", "--model", model, "--train-data", rows, *SMALL, lora, "--output-dir=sft")
    run("made here", "reward", "reward", "--model", model, "--train-data", rows, *SMALL, "--output-dir=rm")
    prompts = [json.dumps({"prompt": start}) + "\n" for start in STARTS]
    used = tmp_path / "deeper" / "used there"  # at another depth, so that no relative path fits by chance
    used.mkdir(parents=True)
    (used / "prompts.jsonl").write_text("".join(prompts))

    tuned = "../../made here/sft/final"
    pairs = ("--train-data", os.path.relpath(HH, used), *SMALL)
    run("deeper/used there", "dpo", "dpo", "--model", tuned, *pairs, lora, "--output-dir=dpo")
    adapter = AutoPeftModelForCausalLM.from_pretrained(used / "dpo/final")
    assert adapter.peft_config["default"].r == 16
    online = ("--train-data=prompts.jsonl", "--max-steps=2", *ONLINE, "--output-dir=ppo")
    run("deeper/used there", "ppo", "ppo", "--model", tuned, "--reward", "../../made here/rm/final", *online)
    run("deeper/used there", "rlhf-merge", "linear", "--model", "dpo/final", "--model", "ppo/final", "merged")
    run("elsewhere", "dpo", "dpo", "--resume", "../deeper/used there/dpo", "--eval-only")

    merged: Any = AutoModelForCausalLM.from_pretrained(used / "merged")
    assert sum(parameter.numel() for parameter in merged.parameters()) == 260_032
    tokenizer = AutoTokenizer.from_pretrained(used / "merged")
    ids = merged.generate(**tokenizer(STARTS[0], return_tensors="pt"), max_new_tokens=12, do_sample=False)
    expected = tokenizer.decode(ids[0, -12:], skip_special_tokens=True)

    named = ("--model", "../deeper/used there/merged", "--reward-model", "../made here/rm/final", "--n", "4")
    client = OpenAI(base_url=serve(tmp_path / "elsewhere", *named) + "/v1", api_key="none")
    answer = client.completions.create(
        model="merged", prompt=STARTS[0], max_tokens=12, temperature=0.0, extra_body={"selection": "none"}
    )
    assert answer.choices[0].text.strip() == expected.strip()
    best = client.completions.create(model="merged", prompt=STARTS[0], max_tokens=12, seed=1)
    assert best.choices[0].model_extra is not None and "score" in best.choices[0].model_extra


def test_grpo_makes_stories_happy(run: Run, tmp_path: Path) -> None:
    """A reward about the text is learned, and hacked: the same few words by the end."""
    work = tmp_path / "work"
    work.mkdir()
    (work / "happy.py").write_text(REWARD)
    (work / "prompts.jsonl").write_text("".join(json.dumps({"prompt": start}) + "\n" for start in STARTS))
    (work / "held-out.jsonl").write_text(json.dumps({"prompt": "The little girl"}) + "\n")
    options = ("--model", str(STORIES), "--train-data=prompts.jsonl", "--eval-data=held-out.jsonl")
    options += ("--reward", "happy.py:happy", "--max-steps=60", "--set=num_generations=8", *ONLINE)
    run("work", "grpo", "grpo", *options, "--set=learning_rate=1e-3", "--output-dir=run")
    metrics = [json.loads(line) for line in (work / "run/metrics.jsonl").read_text().splitlines()]
    rewards = [row["reward"] for row in metrics]
    assert sum(rewards[:3]) / 3 < 0.8 and min(rewards[-5:]) > 0.9
