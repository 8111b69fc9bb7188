"""What a finished run leaves behind."""

from __future__ import annotations

import importlib.util
import logging

import pytest

from rlhf_algos import versions
from rlhf_algos.jobs.results import finish_run
from rlhf_data import RunFolder

ROWS = [
    {"step": step, "loss": 1.0 / step, "learning_rate": 1e-3, "num_tokens": 100 * step, "step_time": 0.1}
    | {"samples_per_second": 10.0 * step**2, "peak_memory_gb": 0.5 + step % 3}
    for step in (1, 2, 3)
]


def _finish(run, **facts):
    return finish_run(
        run,
        method="dpo",
        config={"beta": 0.1},
        before={"eval_loss": 0.7},
        after={"eval_loss": float("nan")},
        wall_time={"training": 2.0, "total": 3.0},
        **facts,
    )


def test_results_curves_and_card(tmp_path):
    run = RunFolder.create(tmp_path / "dpo-1")
    for row in ROWS:
        run.append_metrics(row)
    (run.path / "final").mkdir()
    results = _finish(run, resumed=False, data={"source": "pairs.jsonl"})
    assert run.read_results() == {
        "method": "dpo",
        "before": {"eval_loss": 0.7},
        "after": {"eval_loss": None},
        "last_step": ROWS[-1],
        "steps": 3,
        "num_tokens": 300,
        "tokens_per_second": 150.0,
        "samples_per_second": 40.0,
        "peak_memory_gb": 2.5,
        "wall_time": {"training": 2.0, "total": 3.0},
        "versions": results["versions"],
        "resumed": False,
        "data": {"source": "pairs.jsonl"},
    }
    assert results["steps"] == 3
    assert {"python", "torch", "transformers", "rlhf-algos"} <= results["versions"].keys()
    assert (run.path / "training_curves.png").stat().st_size > 10_000
    card = (run.path / "final" / "README.md").read_text(encoding="utf-8")
    assert "on `pairs.jsonl`." in card and "# dpo-1\n" in card


def test_without_matplotlib_a_run_is_finished_and_says_what_is_missing(tmp_path, monkeypatch, caplog):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name)
    )
    run = RunFolder.create(tmp_path)
    run.append_metrics(ROWS[0])
    with caplog.at_level(logging.INFO):
        _finish(run)
    assert (run.read_results() or {})["steps"] == 1 and not (tmp_path / "training_curves.png").exists()
    assert "rlhf-algos[plots]" in caplog.text


def test_facts_go_first_and_a_resumed_run_states_no_rate(tmp_path):
    run = RunFolder.create(tmp_path)
    run.append_metrics(ROWS[0])
    results = _finish(run, resumed=True, steps=9)
    assert results["tokens_per_second"] is None and results["steps"] == 9


def test_a_run_without_steps_is_finished_too(tmp_path):
    results = _finish(RunFolder.create(tmp_path))
    assert results["last_step"] == {} and results["steps"] == 0 and results["tokens_per_second"] is None
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


def test_versions_name_what_numbers_depend_on():
    found = versions(["torch", "rlhf-algos"])
    assert found.keys() == {"python", "torch", "rlhf-algos"}
    assert all(found.values())


@pytest.mark.parametrize("missing", ["before", "after"])
def test_runs_without_held_out_rows(tmp_path, missing):
    values = {"before": {"eval_loss": 1.0}, "after": {"eval_loss": 1.0}} | {missing: None}
    run = RunFolder.create(tmp_path)
    results = finish_run(run, method="sft", config={}, wall_time={}, **values)
    assert results[missing] is None
