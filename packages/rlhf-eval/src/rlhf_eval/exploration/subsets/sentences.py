"""Where the pairs of one value of a column differ from all others, in sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_eval.exploration.hygiene import ROW_RULES
from rlhf_eval.exploration.sentences import Sentence, percent

_MOST_SENTENCES = 8
_SHARES = {
    "longer": "the longer completion is chosen in {} of the pairs of unequal length",
    "refusal": "where one completion alone refuses, the refusal is chosen in {}",
}


def subset_sentences(columns: Sequence[Mapping[str, Any]]) -> list[Sentence]:
    """A sentence for each of the surest differences, and one for what they leave out.

    Args:
        columns: of `measure_subsets`.
    """
    found = []
    for column in columns:
        compared = column["comparisons"]
        found += [_difference(column, each) for each in compared[:_MOST_SENTENCES]]
        if len(compared) > _MOST_SENTENCES:
            text = (
                f"By {column['column']}: {len(compared) - _MOST_SENTENCES:,} further differences "
                "are in exploration.json."
            )
            found.append(Sentence("subset", False, text))
        if len(column["values"]) == 1:
            only = column["values"][0]
            why = f"every row has the value {only['value']}"
            if column["pooled"]:
                why = f"each of its {column['pooled']:,} values has fewer than 20 pairs"
            found.append(Sentence("subset", False, f"By {column['column']}: {why}, so nothing is compared."))
        elif not compared:
            text = (
                f"By {column['column']}: no value differs from the others by more than chance explains "
                f"({column['compared']:,} comparisons{' in all columns' if len(columns) > 1 else ''})."
            )
            found.append(Sentence("subset", False, text))
    return found


def _difference(column: Mapping[str, Any], found: Mapping[str, Any]) -> Sentence:
    inside, outside, measure = found["inside"], found["outside"], found["measure"]
    if measure in _SHARES:
        text = f"{_SHARES[measure].format(percent(inside))}, elsewhere in {percent(outside)}"
    else:
        text = (
            f"{inside['yes']:,} of {inside['pairs']:,} rows ({percent(inside)}), elsewhere "
            f"{outside['yes']:,} of {outside['pairs']:,}: {ROW_RULES[measure].text}"
        )
    of = f"{column['column']} = {found['value']}"
    p_value = "p\N{NO-BREAK SPACE}< .001"
    if found["p_value"] >= 0.001:
        p_value = f"p\N{NO-BREAK SPACE}= {found['p_value']:.3f}".replace("0.", ".")
    return Sentence("subset", True, f"{of}: {text} ({p_value}, corrected for {column['compared']:,} tests).")
