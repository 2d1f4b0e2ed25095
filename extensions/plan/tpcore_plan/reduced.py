"""A model of whose layers one of each kind is kept, and the last, and what its step costs by the ways to cut it."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from tpcore import nested
from tpcore.checkpoint.storage.tensorfile import nbytes_of
from tpcore.layout.mesh import Mesh
from tpcore.log import quiet
from tpcore.train.zero import Zero1
from tpcore_explain.recording import Recorder
from tpcore_explain.step import MakeOptimizer, record
from tpcore_explain.target import Factory, ModelInputs, build, hugging_face_inputs, with_labels
from tpcore_hf.experts.layers import ShardedExperts
from tpcore_hf.plan.heads import key_value_width
from tpcore_hf.private import set_experts

from .costs import HeldBytes, StepCosts, compact, held_by, on_line, parts_of
from .meter import Meter

RECORDED_BUCKET = 64
"""MiB of a bucket of the Zero1 that is recorded."""
_NUMBER = re.compile(r"(^|_)(idx|index|id|number)$")  # of a layer, among its attributes


@dataclass(frozen=True)
class Ways:
    """How a model is sharded: arguments of ``tpcore.init`` and ``tpcore.parallelize`` that change what a rank computes.
    ``compiled``: experts are one program, in which each computes all tokens."""

    tp: int = 1
    ep: int = 1
    cp: int = 1
    sequence_parallel: bool = False
    expert_parallel: bool = False
    dispatch: str = "gathered"
    context_parallel: str | None = None
    capacity_factor: float | None = None
    compiled: bool = False

    @property
    def mesh(self) -> Mesh:
        return Mesh({"pp": 1, "dp": 1, "ep": self.ep, "cp": self.cp, "tp": self.tp})

    def options(self) -> dict[str, Any]:
        """Of ``parallelize``, those that are not the default."""
        options = {
            "sequence_parallel": (self.tp > 1 and self.sequence_parallel) or None,
            "expert_parallel": (self.tp > 1 and self.expert_parallel) or None,
            "dispatch": None if self.dispatch == "gathered" else self.dispatch,
            "capacity_factor": self.capacity_factor,
            "context_parallel": self.context_parallel if self.cp > 1 else None,
        }
        return {name: value for name, value in options.items() if value is not None}


class Reduced:
    """A model of whose layers one of each kind is kept, and the last. ``order``: the kept one's name for each layer."""

    def __init__(self, target: str | Factory, seq_len: int, dtype: torch.dtype | None) -> None:
        self._target, self.seq_len, self.dtype = target, seq_len, dtype
        self._plain: nn.Module | None = None
        self._config: Any = None
        self.order: list[str] = []
        self.alike = False
        """Whether all layers are, so that stages run one program."""
        self.routed = False
        """Whether the loss is also of what all routers say, which no stage has."""
        self.name = target if isinstance(target, str) else getattr(target, "__qualname__", "model")
        self.experts = 0
        """How many experts a layer has; 0 if none."""
        self.takes_sequence = True
        """Whether sequence parallelism is tried with tp."""
        if isinstance(target, str) and ":" not in target:
            with torch.device("meta"):
                model, _ = build(target, 1, seq_len)
            self.name = type(model).__name__
            self._config = getattr(model, "config", None)
            text = self._config.get_text_config()
            heads, keys = (getattr(text, name, None) for name in ("num_attention_heads", "num_key_value_heads"))
            if isinstance(heads, int) and isinstance(keys, int) and heads % (keys or 1):
                raise ValueError(f"{self.name} cannot run: {keys} key/value heads do not divide {heads} heads")
            for module in model.modules():
                submodule: Any = module
                config: Any = getattr(submodule, "config", None)
                set_experts(config, "grouped_mm")  # of shapes that do not depend on what is chosen
                if _has_experts(module):
                    self.experts = max(self.experts, submodule.num_experts)
            self._plain = self.reduce(model.to(dtype=dtype))
        self._recorded: dict[Any, StepCosts | ValueError] = {}
        self._results: dict[Any, Any] = {}

    def reduce(self, model: nn.Module) -> nn.Module:
        lists = _lists(model)
        self.order, kinds = [], set()
        for name, layers in lists.items():
            # what the last one returns may be made whole again, for what comes after the layers
            signatures = [(_signature(layer), layer is layers[-1]) for layer in layers]
            distinct = list(dict.fromkeys(signatures))
            kinds |= {signature for signature, _ in distinct}
            self.order += [f"{name}.{distinct.index(signature)}" for signature in signatures]
            parent, _, attribute = name.rpartition(".")
            remaining = nn.ModuleList([layers[signatures.index(signature)] for signature in distinct])
            setattr(model.get_submodule(parent), attribute, remaining)
        self.alike = len(lists) == len(kinds) == 1
        self.routed = getattr(getattr(model, "config", None), "output_router_logits", False)
        return model

    def made(self, batch: int, ways: Ways) -> tuple[nn.Module, ModelInputs]:
        """The reduced model, cut as ``ways`` say under the current context, and the inputs of ``batch`` examples."""
        from tpcore_hf import parallelize

        if self._plain is not None:
            model: Any = copy.deepcopy(self._plain)
            inputs = hugging_face_inputs(model, batch, self.seq_len)
        else:
            model, inputs = build(self._target, batch, self.seq_len)
            model = self.reduce(model.to(dtype=self.dtype))
        if hasattr(model, "get_output_embeddings"):
            inputs = with_labels(model, inputs)
            model = parallelize(model, plan={}, **ways.options())
        return model, inputs

    def costs(self, ways: Ways, batch: int) -> StepCosts:
        """Of forward and backward of ``batch`` examples: recorded for one and for two, and on the line through them."""
        single = self._costs(ways, 1)
        if batch == 1:
            return single
        return self._once(("line", ways, batch), lambda: on_line(single, self._costs(ways, 2), batch))

    def update(self, data: int, zero1: bool) -> StepCosts:
        """Of the end of a step over ``data`` ranks, for the kept layers uncut: a line over the part of a rank."""
        if not zero1 or data == 1:
            return self._update(min(data, 2), zero1)
        line = partial(on_line, self._update(2, True), self._update(4, True), 3 - 4 / data)
        return self._once(("line", data), line)

    @property
    def master(self) -> torch.dtype | None:
        """Of the master weights that Zero1 keeps."""
        return torch.float32 if self.dtype in (torch.bfloat16, torch.float16) else None

    def state(self, zero1: bool) -> float:
        """Bytes of the optimizer's state for an element of a parameter, of all ranks together."""
        ranks = 2 if zero1 else 1
        total = sum(self._update(ranks, zero1).held.values(), HeldBytes())
        return ranks * total.optimizer / total.elements

    def cache(self, tp: int) -> float | None:
        """Bytes of a token's keys and values on a rank, of all layers; None where the configuration does not say. A
        window is not looked at; there are at least whole heads on a rank."""
        config: Any = None if self._config is None else self._config.get_text_config()
        heads = getattr(config, "num_attention_heads", None)
        if not heads:
            return None
        kv_heads: int = -(-(getattr(config, "num_key_value_heads", None) or heads) // tp)
        itemsize = (self.dtype or torch.get_default_dtype()).itemsize
        return float(len(self.order) * kv_heads * key_value_width(config) * itemsize)

    def least(self, shares: int, ep: int, data: int, zero1: bool) -> float:
        """Of parameters, gradients and optimizer, in bytes on a rank. ``shares`` divide all of them, ``ep`` experts."""
        recorded = self._update(2 if zero1 else 1, zero1).held
        has_experts = any(expert for _, expert in recorded)
        least = 0.0
        for (region, expert), part in recorded.items():
            whole = part.scaled(max(self.order.count(region), 1) / shares)
            ranks = ep if expert or not has_experts else 1
            least += (whole.nbytes + whole.gradient) / ranks
            least += self.state(zero1) * whole.elements / (data if zero1 else ranks)
        return least

    def _costs(self, ways: Ways, batch: int) -> StepCosts:
        return self._once((ways, batch), lambda: self._record(ways, batch, 1, None))

    def _update(self, data: int, zero1: bool) -> StepCosts:
        optimizer: Any = torch.optim.AdamW
        if zero1:
            optimizer = partial(Zero1, optimizer, master_dtype=self.master, bucket_mb=RECORDED_BUCKET)
        return self._once(("update", data, zero1), lambda: compact(self._record(Ways(), 1, data, optimizer)))

    def _once(self, key: Any, make: Callable[[], StepCosts]) -> StepCosts:
        """Also of an error, which is the same again."""
        if key not in self._recorded:
            try:
                self._recorded[key] = make()
            except ValueError as e:
                self._recorded[key] = e
        outcome = self._recorded[key]
        if isinstance(outcome, ValueError):
            raise outcome
        return outcome

    def _record(self, ways: Ways, batch: int, dp: int, optimizer: MakeOptimizer | None) -> StepCosts:
        meter = Meter(set(self.order), self._results)
        hidden: list[int] = []

        @contextmanager
        def watch(recorder: Recorder, model: nn.Module, inputs: ModelInputs) -> Iterator[None]:
            meter.shares = _shares(model, ways)
            layer = model.get_submodule(self.order[0]) if self.order else model
            handle = layer.register_forward_hook(lambda _, __, out: hidden.append(nbytes_of(next(nested.tensors(out)))))
            with meter.on(recorder, model, inputs):
                yield
            handle.remove()

        mesh, factory = Mesh({**ways.mesh.axes, "dp": dp}), partial(self.made, batch, ways)
        with quiet():
            program, _ = record(factory, mesh, 0, dtype=self.dtype, optimizer=optimizer, max_norm=1.0, meter=watch)
        return StepCosts(parts_of(program, meter), held_by(program, meter), hidden[0])


# -- one of each kind -------------------------------------------------------------------------------------
def _lists(model: nn.Module) -> dict[str, nn.ModuleList]:
    """The lists of layers, without those inside of a layer."""
    lists: dict[str, nn.ModuleList] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) and not any(name.startswith(f"{n}.") for n in lists):
            lists[name] = module
    return lists


def _signature(layer: nn.Module) -> Any:
    """Layers with equal ones cost the same."""
    plain = (int, float, str, bool, type(None))
    return (
        repr(layer),
        tuple(
            (name, key, value)
            for name, module in layer.named_modules()
            for key, value in sorted(vars(module).items())
            if isinstance(value, plain) and not _NUMBER.search(key)
        ),
        tuple((name, tuple(p.shape)) for name, p in layer.named_parameters()),
    )


def _has_experts(module: nn.Module) -> bool:
    """Whether it holds the experts of a layer of transformers, which are not sharded."""
    return hasattr(module, "has_gate") and hasattr(module, "num_experts")


def _shares(model: Any, ways: Ways) -> dict[str, float]:
    """By the name of a layer of experts: the part of its recorded rows that a rank computes, if choices are even."""
    shares: dict[str, float] = {}
    config = getattr(model, "config", None)
    top_k = getattr(config.get_text_config(), "num_experts_per_tok", 2) if config is not None else 2
    for name, module in model.named_modules():
        if isinstance(module, ShardedExperts):
            experts: int = next(iter(module.shard_specs.values())).shape[0]
            local = module.of_a_rank or experts
        elif _has_experts(module):
            experts = local = module.num_experts
        else:
            continue
        even = local / experts
        most = local / (top_k or 2) if ways.compiled else even
        shares[name] = most if ways.capacity_factor is None else min(most, ways.capacity_factor * even)
    return shares
