"""Players: one backbone with an adapter each, or models of their own."""

import itertools
from typing import Any

import pytest
import torch

from raises import raises_error
from rlhf_data import TokenSequence, pack
from rlhf_minmax import MinMaxConfig
from rlhf_minmax.players import players as players_module
from rlhf_minmax.players.players import load_players
from rlhf_models import DeviceManager, load_causal_lm, tiny_model

BATCH = pack([TokenSequence([5, 9, 14, 3, 27], 2)])[0]


def players(policy, monitor, *, baseline=True, policy_settings=None, monitor_settings=None) -> Any:
    config = MinMaxConfig.from_dict(
        {
            "policy_model": {"model_name": policy and str(policy), **(policy_settings or {})},
            "monitor_model": {"model_name": monitor and str(monitor), **(monitor_settings or {})},
            "baseline": baseline,
        }
    )
    return load_players(config, None, DeviceManager({}))


@pytest.fixture
def other_folder(tmp_path, byte_tokenizer):
    model = tiny_model("gpt2", vocab_size=len(byte_tokenizer), seed=5)
    model.save_pretrained(tmp_path / "gpt2")
    byte_tokenizer.save_pretrained(tmp_path / "gpt2")
    return tmp_path / "gpt2"


def test_one_name_is_one_backbone_with_an_adapter_each(tiny_model_folder):
    found = players(tiny_model_folder, tiny_model_folder)
    everyone = [found.policy, found.monitor, found.plain]
    assert found.shared and len({id(p.model) for p in everyone}) == 1
    lists = [{id(parameter) for parameter in p.parameters()} for p in everyone]
    assert all(lists) and not any(a & b for a, b in itertools.combinations(lists, 2))
    names = {id(parameter): name for name, parameter in found.policy.model.named_parameters()}
    assert all("lora_" in names[i] for i in set().union(*lists))
    frozen = [p for p in found.policy.model.parameters() if id(p) not in set().union(*lists)]
    assert frozen and not any(parameter.requires_grad for parameter in frozen)


def test_every_player_starts_as_the_backbone(tiny_model_folder):
    found = players(tiny_model_folder, tiny_model_folder)
    reference = found.policy.ref_logps(BATCH)
    for player in (found.policy, found.monitor, found.plain):
        assert torch.equal(player.logps(BATCH).logps.detach(), reference)


def test_no_baseline_no_third_player(tiny_model_folder, other_folder):
    assert players(tiny_model_folder, tiny_model_folder, baseline=False).plain is None
    assert players(tiny_model_folder, other_folder, baseline=False).plain is None


def test_a_baseline_changes_no_other_player(tiny_model_folder):
    with_one, without = (players(tiny_model_folder, tiny_model_folder, baseline=b) for b in (True, False))
    for role in ("policy", "monitor"):
        both = (getattr(found, role).parameters() for found in (with_one, without))
        assert all(torch.equal(a, b) for a, b in zip(*both, strict=True))


def test_two_names_are_two_models(tiny_model_folder, other_folder):
    found = players(tiny_model_folder, other_folder, monitor_settings={"lora_r": 3})
    assert not found.shared
    assert found.policy.model is not found.monitor.model and found.plain.model is found.policy.model
    assert type(found.policy.model.get_base_model()).__name__ == "LlamaForCausalLM"
    assert type(found.monitor.model.get_base_model()).__name__ == "GPT2LMHeadModel"
    assert {p.shape[0] for p in found.monitor.parameters() if p.shape[0] < 8} == {3}


@pytest.mark.parametrize(
    "setting", [{"lora_r": 8}, {"lora_alpha": 1}, {"lora_dropout": 0.5}, {"lora_target_modules": ["q_proj"]}]
)
def test_one_backbone_refuses_differing_adapters(tiny_model_folder, setting):
    with raises_error("different_adapters"):
        players(tiny_model_folder, tiny_model_folder, monitor_settings=setting)


def test_one_backbone_refuses_two_devices(tiny_model_folder):
    class Apart(DeviceManager):
        def device(self, role):
            return torch.device("cuda:1" if role == "monitor" else "cpu")

    name = {"model_name": str(tiny_model_folder)}
    config = MinMaxConfig.from_dict({"policy_model": name, "monitor_model": name})
    with raises_error("different_devices"):
        load_players(config, None, Apart({}))


def test_full_players_are_models_of_their_own_with_a_frozen_reference(tiny_model_folder):
    full = {"use_lora": False}
    found = players(tiny_model_folder, tiny_model_folder, policy_settings=full, monitor_settings=full)
    everyone = [found.policy, found.monitor, found.plain]
    assert not found.shared and len({id(p.model) for p in everyone}) == 3
    reference = found.policy.ref_logps(BATCH)
    with torch.no_grad():
        for parameter in found.policy.parameters():
            parameter.add_(0.1)
    assert torch.equal(found.policy.ref_logps(BATCH), reference)
    assert torch.equal(found.monitor.logps(BATCH).logps.detach(), reference)
    assert torch.equal(found.plain.logps(BATCH).logps.detach(), reference)
    assert len(found.policy.parameters()) == len(list(found.policy.model.parameters()))


def test_an_adapter_may_play_against_full_weights(tiny_model_folder):
    found = players(tiny_model_folder, tiny_model_folder, monitor_settings={"use_lora": False})
    assert not found.shared and found.policy.adapters is not None and found.monitor.adapters is None


def test_players_trained_in_full_take_the_loaded_model_as_reference(tiny_model_folder, monkeypatch):
    """So that no copy is in memory beside those that the memory plan counts."""
    read = []
    monkeypatch.setattr(
        players_module, "load_causal_lm", lambda *a, **k: read.append(load_causal_lm(*a, **k)) or read[-1]
    )
    full = {"use_lora": False}
    found = players(tiny_model_folder, tiny_model_folder, policy_settings=full, monitor_settings=full)
    assert found.policy.references == found.plain.references == (read[0],)
    assert found.monitor.references == (read[1],)
    assert not any(parameter.requires_grad for model in read for parameter in model.parameters())
    assert all(parameter.requires_grad for parameter in found.policy.model.parameters())


def test_players_without_a_name_take_the_demonstrations_base(tiny_model_folder):
    found = load_players(MinMaxConfig(), str(tiny_model_folder), DeviceManager({}))
    assert found.shared


def test_a_missing_model_is_named(tmp_path):
    with raises_error("model_not_found"):
        players(tmp_path / "nowhere", tmp_path / "nowhere")
