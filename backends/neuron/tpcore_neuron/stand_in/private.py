"""What a device and a compiler that are written in Python are made of: torch 2.13 and later have it under private names
alone. A test asserts that each is read here only, and that it is there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._dynamo import register_backend as register_backend
from torch._dynamo.backends.common import aot_autograd as aot_autograd
from torch._guards import TracingContext
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

DeviceModule = _DummyBackendModule
make_device = _setup_privateuseone_for_python_backend
compiled_now = TracingContext.try_get
has_no_memory = Tensor._is_zerotensor
"""As the zeros of forward mode."""
group_named: Any = getattr(torch.distributed.distributed_c10d, "_resolve_process_group")  # noqa: B009  no stub has it
