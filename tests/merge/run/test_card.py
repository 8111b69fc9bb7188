"""The model card and the recipe beside the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhf_merge.config.merge_config import MergeConfig
from rlhf_merge.run.card import RECIPE_FILE, effective_weights, write_card
from rlhf_merge.run.merger import ModelMerger
from rlhf_merge.run.plan import MergePlan, make_plan

EMBEDDING, NORM = "model.embed_tokens.weight", "model.norm.weight"


def plan_of(values: dict[str, Any]) -> MergePlan:
    plan = make_plan(MergeConfig.from_dict(values))
    plan.close()
    return plan


def card(folder: Path) -> tuple[dict[str, Any], str]:
    """The front matter and the text."""
    _, head, text = (folder / "README.md").read_text(encoding="utf-8").split("---\n", 2)
    return yaml.safe_load(head), text


def test_effective_weights_are_means_over_elements(workshop: Any) -> None:
    base, a, b = workshop.trio()
    plan = plan_of({"method": "task_arithmetic", "base": base, "models": [a, b]})
    coefficients = {job.output.name: (0.25, 1.0) for job in plan.jobs}
    coefficients |= {EMBEDDING: (2.0, 1.0), NORM: (-1.0, 1.0)}
    count = plan.parameters
    # The embedding has 16·8 elements and the norm 8.
    mean = pytest.approx((0.25 * (count - 136) + 2 * 128 - 1 * 8) / count)
    found = effective_weights(plan, coefficients)
    assert found == [(a, -1.0, mean, 2.0), (b, 1.0, pytest.approx(1.0), 1.0)]
    assert effective_weights(plan, {}) == []
    # A model that is listed twice is one row, with the sum of its weights.
    plan = plan_of({"method": "linear", "models": [a, base, a]})
    found = effective_weights(plan, {job.output.name: [0.25, 0.5, 0.25] for job in plan.jobs})
    assert found == [(a, 0.5, 0.5, 0.5), (base, 0.5, 0.5, 0.5)]


def test_a_model_that_is_in_several_slices_is_one_row(workshop: Any) -> None:
    path = workshop.save("a", workshop.tensors())
    parts = [{"sources": [{"model": path, "layers": [0, 2], "weight": w}]} for w in (1.0, 3.0)]
    plan = plan_of({"method": "passthrough", "slices": parts})
    coefficients = {job.output.name: (job.values.per_model[0]["weight"],) for job in plan.jobs}
    ((label, low, mean, high),) = effective_weights(plan, coefficients)
    assert (label, low, high) == (path, 1.0, 3.0) and 1.5 < mean < 2.5


def test_card_and_recipe(workshop: Any) -> None:
    base, a, b = workshop.trio()
    values = {"method": "ties", "base": base, "models": [{"model": a, "weight": 0.75}, b], "density": 0.5}
    merged = ModelMerger(values).merge(workshop.root / "out")
    head, text = card(merged.folder)
    assert head == {"library_name": "transformers", "tags": ["merge", "rlhf-merge", "ties"]}
    recipe = (merged.folder / RECIPE_FILE).read_text(encoding="utf-8")
    assert yaml.safe_load(recipe) == values
    # The card names folders by their ends, and tells nobody where they were.
    shown = yaml.safe_load(text.split("```yaml\n")[1].split("```")[0])
    assert shown == values | {"base": "base", "models": [{"model": "a", "weight": 0.75}, "b"]}
    assert str(workshop.root) not in (merged.folder / "README.md").read_text(encoding="utf-8")
    elements = sum(tensor.numel() for tensor in workshop.tensors().values())
    for words in (
        "# Merge of a, b on base\n",
        "TIES ([arXiv:2306.01708](https://arxiv.org/abs/2306.01708)): trim",
        f" {elements:,} parameters.",
        "| `a` | 0.75 | 0.75 | 0.75 |\n| `b` | 1 | 1 | 1 |",
        "before signs are elected",
        "divided by the weights that agree",
    ):
        assert words in text


@pytest.mark.parametrize(
    ("values", "present", "absent"),
    [
        ({"method": "linear", "weight": 3.0}, "Factors of the models, after", "elected"),
        ({"method": "task_arithmetic"}, "Factors of the task vectors (model less base), after", "elected"),
        ({"method": "dare_ties"}, "before signs are elected", "divided by the weights"),
        ({"method": "nearswap"}, "there is no weight of a whole model", "| model |"),
        ({"method": "slerp"}, "(https://doi.org/10.1145/325165.325242)", "elected"),
        ({"method": "passthrough"}, "Passthrough: layers", "](http"),
    ],
)
def test_what_the_weights_are(workshop: Any, values: dict[str, Any], present: str, absent: str) -> None:
    base, a, b = workshop.trio()
    single = values["method"] in ("nearswap", "passthrough")
    needed = {} if values["method"] in ("linear", "slerp", "passthrough") else {"base": base}
    merger = ModelMerger(values | {"models": [a] if single else [a, b]} | needed)
    _, text = card(merger.merge(workshop.root / "out").folder)
    assert present in text and absent not in text


def test_normalised_and_listed_weights_of_runs_that_all_lie_in_a_folder_final(workshop: Any) -> None:
    state = workshop.tensors()
    sft, dpo = [workshop.save(f"{name}/final", workshop.tuned(state, 1)) for name in ("sft", "dpo")]
    models = [{"model": sft, "weight": 1.0}, {"model": dpo, "weight": [0.0, 3.0]}]
    _, text = card(ModelMerger({"method": "linear", "models": models}).merge(workshop.root / "out").folder)
    assert "# Merge of sft/final, dpo/final\n" in text
    # The last layer has 1/4 and 3/4, all that is outside of the layers 1 and 0.
    assert "| `sft/final` | 0.25 | " in text and "| `dpo/final` | 0 | " in text
    assert text.count(" | 1 |") == 1 and text.count(" | 0.75 |") == 1


def test_the_recipe_makes_the_same_bytes_again(workshop: Any) -> None:
    base, a, b = workshop.trio()
    values = {"method": "dare_ties", "base": base, "density": 0.9, "lambda": 1.5, "sign": "count"}
    values["models"] = [{"model": a, "weight": [0.2, 0.8]}, {"model": b, "density": {"mlp": 0.5, "*": 0.3}}]
    first = ModelMerger(values | {"dtype": "float16", "seed": 11}).merge(workshop.root / "first").folder
    second = ModelMerger(first / RECIPE_FILE).merge(workshop.root / "second").folder
    assert workshop.files(first) == workshop.files(second)


def test_names_with_special_signs(tmp_path: Path, workshop: Any) -> None:
    path = workshop.save("ein Modell: #1 | übung", workshop.tensors())
    plan = plan_of({"method": "linear", "models": [path]})
    write_card(tmp_path, plan, {})
    head, text = card(tmp_path)
    assert "base_model" not in head and "# Merge of ein Modell: #1 | übung\n" in text
    assert MergeConfig.from_file(tmp_path / RECIPE_FILE) == plan.config


def test_models_of_the_hub_are_named_with_their_commits(
    workshop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub's cache keeps a model in snapshots/COMMIT."""
    folders = {name: workshop.save(f"{name}/snapshots/c0ffee", workshop.tensors()) for name in ("org/a", "b")}
    monkeypatch.setattr("rlhf_merge.files.checkpoint.download", lambda name, revision: Path(folders[name]))
    merger = ModelMerger({"method": "linear", "models": ["org/a@v1", "b"]})
    head, text = card(merger.merge(workshop.root / "out").folder)
    assert head["base_model"] == ["org/a", "b"] and "# Merge of org/a@v1, b\n" in text
    assert "- `org/a@v1` at commit `c0ffee`" in text
