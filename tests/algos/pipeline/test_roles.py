"""Who has which role: gates that promote, reject and change their verdict, canaries, rounds."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from quick_pipelines import AGAIN, CHOSEN, DATA, SCORED, gate, report, started
from raises import raises_error
from rlhf_algos.pipeline import results
from rlhf_algos.pipeline.config import PipelineConfig
from rlhf_algos.pipeline.runner import Pipeline


@pytest.mark.slow
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
        "again": AGAIN,
        "second": {"kind": "gate", **gate(worse, before, "${again}", on_failure="rollback")},
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
    assert json.loads(reason.read_text())["candidate"]["path"] == entries["again"]["folder"]
    assert (root / entries["again"]["folder"] / "rows.jsonl").exists()  # rejected, and kept
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_promotion_that_is_withdrawn_gives_the_role_back(run: Any, tmp_path: Path) -> None:
    """The second round's model is accepted, then rejected: the first round's has the role, not the start."""
    good, bad = report(tmp_path / "good", sums=[1.0] * 400), report(tmp_path / "bad", sums=[0.0] * 400)
    base = {"data": DATA, "chosen": CHOSEN, "start": {"kind": "gate", **gate(good, good)}}
    one = {"kind": "filter", "config": {"rows": SCORED, "to": "sft", "top_share": 1.0}}
    two = {"kind": "filter", "config": {"rows": SCORED, "to": "sft", "top_share": 0.5}}
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


def rate(path: Path, liked: int, disliked: int, **more: Any) -> str:
    """A file of ratings."""
    rows = [{"prompt": "p", "completion": "c", "label": i < liked, **more} for i in range(liked + disliked)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def canary(tmp_path: Path, **fields: Any) -> dict[str, Any]:
    """A canary that is judged by its ratings."""
    files = {"measured": str(tmp_path / "canary.jsonl"), "start": rate(tmp_path / "policy.jsonl", 700, 300)}
    return {
        "kind": "gate",
        "config": {"candidate": "${canary_made}", **files},
        "gates": [{"metric": "rating", "against": "start", "margin": 0.1}],
        "promotes": "policy",
        **fields,
    }


@pytest.mark.slow
def test_a_model_that_passed_twice_loses_its_role_to_the_one_before(run: Any, tmp_path: Path) -> None:
    """Pass, pass by other ratings, fail, and the same again: the start model has the role, and keeps it."""
    start = report(tmp_path / "good", sums=[1.0] * 400)
    made = {"kind": "filter", "config": {"rows": SCORED, "to": "sft", "top_share": 0.5}}
    stages = {
        "data": DATA,
        "chosen": CHOSEN,
        "first": {"kind": "gate", **gate(start, start)},
        "canary_made": made,
        "canary": canary(tmp_path),
    }
    told = []
    for liked, disliked in ((280, 120), (560, 240), (280, 420), (280, 420)):
        rate(tmp_path / "canary.jsonl", liked, disliked)
        pipeline = run(stages)
        told.append([event for event, _ in pipeline.told if event in ("promoted", "withdrawn")])
    assert told == [["promoted", "promoted"], [], ["withdrawn"], []]
    assert pipeline.store.held["policy"].stage == "first"
    chosen = tmp_path / "run" / pipeline.store.entries["chosen"]["folder"]
    assert (tmp_path / "run/current/policy").resolve() == chosen.resolve()
    rows = [json.loads(line) for line in (tmp_path / "run/history.jsonl").read_text().splitlines()]
    events = [(row["event"], row["stage"]) for row in rows if row["event"] in ("promoted", "withdrawn")]
    assert events == [("promoted", "first"), ("promoted", "canary"), ("withdrawn", "canary")]


@pytest.mark.slow
def test_a_model_that_lost_its_role_does_not_get_it_back(run: Any, tmp_path: Path) -> None:
    """The second is rejected while the third has the role; when that is rejected, too, the first has it."""
    good, bad = report(tmp_path / "good", sums=[1.0] * 400), report(tmp_path / "bad", sums=[0.0] * 400)
    made = {"kind": "filter", "config": {"rows": SCORED, "to": "sft", "top_share": 0.5}}
    held = []
    for second, third in ((good, good), (bad, good), (bad, bad)):
        pipeline = run(
            {
                "data": DATA,
                "chosen": CHOSEN,
                "again": AGAIN,
                "made": made,
                "first": {"kind": "gate", **gate(good, good)},
                "second": {"kind": "gate", **gate(second, good, "${again}", on_failure="rollback")},
                "third": {"kind": "gate", **gate(third, good, "${made}", on_failure="rollback")},
            }
        )
        held.append(pipeline.store.held["policy"].stage)
    assert held == ["third", "third", "first"]


@pytest.mark.slow
def test_a_verdict_that_can_no_longer_decide_moves_no_role(run: Any, tmp_path: Path) -> None:
    """An emptied file of ratings says nothing against the model that was promoted."""
    made = {"kind": "filter", "config": {"rows": SCORED, "to": "sft", "top_share": 0.5}}
    stages = {"data": DATA, "canary_made": made, "canary": canary(tmp_path)}
    rate(tmp_path / "canary.jsonl", 280, 120)
    promoted = run(stages).store.held["policy"]
    (tmp_path / "canary.jsonl").write_text("")
    again = run(stages)
    assert again.store.entries["canary"]["decision"] == "rejected"
    assert again.store.held["policy"] == promoted and (tmp_path / "run/current/policy").is_symlink()


@pytest.mark.slow
def test_ratings_of_another_model_do_not_count_for_the_candidate(run: Any, tmp_path: Path) -> None:
    """A canary of another round got them; they count for what the candidate is compared with."""
    made = {"kind": "filter", "config": {"rows": SCORED, "to": "sft", "top_share": 0.5}}
    stages = {"data": DATA, "canary_made": made, "canary": canary(tmp_path)}
    rate(tmp_path / "canary.jsonl", 280, 120, folder=f"/elsewhere/results/kto-{'0' * 16}/run/final")
    first = run(stages)
    none, root = verdict(first), tmp_path / "run"
    assert none["outcome"] == "inconclusive" and none["verdicts"][0]["rows"] == 0
    assert "400" in none["reasons"][-1]
    folder = root / first.store.entries["canary_made"]["folder"]
    rate(tmp_path / "canary.jsonl", 280, 120, folder=str(folder))
    stages["canary"]["config"]["start"] = str(tmp_path / "canary.jsonl")
    own = verdict(run(stages))
    assert (own["verdicts"][0]["rows"], own["verdicts"][0]["other_rows"]) == (400, 0)
    stages["canary"] = canary(tmp_path)
    assert verdict(run(stages))["outcome"] == "pass"


@pytest.mark.slow
def test_after_a_rejection_the_pipeline_goes_on_with_what_the_gate_accepted_before(
    run: Any, tmp_path: Path
) -> None:
    """Not with the model at the start; the same again does nothing."""
    good, bad = report(tmp_path / "good", sums=[1.0] * 400), report(tmp_path / "bad", sums=[0.0] * 400)
    after = {"kind": "filter", "config": {"rows": "${current.policy}/rows.jsonl", "to": "sft"}}

    def stages(share: float, measured: str) -> dict[str, Any]:
        made = {"kind": "filter", "config": {"rows": SCORED, "to": "sft", "top_share": share}}
        judged = {"kind": "gate", **gate(measured, good, "${made}", on_failure="rollback")}
        first = {"kind": "gate", **gate(good, good)}
        return {
            "data": DATA,
            "chosen": CHOSEN,
            "first": first,
            "made": made,
            "judged": judged,
            "after": after,
        }

    accepted = run(stages(0.5, good)).store.entries["made"]["address"]
    for started_stages in (["made", "judged"], []):
        pipeline = run(stages(1.0, bad))
        assert started(pipeline) == started_stages
        assert pipeline.store.entries["after"]["inputs"] == {"${current.policy}": accepted}
        assert pipeline.store.held["policy"].artefact.address == accepted


@pytest.mark.slow
def test_a_plan_says_that_a_gate_waits_for_the_role_that_it_compares_with(run: Any, tmp_path: Path) -> None:
    """A gate below an undecided one of the same role: only if it compares with what has the role."""
    good = report(tmp_path / "good", sums=[1.0] * 400)

    def stages(share: float, **conditions: Any) -> dict[str, Any]:
        made = {"kind": "filter", "config": {"rows": SCORED, "to": "sft", "top_share": share}}
        first = {"kind": "gate", **gate(good, good, "${made}")}
        second = {"kind": "gate", **gate(good, good), "gates": [{"metric": "sums", **conditions}]}
        return {"data": DATA, "chosen": CHOSEN, "made": made, "first": first, "second": second}

    for conditions, state in (
        ({"op": ">", "threshold": 0.5}, "done"),
        ({"against": "start", "margin": 0.1}, "done"),
        ({"against": "previous", "margin": 0.1}, "after first"),
    ):
        run(stages(1.0, **conditions))
        config = PipelineConfig.from_dict({"stages": stages(0.5, **conditions)})
        planned = {stage.name: state for stage, state, _ in Pipeline(config, tmp_path / "run").plan()}
        assert planned["second"] == state and planned["first"] == "to run"


@pytest.mark.slow
def test_a_model_that_another_gate_accepts_stays(run: Any, tmp_path: Path) -> None:
    good, bad = report(tmp_path / "good", sums=[1.0] * 400), report(tmp_path / "bad", sums=[0.0] * 400)
    for measured in (good, bad):
        first, second = {"kind": "gate", **gate(good, good)}, {"kind": "gate", **gate(measured, good)}
        pipeline = run({"data": DATA, "chosen": CHOSEN, "first": first, "second": second})
    assert pipeline.store.held["policy"].stage == "first"
    assert (tmp_path / "run/current/policy").exists()


@pytest.mark.slow
def test_a_former_model_that_was_deleted_gets_no_role(run: Any, tmp_path: Path) -> None:
    good, bad = report(tmp_path / "good", sums=[1.0] * 400), report(tmp_path / "bad", sums=[0.0] * 400)

    def stages(share: float, measured: str) -> dict[str, Any]:
        made = {"kind": "filter", "config": {"rows": SCORED, "to": "sft", "top_share": share}}
        judged = {"kind": "gate", **gate(measured, good, "${made}", on_failure="rollback")}
        first = {"kind": "gate", **gate(good, good)}
        return {"data": DATA, "chosen": CHOSEN, "first": first, "made": made, "judged": judged}

    entries = run(stages(0.5, good)).store.entries
    shutil.rmtree(tmp_path / "run" / entries["made"]["folder"])
    run(stages(1.0, good))
    pipeline = run(stages(1.0, bad))
    assert pipeline.store.held["policy"].stage == "first" and (tmp_path / "run/current/policy").exists()


@pytest.mark.slow
def test_a_manifest_without_former_holders_keeps_its_roles(run: Any, tmp_path: Path) -> None:
    """As earlier versions wrote it."""
    good, bad = report(tmp_path / "good", sums=[1.0] * 400), report(tmp_path / "bad", sums=[0.0] * 400)
    made = {"kind": "filter", "config": {"rows": SCORED, "to": "sft", "top_share": 0.5}}
    first = {"kind": "gate", **gate(good, good)}
    stages = {"data": DATA, "chosen": CHOSEN, "first": first, "made": made}
    judged = {"kind": "gate", **gate(good, good, "${made}", on_failure="rollback")}
    run({**stages, "judged": judged})
    path = tmp_path / "run/pipeline.json"
    manifest = json.loads(path.read_text())
    before, _ = manifest.pop("holders")["policy"]
    known = {"first": None, "judged": before}
    manifest["promotions"] = {
        k: {"of": v["of"], "before": known[k]} for k, v in manifest["promotions"].items()
    }
    path.write_text(json.dumps(manifest))
    pipeline = run({**stages, "judged": judged})
    assert pipeline.store.held["policy"].stage == "judged"
    assert not [event for event, _ in pipeline.told if event == "promoted"]
    judged = {"kind": "gate", **gate(bad, good, "${made}", on_failure="rollback")}
    assert run({**stages, "judged": judged}).store.held["policy"].stage == "first"


@pytest.mark.parametrize("role", ["..", "../policy", "Policy", ""])
def test_a_role_is_a_name(run: Any, tmp_path: Path, role: str) -> None:
    good = report(tmp_path / "good", sums=[1.0] * 400)
    with raises_error("invalid_value", key=""):
        run({"data": DATA, "chosen": CHOSEN, "gate": {**gate(good, good), "promotes": role}})


def test_current_that_is_a_file_is_refused(run: Any, tmp_path: Path) -> None:
    good = report(tmp_path / "good", sums=[1.0] * 400)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/current").write_text("a file")
    with raises_error("not_a_folder", path=str(tmp_path / "run/current")):
        run({"data": DATA, "chosen": CHOSEN, "gate": gate(good, good)})


def verdict(pipeline: Any) -> dict[str, Any]:
    folder = pipeline.root / pipeline.store.entries["canary"]["folder"]
    return json.loads((folder / "verdict.json").read_text())


@pytest.mark.slow
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
        "again": AGAIN,
        "first": {"kind": "gate", **gate(good, good)},
        "gate": gate(good, good, "${again}"),
    }
    run(stages)
    promoted = link.resolve()
    assert "again" in json.loads((tmp_path / "run/pipeline.json").read_text())["stages"]
    seen.clear()
    before = (tmp_path / "run/pipeline.json").read_bytes()
    again = run(stages)
    assert started(again) == [] and set(seen) == {str(promoted)}
    assert (tmp_path / "run/pipeline.json").read_bytes() == before
    seen.clear()
    rejected = run({**stages, "gate": gate(bad, good, "${data.sft}")})  # another candidate, a new verdict
    assert rejected.store.entries["gate"]["decision"] == "rejected"
    assert set(seen) == {str(promoted)} and link.resolve() == promoted
    run({**stages, "first": {"kind": "gate", **gate(good, good, "${again}")}, "gate": gate(good, good)})
    assert link.resolve() == again.root.joinpath(again.store.entries["chosen"]["folder"]).resolve()


@pytest.mark.slow
def test_a_loop_has_rounds_until_a_gate_ends_them(run: Any, tmp_path: Path) -> None:
    good = report(tmp_path / "good", sums=[1.0] * 400)
    bad = report(tmp_path / "bad-2", sums=[0.0] * 400)
    os.symlink(good, tmp_path / "bad-1")
    os.symlink(bad, tmp_path / "bad-3")
    drawn = {"kind": "filter", "config": {"rows": SCORED, "to": "sft", "min_score": "${round}"}}
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
