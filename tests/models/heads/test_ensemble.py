"""Ensembles of reward models."""

import json
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForSequenceClassification

from proofs import by_default
from raises import raises_error
from rlhf_data import TokenSequence, pack
from rlhf_models import (
    LoraSettings,
    RewardEnsemble,
    RewardModel,
    aggregate_scores,
    build_tiny_llama,
    load_causal_lm,
)

PROMPTS = ["where is mary ?", "where is mary ?", "where is ball ?"]
COMPLETIONS = [" it is kitchen .", " it is garden", " shed"]
ROWS = [TokenSequence([5, 9, 14, 3, 27], 2), TokenSequence([5, 9, 14, 60], 2), TokenSequence([7, 7, 8], 1)]
(BATCH,) = pack(ROWS)
LORA = LoraSettings(lora_r=2)
KINDS: list[dict[str, Any]] = [
    {"kind": "independent"},
    {"kind": "independent", "head": "mlp"},
    {"kind": "adapters", "lora": LORA},
    {"kind": "adapters", "lora": LORA, "head": "mlp"},
    {"kind": "heads"},
    {"kind": "heads", "head": "mlp"},
    {"kind": "heads", "lora": LORA},
]
NAMES = ["-".join(k if isinstance(k, str) else "lora" for k in options.values()) for options in KINDS]


def make(folder, tokenizer, *, size=3, seed=0, **options):
    return RewardEnsemble.from_backbone(load_causal_lm(folder), tokenizer, size=size, seed=seed, **options)


def train(ensemble, steps=3):
    """The first row up, the second down, for every member."""
    ensemble.train()
    optimizer = torch.optim.Adam([p for p in ensemble.parameters() if p.requires_grad], lr=3e-3)
    for _ in range(steps):
        rewards = ensemble(BATCH)[:, BATCH.sequence_ids.argsort()]
        (-nn.functional.logsigmoid(rewards[:, 0] - rewards[:, 1])).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return ensemble.eval()


def rewards(ensemble):
    with torch.no_grad():
        return ensemble(BATCH)


@pytest.mark.parametrize("options", by_default(KINDS, KINDS[0], KINDS[3], KINDS[5]), ids=NAMES)
def test_members_differ_learn_and_come_back(options, tiny_model_folder, byte_tokenizer, tmp_path, capfd):
    ensemble = make(tiny_model_folder, byte_tokenizer, **options)
    start = rewards(ensemble)
    assert start.shape == (3, 3) and start.dtype == torch.float32 and start.std(0).min() > 1e-4
    margins = start[:, BATCH.sequence_ids.argsort()]
    train(ensemble)
    trained = rewards(ensemble)[:, BATCH.sequence_ids.argsort()]
    assert (trained[:, 0] - trained[:, 1] > margins[:, 0] - margins[:, 1]).all()

    ensemble.append_eos = True
    capfd.readouterr()
    ensemble.save_pretrained(tmp_path / "out")
    again = RewardEnsemble.from_pretrained(tmp_path / "out")
    assert capfd.readouterr() == ("", "")
    assert type(again) is type(ensemble) and again.append_eos and again.size == 3
    assert all(m.append_eos for m in again.modules() if isinstance(m, RewardModel))
    assert torch.equal(rewards(again), rewards(ensemble))
    assert torch.equal(again.scores(PROMPTS, COMPLETIONS), ensemble.scores(PROMPTS, COMPLETIONS))
    trainable = [[n for n, p in e.named_parameters() if p.requires_grad] for e in (again, ensemble)]
    assert trainable[0] == trainable[1]

    other = make(tiny_model_folder, byte_tokenizer, **options, seed=7)
    parameters = [id(p) for p in other.parameters()]
    assert not torch.equal(rewards(other), rewards(ensemble))
    other.load_weights(tmp_path / "out")
    assert (
        torch.equal(rewards(other), rewards(ensemble)) and [id(p) for p in other.parameters()] == parameters
    )


@pytest.mark.parametrize(
    "options", by_default([KINDS[0], KINDS[3]], KINDS[0]), ids=["independent", "adapters-mlp"]
)
def test_every_member_is_a_reward_model_by_itself(options, tiny_model_folder, byte_tokenizer, tmp_path):
    ensemble = train(make(tiny_model_folder, byte_tokenizer, **options))
    ensemble.save_pretrained(tmp_path / "out")
    scores = ensemble.scores(PROMPTS, COMPLETIONS)
    for i in range(3):
        member = RewardModel.from_pretrained(tmp_path / "out" / f"member{i}")
        assert torch.equal(member.score(PROMPTS, COMPLETIONS), scores[i])


def test_linear_heads_are_the_labels_of_a_classifier(tiny_model_folder, byte_tokenizer, tmp_path):
    ensemble = train(make(tiny_model_folder, byte_tokenizer, kind="heads"))
    ensemble.save_pretrained(tmp_path / "out")
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    assert plain.num_labels == 3
    for q, i in enumerate(BATCH.sequence_ids.tolist()):
        with torch.no_grad():
            expected = plain(torch.tensor([list(ROWS[i].input_ids)])).logits[0]
        torch.testing.assert_close(rewards(ensemble)[:, q], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("kind", "passes"), [("heads", 1), ("adapters", 3), ("independent", 3)])
def test_heads_share_one_pass_of_the_trunk(kind, passes, tiny_model_folder, byte_tokenizer):
    ensemble = make(tiny_model_folder, byte_tokenizer, kind=kind)
    seen = []
    for module in ensemble.modules():
        if type(module).__name__ == "LlamaModel":
            module.register_forward_hook(lambda *_: seen.append(1))
    rewards(ensemble)
    assert len(seen) == passes


def test_adapters_leave_their_trunk_alone(tiny_model_folder, byte_tokenizer):
    ensemble = make(tiny_model_folder, byte_tokenizer, kind="adapters", lora=LORA)
    frozen = {n: p.clone() for n, p in ensemble.named_parameters() if not p.requires_grad}
    assert all("lora_" not in name and "modules_to_save" not in name for name in frozen)
    train(ensemble)
    for name, parameter in ensemble.named_parameters():
        assert name not in frozen or torch.equal(frozen[name], parameter)


@pytest.mark.parametrize(
    "options", by_default([KINDS[0], KINDS[2], KINDS[4]], KINDS[2]), ids=["independent", "adapters", "heads"]
)
def test_gradient_checkpointing_changes_no_gradient(options, tiny_model_folder, byte_tokenizer):
    gradients = []
    weights = torch.tensor([[1.0], [2.0], [-1.0]])
    for checkpointing in (False, True):
        ensemble = train(make(tiny_model_folder, byte_tokenizer, **options), 1).train()
        if checkpointing:
            ensemble.gradient_checkpointing_enable()
        (ensemble(BATCH) * weights).sum().backward()
        gradients.append({n: p.grad for n, p in ensemble.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name])


def test_aggregates():
    scores = torch.tensor([[1.0, 0.0], [2.0, 0.0], [6.0, -3.0]])
    # means 3 and -1; squared distances (4 + 1 + 9) / 3 and (1 + 1 + 4) / 3, so std sqrt(14/3) and sqrt(2)
    std = torch.tensor([14 / 3, 2.0]).sqrt()
    mean = torch.tensor([3.0, -1.0])
    torch.testing.assert_close(aggregate_scores(scores, "mean"), mean)
    torch.testing.assert_close(aggregate_scores(scores, "std"), std)
    torch.testing.assert_close(aggregate_scores(scores, "min"), torch.tensor([1.0, -3.0]))
    torch.testing.assert_close(aggregate_scores(scores, "mean_minus_std"), mean - std)
    torch.testing.assert_close(aggregate_scores(scores, "mean_minus_std", k=0.5), mean - 0.5 * std)
    assert aggregate_scores(scores[:1], "std").tolist() == [0.0, 0.0]
    wrong: Any = "max"
    with raises_error("invalid_value", key="aggregate"):
        aggregate_scores(scores, wrong)


def test_scores_of_texts_are_aggregated(tiny_model_folder, byte_tokenizer):
    ensemble = make(tiny_model_folder, byte_tokenizer, kind="heads")
    scores = ensemble.scores(PROMPTS, COMPLETIONS, max_tokens=8)
    assert scores.shape == (3, 3)
    torch.testing.assert_close(ensemble.score(PROMPTS, COMPLETIONS), scores.mean(0))
    expected = scores.mean(0) - 2 * scores.std(0, correction=0)
    torch.testing.assert_close(
        ensemble.score(PROMPTS, COMPLETIONS, aggregate="mean_minus_std", k=2.0), expected
    )
    assert ensemble.scores([], []).shape == (3, 0)
    assert ensemble.score([], []).shape == ensemble.score([], [], aggregate="min").shape == (0,)


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"size": 1}, "size"),
        ({"kind": "boosted"}, "kind"),
        ({"lora": LORA}, "lora"),
    ],
)
def test_impossible_ensembles_are_refused(options, key, tiny_model_folder, byte_tokenizer):
    with raises_error("invalid_value", key=key):
        make(tiny_model_folder, byte_tokenizer, **options)


@pytest.mark.parametrize("content", [None, "{", json.dumps({"kind": "heads"}), json.dumps([1])])
def test_a_folder_that_is_no_ensemble_is_refused(content, tmp_path):
    if content is not None:
        (tmp_path / "ensemble_config.json").write_text(content)
    with raises_error("no_ensemble_config"):
        RewardEnsemble.from_pretrained(tmp_path)


@pytest.mark.parametrize("options", by_default(KINDS, KINDS[2], KINDS[5]), ids=NAMES)
def test_stored_language_models_give_the_same_ensembles(options, tiny_model_folder, byte_tokenizer):
    stored = RewardEnsemble.from_language_model(tiny_model_folder, size=3, seed=5, **options)
    assert rewards(stored).shape == (3, 3) and rewards(stored).std(0).min() > 1e-4
    again = RewardEnsemble.from_language_model(tiny_model_folder, size=3, seed=5, **options)
    assert torch.equal(rewards(stored), rewards(again))
    with raises_error("invalid_value", key="size"):
        RewardEnsemble.from_language_model(tiny_model_folder, size=1, **options)


def test_a_reward_model_has_too_few_heads_for_an_ensemble(tiny_model_folder, tmp_path):
    RewardModel.from_language_model(tiny_model_folder).save_pretrained(tmp_path / "rm")
    with raises_error("model_has_heads"):
        RewardEnsemble.from_language_model(tmp_path / "rm", size=3, kind="heads")


def test_independent_members_do_not_start_from_one_head(tiny_model_folder, byte_tokenizer, tmp_path):
    RewardModel.from_backbone(load_causal_lm(tiny_model_folder), byte_tokenizer).save_pretrained(
        tmp_path / "rm"
    )
    with raises_error("equal_members"):
        RewardEnsemble.from_language_model(tmp_path / "rm", size=2, kind="independent")


@pytest.mark.parametrize("kind", ["heads", "independent"])
def test_weights_of_another_size_are_refused(kind, byte_tokenizer, tmp_path):
    vocab_size = len(byte_tokenizer)
    bases = [
        build_tiny_llama(vocab_size, eos_token_id=1, pad_token_id=0, hidden_size=size) for size in (32, 64)
    ]
    one, other = (RewardEnsemble.from_backbone(base, byte_tokenizer, size=2, kind=kind) for base in bases)
    other.save_pretrained(tmp_path / "other")
    with raises_error("weights_do_not_fit"):
        one.load_weights(tmp_path / "other")
