"""Token ids of texts and conversations: where completions start and end, and what the assistant says."""

import copy
import importlib.util
import itertools
import random
from pathlib import Path

import pytest

from raises import raises_error
from rlhf_data import Encoder

_TALK = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "and ?"},
    {"role": "assistant", "content": "no no"},
]


def _said(tokenizer, ids, mask):
    """The scored tokens' text, `|` where others stand between."""
    parts = [tokenizer.decode([token]) if scored else "|" for token, scored in zip(ids, mask, strict=True)]
    return "|".join(part for part in "".join(parts).split("|") if part)


def test_a_completion_ends_with_one_end_token(tokenizer):
    [ids], start = Encoder(tokenizer).completions("mary went", [" to shed ."])[0:2]
    assert tokenizer.decode(ids) == "mary went to shed .<eos>"
    assert ids.count(tokenizer.eos_token_id) == 1 and ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(ids[:start]) == "mary went"
    assert Encoder(tokenizer).completions("mary went", [" to shed .<eos>"])[0] == [ids]


def test_a_tokenizer_that_reads_special_tokens_as_text_still_ends(tokenizer, byte_tokenizer):
    assert byte_tokenizer.split_special_tokens
    usual = Encoder(tokenizer).completions("mary went", [" to shed ."])
    assert Encoder(byte_tokenizer).completions("mary went", [" to shed ."]) == usual
    [ids], _ = Encoder(byte_tokenizer).completions("a", [" <eos> b <eos>"])
    assert ids.count(byte_tokenizer.eos_token_id) == 1  # those in the text are text
    assert byte_tokenizer.decode(ids) == "a <eos> b <eos><eos>"


def test_a_tokenizer_that_starts_and_ends_texts_itself(tokenizer):
    from tokenizers import processors

    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", tokenizer.bos_token_id)]
    )
    [ids], start = Encoder(tokenizer).completions("mary", [" went"])
    assert ids[0] == tokenizer.bos_token_id and tokenizer.decode(ids[start:]) == " went<eos>"
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <pad>", special_tokens=[("<pad>", tokenizer.pad_token_id)]
    )
    [ids], start = Encoder(tokenizer).completions("mary", [" went"])
    assert tokenizer.decode(ids[:start]) == "mary"  # what ends the prompt alone is not part of it


def test_completions_start_where_tokens_merge_over_the_border(tokenizer):
    # "mary" and "mary went" are tokens of the training texts; "ma" + "ry" parts at the first common token
    encoder = Encoder(tokenizer)
    [ids], start = encoder.completions("ma", ["ry went"])
    alone = encoder.text("ma")
    assert ids[: len(alone)] != alone and start < len(alone) and encoder.moved_starts == 1
    assert tokenizer.decode(ids) == "mary went<eos>"
    encoder.completions("mary", [" went"])
    assert encoder.moved_starts == 1


def test_pairs_start_where_the_first_of_them_parts(tokenizer):
    both, start = Encoder(tokenizer).completions("ma", ["ry went", " b"])
    assert start == min(Encoder(tokenizer).completions("ma", [text])[1] for text in ("ry went", " b"))
    assert both[0][:start] == both[1][:start]


def test_any_text_comes_back_and_starts_no_later_than_its_prompt_ends(tokenizer):
    rng = random.Random(5)
    encoder = Encoder(tokenizer)
    letters = ["mary", "went", " ", "\n", "ü", "😀", "a", "<", ">", "."]
    for _ in range(200):
        prompt, *completions = ("".join(rng.choices(letters, k=rng.randrange(1, 9))) for _ in range(3))
        both, start = encoder.completions(prompt, completions)
        alone = encoder.text(prompt)
        for ids, completion in zip(both, completions, strict=True):
            assert tokenizer.decode(ids) == f"{prompt}{completion}<eos>"
            assert ids[:start] == alone[:start] and start <= len(alone)
        assert start == len(alone) or any(ids[start] != alone[start] for ids in both)


def test_no_end_token(tokenizer):
    tokenizer.eos_token = None
    with raises_error("no_end_token"):
        Encoder(tokenizer).completions("a", ["b"])


@pytest.mark.parametrize("name", ["plain", "marked", "thinking"])
def test_only_what_the_assistant_says_is_scored(with_template, name):
    tokenizer = with_template(name)
    ids, mask = Encoder(tokenizer).conversation(_TALK, assistant_only=True)
    thought = "[thinks]" if name == "thinking" else ""
    assert _said(tokenizer, ids, mask) == f"yes<eos>|{thought}no no<eos>"
    assert ids == tokenizer.apply_chat_template(_TALK, return_dict=True)["input_ids"]


def test_both_ways_to_find_it_agree(with_template):
    marked = Encoder(copy.deepcopy(with_template("marked"))).conversation(_TALK, assistant_only=True)
    assert Encoder(with_template("plain")).conversation(_TALK, assistant_only=True) == marked


def test_an_assistant_who_speaks_first(with_template):
    tokenizer = with_template("plain")
    ids, mask = Encoder(tokenizer).conversation(_TALK[2:4], assistant_only=True)
    assert _said(tokenizer, ids, mask).endswith("yes<eos>")


def test_all_of_a_conversation(with_template):
    tokenizer = with_template("plain")
    ids, mask = Encoder(tokenizer).conversation(_TALK, assistant_only=False)
    assert mask is None and tokenizer.decode(ids).startswith("<|system|>be kind<eos><|user|>hi")


def test_special_tokens_of_the_template_count_for_every_tokenizer(with_template, byte_tokenizer):
    expected = Encoder(with_template("marked")).conversation(_TALK, assistant_only=True)
    literal = copy.deepcopy(byte_tokenizer)
    literal.chat_template = with_template("marked").chat_template
    assert Encoder(literal).conversation(_TALK, assistant_only=True) == expected
    assert literal.eos_token_id in expected[0]


def test_the_chat_template_gets_tools_and_arguments(with_template):
    tokenizer = with_template("tools")
    template = {"tools": [{"name": "look"}], "mood": "!"}
    both, start = Encoder(tokenizer).completions(_TALK[:2], [_TALK[2:3]], template)
    assert tokenizer.decode(both[0]) == "look!<|system|>be kind<eos><|user|>hi<eos><|assistant|>yes<eos>"
    assert tokenizer.decode(both[0][start:]) == "yes<eos>"


def test_a_prompt_that_the_template_shows_otherwise_alone(with_template):
    encoder = Encoder(with_template("counting"))
    _, start = encoder.completions(_TALK[:2], [_TALK[2:3]])
    assert start == 0 and encoder.moved_starts == 1


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("endless", "unclear_turns"),
        ("counting", "unclear_turns"),
        ("refusing", "template_refuses"),
        ("markless", "no_assistant_turn"),
    ],
)
def test_templates_that_cannot_be_used(with_template, name, code):
    with raises_error(code):
        Encoder(with_template(name)).conversation(_TALK, assistant_only=True)


def test_a_tokenizer_without_template(tokenizer):
    with raises_error("no_chat_template"):
        Encoder(tokenizer).completions(_TALK[:2], [_TALK[2:3]])


@pytest.mark.parametrize(("name", "closing"), [("ended", "<end>"), ("returning", "<end>")])
def test_turns_that_close_otherwise_than_the_conversation(with_template, name, closing):
    tokenizer = with_template(name)
    ids, mask = Encoder(tokenizer).conversation(_TALK, assistant_only=True)
    last = "<end><eos>" if name == "ended" else "<return>"
    assert _said(tokenizer, ids, mask) == f"yes{closing}|no no{last}"
    assert ids == tokenizer.apply_chat_template(_TALK, return_dict=True)["input_ids"]


def test_long_texts_are_not_warned_of(with_template, caplog, monkeypatch):
    from transformers.utils import logging as transformers_logging

    tokenizer = with_template("marked")
    tokenizer.model_max_length = 8
    monkeypatch.setattr(tokenizer, "deprecation_warnings", {})
    transformers_logging.get_logger("transformers").addHandler(caplog.handler)
    try:
        encoder = Encoder(tokenizer)
        encoder.completions("mary went to the shed", [" and then back again to the house ."])
        encoder.conversation(_TALK, assistant_only=True)
        encoder.conversation(_TALK, assistant_only=False)
    finally:
        transformers_logging.get_logger("transformers").removeHandler(caplog.handler)
    assert "indexing errors" not in caplog.text and not tokenizer.deprecation_warnings


_TRL = Path(getattr(importlib.util.find_spec("trl"), "origin", None) or "none").parent / "chat_templates"


@pytest.mark.skipif(not _TRL.is_dir(), reason="TRL's templates are not installed")
@pytest.mark.parametrize(
    "name",
    [
        *("phi3", "phi3_5", "gptoss", "llama3", "qwen2_5", "qwen2_5_vl", "qwen3_instruct_2507", "gemma"),
        *("cohere", "deepseekv3", "lfm2"),
    ],
)
def test_shipped_templates_show_the_turns_that_trl_marks(tokenizer, name):
    """TRL trains with copies that mark the turns; some of them count the generation prompt to the turn."""
    parts = {}
    for file in (name, f"{name}_training"):
        given = copy.deepcopy(tokenizer)
        given.chat_template = (_TRL / f"{file}.jinja").read_text(encoding="utf-8")
        ids, mask = Encoder(given).conversation(_TALK[1:], assistant_only=True)
        assert given.decode(ids).count("and ?") == 1
        parts[file] = given.decode(ids), mask
    (text, mask), (expected, theirs) = parts.values()
    assert text == expected
    ends, their_ends = (
        [i for i, (now, then) in enumerate(itertools.pairwise([*each, False])) if now and not then]
        for each in (mask, theirs)
    )
    assert ends == their_ends and len(ends) == 2
    assert not any(ours and not its for ours, its in zip(mask, theirs, strict=True))


@pytest.mark.skipif(not _TRL.is_dir(), reason="TRL's templates are not installed")
@pytest.mark.parametrize("name", ["llama3_1", "llama3_2", "qwen3", "gemma3", "lfm2_v2", "cohere2"])
def test_shipped_templates_are_not_refused(tokenizer, name):
    tokenizer.chat_template = (_TRL / f"{name}.jinja").read_text(encoding="utf-8")
    ids, mask = Encoder(tokenizer).conversation(_TALK[1:], assistant_only=True)
    assert mask is not None
    said = tokenizer.decode([token for token, scored in zip(ids, mask, strict=True) if scored])
    assert said.count("yes") == said.count("no no") == 1 and "and ?" not in said
