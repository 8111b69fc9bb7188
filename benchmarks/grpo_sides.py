"""The two sides of `grpo_vs_trl.py`: `grpo_sides.py TASK.json`."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from online_pace import Pace, Task, gradients_file, move, save_gradients, start, vowels


def train_ours(task: Task, pace: Pace) -> None:
    """This toolkit's `GRPOTrainer`."""
    from rlhf_algos import GRPOConfig, GRPOTrainer
    from rlhf_data import PromptExample
    from rlhf_infer.rewards import RewardFunctions
    from rlhf_models import load_causal_lm, load_tokenizer

    rows = task.read_rows()
    prompts = [PromptExample(row["prompt"], tuple(row["prompt_ids"]), {}) for row in rows]
    config = GRPOConfig.from_dict(
        {
            "per_device_train_batch_size": task.completions_per_step,
            "num_generations": task.num_generations,
            "max_completion_length": task.new_tokens,
            "min_completion_length": task.new_tokens,
            "max_steps": task.steps,
            "shuffle": False,
            "save_steps": None,
            "bf16": False,
            **task.settings,
        }
    )
    trainer = GRPOTrainer(
        load_causal_lm(task.path("policy"), dtype="float32"),
        config,
        prompts,
        rewards=RewardFunctions([vowels]),
        tokenizer=load_tokenizer(task.path("policy")),
    )
    pace.ready(config.model_dump(mode="json"))
    if task.check:
        move(trainer.model)
        pace.step_done(**replay_ours(trainer, task))
        return
    size = task.prompts_per_step
    for first in range(0, task.steps * size, size):
        metrics = trainer.train_step(prompts[first : first + size])
        parts = {part: metrics[f"time/{part}"] for part in ("rollout", "score", "update")}
        pace.step_done(**parts, length=metrics["completions/mean_length"])


def replay_ours(trainer: Any, task: Task, named: Any = None) -> dict[str, Any]:
    """A step of an `OnlineTrainer` on the task's completions, the gradients of each update kept.

    Args:
        trainer: ours.
        task: whose rows have completions.
        named: gives the names and parameters whose gradients are kept; None for those of the policy.
    """
    updates = 0

    def keep(*_: Any) -> None:
        nonlocal updates
        parameters = (named or trainer.model.named_parameters)()
        save_gradients(parameters, gradients_file(task, updates))
        updates += 1

    trainer.optimizer.register_step_pre_hook(keep)
    trainer.prepare()
    prompts = [trainer.examples[i] for i in range(task.prompts_per_step)]
    rollouts = [
        [
            _rollout(trainer.model, row["prompt_ids"], ids, task.new_tokens, trainer.config.temperature)
            for ids in row["completions"]
        ]
        for row in task.read_rows()[: task.prompts_per_step]
    ]
    completions, table = trainer.score(prompts, rollouts, task.num_generations)
    metrics = trainer.compute_advantages(completions, table)
    metrics |= trainer.update(completions, len(prompts))
    return {"metrics": metrics, "loss": metrics["loss"], "rewards": table.total.tolist()}


def _rollout(model: Any, prompt_ids: list[int], ids: list[int], longest: int, temperature: float) -> Any:
    """A completion as an engine would have given it, its log-probs from the plain model."""
    import torch

    from rlhf_infer import Rollout

    with torch.no_grad():
        logits = model(torch.tensor([prompt_ids + ids])).logits[0, len(prompt_ids) - 1 : -1]
    logps = (logits / temperature).log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]
    return Rollout(prompt_ids, ids, logps.tolist(), "length" if len(ids) == longest else "stop")


def train_trl(task: Task, pace: Pace) -> None:
    """TRL's `GRPOTrainer`, told to pause between steps and timed inside of them."""
    from datasets import Dataset
    from trl.trainer.grpo_config import GRPOConfig

    seen = Seen()
    settings = {"per_device_train_batch_size": task.completions_per_step, **task.settings}
    config = GRPOConfig(
        output_dir=task.path("trl"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        gradient_accumulation_steps=task.completions_per_step // settings["per_device_train_batch_size"],
        num_generations=task.num_generations,
        max_completion_length=task.new_tokens,
        generation_kwargs={"min_new_tokens": task.new_tokens},
        shuffle_dataset=False,
        max_steps=task.steps,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **settings,
    )
    trainer = _trl_trainer(task, seen)(
        model=task.path("policy"),
        reward_funcs=seen.reward,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": row["prompt"]} for row in task.read_rows()]),
        callbacks=[_trl_callback(task, pace, seen)],
    )
    if task.check:
        move(trainer.model)
    pace.ready({key: value for key, value in config.to_dict().items() if "dir" not in key})
    trainer.train()


@dataclass
class Seen:
    """What a step of TRL's was seen to do; seconds."""

    began: float = 0.0
    rollout: float = 0.0
    before_update: float = 0.0
    length: float = 0.0
    loss: float = 0.0
    rewards: list[float] = field(default_factory=list)

    def reward(self, completions: Sequence[str], **_: Any) -> list[float]:
        """The reward function, its results kept."""
        self.rewards = vowels(completions)
        return self.rewards

    def report(self, *, check: bool) -> dict[str, Any]:
        """What is reported of a step."""
        if check:
            return {"loss": self.loss, "rewards": self.rewards}
        update = time.perf_counter() - self.began - self.before_update
        score = self.before_update - self.rollout
        return {"rollout": self.rollout, "score": score, "update": update, "length": self.length}


def _trl_trainer(task: Task, seen: Seen) -> Any:
    from trl.trainer.grpo_trainer import GRPOTrainer

    rows = task.read_rows()

    class Trainer(GRPOTrainer):
        def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
            if task.check:
                wanted = [row["prompt_ids"] for row in rows for _ in row["completions"]]
                if [list(ids) for ids in prompt_ids] != wanted[: len(prompt_ids)]:
                    raise ValueError("TRL reads the prompts as other tokens")
                return [ids for row in rows for ids in row["completions"]][: len(prompt_ids)], None
            started = time.perf_counter()
            result = super()._generate_single_turn(prompt_ids, *args, **kwargs)
            seen.rollout = time.perf_counter() - started
            seen.length = sum(map(len, result[0])) / len(result[0])
            return result

        def _generate_and_score_completions(self, *args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            result = super()._generate_and_score_completions(*args, **kwargs)
            seen.before_update = time.perf_counter() - started
            return result

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            seen.loss += loss.item()
            return loss

    return Trainer


def _trl_callback(task: Task, pace: Pace, seen: Seen) -> Any:
    from transformers import TrainerCallback

    class Callback(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step:
                pace.step_done(**seen.report(check=False))
            seen.began = time.perf_counter()

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
            if task.check:
                save_gradients(model.named_parameters(), gradients_file(task, 0))

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            pace.step_done(**seen.report(check=task.check))

    return Callback()


if __name__ == "__main__":
    task = Task.read(sys.argv[1])
    {"ours": train_ours, "trl": train_trl}[task.side](task, start(task))
