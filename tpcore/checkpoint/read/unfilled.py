"""Buffers that no checkpoint holds, of a model that was made on meta: none computes before it has values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn


def refuse_while_on_meta(model: nn.Module) -> None:
    """Modules with a buffer on meta raise a ValueError when they are called, until it has values.

    Where nothing asks for its values, torch computes with such a buffer: the result has memory that nobody
    wrote, and the loss is nan.
    """
    for name, module in model.named_modules():
        if _on_meta(module):
            module.register_forward_pre_hook(_Refusing(name or type(module).__name__))


def _on_meta(module: nn.Module) -> list[str]:
    return [name for name, t in module.named_buffers(recurse=False) if t.is_meta]


@dataclass(frozen=True)
class _Refusing:
    """A hook that removes itself at the first call with all buffers in place. Holds no module: it is copied
    and pickled with the one that it is on."""

    where: str

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        left = _on_meta(module)
        if left:
            names = ", ".join(f"{self.where}.{name}" for name in left)
            raise ValueError(
                f"{names} {'has' if len(left) == 1 else 'have'} no values: on meta since the model was made "
                "there, and in no checkpoint. Set them before the first forward, or make what owns them with "
                "torch.device('cpu')"
            )
        for key in [key for key, hook in module._forward_pre_hooks.items() if hook is self]:
            del module._forward_pre_hooks[key]
