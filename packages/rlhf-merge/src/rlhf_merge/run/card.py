"""The model card: the exact recipe, and how much of each model went into the result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from rlhf_merge.config.files import dump_yaml
from rlhf_merge.methods.catalog import METHODS
from rlhf_merge.report_text import short_names

if TYPE_CHECKING:
    from rlhf_merge.run.plan import MergePlan

RECIPE_FILE = "merge_config.yaml"
"""The config in the result's folder: `rlhf-merge run merge_config.yaml OUT` makes the same tensors again."""


def write_card(folder: Path, plan: MergePlan, coefficients: Mapping[str, Sequence[float]]) -> None:
    """Write README.md and the recipe."""
    (folder / RECIPE_FILE).write_text(plan.config.to_yaml(), encoding="utf-8")
    (folder / "README.md").write_text(_card(plan, coefficients), encoding="utf-8")


def effective_weights(
    plan: MergePlan, coefficients: Mapping[str, Sequence[float]]
) -> list[tuple[str, float, float, float]]:
    """How much of each model went into the result: least, mean and greatest coefficient over its tensors.

    With a base they are those of the task vectors. The mean is weighted by the tensors' sizes.

    Returns:
        (model, least, mean, greatest) for each model; empty where numbers do not say it.
    """
    found: dict[str, list[tuple[float, int]]] = {}
    for job in plan.jobs:
        labels = job.inputs.labels[job.inputs.base is not None :]
        sums: dict[str, float] = {}
        for label, value in zip(labels, coefficients.get(job.output.name, ()), strict=False):
            sums[label] = sums.get(label, 0.0) + value
        for label, value in sums.items():
            found.setdefault(label, []).append((value, job.inputs.numel))
    rows = []
    for label, values in found.items():
        size = sum(count for _, count in values)
        mean = sum(value * count for value, count in values) / size if size else 0.0
        rows.append((label, min(v for v, _ in values), mean, max(v for v, _ in values)))
    return rows


def _card(plan: MergePlan, coefficients: Mapping[str, Sequence[float]]) -> str:
    method = METHODS[plan.config.method]
    commits = {spec: _commit(checkpoint.folder) for spec, checkpoint in plan.checkpoints.items()}
    hub = [spec.split("+")[0].split("@")[0] for spec, commit in commits.items() if commit]
    names = _names(plan)
    head = {
        **({"base_model": hub} if hub else {}),
        "library_name": "transformers",
        "tags": ["merge", "rlhf-merge", plan.config.method],
    }
    paper = f" ([{method.paper}]({_link(method.paper)}))" if _link(method.paper) else ""
    merged = [names[spec] for spec in names if method.base == "optional" or spec != plan.config.base]
    onto = f" on {names[plan.config.base]}" if plan.config.base and method.base == "required" else ""
    parts = [
        f"---\n{yaml.safe_dump(head, sort_keys=False)}---",
        f"# Merge of {', '.join(merged)}{onto}",
        f"{method.title}{paper}: {method.summary}. {plan.parameters:,} parameters. Config and generation "
        f"settings are those of `{names[plan.config_from]}`, the tokenizer is that of "
        f"`{names[plan.tokenizer]}`.",
        "## Effective weights",
        _weights(plan, coefficients, names),
        "## Recipe",
        f"`rlhf-merge run {RECIPE_FILE} OUT`, where the merge was started, makes these tensors again from "
        "the same models. The file has their paths, of which this shows the ends:",
        f"```yaml\n{dump_yaml(_named(plan.config.to_dict(), names)).rstrip()}\n```",
    ]
    if hub:
        rows = [f"- `{spec}` at commit `{commit}`" for spec, commit in commits.items() if commit]
        parts += ["## Models of the hub", "\n".join(rows)]
    return "\n\n".join(parts) + "\n"


def _names(plan: MergePlan) -> dict[str, str]:
    """What the card calls the models: those of the hub by their ids, folders by the ends of their paths."""
    specs = list(plan.checkpoints)
    short = zip(specs, short_names(specs), strict=True)
    return {spec: spec if _commit(plan.checkpoints[spec].folder) else name for spec, name in short}


def _named(value: Any, names: Mapping[str, str]) -> Any:
    """Plain values of a config with these names of the models."""
    if isinstance(value, dict):
        return {key: _named(inner, names) for key, inner in value.items()}
    if isinstance(value, list):
        return [_named(inner, names) for inner in value]
    return names.get(value, value) if isinstance(value, str) else value


def _commit(folder: Path) -> str | None:
    """The commit of a model that came from the hub, whose cache names folders so."""
    return folder.name if folder.parent.name == "snapshots" else None


def _weights(plan: MergePlan, coefficients: Mapping[str, Sequence[float]], names: Mapping[str, str]) -> str:
    rows = effective_weights(plan, coefficients)
    if not rows:
        return "The method decides element by element; there is no weight of a whole model."
    based = METHODS[plan.config.method].base == "required"
    what = "Factors of the task vectors (model less base)" if based else "Factors of the models"
    notes = [f"{what}, after every normalisation that is the same for a whole tensor:"]
    if "sign" in METHODS[plan.config.method].parameters:
        notes[0] = f"{what}, before signs are elected; elements that lose the election are left out"
        divided = any(job.values.shared.get("normalize") for job in plan.jobs)
        notes[0] += ", and each element is divided by the weights that agree:" if divided else ":"
    table = ["| model | least | mean | greatest |", "|---|---|---|---|"]
    table += [
        f"| `{names[label]}` | {low:.6g} | {mean:.6g} | {high:.6g} |" for label, low, mean, high in rows
    ]
    return "\n\n".join([*notes, "\n".join(table)])


def _link(paper: str) -> str:
    kind, _, number = paper.partition(":")
    return {"arXiv": f"https://arxiv.org/abs/{number}", "doi": f"https://doi.org/{number}"}.get(kind, "")
