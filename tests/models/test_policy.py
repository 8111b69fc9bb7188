"""A policy with its reference."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from raises import raises_error
from rlhf_data import TokenSequence, pack
from rlhf_models.adapters.lora import AdapterSet, LoraSettings, add_adapters
from rlhf_models.language_model.logps import token_logps
from rlhf_models.loading.tiny import tiny_model
from rlhf_models.policy import PolicyModel

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
    model.save_pretrained(tmp_path / "base")
    adapters = AdapterSet(add_adapters(model, ["policy"], LORA))
    policy = PolicyModel(None, byte_tokenizer, adapters=adapters, adapter="policy")
    step(policy)
    policy.save_pretrained(tmp_path / "out")
    with raises_error("no_base_model"):
        PolicyModel.from_pretrained(tmp_path / "out")
    again = PolicyModel.from_pretrained(tmp_path / "out", base_model=tmp_path / "base")
    assert torch.equal(again.logps(BATCH).logps, policy.logps(BATCH).logps)


@pytest.mark.parametrize("lora", [None, LORA])
def test_weights_are_put_back_in_place(lora, tiny_model_folder, tmp_path):
    policy = PolicyModel.from_pretrained(tiny_model_folder, lora=lora)
    parameters = [id(p) for p in policy.parameters()]
    step(policy)
    trained = policy.logps(BATCH).logps
    policy.save_pretrained(tmp_path / "out")
    step(policy)
    assert not torch.equal(policy.logps(BATCH).logps, trained)
    policy.load_weights(tmp_path / "out")
    assert torch.equal(policy.logps(BATCH).logps, trained)
    assert [id(p) for p in policy.parameters()] == parameters


def test_an_adapter_that_peft_saved_loads_with_its_base_tokenizer(tiny_model_folder, tmp_path):
    base = AutoModelForCausalLM.from_pretrained(tiny_model_folder)
    config = LoraConfig(r=3, target_modules=["q_proj"], use_dora=True, task_type="CAUSAL_LM")
    plain = get_peft_model(base, config)
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.1)
    plain.save_pretrained(tmp_path / "peft")
    policy = PolicyModel.from_pretrained(tmp_path / "peft")
    torch.testing.assert_close(policy.logps(BATCH).logps, token_logps(plain, BATCH).logps)
    assert not torch.equal(policy.logps(BATCH).logps, policy.ref_logps(BATCH))
    assert policy.tokenizer.eos_token_id == 2
    # 2 layers, each with A, B and DoRA's magnitudes
    assert len(policy.parameters()) == 2 * 3 and all(p.requires_grad for p in policy.parameters())


def test_the_reference_is_no_part_of_the_module(tiny_model_folder):
    policy = PolicyModel.from_pretrained(tiny_model_folder)
    assert len(list(policy.named_parameters())) == len(list(policy.model.named_parameters()))
    assert policy(BATCH, reference=True).logps.requires_grad is False
    torch.testing.assert_close(policy(BATCH, reference=True).logps, policy.ref_logps(BATCH))
    policy.train()
    assert policy.model.training and not policy.eval().model.training


@pytest.mark.parametrize("lora", [None, LORA])
def test_gradient_checkpointing_changes_no_gradient(lora, tiny_model_folder):
    gradients = []
    for checkpointing in (False, True):
        policy = PolicyModel.from_pretrained(tiny_model_folder, lora=lora).train()
        if checkpointing:
            policy.gradient_checkpointing_enable()
        policy.logps(BATCH).logps.sum().backward()
        gradients.append([p.grad for p in policy.parameters()])
    for first, second in zip(*gradients, strict=True):
        torch.testing.assert_close(first, second)


def test_without_a_reference_none_is_made_up(tiny_llama, byte_tokenizer):
    policy = PolicyModel(tiny_llama, byte_tokenizer)
    with pytest.raises(ValueError, match="with one"):
        policy.ref_logps(BATCH)
    with pytest.raises(ValueError, match="give either a model, or adapters"):
        PolicyModel(None, byte_tokenizer)


def test_a_tokenizer_that_does_not_fit_is_refused(byte_tokenizer):
    with raises_error("tokenizer_does_not_fit"):
        PolicyModel(tiny_model("llama", vocab_size=100), byte_tokenizer)


@pytest.mark.parametrize("side", ["left", "right"])
def test_log_probs_of_padded_batches(tiny_model_folder, side):
    """Against transformers' own forward of each sequence by itself."""
    policy = PolicyModel.from_pretrained(tiny_model_folder)
    plain = AutoModelForCausalLM.from_pretrained(tiny_model_folder)
    texts = [[5, 9, 14, 3, 27], [5, 9, 60], [7]]
    pads = [5 - len(ids) for ids in texts]
    ids = [[0] * pad + t if side == "left" else t + [0] * pad for t, pad in zip(texts, pads, strict=True)]
    mask = [
        [0] * pad + [1] * len(t) if side == "left" else [1] * len(t) + [0] * pad
        for t, pad in zip(texts, pads, strict=True)
    ]
    found = policy.get_log_probs(torch.tensor(ids), torch.tensor(mask))
    assert found.shape == (3, 4) and found.requires_grad
    for row, t, pad in zip(found, texts, pads, strict=True):
        logits = plain(torch.tensor([t])).logits[0, :-1].log_softmax(-1)
        expected = logits.gather(1, torch.tensor(t[1:]).unsqueeze(1)).squeeze(1)
        part = row[pad:] if side == "left" else row[: len(t) - 1]
        torch.testing.assert_close(part, expected, atol=1e-5, rtol=1e-5)
        assert row.count_nonzero() == len(t) - 1


def test_texts_are_completed_greedily(tiny_model_folder):
    policy = PolicyModel.from_pretrained(tiny_model_folder, lora=LORA)
    plain: Any = AutoModelForCausalLM.from_pretrained(tiny_model_folder)
    texts = policy.generate(["Where is", "the ball"], max_new_tokens=6, do_sample=False)
    for prompt, text in zip(["Where is", "the ball"], texts, strict=True):
        ids = policy.tokenizer(prompt, return_tensors="pt")["input_ids"]
        whole = plain.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :]
        assert text == policy.tokenizer.decode(whole, skip_special_tokens=True)
