"""One process of a training on rows that stay on disk: `streaming_worker.py DATA FOLDER STEPS [resume]`."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from rlhf_algos import METHODS
from rlhf_data import RunFolder, StreamingDataset
from rlhf_models import tiny_model, train_byte_tokenizer

WORLD, RANK = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
STEP = 6


def main(data: str, folder: Path, steps: int, resume: bool) -> None:
    tokenizer = train_byte_tokenizer(["a story"])
    for name, kind in (("sft", "sft"), ("dpo", "preference"), ("kto", "kto")):
        method = METHODS[name]
        own: dict[str, Any] = {"kl_batch_size": 6} if kind == "kto" else {}
        examples = StreamingDataset(
            f"{data}/{kind}*", tokenizer, kind=kind, on_bad_row="skip", max_length=60, **own
        )
        if RANK == 0:
            RunFolder.create(folder / name, resume=True)
        while not (folder / name).is_dir():
            time.sleep(0.05)
        settings = {
            "learning_rate": 3e-3,
            "per_device_train_batch_size": STEP // WORLD,
            "max_tokens_per_batch": 100,
            "lr_scheduler_type": "constant",
            "max_steps": steps,
            "save_steps": 2,
            "dataloader_num_workers": WORLD - 1,
        }
        trainer: Any = method.trainer_class(
            tiny_model("llama", vocab_size=len(tokenizer), seed=0),
            method.config_class.from_dict(settings),
            examples,
            run=RunFolder(folder / name),
        )
        if resume:
            assert trainer.resume()
        trainer.train()


if __name__ == "__main__":
    torch.set_num_threads(1)
    if WORLD > 1:
        PartialState(cpu=True)
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), len(sys.argv) > 4)
