"""LoRA adapters of peft on sharded layers: beside a column layer B is sharded, beside a row layer A.

Hu et al. 2021, arXiv:2106.09685. An adapter of a column layer has A whole, and B by the features of the
layer; one of a row layer has A by the features that the layer takes, whose output of rank r is summed, and B
whole.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any

from peft.tuners import lora
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from torch import Tensor, nn

from ..layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear
from ..layers.module import ParallelModule
from ..layers.sharding import sharding
from ..runtime.consensus import together
from ..runtime.context import current
from .summed import sum_gradients
from .whole import whole


@dataclass(frozen=True)
class _TokensSharded:
    """Whether a row layer's output is this rank's tokens, in the current forward."""

    row: RowParallelLinear

    @property
    def active(self) -> bool:
        return self.row.sequence_dim is not None


class ShardedLora(lora.Linear):  # type: ignore[misc, unused-ignore]  peft may be without types
    """peft's layer of adapters around a column or row layer. A new adapter is sharded as it is made."""

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
        return module.input_size, module.output_size  # type: ignore[return-value]

    def update_layer(self, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        refuse(kwargs["config"])
        super().update_layer(adapter_name, *args, **kwargs)
        self.shard(adapter_name)

    def shard(self, name: str) -> None:
        """The whole adapter ``name`` becomes this rank's part; sharded Parameters are new ones."""
        base = self.get_base_layer()
        self.fan_in_fan_out = base.transposed
        a, b, own = self.lora_A[name], self.lora_B[name], {"tensor_model_parallel_group": base.tp}
        (blocks,) = {base.shard_specs["weight"].blocks}
        if isinstance(base, ColumnParallelLinear):
            if base.gather_output:
                raise ValueError(_HEAD.format(f"of {base.output_size} features"))
            part: ParallelModule = ColumnParallelLinear.from_plain(
                b, gather_output=False, blocks=blocks, **own
            )
            self.lora_B[name] = part
            if base.input_is_copied:
                # one copy of the input, for all layers that read it, sums its gradient: what A adds to it has
                # to be this rank's part too, and A's own gradient is summed
                part.input_is_copied = True  # type: ignore[assignment]
                sum_gradients(a, base.tp)
        else:
            part = RowParallelLinear.from_plain(
                a, input_is_parallel=base.input_is_parallel, blocks=blocks, pad=base.features.padded, **own
            )
            self.lora_A[name] = part
            sum_gradients(b, base.tp, _TokensSharded(base))
        part.register_load_state_dict_pre_hook(_take_part)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        base = self.get_base_layer()
        names = [name for name in self.active_adapters if name in self.lora_A]
        if isinstance(base, RowParallelLinear):
            for name in names:
                self.lora_A[name].sequence_dim = base.sequence_dim
        if self.disable_adapters or self.merged or kwargs.get("adapter_names") is not None:
            result: Tensor = super().forward(x, *args, **kwargs)
            return result
        # before the base layer: what drops elements of x draws as it does for x, not for the layer's output
        added = []
        for name in names:
            taken = self.lora_dropout[name](self._cast_input_dtype(x, self.lora_A[name].weight.dtype))
            added.append(self.lora_B[name](self.lora_A[name](taken)) * self.scaling[name])
        result = self.base_layer(x, *args, **kwargs)
        return sum(added, result).to(result.dtype)


class ShardedLoraEmbedding(lora.Embedding):  # type: ignore[misc, unused-ignore]
    """peft's layer of adapters around a parallel embedding: they are whole, as its output is."""

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
        return module.num_embeddings, module.embedding_dim  # type: ignore[return-value]

    def update_layer(self, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        refuse(kwargs["config"])
        super().update_layer(adapter_name, *args, **kwargs)

    def get_delta_weight(self, adapter: str) -> Tensor:
        delta, found = super().get_delta_weight(adapter), sharding(self.get_base_layer().weight)
        return delta if found is None else found.layout.shard(delta, found.ctx.rank, found.ctx.mesh)


_HEAD = (
    "an adapter of the head {}: the loss reads the parts of a sharded head, and would miss the adapter's; "
    "leave it out of target_modules and modules_to_save"
)
LAYERS = {
    ColumnParallelLinear: ShardedLora,
    RowParallelLinear: ShardedLora,
    ParallelEmbedding: ShardedLoraEmbedding,
}
"""By the sharded layer, the class of its adapters: as peft takes it for layers that it does not know."""


def refuse(config: Any, *, made: bool = False) -> None:
    """Raise ValueError for what is not right, or was not tried, on a sharded layer. ``made``: the adapters
    have values already, of whole weights."""
    kind = getattr(config.peft_type, "value", config.peft_type)
    if kind != "LORA":
        raise ValueError(f"adapters of a sharded model are LoRA's, not {kind}: train them on the whole model")
    wrong = {name: value for name in _REFUSED if (value := getattr(config, name, None))}
    if not made and isinstance(config.init_lora_weights, str) and config.init_lora_weights != "gaussian":
        wrong["init_lora_weights"] = config.init_lora_weights  # made of the whole weight
    if wrong:
        named = ", ".join(f"{name}={value!r}" for name, value in wrong.items())
        raise ValueError(f"LoraConfig({named}) is not there for a sharded model: leave it out")


_REFUSED = (
    "use_dora",  # the norm of a whole weight's rows
    "target_parameters",
    "layer_replication",
    "trainable_token_indices",
    "use_qalora",
    "use_bdlora",
    "alora_invocation_tokens",
    "arrow_config",
    "velora_config",
    "monteclora_config",
    "kasa_config",
    "megatron_config",
)


def _take_part(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before a load: of a whole tensor, as a file of adapters has it, this rank's part."""
    for name, p in module.named_parameters(recurse=False):
        found, value = sharding(p), state.get(prefix + name)
        if found is not None and value is not None and value.shape == found.layout.shape != p.shape:
            state[prefix + name] = found.layout.shard(value, found.ctx.rank, found.ctx.mesh)


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


def named_targets(model: Any, config: Any) -> None:
    """The names for which "all-linear" stands: peft looks for the classes of whole layers."""
    if config.target_modules != "all-linear":
        return
    head = getattr(model, "get_output_embeddings", lambda: None)()
    kinds = (nn.Linear, ColumnParallelLinear, RowParallelLinear)
    linear = {name: m for name, m in model.named_modules() if isinstance(m, kinds) and m is not head}
    config.target_modules = {name.rpartition(".")[2] for name in linear}


def bound(model: Any) -> Any:
    """The ``PeftModel``, which saves whole adapters, and takes further ones."""
    configs = Configs(model.peft_config)
    for name, config in model.peft_config.items():
        configs[name] = config
    model.base_model.peft_config = model.get_base_model().peft_config = configs
    model.__dict__["save_pretrained"] = MethodType(save_adapters, model)
    return model


def save_adapters(
    model: Any,
    save_directory: str | os.PathLike[str],
    *args: Any,
    is_main_process: bool = True,
    **options: Any,
) -> None:
    """``save_pretrained`` of a ``PeftModel``: peft's files, ``adapter_config.json`` and
    ``adapter_model.safetensors``, of the whole adapters. Rank 0 writes. Collective over the world.

    ``is_main_process``: taken for peft's signature; rank 0 is the process that writes.
    """
    ctx = current()
    state = dict(options.pop("state_dict", None) or {})
    if not state:
        tables = {id(p) for m in model.modules() if isinstance(m, _TABLES) for p in m.parameters()}
        for name, t in model.state_dict(keep_vars=True).items():
            if t.requires_grad or "lora_" in name or "modules_to_save" in name or id(t) in tables:
                state[name] = whole(t)
    with together(ctx):
        if ctx.rank == 0:
            type(model).save_pretrained(model, os.fspath(save_directory), *args, state_dict=state, **options)


_TABLES = nn.Embedding, ParallelEmbedding


def base_of(model: Any) -> Any:
    """The model of transformers in a ``PeftModel``."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


@contextmanager
def aside(model: nn.Module) -> Iterator[None]:
    """Inside, ``model`` has no adapters, so that a plan's rules hold for its layers; then they are back,
    sharded as those. ValueError for adapters of another kind."""
    found = (BaseTunerLayer, AuxiliaryTrainingWrapper)
    layers: dict[str, Any] = {name: m for name, m in model.named_modules() if isinstance(m, found)}
    head = getattr(model, "get_output_embeddings", lambda: None)()
    for name, layer in layers.items():
        if layer is head:
            raise ValueError(_HEAD.format(name))
        if type(layer) not in _INNER:
            raise ValueError(
                f"{name} ({type(layer).__name__}): the adapters of a sharded model are LoRA's, of linear "
                "layers and embeddings"
            )
    configs = model.__dict__.pop("peft_config", {})
    for config in configs.values():
        refuse(config, made=True)
    for name, layer in layers.items():
        _put(model, name, getattr(layer, _INNER[type(layer)]))
    try:
        yield
    finally:
        for name, layer in layers.items():
            setattr(layer, _INNER[type(layer)], model.get_submodule(name))
            _put(model, name, _sharded(layer))
        model.__dict__.pop("peft_config", None)
        if configs:
            model.peft_config = configs


_INNER: dict[type, str] = {
    lora.Linear: "base_layer",
    lora.Embedding: "base_layer",
    ModulesToSaveWrapper: "original_module",
}
"""By the class of a layer with adapters, the attribute that is the model's own layer."""


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, module)


def _sharded(layer: Any) -> nn.Module:
    """``layer`` with its adapters sharded as its base layer is; itself if that stayed whole."""
    inner = getattr(layer, _INNER[type(layer)])
    if not isinstance(inner, ParallelModule):
        return layer  # type: ignore[no-any-return]
    if isinstance(layer, ModulesToSaveWrapper):
        for name, whole in layer.modules_to_save.items():
            layer.modules_to_save[name] = _part_of(whole, inner)
        return layer
    kind = ShardedLora if isinstance(layer, lora.Linear) else ShardedLoraEmbedding
    sharded = kind.__new__(kind)
    sharded.__dict__.update(layer.__dict__)
    for name in layer.lora_A:
        sharded.shard(name)
    return sharded


def _part_of(whole: nn.Module, like: ParallelModule) -> nn.Module:
    """This rank's part of ``whole``, in a copy of the sharded layer ``like``."""
    part = copy.deepcopy(like).train(whole.training)
    for name, p in whole.named_parameters():
        found = sharding(like.get_parameter(name))
        value = (
            p.detach() if found is None else found.layout.shard(p.detach(), found.ctx.rank, found.ctx.mesh)
        )
        part.get_parameter(name).data = value.clone()
        part.get_parameter(name).requires_grad_(p.requires_grad)
    part.register_load_state_dict_pre_hook(_take_part)
    return part
