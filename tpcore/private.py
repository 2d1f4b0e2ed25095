"""What torch has under private names alone and several modules read, or that differs between its releases. Any other
is read in one module; a test asserts both, and that each is there and takes what it took."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OpOverload as OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

plain_functions = torch._C.DisableTorchFunctionSubclass
native_groups: Any = getattr(torch._C, "_distributed_c10d", None)  # not in every build
no_torch_function: Any = torch._C._disabled_torch_function_impl
make_wrapper: Any = Tensor._make_wrapper_subclass
in_transform = torch._C._are_functorch_transforms_active
backward_node = torch._C._current_autograd_node
backward_number = torch._C._current_graph_task_id
"""Of the backward that runs in this thread, or -1."""
when_backward_ends = torch.autograd.Variable._execution_engine.queue_callback
"""Calls a function at the end of the backward that runs in this thread."""

_FAKE = torch._C._TorchDispatchModeKey.FAKE


def recorded(*tensors: Tensor) -> bool:
    """Whether operators become a graph now, or have no values: in torch.compile, torch.export, make_fx, torch.jit.trace
    and on tensors that are fake or on meta. ``tensors``: some that they get."""
    if torch.compiler.is_dynamo_compiling():
        return True
    modes = get_proxy_mode() is not None or torch._C._get_dispatch_mode(_FAKE) is not None
    return modes or torch.jit.is_tracing() or any(t.is_meta or isinstance(t, FakeTensor) for t in tensors)


unwrapped = torch._C._functorch.get_unwrapped
is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
"""Of a tensor inside a transform of torch.func, and whether it is one."""

CLIPPED = "_group_tensors_by_device_and_dtype"
"""What every function of ``torch.nn.utils.clip_grad`` calls with the tensors whose norm it takes or that it clips."""

FUNCTIONAL = "_functional_call"
"""What ``functional_call`` of ``torch.func`` and of ``torch.nn.utils.stateless`` calls with a model and its values."""

FORWARD_HOOKS = "_forward_pre_hooks", "_forward_hooks"
BACKWARD_HOOKS = "_backward_hooks", "_backward_pre_hooks"
forward_pre_hooks, forward_hooks = map(attrgetter, FORWARD_HOOKS)


def backward_hooks(module: nn.Module | Tensor) -> list[Any]:
    """Those on the gradients of a module's outputs and inputs, or of a tensor."""
    return [hook for name in BACKWARD_HOOKS for hook in (getattr(module, name, None) or {}).values()]


def accumulation_hooks(t: Tensor) -> dict[int, Any]:
    """Those that run when ``t.grad`` has got an addend, by the number of their handle."""
    return getattr(t, "_post_accumulate_grad_hooks", None) or {}


def backend_of(group: Any, device: torch.device) -> Any:
    """What computes a process group's collectives of a device: the group alone would check nothing and log them."""
    return group._get_backend(device)


def gather_flat(group: Any, out: Tensor, x: Tensor) -> Any:
    """The work of an all-gather into one tensor. torch.distributed's own takes no backend of a group."""
    return group._allgather_base(out, x)


def set_lazy(t: Tensor, conjugated: bool, negated: bool) -> None:
    """Let torch compute with the conjugate or the negative of what ``t`` holds, which it takes only when it must."""
    torch._C._set_conj(t, conjugated)
    torch._C._set_neg(t, negated)


def schema_of(operator: OpOverload) -> Any:
    """Arguments of an operator, and whether it changes one."""
    return operator._schema
