"""The page of a comparison: outcome, a plot of the intervals, tables, and cases side by side."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from rlhf_eval.html import number, page, paragraphs, section, table, text, verbatim
from rlhf_report.compare.plot import interval_plot
from rlhf_report.compare.table import PREFERENCE
from rlhf_report.compare.words import (
    amount,
    error_of,
    is_rate,
    label,
    notes,
    opening,
    p_text,
    percent,
    points,
    range_of,
    title_of,
    verdict,
)

_LONGEST = 6000
"""Characters of a text that is shown; the rest is in the file."""

_CONTROLLED = (
    "<p>The win rate if both texts were equally long and had as many headings, list items and "
    "bold passages: a logistic model, refitted in each resample. A positive effect of length is a verdict "
    "that likes longer texts (log-odds). Where one model always writes more, equal length is extrapolation, "
    "and the interval is wide.</p>"
)
_PAIRS = (
    "<p>Won, tied and lost count prompts; the win rate is their share, ties as half. Last column: the "
    "smallest difference that this many prompts detect with 80% power.</p>"
)
_SLICES = "<p>Intervals of slices are not corrected for the number of slices: read them as hints.</p>"


def comparison_page(found: dict[str, Any], cases: Sequence[dict[str, Any]]) -> str:
    """One HTML file that loads nothing from outside.

    Args:
        found: Of `compare`.
        cases: Prompts with the texts of two models, each with `prompt`, `heading`, `won` and two `answers` of
            `name`, `score` and `output`.
    """
    said, title = verdict(found), title_of([model["name"] for model in found["models"]])
    body = f"<h1>{text(title)}</h1>\n"
    body += f"<p>{text(opening(found))} <strong>{text(said[0])}</strong></p>\n"
    body += paragraphs(said[1:])
    body += section(_plot_title(found), _plot(found) + _models(found))
    if found["pairs"]:
        body += section("Every pair", _pairs(found))
    if any("controlled" in each for each in (*found["models"], *found["pairs"])):
        body += section("At equal length and style", _controlled(found))
    if found.get("slices"):
        body += section(f"By {found['slice']}", _slices(found))
    if cases:
        body += section("Cases, the clearest first", "".join(_case(case) for case in cases))
    body += section("How it was computed", paragraphs(notes(found)) + _files(found))
    return page(title, body, sortable=True)


def _plot(found: dict[str, Any]) -> str:
    rows = [(model["name"], model["mean"]) for model in found["models"]]
    return interval_plot(_plot_title(found), rows, partial(amount, found), rate=is_rate(found))


def _plot_title(found: dict[str, Any]) -> str:
    what = "Win rate" if found["metric"] == PREFERENCE else f"Mean {found['metric']}"
    better = ", less is better" if found["lower_is_better"] else ""
    return f"{what} with {100 * found['level']:g}% intervals, best first{better}"


def _models(found: dict[str, Any]) -> str:
    head = ["model", label(found) + ", %" * is_rate(found), "interval", "standard error"]
    head += ["characters"] * ("mean_characters" in found["models"][0])
    rows = []
    for model in found["models"]:
        mean = model["mean"]
        values = (amount(found, mean["estimate"]), range_of(found, mean), error_of(found, mean))
        rows.append([text(model["name"]), *map(text, values)])
        if "mean_characters" in model:
            rows[-1].append(number(model["mean_characters"], 0))
    return table(head, rows, numeric=True)


def _pairs(found: dict[str, Any]) -> str:
    head = ["pair", f"difference{points(found).replace(' ', ', ')}", "interval", "p (Holm)", "sign test"]
    head += ["won / tied / lost", "win rate, %", "would show"]
    rows = []
    for pair in found["pairs"]:
        difference, sign_test = pair["difference"], pair["sign_test"]
        cells = [
            f"{pair['first']} − {pair['second']}",
            amount(found, difference["estimate"], signed=True),
            range_of(found, difference, signed=True),
            p_text(pair["holm"]),
            "–" if sign_test is None else p_text(sign_test),
            f"{pair['wins']} / {pair['ties']} / {pair['losses']}",
            percent(pair["win_rate"]),
            amount(found, pair["detectable"]),
        ]
        rows.append([text(cell) for cell in cells])
    return _PAIRS + table(head, rows, numeric=True)


def _controlled(found: dict[str, Any]) -> str:
    head = ["win rate, %", "as judged", "at equal length", "and style", "effect of length"]
    models = [model for model in found["models"] if "controlled" in model]
    pairs = [pair for pair in found["pairs"] if "controlled" in pair]
    rows = [_controlled_row(model["name"], model["mean"], model["controlled"]) for model in models]
    rows += [
        _controlled_row(f"{pair['first']} over {pair['second']}", pair["win_rate"], pair["controlled"])
        for pair in pairs
    ]
    alpaca = "; ".join(f"{model['name']} {percent(model['alpaca_eval'])}" for model in models)
    said = f"By AlpacaEval 2's model, without its term for the instruction's difficulty: {alpaca}."
    return _CONTROLLED + f"<p>{text(said)}</p>" * bool(models) + table(head, rows, numeric=True)


def _controlled_row(name: str, plain: dict[str, Any], controlled: dict[str, Any]) -> list[str]:
    effect = controlled["length_effect"]
    shown = f"{number(effect['estimate'], 2)} [{number(effect['low'], 2)}, {number(effect['high'], 2)}]"
    rates = (plain, controlled["length"], controlled["length_and_style"])
    return [text(name), *(text(percent(rate)) for rate in rates), shown]


def _slices(found: dict[str, Any]) -> str:
    names = [model["name"] for model in found["models"]]
    head = [str(found["slice"]), "prompts", *names]
    differs = any("difference" in entry for entry in found["slices"])
    head += [f"{names[0]} − {names[1]}"] if differs else []
    rows = []
    for entry in found["slices"]:
        cells = [entry["slice"], f"{entry['prompts']:,}"]
        cells += [amount(found, entry["means"][name]) for name in names]
        if differs:
            cells.append(_difference(found, entry.get("difference")))
        rows.append([text(cell) for cell in cells])
    return _SLICES * differs + table(head, rows, numeric=True)


def _difference(found: dict[str, Any], interval: dict[str, Any] | None) -> str:
    if interval is None:
        return "–"
    return f"{amount(found, interval['estimate'], signed=True)} {range_of(found, interval, signed=True)}"


def _case(case: dict[str, Any]) -> str:
    kinds = ("good", "bad") if case["won"] else ("bad", "good")
    answers = ""
    for answer, kind in zip(case["answers"], kinds, strict=True):
        heading = ", ".join(part for part in (answer["name"], answer["score"]) if part)
        answers += (
            f'<div class="turn {kind}"><h4>{text(heading)}</h4>{verbatim(_cut(answer["output"]))}</div>'
        )
    prompt = f"<h3>{text(case['heading'])}</h3>{verbatim(_cut(case['prompt']))}"
    return f'<div class="card">{prompt}<br><div class="grid">{answers}</div></div>\n'


def _cut(found: str) -> str:
    if len(found) <= _LONGEST:
        return found
    return f"{found[:_LONGEST]}\n[{len(found) - _LONGEST:,} further characters are in the file]"


def _files(found: dict[str, Any]) -> str:
    rows = [[text(file["name"]), text(file["file"]), f"{file['rows']:,}"] for file in found["files"]]
    return table(["model", "file", "rows"], rows)
