"""If, Loop and Scan, against ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest

from attnc.frontends.onnx import load_onnx
from attnc.ir import Graph, UnsupportedError, evaluate, parse, verify


def model(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 18]>\n{text}')


def check(text: str, *feeds: dict[str, Any]) -> Graph:
    proto = model(text)
    graph = load_onnx(proto)
    verify(graph)
    assert str(parse(str(graph))) == str(graph)
    for feed in feeds:
        wanted = onnxruntime.InferenceSession(proto.SerializeToString()).run(None, feed)
        for found, right in zip(evaluate(graph, feed).values(), wanted, strict=True):
            assert found.dtype == right.dtype
            np.testing.assert_allclose(found, right, 1e-6)
    return graph


def vector(n: int) -> Any:
    return np.linspace(-1, 2, n).astype(np.float32)


def test_a_branch_on_data() -> None:
    graph = check(
        """g (float[seq] x, bool c) => (float[seq] y, float[seq] z) <float[1] w = {3.0}> {
            t = Exp(x)
            y, z = If (c) <
                then_branch = a () => (float[seq] p, float[seq] q) { p = Mul(t, w)\n q = Identity(x) },
                else_branch = b () => (float[seq] r, float[seq] s) { r = Add(x, w)\n s = Neg(t) }
            >
        }""",
        {"x": vector(3), "c": np.array(True)},
        {"x": vector(5), "c": np.array(False)},
    )
    assert graph.operator_counts()["cond"] == 1


def test_branches_of_different_sizes() -> None:
    """The result's size is what only the run knows."""
    graph = check(
        """g (float[seq] x, bool[1] c) => (float[n] z) {
            y = If (c) <
                then_branch = a () => (float[k] p) { p = Concat<axis = 0>(x, x) },
                else_branch = b () => (float[seq] q) { q = Neg(x) }
            >
            z = Exp(y)
        }""",
        {"x": vector(3), "c": np.array([True])},
        {"x": vector(3), "c": np.array([False])},
    )
    assert str(graph.outputs[0].value.type) == "float32[y_size_0]"


def test_a_loop_with_captures_carried_and_scanned_values() -> None:
    graph = check(
        """g (float[seq] x, int64 trips) => (float[seq] last, float[n, seq] all) {
            yes = Constant<value = bool {1}>()
            half = Constant<value = float {0.5}>()
            last, all = Loop (trips, yes, x) <
                body = b (int64 i, bool c, float[seq] s) => (bool d, float[seq] t, float[seq] o) {
                    d = Identity(c)
                    h = Mul(s, half)
                    t = Add(h, x)
                    o = Sub(t, s)
                }
            >
        }""",
        {"x": vector(4), "trips": np.array(3)},
        {"x": vector(2), "trips": np.array(1)},
    )
    assert graph.operator_counts()["loop"] == 1


def test_a_loop_as_long_as_a_size() -> None:
    graph = check(
        """g (float[seq] x) => (int64[n] all) {
            yes = Constant<value = bool {1}>()
            trips = Size(x)
            all = Loop (trips, yes) <
                body = b (int64 i, bool c) => (bool d, int64 o) { d = Identity(c)\n o = Mul(i, i) }
            >
        }""",
        {"x": vector(4)},
    )
    assert str(graph.outputs[0].value.type) == "int64[seq]"


def test_a_loop_that_stops_by_itself() -> None:
    check(
        """g (float x) => (float last) {
            yes = Constant<value = bool {1}>()
            limit = Constant<value = float {20.0}>()
            last = Loop ("", yes, x) <
                body = b (int64 i, bool c, float s) => (bool d, float t) { t = Add(s, s)\n d = Less(t, limit) }
            >
        }""",
        {"x": np.array(1.5, np.float32)},
    )


def test_a_carried_value_that_grows_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"node y \(Loop\): the carried t begins as"):
        load_onnx(
            model("""g (float[seq] x, int64 trips) => (float[n] y) {
                yes = Constant<value = bool {1}>()
                y = Loop (trips, yes, x) <
                    body = b (int64 i, bool c, float[k] s) => (bool d, float[m] t) {
                        d = Identity(c)
                        t = Concat<axis = 0>(s, x)
                    }
                >
            }""")
        )


@pytest.mark.parametrize("backwards", [0, 1])
def test_a_scan_over_a_sequence(backwards: int) -> None:
    check(
        f"""g (float[seq, 4] x, float[4] s0, float[4] w) => (float[4] last, float[seq, 4] all) {{
            last, all = Scan<num_scan_inputs = 1, scan_input_directions = [{backwards}],
                body = b (float[4] s, float[4] e) => (float[4] t, float[4] o) {{
                    m = Mul(e, w)
                    t = Add(s, m)
                    o = Tanh(t)
                }}
            > (s0, x)
        }}""",
        {"x": vector(12).reshape(3, 4), "s0": vector(4), "w": vector(4)},
        {"x": vector(28).reshape(7, 4), "s0": vector(4), "w": vector(4)},
    )
