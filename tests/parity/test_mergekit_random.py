"""Random drops by mergekit and by rlhf_merge: the masks differ, what they keep and expect does not.

Needs a venv with mergekit, whose Python MERGEKIT_PYTHON names.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.slow

Tensors = dict[str, Tensor]


def merge_of(method: str, names: str, **parameters: float) -> dict[str, Any]:
    """A config that merges fine-tunes of the base, each with weight 1 over their number."""
    weight = 1 / len(names)
    models = [{"model": f"@{name}", "parameters": {"weight": weight, **parameters}} for name in names]
    return {"merge_method": method, "base_model": "@base", "models": models, "dtype": "float32"}


def changes(merged: Tensors, base: Tensors) -> Tensor:
    return torch.cat([(merged[key] - base[key]).double().flatten() for key in base])


@pytest.mark.parametrize("method", ["dare_linear", "della_linear"])
def test_random_drops_keep_the_same_share_and_expectation(method: str, family: Any, merge_both: Any):
    """One model of weight 1: what is kept, and how much of the task vector the change holds on average."""
    merged = merge_both(merge_of(method, "a", density=0.3), family.folders["float32"])
    base = family.tensors["base"]
    delta = changes(family.tensors["a"], base)
    count = len(delta)
    for side in (merged.ours, merged.theirs):
        change = changes(side, base)
        share = float((change != 0).double().mean())
        part = float(change @ delta / (delta @ delta))
        print(f"\n{method}: keeps {share:.4f}, holds {part:.4f} of the task vector")
        assert abs(share - 0.3) <= 5 * math.sqrt(0.3 * 0.7 / count)
        # Var = Σ δ⁴ (1-p)/p over (Σ δ²)², with normal δ 3 (1-p)/(p n); mergekit's scale is right on average
        # for DARE, and for DELLA, which keeps the large ones, one number for all of a tensor.
        assert abs(part - 1) <= (5 * math.sqrt(3 * 0.7 / 0.3 / count) if method == "dare_linear" else 0.1)


def test_dellas_probabilities_rise_alike(family: Any, merge_both: Any):
    """Kept shares by the decile of an element's rank in its row: from density - ε to density + ε."""
    config = merge_of("della_linear", "a", density=0.5, epsilon=0.3)
    merged = merge_both(config, family.folders["float32"])
    name = "lm_head.weight"
    delta = (family.tensors["a"][name] - family.tensors["base"][name]).abs()
    decile = delta.argsort(1).argsort(1) * 10 // delta.shape[1]
    for side in (merged.ours, merged.theirs):
        kept = side[name] != family.tensors["base"][name]
        for index in range(10):
            chosen = kept[decile == index].double()
            expected = 0.2 + 0.6 * float((delta.argsort(1).argsort(1)[decile == index] / 63).mean())
            assert abs(float(chosen.mean()) - expected) <= 5 * math.sqrt(0.25 / len(chosen))


def test_dare_ties_keeps_the_same_share(family: Any, merge_both: Any):
    """Three models: an element changes where at least one of them keeps it, with probability 1 - 0.6³."""
    merged = merge_both(merge_of("dare_ties", "abc", density=0.4), family.folders["float32"])
    base = family.tensors["base"]
    ours, theirs = changes(merged.ours, base), changes(merged.theirs, base)
    bound = 5 * math.sqrt(0.784 * 0.216 / len(ours))
    for change in (ours, theirs):
        assert abs(float((change != 0).double().mean()) - 0.784) <= bound
    print(
        f"\ndare_ties: mean change {float(ours.abs().mean()):.5f}, mergekit {float(theirs.abs().mean()):.5f}"
    )
    assert float(ours.abs().mean()) == pytest.approx(float(theirs.abs().mean()), rel=0.01)
