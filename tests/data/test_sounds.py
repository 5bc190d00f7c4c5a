"""Sounds of every form that data sets hold, and through processors."""

import io
import json
import sys
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import soundfile
import torch
from torch import Tensor
from transformers import Wav2Vec2FeatureExtractor, WhisperFeatureExtractor

from lightning_compress.data import calibration_batches, load_data_config
from lightning_compress.data.sounds import decoded, undecoded
from lightning_compress.errors import CalibrationDataError

RATE = 16000


def tone(rate: int = RATE, seconds: float = 0.25, pitch: float = 440.0) -> np.ndarray:
    return 0.5 * np.sin(2 * np.pi * pitch * np.arange(int(rate * seconds)) / rate).astype(np.float32)


def wav(samples: np.ndarray, rate: int) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format="WAV", subtype="FLOAT")
    return file.getvalue()


def test_one_sound_in_every_form(tmp_path: Path) -> None:
    samples, stored = tone(), wav(tone(), RATE)
    (tmp_path / "a.wav").write_bytes(stored)
    both = np.stack([samples * 1.5, samples * 0.5])
    for sound in (
        "a.wav", str(tmp_path / "a.wav"), stored, {"path": "a.wav", "bytes": None}, {"path": None, "bytes": stored},
        {"array": samples, "sampling_rate": RATE}, {"array": samples.tolist(), "sampling_rate": RATE},
        {"array": both, "sampling_rate": RATE}, {"array": both.T, "sampling_rate": RATE}, wav(both.T, RATE),
    ):  # fmt: skip
        found = decoded(sound, RATE, tmp_path)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, samples, atol=1e-6)


@pytest.mark.parametrize("given", [8000, 44100, 48000])
def test_other_rates(given: int, tmp_path: Path) -> None:
    """The same tone, but for its ends. Seen to fail: without resampling, and with the rates exchanged."""
    for sound in (wav(tone(given), given), {"array": tone(given), "sampling_rate": given}):
        found = decoded(sound, RATE, tmp_path)
        assert len(found) == len(tone())
        np.testing.assert_allclose(found[500:-500], tone()[500:-500], atol=0.02)


@pytest.mark.parametrize(
    ("sound", "message"),
    [
        ("no.wav", "There is no file .*no.wav"),
        (b"nothing", "cannot be read"),
        (3, "is a int; it has to be a path"),
        ({"array": [], "sampling_rate": RATE}, r"shape \(0,\)"),
    ],
)
def test_what_is_no_sound(sound: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(CalibrationDataError, match=message):
        decoded(sound, RATE, tmp_path)


def test_without_soundfile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(CalibrationDataError, match=r"pip install 'lightning-compress\[audio\]'"):
        decoded(b"", RATE, tmp_path)


@pytest.fixture
def recordings(tmp_path: Path) -> Path:
    """Three tones of several lengths, as files beside a table."""
    for number in range(3):
        (tmp_path / f"{number}.wav").write_bytes(wav(tone(8000, 0.2 + 0.1 * number), 8000))
    rows = [json.dumps({"text": f"tone {number}", "sound": f"{number}.wav"}) for number in range(3)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    return tmp_path / "rows.jsonl"


def batches(path: Path, processor: Any, **given: Any) -> list[dict[str, Tensor]]:
    values = {
        "source": "multimodal",
        "path": str(path),
        "num_samples": 3,
        "image_column": None,
        "audio_column": "sound",
    }
    return list(calibration_batches(load_data_config({**values, **given}), processor))


def test_feature_extractors_alone(recordings: Path) -> None:
    """Without a word; sounds keep their lengths, or are what the model wants."""
    found = batches(recordings, Wav2Vec2FeatureExtractor(), text_column=None)
    assert sorted(batch["input_values"].shape[1] for batch in found) == [3200, 4800, 6400]
    found = batches(recordings, WhisperFeatureExtractor(), text_column=None)
    assert [batch["input_features"].shape for batch in found] == [(1, 80, 3000)] * 3


def test_rows_without_a_sound(recordings: Path) -> None:
    """Seen to fail: null was refused as no sound, and an empty list by the extractor."""
    for nothing in (None, []):
        recordings.write_text(json.dumps({"text": "a", "sound": nothing}))
        with pytest.raises(CalibrationDataError, match=r"rows without an image or a sound, .*: leave them out"):
            batches(recordings, Wav2Vec2FeatureExtractor(), text_column=None, num_samples=1)


def test_data_sets_of_sounds(recordings: Path, tmp_path: Path) -> None:
    """As `datasets` stores them, which decodes nothing here; and lists of samples."""
    files = [str(recordings.parent / f"{number}.wav") for number in range(3)]
    rows = datasets.Dataset.from_dict({"sound": files}).cast_column("sound", datasets.Audio())
    rows.save_to_disk(tmp_path / "saved")
    expected = batches(recordings, Wav2Vec2FeatureExtractor(), text_column=None)
    found = batches(tmp_path / "saved", Wav2Vec2FeatureExtractor(), text_column=None)
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one["input_values"], other["input_values"])


def test_bad_input(recordings: Path) -> None:
    extractor = Wav2Vec2FeatureExtractor()
    for given, processor, message in (
        ({"batch_size": 2}, extractor, "sounds of several lengths make no batch"),
        ({"audio_column": None, "text_column": None}, extractor, "names no column"),
        ({"audio_column": "noise"}, extractor, r"data.audio_column='noise': .* has the columns text, sound"),
        ({"audio_column": "text"}, extractor, r"data.audio_column='text' of .*: There is no file"),
        ({"num_samples": 9}, extractor, r"data \(audio\): .* has 3 rows, and 9 are needed"),
        ({"num_samples": "x"}, extractor, r"data.num_samples: .*'x'.* could not be converted to Integer"),
        ({}, object(), "needs a processor of sounds, and object is none"),
    ):
        with pytest.raises(CalibrationDataError, match=message):
            batches(recordings, processor, **given)


def test_samples_of_integers(tmp_path: Path) -> None:
    samples = (tone() * 32768).astype(np.int16)
    found = decoded({"array": samples, "sampling_rate": RATE}, RATE, tmp_path)
    np.testing.assert_allclose(found, tone(), atol=1e-4)


@pytest.mark.parametrize(
    ("sound", "message"),
    [
        ({"array": [0.5, 0.1]}, "has the sampling_rate None"),
        ({"array": [[0.5], [0.1, 0.2]], "sampling_rate": RATE}, "are no array"),
        ({"array": [1, 2, 3], "sampling_rate": RATE}, "samples of int64"),
    ],
)
def test_samples_that_are_none(sound: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(CalibrationDataError, match=message):
        decoded(sound, RATE, tmp_path)


def test_lists_of_stored_sounds(recordings: Path) -> None:
    files = [[str(recordings.parent / f"{number}.wav")] for number in range(3)]
    rows = datasets.Dataset.from_dict({"sound": files}).cast_column("sound", datasets.List(datasets.Audio()))
    rows = undecoded(rows, "sound")
    assert [sound["path"] for sound in rows[0]["sound"]] == files[0]
