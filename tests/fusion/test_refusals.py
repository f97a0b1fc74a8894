"""What is no attention stays as it is, and the report says why."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import attnc
from attnc.ir import Builder, DType, Graph, TensorType, Value, symbol
from attnc.passes.canonicalise import canonicalise
from attnc.passes.fuse_attention import fuse_attention

B, N = symbol("batch"), symbol("seq")


class Site:
    """Tokens x[b, n, 8], and queries, keys and values [b, 2, n, 4] of them with their scores."""

    def __init__(self) -> None:
        self.graph = Graph("refused")
        self.b = b = Builder(self.graph, "here")
        self.rng = np.random.default_rng(0)
        self.x = self.graph.add_input("x", TensorType(DType.FLOAT32, (B, N, 8)))
        self.q, self.k, self.v = (
            b.transpose(b.reshape(b.matmul(self.x, self.weight(8, 8)), (B, N, 2, 4)), (0, 2, 1, 3)) for _ in "qkv"
        )
        self.scores = b.matmul(self.q, b.transpose(self.k, (0, 1, 3, 2)))

    def weight(self, *shape: int) -> Value:
        return self.b.constant(self.rng.normal(size=shape).astype(np.float32))

    def softmax(self, x: Value | None = None, axis: int = -1) -> Value:
        return self.b("softmax", self.scores if x is None else x, axis=axis)

    def over(self, name: str, x: Value) -> Value:
        return self.b(f"reduce_{name}", x, axes=(-1,), keepdims=True)


CASES: dict[str, tuple[str, Callable[[Site], Value]]] = {}


def case(reason: str) -> Callable[[Callable[[Site], Value]], Callable[[Site], Value]]:
    """A graph's output and a part of the reason for the one softmax in it."""

    def add(build: Callable[[Site], Value]) -> Callable[[Site], Value]:
        CASES[build.__name__] = (reason, build)
        return build

    return add


@case("go to an output of the model")
def classifier(s: Site) -> Value:
    return s.softmax(s.b.matmul(s.x, s.weight(8, 5)))


@case("the log of its weights goes to an output of the model")
def ctc_head(s: Site) -> Value:
    return s.b("log_softmax", s.b.matmul(s.x, s.weight(8, 5)), axis=-1)


@case("values depend on the query")
def router_by_product(s: Site) -> Value:
    chosen = s.softmax(s.b.matmul(s.x, s.weight(8, 4)))
    experts = s.b.matmul(s.b.unsqueeze(s.x, 1), s.weight(4, 8, 8))
    return s.b.matmul(s.b.unsqueeze(chosen, 2), s.b.transpose(experts, (0, 2, 1, 3)))


@case("they go to mul")
def router_by_gates(s: Site) -> Value:
    chosen = s.softmax(s.b.matmul(s.x, s.weight(8, 4)))
    experts = s.b.transpose(s.b.matmul(s.b.unsqueeze(s.x, 1), s.weight(4, 8, 8)), (0, 2, 1, 3))
    return s.b("reduce_sum", s.b.mul(s.b.unsqueeze(chosen, 3), experts), axes=(2,))


@case("they go to top_k")
def router_of_the_best(s: Site) -> Value:
    return s.b.multi("top_k", s.softmax(s.b.matmul(s.x, s.weight(8, 4))), k=2)[0]


@case("its keys and values are constants")
def memory_of_constants(s: Site) -> Value:
    return s.b.matmul(s.softmax(s.b.matmul(s.x, s.weight(8, 5))), s.weight(5, 8))


@case("pools by one constant query")
def pooling_by_a_learned_vector(s: Site) -> Value:
    return s.b.matmul(s.b.transpose(s.softmax(s.b.matmul(s.x, s.weight(8, 1)), axis=1), (0, 2, 1)), s.x)


@case("they go to mul")
def pooling_by_a_network(s: Site) -> Value:
    share = s.softmax(s.b.matmul(s.b("tanh", s.b.matmul(s.x, s.weight(8, 8))), s.weight(8, 1)), axis=1)
    return s.b("reduce_sum", s.b.mul(share, s.x), axes=(1,))


@case("they go to mul")
def gate(s: Site) -> Value:
    return s.b.mul(s.softmax(s.b.matmul(s.x, s.weight(8, 8))), s.x)


@case("summed over another axis")
def over_the_queries(s: Site) -> Value:
    return s.b.matmul(s.softmax(axis=-2), s.v)


@case("read before its values are known")
def values_made_of_the_weights(s: Site) -> Value:
    weights = s.softmax()
    return s.b.matmul(weights, s.b.transpose(s.b("tanh", weights), (0, 1, 3, 2)))


@case("they go to pow")
def squared_weights(s: Site) -> Value:
    return s.b.matmul(s.b("pow", s.softmax(), 2.0), s.v)


@case("they go to mul")
def weights_times_a_mask_of_heads(s: Site) -> Value:
    heads = s.graph.add_input("heads", TensorType(DType.FLOAT32, (2, 1, 1)))
    return s.b.matmul(s.b.mul(s.softmax(), heads), s.v)


@case("they go to where")
def weights_zeroed_behind_the_softmax(s: Site) -> Value:
    keep = s.graph.add_input("keep", TensorType(DType.BOOL, (B, 1, 1, N)))
    return s.b.matmul(s.b("where", keep, s.softmax(), 0.0), s.v)


@case("they go to reduce_sum, div")
def weights_made_to_sum_to_one_again(s: Site) -> Value:
    weights = s.softmax()
    return s.b.matmul(s.b.div(weights, s.b.add(s.over("sum", weights), 1e-3)), s.v)


@case("no product of queries and keys")
def heads_that_talk(s: Site) -> Value:
    flat = s.b.reshape(s.scores, (B, 2, N * N))
    return s.b.matmul(s.softmax(s.b.reshape(s.b.matmul(s.weight(2, 2), flat), (B, 2, N, N))), s.v)


@case("made of the same product")
def scores_over_their_largest(s: Site) -> Value:
    return s.b.matmul(s.softmax(s.b.div(s.scores, s.over("max", s.scores))), s.v)


@case("made of the same product")
def keys_above_the_mean(s: Site) -> Value:
    above = s.b("greater", s.scores, s.over("mean", s.scores))
    return s.b.matmul(s.softmax(s.b("where", above, s.scores, float("-inf"))), s.v)


@case("which keys it hides depends on the scores")
def keys_of_positive_scores(s: Site) -> Value:
    kept = s.b("where", s.b("greater", s.scores, 0.0), s.scores, float("-inf"))
    return s.b.matmul(s.softmax(kept), s.v)


@case("made of the same product")
def a_mask_scaled_by_the_scores(s: Site) -> Value:
    keep = s.graph.add_input("keep", TensorType(DType.FLOAT32, (B, 1, 1, N)))
    low = s.b.mul(s.b.sub(s.b.constant(1.0), keep), s.b("neg", s.over("max", s.scores)))
    return s.b.matmul(s.softmax(s.b.add(s.scores, low)), s.v)


@case("it divides powers by add(their sum, 0.001), which is no softmax")
def a_sum_with_something_added(s: Site) -> Value:
    e = s.b("exp", s.b.sub(s.scores, s.over("max", s.scores)))
    return s.b.matmul(s.b.div(e, s.b.add(s.over("sum", e), 1e-3)), s.v)


@case("it divides powers by add(their sum, 0.001), which is no softmax")
def late_by_a_sum_with_something_added(s: Site) -> Value:
    e = s.b("exp", s.b.sub(s.scores, s.over("max", s.scores)))
    return s.b.div(s.b.matmul(e, s.v), s.b.add(s.over("sum", e), 1e-3))


@case("it divides powers by sqrt(mul(their sum, their sum)), which is no softmax")
def a_norm_in_the_place_of_the_sum(s: Site) -> Value:
    e = s.b("exp", s.scores)
    total = s.over("sum", e)
    return s.b.matmul(s.b.mul(e, s.b("reciprocal", s.b("sqrt", s.b.mul(total, total)))), s.v)


@case("it divides powers by max(their sum, 2), which is no softmax")
def a_floor_that_a_sum_may_be_below(s: Site) -> Value:
    e = s.b("exp", s.b.sub(s.scores, s.over("max", s.scores)))
    return s.b.matmul(s.b.div(e, s.b("max", s.over("sum", e), 2.0)), s.v)


@pytest.mark.parametrize("name", CASES)
def test_it_is_left_alone(name: str) -> None:
    reason, build = CASES[name]
    site = Site()
    site.graph.add_output(build(site), "out")
    canonicalise(site.graph)
    counts = site.graph.operator_counts()
    result = fuse_attention(site.graph)
    assert "attention" not in site.graph.operator_counts()
    assert site.graph.operator_counts() == counts
    assert [reason in refusal.reason for refusal in result.refusals] == [True], [r.reason for r in result.refusals]
    assert all(refusal.node for refusal in result.refusals)


def test_the_report_of_a_program_has_them() -> None:
    site = Site()
    site.graph.add_output(classifier(site), "out")
    report = attnc.compile(site.graph, target="numpy").report
    assert report.attentions == []
    assert [r.reason for r in report.refusals if r.what == "attention"] == [
        "its weights do not meet values in a contraction: they go to an output of the model"
    ]
