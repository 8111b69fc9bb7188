"""The two sides of `ppo_vs_trl.py`: `ppo_sides.py TASK.json`; TRL's environment lacks this toolkit."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any

from online_pace import Pace, Task, gradients_file, move, save_gradients, start

_UNCLIPPED = 1e9
"""Gradient norm that is never reached: TRL's PPO does not clip gradients."""


def train_ours(task: Task, pace: Pace) -> None:
    """This toolkit's `PPOTrainer`, its value model started from the reward model."""
    from grpo_sides import replay_ours

    from rlhf_algos import PPOConfig, PPOTrainer
    from rlhf_data import PromptExample
    from rlhf_infer.rewards import RewardFunctionFactory, RewardFunctions
    from rlhf_models import RewardModel, load_causal_lm, load_tokenizer

    rows = task.read_rows()
    prompts = [PromptExample(row["prompt"], tuple(row["prompt_ids"]), {}) for row in rows]
    config = PPOConfig.from_dict(
        {
            "per_device_train_batch_size": task.completions_per_step,
            "num_generations": task.num_generations,
            "max_completion_length": task.new_tokens,
            "min_completion_length": task.new_tokens,
            "value_model_path": task.path("reward"),
            "max_steps": task.steps,
            "max_grad_norm": _UNCLIPPED,
            "shuffle": False,
            "save_steps": None,
            "bf16": False,
            **task.settings,
        }
    )
    reward_model = RewardModel.from_pretrained(task.path("reward"), dtype="float32")
    reward_model.append_eos = False  # TRL reads the score at the last sampled token
    trainer = PPOTrainer(
        load_causal_lm(task.path("policy"), dtype="float32"),
        config,
        prompts,
        rewards=RewardFunctions([RewardFunctionFactory.from_model(reward_model)]),
        tokenizer=load_tokenizer(task.path("policy")),
    )
    pace.ready(config.model_dump(mode="json"))
    if task.check:
        move(trainer.model)
        pace.step_done(**replay_ours(trainer, task, lambda: _named(trainer.model, trainer.value_model.model)))
        return
    size = task.prompts_per_step
    for first in range(0, task.steps * size, size):
        metrics = trainer.train_step(prompts[first : first + size])
        parts = {part: metrics[f"time/{part}"] for part in ("rollout", "score", "update")}
        pace.step_done(**parts, length=metrics["completions/mean_length"])


def train_trl(task: Task, pace: Pace) -> None:
    """TRL's `PPOTrainer`, told to pause between steps and timed inside of them."""
    import torch
    from datasets import Dataset
    from torch.utils.data import DataLoader
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
    from trl.experimental.ppo import PPOConfig  # pyright: ignore[reportMissingImports]

    settings = {"per_device_train_batch_size": task.completions_per_step, **task.settings}
    config = PPOConfig(
        output_dir=task.path("trl"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        gradient_accumulation_steps=task.completions_per_step // settings["per_device_train_batch_size"],
        total_episodes=task.completions_per_step * task.steps,
        response_length=task.new_tokens,
        num_sample_generations=0,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **settings,
    )
    rows = task.read_rows()
    inputs = [{"input_ids": row["prompt_ids"]} for row in rows for _ in range(task.num_generations)]
    seen: dict[str, Any] = {"updates": 0}
    load = {"dtype": torch.float32}
    trainer = _trl_trainer(seen)(
        args=config,
        processing_class=AutoTokenizer.from_pretrained(task.path("policy"), padding_side="left"),
        model=AutoModelForCausalLM.from_pretrained(task.path("policy"), **load),
        ref_model=None,
        reward_model=AutoModelForSequenceClassification.from_pretrained(task.path("reward"), **load),
        value_model=AutoModelForSequenceClassification.from_pretrained(task.path("reward"), **load),
        train_dataset=Dataset.from_list(inputs),
        callbacks=[_trl_callback(task, pace, seen)],
    )
    # The same prompts in the same order as ours, which its own loader shuffles.
    size, collator = task.completions_per_step, trainer.data_collator
    trainer.dataloader = DataLoader(inputs, batch_size=size, collate_fn=collator)  # pyright: ignore
    _watch(trainer, task, seen)
    pace.ready({key: value for key, value in config.to_dict().items() if "dir" not in key})
    trainer.train()


def _trl_trainer(seen: dict[str, Any]) -> Any:
    from trl.experimental.ppo import PPOTrainer  # pyright: ignore[reportMissingImports]

    class Trainer(PPOTrainer):
        def log(self, logs: dict[str, float], *_: Any) -> None:
            seen["metrics"] = logs

    return Trainer


def _trl_callback(task: Task, pace: Pace, seen: dict[str, Any]) -> Any:
    from transformers import TrainerCallback

    class Callback(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if task.check:
                metrics = seen["metrics"]
                loss = metrics["loss/policy_avg"] + args.vf_coef * metrics["loss/value_avg"]
                pace.step_done(loss=loss, rewards=seen["rewards"])
            else:
                pace.step_done(rollout=seen["rollout"], length=seen["length"])

    return Callback()


def _watch(trainer: Any, task: Task, seen: dict[str, Any]) -> None:
    """Time TRL's generation or, in a check, give it the completions and keep rewards and gradients."""
    import torch
    from trl.experimental.ppo import ppo_trainer  # pyright: ignore[reportMissingImports]

    generate, get_reward = ppo_trainer.batch_generation, ppo_trainer.get_reward

    def timed(model: Any, queries: Any, *args: Any) -> Any:
        started = time.perf_counter()
        result = generate(model, queries, *args)
        seen["rollout"] = time.perf_counter() - started
        seen["length"] = float(result[0].shape[1] - queries.shape[1])
        return result

    def replayed(model: Any, queries: Any, size: int, pad: int, generation_config: Any) -> Any:
        rows = task.read_rows()[: task.prompts_per_step]
        ids = torch.cat([queries, torch.tensor([ids for row in rows for ids in row["completions"]])], 1)
        logits = ppo_trainer.forward(model, ids, pad).logits[:, queries.shape[1] - 1 : -1]
        return ids, logits / generation_config.temperature

    def watched(model: Any, *args: Any) -> Any:
        result = get_reward(model, *args)
        if model is trainer.reward_model:
            seen["rewards"] = seen.get("rewards", []) + result[1].tolist()
        return result

    def keep(*_: Any) -> None:
        named = _named(trainer.policy_model, trainer.value_model)
        save_gradients(named, gradients_file(task, seen["updates"]))
        seen["updates"] += 1

    ppo_trainer.batch_generation = replayed if task.check else timed
    if task.check:
        ppo_trainer.get_reward = watched
        move(trainer.policy_model)
        trainer.optimizer.optimizer.register_step_pre_hook(keep)


def _named(policy: Any, value: Any) -> Iterator[tuple[str, Any]]:
    """The parameters of policy and value model under names that both sides share."""
    for prefix, model in (("policy", policy), ("value", value)):
        for name, parameter in model.named_parameters():
            yield f"{prefix}.{name}", parameter


if __name__ == "__main__":
    task = Task.read(sys.argv[1])
    {"ours": train_ours, "trl": train_trl}[task.side](task, start(task))
