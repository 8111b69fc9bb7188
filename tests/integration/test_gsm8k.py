"""Grade-school maths through `rlhf-train grpo|ppo`: real rows, a verifiable reward, a random model.

What is looked at is the machinery, and that a run says what it is: one that cannot learn.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from proofs import by_default
from rlhf_data import read_rows
from rlhf_infer.rewards import RewardFunctionFactory

GSM8K = Path(__file__).parents[3] / "shared" / "data" / "gsm8k" / "train-2000.jsonl.gz"
FEW = (
    *("--subset-size=16", "--max-steps=2", "--reward=number", "--set=max_completion_length=6"),
    *("--set=per_device_train_batch_size=16", "--set=num_generations=4", "--set=sample_steps=1"),
)
Run = Callable[..., str]


@pytest.fixture(scope="module")
def problems() -> list[dict[str, Any]]:
    if not GSM8K.exists():
        pytest.skip("needs ../shared/data, which is missing")
    return [row for _, row in read_rows(GSM8K)]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Calls the command in an empty folder, where it leaves `run`; what it printed, in one line."""
    import rlhf_eval
    from rlhf_train.cli import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(rlhf_eval, "training_curves", lambda *args, **options: None)  # slower than all else

    def call(method: str, *options: Any) -> str:
        arguments = [method, *FEW, *map(str, options), "--output-dir=run"]
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code == 0, (result.output, result.exception)
        return " ".join(result.output.split())

    return call


def lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path("run", name).read_text().splitlines()]


def assert_told_to_be_dead(printed: str) -> None:
    """Nothing ends and nothing is right, and the pre-flight says so in words, before the first step."""
    findings = {row["name"]: row for row in json.loads(Path("run/preflight.json").read_text())}
    assert {"truncated", "no_eos", "zero_variance"} <= set(findings)
    assert {findings[name]["level"] for name in ("truncated", "zero_variance")} == {"error"}
    assert "wrong_sign" not in findings  # the rows' own solutions are rewarded
    for words in ("sampled completions were cut off at max_completion_length 6", "are equal (0 everywhere)"):
        assert words in printed and printed.index(words) < printed.index("step 1/2"), words
    assert "raise max_completion_length, or start from a model that ends its completions" in printed
    for row in lines("metrics.jsonl"):
        assert row["reward"] == row["rewards/number/mean"] == 0 and row["completions/clipped_ratio"] == 1


@pytest.mark.slow
def test_every_solution_is_worth_1_and_none_of_another_problem(problems: list[dict[str, Any]]) -> None:
    reward = RewardFunctionFactory.from_spec("number")
    answers = [row["answer"] for row in problems]
    assert len(answers) == 2000 and reward(completions=answers, answer=answers) == [1.0] * 2000
    finals = [text.rpartition("####")[2].strip() for text in answers]
    turned = [*answers[1:], answers[0]]
    same = [float(one == other) for one, other in zip(finals, [*finals[1:], finals[0]], strict=True)]
    assert reward(completions=turned, answer=answers) == same and sum(same) < 100


@pytest.mark.slow
def test_plain_problems(problems: list[dict[str, Any]], run: Run) -> None:
    printed = run("grpo", f"--train-data={GSM8K}", "--set=columns.prompt=question")
    assert_told_to_be_dead(printed)
    assert [row["step"] for row in lines("metrics.jsonl")] == [1, 2]
    asked = {row["question"] for row in problems[:16]}
    assert {row["prompt"] for row in lines("samples.jsonl")} <= asked
    data = json.loads(Path("run/results.json").read_text())["data"]
    assert data["source"] == str(GSM8K) and data["train_rows"] + data["eval_rows"] == 16


@pytest.mark.parametrize("method", by_default(["grpo", "ppo"], "grpo"))
def test_problems_as_conversations(
    problems: list[dict[str, Any]], run: Run, tmp_path: Path, method: str
) -> None:
    path = tmp_path / "talks.jsonl.gz"
    with gzip.open(path, "wt") as file:
        for row in problems:
            talk = [
                {"role": "system", "content": "Reason step by step; end with #### and the number."},
                {"role": "user", "content": row["question"]},
            ]
            file.write(json.dumps({"prompt": talk, "answer": row["answer"]}) + "\n")
    assert_told_to_be_dead(run(method, f"--train-data={path}"))
    for row in lines("samples.jsonl"):
        assert row["prompt"].startswith("<|system|>\nReason step by step;")
        assert row["prompt"].endswith("\n<|assistant|>\n") and "<|user|>\n" in row["prompt"]


@pytest.mark.slow
def test_long_prompts_and_a_second_reward_that_differs(
    problems: list[dict[str, Any]], run: Run, tmp_path: Path
) -> None:
    """Three worked problems stand before each one; a length is rewarded a little, so rewards differ."""
    worked = "\n\n".join(f"{row['question']}\n{row['answer']}" for row in problems[-3:])
    path = tmp_path / "worked.jsonl"
    rows = [{"prompt": f"{worked}\n\n{row['question']}\n", "answer": row["answer"]} for row in problems[:16]]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    credit = (
        "--reward=length:target=40,unit=characters",
        "--set=reward_weights=[1,0.1]",
        "--set=eval_fraction=0",
    )
    printed = run("grpo", f"--train-data={path}", *credit, "--set=max_completion_length=12")
    assert "are equal" not in printed
    assert any(row["grad_norm"] > 0 for row in lines("metrics.jsonl"))
    assert len(lines("samples.jsonl")[0]["prompt"]) > len(worked)
