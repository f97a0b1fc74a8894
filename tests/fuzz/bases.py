"""What the fuzzer mutates: the zoo's files, pieces of them, and small models of what the zoo lacks."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import onnx
import onnx.parser
import onnx.shape_inference
from onnx import helper

__all__ = ["draw_base"]

_ZOO = Path(__file__).parent.parent / "data" / "zoo"

_SMALL = (
    """<ir_version: 8, opset_import: ["" : 18]>
    loop (float[n, 3] x, int64 trips) => (float[n, 3] last, float[k, n, 3] all) {
        yes = Constant<value = bool {1}>()
        last, all = Loop (trips, yes, x) <
            body = b (int64 i, bool c, float[n, 3] s) => (bool d, float[n, 3] t, float[n, 3] u) {
                d = Identity(c)
                f = Cast<to = 1>(i)
                t = Add(s, f)
                u = Mul(t, x)
            }
        >
    }""",
    """<ir_version: 8, opset_import: ["" : 17]>
    scan (float[2] start, float[t, 2] xs) => (float[2] last, float[t, 2] sums) {
        last, sums = Scan <num_scan_inputs = 1,
            body = b (float[2] s, float[2] x) => (float[2] r, float[2] e) {
                r = Add(s, x)
                e = Identity(r)
            }
        > (start, xs)
    }""",
    """<ir_version: 8, opset_import: ["" : 18]>
    branch (float[n, 4] x, bool c) => (float[n, 4] y) {
        s = Shape(x)
        one = Constant<value = int64 {1}>()
        axis = Constant<value = int64[1] {0}>()
        n = Gather(s, one)
        big = Greater(n, one)
        z = If (big) <
            then_branch = a () => (float[n, 4] p) { p = Relu(x) },
            else_branch = b () => (float[n, 4] q) { q = Neg(x) }
        >
        y = If (c) <
            then_branch = a2 () => (float[n, 4] p2) { p2 = Exp(z) },
            else_branch = b2 () => (float[n, 4] q2) { q2 = CumSum(z, axis) }
        >
    }""",
    """<ir_version: 10, opset_import: ["" : 21, "own" : 1]>
    functions (float[n, 4] x) => (float[n, 4] y) {
        h = own.twice<alpha = 0.5>(x)
        g = Gelu<approximate = "tanh">(h)
        y = own.twice(g)
    }
    <domain: "own", opset_import: ["" : 21]>
    twice<alpha: float = 2.0>(v) => (w) {
        a = Constant<value_float: float = @alpha>()
        t = CastLike(a, v)
        w = Mul(v, t)
    }""",
    """<ir_version: 8, opset_import: ["" : 18]>
    quantised (float[n, 4] x) => (float[n, 2] y)
    <float s = {0.1}, uint8 z = {128}, int8[4, 2] w = {1, -2, 3, -4, 5, -6, 7, -8}, float[2] t = {0.5, 0.25}> {
        q = QuantizeLinear(x, s, z)
        d = DequantizeLinear(q, s, z)
        v = DequantizeLinear<axis = 1>(w, t)
        y = MatMul(d, v)
    }""",
    """<ir_version: 8, opset_import: ["" : 18]>
    shapes (float[batch, seq, 6] x, int64[seq] ids) => (float[a, b, c, d] y, int64[k] r, float[m, e] p) {
        s = Shape<start = 0, end = 2>(x)
        two = Constant<value = int64[2] {2, 3}>()
        target = Concat<axis = 0>(s, two)
        split = Reshape(x, target)
        y = Transpose<perm = [0, 2, 1, 3]>(split)
        zero = Constant<value = int64 {0}>()
        step = Constant<value = int64 {1}>()
        n = Gather(s, step)
        r = Range(zero, n, step)
        k = Constant<value = int64[1] {2}>()
        values, indices = TopK<axis = -1>(x, k)
        axes = Constant<value = int64[1] {1}>()
        sum = ReduceSum<keepdims = 0>(values, axes)
        pads = Constant<value = int64[4] {0, 1, 0, 1}>()
        p = Pad(sum, pads)
    }""",
    """<ir_version: 8, opset_import: ["" : 18]>
    images (float[n, 3, 8, 8] x) => (float[n, 4] y) <float[4, 3, 3, 3] w, float[4] b = {1, 2, 3, 4}> {
        c = Conv<pads = [1, 1, 1, 1], strides = [2, 2]>(x, w, b)
        m = MaxPool<kernel_shape = [2, 2]>(c)
        g = GlobalAveragePool(m)
        y = Flatten(g)
    }""",
    """<ir_version: 8, opset_import: ["" : 18]>
    scatter (float[n, 4] x, int64[n, 2] i, float[n, 2] u) => (float[n, 4] y, float[n, k] o, float[n, n] e) {
        y = ScatterElements<axis = 1>(x, i, u)
        depth = Constant<value = int64 {7}>()
        ends = Constant<value = float[2] {0, 1}>()
        axis = Constant<value = int64[1] {1}>()
        first = ReduceMax(i, axis)
        flat = Squeeze(first, axis)
        o = OneHot(flat, depth, ends)
        e = Einsum<equation = "ij,kj->ik">(x, y)
    }""",
    """<ir_version: 8, opset_import: ["" : 17]>
    recurrent (float[t, n, 3] x) => (float[t, 1, n, 2] y, float[1, n, 2] h, float[1, n, 2] c)
    <float[1, 8, 3] w, float[1, 8, 2] r> { y, h, c = LSTM<hidden_size = 2>(x, w, r) }""",
)


@cache
def _zoo(name: str) -> onnx.ModelProto:
    return onnx.shape_inference.infer_shapes(onnx.load(_ZOO / name))


@cache
def _names() -> list[str]:
    return sorted(path.name for path in _ZOO.glob("*.onnx"))


@cache
def _small(number: int) -> onnx.ModelProto:
    proto = onnx.parser.parse_model(_SMALL[number])
    for value in proto.graph.initializer:
        if not (value.raw_data or value.float_data or value.int32_data or value.int64_data):
            count = 1
            for d in value.dims:
                count *= d
            value.float_data.extend(k / count for k in range(count))
    return proto


def draw_base(rng: random.Random) -> tuple[str, onnx.ModelProto]:
    """What it is called, and a copy of it."""
    kind = rng.random()
    proto = onnx.ModelProto()
    if kind < 0.3:
        number = rng.randrange(len(_SMALL))
        proto.CopyFrom(_small(number))
        return f"small model {number} ({proto.graph.name})", proto
    name = rng.choice(_names())
    if kind < 0.4:
        proto.CopyFrom(_zoo(name))
        return name, proto
    return _piece(name, rng)


def _piece(name: str, rng: random.Random) -> tuple[str, onnx.ModelProto]:
    """Some nodes that belong together: those before a node drawn at random, as many as were drawn."""
    whole = _zoo(name)
    graph = whole.graph
    maker = {output: node for node in graph.node for output in node.output}
    types = {v.name: v for v in (*graph.value_info, *graph.input, *graph.output)}
    last = rng.choice(graph.node)
    count = rng.randint(3, 40)
    kept = {id(last): last}
    queue = [last]
    while queue and len(kept) < count:
        for operand in queue.pop(0).input:
            node = maker.get(operand)
            if node is not None and id(node) not in kept:
                kept[id(node)] = node
                queue.append(node)
    nodes = [node for node in graph.node if id(node) in kept]
    made = {output for node in nodes for output in node.output}
    free = dict.fromkeys(o for node in nodes for o in node.input if o and o not in made)
    initialisers = [t for t in graph.initializer if t.name in free]
    constant = {t.name for t in initialisers}
    inputs = [types[o] for o in free if o not in constant and o in types]
    outputs = [types.get(o) or helper.make_empty_tensor_value_info(o) for o in last.output]
    piece = onnx.ModelProto(ir_version=whole.ir_version)
    piece.opset_import.extend(whole.opset_import)
    piece.functions.extend(whole.functions)
    piece.graph.CopyFrom(helper.make_graph(nodes, graph.name, inputs, outputs, initialisers))
    return f"{len(nodes)} nodes of {name} up to {last.output[0]}", piece
