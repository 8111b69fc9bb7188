"""The sides of `minmax_speed.py`: `minmax_sides.py TASK.json`.

Both sides play with `MinMaxTrainer`: the same stories, rewards, constraint, losses (`rlhf_algos.losses`) and
AdamW. Players, generation, scoring of tokens and scorers are ours here, and in `minmax_padded.py` the peer's.
A third program trains the policy alone, by this toolkit's PPO.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from minmax_work import ROLES, VowelReward, game_config, script, with_adapters_for_scorers
from online_pace import Pace, Task, move, peak_memory_mb, start, vowels
from safetensors.torch import save_file

import rlhf_minmax.game.forward_pass
from rlhf_algos import PPOConfig, PPOTrainer
from rlhf_data import PromptExample, TokenSequence, pack
from rlhf_infer import Rollout, RuleJudge, SamplingParams, TransformersEngine
from rlhf_infer.rewards import RewardFunctionFactory, RewardFunctions
from rlhf_minmax import MinMaxConfig, MinMaxPipeline, MinMaxTrainer
from rlhf_minmax.game.stories import Stories, load_stories
from rlhf_minmax.players.players import load_players
from rlhf_minmax.scorers.loading import ScorerLoader
from rlhf_models import (
    DeviceManager,
    RewardModel,
    add_adapters,
    encode_prompt,
    load_causal_lm,
    load_tokenizer,
    token_logps,
)

LOSSES = ("monitor/loss", "monitor/kl", "policy/loss", "policy/kl", "minmax/value", "policy/judged_value")
"""Metrics of a step that the sides must agree on."""


class Clock:
    """Seconds of the parts of a step, and of what is not part of it."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """A step begins."""
        self.parts: dict[str, float] = {}
        self.untimed = self.untimed_cpu = 0.0
        self._started, self._started_cpu = time.perf_counter(), time.process_time()

    def passed(self) -> dict[str, float]:
        """Seconds since the step began, without the untimed: by the clock, and of processors together."""
        return {
            "seconds": time.perf_counter() - self._started - self.untimed,
            "cpu_seconds": time.process_time() - self._started_cpu - self.untimed_cpu,
        }

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Within this context nothing is counted."""
        started, started_cpu = time.perf_counter(), time.process_time()
        yield
        self.untimed += time.perf_counter() - started
        self.untimed_cpu += time.process_time() - started_cpu

    def watch(self, owner: Any, method: str, part: str) -> None:
        """Count the time of an object's method to a part."""
        function = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            started, untimed = time.perf_counter(), self.untimed
            result = function(*args, **kwargs)
            seconds = time.perf_counter() - started - (self.untimed - untimed)
            self.parts[part] = self.parts.get(part, 0.0) + seconds
            return result

        setattr(owner, method, timed)


def replaying_engine(clock: Clock) -> type[TransformersEngine]:
    """This toolkit's engine; what it has drawn is exchanged for the script, off the clock."""

    class Engine(TransformersEngine):
        def generate(
            self, prompts: Sequence[Sequence[int]], n: int, params: SamplingParams, *, first: int = 0
        ) -> list[list[Rollout]]:
            tokens = params.max_new_tokens
            drawn = super().generate(prompts, n, replace(params, min_new_tokens=tokens), first=first)
            assert all(len(rollout.completion_ids) == tokens for group in drawn for rollout in group)
            with clock.stopped():
                ids = [
                    (list(prompt), script(self.tokenizer, self.tokenizer.decode(prompt), sample, tokens))
                    for prompt in prompts
                    for sample in range(n)
                ]
                logps = _packed_logps(self.model, [TokenSequence(p + c, len(p)) for p, c in ids], tokens)
            rollouts = [Rollout(p, c, logp, "stop") for (p, c), logp in zip(ids, logps, strict=True)]
            return [rollouts[i : i + n] for i in range(0, len(rollouts), n)]

    return Engine


@torch.no_grad()
def _packed_logps(model: Any, sequences: list[TokenSequence], tokens: int) -> list[list[float]]:
    found: dict[int, list[float]] = {}
    for batch in pack(sequences, 2048):
        logps = token_logps(model, batch).logps.view(-1, tokens)
        found |= zip(batch.sequence_ids.tolist(), logps.tolist(), strict=True)
    return [found[i] for i in range(len(sequences))]


def our_trainer(task: Task, config: MinMaxConfig, stories: Stories, clock: Clock) -> MinMaxTrainer:
    """The game as it is: one backbone with two adapters, prefix trees, scorers with packed texts."""
    modules: Any = rlhf_minmax
    modules.pipeline.TransformersEngine = replaying_engine(clock)
    devices = DeviceManager({})
    players = load_players(config, task.path("base"), devices)
    for role in ROLES:
        getattr(players, role).load_weights(task.path(role))
    reward: Any = VowelReward()
    judge: Any = RuleJudge()
    if task.settings["scorers"] == "adapters":
        config = with_adapters_for_scorers(task)
    if task.settings["scorers"] != "none":
        reward = ScorerLoader(config, None, devices, players).reward_model()
        judge = ScorerLoader(config, None, devices, players).judge(stories.prompts)
    pipeline = MinMaxPipeline(players, reward, judge, stories.prompts, config)
    return MinMaxTrainer(pipeline, config, stories.train)


def padded_trainer(task: Task, config: MinMaxConfig, stories: Stories, clock: Clock) -> MinMaxTrainer:
    """The same game done the padded way with separate models."""
    from minmax_padded import build_trainer

    del clock  # this side's engine computes nothing but what is timed
    return build_trainer(task, config, stories)


def play(task: Task, pace: Pace, build: Callable[..., MinMaxTrainer]) -> None:
    """Iterations of the game, each when it is told to; times, losses, and what the first one changed."""
    config, clock, imported = game_config(task), Clock(), peak_memory_mb()
    stories = load_stories(config)
    trainer = build(task, config, stories, clock)
    pipeline, optimizer = trainer.pipeline, trainer.optimizer
    clock.watch(pipeline, "answer", "answers")
    clock.watch(pipeline, "criticise", "critiques")
    for method in ("rewards", "judge_scores", "bare_judge_scores"):
        clock.watch(pipeline, method, "scoring")
    logps = _keep_logps(optimizer)
    clock.watch(optimizer.monitor, "update", "monitor updates")
    clock.watch(optimizer.policy, "update", "policy update")
    pace.ready({"imported_mb": imported, "game": config.model_dump(mode="json")})
    for step in range(task.steps):
        clock.start()
        metrics = trainer.train_step()
        passed = clock.passed()
        if not step:
            for role in ROLES:
                _save_adapter(getattr(pipeline.players, role), task.path(f"{task.side}-{role}.safetensors"))
        pace.step_done(
            **passed,
            parts=clock.parts,
            losses={name: metrics[name] for name in LOSSES},
            updates=[metrics["monitor/updates"], metrics["policy/updates"]],
            logps={} if step else logps,
        )


def _keep_logps(optimizer: Any) -> dict[str, list[list[float]]]:
    """Log-probs of a step's completions before its updates, by player; filled while it trains."""
    kept: dict[str, list[list[float]]] = {}
    for role in ROLES:
        player = getattr(optimizer, role)
        update = player.update

        def kept_update(
            rollouts: Sequence[Rollout],
            advantages: torch.Tensor,
            *,
            updates: int,
            role: str = role,
            player: Any = player,
            update: Any = update,
        ) -> dict[str, float]:
            metrics = update(rollouts, advantages, updates=updates)
            kept[role] = getattr(player, "first_logps", [list(rollout.logps) for rollout in rollouts])
            return metrics

        player.update = kept_update
    return kept


def _save_adapter(player: Any, path: str) -> None:
    """Write a player's adapter under the names that peft gives to a saved one."""
    own = f".{player.adapter}."
    tensors = {
        name.replace(own, "."): parameter.detach().clone()
        for name, parameter in player.model.named_parameters()
        if "lora_" in name and own in name
    }
    save_file(tensors, path)


def train_ppo(task: Task, pace: Pace) -> None:
    """The policy alone: PPO with a value head on its trunk, the reference by switching the adapter off."""
    imported = peak_memory_mb()
    config, stories = game_config(task), load_stories(game_config(task))
    tokenizer = load_tokenizer(task.path("base"))
    texts = [stories.prompts.policy(record) for record in stories.train]
    prompts = [PromptExample(text, tuple(encode_prompt(tokenizer, text)), {}) for text in texts]
    tokens = config.policy_model.max_new_tokens
    settings = PPOConfig.from_dict(
        {
            "per_device_train_batch_size": task.completions_per_step,
            "num_generations": task.num_generations,
            "max_completion_length": tokens,
            "min_completion_length": tokens,
            "max_tokens_per_batch": config.training.max_tokens_per_batch,
            "learning_rate": config.training.policy_learning_rate,
            "value_model": "shared",
            "num_ppo_epochs": 1,
            "max_steps": task.steps,
            "shuffle": False,
            "save_steps": None,
            "bf16": False,
        }
    )
    reward: Any = vowels
    if task.settings["scorers"] == "models":
        reward = RewardFunctionFactory.from_model(RewardModel.from_pretrained(task.path("reward")))
    model = add_adapters(load_causal_lm(task.path("base"), dtype="float32"), ["policy"])
    move(model)
    trainer = PPOTrainer(model, settings, prompts, rewards=RewardFunctions([reward]), tokenizer=tokenizer)
    pace.ready({"imported_mb": imported, "ppo": settings.model_dump(mode="json")})
    size = task.prompts_per_step
    for first in range(0, task.steps * size, size):
        trainer.train_step(prompts[first : first + size])
        pace.step_done()


def main() -> None:
    """A side, as its task says."""
    task = Task.read(sys.argv[1])
    pace = start(task)
    if task.side.startswith("ppo"):
        train_ppo(task, pace)
    else:
        play(task, pace, padded_trainer if task.side.startswith("padded") else our_trainer)


if __name__ == "__main__":
    main()
