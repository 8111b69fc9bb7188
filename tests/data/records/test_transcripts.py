"""Where prompts end: transcripts, texts and message lists."""

import random

import pytest

from rlhf_data.records.transcripts import common_prefix, is_empty, split_last_turn, split_pair

_START = "\n\nHuman: hi\n\nAssistant:"
_USER = {"role": "user", "content": "hi"}


def _says(text):
    return {"role": "assistant", "content": text}


def test_common_prefix_is_what_a_loop_finds():
    rng = random.Random(0)
    for _ in range(300):
        first, second = ([rng.randrange(2) for _ in range(rng.randrange(9))] for _ in range(2))
        shared = 0
        while shared < min(len(first), len(second)) and first[shared] == second[shared]:
            shared += 1
        assert common_prefix(first, second) == shared


@pytest.mark.parametrize(
    ("chosen", "rejected", "expected"),
    [
        (_START + " yes", _START + " no", (_START, " yes", " no")),
        # the shared blank and letters behind the turn belong to the completions
        (_START + " so yes", _START + " so no", (_START, " so yes", " so no")),
        # the turns part earlier than the last one
        (
            _START + " a\n\nHuman: b\n\nAssistant: c",
            _START + " d",
            (_START, " a\n\nHuman: b\n\nAssistant: c", " d"),
        ),
        (
            _START + " a\n\nHuman: b\n\nAssistant: c",
            _START + " a\n\nHuman: b\n\nAssistant: d",
            (_START + " a\n\nHuman: b\n\nAssistant:", " c", " d"),
        ),
        # no transcript: the last white space that both have
        ("The sky is blue", "The sky is black", ("The sky is", " blue", " black")),
        ("yes", "no", ("", "yes", "no")),
        ([_USER, _says("yes")], [_USER, _says("no")], ([_USER], [_says("yes")], [_says("no")])),
        ([_USER], [_USER, _says("no")], ([_USER], [], [_says("no")])),
    ],
)
def test_pairs_are_split_where_they_part(chosen, rejected, expected):
    assert split_pair(chosen, rejected) == expected


def test_last_turn_of_the_assistant():
    talk = _START + " a\n\nHuman: b\n\nAssistant: c"
    assert split_last_turn(talk) == (_START + " a\n\nHuman: b\n\nAssistant:", " c")
    assert split_last_turn([_USER, _says("a"), _USER]) == ([_USER], [_says("a"), _USER])
    assert split_last_turn("no transcript") is None
    assert split_last_turn([_USER]) is None


def test_empty_is_what_says_nothing():
    assert is_empty(" \n") and is_empty([]) and is_empty([_says(""), {"role": "assistant", "content": None}])
    assert not is_empty("a") and not is_empty([{"role": "assistant", "tool_calls": [{"name": "look"}]}])
