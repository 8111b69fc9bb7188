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
