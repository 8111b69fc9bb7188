"""Every offline method, killed with SIGKILL in mid-epoch and resumed, ends as if it had not been."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhf_algos.tracking.run_facts import MACHINE_KEYS
from rlhf_data.worlds.story_tasks import story_records
from rlhf_models import tiny_model

pytestmark = pytest.mark.slow
STEPS = 30
_SETTINGS = {
    "story_rows": 26,  # an epoch has seven steps, the last of them a short one
    "story_eval_rows": 6,
    "per_device_train_batch_size": 4,
    "max_tokens_per_batch": 200,
    "learning_rate": 3e-3,
    "warmup_steps": 10,
    "eval_steps": 6,
    "save_steps": 5,
}
_MODEL = """
architecture: llama
vocab_size: 300
hidden_size: 16
num_layers: 2
num_heads: 2
intermediate_size: 32
max_seq_length: 512
"""
_SCRATCH, _STORED = ("model_config", "model.yaml"), ("model_name_or_path", "model")
_LORA = {"use_peft": True, "lora_r": 2, "lora_dropout": 0.2}
_QLORA = _LORA | {"load_in_4bit": True}
_PAIR_OF = {"num_members": 2, "ensemble": "heads"}
_PRECOMPUTED = {"precompute_ref_log_probs": True}
_STREAMED: dict[str, Any] = {"streaming": True}
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "sft": ("sft", {"optim": "adamw_bnb_8bit", "lr_scheduler_type": "cosine"}),
    "sft-lora-streamed": ("sft", _LORA | _STREAMED),
    "reward": ("reward", {"center_rewards_coefficient": 0.1, "head": "mlp"}),
    "reward-lora": ("reward", _LORA),
    "reward-heads": ("reward", _PAIR_OF),
    "reward-adapters": ("reward", _LORA | _PAIR_OF | {"ensemble": "adapters"}),
    "reward-independent": ("reward", _PAIR_OF | {"ensemble": "independent"}),
    "reward-adapters-4bit": ("reward", _QLORA | _PAIR_OF | {"ensemble": "adapters"}),
    "prm": ("prm", {}),
    "prm-lora-streamed": ("prm", _LORA | _STREAMED),
    "dpo-copy": ("dpo", {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}),
    "dpo-adapter-off": ("dpo", _LORA),
    "dpo-4bit": ("dpo", _QLORA),
    "dpo-precomputed": ("dpo", _PRECOMPUTED),
    "dpo-precomputed-streamed": ("dpo", _PRECOMPUTED | _STREAMED),
    "simpo": ("simpo", {"cpo_alpha": 0.5}),
    "simpo-lora-streamed": ("simpo", _LORA | _STREAMED),
    "kto": ("kto", {}),
    "kto-lora-streamed": ("kto", _LORA | _STREAMED),
    "kto-ema": ("kto", {"kl_estimate": "ema"}),
}
_ALIKE = {
    "reward-lora",
    "reward-heads",
    "reward-independent",
    "prm",
    "dpo-4bit",
    "dpo-precomputed",
    "kto-ema",
}
"""What they are made of is in others of `RUNS` too."""
_KINDS: dict[str, Any] = {"sft": "sft", "prm": "steps", "kto": "kto"}

_SERVER = """
import json, os, sys
import rlhf_algos.jobs.training_job, rlhf_train.display.training
import matplotlib.figure, matplotlib.backends.backend_agg, transformers.models.llama.modeling_llama
from rlhf_train.cli import main
for line in sys.stdin:
    arguments, log, environment = json.loads(line)
    child = os.fork()
    if not child:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ.update(environment)
        main(arguments, prog_name="rlhf-train")
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
"""Reads orders, and runs the command for each in a process of its own, which has the imports done already."""


class Command:
    """`rlhf-train` in processes of its own.

    Args:
        server: a process that runs `_SERVER`.
        folder: where the model's and the rows' files lie.
    """

    def __init__(self, server: subprocess.Popen[str], folder: Path) -> None:
        self._server, self._folder = server, folder

    def arguments(self, name: str) -> list[str]:
        """Those that start one of `RUNS`, but for its folder."""
        method, settings = RUNS[name]
        key, file = _STORED if "load_in_4bit" in settings else _SCRATCH
        values = _SETTINGS | settings | {key: self._folder / file}
        if settings.get("streaming"):
            values |= {"train_data": self._folder / f"{method}.jsonl"}
        words = [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
        return [method, "--max-steps", str(STEPS), *words]

    def start(self, name: str, run: Path) -> int:
        """Start one of `RUNS` in a folder, or resume the one that left its config there; the process."""
        arguments = [*self.arguments(name), "--output-dir", str(run)]
        if (run / "config.json").exists():
            arguments = [RUNS[name][0], "--resume", str(run)]
        cache = {"XDG_CACHE_HOME": str(run.with_name(f"{run.name}-cache"))}
        order = [arguments, str(run.with_name(f"{run.name}.log")), cache]
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps(order) + "\n")
        self._server.stdin.flush()
        return self._said()

    def finish(self, name: str, run: Path) -> None:
        """Run or resume to the end, which must be a good one."""
        self.start(name, run)
        assert self._said() == 0, run.with_name(f"{run.name}.log").read_text()

    def stop(self, name: str, run: Path, *, after: int, number: int = signal.SIGKILL) -> int:
        """Start, and send a signal when so many steps are logged; the exit code."""
        process = self.start(name, run)
        path = run / "metrics.jsonl"
        while not (path.exists() and path.read_bytes().count(b"\n") >= after):
            time.sleep(0.001)
            os.kill(process, 0)  # while it is there
        os.kill(process, number)
        return self._said()

    def _said(self) -> int:
        assert self._server.stdout is not None
        return int(self._server.stdout.readline())


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: Any) -> Iterator[Command]:
    """The command, with a model's shape and files of rows."""
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "model.yaml").write_text(_MODEL)
    model = tiny_model("llama", vocab_size=len(byte_tokenizer), hidden_size=64, intermediate_size=64)
    model.save_pretrained(folder / "model")
    byte_tokenizer.save_pretrained(folder / "model")
    for method in {method for method, settings in RUNS.values() if settings.get("streaming")}:
        records = story_records(_KINDS.get(method, "preference"), 26, split="train", seed=3)
        rows = [dataclasses.asdict(record) for record in records]
        lines = [json.dumps({k: v for k, v in row.items() if v is not None}) + "\n" for row in rows]
        (folder / f"{method}.jsonl").write_text("".join(lines))
    with subprocess.Popen(
        [sys.executable, "-c", _SERVER],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        yield Command(server, folder)


def assert_same(run: Path, other: Path) -> None:
    """Metrics but for the wall clock, held-out metrics and final weights agree to the bit."""
    assert rows(run) == rows(other)
    assert [row["step"] for row in rows(run)] == list(range(1, STEPS + 1))
    names = sorted(path.relative_to(run) for path in (run / "final").rglob("*.safetensors"))
    assert names
    for name in names:
        assert (run / name).read_bytes() == (other / name).read_bytes(), name
    mine, its = (json.loads((path / "results.json").read_text()) for path in (run, other))
    for block in ("before", "after", "num_tokens"):
        assert mine[block] == its[block]


def rows(run: Path) -> list[dict[str, Any]]:
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in MACHINE_KEYS} for line in lines]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.proof) if name in _ALIKE else name for name in RUNS]
)
def test_killed_and_resumed_is_as_uninterrupted(name, command, tmp_path):
    command.finish(name, tmp_path / "whole")
    rng = random.Random(name)
    run = tmp_path / "killed"
    for after in (rng.randrange(1, 10), rng.randrange(12, 20)):  # the second one kills a resumed run
        assert command.stop(name, run, after=after) == -signal.SIGKILL
    command.finish(name, run)
    assert_same(run, tmp_path / "whole")
    assert not list(run.glob(".*tmp*"))


def test_told_to_end_it_saves_and_goes_on_from_there(command, tmp_path):
    command.finish("kto", tmp_path / "whole")
    run = tmp_path / "told"
    assert command.stop("kto", run, after=7, number=signal.SIGTERM) == 143
    step = len(rows(run))
    assert (run / f"checkpoint-{step}").is_dir() and 7 <= step < STEPS
    said = run.with_name("told.log").read_text()
    assert "SIGTERM: finishing this step and saving" in said
    assert f"continue with: rlhf-train kto --resume {run}" in " ".join(said.split())
    command.finish("kto", run)
    assert_same(run, tmp_path / "whole")


_FULL = """
mount -t tmpfs -o size=600k tmpfs "$1"
rlhf-train $2 --output-dir "$1/run"
echo "exit code $?"
ls -d "$1"/run/checkpoint-*
mount -o remount,size=20m "$1"
rlhf-train sft --resume "$1/run" && cp -r "$1/run" "$3"
"""


def test_a_disk_that_fills_up_ends_the_run_and_resuming_goes_on(command, tmp_path):
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode:
        pytest.skip("needs to mount a small file system of its own (unshare -rm)")
    command.finish("sft", tmp_path / "whole")
    (tmp_path / "disk").mkdir()
    arguments = " ".join([*command.arguments("sft"), "--set save_total_limit=null"])
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", _FULL, "sh", str(tmp_path / "disk"), arguments, str(tmp_path / "run")],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "exit code 2" in done.stdout and "checkpoint-5" in done.stdout
    assert "cannot be written: no space is left on the disk or in the quota" in done.stderr
    assert_same(tmp_path / "run", tmp_path / "whole")
