"""``model.generate`` of a sharded model: all ranks choose the same tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch import nn

from ..comm.comm import Comm
from ..runtime.consensus import gather_bytes
from ..runtime.random import get_state, set_state


def generate_alike(model: nn.Module, comm: Comm) -> None:
    """Let ``model.generate`` draw the numbers of the first rank of ``comm`` on all of them, whatever their
    seeds. Samples, beams and guesses then agree, as the ranks' logits do."""
    original: Callable[..., Any] | None = getattr(type(model), "generate", None)
    if original is None:
        return

    @wraps(original)
    def generate(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        _align(comm)
        return original(self, *args, **kwargs)

    model.__dict__["generate"] = MethodType(generate, model)


def _align(comm: Comm) -> None:
    """Let all ranks of ``comm`` go on from the random state of the first one. Collective."""
    state = get_state()
    for name, t in state.items():
        first = gather_bytes(t.cpu().numpy().tobytes(), comm)[0]
        state[name] = torch.frombuffer(bytearray(first), dtype=t.dtype).view(t.shape)
    set_state(state)
