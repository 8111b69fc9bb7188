"""TensorBoard's and W&B's own files, read back with their own readers."""

from __future__ import annotations

import importlib
import json
import os
import struct
import subprocess
import sys

import pytest

from raises import raises_error
from rlhf_algos.tracking.trackers import create_trackers

CONFIG = {"learning_rate": 1e-3, "beta": 0.1, "columns": {"chosen": "better"}}


def test_nothing_asked_for_starts_nothing(tmp_path):
    trackers = create_trackers([], tmp_path, CONFIG, name="dpo")
    trackers.log({"loss": 1.0}, 1)
    trackers.finish()
    assert list(tmp_path.iterdir()) == []


def test_unknown_and_missing_trackers_are_refused(tmp_path, monkeypatch):
    with raises_error("invalid_value", key="report_to"):
        create_trackers(["mlflow"], tmp_path, CONFIG, name="dpo")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with raises_error("missing_package"):
        create_trackers(["wandb"], tmp_path, CONFIG, name="dpo")


def test_tensorboard_events_hold_metrics_and_config(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first = create_trackers(["tensorboard"], tmp_path, CONFIG, name="dpo")
    for step, loss in ((1, 0.5), (2, float("nan")), (3, 99.0)):
        first.log({"loss": loss, "rewards/margins": step / 4}, step)
    first.finish()
    # a run killed after step 3 and resumed from the checkpoint of step 2
    second = create_trackers(["tensorboard"], tmp_path, CONFIG, name="dpo", first_step=3)
    second.log({"loss": 0.25}, 3)
    second.finish()
    second.finish()
    assert [path.name for path in tmp_path.iterdir()] == ["tensorboard"]
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("rewards/margins")] == [(1, 0.25), (2, 0.5)]
    losses = [(e.step, e.value) for e in events.Scalars("loss")]
    assert losses[0] == (1, 0.5) and losses[2:] == [(3, 0.25)]
    (text,) = events.Tensors("config/text_summary")
    assert json.loads(text.tensor_proto.string_val[0]) == CONFIG


_OFFLINE = """
import sys
from rlhf_algos.tracking.trackers import create_trackers
for first in (1, 3):
    trackers = create_trackers(["wandb"], sys.argv[1], {"beta": 0.1}, name="dpo", first_step=first)
    for step in (first, first + 1):
        trackers.log({"loss": 1 / step}, step)
    trackers.finish()
"""


@pytest.mark.slow
def test_wandb_offline_stays_in_the_run_folder(tmp_path):
    home, run = tmp_path / "home", tmp_path / "dpo-20250101"
    home.mkdir()
    run.mkdir()
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("WANDB", "XDG"))}
    environment = kept | {"HOME": str(home), "TMPDIR": str(home), "WANDB_MODE": "offline"}
    command = [sys.executable, "-W", "error", "-c", _OFFLINE, str(run)]
    subprocess.run(command, env=environment, cwd=home, check=True, capture_output=True)
    assert list(home.rglob("*")) == [] and os.listdir(run) == ["wandb"]
    first, second = sorted((run / "wandb").glob("offline-run-*"))
    identifier = first.name.split("-")[3]
    # `wandb sync` joins them to one run; a second run within a second gets a number behind its name
    assert second.name.split("-")[3] == identifier
    records = [
        record for folder in (first, second) for record in _records(folder / f"run-{identifier}.wandb")
    ]
    (header, _) = [record.run for record in records if record.HasField("run")]
    assert (header.project, header.display_name) == ("dpo", "dpo-20250101")
    assert {item.key: item.value_json for item in header.config.update}["beta"] == "0.1"
    losses = [
        {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.HasField("history")
    ]
    assert [(row["_step"], row["loss"]) for row in losses] == [(1, 1), (2, 1 / 2), (3, 1 / 3), (4, 1 / 4)]
    found = {record.WhichOneof("record_type") for record in records}
    assert not found & {"stats", "output", "output_raw", "telemetry_error"}
    names = {path.name for path in run.rglob("*") if path.is_file()}
    assert not names & {"wandb-metadata.json", "requirements.txt", "output.log", "diff.patch"}


def _records(path):
    """The records of a `.wandb` file: a LevelDB log of protobuf messages after a header of 7 bytes.

    Blocks of 32 KiB hold chunks: CRC (4 bytes), length (2), type (1: whole, 2 to 4: first, middle, last).
    """
    data, at, message = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        message += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield importlib.import_module("wandb.proto.wandb_internal_pb2").Record.FromString(message)
            message = b""
