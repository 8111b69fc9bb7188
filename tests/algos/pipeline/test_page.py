"""The page of a pipeline: promotions, reasons, rounds side by side, alarms; what names hold is escaped."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from rlhf_algos.pipeline.page import write_page


def entry(kind: str, address: str, **facts: Any) -> dict[str, Any]:
    return {
        "kind": kind,
        "status": "done",
        "address": address,
        "folder": f"results/{kind}-{address}",
        **facts,
    }


def test_the_page_shows_rounds_gates_promotions_and_alarms(tmp_path: Path) -> None:
    stages: dict[str, Any] = {
        "sft": entry("sft", "s", metrics={"before": {"eval_loss": 6.25}, "after": {"eval_loss": 1.5}})
    }
    for number, decision in ((1, "accepted"), (2, "rejected")):
        drawn = entry("generate", f"d{number}", metrics={"words": 10.0 * number, "distinct_2": 0.4})
        drawn["alarms"] = ["round 2: <b> words"] * (number == 2)
        stages[f"self-{number}-draw"] = drawn
        reasons = [f"text: reason {number}"]
        gate = entry("gate", f"g{number}", decision=decision, metrics={"outcome": "pass", "reasons": reasons})
        stages[f"self-{number}-gate"] = gate
    current = {"policy": {"artefact": {"path": "results/x/final", "address": "x"}, "stage": "self-1-gate"}}
    (tmp_path / "pipeline.json").write_text(json.dumps({"stages": stages, "current": current}))
    finished = {"event": "finished", "stage": "sft", "address": "s", "seconds": 12.34}
    (tmp_path / "history.jsonl").write_text(json.dumps(finished) + "\n")
    (tmp_path / "results/sft-s/run").mkdir(parents=True)
    (tmp_path / "results/sft-s/run/samples.html").write_text("")
    html = write_page(tmp_path).read_text(encoding="utf-8")
    text = re.sub(r"<[^>]+>", " ", html[html.index("<main>") :])
    words = " ".join(text.split())
    assert "5 stages: 5 done; 1 rejected by a gate; 1 alarms. Its results took 12.3 s to make." in words
    assert "<a href='results/sft-s/run/samples.html'>samples.html</a>" in html and "log.txt" not in html
    assert "Current policy : results/x/final , promoted by self-1-gate" in words
    assert "self-2-gate rejected text: reason 2" in words
    assert "self, draw: words 10.000 20.000" in words and "self, gate: decision accepted rejected" in words
    assert "eval_loss: 6.250 → 1.500" in words and "12.3" in words
    assert "round 2: &lt;b&gt; words" in words


def test_a_pipeline_that_has_run_nothing_has_a_page(tmp_path: Path) -> None:
    (tmp_path / "pipeline.json").write_text(json.dumps({"stages": {}, "current": {}}))
    assert "No gate has run" in write_page(tmp_path).read_text(encoding="utf-8")
