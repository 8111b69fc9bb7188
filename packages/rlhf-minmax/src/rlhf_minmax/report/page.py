"""The report of a MinMax run: one HTML file that needs nothing from outside."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhf_data import RunFolder, UserError, atomic_write_text, read_rows, settings_command
from rlhf_eval.html import breakable, findings_list, number, page, paragraphs, section, table, text, verbatim
from rlhf_minmax.config.run import MinMaxConfig
from rlhf_minmax.report import sections
from rlhf_minmax.report.exchanges import exchange_cards

_BLOCKS = (("before", "Start", "start"), ("plain", "Plain RLHF", "plain"), ("after", "MinMax", "minmax"))
_HEADLINE = (
    ("policy/accuracy", "True accuracy ↑"),
    ("policy/hack_rate", "Hack rate ↓"),
    ("policy/reward_score", "Reward-model score"),
    ("policy/parse_rate", "Answers that parse ↑"),
    ("monitor/verdict_balanced_accuracy", "Monitor: verdicts, balanced accuracy ↑"),
    ("monitor/evidence_valid_rate", "Monitor: evidence valid ↑"),
    ("monitor/parse_rate", "Monitor: critiques that parse ↑"),
    ("constraint/violation", "Truthfulness violation ↓"),
    ("dual/lambda", "Multiplier λ"),
    ("minmax/value", "Game value"),
)
_MEASURED_ON_REQUEST = (
    ("minmax/exploitability", "Exploitability ↓"),
    ("minmax/heldout_reward", "Held-out reward model's score ↑"),
    ("minmax/heldout_judge", "Held-out judge's score ↑"),
    ("minmax/hacking_gap", "Hacking gap ↓"),
)
"""Rows of the headline table that are shown where a block has them."""
_WORLDS = {
    "stories": "questions about short stories in which things move and gossip misleads",
    "sums": "questions about short stories with sums",
    "reports": "questions about where everybody in a short story is, with a report of several claims",
}
_JUDGED = {
    None: "a judge reads the critique and says how likely the answer is to be true",
    "monitor": "a validator checks whether the critique refutes it",
    "mixed": "a validator checks whether the critique refutes it, or a piece of evidence drawn at random",
    "random": "a validator checks whether evidence drawn at random refutes it",
    "all": "a validator checks whether any evidence refutes it",
}
"""How an answer is judged, by who chooses a validator's checks; None for another judge."""
_WHERE = {"before": "at the start", "plain": "after plain RLHF", "after": "after MinMax"}
_TILE_FACTS = (("policy/hack_rate", "hack rate"), ("policy/reward_score", "reward score"))
_BREAK_EVEN = (
    ("delta_reward", "Reward model's gap ΔR: the flaw's gain over the truth"),
    ("delta_judge_start", "Judge's gap ΔJ, critiques of the start"),
    ("delta_judge_truthful", "Judge's gap ΔJ, truthful critiques"),
    ("break_even_start", "Break-even w_judge, critiques of the start"),
    ("break_even_truthful", "Break-even w_judge, truthful critiques"),
    ("pays_start", "Share of stories where the truth scores higher, critiques of the start"),
    ("pays_truthful", "Share of stories where the truth scores higher, truthful critiques"),
    ("w_judge", "w_judge of this run"),
    ("w_reward", "w_reward of this run"),
)
_WALL = (
    ("demo", "Models", "#999999"),
    ("plain", "Plain RLHF", "#D55E00"),
    ("game", "MinMax game", "#0072B2"),
    ("evaluation", "Evaluation", "#009E73"),
)
_JUDGES = {"judge": "Judge", "held_out_judge": "Held-out judge"}
_USAGE = (
    ("requests", "Requests"),
    ("retries", "Retries"),
    ("cached", "Texts from the cache"),
    ("unread", "Texts without a readable reply"),
    ("prompt_tokens", "Prompt tokens"),
    ("completion_tokens", "Completion tokens"),
    ("cost", "Cost (currency of the prices)"),
)
_MAX_EXCHANGES = 8
_OPTIONS = {"seed": "--seed", "data.train_data": "--train-data", "data.eval_data": "--eval-data"}


def run_metrics(run_folder: RunFolder) -> list[dict[str, Any]]:
    """The metrics of a MinMax run, those of its plain baseline (the run in its folder `plain`) first."""
    return RunFolder(run_folder.path / "plain").read_metrics() + run_folder.read_metrics()


def write_minmax_report(run_folder: RunFolder, path: str | Path) -> None:
    """Write the report of a finished MinMax run as one HTML file.

    The file holds its style and its figures and loads nothing; all text of the run is escaped. It shows what
    the run's doctor found, the headline metrics, the figures of training, of both players, of every
    constraint and of the outcome, sample exchanges, the break-even check, the prompts as the models saw
    them, the device plan, the wall time, the checks of a validator, the usage of judges behind an API, the
    command that plays the same game, the config and the versions; a part the run did not record is named as
    missing.

    Args:
        run_folder: A run with results.json; its config.json, metrics.jsonl and samples.jsonl are used.
        path: The HTML file, replaced where it exists.

    Raises:
        UserError: the run has no results yet, or one of its files is damaged.
    """
    results = run_folder.read_results()
    if results is None:
        raise UserError(
            f"run folder {run_folder.path} has no results.json, so the run is not finished; "
            "finish it with --resume before reporting on it",
            code="unfinished_run",
        )
    if {"method", "job"} & run_folder.read_config().keys():  # which the game does not write
        raise UserError(
            f"{run_folder.path} is not a run of rlhf-train minmax; name the folder of a game",
            code="wrong_folder",
        )
    samples = _read_samples(run_folder.path / "samples.jsonl")
    metrics, config = run_metrics(run_folder), run_folder.read_config()
    usage, checks = results.get("api_usage"), sections.validator(metrics, results, config)
    parts = [
        _header(run_folder.path.name, results, config),
        section("What the doctor said", _findings(results.get("findings"))),
        section("Start, plain RLHF and MinMax", _headline(results)),
        section("Training", sections.training(metrics, results)),
        section("Both players, step by step", sections.players(metrics)),
        section("Constraints", sections.constraints(metrics, config)),
        section("How sound the outcome is", sections.outcome(metrics, results)),
        section("Sample exchanges", exchange_cards(samples, limit=_MAX_EXCHANGES)),
        section("Break-even check", _break_even(results.get("break_even") or {})),
        section("Prompts as the models saw them", _prompts(results.get("prompts") or [])),
        section("Device plan", _device_plan(results.get("device_plan") or [])),
        section("Wall time", _wall_time(results.get("wall_time") or {})),
        *([section("Checks by the validator", checks)] if checks else []),
        *([section("Judges behind an API", _api_usage(usage))] if usage else []),
        section("The same game again", _command(config)),
        section("Config", _config(config)),
        section("Versions", _versions(results.get("versions") or {})),
    ]
    atomic_write_text(path, page(f"MinMax RLHF: {run_folder.path.name}", "".join(parts)))


def _command(config: dict[str, Any]) -> str:
    return verbatim(settings_command("rlhf-train minmax", config, MinMaxConfig().to_dict(), _OPTIONS))


def _read_samples(path: Path) -> list[dict[str, Any]]:
    if not path.exists() or not path.stat().st_size:
        return []
    return [row for _, row in read_rows(path)]


def _header(name: str, results: dict[str, Any], config: dict[str, Any]) -> str:
    tiles = "".join(_tile(title, kind, results.get(block)) for block, title, kind in _BLOCKS)
    introduction = paragraphs(_opening(results, config))
    title = f'<h1>MinMax RLHF</h1>\n<p class="soft">Run {text(name)}</p>\n'
    return f'{title}{introduction}<div class="tiles">{tiles}</div>\n'


def _opening(results: dict[str, Any], config: dict[str, Any]) -> list[str]:
    """Introduction: task, method and outcome, for a reader who does not know the run."""
    data = config.get("data") or {}
    rows = (
        f"questions of {Path(data['train_data']).name}"
        if data.get("train_data")
        else _WORLDS[str(data.get("world", "stories"))]
    )
    judge = config.get("judge_model") or {}
    checks = judge.get("checks", "monitor") if judge.get("kind") == "validator" else None
    judged = _JUDGED[checks]
    frozen = (config.get("training") or {}).get("monitor_updates_per_policy") == 0
    second = (
        "has a second model beside it, which is not trained here"
        if frozen
        else "trains a second model beside it"
    )
    held = (
        ", while a multiplier λ grows as long as too many critiques are not true"
        if (config.get("constraint") or {}).get("rule") != "fixed"
        else ""
    )
    done = (
        f"A language model, the policy, answers {rows}. Its reward comes from a reward model, which can be "
        f"fooled. Plain RLHF is the policy trained on that reward alone. MinMax {second}: the "
        f"monitor criticises each answer, {judged}, and the policy is paid for that too{held}."
    )
    measured = (
        "True accuracy is the share of held-out questions that are answered correctly. The hack rate is the "
        "share answered with the bait, the wrong answer that the reward model likes, where there is one."
    )
    accuracies = [
        f"{(results.get(block) or {})['policy/accuracy']:.2f} {where}"
        for block, where in _WHERE.items()
        if isinstance((results.get(block) or {}).get("policy/accuracy"), int | float)
    ]
    parts = [done, *_labels(results.get("labels"))]
    if not accuracies:
        return [*parts, measured]
    return [*parts, f"{measured} True accuracy was {_listed(accuracies)}."]


def _labels(labels: dict[str, int] | None) -> list[str]:
    """How many training stories had their right answer, if not all, as a paragraph."""
    if labels is None or labels["labelled"] == labels["stories"]:
        return []
    count, labelled = labels["stories"], labels["labelled"]
    return [
        f"The right answer was known of {labelled:,} of the {count:,} training stories "
        f"({labelled / count:.2g} of them). The policy plays all; verdicts of the monitor are checked on the "
        "known ones alone."
    ]


def _listed(parts: Sequence[str]) -> str:
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def _tile(title: str, kind: str, block: dict[str, Any] | None) -> str:
    if block is None:
        return f'<div class="tile {kind}">{title}<b>–</b><small>not run</small></div>'
    facts = [
        f"<small>{label} {number(block.get(key), 2)}</small>" for key, label in _TILE_FACTS if key in block
    ]
    accuracy = number(block.get("policy/accuracy"), 2)
    return (
        f'<div class="tile {kind}">{title}<b>{accuracy}</b><small>true accuracy</small>{"".join(facts)}</div>'
    )


def _findings(findings: Sequence[dict[str, Any]] | None) -> str:
    if findings is None:
        return '<p class="soft">The run recorded no findings.</p>'
    if not findings:
        return "<p>Nothing: no signal was dead and no multiplier stuck.</p>"
    return findings_list(
        f"<b>{_when(each.get('step', '–'))}</b> {text(each.get('text', ''))}" for each in findings
    )


def _when(step: Any) -> str:
    return "Before training" if step == 0 else f"Step {text(step)}"


def _headline(results: dict[str, Any]) -> str:
    blocks = [results.get(block) or {} for block, _, _ in _BLOCKS]
    measured = [row for row in _MEASURED_ON_REQUEST if any(block.get(row[0]) is not None for block in blocks)]
    rows = [
        [
            f'{text(label)}<span class="key">{breakable(key)}</span>',
            *(number(block.get(key)) for block in blocks),
        ]
        for key, label in (*_HEADLINE, *measured)
    ]
    skipped = "" if results.get("plain") else " Plain RLHF was not run."
    note = (
        "Greedy answers on held-out rows. The reward model can be fooled, so its score going up is no "
        f"success and going down not a failure: read the true accuracy.{skipped} – marks what does not apply."
    )
    return (
        table(["", *(title for _, title, _ in _BLOCKS)], rows, numeric=True) + f'<p class="soft">{note}</p>'
    )


def _break_even(check: dict[str, Any]) -> str:
    if not check:
        return '<p class="soft">Not measured on this run.</p>'
    rows = [[text(label), number(check.get(key))] for key, label in _BREAK_EVEN]
    return (
        "<p>On a story the truth scores higher only if w_judge · ΔJ &gt; w_reward · ΔR there. Gaps are "
        "measured on training rows before the game, in standard deviations of the scores; gaps and "
        "break-evens are means.</p>"
        f'<p class="note">{text(check.get("advice", ""))}</p>'
        + table(["", "Value"], rows, numeric=True, narrow=True)
    )


def _prompts(prompts: Sequence[dict[str, Any]]) -> str:
    if not prompts:
        return '<p class="soft">The run recorded no prompts.</p>'
    return "<p>Decoded from the token ids, special tokens included.</p>" + "".join(
        f"<h3>{text(str(prompt.get('role', '')).capitalize())}</h3>{verbatim(prompt.get('text', ''))}"
        for prompt in prompts
    )


def _device_plan(plan: Sequence[dict[str, Any]]) -> str:
    rows = [[text(row.get(key, "–")) for key in ("role", "device", "dtype", "reason")] for row in plan]
    return table(["Role", "Device", "Dtype", "Reason"], rows)


def _wall_time(seconds: dict[str, Any]) -> str:
    total = seconds.get("total") or 0.0
    spans, rows = [], []
    for key, label, color in _WALL:
        value = seconds.get(key)
        share = 100 * value / total if value and total else 0.0
        spans.append(f'<span style="width:{share:.2f}%;background:{color}"></span>')
        cells = [number(value, 1), f"{share:.0f}%" if value else "–"]
        rows.append([f'<span class="swatch" style="background:{color}"></span>{text(label)}', *cells])
    rows.append(["<b>Total</b>", number(seconds.get("total"), 1), ""])
    return f'<div class="bar">{"".join(spans)}</div>' + table(
        ["", "Seconds", "Share"], rows, numeric=True, narrow=True
    )


def _api_usage(usage: dict[str, dict[str, Any]]) -> str:
    titles = [title for _, title in _USAGE]
    rows = [
        [text(_JUDGES.get(judge, judge)), *(_count(counts.get(key)) for key, _ in _USAGE)]
        for judge, counts in usage.items()
    ]
    return "<p>Since the run started or was last resumed, in all processes.</p>" + table(
        ["", *titles], rows, numeric=True, narrow=True
    )


def _count(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else number(value, 4)


def _config(config: dict[str, Any]) -> str:
    pretty = json.dumps(config, indent=2, ensure_ascii=False)
    return f"<details><summary>The resolved config of this run</summary>{verbatim(pretty)}</details>"


def _versions(versions: dict[str, Any]) -> str:
    return table(
        ["Package", "Version"],
        [[text(name), text(version)] for name, version in versions.items()],
        narrow=True,
    )
