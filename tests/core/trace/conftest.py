"""Traced models on the disk, made once for all tests that serve one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from models import DYNAMIC, Encoder, batch

from tpcore.settings import CHECK, changed
from tpcore.trace import TensorParallelModel, parallel_model_load, parallel_model_save, parallel_model_trace


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is served from processes of its own runs in one xdist worker."""
    for item in items:
        if {"artifact", "served"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.xdist_group("serving"))
            item.add_marker(pytest.mark.processes)


@pytest.fixture(scope="session")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An Encoder at tp=2, as parallel_model_trace and parallel_model_save make it."""
    folder = tmp_path_factory.mktemp("traced") / "encoder"
    with changed({CHECK.name: CHECK.default}):
        model = parallel_model_trace(
            lambda: Encoder(True),
            batch(1, 8),
            tp_degree=2,
            backend="cpu_gloo",
            dynamic_shapes={"ids": DYNAMIC, "mask": DYNAMIC},
        )
    parallel_model_save(model, folder)
    model.close()
    return folder


@pytest.fixture(scope="module")
def served(artifact: Path) -> Iterator[TensorParallelModel]:
    """Shared by tests that leave it as it was."""
    with parallel_model_load(artifact, timeout=60) as model:
        yield model
