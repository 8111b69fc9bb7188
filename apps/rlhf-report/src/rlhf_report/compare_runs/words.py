"""Conclusions of a comparison of runs, as sentences and as a text file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from rlhf_eval.run_comparison import FRACTION, HOLD, WINDOW
from rlhf_report.compare.words import NAMED, better, columns, further, listed, no_ranking, not_decided, p_text
from rlhf_report.compare_runs.read import Run, is_loss

Table = tuple[str, list[tuple[str, str, list[str]]]]
"""Title, and rows of name, explanation and a cell for each group."""

_NO_ORDER = (
    "Losses of different methods are different quantities: no ranking follows from them. Name a metric that "
    "all runs log with --metric, or compare what the models write with rlhf-report evaluate."
)
_MODEL_AND_DATA = ("method", "model_name_or_path", "train_data", "eval_data", "reward")
_FEW = 5


def amount(value: float | None) -> str:
    """A number with four significant digits, thousands apart; – for what is not known."""
    if value is None:
        return "–"
    shown = f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:,.4g}"
    return shown.replace("-", "−")


def opening(found: dict[str, Any]) -> str:
    """One sentence: the runs and the measure; of `rlhf-train compare` also the prompts."""
    names = [f"{group['name']} ({_count(group['runs'], 'run')})" for group in found["groups"]]
    less = ", less is better" if found["lower_is_better"] and found["comparable"] else ""
    plan, metric = found["plan"], found["metric"]
    trained = "" if plan is None else f", each trained {_trained(plan)}"
    measured = "" if plan is None or not metric.startswith(_MEASURED) else f": {_measured(plan, metric)}"
    return f"{listed(names)}{trained}, compared by {metric} at the end of training{less}{measured}."


_MEASURED = "eval_policy/"


def _trained(plan: Mapping[str, Any]) -> str:
    rows = [Path(plan[key]).name for key in ("train_data", "preference_data") if plan[key]]
    budget, unit = plan["budget"], plan["unit"]
    amount_of = f"{budget:,.10g} {unit[:-1] if budget == 1 else unit}"
    return f"from {Path(plan['model']).name} on {listed(rows)} with a budget of {amount_of}"


def _measured(plan: Mapping[str, Any], metric: str) -> str:
    """The units that a measurement of `rlhf-train compare` averages."""
    kind = metric.removeprefix(_MEASURED)
    sources = {"reward": plan["reward"][0], "held_out_reward": plan["held_out_reward"]}
    by = f"reward ({Path(sources[kind]).name})" if kind in sources else kind
    return f"the mean {by} of one completion of each of {_prompts(plan)}"


def _prompts(plan: Mapping[str, Any]) -> str:
    return f"{plan['prompts']['measured']} held-out prompts of {Path(plan['eval_data']).name}"


def verdict(found: dict[str, Any]) -> list[str]:
    """The outcome."""
    single = [group["name"] for group in found["groups"] if group["measures"]["final"]["known"] == 1]
    said = [*_pairs_said(found)] if found["comparable"] else [_NO_ORDER]
    if not said:
        said.append(_order(found))
    if single and found["comparable"]:
        ranked = [group for group in found["groups"] if group["measures"]["final"]["known"]]
        whose = "One seed each" if len(single) == len(ranked) else f"One seed, as of {listed(single)},"
        said.append(f"{whose} says nothing about luck: another seed of the same method may end elsewhere.")
    lacking = [run["name"] for run in found["runs"] if run["measures"]["final"] is None]
    if lacking:
        said.append(f"Without {found['metric']} in the log: {listed(lacking)}.")
    unfinished = [run for run in found["runs"] if run["unfinished"]]
    if unfinished:
        where = [f"{run['name']} ({_reached(run)})" for run in unfinished]
        said.append(f"Unfinished, and read as far as they went: {listed(where)}.")
    return said


_EQUAL = 0.9
"""Of the most tokens; groups that trained on fewer did not train equally long."""


def cautions(found: dict[str, Any], runs: Sequence[Run]) -> list[str]:
    """Caveats about these runs."""
    said = []
    if found["plan"] is not None and (shared := found["plan"]["prompts"]["trained_on"]):
        said.append(
            f"Of the {_prompts(found['plan'])}, {shared} are also trained on, so what is measured on them is "
            "too good: compare on others."
        )
    groups = {group["name"]: [run for run in runs if run.group == group["name"]] for group in found["groups"]}
    asked = found["plan"]["unit"] if found["plan"] is not None else None
    if (unequal := None if asked == "seconds" else _unequal(groups)) is not None:
        unit, counts = unequal
        shown = "; ".join(f"{name} {count:,}" for name, count in counts.items())
        instead = ": compare at equal tokens or seconds" * (asked != "tokens")
        said.append(f"They did not train equally long ({unit}: {shown}){instead}.")
    for name, own in groups.items():
        if differing := _differing(own):
            said.append(
                f"The runs of {name} differ in more than the seed ({_shortened(differing)}): if they "
                "are not seeds of one experiment, name them apart with NAME=RUN."
            )
        seeds = [run.log.config["seed"] for run in own if "seed" in run.log.config]
        if len(set(seeds)) < len(seeds):
            said.append(f"Runs of {name} have the same seed: their spread says too little about luck.")
    if found["comparable"] and is_loss(found["metric"]) and None in {run.method for run in runs}:
        said.append(
            "Not all logs say their method: if they differ, so do their losses, and no ranking follows."
        )
    few = [group["name"] for group in found["groups"] if 1 < group["measures"]["final"]["known"] < _FEW]
    if few:
        allowed = "; those of the differences allow for it" * bool(found["pairs"])
        said.append(
            f"Fewer than {_FEW} seeds ({listed(few)}): intervals of the interquartile means are too "
            f"narrow{allowed}."
        )
    for run in found["runs"]:
        if run["rows_left_out"]:
            said.append(
                f"Of {run['name']}'s log about {run['rows_left_out']:,} rows were left out: it is long."
            )
    return said


def definitions(found: dict[str, Any]) -> list[str]:
    """How the numbers came about."""
    metric, held_out = found["metric"], found["metric"] in found["held_out"]
    curve = "is not smoothed" if held_out else f"is a running mean over {WINDOW} logged steps"
    said = [
        f"The end is the mean over the last tenth of a run's values of {metric}. Everywhere else {metric} "
        f"{curve}.",
        _converged(found, "two evaluations in a row" if held_out else f"{HOLD} logged steps in a row"),
        f"Variances are of what a running median over {WINDOW} logged steps leaves, over the second half of "
        "a run: what is learned is taken out, noise and jumps stay. Losses of different methods have "
        "different scales. Oscillation is the distance that the curve travels for each unit it gets "
        "ahead; 1 is straight.",
        "Seconds are those of the steps, without evaluation; tokens are what each log counts as trained on.",
    ]
    if found["matched_kl"] is not None:
        said.append(
            f"At equal KL is the value of {metric} where {found['kl']} first reaches "
            f"{amount(found['matched_kl'])}, the most that all runs reached. Between logged steps it lies on "
            "a straight line, which begins with a KL of 0 where the start was measured."
        )
    if found["plan"] is not None:
        said.append(
            f"All policies complete the same {_prompts(found['plan'])}, with the same random numbers. "
            "Intervals are over seeds of the training; other prompts, or other completions of these, would "
            "move all numbers, and no interval has that in it."
        )
    if found["pairs"]:
        said.append(
            f"Of several seeds: interquartile means with {100 * found['level']:g}% intervals by the "
            "stratified bootstrap over seeds (Agarwal et al. 2021, rliable). Differences are of means, by "
            "the studentised bootstrap over seeds, or Welch's t where the seeds of one are equal; p-values "
            "are corrected for the number of pairs by Holm's method, and decide. The interval of a "
            "probability of improvement is too sure of itself with few seeds."
        )
    return said


def _converged(found: dict[str, Any], hold: str) -> str:
    if found["threshold"] is None and not found["comparable"]:
        return "Without one quantity for all runs there is no threshold to reach, and nothing at equal KL."
    if found["threshold"] is None:
        return "The convergence threshold is undefined: no run with a measured start improved on it."
    side = "below" if found["lower_is_better"] else "above"
    origin = f"the start plus {FRACTION:g} of the way to the best end of a run"
    return (
        f"A run has converged at the first step from which {found['metric']} stays at or {side} "
        f"{amount(found['threshold'])} for {hold}; that value is "
        f"{'the one given' if found['threshold_given'] else origin}."
    )


def tables(found: dict[str, Any]) -> list[Table]:
    """Every measure of every group: title, and rows of name, explanation and cells."""
    metric, at = found["metric"], found["matched_kl"]
    kl = "" if at is None else f"at {found['kl']} {amount(at)}"
    there = "" if found["threshold"] is None else f" to {metric} {amount(found['threshold'])}"
    layout = {
        "Quality": [
            ("final", f"{metric} at the end", ""),
            ("gain", "better than at the start by", ""),
            ("at_matched_kl", f"{metric} at equal KL", kl),
            ("final_kl", "KL at the end", found["kl"] or ""),
            ("entropy", "entropy at the end", "nats per token"),
        ],
        "Convergence": [
            (f"convergence_{unit}", f"{name}{there}", "") for unit, name in
            (("step", "steps"), ("tokens", "tokens"), ("seconds", "seconds"))
        ],
        "Stability": [
            ("loss_variance", "variance of the loss", "detrended"),
            ("metric_variance", f"variance of {metric}", "detrended"),
            ("oscillation", f"oscillation of {metric}", "1 is straight"),
        ],
        "Efficiency": [
            ("steps", "steps", ""),
            ("tokens", "tokens", ""),
            ("step_time", "seconds a step", "median"),
            ("tokens_per_second", "tokens a second", ""),
            ("samples_per_second", "samples a second", "median"),
            ("peak_memory_gb", "peak memory, GB", ""),
            ("wall_time", "whole time, seconds", "with evaluation"),
        ],
        "Held out, at the last evaluation": [
            (name, name, "") for name in found["held_out"] if name != found["kl"]
        ],
    }  # fmt: skip
    made = []
    for title, rows in layout.items():
        kept = [row for row in rows if row[0] != "metric_variance" or metric != "loss"]
        if kept:
            made.append((title, [(name, hint, _cells(found, key)) for key, name, hint in kept]))
    return made


def text_report(found: dict[str, Any], said: Sequence[str]) -> str:
    """The whole as plain text."""
    lines = [opening(found), *verdict(found), *said]
    names = [group["name"] for group in found["groups"]]
    for title, rows in tables(found):
        body = [(f"{name} ({hint})" if hint else name, *cells) for name, hint, cells in rows]
        lines += ["", *columns([(title, *names), *body])]
    if found["pairs"]:
        head = ("pair", "difference", "interval", "p (Holm)", "P(improvement)")
        lines += ["", *columns([head, *(pair_cells(pair) for pair in found["pairs"])])]
    return "\n".join([*lines, "", *definitions(found)]) + "\n"


def pair_cells(pair: dict[str, Any]) -> tuple[str, ...]:
    """A pair as cells of a table."""
    difference, better = pair["difference"], pair["probability_of_improvement"]
    return (
        f"{pair['first']} − {pair['second']}",
        amount(difference["estimate"]),
        _range(difference) or "–",
        p_text(pair["holm"]),
        f"{amount(better['estimate'])} {_range(better)}",
    )


def _cells(found: dict[str, Any], key: str) -> list[str]:
    cells = []
    for group in found["groups"]:
        value = group["measures"].get(key)
        arrives = key.startswith("convergence_") and found["threshold"] is not None
        if value is None or value["value"] is None:
            never = arrives and key.endswith("_step") and group["measures"]["final"]["known"]
            cells.append("not reached" if never else "–")
            continue
        part = f" ({value['known']} of {value['runs']})" if value["known"] < value["runs"] else ""
        spread = value["low"] is not None and value["low"] < value["high"]
        interval = f" {_range(value)}" if spread else ""
        cells.append(amount(value["value"]) + interval + part)
    return cells


def _pairs_said(found: dict[str, Any]) -> list[str]:
    pairs, alpha = found["pairs"], 1 - found["level"]
    alike = [pair for pair in pairs if pair["difference"]["low"] is None]
    judged = [pair for pair in pairs if pair not in alike]
    decisive = [pair for pair in judged if pair["holm"] < alpha]
    said = [
        better(found, pair, f"{amount(pair['difference']['estimate'])} {_range(pair['difference'])}")
        for pair in decisive[:NAMED]
    ]
    said += further(decisive)
    if judged and not decisive:
        said.append(no_ranking(judged))
    elif len(decisive) < len(judged):
        said.append(not_decided([pair for pair in judged if pair not in decisive]))
    for pair in alike[:NAMED]:
        by = amount(pair["difference"]["estimate"])
        names = f"{pair['first']} and {pair['second']}"
        said.append(f"{names} differ by {by}, and the seeds of each not at all: no spread to judge it by.")
    return said


def _order(found: dict[str, Any]) -> str:
    ends = [
        f"{group['name']} {amount(final)}"
        for group in found["groups"]
        if (final := group["measures"]["final"]["value"]) is not None
    ]
    first = "the lowest" if found["lower_is_better"] else "the highest"
    return f"{found['metric']} at the end{f', {first} first' * (len(ends) > 1)}: {', '.join(ends)}."


def _reached(run: dict[str, Any]) -> str:
    of = f" of {run['total_steps']:,}" if run["total_steps"] else ""
    return f"step {run['step']:,}{of}" if run["step"] else "no step yet"


def _differing(runs: Sequence[Run]) -> list[str]:
    """Settings in which the runs of a group differ, model and data first."""
    known = [run.settings for run in runs if run.settings]
    found = {key for a, b in combinations(known, 2) for key in a.keys() | b if a.get(key) != b.get(key)}
    return [*(key for key in _MODEL_AND_DATA if key in found), *sorted(found - set(_MODEL_AND_DATA))]


def _shortened(names: Sequence[str]) -> str:
    more = len(names) - NAMED
    return f"{', '.join(names[:NAMED])}{f' and {more} more' if more > 0 else ''}"


def _range(interval: dict[str, Any]) -> str:
    return "" if interval["low"] is None else f"[{amount(interval['low'])}, {amount(interval['high'])}]"


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'s' * (number != 1)}"


def _unequal(groups: Mapping[str, Sequence[Run]]) -> tuple[str, dict[str, int]] | None:
    """By what the groups trained longer or shorter, and how long; tokens count where every run logs them."""
    tokens = {
        name: max(
            (int(run.series("num_tokens")[-1][1]) for run in own if run.series("num_tokens")), default=0
        )
        for name, own in groups.items()
    }
    if all(tokens.values()):
        return ("tokens", tokens) if min(tokens.values()) < _EQUAL * max(tokens.values()) else None
    steps = {
        name: max((row["step"] for run in own for row in run.log.rows[-1:]), default=0)
        for name, own in groups.items()
    }
    return ("steps", steps) if len(set(steps.values())) > 1 else None
