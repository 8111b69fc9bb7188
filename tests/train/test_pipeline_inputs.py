"""What a dry run of a pipeline refuses, as a stage that names it must fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raises import raises_error
from rlhf_algos.pipeline import PipelineConfig
from rlhf_train.commands.pipeline import run_pipeline
from rlhf_train.commands.pipeline_inputs import check_stage

HERE = str(Path(__file__))
GATES = [{"metric": "reward", "op": ">", "threshold": 1}]
TIES: dict[str, Any] = {"method": "ties", "base": HERE, "models": [HERE, {"model": HERE}]}


def check(kind: str, config: dict[str, Any], **more: Any) -> None:
    stages = {"data": {"config": {"rows": 8}}, "it": {"kind": kind, "config": config, **more}}
    check_stage(PipelineConfig.from_dict({"stages": stages}).expanded()[1])


@pytest.mark.parametrize(
    ("kind", "config", "code", "fields"),
    [
        ("data", {"input": "none.jsonl"}, "file_not_found", {"key": "input", "path": "none.jsonl"}),
        ("data", {"input": [HERE, "a/none.jsonl"]}, "file_not_found", {"path": "a/none.jsonl"}),
        ("evaluate", {"model": "./none", "prompts": HERE}, "model_not_found", {"name": "./none"}),
        ("evaluate", {"model": HERE, "prompts": "none"}, "file_not_found", {"key": "prompts"}),
        ("evaluate", {"model": "gpt2", "prompts": HERE, "reward_model": "/none"}, "model_not_found", {}),
        ("capability", {"model": HERE, "suite": ["sums", "sum"]}, "unknown_suite", {"suite": "sum"}),
        ("capability", {"model": HERE, "file": "mine=none.jsonl"}, "file_not_found", {"path": "none.jsonl"}),
        ("merge", {**TIES, "density": 3}, "invalid_value", {"key": "density"}),
        ("merge", {**TIES, "models": [HERE, {"model": "./none"}]}, "model_not_found", {"key": "models"}),
        ("serve", {"model": "a/b/none", "prompts": "${data.prompts}"}, "model_not_found", {"key": "model"}),
        ("filter", {"rows": "none.jsonl", "to": "sft"}, "file_not_found", {"key": "rows"}),
        ("gate", {"candidate": HERE, "measured": "none"}, "file_not_found", {"key": "measured"}),
    ],
)
def test_what_is_not_there_is_refused(
    kind: str, config: dict[str, Any], code: str, fields: dict[str, Any]
) -> None:
    with raises_error(code, stage="it", **fields):
        check(kind, config, **({"gates": GATES} if kind == "gate" else {}))


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("data", {"input": "owner/rows", "kind": "preference"}),
        ("evaluate", {"model": "owner/model", "prompts": "${data.prompts}", "reward_model": "choice"}),
        ("evaluate", {"model": HERE, "prompts": HERE, "reward_model": "judge:path=./none"}),
        ("capability", {"model": "gpt2", "suite": "text", "file": f"mine={HERE}", "rows": 4}),
        ("merge", {"method": "linear", "models": ["${data.sft}", f"{HERE}+owner/adapter"]}),
        ("serve", {"model": "gpt2", "prompts": HERE, "rows": 2}),
    ],
)
def test_what_may_be_there_is_not(kind: str, config: dict[str, Any]) -> None:
    """References, names that may be on the hub, rules."""
    check(kind, config)


def test_a_dry_run_looks_at_the_stages_that_would_run(tmp_path: Path) -> None:
    config = tmp_path / "steps.yaml"
    config.write_text("stages: {data: {config: {rows: 8}}, it: {kind: data, config: {input: none.jsonl}}}")
    options: dict[str, Any] = {"config": str(config), "output_dir": str(tmp_path / "run"), "dry_run": True}
    options |= {"resume": None, "overrides": (), "stage": (), "from_stage": None, "until": None}
    options["price_per_hour"] = None
    with raises_error("file_not_found", stage="it"):
        run_pipeline(options)
    run_pipeline(options | {"until": "data"})
    assert not (tmp_path / "run").exists()
