"""Models that have only shapes until each rank reads its part of the files."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from tpcore.checkpoint.forms.source import Reading
from tpcore.checkpoint.forms.whole import Whole, in_memory, open_file
from tpcore.checkpoint.read.load import Loading
from tpcore.checkpoint.read.source import StrPath, open_source
from tpcore.checkpoint.storage.files import naming
from tpcore.checkpoint.stored import Stored
from tpcore.errors import CheckpointError, extra
from tpcore.layers.module import ParallelModule
from tpcore.runtime.consensus import together
from tpcore.runtime.context import ParallelContext
from tpcore.train.pipeline import PipelinedLayers

from ..shard import quantized
from .weights import Weights, by_model_name, equal

FILES = "_tpcore_lazy_from"


class _Shapes(TorchFunctionMode):
    """Makes ``torch.empty``, which torch's modules call for their parameters, allocate on meta. All else has values:
    buffers that no file contains, such as rotary frequencies, are computed."""

    on = True

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        meta = {"device": "meta"} if self.on and func is torch.empty else {}
        return func(*args, **{**(kwargs or {}), **meta})


@contextmanager
def lazy() -> Iterator[None]:
    """Make models without values inside the block: by ``from_config``, constructors, ``from_pretrained``.

    ``from_pretrained`` is transformers' own, with its arguments and its report, but it reads no tensor:
    ``tpcore.parallelize`` reads this rank's part. What no file has, such as a new head, is initialised. Only
    one thread at a time may enter the block, because it replaces methods of transformers.
    """
    with extra("hf", "tpcore.lazy"):
        from transformers import PreTrainedModel

    shapes = _Shapes()
    originals = {name: PreTrainedModel.__dict__[name] for name in ("from_pretrained", "_load_pretrained_model")}

    def from_pretrained(cls: Any, *args: Any, **options: Any) -> Any:
        before, shapes.on = shapes.on, False  # transformers makes the model on meta by itself
        try:
            return originals["from_pretrained"].__func__(cls, *args, **options)
        finally:
            shapes.on = before

    PreTrainedModel.from_pretrained = classmethod(from_pretrained)  # type: ignore[assignment]
    PreTrainedModel._load_pretrained_model = staticmethod(_remember)  # type: ignore[assignment]
    try:
        with shapes:
            yield
    finally:
        for name, method in originals.items():
            setattr(PreTrainedModel, name, method)


def _remember(model: Any, state_dict: Any, files: Any, config: Any, *_: Any) -> tuple[Any, None]:
    """Instead of ``PreTrainedModel._load_pretrained_model``: the same report, and nothing is read."""
    from transformers.core_model_loading import convert_and_load_state_dict_in_model

    _check_unplaced(config)
    path, mapping = str(config.pretrained_model_name_or_path), config.weight_mapping or ()
    with ExitStack() as stack:
        stored = {} if state_dict is None else in_memory(state_dict, path)
        for file in files if state_dict is None else ():
            stored |= open_file(file, Reading(model_key=None), stack)[0]
        tensors = {n: t for n, t in by_model_name(model, stored, mapping).items() if isinstance(t, Stored)}
        _check_ties(model, tensors)
        on_meta = replace(config, device_map={"": "meta"}, weight_mapping=None, hf_quantizer=None)
        shapes = {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in tensors.items()}
        report, _ = convert_and_load_state_dict_in_model(model, shapes, on_meta)
        model._weight_conversions = [entry for entry in mapping if entry.was_used()]
        unused = report.unexpected_keys | {name for name, *_ in report.mismatched_keys}
        weights = Weights(path, {n: t for n, t in tensors.items() if n not in unused})
        weakref.finalize(weights, stack.pop_all().close)
    setattr(model, FILES, weights)
    return report, None


def _check_unplaced(config: Any) -> None:
    """ValueError for options by which transformers itself would distribute or quantize the model."""
    if config.device_map is not None or config.device_mesh is not None:
        raise ValueError(
            "tpcore.lazy: leave out device_map, tp_plan and distributed_config (and torch's default device): "
            "parallelize puts each rank's part on the rank's device"
        )
    quantizer = config.hf_quantizer
    if quantizer is not None and getattr(quantizer, "packed_modules", None) != {}:  # {}: GGUF, made floats
        raise ValueError(
            f"tpcore.lazy: weights quantized by {quantizer.quantization_config.quant_method} cannot be sharded: "
            "give files that are not, or of GGUF with quantization_config=GgufConfig(dequantize=True)"
        )


def _check_ties(model: Any, tensors: dict[str, Stored]) -> None:
    """Leave out the second of two equal tensors that the model ties; untie two that differ."""
    from transformers.utils import logging

    for name, source in list(model.all_tied_weights_keys.items()):
        if name not in tensors or source not in tensors:
            continue
        if equal(tensors[name], tensors[source]):
            del tensors[name]
        else:
            del model.all_tied_weights_keys[name]
            logging.get_logger("transformers.modeling_utils").warning(
                f"The configuration ties {source} and {name}, which have different values in the files: they "
                "are not tied. tie_word_embeddings=False in the configuration silences this warning."
            )


def stored_weights(model: Any, lazy_from: StrPath | None, ctx: ParallelContext) -> Weights | None:
    """What fills a model that is not sharded yet: the files of ``lazy_from``, or of ``from_pretrained``."""
    if lazy_from is not None:
        with together(ctx):
            return open_weights(model, os.fspath(lazy_from))
    weights = model.__dict__.get(FILES)
    return None if weights is None else weights.with_initial(model)


def open_weights(model: Any, path: str) -> Weights:
    """The tensors at ``path`` by the model's names, but for those that transformers ignores."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.utils.loading_report import LoadStateDictInfo

    with ExitStack() as stack, naming("load", path):
        source = open_source(path, Reading(), stack, sharded=False)
        stored = source.stage(0, None, lambda *_: None).model()
        tensors = by_model_name(model, stored, get_model_conversion_mapping(model))
        unknown = tensors.keys() - model.state_dict(keep_vars=True).keys()
        report = LoadStateDictInfo(set(), set(unknown), set(), [], {}, set())
        model._adjust_missing_and_unexpected_keys(report)
        ignored = unknown - report.unexpected_keys
        weights = Weights(path, {name: t for name, t in tensors.items() if name not in ignored})
        weakref.finalize(weights, stack.pop_all().close)
    return weights


def read_parts(model: nn.Module, weights: Weights, ctx: ParallelContext, quantize: torch.dtype | None = None) -> None:
    """Fill ``model`` from ``weights``; each rank reads its parts. Collective over the world. ``quantize``: linear
    layers are read one by one, and each is quantized before the next has memory. Parameters on meta get memory and stay
    the same objects. Raises CheckpointError on every rank if a tensor does not fit or still has no values
    afterwards."""
    if quantize is not None:
        layers = quantized.layers_of(model)
        prefixes = tuple(f"{name}." for name, _ in layers)
        for part, layer in quantized.apart(model, layers):
            names = part.state_dict(keep_vars=True).keys()
            rest = layer is None
            tensors = {n: t for n, t in weights.tensors.items() if (not n.startswith(prefixes) if rest else n in names)}
            read_parts(part, replace(weights, tensors=tensors), ctx)
            if layer is not None:
                quantized.quantize(model, layer, quantize)
        model.__dict__.pop(FILES, None)
        return
    path = weights.path
    ctx.comm("tp")  # here, where all ranks pass: the first use of a group is collective
    with together(ctx), naming("load", path):
        _materialize(model, ctx.device)
        source = Whole(path, "unsharded model", dict(weights.tensors), {})
        loading = Loading(ctx, source, model, strict=True, sharded=False)
        loading.compare()
    loading.run(quiet=True)  # a model's dtype is chosen with the model, as in transformers
    with together(ctx):
        missing = [n for n, t in (*model.named_parameters(), *model.named_buffers()) if t.is_meta]
        if missing:
            raise CheckpointError(
                f"{path} holds no values for {', '.join(missing)}, and the model made none: set them before, or "
                "load without tpcore.lazy()"
            )
    model.__dict__.pop(FILES, None)


def _materialize(model: nn.Module, device: torch.device) -> None:
    """Give parameters on meta memory, and keep the objects: an optimizer may have them already."""
    for p in list(model.parameters()):
        if p.is_meta:
            torch.utils.swap_tensors(p, nn.Parameter(torch.empty_like(p, device=device), requires_grad=p.requires_grad))
    for module in model.modules():
        if isinstance(module, PipelinedLayers):
            module.mark_places()
        if isinstance(module, ParallelModule):
            for name in module.shard_specs:  # swap_tensors has taken away the Parameter's attributes
                module.register_parameter(name, module.get_parameter(name))
