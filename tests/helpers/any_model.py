"""A tiny model of any type that transformers has with a language head, and a batch with what else it reads.

``PYTHONPATH=tests python -m helpers.any_model`` counts the types that work, and names the others;
with ``--table`` it writes the part of the page of families that has the types whose rules are found in the structure.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
import time
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto import modeling_auto as auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from helpers.families import (
    PAGE_FILE,
    SINGLE,
    TABLE,
    Verdict,
    Whole,
    config_of,
    described,
    made,
    on_the_page,
    step,
    table_row,
)
from tpcore_hf.plan.decisions import is_linear
from tpcore_hf.plan.found import COMPARED, found
from tpcore_hf.plan.model import own_rules, vocabulary
from tpcore_hf.plan.rules import REPLICATE, rule_of

HEADS = ("IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "SPEECH_SEQ_2_SEQ", "SEQ_TO_SEQ_CAUSAL_LM", "CAUSAL_LM")
TOKENS = {"image": 98, "audio": 97, "video": 96}
WIDE = {"kosmos-2"}  # its masks are of the default type, with the least number of the weights' type
NEARLY = 0.75  # a tower is more than the rest, of the linear layers that get a gradient


def types_with_heads() -> dict[str, str]:
    """The class of each ``model_type`` with one of these heads, the first that it has."""
    found: dict[str, str] = {}
    for head in HEADS:
        for model_type, name in getattr(auto, f"MODEL_FOR_{head}_MAPPING_NAMES").items():
            found.setdefault(model_type, name if isinstance(name, str) else name[0])
    return found


def compared_types() -> list[str]:
    """Those of which the configuration has a type of ``COMPARED``, which is another for a part of a model."""
    kinds = {name: getattr(class_for(name), "config_class", None) for name in types_with_heads()}
    found = (n for n, kind in kinds.items() if n in COMPARED or getattr(kind, "model_type", n) in COMPARED)
    return sorted({*found} - on_the_page("Work").keys())


def class_for(model_type: str) -> type[nn.Module]:
    return getattr(transformers, types_with_heads()[model_type])


def tiny(model_type: str) -> Any:
    """Its configuration. A tower has no head of its own, which no multimodal model reads."""
    config = config_of(model_type, getattr(class_for(model_type), "config_class", None) or CONFIG_MAPPING[model_type])
    for part in (getattr(config, name) for name in getattr(config, "sub_configs", ())):
        if getattr(part, "model_type", "").startswith("siglip"):
            part.vision_use_head = False
    if model_type.endswith("encoder-decoder"):
        config.decoder.is_decoder = config.decoder.add_cross_attention = True
    return config


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
    frames, grid = _first(config, "temporal_patch_size patch_temporal", 1), size // patch
    flat, area, row = grid * grid, channels * patch * patch, torch.tensor([[grid, grid]] * 2)
    thw = torch.tensor([[1, grid, grid]] * 2)
    rows = {"pixel_values": _noise(2 * flat, area * frames)}
    plain = {"pixel_values": _noise(2, channels, size, size), "high_res_pixel_values": _noise(2, channels, size, size)}
    tiled = {"pixel_values": _noise(2, 1, channels, size, size), "pixel_attention_mask": torch.ones(2, 1) > 0}
    sizes = {"image_sizes": torch.tensor([[size, size]] * 2)}
    padded = {"pixel_attention_mask": torch.ones(2, flat, dtype=torch.long), "spatial_shapes": row}
    pooled = {"image_token_pooling": torch.arange(2 * flat).view(-1, 4), "image_num_crops": torch.tensor([1, 1])}
    pooled["image_grids"] = torch.tensor([[grid // 2, grid // 2, 0, 0]] * 2)
    position = torch.stack(torch.meshgrid(torch.arange(grid), torch.arange(grid), indexing="xy"), -1).reshape(
        1, flat, 2
    )
    return [
        {**rows, "image_grid_thw": thw, "image_merge_sizes": torch.tensor([1, 1])},
        {"pixel_values": _noise(flat // 2, 2 * patch, 2 * patch, channels), "image_grid_thw": thw // 2 + (thw == 1)},
        {"pixel_values": _noise(2 * flat, channels, patch, patch), "image_grid_thw": thw},
        {"pixel_values": _noise(2 * flat, frames, channels, patch, patch), "image_grid_thw": thw},
        {"pixel_values": _noise(2 * flat, area * frames), "image_grid_hw": row},
        {"pixel_values": _noise(2, flat, area), **padded},
        {"pixel_values": _noise(2, flat, area), "image_position_ids": position.repeat(2, 1, 1)},
        {"pixel_values": _noise(1, channels, patch, patch * 2 * flat), "target_sizes": row},
        {"pixel_values": _noise(2, flat, area), **pooled},
        {**plain, **sizes},
        {**tiled, **sizes},
        {"pixel_values": _noise(2, 2, channels, size, size), **sizes},
        {
            "image_pixel_values": _noise(2, 2, channels, size, size),
            "image_attention_mask": torch.ones(2, 2, grid, grid, dtype=torch.long),
            **sizes,
            PLACES: torch.tensor(2 * (2 * (grid // 2) * (grid // 2 + 1) + 1)),
        },
        {"flattened_patches": torch.cat([row.new_ones(2, flat, 2), _noise(2, flat, area)], -1)},
        {"pixel_values": _noise(2, 1, _first(config, "max_num_tiles", 1), channels, size, size)},
        {"pixel_values": _noise(2 * flat, frames, size, size, channels)},
        {"pixel_values": _noise(2 * flat, frames, patch, patch, channels)},
        plain,
        tiled,
    ]


def sounds(config: Any, model: nn.Module) -> list[dict[str, Tensor]]:
    """Sounds of two rows, as their spectra and as waves, in each of the forms that towers read."""
    mel = _first(config, "num_mel_bins input_feat_per_channel feature_size mel_bins input_dim input_size", 8)
    towers = (m for name, m in model.named_modules() if re.search("audio|speech|encoder", name))
    ends = (getattr(m, "in_features", getattr(m, "in_channels", None)) for m in towers)
    mels = dict.fromkeys((mel, next((end for end in ends if end is not None and end > 1), mel)))
    longest, out = 2 * _first(config, "max_source_positions", 32), []
    for length, mel in ((length, mel) for length in dict.fromkeys((longest, 64, 200, 3000)) for mel in mels):
        features, ones = _noise(2, mel, length), torch.ones(2, length, dtype=torch.long)
        masks: dict[str, Tensor] = {"chunk_sample_lengths": torch.tensor([160 * length] * 2)}
        masks |= {"feature_attention_mask": ones, "input_features_mask": ones, "padding_mask": ones}
        out += [{"input_features": features, **masks}, {"input_features": features.mT.contiguous(), **masks}]
        out.append({"input_features": features.mT.contiguous()})
        out.append({"input_features": features.mT.contiguous(), "input_features_mask": ones > 0})
        steps = -(-length // _first(config, "time_reduction", 1))
        audio: dict[str, Tensor] = {"audio_input_features": features.mT.contiguous(), PLACES: torch.tensor(2 * steps)}
        out.append({**audio, "audio_embed_sizes": torch.tensor([steps] * 2)})
    for shape in ((2, 1600), (2, 1, 1600), (2, 3840), (2, 1, 12800), (2, 12800)):
        out.append({"input_values": _noise(*shape), "padding_mask": torch.ones(2, shape[-1], dtype=torch.long)})
    return out


def _rows(output: Any, config: Any) -> int:
    """How many embeddings a tower gives."""
    if getattr(output, "deepstack_features", None) and isinstance(output.deepstack_features[0], tuple):
        output = output.deepstack_features[0][1]  # of the first block that reads some
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


PLACES = "how many embeddings a tower without a function of its own gives"
HEARD = {"pixel_values", "pixel_values_videos", "input_features", "input_values", "flattened_patches"}
HEARD |= {"image_pixel_values", "audio_input_features"}
Heard = tuple[str, dict[str, Tensor], int]


def batches_for(model: Any) -> Iterator[dict[str, Tensor]]:
    """Tokens, and an image and a sound for each row, with as many places as its tower gives embeddings."""
    config = model.config
    vision = getattr(config, "vision_config", None) or config
    audio = getattr(config, "audio_config", None) or getattr(config, "encoder_config", None) or config
    seen = [heard for form in images(vision) if (heard := _heard(model, "image", form))]
    spoken = [heard for form in sounds(audio, model) if (heard := _heard(model, "audio", form))]
    frames = {"pixel_values_videos": _noise(2, 8, 3, *[_first(vision, "image_size", 32)] * 2)}
    spoken += [heard for form in (frames,) if (heard := _heard(model, "video", form))]
    if hasattr(model, "get_video_features") and not hasattr(model, "get_image_features"):
        seen = [heard for form in images(vision) if (heard := _heard(model, "video", form))]
    both = [[first, heard] for first in seen[:2] for heard in spoken[:2]]
    for towers in (*both, *([heard] for heard in (*seen, *spoken)), []):
        if towers or "input_ids" in inspect.signature(model.forward).parameters:
            yield from _batches(model, towers)


def _heard(model: Any, kind: str, form: dict[str, Tensor]) -> Heard | None:
    """What ``model`` takes of ``form``, and how many embeddings a tower gives of it, 0 where there is no tower."""
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    name = f"get_{kind}_features"
    inner = model.model if not hasattr(model, name) and hasattr(model, "model") else model
    if not hasattr(inner, name) and hasattr(getattr(inner, "encoder", None), name):  # which all other names reach
        inner = inner.encoder
        taken = _taken(inner.forward, form)
    else:
        taken = _taken(model.forward, form)
    heard = {n: t.to(dtype) if t.is_floating_point() else t for n, t in taken.items()}
    if not HEARD & heard.keys():
        return None
    function = getattr(inner, name, None)
    if function is None:
        return kind, heard, int(form.get(PLACES, 0))
    for length in (8, 32) if "input_ids" in inspect.signature(function).parameters else (8,):
        ids = torch.full((2, length), _token(model.config, kind, TOKENS[kind]))
        more = _taken(function, {"input_ids": ids, "qformer_input_ids": ids[:, -4:]})
        try:
            with torch.no_grad():
                return kind, heard, _rows(function(**heard, **more), model.config)
        except Exception as e:  # noqa: BLE001  another form
            ERRORS.append(f"{kind} { ({k: tuple(v.shape) for k, v in heard.items()}) } {type(e).__name__}: {e}"[:200])
    return None


ERRORS: list[str] = []


def _batches(model: Any, towers: list[Heard]) -> Iterator[dict[str, Tensor]]:
    """With tokens as many as models of blocks and windows take, with a mask and without one."""
    count = sum(count for _, _, count in towers) // 2
    if towers and not count and "input_features" in towers[0][1]:  # of a tower that cannot be asked
        places = max(towers[0][1]["input_features"].shape[1:]) // 2
        yield _batch(model, [(kind, heard, places) for kind, heard, _ in towers], 6 + places // 2, True)
    for length in (6, 8, 64) if not towers else (6, 0) if count else (6,):
        batch = _batch(model, towers, length + count, bool(length))
        yield batch
        yield from _of_books(model, batch) if not towers else ()
        if count and "decoder_input_ids" in batch:
            yield batch | {"labels": batch["decoder_input_ids"]}
            yield {name: value for name, value in batch.items() if name != "labels"}
        if not towers and "attention_mask" in batch:
            yield {name: value for name, value in batch.items() if name != "attention_mask"}


def _of_books(model: Any, batch: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Tokens of several books of codes, in the batch or last."""
    books = getattr(model.config, "num_codebooks", None) or getattr(
        getattr(model.config, "decoder_config", None), "num_channels", None
    )
    if books:
        rest = {name: value for name, value in batch.items() if name not in ("labels", "attention_mask")}
        yield rest | {"input_ids": batch["input_ids"].repeat_interleave(books, 0)}
        yield rest | {"input_ids": batch["input_ids"][..., None].repeat(1, 1, books + 1)}
        if "decoder_input_ids" in batch:
            decoded = batch["decoder_input_ids"][..., None].repeat(1, 1, books)
            yield {"input_ids": batch["input_ids"], "decoder_input_ids": decoded}


def _batch(model: Any, towers: list[Heard], length: int, placed: bool) -> dict[str, Tensor]:
    ids = torch.randint(3, 90, (2, length), generator=torch.Generator().manual_seed(1))
    batch, at = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, 1
    for kind, heard, count in towers:
        token = _token(model.config, kind, TOKENS[kind])
        ids[:, at : at + count // 2 * placed] = token
        batch, at = batch | heard, at + count // 2 * placed
    places = torch.zeros_like(ids)
    places[:, 1:at] = 1
    if towers and "input_ids" not in inspect.signature(model.forward).parameters:
        batch.pop("attention_mask")
    batch["mm_token_type_ids"] = batch["token_type_ids"] = batch["image_embeds_position_mask"] = places
    batch["labels"] = ids.masked_fill(places == 1, -100)
    batch |= {"qformer_input_ids": ids[:, -4:].clone(), "aspect_ratio_ids": torch.ones(2, 1, dtype=torch.long)}
    tiles = _first(getattr(model.config, "vision_config", None), "max_num_tiles", 1)
    batch["aspect_ratio_mask"] = torch.ones(2, 1, tiles, dtype=torch.long)
    batch["cross_attention_mask"] = torch.ones(2, length, 1, tiles, dtype=torch.long)
    batch.setdefault("image_attention_mask", torch.ones(2, length, 1, dtype=torch.long))
    if hasattr(model.config, "cross_attention_hidden_size"):
        batch["encoder_hidden_states"] = _noise(2, 5, model.config.cross_attention_hidden_size or 32)
    batch |= {"protein_input_ids": ids, "protein_attention_mask": torch.ones_like(ids)}
    if "actions" in inspect.signature(model.forward).parameters:  # of a robot
        batch |= {"state": _noise(2, model.config.max_state_dim), "timestep": _noise(2).abs()}
        shape = (2, model.config.chunk_size, model.config.max_action_dim)
        batch |= {"noise": _noise(*shape), "actions": _noise(*shape)}
    batch["bbox"] = torch.ones(2, length, 4, dtype=torch.float64) / 4
    taken = {name: value for _, heard, _ in towers for name, value in heard.items()} | _taken(model.forward, batch)
    if "decoder_input_ids" in inspect.signature(model.forward).parameters:
        taken["decoder_input_ids"] = ids[:, -5:].contiguous()
        if "labels" in taken and at == 1:
            taken["labels"] = ids[:, -5:].contiguous()
    return taken


def batch_for(model: Any) -> dict[str, Tensor]:
    """The first batch with which nearly all of what is sharded computes, or most."""
    ERRORS.clear()
    best, most, names = None, -1, sharded_in(model)
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    for wide in batches_for(model):
        batch = {n: t.to(dtype) if t.is_floating_point() else t for n, t in wide.items()}
        try:
            reached = _reached(model, batch, names)
        except Exception as e:  # noqa: BLE001  another form
            ERRORS.append(f"step { ({k: tuple(v.shape) for k, v in batch.items()}) } {type(e).__name__}: {e}"[:400])
            continue
        best, most = (batch, reached) if reached > most else (best, most)
        if reached >= NEARLY * len(names):
            break
    if best is None:
        raise ValueError(f"no form of input suits {type(model).__name__}: {ERRORS}")
    return best


def _reached(model: Any, batch: dict[str, Tensor], names: list[str]) -> int:
    """How many of the layers ``names`` get a gradient. ValueError where one is not finite."""
    loss, _ = step(model, batch)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    if not all(value.isfinite().all() for value in (loss, *gradients.values())):
        raise ValueError("values that are not finite")
    return sum(f"{name}.weight" in gradients for name in names)


def sharded_in(model: Any) -> list[str]:
    """The linear layers of the family's rules and of those that are found."""
    own = own_rules(model)
    rules = found(model, own, vocabulary(model)) | own
    weights = dict(model.named_parameters()).keys()  # of those that are tied the first alone
    linears = [name for name, m in model.named_modules() if is_linear(m) and f"{name}.weight" in weights]
    return [name for name in linears if rule_of(name, rules) not in (None, REPLICATE)]


def verdict_of(model_type: str, degree: int = 2, **options: Any) -> Verdict:
    """What comes of a type. Raises if it differs from the whole, or a tower computes with no batch."""
    if model_type in WIDE and torch.get_default_dtype() != torch.float64:
        torch.set_default_dtype(torch.float64)
        try:
            return verdict_of(model_type, degree, **options)
        finally:
            torch.set_default_dtype(torch.float32)
    kind, config = class_for(model_type), tiny(model_type)
    whole = Whole.of(kind, config, batch_for(made(kind, config)))
    names = sharded_in(whole.model)
    idle = [name for name in names if whole.gradients[f"{name}.weight"] is None]
    if len(names) - len(idle) < NEARLY * len(names):
        raise AssertionError(f"a batch of {', '.join(whole.batch)} says nothing of {', '.join(idle)}")
    outcome = whole.compared(degree, **options)
    if isinstance(outcome, str):
        return Verdict(model_type, kind.__name__, False, outcome)
    apart, share = outcome
    if not apart < (1e-4 if model_type in SINGLE else 1e-5):  # as in families.verdict
        raise AssertionError(f"a sharded {kind.__name__} differs from the whole by {apart:.0e}")
    return Verdict(model_type, kind.__name__, True, "works", share)


TITLE = "Found in the structure"
LEFT = {
    "it has no forward; the models inside it have one": "qwen2_5_omni qwen3_omni_moe",
    "its own forward ends in an error": "llama4",
    "it reads the keys and values of another model": "gemma4_assistant gemma4_unified_assistant",
    "a sharded one differs from the whole": "reformer",
}
"""By reason the types with such a head that are not among those that work."""
WITHOUT_FORWARD = 3
"""Of these, the ones that compute nothing even whole."""


def lacking(model_type: str) -> bool:
    """Whether its tower is one of timm, which is not installed."""
    return model_type in ("fast_vlm", "gemma3n", "perception_lm") and find_spec("timm") is None


def known() -> dict[str, str]:
    """By type the rows that the page has."""
    text = PAGE_FILE.read_text().partition(f"\n## {TITLE}\n")[2].partition("\n## ")[0]
    return {row.split("`")[1]: row for row in text.splitlines() if row.startswith("| `")}


def section(rows: dict[str, str]) -> str:
    """The part of the page."""
    types = types_with_heads()
    works = types.keys() & (on_the_page("Work").keys() | rows.keys())
    whole = len(types) - WITHOUT_FORWARD
    return "\n".join(
        [
            f"## {TITLE}",
            "",
            f"Of {len(types)} model types with a language, sequence-to-sequence or image-text head {len(works)} work, "
            f"{len(works) / len(types):.0%}; {len(works) / whole:.0%} of the {whole} that compute anything unsharded.",
            "The rules of these are found by the sizes of their linear layers, and were compared with the whole, with",
            "pixels or sounds where they read some (`PYTHONPATH=tests python -m helpers.any_model --table`).",
            "",
            *TABLE,
            *(rows[name] for name in sorted(rows)),
            "",
            "Neither here nor under Work:",
            "",
            *(f"- {why}: {', '.join(f'`{name}`' for name in sorted(names.split()))}" for why, names in LEFT.items()),
            "",
        ]
    )


def write(rows: dict[str, str]) -> None:
    text = re.sub(rf"\n## {TITLE}\n.*?(?=\n## )", "", PAGE_FILE.read_text(), flags=re.S)
    before, mark, after = text.partition("\n## Refused\n")
    PAGE_FILE.write_text(f"{before}\n{section(rows)}{mark}{after}")


def main() -> None:
    """Compares every type, or those that are named. ``--table`` writes the page after each, so that what was stopped
    goes on with ``--missing``, the types that have no row. ``--columns`` renews the other columns alone."""
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    options = {word for word in sys.argv[1:] if word.startswith("--")}
    rows = {name: row for name, row in known().items() if name in compared_types()}
    named = [word for word in sys.argv[1:] if word not in options] or [n for n in compared_types() if not lacking(n)]
    for number, name in enumerate(named, 1):
        if "--missing" in options and name in rows:
            continue
        started, kind = time.monotonic(), class_for(name)
        shares = re.findall(r"(\d+)%", rows.get(name, "")) if "--columns" in options else []
        found = Verdict(name, "", True, "", int(shares[0]) / 100) if shares else verdict_of(name)
        assert found.works, found.text
        rows[name] = table_row(described(found, kind, tiny(name)))
        took = f"{time.monotonic() - started:.0f} s"
        sys.stderr.write(f"{number} of {len(named)}, {took}: {rows[name]}\n")
        if "--table" in options:
            write(rows)
    if "--table" not in options:
        sys.stdout.write(section(rows))


if __name__ == "__main__":
    main()
