"""Pipelines of quick stages: what runs, what runs again, what is promoted, what an error says."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from proofs import by_default
from quick_pipelines import AGAIN, CHOSEN, DATA, started
from raises import raises_error
from rlhf_algos.pipeline.config import PipelineConfig, Selection
from rlhf_algos.pipeline.kinds import KINDS
from rlhf_algos.pipeline.launch import launch, launcher
from rlhf_algos.pipeline.results import HISTORY
from rlhf_algos.pipeline.runner import Pipeline
from rlhf_data import RunFolder


def test_a_second_run_does_nothing_and_a_change_runs_what_depends_on_it(run: Any, tmp_path: Path) -> None:
    stages = {"data": DATA, "chosen": CHOSEN, "again": AGAIN}
    first = run(stages)
    assert started(first) == ["data", "chosen", "again"]
    manifest = (tmp_path / "run/pipeline.json").read_bytes()
    began = time.monotonic()
    again = run(stages)
    assert started(again) == [] and time.monotonic() - began < 5
    assert (tmp_path / "run/pipeline.json").read_bytes() == manifest
    changed = {**stages, "chosen": {**CHOSEN, "config": {**CHOSEN["config"], "rows": "${data.kto}"}}}
    assert started(run(changed)) == ["chosen", "again"]
    assert started(run(stages)) == []  # the results of before are still there
    renamed = {"data": DATA, "other": CHOSEN}
    assert started(run(renamed)) == []  # a name is no part of what a result is made of


@pytest.mark.slow
def test_a_changed_file_and_a_lost_result_run_again(run: Any, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    row = {"prompt": "a", "completion": "b"}
    rows.write_text(json.dumps(row) + "\n")
    stages = {"chosen": {"kind": "filter", "config": {"rows": str(rows), "to": "sft"}}}
    assert started(run(stages)) == ["chosen"]
    rows.write_text(json.dumps({**row, "completion": "c"}) + "\n")
    second = run(stages)
    assert started(second) == ["chosen"]
    entry = second.store.entries["chosen"]
    left = tmp_path / "run" / entry["folder"] / "rows.jsonl"
    left.unlink()
    assert started(run(stages)) == ["chosen"]
    whole = left.read_bytes()
    left.write_bytes(whole.replace(b"c", b"d"))
    assert started(run(stages)) == ["chosen"] and left.read_bytes() == whole


@pytest.mark.parametrize("change", by_default(["deleted", "changed"], "changed"))
def test_a_result_that_was_changed_is_set_aside_and_made_again(run: Any, tmp_path: Path, change: str) -> None:
    """A stage that is done when its folder is there, as a training is when it has results."""
    first = run({"data": DATA})
    folder = tmp_path / "run" / first.store.entries["data"]["folder"]
    manifest = (tmp_path / "run/pipeline.json").read_bytes()
    rows = folder / "rows" / "kto.jsonl"
    whole = rows.read_bytes()
    if change == "deleted":
        rows.unlink()
    else:
        rows.write_bytes(whole.replace(b"true", b"TRUE", 1))
    for name in (f"{folder.name}.changed", f"{folder.name}.changed1"):  # the older one stays
        left = rows.read_bytes() if rows.exists() else None
        assert started(run({"data": DATA})) == ["data"]
        assert rows.read_bytes() == whole and (tmp_path / "run/pipeline.json").read_bytes() == manifest
        aside = folder.with_name(name) / "rows" / "kto.jsonl"
        assert aside.parent.is_dir() and (aside.read_bytes() if aside.exists() else None) == left
        assert started(run({"data": DATA})) == []
        rows.unlink()


@pytest.mark.parametrize("lost", by_default(["stage.json", "history.jsonl"], "history.jsonl"))
def test_rows_that_nothing_vouches_for_are_set_aside(run: Any, tmp_path: Path, lost: str) -> None:
    """An interrupted stage is resumed only where the history says that it was interrupted."""
    first = run({"data": DATA})
    folder = tmp_path / "run" / first.store.entries["data"]["folder"]
    rows = folder / "rows" / "kto.jsonl"
    whole = rows.read_bytes()
    rows.write_bytes(whole.replace(b"true", b"TRUE", 1))
    (folder / "stage.json").unlink()
    if lost == "history.jsonl":
        (tmp_path / "run" / lost).unlink()
    again = run({"data": DATA})
    assert ("changed", "data") in again.told and rows.read_bytes() == whole
    assert (folder.with_name(f"{folder.name}.changed") / "rows" / "kto.jsonl").read_bytes() != whole


def test_an_interrupted_stage_goes_on_where_it_was(run: Any, tmp_path: Path) -> None:
    first = run({"data": DATA})
    folder = tmp_path / "run" / first.store.entries["data"]["folder"]
    history = tmp_path / "run/history.jsonl"
    history.write_text("".join(history.read_text().splitlines(keepends=True)[:1]))
    (folder / "stage.json").unlink()
    written = (folder / "rows" / "kto.jsonl").stat().st_mtime_ns
    again = run({"data": DATA})
    assert started(again) == ["data"] and ("changed", "data") not in again.told
    assert (folder / "rows" / "kto.jsonl").stat().st_mtime_ns == written


@pytest.mark.parametrize(
    "text", by_default(["{}", "[]", "null", '{"address": "x", "outputs": []}', "{"], "{}", "{")
)
def test_a_result_whose_description_is_damaged_is_refused(run: Any, tmp_path: Path, text: str) -> None:
    folder = tmp_path / "run" / run({"data": DATA}).store.entries["data"]["folder"]
    stage = folder / "stage.json"
    if '"x"' in text:
        text = text.replace('"x"', json.dumps(json.loads(stage.read_text())["address"]))
    stage.write_text(text)
    with raises_error("damaged_file"):
        run({"data": DATA})


def test_selected_stages_need_the_results_of_the_others(run: Any) -> None:
    stages = {"data": DATA, "chosen": CHOSEN, "again": AGAIN}
    with raises_error("missing_result", stage="data"):
        run(stages, Selection(("chosen",)))
    assert started(run(stages, Selection(until="chosen"))) == ["data", "chosen"]
    assert started(run(stages, Selection(start="again"))) == ["again"]
    with raises_error("unknown_stage", stage="choosen"):
        run(stages, Selection(("choosen",)))


def test_a_plan_runs_nothing(run: Any, tmp_path: Path) -> None:
    stages = {"data": DATA, "chosen": CHOSEN, "again": AGAIN}
    pipeline = Pipeline(PipelineConfig.from_dict({"stages": stages}), tmp_path / "run")
    assert [state for _, state, _ in pipeline.plan()] == ["to run"] * 3
    assert not (tmp_path / "run").exists()
    run(stages, Selection(until="chosen"))
    assert [state for _, state, _ in pipeline.plan()] == ["done", "done", "to run"]


def test_a_stage_that_fails_says_why_and_is_tried_again(run: Any, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a"}\n')
    stages = {"chosen": {"kind": "filter", "config": {"rows": str(rows), "to": "sft"}, "retries": 1}}
    with raises_error("stage_failed", stage="chosen", exit_code=2):
        run(stages)
    history = [json.loads(line) for line in (tmp_path / "run/history.jsonl").read_text().splitlines()]
    assert [row["event"] for row in history] == ["started", "failed", "failed"]
    manifest = json.loads((tmp_path / "run/pipeline.json").read_text())
    assert manifest["stages"]["chosen"]["status"] == "failed"


@pytest.mark.parametrize(
    ("stages", "code"),
    [
        ({"tune": {}}, "unknown_kind"),
        ({"sft": {"config": {"train_data": "${data.sft}"}}}, "invalid_value"),
        ({"data": {}, "sft": {"config": {"train_data": "${data.sft"}}}, "invalid_reference"),
        ({"sft": {}, "dpo": {"config": {"model_name_or_path": "${sft.last}"}}}, "invalid_value"),
        ({"data": {"launch": 2}}, "invalid_value"),
        ({"data": {"gates": []}}, "invalid_value"),
        ({"gate": {"config": {"candidate": "a", "measured": "b"}}}, "invalid_value"),
        ({"data": {"promotes": "policy"}}, "invalid_value"),
        ({"Data": {"kind": "data"}}, "invalid_value"),
        ({"data": {"confg": {}}}, "unknown_key"),
        ({}, "invalid_value"),
    ],
)
def test_wrong_settings_are_refused(stages: dict[str, Any], code: str) -> None:
    with raises_error(code):
        PipelineConfig.from_dict({"stages": stages})


TEXTS = {"rows": "a", "model": "b"}


@pytest.mark.parametrize(
    ("stage", "code"),
    [
        ({"kind": "sft", "config": {"lerning_rate": 1}}, "unknown_key"),
        ({"kind": "data", "config": {"row": 1}}, "unknown_key"),
        ({"kind": "refine", "config": {"prompts": "a", "model": "b", "n": 2}}, "unknown_key"),
        ({"kind": "compress", "config": TEXTS | {"question_key": "q"}}, "invalid_value"),
        ({"kind": "compress", "config": TEXTS | {"ratio": 2}}, "no_question"),
        ({"kind": "compress", "config": TEXTS | {"ratio": 0.5, "method": "surprisal"}}, "invalid_value"),
        ({"kind": "compress", "config": TEXTS | {"ratio": 2, "n": 2}}, "unknown_key"),
        ({"kind": "generate", "config": {"prompts": "a"}}, "missing_key"),
        ({"kind": "filter", "config": {"rows": "a", "to": "dpo"}}, "invalid_value"),
        ({"kind": "serve", "config": {"prompts": "a", "model": "b", "rows": 0}}, "invalid_value"),
        ({"kind": "serve", "config": {"prompts": "a", "model": "b", "max_tokens": "many"}}, "invalid_value"),
        ({"kind": "serve", "config": {"prompts": "a", "model": "b", "n": 4}}, "invalid_value"),
    ],
)
def test_settings_of_stages_are_refused_before_anything_runs(
    stage: dict[str, Any], code: str, tmp_path: Path
) -> None:
    pipeline = Pipeline(PipelineConfig.from_dict({"stages": {"data": DATA, "it": stage}}), tmp_path / "run")
    with raises_error(code):
        pipeline.run()
    assert not (tmp_path / "run").exists()


def test_a_missing_package_is_found_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serving = replace(KINDS["serve"], packages={"rlhf_nowhere": "rlhf-nowhere"})
    monkeypatch.setitem(KINDS, "serve", serving)
    stages = {"data": DATA, "it": {"kind": "serve", "config": {"model": "a", "prompts": "b"}}}
    with raises_error("missing_package", package="rlhf_nowhere"):
        Pipeline(PipelineConfig.from_dict({"stages": stages}), tmp_path / "run").run()
    assert not (tmp_path / "run").exists()


def test_launchers() -> None:
    assert launcher(None) == [sys.executable, "-m"]
    assert launcher(2)[1:] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
    assert launcher("accelerate launch --num-processes 2")[-2:] == ["2", "-m"]


def test_keys_of_generate_are_settings_of_rlhf_serve() -> None:
    from rlhf_serve.settings import BatchSettings

    assert set(KINDS["generate"].allowed or ()) - {"prompts"} <= BatchSettings.model_fields.keys()


def test_a_stage_ends_when_its_pipeline_is_killed(tmp_path: Path) -> None:
    """kill -9 of the pipeline: its guard ends the stage, and holds the lock until it has."""
    from rlhf_algos.pipeline import child

    beat = tmp_path / "beat"
    stage = f"import time\nwhile True:\n    open({str(beat)!r}, 'a').write('x')\n    time.sleep(0.05)"
    guard = [
        sys.executable,
        child.__file__,
        str(tmp_path / "lock"),
        str(tmp_path / "log"),
        sys.executable,
        "-c",
        stage,
    ]
    code = "import subprocess as s, sys; s.Popen(sys.argv[1:], stdin=s.PIPE, start_new_session=True).wait()"
    pipeline = subprocess.Popen([sys.executable, "-c", code, *guard])
    _until(lambda: beat.exists() and beat.stat().st_size > 2)
    os.kill(pipeline.pid, signal.SIGKILL)
    pipeline.wait()
    next_guard = [*guard[:4], sys.executable, "-c", "print('next')"]
    with subprocess.Popen(next_guard, stdin=subprocess.PIPE) as following:  # which waits for the lock
        assert following.wait(timeout=60) == 0
    size = beat.stat().st_size
    time.sleep(0.3)
    assert beat.stat().st_size == size
    assert (tmp_path / "log").read_text() == "next\n"


@pytest.mark.slow
def test_a_stage_waits_for_what_a_killed_pipeline_has_left(run: Any, tmp_path: Path) -> None:
    """A stage's process that is slow to end still writes what decides whether the stage is continued."""
    folder = tmp_path / "run" / run({"data": DATA}).store.entries["data"]["folder"]
    [address] = {
        row["address"] for row in RunFolder(tmp_path / "run").read_lines(HISTORY) if "address" in row
    }
    shutil.rmtree(tmp_path / "run")
    folder.mkdir(parents=True)
    late = (
        "import fcntl, pathlib, sys, time\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "held = (folder / 'lock').open('a')\n"
        "fcntl.flock(held, fcntl.LOCK_EX)\n"
        "(folder / 'holds').touch()\n"
        "time.sleep(2)\n"
        "(folder / 'late').touch()\n"
    )
    seen, told = list[bool](), list[str]()

    def launched(stage: Any, settings: dict[str, Any], there: Path) -> int:
        seen.append((there / "late").exists())
        return launch(stage, settings, there)

    with subprocess.Popen([sys.executable, "-c", late, str(folder)]):
        _until((folder / "holds").exists)
        config = PipelineConfig.from_dict({"stages": {"data": DATA}})
        pipeline = Pipeline(config, tmp_path / "run", lambda event, *_: told.append(event), launched)
        pipeline.store.log("started", "data", address=address)
        pipeline.run()
    assert seen == [True] and told == ["waiting", "started", "finished"]


def _until(condition: Any) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)
