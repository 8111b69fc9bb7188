"""`rlhf-train` killed at any moment and resumed, in processes that have the imports done already."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from command_server import CommandServer, command_server
from files import metrics_of, read_json

MODEL = """
architecture: llama
vocab_size: 300
hidden_size: 16
num_layers: 2
num_heads: 2
intermediate_size: 32
max_seq_length: 512
"""
_IMPORTS = """
import contextlib, importlib
import peft, rlhf_algos.jobs.training_job, rlhf_algos.jobs.rlhf, rlhf_eval, rlhf_train.commands.rlhf_story
import rlhf_train.display.training, transformers.models.llama.modeling_llama
from rlhf_train.cli import main
with contextlib.redirect_stdout(sys.stderr), contextlib.suppress(ImportError):
    importlib.import_module("deepspeed")  # accelerate imports it where a model is saved
rlhf_eval.training_curves = lambda *args, **options: None  # drawing is most of so small a run
"""


class Command:
    """Starts, resumes and kills runs; `<run>.log` beside a run's folder has what it printed."""

    def __init__(self, server: CommandServer) -> None:
        self._server = server

    def start(self, arguments: Sequence[str], run: Path) -> int:
        """Start a run in a folder, or resume the one that left its config there; the process."""
        arguments = [*arguments, "--output-dir", str(run)]
        if (run / "config.json").exists():
            arguments = [arguments[0], "--resume", str(run)]
        cache = {"XDG_CACHE_HOME": str(run.with_name(f"{run.name}-cache"))}
        return self._server.start(arguments, run.with_name(f"{run.name}.log"), cache)

    def finish(self, arguments: Sequence[str], run: Path) -> None:
        """Run or resume to the end, which must be a good one."""
        self.start(arguments, run)
        assert self._server.wait() == 0, run.with_name(f"{run.name}.log").read_text()

    def stop(
        self,
        arguments: Sequence[str],
        run: Path,
        *,
        after: int,
        logged: str = "metrics.jsonl",
        wait: float = 0.0,
        number: int = signal.SIGKILL,
    ) -> int:
        """Start, and send a signal some seconds after so many lines are in a file; the exit code."""
        process = self.start(arguments, run)
        path = run / logged
        while not (path.exists() and path.read_bytes().count(b"\n") >= after):
            time.sleep(0.001)
            os.kill(process, 0)  # while it is there
        time.sleep(wait)
        os.kill(process, number)
        return self._server.wait()


@contextlib.contextmanager
def train_server() -> Iterator[Command]:
    with command_server("rlhf-train", _IMPORTS) as server:
        yield Command(server)


def assert_same_run(run: Path, other: Path) -> None:
    """Metrics but for the wall clock, samples, held-out metrics and final weights agree to the bit."""
    assert metrics_of(run) == metrics_of(other)
    assert [row["step"] for row in metrics_of(run)] == list(range(1, len(metrics_of(run)) + 1))
    names = sorted(path.relative_to(run) for path in (run / "final").rglob("*.safetensors"))
    assert names
    if (other / "samples.jsonl").exists():
        names.append(Path("samples.jsonl"))
    for name in names:
        assert (run / name).read_bytes() == (other / name).read_bytes(), name
    mine, its = (read_json(path / "results.json") for path in (run, other))
    for block in ("before", "after", "num_tokens", "steps"):
        assert mine[block] == its[block]
