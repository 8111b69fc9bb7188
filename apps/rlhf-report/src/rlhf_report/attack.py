"""From the options of `rlhf-report attack` to its report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from rlhf_data import (
    RunFolder,
    UserError,
    as_completion,
    atomic_write_text,
    load_records,
    model_folder,
)
from rlhf_eval.attacks import Rated, attack, attack_page, attack_sentence
from rlhf_eval.attacks.attack import check_items, check_transforms
from rlhf_eval.capability import SUITES, Item, read_suite
from rlhf_eval.scoring import as_text, load_scorer
from rlhf_report.options import check_policy, new_run, progress


def run_attack(given: Mapping[str, Any]) -> None:
    """Attack, write the report and print it."""
    if (given["reward"] is None) != (given["right_from"] is None):
        raise UserError(
            "--reward measures answers and --right-from says which are right; give both, or neither",
            code="conflicting_options",
        )
    check_transforms(given["transforms"])
    model = model_folder(given["model"])
    items, columns = _prompts(given["data"]) if given["reward"] else (_suite(given["data"]), {})
    check_items(items)
    check_policy(model)
    rated = _rated(given["reward"], given["right_from"], columns) if given["reward"] else None
    with new_run(given["output_dir"], "attack") as run:
        _attack(given, run, model, items, rated)


def _attack(
    given: Mapping[str, Any], run: RunFolder, model: str, items: Sequence[Item], rated: Rated | None
) -> None:
    from rlhf_eval.evaluation import load_policy

    options = {name: given[name] for name in ("max_new_tokens", "seed")}
    policy = load_policy(model, given["dtype"])
    report = attack(policy, items, given["transforms"], rated=rated, progress=progress, **options)
    results = report.to_dict()
    found = results["transforms"]
    right = f"from a reward of {given['right_from']:g} on ({given['reward']})" if rated else "as the rows say"
    names = {"model": given["model"], "data": Path(given["data"]).name, "right": right}
    run.append_lines("attacks.jsonl", [dict(row) for row in report.rows])
    atomic_write_text(run.path / "attack.html", attack_page(found, report.rows, **names))
    run.write_results({**names, **options, **results})
    for each in found:
        click.echo(attack_sentence(each))
    for count, what in (
        (report.repeated, "rows came twice, and count once"),
        (report.left_out, "rows do not fit the model's context, and are left out"),
    ):
        if count:
            click.echo(f"{count:,} {what}")
    click.echo(str(run.path / "attack.html"))


def _suite(data: str) -> list[Item]:
    """The items of a file, or of a built-in suite."""
    if data in SUITES and not Path(data).exists():
        return SUITES[data](200)
    try:
        return read_suite(data)
    except UserError as error:
        if error.code != "missing_value":
            raise
        raise UserError(
            f"{error}; or let a reward say what is right (--reward)", code=error.code, **error.fields
        ) from error


def _prompts(data: str) -> tuple[list[Item], dict[str, Mapping[str, Any]]]:
    """Prompts of any rows, and by prompt the row's other columns, which rewards read."""
    items, columns = [], {}
    for record in load_records(data, "prompt").records:
        if not isinstance(record.prompt, str) and len(record.prompt) > 1:
            raise UserError(
                f"{record.where}: the prompt has several turns, and none is attacked; give texts",
                code="invalid_value",
                key="prompt",
            )
        prompt = as_text(record.prompt)
        items.append(Item(prompt, "written"))
        columns[prompt] = record.columns
    return items, columns


def _rated(spec: str, least: float, columns: Mapping[str, Mapping[str, Any]]) -> Rated:
    scorer = load_scorer(spec)
    names = {name for row in columns.values() for name in row}

    def reward(prompts: Sequence[str], completions: Sequence[str]) -> Any:
        given = {name: [columns[prompt].get(name) for prompt in prompts] for name in sorted(names)}
        if not scorer.reads_chat:
            return scorer(prompts, completions, columns=given).mean(0)
        asked = [[{"role": "user", "content": prompt}] for prompt in prompts]  # as the policy is asked
        said = [as_completion(*each) for each in zip(asked, completions, strict=True)]
        return scorer(asked, said, columns=given).mean(0)

    return Rated(reward, least)
