"""The engine interface of online trainers, with engines that sample whole steps ahead."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from rlhf_algos.configs.online import OnlineConfig, SamplingConfig
from rlhf_algos.engine.language_model import LanguageModelTrainer
from rlhf_algos.engine.step_examples import order_of, steps_of
from rlhf_algos.online.rollouts import Completion, StepTable, in_parts, samples_of
from rlhf_algos.process_group import broadcast
from rlhf_data import PromptExample, RunFolder, UserError
from rlhf_infer import (
    GenerationEngine,
    Measured,
    PreviousCompletions,
    RewardFunctions,
    RewardScores,
    Rollout,
    SamplingParams,
    SpeculativeDecoder,
    TransformersEngine,
)


@runtime_checkable
class StepEngine(GenerationEngine, Protocol):
    """A generation engine that keeps versions of the weights, and the steps that it has begun."""

    max_staleness: int
    """Steps by which sampling runs ahead of the trainer."""
    exact: bool
    """Whether it computes log-probs as the trainer would, of its present weights."""
    prompts_per_batch: int
    """Prompts whose completions are sampled together, and scored."""

    def publish(self, model: Any, version: int) -> None:
        """Load the weights of the trainer's model, as of `version` steps."""
        ...

    def begin(self, step: int, prompts: Sequence[PromptExample], n: int, params: SamplingParams) -> None:
        """Begin to sample a step, with the weights after max(0, step - max_staleness) steps."""
        ...

    def finish(self, step: int) -> tuple[list[list[Rollout]], list[Measured] | None]:
        """The completions of a step that has begun; what reward functions gave, where the engine has them."""
        ...

    def settle(self) -> None:
        """Wait for the steps that have begun, and write them to disk."""
        ...

    def forget(self, step: int) -> None:
        """Delete what is on disk of earlier steps."""
        ...

    def state(self) -> dict[str, Any]:
        """State for checkpoints."""
        ...

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the state that `state` returned; drop the steps that have begun."""
        ...

    def restart(self, step: int) -> None:
        """Drop the steps that have begun; sample this step and later ones with its weights or newer ones."""
        ...


class SamplingTrainer(LanguageModelTrainer[PromptExample]):
    """A trainer that samples with an engine and scores with reward functions."""

    engine: GenerationEngine
    rewards: RewardFunctions
    config: OnlineConfig

    @abstractmethod
    def sample(
        self, prompts: Sequence[PromptExample], n: int, *, seed: int, temperature: float | None = None
    ) -> list[list[Rollout]]:
        """`n` completions of each of this process's share of the prompts, by the present policy."""

    @abstractmethod
    def score(
        self,
        prompts: Sequence[PromptExample],
        rollouts: Sequence[Sequence[Rollout]],
        n: int,
        measured: Sequence[Measured] | None = None,
    ) -> tuple[list[Completion], StepTable]:
        """This process's completions with their texts, and the rewards of all of them.

        Args:
            prompts: the prompts of all processes.
            rollouts: `n` for each of this process's share of the prompts.
            n: completions per prompt.
            measured: what reward functions gave for these batches, where that is known.

        Raises:
            UserError: a reward function failed.
        """

    @abstractmethod
    def seed_of(self, step: int) -> int:
        """Seed of the sampling of a step."""


def engine_for(
    config: OnlineConfig, model: Any, tokenizer: Any, engine: GenerationEngine | None
) -> GenerationEngine:
    """The engine of a trainer: the one that it is given, or one that samples from its model itself."""
    if not config.speculation:
        return engine or TransformersEngine(model, tokenizer, max_batch_tokens=config.max_kv_tokens)
    if engine is not None:
        raise UserError(
            "speculation is for the trainer's own engine; leave out speculation or the engine",
            code="conflicting_options",
        )
    return SpeculativeDecoder(model, tokenizer, PreviousCompletions(), max_batch_tokens=config.max_kv_tokens)


def keep_guesses(engine: GenerationEngine, rollouts: Sequence[Sequence[Rollout]]) -> dict[str, float]:
    """Keep a step's completions as the next epoch's drafts, if the engine decodes speculatively; metrics.

    These are, from the second epoch on, `speculation/agreement` (mean number of first tokens that equal those
    of the last epoch's completion) and `speculation/saving` (the speed-up that this predicts).
    """
    previous = _previous(engine)
    if previous is None:
        return {}
    previous.keep(rollouts)
    if previous.agreement is None or previous.saving is None:
        return {}
    return {"speculation/agreement": previous.agreement, "speculation/saving": previous.saving}


def _previous(engine: GenerationEngine) -> PreviousCompletions | None:
    drafter = engine.drafter if isinstance(engine, SpeculativeDecoder) else None
    return drafter if isinstance(drafter, PreviousCompletions) else None


def sampling_params(config: SamplingConfig, seed: int, temperature: float | None = None) -> SamplingParams:
    """Sampling parameters of a trainer; `temperature` replaces that of training."""
    coupled = isinstance(config, OnlineConfig) and config.common_random_numbers and not config.use_vllm
    return SamplingParams(
        config.max_completion_length,
        config.temperature if temperature is None else temperature,
        seed,
        top_p=config.top_p,
        top_k=config.top_k,
        min_p=config.min_p,
        repetition_penalty=config.repetition_penalty,
        stop=config.stop,
        min_new_tokens=config.min_completion_length,
        coupled=coupled,
    )


def sync_weights(trainer: SamplingTrainer) -> None:
    """Let a trainer's engine sample from the weights as they are now; every process must call it."""
    engine, parallel = trainer.engine, trainer.parallel
    if isinstance(engine, TransformersEngine):
        return  # it samples from the policy itself
    if isinstance(engine, StepEngine):
        _publish(trainer, engine)
        return
    with parallel.gathering(trainer.model) as sends:
        if sends:
            engine.update_weights(trainer.model)
    if parallel.world_size > 1:  # of several processes one talks to the server for all
        follow: Any = getattr(engine, "follow", None)
        name = broadcast(getattr(engine, "weights_name", None))
        if follow is not None and not parallel.is_main:
            follow(name)


def _publish(trainer: SamplingTrainer, engine: StepEngine) -> None:
    """Give a `StepEngine` the trainer's weights; every process must call it."""
    with trainer.parallel.gathering(trainer.model) as sends:
        if sends:
            engine.publish(trainer.model, trainer.step)


def in_batches(
    engine: GenerationEngine, prompts: Sequence[Any], n: int, params: SamplingParams, size: int | None
) -> list[list[Rollout]]:
    """`n` completions of each prompt, of which at most `size` are sampled together; None: all."""
    if isinstance(engine, StepEngine):  # it makes batches of its own, perhaps of all processes' prompts
        return engine.generate(prompts, n, params)
    if not size:
        return engine.generate(prompts, n, params) if prompts else []
    batches = (prompts[at : at + size] for at in range(0, len(prompts), size))
    return [group for batch in batches for group in engine.generate(batch, n, params)]


def prompts_together(trainer: SamplingTrainer) -> int | None:
    """Prompts whose completions a trainer samples and scores together; None: all of a step."""
    engine = trainer.engine
    return engine.prompts_per_batch if isinstance(engine, StepEngine) else trainer.config.prompts_per_batch


def step_scores(
    trainer: SamplingTrainer, completions: Sequence[Completion], n: int, measured: Sequence[Measured] | None
) -> RewardScores | None:
    """Rewards of this process's completions of a step, in the batches that are scored together.

    Every process must call it, even with no completions (then returns None).  `measured` is what
    reward functions gave for these batches, where that is known.
    """
    samples = samples_of(completions, trainer.step)
    if measured is None:
        together = prompts_together(trainer)
        size = len(completions) if together is None else n * together
        measured = trainer.rewards.measure(in_parts(samples, max(size, 1)))
    return trainer.rewards.joined(measured, samples) if completions else None


def step_rollouts(
    trainer: SamplingTrainer, prompts: Sequence[PromptExample]
) -> tuple[list[list[Rollout]], list[Measured] | None]:
    """The rollouts of the current step, see `StepEngine.finish`; begins up to `max_staleness` later steps."""
    engine, config = trainer.engine, trainer.config
    if not isinstance(engine, StepEngine):
        return trainer.sample(prompts, config.num_generations, seed=trainer.seed_of(trainer.step)), None
    _publish(trainer, engine)
    last = min(trainer.step + engine.max_staleness, trainer.total_steps - 1)
    for step in range(trainer.step, last + 1):
        asked = prompts if step == trainer.step else _prompts_of(trainer, step)
        engine.begin(step, asked, config.num_generations, sampling_params(config, trainer.seed_of(step)))
    return engine.finish(trainer.step)


def computes_as_trainer(engine: GenerationEngine) -> bool:
    """Whether an engine computes log-probs from the trainer's present weights, in the same way."""
    return engine.exact if isinstance(engine, StepEngine) else isinstance(engine, TransformersEngine)


@contextlib.contextmanager
def settled(engine: GenerationEngine, run: RunFolder | None) -> Iterator[None]:
    """Context in which a checkpoint can be written; on leaving, drops what no checkpoint needs any more."""
    if not isinstance(engine, StepEngine):
        yield
        return
    engine.settle()
    yield
    if run is not None and (kept := run.checkpoints()):
        engine.forget(min(step for step, _ in kept))


def engine_state(engine: GenerationEngine) -> dict[str, Any]:
    """State of an engine for checkpoints, by key."""
    if (previous := _previous(engine)) is not None:
        return {"previous": previous.state()}
    return {"engine": engine.state()} if isinstance(engine, StepEngine) else {}


def load_engine_state(engine: GenerationEngine, state: Mapping[str, Any]) -> None:
    """Restore the state that `engine_state` returned, which an older checkpoint may lack."""
    if isinstance(engine, StepEngine):
        engine.load_state(state.get("engine", {}))
    if (previous := _previous(engine)) is not None and "previous" in state:
        previous.load_state(state["previous"])


def _prompts_of(trainer: SamplingTrainer, step: int) -> Sequence[PromptExample]:
    """The prompts of a step that is still to come."""
    config, size = trainer.config, trainer.global_batch_size
    epoch, at = divmod(step, trainer.steps_per_epoch)
    order = order_of(trainer.examples, epoch, shuffle=config.shuffle, seed=trainer.seed)
    start = at * size
    return next(steps_of(trainer.examples, order, range(start, start + size, size), trainer.parallel))
