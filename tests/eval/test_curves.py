"""Training curves: which metrics, what is drawn of them."""

import sys

import numpy as np
import pytest

from files import png_size
from raises import raises_error
from rlhf_eval import metric_keys, training_curves
from rlhf_eval.curves import _panel, _running_mean, _whole

ROWS = [
    {
        "step": step,
        "loss": 1.0 / step,
        "grad_norm": 1.0,
        "learning_rate": 1e-6,
        "rewards/margins": None if step == 2 else 0.1 * step,
        "epoch": step / 10,
        "num_tokens": 100 * step,
        "step_time": 0.1,
        **({"eval_loss": 0.9, "eval_accuracy": 0.5} if step == 3 else {}),
    }
    for step in range(1, 5)
]


def test_keys_are_the_method_s_metrics_with_the_optimizer_s_last():
    assert metric_keys(ROWS) == ["loss", "rewards/margins", "grad_norm", "learning_rate"]
    assert metric_keys([]) == metric_keys([{"step": 1, "note": "text", "done": True}]) == []


def test_any_keys_make_a_grid(tmp_path):
    one, four = tmp_path / "one.png", tmp_path / "plots" / "four.png"
    training_curves([{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}], ["loss"], one)
    training_curves(ROWS, ["loss", "rewards/margins", "not/logged", "$_^odd"], four)
    assert png_size(four)[0] == 3 * png_size(one)[0] and png_size(four)[1] == 2 * png_size(one)[1]
    assert [file.name for file in four.parent.iterdir()] == ["four.png"]
    with pytest.raises(ValueError, match="at least one"):
        training_curves(ROWS, [], one)


def test_a_title_and_long_noisy_runs_are_drawn(tmp_path):
    rows = [{"step": step, "loss": 1.0 + step % 3, "phase": "plain"} for step in range(300)]
    training_curves(rows, ["loss"], tmp_path / "long.png", title="DPO: $odd_name")
    assert png_size(tmp_path / "long.png") == (600, 408)


def lines_of(rows, key):
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    _panel(axes, rows, key)
    points = [(np.asarray(line.get_xdata()), np.asarray(line.get_ydata())) for line in axes.lines]
    drawn = {
        str(line.get_label()): (x.tolist(), y.tolist())
        for line, (x, y) in zip(axes.lines, points, strict=True)
    }
    return drawn, [text.get_text() for text in axes.texts]


def test_a_panel_holds_training_and_held_out_values():
    drawn, _ = lines_of(ROWS, "loss")
    assert drawn == {
        "training": ([1, 2, 3, 4], pytest.approx([1, 1 / 2, 1 / 3, 1 / 4])),
        "held out": ([3], [0.9]),
    }
    drawn, _ = lines_of(ROWS, "rewards/margins")
    assert drawn["training"][0] == [1, 3, 4]
    assert lines_of(ROWS, "not/logged") == ({}, ["no values"])


def test_a_long_line_gets_its_running_mean():
    rows = [{"step": step, "loss": float(step % 2)} for step in range(400)]
    drawn, _ = lines_of(rows, "loss")
    # windows of 11 steps hold 5 or 6 ones
    assert all(5 / 11 <= value <= 6 / 11 for value in drawn["training (running mean)"][1][5:-5])


def test_running_mean_is_that_of_a_naive_loop():
    values = np.random.default_rng(0).normal(size=203).tolist()
    half = 203 // 80
    naive = [np.mean(values[max(0, i - half) : i + half + 1]) for i in range(203)]
    assert _running_mean(values).tolist() == pytest.approx(naive)


def test_a_running_mean_of_one_value_is_that_value():
    assert set(_running_mean([0.1] * 5000)) == {0.1}
    assert list(_running_mean([1.0, 2.0, 6.0])) == [1.0, 2.0, 6.0]


@pytest.mark.parametrize(
    ("step", "said"), [(0, "0"), (250, "250"), (5000, "5000"), (20_000, "20k"), (2e6, "2M")]
)
def test_steps_are_said_shortly(step, said):
    assert _whole(step) == said


def test_without_matplotlib_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with raises_error("missing_package"):
        training_curves(ROWS, ["loss"], tmp_path / "curves.png")
    assert not list(tmp_path.iterdir())
