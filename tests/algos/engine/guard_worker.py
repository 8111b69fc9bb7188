"""A guarded training of which two steps have a ruinous learning rate: `guard_worker.py MODE FOLDER`.

The first process prints steps, rollbacks and metrics.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from rlhf_algos import SFTConfig, SFTTrainer
from rlhf_algos.process_group import barrier, is_main_process, world_size
from rlhf_algos.safeguards.capability import ROLLBACKS
from rlhf_data import RunFolder, TokenSequence
from rlhf_models import tiny_model, train_byte_tokenizer

CONFIGS = Path(__file__).parents[3] / "configs"
TEXTS = [
    f"the {colour} {thing} is here" for colour in ("red", "blue", "green") for thing in ("cat", "cup", "hat")
]
SHARDED: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp": {"fsdp": True},
    "zero2": {"deepspeed": str(CONFIGS / "zero2.json")},
    "zero3": {"deepspeed": str(CONFIGS / "zero3.json")},
}


def main(mode: str, folder: Path) -> None:
    tokenizer = train_byte_tokenizer(TEXTS, vocab_size=300)
    suite = folder / "texts.jsonl"
    if is_main_process():
        suite.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
        RunFolder.create(folder / "run", job="sft")
    barrier()
    settings = {
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "per_device_train_batch_size": 4 // world_size(),
        "max_steps": 6,
        "capability_steps": 2,
        "capability_rows": 8,
        "capability_suites": ["stories", "sums", "text", f"mine={suite}"],
        "save_steps": None,
        "stage_samples": 0,
    }
    rows = [TokenSequence(tokenizer(text)["input_ids"], 1) for text in TEXTS]
    # The items of the suites have up to 180 tokens of this tokenizer.
    model = tiny_model("llama", vocab_size=300, seed=0, max_position_embeddings=256)
    config = SFTConfig.from_dict(settings | SHARDED[mode])
    run = RunFolder(folder / "run")
    trainer = SFTTrainer(model, config, rows, tokenizer=tokenizer, run=run)
    step, seen, ruined = trainer.train_step, list[int](), [1, 3]

    def ruinous(examples: Any) -> dict[str, float]:
        seen.append(trainer.step + 1)
        if seen[-1] not in ruined:
            return step(examples)
        ruined.remove(seen[-1])
        usual = trainer.scheduler.base_lrs
        trainer.scheduler.base_lrs = [1.0 for _ in usual]
        trainer.trained.set_learning_rates()
        metrics = step(examples)
        trainer.scheduler.base_lrs = usual
        trainer.trained.set_learning_rates()
        return metrics

    trainer.train_step = ruinous  # pyright: ignore[reportAttributeAccessIssue]
    trainer.train()
    if is_main_process():
        rollbacks = json.loads((run.path / ROLLBACKS).read_text())
        print(json.dumps({"steps": seen, "rollbacks": rollbacks, "metrics": run.read_metrics()}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
