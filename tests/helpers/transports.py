"""Both roads of the cpu_gloo backend: a fixture named ``pool`` for modules whose tests run on each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from helpers.rank_pool import RankPool
from tpcore.processes.transfer import Outcome

SHARED, GLOO = {"TPCORE_SHM": "1"}, {"TPCORE_SHM": "0"}


class OverRoad:
    """A pool whose runs take one road."""

    def __init__(self, pool: RankPool, road: Mapping[str, str]) -> None:
        self._pool, self._road = pool, road
        self.shared = road is SHARED

    def run(self, *args: Any, env: Mapping[str, str] | None = None, **options: Any) -> list[Any]:
        return self._pool.run(*args, env={**self._road, **(env or {})}, **options)

    def outcomes(self, *args: Any, env: Mapping[str, str] | None = None, **options: Any) -> list[Outcome]:
        return self._pool.outcomes(*args, env={**self._road, **(env or {})}, **options)


@pytest.fixture(name="pool", params=[SHARED, GLOO], ids=["shared", "gloo"])
def each_road(request: pytest.FixtureRequest, pool: RankPool) -> OverRoad:
    return OverRoad(pool, request.param)
