"""Graphs as text: print and parse. Printing what was parsed gives the same text.

    graph @block(%x: float32[batch, seq, 4]) {
      const %w: float32[4, 4] = data:6d0c…
      %y = matmul(%x, %w): float32[batch, seq, 4]  # model.py:7
      return out = %y
    }

Small constants show their values; of large ones the text holds a digest, and ``parse`` takes their data from a
mapping when it is given one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from .attributes import Attr, AttrValue, print_attrs
from .errors import ModelError, ParseError
from .graph import Graph, Node, State, Value, lookup, quote_name
from .tensor import Tensor
from .types import DType, TensorType, split_commas

__all__ = ["parse", "print_graph", "print_node"]

Data = Callable[[str, TensorType], Tensor]


def print_graph(graph: Graph) -> str:
    """The graph as text, ending in a newline."""
    return "\n".join(_graph_lines(graph, "graph", "")) + "\n"


def _graph_lines(graph: Graph, word: str, indent: str) -> Iterator[str]:
    inputs = ", ".join(f"{v}: {v.type}" for v in graph.inputs)
    yield f"{indent}{word} @{quote_name(graph.name)}({inputs}) {{"
    inner = indent + "  "
    for state in graph.states.values():
        initial = f" = {_initial(state)}" if state.initial is not None else ""
        note = f"  # {state.description}" if state.description else ""
        yield f"{inner}state {quote_name(state.name)}: {state.type}{initial}{note}"
    for value in graph.constants:
        yield f"{inner}const {value}: {value.type} = {value.constant}"
    for node in graph.nodes:
        yield inner + print_node(node)
        for region in node.regions:
            yield from _graph_lines(region, "region", inner + "  ")
    results = ", ".join(f"{quote_name(o.name)} = {o.value}" for o in graph.outputs)
    yield f"{inner}return {results}".rstrip()
    yield indent + "}"


def _initial(state: State) -> str:
    """What a state begins as, with its type where the sizes of the state's do not say it."""
    assert state.initial is not None
    same = state.initial.type == state.type
    return str(state.initial) if same else f"{state.initial.type} {state.initial}"


def print_node(node: Node) -> str:
    """One line for a node, without its regions."""
    results = ", ".join(str(v) for v in node.outputs)
    operands = ", ".join("none" if v is None else str(v) for v in node.inputs)
    attrs = print_attrs(node.op.attributes, node.attrs)
    types = ", ".join(str(v.type) for v in node.outputs)
    head = f"{results} = " if results else ""
    source = f"  # {node.source}" if node.source else ""
    return f"{head}{node.op.name}({operands}){' ' + attrs if attrs else ''}{': ' + types if types else ''}{source}"


def parse(text: str, data: Mapping[str, Tensor] | Data | None = None) -> Graph:
    """Reads a graph. ``data`` gives the large constants by digest (a mapping, or a function of digest and type);
    without it they are known by digest alone. Raises ParseError with the line's number and text."""
    fetch: Data = (
        data if callable(data) else lambda digest, type: (data or {}).get(digest) or Tensor.missing(type, digest)
    )
    lines = _Lines(text)
    graph = _parse_graph(lines, "graph", fetch)
    if lines.peek() is not None:
        raise lines.error("there is text behind the graph")
    return graph


_NAME = re.compile(r"(?:[A-Za-z0-9_.$/-]|:(?=\S))+")


class _Lines:
    def __init__(self, text: str) -> None:
        self.lines = [(n, line.strip()) for n, line in enumerate(text.split("\n"), 1) if line.strip()]
        self.position = 0

    def peek(self) -> str | None:
        return self.lines[self.position][1] if self.position < len(self.lines) else None

    def take(self) -> str:
        line = self.peek()
        if line is None:
            raise ParseError("the text ends before the graph does: a } is missing")
        self.position += 1
        return line

    def error(self, reason: str) -> ParseError:
        number, line = self.lines[min(max(self.position - 1, 0), len(self.lines) - 1)] if self.lines else (1, "")
        return ParseError(f"line {number}: {reason}: {line}")


class _Scan:
    """Reads one line from left to right."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def skip(self) -> None:
        while self.at < len(self.text) and self.text[self.at] == " ":
            self.at += 1

    def take(self, token: str) -> bool:
        self.skip()
        if self.text.startswith(token, self.at):
            self.at += len(token)
            return True
        return False

    def expect(self, token: str) -> None:
        if not self.take(token):
            raise ParseError(f"expected {token!r} before {self.text[self.at :][:40]!r}")

    def name(self) -> str:
        self.skip()
        if self.text.startswith('"', self.at):
            name, end = json.JSONDecoder().raw_decode(self.text, self.at)
            self.at = end
            return str(name)
        match = _NAME.match(self.text, self.at)
        if not match:
            raise ParseError(f"expected a name before {self.text[self.at :][:40]!r}")
        self.at = match.end()
        return match[0]

    def balanced(self, opening: str, closing: str) -> str:
        """The text between a bracket, which must come next, and its partner."""
        self.expect(opening)
        end = self.text.find(closing, self.at)
        plain = self.text[self.at : end]
        if end >= 0 and opening not in plain and '"' not in plain:
            self.at = end + 1
            return plain
        start, depth, quoted, escaped = self.at, 1, False, False
        while self.at < len(self.text):
            char = self.text[self.at]
            self.at += 1
            if quoted:
                quoted = escaped or char != '"'
                escaped = char == "\\" and not escaped
            elif char == '"':
                quoted = True
            elif char == opening:
                depth += 1
            elif char == closing:
                depth -= 1
                if depth == 0:
                    return self.text[start : self.at - 1]
        raise ParseError(f"a {closing} is missing")

    def until(self, stop: str) -> str:
        """The text up to ``stop`` outside quotes, or to the end."""
        end = _find(self.text, stop, self.at)
        part, self.at = self.text[self.at : end], end
        return part

    @property
    def rest(self) -> str:
        return self.text[self.at :].strip()


def _find(text: str, stop: str, start: int) -> int:
    end = text.find(stop, start)
    end = len(text) if end < 0 else end
    if '"' not in text[start:end]:
        return end
    quoted = escaped = False
    for at in range(start, len(text)):
        char = text[at]
        if quoted:
            quoted = escaped or char != '"'
            escaped = char == "\\" and not escaped
        elif char == '"':
            quoted = True
        elif text.startswith(stop, at):
            return at
    return len(text)


def _parse_graph(lines: _Lines, word: str, data: Data) -> Graph:
    try:
        scan = _Scan(lines.take())
        scan.expect(f"{word} @")
        graph = Graph(scan.name())
        for part in split_commas(scan.balanced("(", ")")):
            item = _Scan(part)
            item.expect("%")
            name = item.name()
            item.expect(":")
            graph.add_input(name, TensorType.parse(item.rest))
        scan.expect("{")
        while not (lines.peek() or "").startswith("return"):
            _parse_line(graph, lines, data)
        scan = _Scan(lines.take())
        scan.expect("return")
        for part in split_commas(scan.rest):
            item = _Scan(part)
            name = item.name()
            item.expect("=")
            value = _operand(graph, item.rest)
            if value is None:
                raise ParseError(f"the output {name} is none")
            graph.add_output(value, name)
        if lines.take() != "}":
            raise ParseError("expected } behind return")
        return graph
    except ModelError as error:
        if re.match(r"line \d+: ", str(error)):
            raise
        raise lines.error(str(error)) from error
    except (ValueError, KeyError, IndexError, ArithmeticError) as error:
        raise lines.error(f"{type(error).__name__}: {error}") from error


def _parse_line(graph: Graph, lines: _Lines, data: Data) -> None:
    line = lines.take()
    if line == "}":
        raise ParseError("a return line is missing")
    scan = _Scan(line)
    if scan.take("const %"):
        name = scan.name()
        scan.expect(":")
        type = TensorType.parse(scan.until(" = "))
        scan.expect("=")
        graph.add_constant(_tensor(scan.rest, type, data), name)
    elif scan.take("state "):
        graph.add_state(_parse_state(scan, data))
    else:
        _parse_node(graph, scan, lines, data)


def _parse_state(scan: _Scan, data: Data) -> State:
    name = scan.name()
    scan.expect(":")
    body = scan.until("  # ")
    note = scan.rest.removeprefix("# ") if scan.rest else ""
    type_text, _, initial = body.partition(" = ")
    type = TensorType.parse(type_text)
    if not initial:
        return State(name, type, None, note)
    own = re.fullmatch(r"(\w+\[[^\]]*\]) (.*)", initial.strip())
    value = _tensor(own[2], TensorType.parse(own[1]), data) if own else _tensor(initial.strip(), type, data)
    return State(name, type, value, note)


def _tensor(text: str, type: TensorType, data: Data) -> Tensor:
    if not all(isinstance(d, int) for d in type.shape):
        raise ParseError(f"a constant must have a shape of numbers, not {type}")
    if text.startswith("data:"):
        tensor = data(text.removeprefix("data:"), type)
    elif text.startswith("[") and text.endswith("]"):
        items = np.array([_number(i, type) for i in split_commas(text[1:-1])], type.dtype.numpy)
        tensor = Tensor(items.reshape(type.concrete({})))
    else:
        tensor = Tensor(np.asarray(_number(text, type), type.dtype.numpy))
    if tensor.type != type:
        raise ParseError(f"a constant {type} cannot be {tensor.type}")
    return tensor


def _number(text: str, type: TensorType) -> Any:
    text = text.strip()
    if type.dtype is DType.BOOL:
        return {"true": True, "false": False}[text]
    return type.dtype.numpy.type(float(text)) if type.dtype.is_float else int(text)


def _operand(graph: Graph, text: str) -> Value | None:
    text = text.strip()
    if text == "none":
        return None
    if text.startswith("%"):
        scan = _Scan(text[1:])
        value = graph.value(scan.name())
        if scan.rest:
            raise ParseError(f"unexpected {scan.rest!r} behind {value}")
        return value
    match = re.fullmatch(r"(\w+)\((.*)\)", text)
    if not match:
        raise ParseError(f"not an operand: {text!r}")
    type = TensorType.parse(f"{match[1]}[]")
    return graph.add_constant(Tensor(np.asarray(_number(match[2], type), type.dtype.numpy)))


def _parse_node(graph: Graph, scan: _Scan, lines: _Lines, data: Data) -> None:
    names = []
    if scan.text.startswith("%"):
        while scan.take("%"):
            names.append(scan.name())
            scan.take(",")
            scan.skip()
        scan.expect("=")
    op = lookup(scan.name())
    operands = [_operand(graph, part) for part in split_commas(scan.balanced("(", ")"))]
    scan.skip()
    attrs = _attrs(op.name, op.attributes, scan.balanced("{", "}")) if scan.text.startswith("{", scan.at) else {}
    types = [TensorType.parse(part) for part in split_commas(scan.until("  # "))] if scan.take(":") else []
    source = scan.rest.removeprefix("#").strip()
    regions = []
    while (lines.peek() or "").startswith("region "):
        regions.append(_parse_graph(lines, "region", data))
    if len(types) != len(names):
        raise ParseError(f"{len(names)} results but {len(types)} types")
    graph.add(op, *operands, attrs=attrs, regions=regions, names=names, types=types, source=source)


def _attrs(where: str, specs: Mapping[str, Attr], text: str) -> dict[str, AttrValue]:
    values: dict[str, AttrValue] = {}
    for part in split_commas(text):
        name, equals, value = part.partition("=")
        name = name.strip()
        if not equals or name not in specs:
            raise ParseError(f"{where} has no attribute {name!r}; it has: {', '.join(specs) or 'none'}")
        values[name] = specs[name].read(value)
    return values
