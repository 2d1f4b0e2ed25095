"""Which versions of other libraries were tested: said of all others, once, by commands and by the first call."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from helpers.hf import llama
from typer.testing import CliRunner

import tpcore
from tpcore import Mesh, extras
from tpcore.backend.registry import backend_class
from tpcore.cli.app import app
from tpcore.testing import run_ranks


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Versions that are told instead of those installed."""
    versions: dict[str, str] = {}
    real = extras.version
    monkeypatch.setattr(extras, "version", lambda name: versions.get(name) or real(name))
    for told in (extras.untested, extras.tell_untested):
        told.cache_clear()
    yield versions
    for told in (extras.untested, extras.tell_untested):
        told.cache_clear()


def test_what_is_installed_here_was_tested(installed: dict[str, str]) -> None:
    assert [extras.untested(name) for name in ("hf", "peft")] == [(), ()]


@pytest.mark.parametrize(
    ("version", "inside"),
    [("5.17.0", True), ("5.24.3", True), ("5.24.0+cpu", True), ("5.16.9", False), ("5.25.0", False), ("6.0", False)],
)
def test_the_range_is_that_of_the_metadata(installed: dict[str, str], version: str, inside: bool) -> None:
    installed["transformers"] = version
    want = f"transformers {version} was not tested with tpcore[hf], which was with transformers >=5.17, <5.25: "
    assert extras.untested("hf") == (() if inside else (want + "pip install 'tpcore[hf]' installs a version that was",))


def test_the_commands_and_the_first_call_say_it_once(
    installed: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    installed["transformers"] = "5.99.0"
    for command in ("doctor", "backends"):
        assert "transformers 5.99.0 was not tested with tpcore[serve]" in CliRunner().invoke(app, [command]).output
    for _ in range(2):
        run_ranks(Mesh({"tp": 1}), lambda ctx: tpcore.parallelize(llama()))
    said = [r.getMessage() for r in caplog.records if "was not tested" in r.getMessage()]
    assert said == [*extras.untested("hf")]


@pytest.mark.parametrize(
    ("name", "there"),
    [
        ("torch", True),
        ("torch.nn", True),
        ("stand_in", False),
        ("stand_in.core.model", False),
        ("nowhere.at.all", False),
    ],
)
def test_what_a_script_puts_in_the_place_of_a_module_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, name: str, there: bool
) -> None:
    monkeypatch.setitem(sys.modules, "stand_in", ModuleType("stand_in"))  # its __spec__ is None
    assert (extras.module_spec(name) is not None) == there
    monkeypatch.setitem(sys.modules, "torch_xla", ModuleType("torch_xla"))
    reason = backend_class("neuron").unavailable()
    assert reason is not None
    assert "torch_xla is not installed" in reason


def test_a_package_that_misses_another_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "half.py").write_text("import what_is_missing")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="what_is_missing"):
        extras.module_spec("half.inner")
