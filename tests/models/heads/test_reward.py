"""Reward and judge models: one score per text."""

from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

from proofs import by_default
from raises import raises_error
from rlhf_data import TokenSequence, pack
from rlhf_data.records.encode import Encoder
from rlhf_models import (
    JudgeModel,
    LoraSettings,
    RewardModel,
    ScalarModel,
    apply_lora,
    load_causal_lm,
    tiny_model,
)
from rlhf_models.adapters.lora import AdapterSet, add_adapters
from rlhf_models.heads.classifiers import head_of, share_trunk
from rlhf_models.heads.reward import read_positions
from rlhf_models.loading.tiny import TINY_ARCHITECTURES

PROMPTS = ["where is mary ?", "where is mary ?", "where is ball ?"]
COMPLETIONS = [" it is kitchen .", " it is garden", " shed"]
LORA = LoraSettings(lora_r=2)


def make(kind, tokenizer, architecture="llama", seed=0, **options) -> Any:
    backbone = tiny_model(architecture, vocab_size=len(tokenizer), initializer_range=0.1)
    return kind.from_backbone(backbone, tokenizer, seed=seed, **options)


def pairs(model):
    rows = [TokenSequence(model.encode(PROMPTS[0], c), 1) for c in (" it is kitchen .", " it is garden .")]
    return pack(rows)[0]


def train(model, steps=3, learning_rate=1e-3):
    """A few Adam steps on one pair."""
    batch = pairs(model)
    model.train()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=learning_rate)
    for _ in range(steps):
        chosen, rejected = model(batch)
        loss = -nn.functional.logsigmoid(chosen - rejected)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()


def one_by_one(plain, rows):
    """Scores of plain transformers, each text by itself."""
    with torch.no_grad():
        return torch.stack([plain(torch.tensor([ids])).logits[0, 0] for ids in rows])


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


@pytest.mark.parametrize("architecture", by_default(TINY_ARCHITECTURES, "llama", "gpt2"))
def test_a_two_layer_head_is_saved_beside_a_trunk_that_transformers_loads(
    architecture, byte_tokenizer, tmp_path
):
    model = make(RewardModel, byte_tokenizer, architecture, head="mlp")
    train(model)
    scores = model.score(PROMPTS, COMPLETIONS)
    model.save_pretrained(tmp_path / "rm")
    assert torch.equal(RewardModel.from_pretrained(tmp_path / "rm").score(PROMPTS, COMPLETIONS), scores)

    trunk = AutoModel.from_pretrained(tmp_path / "rm").eval()
    head = load_file(tmp_path / "rm" / "score_head.safetensors")
    for prompt, completion, score in zip(PROMPTS, COMPLETIONS, scores, strict=True):
        with torch.no_grad():
            hidden = trunk(torch.tensor([model.encode(prompt, completion)])).last_hidden_state[0, -1]
        inner = torch.relu(head["heads.0.0.weight"] @ hidden + head["heads.0.0.bias"])
        expected = head["heads.0.2.weight"] @ inner + head["heads.0.2.bias"]
        torch.testing.assert_close(score[None], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("head", by_default(["linear", "mlp"], "mlp"))
@pytest.mark.parametrize("lora", [None, LORA])
def test_saving_and_loading_keeps_every_bit_and_prints_nothing(
    head, lora, tiny_model_folder, tmp_path, capfd
):
    model = RewardModel.from_language_model(tiny_model_folder, head=head, seed=3)
    if lora:
        model.add_lora(lora)
    model.append_eos = True
    train(model)
    capfd.readouterr()
    model.save_pretrained(tmp_path / "rm")
    again = RewardModel.from_pretrained(tmp_path / "rm")
    assert capfd.readouterr() == ("", "")
    assert again.append_eos
    assert torch.equal(again.score(PROMPTS, COMPLETIONS), model.score(PROMPTS, COMPLETIONS))
    state = again.state_dict()
    # peft keeps the head that an adapter's own stands for; nothing reads it.
    kept = {name: tensor for name, tensor in model.state_dict().items() if "original_module" not in name}
    assert all(torch.equal(state[name], tensor) for name, tensor in kept.items())

    other = RewardModel.from_language_model(tiny_model_folder, head=head, seed=4)
    other = other.add_lora(lora) if lora else other
    parameters = [id(p) for p in other.parameters()]
    assert not torch.equal(other.score(PROMPTS, COMPLETIONS), model.score(PROMPTS, COMPLETIONS))
    other.load_weights(tmp_path / "rm")
    other.append_eos = True
    assert torch.equal(other.score(PROMPTS, COMPLETIONS), model.score(PROMPTS, COMPLETIONS))
    assert [id(p) for p in other.parameters()] == parameters


@pytest.mark.parametrize(
    "options", by_default([{}, {"dtype": "bfloat16"}, {"load_in_8bit": True}], {}, {"load_in_8bit": True})
)
@pytest.mark.parametrize("head", by_default(["linear", "mlp"], "mlp"))
def test_a_classifier_on_a_shared_trunk_is_the_same_model(options, head, tiny_model_folder, tmp_path):
    model = RewardModel.from_language_model(tiny_model_folder, head=head, seed=3).add_lora(LORA)
    train(model, learning_rate=0.1)
    model.append_eos = True
    model.save_pretrained(tmp_path / "rm")
    own = RewardModel.from_pretrained(tmp_path / "rm", **options)
    backbone: Any = load_causal_lm(tiny_model_folder, **options)
    adapters = AdapterSet(add_adapters(backbone, ["policy"], LORA))
    adapters.add_frozen("reward", tmp_path / "rm")
    kinds = [type(module) for module in adapters.model.modules()]
    state = torch.get_rng_state()
    classifier, tokenizer = share_trunk(AutoModelForSequenceClassification, backbone, tmp_path / "rm")
    shared = RewardModel(classifier, tokenizer)
    assert torch.equal(torch.get_rng_state(), state)
    assert shared.model.base_model is backbone.base_model and shared.append_eos
    assert kinds == [type(module) for module in adapters.model.modules()]  # no layer changes its library
    assert head_of(classifier) is not head_of(own.model) and not any(
        parameter.requires_grad for parameter in head_of(classifier).parameters()
    )
    with adapters.use("reward"):
        torch.testing.assert_close(shared.score(PROMPTS, COMPLETIONS), own.score(PROMPTS, COMPLETIONS))
    assert (shared.score(PROMPTS, COMPLETIONS) - own.score(PROMPTS, COMPLETIONS)).abs().max() > 1e-3


def test_a_shared_trunk_wants_a_head_of_one_output(tiny_model_folder, tmp_path):
    backbone: Any = load_causal_lm(tiny_model_folder)
    AdapterSet(add_adapters(backbone, ["policy"], LORA)).save("policy", tmp_path / "lm")
    with raises_error("head_does_not_fit"):
        share_trunk(AutoModelForSequenceClassification, backbone, tmp_path / "lm")


def test_a_lora_reward_model_loads_in_plain_peft(tiny_model_folder, tmp_path):
    model = RewardModel.from_language_model(tiny_model_folder).add_lora(LORA)
    frozen = [p for name, p in model.named_parameters() if not p.requires_grad and "score" not in name]
    before = [p.clone() for p in frozen]
    assert {n.split(".")[-2] for n, p in model.named_parameters() if p.requires_grad} == {"default"}
    train(model)
    assert all(torch.equal(a, b) for a, b in zip(frozen, before, strict=True))
    model.save_pretrained(tmp_path / "rm")
    assert not (tmp_path / "rm" / "model.safetensors").exists()
    # The base has no head; the adapter brings it.
    base = AutoModelForSequenceClassification.from_pretrained(tiny_model_folder, num_labels=1)
    plain = PeftModel.from_pretrained(base, tmp_path / "rm").eval()
    rows = [model.encode(p, c) for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]
    torch.testing.assert_close(model.score_tokens(rows), one_by_one(plain, rows), rtol=1e-5, atol=1e-6)


def test_a_lora_adapter_of_a_moved_base_is_told_where_it_is(tiny_model_folder, tmp_path):
    model = RewardModel.from_language_model(tiny_model_folder).add_lora(LORA)
    model.save_pretrained(tmp_path / "rm")
    moved = tiny_model_folder.rename(tmp_path / "elsewhere")
    with raises_error("base_model_not_found"):
        RewardModel.from_pretrained(tmp_path / "rm")
    again = RewardModel.from_pretrained(tmp_path / "rm", base_model=moved)
    assert torch.equal(again.score(PROMPTS, COMPLETIONS), model.score(PROMPTS, COMPLETIONS))


def test_a_second_adapter_is_refused(byte_tokenizer):
    model = make(RewardModel, byte_tokenizer).add_lora(LORA)
    with raises_error("adapter_exists"):
        model.add_lora(LORA)


def test_scores_do_not_depend_on_the_cut_or_the_order(byte_tokenizer):
    model = make(RewardModel, byte_tokenizer)
    whole = model.score(PROMPTS, COMPLETIONS)
    torch.testing.assert_close(model.score(PROMPTS, COMPLETIONS, max_tokens=8), whole)
    torch.testing.assert_close(model.score(PROMPTS[::-1], COMPLETIONS[::-1]).flip(0), whole)
    assert whole.shape == (3,) and whole.dtype == torch.float32 and not whole.requires_grad
    assert model.score([], []).shape == (0,)


def test_the_score_is_the_head_on_the_last_hidden_state(byte_tokenizer):
    model = make(RewardModel, byte_tokenizer)
    ids = model.encode(PROMPTS[0], COMPLETIONS[0])
    with torch.no_grad():
        hidden = model.model.base_model(torch.tensor([ids])).last_hidden_state[0, -1]
    expected = hidden @ model.model.score.weight[0]
    torch.testing.assert_close(model.score_tokens([ids])[0], expected, rtol=1e-5, atol=1e-5)
    assert model.model.score.bias is None


def test_texts_are_read_as_in_training_where_the_model_says_so(byte_tokenizer):
    model = make(RewardModel, byte_tokenizer)
    apart = model.encode(PROMPTS[0], COMPLETIONS[0])
    assert apart[-1] != byte_tokenizer.eos_token_id and not model.append_eos
    model.append_eos = True
    [expected], _ = Encoder(byte_tokenizer).completions(PROMPTS[0], [COMPLETIONS[0]])
    assert model.encode(PROMPTS[0], COMPLETIONS[0]) == expected
    assert expected[-1] == byte_tokenizer.eos_token_id


def test_messages_go_through_the_chat_template(byte_tokenizer, chat_tokenizer):
    asked: Any = [{"role": "user", "content": "hi"}]
    said: Any = [{"role": "assistant", "content": "ho"}]
    model = make(RewardModel, chat_tokenizer)
    ids = chat_tokenizer.apply_chat_template([*asked, *said], tokenize=True, return_dict=False)
    assert model.encode(asked, said) == ids
    assert chat_tokenizer.decode(ids) == "<user>hi<assistant>ho"
    with torch.no_grad():
        expected = model.model(input_ids=torch.tensor([ids])).logits[0, 0]
    torch.testing.assert_close(model.score([asked], [said])[0], expected, rtol=1e-5, atol=1e-5)
    with raises_error("mixed_text_and_messages"):
        model.encode(asked, "ho")
    with raises_error("no_chat_template"):
        make(RewardModel, byte_tokenizer).encode(asked, said)


def test_where_the_end_token_is_padding_the_score_is_read_where_transformers_reads_it(
    byte_tokenizer, tmp_path
):
    tokenizer = type(byte_tokenizer)(tokenizer_object=byte_tokenizer.backend_tokenizer, eos_token="<eos>")
    tokenizer.pad_token = tokenizer.eos_token
    model = make(RewardModel, tokenizer)
    rows = [[5, 9, 14, 2], [5, 9, 2, 2], [5, 9], [5, 9, 2, 14], [2]]
    model.save_pretrained(tmp_path / "rm")
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm").eval()
    torch.testing.assert_close(model.score_tokens(rows), one_by_one(plain, rows), rtol=1e-5, atol=1e-6)
    (batch,) = pack([TokenSequence(row, 1) for row in rows])
    read = read_positions(batch, model.config, tokenizer)
    # 5 9 is shared: of "5 9 2 2" the 9 is read, which is stored where "5 9" is.
    positions = dict(zip(batch.sequence_ids.tolist(), read.tolist(), strict=True))
    assert positions[1] == positions[2] and batch.input_ids[read].tolist() == [14, 9, 9, 14, 2]


def test_the_judge_gives_probabilities_and_trains_on_their_logits(byte_tokenizer):
    judge = make(JudgeModel, byte_tokenizer)
    logits = make(RewardModel, byte_tokenizer).score(PROMPTS, COMPLETIONS)
    torch.testing.assert_close(judge.score(PROMPTS, COMPLETIONS), 1 / (1 + (-logits).exp()))
    batch = pack([TokenSequence(judge.encode(PROMPTS[0], COMPLETIONS[0]), 1)])[0]
    torch.testing.assert_close(judge(batch).detach(), logits[:1], rtol=1e-5, atol=1e-5)
    judge(batch).sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in judge.parameters())


@pytest.mark.parametrize("head", ["linear", "mlp"])
def test_from_backbone_copies_the_trunk_and_seeds_the_head(head, byte_tokenizer):
    backbone = tiny_model("qwen2", vocab_size=len(byte_tokenizer))
    state = torch.get_rng_state()
    models: list[Any] = [
        RewardModel.from_backbone(backbone, byte_tokenizer, head=head, seed=s) for s in (1, 1, 2)
    ]
    assert torch.equal(torch.get_rng_state(), state)
    for name, tensor in backbone.base_model.state_dict().items():
        copied = models[0].model.base_model.state_dict()[name]
        assert torch.equal(copied, tensor) and copied.data_ptr() != tensor.data_ptr()
    outer = [next(p for p in m.model.score.parameters() if p.shape == (1, 32)) for m in models]
    assert torch.equal(outer[0], outer[1]) and not torch.equal(outer[0], outer[2])
    assert outer[0].std().item() == pytest.approx(33**-0.5, rel=0.4)  # 32 draws from N(0, 1/33)


@pytest.mark.parametrize("head", ["linear", "mlp"])
def test_a_head_can_be_trained_to_prefer(head, byte_tokenizer):
    model = make(RewardModel, byte_tokenizer, head=head)
    train(model, 20)
    chosen, rejected = model(pairs(model)).tolist()
    assert chosen > rejected + 1


def test_gradient_checkpointing_changes_no_gradient(byte_tokenizer):
    gradients = []
    for checkpointing in (False, True):
        model = make(RewardModel, byte_tokenizer).add_lora(LORA).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        model(pairs(model)).sum().backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys() and len(gradients[0]) > 10
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name])


@pytest.mark.parametrize("option", ["load_in_8bit", "load_in_4bit"])
def test_quantised_reward_models_keep_their_head(option, byte_tokenizer, tmp_path):
    pytest.importorskip("bitsandbytes")
    backbone = tiny_model("gpt2", vocab_size=len(byte_tokenizer), n_embd=64)
    model = RewardModel.from_backbone(backbone, byte_tokenizer)
    model.save_pretrained(tmp_path / "rm")
    options: dict[str, Any] = {option: True}
    small = RewardModel.from_pretrained(tmp_path / "rm", **options)
    kinds = {"Linear8bitLt", "Linear4bit"}
    assert type(small.model.score).__name__ not in kinds
    assert kinds & {type(m).__name__ for m in small.modules()}
    torch.testing.assert_close(
        small.score(PROMPTS, COMPLETIONS), model.score(PROMPTS, COMPLETIONS), rtol=0.2, atol=0.2
    )


def test_a_text_longer_than_the_context_is_refused(byte_tokenizer):
    model = make(RewardModel, byte_tokenizer)
    with raises_error("context_too_short", length=129):
        model.score_tokens([[5] * 129])


def test_a_model_with_several_labels_is_refused(byte_tokenizer):
    config = tiny_model("llama", vocab_size=len(byte_tokenizer)).config
    config.num_labels = 3
    with raises_error("several_labels"):
        ScalarModel(AutoModelForSequenceClassification.from_config(config), byte_tokenizer)


def test_a_model_without_a_scalar_head_is_refused(tiny_llama, byte_tokenizer):
    tiny_llama.config.num_labels = 1
    with raises_error("no_scalar_head"):
        ScalarModel(tiny_llama, byte_tokenizer)


def test_a_plain_language_model_is_no_reward_model(tiny_model_folder):
    with raises_error("missing_weights"):
        RewardModel.from_pretrained(tiny_model_folder)


def test_an_adapter_without_a_head_is_no_reward_model(tiny_model_folder, tmp_path):
    apply_lora(load_causal_lm(tiny_model_folder), LORA).save_pretrained(str(tmp_path / "policy"))
    with raises_error("missing_weights"):
        RewardModel.from_pretrained(tmp_path / "policy")


@pytest.mark.parametrize("damage", ["remove", "truncate"])
def test_a_missing_or_damaged_head_is_answered_in_one_sentence(damage, byte_tokenizer, tmp_path):
    make(RewardModel, byte_tokenizer, head="mlp").save_pretrained(tmp_path / "rm")
    head = tmp_path / "rm" / "score_head.safetensors"
    if damage == "remove":
        head.unlink()
    else:
        head.write_bytes(head.read_bytes()[:100])
    with raises_error("unreadable_head"):
        RewardModel.from_pretrained(tmp_path / "rm")
