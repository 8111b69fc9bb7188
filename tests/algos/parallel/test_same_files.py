"""Processes on machines whose models differ are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf_algos.parallel.same_files import check_same_on_all

WORKER = Path(__file__).with_name("same_files_worker.py")
LONG = b"0" * (3 << 20)


def test_one_process_is_never_refused(tmp_path: Path) -> None:
    check_same_on_all(tmp_path / "none")


def _many(at: int, content: bytes) -> dict[str, bytes]:
    """Seventy files of a byte, but for one."""
    return dict.fromkeys(map(str, range(70)), b"0") | {str(at): content}


@pytest.mark.slow
def test_what_two_processes_see(run_processes: Any, tmp_path: Path) -> None:
    cases: dict[str, list[dict[str, bytes] | None]] = {
        "equal": [{"model": LONG}, {"model": LONG}],
        "on the hub": [None, None],
        "missing": [{"model": LONG}, None],
        "other end": [{"model": LONG}, {"model": LONG[:-1] + b"1"}],
        "other beginning": [{"model": LONG}, {"model": b"1" + LONG[1:]}],
        "longer": [{"model": LONG}, {"model": LONG + b"0"}],
        "other name": [{"model": LONG}, {"modal": LONG}],
        "one more": [{"model": LONG}, {"model": LONG, "config": b""}],
        "last of many": [dict.fromkeys(map(str, range(70)), b"0"), _many(9, b"00")],
        "first of many": [dict.fromkeys(map(str, range(70)), b"0"), _many(0, b"1")],
    }
    for name, folders in cases.items():
        (tmp_path / name).mkdir()
        for rank, files in enumerate(folders):
            for file, content in (files or {}).items():
                folder = tmp_path / name / str(rank)
                folder.mkdir(exist_ok=True)
                (folder / file).write_bytes(content)
    output = run_processes([WORKER, tmp_path], processes=2)
    found = [json.loads(line) for line in output.splitlines() if line.startswith("[")]
    expected = {name: "same" if name in ("equal", "on the hub") else "not_the_same_files" for name in cases}
    assert {name: {*codes} for name, *codes in found} == {name: {code} for name, code in expected.items()}


@pytest.mark.slow
@pytest.mark.parametrize("job", ["rlhf_algos:TrainingJob", "rlhf_train.trl.backend:TRLJob"])
def test_jobs_whose_inputs_differ_are_refused(run_processes: Any, tmp_path: Path, job: str) -> None:
    """Each process has its own home; data, model, reward and value model are looked for there."""
    for home in ("0", "1"):
        (tmp_path / home / "model").mkdir(parents=True)
        (tmp_path / home / "model" / "config.json").write_text(home)
        (tmp_path / home / "rows.jsonl").write_text(f'{{"prompt": "{home}"}}\n')
        (tmp_path / home / "rule.py").write_text(f"def score(completions, **_): return {home}")
    data, common = {"train_data": "~/rows.jsonl"}, tmp_path / "rows.jsonl"
    common.write_text('{"prompt": "p"}\n' * 8)
    online = {"train_data": str(common)}
    cases = [
        ("data", "sft", data, "rows.jsonl"),
        ("held out", "sft", online | {"eval_data": "~/rows.jsonl"}, "rows.jsonl"),
        ("model", "sft", online | {"model_name_or_path": "~/model"}, "model"),
        ("rule", "grpo", online | {"reward": ["~/rule.py:score"]}, "rule.py"),
        ("reward model", "grpo", online | {"reward": ["length", "model:path=~/model"]}, "model"),
        ("value model", "ppo", online | {"reward": ["length"], "value_model_path": "~/model"}, "model"),
    ]
    asked = json.dumps([case[:3] for case in cases])
    output = run_processes([WORKER.with_name("same_inputs_worker.py"), tmp_path, asked, job], processes=2)
    found = [json.loads(line) for line in output.splitlines() if line.startswith("[")]
    assert found == [[name, *2 * [f"not_the_same_files {path}"]] for name, *_, path in cases]
