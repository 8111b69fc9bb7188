"""Precision by hardware, and several processes that compute what one does."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlhf_algos import SFTConfig, SFTTrainer
from rlhf_algos.parallel import Parallel, choose_precision
from rlhf_data import RunFolder, TokenSequence, UserError
from rlhf_models.tiny import tiny_model

CPU, FP32 = torch.device("cpu"), torch.float32
WORKER = Path(__file__).with_name("parallel_worker.py")
JOBS = ("sft", "dpo", "lora")


def test_cpu_computes_in_fp32_unless_told_otherwise():
    assert choose_precision(SFTConfig(), CPU, FP32) == ("no", "fp32 on the CPU")
    assert choose_precision(SFTConfig(bf16=True), CPU, FP32) == ("bf16", "bf16 is set")


@pytest.mark.parametrize(
    ("capability", "settings", "expected"),
    [
        ((9, 0), {}, "bf16"),
        ((7, 0), {}, "fp16"),
        ((9, 0), {"bf16": False}, "no"),
        ((7, 0), {"fp16": False}, "no"),
        ((9, 0), {"fp16": True}, "fp16"),
    ],
)
def test_gpu_computes_in_what_it_is_made_for(monkeypatch, capability, settings, expected):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    assert choose_precision(SFTConfig.from_dict(settings), torch.device("cuda"), FP32)[0] == expected


def test_half_precision_weights_are_left_as_they_are():
    mode, reason = choose_precision(SFTConfig(), CPU, torch.bfloat16)
    assert mode == "no" and "bfloat16" in reason
    with pytest.raises(UserError, match="float32"):
        choose_precision(SFTConfig(fp16=True), torch.device("cuda"), torch.bfloat16)


def test_fp16_needs_a_gpu():
    with pytest.raises(UserError, match="fp16 needs a GPU"):
        choose_precision(SFTConfig(fp16=True), CPU, FP32)


@pytest.mark.parametrize(
    "settings", [{"bf16": True, "fp16": True}, {"fsdp": True, "deepspeed": "zero2.json"}]
)
def test_settings_that_exclude_each_other(settings):
    with pytest.raises(UserError, match="choose one"):
        SFTConfig.from_dict(settings)


def test_fsdp_needs_several_processes():
    with pytest.raises(UserError, match="torchrun"):
        Parallel(SFTConfig(fsdp=True), device=CPU, dtype=FP32)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "does not exist"),
        ("{", "not valid JSON"),
        ("[]", "zero_optimization"),
        ("{}", "zero_optimization"),
    ],
)
def test_deepspeed_file_that_cannot_be_used(tmp_path, text, message):
    path = tmp_path / "zero.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=message):
        Parallel(SFTConfig(deepspeed=str(path)), device=CPU, dtype=FP32)


def test_bf16_learns_almost_what_fp32_does():
    def losses(**settings):
        examples = [TokenSequence([i % 7, 3, 5, i % 5, 9], 2) for i in range(8)]
        config = SFTConfig(learning_rate=1e-2, max_steps=6, per_device_train_batch_size=8, **settings)
        model, rows = tiny_model("llama", vocab_size=16, seed=0), []
        trainer = SFTTrainer(model, config, examples, on_step=lambda _, row: rows.append(row["loss"]))
        trainer.train()
        assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
        return rows

    exact, half = losses(), losses(bf16=True)
    assert half != exact
    assert half == pytest.approx(exact, rel=0.03)


def rows(folder: Path) -> list[dict[str, float]]:
    return [
        {key: value for key, value in row.items() if key != "step_time"}
        for row in RunFolder(folder).read_metrics()
    ]


def run_worker(mode: str, folder: Path, *options: str, processes: int = 2) -> None:
    start = [sys.executable]
    if processes > 1:
        start = [str(Path(sys.executable).with_name("torchrun")), "--nproc-per-node", str(processes)]
    done = subprocess.run(
        [*start, str(WORKER), mode, str(folder), *options],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    worlds = [json.loads(line)["world"] for line in done.stdout.splitlines() if line.startswith("{")]
    assert worlds == [processes] * len(JOBS)


@pytest.fixture(scope="module")
def single(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("single")
    run_worker("one", folder, processes=1)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ddp", "fsdp", "zero1", "zero2", "zero3"])
def test_two_processes_compute_what_one_does_and_resume_to_the_bit(tmp_path, single, mode):
    if mode.startswith("zero") and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    run_worker(mode, tmp_path)
    whole = {}
    for job in JOBS:
        mine, its = whole.setdefault(job, rows(tmp_path / job)), rows(single / job)
        assert len(mine) == len(its) == 6
        for row, other in zip(mine, its, strict=True):
            # Which prefixes happen to meet in one micro-batch depends on the cut.
            assert row.pop("num_tokens") == pytest.approx(other.pop("num_tokens"), rel=0.02)
            assert row == pytest.approx(other, rel=1e-5, abs=2e-6)
        name = "adapter_model.safetensors" if job == "lora" else "model.safetensors"
        tensors, expected = (load_file(path / job / "final" / name) for path in (tmp_path, single))
        assert set(tensors) == set(expected)
        for key, tensor in tensors.items():
            torch.testing.assert_close(tensor, expected[key], rtol=1e-3, atol=1e-4)
        shutil.rmtree(tmp_path / job / "checkpoint-6")
    run_worker(mode, tmp_path, "resume")
    for job in JOBS:
        again = rows(tmp_path / job)
        for row in again:
            del row["num_tokens"]
        assert again == whole[job]
