"""What ``tpcore.init(reproducible=8)`` gives and costs: the bits of weights on many meshes, and the time of a step.

    python -m benchmarks.reproducible bits     the hash of all weights after training on each mesh, as a table
    python -m benchmarks.reproducible speed    a step of a Llama at tp=2, with and without, in turns

The bits are those of this machine's kernels: another may have others, which are then its own on every mesh.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor

import tpcore
import tpcore_hf
from tpcore.comm.order import tree
from tpcore.layout.mesh import Mesh
from tpcore.runtime.context import ParallelContext, use
from tpcore.testing import run_ranks

from .harness import Contestant, conditions, race, table

MOST, MICROBATCHES = 8, 4
MESHES: tuple[dict[str, int], ...] = ({"tp": 1}, {"tp": 2}, {"tp": 4}, {"dp": 2, "tp": 2}, {"dp": 4, "tp": 1})
MESHES += ({"pp": 2, "tp": 2}, {"pp": 2, "dp": 2, "tp": 1})
DTYPES = (torch.float32, torch.bfloat16)
_TINY: dict[str, Any] = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8}
_GATED = _TINY | {"intermediate_size": 128, "num_key_value_heads": 4, "pad_token_id": 0}
_NO_DROPOUT = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
_NO_DROPOUT |= dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)


class Trained(NamedTuple):
    """A model of transformers, how it is sharded, and what steps it."""

    kind: str
    config: dict[str, Any]
    sharded: dict[str, Any] = {}
    optimizer: Any = torch.optim.AdamW
    adapters: dict[str, Any] | None = None
    """Of LoRA."""

    def made(self) -> Any:
        auto = transformers.AutoModelForMaskedLM if self.kind == "bert" else transformers.AutoModelForCausalLM
        model = auto.from_config(transformers.AutoConfig.for_model(self.kind, **self.config))
        if self.adapters is None:
            return model
        import peft

        return peft.get_peft_model(model, peft.LoraConfig(**self.adapters))


_LORA = {"r": 4, "target_modules": "all-linear", "init_lora_weights": "gaussian"}
_EXPERTS = _GATED | {"num_local_experts": 8, "num_experts_per_tok": 2}
_SHORT = {"head_dim": 4, "attn_implementation": "eager"}
_BY_TOKENS = {"sequence_parallel": True}
MODELS = {
    "Llama, 4 key/value heads for 8": Trained("llama", _GATED),
    "Llama, tied": Trained("llama", _GATED | {"tie_word_embeddings": True}),
    "Llama, heads of 4 features, eager attention": Trained("llama", _GATED | _SHORT),
    "Llama, Muon": Trained("llama", _GATED, optimizer=tpcore.Muon),
    "Llama, LoRA, sequence parallel": Trained("llama", _GATED, _BY_TOKENS, adapters=_LORA),
    "Qwen2": Trained("qwen2", _GATED),
    "Qwen3, sequence parallel": Trained("qwen3", _GATED | {"head_dim": 16}, _BY_TOKENS),
    "OLMo 2, sequence parallel": Trained("olmo2", _GATED, _BY_TOKENS),
    "GPT-2": Trained("gpt2", _TINY | _NO_DROPOUT),
    "BERT, eager attention": Trained("bert", _TINY | _NO_DROPOUT | {"attn_implementation": "eager"}),
    "GPT-NeoX": Trained("gpt_neox", _TINY | {"intermediate_size": 128}),
    "Phi": Trained("phi", _TINY | {"intermediate_size": 128}),
    "Mixtral": Trained("mixtral", _EXPERTS),
    "Mixtral, whole experts on each rank": Trained("mixtral", _EXPERTS, {"expert_parallel": True}),
}


def digest(state: Mapping[str, Tensor]) -> str:
    """Of the bits of all tensors."""
    found = hashlib.sha256()
    for name, t in sorted(state.items()):
        found.update(name.encode())
        found.update(t.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:12]


def trained(
    what: Trained, dtype: torch.dtype, steps: int, zero: bool, ctx: ParallelContext
) -> tuple[list[Any], dict[str, Tensor]]:
    """The losses, the norms and this stage's weights after ``steps`` clipped ones."""
    torch.manual_seed(0)
    mine = MICROBATCHES // ctx.mesh.axes.get("dp", 1)
    staged: dict[str, Any] = {"num_microbatches": mine} if ctx.mesh.axes.get("pp", 1) > 1 else {}
    model = tpcore_hf.parallelize(what.made().to(dtype), **what.sharded, **staged)
    pipe, named = tpcore.PipelineModel(model, mine) if staged else None, model.named_parameters()
    optimizer = tpcore.Zero1(what.optimizer, named, lr=1e-3) if zero else what.optimizer(named, lr=1e-3)
    first, seen = ctx.mesh.coords(ctx.rank).get("dp", 0), []
    for step in range(steps):
        batch = torch.randint(3, 96, (MICROBATCHES, 2, 32), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        batch = batch[first * mine :][:mine]
        if pipe is None:
            losses = []
            for ids in batch:
                losses.append(model(input_ids=ids, labels=ids).loss / mine)
                losses[-1].backward()
            loss = tree(losses).detach()
        else:
            loss = pipe.run_train(input_ids=batch.flatten(0, 1), labels=batch.flatten(0, 1))
        norm = tpcore.optimizer_step(optimizer, max_norm=1.0)
        seen.append((ctx.data.all_reduce(loss.view(1)).item() / ctx.data.size, norm.item()))
    return seen, tpcore_hf.full_state_dict(model)


def on(
    axes: dict[str, int], what: Trained, dtype: torch.dtype, steps: int, *, zero: bool = False, most: int | None = MOST
) -> tuple[list[Any], str]:
    """``trained`` on a mesh of threads, with the hash of all weights. ValueError unless all ranks have the same."""
    every = run_ranks(Mesh(axes), partial(trained, what, dtype, steps, zero), reproducible=most)
    seen, whole = every[0][0], {name: t for _, state in every for name, t in state.items()}
    if any(other != seen or digest(whole | state) != digest(whole) for other, state in every):
        raise ValueError(f"{what} on {axes}: the ranks differ")
    return seen, digest(whole)


def bits(steps: int, models: list[str]) -> None:
    """Print the table."""
    torch.set_num_threads(1)
    logging.getLogger("tpcore").setLevel(logging.ERROR)
    meshes = [" ".join(f"{axis}={n}" for axis, n in axes.items()) for axes in MESHES]
    print(
        f"{conditions()}; {MICROBATCHES} microbatches on all ranks of dp together, {steps} clipped steps of AdamW, or "
        f"of what is named; on {', '.join(meshes)}\n"
    )
    print("| model | dtype | weights | losses, norms, weights on every mesh |\n|---|---|---|---|")
    for name in models:
        for dtype in DTYPES:
            found = [on(axes, MODELS[name], dtype, steps) for axes in MESHES]
            other = [mesh for mesh, of in zip(meshes, found, strict=True) if of != found[0]]
            same = f"**different** on {', '.join(other)}" if other else "the same"
            print(f"| {name} | {str(dtype)[6:]} | `{found[0][1]}` | {same} |", flush=True)


SIZES: dict[str, dict[str, Any]] = {
    "127m": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "vocab_size": 27136},
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 96},
}


def _race(size: str, tokens: int, rounds: int, tp: int) -> str | None:
    torch.set_num_threads(1)
    with_it = tpcore.init("cpu_gloo", tp=tp, reproducible=MOST)
    plain = ParallelContext(with_it.backend, with_it.mesh, with_it.rank)
    contestants = []
    for name, ctx in (("without", plain), ("reproducible", with_it)):
        with use(ctx):
            contestants.append(Contestant(name, partial(_step, ctx, *_prepared(size, tokens))))
    found = race(f"a step of Llama, {size}, {tokens} tokens, tp={tp}, float32", contestants, rounds, 1, 1)
    tpcore.shutdown()
    return table(found, "without") if with_it.rank == 0 else None


def _prepared(size: str, tokens: int) -> tuple[Any, Any, Tensor]:
    torch.manual_seed(0)
    heads: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 8, "pad_token_id": 0}
    model = tpcore_hf.parallelize(transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES[size], **heads)))
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=1e-3)
    return model, optimizer, torch.randint(3, 96, (tokens // 64, 64), generator=torch.Generator().manual_seed(1))


def _step(ctx: ParallelContext, model: Any, optimizer: Any, ids: Tensor) -> None:
    with use(ctx):
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        tpcore.optimizer_step(optimizer, max_norm=1.0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("bits", "speed"))
    parser.add_argument("--steps", type=int, default=100, help="of bits")
    parser.add_argument("--models", nargs="+", default=[*MODELS], choices=[*MODELS], help="of bits")
    parser.add_argument("--size", choices=[*SIZES], default="127m", help="of speed")
    parser.add_argument("--tokens", type=int, default=512, help="of speed")
    parser.add_argument("--rounds", type=int, default=7, help="of speed")
    parser.add_argument("--tp", type=int, default=2, help="of speed")
    asked = parser.parse_args()
    os.environ.setdefault("TPCORE_CHECK", "warmup")
    transformers.logging.set_verbosity_error()
    if asked.what == "bits":
        bits(asked.steps, asked.models)
    else:
        print(conditions(), "\n")
        print(tpcore.launch(_race, asked.tp, args=(asked.size, asked.tokens, asked.rounds, asked.tp))[0])
