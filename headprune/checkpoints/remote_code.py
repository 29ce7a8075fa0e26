"""Checkpoints with a modelling file beside the weights, which Transformers loads without headprune.

Loading needs ``trust_remote_code=True``. The file builds the full-size class, then gives every
attention that was cut its shapes and counts, as ``config.json`` lists them, and projections the
biases that a recovery added. A layer without heads adds only the output projection's bias. A model
that needs another correction by code of headprune is refused.

For decoders of the layout ``llama``, ``config.json`` also has Transformers' ``per_layer_config``
with the head counts of every layer: vLLM sizes its cache by it.
"""

from __future__ import annotations

import copy
import importlib.util
import inspect
import re
import sys
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from torch import Tensor, nn

from headprune.attention.kept_heads import weights_of
from headprune.attention.linear import WithoutFeatures
from headprune.core.errors import UnsupportedModel
from headprune.core.files import write_atomic
from headprune.core.layout import FOLDED_ATTRIBUTE, STATE_ATTRIBUTE
from headprune.core.mixin import FORWARDS, Mixin
from headprune.layouts._feed_forward import BiasAlone
from headprune.model.building import fresh, is_known
from headprune.model.losses import is_causal_lm
from headprune.model.saves import added_biases, own_parts
from headprune.model.sites import BoundSite

_WHERE = "format 'remote-code'"
_BODY = Template('''

class $CUT($CLASS):
    """The same without the model's head, for what reads features: ``AutoModel``."""

    def __init__(self, config, *args, **kwargs):
        super().__init__(config, *args, **kwargs)
        resize_all(self, "$PREFIX")
''')
#: Attributes that headprune or a run sets, without effect on what the module computes.
_IGNORED = frozenset({STATE_ATTRIBUTE, FOLDED_ATTRIBUTE, "training", "config"})


def description_of_cut(model: nn.Module, bound: list[BoundSite]) -> dict[str, Any]:
    """Describe a cut for the modelling file, as JSON data.

    Returns:
        ``{site: {heads, of, shapes, attributes, in_front}}``.

    Raises:
        UnsupportedModel: the cut cannot be described so.
    """
    name = type(model).__name__
    if not is_known(model):
        raise UnsupportedModel(_WHERE, "for a class of Transformers", name)
    if not auto_classes(model):
        must = "for a class that one of Transformers' Auto classes loads"
        raise UnsupportedModel(_WHERE, must, name)
    _check_mixins(model, bound)
    built = fresh(model)
    assert built is not None
    full = dict(built.named_modules(remove_duplicate=False))
    # 1. Each attention that was cut.
    description = {}
    described = set(added_biases(model, built))
    for b in bound:
        if len(b.site.heads) == b.site.n_query_heads:
            continue
        site = _site(b, full[b.site.name])
        description[b.site.name] = site
        # A module that several layers share has several names.
        for module in (b.site.name, *b.site.shared_with):
            described.update(f"{module}.{path}".lstrip(".") for path in site["shapes"])
    # 2. A tensor of another shape that no site describes would not load.
    own = {n: t.shape for n, t in weights_of(model).items()}
    whole = {n: t.shape for n, t in weights_of(built).items()}
    for tensor in {**own, **whole}:
        if own.get(tensor) != whole.get(tensor) and tensor not in described:
            must = "for cuts in attentions, with all other tensors as the class makes them"
            raise UnsupportedModel(_WHERE, must, f"a new or cut tensor {tensor}")
    return description


def _check_mixins(model: nn.Module, bound: list[BoundSite]) -> None:
    """Refuse modules whose code headprune corrects by a class that needs headprune."""
    shares_unevenly = any(b.site.geometry.kv_of is not None for b in bound)
    hint = "Cut under the policy group or balanced." if shares_unevenly else ""
    for name, module in model.named_modules():
        for kind in _in_front(module):
            if not _travels(kind):
                must = "for modules that run their own code"
                got = f"{name}, which {kind.__name__} of headprune corrects"
                raise UnsupportedModel(_WHERE, must, got, hint)


def auto_classes(model: nn.Module) -> list[str]:
    """The Auto classes of Transformers that load the model's class."""
    from transformers.models.auto import modeling_auto

    names = []
    # `dir(transformers)` would list them too, but takes a second.
    for name in sorted(modeling_auto.__all__):
        if not name.startswith("AutoModel"):
            continue
        mapping = getattr(getattr(modeling_auto, name), "_model_mapping", None)
        if mapping is None:
            continue
        # One class, or several for one configuration.
        kinds: Any = mapping.get(type(model.config), ())
        if not isinstance(kinds, (tuple, list)):
            kinds = (kinds,)
        if type(model) in kinds:
            names.append(name)
    return names


def body_of(model: Any) -> nn.Module | None:
    """The model without its head, where an Auto class loads that."""
    body: nn.Module = model.base_model
    if body is model or not is_known(body) or not auto_classes(body):
        return None
    return body


def write_code(model: Any, folder: Path) -> tuple[Any, Any]:
    """Write the modelling file.

    Returns:
        The class that it defines, and that of the model without its head or None.
    """
    body = body_of(model)
    name = type(model).__name__
    # 1. The placeholders of the template.
    names = {
        "CLASS": name,
        "CUT": _class_name(model),
        "IN_FRONT": _sources(model),
        "IMPORTS": name,
        "BODY": "",
    }
    if body is not None:
        names["IMPORTS"] += f", {type(body).__name__}"
        names["BODY"] = _BODY.substitute(
            CUT=_class_name(body),
            CLASS=type(body).__name__,
            PREFIX=f"{model.base_model_prefix}.",
        )
    template = files("headprune.checkpoints").joinpath("modeling_template.txt")
    text = Template(template.read_text(encoding="utf-8")).substitute(names)
    path = write_atomic(folder / f"{_file_name(model)}.py", text.encode())

    # 2. Run it, as Transformers will.
    spec = importlib.util.spec_from_file_location(f"_written_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Transformers looks there for a class's module
    spec.loader.exec_module(module)
    kind = getattr(module, names["CUT"])
    return kind, None if body is None else getattr(module, _class_name(body))


def config_of_cut(model: Any, description: dict[str, Any], bound: list[BoundSite]) -> Any:
    """The model's configuration with the description of the cut, as the modelling file reads it."""
    # 1. Which class of the file each Auto class loads.
    config = copy.deepcopy(model.config)
    config.auto_map = {}
    for part in (body_of(model), model):
        if part is not None:
            reference = f"{_file_name(model)}.{_class_name(part)}"
            config.auto_map.update(dict.fromkeys(auto_classes(part), reference))
    # 2. Code of others, which must not run because ours is trusted.
    config.__dict__.pop("custom_pipelines", None)
    config.headprune_heads = description
    config.headprune_biases = list(added_biases(model, fresh(model)))
    # 3. The head counts of every layer, for vLLM.
    decoder = _decoder_layers(model, bound)
    if decoder and not reason_against_vllm(model, bound):
        counts = {}
        for number, b in decoder.items():
            geometry = b.site.geometry
            counts[number] = {
                "num_attention_heads": geometry.n_query_heads,
                "num_key_value_heads": geometry.n_kv_heads,
            }
        config.per_layer_config = counts
        # vLLM also reads the counts of the whole model, and would divide its width by them.
        config.allow_global_per_layer_attribute_access = True
        config.head_dim = decoder[0].module.head_dim
    return config


def reason_against_vllm(model: Any, bound: list[BoundSite]) -> str | None:
    """Why vLLM cannot serve a cut decoder, and the way out; else None."""
    decoder = _decoder_layers(model, bound)
    if not decoder and not is_causal_lm(model):
        return None
    attention = [b.site for b in bound if not b.site.is_feed_forward]
    if not decoder and any(len(site.heads) < site.n_query_heads for site in attention):
        reason = f"config.json cannot state the heads of each layer of a {type(model).__name__}"
        return f"{reason}: where format 'transformers' holds an even cut, vLLM serves that"
    for b in bound:
        # It runs neither attention without heads nor a feed-forward without neurons.
        if not b.site.heads:
            return f"{b.site.name} has no {b.site.noun}s: select with min_heads=1"
    return None


def _decoder_layers(model: Any, bound: list[BoundSite]) -> dict[int, BoundSite]:
    """The attention of each layer of a text decoder whose configuration can hold its counts."""
    config = model.config
    if config.sub_configs or not hasattr(type(config), "per_layer_config"):
        return {}
    layers: dict[Any, BoundSite] = {
        b.module.layer_idx: b for b in bound if b.site.layout == "llama"
    }
    every_layer = set(range(getattr(config, "num_hidden_layers", 0)))
    return layers if set(layers) == every_layer else {}


def _class_name(model: nn.Module) -> str:
    return f"HeadPruned{type(model).__name__}"


def _file_name(model: Any) -> str:
    return f"modeling_headprune_{re.sub(r'[^a-z0-9_]', '_', model.config.model_type.lower())}"


def _site(b: BoundSite, full: nn.Module) -> dict[str, Any]:
    """Describe one cut attention by its difference from the full-size one."""
    name = b.site.name
    # A feed-forward's layer may hold attention, which has a description of its own.
    own = own_parts(b.module)
    # 1. Parameters of other shapes.
    shapes: dict[str, list[int]] = {}
    full_state = full.state_dict()
    # Tensors that the class does not have are found by the comparison of whole models.
    for path, tensor in weights_of(b.module).items():
        if b.module.get_submodule(path.rpartition(".")[0]) not in own:
            continue
        if path in full_state and full_state[path].shape != tensor.shape:
            shapes[path] = list(tensor.shape)

    # 2. Attributes with other values, and classes in front of the modules' own.
    attributes: dict[str, Any] = {}
    in_front: dict[str, str] = {}
    full_modules = dict(full.named_modules())
    for path, module in b.module.named_modules():
        if module not in own:
            continue
        if path not in full_modules:
            raise UnsupportedModel(_WHERE, "for modules of the class", f"a new one, {name}.{path}")
        if _in_front(module):
            in_front[path] = type(module).headprune_mixins[0].__name__
        for attribute, value in _changed(module, full_modules[path]).items():
            where = f"{path}.{attribute}".lstrip(".")
            if not _is_plain(value):
                must = "for modules with attributes that JSON holds"
                raise UnsupportedModel(_WHERE, must, f"{name}.{where}")
            attributes[where] = value
    kept: dict[str, Any] = {"heads": list(b.site.heads)}
    if b.site.is_feed_forward:
        # Which ones is in the record: there are thousands.
        kept = {"n_neurons": len(b.site.heads)}
    return {
        **kept,
        "of": b.site.n_query_heads,
        "shapes": shapes,
        "attributes": attributes,
        "in_front": in_front,
    }


def _changed(module: nn.Module, full: nn.Module) -> dict[str, Any]:
    """Attributes of a cut module that the full one has otherwise or not."""
    changed = {}
    is_hooked = "_hf_hook" in module.__dict__
    for name, value in module.__dict__.items():
        # The forward of accelerate's hooks is no part of the model.
        is_hook = is_hooked and name in FORWARDS
        if name.startswith("_") or is_hook or isinstance(value, (Tensor, nn.Module)):
            continue
        other = full.__dict__.get(name, ...)
        same_type = type(value) is type(other)
        # Values that are no plain data (functions, configurations) are compared by type.
        if same_type and (value == other or not _is_plain(value)):
            continue
        if name not in _IGNORED or (name == "config" and not same_type):
            changed[name] = value
    return changed


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(_is_plain(v) for v in value)
    return value is None or isinstance(value, (bool, int, float, str))


def _in_front(module: nn.Module) -> list[type]:
    """Classes in front of a module's own, each after those it derives from."""
    mixins: tuple[type, ...] = getattr(type(module), "headprune_mixins", ())
    kinds: dict[type, None] = {}
    for mixin in mixins:
        for kind in reversed(mixin.__mro__):
            if issubclass(kind, Mixin) and kind is not Mixin:
                kinds[kind] = None
    return list(kinds)


def _sources(model: nn.Module) -> str:
    """Source text of every class that stands in front of a module's."""
    kinds: dict[type, None] = {}
    for module in model.modules():
        kinds.update(dict.fromkeys(_in_front(module)))
    sources = []
    for kind in kinds:
        # The modelling file has no class Mixin.
        source = inspect.getsource(kind).replace("(Mixin, ", "(").replace("(Mixin)", "(nn.Module)")
        sources.append(f"\n\n{source}")
    return "".join(sources)


def _travels(kind: type) -> bool:
    """Whether a class needs only torch, so that the file can hold its source."""
    from headprune.layouts import _transformers

    if kind in (WithoutFeatures, BiasAlone):
        return True
    is_defined_there = kind.__module__ == _transformers.__name__
    return is_defined_there and issubclass(kind, _transformers.WithoutHeads)
