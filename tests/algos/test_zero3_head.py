"""ZeRO-3 where the output layer runs in another number of chunks on each process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

WORKER = Path(__file__).with_name("zero3_head_worker.py")
pytestmark = pytest.mark.slow


@pytest.mark.proof
def test_processes_with_other_numbers_of_chunks_train_as_one(run_processes: Any, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")

    def losses(processes: int) -> dict[str, list[float]]:
        output = run_processes([WORKER, tmp_path], processes=processes)
        rows = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
        return {row["job"]: row["losses"] for row in rows}

    alone, together = losses(1), losses(2)
    assert together.keys() == alone.keys() == {"sft", "dpo"}
    for job, expected in alone.items():
        assert len(expected) == 3 and together[job] == pytest.approx(expected, rel=1e-5)
