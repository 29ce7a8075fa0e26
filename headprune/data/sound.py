"""Sound becomes what a model takes: clips out of files, bytes or numbers, at the model's rate and
of one length."""

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


#: Samples a second: above any recording, and what is asked for in memory when one is brought to
#: another rate.
_FASTEST = 1_000_000
#: Bytes of a file of sound: what its format can say.
_LARGEST = 1 << 32


@dataclass(frozen=True, eq=False)
class Clip:
    """One channel of sound.

    Args:
        samples: ``[samples]``, -1 to 1.
        rate: Samples a second.
    """

    samples: Samples
    rate: int

    @property
    def key(self) -> str:
        """Tells it from other clips."""
        return hashlib.sha256(f"{self.rate}".encode() + self.samples.tobytes()).hexdigest()

    def at(self, rate: int) -> Samples:
        """Its samples at another rate, without the frequencies that this one cannot hold."""
        if rate == self.rate:
            return self.samples
        from scipy.signal import resample_poly

        common = gcd(rate, self.rate)
        return np.asarray(
            resample_poly(self.samples, rate // common, self.rate // common), dtype=np.float32
        )


def clip_of(value: Any, where: str, folder: Path) -> Clip:
    """The clip of a row.

    Args:
        value: ``{array, sampling_rate}``, ``{bytes, path}`` (one of the two is enough), or a path.
        where: What an error is about.
        folder: Where paths begin.

    Raises:
        InvalidValue: it is none of these, cannot be read, or is not finite.
    """
    if isinstance(value, Mapping) and value.get("array") is not None:
        rate = value.get("sampling_rate")
        if not isinstance(rate, int) or not 1 <= rate <= _FASTEST:
            raise InvalidValue(
                where, "an array with its sampling_rate, samples a second", repr(rate)
            )
        samples = np.asarray(value["array"], dtype=np.float32)
        found = Clip(samples if samples.ndim == 1 else samples.mean(0), rate)
    else:
        found = _of_file(value, where, folder)
    if not found.samples.size or not np.isfinite(found.samples).all():
        raise InvalidValue(
            where, "sound of finite samples, at least one", f"{found.samples.size} samples"
        )
    return found


def _of_file(value: Any, where: str, folder: Path) -> Clip:
    path = value.get("path") if isinstance(value, Mapping) else value
    data = value.get("bytes") if isinstance(value, Mapping) else None
    if data is None:
        if not isinstance(path, str) or not path:
            raise InvalidValue(
                where, "a path, or a mapping with an array or bytes", repr(value)[:80]
            )
        try:
            place = folder / Path(path).expanduser()
            data = read_bytes(place, _LARGEST)
        except (OSError, ValueError) as error:  # ValueError: a zero byte in a name
            got = f"{path!r} ({reason(error)})"
            raise InvalidValue(where, "the path of a file that can be read", got) from None
    try:
        with wave.open(io.BytesIO(data)) as file:
            width, channels, rate = file.getsampwidth(), file.getnchannels(), file.getframerate()
            if not (1 <= width <= 4 and channels >= 1 and 1 <= rate <= _FASTEST):
                raise wave.Error(f"{channels} channels of {width} bytes, {rate} samples a second")
            return Clip(_numbers(file.readframes(file.getnframes()), width, channels), rate)
    except (
        wave.Error,
        EOFError,
        RuntimeError,
    ) as error:  # RuntimeError: a chunk that says that it is longer
        return _by_soundfile(data, where, path, str(error))


def _numbers(frames: bytes, width: int, channels: int) -> Samples:
    """Whole numbers of ``width`` bytes as -1 to 1, the mean over channels; those of one byte have
    no sign."""
    whole = width * channels
    raw = np.frombuffer(frames[: len(frames) // whole * whole], dtype=np.uint8).reshape(-1, width)
    if width == 1:
        raw = raw ^ np.uint8(0x80)
    padded = np.zeros((len(raw), 4), dtype=np.uint8)
    padded[:, 4 - width :] = raw  # the sign is in the last byte
    samples = padded.view("<i4")[:, 0].astype(np.float64) / 2**31
    mono: np.ndarray = samples.reshape(-1, channels).mean(1)
    return mono.astype(np.float32)


def _by_soundfile(data: bytes, where: str, path: Any, reason: str) -> Clip:
    """What the standard library cannot read: compressed sound, for example."""
    name = repr(path) if path else "bytes"
    if importlib.util.find_spec("soundfile") is None:
        hint = "Other sound is read by soundfile: pip install soundfile."
        raise InvalidValue(
            where, "a wav file of whole numbers", f"{name} ({reason or 'no wav file'})", hint
        )
    import soundfile

    try:
        samples, rate = soundfile.read(io.BytesIO(data), dtype="float32", always_2d=True)
    except soundfile.LibsndfileError as error:
        raise InvalidValue(where, "a sound file that can be read", f"{name} ({error})") from None
    return Clip(samples.mean(1), rate)


@dataclass(frozen=True)
class Sounds:
    """Makes examples of clips.

    Args:
        folder: Where paths begin.
        extractor: The model's own feature extractor; without one, samples are left as they are.
        seconds: Longer clips are cut to this, shorter ones filled with silence.
    """

    folder: Path
    extractor: Any = None
    seconds: float | None = None

    def encode(self, values: Any) -> list[dict[str, Any]]:
        """One example a clip, all of one shape.

        Raises:
            InvalidValue: an extractor that takes no sound, or clips of unlike lengths without
                ``seconds``.
        """
        clips = [clip_of(value, f"data: row {i}", self.folder) for i, value in enumerate(values)]
        rate = (
            clips[0].rate
            if self.extractor is None
            else getattr(self.extractor, "sampling_rate", None)
        )
        if rate is None:
            must = "a model of sound, whose feature extractor has a sampling_rate"
            raise InvalidValue("model.path", must, type(self.extractor).__name__)
        examples = [self._example(clip.at(rate), rate) for clip in clips]
        if (
            len(
                {
                    tuple(tensor.shape)
                    for example in examples
                    for tensor in list(example.values())[:1]
                }
            )
            > 1
        ):
            shortest = min(len(clip.samples) / clip.rate for clip in clips)
            must = (
                "given, because clips differ in length: longer ones are cut, shorter ones filled"
                " with silence"
            )
            if (
                self.seconds is not None
            ):  # its features are no samples, that zeros could stand for silence
                must = (
                    f"at most the shortest clip, {shortest:.3g}: {type(self.extractor).__name__}"
                    " makes no silence"
                )
            raise InvalidValue(
                "data.seconds", must, "none" if self.seconds is None else self.seconds
            )
        return examples

    def _example(self, samples: Samples, rate: int) -> dict[str, Any]:
        length = None if self.seconds is None else max(1, round(self.seconds * rate))
        samples = samples[:length]
        if self.extractor is None:
            found = {"input_values": torch.from_numpy(np.ascontiguousarray(samples))}
        else:
            given = self.extractor(samples, sampling_rate=rate, return_tensors="pt")
            found = {name: tensor[0] for name, tensor in given.items()}
        return {name: _filled(tensor, length) for name, tensor in found.items()}


def _filled(tensor: torch.Tensor, length: int | None) -> torch.Tensor:
    """Samples, or the mask of samples, with zeros at the end; features of another shape have a
    length of their own."""
    gap = 0 if length is None or tensor.ndim != 1 else max(0, length - len(tensor))
    return torch.cat([tensor, tensor.new_zeros(gap)]) if gap else tensor
