"""`rlhf-serve generate`: rows in, best completions out, resumable."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from files import read_lines
from rlhf_infer import BestOfNSampler, RewardFunctions
from rlhf_models import save_model, tiny_model, train_byte_tokenizer
from rlhf_serve.cli.main import main

ROWS = [{"prompt": f"where is mary {i} ?", "tag": i} for i in range(7)]


def run(folders: Path, rows: Path, output: Path, *more: str, reward: bool = True) -> Result:
    options = ["--model", str(folders / "policy"), "--max-tokens", "6", "--n", "4", "--batch-size", "2"]
    options += ["--reward-model", str(folders / "reward")] if reward else []
    return CliRunner().invoke(
        main, ["generate", "--input", str(rows), "--output", str(output), *options, *more]
    )


def test_a_tokenizer_of_another_model_is_refused(rows: Path, tmp_path: Path) -> None:
    tokenizer = train_byte_tokenizer(["mary went to the kitchen"], vocab_size=300)
    save_model(tiny_model("llama", vocab_size=len(tokenizer) - 1), tokenizer, tmp_path / "policy")
    result = run(tmp_path, rows, tmp_path / "out.jsonl", "--selection", "majority", reward=False)
    assert result.exit_code == 2 and "embeddings" in result.stderr and not (tmp_path / "out.jsonl").exists()


def test_every_row_gets_its_best_completion(folders: Path, rows: Path, tmp_path: Path) -> None:
    output = tmp_path / "out" / "best.jsonl"
    result = run(folders, rows, output, "--top-k-candidates", "3")
    assert result.exit_code == 0, result.output
    assert "7 prompts, 28 candidates" in result.stderr
    found = read_lines(output)
    assert [(row["prompt"], row["tag"]) for row in found] == [(row["prompt"], row["tag"]) for row in ROWS]
    for row in found:
        scores = [each["score"] for each in row["candidates"]]
        assert len(scores) == 3 and scores == sorted(scores, reverse=True)
        assert row["score"] == scores[0] == row["scores"]["reward"] and row["samples"] == 4
        assert row["completion"] == row["candidates"][0]["text"]


def test_preference_rows_are_prompts_too(folders: Path, tmp_path: Path) -> None:
    talk = "\n\nHuman: where is mary ?\n\nAssistant:"
    row = {"chosen": f"{talk} garden", "rejected": f"{talk} kitchen"}
    rows, output = tmp_path / "hh.jsonl", tmp_path / "out.jsonl"
    rows.write_text(json.dumps(row) + "\n")
    assert run(folders, rows, output).exit_code == 0
    [found] = read_lines(output)
    assert (found["prompt"], found["chosen"]) == (talk, row["chosen"])
    again = run(folders, rows, output)
    assert again.exit_code == 0 and "all 1 rows already" in again.stderr


def test_an_interrupted_run_goes_on_where_it_was(
    folders: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, output = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    assert run(folders, rows, whole).exit_code == 0
    sample, calls = BestOfNSampler.sample, []

    def interrupted(self: Any, prompts: Any, columns: Any) -> Any:
        calls.append(columns["tag"])
        if len(calls) == 3:
            raise KeyboardInterrupt
        return sample(self, prompts, columns)

    monkeypatch.setattr(BestOfNSampler, "sample", interrupted)
    assert run(folders, rows, output).exit_code == 130
    assert len(read_lines(output)) == 4
    with open(output, "a") as file:
        file.write('{"prompt": "where is ma')  # a line that was being written
    size = ["--set", "gpu_memory_utilization=0.05", "--set", "max_model_len=64"]  # changes no completion
    result = run(folders, rows, output, *size)
    assert result.exit_code == 0 and "has 4 of 7 rows; continuing" in result.stderr
    assert calls[3:] == [[4, 5], [6]] and output.read_text() == whole.read_text()
    assert "has all 7 rows already" in run(folders, rows, output).stderr


def test_an_output_of_something_else_is_left_alone(folders: Path, rows: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    assert run(folders, rows, output).exit_code == 0
    before = output.read_text()
    other = run(folders, rows, output, "--temperature", "0.5")
    assert other.exit_code == 2 and "was made with temperature=1.0, now it is 0.5" in other.output
    rows.write_text(json.dumps({"prompt": "another"}) + "\n" + "\n".join(map(json.dumps, ROWS)))
    assert "line 1: it was made from another row" in run(folders, rows, output).output
    foreign = tmp_path / "notes.jsonl"
    foreign.write_text("mine\n")
    assert "does not say how it was made" in run(folders, rows, foreign).output
    assert (output.read_text(), foreign.read_text()) == (before, "mine\n")
    again = run(folders, rows, output, "--overwrite", "--temperature", "0.5")
    assert again.exit_code == 0 and len(read_lines(output)) == 8


def test_a_prompt_that_is_too_long_is_named_by_its_row(folders: Path, rows: Path, tmp_path: Path) -> None:
    lines = rows.read_text().splitlines()
    lines[3] = json.dumps({"prompt": "where is mary ? " * 2000})
    rows.write_text("\n".join(lines))
    result = run(folders, rows, tmp_path / "out.jsonl")
    assert result.exit_code == 2 and f"{rows}, row 4: the prompt of " in result.stderr


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--temperature", "0"), "all n=4 samples of a prompt are the same"),
        (("--temperature", "0.001"), "vLLM samples at temperatures from 0.01"),
        (("--max-tokens", "100000"), "row 1: the prompt has"),
        (("--set", "max_model_len=40", "--max-tokens", "9"), "row 2: the prompt has"),
        (("--search", "beam", "--temperature", "0.001"), "vLLM samples at temperatures from 0.01"),
        (("--search", "mcts", "--temperature", "0"), "all steps drawn after a path are the same"),
    ],
)
def test_what_vllm_would_refuse_is_refused_before_it_starts(
    folders: Path, tmp_path: Path, options: tuple[str, ...], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlhf_serve.cli.load.check_backend", lambda settings: None)  # as if vLLM were there
    rows = tmp_path / "long.jsonl"
    rows.write_text('{"prompt": "where"}\n' + json.dumps({"prompt": "where is mary ? " * 20}))
    command = ["generate", "--input", str(rows), "--output", str(tmp_path / "out.jsonl"), "--backend", "vllm"]
    command += ["--model", str(folders / "policy"), "--reward-model", str(folders / "reward"), *options]
    command += [] if "--search" in options else ["--n", "4"]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 2 and says in result.stderr, result.stderr


def test_the_input_is_not_the_output(folders: Path, rows: Path, tmp_path: Path) -> None:
    before, link = rows.read_bytes(), tmp_path / "link.jsonl"
    link.symlink_to(rows)
    for output in (rows, link):
        result = run(folders, rows, output, "--overwrite")
        assert result.exit_code == 2 and "is the input" in result.stderr
    assert rows.read_bytes() == before


def test_a_refused_run_writes_nothing_and_loses_nothing(folders: Path, rows: Path, tmp_path: Path) -> None:
    output, wrong = tmp_path / "new" / "out.jsonl", ("--draft-model", str(folders / "reward"))
    assert run(folders, rows, output, *wrong).exit_code == 2
    assert not output.parent.exists()
    assert run(folders, rows, output).exit_code == 0
    before = {path: path.read_bytes() for path in output.parent.iterdir()}
    assert run(folders, rows, output, *wrong, "--overwrite").exit_code == 2
    assert {path: path.read_bytes() for path in output.parent.iterdir()} == before


def test_fewer_candidates_where_more_would_not_pay(folders: Path, rows: Path, tmp_path: Path) -> None:
    budget = run(folders, rows, tmp_path / "budget.jsonl", "--budget", "3")
    assert budget.exit_code == 0, budget.output
    drawn = [row["samples"] for row in read_lines(tmp_path / "budget.jsonl")]
    assert sum(drawn) <= 3 * 7 and max(drawn) <= 4
    refused = run(folders, rows, tmp_path / "no.jsonl", "--budget", "5")
    assert refused.exit_code == 2 and "the budget is 5 samples per prompt and n" in refused.output
    both = run(folders, rows, tmp_path / "both.jsonl", "--budget", "3", "--stop-early")
    assert both.exit_code == 2 and "stop_early and budget both decide" in both.output
    # Nearly greedy: four candidates show that a fifth would be one of them.
    early = run(
        *(folders, rows, tmp_path / "early.jsonl"), *("--stop-early", "--temperature", "0.05", "--n", "32")
    )
    assert early.exit_code == 0, early.output
    assert sum(row["samples"] for row in read_lines(tmp_path / "early.jsonl")) < 32 * 7
    assert "of the candidates saved" in early.stderr


def test_a_majority_needs_no_reward(folders: Path, rows: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    result = run(folders, rows, output, "--selection", "majority", reward=False)
    assert result.exit_code == 0, result.output
    assert all(row["score"] is None and row["answer_found"] for row in read_lines(output))


def test_stop_texts_are_left_out(folders: Path, rows: Path, tmp_path: Path) -> None:
    assert run(folders, rows, tmp_path / "a.jsonl").exit_code == 0
    texts = [row["completion"] for row in read_lines(tmp_path / "a.jsonl")]
    stop = max("".join(texts), key="".join(texts).count)
    assert run(folders, rows, tmp_path / "b.jsonl", "--stop", stop).exit_code == 0
    found = read_lines(tmp_path / "b.jsonl")
    assert not any(stop in row["completion"] for row in found)
    assert any(row["finish_reason"] == "stop" for row in found)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no rows"),
        ('{"text": "x"}\n', "line 1, field prompt: missing"),
        ('{"prompt": "a"}\n{"prompt": ""}\n', "line 2, field prompt: empty"),
        ('{"prompt": 3}\n', "line 1, field prompt: expected a text, got 3"),
        ("not json\n", "line 1"),
    ],
)
def test_bad_rows_are_named(folders: Path, tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    result = run(folders, path, tmp_path / "out.jsonl")
    assert result.exit_code == 2 and says in result.output and "Traceback" not in result.output
    assert not (tmp_path / "out.jsonl").exists()


def test_a_failing_reward_names_the_rows_and_keeps_what_is_done(
    folders: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(prompts: Any, completions: Any, tag: list[int]) -> list[float]:
        if 5 in tag:
            raise ValueError("no five please")
        return [float(len(text)) for text in completions]

    monkeypatch.setattr("rlhf_serve.cli.load.load_scorer", lambda *a, **k: RewardFunctions([fails]))
    result = run(folders, rows, tmp_path / "out.jsonl")
    assert result.exit_code == 2
    assert "rows 5 to 6" in result.output and "no five please" in result.output
    assert len(read_lines(tmp_path / "out.jsonl")) == 4


@pytest.mark.parametrize(
    ("drafts", "sampling"),
    [
        (("--draft", "ngram"), ("--temperature", "0.7")),
        pytest.param(
            ("--draft", "ngram", "--set", "draft_tokens=2"),
            ("--temperature", "0", "--n", "1"),
            marks=pytest.mark.slow,
        ),
        pytest.param(("--draft-model", "policy"), ("--temperature", "0", "--n", "1"), marks=pytest.mark.slow),
        (("--draft", "layers", "--set", "draft_layers=1"), ("--temperature", "0", "--n", "1")),
        pytest.param(
            ("--draft-model", "policy", "--set", "draft_alternatives=4"),
            ("--temperature", "0", "--n", "1"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_guessing_tokens_changes_no_completion(
    drafts: tuple[str, ...], sampling: tuple[str, ...], folders: Path, rows: Path, tmp_path: Path
) -> None:
    named = [str(folders / "policy") if option == "policy" else option for option in drafts]
    for name, options in (("plain", []), ("guessed", named)):
        result = run(folders, rows, tmp_path / f"{name}.jsonl", *sampling, *options)
        assert result.exit_code == 0, result.output
    assert (tmp_path / "plain.jsonl").read_text() == (tmp_path / "guessed.jsonl").read_text()


@pytest.mark.parametrize(
    "options",
    [
        ("--draft", "ngram", "--draft-model", "policy"),
        ("--set", "draft_tokens=3"),
        ("--draft", "x"),
        ("--draft", "ngram", "--set", "draft_alternatives=1"),
    ],
)
def test_drafts_that_do_not_go_together_are_refused(
    options: tuple[str, ...], folders: Path, rows: Path, tmp_path: Path
) -> None:
    named = [str(folders / "policy") if option == "policy" else option for option in options]
    result = run(folders, rows, tmp_path / "out.jsonl", *named)
    assert result.exit_code == 2 and "Traceback" not in result.output


def test_a_draft_model_with_another_tokenizer_is_refused(folders: Path, rows: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    tokenizer = train_byte_tokenizer(["quite another text"], 270)
    save_model(tiny_model("llama", vocab_size=len(tokenizer)), tokenizer, other)
    result = run(folders, rows, tmp_path / "out.jsonl", "--draft-model", str(other))
    assert result.exit_code == 2 and "Traceback" not in result.output
    assert "tokenizer" in result.output
