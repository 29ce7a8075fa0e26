"""Sound: what is read, at which rate, of which length, and a whole run."""

from __future__ import annotations

import io
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Audio, Dataset

import headprune as hp
from headprune.core.errors import InvalidValue
from headprune.data import sound
from headprune.data.datasets import load_rows
from headprune.data.features import Collate
from headprune.data.sound import Clip, Sounds, clip_of
from headprune.recipes.schema import Recipe
from headprune.run.identity import facts_of
from tests.small_recipes import checked_recipe, quiet_run, write_rows
from tests.tiny_models import wav2vec2, write_wav


def tone(pitch: float, seconds: float = 0.5, rate: int = 100, phase: float = 0.0) -> np.ndarray:
    times = np.arange(round(seconds * rate)) / rate
    return np.sin(2 * np.pi * pitch * times + phase).astype(np.float32)


def in_wav(frames: bytes, width: int, channels: int = 1) -> bytes:
    found = io.BytesIO()
    with wave.open(found, "wb") as file:
        file.setparams((channels, width, 8000, 0, "NONE", ""))
        file.writeframes(frames)
    return found.getvalue()


def test_whole_numbers_of_every_width_are_the_same_sound():
    wanted = [0.0, 0.5, -0.5, -1.0]
    for width in (1, 2, 3, 4):
        whole = [round(x * 2 ** (8 * width - 1)) + (128 if width == 1 else 0) for x in wanted]
        frames = b"".join(n.to_bytes(width, "little", signed=width > 1) for n in whole)
        clip = clip_of({"bytes": in_wav(frames, width), "path": None}, "here", Path())
        assert (clip.samples.tolist(), clip.rate) == (wanted, 8000), width


def test_channels_are_averaged_and_arrays_are_taken_as_they_are(tmp_path):
    frames = np.array([[16384, 0], [-32768, 16384]], dtype="<i2").tobytes()
    (tmp_path / "a.wav").write_bytes(in_wav(frames, 2, channels=2))
    assert clip_of("a.wav", "here", tmp_path).samples.tolist() == [0.25, -0.25]
    given = {"path": "a.wav", "bytes": None}
    assert clip_of(given, "here", tmp_path).samples.tolist() == [0.25, -0.25]
    clip = clip_of({"array": [0.5, 1.0], "sampling_rate": 7}, "here", tmp_path)
    assert (clip.samples.tolist(), clip.rate) == ([0.5, 1.0], 7)


def test_another_rate_keeps_the_tone_and_drops_what_it_cannot_hold():
    low, high = Clip(tone(5, 2.0, 400), 400), Clip(tone(90, 2.0, 400), 400)
    middle = slice(30, 170)  # the filter needs room at both ends
    np.testing.assert_allclose(low.at(100)[middle], tone(5, 2.0, 100)[middle], atol=0.02)
    assert np.abs(high.at(100)[middle]).max() < 0.02
    assert low.at(400) is low.samples


def test_what_is_no_sound(tmp_path):
    for value, words in (
        ("none.wav", "the path of a file that can be read"),
        ({"bytes": b"RIFFnothing", "path": "a.wav"}, "a wav file of whole|a sound file that can"),
        ({"array": [0.0, float("nan")], "sampling_rate": 8}, "sound of finite samples"),
        ({"array": [], "sampling_rate": 8}, "sound of finite samples, at least one"),
        ({"array": [0.0]}, "an array with its sampling_rate"),
        (7, "a path, or a mapping"),
    ):
        with pytest.raises(InvalidValue, match=rf"row 3: must be ({words})"):
            clip_of(value, "row 3", tmp_path)


def test_a_wav_file_that_nobody_records(monkeypatch):
    """Without soundfile, which would be asked next, it says what the file is."""
    monkeypatch.setattr(sound.importlib.util, "find_spec", lambda name: None)
    for width, rate, words in (
        (5, 8000, "1 channels of 5 bytes, 8000 samples"),
        (2, 0, "2 bytes, 0 samples per second"),
    ):
        data = bytearray(in_wav(bytes(10), 2))
        data[24:28], data[34:36] = rate.to_bytes(4, "little"), (8 * width).to_bytes(2, "little")
        with pytest.raises(InvalidValue, match=rf"whole numbers, got .*{words}.*install soundfile"):
            clip_of({"bytes": bytes(data), "path": "a"}, "here", Path())


def test_compressed_sound_is_read_where_soundfile_is_installed(tmp_path):
    soundfile = pytest.importorskip("soundfile", reason="reads compressed sound")
    soundfile.write(tmp_path / "a.flac", tone(5, rate=8000), 8000)
    clip = clip_of("a.flac", "here", tmp_path)
    np.testing.assert_allclose(clip.samples, tone(5, rate=8000), atol=1e-4)


def test_clips_are_cut_filled_and_normalised_as_the_extractor_does(tmp_path):
    from transformers import AutoFeatureExtractor

    extractor = AutoFeatureExtractor.from_pretrained(wav2vec2(tmp_path))
    values = [{"array": tone(3, s) + 1.0, "sampling_rate": 100} for s in (0.2, 0.5, 0.8)]
    examples = Sounds(tmp_path, extractor, 0.5).encode(values)
    batch = Collate()(examples)["input_values"]
    # Told of a mask, it leaves padding out of the mean; without one a clip would depend on its
    # batch.
    asked = {"padding": True, "return_attention_mask": True, "return_tensors": "pt"}
    padded = extractor([v["array"][:50] for v in values], sampling_rate=100, **asked)
    torch.testing.assert_close(batch, padded["input_values"])
    with pytest.raises(InvalidValue, match=r"data\.seconds: must be given, because clips differ"):
        Sounds(tmp_path, extractor).encode(values)


def test_without_an_extractor_samples_are_kept_as_they_are():
    values = [{"array": tone(3, s), "sampling_rate": 100} for s in (0.2, 0.8)]
    short, long = (example["input_values"] for example in Sounds(Path(), None, 0.5).encode(values))
    assert torch.equal(short, torch.cat([torch.from_numpy(tone(3, 0.2)), torch.zeros(30)]))
    assert torch.equal(long, torch.from_numpy(tone(3, 0.8)[:50]))


def test_extractors_that_cannot_serve():
    class Spectra:
        sampling_rate = 100

        def __call__(self, samples: np.ndarray, **_: Any) -> dict[str, torch.Tensor]:
            return {"input_features": torch.zeros(1, 4, len(samples))}

    values = [{"array": tone(3, s), "sampling_rate": 100} for s in (0.2, 0.8)]
    with pytest.raises(InvalidValue, match=r"at most the shortest clip, 0\.2: Spectra makes no"):
        Sounds(Path(), Spectra(), 0.5).encode(values)
    assert len(Sounds(Path(), Spectra(), 0.2).encode(values)) == 2
    with pytest.raises(InvalidValue, match=r"model\.path: must be a model of sound, .* got dict"):
        Sounds(Path(), {}).encode(values)


AUDIO = "audio_classification"


def recipe(folder: Path) -> Recipe:
    data = {"path": str(folder / "rows"), "seconds": 0.5, "holdout": 8, "test_holdout": 8}
    sections = {
        "train": {"epochs": 1, "batch_size": 16},
        "score": {"random_draws": 1},
        "bench": {"batch_sizes": [2], "seconds": 0.01},
    }
    return checked_recipe(AUDIO, folder / "model", data, **sections)


def test_replaced_sound_is_other_data(tmp_path):
    rows = [{"audio": f"{i}.wav", "label": "ab"[i % 2]} for i in range(40)]
    write_rows(tmp_path / "rows" / "train.jsonl", rows)
    for i in range(40):
        write_wav(tmp_path / "rows" / f"{i}.wav", tone(3 + i), 200)
    before = load_rows(recipe(tmp_path)).facts
    assert load_rows(recipe(tmp_path)).facts == before
    write_wav(tmp_path / "rows" / "7.wav", tone(99), 200)
    after = load_rows(recipe(tmp_path)).facts
    assert {**after, "source": None} == {**before, "source": None}
    assert facts_of(after) != facts_of(before)


def test_a_run(tmp_path):
    torch.manual_seed(0)
    wav2vec2(tmp_path / "model")
    folder, rows = tmp_path / "rows", []
    folder.mkdir()
    for i in range(40):
        label, pitch = [("low", 3), ("high", 15)][i % 2]
        write_wav(folder / f"{i}.wav", tone(pitch, 0.3 + i / 100, 200, phase=i), 200)
        rows.append({"audio": str(folder / f"{i}.wav"), "label": label})
    data = Dataset.from_list(rows).cast_column("audio", Audio(decode=False))
    data.cast_column("audio", Audio()).to_parquet(folder / "train.parquet")
    record = quiet_run(recipe(tmp_path), out=tmp_path / "out")
    assert {row.metric for row in record.quality} == {"accuracy"}
    model = hp.from_pretrained(tmp_path / "out" / "model")
    assert model.config.id2label == {0: "high", 1: "low"}
    assert (tmp_path / "out" / "model" / "preprocessor_config.json").is_file()
