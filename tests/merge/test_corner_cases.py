"""What looks like a merge and is none: refused, or done right, where files and models do not quite fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_merge import MergeError, ModelMerger, ModelSoup, Resources, breadcrumbs, linear, model_stock
from rlhf_merge.config.merge_config import MergeConfig
from rlhf_merge.files.writer import OutputTensor, PartialModel, lay_out
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


def test_model_stock_keeps_the_base_where_task_vectors_oppose_each_other():
    base = torch.tensor([1.0, 2, 3, 4])
    opposed = [base + torch.tensor([1.0, 0, 0, 0]), base + torch.tensor([-0.9, 0.1, 0, 0])]
    assert torch.equal(model_stock(base, opposed), base)
    # cos θ = 0.6: t = 2·0.6/(1 + 0.6) = 0.75, of the mean of (1, 0) and (0.6, 0.8)
    close = [base + torch.tensor([1.0, 0, 0, 0]), base + torch.tensor([0.6, 0.8, 0, 0])]
    torch.testing.assert_close(model_stock(base, close) - base, torch.tensor([0.6, 0.3, 0, 0]))


def test_breadcrumbs_drop_outliers_by_default():
    delta = torch.arange(1.0, 201)
    kept = breadcrumbs(torch.zeros(200), [delta])
    # 180 of 200 are kept, and of the others the two largest are dropped
    assert torch.equal(kept, torch.where((delta > 18) & (delta <= 198), delta, 0.0))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_what_the_type_of_the_result_cannot_hold_is_refused(workshop: Any, dtype: str):
    tensors = workshop.tensors() | {NORM: torch.full((8,), 3.4e38)}
    a = workshop.save("a", tensors)
    said = refusal({"method": "linear", "models": [a], "dtype": dtype}, workshop.root / "out")
    assert said.startswith(f"tensor {NORM} would hold 3.4e+38, more than {dtype} can")
    with pytest.raises(ValueError, match=r"the tensor would hold 1\.2e\+05, more than float16 can"):
        linear([torch.full((3,), 60000.0).half()] * 2, normalize=False)


def test_tensors_of_a_file_that_is_gone_are_merged_again(tmp_path: Path):
    shards = lay_out([OutputTensor(name, (4,), torch.float32) for name in "abc"], 16)
    first = PartialModel(tmp_path / "out", shards, {})
    for name in "abc":
        first.write(name, 0, torch.ones(4))
        first.tensor_finished(name, coefficients=[])
    first.flush()
    first.close()
    (first.folder / shards[1].file).unlink()
    (first.folder / shards[2].file).write_bytes(b"short")
    for _ in range(2):  # the second time the files are there again, and empty
        again = PartialModel(tmp_path / "out", shards, {})
        assert set(again.finished) == {"a"}
        again.close()


@pytest.mark.parametrize("damage", [b"\0\0\0\n", b'{"tensor": "b", "coe', b"[]\n", b"\xff\n"])
def test_a_damaged_journal_is_read_up_to_the_damage(tmp_path: Path, damage: bytes):
    shards = lay_out([OutputTensor(name, (4,), torch.float32) for name in "ab"], 10**6)
    first = PartialModel(tmp_path / "out", shards, {})
    first.tensor_finished("a", coefficients=[1.0])
    first.flush()
    first.close()
    with open(first.root / "journal.jsonl", "ab") as journal:
        journal.write(damage)
    again = PartialModel(tmp_path / "out", shards, {})
    assert again.finished == {"a": {"tensor": "a", "coefficients": [1.0]}}
    again.tensor_finished("b")
    again.flush()
    again.close()
    last = PartialModel(tmp_path / "out", shards, {})
    assert set(last.finished) == {"a", "b"}
    last.close()


def test_models_of_a_soup_that_do_not_fit_are_refused_before_any_is_scored(workshop: Any):
    tensors = workshop.tensors()
    a = workshop.save("a", tensors)
    b = workshop.save("b", {name: tensor for name, tensor in tensors.items() if name != NORM})
    with pytest.raises(MergeError, match=f"lacks tensor {NORM}"):
        ModelSoup([a, b]).greedy(workshop.root / "out", lambda folder: pytest.fail("was scored"))
    assert {path.name for path in workshop.root.iterdir()} == {"a", "b"}


def test_a_soup_is_made_by_one_process_at_a_time(workshop: Any):
    base, a, _ = workshop.trio()
    out = workshop.root / "out"

    def evaluate(folder: Path) -> float:
        with pytest.raises(MergeError, match="another process is merging"):
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


def test_slices_refuse_a_tensor_that_only_another_model_has(workshop: Any):
    tensors = workshop.tensors()
    a, b = workshop.save("a", tensors), workshop.save("b", tensors | {"extra.weight": torch.ones(2)})
    sources = [{"model": model, "layers": [0, 3]} for model in (a, b)]
    said = refusal({"method": "linear", "slices": [{"sources": sources}]}, workshop.root / "out")
    assert said.startswith(f"{a} lacks tensor extra.weight, which {b} has")


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
    with pytest.raises(MergeError, match="must be at least 1"):
        Resources(**values)
