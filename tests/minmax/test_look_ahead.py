"""Steps that look ahead: what they do to both players, by their definition, and in a run."""

from typing import Any

import pytest
import torch

from rlhf_data import UserError
from rlhf_minmax import MinMaxTrainer
from rlhf_minmax.optim.dual_ppo import DualPPOOptimizer

FULL = ("policy_model.use_lora=false", "monitor_model.use_lora=false")
ROLES = ("policy", "monitor")
CONSTRAINTS = ("constraints.monitor.length.threshold=0.2", "constraints.policy.kl.threshold=0.001")
SMALL = ("training.max_steps=3", "training.batch_size=2", "training.monitor_warmup_steps=1")
each_kind = pytest.mark.parametrize(
    "kind", [(), pytest.param(FULL, marks=pytest.mark.slow)], ids=["lora", "full"]
)


def weights(pipeline, role):
    return [p.detach().clone() for p in getattr(pipeline.players, role).parameters()]


def moved(a, b):
    return [after - before for before, after in zip(a, b, strict=True)]


@each_kind
def test_the_second_move_is_made_from_the_old_point(make_game, kind):
    """Against ordinary updates at the look-ahead point. The policy is paid without critiques, for those of
    the monitor that has been put back differ from those of the monitor there."""
    settings = (
        "game.policy_critiques=0",
        "game.target_kl=10",
        "constraint.rule=additive",
        *CONSTRAINTS,
        *kind,
    )
    pipeline, stories = make_game(*settings)
    other, _ = make_game(*settings)
    optimizer: Any = DualPPOOptimizer(pipeline, pipeline.config)
    by_hand: Any = DualPPOOptimizer(other, other.config)
    batch = stories.train[:4]
    starts = {role: weights(pipeline, role) for role in ROLES}
    multipliers = [each.to_dict() for each in optimizer._all_controllers()]
    with optimizer.looking_ahead():
        optimizer.step(pipeline.forward_pass(batch, seed=5), seed=5)
    by_hand.step(other.forward_pass(batch, seed=5), seed=5)
    assert optimizer.guard is not None and optimizer.guard.lowest is None is not by_hand.guard.lowest
    turns = {role: weights(other, role) for role in ROLES}
    for role in ROLES:
        assert any(way.abs().max() > 1e-4 for way in moved(starts[role], turns[role]))
        assert all(map(torch.equal, weights(pipeline, role), turns[role]))
    assert optimizer.balanced_accuracy is None
    assert [each.to_dict() for each in optimizer._all_controllers()] == multipliers and len(multipliers) == 3
    for each, before in zip(by_hand._all_controllers(), multipliers, strict=True):
        assert each.to_dict() != before
        each.load(before)
    output = pipeline.forward_pass(batch, seed=0)
    optimizer.step(output, seed=0)
    by_hand.step(output, seed=0)
    found = [each.to_dict() for each in optimizer._all_controllers()]
    assert found == [pytest.approx(each.to_dict()) for each in by_hand._all_controllers()]
    assert optimizer.dual.updates == 1
    for role in ROLES:
        expected = moved(turns[role], weights(other, role))
        for way, own in zip(expected, moved(starts[role], weights(pipeline, role)), strict=True):
            torch.testing.assert_close(own, way, rtol=0, atol=1e-6)
        assert any(way.abs().max() > 1e-4 for way in expected)
    after = {role: weights(pipeline, role) for role in ROLES}
    optimizer.policy_step(output.answers, output.rewards)  # the next move is an ordinary one
    assert not all(map(torch.equal, weights(pipeline, "policy"), after["policy"]))


def test_the_policy_is_paid_by_the_monitor_that_stays(make_game, monkeypatch):
    pipeline, stories = make_game()
    optimizer: Any = DualPPOOptimizer(pipeline, pipeline.config)
    batch, critics = stories.train[:4], []
    with optimizer.looking_ahead():
        optimizer.step(pipeline.forward_pass(batch, seed=5), seed=5)
    judged = type(pipeline).policy_judge_scores

    def noted(*args: Any, **kwargs: Any) -> Any:
        critics.append(weights(pipeline, "monitor"))
        return judged(*args, **kwargs)

    monkeypatch.setattr(type(pipeline), "policy_judge_scores", noted)
    optimizer.step(pipeline.forward_pass(batch, seed=0), seed=0)
    (critic,) = critics
    assert all(map(torch.equal, critic, weights(pipeline, "monitor")))


def test_a_player_that_stands_still_in_the_second_round_goes_back(make_game):
    pipeline, stories = make_game("schedule.freeze_monitor_above=0.6")
    optimizer: Any = DualPPOOptimizer(pipeline, pipeline.config)
    batch, start = stories.train[:4], weights(pipeline, "monitor")
    optimizer.balanced_accuracy = 0.0
    with optimizer.looking_ahead():
        optimizer.step(pipeline.forward_pass(batch, seed=5), seed=5)
    assert not all(map(torch.equal, weights(pipeline, "monitor"), start))
    optimizer.balanced_accuracy = 2.0  # so that its mean with this round's, whatever that is, is above 0.6
    metrics = optimizer.step(pipeline.forward_pass(batch, seed=0), seed=0)
    assert "monitor/updates" not in metrics
    for own, before in zip(weights(pipeline, "monitor"), start, strict=True):
        torch.testing.assert_close(own, before, rtol=0, atol=1e-6)


def test_a_run_of_such_steps_plays_two_rounds_in_each(make_game):
    def run(*overrides: str) -> list[dict[str, Any]]:
        pipeline, stories = make_game(*SMALL, "game.target_kl=10", *overrides)
        trainer = MinMaxTrainer(pipeline, pipeline.config, stories.train[:6])
        return [trainer.train_step() for _ in range(3)]

    plain, ahead = run(), run("schedule.extragradient=true")
    for once, twice in zip(plain, ahead, strict=True):
        assert once["num_tokens"] > 0 and twice["num_tokens"] == pytest.approx(
            2 * once["num_tokens"], rel=0.1
        )
        assert twice["dual/lambda"] > 0 and twice["monitor/updates"] == once["monitor/updates"]
        assert ("policy/updates" in once) == ("policy/updates" in twice)
    # The first round is played by the same players, in the second one they have moved.
    assert ahead[0]["monitor/sampling_kl"] < 1e-6
    assert ahead[1]["minmax/value"] != plain[1]["minmax/value"]


def test_what_cannot_be_combined_is_refused(make_config):
    with pytest.raises(UserError, match="both extrapolate; take one of the two"):
        make_config("schedule.extragradient=true", "monitor_model.step_rule=optimistic")
