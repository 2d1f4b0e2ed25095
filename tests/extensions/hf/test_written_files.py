"""Files of other releases of transformers, of every family on the page that they had: read by parts, equal.

What changes between releases is names, shapes and dtypes: ``scripts/written_files.py`` has recorded them.
The values are made here.
"""

from __future__ import annotations

import gzip
import json
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers import families
from helpers.places import TESTS
from helpers.tiers import tiers
from safetensors.torch import save_file
from torch import Tensor

import tpcore
import tpcore_hf
from tpcore import Mesh
from tpcore.testing import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore")

FILES = {
    path.name.removeprefix("files-of-transformers-").removesuffix(".json.gz"): json.loads(
        gzip.decompress(path.read_bytes())
    )
    for path in sorted((TESTS / "data").glob("files-of-transformers-*.json.gz"))
}
OLD = "bert roberta distilbert electra albert gpt2 gpt_neox gptj opt bloom t5 bart vit whisper llama mixtral"
CONVERTED = "audio-spectrogram-transformer beit bigbird_pegasus clip_vision_model deberta-v2 dinov2 esm hrm_text "
CONVERTED += "hubert m2m_100 olmo_hybrid openai-gpt siglip_vision_model speech_to_text videomae vit_mae vivit yolos"
"""Of each way in which names or tensors differ from today's, a family or two. The others' are read as they are."""
LEFT_OUT = ("youtu",)
"""transformers itself sets the padding row of its table to zero after it has read it."""
HERE = set(dir(transformers))  # asked by attribute, each class would be imported
ROWS = [
    (release, family)
    for release, rows in FILES.items()
    for family, row in rows.items()
    if family not in LEFT_OUT and row["class"] in HERE
]


def first(release: str, family: str) -> bool:
    """No earlier release wrote the same tensors."""
    of = [FILES[r][family]["tensors"] for r in FILES if family in FILES[r] and r < release]
    return FILES[release][family]["tensors"] not in of


CASES = tiers(
    [row for row in ROWS if row[1] in OLD.split() and first(*row)],
    [row for row in ROWS if row[1] in CONVERTED.split() and first(*row)],
    ROWS,
)


def values(name: str, dtype: str, shape: list[int]) -> Tensor:
    """Values of a tensor, different for each name; above zero in vectors, which may be variances."""
    kind = getattr(torch, dtype)
    if not kind.is_floating_point:
        return torch.arange(torch.Size(shape).numel()).view(shape).remainder(2).to(kind)
    source = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    draw = torch.randn if len(shape) > 1 else torch.rand
    return (draw(shape, generator=source) / 5 + 0.05).to(kind)


def output(model: Any) -> Tensor:
    batch = {n: t.float() if t.is_floating_point() else t for n, t in families.batch_of(model).items()}
    batch.pop("labels", None)
    if model.config.is_encoder_decoder and "input_ids" in batch:
        batch["decoder_input_ids"] = batch["input_ids"]
    if model.config.model_type == "whisper":
        batch["input_features"] = torch.ones(2, 8, 2 * model.config.max_source_positions)
    with torch.no_grad():
        return next(iter(model.eval()(**batch).values()))


@pytest.mark.parametrize(("release", "family"), CASES)
def test_files_of_a_release_are_read_by_parts(release: str, family: str, tmp_path: Path) -> None:
    row = FILES[release][family]
    (tmp_path / "config.json").write_text(json.dumps(row["config"]))
    state = {name: values(name, *of) for name, of in row["tensors"].items()}
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    kind = getattr(transformers, row["class"])
    torch.manual_seed(1)
    whole, report = kind.from_pretrained(tmp_path, output_loading_info=True)
    assert len(report["missing_keys"]) < len(state) / 4, "this release reads what that one wrote"
    expected = output(whole)
    assert expected.isfinite().all()
    want = whole.state_dict()

    def rank(ctx: tpcore.ParallelContext) -> None:
        torch.manual_seed(1)
        with tpcore.lazy():
            model, said = kind.from_pretrained(tmp_path, output_loading_info=True)
        assert said == report
        tpcore.parallelize(model)
        full = tpcore_hf.full_state_dict(model)
        assert full.keys() == want.keys()
        assert all(torch.equal(t, want[name]) for name, t in full.items())
        assert families.distance(output(model), expected) < 1e-4  # float32: the order of sums

    run_ranks(Mesh({"tp": 2}), rank)
