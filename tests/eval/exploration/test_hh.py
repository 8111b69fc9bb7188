"""Golden values of SPEC S1 on 1500 pairs of HH-RLHF, counted there with the standard library alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.eval.exploration.planted import first_of

from rlhf_data import pair_from_row, scan_rows
from rlhf_eval.exploration import PairTexts, columns_of_pairs, pair_texts
from rlhf_eval.exploration.hygiene import find_rows
from rlhf_eval.exploration.lengths import depth_of, label_bias, length_summaries, lengths_of
from rlhf_eval.exploration.surface import REFUSAL

PATH = Path(__file__).parents[4] / "shared" / "data" / "hh-rlhf" / "harmless-base-1500.jsonl.gz"
pytestmark = pytest.mark.skipif(not PATH.exists(), reason="the shared data in ../shared/data is missing")


@pytest.fixture(scope="module")
def pairs() -> list[PairTexts]:
    rows = [row for _, row in scan_rows(PATH) if isinstance(row, dict)]
    return [pair_texts(pair_from_row(row, "row")) for row in rows]


@pytest.fixture(scope="module")
def table(pairs):
    return columns_of_pairs(pairs, [(0, 0, i + 1) for i in range(len(pairs))], None)


def test_rows_turns_and_where_dialogues_part(table):
    assert len(table) == 1500
    several = {"1": 448, "2": 378, "3": 381, "4": 228, "5": 31, "6": 15}
    assert depth_of(table) == several | {"7": 10, "8": 4, "9": 2, "10": 1, "11": 1, "18": 1}
    assert table.flags.sum(axis=0).tolist() == [0, 4]  # 1496 part in the last turn of the assistant


def test_empty_completions_identical_pairs_and_repeated_prompts(table):
    prompts, rows = first_of(table.keys[:, 0]), first_of(table.keys[:, 3])
    found = {
        rule: (table.line[which]).tolist() for rule, (which, _) in find_rows(table, prompts, rows).items()
    }
    assert found["empty_completion"] == [335, 1013]
    assert found["identical_pair"] == [] and found["contradiction"] == []
    assert len(np.unique(table.keys[:, 0])) == 1499 and len(found["duplicate_prompt"]) == 1


def test_words_of_the_last_turn(table):
    found = length_summaries(lengths_of(table))["words"]
    assert found["chosen"]["mean"] == pytest.approx(30.63, abs=0.005)
    assert found["rejected"]["mean"] == pytest.approx(38.35, abs=0.005)
    assert (found["chosen"]["median"], found["rejected"]["median"]) == (21, 27)


def test_the_bars_of_both_completions_are_alike_and_of_whole_lengths(table):
    for parts in length_summaries(lengths_of(table)).values():
        chosen, rejected = parts["chosen"]["histogram"], parts["rejected"]["histogram"]
        assert chosen["edges"] == rejected["edges"] == [int(edge) for edge in chosen["edges"]]
        assert sum(chosen["counts"]) == sum(rejected["counts"]) == len(table)


def test_chosen_is_the_shorter_one(table):
    bias = label_bias(lengths_of(table), table.keys[:, 0])["words"]
    assert [bias[name]["pairs"] for name in ("longer", "equal", "shorter")] == [647, 27, 826]
    assert bias["longer"]["estimate"] == pytest.approx(647 / 1500)
    assert bias["longer"]["high"] < 0.5 < bias["shorter"]["low"]


def test_refusals(pairs, table):
    """The regex of the specification has straight apostrophes only; HH writes most of its with curly ones."""
    straight = np.array(
        [
            [REFUSAL.search(text.lower()) is not None for text in (pair.chosen, pair.rejected)]
            for pair in pairs
        ]
    )
    for found, expected in ((straight, (45, 19, 1)), (table.count("refusal") > 0, (175, 79, 17))):
        chosen, rejected = found.T
        sides = (chosen & ~rejected, rejected & ~chosen, chosen & rejected)
        assert tuple(int(side.sum()) for side in sides) == expected
