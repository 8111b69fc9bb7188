"""`rlhf-report explore` on files: what it writes, what it reads, and what it refuses."""

from __future__ import annotations

import csv
import gzip
import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result
from tests.eval.exploration.planted import words

from rlhf_report.cli import main

WRITTEN = {"report.html", "exploration.json", "findings.jsonl", "samples.jsonl", "pairs.parquet"}
FIGURES = {
    *("length_distribution.png", "length_difference.png", "conversation_depth.png"),
    *("length_vs_preference.png", "phrases.png", "shortcuts.png"),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for module in ("rlhf_report.explore.run", "rlhf_eval.exploration.page"):
        monkeypatch.setattr(f"{module}.can_draw", lambda: False)  # figures take seconds
    return tmp_path


def rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    return [
        {
            "prompt": f"question {seed} {i}",
            "chosen": words(rng, 5 + rng.randint(0, 2)),
            "rejected": words(rng, 6),
        }
        for i in range(count)
    ]


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["explore", *arguments])


def explored(*arguments: str) -> dict[str, Any]:
    result = run(*arguments, "--output-dir", "out")
    assert result.exit_code == 0, result.output
    assert {path.name for path in Path("out").iterdir()} == WRITTEN
    return json.loads(Path("out/exploration.json").read_text())


def findings() -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path("out/findings.jsonl").read_text().splitlines()]


def test_a_file_becomes_a_page_numbers_findings_and_a_table(folder):
    evil = "<script>alert(1)</script>"
    write_rows(folder / "pairs.jsonl", [*rows(60), {"prompt": evil, "chosen": "", "rejected": evil}])
    results = explored("pairs.jsonl", "--samples", "3")
    assert (results["pairs"], results["sets"], results["skipped_rows"]) == (61, ["pairs.jsonl"], 0)
    assert findings() == [
        {
            **{"file": "pairs.jsonl", "line": 61, "rule": "empty_completion", "severity": "error"},
            "detail": "a completion is empty",
        }
    ]
    page = Path("out/report.html").read_text()
    assert "<script" not in page and "&lt;script&gt;alert" in page
    assert not re.search(r"(?:src|href)=[\"'](?!data:)", page) and "url(" not in page
    samples = [json.loads(line) for line in Path("out/samples.jsonl").read_text().splitlines()]
    assert {sample["kind"] for sample in samples} == {"random", "empty", "longest"}
    assert next(each["rejected"] for each in samples if each["kind"] == "empty") == evil
    table = pq.read_table("out/pairs.parquet").to_pylist()
    assert len(table) == 61 and table[60]["rules"] == "empty_completion" and table[60]["chosen"] == ""
    assert table[0]["rejected_words"] == 6 and table[0]["file"] == "pairs.jsonl" and table[0]["line"] == 1


def test_shards_are_one_set_and_two_sets_are_searched_for_leaks(folder):
    first, second = rows(40, 1), rows(40, 2)
    second[7] = first[3]
    write_rows(folder / "shards" / "a.jsonl.gz", first[:20])
    write_rows(folder / "shards" / "b.jsonl.gz", first[20:])
    write_rows(folder / "test.jsonl", second)
    results = explored("shards/*.gz", "test.jsonl")
    assert results["sets"] == ["shards/*.gz", "test.jsonl"] and len(results["files"]) == 3
    leak = next(each for each in results["leaks"] if each["set"] == 1)
    assert (leak["prompts"], leak["whole_rows"]) == (1, 1)
    found = {each["rule"]: each for each in findings() if each["file"] == "test.jsonl"}
    assert found["prompt_in_another_set"]["line"] == 8
    assert found["prompt_in_another_set"]["detail"].endswith("shards/a.jsonl.gz, line 4")


def test_near_duplicates_are_found_by_their_words(folder):
    base = rows(30, 3)
    long = words(random.Random(4), 60)
    base[4] = {"prompt": long, "chosen": f"{long} yes", "rejected": f"{long} no"}
    base[9] = {"prompt": f"{long} please", "chosen": f"{long} No!", "rejected": f"{long} yes"}
    write_rows(folder / "pairs.jsonl", base)
    explored("pairs.jsonl")
    near = [each for each in findings() if each["rule"].startswith("near_dup")]
    assert [(each["rule"], each["line"]) for each in near] == [
        ("near_duplicate_row", 10),
        ("near_duplicate_prompt", 10),
    ]
    assert near[0]["detail"].endswith("pairs.jsonl, line 5")


def test_csv_other_columns_and_bad_rows(folder):
    with open("pairs.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["question", "better", "worse"])
        writer.writerows([row["prompt"], row["chosen"], row["rejected"]] for row in rows(25, 5))
        writer.writerow(["one value"])
    named = [f"--columns={name}" for name in ("prompt=question", "chosen=better", "rejected=worse")]
    refused = run("pairs.csv", *named)
    assert refused.exit_code == 2 and "--on-bad-row skip" in refused.output
    results = explored("pairs.csv", *named, "--on-bad-row", "skip", "--subset-size", "20")
    assert (results["pairs"], results["skipped_rows"]) == (20, 0)  # the bad row comes later
    printed = run("pairs.csv", *named, "--on-bad-row", "skip", "--json", "--output-dir", "all")
    assert json.loads(printed.output)["skipped_rows"] == 1
    assert json.loads(Path("all/findings.jsonl").read_text().splitlines()[0])["rule"] == "bad_row"


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "q", "chosen": "a", "rejected": "b"},
        {"prompt": "q", "chosen": "", "rejected": ""},
        {"prompt": "什么是机器学习？", "chosen": "机器学习是人工智能的一个分支。", "rejected": "我不知道。"},
        {"prompt": "ما هو؟", "chosen": "هذا هو الجواب", "rejected": "لا أعرف"},
    ],
)
@pytest.mark.parametrize("count", [1, 25])
def test_few_rows_and_other_scripts(folder, row, count):
    write_rows(folder / "pairs.jsonl", [row] * count)
    results = explored("pairs.jsonl")
    assert results["pairs"] == count and results["prompts"] == 1
    assert results["label_noise"]["suspected"] == 0


@pytest.mark.slow
def test_every_figure_is_drawn_also_of_little_and_of_other_scripts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    chinese = {"prompt": "什么是机器学习？", "chosen": "机器学习是人工智能", "rejected": "我不知道。"}
    write_rows(tmp_path / "pairs.jsonl", [chinese | {"source": "a $5 web"}] * 12)
    result = run("pairs.jsonl", "--by", "source", "--output-dir", "out")
    assert result.exit_code == 0, result.output
    assert {path.name for path in Path("out").iterdir()} == WRITTEN | FIGURES | {"by_1.png"}
    page = Path("out/report.html").read_text()
    assert page.count("data:image/svg+xml") == len(FIGURES) + 1
    assert not re.search(r"(?:src|href)=[\"'](?!data:)", page)


def test_without_data_the_story_world_is_explored(folder, monkeypatch):
    monkeypatch.setattr("rlhf_report.explore.read._STORIES", 200)
    results = explored()
    assert results["sets"] == ["story world"] and results["pairs"] == 200
    assert len(results["phrases"]["anywhere"]["phrases"]) == 0  # right and wrong answers name the same places


def test_sources_are_told_apart(folder):
    pairs = rows(60, 9)
    for number, row in enumerate(pairs):
        row |= {"source": "web" if number < 30 else "books" if number < 57 else f"rare {number}", "topic": ""}
        if number < 30:
            row["chosen"] = f"{row['rejected']} and more"
    pairs[40]["topic"] = ["a", "b"]
    write_rows(folder / "pairs.jsonl", pairs)
    source, topic = explored("pairs.jsonl", "--by", "source", "--by", "topic")["by"]
    assert [(each["value"], each["pairs"]) for each in source["values"]] == [
        *(("web", 30), ("books", 27), ("other", 3))
    ]
    assert source["pooled"] == 3 and source["values"][0]["longer_where_they_differ"]["estimate"] == 1
    assert [(each["value"], each["pairs"]) for each in topic["values"]] == [("(none)", 59), ('["a", "b"]', 1)]
    (found,) = source["comparisons"]  # too few books are of unequal length to be compared
    assert (found["value"], found["measure"], found["inside"]["yes"]) == ("web", "longer", 30)
    page = Path("out/report.html").read_text()
    assert "By source" in page and "source = web" in page and "3 values are pooled" in page


def test_columns_that_change_the_meaning_and_are_not_read_are_said(folder):
    pairs = rows(20, 10)
    for row in pairs[:7]:
        row["system"] = "Answer in verse."
    pairs[8]["weight"] = 3.0
    prompt = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hello"}]
    answers = {side: [{"role": "assistant", "content": side}] for side in ("chosen", "rejected")}
    write_rows(folder / "pairs.jsonl", [*pairs, {"system": "Be kind.", "prompt": prompt, **answers}])
    results = explored("pairs.jsonl")
    assert results["unread_columns"] == {"system": 7, "weight": 1}
    told = [each["name"] for each in results["findings"]]
    assert told.count("unread column") == 2 and "few prompts" in told


def test_equal_arguments_give_equal_numbers(folder):
    write_rows(folder / "pairs.jsonl", rows(80, 6))
    first = explored("pairs.jsonl", "--seed", "3")
    again = run("pairs.jsonl", "--seed", "3", "--json", "--output-dir", "again")
    assert json.loads(again.output) == first


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["none.jsonl"], ["none.jsonl", "does not exist"]),
        (["none*.jsonl"], ["none*.jsonl"]),
        (["sft.jsonl"], ["sft.jsonl, line 1", "chosen", "missing"]),
        (["empty.jsonl"], ["empty.jsonl", "no rows"]),
        (["pairs.jsonl", "--columns", "better"], ["NAME=COLUMN"]),
        (["pairs.jsonl", "--columns", "margin=x"], ["NAME=COLUMN"]),
        (["pairs.jsonl", "pairs.jsonl"], ["named twice"]),
        (["sft.jsonl", "--on-bad-row", "skip"], ["sft.jsonl", "bad", "chosen"]),
        (["pairs.jsonl", "--output-dir", "."], ["not empty"]),
        (["pairs.jsonl", "--by", "promt"], ["--by promt", "perhaps prompt"]),
        (["--by", "source"], ["--by source", "no row"]),
        (["kto.jsonl"], ["kto.jsonl, line 1", "KTO"]),
    ],
)
def test_bad_input_is_one_sentence_and_leaves_nothing(folder, arguments, parts):
    write_rows(folder / "pairs.jsonl", rows(5))
    write_rows(folder / "sft.jsonl", [{"prompt": "a", "completion": "b"}])
    write_rows(folder / "kto.jsonl", [{"prompt": "a", "completion": "b", "kto_tag": True}])
    (folder / "empty.jsonl").write_text("")
    before = {path.name for path in folder.iterdir()}
    result = run(*arguments)
    assert result.exit_code == 2 and "Traceback" not in result.output
    assert all(part in result.output for part in parts), result.output
    assert len(result.output.strip().splitlines()) == 1 and "--resume" not in result.output
    assert {path.name for path in folder.iterdir()} - {"outputs"} == before
    assert not list((folder / "outputs").glob("*"))


@pytest.mark.slow
def test_processes_give_what_one_gives(folder, monkeypatch):
    write_rows(folder / "pairs.jsonl", rows(9000, 7))
    first = explored("pairs.jsonl")
    monkeypatch.setattr("rlhf_report.explore.read._SERIAL_CHUNKS", 100)
    monkeypatch.setattr("rlhf_report.explore.run._FEW_PAIRS", 10_000)
    alone = run("pairs.jsonl", "--json", "--output-dir", "alone")
    assert json.loads(alone.output) == first


@pytest.mark.slow
def test_tokens_are_those_of_the_tokenizer(folder):
    model = Path(__file__).parents[3] / "shared" / "data" / "stories260k"
    if not model.exists():
        pytest.skip("the shared data in ../shared/data is missing")
    from rlhf_models import load_tokenizer

    write_rows(folder / "pairs.jsonl", rows(20, 8))
    found = explored("pairs.jsonl", "--tokenizer", str(model))["lengths"]["tokens"]["chosen"]
    tokenizer = load_tokenizer(model)
    counts = [len(tokenizer(row["chosen"], add_special_tokens=False)["input_ids"]) for row in rows(20, 8)]
    assert (found["n"], found["max"]) == (20, max(counts))
    assert found["mean"] == pytest.approx(sum(counts) / 20)
