"""What a user can get wrong, as exceptions. Each message names the module, its shape, the scheme and the remedy."""


class CompressionError(ValueError):
    """Base of every error this package raises for a user's input."""


class RecipeError(CompressionError):
    """The recipe cannot be read: unknown name, key, preset or type."""


class UnsupportedModelError(CompressionError):
    """The recipe does not fit the model, or the model cannot be compressed as it is."""


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
