"""One process of online trainings: `online_worker.py MODE FOLDER ROLLOUTS [resume]`, alone or under torchrun.

Every job trains in a run folder of its own below FOLDER.  ROLLOUTS is a file: where it exists its rollouts
are replayed, otherwise those that are sampled are written to it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from rlhf_algos import GRPOConfig, GRPOTrainer, PPOConfig, PPOTrainer
from rlhf_data import PromptExample, RunFolder
from rlhf_infer import Rollout, SamplingParams, TransformersEngine
from rlhf_infer.rewards import RewardFunctions
from rlhf_models import LoraSettings, add_adapters, tiny_model, train_byte_tokenizer

WORLD, RANK = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
CONFIGS = Path(__file__).parents[2] / "configs"
TOKENIZER = train_byte_tokenizer(["a story"])
PROMPTS = [
    PromptExample(f"prompt {i}", (3 + i, 40, 5, *range(6, 7 + i % 3)), {"odd": i % 2}) for i in range(7)
]
"""With three prompts a step, every third step has a single one, so that one of two processes has none."""
STEPS = 10
COMMON = {
    "learning_rate": 1e-3,
    "max_completion_length": 8,
    "max_tokens_per_batch": 40,
    "max_steps": STEPS,
    "save_steps": 5,
}
GRPO = COMMON | {"num_generations": 4, "beta": 0.1, "num_iterations": 2, "scale_rewards": "batch"}
PPO = COMMON | {
    "num_generations": 2,
    "kl_coef": 0.1,
    "kl_target": 0.5,
    "num_mini_batches": 3,
    "num_ppo_epochs": 2,
    "normalize_rewards": True,
    "missing_eos_penalty": 1.0,
}


def lm() -> Any:
    return tiny_model("llama", vocab_size=len(TOKENIZER), seed=0)


def adapted() -> Any:
    return add_adapters(lm(), ["default"], LoraSettings(lora_r=2), seed=0)


JOBS: dict[str, tuple[Any, Any, Callable[[], Any], dict[str, Any]]] = {
    "grpo": (GRPOTrainer, GRPOConfig, lm, GRPO),
    "grpo-sequence": (GRPOTrainer, GRPOConfig, lm, GRPO | {"importance_sampling_level": "sequence"}),
    "grpo-lora": (GRPOTrainer, GRPOConfig, adapted, GRPO | {"loss_type": "grpo"}),
    "ppo": (PPOTrainer, PPOConfig, lm, PPO),
    "ppo-shared": (PPOTrainer, PPOConfig, adapted, PPO | {"value_model": "shared", "target_kl": 0.02}),
}


def even_tokens(completions: Sequence[str], completion_ids: Sequence[Sequence[int]], **columns: Any) -> Any:
    """Share of tokens with an even (odd) id."""
    wanted = columns["odd"]
    return [
        sum(token % 2 == odd for token in ids) / len(ids)
        for ids, odd in zip(completion_ids, wanted, strict=True)
    ]


class Recorder(TransformersEngine):
    """Samples as its class does, and keeps every rollout."""

    kept: dict[str, list[Any]]

    def generate(
        self, prompts: Any, n: int, params: SamplingParams, *, first: int = 0
    ) -> list[list[Rollout]]:
        drawn = super().generate(prompts, n, params, first=first)
        for prompt, group in zip(prompts, drawn, strict=True):
            key = json.dumps([params.seed, list(prompt)])
            self.kept[key] = [[r.completion_ids, r.logps, r.finish_reason] for r in group]
        return drawn


class Replay:
    """Gives the rollouts that were kept."""

    def __init__(self, kept: dict[str, list[Any]]) -> None:
        self.kept, self.eos_token_ids = kept, [TOKENIZER.eos_token_id]
        self.updates = 0

    def generate(
        self, prompts: Any, n: int, params: SamplingParams, *, first: int = 0
    ) -> list[list[Rollout]]:
        found = [self.kept[json.dumps([params.seed, list(prompt)])] for prompt in prompts]
        return [[Rollout(p, *row) for row in rows] for p, rows in zip(prompts, found, strict=True)]

    def update_weights(self, model: Any) -> None:
        self.updates += 1

    def close(self) -> None:
        """Nothing is open."""


def settings(mode: str, config: dict[str, Any]) -> dict[str, Any]:
    """Three prompts a step on one process and on two."""
    completions = 3 * config["num_generations"] // config.get("num_mini_batches", 1)
    assert completions % WORLD == 0
    own = {"per_device_train_batch_size": completions // WORLD, "fsdp": mode == "fsdp"}
    if mode.startswith("zero"):
        own["deepspeed"] = str(CONFIGS / f"{mode}.json")
    return config | own


def main(mode: str, folder: Path, file: Path, resume: bool) -> None:
    kept = json.loads(file.read_text()) if file.exists() else {}
    replay = bool(kept)
    for name, (trainer_class, config_class, model, config) in JOBS.items():
        if RANK == 0:
            RunFolder.create(folder / name, resume=True)
        while not (folder / name).is_dir():
            time.sleep(0.05)
        policy = model()
        mine = kept.setdefault(name, {})
        trainer = trainer_class(
            policy,
            config_class.from_dict(settings(mode, config)),
            PROMPTS,
            eval_examples=PROMPTS[:3],
            rewards=RewardFunctions([even_tokens]),
            tokenizer=TOKENIZER,
            run=RunFolder(folder / name),
        )
        first = trainer.sample(PROMPTS[:3], 4, seed=1)
        own = trainer.engine
        engine: Any = Replay(mine) if replay else Recorder(own.model, TOKENIZER)
        engine.kept = mine
        trainer.engine = engine
        if resume:
            assert trainer.resume() and trainer.step == STEPS // 2
        trainer.train()
        trainer.save_model(folder / name / "final")
        drawn = [[[r.completion_ids, r.logps] for r in group] for group in first]
        said = {"job": name, "rank": RANK, "processes": WORLD, "first": drawn}
        (folder / name / f"said-{RANK}.json").write_text(json.dumps(said))
    if not replay:
        file.write_text(json.dumps(kept))


if __name__ == "__main__":
    torch.set_num_threads(1)
    if WORLD > 1:  # a process that waits for one that hangs ends with an error
        PartialState(cpu=True, timeout=timedelta(minutes=10))
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), len(sys.argv) > 4)
