"""The settings beside the tensors: architecture, tokenizer, generation, an adapter's."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import shorten
from typing import Any

import transformers

from tpcore.checkpoint.forms.source import Reading
from tpcore.checkpoint.read.source import opened, tensors_of
from tpcore.errors import CheckpointError

from .handover import COPY, ERROR, NOTE, SAVE, WARNING, Engine, Handover, Remark, entries_of, quiet


def architecture(here: Handover) -> Iterator[Remark]:
    name, engine = here.architecture, here.engine
    if not name:
        yield Remark("architecture", ERROR, "config.json has no list of 'architectures'", SAVE)
    elif here.refused:
        yield Remark("configuration", ERROR, f"transformers refuses config.json: {here.refused}", SAVE)
    elif engine is None:
        if here.model is None:
            text = f"transformers {transformers.__version__} has no {name}"
            yield Remark("architecture", ERROR, text, "another version of transformers, or trust_remote_code=True")
    elif name in engine.gone:
        text = f"{name} was last in {engine.name} {engine.gone[name]}"
        yield Remark("architecture", ERROR, text, f"pip install {engine.name}=={engine.gone[name]}")
    elif not (road := engine.road(name)):
        remedy = "the model's own code with --trust-remote-code" if "auto_map" in here.config else "another engine"
        yield Remark("architecture", ERROR, f"{engine} has no {name}", f"{remedy}, or a newer {engine.name}")
    elif road == "transformers":
        text = f"{engine} has no {name} of its own, and runs transformers' code"
        yield Remark("architecture", WARNING, text, "slower; try it at the smallest size")
        if here.tp > 1 and here.model is not None and not here.model.tp_plan:
            text = f"{name} has no plan of transformers, so it cannot be sharded over {here.tp} ranks"
            yield Remark("architecture", ERROR, text, "--tensor-parallel-size 1, or tpcore serve")
    yield from _written(here)


def _written(here: Handover) -> Iterator[Remark]:
    """The engine reads the configuration by a transformers of its own."""
    written = here.config.get("transformers_version")
    if here.engine is not None and isinstance(written, str):
        first, end = here.engine.transformers
        if _numbers(written) >= _numbers(end):
            text = f"written by transformers {written}; {here.engine} has one of {first} to before {end}"
            yield Remark("configuration", NOTE, text, "a family that is newer than these is not known there")


def _numbers(version: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", version)[:3]]


def heads(here: Handover) -> Iterator[Remark]:
    heads, groups = (here.text.get(name) for name in ("num_attention_heads", "num_key_value_heads"))
    groups = groups or heads
    if here.engine is None or not isinstance(heads, int) or not isinstance(groups, int):
        return
    if heads % here.tp:
        text = f"{heads} attention heads are not divisible by {here.tp} ranks"
        yield Remark("tp", ERROR, text, f"a size that divides {heads}: tpcore pads heads, {here.engine.name} does not")
    elif max(groups, here.tp) % min(groups, here.tp):
        text = f"{groups} key and value heads: neither they nor {here.tp} ranks divide the other"
        yield Remark("tp", ERROR, text, f"a size that divides {groups} or is a multiple of it")


def tokenizer(here: Handover) -> Iterator[Remark]:
    rows = here.text.get("vocab_size")
    try:
        with quiet():
            tokenizer: Any = transformers.AutoTokenizer.from_pretrained(here.folder, trust_remote_code=False)
    except Exception as e:  # noqa: BLE001  each tokenizer has errors of its own
        line = shorten(str(e), 60, placeholder=" ...") or type(e).__name__  # it may be a list of many lines
        yield Remark("tokenizer", ERROR, f"none that opens: {line}", "tokenizer.save_pretrained(DIR) into the folder")
        return
    if isinstance(rows, int) and len(tokenizer) > rows:
        text = f"it has {len(tokenizer)} tokens, and the model {rows}"
        yield Remark("tokenizer", ERROR, text, "model.resize_token_embeddings(len(tokenizer)), or the right tokenizer")
    if not tokenizer.chat_template:
        remedy = "--chat-template FILE, or completions alone"
        yield Remark("tokenizer", NOTE, "no chat template: chat completions are errors", remedy)


_RANGES = {
    "temperature": (0.0, math.inf),
    "top_p": (math.ulp(0), 1.0),
    "min_p": (0.0, 1.0),
    "top_k": (-1, math.inf),
    "repetition_penalty": (math.ulp(0), math.inf),
    "max_new_tokens": (1, math.inf),
}
"""What engines take of a request that says nothing itself."""


def generation(here: Handover) -> Iterator[Remark]:
    path = here.folder / "generation_config.json"
    config: dict[str, Any] = {}
    try:
        config = entries_of(path) if path.is_file() else {}
        transformers.GenerationConfig.from_dict(config)
    except (CheckpointError, ValueError, TypeError) as e:
        yield Remark("generation", ERROR, f"{path.name}: {e}", "model.generation_config.save_pretrained(DIR)")
    ends, rows = config.get("eos_token_id", here.text.get("eos_token_id")), here.text.get("vocab_size")
    numbers: list[Any] = ends if isinstance(ends, list) else [ends]
    if not numbers or numbers == [None]:
        text = "no eos_token_id: answers go on to the limit of the request"
        yield Remark("generation", WARNING, text, "set eos_token_id in generation_config.json")
    elif strange := [n for n in numbers if type(n) is not int]:
        text = f"eos_token_id {strange[0]!r} is no number of a token"
        yield Remark("generation", ERROR, text, "set eos_token_id in generation_config.json")
    elif isinstance(rows, int) and (beyond := [n for n in numbers if not 0 <= n < rows]):
        text = f"eos_token_id {beyond[0]} is none of {rows} tokens: no answer ends"
        yield Remark("generation", ERROR, text, "set eos_token_id in generation_config.json")
    for name, (low, high) in _RANGES.items():
        value = config.get(name)
        if value is not None and not (type(value) in (int, float) and low <= value <= high):
            text = f"{name}={value!r}: requests that say nothing fail"
            yield Remark("generation", ERROR, text, f"set {name} in generation_config.json")
    sampling = {
        k: v for k in ("temperature", "top_p", "top_k", "repetition_penalty") if (v := config.get(k)) is not None
    }
    if sampling and here.engine is not None:
        text = f"requests that say nothing have {', '.join(f'{k}={v}' for k, v in sampling.items())}"
        yield Remark("generation", NOTE, text, f"{here.engine.defaults} does without")


def adapter(folder: Path, engine: Engine | None) -> Iterator[Remark]:
    """Of a folder that has an adapter alone."""
    config = entries_of(folder / "adapter_config.json")
    merge = "model.merge_and_unload() before save_pretrained"
    lora = config.get("peft_type") == "LORA"
    yield from _adapter_files(folder, "lora_" if lora else "")
    patterns = config.get("rank_pattern") or {}
    ranks: list[Any] = [config.get("r"), *(patterns.values() if isinstance(patterns, dict) else [patterns])]
    if lora and (wrong := [n for n in ranks if type(n) is not int or n < 1]):
        yield Remark("adapters", ERROR, f"adapter_config.json has the rank {wrong[0]!r}", _AGAIN)
        return
    if engine is None:
        return
    if not lora:
        yield Remark("adapters", ERROR, f"{engine} has no adapters of type {config.get('peft_type')}", merge)
        return
    for name in engine.lora_refused:
        if config.get(name):
            yield Remark("adapters", ERROR, f"{engine} has no {name}={config[name]}", merge)
    if config.get("bias", "none") != "none":
        yield Remark("adapters", ERROR, f"{engine} has no adapters with bias={config['bias']!r}", merge)
    rank = max(ranks)
    if engine.lora_ranks and rank > max(engine.lora_ranks):
        yield Remark("adapters", ERROR, f"rank {rank} is above {engine.name}'s {max(engine.lora_ranks)}", merge)
        return
    fitting = min((n for n in engine.lora_ranks if n >= rank), default=rank)
    options = engine.adapter.format(folder=folder, rank=fitting)
    base = config.get("base_model_name_or_path") or "its base model"
    yield Remark("adapters", NOTE, f"an adapter, served beside {base}", options)


_AGAIN = "save_pretrained of the PeftModel"


def _adapter_files(folder: Path, part: str) -> Iterator[Remark]:
    """``part``: of the names of an adapter's tensors."""
    paths = [path for name in ("safetensors", "bin") if (path := folder / f"adapter_model.{name}").is_file()]
    if not paths:
        yield Remark("files", ERROR, "no adapter_model.safetensors", _AGAIN)
        return
    try:
        with opened(paths[0], Reading(quiet=True)) as source:
            names = tensors_of(source)
    except CheckpointError as e:
        yield Remark("files", ERROR, str(e), COPY)
        return
    if not any(part in name for name in names):
        yield Remark("names", ERROR, f"{paths[0].name} has no tensor of an adapter", _AGAIN)
