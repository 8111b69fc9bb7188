"""Rollouts that guess the completions of the last epoch: the run is the same, in fewer passes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from online_trainers import PROMPTS, grpo, ppo
from raises import raises_error
from resumed import assert_resumed_equals_uninterrupted
from rlhf_algos import GRPOConfig
from rlhf_algos.jobs.config import job_config
from rlhf_algos.process_group import world_size
from rlhf_data import RunFolder
from rlhf_infer import TransformersEngine

SETTINGS: dict[str, Any] = {
    "max_steps": 9,  # an epoch has three steps
    "max_completion_length": 24,
    "min_completion_length": 16,
    "learning_rate": 1e-5,
}


def completions_of(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Any], list[int]]:
    """All completions of a training, and the tokens of each forward pass of its engine."""
    drawn, passes = [], []
    sample, forward = trainer.sample, TransformersEngine._forward

    def sampled(*args: Any, **options: Any) -> Any:
        drawn.append(sample(*args, **options))
        return drawn[-1]

    def counted(self: Any, ids: Any, *rest: Any) -> Any:
        passes.append(len(ids))
        return forward(self, ids, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(trainer, "sample", sampled)
        patch.setattr(TransformersEngine, "_forward", counted)
        trainer.train()
    return [[rollout.completion_ids for rollout in group] for step in drawn for group in step], passes


@pytest.mark.slow
@pytest.mark.parametrize("make", [grpo, ppo])
def test_speculation_changes_no_completion_and_saves_passes(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = SETTINGS | {"common_random_numbers": True}
    plain, passes = completions_of(make(**common), monkeypatch)
    trainer = make(**common, speculation="previous")
    found, fewer = completions_of(trainer, monkeypatch)
    assert found == plain
    assert len(fewer) < 0.8 * len(passes)
    agreement = trainer.engine.drafter.agreement
    assert agreement is not None and agreement > 8


@pytest.mark.slow
def test_fresh_random_numbers_agree_too_little_to_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, passes = completions_of(grpo(**SETTINGS), monkeypatch)
    found, same = completions_of(grpo(**SETTINGS, speculation="previous"), monkeypatch)
    assert found == plain and same == passes  # not one pass more


def test_common_random_numbers_are_those_of_the_first_step_in_every_epoch() -> None:
    trainer, other = grpo(common_random_numbers=True), grpo()
    assert trainer.seed_of(0) == trainer.seed_of(5) == other.seed_of(0) != other.seed_of(5)
    evaluation = 1 << 31
    assert trainer.seed_of(evaluation) == other.seed_of(evaluation) != trainer.seed_of(0)


@pytest.mark.slow
def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(tmp_path: Path) -> None:
    settings = SETTINGS | {"common_random_numbers": True, "speculation": "previous", "save_steps": 5}

    def make(name: str) -> Any:
        return grpo(**settings, options={"run": RunFolder.create(tmp_path / name, resume=True)})

    # Killed in the third epoch; the completions of the second, from which it guesses, are in the checkpoint.
    straight, resumed = assert_resumed_equals_uninterrupted(make, killed_after=7)
    assert resumed.engine.drafter.state() == straight.engine.drafter.state()
    assert len(resumed.engine.drafter.state()["known"]) == len(PROMPTS)


@pytest.mark.parametrize(
    "values",
    [
        {"use_vllm": True},
        {"repetition_penalty": 1.1},
        {"distributed": {"rollout_workers": 2}},
    ],
)
def test_speculation_is_refused_where_its_completions_would_be_lost(values: dict[str, Any]) -> None:
    config: Any = job_config(GRPOConfig, "policy")
    with raises_error("invalid_value"):
        config.from_dict({"speculation": "previous", "reward": ["number"], **values})
    assert config.from_dict({"speculation": "previous", "reward": ["number"]}).speculation == "previous"


def test_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert world_size() == 1
    monkeypatch.setattr("rlhf_algos.configs.online.world_size", lambda: 2)
    with raises_error("invalid_value"):
        GRPOConfig.from_dict({"speculation": "previous"})


def test_an_engine_of_ones_own_is_refused() -> None:
    trainer = grpo()
    with raises_error("conflicting_options"):
        grpo(speculation="previous", options={"engine": trainer.engine})
