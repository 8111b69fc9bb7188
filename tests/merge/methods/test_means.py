"""Coefficients from lengths and angles; what they make of tensors is in test_functions."""

from __future__ import annotations

import math

import numpy as np
import pytest

from rlhf_merge.methods.families.means import slerp_coefficients, spherical_mean_coefficients


def gram(*vectors: tuple[float, ...]) -> np.ndarray:
    rows = np.array(vectors, dtype=np.float64)
    return rows @ rows.T


@pytest.mark.parametrize("t", [0.0, 0.3, 1.0])
def test_slerp_depends_on_the_angle_alone(t: float):
    # At 60°: sin((1-t)·60°)/sin 60° and sin(t·60°)/sin 60°.
    near, far = (1.0, 0.0), (0.5, math.sqrt(0.75))
    expected = [math.sin((1 - t) * math.pi / 3), math.sin(t * math.pi / 3)] / np.sqrt(0.75)
    for scale in (1e-12, 1.0, 1e12):
        scaled = (far[0] * scale, far[1] * scale)
        assert slerp_coefficients(gram(near, scaled), t) == pytest.approx(expected, rel=1e-12)


def test_spherical_mean_of_equal_directions_weights_them():
    # Directions are one; at lengths 1 and 3 the mean length 2 takes (1/2)·2/1 and (1/2)·2/3.
    found = spherical_mean_coefficients(gram((1, 0), (3, 0)), np.array([1.0, 1.0]), 10, 1e-5)
    assert found == pytest.approx([1, 1 / 3], rel=1e-12)
    # Sums in float32 are off by 1e-7: equal tensors must have coefficients that sum to 1 all the same.
    noisy = np.full((3, 3), 5.0) + 5e-7 * np.array([[0, 1, -1], [1, 0, 1], [-1, 1, 0.5]])
    found = spherical_mean_coefficients(noisy, np.array([0.2, 0.3, 0.9]), 10, 1e-5)
    assert abs(found.sum() - 1) < 1e-12


def test_spherical_mean_stops_at_its_limits():
    vectors, weights = gram((1, 0), (0.1, 1), (-0.5, 1)), np.array([1.0, 2.0, 1.0])
    exact = spherical_mean_coefficients(vectors, weights, 1000, 1e-14)
    distances = [
        np.abs(spherical_mean_coefficients(vectors, weights, steps, 1e-14) - exact).max()
        for steps in (1, 2, 5, 20)
    ]
    assert distances == sorted(distances, reverse=True) and distances[0] > 1e-4 and distances[-1] < 1e-6
    loose = spherical_mean_coefficients(vectors, weights, 1000, 0.5)
    assert np.abs(loose - exact).max() > 1e-4


def test_spherical_mean_of_opposite_directions_is_finite():
    found = spherical_mean_coefficients(gram((1, 0), (-1, 0), (0, 1), (0, -1)), np.ones(4), 10, 1e-5)
    assert np.isfinite(found).all()
    mean = found @ np.array([(1, 0), (-1, 0), (0, 1), (0, -1)])
    assert np.hypot(*mean) == pytest.approx(1)
