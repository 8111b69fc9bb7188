"""Numbers and names as people read them."""

from __future__ import annotations

import math

import pytest

from rlhf_merge.text import (
    count_text,
    number_text,
    plain,
    share_text,
    short_names,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (math.nan, "–"),
        (math.inf, "∞"),
        (0.0, "0%"),
        (1e-9, "<0.001%"),
        (0.00012345, "0.0123%"),
        (0.1234, "12.3%"),
        (0.9996, ">99.9%"),
        (1.0, "100%"),
        (12.345, "1234%"),
    ],
)
def test_shares_are_never_rounded_to_none_or_all(value: float | None, text: str) -> None:
    assert share_text(value) == text


def test_numbers() -> None:
    assert [number_text(value) for value in (None, math.nan, 0.0123456, 12.0)] == ["–", "–", "0.0123", "12"]
    assert [number_text(value, "z.3f") for value in (None, -0.0001, -0.5, 1.0)] == [
        "–",
        "0.000",
        "-0.500",
        "1.000",
    ]
    assert [plain(value) for value in (None, math.nan, -math.inf, 0.5)] == [None, None, None, 0.5]


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0"), (999, "999"), (1000, "1k"), (999_600, "1M"), (219_702_272, "220M")]
)
def test_counts(count: int, text: str) -> None:
    assert count_text(count) == text


@pytest.mark.parametrize(
    ("specs", "names"),
    [
        (["/a/b/base", "./ft0/"], ["base", "ft0"]),
        (["/run1/model", "/run2/model"], ["run1/model", "run2/model"]),
        (["org/name@v1", "org/name@v2"], ["name@v1", "name@v2"]),
        (["/a/base", "/a/base+/b/adapter"], ["base", "base+adapter"]),
        (["/a/base", "/a/base", "/a/other"], ["base (1)", "base (2)", "other"]),
        (["."], ["."]),
    ],
)
def test_short_names_tell_models_apart(specs: list[str], names: list[str]) -> None:
    assert short_names(specs) == names
