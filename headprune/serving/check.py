"""``serve_check``: does a saved model answer alike in every engine that is installed?"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from headprune.core.errors import InvalidValue, UnknownName, did_you_mean
from headprune.core.opening import read_text
from headprune.data.models import longest_input
from headprune.model.examples import example_batch
from headprune.model.losses import is_causal_lm
from headprune.serving.asking import Answer, ask
from headprune.serving.engines import ENGINES, Engine, in_torch
from headprune.serving.opening import ggufs, is_headprunes, opens_plainly, reference
from headprune.surgery.verify import compare

Status = Literal["equal", "lower precision", "differs", "failed", "not installed", "not applicable"]
#: Greedy tokens of each prompt.
NEW_TOKENS = 32
#: Allowed difference, as a multiple of that between two runs of torch: engines have other kernels.
_OTHER_KERNELS = 10
#: Numbers of 16 or 8 bits change an output; below this correlation with the reference's outputs, it
#: is another model's.
_LEAST_CORRELATION = 0.95
#: Seconds after which an engine that still works is ended.
_LONGEST = 3600
_OTHER = "different tokens"
_TIE = "the first different token is a tie"
_SERVERS = Path(__file__).with_name("servers.py")


@dataclass(frozen=True)
class EngineRow:
    """How one engine answered.

    Args:
        engine: Its name.
        status: ``equal`` and ``lower precision`` are good; ``differs`` and ``failed`` are not.
        version: Of its package, if it ran.
        compared: ``outputs``, ``logits`` or ``log-probabilities``.
        difference: Largest absolute difference from the reference.
        allowed: Largest difference that counts as equal.
        tokens_equal: Greedy tokens equal to the reference's, up to the first that differs.
        tokens: Greedy tokens that were compared.
        note: What else is to be known.
    """

    engine: str
    status: Status
    version: str | None = None
    compared: str | None = None
    difference: float | None = None
    allowed: float | None = None
    tokens_equal: int | None = None
    tokens: int | None = None
    note: str = ""


@dataclass(frozen=True)
class ServeCheck:
    """The answers of all engines for one folder.

    Args:
        folder: The folder.
        model: The class of its model.
        reference: What all are compared with.
        prompts: Prompts of a decoder; 0 for other models.
        rows: One per engine.
    """

    folder: str
    model: str
    reference: str
    prompts: int
    rows: tuple[EngineRow, ...]

    @property
    def failed(self) -> bool:
        """Whether an engine that ran fails or differs."""
        return any(row.status in ("differs", "failed") for row in self.rows)


@dataclass(frozen=True)
class _Subject:
    """What every engine is asked.

    Args:
        folder: The folder.
        model_class: Name of the model's class.
        trust: Whether code in the folder may run.
        example: A batch.
        prompts: Tokens, for a decoder.
        new_tokens: Greedy tokens of each prompt.
        expected: The reference's answer.
        is_plain: Whether plain Transformers opens the folder.
    """

    folder: Path
    model_class: str
    trust: bool
    example: Mapping[str, Tensor]
    prompts: list[list[int]]
    new_tokens: int
    expected: Answer
    is_plain: bool


def serve_check(
    folder: str | Path,
    engines: Iterable[str] = (),
    *,
    reference_folder: str | Path | None = None,
    trust_remote_code: bool = False,
    pythons: Mapping[str, str] | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> ServeCheck:
    """Open a folder in every engine that is installed, and compare their answers in fp32.

    Each engine runs in a process of its own, on a made-up batch. A decoder also generates 32 greedy
    tokens for two prompts.

    Args:
        folder: A model's folder, in any format.
        engines: Names of ``ENGINES``; default all.
        reference_folder: The same model in another format, to compare with; needed for GGUF files.
        trust_remote_code: Run the modelling file of the format ``remote-code``.
        pythons: By engine, the Python of the environment that it is installed in.
        say: Takes lines of progress.

    Raises:
        UnknownName: no such engine.
        InvalidValue: no such folder, code that is not trusted, an environment without headprune for
            an engine that needs it, or a model for which no inputs can be made up.
    """
    folder, pythons = Path(folder).expanduser(), dict(pythons or {})
    names = list(engines) or list(ENGINES)
    for name in [*names, *pythons]:
        if name not in ENGINES:
            hint = did_you_mean(name, ENGINES)
            raise UnknownName("--engine", "the name of an engine", repr(name), hint)
    _check_pythons(pythons)
    other = folder if reference_folder is None else Path(reference_folder).expanduser()
    model = reference(other, trust_remote_code)
    subject = _subject(folder, model, trust_remote_code)
    del model  # its memory is the engines'
    rows = []
    with tempfile.TemporaryDirectory() as place:
        _write_request(Path(place), subject)
        for name in names:
            for path in _files(name, folder):
                say(f"{name} {path.name if path else ''}".rstrip())
                row = _row(name, subject, Path(place), pythons.get(name), path)
                if path is not None:
                    row = replace(row, note=f"{path.name}: {row.note}" if row.note else path.name)
                rows.append(row)
    opener = "headprune" if is_headprunes(other) else "Transformers"
    words = f"{opener} on {other.name}, fp32"
    return ServeCheck(str(folder), subject.model_class, words, len(subject.prompts), tuple(rows))


def _check_pythons(pythons: Mapping[str, str]) -> None:
    """Refuse environments without headprune, for engines that run the model that it opens."""
    absent = 3
    code = f"import importlib.util as u, sys; sys.exit({absent} * (not u.find_spec('headprune')))"
    for name, python in pythons.items():
        if ENGINES[name].prepare is None:
            continue
        try:
            done = subprocess.run([python, "-c", code], capture_output=True, check=False)
        except OSError as error:
            must = f"a Python that can be run, for {name}"
            raise InvalidValue("--python", must, python, str(error)) from error
        if done.returncode == absent:
            must = f"a Python where headprune is installed, for {name}"
            raise InvalidValue("--python", must, python, "Install headprune there, too.")


def _subject(folder: Path, model: nn.Module, trust: bool) -> _Subject:
    """Make inputs up, and answer them with the reference."""
    example = example_batch(model)
    if example is None:
        raise InvalidValue("FOLDER", "a model of tokens, images or waves", type(model).__name__)
    prompts: list[list[int]] = []
    new_tokens = NEW_TOKENS
    if is_causal_lm(model):
        rows = zip(example["input_ids"], example["attention_mask"], strict=True)
        prompts = [ids[mask.bool()].tolist() for ids, mask in rows]
        limit = longest_input(model)
        if limit is not None:
            new_tokens = min(new_tokens, limit - max(map(len, prompts)))
    expected = ask(in_torch(model, example, folder), example, prompts, new_tokens)
    return _Subject(
        folder=folder,
        model_class=type(model).__name__,
        trust=trust,
        example=example,
        prompts=prompts,
        new_tokens=new_tokens,
        expected=expected,
        is_plain=opens_plainly(folder),
    )


def _write_request(place: Path, subject: _Subject, gguf: Path | None = None) -> None:
    request = {
        "folder": str(subject.folder.resolve()),
        "trust": subject.trust,
        "prompts": subject.prompts,
        "new_tokens": subject.new_tokens,
        "gguf": None if gguf is None else str(gguf.resolve()),
    }
    (place / "request.json").write_text(json.dumps(request))
    save_file(dict(subject.example), place / "example.safetensors")


def _files(name: str, folder: Path) -> list[Path | None]:
    """The files that an engine opens one by one; None is the whole folder."""
    found: list[Path | None] = [*ggufs(folder)] if name == "llama.cpp" else []
    return found or [None]


# --------------------------------------------------------------------------------------- one engine


def _row(
    name: str, subject: _Subject, place: Path, python: str | None, gguf: Path | None
) -> EngineRow:
    """Ask one engine, and compare its answer."""
    engine = ENGINES[name]
    # 1. Whether it can be asked.
    reason = _why_not(name, subject, gguf)
    if reason:
        return EngineRow(name, "not applicable", note=reason)
    missing = [p for p in engine.packages if importlib.util.find_spec(p) is None]
    if missing and python is None:
        return EngineRow(name, "not installed", note=engine.install)
    # 2. Ask it.
    if gguf is not None:
        _write_request(place, subject, gguf)
    found = _asked(name, engine, place, python)
    if "error" in found:
        return EngineRow(name, "failed", note=found["error"])
    # 3. Compare.
    arrays = np.load(place / f"{name}.npz", allow_pickle=False)
    tensors = [torch.from_numpy(arrays[key]) for key in arrays.files]
    return judged(name, subject.expected, tensors, found)


def _why_not(name: str, subject: _Subject, gguf: Path | None) -> str:
    """Why an engine does not apply to a folder; empty where it does."""
    folder = subject.folder
    if name == "llama.cpp":
        return "" if gguf else "no GGUF file in the folder"
    if not (folder / "config.json").is_file():
        return "the folder has GGUF files only"
    if name == "headprune":
        return "" if is_headprunes(folder) else "the folder is in Transformers' format"
    if name == "vllm" and not subject.prompts:
        return "asked for decoders only"
    if name in ("transformers", "vllm") and not subject.is_plain:
        return "only headprune opens this folder; save it as transformers or remote-code for others"
    return ""


def _asked(name: str, engine: Engine, place: Path, python: str | None) -> dict[str, Any]:
    """The answer of an engine in a process of its own; ``error`` where it has none."""
    ends = place / f"{name}.json"
    ends.unlink(missing_ok=True)
    command = [python or sys.executable, "-m", "headprune.serving.asking"]
    if engine.prepare is None:
        command = [python or sys.executable, str(_SERVERS)]
    try:
        done = subprocess.run(
            [*command, name, str(place)],
            capture_output=True,
            text=True,
            timeout=_LONGEST,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"it still ran after {_LONGEST} seconds"}
    if not ends.is_file():
        lines = done.stderr.strip().splitlines() or ["no error output"]
        return {"error": f"it ended with code {done.returncode}: {lines[-1][:300]}"}
    answer: dict[str, Any] = json.loads(read_text(ends))
    return answer


def judged(
    name: str, expected: Answer, tensors: list[Tensor], found: Mapping[str, Any]
) -> EngineRow:
    """Compare an engine's answer with the reference.

    Args:
        name: The engine.
        expected: The reference's answer.
        tensors: The engine's outputs.
        found: ``what`` these are, its ``tokens``, ``version``, and whether it is ``exact``.
    """
    # 1. Outputs. vLLM gives log-probabilities, and only those of the first new token.
    wanted = expected.arrays
    if found["what"] == "log-probabilities":
        wanted = [t[:, -1].log_softmax(-1) for t in wanted]
    difference = compare(wanted, tensors)
    allowed = _OTHER_KERNELS * difference.tolerance
    n_equal, n_tokens, note = _compared_tokens(expected, found["tokens"], 2 * allowed)
    # 2. The answer.
    is_finite = math.isfinite(difference.maximum)
    if not is_finite:
        note = "outputs of other shapes, or not finite"
    is_equal = difference.maximum <= allowed and note in ("", _TIE)
    status: Status = "equal" if is_equal else "differs"
    if is_finite and not found["exact"]:
        correlation = _correlation(wanted, tensors)
        status = "lower precision"
        if correlation < _LEAST_CORRELATION:
            status, note = "differs", f"correlation {correlation:.2f} with the reference's outputs"
    return EngineRow(
        name,
        status,
        found["version"],
        found["what"],
        difference.maximum if is_finite else None,
        allowed,
        n_equal if n_tokens else None,
        n_tokens or None,
        note,
    )


def _correlation(wanted: Iterable[Tensor], found: Iterable[Tensor]) -> float:
    """The correlation of outputs; 0 where only those that were found are constant."""
    rows = [_flat(wanted), _flat(found)]
    if rows[0].std() == 0:
        return 1.0
    correlation = torch.corrcoef(torch.stack(rows))[0, 1].item()
    return 0.0 if math.isnan(correlation) else correlation


def _flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.double().flatten() for tensor in tensors])


def _compared_tokens(expected: Answer, found: list[list[int]], tie: float) -> tuple[int, int, str]:
    """Count equal tokens up to the first that differs, and all; say what differs.

    Args:
        expected: The reference's answer.
        found: Tokens of each prompt.
        tie: Where the reference's two best logits are as near as this, either may come first.
    """
    n_equal = 0
    notes = []
    for own, theirs, gaps in zip(expected.tokens, found, expected.gaps, strict=True):
        first = 0
        while own[: first + 1] == theirs[: first + 1] and first < len(own):
            first += 1
        n_equal += first
        if first < len(own):
            notes.append(_TIE if gaps[first] <= tie else _OTHER)
    note = _OTHER if _OTHER in notes else "".join(notes[:1])
    return n_equal, sum(map(len, expected.tokens)), note
