"""Games whose solutions are known, played by MinMax's own optimizers: what approaches them, what does not."""

import copy
import itertools
import math
import statistics

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from rlhf_data import TokenSequence, pack
from rlhf_infer import Rollout
from rlhf_minmax.config.run import MinMaxConfig
from rlhf_minmax.dual_ascent import DualSettings, DualState, update_multiplier
from rlhf_minmax.optim.player import PlayerOptimizer, sequence_advantages
from rlhf_models import PolicyModel, build_tiny_llama

START = math.sqrt(2) * (1 / (1 + math.exp(-1.5)) - 0.5)
"""Distance to (1/2, 1/2) where both players' logits are 3/4 and -3/4."""
STEPS, GAMES = 160, 256
_PROOF = [pytest.mark.slow, pytest.mark.proof]
each_seed = pytest.mark.parametrize("seed", [0, *(pytest.param(i, marks=_PROOF) for i in (1, 2))])


@pytest.fixture(autouse=True)
def one_thread():
    """The models are tiny."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def player(seed, **settings):
    """A model of two tokens that says the first with probability 0.82; its reference is uniform."""
    model = build_tiny_llama(
        2, seed=seed, hidden_size=8, num_layers=0, num_heads=1, tie_word_embeddings=False
    )
    reference = copy.deepcopy(model).requires_grad_(False)
    with torch.no_grad():
        hidden = model.model(torch.tensor([[0]])).last_hidden_state[0, 0]
        model.lm_head.weight.copy_(torch.stack([hidden, -hidden]) * 0.75 / hidden.square().sum())
        reference.lm_head.weight.zero_()
    own = {"baseline": "batch", "adam_betas": (0.0, 0.999)} | settings
    config = MinMaxConfig.from_dict({"policy_model": own, "game": {"target_kl": 10.0}})
    coin = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"heads": 0, "tails": 1})))
    policy = PolicyModel(model, coin, reference=reference)
    return PlayerOptimizer(policy, config.policy_model, config, learning_rate=1e-2)


def probabilities(optimizer):
    """(2,) of its player's two tokens."""
    (batch,) = pack([TokenSequence([0, token], 1) for token in range(2)])
    with torch.no_grad():
        return optimizer.player.logps(batch).logps.exp()


def late_distances(seed, **settings):
    """Distances to (1/2, 1/2) in the last third of a run of matching pennies.

    Both players learn from the same games.
    """
    draw = torch.Generator().manual_seed(seed)
    players = [player(2 * seed + i, **settings) for i in range(2)]
    distances = []
    for _ in range(STEPS):
        said = [probabilities(each) for each in players]
        distances.append(math.hypot(*(float(each[0]) - 0.5 for each in said)))
        tokens = [torch.multinomial(each, GAMES, replacement=True, generator=draw) for each in said]
        payoff = torch.where(tokens[0] == tokens[1], 1.0, -1.0)
        for each, odds, spoken, reward in zip(players, said, tokens, (payoff, -payoff), strict=True):
            rollouts = [Rollout([0], [token], [math.log(odds[token])], "stop") for token in spoken.tolist()]
            together = torch.zeros(GAMES, dtype=torch.long)
            each.update(rollouts, sequence_advantages(reward, together, "batch"), updates=1)
    assert distances[0] == pytest.approx(START, abs=1e-4)
    return distances[-STEPS // 3 :]


@pytest.mark.slow
@each_seed
def test_steps_leave_the_solution_of_matching_pennies(seed):
    assert statistics.fmean(late_distances(seed, beta=0.0)) > 1.15 * START


@pytest.mark.slow
@each_seed
def test_the_regularised_game_is_solved(seed):
    # With 0.3 KL to the uniform distribution each player's payoff is strictly concave; (1/2, 1/2) solves it
    # still, since there the payoff is flat and the KL 0.
    late = late_distances(seed, beta=0.3)
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
    optimizer = torch.optim.SGD([logits], lr=0.5)
    cost = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)

    path = []
    for _ in range(steps):
        p = logits.softmax(0)
        (-(p * (REWARDS - state.multiplier * cost - p.log())).sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
        violation = float(logits.detach().softmax(0)[0])
        state = update_multiplier(state, violation, settings)
        path.append((state.multiplier, violation))
    return path


@pytest.mark.slow
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
