"""Spellings beside the matrix, each against its formula in float64: Gemm, prefix keys, sums with guards, two values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import attnc
from attnc.ir import Builder, DType, Graph, Node, TensorType, Value, evaluate, symbol, verify
from attnc.passes.base import PassResult
from attnc.passes.canonicalise import canonicalise
from attnc.passes.fuse_attention import fuse_attention

B, N, M = symbol("batch"), symbol("seq"), symbol("keys")
INF = float("inf")


def softmax(s: Any) -> Any:
    e = np.exp(s - s.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def fused(graph: Graph) -> PassResult:
    canonicalise(graph)
    result = fuse_attention(graph)
    verify(graph, after="fuse_attention")
    return result


def attentions(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if node.op.name == "attention"]


def close(graph: Graph, given: dict[str, Any], **wanted: Any) -> None:
    found = evaluate(graph, given, DType.FLOAT64)
    for name, want in wanted.items():
        assert np.abs(found[name] - want).max() <= 1e-12 * max(1.0, np.abs(want).max())


def numbers(*shapes: tuple[int, ...]) -> list[Any]:
    rng = np.random.default_rng(3)
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def gemm_model(path: Path, transposed: bool) -> None:
    """Two heads of one sequence, each with its own Gemm for scores: 0.5 q kT + 2 c, and one for values."""
    nodes, heads = [], []
    for h in range(2):
        k = f"k{h}"
        if transposed:
            nodes.append(helper.make_node("Transpose", [k], [f"kt{h}"], perm=[1, 0]))
        nodes += [
            helper.make_node(
                "Gemm", [f"q{h}", f"kt{h}" if transposed else k, "c"], [f"s{h}"], alpha=0.5, beta=2.0,
                transB=0 if transposed else 1,
            ),
            helper.make_node("Softmax", [f"s{h}"], [f"w{h}"], axis=1),
            helper.make_node("Gemm", [f"w{h}", f"v{h}"], [f"o{h}"]),
        ]  # fmt: skip
        heads.append(f"o{h}")
    nodes.append(helper.make_node("Concat", heads, ["out"], axis=1))
    inputs = [
        helper.make_tensor_value_info(f"{name}{h}", TensorProto.FLOAT, ["n" if name == "q" else "m", 4])
        for h in range(2) for name in "qkv"
    ]  # fmt: skip
    inputs.append(helper.make_tensor_value_info("c", TensorProto.FLOAT, ["n", "m"]))
    output = helper.make_tensor_value_info("out", TensorProto.FLOAT, ["n", 8])
    graph = helper.make_graph(nodes, "gemm", inputs, [output])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), path)


@pytest.mark.parametrize("transposed", [False, True])
def test_scores_by_gemm(transposed: bool, tmp_path: Path) -> None:
    gemm_model(tmp_path / "gemm.onnx", transposed)
    graph = attnc.load(str(tmp_path / "gemm.onnx"))
    assert fused(graph).refusals == []
    assert len(attentions(graph)) == 2
    assert all(node.attr("scale") == 0.5 for node in attentions(graph))
    *heads, c = numbers(*[(3, 4), (5, 4), (5, 4)] * 2, (3, 5))
    given = dict(zip(["q0", "k0", "v0", "q1", "k1", "v1", "c"], [*heads, c], strict=True))
    wide = [x.astype(np.float64) for x in heads]
    want = [softmax(0.5 * q @ k.T + 2 * c.astype(np.float64)) @ v for q, k, v in (wide[:3], wide[3:])]
    close(graph, given, out=np.concatenate(want, -1))


class Site:
    def __init__(self, keys: Any = M) -> None:
        self.graph = Graph("by_hand")
        self.b = Builder(self.graph, "test")
        shapes = ((B, 2, N, 4), (B, 2, keys, 4), (B, 2, keys, 3))
        self.q, self.k, self.v = (
            self.graph.add_input(name, TensorType(DType.FLOAT32, shape))
            for name, shape in zip("qkv", shapes, strict=True)
        )

    def scores(self, k: Value | None = None) -> Value:
        return self.b.matmul(self.q, self.b.transpose(self.k if k is None else k, (0, 1, 3, 2)))

    def over(self, name: str, x: Value) -> Value:
        return self.b(f"reduce_{name}", x, axes=(-1,), keepdims=True)

    def causal(self, shift: int = 0, keys: Any = M) -> Value:
        i, j = self.b("iota", shape=(N, 1), axis=0), self.b("iota", shape=(1, keys), axis=1)
        return self.b("less_equal", j, self.b.add(i, shift))


QKV = numbers((2, 2, 3, 4), (2, 2, 5, 4), (2, 2, 5, 3))
GIVEN = dict(zip("qkv", QKV, strict=True))
Q, K, V = (x.astype(np.float64) for x in QKV)
S = Q @ K.swapaxes(-1, -2)
CAUSAL = np.arange(5)[None, :] <= np.arange(3)[:, None]


def test_learned_keys_before_the_others_are_always_visible() -> None:
    """Prefix tuning (Li and Liang 2021): p learned keys and values that every token sees, before causal ones."""
    site = Site(keys=N)
    b, (first_k, first_v) = site.b, numbers((1, 2, 2, 4), (1, 2, 2, 3))
    k, v = (
        b("concat", b.expand(b.constant(first), (B, 2, 2, x.shape[3])), x, axis=2)
        for first, x in ((first_k, site.k), (first_v, site.v))
    )
    masked = b("where", site.causal(2, N + 2), site.scores(k), -INF)
    site.graph.add_output(b.matmul(b("softmax", masked, axis=-1), v), "out")
    assert fused(site.graph).refusals == []
    (node,) = attentions(site.graph)
    assert node.attr("mask").text == "{ [b, h, i, j] : j <= 2 + i }"
    given = GIVEN | {"k": QKV[1][:, :, :3], "v": QKV[2][:, :, :3]}
    all_k, all_v = (
        np.concatenate([np.repeat(first, 2, 0), x[:, :, :3]], 2) for first, x in ((first_k, K), (first_v, V))
    )
    seen = np.arange(5)[None, :] <= np.arange(3)[:, None] + 2
    want = softmax(np.where(seen, Q @ all_k.swapaxes(-1, -2).astype(np.float64), -INF)) @ all_v
    close(site.graph, given, out=want)


@pytest.mark.parametrize("guard", ["equal", "greater", "max"])
@pytest.mark.parametrize("late", [False, True])
def test_a_guard_against_an_empty_sum(guard: str, late: bool) -> None:
    """A row without a key gives zeros."""
    site = Site()
    b = site.b
    keep = site.graph.add_input("keep", TensorType(DType.BOOL, (B, 1, 1, M)))
    x = b("where", keep, site.scores(), -INF)
    peak = site.over("max", x)
    e = b("exp", b.sub(x, b("where", b("is_inf", peak), 0.0, peak)))
    total = site.over("sum", e)
    safe = {
        "equal": lambda: b("where", b("equal", total, 0.0), 1.0, total),
        "greater": lambda: b("where", b("greater", total, 0.0), total, 1.0),
        "max": lambda: b("max", total, 1e-9),
    }[guard]()
    site.graph.add_output(b.div(b.matmul(e, site.v), safe) if late else b.matmul(b.div(e, safe), site.v), "out")
    assert fused(site.graph).refusals == []
    (node,) = attentions(site.graph)
    assert (node.attr("empty"), str(node.attr("where"))) == ("zeros", "keep[b, 0, 0, j]")
    seen = np.array([[True, False, True, True, False], [False] * 5])
    want = np.zeros((2, 2, 3, 3))
    want[0] = softmax(np.where(seen[0], S[0], -INF)) @ V[0]
    close(site.graph, GIVEN | {"keep": seen[:, None, None]}, out=want)


def test_a_floor_without_a_maximum_taken_off_is_no_guard() -> None:
    """Without it a sum may be small, and a floor below it changes the weights."""
    site = Site()
    e = site.b("exp", site.scores())
    site.graph.add_output(site.b.matmul(site.b.div(e, site.b("max", site.over("sum", e), 1e-9)), site.v), "out")
    (refusal,) = fused(site.graph).refusals
    assert "max(their sum, 1e-09)" in refusal.reason


@pytest.mark.parametrize("how", ["where", "mul"])
def test_a_mask_on_the_powers(how: str) -> None:
    site = Site()
    b = site.b
    x = site.scores()
    e = b("exp", b.sub(x, site.over("max", x)))
    e = b("where", site.causal(), e, 0.0) if how == "where" else b.mul(e, b.cast(site.causal(), DType.FLOAT32))
    site.graph.add_output(b.matmul(b.div(e, site.over("sum", e)), site.v), "out")
    assert fused(site.graph).refusals == []
    (node,) = attentions(site.graph)
    assert node.attr("mask").words() == "causal"
    close(site.graph, GIVEN, out=softmax(np.where(CAUSAL, S, -INF)) @ V)


def test_one_more_in_the_sum() -> None:
    """e^s / (1 + sum e^s): a sink with the score 0 (Miller 2023), here with the largest score taken off."""
    site = Site()
    b = site.b
    x = site.scores()
    peak = b("max", site.over("max", x), 0.0)
    e = b("exp", b.sub(x, peak))
    total = b.add(site.over("sum", e), b("exp", b("neg", peak)))
    site.graph.add_output(b.matmul(b.div(e, total), site.v), "out")
    assert fused(site.graph).refusals == []
    assert str(attentions(site.graph)[0].attr("sink")) == "0.0"
    close(site.graph, GIVEN, out=np.exp(S) / (1 + np.exp(S).sum(-1, keepdims=True)) @ V)


@pytest.mark.parametrize("kept", [False, True])
def test_one_softmax_and_two_values(kept: bool) -> None:
    """Two attentions of the same queries and keys; who else reads the weights gets them from the first."""
    site = Site()
    b = site.b
    other = site.graph.add_input("w", TensorType(DType.FLOAT32, (B, 2, M, 6)))
    weights = b("softmax", b("where", site.causal(), site.scores(), -INF), axis=-1)
    site.graph.add_output(b.matmul(weights, site.v), "out")
    guarded = b("where", b("is_nan", weights), 0.0, weights)
    site.graph.add_output(b.matmul(guarded, other), "other")
    if kept:
        site.graph.add_output(weights, "weights")
    assert fused(site.graph).refusals == []
    assert [node.attr("weights") for node in attentions(site.graph)] == [kept, False]
    assert {node.op.name for node in site.graph.nodes} == {"attention"}
    (w,) = numbers((2, 2, 5, 6))
    want = softmax(np.where(CAUSAL, S, -INF))
    wanted = {"out": want @ V, "other": want @ w.astype(np.float64)} | ({"weights": want} if kept else {})
    close(site.graph, GIVEN | {"w": w}, **wanted)


def test_a_branch_that_is_no_attention_leaves_the_other_one() -> None:
    """Weights that meet values, and values of their own making: the first is fused, the second says why not."""
    site = Site()
    b = site.b
    weights = b("softmax", site.scores(), axis=-1)
    site.graph.add_output(b.matmul(weights, site.v), "out")
    received = b.transpose(weights, (0, 1, 3, 2))
    site.graph.add_output(b.matmul(received, site.q), "back")
    (refusal,) = fused(site.graph).refusals
    assert "summed over another axis" in refusal.reason
    assert len(attentions(site.graph)) == 1
    canonicalise(site.graph)
    close(site.graph, GIVEN, out=softmax(S) @ V, back=softmax(S).swapaxes(-1, -2) @ Q)


def test_the_log_of_the_sum_written_out() -> None:
    """exp(x - (log(sum(exp(x - p))) + p))."""
    site = Site()
    b = site.b
    x = b("where", site.causal(), site.scores(), -INF)
    peak = site.over("max", x)
    total = b.add(b("log", site.over("sum", b("exp", b.sub(x, peak)))), peak)
    site.graph.add_output(b.matmul(b("exp", b.sub(x, total)), site.v), "out")
    assert fused(site.graph).refusals == []
    assert attentions(site.graph)[0].attr("mask").words() == "causal"
    close(site.graph, GIVEN, out=softmax(np.where(CAUSAL, S, -INF)) @ V)


EINSUMS: dict[str, tuple[Any, ...]] = {
    "heads first": (("b", 2, "n", 4), ("b", 2, "m", 4), ("b", 2, "m", 3), "bhid,bhjd->bhij", "bhij,bhjc->bhic"),
    "heads behind": (("b", "n", 2, 4), ("b", "m", 2, 4), ("b", "m", 2, 3), "bihd,bjhd->bhij", "bhij,bjhc->bihc"),
    "keys before queries": (("b", 2, "n", 4), ("b", 2, "m", 4), ("b", 2, "m", 3), "bhjd,bhid->bhij", "bhij,bhjc->bhic"),
    "one key head": (("b", 2, "n", 4), ("b", "m", 4), ("b", "m", 3), "bhid,bjd->bhij", "bhij,bjc->bhic"),
}


@pytest.mark.parametrize("name", EINSUMS)
def test_products_by_einsum(name: str, tmp_path: Path) -> None:
    *shapes, first, second = EINSUMS[name]
    order = ["k", "q"] if name == "keys before queries" else ["q", "k"]
    nodes = [
        helper.make_node("Einsum", order, ["s"], equation=first),
        helper.make_node("Softmax", ["s"], ["w"], axis=3),
        helper.make_node("Einsum", ["w", "v"], ["out"], equation=second),
    ]
    inputs = [
        helper.make_tensor_value_info(n, TensorProto.FLOAT, shape) for n, shape in zip("qkv", shapes, strict=True)
    ]  # fmt: skip
    output = helper.make_tensor_value_info("out", TensorProto.FLOAT, [None] * 4)
    model = helper.make_graph(nodes, "einsum", inputs, [output])
    onnx.save(helper.make_model(model, opset_imports=[helper.make_opsetid("", 17)]), tmp_path / "einsum.onnx")
    graph = attnc.load(str(tmp_path / "einsum.onnx"))
    assert fused(graph).refusals == []
    assert len(attentions(graph)) == 1
    q, k, v = numbers(*(tuple({"b": 2, "n": 3, "m": 5}.get(d, d) for d in shape) for shape in shapes))
    wide = [x.astype(np.float64) for x in (q, k, v)]
    pair = wide[::-1][1:] if name == "keys before queries" else wide[:2]
    weights = softmax(np.einsum(first, *pair))
    close(graph, {"q": q, "k": k, "v": v}, out=np.einsum(second, weights, wide[2]))
