"""One process of trainings, started by torchrun or alone: `parallel_worker.py MODE FOLDER [resume]`.

Every job trains in a run folder of its own below FOLDER.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from rlhf_algos.jobs.methods import METHODS
from rlhf_data import RunFolder
from rlhf_models import (
    JudgeModel,
    LoraSettings,
    ProcessRewardModel,
    RewardEnsemble,
    RewardModel,
    add_adapters,
    tiny_model,
    train_byte_tokenizer,
)

WORLD, RANK = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
CONFIGS = Path(__file__).parents[2] / "configs"
TOKENIZER = train_byte_tokenizer(["a story"])
ROWS, STEP, STEPS = 7, 6, 4
"""Every other step has a single row, so that one of two processes has nothing to do in it."""
LORA = LoraSettings(lora_r=2)
PRECOMPUTED = {"precompute_ref_log_probs": True}


def lm() -> Any:
    return tiny_model("llama", vocab_size=len(TOKENIZER), seed=0)


def adapted() -> Any:
    return add_adapters(lm(), ["default"], LORA, seed=0)


def reward() -> Any:
    return RewardModel.from_backbone(lm(), TOKENIZER)


def ensemble(kind: Any) -> Any:
    lora = LORA if kind == "adapters" else None
    return RewardEnsemble.from_backbone(lm(), TOKENIZER, size=2, kind=kind, lora=lora)


KINDS = {"sft": "sequences", "preference": "pairs", "steps": "steps", "kto": "labelled"}
MODELS: dict[str, Callable[[], Any]] = {
    "policy": lm,
    "reward": reward,
    "judge": lambda: JudgeModel.from_backbone(lm(), TOKENIZER),
    "prm": lambda: ProcessRewardModel.from_backbone(lm(), TOKENIZER),
}
JOBS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    **{name: (MODELS[method.model], {}) for name, method in METHODS.items() if not method.online},
    "simpo": (lm, {"cpo_alpha": 0.5}),
    "reward-lora": (lambda: reward().add_lora(LORA), {}),
    "reward-heads": (lambda: ensemble("heads"), {}),
    "reward-adapters": (lambda: ensemble("adapters"), {}),
    "dpo-lora": (adapted, {}),
    "dpo-precomputed": (lm, PRECOMPUTED),
    "kto-lora": (adapted, {}),
    "kto-precomputed": (lm, PRECOMPUTED),
    "kto-ema": (lm, {"kl_estimate": "ema"}),
}
"""The model and the settings of each method, and of its variants."""


def shared_examples() -> Any:
    """The module with the examples of every kind, which lies beside this file."""
    spec = importlib.util.spec_from_file_location("shared", Path(__file__).with_name("conftest.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(mode: str, folder: Path, resume: bool) -> None:
    settings: dict[str, Any] = {
        "learning_rate": 3e-3,
        "per_device_train_batch_size": STEP // WORLD,
        "max_tokens_per_batch": 30,
        "max_steps": STEPS,
        "save_steps": 2,
        "eval_steps": 2,
        "fsdp": mode == "fsdp",
    }
    if mode.startswith("zero"):
        settings["deepspeed"] = str(CONFIGS / f"{mode}.json")
    examples = shared_examples().EXAMPLES
    os.environ["XDG_CACHE_HOME"] = str(folder.with_name(f"{folder.name}-cache"))
    for name, (model, own) in JOBS.items():
        method = METHODS[name.partition("-")[0]]
        kind = KINDS[method.records]
        if RANK == 0:
            RunFolder.create(folder / name, resume=True)
        while not (folder / name).is_dir():
            time.sleep(0.05)
        trainer = method.trainer_class(
            model(),
            method.config_class.from_dict(settings | own),
            examples[kind](ROWS, 0),
            eval_examples=examples[kind](5, 1),
            run=RunFolder(folder / name),
        )
        if resume:
            assert trainer.resume() and trainer.step == 2
        trainer.train()
        trainer.save_model(folder / name / "final")
        if RANK == 0:
            print(json.dumps({"job": name, "processes": trainer.parallel.world_size}), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if WORLD > 1:  # a process that waits for one that hangs ends with an error
        PartialState(cpu=True, timeout=timedelta(minutes=10))
    main(sys.argv[1], Path(sys.argv[2]), len(sys.argv) > 3)
