"""Checkpoints with a modelling file beside the weights: uneven head counts, read by Transformers
with ``trust_remote_code=True`` and without this package.

The file builds the full-size class, then gives every attention that was cut its shapes and counts,
as ``config.json`` lists them, and projections the biases that a recovery gave them; a layer without
heads becomes one that adds only the output projection's bias. Code of ours that corrects a module
in another way cannot travel: such a model is refused.
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
from headprune.checkpoints.building import fresh, is_known
from headprune.checkpoints.own import added_biases
from headprune.core.errors import UnsupportedModel
from headprune.core.files import write_atomic
from headprune.core.layout import FOLDED_ATTRIBUTE, STATE_ATTRIBUTE
from headprune.core.mixin import FORWARDS, Mixin
from headprune.model.sites import BoundSite

_WHERE = "format 'remote-code'"
_BODY = Template('''

class $CUT($CLASS):
    """The same without the model's head, for what reads features: ``AutoModel``."""

    def __init__(self, config, *args, **kwargs):
        super().__init__(config, *args, **kwargs)
        resize_all(self, "$PREFIX")
''')
#: Set by us or by a run, and without effect on what the module computes from its tensors.
_IGNORED = frozenset({STATE_ATTRIBUTE, FOLDED_ATTRIBUTE, "training", "config"})


def description_of_cut(model: nn.Module, bound: list[BoundSite]) -> dict[str, Any]:
    """What the modelling file has to do, as JSON data:
    ``{site: {heads, of, shapes, attributes, in_front}}``.

    Raises:
        UnsupportedModel: the cut cannot be described so; the message says why.
    """
    if not is_known(model):
        raise UnsupportedModel(_WHERE, "for a class of Transformers", type(model).__name__)
    if not auto_classes(model):
        raise UnsupportedModel(
            _WHERE, "for a class that one of Transformers' Auto classes loads", type(model).__name__
        )
    built = fresh(model)
    assert built is not None
    for name, module in model.named_modules():
        stays = [c for c in _in_front(module) if not _travels(c)]
        if stays:
            must = "for modules that run their own code"
            raise UnsupportedModel(
                _WHERE, must, f"{name}, which {stays[0].__name__} of headprune corrects"
            )
    full = dict(built.named_modules(remove_duplicate=False))
    sites = {}
    for b in bound:
        if len(b.site.heads) != b.site.n_query_heads:
            sites[b.site.name] = _site(b, full[b.site.name])
    ours, theirs = ({n: t.shape for n, t in weights_of(m).items()} for m in (model, built))
    names = {b.site.name: (b.site.name, *b.site.shared_with) for b in bound}
    told = {
        f"{n}.{path}".lstrip(".")
        for site, s in sites.items()
        for n in names[site]
        for path in s["shapes"]
    }
    told |= set(added_biases(model, built))
    beyond = [n for n in {**ours, **theirs} if ours.get(n) != theirs.get(n) and n not in told]
    if beyond:
        raise UnsupportedModel(
            _WHERE, "for tensors that the class has, cut inside of attentions", beyond[0]
        )
    return sites


def auto_classes(model: nn.Module) -> list[str]:
    """The Auto classes of Transformers that load the model's class."""
    import transformers

    names = []
    for name in dir(transformers):
        mapping = (
            getattr(getattr(transformers, name), "_model_mapping", None)
            if name.startswith("AutoModel")
            else None
        )
        if mapping is not None:
            found: Any = mapping.get(type(model.config), ())
            if type(model) in (found if isinstance(found, (tuple, list)) else (found,)):
                names.append(name)
    return names


def body_of(model: Any) -> nn.Module | None:
    """The model without its head, where that is a class of its own that an Auto class loads."""
    body: nn.Module = model.base_model
    return body if body is not model and is_known(body) and auto_classes(body) else None


def write_code(model: Any, folder: Path) -> tuple[Any, Any]:
    """Writes the modelling file; returns the class that it defines, and that of the model without
    its head or None."""
    body, name = body_of(model), type(model).__name__
    names = {
        "CLASS": name,
        "CUT": _class_name(model),
        "IN_FRONT": _sources(model),
        "IMPORTS": name,
        "BODY": "",
    }
    if body is not None:
        names["IMPORTS"] += f", {type(body).__name__}"
        whole = {
            "CUT": _class_name(body),
            "CLASS": type(body).__name__,
            "PREFIX": f"{model.base_model_prefix}.",
        }
        names["BODY"] = _BODY.substitute(whole)
    template = (
        files("headprune.checkpoints").joinpath("modeling_template.txt").read_text(encoding="utf-8")
    )
    path = write_atomic(
        folder / f"{_file_name(model)}.py", Template(template).substitute(names).encode()
    )
    spec = importlib.util.spec_from_file_location(f"_written_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Transformers looks there for a class's module
    spec.loader.exec_module(module)
    return getattr(module, names["CUT"]), None if body is None else getattr(
        module, _class_name(body)
    )


def config_of_cut(model: Any, description: dict[str, Any]) -> Any:
    """The model's configuration with what the modelling file reads."""
    config = copy.deepcopy(model.config)
    whole = [m for m in (body_of(model), model) if m is not None]
    config.auto_map = {
        name: f"{_file_name(model)}.{_class_name(m)}" for m in whole for name in auto_classes(m)
    }
    config.__dict__.pop("custom_pipelines", None)  # code of others, which is not ours to have run
    config.headprune_heads = description
    config.headprune_biases = list(added_biases(model, fresh(model)))
    return config


def _class_name(model: nn.Module) -> str:
    return f"HeadPruned{type(model).__name__}"


def _file_name(model: Any) -> str:
    return f"modeling_headprune_{re.sub(r'[^a-z0-9_]', '_', model.config.model_type.lower())}"


def _site(b: BoundSite, full: nn.Module) -> dict[str, Any]:
    """One cut attention beside the full-size one."""
    shapes: dict[str, list[int]] = {}
    attributes: dict[str, Any] = {}
    front: dict[str, str] = {}
    theirs = dict(full.state_dict())
    for path, tensor in weights_of(b.module).items():
        if path in theirs and theirs[path].shape != tensor.shape:
            shapes[path] = list(tensor.shape)
    modules = dict(full.named_modules())
    for path, module in b.module.named_modules():
        if path not in modules:
            raise UnsupportedModel(
                _WHERE, "for modules that the class has", f"{b.site.name}.{path}"
            )
        if _in_front(module):
            front[path] = type(module).headprune_mixins[0].__name__
        for name, value in _changed(module, modules[path]).items():
            where = f"{path}.{name}".lstrip(".")
            if not _is_plain(value):
                raise UnsupportedModel(
                    _WHERE, "for modules with attributes that JSON holds", f"{b.site.name}.{where}"
                )
            attributes[where] = value
    heads = {"heads": list(b.site.heads), "of": b.site.n_query_heads}
    return {**heads, "shapes": shapes, "attributes": attributes, "in_front": front}


def _changed(module: nn.Module, full: nn.Module) -> dict[str, Any]:
    """Attributes that the cut module has and the full one has not, or has with another value or
    type."""
    found = {}
    for name, value in module.__dict__.items():
        hooked = (
            name in FORWARDS and "_hf_hook" in module.__dict__
        )  # accelerate's, which do not travel
        if name.startswith("_") or hooked or isinstance(value, (Tensor, nn.Module)):
            continue
        other = full.__dict__.get(name, ...)
        same = type(value) is type(other) and (value == other or not _is_plain(value))
        if not same and (
            name not in _IGNORED or (name == "config" and type(value) is not type(other))
        ):
            found[name] = value
    return found


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(_is_plain(v) for v in value)
    return value is None or isinstance(value, (bool, int, float, str))


def _in_front(module: nn.Module) -> list[type]:
    """The classes that were put in front of a module's own, each after those it derives from."""
    mixins: tuple[type, ...] = getattr(type(module), "headprune_mixins", ())
    found = dict.fromkeys(
        c for m in mixins for c in reversed(m.__mro__) if issubclass(c, Mixin) and c is not Mixin
    )
    return list(found)


def _sources(model: nn.Module) -> str:
    """Source text of every class that stands in front of a module's."""
    found = dict.fromkeys(c for m in model.modules() for c in _in_front(m))
    return "".join(f"\n\n{inspect.getsource(c).replace('(Mixin, ', '(')}" for c in found)


def _travels(kind: type) -> bool:
    """Whether a class needs nothing but torch, so that its source text can stand in the modelling
    file."""
    from headprune.layouts import _transformers

    without_heads = kind.__module__ == _transformers.__name__ and issubclass(
        kind, _transformers.WithoutHeads
    )
    return without_heads or kind is WithoutFeatures
