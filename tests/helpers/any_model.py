"""A tiny model of any type that transformers has with a language head, and a batch with what else it reads.

``PYTHONPATH=tests python -m helpers.any_model`` counts the types that work, and names the others;
with ``--table`` it writes the part of the page of families that has the types whose rules are found in the structure.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto import modeling_auto as auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from helpers.families import PAGE_FILE, Verdict, Whole, config_of, made, on_the_page
from tpcore_hf.plan.decisions import is_linear
from tpcore_hf.plan.found import COMPARED, found
from tpcore_hf.plan.model import own_rules, vocabulary
from tpcore_hf.plan.rules import rule_of

HEADS = ("IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "SPEECH_SEQ_2_SEQ", "SEQ_TO_SEQ_CAUSAL_LM", "CAUSAL_LM")
IMAGE, AUDIO = 98, 97


def types_with_heads() -> dict[str, str]:
    """The class of each ``model_type`` with one of these heads, the first that it has."""
    found: dict[str, str] = {}
    for head in HEADS:
        for model_type, name in getattr(auto, f"MODEL_FOR_{head}_MAPPING_NAMES").items():
            found.setdefault(model_type, name if isinstance(name, str) else name[0])
    return found


def class_for(model_type: str) -> type[nn.Module]:
    return getattr(transformers, types_with_heads()[model_type])


def _noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def _first(config: Any, names: str, default: Any) -> Any:
    found = (getattr(config, name, None) for name in names.split())
    value = next((value for value in found if isinstance(value, int | list | tuple)), default)
    return value[0] if isinstance(value, list | tuple) else value


def images(config: Any) -> list[dict[str, Tensor]]:
    """Two images in each of the forms that towers read."""
    size, patch = _first(config, "image_size input_size", 32), _first(config, "patch_size", 8)
    channels = _first(config, "num_channels in_channels in_chans", 3)
    frames, grid = _first(config, "temporal_patch_size", 1), size // patch
    flat, area, row = grid * grid, channels * patch * patch, torch.tensor([[grid, grid]] * 2)
    thw = torch.tensor([[1, grid, grid]] * 2)
    rows = {"pixel_values": _noise(2 * flat, area * frames)}
    plain = {"pixel_values": _noise(2, channels, size, size)}
    tiled = {"pixel_values": _noise(2, 1, channels, size, size)}
    sizes = {"image_sizes": torch.tensor([[size, size]] * 2)}
    padded = {"pixel_attention_mask": torch.ones(2, flat, dtype=torch.long), "spatial_shapes": row}
    position = torch.stack(torch.meshgrid(torch.arange(grid), torch.arange(grid), indexing="xy"), -1).reshape(
        1, flat, 2
    )
    return [
        {**rows, "image_grid_thw": thw, "image_merge_sizes": torch.tensor([1, 1])},
        {"pixel_values": _noise(2 * flat, channels, patch, patch), "image_grid_thw": thw},
        {"pixel_values": _noise(2 * flat, frames, channels, patch, patch), "image_grid_thw": thw},
        {"pixel_values": _noise(2 * flat, area * frames), "image_grid_hw": row},
        {"pixel_values": _noise(2, flat, area), **padded},
        {"pixel_values": _noise(2, flat, area), "image_position_ids": position.repeat(2, 1, 1)},
        {"pixel_values": _noise(1, channels, patch, patch * 2 * flat), "target_sizes": row},
        {**plain, **sizes},
        {**tiled, **sizes},
        {"pixel_values": _noise(2, 2, channels, size, size), **sizes},
        {"flattened_patches": _noise(2, flat, area + 2)},
        {"pixel_values": _noise(2 * flat, frames, size, size, channels)},
        plain,
        tiled,
    ]


def sounds(config: Any) -> list[dict[str, Tensor]]:
    mel = _first(config, "num_mel_bins input_feat_per_channel feature_size mel_bins input_dim input_size", 8)
    longest = 2 * _first(config, "max_source_positions", 32)
    out = []
    for length in (longest, 64, 3000):
        features = _noise(2, mel, length)
        ones = torch.ones(2, length, dtype=torch.long)
        masks = {"feature_attention_mask": ones, "input_features_mask": ones}
        out += [{"input_features": features, **masks}, {"input_features": features.mT.contiguous(), **masks}]
    return [*out, {"input_values": _noise(2, 1600), "padding_mask": torch.ones(2, 1600, dtype=torch.long)}]


def _rows(output: Any, config: Any) -> int:
    """How many embeddings a tower gives."""
    found = getattr(output, "pooler_output", None)
    found = found if found is not None else output if isinstance(output, Tensor | list | tuple) else output[0]
    if isinstance(found, list | tuple):
        return sum(part.numel() // part.shape[-1] for part in found)
    return found.numel() // found.shape[-1]


def _token(config: Any, kind: str, default: int) -> int:
    names = f"{kind}_token_id {kind}_token_index {kind}_token"
    return _first(config, names, default)


def _taken(function: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    names = inspect.signature(function).parameters
    return {name: value for name, value in arguments.items() if name in names}


def batches_for(model: Any) -> Iterator[dict[str, Tensor]]:
    """Tokens, and an image or a sound for each row, with as many places as its tower gives embeddings."""
    config, takes = model.config, inspect.signature(model.forward).parameters
    vision = getattr(config, "vision_config", None) or config
    audio = getattr(config, "audio_config", None) or getattr(config, "encoder_config", None) or config
    towers = [("image", form) for form in images(vision)] + [("audio", form) for form in sounds(audio)]
    for what, form in towers:
        heard = _taken(model.forward, form)
        if not {"pixel_values", "input_features", "input_values"} & heard.keys():
            continue
        count = _places(model, what, heard)
        if count is not None:
            yield _batch(model, heard, count, _token(config, what, IMAGE if what == "image" else AUDIO))
    if "input_ids" in takes:
        yield _batch(model, {}, 0, IMAGE)


def _places(model: Any, kind: str, heard: dict[str, Tensor]) -> int | None:
    """How many embeddings a tower gives; None where it reads another form, 0 where there is no tower."""
    inner = model.model if not hasattr(model, f"get_{kind}_features") and hasattr(model, "model") else model
    function = getattr(inner, f"get_{kind}_features", None)
    try:
        with torch.no_grad():
            return 0 if function is None else _rows(function(**heard), model.config)
    except Exception as e:  # noqa: BLE001  another form
        ERRORS.append(f"{kind} { ({k: tuple(v.shape) for k, v in heard.items()}) } {type(e).__name__}: {e}"[:200])
        return None


ERRORS: list[str] = []


def _batch(model: Any, heard: dict[str, Tensor], count: int, token: int) -> dict[str, Tensor]:
    ids = torch.randint(3, 90, (2, 6 + count // 2), generator=torch.Generator().manual_seed(1))
    ids[:, 1 : 1 + count // 2] = token
    batch: dict[str, Tensor] = {"input_ids": ids, **heard, "attention_mask": torch.ones_like(ids)}
    if heard and "input_ids" not in inspect.signature(model.forward).parameters:
        batch.pop("attention_mask")
    batch["mm_token_type_ids"] = batch["token_type_ids"] = (ids == token).long()
    batch["labels"] = ids.masked_fill(ids == token, -100)
    batch |= {"qformer_input_ids": ids[:, -4:].clone(), "aspect_ratio_ids": torch.ones(2, 1, dtype=torch.long)}
    batch["aspect_ratio_mask"] = torch.ones(2, 1, 1, dtype=torch.long)
    batch["cross_attention_mask"] = torch.ones(2, ids.shape[1], 1, 1, dtype=torch.long)
    batch["bbox"] = torch.ones(2, ids.shape[1], 4, dtype=torch.float64) / 4
    taken = _taken(model.forward, batch)
    if "decoder_input_ids" in inspect.signature(model.forward).parameters:
        taken["decoder_input_ids"] = ids[:, -5:].contiguous()
        if "labels" in taken and not count:
            taken["labels"] = ids[:, -5:].contiguous()
    return taken


def batch_for(model: Any) -> dict[str, Tensor]:
    """The first batch that the model computes with."""
    ERRORS.clear()
    for batch in batches_for(model):
        try:
            with torch.no_grad():
                model(**batch)
            return batch
        except Exception as e:  # noqa: BLE001  another form
            ERRORS.append(f"step { ({k: tuple(v.shape) for k, v in batch.items()}) } {type(e).__name__}: {e}"[:400])
    raise ValueError(f"no form of input suits {type(model).__name__}: {ERRORS}")


def found_in(model: Any) -> list[str]:
    """The linear layers whose rules are found."""
    rules = found(model, own_rules(model), vocabulary(model))
    linears = (name for name, module in model.named_modules() if is_linear(module))
    return [name for name in linears if rule_of(name, rules) is not None]


def verdict_of(model_type: str, degree: int = 2, **options: Any) -> Verdict:
    """What comes of a type. Raises if it differs from the whole, or most of what is found computes with no batch."""
    kind, config = class_for(model_type), config_of(model_type, CONFIG_MAPPING[model_type])
    whole = Whole.of(kind, config, batch_for(made(kind, config)))
    idle = [name for name in found_in(whole.model) if whole.gradients[f"{name}.weight"] is None]
    if 2 * len(idle) > len(found_in(whole.model)):
        raise AssertionError(f"a batch of {', '.join(whole.batch)} says nothing of {', '.join(idle)}")
    outcome = whole.compared(degree, **options)
    if isinstance(outcome, str):
        return Verdict(model_type, kind.__name__, False, outcome)
    apart, share = outcome
    if not apart < 1e-5:  # as in families.verdict
        raise AssertionError(f"a sharded {kind.__name__} differs from the whole by {apart:.0e}")
    return Verdict(model_type, kind.__name__, True, "works", share)


TITLE = "Found in the structure"


def section(rows: list[Verdict]) -> str:
    """The part of the page."""
    types, rows = types_with_heads(), [row for row in rows if row.works]
    works = types.keys() & (on_the_page("Work").keys() | {row.family for row in rows})
    lines = [f"| `{row.family}` | `{row.model}` | {row.share:.0%} |" for row in rows]
    small = [f"`{row.family}`" for row in rows if row.share > 0.65]
    return "\n".join(
        [
            f"## {TITLE}",
            "",
            f"Of {len(types)} model types with a language, sequence-to-sequence or image-text head, {len(works)} work.",
            "The rules of these are found by the sizes of their linear layers, and were compared with the whole, with",
            "pixels or sounds where they read some (`PYTHONPATH=tests python -m helpers.any_model --table`):",
            "",
            "| type | class | of a rank |",
            "| --- | --- | --- |",
            *lines,
            "",
            "Right, not sharded, with more than 65 % on each of two ranks: convolutions, tables of positions, and",
            f"what is read without a call stay whole in {', '.join(small)}.",
            "",
            f"Neither here nor under Work: {', '.join(f'`{name}`' for name in sorted(types.keys() - works))}.",
            "",
        ]
    )


def main() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    part = section([verdict_of(model_type) for model_type in sorted(COMPARED)])
    if "--table" in sys.argv:
        text = re.sub(rf"\n## {TITLE}\n.*?(?=\n## )", "", PAGE_FILE.read_text(), flags=re.S)
        before, mark, after = text.partition("\n## Refused\n")
        PAGE_FILE.write_text(f"{before}\n{part}{mark}{after}")
    else:
        sys.stdout.write(part)


if __name__ == "__main__":
    main()
