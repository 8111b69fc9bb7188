"""What a dry run shows of rows cannot steer the terminal."""

from __future__ import annotations

from typing import Any

from rlhf_algos import shown_tokens


def test_control_characters_of_a_row_are_replaced(byte_tokenizer: Any):
    ids = byte_tokenizer("a\x1b[31mb\n\x9bc", add_special_tokens=False).input_ids
    assert shown_tokens(byte_tokenizer, ids) == "a�[31mb\\n�c"


def test_letters_of_any_script_stay(byte_tokenizer: Any):
    ids = byte_tokenizer("für 猫 🙂", add_special_tokens=False).input_ids
    assert shown_tokens(byte_tokenizer, ids) == "für 猫 🙂"
