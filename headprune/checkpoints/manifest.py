"""``headprune.json``: the description of a checkpoint folder in our own format."""

from __future__ import annotations

from dataclasses import dataclass, field

from headprune.core.codec import LATER, FrozenDict, Value
from headprune.core.heads import HeadMask

MANIFEST = "headprune.json"


@dataclass(frozen=True)
class Alias:
    """A tensor that is stored once under another name, because both names share it."""

    name: str
    stored: str


@dataclass(frozen=True)
class Folded:
    """Heads (original indices) whose mean output the bias of a site's output projection holds."""

    site: str
    heads: tuple[int, ...]


@dataclass(frozen=True)
class Shard:
    """One of several weights files."""

    file: str
    sha256: str


@dataclass(frozen=True)
class Manifest(Value):
    """The description of a checkpoint folder, besides weights and configuration.

    Args:
        model_class: Class of the model, found in Transformers by this name; or the user's own
            class.
        transformers: Whether it is a Transformers class, built from ``config.json``.
        structure: Fingerprint of the uncut model's structure.
        mask: The kept heads.
        aliases: Shared tensors, for example tied embeddings.
        added_biases: Biases of projections that recovery gave one.
        tables: Buffers that a model computes when it is built, stored because a new model's may
            differ, for example rotary angles that ``model.bfloat16()`` rounded.
        folded: Heads whose mean output the biases hold, see ``recovery/mean_fold.py``.
        config_sha256: Hash of ``config.json``, where there is one.
        weights_sha256: Hash of the weights file; of the index where there are several.
        library: Version of headprune that wrote it.
        shards: The weights files, where there are several.
        layouts: Layouts of the sites that are no files of this library, as data.
    """

    model_class: str
    transformers: bool
    structure: str
    mask: HeadMask
    aliases: tuple[Alias, ...]
    added_biases: tuple[str, ...]
    tables: tuple[str, ...]
    folded: tuple[Folded, ...]
    config_sha256: str | None
    weights_sha256: str
    library: str
    shards: tuple[Shard, ...] = ()
    layouts: tuple[FrozenDict, ...] = field(default=(), metadata=LATER)
