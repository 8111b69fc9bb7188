"""Whole runs with fewer labels than stories: from the command line, in the dry run and in the report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from rlhf_data import RunFolder
from rlhf_minmax import MinMaxJob
from rlhf_minmax.demo.builder import demo_models, judge_folder, missed_gates, with_judge_of
from rlhf_minmax.game.stories import load_stories
from rlhf_minmax.report.page import write_minmax_report
from small_game import STORIES, plan

TINY = ("demo.pretrain_steps=1", "demo.sft_steps=1", "demo.reward_steps=1", "demo.judge_steps=1")
SMALL = ("game.num_generations=2", "game.num_critiques=2", "training.batch_size=2", "demo.batch_size=4")


def test_the_dry_run_says_share_and_count(quick_plans: None, tmp_path: Path) -> None:
    assert plan()["labels"] == "all 20 training stories"
    found = plan("data.label_share=0.1")["labels"]
    assert found.startswith("2 of 20 training stories (0.1 of them, data.label_share 0.1)")


def test_a_built_judge_learns_from_the_labels_that_are_left(make_config: Any, tmp_path: Path) -> None:
    config = make_config("data.label_share=0.1", *TINY)
    stories, settings = load_stories(config), config.demo_settings()
    more: dict[str, Any] = {"seed": config.seed, "force": True}
    whole = demo_models(stories.building, stories.prompts, settings, cache_folder=tmp_path, **more)
    stages: list[str] = []
    assert stories.judged is not None

    def of_labels(**given: Any) -> Any:
        return with_judge_of(whole, stories.judged or [], stories.prompts, settings, **more, **given)

    few = of_labels(progress=lambda stage, *_: stages.append(stage))
    assert (few.base, few.reward) == (whole.base, whole.reward) and few.judge != whole.judge
    assert few.judge == judge_folder(whole.base.parent, stories.judged) and set(stages) == {"judge"}
    weights = [(models.judge / "model.safetensors").read_bytes() for models in (few, whole)]
    assert weights[0] != weights[1]
    gates = json.loads((few.judge / "gates.json").read_text())
    strict = settings.model_copy(update={"min_judge_accuracy": 1.0, "min_verdict_accuracy": 0.0})
    assert len(missed_gates(few, strict)) == (gates["judge_accuracy"] < 1)
    stages.clear()
    of_labels(progress=lambda stage, *_: stages.append(stage))
    assert stages == []  # kept


@pytest.mark.slow
def test_a_run_with_few_labels_ends_with_a_report_and_repeats(
    make_config: Any, demo_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config("data.label_share=0.05", "training.batch_size=2", "baseline=false", *SMALL)
    for name in ("training_curves", "minmax_figure"):
        monkeypatch.setattr(f"rlhf_minmax.run.minmax_job.{name}", lambda *args: None)
    kept: list[Any] = []
    for name in ("one", "two"):
        run = RunFolder.create(tmp_path / name)
        results = MinMaxJob(config, run, cache_folder=demo_cache).play()
        rows = [
            {k: row[k] for k in row if "time" not in k and "per_second" not in k and "peak" not in k}
            for row in run.read_metrics()
        ]
        kept.append(({k: results[k] for k in ("before", "after", "break_even", "labels")}, rows))
    assert kept[0] == kept[1]
    results, rows = kept[0]
    assert results["labels"] == {"stories": 64, "labelled": 3}
    assert isinstance(results["after"]["policy/accuracy"], float)
    assert results["break_even"]["stories"] + results["break_even"]["left_out"] <= 3
    assert {row["labels/stories"] for row in rows} == {2}
    assert "3 of the 64 training stories" in (tmp_path / "one" / "report.html").read_text()
    whole = json.loads((tmp_path / "one" / "results.json").read_text())
    whole["labels"]["labelled"] = 64
    RunFolder(tmp_path / "one").write_results(whole)
    write_minmax_report(RunFolder(tmp_path / "one"), tmp_path / "all.html")
    assert "of the 64 training stories" not in (tmp_path / "all.html").read_text()


@pytest.mark.slow
def test_rows_without_an_answer_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlhf_train.cli import main

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rows = [json.loads(line) for line in STORIES.read_text(encoding="utf-8").splitlines()]
    train, held_out = rows[: len(rows) * 2 // 3], rows[len(rows) * 2 // 3 :]
    for i, row in enumerate(train):
        if i % 3:
            row["answer"] = None
    files = {"train": train, "eval": held_out, "none": [row | {"answer": None} for row in train]}
    for name, part in files.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))

    def run(name: str, *more: str) -> Any:
        data = ["--train-data", str(tmp_path / f"{name}.jsonl"), "--eval-data", str(tmp_path / "eval.jsonl")]
        sets = [f"--set={each}" for each in (*TINY, *SMALL, "game.w_judge=1.5", "data.probe_stories=4")]
        found = [*data, *sets, "--set=demo.min_evidence_share=0", "--force", "--no-baseline"]
        return CliRunner().invoke(main, ["minmax", *found, "--max-steps", "3", *more])

    played = run("train", "--output-dir", str(tmp_path / "run"))
    assert played.exit_code == 0, (played.output, played.exception)
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    known = sum(row["answer"] is not None for row in train)
    assert results["labels"] == {"stories": len(train), "labelled": known} and 0 < known < len(train)
    refused = run("none", "--output-dir", str(tmp_path / "none"))
    assert refused.exit_code == 2 and not isinstance(refused.exception, ValueError)
