"""The command line: what it prints, for people and for programs, and that a broken plugin hides no other."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import programs as forked
from helpers.distributions import installed
from rich.console import Console
from typer.testing import CliRunner

import tpcore
from tpcore.backend.registry import backend_class
from tpcore.cli import console
from tpcore.cli.app import app


def invoke(*args: str) -> str:
    result = CliRunner().invoke(app, args, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def run(*command: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, check=False, capture_output=True, text=True, env={**os.environ, **env}, timeout=forked.PATIENCE
    )


def test_help_and_version():
    assert "backends" in invoke("--help")
    assert invoke("--version") == f"tpcore {tpcore.__version__}\n"


def test_backends_table_says_where_from_usable_and_why_not():
    out = invoke("backends")
    version = tpcore.__version__
    rows = [line.split() for line in out.splitlines()]
    assert ["cpu_gloo", "tpcore", version, "yes", "any"] in [row[:5] for row in rows]
    assert ["neuron", "tpcore", version, "no,", "see", "below"] in [row[:6] for row in rows]
    # unwrapped, so that it can be copied
    assert "pip install 'tpcore[neuron]' --extra-index-url https://pip.repos.neuron.amazonaws.com\n" in out


def test_backends_json_is_the_listing_of_the_library():
    rows = {row["name"]: row for row in json.loads(invoke("backends", "--json"))}
    assert rows.keys() == {info.name for info in tpcore.backend.backends()}
    assert rows["cpu_gloo"] == {
        "name": "cpu_gloo",
        "distribution": "tpcore",
        "version": tpcore.__version__,
        "module": "tpcore_cpu_gloo",
        "usable": True,
        "reason": "",
        "capabilities": backend_class("cpu_gloo").capabilities.to_json(),
        "remark": backend_class("cpu_gloo").remark(),
    }


def test_backends_says_what_carries_the_collectives_and_why(monkeypatch):
    shared = "groups of ranks on one host exchange tensors through shared memory, other groups over gloo"
    assert f"cpu_gloo: {shared}\n" in invoke("backends")
    monkeypatch.setenv("TPCORE_SHM", "0")
    over_gloo = "cpu_gloo: all groups exchange tensors over gloo, none through shared memory: "
    assert f"{over_gloo}TPCORE_SHM=0\n" in invoke("backends")
    monkeypatch.delenv("TPCORE_SHM")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))  # less than a segment needs
    try:
        remark = backend_class("cpu_gloo").remark()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert f"cpu_gloo: {remark}" == f"{over_gloo}[Errno 27] File too large"


@pytest.mark.slow  # two interpreters, which import all backends
def test_the_installed_script_and_the_module_print_the_same(tmp_path):
    installed(tmp_path, "process", "import no_such_module_anywhere")
    script = Path(sys.executable).with_name("tpcore")
    # one import path: without it the module takes tpcore from the directory at hand, the script the installed one
    env = {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)]), "PYTHONSAFEPATH": "1"}
    a = run(str(script), "backends", **env)
    b = run(sys.executable, "-m", "tpcore", "backends", **env)
    assert (a.returncode, a.stderr) == (0, "")
    assert a.stdout == b.stdout
    assert "no_such_module_anywhere" in a.stdout
    assert "cpu_gloo" in a.stdout


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_its_extra_the_command_says_how_to_get_it(missing, tmp_path):
    # None in sys.modules is how the import system itself spells "not to be found"
    (tmp_path / "command.py").write_text(
        f"import sys; sys.modules[{missing!r}] = None; import tpcore.cli as c; c.main()"
    )
    done = forked.run(["python", "command.py"], tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (f"the tpcore command needs {missing}, which is not installed: pip install 'tpcore[cli]'\n")


def test_texts_are_as_wide_as_a_terminal_and_what_is_copied_stays_whole(monkeypatch, capsys):
    monkeypatch.setattr(console, "Console", lambda: Console(force_terminal=True, width=30))
    console.show("a reason that is longer than a line\n    pip install --and-many-more options")
    assert capsys.readouterr().out.splitlines() == [
        "a reason that is longer than a", "    line", "    pip install --and-many-more options"
    ]  # fmt: skip
