"""The critic."""

from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForTokenClassification

from proofs import by_default
from raises import raises_error
from rlhf_data import TokenSequence, pack
from rlhf_models import LoraSettings, RewardModel, ValueModel, tiny_model
from rlhf_models.loading.tiny import TINY_ARCHITECTURES

ROWS = [TokenSequence([5, 9, 14, 3, 27], 2), TokenSequence([5, 9, 14, 60], 2), TokenSequence([7, 7, 8], 1)]
(BATCH,) = pack(ROWS)


def make(kind, tokenizer, architecture="llama", seed=0) -> Any:
    backbone = tiny_model(architecture, vocab_size=len(tokenizer), initializer_range=0.1)
    return kind.from_backbone(backbone, tokenizer, seed=seed)


def train(model):
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(3):
        (model(BATCH) - 1).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def values(model):
    with torch.no_grad():
        return model(BATCH)


def one_by_one(plain):
    """Plain transformers' outputs in front of each scored token, each sequence by itself."""
    found = []
    for i in BATCH.sequence_ids.tolist():
        with torch.no_grad():
            logits = plain(torch.tensor([list(ROWS[i].input_ids)])).logits[0, :, 0]
        found += [logits[at - 1] for at in ROWS[i].scored()]
    return torch.stack(found)


@pytest.mark.parametrize("architecture", by_default(TINY_ARCHITECTURES, "llama", "gpt2"))
def test_saved_critics_give_the_same_values_in_transformers(architecture, byte_tokenizer, tmp_path):
    model = make(ValueModel, byte_tokenizer, architecture)
    train(model)
    model.save_pretrained(tmp_path / "critic")
    plain = AutoModelForTokenClassification.from_pretrained(tmp_path / "critic")
    assert plain.num_labels == 1 and plain.dropout.p == 0.0
    torch.testing.assert_close(values(model), one_by_one(plain.eval()), rtol=1e-4, atol=1e-5)
    assert torch.equal(values(ValueModel.from_pretrained(tmp_path / "critic")), values(model))


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_a_critic_may_start_as_a_reward_model(architecture, byte_tokenizer, tmp_path):
    reward = make(RewardModel, byte_tokenizer, architecture)
    reward.save_pretrained(tmp_path / "rm")
    critic = ValueModel.from_pretrained(tmp_path / "rm")
    # The value before token t is the score of the text that ends just before t.
    prefixes = [ROWS[i].input_ids[:at] for i in BATCH.sequence_ids.tolist() for at in ROWS[i].scored()]
    torch.testing.assert_close(values(critic), reward.score_tokens(prefixes), rtol=1e-4, atol=1e-5)
    critic.save_pretrained(tmp_path / "critic")
    plain = AutoModelForTokenClassification.from_pretrained(tmp_path / "critic").eval()
    torch.testing.assert_close(values(critic), one_by_one(plain), rtol=1e-4, atol=1e-5)
    assert all(p.requires_grad for p in critic.parameters())


def test_a_lora_critic_comes_back_here_and_in_plain_peft(tiny_model_folder, tmp_path):
    model = ValueModel.from_language_model(tiny_model_folder).add_lora(LoraSettings(lora_r=2))
    train(model)
    model.save_pretrained(tmp_path / "critic")
    assert torch.equal(values(ValueModel.from_pretrained(tmp_path / "critic")), values(model))
    base = AutoModelForTokenClassification.from_pretrained(tiny_model_folder, num_labels=1)
    plain = PeftModel.from_pretrained(base, tmp_path / "critic").eval()
    torch.testing.assert_close(values(model), one_by_one(plain), rtol=1e-5, atol=1e-6)
    again = ValueModel.from_language_model(tiny_model_folder, seed=5).add_lora(LoraSettings(lora_r=2))
    again.load_weights(tmp_path / "critic")
    assert torch.equal(values(again), values(model))


def test_values_train_trunk_and_head(byte_tokenizer):
    model = make(ValueModel, byte_tokenizer)
    assert model(BATCH).shape == (len(BATCH.score_targets),) and model(BATCH).dtype == torch.float32
    model(BATCH).sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())


def test_weights_of_another_size_are_refused(byte_tokenizer, tmp_path):
    make(ValueModel, byte_tokenizer).save_pretrained(tmp_path / "critic")
    with raises_error("weights_do_not_fit"):
        make(ValueModel, byte_tokenizer, "gpt2").load_weights(tmp_path / "critic")
