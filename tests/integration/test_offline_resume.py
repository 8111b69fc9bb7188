"""Every offline method, killed with SIGKILL in mid-epoch and resumed, ends as if it had not been."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from files import metrics_of, write_lines
from killed_runs import MODEL, Command, assert_same_run, train_server
from proofs import in_ci
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
_KINDS: dict[str, Any] = {"sft": "sft", "prm": "steps", "kto": "kto"}


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The command, and the folder of the model's and the rows' files."""

    command: Command
    folder: Path

    def arguments(self, name: str) -> list[str]:
        """Those that start one of `RUNS`, but for its folder."""
        method, settings = RUNS[name]
        key, file = _STORED if "load_in_4bit" in settings else _SCRATCH
        values = _SETTINGS | settings | {key: self.folder / file}
        if settings.get("streaming"):
            values |= {"train_data": self.folder / f"{method}.jsonl"}
        words = [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
        return [method, "--max-steps", str(STEPS), *words]

    def finish(self, name: str, run: Path) -> None:
        self.command.finish(self.arguments(name), run)

    def stop(self, name: str, run: Path, **when: Any) -> int:
        return self.command.stop(self.arguments(name), run, **when)


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: Any) -> Iterator[Inputs]:
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "model.yaml").write_text(MODEL)
    model = tiny_model("llama", vocab_size=len(byte_tokenizer), hidden_size=64, intermediate_size=64)
    model.save_pretrained(folder / "model")
    byte_tokenizer.save_pretrained(folder / "model")
    for method in {method for method, settings in RUNS.values() if settings.get("streaming")}:
        records = story_records(_KINDS.get(method, "preference"), 26, split="train", seed=3)
        rows = [dataclasses.asdict(record) for record in records]
        kept = [{k: v for k, v in row.items() if v is not None} for row in rows]
        write_lines(folder / f"{method}.jsonl", kept)
    with train_server() as server:
        yield Inputs(server, folder)


def assert_same(run: Path, other: Path) -> None:
    assert_same_run(run, other)
    assert len(metrics_of(run)) == STEPS


@pytest.mark.parametrize("name", in_ci(RUNS, "sft", "dpo-precomputed-streamed"))
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
    step = len(metrics_of(run))
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
