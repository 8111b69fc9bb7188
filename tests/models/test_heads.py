"""Reward, judge and value models."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rlhf_data import TokenSequence, UserError, pack
from rlhf_models.heads import JudgeModel, RewardModel, ScalarModel, ValueModel
from rlhf_models.tiny import TINY_ARCHITECTURES, tiny_model

PROMPTS = ["where is mary ?", "where is mary ?", "where is ball ?"]
COMPLETIONS = [" it is kitchen .", " it is garden", " shed"]


def make(kind, tokenizer, architecture="llama", seed=0) -> Any:
    backbone = tiny_model(architecture, vocab_size=len(tokenizer), initializer_range=0.1)
    return kind.from_backbone(backbone, tokenizer, seed=seed)


@pytest.mark.parametrize("architecture", TINY_ARCHITECTURES)
def test_saved_models_give_the_same_scores_in_transformers(architecture, byte_tokenizer, tmp_path):
    model = make(RewardModel, byte_tokenizer, architecture)
    scores = model.score(PROMPTS, COMPLETIONS)
    model.save_pretrained(tmp_path / "rm")
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm").eval()
    assert plain.num_labels == 1
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "rm")
    rows = [model.encode(p, c) for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]
    padded = tokenizer.pad({"input_ids": rows}, return_tensors="pt", padding_side="right")
    with torch.no_grad():
        expected = plain(**padded).logits[:, 0]
    torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-4)
    assert expected.std() > 1e-3


def test_saving_and_loading_keeps_the_scores_and_prints_nothing(byte_tokenizer, tmp_path, capfd):
    model = make(RewardModel, byte_tokenizer)
    model.save_pretrained(tmp_path / "rm")
    again = RewardModel.from_pretrained(tmp_path / "rm")
    assert capfd.readouterr() == ("", "")
    torch.testing.assert_close(again.score(PROMPTS, COMPLETIONS), model.score(PROMPTS, COMPLETIONS))


def test_scores_do_not_depend_on_the_cut_or_the_order(byte_tokenizer):
    model = make(RewardModel, byte_tokenizer)
    whole = model.score(PROMPTS, COMPLETIONS)
    torch.testing.assert_close(model.score(PROMPTS, COMPLETIONS, max_tokens=8), whole)
    torch.testing.assert_close(model.score(PROMPTS[::-1], COMPLETIONS[::-1]).flip(0), whole)
    assert whole.shape == (3,) and whole.dtype == torch.float32 and not whole.requires_grad


def test_the_score_is_the_head_on_the_last_hidden_state(byte_tokenizer):
    model = make(RewardModel, byte_tokenizer)
    ids = model.encode(PROMPTS[0], COMPLETIONS[0])
    with torch.no_grad():
        hidden = model.model.base_model(torch.tensor([ids])).last_hidden_state[0, -1]
    expected = hidden @ model.model.score.weight[0]
    torch.testing.assert_close(model.score_tokens([ids])[0], expected, rtol=1e-5, atol=1e-5)
    assert model.model.score.bias is None


def test_the_judge_gives_probabilities_and_trains_on_their_logits(byte_tokenizer):
    judge = make(JudgeModel, byte_tokenizer)
    logits = make(RewardModel, byte_tokenizer).score(PROMPTS, COMPLETIONS)
    torch.testing.assert_close(judge.score(PROMPTS, COMPLETIONS), 1 / (1 + (-logits).exp()))
    batch = pack([TokenSequence(judge.encode(PROMPTS[0], COMPLETIONS[0]), 1)])[0]
    torch.testing.assert_close(judge(batch).detach(), logits[:1], rtol=1e-5, atol=1e-5)
    judge(batch).sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in judge.parameters())


def test_values_are_the_head_before_each_scored_token(byte_tokenizer, tmp_path):
    reward = make(RewardModel, byte_tokenizer)
    reward.save_pretrained(tmp_path / "rm")
    critic = ValueModel.from_pretrained(tmp_path / "rm")
    ids = reward.encode(PROMPTS[0], COMPLETIONS[0])
    start = len(ids) - 3
    batch = pack([TokenSequence(ids, start)])[0]
    values = critic.values(batch)
    # The value before token t is the score of the text that ends just before t.
    expected = reward.score_tokens([ids[:t] for t in range(start, len(ids))])
    torch.testing.assert_close(values.detach(), expected, rtol=1e-4, atol=1e-5)
    assert values.requires_grad


def test_from_backbone_copies_the_trunk_and_seeds_the_head(byte_tokenizer):
    backbone = tiny_model("qwen2", vocab_size=len(byte_tokenizer))
    state = torch.get_rng_state()
    models: list[Any] = [RewardModel.from_backbone(backbone, byte_tokenizer, seed=s) for s in (1, 1, 2)]
    assert torch.equal(torch.get_rng_state(), state)
    for name, tensor in backbone.base_model.state_dict().items():
        copied = models[0].model.base_model.state_dict()[name]
        assert torch.equal(copied, tensor) and copied.data_ptr() != tensor.data_ptr()
    heads = [m.model.score.weight for m in models]
    assert torch.equal(heads[0], heads[1]) and not torch.equal(heads[0], heads[2])
    assert heads[0].std().item() == pytest.approx(33**-0.5, rel=0.4)  # 32 draws from N(0, 1/33)


def test_a_head_can_be_trained_to_prefer(byte_tokenizer):
    model = make(RewardModel, byte_tokenizer).train()
    rows = [TokenSequence(model.encode(PROMPTS[0], c), 1) for c in (" it is kitchen .", " it is garden .")]
    batch = pack(rows)[0]
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(20):
        chosen, rejected = model(batch)
        loss = -torch.nn.functional.logsigmoid(chosen - rejected)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    chosen, rejected = model(batch).tolist()
    assert chosen > rejected + 1


@pytest.mark.parametrize("option", ["load_in_8bit", "load_in_4bit"])
def test_quantised_reward_models_keep_their_head(option, byte_tokenizer, tmp_path):
    pytest.importorskip("bitsandbytes")
    backbone = tiny_model("gpt2", vocab_size=len(byte_tokenizer), n_embd=64)
    model = RewardModel.from_backbone(backbone, byte_tokenizer)
    model.save_pretrained(tmp_path / "rm")
    options: dict[str, Any] = {option: True}
    small = RewardModel.from_pretrained(tmp_path / "rm", **options)
    assert type(small.model.score) is torch.nn.Linear
    assert {"Linear8bitLt", "Linear4bit"} & {type(m).__name__ for m in small.modules()}
    torch.testing.assert_close(
        small.score(PROMPTS, COMPLETIONS), model.score(PROMPTS, COMPLETIONS), rtol=0.2, atol=0.2
    )


def test_a_text_longer_than_the_context_is_refused(byte_tokenizer):
    model = make(RewardModel, byte_tokenizer)
    with pytest.raises(UserError, match="a text to be scored by RewardModel needs 129 tokens"):
        model.score_tokens([[5] * 129])


def test_a_model_with_several_labels_is_refused(byte_tokenizer):
    config = tiny_model("llama", vocab_size=len(byte_tokenizer)).config
    config.num_labels = 3
    with pytest.raises(UserError, match="with 3 labels gives no single score"):
        ScalarModel(AutoModelForSequenceClassification.from_config(config), byte_tokenizer)


def test_a_plain_language_model_is_no_reward_model(tiny_model_folder):
    with pytest.raises(UserError, match=r"the weights of model folder .* lack score.weight"):
        RewardModel.from_pretrained(tiny_model_folder)
