"""Where rlhf_merge differs from mergekit on purpose, with the smallest examples: both values are asserted.

Needs a venv with mergekit, whose Python MERGEKIT_PYTHON names. The examples are the final norm of a tiny
Llama, whose other tensors are the same in all models.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.slow

NORM = "model.norm.weight"
Merge = Callable[..., tuple[Tensor, Tensor]]


@pytest.fixture
def merge(tmp_path: Path, merge_both: Any, draw_llama: Any, write_llama: Any) -> Merge:
    """Ours and mergekit's merge of vectors: a base, and models with their parameters."""
    rest = draw_llama(0, 0.02, layers=1, hidden=4, vocab=6)

    def merge_vectors(
        method: str,
        base: list[float],
        models: list[list[float]],
        each: list[dict[str, Any]],
        **parameters: Any,
    ) -> tuple[Tensor, Tensor]:
        folder = tmp_path / "models"
        for name, values in {"base": base, **{str(i): values for i, values in enumerate(models)}}.items():
            write_llama(folder / name, rest | {NORM: torch.tensor(values)})
        entries = [{"model": f"@{i}", "parameters": own} for i, own in enumerate(each)]
        if method == "slerp":
            entries.insert(0, {"model": "@base", "parameters": {}})
        config = {"merge_method": method, "base_model": "@base", "models": entries, "parameters": parameters}
        merged = merge_both(config | {"dtype": "float32"}, folder)
        return merged.ours[NORM], merged.theirs[NORM]

    return merge_vectors


def test_ties_divides_by_the_sizes_of_negative_weights(merge: Merge):
    """The sum of 1·4 and -0.5·-2 is 5, of which both are a part: over |1| + |-0.5|, or over 1 - 0.5."""
    each = [{"weight": 1.0}, {"weight": -0.5}]
    ours, theirs = merge("ties", [0.0], [[4.0], [-2.0]], each)
    assert ours.tolist() == pytest.approx([10 / 3])
    assert theirs.tolist() == [10.0]


def test_ties_keeps_the_base_where_no_sign_wins(merge: Merge):
    """+2 and -2 on a base of 1: mergekit counts a sum of 0 as positive, and adds the 2."""
    each = [{"weight": 1.0}, {"weight": 1.0}]
    ours, theirs = merge("ties", [1.0], [[3.0], [-1.0]], each)
    assert ours.tolist() == [1.0]
    assert theirs.tolist() == [3.0]


def test_ties_treats_equal_magnitudes_alike(merge: Merge):
    """The second largest of 1, 1, 1, 3 is 1: all of that size are kept, or one of them."""
    ours, theirs = merge("ties", [0.0] * 4, [[1.0, 1.0, 1.0, 3.0]], [{"weight": 1.0, "density": 0.5}])
    assert ours.tolist() == [1.0, 1.0, 1.0, 3.0]
    assert sorted(theirs.tolist()) == [0.0, 0.0, 1.0, 3.0]


def test_density_is_the_number_that_is_written(merge: Merge):
    """⌊0.29·100⌋ is 29; the product of the floating-point numbers is 28.999999999999996."""
    ours, theirs = merge(
        "ties", [0.0] * 100, [[float(i) for i in range(1, 101)]], [{"weight": 1.0, "density": 0.29}]
    )
    assert [int((side != 0).sum()) for side in (ours, theirs)] == [29, 28]


@pytest.mark.parametrize("method", ["dare_linear", "dare_ties"])
def test_dare_divides_by_the_probability(merge: Merge, method: str):
    """What is kept is doubled at density 1/2, for the expectation; mergekit keeps the sum of magnitudes."""
    values = torch.arange(1.0, 65.0)
    ours, theirs = merge(method, [0.0] * 64, [values.tolist()], [{"weight": 1.0, "density": 0.5}])
    assert {*(ours / values).tolist()} == {0.0, 2.0}
    kept = theirs != 0
    factor = float(values.sum() / values[kept].sum())
    assert torch.allclose(theirs, values * kept * factor)
    assert abs(factor - 2) > 1e-3
    assert float(theirs.sum()) == pytest.approx(float(values.sum()))


def test_della_divides_by_each_probability(merge: Merge):
    """Probabilities 0.2 … 0.8 by rank, so factors 5 … 1.25; mergekit has one, for the sum of magnitudes."""
    values = torch.arange(1.0, 65.0)
    own = {"weight": 1.0, "density": 0.5, "epsilon": 0.3}
    ours, theirs = merge("della_linear", [0.0] * 64, [values.tolist()], [own])
    kept = ours != 0
    probability = 0.2 + 0.6 * torch.arange(64) / 63
    assert torch.allclose((ours / values)[kept], 1 / probability[kept], rtol=1e-3)
    kept = theirs != 0
    factor = float(values.sum() / values[kept].sum())
    assert torch.allclose(theirs, values * kept * factor)


def test_slerp_with_zeros_is_a_straight_line(merge: Merge):
    """Zeros have no direction: half way to (6, 8) is half of it; for mergekit, at 90°, sin 45° of it."""
    ours, theirs = merge("slerp", [0.0, 0.0], [[6.0, 8.0]], [{}], t=0.5)
    assert ours.tolist() == [3.0, 4.0]
    assert theirs.tolist() == pytest.approx([6 * 0.5**0.5, 8 * 0.5**0.5])


def test_model_stock_is_the_same_at_every_size(merge: Merge):
    """Task vectors (1, 0) and (0.6, 0.8) have cosine 0.6, t = 2·0.6/1.6 = 3/4, whatever their unit.

    In units of 1e-4 the product of their lengths is 1e-8, which mergekit takes for 1e-6: cosine 0.006.
    """
    models = [[1e-4, 0.0], [0.6e-4, 0.8e-4]]
    ours, theirs = merge("model_stock", [0.0, 0.0], models, [{}, {}])
    assert ours.tolist() == pytest.approx([0.75 * 0.8e-4, 0.75 * 0.4e-4])
    t = 2 * 0.006 / 1.006
    assert theirs.tolist() == pytest.approx([t * 0.8e-4, t * 0.4e-4])


def test_breadcrumbs_keeps_at_least_one_element(merge: Merge):
    """⌊0.1·4⌋ is 0; one element stays, as in TIES, where mergekit keeps one too."""
    own = {"weight": 1.0, "density": 0.1, "gamma": 0.3}
    ours, theirs = merge("breadcrumbs", [0.0] * 4, [[4.0, 3.0, 2.0, 1.0]], [own])
    assert ours.tolist() == [0.0, 3.0, 0.0, 0.0]
    assert theirs.tolist() == [0.0] * 4
