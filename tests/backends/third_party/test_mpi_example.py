"""The example of a backend from outside: its wheel, and tpcore's, in an environment of their own.

The kit runs on 2 ranks, with layers in one precision and primitives in five of eight dtypes; on 4 ranks its tests
of groups. The drill runs all of it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import pytest
from helpers.places import ROOT
from helpers.tiers import tiers

EXAMPLE = ROOT / "examples/third_party_backend"
# one seed, so that a change of the product alone turns it red; a drill draws its own
PART = ("--kit-seed=1", "-k", "not float16 and not float64 and not fp16 and not bf16 and not fp64")
GROUPS = ("--kit-seed=1", "-k", "joined or groups")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun: apt install openmpi-bin"),
    pytest.mark.skipif(find_spec("mpi4py") is None, reason="no mpi4py: pip install mpi4py"),
    pytest.mark.xdist_group("launched"),
]


def run(*command: str, cwd: Path | None = None) -> str:
    names = ("RANK", "WORLD_SIZE", "PYTHONPATH", "TPCORE_BACKEND", "PYTEST_CURRENT_TEST")
    env = {k: v for k, v in os.environ.items() if k not in names and not k.startswith("PYTEST_XDIST")}
    env |= {
        # also as root, in a container, with more ranks than cores, on one host
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "OMPI_MCA_btl_vader_single_copy_mechanism": "none",
        "OMP_NUM_THREADS": "1",
    }
    out = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(command, check=False, cwd=cwd, env=env, timeout=500, **out)
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An environment with the two wheels; what they need comes from this one."""
    place = tmp_path_factory.mktemp("mpi")
    for source in (ROOT, EXAMPLE):
        run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", str(place), str(source))
    run(sys.executable, "-m", "venv", "--without-pip", str(place / "env"))
    (packages,) = (place / "env/lib").glob("python*/site-packages")
    wheels = [str(w) for w in place.glob("*.whl")]
    assert len(wheels) == 2
    install = ("--no-deps", "--no-index", "--quiet", "--disable-pip-version-check", "--target", str(packages))
    run(sys.executable, "-m", "pip", "install", *install, *wheels)
    # a plain directory on the path: the .pth files in it, an editable tpcore say, are not followed
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    found = str(place / "env/bin/python")
    where = run(found, "-c", "import tpcore, tpcore_mpi; print(tpcore.__file__)", cwd=place)
    assert where.startswith(str(packages))
    return found


@pytest.mark.parametrize(("ranks", "part"), tiers([(2, PART), (4, GROUPS)], drill=[(2, ()), (4, ())]), ids=str)
def test_it_passes_the_kit(python: str, ranks: int, part: tuple[str, ...], tmp_path: Path) -> None:
    shutil.copy(EXAMPLE / "tests/test_conformance.py", tmp_path)
    run("mpirun", "-n", str(ranks), python, "-m", "pytest", "-q", "-x", *part, "test_conformance.py", cwd=tmp_path)


def test_it_is_listed(python: str, tmp_path: Path) -> None:
    out = run(python, "-m", "tpcore", "backends", cwd=tmp_path)
    assert ["mpi", "tpcore-mpi", "0.1.0", "yes"] in [line.split()[:4] for line in out.splitlines()]
