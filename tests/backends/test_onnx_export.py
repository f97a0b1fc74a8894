"""Every operator, exported at several opsets, checked by onnx and run by ONNX Runtime."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from attnc.backends.base import Options
from attnc.backends.onnx import export
from attnc.backends.onnx.kernels import Dialect
from attnc.backends.onnx.writer import embed, write
from attnc.backends.ort.session import OrtExecutable
from attnc.ir import OPERATORS, Array, DType, Graph, TensorType, UnsupportedError, UsageError, evaluate
from attnc.tests.backends.samples import Case, cases, since

OPSETS = (13, 18, 22, 23, 25)

CASES = {symbolic: {case.name: case for case in cases(symbolic)} for symbolic in (False, True)}


def of(op: str) -> list[Case]:
    return [case for table in CASES.values() for name, case in table.items() if name.rsplit("-", 1)[0] == op]


def checked(graph: Graph, opset: int, runtime: bool = False) -> onnx.ModelProto:
    exported = write(graph, Dialect(opset, runtime))
    embed(exported)
    onnx.checker.check_model(exported.model, full_check=True)
    return exported.model


def written(case: Case, opset: int, runtime: bool = False) -> bool:
    """Whether a case can be said in an opset; an error must name the opset that would do."""
    try:
        write(case.graph, Dialect(opset, runtime))
    except UnsupportedError as error:
        first = since(error)
    else:
        return True
    assert first > opset
    return False


def run(graph: Graph, opset: int, feeds: dict[str, Array], states: dict[str, Array], runtime: bool) -> dict[str, Array]:
    options = Options(opset, threads=1)
    executable = OrtExecutable(graph, None, Dialect(opset, runtime), ["CPUExecutionProvider"], options, "ort-cpu")
    return executable.run(feeds, states)


def assert_close(got: Array, want: Array, tolerance: float) -> None:
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    wide = np.bool_ if want.dtype == np.bool_ else np.float64
    np.testing.assert_allclose(got.astype(wide), want.astype(wide), rtol=tolerance, atol=tolerance / 10)


def test_the_samples_cover_every_operator() -> None:
    assert {name.rsplit("-", 1)[0] for name in CASES[False]} == set(OPERATORS)
    assert len({name.rsplit("-", 1)[0] for name in CASES[True]}) > 0.8 * len(OPERATORS)


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("op", sorted(OPERATORS))
def test_operator(op: str, opset: int) -> None:
    for case in of(op):
        want = evaluate(case.graph, case.feeds, states=dict(case.states))
        for runtime in (False, True):
            if not written(case, opset, runtime):
                continue
            checked(case.graph, opset, runtime)
            states = dict(case.states)
            got = run(case.graph, opset, case.feeds, states, runtime)
            for name, array in want.items():
                assert_close(got[name], array, 1e-5)


@pytest.mark.parametrize("opset", [17, 23])
@pytest.mark.parametrize("op", sorted(OPERATORS))
def test_inferred_shapes_agree(op: str, opset: int) -> None:
    for case in of(op):
        if not written(case, opset):
            continue
        model = checked(case.graph, opset)
        whole = onnx.ModelProto()
        whole.CopyFrom(model)
        stated = {v.name: v for v in (*whole.graph.value_info, *whole.graph.output)}
        del model.graph.value_info[:]
        for output in model.graph.output:
            output.type.tensor_type.ClearField("shape")
        inferred = onnx.shape_inference.infer_shapes(model, data_prop=True)
        for found in (*inferred.graph.value_info, *inferred.graph.output):
            if found.name not in stated or not found.type.tensor_type.HasField("shape"):
                continue
            ours, theirs = (v.type.tensor_type for v in (stated[found.name], found))
            assert ours.elem_type == theirs.elem_type
            pairs = list(zip(ours.shape.dim, theirs.shape.dim, strict=True))
            assert all(
                a.dim_value == b.dim_value
                for a, b in pairs
                if a.WhichOneof("value") == "dim_value" == b.WhichOneof("value")
            ), f"{case.name}: {found.name} is {ours} but {theirs}"


NUMBERS = (
    DType.FLOAT16, DType.BFLOAT16, DType.FLOAT64, DType.INT8, DType.INT16, DType.INT32, DType.INT64, DType.UINT8,
    DType.UINT16, DType.UINT32, DType.UINT64,
)  # fmt: skip
ARITHMETIC = ("add", "sub", "mul", "div", "mod", "fmod", "min", "max", "less", "equal", "neg", "abs", "sign", "relu")


@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
@pytest.mark.parametrize("opset", [13, 23])
def test_element_types(dtype: DType, opset: int) -> None:
    graph = Graph()
    x, y = (graph.add_input(name, TensorType(dtype, (2, 3))) for name in "xy")
    c = graph.add_input("c", TensorType(DType.BOOL, (2, 3)))
    for op in ARITHMETIC:
        operands = (x, y) if len(OPERATORS[op].inputs) == 2 else (x,)
        graph.add_output(graph.add(op, *operands, source="s")[0], op)
    graph.add_output(graph.add("where", c, x, y)[0], "where")
    if dtype is not DType.UINT64:  # reduce_max has no kernel and no wider type there
        for op in ("reduce_sum", "reduce_mean", "reduce_max", "argmax", "cumsum"):
            attrs = {"axis": 1} if op in ("argmax", "cumsum") else {"axes": (1,)}
            graph.add_output(graph.add(op, x, attrs=attrs)[0], op)
    graph.add_output(graph.add("matmul", x, graph.add("transpose", y, attrs={"order": (1, 0)})[0])[0], "matmul")
    graph.add_output(graph.add("expand", x, attrs={"shape": (2, 2, 3)})[0], "expand")
    numbers = np.array([[1, 5, 3], [7, 2, 6]])
    feeds = {"x": numbers.astype(dtype.numpy), "y": np.array([[2, 3, 7], [1, 2, 4]]).astype(dtype.numpy)}
    feeds["c"] = numbers > 3
    if dtype.is_float or dtype.value.startswith("int"):
        feeds["x"][0] *= -1
    want = evaluate(graph, feeds)
    checked(graph, opset)
    got = run(graph, opset, feeds, {}, True)
    for name, array in want.items():
        assert_close(got[name], array, {DType.FLOAT16: 2e-3, DType.BFLOAT16: 2e-2}.get(dtype, 1e-6))


def test_a_condition_stays_boolean_beside_boolean_branches() -> None:
    graph = Graph()
    c, x, y = (graph.add_input(name, TensorType(DType.BOOL, (4,))) for name in "cxy")
    graph.add_output(graph.add("where", c, x, y)[0], "z")
    feeds = {"c": np.array([1, 1, 0, 0], bool), "x": np.array([1, 0, 1, 0], bool), "y": np.array([0, 0, 1, 0], bool)}
    np.testing.assert_array_equal(run(graph, 18, feeds, {}, True)["z"], [True, False, True, False])


def test_wrap_around_survives_wider_arithmetic() -> None:
    graph = Graph()
    x = graph.add_input("x", TensorType(DType.INT8, (2,)))
    graph.add_output(graph.add("add", x, x)[0], "y")
    feeds = {"x": np.array([100, -100], np.int8)}
    np.testing.assert_array_equal(run(graph, 13, feeds, {}, True)["y"], np.array([-56, 56], np.int8))


def test_integer_division_by_zero_does_not_end_the_process() -> None:
    graph = Graph()
    x, y = (graph.add_input(name, TensorType(DType.INT64, (3,))) for name in "xy")
    for op in ("div", "mod", "fmod"):
        graph.add_output(graph.add(op, x, y)[0], op)
    feeds = {"x": np.array([7, -7, 5]), "y": np.array([0, 0, -3])}
    want = evaluate(graph, feeds)
    for name, array in run(graph, 18, feeds, {}, True).items():
        np.testing.assert_array_equal(array, want[name])


def test_what_has_no_kernel_names_the_node() -> None:
    graph = Graph()
    x = graph.add_input("x", TensorType(DType.FLOAT64, (2,)))
    graph.add_output(graph.add("erf", x, source="layer.3/erf")[0], "y")
    checked(graph, 18)
    with pytest.raises(UnsupportedError, match=r"erf at layer\.3/erf.*float64"):
        write(graph, Dialect(18, runtime=True))


@pytest.mark.parametrize("opset", [12, 26])
def test_opsets_that_are_not_written(opset: int) -> None:
    with pytest.raises(UsageError, match="13 to 25"):
        export(Graph(), opset)
