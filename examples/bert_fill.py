"""Fill in masked words with a model that bert_pretrain.py has trained: unsharded, and served at tp.

    python examples/bert_fill.py --run demo/tp2

The run's newest checkpoint is consolidated to one file, which both models load: transformers' own, in one
process, and the one with tpcore's layers, traced at tp, saved and loaded again.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from bert_checkpoint import PREFIX
from bert_corpus import load_corpus
from bert_model import bert_config, shard_bert
from bert_tokens import CLS, MASK, PAD, SEP, SPECIAL_TOKENS
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer
from torch import Tensor
from transformers import BertConfig, BertForPreTraining
from transformers.utils.logging import disable_progress_bar

from tpcore.trace import parallel_model_load, parallel_model_save, parallel_model_trace
from tpcore_convert.rewrite import consolidate
from tpcore_nxd import parallel_layers

SHOWN = 3  # words for each mask
# Of the largest difference of any logit, which are about 10 in size: sums over two ranks round differently.
LIMIT = 1e-4

console = Console(highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class Puzzle:
    """A sentence with one token hidden."""

    ids: list[int]  # with [CLS], [MASK] and [SEP]
    answer: int

    @property
    def at(self) -> int:
        return self.ids.index(MASK)


def newest_checkpoint(run: Path) -> Path:
    folders = sorted(run.glob(f"{PREFIX}*"))
    if not folders:
        raise SystemExit(f"there is no checkpoint in {run}: give the --output_dir of a run of bert_pretrain.py")
    return folders[-1]


def whole_checkpoint(run: Path, out: Path) -> Path:
    """The newest checkpoint as a folder that `from_pretrained` opens."""
    options = json.loads((run / "run.json").read_text())
    consolidate(newest_checkpoint(run), out)
    flags = options["options"]
    config = bert_config(
        flags["model_size"], vocab_size=options["vocabulary"], max_seq_length=int(flags["max_seq_length"]), dropout=0.0
    )
    config.save_pretrained(out)
    return out


def parallel_model(folder: Path) -> BertForPreTraining:
    """This rank's part, with the logits of the whole vocabulary on every rank."""
    model = BertForPreTraining(BertConfig.from_pretrained(folder))
    shard_bert(model, gather_logits=True)
    parallel_layers.load(folder, model, sharded=False)
    model.eval()
    return model


def puzzles(tokenizer: Tokenizer, count: int, max_length: int) -> list[Puzzle]:
    """Sentences of the embedded text with a whole word hidden, the same ones every time."""
    sentences = [s for document in load_corpus().documents for s in document if 6 <= len(s.split()) <= 12]
    draw, out = random.Random(0), []
    for sentence in draw.sample(sentences, len(sentences)):
        encoding = tokenizer.encode(sentence, add_special_tokens=False)
        words = [
            i
            for i, word in enumerate(encoding.word_ids)
            if encoding.word_ids.count(word) == 1 and encoding.tokens[i].isalpha()
        ]
        if words and len(encoding.ids) <= max_length - 2:
            hidden = draw.choice(words)
            ids = [CLS, *encoding.ids, SEP]
            answer, ids[hidden + 1] = ids[hidden + 1], MASK
            out.append(Puzzle(ids, answer))
        if len(out) == count:
            break
    return out


def batch(sentences: Sequence[Puzzle]) -> dict[str, Tensor]:
    longest = max(len(p.ids) for p in sentences)
    ids = torch.tensor([p.ids + [PAD] * (longest - len(p.ids)) for p in sentences])
    return {"input_ids": ids, "attention_mask": (ids != PAD).long(), "token_type_ids": torch.zeros_like(ids)}


def best(tokenizer: Tokenizer, logits: Tensor, puzzle: Puzzle) -> str:
    """The likeliest words in the place of the mask, with their probabilities."""
    likely = logits[puzzle.at].softmax(-1)
    likely[: len(SPECIAL_TOKENS)] = 0.0
    values, ids = likely.topk(SHOWN)
    pairs = zip(ids.tolist(), values.tolist(), strict=True)
    return "\n".join(f"{p:.4f} {tokenizer.id_to_token(i)}" for i, p in pairs)


def show(tokenizer: Tokenizer, asked: Sequence[Puzzle], one: Tensor, other: Tensor, tp: int) -> None:
    table = Table(title="masked words, filled in", title_style="bold", show_lines=True)
    table.add_column("sentence", overflow="fold")
    for title in ("hidden", "unsharded", f"tp={tp}"):
        table.add_column(title, no_wrap=True)
    for row, puzzle in enumerate(asked):
        ids = puzzle.ids[1:-1]
        text = tokenizer.decode(ids, skip_special_tokens=False).replace("[MASK]", "____")
        words = (best(tokenizer, logits[row], puzzle) for logits in (one, other))
        table.add_row(text, tokenizer.id_to_token(puzzle.answer), *words)
    console.print(table)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--run", type=Path, required=True, help="--output_dir of a run of bert_pretrain.py")
    parser.add_argument("--tensor_parallel_degree", type=int, default=2)
    parser.add_argument("--output_dir", type=Path, help="of both models; replaced; default: RUN/serve")
    parser.add_argument("--sentences", type=int, default=6)
    arguments = parser.parse_args(argv)
    disable_progress_bar()  # from_pretrained's, which is done in an instant
    tp, out = arguments.tensor_parallel_degree, arguments.output_dir or arguments.run / "serve"
    shutil.rmtree(out, ignore_errors=True)
    whole = whole_checkpoint(arguments.run, out / "whole")
    (vocabulary,) = arguments.run.glob("wordpiece-*.json")
    tokenizer = Tokenizer.from_file(str(vocabulary))
    unsharded = BertForPreTraining.from_pretrained(whole).eval()
    asked = puzzles(tokenizer, arguments.sentences, unsharded.config.max_position_embeddings)
    inputs = batch(asked)

    start = time.perf_counter()
    model = parallel_model_trace(lambda: parallel_model(whole), inputs, tp_degree=tp)
    parallel_model_save(model, out / "traced")
    traced = time.perf_counter()
    with parallel_model_load(out / "traced") as model:
        loaded = time.perf_counter()
        logits = model(**inputs).prediction_logits
    with torch.no_grad():
        expected = unsharded(**inputs).prediction_logits
    show(tokenizer, asked, expected, logits, tp)
    console.print(
        f"{newest_checkpoint(arguments.run).name} traced at tp={tp} in {traced - start:.1f} s,"
        f" loaded from {out / 'traced'} in {loaded - traced:.1f} s"
    )
    largest = float((logits - expected).abs().max())
    console.print(f"largest difference of a logit: {largest:.1e}, limit {LIMIT:g}")
    if not largest <= LIMIT:
        raise SystemExit(f"FAILED: tp={tp} and the unsharded model differ by {largest:.1e}, limit {LIMIT:g}")


if __name__ == "__main__":
    main()
