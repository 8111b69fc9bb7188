"""Games that are sampled by Ray workers are those of one process, to the bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from files import CLOCK
from raises import raises_error
from rlhf_data import RunFolder
from rlhf_minmax import MinMaxConfig, MinMaxTrainer
from rlhf_minmax.evaluation.measure_game import past_against_past
from rlhf_minmax.game.stories import hide_answers
from rlhf_minmax.players.workers import GameWorkers

_WORKERS = "distributed={address: local, rollout_workers: 2, object_store_gb: 0.2}"
_PAST = ("diagnostics.cross_play_steps=1", "data.eval_stories=4")
_FULL = ("policy_model.use_lora=false", "monitor_model.use_lora=false")


def _play(make_game: Any, folder: Path, *settings: str) -> tuple[list[dict[str, Any]], list[torch.Tensor]]:
    """Metrics of a short game but for the clock, and the players' weights."""
    pipeline, stories = make_game("training.prompts_per_batch=1", *settings)
    run = RunFolder.create(folder, resume=True)
    workers = GameWorkers(pipeline.players, pipeline.config, run) if pipeline.config.distributed else None
    game = replace(pipeline, workers=workers)
    rows: list[dict[str, Any]] = []
    train = hide_answers(stories.train[:8], game.config.data.label_share, seed=0)
    trainer = MinMaxTrainer(game, game.config, train, stories.held_out[:4], run=run)
    try:
        for _ in range(3):
            rows.append(dict(trainer.train_step()))
        rows.append(trainer._evaluate())
        if game.config.diagnostics.cross_play_steps:
            table = past_against_past(game, trainer.past, stories.held_out[:4])
            assert table is not None
            rows.append(table.to_metrics())
    finally:
        if workers is not None:
            workers.close()
    players = game.players.policy, game.players.monitor
    weights = [each.detach().clone() for player in players for each in player.parameters()]
    return [{k: v for k, v in row.items() if not k.startswith(CLOCK)} for row in rows], weights


@pytest.mark.slow
@pytest.mark.usefixtures("ray_installed")
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(_PAST, marks=pytest.mark.proof),
        pytest.param(_FULL, marks=pytest.mark.proof),
        ("data.label_share=0.25",),
    ],
    ids=["adapters", "two-models", "few-labels"],
)
def test_a_game_with_workers_is_that_of_one_process(
    settings: tuple[str, ...], make_game: Any, tmp_path: Path
):
    alone = _play(make_game, tmp_path / "alone", *settings)
    shared = _play(make_game, tmp_path / "workers", *settings, _WORKERS)
    assert alone[0] == shared[0]
    assert all(map(torch.equal, alone[1], shared[1]))
    events = RunFolder(tmp_path / "workers").read_lines("workers.jsonl")
    assert [row["event"] for row in events] == ["start", "ready", "ready"]


@pytest.mark.parametrize(
    "other",
    [
        {"distributed": {"max_staleness": 1}},
        {"training": {"fsdp": True}},
        {"policy_model": {"load_in_4bit": True}},
    ],
    ids=["ahead", "fsdp", "4bit"],
)
def test_what_workers_cannot_follow_is_refused(other: dict[str, Any]):
    with raises_error("invalid_value"):
        MinMaxConfig.from_dict({"distributed": {}} | other)
