"""One process of a game: `distributed_worker.py MODE FOLDER CACHE [OVERRIDE...]`, alone or under torchrun.

MODE `play` runs a whole job in FOLDER/<processes>; `replay` makes ten updates of either player on the rounds
of FOLDER/rounds.pt and writes the weights to FOLDER/<processes>.pt.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from rlhf_data import RunFolder, apply_overrides
from rlhf_minmax import MinMaxConfig, MinMaxJob
from rlhf_minmax.demo.builder import demo_models
from rlhf_minmax.game.forward_pass import MinMaxPipeline
from rlhf_minmax.game.stories import load_stories
from rlhf_minmax.optim.dual_ppo import DualPPOOptimizer
from rlhf_minmax.players.players import load_players
from rlhf_minmax.scorers.loading import load_judge, load_reward_model
from rlhf_models import DeviceManager

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
    stories, devices = load_stories(config), DeviceManager({})
    demo = demo_models(
        stories.train, stories.prompts, config.demo, seed=config.seed, cache_folder=cache, force=True
    )
    players = load_players(config, str(demo.base), devices)
    reward = load_reward_model(config, demo, devices)
    judge = load_judge(config, demo, devices, stories.prompts)
    optimizer = DualPPOOptimizer(MinMaxPipeline(players, reward, judge, stories.prompts, config), config)
    rounds = torch.load(folder / "rounds.pt", weights_only=False)
    norms = []
    assert optimizer.monitor is not None
    for role, player in (("policy", optimizer.policy), ("monitor", optimizer.monitor)):
        for rollouts, advantages in rounds[role][:UPDATES]:
            norms.append(player.update(rollouts, advantages, updates=1)["grad_norm"])
    trained = {role: getattr(players, role).parameters() for role in ("policy", "monitor")}
    weights = {role: [parameter.detach().clone() for parameter in each] for role, each in trained.items()}
    if FIRST:
        torch.save({"weights": weights, "norms": norms}, folder / f"{WORLD}.pt")


if __name__ == "__main__":
    mode, folder, cache, *overrides = sys.argv[1:]
    settings = MinMaxConfig.from_dict(apply_overrides(SETTINGS, overrides))
    {"play": play, "replay": replay}[mode](settings, Path(folder), Path(cache))
