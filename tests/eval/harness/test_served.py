"""lm-eval's client for completion servers against ours, and its model `hf` on the same weights."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="lm-eval is not installed: run with --extra harness")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

TASK = """
task: sums
dataset_path: json
dataset_kwargs: {data_files: {test: ROWS}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
ROWS = [
    {"text": "Once upon a time there was a little", "choices": [" girl", " the", " boy who"], "answer": 0},
    {"text": "The girl liked her red", "choices": [" ball", " upon", " and the"], "answer": 0},
    {"text": "Lily was very", "choices": [" who", " happy", " ball in the park"], "answer": 1},
]


@pytest.fixture(scope="module")
def address(stories_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("server") / "log"
    command = [sys.executable, "-m", "rlhf_serve", "--model", stories_model, "--served-model-name", "stories"]
    with open(log, "wb") as file:
        server = subprocess.Popen([*command, "--port", "0"], stdout=file, stderr=subprocess.STDOUT)
    try:
        while "for OpenAI clients" not in (text := log.read_text()):
            assert server.poll() is None, text
            time.sleep(0.2)
        yield text.split("the page, ")[1].split("/v1")[0]
    finally:
        server.terminate()
        server.wait()


def task(folder: Path) -> Any:
    import yaml
    from lm_eval.api.task import ConfigurableTask

    rows = folder / "rows.jsonl"
    rows.write_text("\n".join(map(json.dumps, ROWS)))
    return ConfigurableTask(config=yaml.safe_load(TASK.replace("ROWS", str(rows))))


def test_local_completions(address: str, stories_model: str, tmp_path: Path) -> None:
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.openai_completions import LocalCompletionsAPI
    from lm_eval.tasks import TaskManager

    served = LocalCompletionsAPI(
        add_bos_token=False,
        model="stories",
        base_url=f"{address}/v1/completions",
        tokenizer=stories_model,
        batch_size=4,
    )
    plain = HFLM(pretrained=stories_model, device="cpu", dtype="float32", batch_size=4, add_bos_token=False)
    manager = TaskManager(include_defaults=False)  # reading the thousands there are takes minutes
    found = [
        simple_evaluate(model, tasks=[task(tmp_path)], task_manager=manager, bootstrap_iters=0)
        for model in (served, plain)
    ]
    samples = [
        sorted(result["samples"]["sums"], key=lambda sample: sample["doc_id"]) for result in found if result
    ]
    for ours, theirs in zip(*samples, strict=True):
        for (logp, greedy), (expected, expected_greedy) in zip(
            ours["filtered_resps"], theirs["filtered_resps"], strict=True
        ):
            assert float(logp) == pytest.approx(float(expected), abs=1e-3)
            assert str(greedy) == str(expected_greedy)
    assert found[0]["results"]["sums"]["acc,none"] == found[1]["results"]["sums"]["acc,none"]
