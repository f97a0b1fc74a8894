"""The node cases of the onnx package that attnc does not pass, by family, each with a reason.

Every entry is needed: a test checks that each case of it is still refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["LEFT_OUT", "LeftOut", "reason_for"]


@dataclass(frozen=True)
class LeftOut:
    """Cases whose whole names match ``cases``, without their ``test_`` and the ``_expanded`` of a spelt-out body."""

    family: str
    cases: str
    reason: str
    targets: tuple[str, ...] = ("numpy", "ort-cpu")
    refused: bool = True
    """Whether attnc says so itself; otherwise the results differ by more than a case allows."""

    def holds(self, name: str, target: str) -> bool:
        plain = re.sub(r"^test_|_expanded(_ver\d+)?$", "", name)
        return target in self.targets and re.fullmatch(self.cases, plain) is not None


LEFT_OUT = (
    LeftOut(
        "strings",
        r"equal_string.*|string_.*|strnormalizer_.*|regex_full_match_.*|tfidfvectorizer_.*",
        "text is no tensor of numbers; tokenising comes before the model",
    ),
    LeftOut(
        "sequences and optionals",
        r"sequence_.*|split_to_sequence_.*|optional_.*|(identity|if)_(opt|seq|sequence)|loop1[36]_seq.*",
        "values that are lists of tensors, or nothing, have no type in the IR",
    ),
    LeftOut(
        "narrow element types",
        r"cast(like)?_.*(FLOAT8|FLOAT4|INT4|INT2|e8m0).*|(de)?quantizelinear_(e\dm\d.*|u?int2|float4.*)|"
        r"quantizelinear_u?int4",
        "the IR has no floats of 8 or 4 bits, and of integers of 4 or 2 only constants that are dequantised",
    ),
    LeftOut(
        "images",
        r"image_decoder_.*|gridsample.*|col2im.*|roialign_.*|.*deform_conv_.*",
        "decoding and warping of images is not the business of a transformer",
    ),
    LeftOut("detection", r"nonmaxsuppression_.*", "boxes are chosen one by one, each by those before it"),
    LeftOut(
        "random numbers",
        r"bernoulli.*|training_dropout(?!_zero_ratio).*",
        "a program gives the same results for the same inputs",
    ),
    LeftOut("training", r"adagrad.*|adam.*|.*momentum.*", "steps of optimisers; attnc compiles inference"),
    LeftOut(
        "classical machine learning",
        r"ai_onnx_ml_.*",
        "trees, label encoders and feature extractors (the domain ai.onnx.ml)",
    ),
    LeftOut("bit patterns", r"bitcast_.*", "the bits of a number are not looked at (BitCast, opset 26)"),
    LeftOut("sets and determinants", r"unique_.*|det_.*", "Unique and Det, which no model here uses"),
    LeftOut("integer convolutions", r"convinteger_.*|qlinearconv", "convolutions of the IR are of floats"),
    LeftOut(
        "old and rare forms",
        r"scan_sum|loop11|lstm_with_peepholes|melweightmatrix",
        "Scan of opset 8, a Loop whose carried value grows, peepholes of an LSTM, mel filters made from data",
    ),
    LeftOut(
        "Fourier transforms",
        r"dft.*|stft.*",
        "ONNX Runtime's own DFT rounds more coarsely than the cases allow (1e-7 where the result is 0)",
        ("ort-cpu",),
        refused=False,
    ),
    LeftOut("top-k of uint64", r"top_k_uint64", "ONNX Runtime has no kernel for it", ("ort-cpu",)),
)


def reason_for(name: str, target: str) -> LeftOut | None:
    """The entry that leaves a case out on a target. Raises ValueError when two do."""
    found = [entry for entry in LEFT_OUT if entry.holds(name, target)]
    if len(found) > 1:
        raise ValueError(f"{name} is left out by {' and by '.join(entry.family for entry in found)}")
    return found[0] if found else None
