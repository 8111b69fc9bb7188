"""The first five losses of TRL's own trainers and of ours, on the same rows in the same order, in fp32."""

from __future__ import annotations

import copy
import os
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from proofs import by_default
from rlhf_algos import (
    DPOConfig,
    DPOTrainer,
    KTOConfig,
    KTOTrainer,
    ORPOConfig,
    ORPOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
    SimPOConfig,
    SimPOTrainer,
)
from rlhf_data import KTODataset, PreferenceDataset, SFTDataset, load_records, story_records
from rlhf_models import RewardModel
from rlhf_models.loading.tiny import tiny_model, train_byte_tokenizer

STEPS, BATCH, RATE = 5, 4, 1e-3
HH = Path(__file__).parents[3] / "shared" / "data" / "hh-rlhf" / "harmless-base-1500.jsonl.gz"
SHARED = {"per_device_train_batch_size": BATCH, "learning_rate": RATE, "lr_scheduler_type": "constant"}


@pytest.fixture(scope="module")
def trl() -> Any:
    """TRL's trainers and configs; importing them takes seconds."""
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import datasets
        import trl
        from trl.experimental.cpo import CPOConfig, CPOTrainer
        from trl.experimental.orpo import ORPOConfig, ORPOTrainer

        names = ("SFT", "Reward", "DPO", "KTO")
        found = {
            f"{name}{kind}": getattr(trl, f"{name}{kind}") for name in names for kind in ("Config", "Trainer")
        }
        found |= {"CPOConfig": CPOConfig, "CPOTrainer": CPOTrainer}
        found |= {"ORPOConfig": ORPOConfig, "ORPOTrainer": ORPOTrainer}
        return SimpleNamespace(**found, Dataset=datasets.Dataset)


@pytest.fixture(scope="module", params=by_default(["stories", "hh-rlhf"], "stories"))
def rows(request) -> list[Any]:
    """Preference records: short ones with one prompt format, or real transcripts."""
    if request.param == "stories":
        return story_records("preference", STEPS * BATCH, split="train", seed=0)
    if not HH.exists():
        pytest.skip("needs ../shared/data")
    records = load_records(HH, "preference", on_bad_row="skip").records
    short = [r for r in records if len(r.prompt) + max(len(r.chosen), len(r.rejected)) < 300]
    return short[: STEPS * BATCH]


@pytest.fixture(scope="module")
def tokenizer(rows) -> Any:
    made = train_byte_tokenizer([row.prompt + row.chosen for row in rows], vocab_size=400)
    made.split_special_tokens = False  # TRL writes the end token as text
    made.bos_token = None  # TRL's CPOTrainer puts one in front even where the tokenizer itself does not
    return made


def backbone(tokenizer: Any) -> Any:
    return tiny_model(
        "llama",
        vocab_size=len(tokenizer),
        seed=0,
        max_position_embeddings=1024,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def their_losses(
    trl: Any, name: str, model: Any, data: list[dict[str, Any]], tokenizer: Any, folder: Path, **settings: Any
) -> list[float]:
    model.set_attn_implementation("eager")
    config = getattr(trl, f"{name}Config")(
        output_dir=str(folder),
        max_steps=STEPS,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        disable_tqdm=True,
        train_sampling_strategy="sequential",
        max_length=1024,
        **SHARED,
        **settings,
    )
    options = {"ref_model": copy.deepcopy(model)} if name in ("DPO", "KTO") else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = getattr(trl, f"{name}Trainer")(
            model=model,
            args=config,
            train_dataset=trl.Dataset.from_list(data),
            processing_class=tokenizer,
            **options,
        )
        trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def our_losses(trainer: Any) -> list[float]:
    losses: list[float] = []
    trainer.on_step = lambda step, metrics: losses.append(metrics["loss"])
    trainer.train()
    return losses


def settings(**method: Any) -> dict[str, Any]:
    return SHARED | {"max_steps": STEPS, "shuffle": False} | method


def assert_same(ours: list[float], theirs: list[float]) -> None:
    assert len(ours) == len(theirs) == STEPS
    assert len({round(loss, 5) for loss in ours}) == STEPS
    assert ours == pytest.approx(theirs, rel=1e-4)


def pairs(rows: list[Any]) -> list[dict[str, Any]]:
    return [{"prompt": row.prompt, "chosen": row.chosen, "rejected": row.rejected} for row in rows]


def test_sft(trl, rows, tokenizer, tmp_path):
    data = [{"prompt": row.prompt, "completion": row.chosen} for row in rows]
    records = [_completion(row) for row in rows]
    mine = SFTTrainer(
        backbone(tokenizer), SFTConfig.from_dict(settings()), SFTDataset(records, tokenizer, max_length=1024)
    )
    theirs = their_losses(trl, "SFT", backbone(tokenizer), data, tokenizer, tmp_path)
    assert_same(our_losses(mine), theirs)


@pytest.mark.parametrize("loss_type", by_default(["sigmoid", "hinge", "ipo"], "sigmoid"))
def test_dpo(trl, rows, tokenizer, tmp_path, loss_type):
    mine = DPOTrainer(
        backbone(tokenizer),
        DPOConfig.from_dict(settings(loss_type=loss_type)),
        PreferenceDataset(rows, tokenizer, max_length=1024),
    )
    theirs = their_losses(
        trl, "DPO", backbone(tokenizer), pairs(rows), tokenizer, tmp_path, loss_type=loss_type
    )
    assert_same(our_losses(mine), theirs)


def test_simpo(trl, rows, tokenizer, tmp_path):
    method = {"beta": 2.0, "simpo_gamma": 0.5, "cpo_alpha": 0.0}
    mine = SimPOTrainer(
        backbone(tokenizer),
        SimPOConfig.from_dict(settings(**method)),
        PreferenceDataset(rows, tokenizer, max_length=1024),
    )
    theirs = their_losses(
        trl, "CPO", backbone(tokenizer), pairs(rows), tokenizer, tmp_path, loss_type="simpo", **method
    )
    assert_same(our_losses(mine), theirs)


def test_orpo(trl, rows, tokenizer, tmp_path):
    mine = ORPOTrainer(
        backbone(tokenizer),
        ORPOConfig.from_dict(settings(beta=0.5)),
        PreferenceDataset(rows, tokenizer, max_length=1024),
    )
    theirs = their_losses(trl, "ORPO", backbone(tokenizer), pairs(rows), tokenizer, tmp_path, beta=0.5)
    assert_same(our_losses(mine), theirs)


def test_kto(trl, rows, tokenizer, tmp_path):
    from rlhf_data import LabelledRecord

    records = [
        LabelledRecord(row.prompt, row.chosen if i % 2 else row.rejected, bool(i % 2))
        for i, row in enumerate(rows)
    ]
    data = [{"prompt": r.prompt, "completion": r.completion, "label": r.label} for r in records]
    mine = KTOTrainer(
        backbone(tokenizer),
        KTOConfig.from_dict(settings(desirable_weight=1.2)),
        KTODataset(records, tokenizer, max_length=1024, kl_batch_size=BATCH),
    )
    theirs = their_losses(trl, "KTO", backbone(tokenizer), data, tokenizer, tmp_path, desirable_weight=1.2)
    assert_same(our_losses(mine), theirs)


@pytest.mark.parametrize("coefficient", by_default([None, 0.1], 0.1))
def test_reward(trl, rows, tokenizer, tmp_path, coefficient):
    model = RewardModel.from_backbone(backbone(tokenizer), tokenizer, seed=0)
    their_model = copy.deepcopy(model.model)
    mine = RewardTrainer(
        model,
        RewardConfig.from_dict(settings(center_rewards_coefficient=coefficient)),
        PreferenceDataset(rows, tokenizer, max_length=1024, overlong="drop"),
    )
    theirs = their_losses(
        trl, "Reward", their_model, pairs(rows), tokenizer, tmp_path, center_rewards_coefficient=coefficient
    )
    assert_same(our_losses(mine), theirs)


def _completion(row: Any) -> Any:
    from rlhf_data import CompletionRecord

    return CompletionRecord(row.prompt, row.chosen)


def test_losses_come_from_the_weights_of_each_step(rows, tokenizer):
    """The comparison would not notice a trainer that never steps, were all five losses of the start model."""
    model = backbone(tokenizer)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    config = DPOConfig.from_dict(settings())
    DPOTrainer(model, config, PreferenceDataset(rows, tokenizer, max_length=1024)).train()
    assert not all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
