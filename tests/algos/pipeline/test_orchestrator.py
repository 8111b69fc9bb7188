"""The pipeline written from Python: what each call adds, what it refuses; a run of quick stages."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raises import raises_error
from rlhf_algos import RLHFOrchestrator, TrainingStage


def reward(completions: list[str], **columns: Any) -> list[float]:
    return [1.0] * len(completions)


@pytest.fixture
def added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An orchestrator that runs nothing, and the stages that its calls have added."""

    def make(**options: Any) -> Any:
        orchestrator = RLHFOrchestrator(tmp_path / "run", **options)
        monkeypatch.setattr(orchestrator, "_run", lambda: orchestrator._config())
        monkeypatch.setattr("rlhf_algos.pipeline.orchestrator._result", lambda *arguments: arguments)
        return orchestrator

    return make


def test_calls_become_stages_that_start_from_what_is_current(added: Any) -> None:
    orchestrator = added()
    orchestrator.run_sft([{"prompt": "a", "completion": "b"}], {"max_steps": 2})
    orchestrator.run_reward_model_training("pairs.jsonl")
    orchestrator.run_policy_optimization("grpo", "prompts.jsonl", {"max_steps": 3})
    orchestrator.run_policy_optimization("dpo", "pairs.jsonl")
    sft, rm, grpo, dpo = orchestrator._stages.values()
    assert "model_name_or_path" not in sft["config"] and sft["promotes"] == "policy"
    assert json.loads(Path(sft["config"]["train_data"]).read_text()) == {"prompt": "a", "completion": "b"}
    assert rm == {
        "kind": "reward",
        "config": {"train_data": "pairs.jsonl", "model_name_or_path": "${current.policy}"},
        "promotes": "reward",
    }
    assert grpo["config"]["reward"] == "${current.reward}" and "reward" not in dpo["config"]


def test_capability_tests_gate_every_training_after_the_first(added: Any) -> None:
    orchestrator = added(model="my-model", capability={"suite": ["text"]}, margin=0.1)
    accepted = {name: {"decision": "accepted"} for name in ("gate_dpo", "gate_dpo4")}
    orchestrator._run = lambda: SimpleNamespace(store=SimpleNamespace(entries=accepted))
    orchestrator.run_policy_optimization("dpo", "pairs.jsonl")
    orchestrator.run_policy_optimization("dpo", "pairs.jsonl")
    config = orchestrator._config()
    assert [stage.kind for stage in config.expanded()] == ["capability", *["dpo", "capability", "gate"] * 2]
    gate = config.expanded()[3]
    assert (gate.promotes, gate.on_failure, gate.gates[0].margin) == ("policy", "rollback", 0.1)


def test_rewards_are_found_by_other_processes_or_refused(added: Any) -> None:
    orchestrator = added(model="my-model")
    with raises_error("missing_reward"):
        orchestrator.run_policy_optimization("ppo", "prompts.jsonl")
    with raises_error("function_not_importable"):
        orchestrator.run_policy_optimization("ppo", "prompts.jsonl", reward_fn=lambda completions: [])
    with raises_error("unknown_method", method="reward"):
        orchestrator.run_policy_optimization("reward", "prompts.jsonl")
    orchestrator.run_policy_optimization("ppo", "prompts.jsonl", reward_fn=reward)
    assert orchestrator._stages["ppo"]["config"]["reward"] == f"{reward.__module__}:reward"


def test_stages_run_and_models_are_saved_and_loaded(tmp_path: Path) -> None:
    orchestrator = RLHFOrchestrator(tmp_path / "run")
    with raises_error("no_trained_model"):
        orchestrator.save_models(tmp_path / "saved")
    data = {"config": {"rows": 8}}
    chosen = {"kind": "filter", "config": {"rows": "${data.sft}", "to": "sft"}}
    results = orchestrator.run_full_pipeline({"data": data, "chosen": chosen})
    assert [each.stage for each in results.values()] == [TrainingStage.INIT, TrainingStage.SELF_IMPROVEMENT]
    assert results["chosen"].metrics == {"rows": 8} or results["chosen"].metrics["rows"] == 8
    assert [row["event"] for row in orchestrator.history()] == ["started", "finished"] * 2
    model = tmp_path / "model"
    model.mkdir()
    (model / "weights").write_text("w")
    first = RLHFOrchestrator(tmp_path / "first", str(model))
    first.save_models(tmp_path / "saved")
    second = RLHFOrchestrator(tmp_path / "second")
    second.load_models(tmp_path / "saved")
    assert (Path(second.current() or "") / "weights").read_text() == "w"
    with raises_error("wrong_folder"):
        second.load_models(model)
