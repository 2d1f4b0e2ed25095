"""Parameters of which torch's own parallelism has made other ones since an optimizer was made."""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterable
from itertools import chain
from typing import Any

from torch import Tensor, nn

from .parameters import names_of


def check_not_replaced(groups: Iterable[dict[str, Any]], with_gradient: Collection[Tensor]) -> None:
    """Raise ValueError for parameters that no module has any more while a module has a DTensor of the same
    full shape: ``fully_shard`` made other Parameters, and an optimizer of the old ones would change nothing. If a
    parameter is not in ``with_gradient`` it looks at all modules of the process, for tens of milliseconds."""
    groups = list(groups)
    parameters = chain.from_iterable(group["params"] for group in groups)
    named = zip(names_of(groups), parameters, strict=True)
    without = {name: p for name, p in named if p.requires_grad and p not in with_gradient}
    # by name, as the core does not import torch's own parallelism; without the class there is no such tensor
    if not without or not any(cls.__name__ == "DTensor" for cls in Tensor.__subclasses__()):
        return
    owned: set[int] = set()
    cut: set[tuple[int, ...]] = set()
    for found in gc.get_objects():
        if issubclass(type(found), nn.Module):
            for p in list(vars(found).get("_parameters", {}).values()):
                owned.add(id(p))
                if any(cls.__name__ == "DTensor" for cls in type(p).__mro__):
                    cut.add(tuple(p.shape))
    lost = [name for name, p in without.items() if id(p) not in owned and tuple(p.shape) in cut]
    if lost:
        more = f" and {len(lost) - 5} more" if lost[5:] else ""
        raise ValueError(
            f"parameters {', '.join(lost[:5])}{more} of this optimizer are in no module any more, and got no "
            "gradient: fully_shard (FSDP2) or torch's tensor parallelism has put DTensors in their place "
            "since it was made, so it would train nothing. Step such a model by torch's own optimizer, made "
            "after fully_shard; or cut it with tpcore's layers, and its optimizer's state with tpcore.Zero1"
        )
