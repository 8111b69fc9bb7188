"""Base of GRPO and PPO: rollout, scoring, advantages, updates."""

from __future__ import annotations

import logging
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from rlhf_algos.configs.online import OnlineConfig
from rlhf_algos.engine.language_model import LogpsModule
from rlhf_algos.engine.optimizer_step import combined, epoch_order
from rlhf_algos.engine.step_examples import steps_of
from rlhf_algos.online.rollouts import (
    Completion,
    StepTable,
    completions_of,
    flat,
    idle_completion,
    keep_tokens,
    rollout_metrics,
    table_row,
)
from rlhf_algos.online.samples import keep_samples, stage_rows, start_completions
from rlhf_algos.online.step_engine import (
    SamplingTrainer,
    StepEngine,
    computes_as_trainer,
    engine_for,
    engine_state,
    in_batches,
    keep_guesses,
    load_engine_state,
    sampling_params,
    settled,
    step_rollouts,
    step_scores,
    sync_weights,
)
from rlhf_algos.parallel.lockstep import generate_together
from rlhf_algos.tracking.run_facts import pace
from rlhf_data import PackedBatch, PromptExample, TokenSequence, UserError, pack
from rlhf_infer import (
    GenerationEngine,
    Measured,
    RewardFunctions,
    Rollout,
    SamplingParams,
    TransformersEngine,
)
from rlhf_models import evaluating

_LOG = logging.getLogger(__name__)
_EVALUATION, _STAGE, _START = 1 << 31, 1 << 30, 1 << 29
"""Values that take the place of the step in the sampling seed."""


class OnlineTrainer(SamplingTrainer):
    """Samples completions, scores them with reward functions and updates the policy on them, step by step.

    A step is one rollout and all its updates, so that between steps there is nothing to remember but model,
    optimizer and controllers, and with `speculation` the completions of the last epoch.  A completion's
    random numbers depend on the seed, the step (not with `common_random_numbers`), its prompt and its number
    only, so rollouts do not depend on the number of processes.

    Args:
        model: a transformers causal LM, or a PeftModel around one.
        config: the settings.
        examples: the training prompts.
        rewards: rewards of completions.
        tokenizer: the model's tokenizer.
        eval_examples: prompts that `evaluate` measures.
        engine: samples; None makes a `TransformersEngine`.
        ref_model: another reference than the model itself.
        **options: see `BaseTrainer`.

    Raises:
        UserError: no prompts, or settings that do not go together.
    """

    shown_metrics: ClassVar[tuple[str, ...]] = ("reward", "kl", "completions/mean_length")
    samples_rollouts = True
    compares_groups: ClassVar[bool] = False
    """Whether completions of a prompt are compared with one another, so that equal ones teach nothing."""
    token_fields: ClassVar[tuple[str, ...]] = ("old_logps", "ref_logps", "advantages", "sampling_logps")
    """Names of `Completion.tokens` that the loss reads."""
    terms_per_token: float
    """Ratio of the current update's loss divisor to the number of its tokens that count."""
    config: OnlineConfig

    def __init__(
        self,
        model: Any,
        config: OnlineConfig,
        examples: Sequence[PromptExample],
        *,
        rewards: RewardFunctions,
        tokenizer: Any,
        eval_examples: Sequence[PromptExample] = (),
        engine: GenerationEngine | None = None,
        ref_model: Any = None,
        **options: Any,
    ) -> None:
        self._ref_model = ref_model
        self.rewards = rewards
        self.terms_per_token = 1.0
        self._reward_metrics: dict[str, float] = {}  # what this process's reward functions logged last
        self.engine = engine_for(config, model, tokenizer, engine)
        super().__init__(model, config, examples, eval_examples=eval_examples, tokenizer=tokenizer, **options)
        prompts = self.global_batch_size
        _LOG.info("a step: %d prompts, %d completions of each", prompts, config.num_generations)

    @abstractmethod
    def compute_advantages(self, completions: Sequence[Completion], table: StepTable) -> dict[str, float]:
        """Give this process's completions their advantages; metrics of the whole step."""

    @property
    def global_batch_size(self) -> int:
        """Prompts of a step, over all processes."""
        try:
            return self.config.prompts_per_step(self.parallel.world_size)
        except ValueError as error:
            raise UserError(str(error), code="uneven_groups") from error

    def sequences(self, example: PromptExample) -> Sequence[TokenSequence]:
        """The prompt."""
        return [TokenSequence(example.prompt_ids, len(example.prompt_ids))]

    def micro_batches(
        self, examples: Sequence[Any], sequences: Callable[[Any], Sequence[TokenSequence]] | None = None
    ) -> Iterator[tuple[PackedBatch, list[Any]]]:
        """Completions packed by the token budget, those of a prompt sharing it."""
        for batch in pack([each.sequence for each in examples], self.config.max_tokens_per_batch):
            yield batch, [examples[i] for i in batch.sequence_ids.tolist()]

    def build_scorer(self, model: Any) -> nn.Module:
        """The policy, with its reference if that is a separate model."""
        if not self.config.needs_reference and self._ref_model is None:
            return LogpsModule(model)
        return LogpsModule.with_reference(model, self._ref_model)

    def train_step(self, examples: Sequence[PromptExample]) -> dict[str, float]:
        """One rollout on these prompts, of which this process takes its share, and all its updates.

        Returns:
            Metrics of rollout and updates (means over the updates), `num_updates`, `time/rollout`,
            `time/score`, `time/update` in seconds, and the metrics of `BaseTrainer.train_step`.

        Raises:
            UserError: a reward function failed, or the loss or the gradient became NaN or infinite.
        """
        started = time.perf_counter()
        self.prepare()
        self.scorer.eval()
        rollouts, measured = step_rollouts(self, examples)
        sampled = time.perf_counter()
        completions, table = self.score(examples, rollouts, self.config.num_generations, measured)
        metrics = rollout_metrics(table) | self._reward_metrics | self.compute_advantages(completions, table)
        metrics |= keep_guesses(self.engine, rollouts)
        assessed = time.perf_counter()
        self.scorer.train()
        metrics |= self.update(completions, len(examples))
        every = self.config.sample_steps
        if every and self.run and self.parallel.is_main and (self.step + 1) % every == 0:
            keep_samples(self.run, self.step + 1, completions, table, self.tokenizer)
        self.step += 1
        metrics["epoch"] = self.step / self.steps_per_epoch
        metrics["num_tokens"] = self.num_tokens
        metrics["time/rollout"], metrics["time/score"] = sampled - started, assessed - sampled
        metrics["time/update"] = time.perf_counter() - assessed
        return metrics | pace(started, len(table.total), device=self.device)

    def sample(
        self, prompts: Sequence[PromptExample], n: int, *, seed: int, temperature: float | None = None
    ) -> list[list[Rollout]]:
        """`n` completions of each of this process's share of the prompts, by the present policy."""
        own = prompts[self.parallel.rank :: self.parallel.world_size]
        sync_weights(self)
        params = sampling_params(self.config, seed, temperature)
        return self.generate([prompt.prompt_ids for prompt in own], n, params)

    def generate(
        self, prompts: Sequence[Sequence[int]], n: int, params: SamplingParams
    ) -> list[list[Rollout]]:
        """`n` completions of each prompt by the engine; every process must call it, also without prompts."""
        engine, size = self.engine, self.config.prompts_per_batch
        if not (self.parallel.shards_weights and isinstance(engine, TransformersEngine)):
            with self.parallel.autocast():
                return in_batches(engine, prompts, n, params, size)
        call: Any = self.scorer.call
        return generate_together(
            self.parallel, engine, call, lambda: in_batches(engine, prompts, n, params, size)
        )

    def score(
        self,
        prompts: Sequence[PromptExample],
        rollouts: Sequence[Sequence[Rollout]],
        n: int,
        measured: Sequence[Measured] | None = None,
    ) -> tuple[list[Completion], StepTable]:
        """See `SamplingTrainer.score`."""
        completions = completions_of(
            prompts, rollouts, self.tokenizer, rank=self.parallel.rank, world=self.parallel.world_size
        )
        width = len(self.rewards.names) + 4
        rows = torch.zeros(len(prompts) * n, width, device=self.device)
        scores = step_scores(self, completions, n, measured)
        if scores is not None:
            self._reward_metrics = dict(scores.metrics)
            facts = [completion.facts(self.engine.eos_token_ids) for completion in completions]
            places = torch.tensor([completion.index for completion in completions])
            rows[places.to(self.device)] = table_row(scores.rewards, scores.total, facts).to(self.device)
        rows = self.parallel.sum(rows).cpu()
        return completions, StepTable.of(tuple(self.rewards.names), rows, n)

    def update(self, completions: Sequence[Completion], num_prompts: int) -> dict[str, float]:
        """All passes over the completions of a step; means of the updates' metrics.

        Args:
            completions: this process's, with their advantages.
            num_prompts: prompts in the step, over all processes.
        """
        done, taken = list[dict[str, float]](), False
        for number in range(self.config.passes):
            for prompts in self._mini_batches(num_prompts, number):
                own = [each for each in completions if each.index // self.config.num_generations in prompts]
                share = self._cut(own, lambda: self._filler(completions))
                tokens = self._total(sum(each.length for each in own if each.weight))
                if not tokens:  # AdamW would move the weights by its memory of earlier gradients
                    continue
                self.terms_per_token = share.total / tokens
                metrics, stepped = self._update(share, observe=not done)
                taken = taken or stepped
                self.num_tokens += self._total(sum(b.num_tokens for b, _, real in share.batches if real))
                done.append(metrics)
                if self.exceeds_target_kl(metrics):
                    break
            if done and self.exceeds_target_kl(done[-1]):
                break
        if not done:
            _LOG.info("step %d: no update, because every completion is masked", self.step + 1)
        if taken:
            self.scheduler.step()
        return combined(done) | {"num_updates": float(len(done))}

    def save_checkpoint(self, metrics: Mapping[str, float] | None = None) -> None:
        """See `BaseTrainer.save_checkpoint`; steps that an engine has begun are finished first."""
        with settled(self.engine, self.run):
            super().save_checkpoint(metrics)

    def extra_state(self) -> dict[str, Any]:
        """State of the reward functions, and of an engine that samples ahead or guesses."""
        return {"reward_functions": self.rewards.state()} | engine_state(self.engine)

    def load_extra_state(self, state: dict[str, Any]) -> None:
        """Restore the state that `extra_state` returned."""
        self.rewards.load_state(state["reward_functions"])
        load_engine_state(self.engine, state)

    def after_rollback(self) -> None:
        """Have an engine that samples ahead begin anew: what it sampled is of prompts in the old order."""
        if isinstance(self.engine, StepEngine):
            self.engine.restart(self.step)

    def close(self) -> None:
        """Close the engine."""
        self.engine.close()

    def exceeds_target_kl(self, metrics: Mapping[str, float]) -> bool:
        """Whether the policy is so far from the one that sampled that updates on this rollout end."""
        return False

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Rewards and lengths of completions of `eval_examples`, their names with `eval_` in front.

        The same random numbers are used each time.

        Raises:
            ValueError: there are no `eval_examples`.
            UserError: a reward function failed.
        """
        if not len(self.eval_examples):
            raise ValueError("there is nothing to evaluate on: the trainer was made without eval_examples")
        self.prepare()
        n = self.config.num_generations_eval
        count = len(self.eval_examples)
        [prompts] = steps_of(self.eval_examples, range(count), range(0, count, count), self.parallel)
        temperature = self.config.eval_temperature
        with evaluating(self.scorer):
            rollouts = self.sample(prompts, n, seed=self.seed_of(_EVALUATION), temperature=temperature)
            completions, table = self.score(prompts, rollouts, n)
            metrics = rollout_metrics(table) | self._reward_metrics
            if self.config.needs_reference:
                metrics["kl"] = self._divergence(completions, temperature)
        return {f"eval_{name}": value for name, value in metrics.items()} | self.ref_kl()

    def stage_rows(self) -> list[dict[str, Any]]:
        """As in `LanguageModelTrainer`, with rewards; every process must call it."""
        return stage_rows(self, seed=self.seed_of(_STAGE))

    def compared_sequences(self, count: int) -> list[TokenSequence]:
        """Completions of the first `count` held-out prompts, drawn from the model as it is now."""
        return start_completions(self, count, seed=self.seed_of(_START))

    def compute_known_logps(
        self,
        completions: Sequence[Completion],
        *,
        reference: bool,
        policy: bool = True,
        temperature: float | None = None,
    ) -> None:
        """Give completions `sampling_logps`, and on request `old_logps` and `ref_logps`: (T,) on the CPU.

        The engine's log-probs, `sampling_logps`, serve as the old ones where it computed them from the same
        weights in the same precision; otherwise the trainer computes the old ones.

        Args:
            completions: this process's.
            reference: whether the reference's are wanted.
            policy: whether the policy's are wanted.
            temperature: that they were sampled at; both are scored at it, at 1 when greedy, as the engine
                does. None means that of training.
        """
        temperature = self.config.temperature if temperature is None else temperature or 1.0
        compute = policy and not self.engine_is_exact
        for completion in completions:
            logps = torch.tensor(completion.rollout.logps)
            completion.tokens["sampling_logps"] = logps
            if policy and not compute:
                completion.tokens["old_logps"] = logps
        if not (compute or reference):
            return
        share = self._cut(completions, lambda: self._filler(completions))
        with torch.no_grad():
            for batch, members, real in share.batches:
                batch = batch.to(self.device)
                if compute:
                    scores = self.forward(batch, temperature=temperature)
                    keep_tokens("old_logps", scores.logps, members, real)
                if reference:
                    scores = self.forward(batch, temperature=temperature, reference=True)
                    keep_tokens("ref_logps", scores.logps, members, real)

    @property
    def corrects_sampling(self) -> bool:
        """Whether completions may be drawn from another distribution than the trainer's."""
        return self.config.use_vllm or getattr(self.engine, "max_staleness", 0) > 0

    @property
    def engine_is_exact(self) -> bool:
        """Whether the engine's log-probs are those that the trainer would compute."""
        return (
            computes_as_trainer(self.engine)
            and self.parallel.precision == "no"
            and self.parameters[0].dtype == torch.float32
        )

    def _mini_batches(self, num_prompts: int, number: int) -> list[set[int]]:
        """Prompts of each optimizer step of one pass over a step's completions."""
        parts = self.config.mini_batches
        seed = self.seed + self.step * self.config.passes + number
        order = epoch_order(num_prompts, 0, shuffle=parts > 1, seed=seed)
        size = -(-num_prompts // parts)
        return [set(order[start : start + size]) for start in range(0, num_prompts, size)]

    def _filler(self, completions: Sequence[Completion]) -> Sequence[Completion]:
        """A completion for a process that has none to take part with; it does not count."""
        if completions:
            return completions[:1]
        return [idle_completion(next(iter(self.examples)), self.engine.eos_token_ids[0], self.token_fields)]

    def _divergence(self, completions: Sequence[Completion], temperature: float | None) -> float:
        """Nats per token from the reference at this temperature, the k1 estimate over all completions."""
        self.compute_known_logps(completions, reference=True, temperature=temperature)
        sums = torch.zeros(2, device=self.device)
        if completions:
            old, ref = (flat(name, completions, self.device) for name in ("old_logps", "ref_logps"))
            sums = torch.stack([(old - ref).sum(), torch.tensor(len(old), device=self.device)])
        total, count = self.parallel.sum(sums.float()).tolist()
        return total / max(count, 1.0)

    def seed_of(self, step: int) -> int:
        """Seed of the sampling of a step."""
        same = self.config.common_random_numbers and step < _START
        return (self.seed << 32) + (0 if same else step)
