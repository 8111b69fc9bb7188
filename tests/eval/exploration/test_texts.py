"""Pairs as texts: transcripts, messages, scripts, words without white space."""

from __future__ import annotations

import pytest
from tests.eval.exploration.planted import columns, pair, word_table

from rlhf_data import pair_from_row
from rlhf_eval.exploration import WordCounter, length_unit, pair_texts, words_of_pairs
from rlhf_eval.exploration.surface import COUNTS, SCRIPTS, script_of, strange_characters, surface_counts
from rlhf_eval.exploration.words import words_of

HUMAN, ASSISTANT = "\n\nHuman:", "\n\nAssistant:"


def texts(**row):
    return pair_texts(pair_from_row(row, "row 1"))


def test_a_transcript_is_its_last_turn():
    start = f"{HUMAN} hi{ASSISTANT} hello{HUMAN} and?"
    found = texts(chosen=f"{start}{ASSISTANT} yes", rejected=f"{start}{ASSISTANT} no")
    assert (found.chosen, found.rejected, found.human_turns) == ("yes", "no", 2)
    assert not found.parts_early and not found.ends_with_human
    early = texts(chosen=f"{start}{ASSISTANT} yes", rejected=f"{HUMAN} hi{ASSISTANT} no")
    assert early.parts_early and early.rejected == "no"
    asked = texts(chosen=f"{start}{ASSISTANT} yes{HUMAN} why?", rejected=f"{start}{ASSISTANT} no")
    assert asked.ends_with_human and asked.chosen == "yes" and asked.human_turns == 3


def test_a_tool_call_is_said():
    def calls(name):
        return [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": name}}]}]

    found = texts(prompt=[{"role": "user", "content": "a"}], chosen=calls("f"), rejected=calls("g"))
    assert '"f"' in found.chosen and '"g"' in found.rejected


def test_messages_and_sharegpt():
    def message(role, content):
        return {"role": role, "content": content}

    prompt = [message("user", "a"), message("assistant", "b"), message("user", "c")]
    found = texts(prompt=prompt, chosen=[message("assistant", "yes")], rejected=[message("assistant", "no")])
    assert (found.chosen, found.rejected, found.human_turns, found.parts_early) == ("yes", "no", 2, False)
    longer = [message("assistant", "x"), message("user", "y"), message("assistant", "z")]
    assert texts(prompt=prompt, chosen=longer, rejected=[message("assistant", "no")]).parts_early
    shared = texts(
        conversations=[{"from": "human", "value": "q"}],
        chosen={"from": "gpt", "value": "good"},
        rejected={"from": "gpt", "value": "bad"},
    )
    assert (shared.prompt, shared.chosen, shared.rejected) == ("q", "good", "bad")


def test_empty_and_equal_completions_are_read_as_they_are():
    assert texts(prompt="p", chosen="", rejected=" ").chosen == ""
    assert texts(prompt="p", chosen="a", rejected="a").rejected == "a"


def test_surface_counts():
    text = "# Title\n- one\n2) two 3.5\n`code` I’m sorry, I can’t! Maybe? **b**"
    found = dict(zip(COUNTS, surface_counts(text), strict=True))
    assert found | {"characters": 0, "words": 0} == {
        **{"characters": 0, "words": 0, "list items": 2, "markdown": 2, "code": 1, "numbers": 2},
        **{"questions": 1, "exclamations": 1, "refusal": True, "first person": 2, "hedges": 1},
    }


@pytest.mark.parametrize(
    ("text", "script"),
    [
        ("hello", "Latin"),
        ("12 !?", "no letters"),
        ("你好吗 ok", "Han"),
        ("مرحبا", "Arabic"),
        ("ᚠᚢᚦ", "other"),
    ],
)
def test_scripts(text, script):
    assert SCRIPTS[script_of(text)] == script


def test_strange_characters():
    assert strange_characters("plain\ttext\n") == strange_characters("naïve — “quoted” 👩\u200d🔬 café") == 0
    assert strange_characters("itâ€™s") == 1 and strange_characters("cafÃ©") == 1
    assert strange_characters("a\x00b\ufffd") == 2


def test_words_without_white_space_are_characters():
    assert words_of("Don’t STOP, 你好 café") == ["don't", "stop", "你", "好", "café"]
    chinese = columns([pair("问题", "这是一个比较长的回答，没有空格。", "不知道这个问题的答案是什么呢。")])
    assert length_unit(chinese) == "characters"
    assert length_unit(columns([pair("q", "a longer answer here", "no")])) == "words"


def test_a_bag_holds_what_one_completion_alone_has():
    found = word_table([[("a b b x", "a c")] * 5, [("c", "c d")] * 5])
    bag = [dict.fromkeys("") for _ in range(10)]
    for row, column, value in zip(found.bag.rows, found.bag.columns, found.bag.values, strict=True):
        bag[row][found.bag_words[column]] = int(value)
    assert bag == [{"b": 1, "x": 1, "c": -1}] * 5 + [{"d": -1}] * 5
    assert found.lengths.tolist()[:4] == [4, 2, 4, 2]


def test_words_do_not_depend_on_how_many_pairs_come_at_a_time():
    pairs = [("a b b x", "a c"), ("c", "c d"), ("", "b é"), ("x c", "a a")] * 4
    whole = word_table([pairs])
    parts = word_table([pairs[:3], pairs[3:4], pairs[4:]])
    assert parts.words == whole.words == ["a", "b", "x", "c", "d", "é"]
    assert parts.bag_words == whole.bag_words
    for name in ("ids", "lengths"):
        assert getattr(parts, name).tolist() == getattr(whole, name).tolist()
    for name in ("rows", "columns", "values"):
        for rows in ("bag", "openings"):
            assert (
                getattr(getattr(parts, rows), name).tolist() == getattr(getattr(whole, rows), name).tolist()
            )


def test_a_full_counter_takes_no_further_pairs():
    counter = WordCounter(most_words=3)
    for _ in range(3):
        counter.add(words_of_pairs([("one two", "three")]))
        assert counter.is_full
    assert counter.table().lengths.tolist() == [2, 1]


def test_ascii_words_are_those_of_any_text():
    text = "Don't 'quote' it''s a_b 3.5 rock'n'roll, x-ray\t'tis"
    assert words_of(text) == words_of(f"{text} é")[:-1]
