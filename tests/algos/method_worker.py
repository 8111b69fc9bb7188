"""One process that trains methods for a few steps: `method_worker.py MODE FILE`; the first writes FILE."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from rlhf_algos import (
    DPOConfig,
    DPOTrainer,
    KTOConfig,
    KTOTrainer,
    PRMConfig,
    PRMTrainer,
    RewardConfig,
    RewardTrainer,
    SimPOConfig,
    SimPOTrainer,
)
from rlhf_models import ProcessRewardModel, RewardEnsemble, tiny_model, train_byte_tokenizer

WORLD, RANK = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
CONFIGS = Path(__file__).parents[2] / "configs"
TOKENIZER = train_byte_tokenizer(["a story"])


def shared_examples() -> Any:
    """The module with the examples of every kind, which lies beside this file."""
    spec = importlib.util.spec_from_file_location("shared", Path(__file__).with_name("conftest.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def lm() -> Any:
    return tiny_model("llama", vocab_size=len(TOKENIZER), seed=0)


def main(mode: str, file: Path) -> None:
    parallel: dict[str, Any] = {"fsdp": mode == "fsdp"}
    if mode.startswith("zero"):
        parallel["deepspeed"] = str(CONFIGS / f"{mode}.json")
    precomputed = {"precompute_ref_log_probs": True}
    jobs: dict[str, tuple[Any, Any, str, Any, dict[str, Any]]] = {
        "kto": (KTOTrainer, KTOConfig, "labelled", lm, {}),
        "kto-precomputed": (KTOTrainer, KTOConfig, "labelled", lm, precomputed),
        "kto-ema": (KTOTrainer, KTOConfig, "labelled", lm, {"kl_estimate": "ema"}),
        "dpo-precomputed": (DPOTrainer, DPOConfig, "pairs", lm, precomputed),
        "simpo": (SimPOTrainer, SimPOConfig, "pairs", lm, {"cpo_alpha": 0.5}),
        "prm": (
            PRMTrainer,
            PRMConfig,
            "steps",
            lambda: ProcessRewardModel.from_backbone(lm(), TOKENIZER),
            {},
        ),
        "ensemble": (
            RewardTrainer,
            RewardConfig,
            "pairs",
            lambda: RewardEnsemble.from_backbone(lm(), TOKENIZER, size=2, kind="heads"),
            {},
        ),
    }
    examples = shared_examples().EXAMPLES
    results = {}
    for name, (trainer, config, kind, model, own) in jobs.items():
        values = {"learning_rate": 3e-3, "per_device_train_batch_size": 6 // WORLD, "max_steps": 3}
        settings = config.from_dict(values | {"max_tokens_per_batch": 30} | own | parallel)
        rows: list[dict[str, float]] = []
        # Seven rows: the second step has one, so that one of two processes has nothing to do in it.
        trainer(
            model(),
            settings,
            examples[kind](7, 0),
            eval_examples=examples[kind](5, 1),
            on_step=lambda step, metrics, rows=rows: rows.append(dict(metrics)),
        ).train()
        results[name] = rows
    if RANK == 0:
        file.write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], Path(sys.argv[2]))
