"""Requests of mixed lengths that come over a minute, to servers of one model on this host.

    tpcore serve, tp=2       two ranks of one thread each
    tpcore serve, tp=1       one process of two threads
    transformers serve       its own server with continuous batching, one process of two threads
    generate                 one process of two threads, without a server: one request after the other

Each server gets the same requests at the same times, from OpenAI's client, which streams. The texts at temperature 0
are compared with those of ``generate``. Time to the first token and time for each further one are the client's.
"""

from __future__ import annotations

import argparse
import os
import random
import socket
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import openai
import torch
import transformers

from .harness import conditions

WORDS = ("city", "river", "bridge", "morning", "old", "paper", "ship", "winter", "letter", "garden", "stone", "music")


@dataclass
class Asked:
    """A request and what came of it. Seconds are of one clock."""

    prompt: str
    new: int
    at: float
    text: str = ""
    times: list[float] = field(default_factory=list)


def requests(count: int, seconds: float, longest: int) -> list[Asked]:
    """Prompts of a few to ``longest`` words, and answers of as many, at random times."""
    draw = random.Random(0)
    times = sorted(draw.uniform(0, seconds) for _ in range(count))
    lengths = [(draw.randint(4, longest), draw.randint(8, longest)) for _ in times]
    return [Asked(" ".join(draw.choices(WORDS, k=n)), new, at) for at, (n, new) in zip(times, lengths, strict=True)]


def served(command: list[str], threads: int, name: str, work: list[Asked], port: int) -> float:
    """Run a server and send it ``work``; returns the seconds from the first request to the last token."""
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    server = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="-", max_retries=0, timeout=600)
    try:
        while True:  # the first request also makes transformers' engine
            try:
                client.completions.create(model=name, prompt="the city", max_tokens=2, temperature=0)
                break
            except openai.APIConnectionError:
                time.sleep(0.5)
                if server.poll() is not None:
                    raise RuntimeError(f"{command} ended with status {server.returncode}") from None
        start = time.perf_counter()

        def one(asked: Asked) -> None:
            time.sleep(max(0.0, start + asked.at - time.perf_counter()))
            sent = time.perf_counter()
            asked.times = [sent]
            parts = client.completions.create(
                model=name, prompt=asked.prompt, max_tokens=asked.new, temperature=0, stream=True
            )
            for part in parts:
                if part.choices[0].text:
                    asked.times.append(time.perf_counter())
                    asked.text += part.choices[0].text

        workers = [threading.Thread(target=one, args=(asked,)) for asked in work]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return time.perf_counter() - start
    finally:
        server.terminate()
        server.wait(30)


def one_by_one(folder: Path, work: list[Asked]) -> float:
    """``generate`` for one request after the other, as they come."""
    torch.set_num_threads(os.cpu_count() or 1)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    start = time.perf_counter()
    for asked in work:
        time.sleep(max(0.0, start + asked.at - time.perf_counter()))
        ids = tokenizer(asked.prompt, return_tensors="pt")
        with torch.no_grad():
            out = model.generate(**ids, max_new_tokens=asked.new, do_sample=False)
        asked.text = str(tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True))
        asked.times = [start + asked.at, time.perf_counter()]
    return time.perf_counter() - start


def report(name: str, work: list[Asked], seconds: float, tokens: int) -> str:
    first = sorted(asked.times[1] - asked.times[0] for asked in work if len(asked.times) > 1)
    between = sorted(b - a for asked in work for a, b in zip(asked.times[1:], asked.times[2:], strict=False))
    whole = sorted(asked.times[-1] - asked.times[0] for asked in work)
    gaps = f"{_at(between, 0.5)} | {_at(between, 0.99)}" if between else "- | -"
    starts = f"{_at(first, 0.5)} | {_at(first, 0.99)}" if between else "- | -"
    return f"| {name} | {tokens / seconds:.1f} | {starts} | {gaps} | {statistics.median(whole):.2f} s |"


def _at(values: list[float], share: float) -> str:
    return f"{1e3 * values[min(len(values) - 1, int(share * len(values)))]:.0f} ms"


def _port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as s:
        return int(s.getsockname()[1])


def main(options: argparse.Namespace) -> None:
    os.environ.setdefault("TPCORE_CHECK", "0")
    folder, cores = Path(options.model).resolve(), os.cpu_count() or 1
    exact = requests(options.requests, options.seconds, options.longest)
    results = [("generate, one by one", exact, one_by_one(folder, exact))]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokens = sum(len(tokenizer(asked.text)["input_ids"]) for asked in exact)
    tool = [sys.executable, "-m", "tpcore", "serve", str(folder), "--name", "model", "--max-requests", "1000"]
    plain = [str(Path(sys.executable).parent / "transformers"), "serve", str(folder), "--continuous-batching"]
    plain += ["--cb-num-blocks", "64", "--cb-max-batch-tokens", "512", "--device", "cpu"]
    for name, command, threads, model in (
        ("tpcore serve, tp=2", [*tool, "--tp", "2"], max(1, cores // 2), "model"),
        ("tpcore serve, tp=1", [*tool, "--tp", "1"], cores, "model"),
        ("transformers serve", plain, cores, str(folder)),
    ):
        work, port = requests(options.requests, options.seconds, options.longest), _port()
        seconds = served([*command, "--port", str(port)], threads, model, work, port)
        equal = sum(a.text == b.text for a, b in zip(work, exact, strict=True))
        results.append((f"{name} ({equal} of {len(work)} texts equal)", work, seconds))
    print(f"{conditions()}\n\n{options.requests} requests over {options.seconds:g} s, {folder.name}\n")
    print("| | tokens a second | first token, median | 99 % | next token, median | 99 % | whole, median |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for name, work, seconds in results:
        print(report(name, work, seconds, tokens))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a language model in transformers' files, with its tokenizer")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=60.0, help="over which the requests come")
    parser.add_argument("--longest", type=int, default=96, help="words of a prompt, and tokens of an answer")
    main(parser.parse_args())
