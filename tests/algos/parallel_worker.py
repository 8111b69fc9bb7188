"""One process of a training, started by torchrun or alone: `parallel_worker.py MODE FOLDER [resume]`."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path

import torch

from rlhf_algos import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer
from rlhf_data import PreferencePair, RunFolder, TokenSequence
from rlhf_models import LoraSettings, add_adapters
from rlhf_models.tiny import tiny_model

VOCABULARY, STEPS = 40, 6
WORLD, RANK = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
CONFIGS = Path(__file__).parents[2] / "configs"


def sequences(count: int, seed: int) -> list[TokenSequence]:
    rng = random.Random(seed)
    lengths = [rng.randrange(5, 20) for _ in range(count)]
    return [TokenSequence([rng.randrange(VOCABULARY) for _ in range(n)], 3) for n in lengths]


def pairs(count: int) -> list[PreferencePair]:
    rows = zip(sequences(count, 1), sequences(count, 2), strict=True)
    return [
        PreferencePair(a, TokenSequence([*list(a.input_ids)[:3], *list(b.input_ids)[3:]], 3)) for a, b in rows
    ]


def main(mode: str, folder: Path, resume: bool) -> None:
    settings: dict[str, object] = {
        "per_device_train_batch_size": 8 // WORLD,
        "max_tokens_per_batch": 60,
        "learning_rate": 1e-2,
        "max_steps": STEPS,
        "save_steps": 3,
    }
    if mode.startswith("zero"):
        settings["deepspeed"] = str(CONFIGS / f"{mode}.json")
    settings["fsdp"] = mode == "fsdp"

    def model():
        return tiny_model("llama", vocab_size=VOCABULARY, seed=0)

    def adapted():
        return add_adapters(model(), ["default"], LoraSettings(), seed=0)

    sft, dpo = SFTConfig.from_dict(settings), DPOConfig.from_dict(settings)
    jobs = {
        "sft": lambda run: SFTTrainer(model(), sft, sequences(21, 0), eval_examples=sequences(5, 3), run=run),
        "dpo": lambda run: DPOTrainer(model(), dpo, pairs(19), run=run),
        "lora": lambda run: DPOTrainer(adapted(), dpo, pairs(19), run=run),
    }
    for name, make in jobs.items():
        if RANK == 0:
            RunFolder.create(folder / name, resume=True)
        while not (folder / name).is_dir():
            time.sleep(0.05)
        trainer = make(RunFolder(folder / name))
        if resume:
            trainer.resume()
        trainer.train()
        trainer.save_model(folder / name / "final")
        if RANK == 0:
            print(json.dumps({"mode": mode, "job": name, "world": trainer.parallel.world_size}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], Path(sys.argv[2]), len(sys.argv) > 3)
