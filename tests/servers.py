"""A tiny language model in ``tpcore serve``, for tests: its files, its process and its client."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

WORDS, NEW = 60, 8
LONG = 400


def written(folder: Path) -> Path:
    """``folder``, with a model without an end and its tokenizer."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}
    config = transformers.LlamaConfig(**sizes, vocab_size=64, num_hidden_layers=2, max_position_embeddings=512)
    config.eos_token_id = None
    model = transformers.LlamaForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    words = ["<unk>", "<s>", "</s>", "<pad>", *(f"w{i}" for i in range(WORDS))]
    text = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    text.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=text, unk_token="<unk>", pad_token="<pad>")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] + ' ' }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    return folder


class Server:
    def __init__(self, folder: Path, *options: str, **environment: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as s:
            port = s.getsockname()[1]
        named = ["--name", "tiny", "--port", str(port)]
        command = [sys.executable, "-m", "tpcore", "serve", str(folder), *named, *options]
        pipes: Any = {"stderr": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env=os.environ | environment, **pipes)
        self.client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="-", max_retries=0, timeout=60)
        self.log: list[str] = []
        self._reader = threading.Thread(target=lambda: self.log.extend(self.process.stderr or ()), daemon=True)
        self._reader.start()
        assert "tiny at http://127.0.0.1:" in (self.process.stdout.readline() if self.process.stdout else "")

    def text(self, prompt: str = "w1 w2 w3", tokens: int = NEW, **options: Any) -> str:
        options = {"temperature": 0} | options
        answer = self.client.completions.create(model="tiny", prompt=prompt, max_tokens=tokens, **options)
        return str(answer.choices[0].text)

    def streamed(self, prompt: str = "w1 w2 w3", tokens: int = NEW) -> Iterator[str]:
        options: Any = {"temperature": 0, "stream": True, "max_tokens": tokens}
        for part in self.client.completions.create(model="tiny", prompt=prompt, **options):
            yield part.choices[0].text

    def counts(self) -> tuple[int, int]:
        """Running and waiting requests."""
        health = self.client._client.get(str(self.client.base_url).replace("/v1/", "/health")).json()
        assert health["status"] == "ok"
        return health["running"], health["waiting"]

    def until(self, running: int) -> None:
        """Wait until so many requests run, and none waits."""
        deadline = time.monotonic() + 120  # against hangs alone
        while self.counts() != (running, 0):
            assert time.monotonic() < deadline, self.counts()
            time.sleep(0.02)

    def rank(self, number: int) -> int:
        """The pid of a rank."""
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                status = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                environment = Path(f"/proc/{pid}/environ").read_text().split("\0")
            except OSError:
                continue
            if int(status[1]) == self.process.pid and f"RANK={number}" in environment:
                return int(pid)
        raise AssertionError(self.log)

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()
        self.client.close()


@contextmanager
def beside(count: int, fn: Callable[[int], object]) -> Iterator[None]:
    """``fn(0)`` to ``fn(count - 1)`` in threads, which have ended after the block."""
    threads = [threading.Thread(target=fn, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    yield
    for thread in threads:
        thread.join()


def expected(folder: Path, prompt: str, tokens: int = NEW) -> str:
    model = transformers.LlamaForCausalLM.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor([tokenizer(prompt)["input_ids"]])
    answer = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False)
    return str(tokenizer.decode(answer[0, ids.shape[1] :], skip_special_tokens=True))
