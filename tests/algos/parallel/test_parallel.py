"""Precision by hardware, and settings of parallel runs that cannot be used."""

from __future__ import annotations

import logging

import pytest
import torch

from raises import raises_error
from rlhf_algos import SFTConfig, SFTTrainer
from rlhf_algos.parallel.parallel import Parallel
from rlhf_algos.parallel.precision import choose_precision
from rlhf_data import RunFolder, TokenSequence, UserError
from rlhf_models.loading.tiny import tiny_model

CPU, FP32 = torch.device("cpu"), torch.float32


def test_cpu_computes_in_fp32_unless_told_otherwise():
    assert choose_precision(SFTConfig(), CPU, FP32) == ("no", "fp32 on the CPU")
    assert choose_precision(SFTConfig(bf16=True), CPU, FP32) == ("bf16", "bf16 is set")


@pytest.mark.parametrize(
    ("capability", "settings", "expected"),
    [
        ((9, 0), {}, ("bf16", "a GPU has bfloat16")),
        ((8, 0), {}, ("bf16", "a GPU has bfloat16")),
        ((7, 5), {}, ("fp16", "a GPU has no bfloat16")),
        ((9, 0), {"bf16": False}, ("no", "bf16 or fp16 is switched off")),
        ((7, 0), {"fp16": False}, ("no", "bf16 or fp16 is switched off")),
        ((9, 0), {"fp16": True}, ("fp16", "fp16 is set")),
        ((9, 0), {"fsdp": True}, ("bf16", "a GPU has bfloat16")),
        ((7, 0), {"fsdp": True}, ("no", "a GPU has no bfloat16, FSDP no fp16")),
    ],
)
def test_gpu_computes_in_what_it_is_made_for(monkeypatch, capability, settings, expected):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    assert choose_precision(SFTConfig.from_dict(settings), torch.device("cuda"), FP32) == expected


@pytest.mark.parametrize(
    ("settings", "said"),
    [({}, "precision as loaded: fp32 on the CPU"), ({"bf16": True}, "precision bf16: bf16 is set")],
)
def test_the_log_says_which_precision_and_why(settings, said, caplog):
    with caplog.at_level(logging.INFO, logger="rlhf_algos.parallel.parallel"):
        Parallel(SFTConfig.from_dict(settings), device=CPU, dtype=FP32)
    assert said in caplog.messages


def test_weights_loaded_in_bfloat16_are_computed_in_it_unless_told_otherwise():
    assert choose_precision(SFTConfig(), CPU, torch.bfloat16)[0] == "bf16"
    assert choose_precision(SFTConfig(bf16=False), CPU, torch.bfloat16)[0] == "no"
    assert choose_precision(SFTConfig(fp16=True), torch.device("cuda"), torch.bfloat16)[0] == "fp16"
    assert choose_precision(SFTConfig(), CPU, torch.float16)[0] == "no"


def test_fp16_needs_a_gpu():
    with raises_error("missing_gpu"):
        choose_precision(SFTConfig(fp16=True), CPU, FP32)


@pytest.mark.parametrize(
    "settings", [{"bf16": True, "fp16": True}, {"fsdp": True, "deepspeed": "zero2.json"}]
)
def test_settings_that_exclude_each_other(settings):
    with pytest.raises(UserError, match="choose one"):
        SFTConfig.from_dict(settings)


def test_fsdp_scales_no_fp16_loss():
    with raises_error("fp16_with_fsdp"):
        choose_precision(SFTConfig(fp16=True, fsdp=True), torch.device("cuda"), FP32)


def test_the_scale_of_fp16_losses_is_resumed(tmp_path):
    def make():
        run = RunFolder.create(tmp_path / "run", resume=True)
        config = SFTConfig(max_steps=2, save_steps=1, per_device_train_batch_size=1)
        trainer = SFTTrainer(
            tiny_model("llama", vocab_size=16), config, [TokenSequence([1, 2, 3], 1)], run=run
        )
        trainer.parallel.accelerator.scaler = torch.amp.GradScaler(
            "cpu", init_scale=1024.0, growth_interval=3
        )
        return trainer

    first = make()
    first.train()  # two steps without an overflow: the third would double the scale
    scaled = first.parallel.scaler_state()
    assert scaled["scale"] == 1024.0 and scaled["_growth_tracker"] == 2
    again = make()
    assert again.resume() and again.parallel.scaler_state() == scaled


def test_fsdp_needs_several_processes():
    with raises_error("single_process"):
        Parallel(SFTConfig(fsdp=True), device=CPU, dtype=FP32)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (None, "unreadable_file"),
        ("{", "invalid_json"),
        ("[]", "missing_key"),
        ("{}", "missing_key"),
    ],
)
def test_deepspeed_file_that_cannot_be_used(tmp_path, text, code):
    path = tmp_path / "zero.json"
    if text is not None:
        path.write_text(text)
    with raises_error(code):
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

    exact, half = losses(bf16=False), losses(bf16=True)
    assert half != exact
    assert half == pytest.approx(exact, rel=0.03)
