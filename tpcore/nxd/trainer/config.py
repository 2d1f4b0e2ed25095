"""The one dict that scripts of the trainer hand around: checked here, and the job joined."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...log import inform
from ...runtime.context import current, is_initialized
from ...runtime.init import init

Config = dict[str, Any]

_OPTIMIZER = {"zero_one_enabled": False, "grad_clipping": True, "max_grad_norm": 1.0}


def neuronx_distributed_config(
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    expert_parallel_size: int = 1,
    context_parallel_size: int = 1,
    pipeline_config: Mapping[str, Any] | None = None,
    optimizer_config: Mapping[str, Any] | None = None,
    activation_checkpoint_config: Any = None,
    pad_model: bool = False,
    sequence_parallel: bool = False,
    model_init_config: Mapping[str, Any] | None = None,
    lora_config: Any = None,
    mixed_precision_config: Mapping[str, Any] | None = None,
    sequential_move_factor: int = 11,
    lnc_size: int = 1,
) -> Config:
    """The configuration of a training script, with defaults filled in; joins the job if nobody has.

    ``optimizer_config``: ``zero_one_enabled`` (False), ``grad_clipping`` (True), ``max_grad_norm`` (1.0).
    ``mixed_precision_config``: ``use_master_weights`` and ``use_fp32_grad_acc``, by default on where ZeRO-1 is;
    ``use_master_weights_in_ckpt`` needs nothing here, for a checkpoint has them. ``model_init_config``:
    ``param_init_fn(module, device)`` is called for every module with parameters of its own where ``meta_device_init``
    asks for it. ``pipeline_config``: the arguments of ``NxDPPModel``. ``sequence_parallel``: the optimizer sums the
    gradients of parameters that carry ``sequence_parallel_enabled``; tpcore's own layers sum theirs in backward.

    Raises ValueError for what is not here, for unknown keys, and for sizes that are not those of the context in force.
    """
    refused = {
        "lnc_size": (lnc_size, 1, "tp ranks are contiguous on every device"),
        "pad_model": (pad_model, False, "pass pad=True to the layers whose sizes tp does not divide"),
        "lora_config": (lora_config, None, "model_fn can return tpcore.integrations.peft.get_peft_model(...)"),
    }
    for name, (value, only, why) in refused.items():
        if value != only:
            raise ValueError(f"neuronx_distributed_config({name}={value!r}): only {only!r}, for {why}")
    optimizer = _filled("optimizer_config", optimizer_config, _OPTIMIZER)
    zero1 = bool(optimizer["zero_one_enabled"])
    default = {"use_master_weights": zero1, "use_fp32_grad_acc": zero1, "use_master_weights_in_ckpt": False}
    precision = _filled("mixed_precision_config", mixed_precision_config, default)
    asked = [name for name, value in precision.items() if value]
    if asked and not zero1:
        raise ValueError(
            f"mixed_precision_config asks for {asked}, which the ZeRO-1 optimizer has: set "
            "optimizer_config={'zero_one_enabled': True, ...}"
        )
    defaults = {"sequential_move_factor": sequential_move_factor, "meta_device_init": False, "param_init_fn": None}
    model_init = _filled("model_init_config", model_init_config, defaults)
    _join(tp=tensor_parallel_size, pp=pipeline_parallel_size, ep=expert_parallel_size, cp=context_parallel_size)
    return {
        "tensor_parallel_size": tensor_parallel_size,
        "pipeline_parallel_size": pipeline_parallel_size,
        "expert_parallel_size": expert_parallel_size,
        "context_parallel_size": context_parallel_size,
        "pipeline_config": dict(pipeline_config or {}),
        "optimizer_config": optimizer,
        "activation_checkpoint_config": activation_checkpoint_config,
        "pad_model": pad_model,
        "sequence_parallel": sequence_parallel,
        "model_init_config": model_init,
        "lora_config": lora_config,
        "mixed_precision_config": precision,
        "lnc_size": lnc_size,
    }


def _filled(name: str, given: Mapping[str, Any] | None, defaults: Mapping[str, Any]) -> Config:
    unknown = sorted(set(given or {}) - set(defaults))
    if unknown:
        raise ValueError(f"{name} has {unknown}, and knows {sorted(defaults)}")
    return {**defaults, **(given or {})}


def _join(tp: int, pp: int, ep: int, cp: int) -> None:
    if not is_initialized():
        ctx = init(tp=tp, pp=pp, ep=ep, cp=cp)
        if ctx.rank == 0:
            inform(f"{ctx.mesh} over {type(ctx.backend).__name__}")
    axes = current().mesh.axes
    for axis, size in (("tp", tp), ("pp", pp), ("ep", ep), ("cp", cp)):
        if axes.get(axis, 1) != size:
            raise ValueError(
                f"neuronx_distributed_config wants {axis}={size}, and the job runs on {dict(axes)}: give the "
                "sizes once, here or to initialize_model_parallel"
            )
