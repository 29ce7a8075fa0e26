"""What all peers start from: a base model as a plain Transformers folder, its rows as arrays, and
ONNX files.

Nothing here is a pickle, so that environments with other versions can read it.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import headprune as hp
from headprune.checkpoints.export import export_onnx
from headprune.core.files import atomic_path
from headprune.data.datasets import Data, load_rows
from headprune.data.labels import number_labels
from headprune.data.models import build_model
from headprune.recipes.reading import locate
from headprune.recipes.schema import Recipe
from headprune.recipes.validate import load_recipe

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent / "programs"))
import studies
from encoder_tasks import COLUMNS
from judging import IGNORED
from protocol import FIRST, batches_of, logits, pretrained, running
from roster import IMAGE, LANGUAGE
from scorers import drawn, encoder_recipe, fine_tuned

#: Rows that a program runs at once, but for timing.
BATCH = 32
_TRAINING = ("epochs", "learning_rate", "weight_decay", "warmup_ratio", "schedule")


@dataclass(frozen=True)
class Subject:
    """A trained model and its data, laid out for other environments.

    Args:
        name: Of the task.
        folder: Where it lies.
        heads: Of the whole model.
        weights: Fingerprint of the weights.
        train: How it was trained: settings of ``Finetune``, and the batch size; empty where it came
            trained.
        rows: Rows by purpose, for the record.
    """

    name: str
    folder: Path
    heads: int
    weights: str
    train: dict[str, Any]
    rows: dict[str, int]

    @property
    def image(self) -> bool:
        return self.name in IMAGE

    @property
    def tokens(self) -> int | None:
        """Of an image, its patches and one for the class; texts have as many as one likes."""
        if not self.image:
            return None
        config = json.loads((self.base / "config.json").read_text())
        return int((config["image_size"] // config["patch_size"]) ** 2 + 1)

    @property
    def layers(self) -> int:
        return int(json.loads((self.base / "config.json").read_text())["num_hidden_layers"])

    @property
    def base(self) -> Path:
        return self.folder / "base"

    @property
    def before(self) -> Path:
        """The model before it was fine-tuned."""
        return self.folder / "before"

    def file(self, purpose: str, seed: int) -> Path:
        return self.folder / (
            f"calibration-{seed}.npz" if purpose == "calibration" else f"{purpose}.npz"
        )

    def first(self) -> np.ndarray:
        """The base model's logits of the first test rows, which every environment must give."""
        with np.load(self.folder / "first.npz", allow_pickle=False) as file:
            return file["logits"]

    def labels(self, purpose: str) -> np.ndarray:
        return labels_of(self.file(purpose, 0))


def labels_of(rows: Path) -> np.ndarray:
    """The labels in a file of rows."""
    with np.load(rows, allow_pickle=False) as file:
        found: np.ndarray = file["label"]
    return found


def subject(args: Any) -> Subject:
    """Trains what is not trained yet, and writes what peers read."""
    recipe = recipe_of(args)
    model, data = fine_tuned(recipe, args.work)
    model = model.cpu()
    weights = studies.weights_of(model)
    amounts = [args.calibration, args.judged, args.train_rows]
    digest = hashlib.sha256(json.dumps([weights, *amounts]).encode()).hexdigest()[:16]
    folder = args.work / f"subject-{args.task}-{digest}"
    if not folder.is_dir():
        unfinished = args.work / f".unfinished-subject-{digest}"
        shutil.rmtree(unfinished, ignore_errors=True)
        model.save_pretrained(unfinished / "base")
        if recipe.train is not None:
            build_model(recipe, number_labels(recipe, load_rows(recipe)).labels).save_pretrained(
                unfinished / "before"
            )
        parts = {"train": data.examples["train"][: args.train_rows]}
        parts |= {split: data.examples[split][: args.judged] for split in ("validation", "test")}
        for purpose, rows in parts.items():
            _write(data, rows, unfinished / f"{purpose}.npz")
        rows = _joined([data.collate(parts["test"][:FIRST])])
        first = logits(running(model.eval()), list(batches_of(rows, BATCH)))
        _save({"logits": first}, unfinished / "first.npz")
        unfinished.rename(folder)
    for seed in range(args.seeds):
        if not (path := folder / f"calibration-{seed}.npz").is_file():
            _save(_joined(_calibration(args, data, seed)), path)
    train = {}
    if recipe.train is not None:
        train = {key: getattr(recipe.train, key) for key in (*_TRAINING, "batch_size")}
    counts = {
        p: len(np.load(folder / f"{p}.npz")["label"]) for p in ("train", "validation", "test")
    }
    heads = sum(len(site.heads) for site in hp.find_sites(model))
    return Subject(
        args.task, folder, heads, weights, train, {**counts, "calibration": args.calibration}
    )


def recipe_of(args: Any) -> Recipe:
    """How the base model is made."""
    settings = [f"device={args.device}"]
    if args.task in LANGUAGE:
        where = [f"model.path={args.data}", "model.dtype=float32"]
        return load_recipe(locate("llama-stories"), [*settings, *where])
    if args.task in COLUMNS:
        column, epochs = COLUMNS[args.task]
        epochs = epochs if args.epochs is None else args.epochs
        return encoder_recipe(column, args.model, args.data, epochs, args.device)
    if args.epochs is not None:
        settings.append(f"train.epochs={args.epochs}")
    if args.task in IMAGE:
        return load_recipe(locate("digits-vit"), settings)
    where = [f"model.path={args.model}", f"data.path={args.data}", "model.dtype=float32"]
    return load_recipe(locate("stsb-minilm"), [*settings, *where])


def onnx_file(folder: Path, rows: Path, out: Path, opset: int | None = None) -> Path:
    """The ONNX file of a model in a folder, of ours or of Transformers', proven equal; made
    once."""
    if not out.is_file():
        ours = (folder / "headprune.json").is_file()
        model = hp.from_pretrained(folder).eval() if ours else pretrained(folder, "cpu")
        with np.load(rows, allow_pickle=False) as file:
            example = {k: torch.from_numpy(v[:4]) for k, v in file.items() if k != "label"}
        with atomic_path(out) as temporary:
            export_onnx(model, example, temporary, opset=opset)
    return out


def _calibration(args: Any, data: Data, seed: int) -> list[dict[str, torch.Tensor]]:
    """A draw of training rows; of text, rows of like length together."""
    if args.task not in IMAGE:
        return drawn(data, args.calibration, args.calibration, seed)
    train = data.examples["train"]
    return [data.collate(random.Random(seed).sample(train, min(args.calibration, len(train))))]


def _write(data: Data, rows: list[Any], path: Path) -> None:
    _save(_joined([data.collate(rows)]), path)


def _joined(batches: list[dict[str, torch.Tensor]]) -> dict[str, np.ndarray]:
    """Batches as one, padded on the right with zeros, which masks leave out; a text without labels
    has its own tokens for them."""
    found: dict[str, np.ndarray] = {}
    for name in batches[0]:
        values = [batch[name].numpy() for batch in batches]
        label = name in ("labels", "label")
        if values[0].ndim == 2:
            widest, fill = max(v.shape[1] for v in values), IGNORED if label else 0
            values = [
                np.pad(v, ((0, 0), (0, widest - v.shape[1])), constant_values=fill) for v in values
            ]
        found["label" if label else name] = np.concatenate(values)
    if "label" not in found:
        found["label"] = np.where(found["attention_mask"] == 1, found["input_ids"], IGNORED)
    return found


def _save(arrays: dict[str, np.ndarray], path: Path) -> None:
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, **arrays)
