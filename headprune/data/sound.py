"""Read sound, and bring clips to a model's rate and to one length."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import wave
from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headprune.core.errors import InvalidValue
from headprune.core.opening import read_bytes, reason

Samples = NDArray[np.float32]

#: Samples per second: above any recording. It bounds the memory of a change of rate.
_FASTEST = 1_000_000
#: Bytes of a sound file: the most that the WAV format can declare.
_LARGEST = 1 << 32


@dataclass(frozen=True, eq=False)
class Clip:
    """One channel of sound.

    Args:
        samples: ``[samples]``, -1 to 1.
        rate: Samples per second.
    """

    samples: Samples
    rate: int

    @property
    def key(self) -> str:
        """A digest of rate and samples."""
        return hashlib.sha256(f"{self.rate}".encode() + self.samples.tobytes()).hexdigest()

    def at(self, rate: int) -> Samples:
        """Resample to another rate, without frequencies that this rate cannot hold."""
        if rate == self.rate:
            return self.samples
        from scipy.signal import resample_poly

        common = gcd(rate, self.rate)
        samples = resample_poly(self.samples, rate // common, self.rate // common)
        return np.asarray(samples, dtype=np.float32)


def clip_of(value: Any, where: str, folder: Path) -> Clip:
    """Read the clip of a row.

    Args:
        value: ``{array, sampling_rate}``, ``{bytes, path}`` (one of the two is enough), or a path.
        where: The place that an error names.
        folder: The folder that paths start from.

    Raises:
        InvalidValue: it is none of these, cannot be read, or is not finite.
    """
    if isinstance(value, Mapping) and value.get("array") is not None:
        clip = _from_array(value["array"], value.get("sampling_rate"), where)
    else:
        clip = _from_file(value, where, folder)
    if not clip.samples.size or not np.isfinite(clip.samples).all():
        must = "sound of finite samples, at least one"
        raise InvalidValue(where, must, f"{clip.samples.size} samples")
    return clip


def _from_array(array: Any, rate: Any, where: str) -> Clip:
    if not isinstance(rate, int) or not 1 <= rate <= _FASTEST:
        must = "an array with its sampling_rate, samples per second"
        raise InvalidValue(where, must, repr(rate))
    samples = np.asarray(array, dtype=np.float32)
    if samples.ndim > 1:  # [channels, samples]
        samples = samples.mean(0)
    return Clip(samples, rate)


def _from_file(value: Any, where: str, folder: Path) -> Clip:
    """Read a file with the standard library if it can, else with soundfile."""
    path, data = value, None
    if isinstance(value, Mapping):
        path, data = value.get("path"), value.get("bytes")
    if data is None:
        if not isinstance(path, str) or not path:
            must = "a path, or a mapping with an array or bytes"
            raise InvalidValue(where, must, repr(value)[:80])
        data = _bytes_at(path, where, folder)
    try:
        return _from_wav(data)
    except (wave.Error, EOFError, RuntimeError) as error:
        # wave raises RuntimeError for a chunk that declares more bytes than the file has.
        return _by_soundfile(data, where, path, str(error))


def _bytes_at(path: str, where: str, folder: Path) -> bytes:
    try:
        return read_bytes(folder / Path(path).expanduser(), _LARGEST)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in a name
        must, got = "the path of a file that can be read", f"{path!r} ({reason(error)})"
        raise InvalidValue(where, must, got) from None


def _from_wav(data: bytes) -> Clip:
    """Read a WAV file of whole numbers, as the mean over its channels.

    Raises:
        wave.Error: it is another file, or declares what no recording has.
    """
    with wave.open(io.BytesIO(data)) as file:
        width, channels, rate = file.getsampwidth(), file.getnchannels(), file.getframerate()
        if not (1 <= width <= 4 and channels >= 1 and 1 <= rate <= _FASTEST):
            raise wave.Error(f"{channels} channels of {width} bytes, {rate} samples per second")
        frames = file.readframes(file.getnframes())
    # The last frame of a damaged file may be cut off.
    complete = len(frames) // (width * channels) * (width * channels)
    raw = np.frombuffer(frames[:complete], dtype=np.uint8).reshape(-1, width)
    if width == 1:
        # WAV stores one byte unsigned, with 128 as silence.
        raw = raw ^ np.uint8(0x80)
    # Widen to 32 bits with zeros as the lowest bytes: so the sign bit comes last, as it must.
    widened = np.zeros((len(raw), 4), dtype=np.uint8)
    widened[:, 4 - width :] = raw
    samples = widened.view("<i4")[:, 0].astype(np.float64) / 2**31
    mono: np.ndarray = samples.reshape(-1, channels).mean(1)
    return Clip(mono.astype(np.float32), rate)


def _by_soundfile(data: bytes, where: str, path: Any, why: str) -> Clip:
    """Read compressed and other sound with soundfile, where it is installed."""
    name = repr(path) if path else "bytes"
    if importlib.util.find_spec("soundfile") is None:
        must, got = "a wav file of whole numbers", f"{name} ({why or 'no wav file'})"
        hint = "Other sound is read by soundfile: pip install soundfile."
        raise InvalidValue(where, must, got, hint)
    import soundfile

    try:
        samples, rate = soundfile.read(io.BytesIO(data), dtype="float32", always_2d=True)
    except soundfile.LibsndfileError as error:
        raise InvalidValue(where, "a sound file that can be read", f"{name} ({error})") from None
    # [samples, channels] -> [samples]
    return Clip(samples.mean(1), rate)


@dataclass(frozen=True)
class Sounds:
    """Turns clips into examples.

    Args:
        folder: The folder that paths start from.
        extractor: The model's own feature extractor; without one, samples are unchanged.
        seconds: Longer clips are cut to this, shorter ones filled with silence.
    """

    folder: Path
    extractor: Any = None
    seconds: float | None = None

    def encode(self, values: Any) -> list[dict[str, Any]]:
        """Return one example per clip, all of one shape.

        Raises:
            InvalidValue: an extractor of something else than sound, or clips of different lengths
                without ``seconds``.
        """
        # 1. Read every clip, and resample to the rate of the model, or of the first clip.
        clips = [clip_of(value, f"data: row {i}", self.folder) for i, value in enumerate(values)]
        rate: int | None = getattr(self.extractor, "sampling_rate", None)
        if self.extractor is None:
            rate = clips[0].rate
        if rate is None:
            must = "a model of sound, whose feature extractor has a sampling_rate"
            raise InvalidValue("model.path", must, type(self.extractor).__name__)
        examples = [self._example(clip.at(rate), rate) for clip in clips]
        # 2. A batch has no padding, so all examples must have one shape.
        shapes = {tuple(next(iter(example.values())).shape) for example in examples}
        if len(shapes) > 1:
            raise self._different_lengths(clips)
        return examples

    def _example(self, samples: Samples, rate: int) -> dict[str, Any]:
        length = None
        if self.seconds is not None:
            length = max(1, round(self.seconds * rate))
        # Cut before the extractor, so that it normalises what the model reads.
        samples = samples[:length]
        if self.extractor is None:
            values = torch.from_numpy(np.ascontiguousarray(samples))
            return {"input_values": _filled(values, length)}
        features = self.extractor(samples, sampling_rate=rate, return_tensors="pt")
        return {name: _filled(tensor[0], length) for name, tensor in features.items()}

    def _different_lengths(self, clips: list[Clip]) -> InvalidValue:
        if self.seconds is None:
            must = (
                "given, because clips differ in length: longer ones are cut, shorter ones filled"
                " with silence"
            )
            return InvalidValue("data.seconds", must, "none")
        # Features such as spectrograms cannot be filled: zeros are not their silence.
        shortest = min(len(clip.samples) / clip.rate for clip in clips)
        extractor = type(self.extractor).__name__
        must = f"at most the shortest clip, {shortest:.3g}: {extractor} makes no silence"
        return InvalidValue("data.seconds", must, self.seconds)


def _filled(tensor: torch.Tensor, length: int | None) -> torch.Tensor:
    """Fill samples, or their mask, with zeros at the end; other features are unchanged."""
    if length is None or tensor.ndim != 1 or len(tensor) >= length:
        return tensor
    return torch.cat([tensor, tensor.new_zeros(length - len(tensor))])
