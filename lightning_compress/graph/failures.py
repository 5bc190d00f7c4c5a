"""Why a model cannot be recorded as it is; see `fallback` for what is tried then."""

import sympy

from lightning_compress.errors import UnsupportedModelError


class UnrecordedTensorError(RuntimeError):
    """The model uses a tensor that was made inside a leaf and did not come out as its result."""


class AutocastError(RuntimeError):
    """The model switches autocast between leaves; the recorded operations would run without the switch."""


class ExchangeError(UnsupportedModelError):
    """The model asks other ranks for something before its last module that is quantized."""

    def __init__(self) -> None:
        super().__init__(
            "The code that is run for a batch exchanges tensors with other ranks (all_gather, all_reduce), and a "
            "module to be quantized is called behind that. What a batch gives may not depend on the batches of "
            "others: leave that out of the LightningModule's `calibration_step(self, batch)`, or put it behind the "
            "last of these modules."
        )


class SpecializedSizeError(RuntimeError):
    """The code only works for the very size that it was traced with; `symbol` is that size, if it is just one."""

    def __init__(self, message: str, symbol: sympy.Symbol | None = None) -> None:
        super().__init__(message)
        self.symbol = symbol


def at(line: str) -> str:
    """For a message about code at this line, which may not be known."""
    return f" (at {line})" if line else ""


class SetFromOutsideError(RuntimeError):
    """The model sets something on a leaf before it calls it; the leaf would later run without."""


def about_a_size(error: BaseException | None) -> SpecializedSizeError | None:
    """What was raised because of a size, also where a library (einx) has made an error of its own of it."""
    while error is not None and not isinstance(error, SpecializedSizeError):
        error = error.__cause__ or error.__context__
    return error
