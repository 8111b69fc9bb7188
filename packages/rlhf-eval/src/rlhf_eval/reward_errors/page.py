"""The report of a reward model's errors as a page, as text and as pictures."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_eval.figures import (
    BLUE,
    GREY,
    ORANGE,
    can_draw,
    figure_grid,
    make_panel,
    new_figure,
    save_png,
    styled,
)
from rlhf_eval.html import findings_list, number, page, section, table, text, verbatim
from rlhf_eval.reward_errors.candidates import TIES
from rlhf_eval.reward_errors.findings import ErrorFinding
from rlhf_eval.reward_errors.scored_pairs import ScoredPairs


def errors_page(
    results: Mapping[str, Any],
    findings: Sequence[ErrorFinding],
    cases: Sequence[Mapping[str, Any]],
    pairs: ScoredPairs,
    *,
    model: str,
    data: str,
) -> str:
    """One HTML file that loads nothing from outside.

    Args:
        results: of `analyse_errors`.
        findings: of `error_findings`.
        cases: of `error_cases`.
        pairs: the scored pairs, for the figures; they are left out where matplotlib is missing.
        model: name of the model.
        data: name of the data.
    """
    accuracy = results["accuracy"]
    body = (
        f"<h1>What the reward model gets wrong</h1>\n<p>{text(model)} scored {results['pairs']:,} pairs of "
        f"{text(data)}, on {results['prompts']:,} prompts. It prefers the completion people preferred in "
        f"{_percent(accuracy)} of them. Intervals are 95%, and take the prompts as independent.</p>\n"
    )
    body += _findings_html(findings)
    body += _figures(results, pairs) if can_draw() else ""
    for kind, shares in {
        "length of the chosen one": results["length"]["accuracy"],
        **results["slices"],
    }.items():
        body += section(f"Accuracy by {kind}", _shares_table(shares))
    if "flips" in results:
        body += section("Verdicts that a harmless change flips", _shares_table(results["flips"]))
    if results.get("best_of_n"):
        body += section("The best of N by this reward, under another", _best_of_n_table(results["best_of_n"]))
    sides = ("people preferred", "the model prefers")
    return page("What the reward model gets wrong", body + _cases_html(cases, sides))


def candidates_page(
    results: Mapping[str, Any],
    findings: Sequence[ErrorFinding],
    cases: Sequence[Mapping[str, Any]],
    *,
    model: str,
    data: str,
) -> str:
    """The same for prompts with several completions.

    Args:
        results: of `analyse_candidates`.
        findings: of `candidate_findings`.
        cases: of `candidate_cases`.
        model: name of the model.
        data: name of the data.
    """
    body = (
        f"<h1>What the reward model gets wrong</h1>\n<p>{text(model)} scored {results['completions']:,} "
        f"completions of {results['rows']:,} prompts of {text(data)}, some correct and some not. It is right "
        f"where a correct one has the highest score{_mean_of(results)}. Intervals are 95%, and take the "
        "prompts as independent.</p>\n"
    )
    body += _findings_html(findings)
    head, *rows = subset_rows(results)
    body += section("Score by subset", table(head, [[*map(text, row)] for row in rows], numeric=True))
    if TIES in results["subsets"]:
        body += section("The parts of the score of Ties", _ties_table(results["subsets"][TIES]))
    for kind, shares in results["slices"].items():
        body += section(f"Accuracy by {kind}", _shares_table(shares, "prompts"))
    if results.get("best_of_n"):
        body += section("The best of N by this reward, under another", _best_of_n_table(results["best_of_n"]))
    sides = ("correct", "the model prefers")
    return page("What the reward model gets wrong", body + _cases_html(cases, sides))


def _mean_of(results: Mapping[str, Any]) -> str:
    if len(results["subsets"]) == 1:
        return ""
    mean, low, high = _ends(results["mean_over_subsets"])
    return f": {mean} [{low}, {high}] in the mean over {len(results['subsets'])} subsets"


def subset_rows(results: Mapping[str, Any]) -> list[list[str]]:
    """The table of subsets as text, its head first: prompts, score, interval, chance."""
    rows = [["", "prompts", "score", "from", "to", "chance"]]
    for name, entry in results["subsets"].items():
        chance = "–" if entry["chance"] is None else f"{entry['chance']:.1%}"
        rows.append([name, f"{entry['rows']:,}", *_ends(entry), chance])
    if len(results["subsets"]) > 1:
        rows.append(["mean over subsets", f"{results['rows']:,}", *_ends(results["mean_over_subsets"]), "–"])
    return rows


def _ends(share: Mapping[str, Any]) -> list[str]:
    ends = (share[name] for name in ("estimate", "low", "high"))
    return [f"{end:.1%}" if math.isfinite(end) else "–" for end in ends]


def _ties_table(entry: Mapping[str, Any]) -> str:
    tied, ref = (entry["accuracy"][kind] for kind in ("tied", "ref"))
    rows = [
        ["every correct one above every incorrect one, of several correct ones", "0.30", tied],
        ["the same, of one correct one", "0.30", ref],
        ["and by more than the correct ones differ", "0.20", f"{entry['preferred']:.1%}"],
        ["the same, by the smaller gap of both prompts", "0.20", f"{entry['preferred_hard']:.1%}"],
        ["tanh(that gap / what the correct ones differ − 1)", "0.01", number(entry["margin"])],
    ]
    cells = [
        [text(what), weight, *_ends(value), f"{value['chance']:.1%}"]
        if isinstance(value, Mapping)
        else [text(what), weight, value, "–", "–", "–"]
        for what, weight, value in rows
    ]
    return table(["", "weight", "value", "from", "to", "chance"], cells, numeric=True)


def _findings_html(findings: Sequence[ErrorFinding]) -> str:
    marks = {True: '<span class="bad-text">problem</span>', False: '<span class="good-text">fine</span>'}
    return findings_list(f"{marks[each.problem]}: {text(each.text)}" for each in findings)


def errors_text(
    findings: Sequence[ErrorFinding],
    cases: Sequence[Mapping[str, Any]],
    *,
    model: str,
    data: str,
    table: Sequence[str] = (),
) -> str:
    """The findings and the cases as plain text, with the lines of a table before them."""
    lines = [f"{model} on {data}", "", *table]
    lines += [f"- {'PROBLEM: ' if found.problem else ''}{found.text}" for found in findings]
    for count, case in enumerate(cases, start=1):
        scores = f"chosen {case['chosen_score']:.3f}, rejected {case['rejected_score']:.3f}"
        lines += ["", f"=== {count}. {case['kind']}, row {case['row']}: {scores}"]
        for part in ("prompt", "chosen", "rejected"):
            lines += [f"--- {part}", case[part]]
    return "\n".join(lines) + "\n"


def draw_errors(results: Mapping[str, Any], pairs: ScoredPairs, path: Path) -> None:
    """Write the three figures of the page side by side as one PNG."""
    with styled():
        figure = new_figure(15, 4)
        axes = figure.subplots(1, 3)
        _draw_reliability(axes[0], results)
        _draw_margins(axes[1], pairs)
        _draw_length(axes[2], pairs)
        for axis, title in zip(axes, ("confidence", "margins", "length"), strict=True):
            axis.set_title(title)
        save_png(figure, path)


_SURE_CAPTION = "Share of right verdicts against the model's own probability; on the line the two agree."
_MARGIN_CAPTION = "Score of the preferred completion minus that of the other; below 0 it is wrong."
_LENGTH_CAPTION = (
    "Margin against the difference of length; points along a rising line mean that longer is better."
)


def _draw_reliability(axes: Any, results: Mapping[str, Any]) -> None:
    bins = results["calibration"]["bins"]
    x, y = [row["confidence"] for row in bins], [row["estimate"] for row in bins]
    errors = [[row["estimate"] - row["low"] for row in bins], [row["high"] - row["estimate"] for row in bins]]
    axes.plot([0.5, 1], [0.5, 1], color=GREY, linewidth=1)
    axes.errorbar(x, y, yerr=np.maximum(errors, 0), fmt="o", color=BLUE, markersize=4)
    axes.set_xlabel("how sure it is")
    axes.set_ylabel("share right")


def _draw_margins(axes: Any, pairs: ScoredPairs) -> None:
    low, high = np.quantile(pairs.margins, [0.005, 0.995])
    edges = np.linspace(min(low, 0), max(high, 0) or 1e-9, 41)
    parts = [pairs.margins[pairs.margins < 0], pairs.margins[pairs.margins >= 0]]
    axes.hist(parts, bins=edges.tolist(), stacked=True, color=[ORANGE, BLUE])
    axes.set_xlabel("margin")
    axes.set_ylabel("pairs")


def _draw_length(axes: Any, pairs: ScoredPairs) -> None:
    rows = np.linspace(0, len(pairs) - 1, min(len(pairs), 1000)).astype(int)
    axes.plot(pairs.length_difference[rows], pairs.margins[rows], ".", color=BLUE, markersize=3, alpha=0.5)
    axes.axhline(0, color=GREY, linewidth=1)
    axes.axvline(0, color=GREY, linewidth=1)
    axes.set_xlabel("characters by which the preferred one is longer")
    axes.set_ylabel("margin")


def _percent(share: Mapping[str, Any]) -> str:
    return f"{share['estimate']:.1%} [{share['low']:.1%}, {share['high']:.1%}]"


def _shares_table(shares: Mapping[str, Mapping[str, Any]], unit: str = "pairs") -> str:
    rows = [
        [
            text(label),
            f"{share['rows']:,}",
            f"{share['estimate']:.1%}",
            f"{share['low']:.1%}",
            f"{share['high']:.1%}",
        ]
        for label, share in shares.items()
    ]
    return table(["", unit, "share", "from", "to"], rows, numeric=True)


def _cases_html(cases: Sequence[Mapping[str, Any]], sides: tuple[str, str]) -> str:
    body = ""
    for kind in dict.fromkeys(case["kind"] for case in cases):
        cards = ""
        for case in (each for each in cases if each["kind"] == kind):
            cards += f'<div class="card">{verbatim(case["prompt"])}<div class="grid">'
            for side, name in zip(("chosen", "rejected"), sides, strict=True):
                heading = f"{name}, score {number(case[f'{side}_score'])}"
                cards += f"<div><h3>{text(heading)}</h3>{verbatim(case[side])}</div>"
            cards += "</div></div>\n"
        body += section(f"Errors to read: {kind}", cards)
    return body


def _figures(results: Mapping[str, Any], pairs: ScoredPairs) -> str:
    titles = (
        "Is it as often right as it is sure?",
        "How far apart are the scores?",
        "Does it follow length?",
    )
    captions = (_SURE_CAPTION, _MARGIN_CAPTION, _LENGTH_CAPTION)
    draws: tuple[Callable[[Any], None], ...] = (
        lambda axes: _draw_reliability(axes, results),
        lambda axes: _draw_margins(axes, pairs),
        lambda axes: _draw_length(axes, pairs),
    )
    panels = [make_panel(*each) for each in zip(titles, captions, draws, strict=True)]
    return figure_grid(panels)


def _best_of_n_table(rows: Sequence[Mapping[str, float]]) -> str:
    head = ["best of", "KL at most, nats", "this reward", "held-out reward", "prompts"]
    cells = [
        [
            f"{row['n']:.0f}",
            number(row["kl"], 2),
            number(row["proxy"]),
            number(row["gold"]),
            f"{row['prompts']:.0f}",
        ]
        for row in rows
    ]
    return table(head, cells, numeric=True)
