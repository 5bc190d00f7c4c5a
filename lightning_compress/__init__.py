"""Calibration-based post-training quantization as one more stage of a PyTorch Lightning Trainer."""

import gc
import sys

# what libraries make as they are imported stays: to look for garbage in it again and again is a third of the time
_is_all_theirs = gc.isenabled() and "torch" not in sys.modules  # else there may be a model that goes one day
if _is_all_theirs:
    gc.disable()
try:
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
finally:
    if _is_all_theirs:
        gc.freeze()
        gc.enable()

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
