"""A player's optimizer: saved and taken up."""

import copy

import torch

from rlhf_infer import Rollout
from rlhf_minmax.config.run import MinMaxConfig
from rlhf_minmax.optim.player import PlayerOptimizer
from rlhf_models import PolicyModel


def test_a_player_goes_on_from_a_checkpoint_as_if_nothing_had_happened(tiny_llama, byte_tokenizer, tmp_path):
    config = MinMaxConfig.from_dict({"policy_model": {"baseline": "critic"}, "game": {"target_kl": 100.0}})
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
    whole.save(tmp_path, "policy")
    rest = player(whole.player.model.state_dict())
    rest.load(tmp_path, "policy")
    for each in (whole, rest):
        each.update(rollouts, torch.tensor([0.5, -2.0]), updates=2)
    assert all(torch.equal(a, b) for a, b in zip(rest.parameters, whole.parameters, strict=True))
    assert rest.critic is not None and whole.critic is not None
    for mine, its in zip(rest.critic.parameters(), whole.critic.parameters(), strict=True):
        assert torch.equal(mine, its)
