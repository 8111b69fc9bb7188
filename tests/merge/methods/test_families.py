"""A method is one record: adding it makes it known to every part of the package."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor

from rlhf_merge import MergeConfig, ModelMerger
from rlhf_merge.cli.main import main
from rlhf_merge.methods.blocks import Inputs, Workspace
from rlhf_merge.methods.families import METHODS
from rlhf_merge.methods.spec import Method, Step, Values


def fit_median(inputs: Inputs, values: Values, space: Workspace) -> Step:
    """The median of the models, element by element."""

    def merge(start: int, stop: int, space: Workspace) -> Tensor:
        rows = space.take_rows("rows", len(inputs.models), stop - start)
        for row, model in zip(rows, inputs.models, strict=True):
            inputs.read(model, start, stop, row)
        return rows.median(0).values

    return Step(merge)


MEDIAN = Method(
    "Median", "median of the models", {}, fit_median, base="optional", models=(3, None), buffers=3
)


@pytest.fixture
def models(workshop: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setitem(METHODS, "median", MEDIAN)
    base = workshop.tensors()
    return [workshop.save(name, workshop.tuned(base, seed)) for seed, name in enumerate("abc")]


def test_a_method_is_added_by_one_record(workshop: Any, models: list[str]):
    """From our config, mergekit's, the command line; with its buffers in the bound on memory."""
    theirs = {"merge_method": "median", "models": [{"model": model} for model in models]}
    path = workshop.root / "theirs.json"
    path.write_text(str(theirs).replace("'", '"'))
    merger = ModelMerger({"method": "median", "models": models})
    plan = merger.plan()
    assert plan.bytes_per_thread == 4 * 2**18 * (3 + 8 + 3) and plan.jobs[0].passes == 1
    merger.merge(workshop.root / "ours", plan=plan)
    ModelMerger(MergeConfig.from_file(path)).merge(workshop.root / "theirs")
    options = [word for model in models for word in ("--model", model)]
    run = CliRunner().invoke(main, ["median", *options, str(workshop.root / "command"), "--quiet"])
    assert run.exit_code == 0, run.output
    assert "median" in CliRunner().invoke(main, ["--help"]).output
    states = [workshop.load(model) for model in models]
    for name in ("ours", "theirs", "command"):
        for key, tensor in workshop.load(workshop.root / name).items():
            assert torch.equal(tensor, torch.stack([state[key] for state in states]).median(0).values)
