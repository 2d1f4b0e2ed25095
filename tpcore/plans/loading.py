"""Models that have only shapes until each rank reads its part of the files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ..checkpoint.forms.registry import open_source
from ..checkpoint.forms.source import Reading
from ..checkpoint.forms.whole import Whole
from ..checkpoint.read.model import Loading
from ..consensus import together
from ..context import ParallelContext
from ..errors import CheckpointError
from ..layers.module import ParallelModule
from ..storage.files import naming
from ..train.pipeline import PipelinedLayers
from .names import names_in_memory

FILES = "_tpcore_lazy_from"


class _Shapes(TorchFunctionMode):
    """Makes ``torch.empty``, which torch's modules call for their parameters, allocate on meta.

    All else has values: buffers that no file contains, such as rotary frequencies, are computed.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = {**(kwargs or {}), **({"device": "meta"} if func is torch.empty else {})}
        return func(*args, **kwargs)


@contextmanager
def lazy() -> Iterator[None]:
    """Make models without values inside the block: by ``from_config``, constructors, ``from_pretrained``.

    ``from_pretrained`` takes a directory and remembers it: ``tpcore.parallelize`` then reads this rank's part
    from there. The dtype is that of the files' configuration unless ``dtype`` is given. Only one thread at a
    time may enter the block, because it replaces a method of transformers.
    """
    from transformers import PreTrainedModel

    original = PreTrainedModel.__dict__["from_pretrained"]
    PreTrainedModel.from_pretrained = classmethod(_from_pretrained)  # type: ignore[assignment, arg-type]
    try:
        with _Shapes():
            yield
    finally:
        PreTrainedModel.from_pretrained = original  # type: ignore[method-assign]


_OF_THE_HUB = (
    "revision",
    "code_revision",
    "token",
    "cache_dir",
    "local_files_only",
    "adapter_kwargs",
    "subfolder",
)
_TAKEN = ("attn_implementation", "trust_remote_code", *_OF_THE_HUB)


def _from_pretrained(
    cls: Any, path: Any, *args: Any, config: Any = None, dtype: Any = None, **options: Any
) -> Any:
    if not os.path.isdir(path):
        raise ValueError(
            f"tpcore.lazy: from_pretrained takes a directory, and {path!r} is none: "
            "huggingface_hub.snapshot_download(name) gives one"
        )
    dtype = options.pop("torch_dtype", dtype)
    unknown = {k: v for k, v in options.items() if k not in _TAKEN and not k.startswith("_")}
    if args or unknown:
        raise ValueError(f"tpcore.lazy: from_pretrained does not take {sorted(unknown) or args} here")
    if config is None or not hasattr(config, "model_type"):
        config = cls.config_class.from_pretrained(path)
    given = {} if dtype in (None, "auto") else {"dtype": dtype}
    attention = options.get("attn_implementation")
    if attention is not None:
        given["attn_implementation"] = attention
    model = cls._from_config(config, **given)
    if model.can_generate() and os.path.isfile(os.path.join(path, "generation_config.json")):
        model.generation_config = type(model.generation_config).from_pretrained(path)
    setattr(model, FILES, os.fspath(path))
    return model.eval()


def read_parts(model: nn.Module, path: str, ctx: ParallelContext) -> None:
    """Fill ``model`` from the files at ``path``; each rank reads its parts. Collective over the world.

    Parameters on meta get memory and stay the same objects. Raises CheckpointError on every rank if a tensor
    does not fit or still has no values afterwards.
    """
    ctx.comm("tp")  # here, where all ranks pass: the first use of a group is collective
    with ExitStack() as stack:
        with together(ctx), naming("load", path):
            source = open_source(path, Reading(), stack, sharded=False)
            found = source.stage(0, None, lambda *_: None).model()
            names = names_in_memory(model, found, path)
            renamed = {names[name]: item for name, item in found.items() if name in names}
            _materialize(model, ctx.device)
            loading = Loading(ctx, Whole(source.path, source.form, renamed, {}), strict=True, sharded=False)
            loading.compare(model)
        loading.run()
    with together(ctx):
        left = [n for n, t in (*model.named_parameters(), *model.named_buffers()) if t.is_meta]
        if left:
            raise CheckpointError(f"{path} holds no values for {', '.join(left)}, and the model made none")


def _materialize(model: nn.Module, device: torch.device) -> None:
    """Give parameters on meta memory, and keep the objects: an optimizer may have them already."""
    for p in list(model.parameters()):
        if p.is_meta:
            torch.utils.swap_tensors(
                p, nn.Parameter(torch.empty_like(p, device=device), requires_grad=p.requires_grad)
            )
    for module in model.modules():
        if isinstance(module, PipelinedLayers):
            module.mark_places()
        if isinstance(module, ParallelModule):
            for name in module.shard_specs:  # swap_tensors has taken away the Parameter's attributes
                module.register_parameter(name, module.get_parameter(name))
