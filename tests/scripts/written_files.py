"""Writes the names, dtypes and shapes in the files of every family, as the installed transformers saves them.

``PYTHONPATH=DIR:tests python tests/scripts/written_files.py`` with DIR of ``pip install --target DIR
transformers==4.26.1`` and the releases of tokenizers and huggingface_hub that it asks for.
"""

from __future__ import annotations

import gzip
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from helpers.families import class_of, config_of, on_the_page
from helpers.places import ROOT
from safetensors.torch import load_file

LARGEST = 6_000_000


def written(family: str) -> dict[str, Any]:
    """The class, the ``config.json`` and the tensors of a tiny model of a family."""
    kind: Any = class_of(family)
    config = config_of(family)
    for name, value in {"apply_spec_augment": False, "out_indices": [1, 2]}.items():
        if hasattr(config, name):
            setattr(config, name, value)
    model = kind(config)
    if sum(p.numel() for p in model.parameters()) > LARGEST:
        raise ValueError("no tiny model")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model.save_pretrained(folder)
        state: dict[str, torch.Tensor] = {}
        for file in folder.iterdir():
            if file.suffix in (".safetensors", ".bin"):
                state |= load_file(file) if file.suffix == ".safetensors" else torch.load(file)
        config = json.loads((folder / "config.json").read_text())
    tensors = {n: [str(t.dtype).removeprefix("torch."), list(t.shape)] for n, t in state.items()}
    return {"class": kind.__name__, "config": config, "tensors": tensors}


def main() -> None:
    rows = {}
    for family in on_the_page("Work"):
        try:
            rows[family] = written(family)
        except Exception as e:  # noqa: BLE001  most often a family that the release does not have
            print(family, type(e).__name__, str(e)[:80], file=sys.stderr)  # noqa: T201
    out = ROOT / "tests" / "data" / f"files-of-transformers-{transformers.__version__}.json.gz"
    out.write_bytes(gzip.compress(json.dumps(rows, separators=(",", ":")).encode(), mtime=0))
    print(out, len(rows), out.stat().st_size)  # noqa: T201


if __name__ == "__main__":
    main()
