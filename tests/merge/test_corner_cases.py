"""What looks like a merge and is none: refused, or done right, where files and models do not quite fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from raises import raises_error
from rlhf_merge import MergeError, ModelMerger, ModelSoup, Resources, breadcrumbs
from rlhf_merge.config.merge_config import MergeConfig
from rlhf_merge.run.card import effective_weights
from rlhf_merge.run.plan import make_plan

HEAD = "lm_head.weight"
NORM = "model.norm.weight"


def refusal(values: dict[str, Any], out: Path) -> str:
    with pytest.raises(MergeError) as caught:
        ModelMerger(values).merge(out)
    assert not out.exists()
    return str(caught.value)


def test_a_missing_head_of_its_own_is_not_replaced_by_the_embedding(workshop: Any):
    tensors = workshop.tensors()
    a = workshop.save("a", tensors)
    b = workshop.save("b", {name: tensor for name, tensor in tensors.items() if name != HEAD})
    expected = f"{b} lacks tensor {HEAD}, which {a} has"
    assert refusal({"method": "linear", "models": [a, b]}, workshop.root / "out").startswith(expected)


def test_breadcrumbs_drop_outliers_by_default():
    delta = torch.arange(1.0, 201)
    kept = breadcrumbs(torch.zeros(200), [delta])
    # 180 of 200 are kept, and of the others the two largest are dropped
    assert torch.equal(kept, torch.where((delta > 18) & (delta <= 198), delta, 0.0))


def test_models_of_a_soup_that_do_not_fit_are_refused_before_any_is_scored(workshop: Any):
    tensors = workshop.tensors()
    a = workshop.save("a", tensors)
    b = workshop.save("b", {name: tensor for name, tensor in tensors.items() if name != NORM})
    with raises_error("missing_tensor", tensor="model.norm.weight"):
        ModelSoup([a, b]).greedy(workshop.root / "out", lambda folder: pytest.fail("was scored"))
    assert {path.name for path in workshop.root.iterdir()} == {"a", "b"}


def test_a_soup_is_made_by_one_process_at_a_time(workshop: Any):
    base, a, _ = workshop.trio()
    out = workshop.root / "out"

    def evaluate(folder: Path) -> float:
        with raises_error("folder_in_use"):
            ModelSoup([base, a]).greedy(out, lambda folder: 1.0)
        return 1.0

    assert ModelSoup([base, a]).greedy(out, evaluate).members == (base, a)


def test_a_model_without_config_borrows_that_of_another(workshop: Any):
    tensors = workshop.tensors()
    a, b = workshop.save("a", tensors), workshop.save("b", tensors)
    Path(a, "config.json").unlink()
    merged = ModelMerger({"method": "linear", "models": [a, b]}).merge(workshop.root / "out").folder
    assert json.loads((merged / "config.json").read_text())["model_type"] == "llama"
    Path(b, "config.json").unlink()
    bare = ModelMerger({"method": "linear", "models": [a, b]}).merge(workshop.root / "bare").folder
    assert not (bare / "config.json").exists()


def test_the_base_by_another_name_is_refused(workshop: Any):
    base, a, _ = workshop.trio()
    again = base + "/."
    said = refusal({"method": "ties", "base": base, "models": [a, again]}, workshop.root / "out")
    assert said == f"{again} is the base {base} by another name; leave it out of models"


def test_a_model_listed_twice_has_the_sum_of_its_weights(workshop: Any):
    base, a, _ = workshop.trio()
    plan = make_plan(MergeConfig.from_dict({"method": "linear", "models": [a, base, a]}))
    found = effective_weights(plan, {job.output.name: [0.25, 0.5, 0.25] for job in plan.jobs})
    assert found == [(a, 0.5, 0.5, 0.5), (base, 0.5, 0.5, 0.5)]


def test_progress_ends_at_the_total_whatever_is_not_read(workshop: Any):
    _, a, b = workshop.trio()
    values = {"method": "linear", "models": [a, {"model": b, "weight": 0}], "dtype": "bfloat16"}
    merger = ModelMerger(values)
    plan = merger.plan()
    moved: list[int] = []
    merger.merge(workshop.root / "out", plan=plan, on_bytes=moved.append)
    assert sum(moved) == plan.bytes_read + plan.bytes_written


def test_what_the_bytes_depend_on_is_in_the_identity(workshop: Any):
    _, a, b = workshop.trio()
    config = MergeConfig.from_dict({"method": "linear", "models": [a, b]})
    first = make_plan(config)
    assert make_plan(config).identity() == first.identity()
    text = (
        Path(a, "config.json")
        .read_text()
        .replace('"max_position_embeddings": 64', '"max_position_embeddings": 65')
    )
    Path(a, "config.json").write_text(text)
    assert make_plan(config).identity() != first.identity()


@pytest.mark.parametrize("values", [{"threads": 0}, {"threads": -1}, {"max_memory": 0}])
def test_resources_are_positive(values: dict[str, Any]):
    with raises_error("invalid_value"):
        Resources(**values)
