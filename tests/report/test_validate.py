"""`rlhf-report validate` run for real: flaws by kind, thresholds from a model, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from files import read_lines
from rlhf_models import tiny_model
from rlhf_report.cli import main

ROWS = [
    {"prompt": "where is mary ?", "completion": " in the kitchen ."},
    {"prompt": "where is mary ?", "completion": ""},
    {"prompt": [{"role": "user", "content": "hi"}], "completion": "so it goes " * 8},
]


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["validate", *arguments])


def test_flaws_are_counted_and_listed(tmp_path: Path) -> None:
    data = write(tmp_path / "rows.jsonl", ROWS)
    result = run(data, "--output-dir", str(tmp_path / "out"))
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "out/results.json").read_text())
    assert found["completions"] == 3 and found["flagged"]["estimate"] == pytest.approx(2 / 3)
    assert set(found["flaws"]) == {"empty", "repetition"}
    rows = read_lines(tmp_path / "out/validations.jsonl")
    assert [[flaw["kind"] for flaw in row["flaws"]] for row in rows] == [[], ["empty"], ["repetition"]]
    assert run(data, "--output-dir", str(tmp_path / "one"), "--max-flagged", "0.01").exit_code == 1
    assert run(data, "--output-dir", str(tmp_path / "two"), "--max-flagged", "0.9").exit_code == 0


def test_a_reference_model_has_thresholds_from_good_completions(tmp_path: Path, byte_tokenizer: Any) -> None:
    model = tiny_model("llama", vocab_size=len(byte_tokenizer), seed=0)
    for each in (model, byte_tokenizer):
        each.save_pretrained(tmp_path / "model")
    good = [{"prompt": "where is mary ?", "completion": f" in room {i} ."} for i in range(40)]
    human = write(tmp_path / "human.jsonl", good)
    data = write(tmp_path / "rows.jsonl", ROWS[:2])
    reference = ("--reference", str(tmp_path / "model"))
    result = run(data, *reference, "--human", human, "--output-dir", str(tmp_path / "out"))
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "out/results.json").read_text())
    assert len(found["thresholds"]["nll"]) == 2 and found["thresholds"]["coherence"] is None
    rows = read_lines(tmp_path / "out/validations.jsonl")
    assert all(row["measures"]["nll"] > 0 for row in rows)  # of the empty one it is that of the end token
    assert all(row["measures"]["coherence"] is None for row in rows)


def test_sources_are_compared_by_a_model(tmp_path: Path, byte_tokenizer: Any) -> None:
    from transformers import BertConfig, BertForSequenceClassification

    labels: dict[int, str] = dict(enumerate(("contradiction", "neutral", "entailment")))
    config = BertConfig(vocab_size=len(byte_tokenizer), hidden_size=16, num_hidden_layers=1, id2label=labels)
    config.num_attention_heads = 2
    model = BertForSequenceClassification(config)
    torch.nn.init.zeros_(model.classifier.weight)
    with torch.no_grad():
        model.classifier.bias.copy_(torch.tensor([2.0, 0.0, 0.0]))  # P(contradiction) e² / (e² + 2) = .787
    for each in (model, byte_tokenizer):
        each.save_pretrained(tmp_path / "nli")
    rows = [ROWS[0] | {"story": "mary is here . she sits ."}, ROWS[0] | {"story": None}, ROWS[0]]
    data = write(tmp_path / "rows.jsonl", rows)
    nli = ("--nli", str(tmp_path / "nli"))
    result = run(data, *nli, "--output-dir", str(tmp_path / "out"))
    assert result.exit_code == 0, result.output
    found = read_lines(tmp_path / "out/validations.jsonl")
    assert found[0]["measures"]["contradiction"] == pytest.approx(0.787, abs=1e-3)
    assert found[0]["flaws"][0]["span"] == [1, 17] and found[0]["flaws"][0]["evidence"] == "mary is here ."
    assert [row["measures"]["contradiction"] for row in found[1:]] == [None, None]
    results = json.loads((tmp_path / "out/results.json").read_text())
    assert results["consistency"]["rows"] == 1 and "contradiction" in results["flaws"]
    refused = run(data, *nli, "--source", "text", "--output-dir", str(tmp_path / "no"))
    assert refused.exit_code == 2 and "no text in text" in refused.output and not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    ("rows", "more", "says"),
    [
        ([ROWS[0] | {"completion": "a \ud800 b"}], (), "surrogate"),
        ([ROWS[0] | {"source": "a \ud800 b"}], ("--nli", "/nowhere/at/all"), "surrogate"),
        ([{"prompt": "a"}], (), "row 1"),
        ([], (), "no rows"),
        (ROWS, ("--human", "x.jsonl"), "--reference"),
        (ROWS, ("--reference", "/nowhere/at/all"), "/nowhere/at/all"),
        (ROWS, ("--source", "story"), "--nli"),
        (ROWS, ("--nli", "/nowhere/at/all"), "no text in source"),
        ([ROWS[0] | {"source": "a"}], ("--nli", "/nowhere/at/all"), "/nowhere/at/all"),
    ],
)
def test_refusals(tmp_path: Path, rows: list[Any], more: tuple[str, ...], says: str) -> None:
    data = write(tmp_path / "rows.jsonl", rows)
    result = run(data, *more, "--output-dir", str(tmp_path / "out"))
    assert result.exit_code == 2 and says in result.output and "Traceback" not in result.output
    assert not (tmp_path / "out").exists()
