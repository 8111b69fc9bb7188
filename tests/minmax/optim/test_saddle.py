"""Steps for games by hand, on min over x, max over y of x · y, and averages of iterates."""

import copy
import math

import pytest
import torch

from rlhf_infer import Rollout
from rlhf_minmax.config.run import MinMaxConfig
from rlhf_minmax.optim.extragradient import GameStep, IterateAverage, LookAhead
from rlhf_minmax.optim.player import PlayerOptimizer
from rlhf_models import PolicyModel

RULES = ("plain", "optimistic")


def sgd(parameters, rule, lr):
    return GameStep(parameters, torch.optim.SGD(parameters, lr=lr), rule)


class Bilinear:
    """The game x · y from (1, 0) with SGD, both players moving at once.

    Args:
        rule: of every step; `extragradient` for plain ones that look ahead.
        lr: learning rate η.
        alone: whether each player looks ahead while the other one stands still.
    """

    def __init__(self, rule, lr, *, alone=False):
        self.x = torch.tensor([1.0], dtype=torch.float64)
        self.y = torch.tensor([0.0], dtype=torch.float64)
        self.looks, self.alone = rule == "extragradient", alone
        self.steps = [sgd([z], "plain" if self.looks else rule, lr) for z in (self.x, self.y)]

    def move(self):
        # F(z) = (∂/∂x, -∂/∂y) of x · y = (y, -x): x goes down, y goes up.
        self.x.grad, self.y.grad = self.y.clone(), -self.x.clone()
        for step in self.steps:
            step()

    def step(self):
        if not self.looks:
            return self.move()
        players = [LookAhead([self.x]), LookAhead([self.y])]
        x, y = float(self.x), float(self.y)
        self.move()
        for player in players:
            player.turn()
        if self.alone:
            self.x.grad, self.y.grad = torch.full_like(self.x, y), torch.full_like(self.y, -x)
            for step in self.steps:
                step()
        else:
            self.move()
        for player in players:
            player.land()

    def run(self, count):
        points = []
        for _ in range(count):
            self.step()
            points.append((float(self.x), float(self.y)))
        return points


# η = 1/2, z0 = (1, 0), F(x, y) = (y, -x).
# plain: z1 = (1, 0) - (0, -1)/2 = (1, 1/2); z2 = z1 - (1/2, -1)/2 = (3/4, 1); z3 = z2 - (1, -3/4)/2.
# optimistic, z' = z - F(z) + F(z_before)/2, the first step plain: z1 = (1, 1/2), F(z1) = (1/2, -1);
#   z2 = z1 - (1/2, -1) + (0, -1)/2 = (1/2, 1), F(z2) = (1, -1/2);
#   z3 = z2 - (1, -1/2) + (1/2, -1)/2 = (-1/4, 1).
# extragradient, z' = z - F(z - F(z)/2)/2: ahead (1, 1/2), z1 = (1, 0) - (1/2, -1)/2 = (3/4, 1/2);
#   ahead (3/4 - 1/4, 1/2 + 3/8) = (1/2, 7/8), z2 = (3/4, 1/2) - (7/8, -1/2)/2 = (5/16, 3/4);
#   ahead (5/16 - 3/8, 3/4 + 5/32) = (-1/16, 29/32), z3 = (5/16, 3/4) - (29/32, 1/16)/2 = (-9/64, 23/32).
@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("plain", [(1, 0.5), (0.75, 1), (0.25, 1.375)]),
        ("optimistic", [(1, 0.5), (0.5, 1), (-0.25, 1)]),
        ("extragradient", [(0.75, 0.5), (0.3125, 0.75), (-0.140625, 0.71875)]),
    ],
)
def test_three_steps_by_hand(rule, expected):
    assert Bilinear(rule, 0.5).run(3) == expected


@pytest.mark.parametrize("lr", [0.01, 0.3])
def test_plain_steps_leave_the_saddle_point_by_a_known_factor(lr):
    distances = [math.hypot(*point) for point in Bilinear("plain", lr).run(50)]
    assert distances == pytest.approx([math.sqrt(1 + lr**2) ** t for t in range(1, 51)])


@pytest.mark.parametrize("lr", [0.1, 0.3])
def test_looking_ahead_approaches_it_by_a_known_factor(lr):
    # With F = J and J² = -1, z' = (1 - η J + η² J²) z = ((1 - η²) - η J) z: factor √((1 - η²)² + η²).
    factor = math.sqrt((1 - lr**2) ** 2 + lr**2)
    distances = [math.hypot(*point) for point in Bilinear("extragradient", lr).run(50)]
    # the way back is kept in fp32
    assert distances == pytest.approx([factor**t for t in range(1, 51)], rel=1e-5)
    assert factor < 1


def test_optimistic_steps_approach_it():
    # As complex numbers z' = (1 + 2 i η) z - i η z_before: λ² = (1 + 2 i η) λ - i η. With η = 0.3 the larger
    # root is (1 + 0.6 i + √(1 - 0.36)) / 2 = 0.9 + 0.3 i, |λ| = √0.9.
    distances = [math.hypot(*point) for point in Bilinear("optimistic", 0.3).run(200)]
    assert distances[199] / distances[99] == pytest.approx(math.sqrt(0.9) ** 100, rel=1e-6)


def test_players_that_look_ahead_alone_leave_it_as_plain_ones_do():
    """In x · y a player's gradient depends on its opponent only, which stands still meanwhile."""
    points = Bilinear("extragradient", 0.3, alone=True).run(50)
    assert points[-1] == pytest.approx(Bilinear("plain", 0.3).run(50)[-1], rel=1e-5)
    assert math.hypot(*points[-1]) > 8  # 1.09 ** 25


def test_moves_of_several_updates_look_ahead_too():
    # Gradient x of x²/2, η = 0.5: each update halves x, a move of two takes 1 to 1/4 and then to 1/16. The
    # second one, -3/16, is made from 1: 13/16.
    x = torch.tensor([1.0])
    step, ahead = sgd([x], "plain", 0.5), LookAhead([x])
    for _ in range(2):
        for _ in range(2):
            x.grad = x.clone()
            step()
        if float(x) == 0.25:
            ahead.turn()
    ahead.land()
    assert float(x) == 13 / 16


def test_momentum_takes_the_damping_of_optimistic_steps_away():
    ends = []
    for momentum in (0.0, 0.9):
        game = Bilinear("optimistic", 0.03)
        for step in game.steps:
            step.optimizer = torch.optim.SGD(step.parameters, lr=0.03, momentum=momentum)
        ends.append(math.hypot(*game.run(1000)[-1]))
    assert ends[0] < 0.7 and ends[1] > 10


@pytest.mark.parametrize("rule", RULES)
def test_gradients_are_none_after_a_step(rule):
    x = torch.tensor([1.0])
    x.grad = torch.tensor([1.0])
    sgd([x], rule, 0.25)()
    assert x.grad is None and float(x) == 0.75


def test_a_parameter_without_a_gradient_has_gradient_zero():
    x, y = torch.tensor([1.0]), torch.tensor([1.0])
    step = sgd([x, y], "optimistic", 0.5)
    x.grad = torch.tensor([1.0])
    step()
    y.grad = torch.tensor([1.0])
    step()
    # x: 1 - 0.5, then - 0.5 · (0 - 1); y: 1, then - 0.5 · (2 - 0).
    assert (float(x), float(y)) == (1.0, 0.0)


def test_the_gradients_of_the_step_before_are_taken_up():
    whole = Bilinear("optimistic", 0.3)
    whole.run(3)
    rest = Bilinear("optimistic", 0.3)
    rest.x.copy_(whole.x)
    rest.y.copy_(whole.y)
    for own, other in zip(rest.steps, whole.steps, strict=True):
        state = other.state()
        assert set(state) == {"gradient.0"}
        own.load_state({name: value.clone() for name, value in state.items()})
    forgetful = copy.deepcopy(rest)
    for step in forgetful.steps:
        step.load_state({})
    expected = whole.run(3)
    assert rest.run(3) == expected
    assert forgetful.run(3) != expected
    assert Bilinear("optimistic", 0.3).steps[0].state() == {}


def test_an_average_by_hand():
    # d = 0.75 from 4: 0.75 · 4 + 0.25 · 0 = 3; 0.75 · 3 + 0.25 · 8 = 4.25.
    weight = torch.tensor([4.0])
    average = IterateAverage([weight], 0.75)
    for value, expected in ((0.0, 3.0), (8.0, 4.25)):
        weight.fill_(value)
        average.update()
        assert float(average.values[0]) == expected


def test_averages_come_nearer_than_the_iterates_that_circle():
    game = Bilinear("plain", 0.03)
    average = IterateAverage([game.x, game.y], 0.99)
    for _ in range(600):
        game.run(1)
        average.update()
    own = math.hypot(float(game.x), float(game.y))
    # Iterates turn by η a step and the average remembers 1 / (1 - d) = 100 of them: a low-pass filter of gain
    # (1 - d) / |1 - d e^(-iη)| = 0.01 / 0.0315 ≈ 0.32; the start is still felt by d^600 = 0.002.
    assert own > 1
    assert math.hypot(*(float(value) for value in average.values)) == pytest.approx(0.32 * own, rel=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_averages_are_applied_for_a_while_and_restored_bit_for_bit(dtype):
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(5, generator=generator).to(dtype) for _ in range(2)]
    average = IterateAverage(weights, 0.9)
    for weight in weights:
        weight.add_(1.0)
    average.update()
    own = [weight.clone() for weight in weights]
    with pytest.raises(KeyError), average.applied():
        for weight, value in zip(weights, average.values, strict=True):
            assert torch.equal(weight, value.to(dtype)) and value.dtype == torch.float32
        raise KeyError
    assert all(torch.equal(weight, before) for weight, before in zip(weights, own, strict=True))


def test_averages_are_saved_and_taken_up(tmp_path):
    weights = [torch.tensor([1.0]), torch.tensor([2.0, 3.0])]
    average, other = IterateAverage(weights, 0.5), IterateAverage(weights, 0.5)
    for weight in weights:
        weight.mul_(3)
    average.update()
    average.save(tmp_path / "average")
    other.load(tmp_path / "average")
    assert [value.tolist() for value in other.values] == [[2.0], [4.0, 6.0]]


@pytest.mark.parametrize("rule", RULES)
def test_a_player_goes_on_from_a_checkpoint_as_if_nothing_had_happened(
    rule, tiny_llama, byte_tokenizer, tmp_path
):
    config = MinMaxConfig.from_dict(
        {
            "policy_model": {"step_rule": rule, "average_decay": 0.9, "baseline": "critic"},
            "game": {"target_kl": 100.0},
        }
    )
    start = tiny_llama.state_dict()
    rollouts = [Rollout([5, 6], [7, 8], [-5.7, -5.7], "stop"), Rollout([5, 6], [9, 7], [-5.7, -5.7], "stop")]

    def player(weights):
        model = copy.deepcopy(tiny_llama)
        model.load_state_dict(weights)
        reference = copy.deepcopy(tiny_llama).requires_grad_(False)
        return PlayerOptimizer(
            PolicyModel(model, byte_tokenizer, reference=reference),
            config.policy_model,
            config,
            learning_rate=1e-2,
        )

    whole = player(start)
    whole.update(rollouts, torch.tensor([1.0, -1.0]), updates=2)
    whole.end_step()
    whole.save(tmp_path, "policy")
    rest = player(whole.player.model.state_dict())
    rest.load(tmp_path, "policy")
    for each in (whole, rest):
        each.update(rollouts, torch.tensor([0.5, -2.0]), updates=2)
        each.end_step()
    for mine, its in ((rest.parameters, whole.parameters), (rest.stepper.trained, whole.stepper.trained)):
        assert all(torch.equal(a, b) for a, b in zip(mine, its, strict=True))
    assert rest.average is not None and whole.average is not None
    with rest.averaged(), whole.averaged():
        assert all(torch.equal(a, b) for a, b in zip(rest.parameters, whole.parameters, strict=True))
