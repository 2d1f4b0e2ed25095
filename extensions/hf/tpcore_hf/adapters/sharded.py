"""Adapters of peft on a model: aside while it is sharded, sharded as it is, and in peft's files."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import MethodType
from typing import Any

from peft.tuners import lora
from peft.tuners.tuners_utils import BaseTunerLayer, check_target_module_exists
from peft.utils import (
    CONFIG_NAME,
    SAFETENSORS_WEIGHTS_NAME,
    get_peft_model_state_dict,
    load_peft_weights,
    set_peft_model_state_dict,
)
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from safetensors.torch import load, save, save_file
from torch import Tensor, nn

from tpcore.checkpoint.storage.files import listed
from tpcore.errors import CheckpointError
from tpcore.layers import ParallelEmbedding
from tpcore.layers.adopt import HOOKED, become, is_hooked, see_whole, shard
from tpcore.layers.module import ParallelModule
from tpcore.private import forward_hooks
from tpcore.runtime.consensus import gather_bytes, together
from tpcore.runtime.context import current
from tpcore.train.pipeline import PipelinedLayers

from ..load.gathered import whole
from ..shard.figures import count_whole
from ..shard.forwards import SUBSTITUTED, Rotary, substitute
from .lora import (
    HEAD,
    LAYERS,
    ShardedLora,
    ShardedLoraEmbedding,
    add_weighted_adapter,
    around,
    check_attached,
    name_linear,
    refuse,
    take_part,
)


class Configs(dict[str, Any]):
    """The configurations of a sharded model's adapters by name; a further one is prepared as it is added."""

    def __setitem__(self, name: str, config: Any) -> None:
        super().__setitem__(name, prepared(config))

    def update(self, other: Any = (), /, **named: Any) -> None:
        for name, config in dict(other, **named).items():
            self[name] = config


def prepared(config: Any) -> Any:
    """``config``, from which peft makes adapters of sharded layers too."""
    refuse(config)
    config._register_custom_module(LAYERS)
    return config


def check_targets(model: Any, config: Any) -> None:
    """Before peft changes anything: ValueError for an adapter of the head and for a model of several stages; names
    instead of "all-linear", for which peft looks for the classes of whole layers."""
    if any(isinstance(module, PipelinedLayers) and module.pp.size > 1 for module in model.modules()):
        raise ValueError(
            "this rank has the layers of its stage alone, and would draw other initial values than one process: add "
            "adapters before, tpcore.parallelize(peft.get_peft_model(model, config), num_microbatches=...)"
        )
    head = getattr(model, "get_output_embeddings", lambda: None)()
    name = next((n for n, m in model.named_modules() if m is head), "")
    saved = name.rpartition(".")[2] in (config.modules_to_save or ())
    every = name_linear(model, config)
    if name and (saved or (not every and config.target_modules and check_target_module_exists(config, name))):
        raise ValueError(HEAD.format(name))


def bound(model: Any) -> Any:
    """The ``PeftModel``, which saves whole adapters, and takes further ones."""
    for layer in model.modules():
        if type(layer) in _INNER:
            _hooks_outside(layer, getattr(layer, _INNER[type(layer)]))
    _link_copies(model)
    configs = Configs(model.peft_config)  # without refusals: these adapters are made, perhaps of whole weights
    for config in configs.values():
        config._register_custom_module(LAYERS)
    model.base_model.peft_config = model.get_base_model().peft_config = configs
    count_whole(model)
    model.__dict__["save_pretrained"] = MethodType(save_adapters, model)
    model.__dict__["load_adapter"] = MethodType(_load_adapter, model)
    model.__dict__["add_adapter"] = MethodType(_add_adapter, model)
    model.base_model.__dict__["add_weighted_adapter"] = MethodType(add_weighted_adapter, model.base_model)
    return model


def save_adapters(
    model: Any,
    save_directory: str | os.PathLike[str],
    safe_serialization: bool = True,
    selected_adapters: list[str] | None = None,
    save_embedding_layers: Any = "auto",
    is_main_process: bool = True,
    **options: Any,
) -> None:
    """``save_pretrained`` of a ``PeftModel``: peft's files, ``adapter_config.json`` and ``adapter_model.safetensors``,
    of the whole adapters. Rank 0 writes, whatever ``is_main_process``. Collective over the world."""
    ctx, tables_too, staged = current(), save_embedding_layers, current().mesh.axes.get("pp", 1) > 1
    if staged and not safe_serialization:
        raise ValueError("save_pretrained(safe_serialization=False): adapters on stages are written as safetensors")
    state = dict(options.pop("state_dict", None) or {})
    if not state:
        head: Any = getattr(model, "get_output_embeddings", lambda: None)()
        tables = (m for m in model.modules() if m is head or isinstance(m, nn.Embedding | ParallelEmbedding))
        saved = {id(p) for m in tables for p in m.parameters()} if tables_too else set()
        for name, t in model.state_dict(keep_vars=True).items():
            if t.requires_grad or "lora_" in name or "modules_to_save" in name or id(t) in saved:
                state[name] = whole(t)
    names = [name for name in model.peft_config if selected_adapters is None or name in selected_adapters]
    stages = _of_stages(model, state, names) if staged else {}
    options |= {"selected_adapters": selected_adapters, "save_embedding_layers": tables_too, "state_dict": state}
    with together(ctx):
        if ctx.rank == 0:
            type(model).save_pretrained(model, os.fspath(save_directory), safe_serialization, **options)
            for name, of_all in stages.items():  # peft writes what its model has, one stage's
                local = get_peft_model_state_dict(model, state, name, save_embedding_layers=tables_too)
                file = os.path.join(_folder(os.fspath(save_directory), name), SAFETENSORS_WEIGHTS_NAME)
                save_file({**local, **of_all}, file, {"format": "pt"})


def _of_stages(model: Any, state: dict[str, Tensor], names: list[str]) -> dict[str, dict[str, Tensor]]:
    """The adapters ``names`` of all stages, from the ``state`` of each. Collective over them."""
    adapters: dict[str, dict[str, Tensor]] = {}
    for name in names:
        # the vocabulary's tables are on every stage
        local = get_peft_model_state_dict(model, state_dict=state, adapter_name=name, save_embedding_layers=False)
        parts = gather_bytes(save(local), current().comm("pp"))
        adapters[name] = {key: t for part in parts for key, t in load(part).items()}
    return adapters


def _folder(where: str, name: str) -> str:
    return where if name == "default" else os.path.join(where, name)


def load_adapters(model: Any, where: str) -> None:
    """Load this rank's part of what ``save_pretrained`` wrote, for each adapter of the ``PeftModel``. CheckpointError
    if the files lack one, or a part of it."""
    with whole_layers(model):
        for name in model.peft_config:
            folder = _folder(where, name)
            if not os.path.isfile(os.path.join(folder, CONFIG_NAME)):
                raise CheckpointError(f"{folder} has no {CONFIG_NAME}: the adapter {name!r} of the model is not there")
            report: Any = set_peft_model_state_dict(model, load_peft_weights(folder, "cpu"), adapter_name=name)
            of_adapter = re.compile(rf"\.(lora_\w+|modules_to_save)\.{re.escape(name)}(\.|$)")
            missing = [key for key in report.missing_keys if of_adapter.search(key)]
            if missing:
                raise CheckpointError(listed(f"{folder} holds no values for the adapter {name!r}", missing))


def _load_adapter(model: Any, *args: Any, **options: Any) -> Any:
    with whole_layers(model):
        loaded = type(model).load_adapter(model, *args, **options)
    _link_copies(model)
    return loaded


def _add_adapter(model: Any, adapter_name: str, peft_config: Any, *args: Any, **options: Any) -> Any:
    name_linear(model.get_base_model(), peft_config)
    added = type(model).add_adapter(model, adapter_name, peft_config, *args, **options)
    _link_copies(model)
    return added


@contextmanager
def whole_layers(model: nn.Module) -> Iterator[None]:
    """Inside, files may have layers of a sharded model whole, as ``save_embedding_layers``, ``modules_to_save`` and
    ``bias`` write them. Copies that peft makes of a layer inside keep that."""
    with ExitStack() as hooks:
        for layer in model.modules():
            if isinstance(layer, ParallelModule):
                hooks.enter_context(layer.register_load_state_dict_pre_hook(take_part))
        yield


@contextmanager
def aside(adapted: Any) -> Iterator[Any]:
    """Inside, the model of transformers in ``adapted`` has no adapters, so that a plan's rules hold for its layers;
    then they are back, sharded as those. ValueError for adapters of another kind."""
    model: Any = adapted.get_base_model() if hasattr(adapted, "get_base_model") else adapted
    kinds = (BaseTunerLayer, AuxiliaryTrainingWrapper)
    layers: dict[str, Any] = {name: m for name, m in model.named_modules() if isinstance(m, kinds)}
    head = getattr(model, "get_output_embeddings", lambda: None)()
    for name, layer in layers.items():
        if layer is head:
            raise ValueError(HEAD.format(name))
        if type(layer) not in _INNER:
            raise ValueError(
                f"{name} ({type(layer).__name__}): the adapters of a sharded model are LoRA's, of linear "
                "layers and embeddings"
            )
        check_attached(name, layer, getattr(layer, _INNER[type(layer)]))
    configs = model.__dict__.get("peft_config", {})
    for config in {**configs, **getattr(adapted, "peft_config", {})}.values():  # prompts are of the PeftModel alone
        refuse(config, initialized=True)
    model.__dict__.pop("peft_config", None)
    for name, layer in layers.items():
        inner = getattr(layer, _INNER[type(layer)])
        if any(is_hooked(part) for part in around(layer, inner)):
            vars(inner)[HOOKED] = True
        model.set_submodule(name, inner)
    try:
        yield model
    finally:
        here = dict(model.named_modules())  # others are on another stage
        for name, layer in layers.items():
            if name in here:
                setattr(layer, _INNER[type(layer)], here[name])
                model.set_submodule(name, _sharded(layer))
        model.__dict__.pop("peft_config", None)
        if configs:
            model.peft_config = configs
    for module in model.modules():
        if isinstance(module, PipelinedLayers):
            module.mark_places()
    if adapted is not model:
        bound(adapted)


_INNER: dict[type, str] = {
    lora.Linear: "base_layer",
    lora.Embedding: "base_layer",
    ModulesToSaveWrapper: "original_module",
}
"""By the class of a layer with adapters, the attribute that is the model's own layer."""


def _sharded(layer: Any) -> nn.Module:
    """``layer`` with its adapters sharded as its base layer is; itself if that stayed whole."""
    inner = getattr(layer, _INNER[type(layer)])
    if not isinstance(inner, ParallelModule):
        _hooks_outside(layer, inner)
        return layer  # type: ignore[no-any-return]
    if isinstance(layer, ModulesToSaveWrapper):
        for module in layer.modules_to_save.values():
            _become_part(module, inner)
        return layer
    layer.__class__ = ShardedLora if isinstance(layer, lora.Linear) else ShardedLoraEmbedding
    see_whole(layer)
    for name in layer.lora_A:
        layer.shard(name)
    return layer  # type: ignore[no-any-return]


def _hooks_outside(layer: nn.Module, inner: nn.Module) -> None:
    """What ``parallelize`` does to the output of a whole layer, such as summing the gradient of a rotary key, it does
    to its adapters' output too."""
    hooks = forward_hooks(inner)
    for number, hook in list(hooks.items()):
        if isinstance(hook, Rotary):
            forward_hooks(layer)[number] = hooks.pop(number)


def _link_copies(model: nn.Module) -> None:
    """Under sequence parallelism the copies of ``modules_to_save`` sum gradients as the model's own modules do."""
    for layer in model.modules():
        if not isinstance(layer, ModulesToSaveWrapper):
            continue
        own: Any = layer.original_module
        for part in layer.modules_to_save.values():
            if SUBSTITUTED in vars(own) and SUBSTITUTED not in vars(part):
                substitute(part, vars(own)[SUBSTITUTED])
            elif SUBSTITUTED in vars(own):  # a copy, of which a copy would be told
                vars(part)[SUBSTITUTED] = vars(own)[SUBSTITUTED]


def _become_part(module: nn.Module, like: ParallelModule) -> None:
    """Let the whole ``module`` become a layer as ``like`` is, with this rank's part of its own parameters."""
    training = module.training
    see_whole(module)
    become(module, copy.deepcopy(like))
    shard([module.train(training)])
    module.register_load_state_dict_pre_hook(take_part)
