"""What a job makes of its rows before and when they are tokenised."""

import copy
import json
import logging
from dataclasses import replace
from typing import Any

import pytest

from raises import raises_error
from rlhf_algos.jobs.data import build_sets, load_rows
from rlhf_algos.jobs.methods import METHODS
from rlhf_data import PreferencePair, PreferenceRecord
from rlhf_data.records.kind import RECORD_KINDS, record_kind
from rlhf_data.records.preference import PreferenceBuilder

_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture
def first_chosen(tmp_path, byte_tokenizer, caplog):
    """The first training pair's chosen text, as the model reads it; the log goes to `caplog`."""
    caplog.set_level(logging.INFO)
    path = tmp_path / "pairs.jsonl"
    prompt = "\n\nHuman: Where is the ball?\n\nAssistant:"
    rows = [{"chosen": f"{prompt} In box {i}.", "rejected": f"{prompt} Who knows {i}."} for i in range(4)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def text(*, template=_TEMPLATE, **settings):
        method = METHODS["dpo"]
        config = method.resolve({"train_data": str(path), "eval_fraction": 0, **settings})
        tokenizer = copy.deepcopy(byte_tokenizer)
        tokenizer.chat_template = template
        train, _ = build_sets(method, config, load_rows(method, config), tokenizer, max_length=None)
        return tokenizer.decode(train[0].chosen.input_ids)

    return text


@pytest.mark.parametrize("streaming", [False, True])
def test_transcripts_are_rendered_by_the_chat_template(first_chosen, caplog, streaming):
    text = first_chosen(streaming=streaming)
    assert text.startswith("<|user|>Where is the ball?<eos><|assistant|>In box 0.")
    assert "4 of the first 4 rows" in caplog.text


def test_transcripts_stay_texts_where_that_is_wanted_or_there_is_no_template(first_chosen, caplog):
    assert first_chosen(transcripts="text").startswith("\n\nHuman: Where")
    assert "transcripts" not in caplog.text
    assert first_chosen(template=None).startswith("\n\nHuman: Where")
    assert "stay texts" in caplog.text
    with raises_error("no_chat_template"):
        first_chosen(template=None, transcripts="messages")


def labelled_rows(folder, count):
    path = folder / "rows.jsonl"
    line = '{{"prompt": "p{0}", "completion": " answer {0}", "label": true}}\n'
    path.write_text("".join(line.format(i) for i in range(count)))
    return str(path)


@pytest.mark.parametrize(("processes", "batch", "fits"), [(1, 1, False), (1, 2, True), (2, 1, True)])
def test_a_step_of_kto_has_completions_to_exchange(
    byte_tokenizer, tmp_path, monkeypatch, processes, batch, fits
):
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    settings = {"train_data": labelled_rows(tmp_path, 5), "per_device_train_batch_size": batch}
    method = METHODS["kto"]
    config = method.resolve(settings | {"eval_fraction": 0})
    rows = load_rows(method, config)
    if not fits:
        with raises_error("too_few_rows"):
            build_sets(method, config, rows, byte_tokenizer, max_length=None)
        return
    train, _ = build_sets(method, config, rows, byte_tokenizer, max_length=None)
    for example in train:  # step of 2 over 5 rows: the last one stands alone
        own, kl = example.sequence, example.kl_sequence
        assert kl.input_ids[: kl.score_from] == own.input_ids[: own.score_from]
        assert kl.input_ids != own.input_ids
    config = method.resolve(settings | {"eval_fraction": 0, "kl_estimate": "ema"})
    assert build_sets(method, config, rows, byte_tokenizer, max_length=None)[0][0].kl_sequence is None


@pytest.mark.parametrize("streaming", [False, True])
def test_a_method_takes_its_rows_options_from_the_record_kind(
    byte_tokenizer, tmp_path, monkeypatch, streaming
):
    class Reversed(PreferenceBuilder):
        """Pairs whose rejected completion is to be learned; the options are settings of the job."""

        def __init__(self, tokenizer: Any, *, max_length: int | None, seed: int) -> None:
            super().__init__(tokenizer, max_length=max_length)
            self.seed = seed

        def build(self, record: PreferenceRecord) -> PreferencePair:
            return super().build(replace(record, chosen=record.rejected, rejected=record.chosen))

    kind = replace(record_kind("preference"), name="reversed", builder=Reversed)
    monkeypatch.setitem(RECORD_KINDS, "reversed", kind)
    path = tmp_path / "pairs.jsonl"
    path.write_text('{"prompt": "p", "chosen": " a", "rejected": " b"}\n')
    method = replace(METHODS["dpo"], records="reversed")
    settings = {"train_data": str(path), "eval_fraction": 0, "streaming": streaming, "seed": 7}
    config = method.resolve(settings)
    rows = load_rows(method, config)
    train: Any = build_sets(method, config, rows, byte_tokenizer, max_length=9)[0]
    assert byte_tokenizer.decode(train[0].chosen.input_ids).startswith("p b")
    assert (train.builder.seed, train.builder.max_length) == (7, 9)
    with raises_error("unknown_kind"):
        load_rows(method, method.resolve({}))


@pytest.fixture
def pairs_file(tmp_path):
    """Forty pairs of long dialogues, of which the first is a tie."""
    path = tmp_path / "pairs.jsonl"
    talk = "".join(f"\n\nHuman: question {i}\n\nAssistant: answer {i}" for i in range(9))
    rows = [
        {"prompt": f"{talk}\n\nHuman: now {i}\n\nAssistant:", "chosen": f" Yes {i}.", "rejected": f" No {i}."}
        for i in range(40)
    ]
    rows[0]["rejected"] = " yes  0."
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("method", ["dpo", "reward", "kto", "sft"])
def test_truncated_dialogues_keep_their_end(method, pairs_file, byte_tokenizer):
    method = METHODS[method]
    settings = {"train_data": pairs_file, "max_length": 60, "eval_fraction": 0}
    config = method.resolve(settings | {"truncation": "left"})
    train, _ = build_sets(method, config, load_rows(method, config), byte_tokenizer, max_length=60)
    sequence = train[0]
    while not hasattr(sequence, "input_ids"):
        sequence = sequence[0]
    assert len(train) >= 40
    assert byte_tokenizer.decode(sequence.input_ids).startswith("\n\nHuman: now ")
    assert byte_tokenizer.decode(sequence.input_ids).endswith(".<eos>")
    usual = method.resolve(settings)
    with raises_error("no_row_left"):  # a prompt alone is longer
        build_sets(method, usual, load_rows(method, usual), byte_tokenizer, max_length=60)


def test_ties_are_left_out_where_that_is_wanted(pairs_file, caplog):
    method = METHODS["dpo"]
    counts = {}
    for ties in ("keep", "drop"):
        rows = load_rows(method, method.resolve({"train_data": pairs_file, "ties": ties}))
        counts[ties] = len(rows.train) + len(rows.held_out)
    assert counts == {"keep": 40, "drop": 39}
    assert f"ties of {pairs_file}: 1" in caplog.text


@pytest.mark.parametrize(("labels", "warned"), [([True], True), ([False], True), ([True, False], False)])
def test_rows_of_one_label_are_warned_about(tmp_path, caplog, labels, warned):
    rows = [{"prompt": f"p{i}", "completion": "c", "label": labels[i % len(labels)]} for i in range(20)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in ("judge", "kto"):
        caplog.clear()
        load_rows(METHODS[name], METHODS[name].resolve({"train_data": str(path)}))
        assert ("one label" in caplog.text) == warned


def test_a_stratified_split_holds_out_the_share_exactly(pairs_file):
    method = METHODS["sft"]
    settings = {"train_data": pairs_file, "eval_fraction": 0.2, "split": "stratified"}
    rows = load_rows(method, method.resolve(settings))
    assert (len(rows.train), len(rows.held_out)) == (32, 8)


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("prm", {"truncation": "left"}),
        ("sft", {"ties": "drop"}),
        ("dpo", {"ties": "drop", "train_data": None}),
        ("dpo", {"split": "stratified", "streaming": True}),
        ("dpo", {"split": "stratified", "eval_data": "pairs.jsonl"}),
    ],
)
def test_settings_that_could_do_nothing_are_refused(method, settings, pairs_file, byte_tokenizer):
    method = METHODS[method]
    with raises_error("invalid_value"):
        config = method.resolve({"train_data": pairs_file} | settings)
        rows = load_rows(method, replace_rows(config)) if method.records == "steps" else None
        rows = rows or load_rows(method, config)
        build_sets(method, config, rows, byte_tokenizer, max_length=60)


def replace_rows(config):
    """The config with rows of the story world, which every method has."""
    return config.model_copy(update={"train_data": None, "story_rows": 4, "story_eval_rows": 2})
