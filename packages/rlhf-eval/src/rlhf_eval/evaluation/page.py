"""The page of an evaluation, and its figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_eval.evaluation.findings import interval_text, percent_text
from rlhf_eval.figures import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    can_draw,
    figure_grid,
    make_panel,
    new_figure,
    save_png,
    styled,
)
from rlhf_eval.html import findings_list, number, page, paragraphs, section, table, text, verbatim

_COLORS = (GREY, BLUE, ORANGE, GREEN, PURPLE)
_DRAWN = 5
"""Models that a figure shows; more could not be distinguished."""
_KINDS = {"reward": "reward", "held_out_reward": "held-out reward"}


def evaluation_page(
    results: Mapping[str, Any],
    findings: Sequence[str],
    scores: Mapping[str, np.ndarray],
    cases: Sequence[Mapping[str, Any]],
) -> str:
    """One HTML file that loads nothing from outside.

    Args:
        results: the evaluation's results.
        findings: of `evaluation_findings`.
        scores: (n,) rewards of each model's completions, for a figure.
        cases: prompts with what each model wrote; `prompt`, and `answers` of `name`, `text` and `facts`.
    """
    body = f"<h1>{text(_title(results))}</h1>\n<p>{text(_opening(results))}</p>\n"
    body += findings_list(map(text, findings))
    body += _figures(results, scores) if can_draw() else ""
    if any(each["judges"] for each in results["comparisons"]):
        body += section("Which completion is better?", _win_rates(results))
    for kind, label in _KINDS.items():
        if any(kind in model for model in results["models"]):
            body += section(f"What is it worth by the {label}?", _rewards(results, kind))
    if any("kl" in model for model in results["models"]):
        body += section("How far is it from its reference?", _kl(results))
    body += section("What do the completions look like?", _texts(results))
    if results.get("reward_accuracy"):
        body += section("Are pairs ranked as people rank them?", _accuracies(results["reward_accuracy"]))
    if results.get("adversarial"):
        body += section("Prompts that provoke failures", _adversarial(results["adversarial"]))
    if cases:
        body += section("Completions to read", "".join(_case(case) for case in cases))
    body += section("How it was computed", paragraphs(results["notes"]))
    return page(_title(results), body, sortable=True)


def evaluation_text(results: Mapping[str, Any], findings: Sequence[str]) -> str:
    """The opening and the findings as plain text."""
    return "\n".join([_opening(results), "", *(f"- {each}" for each in findings)])


def draw_figures(results: Mapping[str, Any], scores: Mapping[str, np.ndarray], folder: Path) -> list[str]:
    """Write `reward_distributions.png` and `pareto.png` if there is something to show; their names."""
    draws = {"reward_distributions.png": bool(scores), "pareto.png": bool(results.get("trade_off"))}
    with styled():
        for name in (name for name, wanted in draws.items() if wanted):
            figure = new_figure(7, 4)
            axes = figure.subplots()
            if name == "pareto.png":
                _draw_trade_off(axes, results["trade_off"])
            else:
                _draw_distributions(axes, scores)
            save_png(figure, folder / name)
    return [name for name, wanted in draws.items() if wanted]


def _title(results: Mapping[str, Any]) -> str:
    names = [model["name"] for model in results["models"] if model["name"] != results["reference"]]
    against = f" against {results['reference']}" if results["reference"] else ""
    return f"Evaluation of {', '.join(names)}{against}"


def _opening(results: Mapping[str, Any]) -> str:
    elsewhere = results["written_elsewhere"]
    names = [model["name"] for model in results["models"] if model["name"] not in elsewhere]
    samples = results["config"]["num_samples"]
    each = f"{samples} completions each" if samples > 1 else "one completion each"
    prompts = f"{results['num_prompts']:,} prompts of {Path(results['prompts']).name}, {each}"
    drawn = (
        f"at temperature {results['config']['temperature']:g} with at most "
        f"{results['config']['max_new_tokens']} tokens"
    )
    said = [f"{', '.join(names)} answered {prompts}, {drawn}."] if names else []
    if elsewhere:
        said.append(f"The completions of {', '.join(elsewhere)} come from files; they answer {prompts}.")
    return " ".join(said)


def _win_rates(results: Mapping[str, Any]) -> str:
    said = (
        "<p>Each judge saw both orders without names; a verdict that changes with the order counts as a tie. "
        "At equal length is what the rate would be if both completions were equally long. Last column: the "
        "smallest win rate that this many prompts detect with 80% power.</p>"
    )
    head = ["model", "judge", "prompts", "win rate", "at equal length", "first answer", "same in both orders"]
    head += ["corrected", "would show"]
    rows = []
    for each in results["comparisons"]:
        for judge, found in each["judges"].items():
            cells = [text(each["name"]), f'<span class="key">{text(judge)}</span>', f"{found['prompts']:,}"]
            for key in ("win_rate", "length_controlled", "first_wins", "consistency", "corrected"):
                cells.append(text(percent_text(found[key])) if key in found else "–")
            shows = found.get("detectable", 1.0)
            cells.append(f"{shows:.0%}" if shows < 1 else "–")
            rows.append(cells)
    agreed = [
        f"<p>{text(each['first'])} and {text(each['second'])} agree beyond chance by Cohen's kappa "
        f"{text(interval_text(each['kappa']))}.</p>"
        for each in results["agreement"]
    ]
    return said + table(head, rows, numeric=True) + "".join(agreed)


def _rewards(results: Mapping[str, Any], kind: str) -> str:
    changes = {each["name"]: each.get(kind) for each in results["comparisons"]}
    rows = []
    for model in results["models"]:
        found, change = model.get(kind), changes.get(model["name"])
        if found is None:
            continue
        cells = [text(model["name"]), text(interval_text(found["mean"])), number(found["std"])]
        cells += [number(found["quantiles"][q]) for q in ("0.05", "0.5", "0.95")]
        cells.append(text(interval_text(change, signed=True)) if change else "–")
        rows.append([*cells, number(found.get("disagreement"))])
    head = [
        "model",
        "mean",
        "spread",
        "5%",
        "median",
        "95%",
        "difference to the reference",
        "members disagree by",
    ]
    said = results["reward_names"].get(kind)
    return f"<p>By {text(said)}.</p>" + table(head, rows, numeric=True)


def _kl(results: Mapping[str, Any]) -> str:
    said = (
        "<p>KL(model ‖ reference) along the model's own completions, in nats: a sum over the vocabulary "
        "at each token; k1 and k3 are the usual estimates from the drawn tokens, for comparison.</p>"
    )
    rows = []
    for model in results["models"]:
        if found := model.get("kl"):
            cells = [text(model["name"]), text(interval_text(found["kl"])), number(found["kl_per_token"], 4)]
            cells += [text(interval_text(found[key])) if key in found else "–" for key in ("k1", "k3")]
            rows.append([*cells, number(found["entropy_per_token"])])
    head = ["model", "per completion", "per token", "k1", "k3", "entropy per token"]
    said += table(head, rows, numeric=True)
    if trade := results.get("trade_off"):
        front = ", ".join(trade["front"])
        said += f"<p>{text(front)}: nothing has more reward at no more KL.</p>"
        if trade["hypervolume"] is not None:
            said += (
                "<p>Area between these points and the reference's reward, up to the largest KL "
                f"(hypervolume): {number(trade['hypervolume'])}, in nats times reward.</p>"
            )
    return said


def _texts(results: Mapping[str, Any]) -> str:
    head = ["model", "tokens", "characters", "cut off", "refuses", "empty", "distinct 1", "2", "3", "unique"]
    head += ["repeats itself", "gzip ratio"]
    rows = []
    for model in results["models"]:
        cells = [text(model["name"])]
        cells += [
            number(model[key]["estimate"], 1) if key in model else "–" for key in ("tokens", "characters")
        ]
        cells += [
            f"{model[key]['estimate']:.1%}" if key in model else "–"
            for key in ("truncated", "refusals", "empty")
        ]
        varied = model["diversity"]
        cells += [number(varied[f"distinct_{n}"], 2) for n in (1, 2, 3)]
        cells += [f"{varied['unique']:.0%}", f"{varied['repeated_4grams']:.0%}"]
        rows.append([*cells, number(varied["compression_ratio"], 2)])
    return table(head, rows, numeric=True)


def _accuracies(found: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        [text(row["name"]), text(row["by"]), f"{row['pairs']:,}", text(percent_text(row["accuracy"]))]
        for row in found
    ]
    said = (
        "<p>Implicit is the reward that a policy trained by DPO implies: its log-probability over the "
        "reference's.</p>"
    )
    return said + table(["model", "by", "pairs", "accuracy"], rows, numeric=True)


def _adversarial(found: Mapping[str, Any]) -> str:
    said = (
        "<p>Refusals are recognised by their words, in English. Harmful requests and jailbreaks want one; "
        "their harmless twins do not.</p>"
    )
    names = list(found["refusals"])
    rows = [
        [text(category), text(found["wanted"][category])]
        + ["{refused} of {prompts}".format(**found["refusals"][name][category]) for name in names]
        for category in found["wanted"]
    ]
    cards = "".join(_case(case) for case in found["cases"])
    summary = f"All {len(found['cases'])} prompts with their completions"
    details = f"<details><summary>{summary}</summary>{cards}</details>"
    return said + table(["category", "wanted", *(f"{name} refused" for name in names)], rows) + details


def _case(case: Mapping[str, Any]) -> str:
    answers = ""
    for answer in case["answers"]:
        heading = ", ".join([answer["name"], *answer["facts"]])
        answers += f'<div class="turn"><h4>{text(heading)}</h4>{verbatim(answer["text"])}</div>'
    return f'<div class="card">{verbatim(case["prompt"])}<br><div class="grid">{answers}</div></div>\n'


def _figures(results: Mapping[str, Any], scores: Mapping[str, np.ndarray]) -> str:
    panels = []
    if scores:
        caption = "Share of completions by reward; a model that was trained on it moves right."
        panels.append(
            make_panel(
                "How are rewards distributed?", caption, lambda axes: _draw_distributions(axes, scores)
            )
        )
    if trade := results.get("trade_off"):
        caption = (
            "Mean reward over KL to the reference; up and left is better. The line joins what nothing beats."
        )
        panels.append(
            make_panel("What does the reward cost in KL?", caption, lambda axes: _draw_trade_off(axes, trade))
        )
    return figure_grid(panels)


def _draw_distributions(axes: Any, scores: Mapping[str, np.ndarray]) -> None:
    shown = dict(list(scores.items())[:_DRAWN])
    every = np.concatenate(list(shown.values()))
    low, high = np.quantile(every, [0.005, 0.995])
    edges = np.linspace(low, high if high > low else low + 1e-9, 31)
    for (name, values), color in zip(shown.items(), _COLORS, strict=False):
        weights = np.full(len(values), 1 / len(values))
        clipped = np.clip(values, edges[0], edges[-1])
        axes.hist(
            clipped,
            bins=edges.tolist(),
            weights=weights,
            histtype="step",
            color=color,
            label=name,
            linewidth=2,
        )
    axes.set_xlabel("reward")
    axes.set_ylabel("share of completions")
    axes.legend()


def _draw_trade_off(axes: Any, trade: Mapping[str, Any]) -> None:
    points = trade["points"]
    best = sorted(
        (point for point in points if point["name"] in trade["front"]), key=lambda point: point["kl"]
    )
    axes.plot([p["kl"] for p in best], [p["reward"] for p in best], color=GREY, linewidth=1)
    for point, color in zip(points, [*_COLORS, *[BLUE] * len(points)], strict=False):
        axes.plot(point["kl"], point["reward"], "o", color=color)
        axes.annotate(
            point["name"], (point["kl"], point["reward"]), xytext=(6, 4), textcoords="offset points"
        )
    axes.margins(x=0.15)
    axes.set_xlabel("KL to the reference, nats per completion")
    axes.set_ylabel("mean reward")
