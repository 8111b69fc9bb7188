"""`rlhf-report errors` on files: what it writes, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from files import read_json, read_lines, write_lines
from rlhf_report.cli import main

LENGTH = "def length(completions, **columns):\n    return [len(each) / 10 for each in completions]\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reward.py").write_text(LENGTH)
    rows = [
        {"prompt": f"q{i}", "chosen": "a" * (5 + i % 7), "rejected": "b" * (5 + i % 5), "source": "xy"[i % 2]}
        for i in range(60)
    ]
    write_lines(tmp_path / "pairs.jsonl", rows)
    return tmp_path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["errors", *arguments])


def report(*arguments: str) -> dict[str, Any]:
    result = run("--reward", "reward.py:length", "--data", "pairs.jsonl", "--output-dir", "out", *arguments)
    assert result.exit_code == 0, result.output
    return read_json("out/errors.json")


def test_a_reward_of_length_is_reported_as_one(folder):
    results = report("--slice", "source", "--examples", "3")
    rows = read_lines("pairs.jsonl")
    differences = [len(row["chosen"]) - len(row["rejected"]) for row in rows]
    right = sum(0.5 if d == 0 else d > 0 for d in differences)
    assert results["accuracy"]["estimate"] == right / 60
    assert results["length"]["spearman"] == pytest.approx(1, abs=0.01)  # scores are fp32
    assert {"length"} <= {found["name"] for found in results["findings"] if found["problem"]}
    assert set(results["slices"]["source"]) == {"x", "y"}
    assert set(results["flips"]) and all(each["rows"] == 60 for each in results["flips"].values())
    cases = read_lines(folder / "out" / "cases.jsonl")
    assert all(case["chosen_score"] <= case["rejected_score"] for case in cases)
    assert [case["kind"] for case in cases].count("most confident") == 3
    assert "It rewards length" in (folder / "out" / "errors.html").read_text()
    assert (folder / "out" / "error_analysis_plots.png").read_bytes().startswith(b"\x89PNG")


def test_a_baseline_and_the_best_of_n(folder):
    (folder / "other.py").write_text(
        "def none(completions, **columns):\n    return [0.0] * len(completions)\n"
    )
    write_lines(folder / "many.jsonl", [{"prompt": "q", "completions": ["a", "aa", "aaa", "aaaa"]}])
    results = report(
        *("--baseline-model", "other.py:none"),
        *("--completions", "many.jsonl", "--held-out-reward", "length:target=1,unit=characters"),
    )
    # The other reward ties everywhere: half of the pairs.
    assert results["baseline"]["accuracy"]["estimate"] == 0.5
    assert results["baseline"]["difference"]["estimate"] == pytest.approx(
        results["accuracy"]["estimate"] - 0.5
    )
    assert [row["n"] for row in results["best_of_n"]] == [1, 2, 4]
    gold = [row["gold"] for row in results["best_of_n"]]
    assert gold == sorted(gold, reverse=True)  # the longest is the farthest from one character


def test_texts_of_rows_cannot_change_the_page(folder):
    evil = "<script>alert(1)</script>"
    write_lines(folder / "pairs.jsonl", [{"prompt": evil, "chosen": "a", "rejected": evil}] * 12)
    report()
    page = (folder / "out" / "errors.html").read_text()
    assert "<script>alert" not in page and "&lt;script&gt;alert" in page


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--data", "none.jsonl"], ["none.jsonl"]),
        (["--data", "pairs.jsonl", "--slice", "color"], ["row 1", "color", "source"]),
        (["--data", "pairs.jsonl", "--columns", "chosen"], ["NAME=COLUMN"]),
        (["--data", "pairs.jsonl", "--held-out-reward", "length:target=1"], ["--completions"]),
        (["--data", "pairs.jsonl", "--output-dir", "."], ["not empty"]),
    ],
)
def test_bad_input_is_one_sentence_and_leaves_nothing(folder, arguments, parts):
    before = {path.name for path in folder.iterdir()}
    result = run("--reward", "reward.py:length", *arguments)
    assert result.exit_code == 2
    assert all(part in result.output for part in parts), result.output
    assert "Traceback" not in result.output
    # Python may keep what it compiled of the user's module.
    assert {path.name for path in folder.iterdir()} - {"__pycache__"} == before


def test_an_unknown_reward_is_refused(folder):
    result = run("--reward", "nobody/knows", "--data", "pairs.jsonl")
    assert (result.exit_code, "Traceback" in result.output) == (2, False)
    assert "nobody/knows" in result.output


def test_a_rule_that_counts_tokens_is_refused_for_texts(folder):
    result = run("--reward", "length:target=200", "--data", "pairs.jsonl", "--output-dir", "out")
    assert (result.exit_code, "Traceback" in result.output) == (2, False)
    assert "tokens" in result.output
    assert not Path("out").exists()


def rows_of_candidates() -> list[dict[str, Any]]:
    """Math: the length reward is right in every prompt. Focus: in none. Ties: one whole pair."""
    rows = []
    for i in range(12):
        for subset, right, wrong in (("Math", "a" * 9, "b" * 3), ("Focus", "a" * 3, "b" * 9)):
            more = {"num_correct": 1, "num_incorrect": 3, "subset": subset, "source": "xy"[i % 2]}
            rows.append({"id": f"{i}", "prompt": f"q{i}", "chosen": [right], "rejected": [wrong] * 3} | more)
    for kind, right in (("ref", ["red sky"]), ("tied", ["red sky", "big sea"])):
        rows.append({"id": f"{kind}:1", "prompt": "q", "chosen": right, "rejected": ["no"], "source": "x"})
        rows[-1]["subset"] = "Ties"
    return rows


def test_prompts_with_several_completions_are_scored_by_subset(folder):
    write_lines(folder / "pairs.jsonl", rows_of_candidates())
    results = report("--slice", "source", "--examples", "2")
    subsets = results["subsets"]
    assert {name: entry["estimate"] for name, entry in subsets.items()} == {
        # The score of Ties: .3 + .3 + .2 + .2 + .01 (no spread and a gap: tanh is 1).
        **{"Math": 1.0, "Focus": 0.0, "Ties": pytest.approx(1.01)}
    }
    assert subsets["Math"]["chance"] == 0.25
    assert results["mean_over_subsets"]["estimate"] == pytest.approx(2.01 / 3)
    assert set(results["slices"]["source"]) == {"x", "y"}
    cases = read_lines(folder / "out" / "cases.jsonl")
    assert [case["groups"]["subset"] for case in cases] == ["Focus"] * 4
    for name in ("errors.html", "errors.txt"):
        assert all(subset in (folder / "out" / name).read_text() for subset in subsets)


def test_scores_may_stand_in_the_rows(folder):
    rows = [
        row | {"scores": [[1.0], [0], [0.5], [2]]} for row in rows_of_candidates() if row["subset"] == "Math"
    ]
    write_lines(folder / "pairs.jsonl", rows)
    result = run("--data", "pairs.jsonl", "--output-dir", "out")
    assert result.exit_code == 0, result.output
    results = read_json("out/errors.json")
    assert results["subsets"]["Math"]["estimate"] == 0.0  # the last one is the highest


def test_lists_of_one_and_one_are_pairs(folder):
    rows = [{"prompt": f"q{i}", "chosen": ["aa"], "rejected": ["b"]} for i in range(20)]
    write_lines(folder / "pairs.jsonl", rows)
    assert report()["accuracy"]["estimate"] == 1.0


def test_several_completions_have_a_baseline_and_a_best_of_n(folder):
    write_lines(folder / "pairs.jsonl", [row for row in rows_of_candidates() if row["subset"] != "Ties"])
    write_lines(folder / "many.jsonl", [{"prompt": "q", "completions": ["a", "aa", "aaa", "aaaa"]}])
    results = report(
        *("--baseline-model", "length:target=1,unit=characters"),
        *("--completions", "many.jsonl", "--held-out-reward", "length:target=1,unit=characters"),
    )
    # Each is right where the other is wrong: where the right completion is the longest, and elsewhere.
    assert results["baseline"]["difference"]["estimate"] == 0.0
    assert [row["n"] for row in results["best_of_n"]] == [1, 2, 4]


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"chosen": []}, ["line 3", "chosen"]),
        ({"rejected": ["b", " "]}, ["line 3", "rejected"]),
        ({"prompt": " "}, ["line 3", "prompt"]),
        ({"num_correct": 2}, ["line 3", "chosen", "2"]),
        ({"subset": "Ties"}, ["line 3", "id", "tied:N"]),
    ],
)
def test_a_bad_row_of_several_completions_is_named_or_skipped(folder, change, parts):
    rows = rows_of_candidates()
    rows[2] |= change
    write_lines(folder / "pairs.jsonl", rows)
    result = run("--reward", "reward.py:length", "--data", "pairs.jsonl", "--output-dir", "out")
    assert result.exit_code == 2 and "Traceback" not in result.output
    assert all(part in result.output for part in parts), result.output
    assert not Path("out").exists()
    assert report("--on-bad-row", "skip")["rows"] == len(rows) - 1


@pytest.mark.parametrize(
    ("rows", "arguments", "part"),
    [
        ([{"prompt": "q", "chosen": "a", "rejected": "b"}], [], "--reward-model"),
        ([{"prompt": "q", "chosen": ["a"], "rejected": ["b", "c"]}], [], "--reward-model"),
        ([{"prompt": "q", "chosen": ["a"], "rejected": ["b"], "scores": [1]}], [], "scores"),
        ([{"prompt": "q", "chosen": ["a"], "rejected": ["b"], "scores": [1, None]}], [], "scores"),
        (rows_of_candidates(), ["--reward", "reward.py:length", "--columns", "margin=x"], "margin"),
        (rows_of_candidates()[-1:], ["--reward", "reward.py:length"], "counterpart"),
    ],
)
def test_what_cannot_be_scored_is_refused(folder, rows, arguments, part):
    write_lines(folder / "pairs.jsonl", rows)
    result = run("--data", "pairs.jsonl", "--output-dir", "out", *arguments)
    assert (result.exit_code, "Traceback" in result.output) == (2, False)
    assert part in result.output
    assert not Path("out").exists()
