"""Which kernels an attention becomes; nothing is compiled."""

from __future__ import annotations

from dataclasses import replace

import pytest

from attnc.backends.tvm.cuda.rules import CUDA_RULES, takes
from attnc.backends.tvm.plan import Call, Machine, Planner
from attnc.ir import DType, Graph, TensorType, UnsupportedError, symbol
from attnc.tests.backends.tvm.cuda.planned import Case
from attnc.tests.backends.tvm.cuda.variants import Variant, variant


def calls(case: Case) -> list[Call]:
    steps = [step for step in case.planned()[1].steps if isinstance(step, Call)]
    assert steps[-1].node == "output o"
    return steps[:-1]


def half(name: str, **changes: int) -> Variant:
    case = variant(name)
    return replace(case, spec=replace(case.spec, dtype=DType.FLOAT16), **changes)  # type: ignore[arg-type]


def test_a_number_of_queries_that_is_not_known_decides_at_run_time() -> None:
    few, merge, many = calls(Case(variant("causal")))
    n = symbol("n")
    assert [x.kernel.kind for x in (few, merge, many)] == ["attention_fma_split", "attention_merge", "attention_fma"]
    assert few.when == merge.when == (n, 0, 16)
    assert many.when == (n, 17, 2**31 - 1)


@pytest.mark.parametrize(
    ("n", "m", "kinds"),
    [
        (0, 60, []),
        (3, 60, ["attention_mma_few"]),
        (3, 600, ["attention_mma_split", "attention_merge"]),
        (17, 600, ["attention_mma"]),
    ],
)
def test_lengths_that_are_known_decide_at_once(n: int, m: int, kinds: list[str]) -> None:
    found = calls(Case(half("causal", n=n, m=m), fixed=True))
    assert [x.kernel.kind for x in found] == kinds
    assert all(x.when is None for x in found)


def test_rows_that_begin_anywhere_are_copied_for_many_queries_only() -> None:
    found = calls(Case(half("causal"), "turned"))
    assert [x.kernel.kind for x in found] == ["attention_fma_split", "attention_merge", *["map"] * 3, "attention_mma"]
    assert {x.when for x in found[2:]} == {(symbol("n"), 17, 2**31 - 1)}


def test_a_cache_is_read_where_it_lies() -> None:
    found = calls(Case(half("gqa"), "cache"))
    assert [x.kernel.kind for x in found if x.kernel.kind != "map"] == [
        "attention_mma_split", "attention_merge", "attention_mma",
    ]  # fmt: skip
    assert [x.storages[0].kind for x in found if x.kernel.kind == "map"] == ["grown", "grown"]
    for x in found:
        if x.kernel.kind.startswith("attention_mma"):
            assert {s.kind for s in x.storages} == {"buffer", "input", "grown"}


def test_attentions_that_differ_in_mask_and_score_share_the_merge() -> None:
    names = {x.kernel.name for k in ("causal", "window", "softcap") for x in calls(Case(variant(k)))}
    assert sum(name.startswith("attention_merge") for name in names) == 1
    assert sum(name.startswith("attention_fma_split") for name in names) == 3


def attention(dtype: DType = DType.FLOAT32, width: int = 32, **attrs: object) -> Graph:
    graph = Graph()
    shape = (symbol("b"), 2, symbol("n"), width)
    inputs = [graph.add_input(name, TensorType(dtype, shape)) for name in "qkv"]
    graph.add_output(graph.add("attention", *inputs, attrs=attrs)[0])
    return graph


@pytest.mark.parametrize(
    ("graph", "taken"),
    [
        (attention(), True),
        (attention(mask="j < i", empty="mean"), True),
        (attention(weights=True), False),
        (attention(DType.FLOAT64), False),
        (attention(width=300), False),
    ],
)
def test_what_the_kernels_lack_is_refused(graph: Graph, taken: bool) -> None:
    (node,) = graph.nodes
    assert takes(node) is taken
    if not taken:
        with pytest.raises(UnsupportedError, match="the CUDA attention kernels do not take"):
            Planner(graph, Machine(), CUDA_RULES).run()
