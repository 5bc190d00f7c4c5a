"""Sounds as processors take them: one channel, at the rate that the model was trained with."""

import io
from collections.abc import Mapping
from math import gcd
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from scipy.signal import resample_poly

from lightning_compress.errors import CalibrationDataError


def undecoded(rows: datasets.Dataset, column: str) -> datasets.Dataset:
    """A data set whose sounds are left as they are stored: decoding is `decoded`'s affair."""
    if isinstance(rows.features[column], datasets.Audio):
        return rows.cast_column(column, datasets.Audio(decode=False))
    return rows


def decoded(sound: Any, rate: int, folder: Path) -> np.ndarray:
    """A sound as float32 [T] at `rate` samples per second; channels are averaged.

    Args:
        sound: a path, the bytes of a file, or a mapping of either ({path, bytes}) or of samples ({array,
            sampling_rate}), as data sets hold them.
        rate: samples per second.
        folder: what paths are relative to.

    Raises:
        CalibrationDataError: it is nothing of this kind, or a file that cannot be read; or `soundfile` is missing.
    """
    if isinstance(sound, Mapping) and sound.get("array") is not None:
        samples, given = np.asarray(sound["array"], dtype=np.float32), int(sound["sampling_rate"])
        samples = samples.mean(int(np.argmin(samples.shape))) if samples.ndim == 2 else samples
    else:
        samples, given = _read(sound, folder)
    if samples.ndim != 1 or not len(samples):
        raise CalibrationDataError(
            f"A sound has the shape {samples.shape}; samples of one or more channels are needed."
        )
    shared = gcd(rate, given)
    return samples if rate == given else resample_poly(samples, rate // shared, given // shared).astype(np.float32)


def _read(sound: Any, folder: Path) -> tuple[np.ndarray, int]:
    try:
        import soundfile
    except ImportError as error:
        raise CalibrationDataError(
            "Reading sounds needs soundfile: pip install 'lightning-compress[audio]'."
        ) from error
    if isinstance(sound, Mapping):
        sound = sound.get("bytes") or sound.get("path")
    if not isinstance(sound, str | bytes):
        raise CalibrationDataError(
            f"A sound is a {type(sound).__name__}; it has to be a path, the bytes of a file, or a mapping of samples "
            "({array, sampling_rate})."
        )
    try:
        file = io.BytesIO(sound) if isinstance(sound, bytes) else str(folder / sound)
        samples, given = soundfile.read(file, dtype="float32", always_2d=True)
    except (OSError, soundfile.SoundFileError) as error:
        raise CalibrationDataError(f"A sound cannot be read: {error}") from error
    return samples.mean(1), given
