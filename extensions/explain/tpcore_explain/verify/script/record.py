"""Records what one rank's training computes: what modules take and give, gradients, parameters before and after steps.

It sees every module through torch's hooks, so it needs nothing of the script and nothing of a library's own.
"""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from functools import cached_property, partial
from itertools import count
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tpcore import nested
from tpcore.private import forward_hooks
from tpcore.runtime.context import current, is_initialized
from tpcore.runtime.elementwise import TRIAL

START, FORWARD, BACKWARD, GRADIENT, UPDATE = "start", "forward", "backward", "gradient", "update"


class TraceEntry(NamedTuple):
    """What a tensor of a trace is. ``what``: input, output, loss, mask, or a parameter's name in its module."""

    step: int
    direction: str
    module: str
    what: str
    call: int = 0


@dataclass
class Trace:
    """The tensors of one rank, in the order of time, and what is known of its modules."""

    entries: dict[TraceEntry, Tensor] = field(default_factory=dict)
    classes: dict[str, str] = field(default_factory=dict)
    hooked: list[str] = field(default_factory=list)
    """Modules whose outputs hooks of the script may change."""
    delegated: bool = False
    """The optimizer gave other tensors to one inside of it, and gradients are reduced on the way."""
    narrow: bool = False
    """The run was for float64, and ends at the first model: its device does not keep that."""
    exact: bool = False
    """The job asked for the same bits at every degree."""

    @cached_property
    def calls(self) -> dict[TraceEntry, list[TraceEntry]]:
        """All of one tensor, under its number 0."""
        found: dict[TraceEntry, list[TraceEntry]] = {}
        for entry in self.entries:
            found.setdefault(entry._replace(call=0), []).append(entry)
        return found

    def save(self, path: str) -> None:
        entries = [(tuple(entry), value) for entry, value in self.entries.items()]
        torch.save({**{f.name: getattr(self, f.name) for f in fields(self)}, "entries": entries}, path)

    @classmethod
    def load(cls, path: str) -> Trace:
        saved = torch.load(path, mmap=True)
        return cls(**{**saved, "entries": {TraceEntry(*entry): value for entry, value in saved["entries"]}})


class Enough(BaseException):  # as SystemExit: no error, and nothing in a script should catch it
    """As many steps are recorded as were asked for."""


class ScriptRecorder:
    """Records inside its block what this thread trains. ``steps``: after so many Enough is raised; ``noise``: outputs
    and gradients of modules are changed in their last bit, to learn what rounding does; ``double``: models compute in
    float64."""

    def __init__(self, steps: int | None = None, *, noise: bool = False, double: bool = False) -> None:
        self.trace = Trace()
        self._steps, self._noise, self._double = steps, noise, double
        self._thread = threading.get_ident()
        self._paths: dict[nn.Module, str] = {}
        self._owners: dict[nn.Parameter, tuple[str, str]] = {}
        self._stack: list[tuple[nn.Module, int]] = []
        self._step = 0
        self._stepping: list[torch.optim.Optimizer] = []
        self._calls: Counter[tuple[str, str, str]] = Counter()
        self._kept: dict[Any, Tensor] = {}
        self._handles: list[Any] = []
        self._nodes: list[Any] = []
        self.mode: AbstractContextManager[Any] | None = None
        """To enter around modules, if any."""
        self._entered: list[AbstractContextManager[Any]] = []
        self._draw = torch.Generator().manual_seed(1)

    def __deepcopy__(self, memo: object) -> ScriptRecorder:
        return self  # of the hooks of a model that a script copies

    def __enter__(self) -> ScriptRecorder:
        self._handles = [
            register_module_forward_pre_hook(self._first),
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        ]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> bool:
        for handle in self._handles:
            handle.remove()
        self._kept.clear()
        return isinstance(error, Enough)

    def add(self, direction: str, module: str, what: str, value: Tensor, call: int = 0) -> None:
        self.trace.entries[TraceEntry(self._step, direction, module, what, call)] = self._copy(value)

    def loss(self, value: Tensor) -> None:
        """Before its backward."""
        self.add(FORWARD, "", "loss", value, self._count("", "loss"))

    def mask(self, kept: Tensor) -> None:
        """What dropout left of an activation, in the module that is running."""
        module = self._paths[self._stack[-1][0]] if self._stack else ""
        self.add(FORWARD, module, "mask", kept != 0, self._count(module, "mask"))

    def _count(self, module: str, what: str, direction: str = FORWARD) -> int:
        self._calls[module, what, direction] += 1
        return self._calls[module, what, direction] - 1

    def _copy(self, value: Tensor) -> Tensor:
        """Of a tensor that was seen and not changed since, the copy of that time: one gives it and others take it."""
        local = getattr(value, "to_local", None)  # of torch's DTensor
        value = value if local is None else local()
        plain = value.detach().as_subclass(Tensor)
        if plain.is_meta or plain.layout != torch.strided:
            return torch.empty(0)
        key = plain.data_ptr(), plain.shape, plain.stride(), plain.dtype
        kept = self._kept.get(key)
        if kept is None or not torch.equal(plain.cpu(), kept):
            kept = self._kept[key] = plain.to("cpu", copy=True).contiguous()
        return kept

    # -- modules
    def _first(self, module: nn.Module, args: tuple[Any, ...]) -> Any:
        """A module before its call. Its own hooks are there from the next call on."""
        if threading.get_ident() != self._thread or torch.compiler.is_compiling() or module in self._paths:
            return None
        self._name(module)
        return self._enter(module, args, {})[0]

    def _name(self, root: nn.Module) -> None:
        """Name ``root`` and what is in it, by the module in whose call this is or as the next model."""
        parent = self.trace.classes and self._stack and self._paths[self._stack[-1][0]]
        roots = sum("." not in path for path in self.trace.classes)
        first = "model" if not roots else f"model{roots + 1}"
        top = f"{parent}.({type(root).__name__})" if parent else first
        if self._double:
            self._stop_if_narrow(root)
            root.double()
        for name, module in root.named_modules():
            if module in self._paths:
                continue
            path = f"{top}.{name}" if name else top
            self._paths[module] = path
            self.trace.classes[path] = type(module).__name__
            if forward_hooks(module):
                self.trace.hooked.append(path)
            module.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True)
            module.register_forward_hook(self._leave, always_call=True)
            for what, p in module.named_parameters(recurse=False):
                if p not in self._owners:
                    self._owners[p] = path, what
                    self.add(START, path, what, p)
                    if p.requires_grad:
                        with torch.enable_grad():
                            node = p.view_as(p).grad_fn.next_functions[0][0]
                        self._nodes.append(node)  # or it would be made anew without the hook
                        node.register_prehook(partial(self._parameter, path, what))
        self.trace.exact |= is_initialized() and current().reproducible is not None

    def _stop_if_narrow(self, root: nn.Module) -> None:
        self.trace.narrow = any(not keeps_float64(device) for device in {p.device for p in root.parameters()})
        if self.trace.narrow:
            raise Enough

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        path = self._paths[module]
        call = self._count(path, "input")
        if self.mode is not None and not self._stack:
            self.mode.__enter__()
            self._entered.append(self.mode)
        self._stack.append((module, call))
        seen: dict[int, Tensor] = {}  # one tensor as query, key and value stays one

        def seen_once(what: str, value: Any) -> Any:
            if not _is_plain(value):
                return value
            if id(value) not in seen:
                if self._double and value.is_floating_point():
                    value = value.double()
                self.add(FORWARD, path, f"input {what}", value, call)
                seen[id(value)] = self._watched(value, path, f"input {what}", call, alias=True)
            return seen[id(value)]

        return (
            tuple(seen_once(str(i), value) for i, value in enumerate(args)),
            {name: seen_once(name, value) for name, value in kwargs.items()},
        )

    def _leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        while self._stack and (top := self._stack.pop())[0] is not module:
            pass  # of calls that an error has ended
        if self._entered and not self._stack:
            self._entered.pop().__exit__(None, None, None)
        path, number = self._paths[module], count()
        if output is None:
            return None
        return nested.mapped(lambda t: self._output(t, path, next(number), top[1]) if _is_plain(t) else t, output)

    def _output(self, value: Tensor, path: str, number: int, call: int) -> Tensor:
        if self._noise and value.is_floating_point():
            value = self._noisy(value)
        self.add(FORWARD, path, f"output {number}", value, call)
        return self._watched(value, path, f"output {number}", call)

    def _watched(self, value: Tensor, path: str, what: str, call: int, alias: bool = False) -> Tensor:
        """``value``, whose gradient will be recorded; as an alias only what comes through this module."""
        if not (torch.is_grad_enabled() and value.requires_grad):
            return value
        if alias:
            marks = vars(value)  # by which layers know the order of features
            value = value.view_as(value)
            vars(value).update(marks)
        value.register_hook(partial(self._gradient, path, what, call))
        return value

    def _gradient(self, path: str, what: str, call: int, grad: Tensor) -> Tensor | None:
        grad = self._noisy(grad) if self._noise and what.startswith("input") else grad
        self.add(BACKWARD, path, what, grad, call)
        return grad if self._noise else None

    def _parameter(self, path: str, name: str, grads: tuple[Tensor, ...]) -> None:
        """Of this rank's examples and tokens alone, before anything reduces it."""
        if grads[0] is not None:
            self.add(BACKWARD, path, f"parameter {name}", grads[0], self._count(path, name, BACKWARD))

    def _noisy(self, value: Tensor) -> Tensor:
        draw = torch.rand(value.shape, generator=self._draw).to(value.device) * 2 - 1
        return value * (1 + torch.finfo(value.dtype).eps * draw).to(value.dtype)

    # -- optimizers
    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if threading.get_ident() != self._thread or hasattr(optimizer, TRIAL):
            return
        own = self._of(optimizer)
        self.trace.delegated |= bool(self._stepping) and self._stepping[0] is not optimizer
        if not own or self._stepping:
            return
        self._stepping.append(optimizer)
        for p, (path, what) in own:
            if p.grad is not None:
                self.add(GRADIENT, path, what, p.grad)

    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not self._stepping or self._stepping[0] is not optimizer:
            return
        self._stepping.clear()
        for p, (path, what) in self._of(optimizer):
            self.add(UPDATE, path, what, p)
        self._step += 1
        self._calls.clear()
        self._kept.clear()
        if self._step == self._steps:
            raise Enough

    def _of(self, optimizer: torch.optim.Optimizer) -> list[tuple[nn.Parameter, tuple[str, str]]]:
        """Of this thread's parameters those that it steps, the last first, as backward comes to them. An
        optimizer of other tensors works inside of one of ours."""
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        return [pair for pair in self._owners.items() if id(pair[0]) in own][::-1]


def keeps_float64(device: torch.device) -> bool:
    """Some devices refuse it, and others compute in 32 bits without a word."""
    try:
        return torch.tensor(1 / 3, dtype=torch.float64, device=device).item() == 1 / 3
    except (TypeError, RuntimeError):
        return False


def _is_plain(value: Any) -> bool:
    """Whether ``value`` may be looked at: a tensor of a class of its own may be one that is made when it is read."""
    return nested.is_plain(value) or hasattr(value, "to_local")
