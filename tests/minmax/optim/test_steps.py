"""What a step is told of and told by: rates, advantages without a signal, figures of several batches."""

import pytest
import torch

from rlhf_data import UserError
from rlhf_minmax import MinMaxConfig, MinMaxTrainer
from rlhf_minmax.constraints.controllers import Controller
from rlhf_minmax.dual_ascent import DualSettings
from rlhf_minmax.optim.player import sequence_advantages


@pytest.mark.parametrize("baseline", ["group", "leave_one_out", "batch"])
@pytest.mark.parametrize("size", [2, 3, 5, 7, 8])
def test_equal_rewards_are_no_signal(baseline, size):
    """Means of equal numbers are off by rounding, which a deviation of that size would make large."""
    groups = torch.arange(4).repeat_interleave(size)
    rewards = (
        torch.tensor([-2.3, 0.1, 0.7, 4.9])[groups] if baseline != "batch" else torch.full((4 * size,), 0.7)
    )
    assert torch.equal(sequence_advantages(rewards, groups, baseline), torch.zeros(4 * size))
    noise = 1e-7 * torch.randn(4 * size, generator=torch.Generator().manual_seed(0))
    assert torch.equal(sequence_advantages(rewards + noise, groups, baseline), torch.zeros(4 * size))


def test_one_group_with_a_signal_keeps_it():
    # (0, 0) and (0, 0.001): centred 0, 0, -0.0005, 0.0005, of deviation 0.0005 √(2/3).
    found = sequence_advantages(torch.tensor([9.0, 9.0, 1.0, 1.001]), torch.tensor([0, 0, 1, 1]), "group")
    assert found.tolist() == pytest.approx([0, 0, -((3 / 2) ** 0.5), (3 / 2) ** 0.5], rel=1e-3)


def test_the_policys_schedule_begins_where_it_learns(make_game):
    settings = ("training.max_steps=6", "training.monitor_warmup_steps=2", "training.batch_size=2")
    schedule = ("policy_model.lr_scheduler_type=linear", "policy_model.warmup_steps=2")
    pipeline, stories = make_game(*settings, *schedule, "training.policy_learning_rate=1e-3")
    rates = {}
    for adversary in (True, False):
        trainer = MinMaxTrainer(pipeline, pipeline.config, stories.train, adversary=adversary)
        begin = trainer.optimizer.begin_step
        rates[adversary] = [begin(step)["policy/learning_rate"] for step in range(trainer.total_steps)]
    assert len(rates[True]) == 6 and rates[True][2:] == rates[False]
    # Of 4 steps 2 rise, from 0, and 2 fall, to 0 behind the last one.
    assert rates[False] == pytest.approx([0, 5e-4, 1e-3, 5e-4])


def test_the_parts_of_a_pid_multiplier_add_up_to_it():
    settings = DualSettings("pid", 0.1, 0.5, maximum=20.0)
    controller = Controller("c", settings, 2.0)
    # v = 0.3: v̄ = 0.3, e = 0.2, Σe = 2 / 0.5 + 0.2, no change: 0.5 (0.2 + 4.2).
    first = controller.update(0.3)
    assert [first[f"dual/c/{part}"] for part in "pid"] == pytest.approx([0.1, 2.1, 0.0])
    assert first["dual/c/lambda"] == pytest.approx(2.2)
    # v = 0.7: v̄ = 0.5, e = 0.4, Σe = 4.6, rise 0.2 with gain 0.5: 0.5 (0.4 + 4.6 + 0.1).
    second = controller.update(0.7)
    assert [second[f"dual/c/{part}"] for part in "pid"] == pytest.approx([0.2, 2.3, 0.05])
    assert second["dual/c/lambda"] == pytest.approx(2.55)
    assert "dual/c/p" not in Controller("c", DualSettings("log", 0.1, 0.5), 2.0).update(0.3)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"policy_model": {"adam_betas": [2.0, 3.0]}}, "expected two in"),
        ({"policy_model": {"adam_betas": [0.9, 1.0]}}, "expected two in"),
        ({"training": {"constraint_penalty_lambda": 50}}, "50.0 is above constraint.lambda_max 20.0"),
    ],
)
def test_settings_that_are_refused(section, message):
    with pytest.raises(UserError, match=message):
        MinMaxConfig.from_dict(section)


def test_a_fixed_multiplier_has_no_bounds():
    fixed = {"training": {"constraint_penalty_lambda": 50}, "constraint": {"rule": "fixed"}}
    assert MinMaxConfig.from_dict(fixed).training.constraint_penalty_lambda == 50
