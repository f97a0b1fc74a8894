"""Models from files, functions, text and artifacts, and what is said about those that are wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import attnc
from attnc import Graph, ModelError, UsageError


def test_a_graph_is_itself(graph: Graph) -> None:
    assert attnc.load(graph) is graph


def test_functions_and_graphs_of_a_python_file(model_file: Path) -> None:
    made = attnc.load(f"{model_file}:block")
    assert made.name == "block"
    assert attnc.load(f"{model_file}:ready") == made


def test_a_python_file_imports_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_model.py").write_text("NAME = 'from the neighbour'\n")
    (tmp_path / "m.py").write_text(
        "import attnc, neighbour_of_model\ndef f():\n    return attnc.Graph(neighbour_of_model.NAME)\n"
    )
    assert attnc.load(f"{tmp_path}/m.py:f").name == "from the neighbour"


def test_text(tmp_path: Path, graph: Graph) -> None:
    path = tmp_path / "g.attnc"
    path.write_text(str(graph), encoding="utf-8")
    for form in (path, str(path)):
        loaded = attnc.load(form)
        assert loaded == graph
        assert attnc.parse(str(loaded)) == loaded


@pytest.mark.parametrize(
    ("function", "line", "says"),
    [
        ("raises", 21, "IndexError: list index out of range"),
        ("leaves", 25, "SystemExit: enough"),
        ("bad_shapes", 35, "ShapeError: matmul"),
    ],
)
def test_what_a_function_raises(model_file: Path, function: str, line: int, says: str) -> None:
    with pytest.raises(ModelError) as caught:
        attnc.load(f"{model_file}:{function}")
    assert str(caught.value).startswith(f"{model_file}:{line}: {says}")


def test_functions_that_are_not_models(model_file: Path) -> None:
    with pytest.raises(ModelError, match=r"model\.py:number must return an attnc\.Graph, not int"):
        attnc.load(f"{model_file}:number")
    with pytest.raises(ModelError, match=r"has no function blok; it defines .*block, raises"):
        attnc.load(f"{model_file}:blok")


def test_python_that_does_not_parse(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("x = 1\ndef f(:\n")
    with pytest.raises(ModelError, match=r"bad\.py:2: SyntaxError"):
        attnc.load(f"{tmp_path}/bad.py:f")
    (tmp_path / "worse.py").write_text("\n\nimport no_such_module_here\n")
    with pytest.raises(ModelError, match=r"worse\.py:3: ModuleNotFoundError"):
        attnc.load(f"{tmp_path}/worse.py:f")


@pytest.mark.parametrize("name", ["m.onnx", "m.attnc", "m.py:f"])
def test_missing_and_empty(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelError, match=r"m\.\w+: there is no such file"):
        attnc.load(tmp_path / name)
    (tmp_path / name.removesuffix(":f")).touch()
    with pytest.raises(ModelError, match=r"m\.\w+: the file is empty"):
        attnc.load(tmp_path / name)


def test_folders_and_foreign_files(tmp_path: Path, model_file: Path) -> None:
    (tmp_path / "m.onnx").mkdir()
    with pytest.raises(ModelError, match="not an artifact"):
        attnc.load(tmp_path / "m.onnx")
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(UsageError, match=r"does not read \.bin; a model is a \.onnx file"):
        attnc.load(tmp_path / "weights.bin")
    with pytest.raises(UsageError, match="which function returns the graph"):
        attnc.load(model_file)
    with pytest.raises(UsageError, match="not bytes"):
        attnc.load(b"m.onnx")  # type: ignore[arg-type]


def test_broken_text(tmp_path: Path, graph: Graph) -> None:
    path = tmp_path / "g.attnc"
    path.write_text(str(graph)[:-40])
    with pytest.raises(ModelError, match=r"g\.attnc: line \d+"):
        attnc.load(path)
    path.write_bytes(b"graph @\xff")
    with pytest.raises(ModelError, match="UTF-8"):
        attnc.load(path)


@pytest.mark.parametrize(
    "damage", [lambda data: data[: len(data) // 2], lambda data: b"not a model", lambda data: data[:-1]]
)
def test_broken_onnx(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    from onnx import TensorProto, helper

    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [2]) for n in "xy")
    model = helper.make_model(helper.make_graph([helper.make_node("Tanh", ["x"], ["y"])], "g", [x], [y]))
    path = tmp_path / "m.onnx"
    path.write_bytes(damage(model.SerializeToString()))
    with pytest.raises(ModelError, match=r"m\.onnx"):
        attnc.load(path)


def test_an_artifact_gives_its_model(tmp_path: Path, fake: str, graph: Graph) -> None:
    attnc.compile(graph, fake).save(tmp_path / "out")
    assert attnc.load(tmp_path / "out") == graph
