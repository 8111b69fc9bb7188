"""Heat maps: what is drawn, whether it fits, and what is refused."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from raises import raises_error
from rlhf_merge.compare.diff import diff_models
from rlhf_merge.compare.report import check_heatmap, heatmap

pytest.importorskip("matplotlib")


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that are saved."""
    from matplotlib.figure import Figure

    figures: list[Any] = []
    save: Callable[..., None] = Figure.savefig

    def remember(figure: Figure, *args: Any, **options: Any) -> None:
        figures.append(figure)
        save(figure, *args, **options)

    monkeypatch.setattr(Figure, "savefig", remember)
    return figures


def comparison(workshop: Any, count: int = 1, *, layers: int = 3, **options: Any) -> Any:
    """A comparison of some fine-tunes."""
    base = workshop.tensors(layers=layers)
    spec = workshop.save("base", base)
    models = [workshop.save(f"model-{i}", workshop.tuned(base, i, 0.1 * i)) for i in range(1, count + 1)]
    return diff_models(spec, models, **options)


def panels(figure: Any) -> list[Any]:
    """The panels that show, without bars."""
    return [axes for axes in figure.get_axes() if axes.images and axes.get_visible()]


def texts(panel: Any) -> list[str]:
    return [text.get_text() for text in panel.texts]


def test_values_of_the_cells(workshop: Any, tmp_path: Path, drawn: list[Any]) -> None:
    found = comparison(workshop, 2)
    heatmap(found, tmp_path / "heat.png")
    first, second, conflict = panels(drawn[0])
    assert [label.get_text() for label in first.get_yticklabels()] == [
        "embedding",
        "0",
        "1",
        "2",
        "norm",
        "head",
    ]
    kinds = ["attn.q", "attn.k", "attn.v", "attn.o", "mlp.gate", "mlp.up", "mlp.down", "norm"]
    assert [label.get_text() for label in first.get_xticklabels()] == kinds
    for model, panel in enumerate((first, second)):
        image = np.asarray(panel.images[0].get_array())
        assert image[2, 5] == found.cells["1", "mlp.up"].relative_norm(model)
        assert set(image[5]) == {found.cells["head", "head"].relative_norm(model)}
    assert (
        np.asarray(conflict.images[0].get_array())[3, 1]
        == found.cells["2", "attn.k"].of_any()["sign_conflict"]
    )
    assert len(texts(first)) == 3 * 8 + 3
    assert first.images[0].norm is second.images[0].norm
    assert [panel.get_title() for panel in (first, second, conflict)] == [
        "model-1",
        "model-2",
        "opposed signs",
    ]


@pytest.mark.parametrize(
    ("layers", "count"),
    [
        (2, 3),
        pytest.param(12, 2, marks=pytest.mark.slow),
        (40, 1),
        pytest.param(80, 1, marks=pytest.mark.slow),
    ],
)
def test_labels_neither_overlap_nor_leave_the_picture(
    workshop: Any, tmp_path: Path, drawn: list[Any], layers: int, count: int
) -> None:
    heatmap(comparison(workshop, count, layers=layers), tmp_path / "heat.png")
    (figure,) = drawn
    for panel in panels(figure):
        for labels in (panel.get_yticklabels(), panel.get_xticklabels(), panel.texts):
            boxes = [label.get_window_extent() for label in labels]
            assert all(figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1 for box in boxes)
            assert all(figure.bbox.y0 <= box.y0 and box.y1 <= figure.bbox.y1 for box in boxes)
            overlaps = [one.overlaps(other) for i, one in enumerate(boxes) for other in boxes[:i]]
            assert not any(overlaps)
    assert bool(panels(figure)[0].texts) == (layers <= 12)


def test_the_scale_is_logarithmic_where_changes_are_far_apart(
    workshop: Any, tmp_path: Path, drawn: list[Any]
) -> None:
    from matplotlib.colors import LogNorm

    base = {name: torch.ones_like(tensor) for name, tensor in workshop.tensors().items()}
    near = {name: tensor * 1.125 for name, tensor in base.items()}
    far = near | {"model.norm.weight": 1.001 * base["model.norm.weight"]}
    spec = workshop.save("base", base)
    for name, tensors in (("near", near), ("far", far)):
        heatmap(diff_models(spec, [workshop.save(name, tensors)]), tmp_path / f"{name}.png")
    near_norm, far_norm = (panels(figure)[0].images[0].norm for figure in drawn)
    assert (near_norm.vmin, near_norm.vmax) == (0, pytest.approx(0.125))
    assert isinstance(far_norm, LogNorm)
    assert (far_norm.vmin, far_norm.vmax) == pytest.approx((0.001, 0.125), rel=1e-3)


def test_what_has_no_number_is_written(workshop: Any, tmp_path: Path, drawn: list[Any]) -> None:
    base = workshop.tensors(layers=2) | {"model.layers.1.mlp.up_proj.bias": torch.zeros(12)}
    base["model.layers.0.mlp.gate_proj.weight"] = torch.zeros(12, 8)
    del base["model.layers.1.mlp.down_proj.weight"]
    changes = {"model.layers.0.mlp.gate_proj.weight": torch.ones(12, 8), "model.norm.weight": torch.ones(8)}
    found = diff_models(workshop.save("base", base), [workshop.save("model", base | changes)])
    heatmap(found, tmp_path / "heat.png")
    (panel,) = panels(drawn[0])
    written = texts(panel)
    assert len(written) == 2 * 8 + 3 - 1
    assert written.count("∞") == 1
    assert written.count("0") == len(written) - 2


def test_models_without_layers_and_without_changes_are_drawn(
    workshop: Any, tmp_path: Path, drawn: list[Any]
) -> None:
    spec = workshop.save("base", {"lm_head.weight": torch.ones(4, 2)})
    heatmap(diff_models(spec, [spec, spec]), tmp_path / "heat.png")
    assert [texts(panel) for panel in panels(drawn[0])] == [["0"], ["0"], ["0"]]


def test_long_names_are_shortened(workshop: Any, tmp_path: Path, drawn: list[Any]) -> None:
    tensors = workshop.tensors()
    name = "a-very-long-name-of-a-model-" * 4
    models = [workshop.save(f"{name}{i}", tensors) for i in range(4)]
    heatmap(diff_models(workshop.save("base", tensors), models), tmp_path / "heat.png")
    (figure,) = drawn
    for text in [panel.title for panel in panels(figure)] + figure.texts:
        box = text.get_window_extent()
        assert figure.bbox.x0 <= box.x0 < box.x1 <= figure.bbox.x1, text.get_text()
    boxes = [panel.title.get_window_extent() for panel in panels(figure)]
    assert not any(one.overlaps(other) for i, one in enumerate(boxes) for other in boxes[:i])


def test_without_matplotlib_it_says_what_to_install(
    workshop: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = comparison(workshop)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with raises_error("missing_package"):
        heatmap(found, tmp_path / "heat.png")
    with raises_error("missing_package"):
        check_heatmap(tmp_path / "heat.png")


def test_a_folder_and_a_file_in_none_are_refused(tmp_path: Path) -> None:
    with raises_error("invalid_output"):
        check_heatmap(tmp_path)
    with raises_error("invalid_output"):
        check_heatmap(tmp_path / "nowhere" / "heat.png")


def test_a_file_that_cannot_be_written_is_refused(
    workshop: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*names: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with raises_error("unwritable"):
        heatmap(comparison(workshop), tmp_path / "heat.png")
    assert not list(tmp_path.glob("*png*"))
