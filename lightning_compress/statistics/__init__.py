"""What calibration remembers of a layer's inputs (`base`): of the inputs alone (`inputs`), and beside the original
model's (`drift`); as exact sums (`sums`)."""

from lightning_compress.statistics.base import Beside, Reduction, Statistic
from lightning_compress.statistics.drift import Drift, InputDrift, InputLack, Lack, OutputDrift, drift_form
from lightning_compress.statistics.inputs import InputGram, MinMax
from lightning_compress.statistics.sums import matrix_bytes, row_products

__all__ = [
    "Beside",
    "Drift",
    "InputDrift",
    "InputGram",
    "InputLack",
    "Lack",
    "MinMax",
    "OutputDrift",
    "Reduction",
    "Statistic",
    "drift_form",
    "matrix_bytes",
    "row_products",
]
