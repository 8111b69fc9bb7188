"""Texts cut to a budget of their own tokens."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raises import raises_error
from rlhf_models.compression.compressor import ContextCompressor
from rlhf_models.loading.tiny import tiny_model, train_byte_tokenizer

TEXT = "mary went to kitchen . gossip says in garden . john moved to shed . mary went to attic ."
TOKENIZER = train_byte_tokenizer([TEXT + " where is mary ?"] * 4, 300)
MODEL = tiny_model("llama", vocab_size=len(TOKENIZER), seed=1)
IDS = TOKENIZER(TEXT)["input_ids"]


def compressor(**options):
    return ContextCompressor(MODEL, TOKENIZER, **({"ratio": 2} | options))


@pytest.mark.parametrize("method", ["surprisal", "question", "contrastive"])
def test_every_method_keeps_the_budget_in_order(method):
    made = compressor(method=method, max_tokens=20, ratio=None)
    found = made.compress_text(TEXT, "where is mary ?")
    assert len(found.kept) == len(found.ids) == 20 and found.ratio == len(IDS) / 20
    assert (np.diff(found.kept) > 0).all()
    assert found.ids == [IDS[i] for i in found.kept]
    assert found.text == TOKENIZER.decode(found.ids)


def test_token_units_keep_the_most_surprising_tokens():
    made = compressor(method="surprisal", units="token", max_tokens=5, ratio=None)
    ids = torch.tensor([[TOKENIZER.bos_token_id, *IDS]])
    with torch.no_grad():
        logps = MODEL(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    assert made.compress_ids(IDS).kept.tolist() == logps.argsort()[:5].sort().values.tolist()


def test_a_text_within_the_budget_comes_back_whole():
    found = compressor(max_tokens=1000, ratio=None).compress_text(TEXT, "where ?")
    assert (found.text, found.ratio, len(found.kept)) == (TEXT, 1.0, len(IDS))


@pytest.mark.parametrize("texts", [("so \ud800", "?", []), ("so", "\udfff", []), ("so", "?", ["\ud800"])])
def test_half_of_a_surrogate_pair_is_refused(texts):
    text, question, protect = texts
    with raises_error("not_unicode"):
        compressor().compress_text(text, question, protect=protect)


def test_protected_strings_questions_and_ends_are_kept():
    found = compressor(keep_first=1, keep_last=2).compress_text(TEXT, "says in", protect=["shed", "none"])
    assert "says in" in found.text and "shed" in found.text
    assert {0, len(IDS) - 2, len(IDS) - 1} <= set(found.kept.tolist())


def test_texts_together_give_what_each_gives_alone():
    texts, questions = [TEXT, TEXT[23:], TEXT], ["where is mary ?", "who ?", "what is in garden ?"]
    made = compressor()
    together = made.compress_texts(texts, questions)
    for text, question, found in zip(texts, questions, together, strict=True):
        assert made.compress_text(text, question).ids == found.ids


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 60), st.floats(1, 10))
def test_the_rate_is_exact(length, ratio):
    ids = (IDS * 3)[:length]
    found = compressor(method="surprisal", ratio=ratio).compress_ids(ids)
    assert len(found.kept) <= max(1, length / ratio) < len(found.kept) + 1


def test_saved_and_loaded_it_chooses_the_same(tmp_path):
    made = compressor(method="contrastive", keep_first=2)
    made.save_pretrained(tmp_path / "compressor")
    again = ContextCompressor.from_pretrained(tmp_path / "compressor")
    assert again.settings == made.settings
    weights = again.model.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in MODEL.state_dict().items())
    assert again.compress_text(TEXT, "who ?").ids == made.compress_text(TEXT, "who ?").ids


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"max_tokens": 5}, "invalid_value"),
        ({"ratio": None}, "invalid_value"),
        ({"units": "token"}, "invalid_value"),
    ],
)
def test_settings_that_contradict_are_refused(options, code):
    with raises_error(code):
        compressor(**options)


def test_bad_input_is_refused(tmp_path):
    with raises_error("no_question"):
        compressor().compress_text(TEXT)
    with raises_error("unequal_lengths"):
        compressor().compress_texts([TEXT], ["a", "b"])
    with raises_error("empty_text"):
        compressor().compress_text("", "who ?")
    with raises_error("budget_too_small"):
        compressor(keep_last=len(IDS)).compress_text(TEXT, "who ?")
    with raises_error("context_too_short"):
        compressor().compress_text(TEXT, "where is mary ? " * 30)
    with raises_error("no_compressor"):
        ContextCompressor.from_pretrained(tmp_path)


def test_an_architecture_that_cannot_be_packed_is_refused():
    from transformers import BloomConfig, BloomForCausalLM

    config = BloomConfig(vocab_size=len(TOKENIZER), hidden_size=32, n_layer=1, n_head=2)
    with raises_error("cannot_be_packed"):
        ContextCompressor(BloomForCausalLM(config), TOKENIZER, ratio=2)
