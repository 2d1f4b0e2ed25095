"""What all tests share: one pool of processes, checked collectives, one thread per process, three tiers."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

# before torch is imported here or in a worker
if find_spec("tpcore_explain"):  # by which a run is checked; the core's tests run without it too
    os.environ["TPCORE_CHECK"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from helpers.rank_pool import RankPool
from helpers.selection import XLA, Selection
from hypothesis import HealthCheck, settings

import tpcore
from tpcore.settings import CHECK, changed
from tpcore.testing import run_ranks

torch.set_num_threads(1)
# tests send it; jobs that a shell starts in the background ignore it, and so would all that they start
signal.signal(signal.SIGINT, signal.default_int_handler)

# no assertion on time, and the same examples on every run
settings.register_profile("tpcore", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tpcore")

collect_ignore = [] if XLA else ["xla"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--limit", action="store_true", help="fail where a test takes long and is not marked slow")
    parser.addoption("--first", action="store_true", help="of each test's parameters the first ones alone")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Selection(config))
    if not config.pluginmanager.hasplugin("xdist"):
        config.addinivalue_line("markers", "xdist_group(name): tests that share one worker under pytest-xdist")


@pytest.hookimpl(tryfirst=True)  # xdist and -m read the marks in their own
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests of one module that use the pool run in one xdist worker (--dist loadgroup), on one pool.

    A class or a module says by ``quick`` which points of its products are not slow.
    """
    for item in items:
        params = getattr(getattr(item, "callspec", None), "params", {})
        if "pool" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group(f"pool of {item.path.name}"))
            item.add_marker(pytest.mark.processes)
        quick = getattr(getattr(item, "cls", None) or getattr(item, "module", None), "quick", None)
        if quick is not None and not quick(getattr(item, "originalname", ""), params):
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Modules and tests stay to the end: collections of garbage, of which tests make many, pass over them."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Four processes over gloo: ``pool.run(Mesh({"tp": 2}), fn, *args)``."""
    with RankPool(4, grace=120) as ranks:  # beside other work, a rank was seen to import for a minute
        yield ranks


@pytest.fixture(scope="module")
def default_checks() -> Iterator[None]:
    """Interpreters that are started check what a user's do: those of checked runs import the compiler first."""
    with changed({CHECK.name: CHECK.default}):
        yield


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Nothing is compared in the first calls: for what is to see other data later."""
    with changed({CHECK.name: "off"}):
        yield


@pytest.fixture
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """No waiting for the disk: where a process ends, the system's cache outlives it."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture
def ranks() -> Callable[..., list[Any]]:
    """``ranks(mesh, fn, *args)`` calls ``fn(ctx, *args)`` on every rank."""
    return lambda mesh, fn, *args: run_ranks(mesh, lambda ctx: fn(ctx, *args))


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No launcher's environment, and nothing left initialized."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TPCORE_BACKEND", "TPCORE_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)
    yield
    left = tpcore.is_initialized()
    if left:
        tpcore.shutdown()
    assert not left
