"""The checkpoints of tests/data/hf, and copies of them with something changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

__all__ = ["CASES", "HF", "Array", "altered", "known", "relative_error"]

Array = NDArray[Any]
HF = Path(__file__).parent.parent / "data" / "hf"
CASES = sorted(path.name for path in HF.iterdir() if path.is_dir())


def known(name: str) -> dict[str, Array]:
    """Inputs and outputs of PyTorch in float32; a BERT that was fed without kinds of segments gets zeros."""
    with np.load(HF / name / "pytorch.npz") as data:
        found = {key: data[key] for key in data.files}
    if name == "bert":
        found["in_token_type_ids"] = np.zeros_like(found["in_input_ids"])
    return found


def relative_error(found: Array, data: dict[str, Array]) -> float:
    """The largest difference from PyTorch's output where there is no padding, relative to its largest number."""
    wanted = data["out"]
    assert found.shape == wanted.shape
    apart = np.abs(found - wanted)
    real = data.get("in_attention_mask")
    if real is not None and wanted.ndim == 3 and "in_decoder_input_ids" not in data:
        apart = apart * real[..., None]
    return float(apart.max() / np.abs(wanted).max())


def altered(
    name: str,
    to: Path,
    config: Callable[[dict[str, Any]], object] | None = None,
    weights: Callable[[dict[str, Array]], object] | None = None,
) -> Path:
    """A copy of a checkpoint in the folder ``to``, its configuration and its weights (in float32) changed in place."""
    to.mkdir(exist_ok=True)
    fields = json.loads((HF / name / "config.json").read_text(encoding="utf-8"))
    if config is not None:
        config(fields)
    (to / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    source = HF / name / "model.safetensors"
    if weights is None:
        (to / "model.safetensors").write_bytes(source.read_bytes())
        return to
    with safe_open(source, "np") as file:
        is_single = all(file.get_slice(key).get_dtype() == "F32" for key in file.keys())  # noqa: SIM118
    assert is_single, f"{name} is not stored in float32"
    arrays = load_file(source)
    weights(arrays)
    save_file({key: np.ascontiguousarray(array) for key, array in arrays.items()}, to / "model.safetensors")
    return to
