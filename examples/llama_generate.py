"""A tiny Llama trained on Python's own documentation, saved, and served from two processes token by token.

    python examples/llama_generate.py

Training and serving are at tp=2. The tokens are compared with those of transformers' `generate` in this
process. Nothing is downloaded: the text comes with Python, and the tokenizer is trained on it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

import tpcore
import tpcore_hf
from tpcore.trace import generate, parallel_model_load, parallel_model_save

VOCABULARY, MAX_LENGTH = 1024, 192
PROMPT_LENGTHS = (16, 64)  # a program for each; longer prompts take several calls
PROMPT = "The for statement is used to"
THREADS = 1  # of each rank


def text() -> str:
    return "\n\n".join(topic for _, topic in sorted(topics.items()))


def make_tokenizer(path: Path) -> Tokenizer:
    """Byte pairs, so that every text has tokens and every tokens have a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([text()], trainer)
    tokenizer.save(str(path))
    return tokenizer


def config(hidden: int, layers: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3 // 8 * 8,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=max(1, hidden // 64),
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )


def batches(ids: Tensor, batch: int, length: int) -> Iterator[Tensor]:
    """Pieces of the text from random places, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    while True:
        starts = torch.randint(len(ids) - length, (batch,), generator=generator)
        yield torch.stack([ids[start : start + length] for start in starts.tolist()])


def train(shape: LlamaConfig, ids: Tensor, tp: int, steps: int, out: Path) -> list[float]:
    """Train one model over all ranks, which each run this, and save it whole; its losses."""
    torch.set_num_threads(THREADS)
    ctx = tpcore.init(backend="cpu_gloo", tp=tp)
    torch.manual_seed(0)
    model = tpcore.parallelize(LlamaForCausalLM(shape), sequence_parallel=True).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for step, batch in zip(range(1, steps + 1), batches(ids, 8, 64), strict=False):
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        tpcore.optimizer_step(optimizer, max_norm=1.0)
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        if ctx.rank == 0 and step % max(1, steps // 5) == 0:
            print(f"step {step}: loss {losses[-1]:.3f}", flush=True)
    model.save_pretrained(out)
    tpcore.shutdown()
    return losses


def serve(folder: Path, traced: Path, tp: int) -> None:
    """Trace the saved model, each rank with its part of the files, and write what is served."""

    def cut() -> nn.Module:
        with tpcore.lazy():
            model = AutoModelForCausalLM.from_pretrained(folder)
        return tpcore.parallelize(model)

    with tpcore_hf.trace_causal_lm(cut, tp, max_length=MAX_LENGTH, prompt_lengths=PROMPT_LENGTHS) as model:
        parallel_model_save(model, traced)


def stream(traced: Path, tokenizer: Tokenizer, prompt: list[int], new: int) -> list[int]:
    """Print the tokens as they come; all that is needed is tpcore, the directory and the tokenizer."""
    tokens: list[int] = []
    with parallel_model_load(traced) as model:
        print(tokenizer.decode(prompt), end="", flush=True)
        shown, start = "", time.perf_counter()
        for token in generate(model, [prompt], max_new_tokens=new):
            tokens.append(int(token))
            whole = tokenizer.decode(tokens)  # a character may take several tokens
            print(whole[len(shown) :], end="", flush=True)
            shown = whole
        seconds = time.perf_counter() - start
    print(f"\n{len(tokens)} tokens, {len(tokens) / seconds:.0f} a second, prompt and printing included")
    return tokens


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--tensor_parallel_degree", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--new_tokens", type=int, default=64)
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--output_dir", type=Path, default=Path("llama_docs"), help="replaced")
    arguments = parser.parse_args(argv)
    disable_progress_bar()  # from_pretrained's, which is done in an instant
    out, tp = arguments.output_dir.absolute(), arguments.tensor_parallel_degree
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(out / "tokenizer.json")
    ids = torch.tensor(tokenizer.encode(text()).ids)

    shape = config(arguments.hidden, arguments.layers)
    tpcore.launch(train, tp, args=(shape, ids, tp, arguments.steps, out / "model"))
    serve(out / "model", out / "traced", tp)
    prompt = tokenizer.encode(arguments.prompt).ids
    tokens = stream(out / "traced", tokenizer, prompt, arguments.new_tokens)

    whole: Any = AutoModelForCausalLM.from_pretrained(out / "model")
    prompts = torch.tensor([prompt])
    options = {"max_new_tokens": arguments.new_tokens, "do_sample": False, "pad_token_id": 0}
    expected = whole.generate(prompts, attention_mask=torch.ones_like(prompts), **options)
    if expected[0, len(prompt) :].tolist() != tokens:
        raise SystemExit(f"FAILED: tp={tp} and transformers' generate give other tokens")
    print(f"the {len(tokens)} tokens equal those of transformers' generate in one process")


if __name__ == "__main__":
    main()
