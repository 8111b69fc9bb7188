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

from raises import raises_error
from rlhf_algos.pipeline import results
from rlhf_algos.pipeline.config import PipelineConfig, Selection
from rlhf_algos.pipeline.kinds import KINDS
from rlhf_algos.pipeline.launch import launcher
from rlhf_algos.pipeline.runner import Pipeline

DATA = {"config": {"rows": 8}}
CHOSEN = {"kind": "filter", "config": {"rows": "${data.sft}", "to": "sft"}}
LABELLED = {"kind": "filter", "config": {"rows": "${chosen.rows}", "to": "kto"}}


@pytest.fixture
def run(tmp_path: Path):
    """Runs a pipeline of these stages in one folder; the pipeline, with the events it told."""

    def start(stages: dict[str, Any], selection: Selection | None = None, **values: Any) -> Any:
        told: list[tuple[str, str]] = []
        config = PipelineConfig.from_dict({"stages": stages, **values})
        pipeline = Pipeline(config, tmp_path / "run", lambda event, stage, text: told.append((event, stage)))
        pipeline.told = told  # type: ignore[attr-defined]
        pipeline.run(selection)
        return pipeline

    return start


def started(pipeline: Any) -> list[str]:
    return [stage for event, stage in pipeline.told if event == "started"]


def report(folder: Path, **suites: list[float]) -> str:
    """A report of capability suites."""
    folder.mkdir(parents=True)
    rows = [
        {"suite": suite, "id": str(i), "score": score}
        for suite, values in suites.items()
        for i, score in enumerate(values)
    ]
    (folder / "items.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


def gate(measured: str, start: str, candidate: str = "${chosen}", **fields: Any) -> dict[str, Any]:
    return {
        "config": {"candidate": candidate, "measured": measured, "start": start},
        "gates": [{"metric": "suites", "against": "previous", "margin": 0.05}],
        "promotes": "policy",
        **fields,
    }


def test_a_second_run_does_nothing_and_a_change_runs_what_depends_on_it(run: Any, tmp_path: Path) -> None:
    stages = {"data": DATA, "chosen": CHOSEN, "labelled": LABELLED}
    first = run(stages)
    assert started(first) == ["data", "chosen", "labelled"]
    manifest = (tmp_path / "run/pipeline.json").read_bytes()
    began = time.monotonic()
    again = run(stages)
    assert started(again) == [] and time.monotonic() - began < 5
    assert (tmp_path / "run/pipeline.json").read_bytes() == manifest
    changed = {**stages, "chosen": {**CHOSEN, "config": {**CHOSEN["config"], "top_share": 0.5}}}
    assert started(run(changed)) == ["chosen", "labelled"]
    assert started(run(stages)) == []  # the results of before are still there
    renamed = {"data": DATA, "other": CHOSEN}
    assert started(run(renamed)) == []  # a name is no part of what a result is made of


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


@pytest.mark.parametrize("change", ["deleted", "changed"])
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


@pytest.mark.parametrize("lost", ["stage.json", "history.jsonl"])
def test_rows_that_nothing_vouches_for_are_set_aside(run: Any, tmp_path: Path, lost: str) -> None:
    """What an interrupted stage left is gone on with only where the history says that it was interrupted."""
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


@pytest.mark.parametrize("text", ["{}", "[]", "null", '{"address": "x", "outputs": []}', "{"])
def test_a_result_whose_description_is_damaged_is_refused(run: Any, tmp_path: Path, text: str) -> None:
    folder = tmp_path / "run" / run({"data": DATA}).store.entries["data"]["folder"]
    stage = folder / "stage.json"
    if '"x"' in text:
        text = text.replace('"x"', json.dumps(json.loads(stage.read_text())["address"]))
    stage.write_text(text)
    with raises_error("damaged_file"):
        run({"data": DATA})


def test_a_gate_that_passes_promotes_and_one_that_fails_leaves_what_was_current(
    run: Any, tmp_path: Path
) -> None:
    good, bad = [1.0] * 400, [1.0] * 200 + [0.0] * 200
    before = report(tmp_path / "before", sums=good)
    same, worse = report(tmp_path / "same", sums=good), report(tmp_path / "worse", sums=bad)
    stages = {
        "data": DATA,
        "chosen": CHOSEN,
        "first": {"kind": "gate", **gate(same, before)},
        "labelled": LABELLED,
        "second": {"kind": "gate", **gate(worse, before, "${labelled}", on_failure="rollback")},
        "after": {"kind": "filter", "config": {"rows": "${current.policy}/rows.jsonl", "to": "sft"}},
    }
    pipeline = run(stages)
    root, entries = tmp_path / "run", pipeline.store.entries
    assert [entries[name]["decision"] for name in ("first", "second")] == ["accepted", "rejected"]
    current = json.loads((root / "pipeline.json").read_text())["current"]["policy"]
    assert current["stage"] == "first" and current["artefact"]["path"] == entries["chosen"]["folder"]
    assert (root / "current/policy").resolve() == (root / entries["chosen"]["folder"]).resolve()
    assert entries["after"]["inputs"] == {"${current.policy}": entries["chosen"]["address"]}
    (reason,) = (root / "rejected").glob("second-*/reason.json")
    assert json.loads(reason.read_text())["candidate"]["path"] == entries["labelled"]["folder"]
    assert (root / entries["labelled"]["folder"] / "rows.jsonl").exists()  # rejected, and kept
    (root / "current/policy").unlink()  # as a copy leaves it that follows links
    shutil.copytree(root / entries["chosen"]["folder"], root / "current/policy")
    with raises_error("not_a_link", path=str(root / "current/policy")):
        run(stages)
    shutil.rmtree(root / "current/policy")
    stopped = run({**stages, "second": {**stages["second"], "on_failure": "stop"}})
    assert stopped.stopped and stopped.store.entries["after"] == {"kind": "filter", "status": "skipped"}


def test_an_open_gate_rejects_unless_it_is_told_to_accept(run: Any, tmp_path: Path) -> None:
    start, few = report(tmp_path / "start", sums=[1, 0, 1, 0]), report(tmp_path / "few", sums=[1, 0, 0, 1])
    stages = {"data": DATA, "chosen": CHOSEN, "gate": gate(few, start)}
    assert run(stages).store.entries["gate"]["decision"] == "rejected"
    (reason,) = (tmp_path / "run/rejected").glob("gate-*/reason.json")
    assert json.loads(reason.read_text())["outcome"] == "inconclusive"
    accepting = run({**stages, "gate": gate(few, start, on_inconclusive="accept")})
    assert accepting.store.entries["gate"]["decision"] == "accepted"


def test_ratings_of_a_canary_are_judged_again_when_there_are_more(run: Any, tmp_path: Path) -> None:
    def rate(name: str, liked: int, disliked: int) -> str:
        rows = [{"prompt": "p", "completion": "c", "label": i < liked} for i in range(liked + disliked)]
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(tmp_path / name)

    known = rate("policy.jsonl", 700, 300)
    canary = {
        "kind": "gate",
        "config": {"candidate": "${chosen}", "measured": rate("canary.jsonl", 14, 6), "start": known},
        "gates": [{"metric": "rating", "against": "start", "margin": 0.1}],
        "promotes": "policy",
    }
    stages = {"data": DATA, "chosen": CHOSEN, "canary": canary}
    (tmp_path / "canary.jsonl").write_text("")  # as the server begins it
    assert run(stages).store.entries["canary"]["metrics"]["outcome"] == "inconclusive"
    rate("canary.jsonl", 14, 6)
    first = run(stages)
    assert first.store.entries["canary"]["metrics"]["outcome"] == "inconclusive"
    assert "policy" not in first.store.current
    rate("canary.jsonl", 280, 120)
    again = run(stages)
    assert started(again) == ["canary"] and "policy" in again.store.current
    rate("canary.jsonl", 280, 420)  # a verdict that changes takes the role away again
    assert "policy" not in run(stages).store.held
    assert not (tmp_path / "run/current/policy").is_symlink()


def test_a_promotion_that_is_withdrawn_gives_the_role_back(run: Any, tmp_path: Path) -> None:
    """The second round's model is accepted, then rejected: the first round's has the role, not the start."""
    good, bad = report(tmp_path / "good", sums=[1.0] * 400), report(tmp_path / "bad", sums=[0.0] * 400)
    base = {"data": DATA, "chosen": CHOSEN, "start": {"kind": "gate", **gate(good, good)}}
    one = {"kind": "filter", "config": {"rows": "${data.sft}", "to": "sft", "top_share": 1.0}}
    two = {"kind": "filter", "config": {"rows": "${data.sft}", "to": "sft", "top_share": 0.5}}
    first = run({**base, "made": one, "canary": {"kind": "gate", **gate(good, good, "${made}")}})
    promoted = first.store.held["policy"]
    assert promoted.stage == "canary"
    second = run({**base, "made": two, "canary": {"kind": "gate", **gate(good, good, "${made}")}})
    assert second.store.held["policy"].artefact != promoted.artefact
    withdrawn = run({**base, "made": two, "canary": {"kind": "gate", **gate(bad, good, "${made}")}})
    assert withdrawn.store.held["policy"] == promoted
    assert (tmp_path / "run/current/policy").resolve() == Path(
        withdrawn.store.path(promoted.artefact)
    ).resolve()


def test_a_round_that_has_not_decided_leaves_the_role_to_who_has_it(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two gates promote to one role; a later run finds both results, or has the second to decide."""
    good, bad = report(tmp_path / "good", sums=[1.0] * 400), report(tmp_path / "bad", sums=[0.0] * 400)
    link = tmp_path / "run/current/policy"
    seen: list[str] = []
    point = results._point

    def watched(where: Path, target: str) -> None:
        point(where, target)
        seen.append(os.path.realpath(where))

    monkeypatch.setattr(results, "_point", watched)
    stages = {
        "data": DATA,
        "chosen": CHOSEN,
        "labelled": LABELLED,
        "first": {"kind": "gate", **gate(good, good)},
        "gate": gate(good, good, "${labelled}"),
    }
    run(stages)
    promoted = link.resolve()
    assert "labelled" in json.loads((tmp_path / "run/pipeline.json").read_text())["stages"]
    seen.clear()
    before = (tmp_path / "run/pipeline.json").read_bytes()
    again = run(stages)
    assert started(again) == [] and set(seen) == {str(promoted)}
    assert (tmp_path / "run/pipeline.json").read_bytes() == before
    seen.clear()
    rejected = run({**stages, "gate": gate(bad, good, "${data.sft}")})  # another candidate, a new verdict
    assert rejected.store.entries["gate"]["decision"] == "rejected"
    assert set(seen) == {str(promoted)} and link.resolve() == promoted
    run({**stages, "first": {"kind": "gate", **gate(good, good, "${labelled}")}, "gate": gate(good, good)})
    assert link.resolve() == again.root.joinpath(again.store.entries["chosen"]["folder"]).resolve()


def test_a_loop_has_rounds_until_a_gate_ends_them(run: Any, tmp_path: Path) -> None:
    good = report(tmp_path / "good", sums=[1.0] * 400)
    bad = report(tmp_path / "bad-2", sums=[0.0] * 400)
    os.symlink(good, tmp_path / "bad-1")
    os.symlink(bad, tmp_path / "bad-3")
    drawn = {"kind": "filter", "config": {"rows": "${data.sft}", "to": "sft", "min_score": "${round}"}}
    drawn["config"]["min_score"] = -1
    loop = {
        "rounds": 3,
        "stages": {
            "drawn": {**drawn, "config": {**drawn["config"], "top_share": 1.0}},
            "gate": gate(f"{tmp_path}/bad-${{round}}", good, "${drawn}"),
        },
    }
    pipeline = run({"data": DATA, "loop": loop, "last": {**CHOSEN, "needs": ["loop-1-drawn"]}})
    entries = pipeline.store.entries
    assert [entries[f"loop-{i}-gate"].get("decision") for i in (1, 2, 3)] == ["accepted", "rejected", None]
    assert entries["loop-3-drawn"]["status"] == "skipped" and entries["last"]["status"] == "done"
    assert pipeline.store.current["policy"].stage == "loop-1-gate" and not pipeline.stopped


def test_selected_stages_need_the_results_of_the_others(run: Any) -> None:
    stages = {"data": DATA, "chosen": CHOSEN, "labelled": LABELLED}
    with raises_error("missing_result", stage="data"):
        run(stages, Selection(("chosen",)))
    assert started(run(stages, Selection(until="chosen"))) == ["data", "chosen"]
    assert started(run(stages, Selection(start="labelled"))) == ["labelled"]
    with raises_error("unknown_stage", stage="choosen"):
        run(stages, Selection(("choosen",)))


def test_a_plan_runs_nothing(run: Any, tmp_path: Path) -> None:
    stages = {"data": DATA, "chosen": CHOSEN, "labelled": LABELLED}
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


def _until(condition: Any) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)
