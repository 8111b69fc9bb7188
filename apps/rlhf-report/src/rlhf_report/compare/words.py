"""Conclusions of a comparison, as sentences and as a text file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlhf_report.compare.table import PREFERENCE, name_of

NAMED = 4
"""Pairs that are named one by one."""


def is_rate(found: dict[str, Any]) -> bool:
    """Whether the metric is shown in percent: a win rate, or an accuracy."""
    return found["metric"] == PREFERENCE or found["models"][0]["mean"]["method"].startswith("Wilson")


def label(found: dict[str, Any]) -> str:
    """Name of the metric."""
    return "win rate" if found["metric"] == PREFERENCE else found["metric"]


def amount(found: dict[str, Any], value: float | None, *, signed: bool = False) -> str:
    """A value of the metric: percent for rates, else four significant digits."""
    if value is None:
        return "–"
    shown = f"{100 * value:+.1f}" if is_rate(found) else f"{value:+.4g}"
    return (shown if signed else shown.removeprefix("+")).replace("-", "−")


def error_of(found: dict[str, Any], interval: dict[str, Any]) -> str:
    """A standard error, with a digit more than the estimate."""
    error = interval["standard_error"]
    return f"{100 * error:.2f}" if is_rate(found) and error is not None else amount(found, error)


def points(found: dict[str, Any]) -> str:
    """The unit of a difference, with a space before it; nothing for scores."""
    return " points" if is_rate(found) else ""


def range_of(found: dict[str, Any], interval: dict[str, Any], *, signed: bool = False) -> str:
    """Both ends of an interval of the metric."""
    low, high = (amount(found, interval[end], signed=signed) for end in ("low", "high"))
    return f"[{low}, {high}]"


def percent(interval: dict[str, Any]) -> str:
    """A win rate with its interval, in percent."""
    shown = ["–" if (value := interval[key]) is None else f"{100 * value:.1f}" for key in _ENDS]
    return f"{shown[0]} [{shown[1]}, {shown[2]}]"


_ENDS = ("estimate", "low", "high")


def title_of(names: Sequence[str]) -> str:
    """The page's title."""
    return " and ".join(names) if len(names) < 3 else f"{names[0]} and {len(names) - 1} others"


def opening(found: dict[str, Any]) -> str:
    """One sentence: the models and the prompts."""
    names = [model["name"] for model in found["models"]]
    what = f"{'' if found['metric'] == PREFERENCE else 'mean '}{label(found)}"
    against = f" against {name_of(found['baseline'])}" if found["baseline"] else ""
    where = f"{found['prompts']:,} prompts" + " that all files have" * (len(names) > 1)
    unit = "" if found["unit"] == "prompt" else f" Prompts of one {found['unit']} are resampled together."
    return f"{listed(names)}, compared by {what}{against} on {where}.{unit}"


def verdict(found: dict[str, Any]) -> list[str]:
    """The outcome: the sentences under the plot."""
    pairs, alpha = found["pairs"], 1 - found["level"]
    if not pairs:
        return [_single(found)]
    decisive = [pair for pair in pairs if pair["holm"] < alpha]
    alike = [pair for pair in pairs if pair["difference"]["low"] is None]
    undecided = [pair for pair in pairs if pair["holm"] >= alpha and pair not in alike]
    if undecided and not decisive and not alike:
        return [no_ranking(pairs), _detectable(found, undecided)]
    sentences = [better(found, pair, _difference(found, pair)) for pair in decisive[:NAMED]]
    sentences += [_constant(found, pair) for pair in alike[:NAMED]]
    sentences += further(decisive)
    if undecided:
        sentences += [not_decided(undecided), _detectable(found, undecided)]
    return sentences


def left_out(found: dict[str, Any]) -> list[str]:
    """Rows that could not be joined, and scores of two kinds."""
    said = []
    for file in found["files"]:
        lost = []
        if file["unmatched_prompts"]:
            lost.append(f"{file['unmatched_prompts']:,} prompts that not all other files have")
        if file["rows_without_metric"]:
            lost.append(f"{file['rows_without_metric']:,} rows without {found['metric']}")
        if lost:
            said.append(f"Left out of {file['name']}: {' and '.join(lost)}.")
    verdicts, numbers = (
        [file["name"] for file in found["files"] if file["scores"] == kind]
        for kind in ("verdicts", "numbers")
    )
    if verdicts and numbers and found["metric"] != PREFERENCE:
        said.append(
            f"{found['metric']} is true or false in {listed(verdicts)} and a number from 0 to 1 in "
            f"{listed(numbers)}: their difference is one of accuracies only where that number is a share of "
            "right answers."
        )
    return said


def notes(found: dict[str, Any]) -> list[str]:
    """Rows that could not be joined, and how the numbers were computed."""
    said = left_out(found)
    mean, level = found["models"][0]["mean"], 100 * found["level"]
    said.append(f"Intervals are {level:g}%; of the means: {mean['method']}, {mean['n']:,} {mean['unit']}s.")
    if found["pairs"]:
        difference = found["pairs"][0]["difference"]
        said.append(
            f"Differences are paired, both models on the same prompts: {difference['method']} by "
            f"{difference['unit']}. P-values are corrected for the number of pairs by Holm's method."
        )
    return said


def text_report(found: dict[str, Any]) -> str:
    """The whole comparison as plain text."""
    lines = [opening(found), *verdict(found), ""]
    unit = "%" * is_rate(found)
    rows: list[tuple[str, ...]] = [("model", label(found), "interval")]
    for model in found["models"]:
        mean = model["mean"]
        rows.append((model["name"], amount(found, mean["estimate"]) + unit, range_of(found, mean)))
    lines += columns(rows)
    controlled = [model for model in found["models"] if "controlled" in model]
    if controlled:
        rows = [("win rate, %", "at equal length", "and style", "AlpacaEval 2's model")]
        for model in controlled:
            rates = (model["controlled"]["length"], model["controlled"]["length_and_style"])
            rows.append((model["name"], *map(percent, rates), percent(model["alpaca_eval"])))
        lines += ["", *columns(rows)]
    if found["pairs"]:
        rows = [("pair", "difference", "interval", "p (Holm)", "won/tied/lost", "detectable")]
        rows += [_pair_cells(found, pair) for pair in found["pairs"]]
        lines += ["", *columns(rows)]
    if found.get("slices"):
        lines.append("")
    for entry in found.get("slices", ()):
        means = ", ".join(f"{name} {amount(found, value)}" for name, value in entry["means"].items())
        lines.append(f"{found['slice']} = {entry['slice']} ({entry['prompts']} prompts): {means}")
    return "\n".join([*lines, "", *notes(found)]) + "\n"


def p_text(p_value: float) -> str:
    """A p-value, with the smallest one worth showing as a floor."""
    return "< .001" if p_value < 0.001 else f"{p_value:.3f}".removeprefix("0")


def _pair_cells(found: dict[str, Any], pair: dict[str, Any]) -> tuple[str, ...]:
    difference = pair["difference"]
    return (
        f"{pair['first']} − {pair['second']}",
        amount(found, difference["estimate"], signed=True),
        range_of(found, difference, signed=True),
        p_text(pair["holm"]),
        f"{pair['wins']}/{pair['ties']}/{pair['losses']}",
        amount(found, pair["detectable"]),
    )


def _difference(found: dict[str, Any], pair: dict[str, Any]) -> str:
    difference = pair["difference"]
    return f"{amount(found, difference['estimate'])}{points(found)} {range_of(found, difference)}"


def better(found: dict[str, Any], pair: dict[str, Any], by: str) -> str:
    """The sentence for a significant difference of `by`."""
    p_value = p_text(pair["holm"])
    corrected = f" after correction for {len(found['pairs'])} comparisons" * (len(found["pairs"]) > 1)
    equals = "" if p_value.startswith("<") else "= "
    return f"{pair['first']} is better than {pair['second']} by {by}, p {equals}{p_value}{corrected}."


def further(decisive: Sequence[dict[str, Any]]) -> list[str]:
    """A sentence that counts the significant differences beyond those named one by one, if any."""
    more = len(decisive) - NAMED
    return [f"So are {more} further differences; the table has them."] if more > 0 else []


def not_decided(pairs: Sequence[dict[str, Any]]) -> str:
    """The sentence for pairs without a significant difference, where others have one."""
    named = "; ".join(f"{pair['first']} and {pair['second']}" for pair in pairs[:NAMED])
    more = f"; and {len(pairs) - NAMED} further pairs" * (len(pairs) > NAMED)
    return f"Not decided: {named}{more}."


def _single(found: dict[str, Any]) -> str:
    model = found["models"][0]
    mean = model["mean"]
    said = f"{model['name']}: {amount(found, mean['estimate'])}% {range_of(found, mean)}."
    if mean["low"] > 0.5:
        return f"{said} It is better than what it was compared with."
    if mean["high"] < 0.5:
        return f"{said} It is worse than what it was compared with."
    return f"{said} The interval includes 50%: neither is shown to be better."


def _constant(found: dict[str, Any], pair: dict[str, Any]) -> str:
    by = f"{amount(found, pair['difference']['estimate'])}{points(found)}"
    return f"{pair['first']} and {pair['second']} differ by {by} on every prompt."


def no_ranking(pairs: Sequence[dict[str, Any]]) -> str:
    """The sentence for pairs without any significant difference."""
    outside = sum(pair["difference"]["low"] > 0 or pair["difference"]["high"] < 0 for pair in pairs)
    if not outside:
        one, many = "The interval of the difference includes zero", "All pairwise intervals include zero"
        return f"{one if len(pairs) == 1 else many}: the ranking is not decisive."
    return (
        f"{outside} of {len(pairs)} intervals exclude zero, but no difference is significant when corrected "
        "for multiple comparisons: the ranking is not decisive."
    )


def _detectable(found: dict[str, Any], undecided: Sequence[dict[str, Any]]) -> str:
    largest = max(pair["detectable"] for pair in undecided)
    return (
        f"With this many prompts, a difference of {amount(found, largest)}{points(found)} would be found "
        "four times in five."
    )


def listed(names: Sequence[str]) -> str:
    """Names as a sentence has them: a, b and c."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table in plain text."""
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
