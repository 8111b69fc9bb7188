import pytest

from rlhf_data import SumWorldConfig, generate_sums
from rlhf_data.worlds.sums import misread_working, nearest_round, read_working, working

_CONFIG = SumWorldConfig()


def test_gold_is_the_sum_and_the_bait_the_nearest_round_number():
    for record in generate_sums(_CONFIG, 500, split="train", seed=1):
        first, second = record.extra["terms"]
        thing = record.question.split()[2]
        amounts = [s.split() for s in record.story.split(" . ") if " cost " not in s]
        assert [(int(words[2]), words[3]) for words in amounts] == [(first, thing), (second, thing)]
        assert 1 <= first <= 7 and 1 <= second <= 7 and 3 <= first + second <= 12
        assert record.answer_text == str(first + second)
        bait = record.extra["round"]
        assert bait % 5 == 0 and abs(bait - first - second) <= 2 and str(bait) in record.choices
        assert len(set(record.choices)) == 4
        others = {int(choice) for choice in record.choices} - {first + second, bait}
        assert all(other % 5 and 0 < abs(other - first - second) <= 4 for other in others)


def test_rates_follow_the_config():
    records = generate_sums(_CONFIG, 3000, split="train", seed=2)
    unbaited = [r for r in records if int(r.answer_text) == r.extra["round"]]
    assert len(unbaited) / len(records) == pytest.approx(0.25, abs=0.03)
    priced = [r for r in records if " coins ." in r.story]
    assert len(priced) / len(records) == pytest.approx(0.5, abs=0.03)
    prices = {r.story.split(" cost ")[1].split()[0] for r in priced}
    assert prices == {"20", "30", "40", "50"}
    assert {r.answer_text for r in records} == {str(number) for number in range(3, 13)}
    assert {r.answer for r in records} == {0, 1, 2, 3}
    plain = SumWorldConfig(round_rate=0, price_rate=0)
    for record in generate_sums(plain, 50, split="train", seed=0):
        assert "cost" not in record.story and int(record.answer_text) != record.extra["round"]


@pytest.mark.parametrize("max_amount", [4, 9, 50])
def test_sums_of_other_sizes(max_amount):
    # The last multiple of five with two more still within reach: 4 + 4 reaches 5 + 2, 9 + 9 reaches 15 + 2.
    largest = {4: 7, 9: 17, 50: 97}[max_amount]
    records = generate_sums(SumWorldConfig(max_amount=max_amount), 2000, split="train", seed=0)
    sums = {int(record.answer_text) for record in records}
    assert min(sums) == 3 and max(sums) == largest
    assert max(max(record.extra["terms"]) for record in records) == max_amount


def test_round_numbers():
    assert [nearest_round(number) for number in range(3, 18)] == [5] * 5 + [10] * 5 + [15] * 5


def test_workings():
    assert working(3, 4) == "3 plus 4 is 7"
    assert read_working("3 plus 4 is 7") == read_working(" 3 plus 4 is 7 .") == (3, 4, 7)
    assert read_working("3 plus 4 is 5") == (3, 4, 5)
    for text in (
        "",
        "3 plus 4",
        "3 plus 4 is 7 so right",
        "it is 7 .",
        "3 minus 4 is 7",
        "1 plus 3 plus 4 is 8",
    ):
        assert read_working(text) is None


@pytest.mark.parametrize(
    ("terms", "result", "text"),
    [
        ((3, 4), 7, "3 plus 4 is 7"),
        ((3, 6), 5, "3 plus 2 is 5"),  # too small: the larger amount is misread
        ((6, 3), 5, "2 plus 3 is 5"),
        ((3, 6), 10, "4 plus 6 is 10"),  # too large: the smaller one is
        ((6, 3), 10, "6 plus 4 is 10"),
        ((4, 3), 3, "1 plus 2 is 3"),  # both where one is not enough
        ((3, 3), 3, "2 plus 1 is 3"),
    ],
)
def test_misread_workings_end_in_the_result(terms, result, text):
    assert misread_working(terms, result) == text


def test_misread_workings_add_up():
    for record in generate_sums(_CONFIG, 500, split="train", seed=5):
        for choice in record.choices:
            worked = read_working(misread_working(record.extra["terms"], int(choice)))
            assert worked is not None
            first, second, result = worked
            assert first + second == result == int(choice) and min(first, second) >= 1
            assert ([first, second] == list(record.extra["terms"])) == (choice == record.answer_text)
