"""Weights that are loaded in half precision learn as those in fp32 do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlhf_algos import DPOConfig, DPOTrainer, RewardTrainer, SFTConfig, SFTTrainer, create_optimizer
from rlhf_algos.configs.offline import RewardConfig
from rlhf_algos.engine.optimizer import train_in_fp32
from rlhf_data import RunFolder, pack
from rlhf_models import LoraSettings, RewardModel, add_adapters, tiny_model, token_logps, train_byte_tokenizer

HALF = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


def start(dtype: torch.dtype, vocab_size: int = 40) -> Any:
    """A model whose weights are numbers that bfloat16 and float16 both have."""
    model = tiny_model("llama", vocab_size=vocab_size, initializer_range=0.05)
    for parameter in model.parameters():
        parameter.data = parameter.data.half().bfloat16().half().to(dtype)
    return model


def margin(model: Any, pairs: list[Any]) -> float:
    """Mean log-probability of chosen over rejected completions, in fp32."""
    (batch,) = pack([side for pair in pairs for side in pair[:2]])
    with torch.no_grad():
        logps = token_logps(model.float(), batch).logps
    signs = torch.where(batch.score_sequence % 2 == 0, 1.0, -1.0)
    return float((logps * signs).sum()) / len(pairs)


@pytest.mark.slow
@HALF
def test_small_steps_are_not_lost(dtype: torch.dtype, examples: Any) -> None:
    pairs = examples("pairs", 8)

    def trained(dtype: torch.dtype) -> tuple[float, float]:
        model = start(dtype)
        config = DPOConfig(learning_rate=1e-6, max_steps=30, lr_scheduler_type="constant", shuffle=False)
        trainer = DPOTrainer(model, config, pairs)
        trainer.train()
        before = list(start(torch.float32).parameters())
        moved = [(p != b).float() for p, b in zip(model.parameters(), before, strict=True)]
        return float(torch.cat([m.flatten() for m in moved]).mean()), margin(model, pairs)

    unmoved = margin(start(torch.float32), pairs)
    share, gained = trained(torch.float32)
    half_share, half_gained = trained(dtype)
    assert share > 0.9 and half_share > 0.95 * share
    assert gained > unmoved and half_gained - unmoved == pytest.approx(gained - unmoved, rel=0.1)


@HALF
def test_what_is_trained_is_in_fp32_and_the_rest_as_it_was(dtype: torch.dtype, examples: Any) -> None:
    adapted = add_adapters(start(dtype), ["default"], LoraSettings(lora_r=2))
    reward = RewardModel.from_backbone(start(dtype, 300), train_byte_tokenizer(["a"], 300)).add_lora()
    cases: list[tuple[Any, Any, Any, str]] = [
        (adapted, DPOTrainer, DPOConfig, "pairs"),
        (reward, RewardTrainer, RewardConfig, "pairs"),
    ]
    for model, trainer_class, config, kind in cases:
        trainer = trainer_class(model, config(max_steps=1), examples(kind, 2))
        trainer.train()
        for parameter in model.parameters():
            assert parameter.dtype == (torch.float32 if parameter.requires_grad else dtype)


def test_a_run_in_bfloat16_resumes_to_the_bit(tmp_path: Any, examples: Any) -> None:
    def trainer(name: str) -> Any:
        config = SFTConfig(learning_rate=1e-6, max_steps=4, save_steps=2, per_device_train_batch_size=2)
        run = RunFolder.create(tmp_path / name, resume=True)
        return SFTTrainer(start(torch.bfloat16), config, examples("sequences", 4), run=run)

    whole = trainer("whole")
    assert whole.parallel.precision == "bf16"
    whole.train()
    cut = trainer("cut")
    cut.train_epoch()  # two steps
    cut.save_checkpoint()
    again = trainer("cut")
    assert again.resume() and again.step == 2
    again.train()
    for a, b in zip(again.parameters, whole.parameters, strict=True):
        assert torch.equal(a, b)


def test_optimizers_refuse_half_precision() -> None:
    module = torch.nn.Linear(2, 2).bfloat16()
    with pytest.raises(ValueError, match="lose their updates"):
        create_optimizer(module.parameters(), learning_rate=0.1)
    assert train_in_fp32(module) == torch.bfloat16
    create_optimizer(module.parameters(), learning_rate=0.1)
    with pytest.raises(ValueError, match="requires a gradient"):
        train_in_fp32(module.requires_grad_(False))
