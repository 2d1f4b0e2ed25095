"""Finds the model to explain, and what shards it: functions, Hugging Face configs, plans."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tpcore.checkpoint.storage.files import read_file
from tpcore_hf.private import set_experts

ModelInputs = Tensor | tuple[Any, ...] | list[Any] | Mapping[str, Any] | Callable[[nn.Module], Tensor]
"""The input of forward: a tensor, positional or keyword arguments; or ``loss(model)``, which calls it."""
Factory = Callable[..., Any]

AUTO = "auto"
_FORMS = (
    "name a function as package.module:function or path/to/file.py:function, a directory with a Hugging Face "
    "config.json, that file itself, or a model class of transformers"
)


def function(name: str) -> Factory:
    """The function called ``package.module:function`` or ``path/to/file.py:function``."""
    place, _, attribute = name.rpartition(":")
    if place.endswith(".py"):
        module = _from_file(Path(place))
    else:
        if "" not in sys.path:
            sys.path.insert(0, "")  # so that modules of the current directory are found, as by `python -m`
        module = importlib.import_module(place)
    factory = getattr(module, attribute, None)
    if not callable(factory):
        raise ValueError(f"{place} has no function {attribute!r}")
    return factory  # type: ignore[no-any-return]


def _from_file(path: Path) -> Any:
    path = path.resolve()
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    loaded = sys.modules.get(path.stem)
    if loaded is not None and getattr(loaded, "__file__", None) == str(path):
        return loaded
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is not a Python file")
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))  # so that the files next to it are found, as by `python path`
    module = importlib.util.module_from_spec(spec)
    if loaded is None:
        sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:  # what is half made would be found by the next call
        if sys.modules.get(path.stem) is module:
            del sys.modules[path.stem]
        raise
    return module


@contextmanager
def told() -> Iterator[None]:
    """What a model's own code raises, as a ValueError of one line."""
    try:
        yield
    except (ValueError, ImportError, OSError):
        raise
    except Exception as e:
        where = "".join(f" ({note})" for note in getattr(e, "__notes__", []))
        raise ValueError(f"{type(e).__name__}: {e}{where}") from e


def build(target: str | Factory, batch_size: int, seq_len: int) -> tuple[nn.Module, ModelInputs]:
    """The model and its inputs, made under the current context and default device."""
    if isinstance(target, str) and target.endswith(".py"):
        raise ValueError(f"{target} is a file: name the function in it that makes the model, as {target}:make")
    if isinstance(target, str) and ":" not in target:
        return _hugging_face(target, batch_size, seq_len)
    factory = function(target) if isinstance(target, str) else target
    sizes = {"batch_size": batch_size, "seq_len": seq_len}
    parameters = inspect.signature(factory).parameters
    output = factory(**{k: v for k, v in sizes.items() if k in parameters})
    if isinstance(output, nn.Module):
        return output, _guess_inputs(output, batch_size, seq_len)
    if isinstance(output, tuple) and len(output) == 2 and isinstance(output[0], nn.Module):
        return output
    raise ValueError(f"{target} returned {type(output).__name__}, not a module, or a module and its inputs")


def _guess_inputs(model: nn.Module, batch_size: int, seq_len: int) -> Tensor:
    """Inputs for the first layer: token ids for an embedding, floats for a linear layer."""
    for module in model.modules():
        if any(True for _ in module.parameters(recurse=False)):
            if hasattr(module, "num_embeddings"):
                return torch.zeros(batch_size, seq_len, dtype=torch.int64)
            features = getattr(module, "in_features", None)
            if isinstance(features, int):
                return torch.zeros(batch_size, seq_len, features)
            break
    raise ValueError(
        f"the inputs of {type(model).__name__} cannot be told from its first layer: return (model, inputs) "
        "from the factory; it may take batch_size and seq_len"
    )


def _hugging_face(target: str, batch_size: int, seq_len: int) -> tuple[nn.Module, ModelInputs]:
    try:
        transformers: Any = importlib.import_module("transformers")
    except ModuleNotFoundError as e:
        raise ValueError(
            f"{target!r} would need transformers, which is not installed: pip install 'tpcore[hf]'; or else {_FORMS}"
        ) from e
    try:
        model = _made(transformers, target)
    except ValueError:
        raise
    except Exception as e:  # sizes that cannot be end in errors of many kinds in its code
        why = str(e).strip().splitlines()
        raise ValueError(f"{target} has sizes of which no model is made: {why[-1].strip() if why else e!r}") from e
    # transformers reads values to decide if it needs a mask, and makes none for an implementation of another name
    sdpa = importlib.import_module("transformers.integrations.sdpa_attention")
    transformers.AttentionInterface.register("tpcore_recorded", sdpa.sdpa_attention_forward)
    model.set_attn_implementation("tpcore_recorded")
    return model, hugging_face_inputs(model, batch_size, seq_len)


def _made(transformers: Any, target: str) -> Any:
    """The model of a configuration's file or folder, or of a class's name."""
    path = Path(target)
    if path.exists():
        config = _read_config(transformers, path / "config.json" if path.is_dir() else path)
        names = getattr(config, "architectures", None) or []
        cls = getattr(transformers, names[0], None) if names else None
    else:
        cls = getattr(transformers, target, None)
        if "/" in target or target.endswith(".json"):
            raise ValueError(f"there is no file or folder {target}; {_FORMS}")
        if cls is None or getattr(cls, "config_class", None) is None:
            raise ValueError(f"there is no file, folder or model class of transformers {target}; {_FORMS}")
        config = cls.config_class()
    if hasattr(config, "use_cache"):
        config.use_cache = False  # the cache is for generation; in a training step it only costs memory
    set_experts(config, "batched_mm")  # of static shapes: the others read which experts are chosen
    return transformers.AutoModel.from_config(config) if cls is None else cls(config)


def _read_config(transformers: Any, path: Path) -> Any:
    if not path.is_file():
        raise ValueError(f"there is no file {path}; {_FORMS}")
    entries = _json(path)
    if not isinstance(entries, dict) or "model_type" not in entries:
        raise ValueError(f"{path} is no Hugging Face config: it has no model_type")
    return transformers.AutoConfig.for_model(entries.pop("model_type"), **entries)


def _json(path: Path) -> Any:
    try:
        return json.loads(read_file(str(path)))
    except ValueError as e:
        raise ValueError(f"{path} is no JSON: {e}") from e


def hugging_face_inputs(model: Any, batch_size: int, seq_len: int) -> ModelInputs:
    kind, config = model.main_input_name, model.config
    if kind == "input_ids":
        names = (kind, "decoder_input_ids") if config.is_encoder_decoder else (kind,)
        return {name: torch.zeros(batch_size, seq_len, dtype=torch.int64) for name in names}
    if kind == "pixel_values":
        size = config.image_size
        return {kind: torch.zeros(batch_size, config.num_channels, size, size)}
    raise ValueError(
        f"{type(model).__name__} takes {kind}, whose shape its config does not say: write a factory that "
        "returns (model, inputs)"
    )


def rules_in(plan: str) -> dict[str, str]:
    """The rules that go before a model's own: none for ``auto``, else those of a JSON file."""
    if plan == AUTO:
        return {}
    path = Path(plan)
    if not path.is_file():
        raise ValueError(f"plan {plan!r} is no file: name a JSON file of rules, or {AUTO!r} for the model's own")
    rules = _json(path)
    if not isinstance(rules, dict) or not all(isinstance(style, str) for style in rules.values()):
        raise ValueError(f'{path} is no plan: it has to be a dict like {{"model.layers.*.mlp": "replicate"}}')
    return rules


def with_labels(model: Any, inputs: ModelInputs) -> ModelInputs:
    """``inputs`` with labels, where the model makes a loss of them: logits then need not be gathered."""
    ids = inputs.get("decoder_input_ids", inputs.get("input_ids")) if isinstance(inputs, Mapping) else None
    takes = "labels" in inspect.signature(model.forward).parameters
    if not isinstance(ids, Tensor) or not takes or model.get_output_embeddings() is None:
        return inputs
    return {**inputs, "labels": ids}  # type: ignore[dict-item]
