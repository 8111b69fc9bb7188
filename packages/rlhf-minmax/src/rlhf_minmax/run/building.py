"""A game put together: models built or loaded, players, scorers and the pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rlhf_algos import check_same_on_all, few_threads_for_a_small_model, samplers, shards_weights
from rlhf_algos.process_group import init_process_group, world_size
from rlhf_data import RunFolder
from rlhf_minmax.config.run import MinMaxConfig
from rlhf_minmax.demo.builder import DemoModels, demo_models, with_judge_of
from rlhf_minmax.demo.held_out import with_held_out_reward
from rlhf_minmax.game.forward_pass import MinMaxPipeline
from rlhf_minmax.game.stories import Stories
from rlhf_minmax.players.players import load_players
from rlhf_minmax.players.sharded import ShardedGame
from rlhf_minmax.players.workers import GameWorkers
from rlhf_minmax.run.distributed import check_built, plan_devices
from rlhf_minmax.run.events import Events
from rlhf_minmax.scorers.distributed import held_out_together, sharded_modules, shared_out
from rlhf_minmax.scorers.loading import HeldOut, ScorerLoader, needs_demo, needs_held_out_reward
from rlhf_models import DeviceManager

_WITHOUT_MODEL = ("rule", "validator")


@dataclass(frozen=True)
class Game:
    """The game, the scorers that are kept out of it, and the models built for it."""

    pipeline: MinMaxPipeline
    held_out: HeldOut
    demo: DemoModels | None


def build_game(
    config: MinMaxConfig,
    stories: Stories,
    devices: DeviceManager | None = None,
    events: Events | None = None,
    cache_folder: Path | None = None,
    *,
    rebuild: bool = False,
) -> Game:
    """Build the models that are not named, or take them from the cache, and load everything.

    Args:
        config: the run's settings.
        stories: its records and prompts.
        devices: which role runs where; None for what `plan_devices` says.
        events: called with every step of building.
        cache_folder: where built models are kept; None is the user's cache folder.
        rebuild: build them even where they are cached.

    Raises:
        UserError: a built model misses its gate without `force`, or a model cannot be loaded.
    """
    devices, events = devices or plan_devices(config), events or Events()
    demo = _built_models(config, stories, events, cache_folder, rebuild) if needs_demo(config) else None
    sharded = config.training.is_sharded and shards_weights(config.training.hardware()) and world_size() > 1
    if sharded:
        init_process_group()
    players = load_players(config, str(demo.base) if demo else None, devices, sharded=sharded)
    few_threads_for_a_small_model(players.policy.model)
    loader = ScorerLoader(config, demo, devices, players, sharded)
    reward, judge = loader.reward_model(), loader.judge(stories.prompts)
    held_out = loader.held_out(stories.prompts)
    shared = None
    if config.training.is_sharded:
        scorers = (reward, judge, held_out.reward_model, held_out.judge)
        shared = ShardedGame(players, *sharded_modules(scorers), config)
    pipeline = MinMaxPipeline(
        players,
        shared_out(reward, None, shared),
        shared_out(judge, config.judge_model, shared),
        stories.prompts,
        config,
        shared=shared,
    )
    return Game(pipeline, held_out_together(held_out, config.held_out.judge, shared), demo)


@contextmanager
def with_workers(game: Game, config: MinMaxConfig, run: RunFolder) -> Iterator[Game]:
    """Within this context the game is sampled by workers, where the settings say so.

    Raises:
        UserError: Ray is missing, no cluster answers, or it has no room for the workers.
    """
    if samplers(config) is None:
        yield game
        return
    with GameWorkers(game.pipeline.players, config, run) as workers:
        yield replace(game, pipeline=replace(game.pipeline, workers=workers))


def _built_models(
    config: MinMaxConfig, stories: Stories, events: Events, cache_folder: Path | None, rebuild: bool
) -> DemoModels:
    check_built(config, stories, cache_folder)
    settings = config.demo_settings()
    built = stories.building, stories.prompts, settings
    demo = demo_models(
        *built,
        seed=config.seed,
        cache_folder=cache_folder,
        rebuild=rebuild,
        progress=events.demo_step,
        force=config.force,
    )
    if stories.judged is not None:
        demo = with_judge_of(
            demo,
            stories.judged,
            stories.prompts,
            settings,
            seed=config.seed,
            progress=events.demo_step,
            force=config.force,
        )
    if needs_held_out_reward(config):
        demo = with_held_out_reward(demo, *built, seed=config.seed, progress=events.demo_step)
    check_same_on_all(*filter(None, asdict(demo).values()))
    return demo


def model_names(config: MinMaxConfig, demo: DemoModels | None) -> dict[str, str | None]:
    """Folder or hub name by role; the kind of a judge that has no model."""
    built = {name: str(path) for name, path in asdict(demo).items() if path} if demo else {}
    judge = config.judge_model
    return {
        "policy": config.policy_model.model_name or built.get("base"),
        "monitor": config.monitor_model.model_name or built.get("base"),
        "reward": config.reward_model.model_name or built.get("reward"),
        "judge": judge.kind if judge.kind in _WITHOUT_MODEL else judge.model_name or built.get("judge"),
    }
