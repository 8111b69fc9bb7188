"""Our provider and tasks in inspect-ai, found by their entry point."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from raises import raises_error

pytest.importorskip("inspect_ai", reason="inspect-ai is not installed: run with --extra harness")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def model(stories_model: str) -> Any:
    from inspect_ai.model import get_model

    return get_model(f"rlhf/{stories_model}")


@pytest.fixture
def evaluate(tmp_path: Path, model: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("INSPECT_LOG_DIR", str(tmp_path / "logs"))
    monkeypatch.chdir(tmp_path)

    def run(task: Any, **options: Any) -> Any:
        from inspect_ai import eval

        (log,) = eval(task, model=model, display="none", log_dir=str(tmp_path / "logs"), **options)
        return log

    return run


def test_our_tasks(evaluate: Any) -> None:
    for task, count in (("rlhf_eval/stories", 5), ("rlhf_eval/sums", 5), ("rlhf_eval/adversarial", 12)):
        log = evaluate(task, limit=count, max_tokens=16)
        assert log.status == "success" and log.results.completed_samples == count
        assert log.stats.model_usage


def test_epochs_are_different_samples_of_one_prompt(evaluate: Any) -> None:
    from inspect_ai import Task
    from inspect_ai.dataset import MemoryDataset, Sample
    from inspect_ai.scorer import includes

    task = Task(dataset=MemoryDataset([Sample(input="Once upon a time", target="girl")]), scorer=includes())
    log = evaluate(task, epochs=4, max_tokens=16, logprobs=True, top_logprobs=2)
    written = {sample.output.completion for sample in log.samples}
    assert len(written) == 4
    for sample in log.samples:
        choice = sample.output.choices[0]
        assert choice.stop_reason in ("stop", "max_tokens")
        tokens = choice.logprobs.content
        assert len(tokens) == sample.output.usage.output_tokens
        assert all(len(t.top_logprobs) == 2 and t.logprob <= t.top_logprobs[0].logprob + 1e-6 for t in tokens)


def test_settings_reach_the_engine(model: Any) -> None:
    import asyncio

    from inspect_ai.model import GenerateConfig

    def ask(**settings: Any) -> Any:
        return asyncio.run(
            model.generate("Once upon a time", config=GenerateConfig(max_tokens=24, **settings))
        )

    assert ask(temperature=0.0).completion == ask(temperature=0.0).completion
    assert ask(seed=1).completion == ask(seed=1).completion != ask(seed=2).completion
    assert len(ask(num_choices=3).choices) == 3
    assert "time" not in ask(temperature=0.0, stop_seqs=["was"]).completion.split("was")[-1]


@pytest.mark.parametrize("wrong", [{"frequency_penalty": 1.0}, {"logit_bias": {1: 2.0}}])
def test_what_it_does_not_do_is_refused(model: Any, wrong: dict[str, Any]) -> None:
    import asyncio

    from inspect_ai.model import GenerateConfig

    with raises_error("unknown_key"):
        asyncio.run(model.api.generate(_conversation(), [], "none", GenerateConfig(**wrong)))
    with raises_error("unsupported_setting"):
        asyncio.run(model.api.generate(_conversation(), ["tool"], "auto", GenerateConfig()))


def test_what_does_not_fit_ends_its_sample_alone(model: Any) -> None:
    import asyncio

    from inspect_ai.model import GenerateConfig

    found = asyncio.run(model.generate("Once upon a time", config=GenerateConfig(max_tokens=600)))
    assert found.stop_reason == "model_length" and not found.completion and found.error


def test_a_wrong_model_is_one_sentence(tmp_path: Path) -> None:
    run = subprocess.run(
        [
            str(Path(sys.executable).with_name("inspect")),
            "eval",
            "rlhf_eval/sums",
            "--model",
            "rlhf//nowhere",
        ],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert run.returncode and "/nowhere" in run.stdout + run.stderr
    assert "Traceback" not in run.stdout + run.stderr


def test_its_logs_are_compared(tmp_path: Path, evaluate: Any) -> None:
    for name in ("a", "b"):
        log = evaluate("rlhf_eval/sums", limit=4, max_tokens=8)
        shutil.copy(log.location.removeprefix("file://"), tmp_path / f"{name}.eval")
    command = [sys.executable, "-m", "rlhf_report"]
    logs = [f"{name}={tmp_path / name}.eval" for name in ("a", "b")]
    for verb, place in (("compare", "--output-dir"), ("samples", "--out-dir")):
        run = subprocess.run([*command, verb, *logs, place, str(tmp_path / verb)], capture_output=True)
        assert run.returncode == 0, run.stderr


def _conversation() -> list[Any]:
    from inspect_ai.model import ChatMessageUser

    return [ChatMessageUser(content="Once upon a time")]
