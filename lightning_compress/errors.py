"""What a user can get wrong, as exceptions. Each message names the module, its shape, the scheme and the remedy."""

from collections.abc import Collection, Iterable
from difflib import get_close_matches
from itertools import islice


def nearest(word: str, known: Iterable[str]) -> str:
    """The end of a sentence that says that a word is unknown.

    >>> nearest("dcos", ["docs", "text"]), nearest("x", ["docs", "text"])
    ("; did you mean 'docs'?", '; known are docs, text.')
    """
    known = list(known)
    close = get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known are {', '.join(known)}."


def listed(names: Collection[str], most: int = 5) -> str:
    """The first of them, and how many more there are.

    >>> listed(["a", "b"]), listed("abcdefg", 3)
    ('a, b', 'a, b, c and 4 more')
    """
    first = ", ".join(islice(names, most))
    return f"{first} and {len(names) - most} more" if len(names) > most else first


def reason(error: Exception) -> str:
    """Why a file is not what it should be, without Python's words for it."""
    if isinstance(error, OSError):
        return (error.strerror or str(error)).lower()
    return f"it has no {error}" if isinstance(error, KeyError) else str(error)


class CompressionError(ValueError):
    """Base of every error this package raises for a user's input."""


def check_options(what: str, given: Iterable[object], known: Collection[str]) -> None:
    """
    Raises:
        CompressionError: an option that is not known; names the nearest one that is.
    """
    for key in map(str, given):
        if key not in known:
            raise CompressionError(f"{what} has no option {key}{nearest(key, known)}")


class RecipeError(CompressionError):
    """The recipe cannot be read: unknown name, key, preset or type."""


class UnsupportedModelError(CompressionError):
    """The recipe does not fit the model, or the model cannot be compressed as it is."""


class ComputedWeightError(UnsupportedModelError):
    """A weight that is to be quantized is computed of other parameters, into which nobody has folded them."""


class UntraceableModelError(CompressionError):
    """The model's forward cannot be recorded as a graph, even with its layers as single nodes."""


class CalibrationDataError(CompressionError):
    """The calibration batches cannot be used."""


class NonFiniteError(CompressionError):
    """A weight or an activation holds NaN or Inf."""


class SolveError(CompressionError):
    """A weight could not be quantized by its algorithm."""


class OutputDirectoryError(CompressionError):
    """The output folder cannot be written to."""


class UnreachedModulesWarning(UserWarning):
    """The calibration data does not reach some of the modules that the recipe targets."""


class CalibrationWarning(UserWarning):
    """A model that does more than calibration sees, or keeps."""


class RunWarning(UserWarning):
    """What is to be known of a run that goes on as it was asked for; the report has it, too."""


class CommunicationError(RuntimeError):
    """The ranks of a run have lost one another."""


class BudgetError(CompressionError):
    """A budget of memory cannot hold the run.

    Attributes:
        budget: which one.
        needed: bytes of the smallest that could; None: that is not known.
    """

    def __init__(self, message: str, budget: str = "", needed: int | None = None) -> None:
        super().__init__(message)
        self.budget = budget
        self.needed = needed
