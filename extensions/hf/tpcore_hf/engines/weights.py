"""The tensors of a folder as an engine reads them: names, shapes, ties, quantization, dtype."""

from __future__ import annotations

from collections.abc import Iterator

from ..load.weights import equal
from .handover import ERROR, NOTE, SAVE, WARNING, Handover, Remark

_SOME = 3


def names(here: Handover) -> Iterator[Remark]:
    if here.config.get("quantization_config") or not here.expected:
        return
    expected, stored = here.expected, here.tensors
    tied = {name for pair in here.model.all_tied_weights_keys.items() for name in pair}
    made = {_end(name) for name, _ in here.model.named_buffers()} - {_end(name) for name in here.model.state_dict()}
    surplus = [n for n in stored if n not in expected and n not in tied and _end(n) not in made]
    lacking = [name for name in expected if name not in stored]
    if here.engine is None and tied & set(stored):  # transformers takes either of tied names
        lacking = [name for name in lacking if name not in tied]
    if lacking:
        ends = [n for n in surplus if any(n.endswith(m) or n.replace("_orig_mod.", "") == m for m in lacking)]
        why = f"; they are there as {ends[0]}: a wrapper's name" if ends else ""
        head = "lm_head.weight" in lacking and not here.config.get("tie_word_embeddings", True)
        also = "; if the head is tied, tie_word_embeddings is true" if head else ""
        yield Remark("names", ERROR, f"files lack {_few(lacking)}{why}", f"{SAVE}, of the model inside{also}")
    if surplus:
        kind = "adapters that are not merged: " if any(".lora_" in name for name in surplus) else ""
        remedy = "model.merge_and_unload() first" if kind else SAVE
        yield Remark("names", ERROR, f"{kind}a {here.architecture} has no {_few(surplus)}", remedy)
    rows = here.text.get("vocab_size")
    for name, want in expected.items():
        if name in stored and (has := stored[name].shape) != tuple(want.shape):
            table = len(has) > 0 and want.shape[:1] == (rows,) and has[1:] == tuple(want.shape[1:])
            remedy = f"cut rows from {rows} on, which are padding, or set vocab_size to {has[0]} in config.json"
            text = f"{name} is {_by(has)}, and by config.json {_by(want.shape)}"
            yield Remark("vocabulary" if table else "shapes", ERROR, text, remedy if table else SAVE)


def _end(name: str) -> str:
    """Of a buffer: what each model makes itself lay in each layer of old files."""
    return ".".join(name.split(".")[-2:])


def _few(names: list[str]) -> str:
    more = f" and {len(names) - _SOME} more" if len(names) > _SOME else ""
    return ", ".join(names[:_SOME]) + more


def _by(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def ties(here: Handover) -> Iterator[Remark]:
    """An engine that ties them takes one of the two tensors."""
    if here.model is None:
        return
    for target, source in here.model.all_tied_weights_keys.items():
        if target in here.tensors and source in here.tensors and not equal(here.tensors[target], here.tensors[source]):
            text = f"tie_word_embeddings is true, and {target} has other values than {source}"
            yield Remark("ties", ERROR, text, "set tie_word_embeddings to false, if the head was trained alone")


def quantization(here: Handover) -> Iterator[Remark]:
    config, stored = here.config.get("quantization_config"), here.tensors
    small = sorted({str(t.dtype) for t in stored.values() if t.dtype.is_floating_point and t.dtype.itemsize < 2})
    if small and not any("scale" in name for name in stored):
        text = f"tensors of {', '.join(small)} without their scales"
        yield Remark("quantization", ERROR, text, "save in bfloat16, or by the quantizing library")
    if not config:
        return
    method = config.get("quant_method", "") if isinstance(config, dict) else str(config)
    if here.engine is not None and method not in here.engine.quantization:
        text = f"{here.engine} has no quantization {method!r}"
        yield Remark("quantization", ERROR, text, f"one of {', '.join(sorted(here.engine.quantization))}")
    same = here.expected and here.expected.keys() <= here.tensors.keys()
    if same and all(t.dtype.is_floating_point and t.dtype.itemsize > 1 for t in here.tensors.values()):
        text = f"quantization_config says {method!r}, and the files have the values of an unquantized model"
        yield Remark("quantization", ERROR, text, "remove quantization_config from config.json")


def dtype(here: Handover) -> Iterator[Remark]:
    said = here.config.get("dtype") or here.config.get("torch_dtype") or here.text.get("dtype")
    has = sorted({str(t.dtype).removeprefix("torch.") for t in here.tensors.values() if t.dtype.is_floating_point})
    wide = max((t.dtype.itemsize for t in here.tensors.values() if t.dtype.is_floating_point), default=0)
    if here.engine is not None:
        refused = {here.config.get("model_type"), here.text.get("model_type")} & here.engine.not_float16
        if said == "float16" and refused:
            text = f"{here.engine} refuses float16 for {refused.pop()}, whose values it cannot hold"
            yield Remark("dtype", ERROR, text, "save in bfloat16, or --dtype bfloat16")
        elif said in ("float64", "float32") or (said is None and wide > 2):
            text = f"{here.engine.name} computes {said or has[-1]} in 16 bits"
            last = "--dtype float32 keeps float32" if said != "float64" else "it has no float64"
            yield Remark("dtype", WARNING if said == "float64" else NOTE, text, last)
    if said and has and said not in has and not here.config.get("quantization_config"):
        text = f"config.json says {said}, and the files have {', '.join(has)}: values are rounded when they are read"
        yield Remark("dtype", WARNING, text, f"set dtype to {has[-1]} in config.json")
