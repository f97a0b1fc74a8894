"""Errors that users see. Each class has the exit code that the command line returns for it."""

from __future__ import annotations


class AttncError(Exception):
    """Base of every error that attnc raises on purpose."""

    exit_code = 1


class UsageError(AttncError):
    """An option, a target's name or an argument that does not exist or does not fit."""

    exit_code = 2


class ModelError(AttncError):
    """A model that cannot be read or does not make sense; names the file and the node."""

    exit_code = 3


class ParseError(ModelError):
    """Text (of a graph, a dimension, a set, an expression) that does not parse."""


class ShapeError(ModelError):
    """Operands whose shapes, dtypes or attributes do not fit an operator.

    ``conflict`` holds the two dimensions that had to be equal, where that was the reason.
    """

    def __init__(self, message: str, conflict: tuple[object, object] | None = None) -> None:
        super().__init__(message)
        self.conflict = conflict


class UnsupportedError(ModelError):
    """Something valid that attnc, or the chosen backend, does not know yet."""


class VerifyError(AttncError):
    """A graph that breaks a rule of the IR: a fault of a pass or a frontend, not of the user."""

    exit_code = 4


class InputError(AttncError):
    """A feed of a run with a wrong name, dtype or shape."""

    exit_code = 5


class TargetError(AttncError):
    """A backend that is not installed or cannot work on this machine."""

    exit_code = 6


class ArtifactError(AttncError):
    """An artifact folder that is incomplete, altered, or not one of ours."""

    exit_code = 7


class OutputError(AttncError):
    """Something that could not be written; nothing is left half-written."""

    exit_code = 8
