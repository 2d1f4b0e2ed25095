"""pytest's plugin: ``@pytest.mark.tpcore(tp=[1, 2, 4])`` and the fixture ``ranks``.

A module of its own beside tpcore: pytest imports it in every run, and imports torch by it in none.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "tpcore(**axes): meshes of the fixture `ranks`: a size or a list of sizes for each axis"
    )


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tpcore", "the conformance kit of tpcore's backends")
    group.addoption("--kit-quick", action="store_true", help="a short run: few drawn calls, no test that takes long")
    group.addoption("--kit-seed", type=int, metavar="N", help="draw the calls that a failure's message names again")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    mark = metafunc.definition.get_closest_marker("tpcore")
    if mark is None:
        return
    if mark.args or not mark.kwargs or "ranks" not in metafunc.fixturenames:
        pytest.fail(
            f"{metafunc.definition.nodeid}: a test with @pytest.mark.tpcore(tp=[1, 2, 4]) takes the fixture "
            "`ranks` and calls ranks(fn); axes have names",
            pytrace=False,
        )
    sizes = [size if isinstance(size, list | tuple) else [size] for size in mark.kwargs.values()]
    meshes = [dict(zip(mark.kwargs, chosen, strict=True)) for chosen in product(*sizes)]
    names = ["-".join(f"{axis}{size}" for axis, size in mesh.items()) for mesh in meshes]
    metafunc.parametrize("ranks", meshes, indirect=True, ids=names)


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    """``ranks(fn, *args)`` calls ``fn(ctx, *args)`` on every rank of the mark's mesh, each a thread; results
    in rank order."""
    axes = getattr(request, "param", None)
    if axes is None:
        pytest.fail("the fixture `ranks` needs @pytest.mark.tpcore(tp=[1, 2, 4]) on the test", pytrace=False)
    from tpcore import Mesh
    from tpcore.testing import run_ranks

    return partial(run_ranks, Mesh(axes))
