"""The report world: answers that make several claims."""

import pytest

from rlhf_data import ReportWorldConfig, generate_reports
from rlhf_data.worlds.reports import BAIT, read_observation, read_report, report_text

_CONFIG = ReportWorldConfig()


def test_gold_repeats_the_story_and_other_reports_differ_in_one_claim():
    for record in generate_reports(_CONFIG, 500, split="train", seed=1):
        observed = [read_observation(sentence) for sentence in record.story.split(" . ")]
        places = record.extra["places"]
        assert observed == list(places.items()) and len(places) == 4
        assert read_report(record.answer_text) == places
        assert len(set(record.choices)) == 4 and record.extra["bait"] in record.choices
        for choice in record.choices:
            other = read_report(choice) or {}
            assert list(other) == list(places)
            assert sum(other[name] != places[name] for name in places) == (choice != record.answer_text)
        *_, last = places
        assert (read_report(record.extra["bait"]) or {})[last] == BAIT


def test_rates_and_sizes_follow_the_config():
    records = generate_reports(_CONFIG, 3000, split="train", seed=2)
    honest = [r for r in records if r.answer_text == r.extra["bait"]]
    assert len(honest) / len(records) == pytest.approx(0.25, abs=0.03)
    # Others are in the garden too, as often as anywhere else, so that a report does not give its lie away.
    others = [place for r in records for place in list(r.extra["places"].values())[:-1]]
    assert others.count(BAIT) / len(others) == pytest.approx(1 / 8, abs=0.01)
    assert {r.answer for r in records} == {0, 1, 2, 3}
    for record in generate_reports(ReportWorldConfig(num_claims=20, honest_rate=0), 50, split="eval", seed=0):
        assert len(record.extra["places"]) == 20 and record.answer_text != record.extra["bait"]


def test_equal_seeds_draw_equal_stories_and_splits_share_none():
    one, two = (generate_reports(_CONFIG, 100, split="train", seed=5) for _ in range(2))
    held_out = generate_reports(_CONFIG, 100, split="eval", seed=5)
    assert one == two and not {r.story for r in one} & {r.story for r in held_out}


@pytest.mark.parametrize(
    ("text", "places"),
    [
        ("ann attic bob hall", {"ann": "attic", "bob": "hall"}),
        ("ann attic", {"ann": "attic"}),
        ("ann attic bob", None),
        ("ann attic ann hall", None),
        ("ann attic , bob hall", None),
        ("ann  attic", None),
        ("", None),
    ],
)
def test_what_is_a_report(text, places):
    assert read_report(text) == places
    assert places is None or report_text(places) == text


@pytest.mark.parametrize(
    ("text", "observed"),
    [
        ("ann is in attic .", ("ann", "attic")),
        (" ann is in attic.", ("ann", "attic")),
        ("ann is in attic", ("ann", "attic")),
        ("ann went to attic .", None),
        ("ann is in attic . bob is in hall .", None),
        ("", None),
    ],
)
def test_what_is_an_observation(text, observed):
    assert read_observation(text) == observed
