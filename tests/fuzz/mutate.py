"""Mutants of ONNX models, by structure and by bytes. Everything follows from one random generator."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import onnx
from google.protobuf.message import DecodeError
from onnx import AttributeProto, GraphProto, NodeProto, TensorProto, helper

__all__ = ["mutant"]

_NUMBERS = (0, 1, -1, 2, 3, 4, 7, 16, 63, 64, 65, 1000, 2**31 - 1, 2**31, -(2**31), 10**9, 2**40, 2**62, 2**63 - 1)
_FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-30, 1e30, float("inf"), float("-inf"), float("nan"))
_TEXTS = (
    "", "x", "a b", 'a"b', "a\nb", "a\0b", "%", "#", "é", "日本", "seq*2", "seq//0", "2**99", "min(a, b)", "-1", "((((",
    "lambda", "x" * 5000, "tanh", "NOTSET", "ij,jk->ik", "…", "a,b->c", "reflect", "  # %x", "}", "data:0",
)  # fmt: skip
_OPERATORS = sorted({schema.name for schema in onnx.defs.get_all_schemas() if schema.domain == ""})
_CONTRIB = (
    "Attention",
    "MultiHeadAttention",
    "GroupQueryAttention",
    "FusedMatMul",
    "BiasGelu",
    "SkipLayerNormalization",
)


def mutant(base: onnx.ModelProto, rng: random.Random) -> tuple[bytes, list[str]]:
    """The bytes of a mutant of ``base``, which is changed, and what was done."""
    steps = []
    by_bytes = rng.random() < 0.25
    if not by_bytes or rng.random() < 0.3:
        for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 5))):
            change = rng.choice(_CHANGES)
            try:
                told = change(base, rng)
            except DecodeError:  # nested deeper than protobuf can write
                told = ""
            if told:
                steps.append(f"{change.__name__.strip('_')}: {told}")
    content = base.SerializeToString()
    if by_bytes:
        content, told = _bytes(content, rng)
        steps.append(told)
    return content, steps


# -- structure -----------------------------------------------------------------------------------------------


def _graph(model: onnx.ModelProto, rng: random.Random) -> GraphProto:
    """The main graph, or sometimes a subgraph."""
    inner = [a.g for node in model.graph.node for a in node.attribute if a.HasField("g")]
    return rng.choice(inner) if inner and rng.random() < 0.5 else model.graph


def _nodes(model: onnx.ModelProto, rng: random.Random) -> list[NodeProto]:
    if model.functions and rng.random() < 0.3:
        return list(rng.choice(model.functions).node)
    return list(_graph(model, rng).node)


def _node(model: onnx.ModelProto, rng: random.Random) -> NodeProto | None:
    nodes = _nodes(model, rng)
    return rng.choice(nodes) if nodes else None


def _names(model: onnx.ModelProto) -> list[str]:
    graph = model.graph
    made = [name for node in graph.node for name in node.output]
    return [v.name for v in graph.input] + [t.name for t in graph.initializer] + made or ["x"]


def _number(rng: random.Random) -> int:
    return rng.choice(_NUMBERS) if rng.random() < 0.7 else rng.randint(-9, 9)


def _drop_node(model: onnx.ModelProto, rng: random.Random) -> str:
    graph = _graph(model, rng)
    if not graph.node:
        return ""
    at = rng.randrange(len(graph.node))
    name = graph.node[at].name
    del graph.node[at]
    return name or "a node"


def _bypass_node(model: onnx.ModelProto, rng: random.Random) -> str:
    """Its readers read its first operand."""
    graph = _graph(model, rng)
    found = [n for n in graph.node if n.input and n.output and n.input[0]]
    if not found:
        return ""
    node = rng.choice(found)
    source, gone = node.input[0], node.output[0]
    for other in graph.node:
        for k, name in enumerate(other.input):
            if name == gone:
                other.input[k] = source
    return f"{gone} by {source}"


def _double_node(model: onnx.ModelProto, rng: random.Random) -> str:
    graph = _graph(model, rng)
    if not graph.node:
        return ""
    node = NodeProto()
    node.CopyFrom(rng.choice(graph.node))
    if rng.random() < 0.5:
        for k, name in enumerate(node.output):
            node.output[k] = f"{name}_again"
    graph.node.insert(rng.randint(0, len(graph.node)), node)
    return ", ".join(node.output)


def _move_node(model: onnx.ModelProto, rng: random.Random) -> str:
    graph = _graph(model, rng)
    if len(graph.node) < 2:
        return ""
    at, to = rng.randrange(len(graph.node)), rng.randrange(len(graph.node))
    node = NodeProto()
    node.CopyFrom(graph.node[at])
    del graph.node[at]
    graph.node.insert(to, node)
    return f"{at} to {to}"


def _change_operand(model: onnx.ModelProto, rng: random.Random) -> str:
    node = _node(model, rng)
    if node is None or not node.input:
        return ""
    at = rng.randrange(len(node.input))
    node.input[at] = rng.choice([*rng.sample(_names(model), 1) * 6, "", rng.choice(_TEXTS)])
    return f"operand {at} of {node.output[:1]} is {node.input[at][:40]!r}"


def _swap_operands(model: onnx.ModelProto, rng: random.Random) -> str:
    a, b = _node(model, rng), _node(model, rng)
    if a is None or b is None or not a.input or not b.input:
        return ""
    i, j = rng.randrange(len(a.input)), rng.randrange(len(b.input))
    a.input[i], b.input[j] = b.input[j], a.input[i]
    return f"{i} of {a.output[:1]} and {j} of {b.output[:1]}"


def _count_operands(model: onnx.ModelProto, rng: random.Random) -> str:
    node = _node(model, rng)
    if node is None:
        return ""
    if node.input and rng.random() < 0.5:
        del node.input[rng.randrange(len(node.input))]
    else:
        node.input.append(rng.choice(_names(model)))
    return f"{node.output[:1]} has {len(node.input)}"


def _change_result(model: onnx.ModelProto, rng: random.Random) -> str:
    node = _node(model, rng)
    if node is None:
        return ""
    if node.output and rng.random() < 0.7:
        at = rng.randrange(len(node.output))
        node.output[at] = rng.choice([rng.choice(_names(model)), rng.choice(_TEXTS)])
    else:
        node.output.append(rng.choice(["more", *_names(model)[:3]]))
    return str(list(node.output))[:80]


def _change_operator(model: onnx.ModelProto, rng: random.Random) -> str:
    node = _node(model, rng)
    if node is None:
        return ""
    old = node.op_type
    other = _node(model, rng)
    if rng.random() < 0.8:
        node.op_type = rng.choice(_OPERATORS) if rng.random() < 0.6 or other is None else other.op_type
    else:
        node.domain, node.op_type = rng.choice(("com.microsoft", "own", "ai.onnx")), rng.choice(_CONTRIB)
    return f"{old} is {node.domain}.{node.op_type}"


def _change_attribute(model: onnx.ModelProto, rng: random.Random) -> str:
    found = [n for n in _nodes(model, rng) if n.attribute]
    if not found:
        return ""
    node = rng.choice(found)
    a = rng.choice(node.attribute)
    match a.type:
        case AttributeProto.INT:
            a.i = _number(rng)
        case AttributeProto.FLOAT:
            a.f = rng.choice(_FLOATS)
        case AttributeProto.STRING:
            a.s = rng.choice([*(t.encode() for t in _TEXTS), b"\xff\xfe"])
        case AttributeProto.INTS:
            values = list(a.ints)
            _change_list(values, rng)
            a.ClearField("ints")
            a.ints.extend(values)
        case AttributeProto.TENSOR:
            _change_tensor(a.t, rng)
        case _:
            a.type = rng.choice(AttributeProto.AttributeType.values())
    return f"{a.name} of {node.op_type} {node.output[:1]}"


def _change_list(values: list[int], rng: random.Random) -> None:
    kind = rng.random()
    if kind < 0.5 and values:
        values[rng.randrange(len(values))] = _number(rng)
    elif kind < 0.75 and values:
        del values[rng.randrange(len(values))]
    else:
        values.insert(rng.randint(0, len(values)), _number(rng))


def _attribute_type(model: onnx.ModelProto, rng: random.Random) -> str:
    found = [n for n in _nodes(model, rng) if n.attribute]
    if not found:
        return ""
    node = rng.choice(found)
    a = rng.choice(node.attribute)
    match rng.randrange(4):
        case 0:
            a.type = rng.choice(AttributeProto.AttributeType.values())
        case 1:
            node.attribute.append(a)
        case 2:
            node.attribute.remove(a)
            return f"no {a.name} of {node.op_type}"
        case _:
            name = a.name
            a.CopyFrom(helper.make_attribute(name, rng.choice([1, 2.5, "text", [1, 2], [0.5], b"\xff", ["a", "b"]])))
    return f"{a.name} of {node.op_type} {node.output[:1]}"


def _more_attributes(model: onnx.ModelProto, rng: random.Random) -> str:
    """An attribute that the operator's definition has."""
    node = _node(model, rng)
    if node is None or not onnx.defs.has(node.op_type):
        return ""
    # The stubs of onnx know no attribute types.
    schema: Any = onnx.defs.get_schema(node.op_type)
    known = [a for a in schema.attributes.values() if a.type.name in ("INT", "FLOAT", "INTS")]
    if not known:
        return ""
    a = rng.choice(known)
    values = {
        "INT": _number(rng),
        "FLOAT": rng.choice(_FLOATS),
        "INTS": [_number(rng) for _ in range(rng.randint(1, 4))],
    }
    node.attribute.append(helper.make_attribute(a.name, values[a.type.name]))
    return f"{a.name} of {node.op_type} is {values[a.type.name]}"


def _change_tensor(t: TensorProto, rng: random.Random) -> None:
    match rng.randrange(6):
        case 0:
            dims = list(t.dims)
            _change_list(dims, rng)
            t.ClearField("dims")
            t.dims.extend(dims)
        case 1:
            t.data_type = rng.choice(TensorProto.DataType.values())
        case 2:
            t.raw_data = t.raw_data[: rng.randint(0, len(t.raw_data))]
        case 3:
            t.data_location = TensorProto.EXTERNAL
            for key, value in (
                ("location", rng.choice(("mutant.onnx", "../x", "/dev/zero", "", "."))),
                ("offset", "8"),
            ):
                t.external_data.add(key=key, value=value)
        case 4:
            t.name = rng.choice(_TEXTS)
        case _:
            count = max(1, len(t.int64_data) or len(t.raw_data) // 8)
            if count <= 64:
                t.data_type = TensorProto.INT64
                t.ClearField("raw_data")
                t.ClearField("int64_data")
                t.int64_data.extend(_number(rng) for _ in range(count))


def _change_initialiser(model: onnx.ModelProto, rng: random.Random) -> str:
    found = model.graph.initializer
    if not found:
        return ""
    small = [t for t in found if len(t.raw_data) <= 64]
    t = rng.choice(small if small and rng.random() < 0.7 else found)
    name = t.name
    match rng.randrange(8):
        case 0:
            found.remove(t)
        case 1:
            found.append(t)
        case 2:
            model.graph.input.append(helper.make_tensor_value_info(name, t.data_type, list(t.dims)))
        case _:
            _change_tensor(t, rng)
    return str(name)


def _change_input(model: onnx.ModelProto, rng: random.Random) -> str:
    graph = _graph(model, rng)
    if not graph.input:
        return ""
    value = rng.choice(graph.input)
    tensor = value.type.tensor_type
    kind = rng.randrange(8)
    if kind == 0:
        tensor.elem_type = rng.choice(TensorProto.DataType.values())
    elif kind == 1:
        graph.input.remove(value)
    elif kind == 2:
        graph.input.append(value)
    elif kind == 3:
        value.name = rng.choice([*_TEXTS, *_names(model)[:3]])
    elif kind == 4:
        tensor.shape.dim.add(dim_value=_number(rng))
    elif kind == 5 and tensor.shape.dim:
        del tensor.shape.dim[rng.randrange(len(tensor.shape.dim))]
    elif tensor.shape.dim:
        d = rng.choice(tensor.shape.dim)
        if rng.random() < 0.5:
            d.dim_value = _number(rng)
        else:
            d.dim_param = rng.choice(_TEXTS)
    return f"{value.name[:40]!r} ({kind})"


def _change_output(model: onnx.ModelProto, rng: random.Random) -> str:
    graph = _graph(model, rng)
    if not graph.output:
        return ""
    value = rng.choice(graph.output)
    match rng.randrange(4):
        case 0:
            value.name = rng.choice(_names(model))
        case 1:
            graph.output.remove(value)
        case 2:
            graph.output.append(value)
        case _:
            graph.output.add(name=rng.choice(_names(model)))
    return str(value.name)


def _change_version(model: onnx.ModelProto, rng: random.Random) -> str:
    if rng.random() < 0.2:
        model.ir_version = rng.choice((0, 3, 4, 8, 99))
        return f"ir_version {model.ir_version}"
    if not model.opset_import:
        return ""
    entry = rng.choice(model.opset_import)
    match rng.randrange(8):
        case 0:
            model.opset_import.remove(entry)
        case 1:
            model.opset_import.append(entry)
        case 2:
            entry.domain = rng.choice(("own", "com.microsoft", "ai.onnx", ""))
        case 3:
            entry.version = _number(rng)
        case _:
            entry.version = rng.randint(6, 26)
    return f"{entry.domain} {entry.version}"


def _wrap_node(model: onnx.ModelProto, rng: random.Random) -> str:
    """The node inside the branches of an If, or as the body of a function, a few levels deep."""
    nodes = [k for k, n in enumerate(model.graph.node) if n.output and all(n.output)]
    if not nodes:
        return ""
    at = rng.choice(nodes)
    node = NodeProto()
    node.CopyFrom(model.graph.node[at])
    depth = rng.choice((1, 1, 2, 3, 40))
    inner = node
    if rng.random() < 0.5:
        depth = min(depth, 20)  # protobuf reads messages up to 100 deep
        condition = rng.choice(_names(model))
        for level in range(depth):
            outputs = [helper.make_empty_tensor_value_info(name) for name in inner.output]
            branch = helper.make_graph([inner], f"branch{level}", [], outputs)
            other = helper.make_graph(
                [node], f"other{level}", [], [*map(helper.make_empty_tensor_value_info, node.output)]
            )
            names = [f"{name}_{level}" if level < depth - 1 else name for name in node.output]
            inner = helper.make_node("If", [condition], names, then_branch=branch, else_branch=other)
    else:
        calls = 1 if depth < 40 else 2
        names = [f"i{k}" for k in range(len(node.input))]
        body = NodeProto()
        body.CopyFrom(node)
        body.ClearField("input")
        body.input.extend(names)
        opsets = list(model.opset_import)
        for level in range(depth):
            outputs = list(node.output)
            copies = [body]
            for _ in range(calls - 1):
                again = NodeProto()
                again.CopyFrom(body)
                again.ClearField("output")
                again.output.extend(f"{name}_unused" for name in outputs)
                copies.append(again)
            model.functions.append(helper.make_function("fuzz", f"f{level}", names, outputs, copies, opsets))
            body = helper.make_node(f"f{level}", names, outputs, domain="fuzz")
        inner = helper.make_node(f"f{depth - 1}", list(node.input), list(node.output), domain="fuzz")
        if rng.random() < 0.9:
            model.opset_import.append(helper.make_opsetid("fuzz", 1))
    model.graph.node[at].CopyFrom(inner)
    return f"{node.output[:1]} in {depth} × {inner.op_type}"


def _square_sizes(model: onnx.ModelProto, rng: random.Random) -> str:
    """Sizes multiplied by themselves again and again, as the target of a reshape."""
    inputs = [v.name for v in model.graph.input]
    if not inputs:
        return ""
    op = rng.choice(("Mul", "Add", "Div", "Mod", "Pow", "Max", "Min", "Sub"))
    count = rng.choice((3, 30, 200))
    nodes = [helper.make_node("Shape", [inputs[0]], ["fuzz_0"])]
    for k in range(count):
        second = f"fuzz_{k if rng.random() < 0.7 else rng.randint(0, k)}"
        nodes.append(helper.make_node(op if rng.random() < 0.8 else "Add", [f"fuzz_{k}", second], [f"fuzz_{k + 1}"]))
    nodes.append(helper.make_node(rng.choice(("ConstantOfShape", "Identity")), [f"fuzz_{count}"], ["fuzz_made"]))
    model.graph.node.extend(nodes)
    model.graph.output.add(name="fuzz_made")
    return f"{count} × {op}"


def _giant(model: onnx.ModelProto, rng: random.Random) -> str:
    """An operator that makes much of little."""
    size = rng.choice((2**20, 2**31, 2**40, 2**62))
    big = helper.make_tensor("fuzz_size", TensorProto.INT64, [1], [size])
    one = helper.make_tensor("fuzz_one", TensorProto.INT64, [1], [1])
    scalar = helper.make_tensor("fuzz_scalar", TensorProto.INT64, [], [size])
    unit = helper.make_tensor("fuzz_unit", TensorProto.INT64, [], [1])
    pads = helper.make_tensor("fuzz_pads", TensorProto.INT64, [2], [size, size])
    ends = helper.make_tensor("fuzz_ends", TensorProto.INT64, [2], [0, 1])
    model.graph.initializer.extend([big, one, scalar, unit, pads, ends])
    op, operands = rng.choice([
        ("ConstantOfShape", ["fuzz_size"]),
        ("Expand", ["fuzz_one", "fuzz_size"]),
        ("Range", ["fuzz_unit", "fuzz_scalar", "fuzz_unit"]),
        ("Tile", ["fuzz_one", "fuzz_size"]),
        ("OneHot", ["fuzz_one", "fuzz_scalar", "fuzz_ends"]),
        ("Pad", ["fuzz_one", "fuzz_pads"]),
        ("HannWindow", ["fuzz_scalar"]),
        ("BlackmanWindow", ["fuzz_scalar"]),
        ("EyeLike", ["fuzz_one"]),
        ("Resize", ["fuzz_one", "", "", "fuzz_size"]),
        ("MelWeightMatrix", ["fuzz_scalar", "fuzz_scalar", "fuzz_scalar", "fuzz_unit", "fuzz_scalar"]),
    ])  # fmt: skip
    model.graph.node.add(op_type=op, input=operands, output=["fuzz_giant"])
    model.graph.node.add(
        op_type=rng.choice(("Identity", "Shape", "Neg", "CumSum")), input=["fuzz_giant"], output=["fuzz_end"]
    )
    model.graph.output.add(name="fuzz_end")
    return f"{op} of {size}"


_CHANGES: tuple[Callable[[onnx.ModelProto, random.Random], str], ...] = (
    _drop_node, _bypass_node, _bypass_node, _double_node, _move_node, _change_operand, _change_operand,
    _swap_operands, _swap_operands, _count_operands, _change_result, _change_operator, _change_operator,
    _change_operator, _change_attribute, _change_attribute, _change_attribute, _attribute_type, _more_attributes,
    _more_attributes, _change_initialiser, _change_initialiser, _change_initialiser, _change_input, _change_input,
    _change_output, _change_version, _wrap_node, _square_sizes, _giant,
)  # fmt: skip
"""Those that leave more models that import occur more than once."""


# -- bytes ---------------------------------------------------------------------------------------------------


def _bytes(content: bytes, rng: random.Random) -> tuple[bytes, str]:
    data = bytearray(content)
    steps = []
    for _ in range(rng.choice((1, 1, 2, 4))):
        if not data:
            break
        at = rng.randrange(len(data))
        if rng.random() < 0.5:
            at = min(at, rng.randrange(min(len(data), 4000)))  # the nodes come before the weights
        stop = min(len(data), at + rng.choice((1, 2, 8, 100)))
        kind = rng.choice(("flip", "set", "cut", "repeat", "insert", "end", "ones"))
        if kind == "flip":
            data[at] ^= 1 << rng.randrange(8)
        elif kind == "set":
            data[at] = rng.randrange(256)
        elif kind == "cut":
            del data[at:stop]
        elif kind == "repeat":
            data[at:at] = data[at:stop]
        elif kind == "insert":
            data[at:at] = rng.randbytes(stop - at)
        elif kind == "end":
            del data[at:]
        else:
            data[at : at + 9] = b"\xff" * 9
        steps.append(f"{kind} {at}")
    return bytes(data), f"bytes: {', '.join(steps)}"
