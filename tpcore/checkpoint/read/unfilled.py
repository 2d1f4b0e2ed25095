"""Guards buffers that are still on meta after a load: no forward before they have values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn


def refuse_while_on_meta(model: nn.Module) -> None:
    """Make modules with a buffer on meta raise ValueError in forward, until the buffer has values.

    torch may compute with such a buffer without an error. The result is then uninitialised memory, and the
    loss is nan.
    """
    for name, module in model.named_modules():
        if _on_meta(module):
            module.register_forward_pre_hook(_Refusing(name or type(module).__name__))


def _on_meta(module: nn.Module) -> list[str]:
    return [name for name, t in module.named_buffers(recurse=False) if t.is_meta]


@dataclass(frozen=True)
class _Refusing:
    """A pre-forward hook that removes itself once all buffers have values. It holds no module, because it is
    copied and pickled together with its module."""

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
