"""A page to play with: the fastest plans of other numbers of devices, examples and tokens, beside those asked for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .reduced import Reduced
from .search import MeshPlan, plan

_SHOWN = 10
_DEVICES, _BATCHES, _TOKENS = (0.25, 0.5, 1, 2, 4), (0.25, 0.5, 1, 2, 4), (0.5, 1, 2)


def save_page(path: Path, asked: MeshPlan, target: str, options: dict[str, Any], tell: Callable[[str], None]) -> None:
    """Write one file without links. ``options``: of ``plan``, for which ``asked`` came. ``tell`` takes what is done."""
    limits = asked.limits
    sizes = {
        "devices": _near(limits.devices, _DEVICES),
        "batch": _near(limits.batch, _BATCHES),
        "seq_len": _near(limits.seq_len, _TOKENS),
    }
    plans = {}
    for tokens in sizes["seq_len"]:
        tell(f"steps of {tokens} tokens are recorded")
        model = Reduced(target, tokens, limits.dtype)  # once for all numbers of devices and examples
        for devices in sizes["devices"]:
            for batch in sizes["batch"]:
                given = {"devices": devices, "batch": batch, "seq_len": tokens}
                try:
                    found = _entry(plan(model, **{**options, **given}))
                except ValueError as e:  # more tokens than the model has positions for, say
                    found = {"rows": [], "fit": 0, "refused": [[str(e), 1]]}
                plans[f"{devices}/{batch}/{tokens}"] = found
    document = {
        "model": asked.model,
        "machine": asked.machine.name,
        "limit": limits.memory,
        "dtype": str(limits.dtype).removeprefix("torch."),
        "asked": {name: getattr(limits, name) for name in sizes},
        **sizes,
        "plans": plans,
    }
    text = json.dumps(document, separators=(",", ":")).replace("<", "\\u003c")  # a name may not end the script
    path.write_text(Path(__file__).with_name("page.html").read_text().replace("DATA", text, 1))


def _near(value: int, factors: tuple[float, ...]) -> list[int]:
    return sorted({max(int(value * factor), 1) for factor in factors})


def _entry(plans: MeshPlan) -> dict[str, Any]:
    rows = [{"mesh": str(row.choice), "seconds": row.seconds, "memory": row.memory} for row in plans.rows[:_SHOWN]]
    refused = sorted(plans.refused.items(), key=lambda item: -item[1])[:_SHOWN]
    return {"rows": rows, "fit": len(plans.rows), "refused": refused}
