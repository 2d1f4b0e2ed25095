"""One script: its imports from other libraries, their uses, and the script with its imports rewritten."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from .meanings import notes_on
from .names import NXD, Counterpart, counterpart, old_library


@dataclass(frozen=True)
class Finding:
    """One line of a script. ``new`` None: nothing takes the place of ``old``."""

    line: int
    old: str
    new: str | None
    note: str = ""


@dataclass(frozen=True)
class Edit:
    """Other text for a part of the script, by line and byte."""

    line: int
    column: int
    end_line: int
    end_column: int
    text: str


class Script:
    """``findings``: in order of lines. ``stays``: how many imports of an old library ``rewritten`` leaves.
    SyntaxError for text that is no Python."""

    def __init__(self, text: str, path: str = "<script>") -> None:
        self.text = text
        self._tree = ast.parse(text, path)
        self._names: dict[str, str] = {}  # what a local name stands for
        self._moved: dict[str, str] = {}  # the same after the rewriting
        self.stays = 0
        self._edits: list[Edit] = []
        self.findings: list[Finding] = []
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Import):
                self._import(node)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                self._import_from(node, node.module)
        self._uses()
        self.findings = sorted(dict.fromkeys(self.findings), key=lambda f: (f.line, f.old))

    # -- imports --------------------------------------------------------------------------------------------
    def _import(self, node: ast.Import) -> None:
        for alias in node.names:
            new = counterpart(alias.name) if old_library(alias.name) else None
            if not old_library(alias.name):
                continue
            first = alias.name.partition(".")[0]
            local = alias.asname or first
            self._names[local] = alias.name if alias.asname else first
            if new is None:
                continue
            self._found(alias.lineno, f"import {alias.name}", new, new.new and f"import {new.new}")
            # without a name of its own the script goes on by the old package's name, of which NxD's is kept
            if new.new and new.same_call and (alias.asname or first == NXD):
                self._moved[local] = new.new if alias.asname else "tpcore.nxd"
                self._edit(alias, self._imported(alias, new.new))
            else:
                self.stays += 1

    @staticmethod
    def _imported(alias: ast.alias, new: str) -> str:
        if alias.asname:
            return f"{new} as {alias.asname}"
        whole = f"tpcore.nxd as {NXD}"
        return whole if new == "tpcore.nxd" else f"{whole}, {new}"

    def _import_from(self, node: ast.ImportFrom, module: str) -> None:
        if module.startswith("transformers") and "optimum.neuron" not in self.text:
            return  # a script for whichever version of transformers its author has
        known = {a.name: a for a in node.names if old_library(f"{module}.{a.name}")}
        moved = {}
        for name, alias in known.items():
            local, old = alias.asname or name, f"{module}.{name}"
            self._names[local] = old
            to = counterpart(old)
            if to is None:
                continue
            if to.new and to.same_call:
                moved[name] = to
                self._moved[local] = to.new
            else:
                self.stays += 1
                self._found(node.lineno, f"from {module} import {name}", to, to.new)
        if moved:
            self._move(node, module, moved)

    def _move(self, node: ast.ImportFrom, module: str, moved: dict[str, Counterpart]) -> None:
        """Rewrite an import whose names in ``moved`` are in other modules now."""
        by_module: dict[str, list[str]] = defaultdict(list)
        for alias in node.names:
            if alias.name in moved:
                home, _, name = str(moved[alias.name].new).rpartition(".")
                local = alias.asname or alias.name
                by_module[home].append(name if name == local else f"{name} as {local}")
        for home, names in by_module.items():
            plain = ", ".join(names)
            self.findings.append(Finding(node.lineno, f"from {module} import ...", f"from {home} import {plain}"))
        stay = [alias for alias in node.names if alias.name not in moved]
        kept = all(str(to.new).rpartition(".")[2] == name for name, to in moved.items())
        if len(by_module) == 1 and not stay and kept:
            line = self.text.encode().split(b"\n")[node.lineno - 1]
            at = line.index(module.encode(), node.col_offset)
            end = at + len(module.encode())
            self._edits.append(Edit(node.lineno, at, node.lineno, end, next(iter(by_module))))
            return
        lines = [f"from {home} import {', '.join(names)}" for home, names in by_module.items()]
        if stay:
            rest = ", ".join(a.name if a.asname is None else f"{a.name} as {a.asname}" for a in stay)
            lines.append(f"from {module} import {rest}")
        self._edit(node, ("\n" + " " * node.col_offset).join(lines))

    # -- uses -----------------------------------------------------------------------------------------------
    def _uses(self) -> None:
        calls = {id(node.func): node for node in ast.walk(self._tree) if isinstance(node, ast.Call)}
        for node, name, reached in self._chains(self._tree):
            new = counterpart(name)
            call = calls.get(id(node))
            if new is None:
                continue
            if new.new is None:
                self._found(node.lineno, name, new, None)
            elif new.note or not new.same_call or reached != new.new:
                self._found(node.lineno, name, new, new.new)
            for note in notes_on(new.new or "", call) if call is not None else ():
                self.findings.append(Finding(node.lineno, name, new.new, note))
        for call in calls.values():
            dynamic = _imported_by_call(call)
            if old_library(dynamic) and not dynamic.startswith("torch_xla"):
                of = counterpart(dynamic) or Counterpart(None)
                self._found(call.lineno, ast.unparse(call), of, of.new)
                self.stays += 1
            if _starts_xla_group(call):
                note = "tpcore joins the job by itself; a group that the script makes otherwise is used"
                self.findings.append(Finding(call.lineno, ast.unparse(call), "nothing", note))

    def _chains(self, tree: ast.AST) -> Iterator[tuple[ast.expr, str, str | None]]:
        """Longest dotted names that begin with an imported one, what they stand for, and what they reach
        after the rewriting."""
        inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute | ast.Name) and id(node) not in inner:
                parts: list[str] = []
                at: ast.expr = node
                while isinstance(at, ast.Attribute):
                    parts.insert(0, at.attr)
                    at = at.value
                if isinstance(at, ast.Name) and at.id in self._names:
                    begin, now = self._names[at.id], self._moved.get(at.id)
                    yield node, ".".join([begin, *parts]), now and ".".join([now, *parts])

    # -- what comes of it -----------------------------------------------------------------------------------
    def _found(self, line: int, old: str, of: Counterpart, new: str | None) -> None:
        self.findings.append(Finding(line, old, new, of.note))

    def _edit(self, node: ast.stmt | ast.alias, text: str) -> None:
        end_line, end_column = node.end_lineno, node.end_col_offset
        if end_line is not None and end_column is not None:
            self._edits.append(Edit(node.lineno, node.col_offset, end_line, end_column, text))

    def rewritten(self) -> str:
        """The script with other imports, and with every other byte as it was."""
        lines = self.text.encode().split(b"\n")
        for edit in sorted(self._edits, key=lambda e: (e.line, e.column), reverse=True):
            first, last = lines[edit.line - 1], lines[edit.end_line - 1]
            new = first[: edit.column] + edit.text.encode() + last[edit.end_column :]
            lines[edit.line - 1 : edit.end_line] = new.split(b"\n")
        return b"\n".join(lines).decode()


def _imported_by_call(call: ast.Call) -> str:
    """The module that ``importlib.import_module("...")`` or ``__import__("...")`` imports, up to the first
    value that is put in; else empty."""
    if not call.args or ast.unparse(call.func).rpartition(".")[2] not in ("import_module", "__import__"):
        return ""
    first = call.args[0]
    if isinstance(first, ast.JoinedStr) and first.values:
        first = first.values[0]
    return str(first.value).rstrip(".") if isinstance(first, ast.Constant) else ""


def _starts_xla_group(call: ast.Call) -> bool:
    """Whether it is ``torch.distributed.init_process_group("xla")``, under any name."""
    ends = ast.unparse(call.func).rpartition(".")[2] == "init_process_group"
    values = [*call.args, *(keyword.value for keyword in call.keywords)]
    return ends and any(isinstance(v, ast.Constant) and v.value == "xla" for v in values)
