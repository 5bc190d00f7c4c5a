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
    kind, stored = rows.features[column], datasets.Audio(decode=False)
    if isinstance(kind, datasets.Audio):
        return rows.cast_column(column, stored)
    if isinstance(getattr(kind, "feature", None), datasets.Audio):  # a list of them
        return rows.cast_column(column, type(kind)(stored))
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
        samples, given = _samples(sound)
    else:
        samples, given = _read(sound, folder)
    if samples.ndim != 1 or not len(samples):
        raise CalibrationDataError(
            f"A sound has the shape {samples.shape}; samples of one or more channels are needed."
        )
    shared = gcd(rate, given)
    return samples if rate == given else resample_poly(samples, rate // shared, given // shared).astype(np.float32)


def _samples(sound: Mapping[str, Any]) -> tuple[np.ndarray, int]:
    rate = sound.get("sampling_rate")
    try:
        samples = np.asarray(sound["array"])
    except ValueError as error:
        raise CalibrationDataError(f"The samples of a sound are no array: {error}") from error
    if not isinstance(rate, int) or rate <= 0:
        raise CalibrationDataError(f"A sound has the sampling_rate {rate!r}; it has to be samples per second.")
    if samples.dtype in (np.int16, np.int32):
        samples = samples / (np.iinfo(samples.dtype).max + 1)
    if samples.dtype.kind != "f":
        raise CalibrationDataError(f"A sound has samples of {samples.dtype}; they have to be float, or int16 or int32.")
    samples = samples.astype(np.float32)
    return samples.mean(int(np.argmin(samples.shape))) if samples.ndim == 2 else samples, rate


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
    if isinstance(sound, str) and not (folder / sound).is_file():
        raise CalibrationDataError(f"There is no file {folder / sound}.")
    try:
        file = io.BytesIO(sound) if isinstance(sound, bytes) else str(folder / sound)
        samples, given = soundfile.read(file, dtype="float32", always_2d=True)
    except (OSError, soundfile.SoundFileError) as error:
        raise CalibrationDataError(f"A sound cannot be read: {error}") from error
    return samples.mean(1), given
