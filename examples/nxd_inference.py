"""A sequence classifier traced, saved and loaded with NeuronX Distributed's documented calls.

    python examples/nxd_inference.py

BertForSequenceClassification of BERT-base's width with random weights, made here, so nothing is downloaded.
Only the imports say tpcore. It runs with transformers 4.26.0, which those documents name, and with the
current one.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification, BertTokenizer
from transformers.models.bert.modeling_bert import BertSelfAttention, BertSelfOutput

import tpcore_nxd as neuronx_distributed
from tpcore_nxd.parallel_layers import layers, parallel_state

SENTENCES = [
    "The library is closed on public holidays.",
    "On public holidays nobody can visit the library.",
    "Rain is expected in the north tomorrow.",
]
LIMIT = 1e-5  # float32 sums over two ranks round differently, by about 1e-7 of a logit's terms


class ParallelSelfAttention(BertSelfAttention):
    """Each rank computes some of the heads."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        for name in ("query", "key", "value"):
            projection = layers.ColumnParallelLinear(config.hidden_size, self.all_head_size, gather_output=False)
            self.add_module(name, projection)
        tp = parallel_state.get_tensor_model_parallel_size()
        self.num_attention_heads = self.num_attention_heads // tp
        self.all_head_size = self.all_head_size // tp


class ParallelSelfOutput(BertSelfOutput):
    """Sums what the heads of all ranks give."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        projection = layers.RowParallelLinear(config.hidden_size, config.hidden_size, input_is_parallel=True)
        self.add_module("dense", projection)


def encode(tokenizer: BertTokenizer, first: str, second: str, max_length: int = 128) -> tuple[Tensor, Tensor, Tensor]:
    tokens = tokenizer(first, second, max_length=max_length, padding="max_length", truncation=True, return_tensors="pt")
    return tokens["input_ids"], tokens["attention_mask"], tokens["token_type_ids"]


def make_vocabulary(path: Path) -> None:
    """One token for every word of the sentences: enough for a random model."""
    words = sorted({word.strip(".").lower() for sentence in SENTENCES for word in sentence.split()})
    path.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", *words]))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tensor_parallel_degree", type=int, default=2)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden_size", type=int, default=768)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="nxd_inference_") as folder:
        run(arguments, Path(folder))


def run(arguments: argparse.Namespace, folder: Path) -> None:
    make_vocabulary(folder / "vocab.txt")
    tokenizer = BertTokenizer(str(folder / "vocab.txt"))
    same = encode(tokenizer, SENTENCES[0], SENTENCES[1])
    other = encode(tokenizer, SENTENCES[0], SENTENCES[2])

    # An unsharded checkpoint, as some other program would have left it.
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=arguments.hidden_size,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.hidden_size // 64,
        intermediate_size=4 * arguments.hidden_size,
    )
    torch.manual_seed(0)
    whole = BertForSequenceClassification(config).eval()
    torch.save({"model": whole.state_dict()}, folder / "bert.pt")

    def get_model() -> tuple[torch.nn.Module, dict[str, Tensor]]:
        """The model with parallel layers, made and loaded in each of the processes."""
        model = BertForSequenceClassification(config)
        layer: Any
        for layer in model.bert.encoder.layer:
            layer.attention.self = ParallelSelfAttention(config)
            layer.attention.output = ParallelSelfOutput(config)
        neuronx_distributed.parallel_layers.load(folder / "bert.pt", model, sharded=False)
        return model.eval(), {}

    degree = arguments.tensor_parallel_degree
    model = neuronx_distributed.trace.parallel_model_trace(get_model, same, tp_degree=degree)
    neuronx_distributed.trace.parallel_model_save(model, folder / "tp_models")

    with neuronx_distributed.trace.parallel_model_load(folder / "tp_models") as model:
        for name, inputs in (("same meaning", same), ("other meaning", other)):
            logits = model(*inputs).logits
            with torch.no_grad():
                expected = whole(*inputs).logits
            difference = float((logits - expected).abs().max())
            rows = (" ".join(f"{x:+.6f}" for x in t[0].tolist()) for t in (expected, logits))
            print(f"{name}: unsharded {next(rows)}, tp={degree} {next(rows)}, difference {difference:.1e}")
            if not difference <= LIMIT:
                raise SystemExit(f"FAILED: the logits differ by {difference:.1e}, limit {LIMIT:g}")


if __name__ == "__main__":
    main()
