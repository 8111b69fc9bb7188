"""Merges that are stopped, killed or run out of space end as if they had not been."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from command_server import CommandServer, command_server
from proofs import by_default, in_ci
from raises import raises_error
from rlhf_merge.files import writer as output
from rlhf_merge.run import merger as merging
from rlhf_merge.run.merger import MergeResult, ModelMerger

slow = pytest.mark.slow
COMMAND = str(Path(sys.executable).with_name("rlhf-merge"))
SETTINGS: dict[str, dict[str, Any]] = {
    "ties": {"density": 0.5},
    "dare_ties": {"density": 0.5, "seed": 3},
    "model_stock": {},
}


def values_of(method: str, workshop: Any) -> dict[str, Any]:
    base, a, b = workshop.trio(torch.bfloat16)
    (Path(base) / "tokenizer.json").write_text('{"model": {"vocab": {}}}')
    return {"method": method, "base": base, "models": [a, b], **SETTINGS[method]}


def stopped_after(count: int) -> Callable[[int], None]:
    """A listener that stops a merge after so many bytes."""
    left = [count]

    def on_bytes(moved: int) -> None:
        left[0] -= moved
        if left[0] < 0:
            raise KeyboardInterrupt

    return on_bytes


@pytest.mark.parametrize("method", by_default(SETTINGS, "dare_ties"))
def test_stopped_anywhere_and_resumed(workshop: Any, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf_merge.methods.blocks.BLOCK", 64)
    values = values_of(method, workshop)
    whole = ModelMerger(values, max_shard_size=1500).merge(workshop.root / "whole")
    resumed = 0
    for part in (0.0, 0.3, 0.9):
        out, moved = workshop.root / f"out {part}", []
        merger = ModelMerger(values, max_shard_size=1500)
        plan = merger.plan()
        every = plan.bytes_read + plan.bytes_written
        with pytest.raises(KeyboardInterrupt):
            merger.merge(out, plan=plan, on_bytes=stopped_after(int(part * every)))
        assert not out.exists() and (workshop.root / f".{out.name}.merging").is_dir()
        result: MergeResult = merger.merge(out, on_bytes=moved.append)
        assert sum(moved) == every, "bytes of what was finished before are told at once"
        assert workshop.files(out) == workshop.files(whole.folder)
        assert result.coefficients == whole.coefficients and result.resumed >= resumed
        resumed = result.resumed
    assert 10 < resumed < result.tensors


STEPS = {
    "small files": (merging, "_write_small_files"),
    "card": (merging, "write_card"),
    "publishing": (os, "rename"),
    "after it has its name": (output, "_sync"),
}


@pytest.mark.parametrize("step", by_default(STEPS, "publishing", "card"))
def test_stopped_at_the_end_and_resumed(workshop: Any, step: str, monkeypatch: pytest.MonkeyPatch):
    values = values_of("ties", workshop)
    merger = ModelMerger(values)
    whole = merger.merge(workshop.root / "whole")
    module, name = STEPS[step]
    done = getattr(module, name)

    def stopping(*arguments: Any, **keywords: Any) -> None:
        if step == "after it has its name" and not (workshop.root / "out").exists():
            return done(*arguments, **keywords)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, name, stopping)
        with pytest.raises(KeyboardInterrupt):
            merger.merge(workshop.root / "out")
    if step == "after it has its name":
        assert workshop.files(workshop.root / "out") == workshop.files(whole.folder)
        with raises_error("folder_not_empty"):
            merger.merge(workshop.root / "out")
        return
    assert not (workshop.root / "out").exists()
    result = merger.merge(workshop.root / "out")
    assert result.resumed == result.tensors
    assert workshop.files(result.folder) == workshop.files(whole.folder)


@pytest.mark.parametrize("change", ["time", "settings", "content"])
def test_what_changed_meanwhile_is_not_mixed_in(workshop: Any, change: str) -> None:
    """A model exchanged for another of its size and time, as `cp -p` leaves it, keeps its inode, too."""
    values = values_of("ties", workshop)
    merger = ModelMerger(values)
    with pytest.raises(KeyboardInterrupt):
        merger.merge(workshop.root / "out", on_bytes=stopped_after(1000))
    path = Path(values["models"][0]) / "model.safetensors"
    if change == "time":
        os.utime(path)
    elif change == "settings":
        merger = ModelMerger(values | {"density": 0.4})
    else:
        status, content = path.stat(), bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        assert (path.stat().st_size, path.stat().st_mtime_ns) == (status.st_size, status.st_mtime_ns)
    with raises_error("other_merge_interrupted"):
        merger.merge(workshop.root / "out")
    assert merger.merge(workshop.root / "out", restart=True).resumed == 0


_IMPORTS = """
import rlhf_merge.methods.blocks, rlhf_merge.cli.commands, rlhf_merge.files.writer
from rlhf_merge.cli.main import main
rlhf_merge.methods.blocks.BLOCK = 512
rlhf_merge.files.writer._FLUSH_SECONDS = 0.02
"""
"""Short blocks make merges slow, and short intervals let them have something to resume."""


class Command:
    """`rlhf-merge` in processes of its own.

    Args:
        server: runs the command.
        log: where the processes' output goes.
    """

    def __init__(self, server: CommandServer, log: Path) -> None:
        self._server, self._log = server, log

    def start(self, *arguments: Any) -> int:
        """Start the command; the process."""
        self._log.unlink(missing_ok=True)
        return self._server.start(arguments, self._log)

    def finish(self, *arguments: Any) -> str:
        """Run it to a good end; what it printed."""
        self.start(*arguments)
        code = self.wait()
        assert code == 0, self._log.read_text()
        return self._log.read_text()

    def wait(self) -> int:
        """Wait for the end of what was started; its exit code."""
        return self._server.wait()

    def printed(self) -> str:
        """What the last process printed."""
        return self._log.read_text()


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Command]:
    """The command."""
    with command_server("rlhf-merge", _IMPORTS) as server:
        yield Command(server, tmp_path / "log")


@pytest.fixture
def large(workshop: Any) -> dict[str, Any]:
    """The config of a merge that takes a good part of a second in processes of the server."""
    generator = torch.Generator().manual_seed(0)
    names = [f"model.layers.{i}.mlp.{part}_proj.weight" for i in range(12) for part in ("up", "down")]
    base = {name: torch.randn(128, 256, generator=generator).bfloat16() for name in names}
    models = [workshop.tuned(base, seed) for seed in (1, 2)]
    paths = [workshop.save(n, t, num_hidden_layers=12) for n, t in zip("cde", [base, *models], strict=True)]
    (Path(paths[0]) / "tokenizer.json").write_text('{"model": {"vocab": {}}}')
    return {"base": paths[0], "models": paths[1:]}


def written(workshop: Any, values: dict[str, Any]) -> Path:
    path = workshop.root / f"{values['method']}.json"
    path.write_text(json.dumps(values))
    return path


def wait_for_progress(root: Path, process: int, tensors: int = 1) -> None:
    """Wait until so many tensors of a merge are finished."""
    journal = root / "journal.jsonl"
    while not (journal.exists() and journal.read_bytes().count(b"\n") >= tensors):
        time.sleep(0.0005)
        os.kill(process, 0)  # while it is there


@slow
@pytest.mark.parametrize("method", in_ci(SETTINGS, "dare_ties"))
def test_killed_at_random_moments_and_resumed(
    workshop: Any, command: Command, large: dict[str, Any], method: str
):
    """With one thread and two in turns, until enough attempts had something to go on with."""
    config = written(workshop, {"method": method, **large, **SETTINGS[method]})
    limit = ("--max-shard-size", "700KB")
    command.finish("run", config, workshop.root / "warm", *limit)
    begin = time.monotonic()
    command.start("run", config, workshop.root / "whole", *limit, "--threads", 1)
    while not (workshop.root / "whole").exists():
        time.sleep(0.001)
    takes = time.monotonic() - begin
    assert command.wait() == 0
    whole = workshop.files(workshop.root / "whole")
    assert {"model-00003-of-00003.safetensors", "model.safetensors.index.json"} < set(whole)
    rng = random.Random(method)
    codes: list[int] = []
    noted: list[int] = []  # by the journal, before each run that went on
    for trial in range(100):
        out = workshop.root / f"out{trial}"
        journal = workshop.root / f".{out.name}.merging" / "journal.jsonl"
        for attempt in range(4):
            finished = journal.read_bytes().count(b"\n") if journal.exists() else 0
            noted += [finished] if finished else []
            process = command.start("run", config, out, *limit, "--threads", 1 + (trial + attempt) % 2)
            if attempt < 3:
                time.sleep(rng.uniform(0, takes))
                with suppress(ProcessLookupError):  # it was faster
                    os.kill(process, signal.SIGKILL)
            codes.append(command.wait())
            if out.exists():
                break
        if codes[-1] == 0:  # not killed between the renaming and the end
            assert not journal.parent.exists()
            assert ("tensors had been merged before" in command.printed()) is (finished > 0)
        assert workshop.files(out) == whole
        if trial >= 3 and len(set(noted)) > 2 and 0 in codes:
            break
    assert set(codes) == {0, -signal.SIGKILL} and len(set(noted)) > 2


@slow
@pytest.mark.parametrize(
    ("number", "code", "sentence"),
    [
        (signal.SIGTERM, 143, ""),
        pytest.param(
            signal.SIGINT, 130, "Interrupted; give the same command again to go on.", marks=pytest.mark.proof
        ),
    ],
)
def test_told_to_end_it_ends_and_can_be_resumed(
    workshop: Any, command: Command, large: dict[str, Any], number: int, code: int, sentence: str
):
    config = written(workshop, {"method": "ties", **large, "density": 0.5})
    command.finish("run", config, workshop.root / "whole")
    out, root = workshop.root / "out", workshop.root / ".out.merging"
    process = command.start("run", config, out, "--threads", 2)
    wait_for_progress(root, process)
    os.kill(process, number)
    assert command.wait() == code
    lines = [line for line in command.printed().splitlines() if line.strip()]
    bar = [line for line in lines if line.startswith("TIES ")]
    assert len(bar) == 1 and lines == [*bar, *([sentence] if sentence else [])]
    assert not out.exists()
    other = written(workshop, {"method": "dare_ties", **large, "density": 0.5})
    command.start("run", other, out)
    assert command.wait() == 2 and "had other settings or models" in command.printed()
    assert "tensors had been merged before" in command.finish("run", config, out)
    assert workshop.files(out) == workshop.files(workshop.root / "whole")


@slow
def test_a_second_process_is_refused_while_the_first_is_at_work(
    workshop: Any, command: Command, large: dict[str, Any]
):
    config = written(workshop, {"method": "ties", **large, "density": 0.5})
    out = workshop.root / "out"
    process = command.start("run", config, out)
    wait_for_progress(workshop.root / ".out.merging", process)
    os.kill(process, signal.SIGSTOP)
    try:
        for more in ([], ["--restart"]):
            second = subprocess.run([COMMAND, "run", config, out, *more], capture_output=True, text=True)
            assert second.returncode == 2 and not out.exists()
            assert f"Error: another process is merging into {out}; wait for it" in second.stderr
    finally:
        os.kill(process, signal.SIGCONT)
    assert command.wait() == 0
    command.finish("run", config, workshop.root / "whole")
    assert workshop.files(out) == workshop.files(workshop.root / "whole")
