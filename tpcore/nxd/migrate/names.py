"""The counterparts of other libraries' names, which are rows of ``names.tsv``."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType


@dataclass(frozen=True)
class Counterpart:
    """The name here for a name of another library. ``new`` None: there is none, and ``note`` says what to do.
    ``same_call``: the call stays as it is, so rewriting the import is enough."""

    new: str | None
    note: str = ""
    same_call: bool = True


def _read() -> dict[str, Counterpart]:
    """The rows of ``names.tsv``, by the old name."""
    rows = (line.split("\t") for line in Path(__file__).with_name("names.tsv").read_text().splitlines())
    table = {}
    for old, *fields in (row for row in rows if not row[0].startswith("#")):
        new, call, note = (*fields, "", "", "")[:3]
        table[old] = Counterpart(new or None, note, same_call=not call)
    return table


NXD, _STATE, _NEW_STATE = "neuronx_distributed", "megatron.core.parallel_state", "tpcore.nxd.parallel_state"
_MPU = ("megatron.core.mpu", "megatron.mpu")
"""Other names of Megatron's parallel_state."""
FAMILIES = (NXD, "fairscale.nn.model_parallel", "megatron", "optimum.neuron", "torch_xla")

_ROWS = _read()
TABLES = {old: to for old, to in _ROWS.items() if to.new is not None}
OPTIMUM = {old: to for old, to in TABLES.items() if old.startswith("optimum.neuron.")}
TRANSFORMERS = {old: to for old, to in TABLES.items() if old.startswith("transformers.")}
"""What scripts of optimum-neuron import of transformers 4, and 5 has not."""
_ABSENT = {old: to for old, to in _ROWS.items() if to.new is None}
"""What tpcore lacks of NxD, with what to do instead. The longest match counts."""

_OF_OPTIMUM = {
    "NeuronModelForCausalLM": "tpcore.parallelize(AutoModelForCausalLM.from_pretrained(...)), or `tpcore serve`",
    "NeuronORPOTrainer": "tpcore.integrations.trl.DPOTrainer, or a loss of one's own in NeuronTrainer",
    "NeuronGRPOTrainer": "there is none: it needs a server that generates",
}
"""What to do where optimum-neuron has a class that is not here, under any of its modules."""


def counterpart(name: str) -> Counterpart | None:
    """The counterpart of a full name, ``package.module.name``; None for a name of an unknown library."""
    for alias in _MPU:
        if name == alias or name.startswith(f"{alias}."):
            name = f"{_STATE}{name.removeprefix(alias)}"
    if name in TABLES:
        return TABLES[name]
    owner = next((known for known in TABLES if name.startswith(f"{known}.")), None)
    if owner is not None and not owner.startswith("torch_xla"):
        to = TABLES[owner]
        return Counterpart(to.new and f"{to.new}{name.removeprefix(owner)}", "", to.same_call)
    if name == _STATE or name.startswith(f"{_STATE}."):
        new = f"{_NEW_STATE}{name.removeprefix(_STATE)}"
        return Counterpart(new) if _exists(new) else Counterpart(None, "no counterpart")
    if name != NXD and not name.startswith(f"{NXD}."):
        return _module(name) or _gone(name)
    inside = name.removeprefix(NXD).lstrip(".")
    new = f"tpcore.nxd.{inside}" if inside else "tpcore.nxd"
    if _exists(new):
        return Counterpart(new)
    fits = [old for old in _ABSENT if name == old or name.startswith(f"{old}.")]
    return _ABSENT[max(fits, key=len)] if fits else Counterpart(None, "no counterpart")


def _module(name: str) -> Counterpart | None:
    """The counterpart of a module with names in the tables: the module here that has all of them as they are,
    or those from which the script has to import them itself."""
    names = {old.removeprefix(f"{name}."): to for old, to in TABLES.items() if old.startswith(f"{name}.")}
    if not names or name.startswith("torch_xla"):
        return None
    names = {old: to for old, to in names.items() if "." not in old} or names
    homes = sorted({str(to.new).rpartition(".")[0] for to in names.values()})
    if homes[1:] or any(to.new != f"{homes[0]}.{old}" or not to.same_call for old, to in names.items()):
        return Counterpart(", ".join(homes), "names differ: import here what the lines below name", False)
    return Counterpart(homes[0])


def _gone(name: str) -> Counterpart | None:
    """'No counterpart' for a name of a listed library; None for torch_xla's and for what is of none."""
    note = next((note for kind, note in _OF_OPTIMUM.items() if kind in name.split(".")), "no counterpart")
    return Counterpart(None, note) if old_library(name) and "torch_xla" not in name else None


def old_library(name: str) -> bool:
    """Whether ``name`` is, or is in, a library whose names are known here, or is one that has gone."""
    return name in TRANSFORMERS or any(name == family or name.startswith(f"{family}.") for family in FAMILIES)


def _exists(name: str) -> bool:
    """Whether ``name`` is a module of tpcore, or an attribute of one."""
    found: object = import_module("tpcore")
    parts = name.split(".")
    for at, part in enumerate(parts[1:], 1):
        inside = ".".join(parts[: at + 1])
        if isinstance(found, ModuleType) and not hasattr(found, part):
            if not hasattr(found, "__path__") or find_spec(inside) is None:
                return False
            found = import_module(inside)
        elif hasattr(found, part):
            found = getattr(found, part)
        else:
            return False
    return True
