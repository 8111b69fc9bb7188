"""What a gate compares its candidate with: what has the role now, in later runs too."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from quick_pipelines import DATA, SCORED, gate, report, started
from rlhf_algos.pipeline.config import PipelineConfig, Selection, Stage
from rlhf_algos.pipeline.launch import launch
from rlhf_algos.pipeline.runner import Pipeline

BETTER = [{"metric": "sums", "against": "previous", "op": ">", "threshold": 0}]

MARGIN = {"metric": "sums", "margin": 0.1}


def stages(share: float, measured: str, start: str) -> dict[str, Any]:
    """A model by its share of rows, and a gate that asks for more than what has the role."""
    made = {"kind": "filter", "config": {"rows": SCORED, "to": "sft", "top_share": share}}
    judged = gate(measured, start, "${made}", gates=BETTER, on_failure="rollback")
    return {"made": made, "gate": judged}


def right(share: float) -> list[float]:
    """Scores of 400 rows."""
    return [1.0] * round(400 * share) + [0.0] * (400 - round(400 * share))


def events(pipeline: Any) -> list[str]:
    return _roles(pipeline.told)


def _roles(told: list[tuple[str, str]]) -> list[str]:
    return [event for event, _ in told if event in ("promoted", "rejected", "withdrawn")]


def previous(pipeline: Any) -> Any:
    """Reports that the gate compared with."""
    folder = pipeline.root / pipeline.store.entries["gate"]["folder"]
    return json.loads((folder / "settings.json").read_text())["previous"]


@pytest.mark.slow
def test_a_later_run_is_judged_against_what_has_the_role(run: Any, tmp_path: Path) -> None:
    """Not against the start, as the one after it: half as good as the holder is better than the start."""
    shares = {"start": 0.1, "good": 0.8, "half": 0.5, "best": 0.95}
    reports = {name: report(tmp_path / name, sums=right(share)) for name, share in shares.items()}
    config = {name: stages(shares[name], reports[name], reports["start"]) for name in reports}
    good = run(config["good"])
    assert (events(good), previous(good)) == (["promoted"], [reports["start"]])
    for work in (["made", "gate"], []):  # the same again does nothing
        half = run(config["half"])
        assert started(half) == work and events(half) == ["rejected"] and previous(half) == [reports["good"]]
        assert half.store.held == good.store.held
    again = run(config["good"])
    assert started(again) == [] and events(again) == [] and previous(again) == [reports["start"]]
    best = run(config["best"])
    assert (events(best), previous(best)) == (["promoted"], [reports["good"]])
    back = run(config["good"])  # its test against the start does not count against the best
    assert (started(back), events(back), previous(back)) == (["gate"], ["rejected"], [reports["best"]])
    assert back.store.held == best.store.held


@pytest.mark.slow
@pytest.mark.parametrize("before", [None, "canary"])
def test_a_gate_that_begins_to_give_a_role_judges_anew(run: Any, tmp_path: Path, before: str | None) -> None:
    """Its verdict was against the start, or what had another role; now a better model has this one."""
    shares = {"start": 0.1, "good": 0.9, "half": 0.5}
    reports = {name: report(tmp_path / name, sums=right(share)) for name, share in shares.items()}
    config = {name: stages(shares[name], reports[name], reports["start"]) for name in reports}
    half = config["half"]
    named = {"kind": "gate", **half["gate"]}
    quiet = {"made": half["made"], "look": named | {"promotes": before}}
    loud = {"made": half["made"], "look": named}
    run(quiet)
    good = run(config["good"])
    later = run(loud)
    assert events(later) == ["rejected"] and later.store.held["policy"] == good.store.held["policy"]
    assert started(run(loud)) == []


@pytest.mark.slow
def test_a_role_with_another_name_is_given(run: Any, tmp_path: Path) -> None:
    reports = {name: report(tmp_path / name, sums=right(share)) for name, share in (("a", 0.1), ("b", 0.5))}
    config = stages(0.5, reports["b"], reports["a"])
    assert events(run(config)) == ["promoted"]
    renamed = run(config | {"gate": config["gate"] | {"promotes": "best"}})
    assert events(renamed) == ["promoted"]
    assert renamed.store.held["best"].artefact == renamed.store.held["policy"].artefact


@pytest.mark.slow
def test_a_report_that_was_overwritten_is_not_the_holders(run: Any, tmp_path: Path) -> None:
    start, now = report(tmp_path / "start", sums=right(0.1)), report(tmp_path / "now", sums=right(0.9))
    assert events(run(stages(0.9, now, start))) == ["promoted"]
    shutil.rmtree(now)
    report(tmp_path / "now", sums=right(0.5))
    later = run(stages(0.5, now, start))
    assert previous(later) == [start]
    settings = later.root / later.store.entries["gate"]["folder"] / "settings.json"
    assert "has changed" in json.loads(settings.read_text())["note"]


@pytest.mark.slow
def test_rounds_with_nothing_changed_are_not_judged_again(run: Any, tmp_path: Path) -> None:
    """The first two compared with less than what has the role in the end."""
    start = report(tmp_path / "start", sums=right(0.1))
    for number, share in enumerate((0.5, 0.2, 0.9), 1):
        report(tmp_path / f"measured-{number}", sums=right(share))
    drawn = {"kind": "filter", "config": {"rows": SCORED, "to": "sft", "top_share": "0.${round}"}}
    judged = gate(f"{tmp_path}/measured-${{round}}", start, "${drawn}", gates=BETTER, on_failure="rollback")
    loop = {"loop": {"rounds": 3, "stages": {"drawn": drawn, "gate": judged}}}
    first = run(loop)
    assert events(first) == ["promoted", "rejected", "promoted"]
    manifest = (tmp_path / "run/pipeline.json").read_bytes()
    again = run(loop)
    assert started(again) == [] and events(again) == ["rejected"]
    known = json.loads(manifest)
    del known["judged"]  # as earlier versions wrote it
    (tmp_path / "run/pipeline.json").write_text(json.dumps(known))
    assert started(run(loop)) == []
    assert (tmp_path / "run/pipeline.json").read_bytes() == manifest
    drawn["config"]["top_share"] = "0.${round}5"  # rounds of another config against the last one's winner
    judged["config"]["measured"] = f"{tmp_path}/changed-${{round}}"
    for number, share in enumerate((0.7, 0.95, 0.99), 1):
        report(tmp_path / f"changed-{number}", sums=right(share))
    for work in (6, 0):
        changed = run(loop)
        assert len(started(changed)) == work
        decisions = [changed.store.entries[f"loop-{i}-gate"]["decision"] for i in (1, 2, 3)]
        assert decisions == ["rejected", "accepted", "accepted"]
        assert changed.store.held["policy"].stage == "loop-3-gate"


@pytest.mark.slow
@pytest.mark.parametrize("change", ["rows", "gone"])
def test_a_report_that_cannot_be_compared_gives_way_to_the_start(tmp_path: Path, change: str) -> None:
    """And the verdict says so: the holder was measured on other rows, or its report was deleted."""
    told: list[tuple[str, str]] = []

    def measures(stage: Stage, settings: dict[str, Any], folder: Path) -> int:
        if stage.kind != "capability":
            return launch(stage, settings, folder)
        share = {"base": 0.1, "made": 0.8, "less": 0.5}[stage.name if stage.name != "after" else tuned]
        report(folder / "report", sums=right(share))
        (folder / "report/results.json").write_text('{"suites": {}}')
        return 0

    def run(share: float, rows: int) -> Pipeline:
        asked = {"rows": rows, "suite": "sums"}
        config: dict[str, Any] = {
            "data": DATA,
            "base": {"kind": "capability", "config": {"model": "${data.sft}", **asked}},
            **stages(share, "${after.report}", "${base.report}"),
        }
        config["after"] = {"kind": "capability", "config": {"model": "${made}", **asked}}
        config["gate"] = config.pop("gate")
        told.clear()
        pipeline = Pipeline(
            PipelineConfig.from_dict({"stages": config}),
            tmp_path / "run",
            lambda event, stage, text: told.append((event, stage)),
            measures,
        )
        pipeline.run()
        return pipeline

    tuned = "made"
    good = run(0.8, 400)
    (was,) = good.store.held["policy"].measured
    tuned = "less"
    rejected = run(0.5, 400)
    assert _roles(told) == ["rejected"] and previous(rejected) == [good.store.path(was)]
    if change == "gone":
        shutil.rmtree(Path(good.store.path(was)).parent)
    less = run(0.4, 400 if change == "gone" else 500)
    assert _roles(told) == ["promoted"]
    start = less.root / less.store.entries["base"]["folder"] / "report"
    assert previous(less) == [str(start)]
    notes = less.store.entries["gate"]["metrics"]["reasons"][1:]
    assert len(notes) == 1 and good.store.held["policy"].artefact.path in notes[0]


@pytest.mark.slow
def test_stages_that_are_not_selected_move_no_role(run: Any, tmp_path: Path) -> None:
    """Neither promotions nor withdrawals of results that are there; a later run of all makes them."""
    good, bad = (report(tmp_path / name, sums=right(share)) for name, share in (("good", 0.8), ("bad", 0.1)))
    plain = {"data": DATA, "tuned": {"kind": "filter", "config": {"rows": SCORED, "to": "sft"}}}

    def config(share: float, measured: str) -> dict[str, Any]:
        canary = {**stages(share, measured, good)["gate"], "gates": [{**MARGIN, "against": "start"}]}
        return {**plain, **stages(share, measured, good), "gate": canary}

    for share in (0.5, 1.0):
        run(config(share, good))
    held = json.loads((tmp_path / "run/pipeline.json").read_text())["holders"]
    for selection in (Selection(("tuned",)), Selection(until="made")):
        cached = run(config(0.5, good), selection)
        assert events(cached) == [] and cached.store.read_manifest()["holders"] == held
    assert events(run(config(0.5, good))) == ["promoted"]
    assert events(run(config(0.5, bad))) == ["withdrawn", "rejected"]
    assert events(run(config(0.5, good))) == ["promoted"]
    assert events(run(config(0.5, bad), Selection(("tuned",)))) == ["rejected"]
    assert events(run(config(0.5, bad))) == ["withdrawn", "rejected"]


@pytest.mark.slow
def test_a_plan_takes_a_role_away_as_the_run_does(run: Any, tmp_path: Path) -> None:
    """Accepted, rejected, accepted, rejected: a second gate then compares with the start again."""
    shares = {"start": 0.3, "good": 0.9, "bad": 0.1, "other": 0.5}
    reports = {name: report(tmp_path / name, sums=right(share)) for name, share in shares.items()}
    made = {"kind": "filter", "config": {"rows": SCORED, "to": "sft", "top_share": 0.5}}
    other = {"kind": "filter", "config": {"rows": SCORED, "to": "sft", "top_share": 0.2}}
    fixed = [{**BETTER[0], "against": "start"}]
    judged = gate(reports["other"], reports["start"], "${other}", gates=BETTER, on_failure="rollback")
    found = []
    for name, selection in (("good", None), ("bad", Selection(until="gate")), ("good", None), ("bad", None)):
        first = gate(reports[name], reports["start"], "${made}", gates=fixed, on_failure="rollback")
        config = {"made": made, "gate": first, "other": other, "after": {"kind": "gate", **judged}}
        found.append(sorted(events(run(config, selection))))
    assert found == [
        ["promoted", "rejected"],
        ["rejected", "withdrawn"],
        ["promoted", "rejected"],
        ["promoted", "rejected", "withdrawn"],
    ]
