"""A policy with its reference."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlhf_data import TokenSequence, UserError, pack
from rlhf_models.adapters import AdapterSet, LoraSettings, add_adapters
from rlhf_models.logps import token_logps
from rlhf_models.policy import PolicyModel
from rlhf_models.tiny import tiny_model

BATCH = pack([TokenSequence([5, 9, 14, 3, 27], 2), TokenSequence([5, 9, 14, 60], 2)])[0]
LORA = LoraSettings(lora_r=2)


def step(policy):
    """One ascent step on the log-probs."""
    optimizer = torch.optim.SGD(policy.parameters(), lr=1e-3)
    (-policy.logps(BATCH).logps.sum()).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("lora", [None, LORA])
def test_training_moves_the_policy_and_not_its_reference(tiny_model_folder, lora):
    policy = PolicyModel.from_pretrained(tiny_model_folder, lora=lora)
    start = policy.logps(BATCH).logps.detach()
    torch.testing.assert_close(policy.ref_logps(BATCH), start)
    step(policy)
    after = policy.logps(BATCH).logps
    assert after.sum() > start.sum() and after.requires_grad
    reference = policy.ref_logps(BATCH)
    torch.testing.assert_close(reference, start)
    assert not reference.requires_grad


def test_temperature_and_entropy_reach_the_scores(tiny_model_folder):
    policy = PolicyModel.from_pretrained(tiny_model_folder)
    scores = policy.logps(BATCH, temperature=0.5, with_entropy=True)
    expected = token_logps(policy.model, BATCH, temperature=0.5, with_entropy=True)
    torch.testing.assert_close(scores.logps, expected.logps)
    torch.testing.assert_close(scores.entropy, expected.entropy)
    torch.testing.assert_close(policy.ref_logps(BATCH, temperature=0.5), expected.logps)


def test_two_players_share_a_backbone_and_not_their_training(byte_tokenizer):
    model = tiny_model("gpt2", vocab_size=len(byte_tokenizer))
    adapters = AdapterSet(add_adapters(model, ["policy", "monitor"], LORA))
    policy, monitor = (
        PolicyModel(None, byte_tokenizer, adapters=adapters, adapter=name) for name in adapters.names
    )
    start = monitor.logps(BATCH).logps.detach()
    step(policy)
    assert torch.equal(monitor.logps(BATCH).logps, start)
    assert torch.equal(policy.ref_logps(BATCH), start)
    assert not torch.equal(policy.logps(BATCH).logps, start)
    assert policy.model is monitor.model and adapters.active == "policy"


def test_a_full_policy_is_saved_as_a_plain_model(tiny_model_folder, tmp_path, capfd):
    policy = PolicyModel.from_pretrained(tiny_model_folder)
    step(policy)
    policy.save_pretrained(tmp_path / "out")
    assert capfd.readouterr() == ("", "")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(token_logps(plain, BATCH).logps, policy.logps(BATCH).logps)
    again = PolicyModel.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(again.logps(BATCH).logps, policy.logps(BATCH).logps)


def test_a_lora_policy_is_saved_as_an_adapter_that_finds_its_base(tiny_model_folder, tmp_path):
    policy = PolicyModel.from_pretrained(tiny_model_folder, lora=LORA)
    step(policy)
    policy.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out" / "model.safetensors").exists()
    again = PolicyModel.from_pretrained(tmp_path / "out")
    assert again.adapters is not None and again.tokenizer.eos_token_id == 2
    torch.testing.assert_close(again.logps(BATCH).logps, policy.logps(BATCH).logps)
    torch.testing.assert_close(again.ref_logps(BATCH), policy.ref_logps(BATCH))


def test_an_adapter_of_a_model_made_in_memory_names_no_base(byte_tokenizer, tmp_path):
    model = tiny_model("llama", vocab_size=len(byte_tokenizer))
    adapters = AdapterSet(add_adapters(model, ["policy"], LORA))
    PolicyModel(None, byte_tokenizer, adapters=adapters, adapter="policy").save_pretrained(tmp_path / "out")
    with pytest.raises(UserError, match="names no base model"):
        PolicyModel.from_pretrained(tmp_path / "out")


def test_without_a_reference_none_is_made_up(tiny_llama, byte_tokenizer):
    policy = PolicyModel(tiny_llama, byte_tokenizer)
    with pytest.raises(ValueError, match="with one"):
        policy.ref_logps(BATCH)
    with pytest.raises(ValueError, match="give either a model, or adapters"):
        PolicyModel(None, byte_tokenizer)


def test_a_tokenizer_that_does_not_fit_is_refused(byte_tokenizer):
    with pytest.raises(UserError, match="tokenizer has 300 tokens but the model only 100 embeddings"):
        PolicyModel(tiny_model("llama", vocab_size=100), byte_tokenizer)
