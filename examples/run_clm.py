"""Fine-tune or train a causal language model on local text, with the flags of optimum-neuron's script.

    torchrun --nproc_per_node=2 examples/run_clm.py --model_name_or_path FOLDER --train_file text.txt \\
        --do_train --do_eval --block_size 128 --per_device_train_batch_size 4 --learning_rate 1e-4 \\
        --zero_1 --tensor_parallel_size 2 --output_dir runs/clm
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from bert_corpus import Corpus, load_corpus
from bert_tokens import SEP, cached_tokenizer, encode
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, set_seed

import tpcore
from tpcore_nxd.optimum_neuron import (
    NeuronHfArgumentParser,
    NeuronTrainer,
    NeuronTrainingArguments,
    lazy_load_for_parallelism,
)


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class ModelArguments:
    model_name_or_path: str | None = _option(None, "A directory that save_pretrained wrote.")
    model_type: str = _option("llama", "What to make where no directory is given.")
    config_overrides: str = _option("", "Its sizes: hidden_size=256,num_hidden_layers=4")
    tokenizer_name: str | None = _option(None, "A directory with a tokenizer, if not the model's own.")
    vocab_size: int = _option(2048, "Of the tokenizer that is trained where there is none.")
    prompt: str = _option("", "Greedy tokens after it are printed when all is done.")
    prompt_tokens: int = _option(12, "How many.")


@dataclass
class DataArguments:
    train_file: Path | None = field(
        default=None, metadata={"help": "A .txt file or a folder of some; default: Python's own reference."}
    )
    validation_split_percentage: int = _option(5, "Of the blocks, the last ones.")
    block_size: int = _option(128, "Tokens of one example.")


def tokenizer_of(arguments: ModelArguments, corpus: Corpus, folder: Path) -> Any:
    """The model's own, or a WordPiece trained on the text, the same on every rank."""
    source = arguments.tokenizer_name or arguments.model_name_or_path
    if source is not None:
        return AutoTokenizer.from_pretrained(source)
    folder.mkdir(parents=True, exist_ok=True)
    trained = cached_tokenizer(corpus, arguments.vocab_size, folder)
    return PreTrainedTokenizerFast(tokenizer_object=trained, pad_token="[PAD]", unk_token="[UNK]", eos_token="[SEP]")


def ids_of(tokenizer: Any, corpus: Corpus) -> list[int]:
    """The whole text, documents separated."""
    if tokenizer.eos_token == "[SEP]":  # of this script's own
        documents = encode(tokenizer.backend_tokenizer, corpus)
        return [token for document in documents for sentence in document for token in (*sentence, SEP)]
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    texts = [" ".join(document) for document in corpus.documents]
    return [token for ids in tokenizer(texts)["input_ids"] for token in (*ids, *end)]


def blocks(ids: list[int], size: int) -> list[dict[str, torch.Tensor]]:
    rows = torch.tensor(ids[: len(ids) // size * size]).view(-1, size)
    return [{"input_ids": row, "labels": row} for row in rows]


def model_of(arguments: ModelArguments, training: NeuronTrainingArguments, vocabulary: int) -> Any:
    """Shapes alone of what a directory holds, whose parts each rank reads; or a new model."""
    if arguments.model_name_or_path is not None:
        with lazy_load_for_parallelism(training.tensor_parallel_size, training.pipeline_parallel_size):
            return AutoModelForCausalLM.from_pretrained(arguments.model_name_or_path)
    pairs = [pair.split("=", 1) for pair in arguments.config_overrides.split(",") if pair]
    sizes = {name: json.loads(value) for name, value in pairs}
    config = AutoConfig.for_model(arguments.model_type, **{"vocab_size": vocabulary, **sizes})
    return AutoModelForCausalLM.from_config(config)


def say(model: Any, tokenizer: Any, arguments: ModelArguments) -> None:
    """Greedy tokens; every rank of a cut model takes part."""
    ids = tokenizer(arguments.prompt, add_special_tokens=False, return_tensors="pt")["input_ids"]
    told = model.eval().generate(ids, do_sample=False, max_new_tokens=arguments.prompt_tokens, pad_token_id=0)
    if tpcore.current().rank == 0:
        print(f"tokens: {told[0].tolist()}\ntext: {tokenizer.decode(told[0])}", flush=True)


def main() -> None:
    groups: Any = (ModelArguments, DataArguments, NeuronTrainingArguments)
    named, files, training = NeuronHfArgumentParser(groups).parse_args_into_dataclasses()
    corpus = load_corpus(files.train_file)
    tokenizer = tokenizer_of(named, corpus, Path(training.output_dir))
    examples = blocks(ids_of(tokenizer, corpus), files.block_size)
    kept = max(1, len(examples) * files.validation_split_percentage // 100)
    set_seed(training.seed)  # a new model's values are the same on every rank before it is sharded
    trainer = NeuronTrainer(
        model=model_of(named, training, len(tokenizer)),
        args=training,
        train_dataset=examples[:-kept],
        eval_dataset=examples[-kept:],
        processing_class=tokenizer,
        data_collator=transformers.default_data_collator,
    )
    if training.do_train:
        trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
        trainer.save_model()
        trainer.save_state()
    if training.do_eval:
        trainer.log_metrics("eval", trainer.evaluate())
    if named.prompt:
        say(trainer.model, tokenizer, named)
    tpcore.checkpoint.wait()
    tpcore.shutdown()


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
