"""The command of a run gives its settings again."""

from __future__ import annotations

import shlex
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from rlhf_data import apply_overrides, settings_command

USUAL = {"seed": 0, "name": None, "section": {"rate": 0.1, "names": [], "map": {}}, "other": None}
_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(codec="utf-8", exclude_characters="\0")),
    st.lists(st.text(alphabet="ab :#{}'\"")),
    st.dictionaries(st.text(alphabet="ab.", min_size=1), st.integers()),
)


@given(_VALUES, _VALUES, _VALUES, st.one_of(st.none(), st.dictionaries(st.text("ab", min_size=1), _VALUES)))
def test_the_command_gives_the_settings_again(name: Any, rate: Any, mapping: Any, other: Any) -> None:
    values = {"seed": 0, "name": name, "section": {"rate": rate, "names": [], "map": mapping}, "other": other}
    command, *rest = shlex.split(settings_command("train", values, USUAL))
    assert command == "train" and set(rest[::2]) <= {"--set"}
    assert apply_overrides(USUAL, rest[1::2]) == values


def test_what_is_as_usual_is_left_out_and_options_stand_for_settings() -> None:
    values = {**USUAL, "seed": 3, "name": "two words", "section": {**USUAL["section"], "rate": 1e-6}}
    options = {"seed": "--seed", "name": "--name"}
    expected = "train minmax --seed 3 --name 'two words' --set section.rate=1e-06"
    assert settings_command("train minmax", values, USUAL, options) == expected
    assert settings_command("train minmax", USUAL, USUAL, options) == "train minmax"
