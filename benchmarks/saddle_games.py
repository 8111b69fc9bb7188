"""Games whose saddle points are known, under every rule of MinMax's own steps: who comes near, who circles.

The bilinear game x · y with SGD, and matching pennies between two language models that emit one token,
through `PlayerOptimizer`, as the game itself trains its players. Prints JSON and draws the distances to the
saddle point.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from rlhf_data import TokenSequence, atomic_write_json, pack
from rlhf_infer import Rollout
from rlhf_minmax.config.run import MinMaxConfig
from rlhf_minmax.optim.extragradient import GameStep, IterateAverage, LookAhead
from rlhf_minmax.optim.player import PlayerOptimizer, sequence_advantages
from rlhf_models import PolicyModel, build_tiny_llama

BILINEAR: dict[str, dict[str, Any]] = {
    "plain": {"rule": "plain"},
    "averages of plain": {"rule": "plain", "decay": 0.99},
    "extragradient": {"looks_ahead": True},
    "optimistic": {"rule": "optimistic"},
}
_CALM = {"adam_betas": (0.0, 0.999), "beta": 0.0}
PENNIES: dict[str, dict[str, Any]] = {
    "plain": _CALM,
    "averages of plain": _CALM | {"average_decay": 0.99},
    "extragradient": _CALM | {"looks_ahead": True},
    "extragradient with momentum": _CALM | {"looks_ahead": True, "adam_betas": (0.9, 0.95)},
    "optimistic": _CALM | {"step_rule": "optimistic"},
    "optimistic with momentum": _CALM | {"step_rule": "optimistic", "adam_betas": (0.9, 0.95)},
    "KL to a uniform reference": _CALM | {"beta": 0.3},
}
"""Settings of both players, and whether they look ahead. The solution is (1/2, 1/2), with the KL too, whose
minimum is there."""
_TITLES = {"bilinear": "x · y, SGD", "pennies": "Matching pennies, two language models"}
_STYLES: dict[str, dict[str, Any]] = {
    "plain": {"color": "#666666"},
    "averages of plain": {"color": "#1b6ca8"},
    "extragradient": {"color": "#8a5fa8", "lw": 3.5, "alpha": 0.5},
    "extragradient with momentum": {"color": "#8a5fa8", "ls": ":"},
    "optimistic": {"color": "#c8553d"},
    "optimistic with momentum": {"color": "#c8553d", "ls": ":"},
    "KL to a uniform reference": {"color": "#3c8d5a"},
}


def moved(parameters: Sequence[Sequence[torch.Tensor]], move: Callable[[], object], *, ahead: bool) -> None:
    """Make a move of all players, with `ahead` by extragradient: looking ahead and from the old point."""
    players = [LookAhead(own) for own in parameters] if ahead else []
    if ahead:
        move()
    for each in players:
        each.turn()
    move()
    for each in players:
        each.land()


def bilinear(
    rule: Any = "plain", *, steps: int = 240, decay: float | None = None, looks_ahead: bool = False
) -> list[float]:
    """Distance to (0, 0) before each step of min over x, max over y of x · y, from (1, 0) with η = 0.1.

    Args:
        rule: of `GameStep`.
        steps: how many.
        decay: of averages, whose distance is then the result; None for the iterates'.
        looks_ahead: whether steps are extragradient.
    """
    x, y = torch.tensor([1.0]), torch.tensor([0.0])
    average = None if decay is None else IterateAverage([x, y], decay)
    steppers = [GameStep([each], torch.optim.SGD([each], lr=0.1), rule) for each in (x, y)]
    distances = []

    def move() -> None:
        x.grad, y.grad = y.clone(), -x
        for step in steppers:
            step()

    for _ in range(steps):
        distances.append(math.hypot(*map(float, (x, y) if average is None else average.values)))
        moved([[x], [y]], move, ahead=looks_ahead)
        if average is not None:
            average.update()
    return distances


def player(settings: dict[str, Any], *, seed: int, learning_rate: float) -> PlayerOptimizer:
    """A model of two tokens that says the first with probability 0.82; its reference is uniform."""
    model = build_tiny_llama(
        2, seed=seed, hidden_size=8, num_layers=0, num_heads=1, tie_word_embeddings=False
    )
    reference = copy.deepcopy(model).requires_grad_(False)
    with torch.no_grad():
        hidden = model.model(torch.tensor([[0]])).last_hidden_state[0, 0]
        model.lm_head.weight.copy_(torch.stack([hidden, -hidden]) * 0.75 / hidden.square().sum())
        reference.lm_head.weight.zero_()
    config = MinMaxConfig.from_dict(
        {"policy_model": settings | {"baseline": "batch"}, "game": {"target_kl": 10.0}}
    )
    policy = PolicyModel(model, range(2), reference=reference)
    return PlayerOptimizer(policy, config.policy_model, config, learning_rate=learning_rate)


def probabilities(optimizer: PlayerOptimizer) -> torch.Tensor:
    """(2,) of its player's two tokens."""
    (batch,) = pack([TokenSequence([0, token], 1) for token in range(2)])
    with torch.no_grad():
        return optimizer.player.logps(batch).logps.exp()


def pennies(
    settings: dict[str, Any], *, seed: int, steps: int = 240, samples: int = 256, learning_rate: float = 1e-2
) -> list[float]:
    """Distance to (1/2, 1/2) before each step of matching pennies; both players learn from the same games.

    Args:
        settings: of both players, and `looks_ahead`; with `average_decay`, distances are those of averages.
        seed: of models and samples.
        steps: how many.
        samples: games per step.
        learning_rate: of AdamW.
    """
    generator = torch.Generator().manual_seed(seed)
    own = {name: value for name, value in settings.items() if name != "looks_ahead"}
    players = [player(own, seed=2 * seed + i, learning_rate=learning_rate) for i in range(2)]
    distances, together = [], torch.zeros(samples, dtype=torch.long)

    def move() -> None:
        said = [probabilities(each) for each in players]
        tokens = [torch.multinomial(own, samples, replacement=True, generator=generator) for own in said]
        payoff = torch.where(tokens[0] == tokens[1], 1.0, -1.0)
        for each, own, spoken, reward in zip(players, said, tokens, (payoff, -payoff), strict=True):
            rollouts = [Rollout([0], [token], [math.log(own[token])], "stop") for token in spoken.tolist()]
            each.update(rollouts, sequence_advantages(reward, together, "batch"), updates=1)

    for _ in range(steps):
        distances.append(math.hypot(*(_heads(each) - 0.5 for each in players)))
        moved([each.stepper.trained for each in players], move, ahead=settings.get("looks_ahead", False))
        for each in players:
            each.end_step()
    return distances


def _heads(optimizer: PlayerOptimizer) -> float:
    """Probability of the first token, under averaged weights where there are any."""
    with optimizer.averaged():
        return float(probabilities(optimizer)[0])


def draw(results: dict[str, Any], path: Path) -> None:
    """A panel for each game: distance to the saddle point over steps, means over seeds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10.5, 3.9), layout="constrained")
    handles = {}
    for axis, (game, title) in zip(axes, _TITLES.items(), strict=True):
        for rule, distances in results[game]["distances"].items():
            style = {"lw": 1.6} | _STYLES[rule]
            (handles[rule],) = axis.plot(distances, **style)
        axis.set(title=title, xlabel="step")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set(ylabel="distance to the saddle point", yscale="log")
    axes[1].set_ylim(0, 0.75)
    shown = [rule for rule in _STYLES if rule in handles]
    figure.legend([handles[rule] for rule in shown], shown, loc="outside right center", frameon=False)
    figure.savefig(path, dpi=150)


def summary(distances: dict[str, list[float]]) -> dict[str, Any]:
    """The start, means over the last third of the steps, and the curves."""
    late = {rule: round(statistics.fmean(each[-len(each) // 3 :]), 4) for rule, each in distances.items()}
    curves = {rule: [round(value, 4) for value in each] for rule, each in distances.items()}
    return {"start": next(iter(curves.values()))[0], "last_third": late, "distances": curves}


def run(seeds: list[int], steps: int) -> dict[str, Any]:
    """Distances of both games under all rules, of matching pennies the mean over seeds."""
    started = time.perf_counter()
    exact = {rule: bilinear(**settings, steps=steps) for rule, settings in BILINEAR.items()}
    sampled = {}
    for rule, settings in PENNIES.items():
        rows = [pennies(settings, seed=seed, steps=steps) for seed in seeds]
        sampled[rule] = [statistics.fmean(at) for at in zip(*rows, strict=True)]
    games = {"bilinear": summary(exact), "pennies": summary(sampled)}
    return {"seeds": seeds, "steps": steps, "seconds": round(time.perf_counter() - started, 1)} | games


def main() -> None:
    """Run everything and print the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds of matching pennies")
    parser.add_argument("--steps", type=int, default=240, help="of every game")
    parser.add_argument("--output", type=Path, help="write the results to this file too")
    parser.add_argument("--figure", type=Path, help="draw the curves into this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = run(options.seeds, options.steps)
    if options.output:
        atomic_write_json(options.output, results)
    if options.figure:
        draw(results, options.figure)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
