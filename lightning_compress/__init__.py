"""Calibration-based post-training quantization as one more stage of a PyTorch Lightning Trainer."""

from lightning_compress.algorithms.gptq import Gptq
from lightning_compress.algorithms.rtn import Rtn
from lightning_compress.errors import CompressionError
from lightning_compress.export.packed import load_compressed
from lightning_compress.memory.placement import MemoryConfig
from lightning_compress.memory.source import parameters_on_meta
from lightning_compress.plugin.callback import CompressionCallback
from lightning_compress.plugin.compressor import Compressor
from lightning_compress.plugin.memory_report import MemoryReport, MemoryReportCallback
from lightning_compress.plugin.strategy import SequentialOnloadStrategy, register
from lightning_compress.recipe.config import Modifier, Recipe
from lightning_compress.recipe.load import load_recipe
from lightning_compress.report.report import Report

register()

__all__ = [
    "CompressionCallback",
    "CompressionError",
    "Compressor",
    "Gptq",
    "MemoryConfig",
    "MemoryReport",
    "MemoryReportCallback",
    "Modifier",
    "Recipe",
    "Report",
    "Rtn",
    "SequentialOnloadStrategy",
    "load_compressed",
    "load_recipe",
    "parameters_on_meta",
]
