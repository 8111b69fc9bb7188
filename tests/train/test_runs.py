"""Run folders in commands: what an unwanted end says about continuing."""

from __future__ import annotations

import fcntl
import os
import shlex
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from raises import raises_error
from rlhf_algos import CheckpointManager
from rlhf_data import RunFolder, UserError
from rlhf_train.runs import new_run, resumable


def _checkpoint(run: RunFolder, step: int) -> None:
    with CheckpointManager(run, keep=2).writing(step, {}):
        pass


@pytest.mark.parametrize(
    ("error", "begun", "before", "after", "told"),
    [
        (KeyboardInterrupt, True, 0, 0, True),
        (KeyboardInterrupt, False, 0, 0, False),
        (UserError, True, 0, 3, True),
        (UserError, True, 2, 3, True),
        (
            UserError,
            True,
            2,
            2,
            False,
        ),  # such as other data for a resumed run: the same command will not help
        (UserError, True, 0, 0, False),
    ],
)
def test_an_end_says_how_to_go_on(
    tmp_path: Path, error: type[BaseException], begun: bool, before: int, after: int, told: bool
) -> None:
    run = RunFolder.create(tmp_path / "a run")
    if begun:
        (run.path / "config.json").write_text("{}")
    if before:
        _checkpoint(run, before)
    with pytest.raises(error) as raised, resumable(run, "minmax"):
        if after > before:
            _checkpoint(run, after)
        raise error("no reply")
    expected = [f"continue with: rlhf-train minmax --resume {shlex.quote(str(run.path))}"] if told else []
    assert getattr(raised.value, "__notes__", []) == expected


@pytest.mark.parametrize("begun", [False, True])
def test_sigterm_leaves_no_folder_of_a_run_that_never_began(
    request: pytest.FixtureRequest, tmp_path: Path, begun: bool
) -> None:
    """torchrun sends it to the process that cleans up, when another one refuses the run."""
    folder = tmp_path / "run"
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    request.addfinalizer(lambda: signal.signal(signal.SIGTERM, before))
    with (
        pytest.raises(KeyboardInterrupt) as raised,
        new_run({"output_dir": str(folder), "dry_run": False}, "sft") as run,
    ):
        if begun:
            (run.path / "config.json").write_text("{}")
        os.kill(os.getpid(), signal.SIGTERM)
    assert getattr(raised.value, "exit_code", None) == 143
    assert folder.exists() is begun
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.fixture
def taken(tmp_path: Path) -> Iterator[Path]:
    """An empty folder that another process is training in: a lock is of an open file, not of a process."""
    folder = tmp_path / "taken"
    folder.mkdir()
    handle = os.open(folder, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    yield folder
    os.close(handle)


def test_a_folder_has_one_run_at_a_time(taken: Path, train_refused: Callable[..., str]) -> None:
    message = train_refused("sft", "--max-steps=1", f"--output-dir={taken}")
    assert str(taken) in message and list(taken.iterdir()) == []
    run = RunFolder(taken)
    with raises_error("folder_in_use"), resumable(run, "sft"):
        pytest.fail("two at once")
    with resumable(run, "sft", trains=False):  # evaluating a run that goes on is fine
        pass


def test_a_folder_is_free_again_after_a_run(tmp_path: Path) -> None:
    options: dict[str, Any] = {"output_dir": str(tmp_path / "run"), "dry_run": False}
    for _ in range(2):
        with new_run(options, "sft") as run, resumable(run, "sft"):
            handle = os.open(run.path, os.O_RDONLY)
            with pytest.raises(BlockingIOError):
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(handle)


@pytest.mark.parametrize("named", ["a b/c/run", "there/run", "there", None])
def test_a_dry_run_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    with new_run({"output_dir": named, "dry_run": True}, "sft") as run:
        assert [path.name for path in tmp_path.rglob("*")] == ["there"]  # not while it plans either
    assert run.path == Path(named) if named else run.path.parent == Path("outputs")
    assert [path.name for path in tmp_path.rglob("*")] == ["there"]


def test_a_dry_run_checks_its_folder(taken: Path, tmp_path: Path) -> None:
    full = tmp_path / "full"
    full.mkdir()
    (full / "file").touch()
    for folder, code in ((full, "folder_not_empty"), (full / "file" / "run", "folder_not_writable")):
        with raises_error(code), new_run({"output_dir": str(folder), "dry_run": True}, "sft"):
            pytest.fail("planned")
    with raises_error("folder_in_use"), new_run({"output_dir": str(taken), "dry_run": True}, "sft"):
        pytest.fail("planned")
    assert taken.is_dir() and list(full.iterdir()) == [full / "file"]


def test_each_player_may_have_a_model_of_its_own() -> None:
    from rlhf_train.commands.minmax import _KEY_OF_OPTION, resolve_config

    def models(**given: str) -> tuple[str | None, str | None]:
        empty = dict.fromkeys((*_KEY_OF_OPTION, "config", "distributed"), None)
        options: dict[str, Any] = {**empty, "overrides": (), "no_baseline": False, "force": False}
        options |= {"quick": False, **given}
        config = resolve_config(options)
        return config.policy_model.model_name, config.monitor_model.model_name

    assert models(model="hub/a") == ("hub/a", "hub/a")
    assert models(model="hub/a", monitor="hub/b") == ("hub/a", "hub/b")
    assert models(policy="hub/c", monitor="hub/b") == ("hub/c", "hub/b")
    assert models(policy="hub/c") == ("hub/c", None)
