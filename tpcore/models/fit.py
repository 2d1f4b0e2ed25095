"""The check that a model fits a tensor-parallel degree: one error for all misfits, before any change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .plan import wildcard


@dataclass(frozen=True)
class Need:
    """``count`` indivisible units (heads, features) that a module's cut has to distribute evenly."""

    name: str
    count: int
    what: str
    shared: bool = False
    """Whether several ranks may have the same unit if there are more ranks than units."""

    def __str__(self) -> str:
        return f"{wildcard(self.name)} has {self.count} {self.what.removesuffix('s' * (self.count == 1))}"

    def fits(self, n: int) -> bool:
        return self.count % n == 0 or (self.shared and n % self.count == 0)


def check_fit(model: str, needs: Sequence[Need], tp: int) -> None:
    """Raise a ValueError that names every misfit at this degree and the degrees that fit."""
    misfits = {str(need) for need in needs if not need.fits(tp)}
    if not misfits:
        return
    largest = max(need.count for need in needs)
    fitting = [n for n in range(1, min(largest, 1024) + 1) if all(need.fits(n) for need in needs)]
    raise ValueError(
        f"tp={tp} does not fit {model}: {'; '.join(sorted(misfits))}. Degrees that fit: {', '.join(map(str, fitting))}"
    )
