"""The house rules that code can check: names, sizes, who imports whom, who reads the environment."""

from __future__ import annotations

import ast
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from graphlib import TopologicalSorter
from importlib import import_module
from pathlib import Path
from typing import Any

import typer
from helpers.places import ROOT, TESTS

from tpcore.backend.registry import manager, names

FILES = sorted(path for folder in ("tpcore", "backends", "extensions") for path in (ROOT / folder).rglob("*.py"))
LINES, BODY = 300, 40


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "tpcore" else parts[2:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


TREES = {module_of(path): ast.parse(path.read_text()) for path in FILES}
PACKAGES = {module_of(path) for path in FILES if path.name == "__init__.py"}


def imports(module: str) -> Iterator[tuple[str, str]]:
    """(module, name) of each import from this product; name "" for ``import module``. Those inside functions and
    those for type checkers are imports too."""
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if alias.name in TREES)
        if isinstance(node, ast.ImportFrom):
            base = _absolute(module, node)
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                yield (whole, "") if whole in TREES else (base, alias.name)


def _absolute(module: str, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = module.split(".") if module in PACKAGES else module.split(".")[:-1]
    parts = parts[: len(parts) - node.level + 1]
    return ".".join([*parts, *([node.module] if node.module else [])])


ROOMS = (
    "log extras errors settings nested private layout comm backend runtime c10d layers train checkpoint processes "
    "trace testing cli"
)
ROOMS = (*ROOMS.split(), "__main__")
"""A room imports only rooms before it."""
EXTENSIONS = tuple(f"tpcore_{name}" for name in ("convert", "hf", "explain", "plan", "serve", "nxd"))
"""An extension imports only extensions before it; its command, which nothing imports but a hook, any."""


def room_of(module: str) -> str:
    return module.split(".")[1]


def test_a_class_name_means_one_thing() -> None:
    found = defaultdict(list)
    for module, tree in TREES.items():
        for node in tree.body:
            names = [node.name] if isinstance(node, ast.ClassDef) else []
            if isinstance(node, ast.Assign):  # aliases, type variables
                names = [target.id for target in node.targets if isinstance(target, ast.Name) and _is_class(target.id)]
            # NxD's names are its own: a subclass there has the name of the layer that it dresses
            for name in names if not module.startswith("tpcore_nxd") else ():
                found[name].append(module)
    twice = {name: modules for name, modules in found.items() if len(modules) > 1}
    assert not twice


def _is_class(name: str) -> bool:
    return name[0].isupper() and any(map(str.islower, name))


def test_no_file_is_too_long() -> None:
    long = {str(p.relative_to(ROOT)) for p in FILES if len(p.read_text().splitlines()) > LINES}
    assert not long


def test_a_function_fits_on_a_screen() -> None:
    """Lines of the body without its docstring. Checks of the kit and the matrix go through a longer list."""
    long = []
    for module, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and not module.startswith("tpcore.testing"):
                first = node.body[ast.get_docstring(node) is not None :]
                if first and (node.end_lineno or 0) - first[0].lineno >= BODY:
                    long.append(f"{module}.{node.name}")
    assert long == []


def test_no_circle_of_imports_between_modules() -> None:
    # tpcore itself names everything that is public
    graph = {m: {to for to, _ in imports(m) if to in TREES and to not in (m, "tpcore")} for m in TREES}
    TopologicalSorter(graph | {"tpcore": set()}).prepare()  # raises CycleError, which names the modules of a circle


def test_a_room_imports_only_rooms_above_it() -> None:
    wrong = []
    for module in TREES:
        if not module.startswith("tpcore."):
            continue
        for to, _ in imports(module):
            if to == "tpcore" or to.startswith("tpcore."):
                # tpcore itself is where users and tests take names from, and so may the rooms from testing on
                last = room_of(to) if to != "tpcore" else "testing"
                if ROOMS.index(last) > ROOMS.index(room_of(module)):
                    wrong.append(f"{module} imports {to}")
    assert wrong == []


def test_nothing_lies_loose_at_the_root() -> None:
    assert {room_of(m) for m in TREES if m.startswith("tpcore.")} == set(ROOMS)


def test_the_core_imports_nothing_beside_it_and_the_product_no_tests() -> None:
    wrong = []
    for module in TREES:
        for to, name in imports(module):
            if module.startswith("tpcore.") and to.startswith("tpcore_"):
                wrong.append(f"{module} imports {to} {name}")
            replicas = module.startswith(("tpcore_neuron.testing", "tpcore_neuron.replicas"))
            testing = replicas or module.startswith(("tpcore.testing", "tpcore_explain.verify"))
            if to.startswith("tpcore.testing") and not testing:
                wrong.append(f"{module} imports {to} {name}")
    assert wrong == []


def test_an_extension_imports_only_extensions_before_it() -> None:
    wrong = []
    for module in TREES:
        top = module.split(".")[0]
        for to, _ in imports(module):
            other = to.split(".")[0]
            if top not in EXTENSIONS or other not in EXTENSIONS or module.endswith(".command"):
                continue
            if EXTENSIONS.index(other) > EXTENSIONS.index(top):
                wrong.append(f"{module} imports {to}")
    assert wrong == []


def test_a_command_is_imported_by_the_hooks_alone() -> None:
    doors = {(m, to) for m in TREES for to, _ in imports(m) if to.endswith(".command")}
    assert {m.rpartition(".")[2] for m, _ in doors} == {"hooks"}


def test_the_core_names_nothing_beside_it_in_an_import_string() -> None:
    beside = {module.split(".")[0] for module in TREES} - {"tpcore"}
    names = [
        f"{module}: {node.value}"
        for module, tree in TREES.items()
        if module.startswith("tpcore.")
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.split(".")[0] in beside
    ]
    assert names == []


def test_no_text_of_the_core_names_an_extension() -> None:
    """Nor what extensions add to it, in docstrings, comments and messages: a core without them would send its users to
    what is not there."""
    commands: Any = typer.Typer()
    manager().hook.tpcore_commands(app=commands)
    made = [*commands.registered_commands, *commands.registered_groups]
    added = {*names(), *(name for package in EXTENSIONS for name in getattr(import_module(package), "__all__", ()))}
    words = added - {"explain", "lazy", "plan"}  # which are English, too
    text = re.compile(
        rf"\b({'|'.join({*EXTENSIONS, *words})})\b|\btpcore\.({'|'.join(added)})\b"
        rf"|`tpcore ({'|'.join(entry.name or entry.callback.__name__ for entry in made)})\b"
    )
    code = {tokenize.NAME, tokenize.NUMBER, tokenize.OP}
    wrong = []
    for path in FILES:
        if module_of(path).startswith("tpcore."):
            with path.open() as file:
                for token in tokenize.generate_tokens(file.readline):
                    if token.type not in code and (found := text.search(token.string)):
                        wrong.append(f"{path.relative_to(ROOT)}:{token.start[0]}: {found.group()}")
    assert wrong == []


def test_the_cores_tests_import_no_extension() -> None:
    """Nor what extensions are for; ``make test-core`` runs them where nothing of it is installed."""
    beside = {*EXTENSIONS, "transformers", "peft", "accelerate", "trl"}
    rooms = [path for room in ("core", "backends") for path in (TESTS / room).rglob("*.py")]
    paths, wrong, seen = [TESTS / "conftest.py", *rooms], [], set[str]()
    for path in paths:  # which grows by the helpers that they use
        for node in ast.walk(ast.parse(path.read_text())):
            used: list[str] = []
            if isinstance(node, ast.Import):
                used = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                used = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                used = [f"{node.value.id}.{node.attr}"]
            for name in used:
                top, part, *_ = [*name.split("."), ""]
                if top in beside or (top == "tpcore" and part in names()):
                    wrong.append(f"{path.relative_to(ROOT)}: {name}")
                if top == "helpers" and (TESTS / top / f"{part}.py").exists() and part not in seen:
                    seen.add(part)
                    paths.append(TESTS / top / f"{part}.py")
    assert wrong == []


def test_no_private_name_of_another_module_is_used() -> None:
    wrong = []
    for module, tree in TREES.items():
        wrong += [
            f"{module}: from {to} import {name}"
            for to, name in imports(module)
            if to in TREES and name.startswith("_") and not name.startswith("__")
        ]
        modules = {
            (alias.asname or alias.name)
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
            if f"{_absolute(module, node)}.{alias.name}" in TREES
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                private = node.attr.startswith("_") and not node.attr.startswith("__")
                if node.value.id in modules and private:
                    wrong.append(f"{module}: {node.value.id}.{node.attr}")
    assert wrong == []


def test_tests_use_no_private_name_but_to_break_it() -> None:
    wrong = []
    for path in sorted(TESTS.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tpcore"):
                private = [n for alias in node.names if (n := alias.name).startswith("_") and not n.startswith("__")]
                wrong += [f"{path.name}: {name}" for name in private]
    assert wrong == []


def test_one_channel_for_messages() -> None:
    """The logger ``tpcore``; what is ``get_logger`` in NxD gives scripts loggers of their own."""
    named = [m for m, tree in TREES.items() if "'getLogger'" in ast.dump(tree)]
    assert sorted(named) == ["tpcore.log", "tpcore_nxd.utils"]


def test_the_environment_is_read_in_settings_alone() -> None:
    wrong = []
    for module, tree in TREES.items():
        if module == "tpcore.settings":
            continue
        for node in ast.walk(tree):
            name = getattr(node, "attr", getattr(node, "id", ""))
            imported = [a.name for a in node.names] if isinstance(node, ast.ImportFrom) else []
            if {name, *imported} & {"environ", "environb", "getenv", "putenv"}:
                wrong.append(f"{module}:{node.lineno}")
    assert wrong == []
