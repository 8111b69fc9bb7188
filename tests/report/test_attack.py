"""`rlhf-report attack` run for real: files it writes, rewards, mistakes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from files import read_lines
from rlhf_eval.scoring import Scorer
from rlhf_report import attack
from rlhf_report.cli import main

ROWS = [
    {"prompt": f"where is mary {i} ? hall | shed\nanswer:", "choices": ["hall", "shed"], "answer": i % 2}
    for i in range(4)
]


def call(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["attack", *map(str, arguments)])


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_attacks_are_written_and_the_same_every_time(built_llama_folder: Path, tmp_path: Path) -> None:
    data = write(tmp_path / "rows.jsonl", [*ROWS, {"prompt": "日本 {0} 😀", "answer": "東京"}])
    arguments = (built_llama_folder, data, "--max-new-tokens", 4)
    for name in ("one", "two"):
        result = call(*arguments, "--output-dir", tmp_path / name)
        assert result.exit_code == 0, result.output
        assert "none: 0 of 2" in result.output
    found = json.loads((tmp_path / "one/results.json").read_text())
    assert [each["rows"] for each in found["transforms"]][:2] == [
        5,
        5 - found["transforms"][1]["not_applicable"],
    ]
    rows = read_lines(tmp_path / "one/attacks.jsonl")
    assert len(rows) == sum(each["rows"] for each in found["transforms"])
    assert {"attacked", "before", "after", "succeeded"} <= set(rows[0])
    for name in ("attacks.jsonl", "attack.html", "results.json"):
        again = (tmp_path / "two" / name).read_text().replace(str(tmp_path / "two"), str(tmp_path / "one"))
        assert (tmp_path / "one" / name).read_text() == again


def test_what_comes_twice_or_does_not_fit_is_counted(built_llama_folder: Path, tmp_path: Path) -> None:
    long = {"prompt": "word " * 4000, "answer": "x"}
    data = write(tmp_path / "rows.jsonl", [*ROWS, *ROWS[:2], long])
    result = call(built_llama_folder, data, "--transform", "typos", "--output-dir", tmp_path / "out")
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "out/results.json").read_text())
    assert (found["repeated"], found["left_out"], found["transforms"][0]["rows"]) == (2, 1, 4)
    alone = call(built_llama_folder, write(tmp_path / "long.jsonl", [long]), "--output-dir", tmp_path / "no")
    assert alone.exit_code == 2 and "needs" in alone.output and not (tmp_path / "no").exists()


def test_a_reward_and_one_row(built_llama_folder: Path, tmp_path: Path) -> None:
    data = write(tmp_path / "rows.jsonl", [{"prompt": [{"role": "user", "content": "Say a word."}]}])
    options = ("--reward", "non_empty", "--right-from", "-100", "--transform", "typos")
    result = call(built_llama_folder, data, *options, "--max-new-tokens", 4, "--output-dir", tmp_path / "out")
    assert result.exit_code == 0, result.output
    control, typos = json.loads((tmp_path / "out/results.json").read_text())["transforms"]
    assert control["right_before"] == typos["right_before"] == 1


@pytest.mark.parametrize(
    ("rows", "more", "says"),
    [
        ([ROWS[0] | {"prompt": "a \ud800 b"}], (), "surrogate"),
        ([{"prompt": "a"}], (), "--reward"),
        ([{"text": "some text"}], (), "no prompt to attack"),
        ([], (), "no rows"),
        (ROWS, ("--transform", "rhymes"), "unknown transform rhymes"),
        (ROWS, ("--reward", "non_empty"), "--right-from"),
        (ROWS, ("--right-from", "1"), "--reward"),
        (
            [{"prompt": [{"role": "user", "content": "a"}] * 3}],
            ("--reward", "x", "--right-from", "1"),
            "turns",
        ),
        ([{"prompt": "x " * 9000, "answer": "x"}], (), "context holds"),
    ],
)
def test_mistakes_are_one_sentence(
    rows: list[Any], more: tuple[str, ...], says: str, built_llama_folder: Path, tmp_path: Path
) -> None:
    data = write(tmp_path / "rows.jsonl", rows)
    found = call(built_llama_folder, data, *more, "--output-dir", tmp_path / "out")
    assert found.exit_code == 2 and says in found.stderr, found.output
    assert "Traceback" not in found.stderr and found.stderr.count("Error") == 1
    assert not (tmp_path / "out").exists()


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    found = call(tmp_path / "none", write(tmp_path / "rows.jsonl", ROWS), "--output-dir", tmp_path / "out")
    assert found.exit_code == 2 and str(tmp_path / "none") in found.stderr
    assert not (tmp_path / "out").exists()


def test_a_reward_with_a_chat_template_reads_a_chat_as_the_policy_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Any] = []

    def scores(batch: Any) -> np.ndarray:
        seen.extend(zip(batch.prompts, batch.completions, strict=True))
        return np.ones((1, len(batch.prompts)))

    for reads_chat in (True, False):
        scorer = Scorer("r", scores, reads_chat=reads_chat)
        monkeypatch.setattr(attack, "load_scorer", lambda spec, scorer=scorer: scorer)
        assert list(attack._rated("r", 0.5, {"q": {"answer": "a"}}).reward(["q"], ["said"])) == [1.0]
    chat = ([{"role": "user", "content": "q"}], [{"role": "assistant", "content": "said"}])
    assert seen == [chat, ("q", "said")]
