"""One process of a game: `distributed_worker.py MODE FOLDER CACHE [OVERRIDE...]`, alone or under torchrun.

MODE `play` runs a whole job in FOLDER/<processes>; `replay` makes ten updates of either player on the rounds
of FOLDER/rounds.pt and writes the weights to FOLDER/<processes>.pt.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from rlhf_algos import local_part, whole_of_part
from rlhf_data import RunFolder, apply_overrides
from rlhf_minmax import MinMaxConfig, MinMaxJob
from rlhf_minmax.game.stories import load_stories
from rlhf_minmax.optim.dual_ppo import DualPPOOptimizer
from rlhf_minmax.run.building import build_game

sys.path.insert(0, str(Path(__file__).parent))
from conftest import SETTINGS

WORLD, FIRST = os.environ.get("WORLD_SIZE", "1"), os.environ.get("RANK", "0") == "0"
UPDATES = 10


def play(config: MinMaxConfig, folder: Path, cache: Path) -> None:
    run = RunFolder(folder / WORLD)
    if FIRST:
        RunFolder.create(run.path, resume=True)
    MinMaxJob(config, run, cache_folder=cache).play(resume=True)


def replay(config: MinMaxConfig, folder: Path, cache: Path) -> None:
    pipeline = build_game(config, load_stories(config), cache_folder=cache).pipeline
    optimizer, players = DualPPOOptimizer(pipeline, config), pipeline.players
    rounds = torch.load(folder / "rounds.pt", weights_only=False)
    norms = []
    assert optimizer.monitor is not None
    for role, player in (("policy", optimizer.policy), ("monitor", optimizer.monitor)):
        for rollouts, advantages in rounds[role][:UPDATES]:
            norms.append(player.update(rollouts, advantages, updates=1)["grad_norm"])
    weights: dict[str, list[torch.Tensor]] = {}
    for role in ("policy", "monitor"):
        parameters = getattr(players, role).parameters()
        weights[role] = [whole_of_part(each, local_part(each)).clone() for each in parameters]
    if FIRST:
        torch.save({"weights": weights, "norms": norms}, folder / f"{WORLD}.pt")


if __name__ == "__main__":
    mode, folder, cache, *overrides = sys.argv[1:]
    settings = MinMaxConfig.from_dict(apply_overrides(SETTINGS, overrides))
    {"play": play, "replay": replay}[mode](settings, Path(folder), Path(cache))
