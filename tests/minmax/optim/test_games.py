"""Games whose solutions are known, played by MinMax's own optimizers: what approaches them, what does not."""

import importlib
import itertools
import math
import statistics
from pathlib import Path

import pytest
import torch

from rlhf_minmax.dual_ascent import DualSettings, DualState, update_multiplier
from rlhf_minmax.optim.extragradient import GameStep

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
START = math.sqrt(2) * (1 / (1 + math.exp(-1.5)) - 0.5)
"""Distance to (1/2, 1/2) where both players' logits are 3/4 and -3/4."""
_PROOF = [pytest.mark.slow, pytest.mark.proof]
each_seed = pytest.mark.parametrize("seed", [0, *(pytest.param(i, marks=_PROOF) for i in (1, 2))])


@pytest.fixture
def late_distances(monkeypatch):
    """Plays matching pennies under a rule; distances to (1/2, 1/2) in the last third of 160 steps."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    games = importlib.import_module("saddle_games")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def play(rule, seed):
        distances = games.pennies(games.PENNIES[rule], seed=seed, steps=160)
        assert distances[0] == pytest.approx(START, abs=1e-4)
        return distances[-53:]

    yield play
    torch.set_num_threads(threads)


@pytest.mark.slow
@each_seed
def test_plain_steps_leave_the_solution_of_matching_pennies(late_distances, seed):
    assert statistics.fmean(late_distances("plain", seed)) > 1.15 * START


@each_seed
def test_optimistic_steps_approach_it_and_stay(late_distances, seed):
    late = late_distances("optimistic", seed)
    assert statistics.fmean(late) < 0.5 * START and max(late) < 0.75 * START


@pytest.mark.slow
@each_seed
def test_looking_ahead_comes_nearer_than_plain_steps(late_distances, seed):
    late = late_distances("extragradient", seed)
    assert statistics.fmean(late) < 0.5 * START and max(late) < 0.75 * START


@pytest.mark.slow
@each_seed
def test_momentum_keeps_optimistic_steps_from_it(late_distances, seed):
    assert statistics.fmean(late_distances("optimistic with momentum", seed)) > 1.15 * START


@pytest.mark.slow
@each_seed
def test_averages_come_nearer_than_the_plain_iterates_that_they_average(late_distances, seed):
    # They do not settle: the circle that they average grows.
    late = late_distances("averages of plain", seed)
    assert statistics.fmean(late) < 0.6 * START and max(late) < START


@each_seed
def test_the_regularised_game_is_solved(late_distances, seed):
    # With 0.3 KL to the uniform distribution each player's payoff is strictly concave; (1/2, 1/2) solves it
    # still, since there the payoff is flat and the KL 0.
    late = late_distances("KL to a uniform reference", seed)
    assert statistics.fmean(late) < 0.25 * START and max(late) < 0.5 * START


# Maximise Σ r_a p_a + H(p) over three actions, r = (ln 8, ln 2, 0), subject to p_0 <= ε = 0.2. Without the
# constraint p ∝ (8, 2, 1) and p_0 = 8/11 > ε, so it binds. The Lagrangian's maximiser is
# p ∝ (8 e^-λ, 2, 1): p_0 = ε needs 8 e^-λ = 3 ε / (1 - ε) = 3/4, so λ* = ln(32/3) = 2.3671.
REWARDS = torch.log(torch.tensor([8.0, 2.0, 1.0], dtype=torch.float64))
THRESHOLD, SOLUTION = 0.2, math.log(32 / 3)


def constrained(rule, *, step_size, steps=3000):
    """(multiplier, violation) of every step of gradient ascent on the Lagrangian with dual ascent on λ."""
    settings = DualSettings(rule, THRESHOLD, step_size)
    state = DualState(1.0, integral=1.0 / step_size)
    logits = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    step = GameStep([logits], torch.optim.SGD([logits], lr=0.5), "plain")
    cost = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)

    path = []
    for _ in range(steps):
        p = logits.softmax(0)
        (-(p * (REWARDS - state.multiplier * cost - p.log())).sum()).backward()
        step()
        violation = float(logits.detach().softmax(0)[0])
        state = update_multiplier(state, violation, settings)
        path.append((state.multiplier, violation))
    return path


@pytest.mark.parametrize(("rule", "step_size"), [("additive", 0.5), ("log", 0.5), ("pid", 0.5)])
def test_dual_ascent_finds_the_multiplier_and_meets_the_threshold(rule, step_size):
    path = constrained(rule, step_size=step_size)
    for multiplier, violation in path[-100:]:
        assert multiplier == pytest.approx(SOLUTION, abs=1e-4)
        assert violation == pytest.approx(THRESHOLD, abs=1e-4)


def test_the_multiplicative_rule_circles_around_it():
    # It moves by ± α whatever the excess: no step is smaller than α λ, so it cannot come to rest.
    multipliers, found = zip(*constrained("multiplicative", step_size=0.05)[-1000:], strict=True)
    moves = [abs(b - a) / a for a, b in itertools.pairwise(multipliers)]
    assert moves == pytest.approx([0.05] * len(moves))
    assert min(multipliers) < SOLUTION < max(multipliers)
    assert min(found) < THRESHOLD - 0.01 and max(found) > THRESHOLD + 0.01
    # On average it does hold the constraint, about.
    assert statistics.fmean(found) == pytest.approx(THRESHOLD, abs=0.05)


@pytest.mark.parametrize("rule", ["additive", "log", "pid"])
def test_a_constraint_that_does_not_bind_costs_nothing(rule):
    settings = DualSettings(rule, 0.9, 0.5, minimum=0.01)
    state = DualState(1.0, integral=2.0)
    for _ in range(40):
        state = update_multiplier(state, 8 / 11, settings)
    # log: e^(-0.5 · 40 · (0.9 - 8/11)) = e^-3.5 = 0.032, on its way down; the others are at the bound.
    assert state.multiplier == pytest.approx(0.0316 if rule == "log" else 0.01, rel=0.02)
