"""One process of trainings whose output layer runs in chunks: `zero3_head_worker.py FOLDER`.

Alone it trains as it is, under torchrun with ZeRO-3 and every weight partitioned.  With 10 rows to a chunk
one of two processes scores 90 tokens in 9 chunks, the other 14 in 2.
"""

from __future__ import annotations

import json
import os
import random
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

import rlhf_models.language_model.head
from rlhf_algos import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer
from rlhf_data import PreferencePair, TokenSequence
from rlhf_models import tiny_model

WORLD = int(os.environ.get("WORLD_SIZE", "1"))
VOCABULARY, CHUNK, STEPS = 128, 10, 3


def sequence(rng: random.Random, scored: int) -> TokenSequence:
    return TokenSequence([rng.randrange(3, VOCABULARY) for _ in range(4 + scored)], 4)


def main(folder: Path) -> None:
    settings: dict[str, object] = {"learning_rate": 1e-3, "max_steps": STEPS, "shuffle": False}
    settings["per_device_train_batch_size"] = 2 // WORLD
    if WORLD > 1:
        path = folder / "zero3.json"
        partition = {"stage": 3, "stage3_param_persistence_threshold": 0, "overlap_comm": False}
        path.write_text(json.dumps({"zero_optimization": partition}))
        settings["deepspeed"] = str(path)
    rng = random.Random(0)
    rows = [sequence(rng, length) for length in (90, 14)]
    pairs = [PreferencePair(sequence(rng, length), sequence(rng, length)) for length in (45, 7)]
    jobs: list[tuple[str, str, Any, Any, Any]] = [
        ("sft", "llama", SFTTrainer, SFTConfig, rows),
        ("dpo", "gemma2", DPOTrainer, DPOConfig, pairs),  # its logits are capped
    ]
    for name, architecture, trainer, config, examples in jobs:
        losses = []
        made = trainer(
            tiny_model(architecture, vocab_size=VOCABULARY, seed=0),
            config.from_dict(settings),
            examples,
            on_step=lambda _, row, losses=losses: losses.append(row["loss"]),
        )
        made.train()
        if made.parallel.is_main:
            print(json.dumps({"job": name, "losses": losses}), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    rlhf_models.language_model.head.CHUNK_BYTES = 4 * VOCABULARY * CHUNK
    if WORLD > 1:  # a process that waits for one that hangs ends with an error
        PartialState(cpu=True, timeout=timedelta(minutes=2))
    main(Path(sys.argv[1]))
