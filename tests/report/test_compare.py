"""`rlhf-report compare` on files of every kind it reads, and what it refuses."""

from __future__ import annotations

import gzip
import json
import math
import random
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from imports import imported_by
from rlhf_report.cli import main

DATA = Path(__file__).parents[3] / "shared" / "data" / "alpaca_eval"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="the AlpacaEval files are not there")
BASELINE = DATA / "gpt4_1106_preview.jsonl.gz"


@pytest.fixture
def compare(tmp_path: Path) -> Callable[..., tuple[Result, dict[str, Any]]]:
    """Calls the command; its result, and comparison.json where it was written."""

    def call(*arguments: Any) -> tuple[Result, dict[str, Any]]:
        folder = tmp_path / "out"
        result = CliRunner().invoke(main, ["compare", *map(str, arguments), "--output-dir", str(folder)])
        written = folder / "comparison.json"
        return result, json.loads(written.read_text()) if written.exists() else {}

    return call


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(gzip.compress(lines.encode()) if path.suffix == ".gz" else lines.encode())
    return path


def rows_of(shift: float, count: int = 60, **more: Any) -> list[dict[str, Any]]:
    rng = random.Random(0)
    return [
        {"prompt": f"question {i}", "completion": f"text {i}", "score": rng.gauss(0, 1) + shift, **more}
        for i in range(count)
    ]


def noisy(rows: list[dict[str, Any]], seed: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    return [row | {"score": row["score"] + rng.gauss(0, 0.5)} for row in rows]


def test_a_better_model_is_called_better(tmp_path: Path, compare) -> None:
    old = write(tmp_path / "old.jsonl", noisy(rows_of(0), 1))
    new = write(tmp_path / "new.jsonl.gz", noisy(rows_of(0.6), 2))
    result, found = compare(old, new)
    assert result.exit_code == 0, result.output
    (pair,) = found["pairs"]
    assert (pair["first"], pair["second"], found["metric"], found["prompts"]) == ("new", "old", "score", 60)
    assert pair["difference"]["low"] > 0 and pair["holm"] < 0.05 and pair["difference"]["unit"] == "prompt"
    assert pair["wins"] + pair["ties"] + pair["losses"] == 60
    assert "new is better than old by" in result.stdout
    assert f"<code>rlhf-report compare {old} {new} " in (tmp_path / "out" / "comparison.html").read_text()
    text = (tmp_path / "out" / "comparison.txt").read_text()
    assert "new is better than old by" in text and "won/tied/lost" in text
    assert len(found["cases"]) == 8 and found["cases"][0]["won"] and not found["cases"][-1]["won"]
    assert found["cases"][0]["answers"][0]["output"].startswith("text")


def test_chance_is_called_chance(tmp_path: Path, compare) -> None:
    files = [
        write(tmp_path / f"{name}.jsonl", noisy(rows_of(0), seed)) for seed, name in enumerate("abc", 20)
    ]
    result, found = compare(*files)
    assert "All pairwise intervals include zero: the ranking is not decisive." in result.stdout
    assert len(found["pairs"]) == 3 and all(pair["detectable"] > 0 for pair in found["pairs"])


def test_rows_are_joined_by_prompt_and_what_is_not_is_said(tmp_path: Path, compare) -> None:
    first = rows_of(0, 20)
    second = [*reversed(rows_of(1, 15)), {"prompt": "question 3", "completion": "no score"}]
    result, found = compare(write(tmp_path / "a.jsonl", first), write(tmp_path / "b.jsonl", second))
    assert result.exit_code == 0 and found["prompts"] == 15
    files = {file["name"]: file for file in found["files"]}
    assert files["a"]["unmatched_prompts"] == 5 and files["b"]["rows_without_metric"] == 1
    # Paired row by row the difference is 1 everywhere; without spread it has no interval.
    assert found["pairs"][0]["difference"]["estimate"] == pytest.approx(1)
    assert found["pairs"][0]["difference"]["low"] is None
    assert "zero" not in result.stdout and "b and a differ by 1 on every prompt." in result.stdout


def test_several_rows_of_a_prompt_count_with_their_mean(tmp_path: Path, compare) -> None:
    a = [{"prompt": str(i), "correct": value} for i in range(10) for value in (True, False)]
    b = [{"prompt": str(i), "correct": i == 0} for i in range(10)]
    _, found = compare(write(tmp_path / "a.jsonl", a), write(tmp_path / "b.jsonl", b))
    models = {model["name"]: model["mean"] for model in found["models"]}
    assert models["a"]["estimate"] == 0.5 and models["a"]["n"] == 10
    assert models["b"]["estimate"] == pytest.approx(0.1) and models["b"]["method"].startswith("Wilson")


def test_clusters_widen_and_slices_are_counted(tmp_path: Path, compare) -> None:
    rng = random.Random(3)
    effects = [rng.gauss(0, 1) for _ in range(12)]
    a = [row | {"topic": i // 10} for i, row in enumerate(rows_of(0, 120))]
    b = [row | {"score": row["score"] + effects[i // 10] + rng.gauss(0, 0.1)} for i, row in enumerate(a)]
    files = write(tmp_path / "a.jsonl", a), write(tmp_path / "b.jsonl", b)
    _, plain = compare(*files)
    _, found = compare(*files, "--cluster", "topic", "--slice", "topic")
    width = {
        name: each["pairs"][0]["difference"]["high"] - each["pairs"][0]["difference"]["low"]
        for name, each in (("plain", plain), ("topic", found))
    }
    assert width["topic"] > 2 * width["plain"]
    assert found["pairs"][0]["difference"]["n"] == 12 and found["pairs"][0]["difference"]["unit"] == "topic"
    assert [entry["prompts"] for entry in found["slices"]] == [10] * 12


def test_less_can_be_better(tmp_path: Path, compare) -> None:
    files = write(tmp_path / "a.jsonl", rows_of(0)), write(tmp_path / "b.jsonl", noisy(rows_of(2), 1))
    _, found = compare(*files, "--lower-is-better")
    assert found["models"][0]["name"] == "a" and found["pairs"][0]["difference"]["estimate"] > 1
    assert found["models"][0]["mean"]["estimate"] < found["models"][1]["mean"]["estimate"]


def test_true_and_false_beside_a_share_is_said_and_beside_a_reward_is_refused(
    tmp_path: Path, compare
) -> None:
    def scored(name: str, score: Any) -> Path:
        return write(tmp_path / name, [{"prompt": f"q{i}", "score": score(i)} for i in range(20)])

    right = scored("right.jsonl", lambda i: i % 2 == 0)
    result, found = compare(right, scored("share.jsonl", lambda i: i / 40))
    assert [file["scores"] for file in found["files"]] == ["verdicts", "numbers"]
    assert "score is true or false in right" in result.stdout
    result, found = compare(right, scored("zeros.jsonl", lambda i: float(i % 3 == 0)))
    assert found["files"][1]["scores"] == "either" and "true or false" not in result.stdout
    result, _ = compare(right, scored("reward.jsonl", lambda i: i / 4 - 1))
    assert result.exit_code == 2 and "right" in result.stderr and "reward" in result.stderr
    assert "Traceback" not in result.output


def test_samples_of_lm_eval_are_read(tmp_path: Path, compare) -> None:
    def sample(i: int, right: bool, filter: str = "none") -> dict[str, Any]:
        return {
            "doc_id": i,
            "doc": {"question": f"q{i}"},
            "arguments": {"gen_args_0": {"arg_0": f"Question: q{i}", "arg_1": {}}},
            "resps": [[f"answer {i}"]],
            "filtered_resps": [f"answer {i}"],
            "filter": filter,
            "metrics": ["exact_match"],
            "exact_match": float(right),
        }

    a = [sample(i, i % 2 == 0, name) for i in range(40) for name in ("strict", "flexible")]
    b = [sample(i, i % 4 == 0) for i in range(40)]
    result, found = compare(write(tmp_path / "a.jsonl", a), write(tmp_path / "b.jsonl", b))
    assert result.exit_code == 0, result.output
    assert found["metric"] == "exact_match" and found["prompts"] == 40
    assert found["pairs"][0]["sign_test"] == pytest.approx(2 * 0.5**10)  # 10 gains, no loss
    assert found["cases"][0]["prompt"] == "Question: q2"


def test_logs_of_inspect_are_read(tmp_path: Path, compare) -> None:
    def sample(i: int, grade: str) -> dict[str, Any]:
        return {
            "id": i,
            "epoch": 1,
            "input": f"q{i}",
            "output": {"completion": f"answer {i}"},
            "scores": {"match": {"value": grade}},
        }

    (tmp_path / "a.json").write_text(
        json.dumps(
            {"version": 2, "eval": {"model": "m"}, "samples": [sample(i, "CPIN"[i % 4]) for i in range(8)]}
        )
    )
    with zipfile.ZipFile(tmp_path / "b.eval", "w") as archive:
        archive.writestr("header.json", "{}")
        for i in range(8):
            archive.writestr(f"samples/{i}_epoch_1.json", json.dumps(sample(i, "I")))
    result, found = compare(tmp_path / "a.json", tmp_path / "b.eval")
    assert result.exit_code == 0, result.output
    assert found["models"][0]["mean"]["estimate"] == pytest.approx(1.5 / 4) and found["metric"] == "match"


def test_one_file_of_preferences_is_compared_with_its_baseline(tmp_path: Path, compare) -> None:
    rows = [
        {
            "instruction": f"q{i}",
            "output_1": "short",
            "output_2": "longer " * (1 + i % 5),
            "preference": 1 + (i % 4 > 0),
        }
        for i in range(80)
    ]
    result, found = compare(write(tmp_path / "new.jsonl", rows))
    assert result.exit_code == 0, result.output
    assert found["models"][0]["mean"]["estimate"] == 0.75
    assert "It is better than what it was compared with." in result.stdout
    assert found["models"][0]["controlled"]["length"]["method"].startswith("logistic")


@pytest.mark.slow
@needs_data
def test_alpaca_eval_is_what_is_published(tmp_path: Path, compare) -> None:
    published = json.loads((DATA / "published.json").read_text())
    result, found = compare(*(DATA / f"{name}.jsonl.gz" for name in published), "--baseline", BASELINE)
    assert result.exit_code == 0, result.output
    for model in found["models"]:
        mean, expected = model["mean"], published[model["name"]]
        assert 100 * mean["estimate"] == pytest.approx(expected["win_rate"], abs=0.01)
        assert 100 * mean["standard_error"] == pytest.approx(expected["standard_error"], abs=0.01)
        # The leaderboard counts characters a little differently.
        assert model["mean_characters"] == pytest.approx(expected["avg_length"], abs=2)
    assert "Not decided: vicuna-7b and alpaca-farm-ppo-human." in result.stdout
    page = (tmp_path / "out" / "comparison.html").read_text()
    assert page.count("<svg") == 2 and "At equal length and style" in page


def test_texts_are_escaped_and_nothing_is_loaded(tmp_path: Path, compare) -> None:
    evil = "</pre><script>alert(1)</script><img src=http://x>\ud800"
    a = [row | {"completion": evil, "prompt": row["prompt"] + evil} for row in rows_of(1)]
    b = [row | {"prompt": row["prompt"] + evil} for row in noisy(rows_of(0), 1)]
    result, _ = compare(f"<i>new</i>={write(tmp_path / 'a.jsonl', a)}", write(tmp_path / "b.jsonl", b))
    assert result.exit_code == 0, (result.output, result.exception)
    page = (tmp_path / "out" / "comparison.html").read_text()
    assert "&lt;script&gt;alert(1)" in page and "<script>alert" not in page and "<img" not in page
    assert "<i>new" not in page and "http://x>" not in page.replace("http://x&gt;", "")
    assert "default-src 'none'" in page and "script-src 'sha256-" in page


@pytest.mark.parametrize(
    ("rows", "arguments"),
    [
        ([{"completion": "no prompt", "score": 1}], []),
        ([{"prompt": "a", "score": 1}, {"prompt": "b", "score": 1}], ["--metric", "reward"]),
        ([{"prompt": "elsewhere", "score": 1}], []),
        ([{"prompt": "question 1", "score": 1}], []),
        ([{"prompt": "question 1", "score": 1}, {"prompt": "question 2", "score": 1}], ["--slice", "topic"]),
        ([{"prompt": "question 1", "first": 1, "second": 2}], []),
        (
            [{"prompt": f"question {i}", "preference": 7} for i in range(3)],
            ["--metric", "preference"],
        ),
    ],
)
def test_what_cannot_be_compared_is_refused(tmp_path: Path, compare, rows, arguments) -> None:
    good = write(tmp_path / "good.jsonl", rows_of(0, 5, preference=1))
    result, found = compare(good, write(tmp_path / "bad.jsonl", rows), *arguments)
    assert result.exit_code == 2 and result.stderr.startswith("Error: ") and result.stderr.count("\n") == 1
    assert found == {} and not (tmp_path / "out").exists()


def test_files_are_told_apart(tmp_path: Path, compare) -> None:
    good = write(tmp_path / "good.jsonl", rows_of(0, 5))
    for files in ([good], [good, good], [good, tmp_path / "missing.jsonl"]):
        result, _ = compare(*files)
        assert result.exit_code == 2
    (tmp_path / "broken.eval").write_bytes(b"no zip")
    result, _ = compare(good, tmp_path / "broken.eval")
    assert result.exit_code == 2 and "broken.eval" in result.stderr
    result, found = compare(f"one={good}", f"two={good}")
    assert result.exit_code == 0 and {model["name"] for model in found["models"]} == {"one", "two"}
    assert not math.isnan(found["pairs"][0]["holm"])


def test_torch_is_not_loaded(tmp_path: Path) -> None:
    files = [str(write(tmp_path / f"{name}.jsonl", noisy(rows_of(0), 1))) for name in "ab"]
    arguments = ["compare", *files, "--output-dir", str(tmp_path / "out")]
    code = f"from rlhf_report.cli import main; main({arguments!r}, standalone_mode=False)"
    assert imported_by(code, ("torch", "transformers", "scipy", "sklearn")) == []
