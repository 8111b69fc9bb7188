"""Rewards of a run's log that are trained on, and held-out ones, which are only measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_OF_THE_GAME = (
    ("minmax/reward_model", "minmax/heldout_reward"),
    ("minmax/judge", "minmax/heldout_judge"),
)


def held_out_keys(rows: Sequence[Mapping[str, Any]], config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Pairs of a reward that is trained on and one that is held out, both in the log.

    Held out are the reward functions of an online run whose weight is 0 (`reward_weights`), and the held-out
    scorers of the game (`held_out`), which are measured in evaluation.

    Args:
        rows: rows of the log.
        config: the run's settings.
    """
    logged = {key for row in rows for key in row}
    of_game = [(f"eval_{train}", f"eval_{held_out}") for train, held_out in _OF_THE_GAME]
    pairs = [pair for pair in of_game if logged >= set(pair)]
    weights = config.get("reward_weights") or ()
    names = list(dict.fromkeys(key.split("/")[1] for row in rows[-1:] for key in row if _is_reward(key)))
    if len(weights) == len(names):
        unused = [name for name, weight in zip(names, weights, strict=True) if not weight]
        pairs += [("reward", f"rewards/{name}/mean") for name in unused if "reward" in logged]
    return pairs


def _is_reward(key: str) -> bool:
    parts = key.split("/")
    return len(parts) == 3 and parts[0] == "rewards" and parts[2] == "mean"
