"""`rlhf-report prepare`, as it is called."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from raises import raises_error
from rlhf_data import load_records, write_dummy_data
from rlhf_data.preprocessing.output import as_row
from rlhf_report.cli import main
from rlhf_report.prepare.page import prepare_page
from rlhf_report.prepare.run import run_prepare

TALK = "\n\nHuman: one two three\n\nAssistant: four\n\nHuman: five <b>\n\nAssistant:"


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    rows = [{"prompt": f"{i} {TALK}", "chosen": f" yes {i}", "rejected": " no"} for i in range(30)]
    rows += [{"prompt": "p", "chosen": a, "rejected": b} for a, b in (("Same.", "same."), ("", "b"))]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def call(*arguments: Any) -> Any:
    return CliRunner().invoke(main, ["prepare", *map(str, arguments)])


def test_the_folder_has_what_training_takes_and_a_page_that_shows_it(pairs: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = call(pairs, "--out", out, "--max-length", 8, "--eval-fraction", 0.2)
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in out.iterdir()) == [
        *("dropped.jsonl", "eval.jsonl", "report.html", "report.json", "train.jsonl"),
    ]
    train = load_records(out / "train.jsonl", "preference").records
    assert len(train) == 24
    assert train[0].prompt.endswith("Human: five <b>\n\nAssistant:")
    assert "one" not in train[0].prompt
    report = json.loads((out / "report.json").read_text())
    assert report["left_out"] == {"empty": 1, "tie": 1}
    assert [place.rpartition(", ")[2] for place in report["shown"]["dropped"]["tie"]] == ["line 31"]
    page = (out / "report.html").read_text()
    assert "<del" in page
    assert "five &lt;b&gt;" in page
    assert "<b>" not in page.split("<style>")[1].split("</style>")[1]
    assert "http://" not in page
    assert "https://" not in page
    assert "30 had turns or words taken out" in result.output
    again = call(pairs, "--out", out)
    assert again.exit_code == 2
    assert again.output.count("\n") == 1
    assert call(pairs, "--out", out, "--overwrite").exit_code == 0
    (out / "report.json").write_text("{}")
    assert call(pairs, "--out", out, "--overwrite").exit_code == 2


def test_a_dry_run_writes_nothing(pairs: Path, tmp_path: Path) -> None:
    result = call(pairs, "--dry-run", "--out", tmp_path / "out")
    assert result.exit_code == 0
    assert "32 rows were read, 2 left out" in result.output
    assert not (tmp_path / "out").exists()


def test_settings_come_from_a_file_and_options_are_before_it(pairs: Path, tmp_path: Path) -> None:
    config = tmp_path / "rules.yaml"
    config.write_text("eval_fraction: 0.5\nseed: 7\n")
    assert call(pairs, "--out", tmp_path / "out", "--config", config, "--seed", 8).exit_code == 0
    settings = json.loads((tmp_path / "out" / "report.json").read_text())["settings"]
    assert (settings["eval_fraction"], settings["seed"]) == (0.5, 8)


GIVEN: dict[str, Any] = {
    **dict.fromkeys(("out", "config", "kind", "source_column", "tokenizer", "truncation", "margins")),
    **dict.fromkeys(("columns", "against"), ()),
    **{"on_bad_row": "error", "dry_run": False, "overwrite": False},
}


@pytest.mark.parametrize(
    ("code", "given"),
    [
        ("missing_option", {}),
        ("file_not_found", {"dry_run": True, "data": ("none.jsonl",)}),
        ("file_not_found", {"dry_run": True, "against": ("none.jsonl",)}),
        ("file_not_found", {"dry_run": True, "kind": "preference", "data": ("none.jsonl",)}),
        ("invalid_value", {"dry_run": True, "truncation": "right"}),
        ("invalid_value", {"dry_run": True, "kind": "prompt", "margins": "similarity"}),
        ("invalid_option", {"dry_run": True, "columns": ("chosen",)}),
        ("unknown_column", {"dry_run": True, "columns": ("winner=chosen",)}),
    ],
)
def test_what_cannot_be_is_refused(pairs: Path, code: str, given: dict[str, Any]) -> None:
    with raises_error(code):
        run_prepare(GIVEN | {"data": (str(pairs),)} | given)


def test_a_refused_setting_is_blamed_on_what_it_was_given_with(pairs: Path, tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("strata: 5")
    given = (pairs, "--out", tmp_path / "out", "--config", config)
    assert call(*given, "--eval-fraction", "2").stderr.startswith("Error: --eval-fraction: ")
    config.write_text("eval_fraction: 2")
    assert call(*given, "--strata", "5").stderr.startswith(f"Error: {config}: ")


def test_rows_with_other_columns_are_known_by_their_usual_names(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"broken\n' + json.dumps({"prompt": "p", "better": "a", "worse": "b"}) + "\n")
    columns = ("--columns", "chosen=better", "--columns", "rejected=worse")
    assert call(path, "--out", tmp_path / "out", *columns).exit_code == 2
    assert call(path, "--out", tmp_path / "out", *columns, "--on-bad-row", "skip").exit_code == 0
    assert json.loads((tmp_path / "out" / "train.jsonl").read_text())["chosen"] == "a"
    path.write_text("{\n")
    with raises_error("invalid_json"):
        run_prepare(GIVEN | {"data": (str(path),), "dry_run": True})


def test_a_page_without_changes_or_held_out_rows(pairs: Path, tmp_path: Path) -> None:
    assert call(pairs, "--out", tmp_path / "out", "--eval-fraction", 0).exit_code == 0
    assert not (tmp_path / "out" / "eval.jsonl").exists()
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    report |= {"shown": {"dropped": {}, "changed": []}, "left_out": {}}
    page = prepare_page(report)
    assert "No row is held out" in page
    assert "No row was left out" in page


@pytest.mark.parametrize("form", ["helpsteer3", "conversational", "hh", "ultrafeedback", "pku_saferlhf"])
def test_what_it_writes_of_any_form_it_reads_again(form: str, tmp_path: Path) -> None:
    write_dummy_data(tmp_path / "data", rows=12)
    source = tmp_path / "data" / "forms" / f"preference-{form}.jsonl"
    out = tmp_path / "out"
    assert call(source, "--out", out, "--eval-fraction", 0).exit_code == 0
    first, again = (
        {repr(as_row(record)) for record in load_records(path, "preference").records}
        for path in (source, out / "train.jsonl")
    )
    assert again == first


def test_a_column_that_is_named_must_be_there(pairs: Path, tmp_path: Path) -> None:
    for named in (["prompt=nowhere"], ["prompt=p", "--columns", "prompt=q"], ["prompt=[a, b]"], ["prompt"]):
        result = call(pairs, "--out", tmp_path / "out", "--columns", *named)
        assert result.exit_code == 2 and result.output.count("\n") == 1
        assert not (tmp_path / "out").exists()


def test_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    with raises_error("not_a_file"):
        run_prepare(GIVEN | {"data": (str(tmp_path / "pipe.jsonl"),), "dry_run": True})


def test_of_two_that_write_one_folder_the_second_is_told(
    pairs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, page = tmp_path / "out", prepare_page

    def meanwhile(found: Any) -> str:
        monkeypatch.setattr("rlhf_report.prepare.run.prepare_page", page)
        assert call(pairs, "--out", out, "--eval-fraction", 0).exit_code == 0
        return page(found)

    monkeypatch.setattr("rlhf_report.prepare.run.prepare_page", meanwhile)
    result = call(pairs, "--out", out)
    assert result.exit_code == 2 and not (out / "eval.jsonl").exists()
    assert [path.name for path in tmp_path.iterdir() if ".tmp-" in path.name] == []
