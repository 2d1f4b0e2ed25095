"""Backends as plugins, found through real distributions on the path."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.distributions import installed

import tpcore
from tpcore.backend.registry import backend_class, load_backend
from tpcore.errors import BackendError
from tpcore.testing.kit.launched import Launched

pytestmark = pytest.mark.usefixtures("alone")
GOOD = """
    from tpcore.backend import hookimpl
    from tpcore.testing.threads import ThreadBackend, ThreadWorld

    class Mine(ThreadBackend):
        def __init__(self):
            super().__init__(0, ThreadWorld(1))

    @hookimpl
    def tpcore_backend():
        return Mine
"""
PROBE = """
    def unavailable():
        {}

    Mine.unavailable = staticmethod(unavailable)
"""
Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Put a distribution with one backend on the path, as an installer would."""

    def put(name: str, code: str, distribution: str = "") -> None:
        place = tmp_path / (distribution or name)
        modules.append(installed(place, name, code, distribution, "1.2"))
        monkeypatch.syspath_prepend(place)

    modules: list[str] = []
    yield put
    for module in modules:
        sys.modules.pop(module, None)


def test_a_third_partys_backend_needs_only_to_be_installed(install: Install) -> None:
    install("mine", GOOD)
    (info,) = [b for b in tpcore.backend.backends() if b.name == "mine"]
    assert (info.distribution, info.version, info.module) == ("tpcore-mine", "1.2", "tpcore_mine")
    assert (info.usable, info.reason) == (True, "")
    ctx = tpcore.init("mine")
    assert type(ctx.backend).__name__ == "Mine"
    tpcore.shutdown()


def test_a_backend_that_stays_alone_under_a_launcher_is_told_by_the_kit(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("mine", GOOD)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(BackendError, match=r"Mine\.start returned rank 0 of 1 in a job of 2 ranks: it must join"):
        Launched("mine")


def test_the_environment_chooses_and_the_choice_is_said(
    install: Install, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "tpcore")
    install("mine", GOOD)
    monkeypatch.setenv("TPCORE_BACKEND", "mine")
    tpcore.init()
    tpcore.shutdown()
    assert caplog.messages == ["backend mine (TPCORE_BACKEND is set)"]
    monkeypatch.setenv("RANK", "1")
    tpcore.init()
    tpcore.shutdown()
    assert len(caplog.messages) == 1, "rank 0 alone says it"


def test_an_unknown_backend_is_told_what_there_is(install: Install) -> None:
    install("mine", GOOD)
    with pytest.raises(
        BackendError, match=r"no backend 'mien' is installed; there are \['cpu_gloo', 'cuda', 'mine', 'neuron'\]"
    ):
        tpcore.init("mien")


def test_only_the_named_plugin_is_imported(install: Install) -> None:
    install("mine", GOOD)
    install("other", "raise SystemError('must not be imported')")
    assert load_backend("mine")
    assert "tpcore_other" not in sys.modules


HOOK = "from tpcore.backend import hookimpl, Backend\n\n@hookimpl\ndef tpcore_backend():\n    "
LEAST = """
import torch, tpcore

class Mine(tpcore.backend.Backend):
    interface = 2
    def start(self, timeout): return 0, 1
    def connect(self, group, rank): return None
    def device(self): return torch.device("cpu")

@tpcore.backend.hookimpl
def tpcore_backend(): return Mine
"""
BROKEN: dict[str, tuple[str, str]] = {
    "import fails": ("import no_such_library", "ModuleNotFoundError: No module named 'no_such_library'"),
    "syntax": ("def :", "SyntaxError"),
    "no hook": ("x = 1", "has no hook: define tpcore_backend"),
    "misspelt hook": (
        HOOK.replace("tpcore_backend", "tpcore_bakend") + "return 1",
        "PluginValidationError.*tpcore_bakend",
    ),
    "hook returns an instance": (HOOK + "return 'gloo'", "hook returned 'gloo', not a Backend class"),
    "hook returns another class": (HOOK + "return dict", "hook returned <class 'dict'>, not a Backend class"),
    "hook raises": (HOOK + "raise OSError('no driver')", "OSError: no driver"),
    "exits": ("raise SystemExit('no licence')", "SystemExit: no licence"),
    "other version": (LEAST.replace("interface = 2", "interface = 1"), "written for version 1 of the plugin interface"),
    "no device": (LEAST.replace("def device", "def devise"), "Mine lacks device"),
    "no primitive": (
        LEAST.replace("class Mine", "class Talk(tpcore.comm.Transport): pass\nclass Mine").replace(
            "    def start", "    transport_class = Talk\n    def start"
        ),
        "Talk lacks all_gather, all_reduce, reduce_scatter",
    ),
    "undeclared dtype": (
        LEAST.replace(
            "    def start", "    capabilities = tpcore.backend.Capabilities(dtypes=(torch.float32,))\n    def start"
        ),
        "it does not sum int64, uint8",
    ),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_plugin_names_itself_and_hides_no_other(how: str, install: Install) -> None:
    code, said = BROKEN[how]
    install("broken", code)
    install("mine", GOOD)
    with pytest.raises(BackendError, match=rf"(?s)backend 'broken' of tpcore-broken 1\.2.*{said}"):
        tpcore.init("broken")
    infos = {b.name: b for b in tpcore.backend.backends()}
    assert {"broken", "cpu_gloo", "cuda", "mine", "neuron"} <= set(infos)
    assert infos["mine"].usable
    assert infos["cpu_gloo"].usable
    assert not infos["broken"].usable
    assert said.split(".*")[0] in infos["broken"].reason


def test_two_distributions_with_one_name(install: Install) -> None:
    install("mine", GOOD)
    install("mine", GOOD, distribution="another-mine")
    with pytest.raises(
        BackendError, match=r"provided by several distributions: \['another-mine 1.2', 'tpcore-mine 1.2'\]; uninstall"
    ):
        backend_class("mine")


@pytest.mark.parametrize(
    ("probe", "reason", "said"),
    [
        ("return 'no device: buy one'", "no device: buy one", "cannot run here"),
        ("raise OSError('bus error')", "OSError: bus error", "cannot tell if it can run"),
    ],
)
def test_a_backend_that_cannot_run_here_says_why(install: Install, probe: str, reason: str, said: str) -> None:
    install("mine", GOOD + PROBE.format(probe))
    with pytest.raises(BackendError, match=f"backend 'mine' {said}: {reason}"):
        tpcore.init("mine")
    (info,) = [b for b in tpcore.backend.backends() if b.name == "mine"]
    assert (info.usable, info.reason) == (False, reason)


@pytest.mark.parametrize(
    ("comm", "said"),
    [
        (
            "Half(group, rank)",
            r"backend 'half' of tpcore-half 1\.2: Mine\.connect\(\) makes .*abstract class Half.*all_gather",
        ),
        ("None", r"Mine.connect\(\) returned None, not a tpcore Transport"),
    ],
)
def test_a_transport_that_is_none_or_unfinished_is_told_at_init(comm: str, said: str, install: Install) -> None:
    """Also of a plugin that does not say beforehand which class its Transport is of."""
    half = "class Half(tpcore.comm.Transport):\n    def all_reduce(self, x, op, donate): return x\n"
    half += "    def reduce_scatter(self, x, dim): return x\n"
    install("half", LEAST.replace("class Mine", f"{half}\nclass Mine").replace("return None", f"return {comm}"))
    with pytest.raises(BackendError, match=said):
        tpcore.init("half")
