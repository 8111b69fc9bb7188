"""`rlhf-report evaluate` run for real on a tiny model, on files, and against a server that judges."""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from files import read_lines, write_lines
from rlhf_eval.evaluation import read_env_file
from rlhf_models import build_tiny_llama, train_byte_tokenizer
from rlhf_report.cli import main

LENGTH = "def length(completions, **columns):\n    return [len(each) / 10 for each in completions]\n"
PROMPTS = [f"where is mary {i} ?" for i in range(6)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reward.py").write_text(LENGTH)
    write_lines(tmp_path / "prompts.jsonl", [{"prompt": prompt} for prompt in PROMPTS])
    for name, text in (("long", "aaaa bbbb"), ("short", "cc")):
        write_lines(tmp_path / f"{name}.jsonl", [{"prompt": p, "completion": f"{text} {p}"} for p in PROMPTS])
    return tmp_path


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The API that tests of judges ask."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "infer"))
    return importlib.import_module("judge_server")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["evaluate", "--prompts", "prompts.jsonl", *arguments])


def results(*arguments: str, output: str = "out") -> dict[str, Any]:
    found = run(*arguments, "--output-dir", output)
    assert found.exit_code == 0, found.output
    return json.loads((Path(output) / "results.json").read_text())


FILES = ("--model", "long.jsonl", "--reference", "short.jsonl", "--reward-model", "reward.py:length")


def test_models_write_and_are_measured(folder: Path, tiny_model_folder: Path) -> None:
    model = ("--model", f"mine={tiny_model_folder}", "--reference", f"start={tiny_model_folder}")
    write_lines(folder / "pairs.jsonl", [{"prompt": "q", "chosen": "aa", "rejected": "bbb"}] * 3)
    few = ("--max-new-tokens", "5", "--samples", "2", "--reward-model", "reward.py:length")
    found = results(*model, *few, "--judge", "reward.py:length", "--adversarial", "--pairs", "pairs.jsonl")
    start, mine = found["models"]
    # The same weights and seed: the same completions, no distance, ties alone.
    assert mine["kl"]["kl"]["estimate"] == pytest.approx(0, abs=1e-6)
    assert found["comparisons"][0]["reward"]["estimate"] == 0
    assert found["comparisons"][0]["judges"]["reward.py:length"]["win_rate"]["estimate"] == 0.5
    assert start["reward"]["mean"] == mine["reward"]["mean"]
    assert {row["by"]: row["accuracy"]["estimate"] for row in found["reward_accuracy"]} == {
        "reward": 0.0,
        "implicit": 0.5,
    }
    assert set(found["adversarial"]["refusals"]) == {"start", "mine"}
    rows = read_lines("out/completions.jsonl")
    assert len(rows) == 2 * 6 * 2 and all(
        {"prompt", "model", "completion", "reward"} <= set(row) for row in rows
    )
    assert [row["kl"] for row in rows if row["model"] == "mine"] == pytest.approx([0.0] * 12, abs=1e-6)
    page = Path("out/evaluation.html").read_text()
    assert "Evaluation of mine against start" in page and "http" not in page.replace("http-equiv", "")
    assert Path("out/pareto.png").read_bytes().startswith(b"\x89PNG")
    assert CliRunner().invoke(main, ["samples", "out", "--out-dir", "shown"]).exit_code == 0


def test_an_evaluation_goes_on_with_the_same_options_only(folder: Path) -> None:
    first = results(*FILES)
    assert results(*FILES) == first
    other = run(*FILES, "--seed", "3", "--output-dir", "out")
    assert other.exit_code == 2 and "seed" in other.output
    again = run(*FILES, "--output-dir", ".")
    assert again.exit_code == 2 and "not empty" in again.output


def test_a_refused_evaluation_leaves_its_folder_to_the_next(folder: Path) -> None:
    refused = run(*FILES, "--judge", "reward.py:nothing", "--output-dir", "out")
    assert refused.exit_code == 2 and Path("out/config.json").exists()
    assert run(*FILES, "--output-dir", "out").exit_code == 0


def test_files_are_compared_and_hostile_names_stay_text(folder: Path) -> None:
    evil = "<script>alert(1)</script>"
    found = results("--model", f"{evil}=long.jsonl", *FILES[2:], "--judge", "reward.py:length")
    [comparison] = found["comparisons"]
    assert comparison["reward"]["estimate"] == pytest.approx(0.7)  # seven characters more
    assert comparison["judges"]["reward.py:length"]["win_rate"]["estimate"] == 1.0
    assert "kl" not in found["models"][1]
    page = Path("out/evaluation.html").read_text()
    assert "<script>alert" not in page and "not independent" in page
    per_model = CliRunner().invoke(
        main,
        [
            "compare",
            *map(str, sorted(Path("out/completions").iterdir())),
            "--metric=reward",
            "--output-dir=c",
        ],
    )
    assert per_model.exit_code == 0, per_model.output


def test_surrogates_are_written_as_escapes(folder: Path) -> None:
    rows = [{"prompt": p, "completion": f"\ud800 {p}"} for p in PROMPTS]  # JSON can hold half a pair
    write_lines(folder / "half.jsonl", rows)
    found = results("--model", "half.jsonl", *FILES[2:])
    assert found["written_elsewhere"] == ["short", "half"]
    assert "\\ud800" in Path("out/completions/half.jsonl").read_text()
    assert "come from files" in Path("out/evaluation.txt").read_text()


def test_what_cannot_work_is_said_before_a_model_is_loaded(
    folder: Path, tiny_model_folder: Path, byte_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = folder / "other"
    build_tiny_llama(310, hidden_size=32).save_pretrained(other)
    train_byte_tokenizer(["something else entirely"], vocab_size=290).save_pretrained(other)
    loaded: list[str] = []
    monkeypatch.setattr("rlhf_report.evaluate.run.load_policy", lambda source, dtype: loaded.append(source))
    model = ("--model", f"mine={tiny_model_folder}")
    write_lines(folder / "few.jsonl", [{"prompt": PROMPTS[0], "completion": "x"}])
    write_lines(folder / "chat.jsonl", [{"prompt": [{"role": "user", "content": f"q{i}"}]} for i in range(3)])
    write_lines(folder / "wide.jsonl", [{"prompt": "where " * 600}, {"prompt": "a"}])
    for arguments, part in (
        ((*model, "--reference", str(other)), "tokenizer"),
        ((*model, "--model", "few.jsonl"), "0 completions"),
        ((*model, "--prompts", "chat.jsonl"), "chat template"),
        ((*model, "--prompts", "wide.jsonl"), "--on-bad-row skip"),
        ((*model, "--prompts", "wide.jsonl", "--on-bad-row", "skip"), "fewer than two"),
    ):
        found = run(*arguments, "--output-dir", "out")
        assert found.exit_code == 2 and part in found.output, found.output
    assert not loaded and not Path("out").exists()


def test_with_few_prompts_nothing_can_be_shown(folder: Path) -> None:
    said = run(*FILES, "--judge", "reward.py:length", "--winrate-prompts", "2", "--output-dir", "out")
    assert said.exit_code == 0 and "so few prompts" in said.output and "100% would" not in said.output


def test_rows_that_are_left_out_are_counted(folder: Path) -> None:
    pairs = [{"prompt": "q", "chosen": "aa", "rejected": "b"}] * 2 + [
        {"prompt": "q", "chosen": "a", "rejected": "a"}
    ]
    write_lines(folder / "pairs.jsonl", pairs)
    found = results(*FILES, "--pairs", "pairs.jsonl", "--on-bad-row", "skip")
    assert any("1 rows of pairs.jsonl" in note for note in found["notes"])


@pytest.mark.slow
def test_a_judge_behind_an_api_is_asked_in_both_orders(folder: Path, fake: Any) -> None:
    """It says yes at 90% to whatever stands first: biased, and undecided in the end."""
    yes = fake.completion("yes", {"yes": math.log(0.9), "no": math.log(0.1)})
    with fake.serve(fake.says(yes)) as server:
        line = f"judge:url={server.url},model=m,api_key_env=null,prompt_price=2,completion_price=4"
        found = results(*FILES, "--judge", line)
        [verdicts] = [each["judges"]["judge m"] for each in found["comparisons"]]
        assert verdicts["win_rate"]["estimate"] == 0.5
        assert (verdicts["first_wins"]["estimate"], verdicts["consistency"]["estimate"]) == (1.0, 0.0)
        asked = [text for text in server.texts if "where is mary" in text]
        assert len(asked) == 2 * len(PROMPTS)
        assert not any(name in text for text in asked for name in ("long", "short", "reference"))
        usage = found["usage"]["judge m"]
        assert usage["requests"] == 2 * len(PROMPTS) + 2 and usage["cost"] > 0  # and one pair to try it
        before = len(server.requests)
        assert results(*FILES, "--judge", line)["comparisons"] == found["comparisons"]
        assert len(server.requests) == before  # verdicts and replies are kept


def test_a_judge_that_cannot_be_reached_is_found_before_anything_is_written(
    folder: Path, tiny_model_folder: Path
) -> None:
    line = "judge:url=http://127.0.0.1:9/v1,model=m,api_key_env=null,max_retries=0"
    arguments = ("--model", f"mine={tiny_model_folder}", *FILES[2:], "--judge", line, "--output-dir", "out")
    found = run(*arguments)
    assert found.exit_code == 2 and "127.0.0.1:9" in found.output and "Traceback" not in found.output
    assert not list(Path("out").rglob("completions.jsonl"))


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--model", "none"], "none"),
        (["--model", "=long.jsonl"], "NAME=PATH"),
        (["--model", "long.jsonl", "--reference", "long.jsonl"], "long"),
        (["--model", "long.jsonl", "--judge", "reward.py:length"], "--reference"),
        (["--model", "long.jsonl", "--reference", "short.jsonl", "--judge-labels", "long.jsonl"], "--judge"),
        (["--model", "long.jsonl", "--samples", "2"], "1 completions"),
        (["--model", "long.jsonl", "--reward-model", "nobody/knows"], "nobody/knows"),
        (["--model", "reward.py"], "reward.py"),
    ],
)
def test_bad_input_is_one_sentence(folder: Path, arguments: list[str], part: str) -> None:
    found = run(*arguments, "--output-dir", "out")
    assert (found.exit_code, "Traceback" in found.output) == (2, False)
    assert part in found.output
    assert not Path("out/results.json").exists()


def test_env_files(tmp_path: Path) -> None:
    path = tmp_path / ".env"
    path.write_text("# keys\nexport OPENAI_API_KEY=\"sk-1\"\n\nOPENAI_MODEL='m'\n")
    path.chmod(0o600)
    assert read_env_file(str(path)) == {"OPENAI_API_KEY": "sk-1", "OPENAI_MODEL": "m"}
    for mode, text, part in ((0o644, "A=1", "chmod 600"), (0o600, "no pair", "line 1")):
        path.write_text(text)
        path.chmod(mode)
        with pytest.raises(Exception, match=part):
            read_env_file(str(path))
