"""Regions: what cond, loop and scan accept, what their sizes become, and what ONNX Runtime says."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx.parser
import onnxruntime
import pytest

from attnc.ir import InputError, ParseError, ShapeError, evaluate, parse, verify


def onnx_run(text: str, feeds: dict[str, Any]) -> list[Any]:
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 18]>\n{text}')
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return list(session.run(None, feeds))


LOOP = """
graph @g(%n: int64[], %go: bool[], %x: float32[k], %limit: float32[]) {
  %last, %seen, %i = loop(%n, %go, %x, %limit) {carried = 1, length = t}: float32[k], float32[t, k], int64[t]
    region @body(%i: int64[], %c: bool[], %x: float32[m], %limit: float32[]) {
      %y = add(%x, %x): float32[m]
      %top = reduce_max(%y): float32[]
      %more = less(%top, %limit): bool[]
      return more = %more, y = %y, seen = %x, i = %i
    }
  return last = %last, seen = %seen, i = %i
}
"""
ONNX_LOOP = """
g (int64 n, bool go, float[k] x, float limit) => (float[k] last, float[t, k] seen, int64[t] steps) {
  last, seen, steps = Loop <body = b (int64 i, bool c, float[k] x0)
    => (bool more, float[k] y, float[k] s, int64 j) {
      y = Add (x0, x0)
      top = ReduceMax <keepdims = 0> (y)
      more = Less (top, limit)
      s = Identity (x0)
      j = Identity (i)
    }> (n, go, x)
}
"""


@pytest.mark.parametrize(
    ("n", "go", "limit"), [(5, True, 1e9), (9, True, 20), (1, True, -1), (0, True, 1), (4, False, 9)]
)
def test_loop_is_that_of_onnxruntime(n: int, go: bool, limit: float) -> None:
    feeds = {
        "n": np.array(n), "go": np.array(go), "x": np.array([1, -3], np.float32), "limit": np.array(limit, np.float32)
    }  # fmt: skip
    graph = parse(LOOP)
    verify(graph)
    found = evaluate(graph, feeds)
    for array, expected in zip(found.values(), onnx_run(ONNX_LOOP, feeds), strict=True):
        assert array.dtype == expected.dtype
        assert array.shape == expected.shape or (array.shape, expected.shape) == ((0, 2), (0, 0))  # it does not know
        np.testing.assert_array_equal(array, expected.reshape(array.shape))


SCAN = """
graph @g(%s: float32[2], %x: float32[2, n], %y: float32[n, 2]) {
  %t, %sums, %twice = scan(%s, %x, %y) ATTRS: float32[2], float32[2, n], float32[n, 2]
    region @body(%s: float32[2], %x: float32[2], %y: float32[2]) {
      %half = mul(%s, float32(0.5)): float32[2]
      %a = add(%half, %x): float32[2]
      %b = sub(%a, %y): float32[2]
      %c = mul(%b, float32(2.0)): float32[2]
      return t = %b, sum = %b, twice = %c
    }
  return t = %t, sums = %sums, twice = %twice
}
"""
ONNX_SCAN = """
g (float[2] s, float[2, n] x, float[n, 2] y) => (float[2] t, float[2, n] sums, float[n, 2] twice) {
  t, sums, twice = Scan <num_scan_inputs = 2, scan_input_axes = [1, 0], scan_input_directions = [IN],
      scan_output_axes = [1, 0], scan_output_directions = [OUT],
      body = b (float[2] s0, float[2] x0, float[2] y0) => (float[2] b0, float[2] b1, float[2] c) {
      k = Constant <value_float = 0.5> ()
      two = Constant <value_float = 2.0> ()
      half = Mul (s0, k)
      a = Add (half, x0)
      b0 = Sub (a, y0)
      b1 = Identity (b0)
      c = Mul (b0, two)
    }> (s, x, y)
}
"""


@pytest.mark.parametrize("ins", [(0, 0), (0, 1), (1, 1)])
@pytest.mark.parametrize("outs", [(0, 0), (1, 0)])
def test_scan_is_that_of_onnxruntime(ins: tuple[int, int], outs: tuple[int, int]) -> None:
    rng = np.random.default_rng(1)
    feeds = {name: rng.normal(size=s).astype(np.float32) for name, s in (("s", (2,)), ("x", (2, 4)), ("y", (4, 2)))}
    text = ONNX_SCAN.replace("[IN]", str(list(ins))).replace("[OUT]", str(list(outs)))
    flags = [f"[{', '.join('true' if d else 'false' for d in pair)}]" for pair in (ins, outs)]
    attrs = f"states = 1, sequences = 2, axes = [-1, 0], reverse = {flags[0]}"
    attrs += f", output_axes = [1, -2], output_reverse = {flags[1]}"
    graph = parse(SCAN.replace("ATTRS", "{" + attrs + "}"))
    verify(graph)
    for array, expected in zip(evaluate(graph, feeds).values(), onnx_run(text, feeds), strict=True):
        np.testing.assert_allclose(array, expected, rtol=1e-6)


COND = """
graph @g(%p: bool[], %x: float32[n]) {
  %y = cond(%p, %x) ATTRS: float32[some]
    region @then(%x: float32[k]) {
      %y = concat(%x, %x) {axis = 0}: float32[2*k]
      return y = %y
    }
    region @else(%x: float32[k]) {
      return x = %x
    }
  return y = %y
}
"""


def test_branches_of_different_sizes_need_a_name() -> None:
    graph = parse(COND.replace("ATTRS", "{sizes = [some]}"))
    verify(graph)
    x = np.ones(3, np.float32)
    assert [evaluate(graph, {"p": np.array(p), "x": x})["y"].shape for p in (True, False)] == [(6,), (3,)]
    with pytest.raises(ParseError, match=r"a size that only a run knows \(result 0: 2\*n or n\) needs a name in sizes"):
        parse(COND.replace("ATTRS", ""))
    with pytest.raises(ParseError, match="sizes names other, which nothing needs"):
        parse(COND.replace("ATTRS", "{sizes = [some, other]}"))


def test_a_region_has_its_own_sizes() -> None:
    """The region's n is 2 where the graph's n is 3."""
    graph = parse("""
        graph @g(%p: bool[], %x: float32[n], %y: float32[m]) {
          %z = cond(%p, %x, %y): int64[]
            region @then(%x: float32[m], %y: float32[n]) {
              %z = size() {value = n}: int64[]
              return z = %z
            }
            region @else(%x: float32[a], %y: float32[b]) {
              %z = size() {value = a}: int64[]
              return z = %z
            }
          return z = %z
        }""")
    verify(graph)
    feeds = {"x": np.ones(3, np.float32), "y": np.ones(2, np.float32)}
    assert [int(evaluate(graph, {"p": np.array(p), **feeds})["z"]) for p in (True, False)] == [2, 3]


GROWS = """region @body(%i: int64[], %c: bool[], %x: float32[m], %y: float32[k]) {
  %x1 = concat(%x, %y) {axis = 0}: float32[k + m]
  return c = %c, x = %x1
}"""
SWAPS = """region @body(%i: int64[], %c: bool[], %x: float32[m], %y: float32[k]) {
  return c = %c, x = %y, y = %x
}"""
FOLLOWS = """region @body(%i: int64[], %c: bool[], %x: float32[m], %y: float32[k]) {
  %x1 = concat(%x, %x) {axis = 0}: float32[2*m]
  return c = %c, x = %x1, y = %x
}"""
INPUTS = "%n: int64[], %x: float32[3], %y: float32[3]"


def infer(body: str, attrs: str, results: str, inputs: str = INPUTS) -> str:
    count = results.count("float")
    names = ", ".join(f"%r{k}" for k in range(count))
    node = f"{names} = loop(%n, none, %x, %y) {{{attrs}}}: {results}"
    text = f"graph @g({inputs}) {{\n  {node}\n{body}\n  return r = %r0\n}}"
    return str(parse(text))


def test_carried_sizes_are_kept_or_named() -> None:
    """A size stays only when one iteration keeps it wherever all sizes are as they were."""
    assert "float32[3], float32[3]" in infer(SWAPS, "carried = 2", "float32[3], float32[3]")
    assert "float32[q]" in infer(GROWS, "carried = 1, sizes = [q]", "float32[q]")
    assert "float32[p], float32[q]" in infer(FOLLOWS, "carried = 2, sizes = [p, q]", "float32[p], float32[q]")
    with pytest.raises(ParseError, match=r"\(carried 1, which begins as 3\) needs a name in sizes"):
        infer(FOLLOWS, "carried = 2, sizes = [p]", "float32[p], float32[3]")
    with pytest.raises(ParseError, match=r"\(carried 1, which begins as m\) needs a name in sizes"):
        infer(FOLLOWS, "carried = 2, sizes = [p]", "float32[p], float32[m]", INPUTS.replace("[3]", "[m]"))
    with pytest.raises(ParseError, match=r"leaves as float32\[6\], but the region takes float32\[3\]"):
        infer(FOLLOWS.replace("[m]", "[3]").replace("2*m", "6"), "carried = 2", "float32[3], float32[3]")


@pytest.mark.parametrize(
    ("attrs", "change", "reason"),
    [
        ("carried = 1", ("", ""), "length must say or name how many iterations there are"),
        ("carried = 3, length = t", ("", ""), "carried is 3, but there are 2 values"),
        ("carried = 2, length = t", ("", ""), r"carried 1 begins as float32\[\] and leaves the region as float32\[m\]"),
        ("carried = 1, length = t", ("%i: int64[]", "%i: int32[]"), "the region's first inputs must be the iteration"),
        ("carried = 1, length = t", ("more = %more", "more = %y"), "the region must give its condition"),
        (
            "carried = 1, length = t",
            ("%limit: float32[])", "%limit: float32[], %z: bool[])"),
            "the region body has 3 inputs for 2 operands",
        ),
        (
            "carried = 1, length = t",
            ("%x: float32[m]", "%x: float32[m, 1]"),
            r"takes float32\[m, 1\] as %x, not float32\[k\]",
        ),
        ("carried = 1, length = t", ("%go: bool[]", "%go: int64[]"), r"condition must be bool\[\]"),
    ],
)
def test_what_a_loop_refuses(attrs: str, change: tuple[str, str], reason: str) -> None:
    text = LOOP.replace("{carried = 1, length = t}", "{" + attrs + "}")
    head, _, body = text.partition("    region")
    if change[0] and change[0] in head and change[0].startswith("%go"):
        head = head.replace(*change)
    elif change[0]:
        body = body.replace(*change)
        if "1]" in change[1]:
            body = body.replace("float32[m]", "float32[m, 1]")
    with pytest.raises(ParseError, match=reason):
        parse(head + "    region" + body)


def test_what_a_scan_refuses() -> None:
    def attempt(attrs: str, *change: str) -> None:
        parse(SCAN.replace("ATTRS", "{" + attrs + "}").replace(*(change or ("", "", 0))))

    good = "states = 1, sequences = 2, axes = [1, 0], output_axes = [1, 0]"
    attempt(good)
    for attrs, change, reason in (
        ("states = 1, sequences = 2", (), "the lengths of the sequences: 2 and n differ"),
        ("states = 1, sequences = 2, axes = [1]", (), "axes must have 2 entries"),
        ("states = 1, sequences = 2, axes = [2, 0]", (), "axis 2 is out of range for sequence 0"),
        ("states = 1, sequences = 0", (), r"sequences \(1 or more\) 0"),
        ("states = 2, sequences = 2", (), "of 3 values"),
        (good.replace("output_axes = [1", "output_axes = [3"), (), "cannot be stacked on axis 3"),
        (good, ("return t = %b", "return t = %i"), "no value called i"),
        (good, ("%y: float32[2])", "%y: float32[1])"), r"takes float32\[1\] as %y, but 1 would be 2"),
    ):
        with pytest.raises(ParseError, match=reason):
            attempt(attrs, *change)


def test_a_wrong_size_inside_a_region_is_named() -> None:
    graph = parse("""
        graph @g(%n: int64[], %x: float32[2]) {
          %r = loop(%n, none, %x) {carried = 1}: float32[2]
            region @body(%i: int64[], %c: bool[], %x: float32[2]) {
              %keep = less(%i, int64(1)): bool[]
              %y = cond(%keep, %x) {sizes = [k]}: float32[2]
                region @then(%x: float32[2]) {
                  return x = %x
                }
                region @else(%x: float32[2]) {
                  %y = concat(%x, %x) {axis = 0}: float32[4]
                  return y = %y
                }
              return c = %c, y = %y
            }
          return r = %r
        }""")
    x = np.ones(2, np.float32)
    assert evaluate(graph, {"n": 1, "x": x})["r"].shape == (2,)
    with pytest.raises(InputError, match=r"cond result y must be float32\[2\], but axis 0 has size 4"):
        evaluate(graph, {"n": 2, "x": x})


def test_states_are_for_the_outer_graph() -> None:
    text = COND.replace("ATTRS", "").replace("float32[some]", "float32[n]")
    text = text.replace(
        "%y = concat(%x, %x) {axis = 0}: float32[2*k]", '%y = state_write(%x) {state = "k"}: float32[k]'
    )
    with pytest.raises(ParseError, match="state_write: the state k is not declared; the graph's states: none"):
        parse(text.replace("  %y = cond", "  state k: float32[n]\n  %y = cond", 1))


STATE = (
    "graph @g(%x: float32[2, 3]) {\n  state k: float32[past, 3]\n  %y = OP: float32[past + 2, 3]\n  return y = %y\n}"
)


@pytest.mark.parametrize(
    ("op", "reason"),
    [
        ('state_append(%x) {state = "k", axis = 1}', "axis 1 of the state k, which is .* cannot grow"),
        ('state_append(%x) {state = "k", axis = 2}', "axis 2 is out of range for rank 2"),
        ('state_append(%x) {state = "q", axis = 0}', "the state q is not declared; the graph's states: k"),
    ],
)
def test_what_states_refuse(op: str, reason: str) -> None:
    parse(STATE.replace("OP", 'state_append(%x) {state = "k", axis = 0}'))
    with pytest.raises(ParseError, match=reason):
        parse(STATE.replace("OP", op))
    write = STATE.replace("OP", 'state_write(%x) {state = "k"}').replace("past, 3", "past, 4")
    with pytest.raises(ParseError, match=r"axis 1 of the state k, which is .*: 3 and 4 differ"):
        parse(write)


ROPE = """
graph @g(%x: float32[b, 2, n, 8], %c: float32[C], %s: float32[S]) {
  %y = rope(%x, %c, %s) A: float32[b, 2, n, 8]
  return y = %y
}
"""


@pytest.mark.parametrize(
    ("cos", "sin", "attrs", "reason"),
    [
        ("n, 4", "n, 4", "", None),
        ("b, n, 4", "b, n, 4", "{interleaved = true}", None),
        ("1, n, 3", "1, n, 3", "{rotary_dim = 6}", None),
        ("n, 4", "n, 3", "", "cos and sin must be of one shape"),
        ("n, 4", "n, 4", "{rotary_dim = 6}", "twice the last axis of cos .*: 6 and 8 differ"),
        ("n, 5", "n, 5", "{rotary_dim = 10}", "rotary_dim must be from 2 to 8, not 10"),
        ("m, 4", "m, 4", "", "the number of positions: n and m differ"),
        ("n, n, 4", "n, n, 4", "", "the batch: b and n differ"),
        ("4", "4", "", "cos and sin"),
    ],
)
def test_what_rope_accepts(cos: str, sin: str, attrs: str, reason: str | None) -> None:
    text = ROPE.replace("C]", cos + "]").replace("S]", sin + "]").replace(" A:", f" {attrs}:" if attrs else ":")
    if reason is None:
        verify(parse(text))
    else:
        with pytest.raises(ParseError, match=reason):
            parse(text)


def test_shape_errors_of_regions_are_shape_errors() -> None:
    graph = parse(COND.replace("ATTRS", "{sizes = [some]}"))
    (node,) = graph.nodes
    with pytest.raises(ShapeError, match=r"cond: pred must be bool\[\]"):
        graph.add("cond", graph.value("x"), graph.value("x"), regions=[r.copy() for r in node.regions])
