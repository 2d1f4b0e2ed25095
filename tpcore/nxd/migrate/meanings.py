"""The notes on calls that import as before but mean something else, or are refused."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass

Test = Callable[[ast.expr], bool]


def _any(value: ast.expr) -> bool:
    return True


def _true(value: ast.expr) -> bool:
    return not (isinstance(value, ast.Constant) and not value.value)


def _not_one(value: ast.expr) -> bool:
    return not (isinstance(value, ast.Constant) and value.value in (None, 1))


def _one(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value == 1


@dataclass(frozen=True)
class Meaning:
    """A note on calls of ``name`` that give ``keyword`` a value that passes ``test``; on every call if
    ``keyword`` is None."""

    name: str  # the last part of the full name here
    keyword: str | None
    note: str
    test: Test = _any


MEANINGS = (
    Meaning("checkpointing.save", "save_xser", "a ValueError: drop it, tensors are streamed anyhow", _true),
    Meaning(
        "checkpointing.load", "weights_only", "False is a ValueError: nothing is unpickled", lambda v: not _true(v)
    ),
    Meaning(
        "checkpointing.save", None, "writes safetensors and JSON into tp_rank_<i>; other files in the directory stay"
    ),
    Meaning(
        "ParallelEmbedding",
        "sequence_dimension",
        "gives [batch, sequence / tp, hidden], already summed: drop the reduce-scatter after it",
        _one,
    ),
    Meaning("clip_grad_norm", "zero1_optimizer", "a ValueError: tpcore.Zero1 clips in its own step", _true),
    Meaning("get_grad_norm", "zero1_optimizer", "a ValueError: use the optimizer's norm()", _true),
    Meaning("parallel_cross_entropy", "label_smoothing", "smooths as torch.nn.functional.cross_entropy does", _true),
    Meaning("initialize_model_parallel", "mesh_only", "no such argument: tpcore.Mesh needs no job"),
    Meaning(
        "neuronx_distributed_config",
        "lora_config",
        "a ValueError: let model_fn return tpcore.integrations.peft.get_peft_model(...)",
        _true,
    ),
    Meaning("neuronx_distributed_config", "pad_model", "a ValueError: pass pad=True to the layers", _true),
    Meaning("NxDPPModel", "virtual_pipeline_size", "a ValueError unless 1", _not_one),
    Meaning("NxDPPModel", None, "run_train returns the loss on every rank; a last stage needs no test of its own"),
    Meaning(
        "GQAQKVColumnParallelLinear",
        "kv_size_multiplier",
        "rank r holds part r // multiplier of k and v, in the model's own order: no reordering of q",
        _not_one,
    ),
    Meaning("parallel_model_trace", "bucket_config", "no such argument: bucket_inputs= has examples of sizes"),
    Meaning("parallel_model_trace", "inline_weights_to_neff", "weights stay apart from the program", _true),
    Meaning("parallel_model_trace", "states", "no such argument: func returns (model, aliases)"),
    Meaning(
        "save_checkpoint",
        "num_kept_ckpts",
        "keeps the last of the tags that differ in the number at the end only",
        _true,
    ),
)


def notes_on(name: str, call: ast.Call) -> list[str]:
    """The notes on a call of ``name``, a full name of tpcore."""
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    found = []
    for meaning in MEANINGS:
        if not f".{name}".endswith(f".{meaning.name}"):
            continue
        if meaning.keyword is None:
            found.append(meaning.note)
        elif meaning.keyword in given and meaning.test(given[meaning.keyword]):
            found.append(f"{meaning.keyword}: {meaning.note}")
    return found
