"""Real transcripts and conversations have the token ids that TRL's own preparation gives them."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest

from rlhf_data import (
    CompletionRecord,
    ConversationRecord,
    KTODataset,
    LabelledRecord,
    PreferenceDataset,
    PreferenceRecord,
    SFTDataset,
    TextRecord,
    load_records,
)

datasets = pytest.importorskip("datasets")
trl = pytest.importorskip("trl")

_ROWS = 60
_MAX_LENGTH = 300
_TALKS = [
    [{"role": "user", "content": f"hi {i}"}, {"role": "assistant", "content": f"yes {i}"}] * (1 + i % 3)
    for i in range(6)
]


@pytest.fixture(scope="module")
def records(hh_pairs) -> list[PreferenceRecord]:
    return load_records(hh_pairs, "preference", subset_size=_ROWS).records


@pytest.fixture(scope="module")
def hh_tokenizer(records) -> Any:
    from rlhf_models import train_byte_tokenizer

    tokenizer = train_byte_tokenizer([str(record.prompt) for record in records], 600)
    tokenizer.split_special_tokens = False  # TRL writes the end token as text
    return tokenizer


def _prepare(
    trainer: str, rows: list[dict[str, Any]], tokenizer: Any, **settings: Any
) -> list[dict[str, Any]]:
    """Rows as TRL's trainer prepares them."""
    owner = SimpleNamespace(
        _tokenizer=tokenizer,
        chat_template=None,
        completion_only_loss=True,
        calculate_KL=True,
        desirable_weight=1.0,
        undesirable_weight=1.0,
    )
    values: dict[str, Any] = {
        "dataset_num_proc": None,
        "max_length": _MAX_LENGTH,
        "truncation_mode": "keep_start",
        "dataset_text_field": "text",
        "assistant_only_loss": False,
        "shuffle_dataset": False,
        **settings,
    }
    extra = (False, None) if trainer == "SFTTrainer" else ()
    dataset = datasets.Dataset.from_list(rows)
    prepare = getattr(trl, trainer)._prepare_dataset
    return list(prepare(owner, dataset, tokenizer, SimpleNamespace(**values), *extra, "train"))


def _pair_row(record: PreferenceRecord) -> dict[str, Any]:
    return {"prompt": record.prompt, "chosen": record.chosen, "rejected": record.rejected}


def _assert_supervised(prepared, examples) -> None:
    assert len(prepared) == len(examples)
    for row, example in zip(prepared, examples, strict=True):
        assert row["input_ids"] == example.input_ids
        labels = [-100] * len(example.input_ids)
        for i in example.scored():
            labels[i] = example.input_ids[i]
        assert row["labels"][1:] == labels[1:]  # the first token is never predicted


def _assert_pairs(prepared, examples) -> None:
    assert len(prepared) == len(examples)
    for row, pair in zip(prepared, examples, strict=True):
        for name, sequence in (("chosen", pair.chosen), ("rejected", pair.rejected)):
            assert (row["prompt_ids"] + row[f"{name}_ids"])[:_MAX_LENGTH] == sequence.input_ids
            assert len(row["prompt_ids"]) == sequence.score_from


def test_supervised_transcripts(records, hh_tokenizer):
    rows = [{"prompt": record.prompt, "completion": record.chosen} for record in records]
    ours = SFTDataset(
        [CompletionRecord(r.prompt, r.chosen) for r in records], hh_tokenizer, max_length=_MAX_LENGTH
    )
    assert 0 < ours.dropped < _ROWS / 2
    _assert_supervised(_prepare("SFTTrainer", rows, hh_tokenizer), ours)


def test_supervised_texts(records, hh_tokenizer):
    texts = [f"{record.prompt}{record.chosen}" for record in records]
    ours = SFTDataset([TextRecord(text) for text in texts], hh_tokenizer, max_length=_MAX_LENGTH)
    _assert_supervised(_prepare("SFTTrainer", [{"text": text} for text in texts], hh_tokenizer), ours)


def test_preferences_for_dpo(records, hh_tokenizer):
    ours = PreferenceDataset(records, hh_tokenizer, max_length=_MAX_LENGTH)
    assert 0 < ours.dropped < _ROWS / 2
    _assert_pairs(_prepare("DPOTrainer", [_pair_row(r) for r in records], hh_tokenizer), ours)


def test_preferences_for_reward_models(records, hh_tokenizer):
    ours = PreferenceDataset(records, hh_tokenizer, max_length=_MAX_LENGTH, overlong="drop")
    prepared = _prepare("RewardTrainer", [_pair_row(r) for r in records], hh_tokenizer)
    assert len(prepared) == len(ours) < _ROWS
    for row, pair in zip(prepared, ours, strict=True):
        assert (row["chosen_ids"], row["rejected_ids"]) == (pair.chosen.input_ids, pair.rejected.input_ids)


@pytest.mark.parametrize("batch_size", [4, 7])
def test_labelled_transcripts_and_their_mismatched_pairs(hh_pairs, records, hh_tokenizer, batch_size):
    rows = [_pair_row(record) for record in records]
    prepared = _prepare("KTOTrainer", rows, hh_tokenizer, per_device_train_batch_size=batch_size)
    labelled = load_records(hh_pairs, "kto", subset_size=_ROWS).records
    ours = KTODataset(labelled, hh_tokenizer, max_length=_MAX_LENGTH, kl_batch_size=batch_size)
    assert len(prepared) == len(ours) > _ROWS
    for row, example in zip(prepared, ours, strict=True):
        assert example.label == row["label"]
        assert (row["prompt_ids"] + row["completion_ids"])[:_MAX_LENGTH] == example.sequence.input_ids
        assert example.kl_sequence is not None
        kl_ids = (row["prompt_ids"] + row["KL_completion_ids"])[:_MAX_LENGTH]
        assert kl_ids == example.kl_sequence.input_ids
        starts = (example.sequence.score_from, example.kl_sequence.score_from)
        assert starts == (len(row["prompt_ids"]),) * 2


@pytest.mark.parametrize("assistant_only", [False, True])
def test_conversations(with_template, assistant_only):
    tokenizer = with_template("marked")
    rows = [{"messages": talk} for talk in _TALKS]
    ours = SFTDataset(
        [ConversationRecord(talk) for talk in _TALKS], tokenizer, assistant_only_loss=assistant_only
    )
    _assert_supervised(_prepare("SFTTrainer", rows, tokenizer, assistant_only_loss=assistant_only), ours)
    rows = [{"prompt": talk[:-1], "completion": talk[-1:]} for talk in _TALKS]
    ours = SFTDataset(
        [CompletionRecord(talk[:-1], talk[-1:]) for talk in _TALKS],
        tokenizer,
        assistant_only_loss=assistant_only,
    )
    _assert_supervised(_prepare("SFTTrainer", rows, tokenizer, assistant_only_loss=assistant_only), ours)


@pytest.mark.parametrize("template", ["plain", "counting"])
def test_preferences_and_labels_in_messages(with_template, template):
    tokenizer = with_template(template)
    other = [{"role": "assistant", "content": "no way"}]
    records = [PreferenceRecord(talk[:-1], talk[-1:], other) for talk in _TALKS]
    ours = PreferenceDataset(records, tokenizer, max_length=_MAX_LENGTH)
    _assert_pairs(_prepare("DPOTrainer", [_pair_row(r) for r in records], tokenizer), ours)

    rows = [{"prompt": talk[:-1], "completion": talk[-1:], "label": True} for talk in _TALKS]
    prepared = _prepare("KTOTrainer", rows, tokenizer, per_device_train_batch_size=2)
    labelled = [LabelledRecord(talk[:-1], talk[-1:], True) for talk in _TALKS]
    for row, example in zip(prepared, KTODataset(labelled, tokenizer), strict=True):
        assert row["prompt_ids"] + row["completion_ids"] == example.sequence.input_ids
        assert len(row["prompt_ids"]) == example.sequence.score_from


def test_merging_borders(tokenizer):
    records = [PreferenceRecord("ma", "ry went", " b"), PreferenceRecord("where is ma", "ry went", "ry ?")]
    ours = PreferenceDataset(records, tokenizer, max_length=_MAX_LENGTH)
    assert ours.builder.encoder.moved_starts == 2
    _assert_pairs(_prepare("DPOTrainer", [_pair_row(r) for r in records], copy.deepcopy(tokenizer)), ours)
