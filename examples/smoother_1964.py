"""The oldest attention: the kernel smoother of Nadaraya and of Watson, both of 1964.

    m(x) = sum_j K((x - x_j) / h) y_j / sum_j K((x - x_j) / h)

With the Gaussian kernel K this is softmax attention whose score is -|q - k|² / (2 h²): the query is the point asked
for, the keys are the observed x, the values the observed y. (E. A. Nadaraya, "On Estimating Regression", 1964;
G. S. Watson, "Smooth Regression Analysis", 1964.)

    python examples/smoother_1964.py
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

import attnc
from attnc.frontends.api import Model, attention, gaussian

Array = NDArray[Any]


def model(bandwidth: float = 0.3) -> attnc.Graph:
    """points [n, 1], observed x and y [m, 1] each → estimates [n, 1]."""
    m = Model("smoother")
    points = m.input("points", "float32", ["n", 1])
    x = m.input("x", "float32", ["m", 1])
    y = m.input("y", "float32", ["m", 1])
    m.output("estimates", attention(points, x, y, score=gaussian(bandwidth)))
    return m.graph


def closed_formula(points: Array, x: Array, y: Array, bandwidth: float) -> Array:
    """The formula above, in float64."""
    kernel = np.exp(-(((points - x.T.astype(np.float64)) / bandwidth) ** 2) / 2)
    return np.asarray(kernel @ y / kernel.sum(1, keepdims=True))


def main() -> None:
    rng = np.random.default_rng(1964)
    x = np.sort(rng.uniform(0, 2 * np.pi, (200, 1)), axis=0).astype(np.float32)
    y = (np.sin(x) + rng.normal(scale=0.3, size=x.shape)).astype(np.float32)
    points = np.linspace(0.5, 5.5, 6, dtype=np.float32)[:, None]
    feeds = {"points": points, "x": x, "y": y}

    print("200 noisy observations of a sine, smoothed with bandwidth 0.3:")
    print(f"{'x':>6}{'sin x':>9}{'numpy':>9}{'ort-cpu':>9}{'formula':>9}")
    columns = [np.sin(points)]
    columns += [attnc.compile(model(0.3), target=t).session().run(feeds)["estimates"] for t in ("numpy", "ort-cpu")]
    columns += [closed_formula(points, x, y, 0.3)]
    for point, *row in zip(points, *columns, strict=True):
        print(f"{point[0]:6.1f}" + "".join(f"{value[0]:9.4f}" for value in row))

    print("\nA narrow kernel follows the noise, a wide one flattens the curve:")
    print(f"{'bandwidth':>9}{'distance to sin x':>19}{'targets and formula within 1e-4':>33}")
    feeds["points"] = grid = np.linspace(0.5, 5.5, 101, dtype=np.float32)[:, None]
    for bandwidth in (0.03, 0.3, 3.0):
        formula = closed_formula(grid, x, y, bandwidth)
        runs = [attnc.compile(model(bandwidth), target=t).session().run(feeds) for t in ("numpy", "ort-cpu")]
        apart = max(np.abs(run["estimates"] - formula).max() for run in runs)
        print(f"{bandwidth:9.2f}{np.sqrt(np.mean((formula - np.sin(grid)) ** 2)):19.3f}{apart < 1e-4!s:>33}")


if __name__ == "__main__":
    main()
