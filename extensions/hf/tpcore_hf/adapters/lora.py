"""peft's LoRA layers around sharded layers (Hu et al. 2021, arXiv:2106.09685).

Beside a column layer A is whole, and B sharded by the features of the layer. Beside a row layer A is sharded by the
features that the layer takes, and its output is summed; B is whole.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from peft.tuners import lora
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn

from tpcore.layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear
from tpcore.layers.adopt import adopt, is_hooked
from tpcore.layers.sharding import sharding
from tpcore.private import backward_hooks

from ..shard.forwards import sum_gradients
from ..shard.logits import IS_HEAD


def _has_some_tokens(row: RowParallelLinear) -> bool:
    """Whether the output of ``row`` is this rank's tokens, in the current forward."""
    return row.tokens_dim is not None


class ShardedLora(lora.Linear):  # type: ignore[misc, unused-ignore]
    """peft's layer of adapters around a column or row layer. A new adapter is sharded as it is made."""

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
        return module.in_features, module.out_features  # type: ignore[return-value]

    def update_layer(self, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        refuse(kwargs["config"])
        super().update_layer(adapter_name, *args, **kwargs)
        self.shard(adapter_name)

    def shard(self, name: str) -> None:
        """The whole adapter ``name`` becomes this rank's part; its Parameters stay the same objects."""
        base: Any = self.get_base_layer()
        options: dict[str, Any] = {"group": base.tp, "blocks": base.shard_specs["weight"].blocks}
        self.fan_in_fan_out = bool(base.transposed)
        a, b = self.lora_A[name], self.lora_B[name]
        if isinstance(base, ColumnParallelLinear):
            if base.__dict__.get(IS_HEAD):
                raise ValueError(HEAD.format(f"of {base.out_features} features"))
            options |= {
                "gather_output": base.gather_output,
                "pad": base.features.padded,
                "sequence_dim": base.sequence_dim,
            }
            adopt(b, partial(ColumnParallelLinear.from_plain, **options))
            if base.input_is_copied:
                # one copy of the input, for all layers that read it, sums its gradient: what A adds to it has
                # to be this rank's part too
                vars(b)["input_is_copied"] = True
            if base.input_is_copied or base.sequence_dim is not None:  # each rank has a part of A's gradient
                sum_gradients(a, base.tp)
        else:
            options |= {"input_is_parallel": base.input_is_parallel, "pad": base.features.padded}
            adopt(a, partial(RowParallelLinear.from_plain, **options))
            vars(a).update(sequence_dim=base.sequence_dim, region=base.region)
            sum_gradients(b, base.tp, partial(_has_some_tokens, base))
        part = b if isinstance(base, ColumnParallelLinear) else a
        part.register_load_state_dict_pre_hook(take_part)

    def merge(self, *args: Any, **kwargs: Any) -> None:
        base: Any = self.get_base_layer()
        if base.weight_scale is not None:
            raise ValueError(
                f"adapters are not merged into a weight of {base.weight.dtype}: save them with save_pretrained, and "
                "merge them into the model that it was quantized from"
            )
        super().merge(*args, **kwargs)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        layers: dict[str, tuple[Any, Any]] = {
            name: (self.lora_A[name], self.lora_B[name]) for name in self.active_adapters if name in self.lora_A
        }
        if self.disable_adapters or self.merged or kwargs.get("adapter_names") is not None:
            output: Tensor = super().forward(x, *args, **kwargs)
            return output
        # before the base layer: what drops elements of x draws as it does for x, not for the layer's output
        added = []
        for name, (a, b) in layers.items():
            inputs = self.lora_dropout[name](self._cast_input_dtype(x, a.weight.dtype))
            added.append(b(a(inputs)) * self.scaling[name])
        output = self.base_layer(x, *args, **kwargs)
        return sum(added, output).to(output.dtype)


class ShardedLoraEmbedding(lora.Embedding):  # type: ignore[misc, unused-ignore]
    """peft's layer of adapters around a parallel embedding: they are whole, as its output is."""

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
        return module.num_embeddings, module.embedding_dim  # type: ignore[return-value]

    def update_layer(self, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        refuse(kwargs["config"])
        super().update_layer(adapter_name, *args, **kwargs)

    def get_delta_weight(self, adapter: str) -> Tensor:
        base: Any = self.get_base_layer()
        delta, mark = super().get_delta_weight(adapter), sharding(base.weight)
        return delta if mark is None else mark.layout.shard(delta, mark.ctx.rank, mark.ctx.mesh)


HEAD = (
    "an adapter of the head {}: the loss reads the parts of a sharded head, and would miss the adapter's; "
    "leave it out of target_modules and modules_to_save"
)
LAYERS = {ColumnParallelLinear: ShardedLora, RowParallelLinear: ShardedLora, ParallelEmbedding: ShardedLoraEmbedding}
"""By the sharded layer, the class of its adapters: as peft takes it for layers that it does not know."""


def refuse(config: Any, *, initialized: bool = False) -> None:
    """Raise ValueError for what is not right, or was not tried, on a sharded layer. ``initialized``: the adapters
    have values already, of whole weights."""
    kind = getattr(config.peft_type, "value", config.peft_type)
    if kind != "LORA":
        raise ValueError(f"adapters of a sharded model are LoRA's, not {kind}: train them on the whole model")
    wrong = {name: value for name in _REFUSED.split() if (value := getattr(config, name, None))}
    if not initialized and isinstance(config.init_lora_weights, str) and config.init_lora_weights != "gaussian":
        wrong["init_lora_weights"] = config.init_lora_weights  # made of the whole weight
    if wrong:
        options = ", ".join(f"{name}={value!r}" for name, value in wrong.items())
        raise ValueError(f"LoraConfig({options}) is not there for a sharded model: leave it out")


def around(layer: nn.Module, inner: nn.Module) -> list[nn.Module]:
    """``layer`` and what it has beside ``inner``, the model's own."""
    own = set(inner.modules())
    return [part for part in layer.modules() if part not in own]


def check_attached(name: str, layer: nn.Module, inner: nn.Module) -> None:
    """ValueError for what is attached to adapters, and would take this rank's part for the whole."""
    for part in around(layer, inner):
        linear = isinstance(part, nn.Linear)
        wrong = {
            "a forward of its own, set on it": "forward" in vars(part),
            "backward hooks": backward_hooks(part),
            "hooks": is_hooked(part) and not (linear or part is layer),
            "a weight that is computed of others": linear and part._parameters.get("weight") is None,
            "gradients of whole parameters": any(p.grad is not None for p in part.parameters(recurse=False)),
        }
        for what in (what for what, there in wrong.items() if there):
            raise ValueError(
                f"{name}: the {type(part).__name__} of its adapters has {what}, and each rank would see a part: remove "
                "that, or put hooks on the layer itself"
            )


_REFUSED = """
use_dora target_parameters layer_replication trainable_token_indices use_qalora use_bdlora alora_invocation_tokens
arrow_config velora_config monteclora_config kasa_config megatron_config
"""  # DoRA, because it takes the norm of a whole weight's rows


def name_linear(model: Any, config: Any) -> bool:
    """Whether the ``config`` of adapters has "all-linear", which becomes the names of the linear layers but the head;
    layers that have adapters already count, their adapters do not."""
    targets = config.target_modules
    if not (isinstance(targets, str) and targets.lower() == "all-linear"):
        return False
    head = getattr(model, "get_output_embeddings", lambda: None)()
    kinds = (nn.Linear, ColumnParallelLinear, RowParallelLinear, lora.Linear)
    names, inner = set[str](), tuple[str, ...]()
    for name, module in model.named_modules():
        if name.startswith(inner):
            continue
        if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
            inner += (f"{name}.",)
        if isinstance(module, kinds) and module is not head:
            names.add(name.rpartition(".")[2])
    config.target_modules = names
    return True


def add_weighted_adapter(
    tuner: Any,
    adapters: Any,
    weights: Any,
    adapter_name: str,
    combination_type: str = "svd",
    *rest: Any,
    **options: Any,
) -> None:
    """peft's, for the combinations that take each entry by itself."""
    bases: list[Any] = [m.get_base_layer() for m in tuner.modules() if isinstance(m, ShardedLora)]
    if any(base.tp.size > 1 for base in bases) and combination_type not in ("linear", "cat"):
        raise ValueError(
            f"add_weighted_adapter(combination_type={combination_type!r}) decomposes or prunes whole weights, of which "
            'each rank has a part: take "linear" or "cat", or combine the saved adapters on the whole model'
        )
    type(tuner).add_weighted_adapter(tuner, adapters, weights, adapter_name, combination_type, *rest, **options)


def take_part(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before a load: of a whole tensor, as a file of adapters has it, this rank's part."""
    for name, p in module.named_parameters(recurse=False):
        mark, stored = sharding(p), state.get(prefix + name)
        if mark is not None and stored is not None and stored.shape == mark.layout.shape != p.shape:
            state[prefix + name] = mark.layout.shard(stored, mark.ctx.rank, mark.ctx.mesh)
