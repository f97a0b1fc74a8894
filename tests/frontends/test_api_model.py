"""Models of the graph API: inputs, parameters, scopes, sources, and what errors say."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

from attnc.frontends.api import (
    Model,
    alibi,
    attention,
    causal,
    concat,
    dense,
    ffn,
    layer_normed,
    linear,
    multi_head_attention,
    pre_norm,
    relu,
    scan,
)
from attnc.ir import AttncError, DType, ModelError, ShapeError, UsageError, evaluate, parse, symbol
from attnc.tests.frontends.reference import draw


def test_the_model_of_the_docstring() -> None:
    model = Model("two_layer")
    x = model.input("x", "float32", ["batch", "seq", 64])
    model.output("y", dense(relu(dense(x, 128, "up")), 64, "down"))
    assert list(model.parameters) == ["up.weight", "up.bias", "down.weight", "down.bias"]
    graph = model.graph
    assert graph.name == "two_layer"
    assert [str(v.type) for v in graph.inputs] == ["float32[batch, seq, 64]"]
    given = draw(2, 3, 64).astype(np.float32)
    w = {name: value.value.constant.array for name, value in model.parameters.items() if value.value.constant}
    expected = np.maximum(given @ w["up.weight"] + w["up.bias"], 0) @ w["down.weight"] + w["down.bias"]
    np.testing.assert_allclose(evaluate(graph, {"x": given})["y"], expected, rtol=1e-4, atol=1e-5)


def test_dimensions() -> None:
    model = Model("sizes")
    assert model.dim("2*seq + 1") == 2 * symbol("seq") + 1
    assert model.dim(symbol("n")) == symbol("n")
    assert model.input("numpy", "float32", list(np.array([3, 4]))).shape == (3, 4)
    with pytest.raises(ShapeError, match=r"a dimension is a whole number or text, not None, at test_api_model\.py:"):
        model.input("x", "float32", [None])  # type: ignore[list-item]


def test_sizes_and_ranges() -> None:
    model = Model("sizes")
    x = model.input("x", "float32", ["n", 2])
    model.output("count", model.size("2 * n"))
    model.output("range", model.arange(x.shape[0], start=3))
    model.output("floats", model.arange("n", "float32"))
    got = evaluate(model.graph, {"x": np.zeros((4, 2), np.float32)})
    assert got["count"] == 8
    assert got["range"].tolist() == [3, 4, 5, 6]
    assert got["floats"].dtype == np.float32


def test_constants_take_the_dtype_of_the_model() -> None:
    model = Model("constants", dtype="float64")
    assert model.constant([1.0, 2.0]).dtype is DType.FLOAT64
    assert model.constant(np.array([1, 2], np.float32)).dtype is DType.FLOAT64
    assert model.constant([1, 2]).dtype is DType.INT64
    assert model.constant([True]).dtype is DType.BOOL
    assert model.constant([1, 2], "float32").dtype is DType.FLOAT32


# -- parameters ------------------------------------------------------------------------------------------------------


def test_weights_come_by_their_scoped_names() -> None:
    weights = {"h.0.attn.query.weight": draw(4, 4), "h.0.attn.query.bias": draw(4)}
    model = Model("scoped", weights)
    x = model.input("x", "float32", ["n", 4])
    with model.scope("h"), model.scope("0"), model.scope(""), model.scope("attn"):
        assert model.full_name("query.weight") == "h.0.attn.query.weight"
        y = dense(x, 4, "query")
    assert model.full_name("query") == "query"
    model.output("y", y)
    given = draw(3, 4, seed=1).astype(np.float32)
    expected = given @ weights["h.0.attn.query.weight"] + weights["h.0.attn.query.bias"]
    np.testing.assert_allclose(evaluate(model.graph, {"x": given})["y"], expected, rtol=1e-5, atol=1e-6)


def test_a_scope_ends_with_an_error_too() -> None:
    model = Model("scoped")
    with pytest.raises(KeyError), model.scope("h"):
        raise KeyError
    assert model.full_name("w") == "w"


def test_one_name_is_one_parameter() -> None:
    model = Model("shared")
    first, again = model.parameter("w", (3, 4)), model.parameter("w", (3, 4))
    assert first.value is again.value
    with pytest.raises(ModelError, match=r"parameter w is \[3, 4\], not \[4, 3\], at test_api_model\.py:\d+"):
        model.parameter("w", (4, 3))


def test_random_weights_depend_on_seed_and_name_only() -> None:
    def array(seed: int, *before: str, name: str = "w") -> Any:
        model = Model("random", seed=seed)
        for other in before:
            model.parameter(other, (7,))
        constant = model.parameter(name, (50, 40)).value.constant
        assert constant is not None
        return constant.array

    assert np.array_equal(array(0), array(0, "a", "b"))
    assert not np.array_equal(array(0), array(1))
    assert not np.array_equal(array(0), array(0, name="v"))
    assert array(0).std() == pytest.approx(1 / np.sqrt(50), rel=0.1)


def test_initial_values() -> None:
    model = Model("initial")
    kinds: dict[str, Any] = {}
    for init in ("zeros", "ones", "normal", "fan_in", "fan_in_last"):
        constant = model.parameter(init, (400, 25), init).value.constant
        assert constant is not None
        kinds[init] = constant.array
    assert not kinds["zeros"].any()
    assert (kinds["ones"] == 1).all()
    assert kinds["normal"].std() == pytest.approx(0.02, rel=0.1)
    assert kinds["fan_in"].std() == pytest.approx(1 / 20, rel=0.1)
    assert kinds["fan_in_last"].std() == pytest.approx(1 / 5, rel=0.1)


def test_missing_and_misshapen_weights() -> None:
    model = Model("weights", {"up.weight": draw(4, 3)})
    x = model.input("x", "float32", ["n", 4])
    with pytest.raises(ModelError, match=r"the weight up\.weight is \[4, 3\], not \[4, 5\], at test_api_model\.py:\d+"):
        dense(x, 5, "up")
    with (
        model.scope("h.0"),
        pytest.raises(ModelError, match=r"no h\.0\.down\.weight \[4, 5\], asked for at h\.0 test_api_model\.py:\d+"),
    ):
        dense(x, 5, "down")


# -- sources and errors ----------------------------------------------------------------------------------------------


def test_every_node_knows_its_line() -> None:
    model = Model("lines")
    x = model.input("x", "float32", ["batch", "n", 8])
    with model.scope("h.3"):
        y = pre_norm(x, lambda x: layer_normed(x, "ln"), lambda x: multi_head_attention(x, heads=2, mask=causal()))
    line = line_above()
    z = ffn(y, 16)
    model.output("z", z)
    sources = [node.source for node in model.graph.nodes]
    assert set(sources[:-5]) == {f"{scope} test_api_model.py:{line}" for scope in ("h.3", "h.3.attn")}
    assert set(sources[-5:]) == {f"ffn test_api_model.py:{line + 2}"}
    assert parse(str(model.graph)) == model.graph


def line_above() -> int:
    """The line above the call."""
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return frame.f_back.f_lineno - 1


def test_a_wrong_shape_names_line_scope_and_shapes() -> None:
    model = Model("wrong")
    x, w = model.input("x", "float32", ["batch", "seq", 3]), model.input("w", "float32", [4, 5])
    with model.scope("h.0"), pytest.raises(ShapeError) as caught:
        linear(x, w)
    line = caught.tb.tb_lineno
    says = "the inner dimensions must agree: 3 and 4 differ (x: float32[batch, seq, 3], y: float32[4, 5])"
    assert str(caught.value) == f"matmul at h.0 test_api_model.py:{line}: {says}"


def test_what_a_model_refuses() -> None:
    model, other = Model("one"), Model("other")
    with pytest.raises(ModelError, match=r"the model one has no output; call model\.output\(name, tensor\)"):
        _ = model.graph
    x, y = model.input("x", "float32", [3]), other.input("y", "float32", [3])
    with pytest.raises(ModelError, match=r"\(y: float32\[3\]\) belongs to the model other, not one, at test_api_"):
        _ = x + y
    with pytest.raises(ModelError):
        model.output("y", y)
    with pytest.raises(AttncError):
        model.input("x", "float32", [3])
    with pytest.raises(AttncError):
        model.input("z", "float33", [3])
    with pytest.raises(AttncError, match="frobnicate"):
        model.op("frobnicate", x)
    with pytest.raises(UsageError, match="no activation is called swish; known: relu, gelu, gelu_tanh, silu"):
        ffn(x, 4, "swish")
    with pytest.raises(UsageError, match=r"no initial value is called xavier; known: fan_in, .*zeros, ones"):
        model.parameter("w", (3,), "xavier")
    with pytest.raises(ShapeError, match="concat needs at least one tensor"):
        concat([])


# -- loops -----------------------------------------------------------------------------------------------------------


def test_scan_sums() -> None:
    model = Model("sums")
    x = model.input("x", "float32", ["batch", "n", 2])

    def body(total: Any, x: Any) -> Any:
        return [total + x], [total * 2.0]

    (last,), (before,) = scan(body, [x[:, 0] * 0.0], [x])
    model.output("last", last)
    model.output("before", before)
    given = draw(2, 4, 2).astype(np.float32)
    got = evaluate(model.graph, {"x": given})
    np.testing.assert_allclose(got["last"], given.sum(1), rtol=1e-5, atol=1e-6)
    sums = np.concatenate([np.zeros((2, 1, 2)), given.cumsum(1)[:, :-1]], 1)
    np.testing.assert_allclose(got["before"], 2 * sums, rtol=1e-5, atol=1e-6)


def test_load_names_within_and_without_a_loop_differ() -> None:
    """A tensor of the loop and one around it may have the same name."""
    model = Model("names")
    x, slopes = model.input("x", "float32", [1, 3, 2, 4, 5]), model.input("slope", "float32", [2])
    inner_slopes = model.input("inner", "float32", [1, 3, 2])

    def body(x: Any, slope: Any) -> Any:
        slope = slope.reshape(2)
        slope.model._graph.rename(slope.value, "slope")
        return [], [attention(x, x, x, score=[alibi(slopes), alibi(slope)])]

    _, (y,) = scan(body, [], [x, inner_slopes])
    model.output("y", y)
    given = {"x": draw(1, 3, 2, 4, 5), "slope": np.array([1.0, 2.0]), "inner": draw(1, 3, 2)}
    feeds = {name: array.astype(np.float32) for name, array in given.items()}
    got = evaluate(model.graph, feeds, precision=DType.FLOAT64)["y"]
    distance = abs(np.arange(4)[:, None] - np.arange(4))
    for t in range(3):
        for h in range(2):
            one = feeds["x"][0, t, h].astype(np.float64)
            slope = float(feeds["slope"][h]) + float(feeds["inner"][0, t, h])
            e = np.exp(one @ one.T / np.sqrt(5) - slope * distance)
            np.testing.assert_allclose(got[0, t, h], e / e.sum(-1, keepdims=True) @ one, rtol=1e-9)
