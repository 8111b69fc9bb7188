"""A tiny game: models built once in seconds.

They are trained enough that critiques parse now and then, and sampled hot enough that samples differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

SETTINGS = {
    "demo": {
        "pretrain_steps": 45,
        "min_verdict_accuracy": 0.0,
        "sft_steps": 20,
        "reward_steps": 10,
        "num_stories": 20,
        "judge_steps": 20,
        "batch_size": 16,
        "flawed_reward": False,
    },
    "data": {"train_stories": 64, "eval_stories": 12, "probe_stories": 8},
    "policy_model": {"max_new_tokens": 8, "temperature": 1.5},
    "monitor_model": {"max_new_tokens": 12, "temperature": 1.2},
    "training": {"batch_size": 4, "max_steps": 3, "monitor_warmup_steps": 1, "save_steps": 1},
    "game": {"num_generations": 3, "num_critiques": 3},
    "diagnostics": {"sample_steps": 2},
    "force": True,
}
EVERYTHING = (
    "policy_model.baseline=critic",
    "policy_model.lr_scheduler_type=linear",
    "policy_model.warmup_steps=2",
    "monitor_model.baseline=leave_one_out",
    "monitor_model.lr_scheduler_type=cosine",
    "constraint.rule=pid",
    "constraint.warmup_steps=1",
    "diagnostics.cross_play_steps=1",
    "guards.patience=2",
    "guards.zero_std_share=0.1",
)
"""Every controller, past player and memory that a checkpoint has to hold."""


@pytest.fixture
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing is most of a tiny run; where only numbers matter it is left out."""
    for name in ("training_curves", "minmax_figure", "write_minmax_report"):
        monkeypatch.setattr(f"rlhf_minmax.run.minmax_job.{name}", lambda *args: None)


@pytest.fixture
def quick_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dry runs that do not measure how long building takes, which is most of them; other tests do."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("rlhf_minmax.run.checks.build_seconds", lambda *_, **__: 60.0)


@pytest.fixture(scope="session")
def demo_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the tiny models are kept for the session."""
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="session")
def everything() -> tuple[str, ...]:
    """Overrides that switch on every controller, pool, average and memory."""
    return EVERYTHING


@pytest.fixture(scope="session")
def make_config() -> Callable[..., Any]:
    """Makes the tiny game's config, with overrides written as `section.key=value`."""
    from rlhf_data import apply_overrides
    from rlhf_minmax import MinMaxConfig

    return lambda *overrides: MinMaxConfig.from_dict(apply_overrides(SETTINGS, list(overrides)))


@pytest.fixture(scope="session")
def make_game(demo_cache: Path, make_config: Callable[..., Any]) -> Callable[..., Any]:
    """Makes (pipeline, stories) of the tiny game with fresh players, from overrides as of `make_config`."""
    from rlhf_minmax import MinMaxPipeline
    from rlhf_minmax.demo.builder import demo_models
    from rlhf_minmax.game.stories import load_stories
    from rlhf_minmax.players.players import load_players
    from rlhf_minmax.scorers.loading import ScorerLoader
    from rlhf_models import DeviceManager

    def make(*overrides: str) -> tuple[Any, Any]:
        config, devices = make_config(*overrides), DeviceManager({})
        stories = load_stories(config)
        demo = demo_models(
            stories.building,
            stories.prompts,
            config.demo,
            seed=config.seed,
            cache_folder=demo_cache,
            force=config.force,
        )
        pipeline = MinMaxPipeline(
            load_players(config, str(demo.base), devices),
            ScorerLoader(config, demo, devices).reward_model(),
            ScorerLoader(config, demo, devices).judge(stories.prompts),
            stories.prompts,
            config,
        )
        return pipeline, stories

    return make


@pytest.fixture(scope="session")
def game(make_game: Callable[..., Any]) -> Any:
    """A tiny game (pipeline, stories) whose players no test may train."""
    return make_game()


class ScriptedEngine:
    """Stands in for the generation engine; `reply(prompt, sample)` writes, `<cut>` at its end truncates."""

    reply: Callable[[str, int], str]

    def __init__(self, model: Any, tokenizer: Any, **options: Any) -> None:
        del model, options
        self.tokenizer = tokenizer

    def generate(
        self, prompts: Sequence[list[int]], n: int, params: Any, *, first: int = 0
    ) -> list[list[Any]]:
        """See `TransformersEngine.generate`; every token's log-probability is -0.5."""
        del params
        return [[self._rollout(prompt, sample) for sample in range(first, first + n)] for prompt in prompts]

    def _rollout(self, prompt: list[int], sample: int) -> Any:
        from rlhf_infer import Rollout

        text = type(self).reply(self.tokenizer.decode(prompt), sample)
        cut = text.endswith("<cut>")
        end = [] if cut else [self.tokenizer.eos_token_id]
        ids = self.tokenizer.encode(text.removesuffix("<cut>")) + end
        return Rollout(prompt, ids, [-0.5] * len(ids), "length" if cut else "stop")


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Lets both players write what `reply(prompt, sample)` says."""
    import rlhf_minmax.game.forward_pass

    def script(reply: Callable[[str, int], str]) -> None:
        engine = type("Engine", (ScriptedEngine,), {"reply": staticmethod(reply)})
        monkeypatch.setattr(rlhf_minmax.game.forward_pass, "TransformersEngine", engine)

    return script
