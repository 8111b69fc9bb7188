"""Tokenizers with chat templates, and the real preference transcripts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HH_PAIRS = Path(__file__).parents[3] / "shared/data/hh-rlhf/harmless-base-1500.jsonl.gz"

_SAID = "{{ m.content }}<eos>"
_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>TURN{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TEMPLATES = {
    "plain": _TEMPLATE.replace("TURN", _SAID),
    "marked": _TEMPLATE.replace(
        "TURN",
        f"{{% if m.role == 'assistant' %}}{{% generation %}}{_SAID}{{% endgeneration %}}"
        f"{{% else %}}{_SAID}{{% endif %}}",
    ),
    # shows what the assistant thinks in its last turn only
    "thinking": _TEMPLATE.replace(
        "TURN", "{% if loop.last and m.role == 'assistant' %}[thinks]{% endif %}" + _SAID
    ),
    # shows earlier turns of the assistant without an end
    "endless": _TEMPLATE.replace(
        "TURN", "{{ m.content }}{% if loop.last or m.role != 'assistant' %}<eos>{% else %} ...{% endif %}"
    ),
    # puts an end token behind the whole conversation, as Phi-3's does
    "ended": _TEMPLATE.replace("TURN", "{{ m.content }}<end>")
    + "{% if not add_generation_prompt %}<eos>{% endif %}",
    # closes the last turn by another token than earlier ones, as GPT-OSS's does
    "returning": _TEMPLATE.replace(
        "TURN",
        "{{ m.content }}{% if loop.last and m.role == 'assistant' and not add_generation_prompt %}<return>"
        "{% else %}<end>{% endif %}",
    ),
    # says which turn it is, so that a prompt alone and with its answer differ
    "counting": "{{ messages | length }}" + _TEMPLATE.replace("TURN", _SAID),
    "refusing": "{{ raise_exception('roles must alternate') }}",
    "markless": _TEMPLATE.replace(
        "TURN", _SAID + "{% if false %}{% generation %}{% endgeneration %}{% endif %}"
    ),
    "tools": "{% if tools %}{{ tools[0].name }}{% endif %}{{ mood }}" + _TEMPLATE.replace("TURN", _SAID),
}
"""Chat templates by what is special about them."""


@pytest.fixture
def tokenizer(byte_tokenizer: Any) -> Any:
    """A tokenizer of the test's own, which reads `<eos>` in a text as the end token, as most do."""
    own = copy.deepcopy(byte_tokenizer)
    own.split_special_tokens = False
    return own


@pytest.fixture
def with_template(tokenizer: Any) -> Callable[[str], Any]:
    """A function that gives the tokenizer one of the chat templates."""

    def give(name: str) -> Any:
        tokenizer.chat_template = TEMPLATES[name]
        return tokenizer

    return give


@pytest.fixture(scope="session")
def hh_pairs() -> Path:
    """The file of real preference transcripts."""
    if not HH_PAIRS.exists():
        pytest.skip("needs ../shared/data, which is missing")
    return HH_PAIRS
