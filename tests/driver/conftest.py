"""A third-party backend as a package of its own, and small models."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from attnc.ir import Builder, DType, Graph, TensorType, symbol

# A backend as someone else would ship it: it evaluates the graph, and puts the largest constant into a file of its own.
BACKEND = '''
from attnc.backends.base import Backend, Executable, Placement
from attnc.ir import evaluate


class Evaluating(Executable):
    def __init__(self, graph):
        self.graph = graph

    def run(self, feeds, states):
        return dict(reversed(evaluate(self.graph, feeds, states=states).items()))


class FakeBackend(Backend):
    name = "fake"

    def check(self):
        pass

    def supports(self, node, options):
        return True

    def build(self, graph, folder, options):
        large = [v.constant for v in graph.constants if not v.constant.is_inline]
        (folder / "parts").mkdir()
        (folder / "parts" / "note.txt").write_text(f"opset {options.opset}")
        if not large:
            return {}
        tensor = max(large, key=lambda t: t.nbytes)
        with (folder / "parts" / "raw.bin").open("wb") as file:
            file.write(b"12345678")
            file.write(tensor.array.tobytes())
        return {tensor.digest: Placement("parts/raw.bin", 8, tensor.nbytes)}

    def load(self, graph, folder, options):
        if folder is not None:
            assert (folder / "parts" / "note.txt").read_text() == f"opset {options.opset}"
        return Evaluating(graph)


class OffBackend(FakeBackend):
    """Gives results that are wrong by a little."""

    name = "off"

    def load(self, graph, folder, options):
        class Wrong(Evaluating):
            def run(self, feeds, states):
                return {name: array * 1.01 for name, array in super().run(feeds, states).items()}
        return Wrong(graph)


class AbsentBackend(FakeBackend):
    name = "absent"

    def check(self):
        from attnc.ir import TargetError
        raise TargetError("the target absent needs a machine that nobody has")


class SlowBackend(FakeBackend):
    """Says that it writes, then takes its time."""

    name = "slow"

    def build(self, graph, folder, options):
        import sys, time
        (folder / "half.bin").write_bytes(b"x" * 1000)
        print("WRITING", flush=True)
        time.sleep(60)


class FullBackend(FakeBackend):
    """Writes more than the disk takes."""

    name = "full"

    def build(self, graph, folder, options):
        (folder / "part.bin").write_bytes(b"x" * 100)
        raise OSError(28, "No space left on device")
'''

ENTRY_POINTS = """[attnc.backends]
fake = attnc_fake:FakeBackend
off = attnc_fake:OffBackend
absent = attnc_fake:AbsentBackend
slow = attnc_fake:SlowBackend
full = attnc_fake:FullBackend
broken = attnc_fake:NoSuchClass
wrong = attnc_fake:Evaluating
"""

MODEL = """
import numpy as np
from attnc import Builder, DType, Graph, TensorType, symbol


def block():
    graph = Graph("block")
    x = graph.add_input("x", TensorType(DType.FLOAT32, (symbol("batch"), 8)))
    b = Builder(graph, "model.py:7")
    w = b.constant(np.random.default_rng(0).standard_normal((8, 6)).astype(np.float32), "w")
    y = b.mul(b.matmul(x, w), 1.0)
    graph.add_output(b("tanh", y), "y")
    return graph


ready = block()


def raises():
    values = [1, 2]
    return values[7]


def leaves():
    raise SystemExit("enough")


def number():
    return 7


def bad_shapes():
    graph = Graph()
    x = graph.add_input("x", TensorType(DType.FLOAT32, (3, 4)))
    return Builder(graph).matmul(x, x)
"""


@pytest.fixture(scope="session")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package ``attnc-fake`` installed in it, for sys.path."""
    folder = tmp_path_factory.mktemp("plugin")
    (folder / "attnc_fake.py").write_text(BACKEND, encoding="utf-8")
    info = folder / "attnc_fake-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: attnc-fake\nVersion: 1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(ENTRY_POINTS, encoding="utf-8")
    return folder


@pytest.fixture
def fake(plugin: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a target that someone else's package provides."""
    monkeypatch.syspath_prepend(str(plugin))
    return "fake"


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    """A Python file with models in it."""
    path = tmp_path / "model.py"
    path.write_text(MODEL, encoding="utf-8")
    return path


@pytest.fixture
def graph() -> Graph:
    """Token ids through a table, a product and a softmax."""
    rng = np.random.default_rng(7)
    graph = Graph("tokens")
    ids = graph.add_input("ids", TensorType(DType.INT64, (symbol("batch"), symbol("seq"))))
    keep = graph.add_input("keep", TensorType(DType.BOOL, (symbol("batch"), symbol("seq"), 1)))
    b = Builder(graph, "tokens.py:3")
    table = b.constant(rng.standard_normal((50, 8)).astype(np.float32), "table")
    weight = b.constant(rng.standard_normal((8, 8)).astype(np.float32), "weight")
    half = b.constant(rng.standard_normal(32).astype(np.float16), "half")
    rows = b("gather", table, ids)
    mixed = b.matmul(b.mul(rows, 1.0), weight)
    graph.add_output(b("softmax", b("where", keep, mixed, b.constant(0.0))), "probs")
    graph.add_output(b("argmax", mixed), "best/1")
    graph.add_output(b("neg", half), "half")
    return graph


@pytest.fixture
def feeds() -> dict[str, np.ndarray]:
    """Inputs of ``graph``."""
    ids = np.array([[1, 2, 49], [0, 7, 7]])
    return {"ids": ids, "keep": (ids != 7)[..., None]}


@pytest.fixture
def command(environment: dict[str, str]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs ``attnc`` in a process of its own, with the other package's targets."""

    def run(*args: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
        call = [sys.executable, "-m", "attnc", *map(str, args)]
        return subprocess.run(call, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=120)

    return run


@pytest.fixture
def environment(plugin: Path) -> dict[str, str]:
    """The environment of a process that has this attnc and the other package."""
    here = [str(plugin), *(p for p in sys.path if p)]
    return os.environ | {"PYTHONPATH": os.pathsep.join(here)}
