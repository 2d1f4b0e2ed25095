"""The configuration, the model and the optimizer of a training script, whose step does what follows backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tpcore.layers.module import move_model_to_device
from tpcore.log import inform
from tpcore.runtime.consensus import gather_bytes
from tpcore.runtime.context import current, is_initialized
from tpcore.runtime.init import init
from tpcore.train.parameters import unique_parameters
from tpcore.train.pipeline import PipelinedLayers, find_layers
from tpcore.train.pipeline.model import loss_of
from tpcore.train.step import optimizer_step

from ..optimizer import NeuronZero1Optimizer
from ..parallel_layers.grads import allreduce_sequence_parallel_gradients
from ..paths import mirror
from ..pipeline import NxDPPModel, Wrapper
from ..utils import loss_of_closure

Config = dict[str, Any]

_REFUSED = {
    "lnc_size": (1, "tp ranks are contiguous on every device"),
    "pad_model": (False, "pass pad=True to the layers whose sizes tp does not divide"),
    "lora_config": (None, "model_fn can return tpcore_hf.peft.get_peft_model(...)"),
}
"""The only value of an argument, and what to do instead of another."""


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
    config = dict(locals())
    for name, (only, why) in _REFUSED.items():
        if config[name] != only:
            raise ValueError(f"neuronx_distributed_config({name}={config[name]!r}): only {only!r}, for {why}")
    defaults: Config = {"zero_one_enabled": False, "grad_clipping": True, "max_grad_norm": 1.0}
    optimizer = _filled("optimizer_config", optimizer_config, defaults)
    zero1 = bool(optimizer["zero_one_enabled"])
    defaults = {"use_master_weights": zero1, "use_fp32_grad_acc": zero1, "use_master_weights_in_ckpt": False}
    precision = _filled("mixed_precision_config", mixed_precision_config, defaults)
    asked = [name for name, value in precision.items() if value]
    if asked and not zero1:
        raise ValueError(
            f"mixed_precision_config asks for {asked}, which the ZeRO-1 optimizer has: set "
            "optimizer_config={'zero_one_enabled': True, ...}"
        )
    factor = config.pop("sequential_move_factor")
    defaults = {"sequential_move_factor": factor, "meta_device_init": False, "param_init_fn": None}
    model_init = _filled("model_init_config", model_init_config, defaults)
    _join(tp=tensor_parallel_size, pp=pipeline_parallel_size, ep=expert_parallel_size, cp=context_parallel_size)
    config |= {"pipeline_config": dict(pipeline_config or {}), "optimizer_config": optimizer}
    return config | {"model_init_config": model_init, "mixed_precision_config": precision}


def _filled(name: str, config: Mapping[str, Any] | None, defaults: Mapping[str, Any]) -> Config:
    unknown = sorted(set(config or {}) - set(defaults))
    if unknown:
        raise ValueError(f"{name} has {unknown}, and knows {sorted(defaults)}")
    return {**defaults, **(config or {})}


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


class NxDModel(Wrapper):
    """A model and how it is trained. Names of parameters and state are those of the model itself."""

    def __init__(self, module: nn.Module, nxd_config: Config) -> None:
        super().__init__(module.original_module() if isinstance(module, NxDPPModel) else module)
        self.module, self.nxd_config = module, nxd_config
        self.pp_enabled = isinstance(module, NxDPPModel)

    def local_modules(self) -> list[nn.Module]:
        """This rank's part, which is what ``original_module`` has here."""
        return [self.original_module()]

    def run_train(self, *args: Any, **kwargs: Any) -> Tensor:
        """Forward and backward of a batch; the loss, on every rank."""
        if isinstance(self.module, NxDPPModel):
            return self.module.run_train(*args, **kwargs)
        loss = loss_of(self.module(*args, **kwargs), type(self.module).__name__)
        loss.backward()
        return loss.detach()

    def run_eval(self, *args: Any, **kwargs: Any) -> Any:
        """The loss of a batch without backward; without stages what the model returns."""
        if isinstance(self.module, NxDPPModel):
            return self.module.run_eval(*args, **kwargs)
        with torch.no_grad():
            return self.module(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        return self.original_module().named_children()

    # torch's walk over the children, and these are the model's: it would pass by the model itself
    def train(self, mode: bool = True) -> NxDModel:
        self.training = mode
        self.original_module().train(mode)
        return self

    def apply(self, fn: Callable[[nn.Module], None]) -> NxDModel:
        self.original_module().apply(fn)
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> NxDModel:
        self.original_module()._apply(fn, recurse)
        return self


def initialize_parallel_model(
    nxd_config: Config,
    model_fn: Callable[..., nn.Module],
    include_buffers: bool = False,
    *model_args: Any,
    **model_kwargs: Any,
) -> NxDModel:
    """``model_fn(*model_args, **model_kwargs)`` on this rank: in stages where pp is above 1, on the device,
    with activation checkpointing where the configuration has it.

    Layers allocate this rank's shards alone, so ``meta_device_init`` puts nothing on meta, buffers neither
    (``include_buffers``): it has ``param_init_fn(module, device)`` fill every module that owns parameters.
    Scripts seed each stage differently. Here every stage draws all layers, and as the first stage does.
    """
    if not is_initialized():
        neuronx_distributed_config(**nxd_config)
    staged = nxd_config["pipeline_parallel_size"] > 1
    if staged:  # the host's generator, as it is on the first stage
        states = gather_bytes(bytes(torch.get_rng_state().tolist()), current().comm("pp"))
        torch.set_rng_state(torch.frombuffer(bytearray(states[0]), dtype=torch.uint8))
    model = model_fn(*model_args, **model_kwargs)
    model_init = nxd_config["model_init_config"]
    if model_init["meta_device_init"]:
        if model_init["param_init_fn"] is None:
            raise ValueError("model_init_config: meta_device_init=True needs a param_init_fn(module, device)")
        for module in model.modules():
            if next(module.parameters(recurse=False), None) is not None:
                with torch.no_grad():
                    model_init["param_init_fn"](module, torch.device("cpu"))
    classes = _checkpointed(model, nxd_config["activation_checkpoint_config"])
    wrapped: nn.Module = model
    if staged:
        wrapped = NxDPPModel(model, **{"use_optimizer_wrapper": True, **nxd_config["pipeline_config"]})
    move_model_to_device(model, current().device)
    # the layers of a pipeline are computed again anyhow
    pipelined = {child for m in model.modules() if isinstance(m, PipelinedLayers) for child in m.modules()}
    for module in model.modules():
        if isinstance(module, classes) and module not in pipelined:
            module.forward = partial(checkpoint, module.forward, use_reentrant=False)
    unique_parameters(model)  # marks that contradict their layers show here, and a save before the first step knows all
    made = NxDModel(wrapped, nxd_config)
    made.train()
    return made


def _checkpointed(model: nn.Module, asked: Any) -> tuple[type[nn.Module], ...]:
    """The classes whose forward is computed again in backward."""
    if asked is None:
        return ()
    if asked == "full":
        owner, name = find_layers(model)
        return tuple({type(layer) for layer in owner.get_submodule(name).children()})
    classes = tuple(asked) if isinstance(asked, list | tuple) else (asked,)
    wrong = [c for c in classes if not (isinstance(c, type) and issubclass(c, nn.Module))]
    if wrong or not classes:
        raise ValueError(f"activation_checkpoint_config must be None, 'full' or classes of modules, not {asked!r}")
    return classes


class NxDOptimizer(torch.optim.Optimizer):
    """``optimizer`` with a step that takes the mean over dp, clips and steps, as the configuration says.

    Groups, state and defaults are those of ``optimizer``, so that schedulers work on either.
    """

    grad_norm: Tensor | None = None
    """The norm of the last step's gradient before clipping; None without clipping."""

    def __init__(self, optimizer: torch.optim.Optimizer, nxd_config: Config) -> None:
        # not Optimizer.__init__: there is one set of groups
        self.optimizer, self.nxd_config = optimizer, nxd_config

    def __getattr__(self, name: str) -> Any:
        if name in ("param_groups", "state", "defaults"):
            return getattr(self.optimizer, name)
        raise AttributeError(f"NxDOptimizer has no attribute {name!r}")

    @property
    def params(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = loss_of_closure(closure)
        if self.nxd_config["sequence_parallel"]:
            allreduce_sequence_parallel_gradients(self.optimizer)
        config = self.nxd_config["optimizer_config"]
        norm = float(config["max_grad_norm"]) if config["grad_clipping"] else None
        self.grad_norm = optimizer_step(self.optimizer, max_norm=norm)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)


def initialize_parallel_optimizer(
    nxd_config: Config, optimizer_class: type[torch.optim.Optimizer], parameters: Any, **defaults: Any
) -> NxDOptimizer:
    """``optimizer_class(parameters, **defaults)``, or ZeRO-1 over it, with a step that does all. Give
    ``model.named_parameters()``: then its state opens at other degrees."""
    config, precision = nxd_config["optimizer_config"], nxd_config["mixed_precision_config"]
    if not config["zero_one_enabled"]:
        return NxDOptimizer(optimizer_class(parameters, **defaults), nxd_config)
    zero1 = NeuronZero1Optimizer(
        parameters,
        optimizer_class,
        grad_clipping=config["grad_clipping"],
        max_norm=config["max_grad_norm"],
        use_grad_acc_hook=precision["use_fp32_grad_acc"],
        # bfloat16 is wider than no parameter: there is no master copy then
        optimizer_dtype=torch.float32 if precision["use_master_weights"] else torch.bfloat16,
        **defaults,
    )
    return NxDOptimizer(zero1, nxd_config)


mirror(__name__, "trainer.optimizer")
