"""Calibration and evaluation data (text, images, sounds, or your own): configuration -> samples -> batches."""

from lightning_compress.data.batches import calibration_batches, calibration_dataloader, evaluation_dataloader
from lightning_compress.data.config import (
    CustomConfig,
    DataConfig,
    DocsConfig,
    HfConfig,
    MultimodalConfig,
    TextConfig,
    load_data_config,
)
from lightning_compress.data.perplexity import perplexity
from lightning_compress.data.sources import docs_documents, load_documents

__all__ = [
    "CustomConfig",
    "DataConfig",
    "DocsConfig",
    "HfConfig",
    "MultimodalConfig",
    "TextConfig",
    "calibration_batches",
    "calibration_dataloader",
    "docs_documents",
    "evaluation_dataloader",
    "load_data_config",
    "load_documents",
    "perplexity",
]
