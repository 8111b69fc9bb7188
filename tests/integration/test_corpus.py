"""Inputs that are bad in a way that once did harm: each is refused, or used, as it was when it was kept."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from corpus import CORPUS, GOOD, KINDS, OUTCOMES, body_of, cases, keep, request_row
from corpus_doors import ACCEPTED, Workshop, replayed, steady
from malformed_requests import Sent, request
from raises import raises_error
from rlhf_algos.jobs.rlhf_config import RLHFConfig
from rlhf_algos.pipeline import PipelineConfig
from rlhf_data import BaseConfig
from rlhf_infer.vllm.settings import VLLMSettings
from rlhf_serve.settings import BatchSettings, ServeSettings

LARGEST = 300_000
"""Bytes of the whole corpus."""


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("workshop"))


@pytest.mark.parametrize("kind", KINDS)
def test_every_input_ends_as_it_was_written_down(kind: str, workshop: Workshop) -> None:
    """After a wanted change: `uv run scripts/replay_corpus.py --write`."""
    found, good = replayed(workshop, kind)
    assert found == json.loads(OUTCOMES.read_text())[kind]
    assert good["before"] and steady(good["before"], good["after"])
    for name in good["before"]:
        outcome = found[name]
        assert outcome == "200" or ACCEPTED in (outcome.values() if isinstance(outcome, dict) else [outcome])


@pytest.mark.parametrize("config", [BatchSettings, PipelineConfig, RLHFConfig, ServeSettings, VLLMSettings])
def test_seeds_that_torch_cannot_take_are_refused(config: type[BaseConfig]) -> None:
    needed: dict[type, dict[str, Any]] = {
        BatchSettings: {"input_path": "a", "output_path": "b", "model": "c"},
        PipelineConfig: {"stages": {"sft": {}}},
    }
    for name in {"seed", "sampling_seed"} & config.model_fields.keys():
        values = needed.get(config, {}) | {name: (1 << 63) - 1}
        assert getattr(config.from_dict(values), name) == values[name]
        with raises_error("invalid_value"):
            config.from_dict(values | {name: 1 << 63})


def test_the_corpus_stays_small() -> None:
    assert sum(path.stat().st_size for path in CORPUS.rglob("*") if path.is_file()) < LARGEST
    assert all(any(name.startswith(GOOD) for name in cases(kind)) for kind in KINDS)


@pytest.mark.parametrize("body", [b'{"a": 1}', b"\xff\xfe", b""])
def test_a_kept_request_is_one_of_the_corpus(tmp_path: Path, body: bytes) -> None:
    raw = request("", "PUT", "/v1/score?a=b c", body, {"X-Odd": "é: 1"}).raw
    row = json.loads(keep(tmp_path, "requests", "odd", raw).read_text())
    assert row == request_row("odd", raw) and body_of(row) == body
    assert (row["method"], row["path"], row["headers"]["X-Odd"]) == ("PUT", "/v1/score?a=b c", "é: 1")


@pytest.fixture
def torture(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Imports a module of the torture's trials."""
    import importlib

    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "scripts"))
    yield lambda name: importlib.import_module(f"torture_trials.{name}")
    for name in [name for name in sys.modules if name.startswith("torture_trials")]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("code", "said", "kept"),
    [(1, "", True), (2, "Error: no", False), (0, "Traceback (most recent call last)", True), (0, "", False)],
)
def test_torture_keeps_rows_that_a_command_failed_on(
    torture: Callable[[str], Any], tmp_path: Path, code: int, said: str, kept: bool
) -> None:
    import random

    class Commands:
        def finish(self, words: Any, **options: Any) -> Any:
            return torture("commands").Ended(code, said, 0.1, hung=False)

    (tmp_path / "place").mkdir()
    place = torture("place").Place(tmp_path / "place", Commands(), tmp_path / "kept")
    trial = torture("inputs").mutated_rows(place, random.Random(0))
    names = [path.name for path in (tmp_path / "kept").rglob("*") if path.is_file()]
    assert bool(names) == bool(trial.lost or trial.traceback) == kept
    assert all(name.startswith("found_") and name.endswith((".jsonl", ".csv", ".parquet")) for name in names)


def test_torture_keeps_requests_and_the_corpus_names_of_models(
    torture: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = torture("place").Place(tmp_path, None, tmp_path / "kept")
    place.keep("merges", "yaml", f"base: {tmp_path}/models/base".encode())
    (kept,) = (tmp_path / "kept" / "merges").iterdir()
    assert kept.read_text() == "base: models/base"
    network = torture("network")
    sent: Sent = request("spoiled", "POST", "/v1/score", b"{}")
    for answer, wrong in [((500, "", b""), True), (None, True), ((200, "", b""), False)]:
        monkeypatch.setattr(network, "exchange", lambda port, sent, answer=answer: answer)
        assert bool(network.wrong_answer(0, sent)) == wrong
