"""Every ONNX operator that has a handler, on the test cases that the onnx package ships (inputs and right results)."""

from __future__ import annotations

import re
import warnings
from collections import defaultdict
from functools import cache
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from attnc.frontends.onnx import load_onnx
from attnc.frontends.onnx.table import HANDLERS
from attnc.ir import UnsupportedError, evaluate, parse, verify

WITHOUT_CASES = {"GlobalLpPool", "Loop"}
OPERATORS = sorted(op for domain, op in HANDLERS if not domain and op not in WITHOUT_CASES and onnx.defs.has(op))
"""The package has no case of GlobalLpPool; those of Loop slice up to the iteration's number or collect sequences: both
are refused. See the tests of control flow for others."""

REFUSED = re.compile(
    r"FLOAT8|FLOAT4|float4|_INT4|UINT4|INT2\b|UINT2|_INT2|STRING|string|FLOAT4E2M1"  # element types
    r"|quantizelinear_(e4m3fn|e5m2|u?int[24]$|float4)"
    r"|_e8m0|_opt$|_seq$|identity_sequence"  # things that are not tensors
    r"|bitshift_(left|right)_int"  # shifts of signed numbers
    r"|attention.*qk_matmul(?!.*softmax)|attention_local_window_gqa_rank4_mask"  # scores before the softmax
    r"|training_dropout(?!_zero_ratio)|batchnorm.*training"  # training
    r"|lstm_with_peepholes|einsum_batch_diagonal|scan_sum$"
)
"""Cases that are to be refused, by name."""

EMPTY = re.compile(r"reduce_(max|min|log_sum_exp)_empty_set$")
"""Reductions of nothing: a size is at least 1 here."""


@cache
def cases() -> dict[str, list[Any]]:
    """Operator → its cases with one node."""
    from onnx.backend.test.loader import load_model_tests

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the cases themselves divide by zero
        found = load_model_tests(kind="node")
    sorted_cases = defaultdict(list)
    for case in found:
        assert case.model is not None
        nodes = case.model.graph.node
        if len(nodes) == 1 and nodes[0].domain in ("", "ai.onnx") and not EMPTY.search(case.name):
            sorted_cases[nodes[0].op_type].append(case)
    return sorted_cases


def as_array(value: Any) -> Any:
    return numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else np.asarray(value)


def check(case: Any) -> None:
    """Imports and runs a case. Sizes given as data are tried as constants: a case's shapes are fixed anyway."""
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    given = {v.name: x for v, x in zip(model.graph.input, case.data_sets[0][0], strict=False)}
    try:
        graph = load_onnx(model)
    except UnsupportedError:
        for name, data in given.items():
            array = as_array(data)
            if array.ndim <= 1 and array.dtype != object:
                model.graph.initializer.append(numpy_helper.from_array(array, name))
        graph = load_onnx(model)
    verify(graph)
    assert str(parse(str(graph))) == str(graph)
    results = evaluate(graph, {v.name: as_array(given[v.name]) for v in graph.inputs})
    for found, expected in zip(results.values(), case.data_sets[0][1], strict=True):
        wanted = as_array(expected)
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
        if wanted.dtype.kind == "b":
            assert np.array_equal(found, wanted)
            continue
        half = {"float16": 2e-3, "bfloat16": 2e-2}.get(wanted.dtype.name, 0.0)
        np.testing.assert_allclose(
            found.astype(np.float64), wanted.astype(np.float64), max(case.rtol, half), max(1e-6, half), equal_nan=True
        )


@pytest.mark.parametrize("operator", OPERATORS)
def test_the_standard_cases(operator: str) -> None:
    passed = 0
    for case in cases()[operator]:
        try:
            check(case)
        except Exception as error:
            if not isinstance(error, UnsupportedError) or not REFUSED.search(case.name):
                raise AssertionError(f"{case.name}: {error}") from error
        else:
            passed += 1
    assert passed, "no case of this operator ran"


@pytest.mark.parametrize(
    "operator", ["AffineGrid", "MeanVarianceNormalization", "NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss",
                 "HannWindow", "CenterCropPad"]
)  # fmt: skip
def test_operators_without_a_handler_by_their_function_body(operator: str) -> None:
    assert ("", operator) not in HANDLERS
    ran = 0
    for case in cases()[operator]:
        if "_high_ii" not in case.name:  # an index out of range that the standard ignores
            check(case)
            ran += 1
    assert ran
