import contextlib
import json
import math
import os
import resource
import signal
import subprocess
import sys

import pytest

from raises import raises_error
from rlhf_data import RunFolder, atomic_folder, newest_unfinished
from rlhf_data.runs.atomic import DiskFullError
from rlhf_data.runs.checksums import write_checksums


def _checkpoint(run, step):
    with atomic_folder(run.checkpoint_path(step)) as temp:
        (temp / "trainer_state.json").write_text("{}", encoding="utf-8")
        (temp / "model.safetensors").write_bytes(b"weights")
        write_checksums(temp)


def test_named_folders_are_fresh(tmp_path):
    first = RunFolder.create(root=tmp_path, job="sft")
    second = RunFolder.create(root=tmp_path, job="sft")
    assert first.path != second.path
    assert first.path.parent == tmp_path and first.path.name.startswith("sft-")


def test_non_empty_folder_needs_resume(tmp_path):
    run = RunFolder.create(tmp_path / "run")
    RunFolder.create(tmp_path / "run")
    run.write_config({"seed": 1})
    with raises_error("folder_not_empty"):
        RunFolder.create(tmp_path / "run")
    assert RunFolder.create(tmp_path / "run", resume=True).read_config() == {"seed": 1}


def test_unwritable_and_missing_folders_are_refused(tmp_path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    with raises_error("folder_not_writable"):
        RunFolder.create(tmp_path / "file" / "run")
    with raises_error("folder_not_found"):
        RunFolder.open(tmp_path / "none")
    with raises_error("no_config"):
        RunFolder.create(tmp_path / "run").read_config()


def test_damaged_json_is_named(tmp_path):
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with raises_error("damaged_file"):
        RunFolder.open(tmp_path).read_config()


def test_metrics_write_nan_as_null(tmp_path):
    run = RunFolder.create(tmp_path)
    assert run.read_metrics() == []
    run.append_metrics({"step": 1, "a": math.nan, "b": [math.inf, 2.0], "c": {"d": -math.inf}})
    assert run.read_metrics() == [{"step": 1, "a": None, "b": [None, 2.0], "c": {"d": None}}]


def test_evaluations_of_older_runs_of_the_game_are_read_by_their_names_of_now(tmp_path):
    run = RunFolder.create(tmp_path / "run")
    run.append_metrics({"step": 1, "policy/accuracy": 0.5, "eval/policy/accuracy": 0.25})
    run.append_metrics({"step": 2, "policy/accuracy": 0.5, "eval_policy/accuracy": 0.75})
    assert run.read_metrics() == [
        {"step": 1, "policy/accuracy": 0.5, "eval_policy/accuracy": 0.25},
        {"step": 2, "policy/accuracy": 0.5, "eval_policy/accuracy": 0.75},
    ]


def test_torn_last_line_is_dropped_on_read_append_and_truncate(tmp_path):
    run = RunFolder.create(tmp_path)
    path = tmp_path / "metrics.jsonl"
    for step in (1, 2, 3):
        run.append_metrics({"step": step, "text": "ü"})
    whole = path.read_bytes()
    for cut in range(1, len(whole) // 3):
        path.write_bytes(whole[:-cut])
        assert [row["step"] for row in run.read_metrics()] == [1, 2]
        run.append_metrics({"step": 3, "text": "ü"})
        assert path.read_bytes() == whole
    path.write_bytes(whole[:-4])
    run.truncate_logs(2)
    assert path.read_bytes() == whole[: len(whole) // 3 * 2]
    run.truncate_logs(0)
    assert path.read_bytes() == b""


def test_truncate_keeps_every_byte_of_what_stays(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"note":  1}\n{"step": 1,"a":0.10}\n{"step": 2}\n', encoding="utf-8")
    RunFolder.open(tmp_path).truncate_logs(1)
    assert path.read_text(encoding="utf-8") == '{"note":  1}\n{"step": 1,"a":0.10}\n'


def test_damaged_middle_line_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"st\n{"step": 3}\n', encoding="utf-8")
    with raises_error("damaged_file", line=2):
        RunFolder.open(tmp_path).read_metrics()


def test_lines_survive_kill_9(tmp_path):
    code = (
        "import itertools, sys\n"
        "from rlhf_data import RunFolder\n"
        "run = RunFolder.create(sys.argv[1])\n"
        "for step in itertools.count(1):\n"
        "    run.append_metrics({'step': step, 'pad': 'x' * 3000})\n"
        "    print(step, flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for _ in range(20):
        process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    confirmed = 20 + len([line for line in process.stdout.read().split("\n")[:-1] if line])
    process.stdout.close()
    process.wait()
    steps = [row["step"] for row in RunFolder.open(tmp_path).read_metrics()]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) >= confirmed


def test_results_and_newest_unfinished(tmp_path):
    assert newest_unfinished(tmp_path, "minmax") is None
    for stamp in ("20250101-000000", "20250102-000000", "20250103-000000"):
        RunFolder.create(tmp_path / f"minmax-{stamp}").write_config({"stamp": stamp})
    RunFolder.create(tmp_path / "minmax-20250104-000000")  # no config yet
    RunFolder.create(tmp_path / "sft-20250105-000000").write_config({})
    last = RunFolder.open(tmp_path / "minmax-20250103-000000")
    assert last.read_results() is None
    last.write_results({"after": {"policy/accuracy": 0.5, "hack": math.nan}})
    assert last.read_results() == {"after": {"policy/accuracy": 0.5, "hack": None}}
    found = newest_unfinished(tmp_path, "minmax")
    assert found is not None and found.read_config() == {"stamp": "20250102-000000"}
    (found.path / "evaluation.json").write_text("{}")  # of a model that was evaluated and never trained
    found = newest_unfinished(tmp_path, "minmax")
    assert found is not None and found.read_config() == {"stamp": "20250101-000000"}
    found.append_metrics({"step": 1})
    (found.path / "evaluation.json").write_text("{}")  # of a run that was interrupted
    assert newest_unfinished(tmp_path, "minmax") is not None


def test_samples(tmp_path):
    run = RunFolder.create(tmp_path)
    run.append_samples([{"a": 1}, {"a": "ü"}])
    run.append_samples([{"a": 3}])
    lines = (tmp_path / "samples.jsonl").read_text(encoding="utf-8").split("\n")
    assert [json.loads(line) for line in lines[:-1]] == [{"a": 1}, {"a": "ü"}, {"a": 3}]
    run.write_samples([{"b": 1}])
    assert (tmp_path / "samples.jsonl").read_text(encoding="utf-8") == '{"b": 1}\n'


def test_checkpoints_are_sorted_complete_and_pruned(tmp_path):
    run = RunFolder.create(tmp_path)
    assert run.latest_checkpoint() is None
    for step in (2, 10, 9):
        _checkpoint(run, step)
    (tmp_path / "checkpoint-11").mkdir()
    (tmp_path / "checkpoint-best").mkdir()
    (tmp_path / "checkpoint-best" / "trainer_state.json").write_text("{}", encoding="utf-8")
    assert run.checkpoints() == [(step, tmp_path / f"checkpoint-{step}") for step in (2, 9, 10)]
    (tmp_path / "checkpoint-11").rmdir()
    assert run.latest_checkpoint() == tmp_path / "checkpoint-10"
    run.prune_checkpoints(2)
    assert [step for step, _ in run.checkpoints()] == [9, 10]
    run.prune_checkpoints(5)
    assert [step for step, _ in run.checkpoints()] == [9, 10]
    with pytest.raises(ValueError, match="at least 1"):
        run.prune_checkpoints(0)


def test_the_best_checkpoint_is_not_pruned_and_later_ones_can_be_dropped(tmp_path):
    run = RunFolder.create(tmp_path)
    for step in (1, 2, 3, 4, 12):
        _checkpoint(run, step)
    run.prune_checkpoints(2, best=1)
    assert [step for step, _ in run.checkpoints()] == [1, 4, 12]
    (tmp_path / "checkpoint-20").mkdir()
    run.drop_checkpoints_after(1, but=4)
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-1", "checkpoint-4"]


def test_a_damaged_checkpoint_is_passed_over_and_named(tmp_path, caplog):
    run = RunFolder.create(tmp_path)
    for step in (1, 2, 3):
        _checkpoint(run, step)
    (tmp_path / "checkpoint-3" / "model.safetensors").write_bytes(b"weigh")
    (tmp_path / "checkpoint-2" / "trainer_state.json").unlink()
    assert run.latest_checkpoint() == tmp_path / "checkpoint-1"
    assert "checkpoint-3 is damaged and passed over: model.safetensors has 5 bytes, 7 were" in caplog.text
    assert "checkpoint-2 is damaged and passed over: trainer_state.json is missing" in caplog.text
    (tmp_path / "checkpoint-1" / "checksums.json").write_text("{}")
    with raises_error("no_whole_checkpoint"):
        run.latest_checkpoint()


def test_a_full_disk_leaves_the_metrics_as_they_were(tmp_path):
    run = RunFolder.create(tmp_path / "whole")
    run.append_metrics({"step": 1})
    with (
        file_limit(40),
        pytest.raises(DiskFullError),
    ):
        run.append_metrics({"step": 2, "note": "x" * 100})
    assert run.read_metrics() == [{"step": 1}]
    with file_limit(40), pytest.raises(DiskFullError):
        run.write_results({"note": "x" * 100})
    assert os.listdir(run.path) == ["metrics.jsonl"]
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(DiskFullError):
        RunFolder(tmp_path / "full").append_metrics({"step": 1})


def test_every_log_is_cut_back_to_a_step(tmp_path):
    run = RunFolder.create(tmp_path)
    for name in ("metrics.jsonl", "gradient_flow.jsonl"):
        run.append_lines(name, [{"step": step} for step in (1, 2, 3)])
    run.append_samples([{"story": "no step"}, {"step": 3}])
    run.truncate_logs(2)
    assert run.read_lines("gradient_flow.jsonl") == run.read_metrics() == [{"step": 1}, {"step": 2}]
    assert run.read_lines("samples.jsonl") == [{"story": "no step"}]
    assert run.read_lines("none.jsonl") == []


@contextlib.contextmanager
def file_limit(size):
    """A process whose files may have that many bytes: writing more fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_reopening_removes_a_killed_checkpoint_write(tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    stale = tmp_path / f".checkpoint-5.tmp-{ended.pid}-abcd-0"
    stale.mkdir()
    (stale / "trainer_state.json").write_text("{}", encoding="utf-8")
    run = RunFolder.open(tmp_path)
    assert run.latest_checkpoint() is None and os.listdir(tmp_path) == []
