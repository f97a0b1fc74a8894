"""What a program is: graphs of operators over tensors with symbolic sizes."""

from __future__ import annotations

from .attributes import Attr, AttrValue
from .builder import Builder
from .dims import (
    Dim,
    Shape,
    SymDim,
    at_least,
    dim_max,
    dim_min,
    evaluate_dim,
    parse_dim,
    product,
    substitute_dim,
    symbol,
    symbols,
)
from .errors import (
    ArtifactError,
    AttncError,
    InputError,
    ModelError,
    OutputError,
    ParseError,
    ShapeError,
    TargetError,
    UnsupportedError,
    UsageError,
    VerifyError,
)
from .evaluate import evaluate
from .expr import Expr
from .graph import Graph, Node, Output, State, Use, Value
from .maskset import MaskSet
from .operator import Array, Call, Operator, Run, Sample
from .ops import OPERATORS, operator
from .samples import sample_graph
from .tensor import Tensor
from .text import parse, print_graph, print_node
from .types import DType, TensorType, dtype_of
from .verify import verify

__all__ = [
    "OPERATORS",
    "ArtifactError",
    "Array",
    "Attr",
    "AttrValue",
    "AttncError",
    "Builder",
    "Call",
    "DType",
    "Dim",
    "Expr",
    "Graph",
    "InputError",
    "MaskSet",
    "ModelError",
    "Node",
    "Operator",
    "Output",
    "OutputError",
    "ParseError",
    "Run",
    "Sample",
    "Shape",
    "ShapeError",
    "State",
    "SymDim",
    "TargetError",
    "Tensor",
    "TensorType",
    "UnsupportedError",
    "UsageError",
    "Use",
    "Value",
    "VerifyError",
    "at_least",
    "dim_max",
    "dim_min",
    "dtype_of",
    "evaluate",
    "evaluate_dim",
    "operator",
    "parse",
    "parse_dim",
    "print_graph",
    "print_node",
    "product",
    "sample_graph",
    "substitute_dim",
    "symbol",
    "symbols",
    "verify",
]
