"""The target cuda: whole programs on the shim, through the driver and by the executor alone; memory, states, errors."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import attnc
from attnc.backends.base import Options
from attnc.backends.tvm.cuda.backend import CudaBackend
from attnc.backends.tvm.cuda.device import CudaExecutable
from attnc.backends.tvm.cuda.run import DeviceArray, Program, load
from attnc.driver import Session
from attnc.driver.program import Program as Compiled
from attnc.ir import Builder, DType, Graph, State, TensorType, evaluate, symbol
from attnc.tests.backends.tvm.cuda.cpu import needs_gxx, needs_tvm
from attnc.tests.backends.tvm.cuda.programs import for_cuda, memory_of, shimmed
from attnc.tests.driver.decoders import Decoder, cached, full_graph, greedy, logits

pytestmark = [needs_tvm, needs_gxx]
F = DType.FLOAT32
CONFIG = Decoder(masked=True, placed=True, window=4, encoder=True)
ROWS = [[7, 3, 39, 5, 11, 2], [1, 1, 2, 30, 31, 32]]
ENCODED = {
    "enc_ids": np.array([[4, 9, 17], [21, 0, 3]]),
    "enc_mask": np.array([[True, True, True], [True, False, True]]),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact of a decoder with grouped heads, a mask, a window in a ring, and an encoder."""
    path = tmp_path_factory.mktemp("cuda") / "decoder"
    with shimmed():
        for_cuda(cached(CONFIG)).save(path)
    return path


@pytest.fixture
def session(folder: Path) -> Iterator[Session]:
    """The artifact as attnc opens it."""
    from attnc.driver.artifact import read

    held = read(folder)
    program = Compiled(
        held.program(), held.source(), "cuda", held.options, held.report, folder, CudaBackend(),
        plan=held.plan, prepare=held.prepare(),
    )  # fmt: skip
    with program.session() as made:
        yield made
        main = made._main.executable
        assert isinstance(main, CudaExecutable)
        assert memory_of(main.program)[2] == 0


def expected(row: int, tokens: list[int]) -> np.ndarray:
    """The last logits after the tokens, in float64, by the graph over all of them."""
    feeds = {name: array[row : row + 1] for name, array in ENCODED.items()}
    return np.asarray(logits(full_graph(CONFIG), tokens, **feeds)[-1])


def check(got: np.ndarray, *wanted: tuple[int, list[int]]) -> None:
    want = np.stack([expected(row, tokens) for row, tokens in wanted])
    np.testing.assert_allclose(got, want, rtol=0, atol=3e-6 * np.abs(want).max())


def test_steps_of_any_length(session: Session) -> None:
    check(session.step([row[:2] for row in ROWS], ENCODED), *enumerate(row[:2] for row in ROWS))
    for first, end in ((2, 3), (3, 6)):
        check(session.step([row[first:end] for row in ROWS]), *enumerate(row[:end] for row in ROWS))
    assert all(isinstance(state, DeviceArray) for state in session.states.values())


def test_generated_tokens(session: Session) -> None:
    one = {name: array[1:] for name, array in ENCODED.items()}
    assert list(session.generate(ROWS[1], 8, one)) == greedy(full_graph(CONFIG), ROWS[1], 8, **one)


def test_rows_of_different_lengths(session: Session) -> None:
    got = list(session.generate([ROWS[0], ROWS[1][:3]], 5, ENCODED))
    for row, prompt in enumerate((ROWS[0], ROWS[1][:3])):
        own = {name: array[row : row + 1] for name, array in ENCODED.items()}
        assert [tokens[row] for tokens in got] == greedy(full_graph(CONFIG), prompt, 5, **own)


def test_beams_are_those_of_numpy(session: Session) -> None:
    one = {name: array[:1] for name, array in ENCODED.items()}
    found = session.beam_search(ROWS[0], 3, 5, one)
    wanted = cached(CONFIG).session().beam_search(ROWS[0], 3, 5, one)
    assert [beam.tokens for beam in found] == [beam.tokens for beam in wanted]
    np.testing.assert_allclose([beam.score for beam in found], [beam.score for beam in wanted], rtol=1e-5)


def test_rows_are_reordered_on_the_device(session: Session) -> None:
    session.step(ROWS, ENCODED)
    session.reorder([1, 0, 1])
    assert all(isinstance(state, DeviceArray) for state in session.states.values())
    check(session.step([[8], [9], [10]]), (1, [*ROWS[1], 8]), (0, [*ROWS[0], 9]), (1, [*ROWS[1], 10]))


def test_going_back(session: Session) -> None:
    session.step([row[:3] for row in ROWS], ENCODED)
    session.truncate(2)
    assert all(isinstance(state, DeviceArray) for state in session.states.values())
    check(session.step([[8, 4], [9, 1]]), (0, [*ROWS[0][:2], 8, 4]), (1, [*ROWS[1][:2], 9, 1]))
    session.truncate(0)
    check(session.step([[5], [6]]), (0, [5]), (1, [6]))


def test_a_clone_goes_its_own_way(session: Session) -> None:
    session.step([row[:4] for row in ROWS], ENCODED)
    clone = session.clone()
    check(session.step([[8], [9]]), (0, [*ROWS[0][:4], 8]), (1, [*ROWS[1][:4], 9]))
    check(clone.step([[18, 3], [19, 2]]), (0, [*ROWS[0][:4], 18, 3]), (1, [*ROWS[1][:4], 19, 2]))
    check(session.step([[1], [2]]), (0, [*ROWS[0][:4], 8, 1]), (1, [*ROWS[1][:4], 9, 2]))


def test_a_step_asks_only_for_what_it_gives(session: Session) -> None:
    """One piece of memory for each output, and for each state that is written anew: those of the ring."""
    session.step([row[:2] for row in ROWS], ENCODED)
    main = session._main.executable
    assert isinstance(main, CudaExecutable)
    program = main.program
    session.step([[5], [6]])
    before = memory_of(program)
    session.step([[7], [8]])
    after = memory_of(program)
    rings = sum(entry["write"] is not None for entry in program.about["states"])
    assert rings == 2
    assert after[0] - before[0] == len(program.outputs) + rings
    assert after[1] == before[1]


def test_verify_goes_through_the_driver(session: Session) -> None:
    from attnc.driver.verify_cached import verify_cached

    assert session.plan is not None
    result = verify_cached(session, session.plan, full_graph(CONFIG), sizes={"batch": 2, "enc": 3})
    assert result.ok
    assert result.cases


# -- the executor alone ------------------------------------------------------------------------------------------------

STANDALONE = """
import sys
for name in ("attnc", "tvm", "onnx", "ml_dtypes"):
    sys.modules[name] = None
import json
import numpy as np
from run import load
given = json.load(sys.stdin)
session = load(sys.argv[1]).session()
found = []
def step(rows, length, **more):
    mask = np.ones((len(rows), length), np.int64)
    places = np.broadcast_to(np.arange(length - len(rows[0]), length), (len(rows), len(rows[0])))
    feeds = {"input_ids": np.array(rows), "attention_mask": mask, "position_ids": places, **more}
    found.append(session.step(**feeds)["logits"].numpy()[:, -1].tolist())
encoded = {"enc_ids": np.array(given["enc_ids"]), "enc_mask": np.array(given["enc_mask"])}
step(given["rows"], len(given["rows"][0]), **encoded)
clone = session.clone()
session.reorder([1, 0, 1])
step([[8], [9], [10]], session.length + 1)
session = clone
session.truncate(2)
step([[4], [3]], 3)
print(json.dumps(found))
"""


def test_the_folder_runs_without_attnc(folder: Path) -> None:
    given = {name: array.tolist() for name, array in ENCODED.items()} | {"rows": [row[:3] for row in ROWS]}
    done = subprocess.run(
        [sys.executable, "-c", STANDALONE, str(folder)],
        input=json.dumps(given), capture_output=True, text=True, check=False, env={"PYTHONPATH": str(folder)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, reordered, back = json.loads(done.stdout)
    check(np.array(first), *enumerate(row[:3] for row in ROWS))
    check(np.array(reordered), (1, [*ROWS[1][:3], 8]), (0, [*ROWS[0][:3], 9]), (1, [*ROWS[1][:3], 10]))
    check(np.array(back), (0, [*ROWS[0][:2], 4]), (1, [*ROWS[1][:2], 3]))


# -- a program of a few operators --------------------------------------------------------------------------------------


def small() -> Graph:
    """A state that grows and is read as it was, one that is written anew and begins as a constant, and an output that
    is a constant."""
    graph = Graph("small")
    b = Builder(graph)
    rows = symbol("n")
    graph.add_state(State("k", TensorType(F, (2, symbol("past"), 3))))
    graph.add_state(State("total", TensorType(F, (2, 3)), initial=constant(np.full((2, 3), 7, np.float32))))
    x = graph.add_input("x", TensorType(F, (2, rows, 3)))
    (old,) = graph.add("state_read", attrs={"state": "k"})
    (whole,) = graph.add("state_append", b.mul(x, 2.0), attrs={"state": "k", "axis": 1})
    (total,) = graph.add("state_read", attrs={"state": "total"})
    total = b.add(total, b("reduce_sum", x, axes=(1,)))
    graph.add("state_write", total, attrs={"state": "total"})
    graph.add_output(b("exp", whole), "y")
    graph.add_output(b("neg", old), "old")
    graph.add_output(total, "total")
    graph.add_output(b.constant(np.arange(20, dtype=np.int64), "table"), "table")
    return graph


def constant(array: np.ndarray) -> Any:
    from attnc.ir import Tensor

    return Tensor(array)


@pytest.fixture(scope="module")
def small_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("small")
    with shimmed():
        CudaBackend().build(small(), path, Options())
    return path


@pytest.fixture
def program(small_folder: Path) -> Iterator[Program]:
    made = load(small_folder)
    yield made
    assert memory_of(made)[2] == 0


def new(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(2, count, 3)).astype(np.float32)


def test_states_as_the_definition_has_them(program: Program) -> None:
    graph, states, held = small(), {}, {}  # type: ignore[var-annotated]
    for number, count in enumerate((3, 1, 0, 80, 2, 1)):
        x = new(count, number)
        got, want = program.run({"x": x}, states), evaluate(graph, {"x": x}, states=held)
        for name, array in want.items():
            np.testing.assert_allclose(got[name].numpy(), array, rtol=1e-5, atol=1e-6, err_msg=name)
        for name, array in held.items():
            np.testing.assert_allclose(states[name].numpy(), array, rtol=1e-5, atol=1e-6)


def test_what_an_array_shows_stays(program: Program) -> None:
    """Runs from an older state, from a part of one, and from rows of one, each beside the newest."""
    states: dict[str, Any] = {}
    program.run({"x": new(5)}, states)
    older = dict(states)
    program.run({"x": new(1, 1)}, states)
    assert states["k"].base == older["k"].base  # in place
    kept = {name: (array, array.numpy()) for name, array in (("older", older["k"]), ("newest", states["k"]))}
    branch = dict(older)
    program.run({"x": new(2, 2)}, branch)
    np.testing.assert_allclose(branch["k"].numpy(), np.concatenate([2 * new(5), 2 * new(2, 2)], 1), rtol=1e-6)
    part = {**older, "k": older["k"][:, 1:4]}
    program.run({"x": new(2, 3)}, part)
    np.testing.assert_allclose(part["k"].numpy(), np.concatenate([2 * new(5)[:, 1:4], 2 * new(2, 3)], 1), rtol=1e-6)
    turned = {**older, "k": older["k"].take([1, 0], 0)}
    program.run({"x": new(1, 4)}, turned)
    np.testing.assert_allclose(turned["k"].numpy(), np.concatenate([2 * new(5)[::-1], 2 * new(1, 4)], 1), rtol=1e-6)
    for array, was in kept.values():
        np.testing.assert_array_equal(array.numpy(), was)


def test_storages_begin_where_kernels_may_read_many_elements(program: Program) -> None:
    """A part of an input, and of a state, that begins elsewhere is copied to such a place."""
    from attnc.backends.tvm.cuda.run.arrays import upload
    from attnc.backends.tvm.cuda.run.steps import ALIGNMENT

    x, total = np.concatenate([new(4), new(4, 1)]), new(3)[0]
    given, held = upload(program.library, x, "float32")[1:3], upload(program.library, total, "float32")[1:3]
    assert given.pointer % ALIGNMENT
    assert held.pointer % ALIGNMENT
    got = program.run({"x": given}, {"total": held})
    assert not (program._pointers % ALIGNMENT).any()
    np.testing.assert_allclose(got["y"].numpy(), np.exp(2 * x[1:3]), rtol=1e-6)
    np.testing.assert_allclose(got["total"].numpy(), total[1:3] + x[1:3].sum(1), rtol=1e-5, atol=1e-5)


def test_going_back_and_on_copies_nothing(program: Program) -> None:
    """Once nobody has the longer array, its place is written to again."""
    states: dict[str, Any] = {}
    program.run({"x": new(5)}, states)
    base = states["k"].base
    states["k"] = states["k"][:, :3]
    program.run({"x": new(2, 1)}, states)
    assert states["k"].base == base
    np.testing.assert_allclose(states["k"].numpy(), np.concatenate([2 * new(5)[:, :3], 2 * new(2, 1)], 1), rtol=1e-6)


@pytest.mark.parametrize("shape", [(2, 3, 4), (2, 3, 0), (1, 1, 1), (0, 3, 2)])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_parts_and_rows_of_arrays(program: Program, shape: tuple[int, ...], axis: int) -> None:
    from attnc.backends.tvm.cuda.run.arrays import upload

    host = np.random.default_rng(0).normal(size=shape)
    array = upload(program.library, host, "float64")
    np.testing.assert_array_equal(array.numpy(), host)
    cut: list[Any] = [slice(None)] * 3
    cut[axis] = slice(shape[axis] // 3, shape[axis] - 1)
    part = array[tuple(cut)]
    np.testing.assert_array_equal(part.numpy(), host[tuple(cut)])
    np.testing.assert_array_equal(part.contiguous().numpy(), host[tuple(cut)])
    for other in range(3):
        inner: list[Any] = [slice(None)] * 3
        inner[other] = slice(0, 1)
        np.testing.assert_array_equal(part[tuple(inner)].numpy(), host[tuple(cut)][tuple(inner)])
        rows = list(range(part.shape[other]))[::-1] * 2
        np.testing.assert_array_equal(np.take(part, rows, other), host[tuple(cut)].take(rows, other))
        grown = part.with_room(other, 2)
        np.testing.assert_array_equal(grown.first(other, part.shape[other]).numpy(), host[tuple(cut)])
        assert grown.shape[other] >= part.shape[other] + 2
    if array.size:
        with pytest.raises(IndexError):
            array.take([shape[axis]], axis)


def test_tensors_that_speak_dlpack(program: Program) -> None:
    import tvm_ffi

    x = new(3)
    given = tvm_ffi.from_dlpack(np.ascontiguousarray(x))
    out = program.run({"x": given}, {})["y"]
    assert out.__dlpack_device__() == (1, 0)
    np.testing.assert_allclose(np.from_dlpack(out.tensor()), np.exp(2 * x), rtol=1e-6)
    again = program.run({"x": program.run({"x": x}, {})["y"]}, {})["y"]
    np.testing.assert_allclose(again.numpy(), np.exp(2 * np.exp(2 * x)), rtol=1e-5)


@pytest.mark.parametrize(
    ("feeds", "reason"),
    [
        ({}, "missing: x. The inputs are x"),
        ({"x": new(1), "y": 1}, "no input is called y"),
        ({"x": new(1).astype(np.float64)}, "input x must be float32, not float64"),
        ({"x": new(1)[0]}, r"input x must have the shape \[2, n, 3\], not \[1, 3\]"),
        ({"x": new(1)[:1]}, r"input x must have the shape \[2, n, 3\], but axis 0 has size 1"),
    ],
)
def test_feeds_that_do_not_fit(program: Program, feeds: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        program.run(feeds, {})


def test_states_that_do_not_fit(program: Program) -> None:
    with pytest.raises(ValueError, match=r"state k must have the shape \[2, past, 3\], but axis 2 has size 4"):
        program.run({"x": new(1)}, {"k": np.zeros((2, 5, 4), np.float32)})
    with pytest.raises(ValueError, match="the program has states: run it in a session"):
        program(x=new(1))


def test_a_run_that_fails_changes_nothing(program: Program) -> None:
    states: dict[str, Any] = {}
    program.run({"x": new(5)}, states)
    before = dict(states)
    limit = program.library.kernels(["shim_limit"])["shim_limit"]
    limit(2000)
    try:
        with pytest.raises(RuntimeError, match=r"CUDA: \d+ bytes of memory are needed, and 2000 of 2000 are free"):
            program.run({"x": new(200)}, states)
    finally:
        limit(0)
    assert states == before
    program.run({"x": new(1, 1)}, states)
    np.testing.assert_allclose(states["k"].numpy(), np.concatenate([2 * new(5), 2 * new(1, 1)], 1), rtol=1e-6)


def test_sizes_that_kernels_cannot_count(program: Program) -> None:
    with pytest.raises(ValueError, match="too large: the kernels count in 32 bits"):
        program._resize({"n": 1 << 31, "past": 0, "attnc_room0": 1 << 31})


def test_weights_lie_on_the_device_once(small_folder: Path) -> None:
    one, other = load(small_folder), load(small_folder)
    assert one._weights is other._weights


def test_another_program_in_the_same_folder(tmp_path: Path) -> None:
    """While the first is still loaded."""
    x = np.random.default_rng(0).normal(size=(5, 8)).astype(np.float32)
    sessions = []
    with shimmed():
        for op, fn in (("tanh", np.tanh), ("sin", np.sin)):
            graph = Graph()
            value = graph.add_input("x", TensorType(DType.FLOAT32, (symbol("n"), 8)))
            graph.add_output(Builder(graph)(op, value), "y")
            attnc.compile(graph, "cuda").save(tmp_path / "out")
            sessions.append(attnc.open(tmp_path / "out").session())
            np.testing.assert_allclose(sessions[-1].run({"x": x})["y"], fn(x.astype(np.float64)), rtol=1e-5)
        np.testing.assert_allclose(sessions[0].run({"x": x})["y"], np.tanh(x.astype(np.float64)), rtol=1e-5)
