"""The reference: its forms agree, it does not move, and what was computed once is found again."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from rlhf_algos import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer
from rlhf_algos.engine import reference_cache
from rlhf_algos.engine.reference_cache import data_hash, model_hash
from rlhf_data import TokenSequence, cache_folder, pack
from rlhf_models import disable_dropout, tiny_model

MAKERS = {"pairs": (DPOTrainer, DPOConfig), "labelled": (KTOTrainer, KTOConfig)}
KINDS = pytest.mark.parametrize("kind", list(MAKERS))


def _model(seed=0, **fields):
    return tiny_model("llama", vocab_size=40, seed=seed, **fields)


def _lora(seed=0, **options):
    torch.manual_seed(seed)
    return get_peft_model(_model(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"], **options))


def _trainer(kind, rows, *, precompute=False, model=None, config=None, **options):
    trainer, settings = MAKERS[kind]
    values = {"learning_rate": 3e-3, "max_steps": 4, "per_device_train_batch_size": 4, "beta": 0.5}
    values |= {"precompute_ref_log_probs": precompute, "max_tokens_per_batch": 40} | (config or {})
    return trainer(model or _model(), settings.from_dict(values), rows, **options)


def assert_same(histories):
    first, *others = histories
    for other in others:
        for a, b in zip(first, other, strict=True):
            assert b == pytest.approx(a, rel=2e-4, abs=2e-5)


@KINDS
def test_frozen_copy_and_precomputed_agree(kind, examples, history):
    rows, held_out = examples(kind), examples(kind, seed=1)
    assert_same([history(_trainer(kind, rows, precompute=p, eval_examples=held_out)) for p in (False, True)])


@KINDS
def test_adapter_off_and_precomputed_and_copy_agree(kind, examples, history):
    rows = examples(kind)
    runs = [history(_trainer(kind, rows, precompute=p, model=_lora())) for p in (False, True)]
    given = history(_trainer(kind, rows, model=_lora(), ref_model=_model()))
    assert_same([*runs, given])


@KINDS
def test_another_reference_precomputed_or_not(kind, examples, history):
    rows = examples(kind)
    assert_same([history(_trainer(kind, rows, precompute=p, ref_model=_model(1))) for p in (False, True)])


@KINDS
def test_a_trained_adapter_is_its_own_reference(kind, examples, history):
    rows = examples(kind)

    def trained():
        model = _lora()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(4))
        return model

    runs = [history(_trainer(kind, rows, precompute=p, model=trained())) for p in (False, True)]
    assert_same(runs)
    for side in ("chosen", "rejected"):
        assert runs[0][0][f"rewards/{side}"] == pytest.approx(0, abs=1e-5)


@KINDS
def test_the_reference_stays_as_it_was(kind, examples):
    trainer = _trainer(kind, examples(kind))
    scorer = trainer.scorer
    before = {name: value.clone() for name, value in scorer.reference.state_dict().items()}
    trainer.train()
    assert all(torch.equal(before[name], value) for name, value in scorer.reference.state_dict().items())
    assert scorer.training
    assert not scorer.reference.training
    assert not any(parameter.requires_grad for parameter in scorer.reference.parameters())


def test_adapter_training_keeps_one_model_in_memory(examples):
    rows = examples("pairs")
    for trainer in (_trainer("pairs", rows, model=_lora()), _trainer("pairs", rows, precompute=True)):
        assert trainer.scorer.reference is None


@KINDS
def test_a_second_run_computes_nothing(kind, examples, history, monkeypatch):
    rows = examples(kind)
    first = history(_trainer(kind, rows, precompute=True))
    monkeypatch.setattr(reference_cache, "compute_logps", lambda *_: pytest.fail("computed again"))
    for a, b in zip(first, history(_trainer(kind, rows, precompute=True)), strict=True):
        assert b == pytest.approx(a, rel=0, abs=0)


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty"])
def test_a_damaged_cache_is_made_again(damage, examples, history, caplog):
    rows = examples("pairs")
    first = history(_trainer("pairs", rows, precompute=True))
    (path,) = cache_folder("reference").rglob("*.safetensors")
    whole = path.read_bytes()
    flipped = whole[:-1] + bytes([whole[-1] ^ 1])
    path.write_bytes({"cut": whole[:-5], "flipped": flipped, "empty": b""}[damage])
    with caplog.at_level(logging.WARNING):
        assert history(_trainer("pairs", rows, precompute=True)) == first
    assert "will be made again" in caplog.text
    assert path.read_bytes() == whole


def test_a_cache_that_cannot_be_written_is_reported(examples, history, caplog):
    cache_folder("reference").parent.mkdir(parents=True)
    cache_folder("reference").write_text("in the way")
    rows = examples("pairs")
    with caplog.at_level(logging.WARNING):
        run = history(_trainer("pairs", rows, precompute=True))
    assert "cannot be written" in caplog.text
    assert_same([run, history(_trainer("pairs", rows))])


def test_other_data_or_weights_are_other_caches(examples):
    rows = examples("pairs")
    for model, data in ((_model(), rows), (_model(1), rows), (_model(), rows[:-1]), (_model(), rows[::-1])):
        _trainer("pairs", data, precompute=True, model=model)
    assert len(list(cache_folder("reference").iterdir())) == 4
    _trainer("pairs", rows, precompute=True, model=_lora(1))
    _trainer("pairs", rows, precompute=True, model=_lora(2))  # an adapter that is off is no part of the key
    assert len(list(cache_folder("reference").iterdir())) == 5


def test_hashes_see_what_scores_depend_on():
    sequence = TokenSequence([5, 6, 7], 1)
    variants = [
        [[sequence]],
        [[TokenSequence([5, 6, 8], 1)]],
        [[TokenSequence([5, 6, 7], 2)]],
        [[TokenSequence([5, 6, 7], 1, (True, True, False))]],
        [[sequence, sequence]],
        [[sequence], [sequence]],
    ]
    assert len({data_hash(rows) for rows in variants}) == len(variants)
    assert data_hash([[TokenSequence((5, 6, 7), 1)]]) == data_hash(variants[0])
    models = [_model(), _model(1), tiny_model("llama", vocab_size=41), _model(rms_norm_eps=1e-3)]

    def hashed(model):
        return model_hash(model.config, model.state_dict().items())

    assert len({hashed(model) for model in models}) == len(models)
    assert hashed(_model()) == hashed(_model())


def test_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    assert cache_folder("reference") == tmp_path / "elsewhere" / "rlhf" / "reference"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder("reference") == tmp_path / ".cache" / "rlhf" / "reference"


def test_rows_made_on_demand_get_their_log_probs(examples, history):
    class Rows:
        def __init__(self, rows):
            self.rows = rows

        def __len__(self):
            return len(self.rows)

        def __getitem__(self, index):
            return self.rows[index]

    rows = examples("pairs")
    trainer = _trainer("pairs", Rows(rows), precompute=True, eval_examples=Rows(rows))
    assert [pair.chosen for pair in trainer.examples] == [pair.chosen for pair in rows]
    assert trainer.examples[3].ref_chosen_logps == trainer.eval_examples[3].ref_chosen_logps < 0
    assert_same([history(trainer), history(_trainer("pairs", rows, eval_examples=rows))])


def test_dropout_is_switched_off_unless_asked_for(examples):
    rows = examples("pairs")
    for disabled in (True, False):
        model = _lora(lora_dropout=0.5)
        _trainer("pairs", rows, model=model, config={"disable_dropout": disabled})
        dropouts = [module.p for module in model.modules() if isinstance(module, nn.Dropout)]
        assert set(dropouts) == ({0.0} if disabled else {0.5})
    model = _model(attention_dropout=0.3)
    disable_dropout(model)
    assert {layer.self_attn.attention_dropout for layer in model.model.layers} == {0.0}


def test_the_reference_of_an_adapter_has_no_dropout(examples):
    model = _lora(lora_dropout=0.0)
    modules: list[Any] = list(model.modules())
    for module in modules:
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.5
    trainer = _trainer("pairs", examples("pairs"), model=model, config={"disable_dropout": False})
    (batch,) = pack([side for pair in examples("pairs") for side in pair[:2]])
    expected = trainer.reference_logps(batch)
    trainer.scorer.train()
    assert torch.equal(trainer.reference_logps(batch), expected)
    assert not torch.equal(trainer.forward(batch).logps, trainer.forward(batch).logps)
