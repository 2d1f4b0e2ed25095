"""What vLLM and SGLang publish of themselves, written into the table that ``tpcore export`` reads.

    pip download --no-deps --dest wheels vllm sglang
    python -m benchmarks.engines wheels/*.whl

Read from the files, of which nothing is imported: architectures, quantizations and LoRA ranks. ``lacks``, ``defaults``,
``adapter``, ``lora_refused`` and ``transformers`` are in no list, and stay as they are.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zipfile import ZipFile

NOT_OF_FILES = {"online", "unquant", "nvfp4_online", "mlx_q4", "mlx_q8"}
"""Quantizations that an engine makes itself, or with no kernels for a server's devices."""
TABLE = Path(__file__).parents[1] / "extensions" / "hf" / "tpcore_hf" / "engines" / "engines.json"


def value_of(source: str, name: str) -> Any:
    """What is assigned to ``name``: a literal's value; of a mapping to something else, its keys."""
    for node in ast.walk(ast.parse(source)):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if name not in [getattr(target, "id", None) for target in targets] or not getattr(node, "value", None):
            continue
        value: Any = node.value  # type: ignore[attr-defined]
        value = value.slice if isinstance(value, ast.Subscript) else value  # Literal[...]
        try:
            return ast.literal_eval(value)
        except ValueError:
            return [key.value for key in value.keys if isinstance(key, ast.Constant)]
    raise ValueError(f"no module assigns {name} as it did")


def entry_classes(wheel: ZipFile, folder: str) -> Iterator[str]:
    """The names in the ``EntryClass`` of the modules under ``folder``."""
    for path in wheel.namelist():
        if not path.startswith(folder) or not path.endswith(".py"):
            continue
        for node in ast.parse(wheel.read(path)).body:
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "EntryClass":
                values = node.value.elts if isinstance(node.value, ast.List | ast.Tuple) else [node.value]
                yield from (value.id for value in values if isinstance(value, ast.Name))


def vllm(wheel: ZipFile) -> dict[str, Any]:
    registry = wheel.read("vllm/model_executor/models/registry.py").decode()
    kinds = re.findall(r"\*\*(_\w+_MODELS)", registry[registry.index("_VLLM_MODELS = {") :].partition("}")[0])
    through = {*value_of(registry, "_TRANSFORMERS_SUPPORTED_MODELS")}
    unserved = {"_SPECULATIVE_DECODING_MODELS", "_TRANSFORMERS_SUPPORTED_MODELS", "_TRANSFORMERS_BACKEND_MODELS"}
    own = {name for kind in kinds if kind not in unserved for name in value_of(registry, kind)}
    quantization = wheel.read("vllm/model_executor/layers/quantization/__init__.py").decode()
    return {
        "own": sorted(own - through),
        "through": sorted(through),
        "gone": value_of(registry, "_PREVIOUSLY_SUPPORTED_MODELS"),
        "quantization": sorted({*value_of(quantization, "method_to_config")} - NOT_OF_FILES),
        "not_float16": sorted(value_of(wheel.read("vllm/config/model.py").decode(), "_FLOAT16_NOT_SUPPORTED_MODELS")),
        "lora_ranks": [*value_of(wheel.read("vllm/config/lora.py").decode(), "MaxLoRARanks")],
    }


def sglang(wheel: ZipFile) -> dict[str, Any]:
    choices = wheel.read("sglang/srt/arg_groups/choices.py").decode()
    methods = wheel.read("sglang/srt/layers/quantization/__init__.py").decode()
    quantization = {*value_of(choices, "QUANTIZATION_CHOICES"), *value_of(methods, "BASE_QUANTIZATION_METHODS")}
    own = {*entry_classes(wheel, "sglang/srt/models/")}
    return {
        "own": sorted(name for name in own if not name.startswith("Transformers")),  # its backend, no architecture
        "quantization": sorted(quantization - NOT_OF_FILES),
    }


def written(table: dict[str, dict[str, Any]]) -> str:
    """JSON with as many names to a line as it holds."""
    parts = []
    for name, entries in table.items():
        lines = []
        for key, value in entries.items():
            text = json.dumps(value, ensure_ascii=False)
            if len(text) > 110:
                inner = textwrap.fill(text[1:-1], 112, break_long_words=False, break_on_hyphens=False)
                text = f"{text[0]}\n{textwrap.indent(inner, ' ' * 6)}\n    {text[-1]}"
            lines.append(f"    {json.dumps(key)}: {text}")
        parts.append(f"  {json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n  }")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("wheels", nargs="+", type=Path)
    parser.add_argument("--table", type=Path, default=TABLE)
    options = parser.parse_args()
    table = json.loads(options.table.read_text())
    for path in options.wheels:
        name, version = path.name.split("-")[:2]
        with ZipFile(path) as wheel:
            found = {"vllm": vllm, "sglang": sglang}[name](wheel)
        before = table[name]
        found |= {"version": version, "source": before["source"].replace(before["version"], version)}
        for key in sorted(key for key in found if found[key] != before[key]):
            print(f"{name} {version}: {key} differs: {found[key]!s:.500}")
        table[name] = before | found
    options.table.write_text(written(table))


if __name__ == "__main__":
    main()
