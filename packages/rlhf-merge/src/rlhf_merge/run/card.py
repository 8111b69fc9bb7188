"""The model card: the exact recipe, and how much of each model went into the result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from rlhf_merge.config.reading import dump_yaml
from rlhf_merge.methods.families import METHODS
from rlhf_merge.text import short_names

if TYPE_CHECKING:
    from rlhf_merge.run.plan import MergePlan

RECIPE_FILE = "merge_config.yaml"
"""The config in the result's folder: `rlhf-merge run merge_config.yaml OUT` makes the same tensors again."""

_LINKS = {"arXiv": "https://arxiv.org/abs/", "doi": "https://doi.org/"}


def effective_weights(
    plan: MergePlan, coefficients: Mapping[str, Sequence[float]]
) -> list[tuple[str, float, float, float]]:
    """How much of each model went into the result: least, mean and greatest coefficient over its tensors.

    With a base they are those of the task vectors. The mean is weighted by the tensors' sizes. Empty where
    numbers do not say it.
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
    for label, pairs in found.items():
        values, size = [value for value, _ in pairs], sum(count for _, count in pairs)
        mean = sum(value * count for value, count in pairs) / size if size else 0.0
        rows.append((label, min(values), mean, max(values)))
    return rows


def write_card(folder: Path, plan: MergePlan, coefficients: Mapping[str, Sequence[float]]) -> None:
    """Write README.md and the recipe."""
    (folder / RECIPE_FILE).write_text(plan.config.to_yaml(), encoding="utf-8")
    method, config = METHODS[plan.config.method], plan.config
    # The hub's cache names folders by commits. Its models go by their ids, others by the ends of their paths.
    folders = {spec: checkpoint.folder for spec, checkpoint in plan.checkpoints.items()}
    commits = {spec: path.name for spec, path in folders.items() if path.parent.name == "snapshots"}
    short = dict(zip(folders, short_names(list(folders)), strict=True))
    names = short | {spec: spec for spec in commits}
    head: dict[str, Any] = (
        {"base_model": [spec.split("+")[0].split("@")[0] for spec in commits]} if commits else {}
    )
    head |= {"library_name": "transformers", "tags": ["merge", "rlhf-merge", config.method]}
    kind, _, number = method.paper.partition(":")
    paper = f" ([{method.paper}]({_LINKS[kind]}{number}))" if kind in _LINKS else ""
    based = method.base == "required"
    merged = ", ".join(name for spec, name in names.items() if not based or spec != config.base)
    onto = f" on {names[config.base]}" if config.base and based else ""
    recipe = dump_yaml(_named(config.to_dict(), names)).rstrip()
    parts = [
        f"---\n{yaml.safe_dump(head, sort_keys=False)}---",
        f"# Merge of {merged}{onto}",
        f"{method.title}{paper}: {method.summary}. {plan.parameters:,} parameters. Config and generation "
        f"settings are those of `{names[plan.config_from]}`, the tokenizer is that of "
        f"`{names[plan.tokenizer]}`.",
        "## Effective weights",
        _weights(plan, coefficients, names),
        "## Recipe",
        f"`rlhf-merge run {RECIPE_FILE} OUT`, where the merge was started, makes these tensors again from "
        "the same models. The file has their paths, of which this shows the ends:",
        f"```yaml\n{recipe}\n```",
    ]
    if commits:
        rows = [f"- `{spec}` at commit `{commit}`" for spec, commit in commits.items()]
        parts += ["## Models of the hub", "\n".join(rows)]
    (folder / "README.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def _named(value: Any, names: Mapping[str, str]) -> Any:
    """Plain values of a config with these names of the models."""
    if isinstance(value, dict):
        return {key: _named(inner, names) for key, inner in value.items()}
    if isinstance(value, list):
        return [_named(inner, names) for inner in value]
    return names.get(value, value) if isinstance(value, str) else value


def _weights(plan: MergePlan, coefficients: Mapping[str, Sequence[float]], names: Mapping[str, str]) -> str:
    rows, method = effective_weights(plan, coefficients), METHODS[plan.config.method]
    if not rows:
        return "The method decides element by element; there is no weight of a whole model."
    based = method.base == "required"
    note = "Factors of the task vectors (model less base), " if based else "Factors of the models, "
    if "sign" in method.parameters:
        note += "before signs are elected; elements that lose the election are left out"
        if any(job.values.shared.get("normalize") for job in plan.jobs):
            note += ", and each element is divided by the weights that agree"
    else:
        note += "after every normalisation that is the same for a whole tensor"
    table = ["| model | least | mean | greatest |", "|---|---|---|---|"]
    table += [f"| `{names[label]}` | {a:.6g} | {mean:.6g} | {b:.6g} |" for label, a, mean, b in rows]
    return f"{note}:\n\n" + "\n".join(table)
