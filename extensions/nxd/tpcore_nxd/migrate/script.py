"""One script: its imports from other libraries, their uses, and the script rewritten."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from .names import PACKAGES, Counterpart, counterpart, notes_on, old_library


@dataclass(frozen=True)
class Finding:
    """One line of a script. ``new`` None: nothing takes the place of ``old``."""

    line: int
    old: str
    new: str | None
    note: str = ""


Edit = tuple[int, int, int, int, str]
"""First line and byte, last line and byte of a part of the script, and other text for it."""
_XLA = PACKAGES["torch_xla"]
_DEVICE = "this rank's device, whatever the backend; before initialization tpcore_nxd.utils.get_device()"


class Script:
    """``findings``: in order of lines. ``stays``: how many imports of an old library ``rewritten`` leaves. ``by_hand``:
    how many devices and groups of xla, names that moved out of a module, and calls that raise. SyntaxError for text
    that is no Python."""

    def __init__(self, text: str, path: str = "<script>") -> None:
        self.text = text
        self._lines = text.encode().splitlines(keepends=True)  # by which Python counts, too
        tree = ast.parse(text, path)
        self._names: dict[str, str] = {}  # what a local name stands for
        self._moved: dict[str, str] = {}  # the same after the rewriting
        self.stays = self.by_hand = 0
        self._edits: list[Edit] = []
        self.findings: list[Finding] = []
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                self._import(node)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                self._import_from(node, node.module)
        self._uses(tree)
        self.findings = sorted(dict.fromkeys(self.findings), key=lambda f: (f.line, f.old))

    # -- imports --------------------------------------------------------------------------------------------
    def _import(self, node: ast.Import) -> None:
        for alias in node.names:
            if not old_library(alias.name):
                continue
            first = alias.name.partition(".")[0]
            local = alias.asname or first
            self._names[local] = alias.name if alias.asname else first
            new = counterpart(alias.name)
            if new is None:
                continue
            self._found(alias.lineno, f"import {alias.name}", new, new.new and f"import {new.new}")
            # without a name of its own the script goes on by the old package's name, which is kept where all is here
            if new.new and new.same_call and (alias.asname or first in PACKAGES):
                whole = new.new if alias.asname else PACKAGES[first]
                self._moved[local] = whole
                self._edit(alias, f"{whole} as {local}{'' if new.new == whole else f', {new.new}'}")
            else:
                self.stays += 1

    def _import_from(self, node: ast.ImportFrom, module: str) -> None:
        if module.startswith("transformers") and "optimum.neuron" not in self.text:
            return  # a script for whichever version of transformers its author has
        moved = {}
        for alias in node.names:
            local, old = alias.asname or alias.name, f"{module}.{alias.name}"
            if not old_library(old):
                continue
            self._names[local] = old
            to = counterpart(old)
            if to is not None and to.new and to.same_call:
                moved[alias.name] = to.new
                self._moved[local] = to.new
            elif to is not None:
                self.stays += 1
                self._found(node.lineno, f"from {module} import {alias.name}", to, to.new)
        if moved:
            self._move(node, module, moved)

    def _move(self, node: ast.ImportFrom, module: str, moved: dict[str, str]) -> None:
        """Rewrite an import whose names in ``moved`` are in other modules now."""
        by_module: dict[str, list[str]] = defaultdict(list)
        for alias in node.names:
            if alias.name in moved:
                home, _, name = moved[alias.name].rpartition(".")
                local = alias.asname or alias.name
                by_module[home].append(name if name == local else f"{name} as {local}")
        for home, names in by_module.items():
            plain = ", ".join(names)
            self.findings.append(Finding(node.lineno, f"from {module} import ...", f"from {home} import {plain}"))
        stay = [alias for alias in node.names if alias.name not in moved]
        kept = all(to.rpartition(".")[2] == name for name, to in moved.items())
        line = self._lines[node.lineno - 1]
        # -1: the name has spaces around its dots, or is on another line
        at = line.find(module.encode(), node.col_offset)
        if len(by_module) == 1 and not stay and kept and at >= 0:
            self._edits.append((node.lineno, at, node.lineno, at + len(module.encode()), next(iter(by_module))))
            return
        lines = [f"from {home} import {', '.join(names)}" for home, names in by_module.items()]
        if stay:
            rest = ", ".join(a.name if a.asname is None else f"{a.name} as {a.asname}" for a in stay)
            lines.append(f"from {module} import {rest}")
        before, ending = line[: node.col_offset].decode(), "\r\n" if line.endswith(b"\r\n") else "\n"
        # after `try:` or another statement a line of its own would be indented wrongly
        self._edit(node, ("; " if before.strip() else f"{ending}{before}").join(lines))

    # -- uses -----------------------------------------------------------------------------------------------
    def _uses(self, tree: ast.AST) -> None:
        calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
        for node, name, reached in self._chains(tree):
            new = counterpart(name)
            if new is None:
                continue
            if new.new is None or new.note or not new.same_call or reached != new.new:
                self._found(node.lineno, name, new, new.new)
                self.by_hand += new.new is not None and reached not in (None, new.new)
            for note, must in notes_on(new.new or "", calls[id(node)]) if id(node) in calls else ():
                self.by_hand += must
                self.findings.append(Finding(node.lineno, name, new.new, note))
        for call in calls.values():
            dynamic = _imported_by_call(call)
            if old_library(dynamic):
                of = counterpart(dynamic) or Counterpart(None)
                self._found(call.lineno, ast.unparse(call), of, of.new)
                self.stays += 1
        self._xla(tree, [*calls.values()])

    def _xla(self, tree: ast.AST, calls: list[ast.Call]) -> None:
        """Every device of xla, rewritten where it is an argument that can only be one; and groups of the script's."""
        starts = [call for call in calls if ast.unparse(call.func).endswith("init_process_group")]
        groups = {id(node): call for call in starts for node in ast.walk(call)}
        devices = {id(keyword.value) for call in calls for keyword in call.keywords if keyword.arg == "device"}
        devices |= {
            id(arg) for call in calls if ast.unparse(call.func).endswith((".to", ".device")) for arg in call.args
        }
        known = any(name.startswith(_XLA) for name in (*self._moved.values(), *_imported(tree)))
        since, here = self._device(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr in ("is_xla", "xla"):
                self._by_hand(node, ast.unparse(node), "tpcore.current().device", _DEVICE)
            if not (isinstance(node, ast.Constant) and re.fullmatch(r"xla(:\d*)?", str(node.value))):
                continue
            text = self._lines[node.lineno - 1][node.col_offset : node.end_col_offset]
            if call := groups.get(id(node)):
                note = "tpcore joins the job by itself; a group that the script makes otherwise is used"
                if not known:  # importing tpcore_nxd.xla has made it known to torch
                    self._by_hand(call, ast.unparse(call), "nothing", note)
            # a device above the import cannot have its name; in an f-string a node has another place before Python 3.12
            elif here and node.lineno > since and id(node) in devices and text.strip(b"\"'") == b"xla":
                self.findings.append(Finding(node.lineno, repr(node.value), here))
                self._edits.append((node.lineno, node.col_offset, node.lineno, node.end_col_offset or 0, here))
            else:
                self._by_hand(node, repr(node.value), "tpcore.current().device", _DEVICE)

    def _by_hand(self, node: ast.expr, old: str, new: str, note: str) -> None:
        self.by_hand += 1
        self.findings.append(Finding(node.lineno, old, new, note))

    def _device(self, tree: ast.AST) -> tuple[int, str | None]:
        """The line of the import, and the call of this rank's device, by the name that the script has for xla_model
        everywhere; None without."""
        nodes = [*ast.walk(tree)]
        bound: list[str | None] = [n.id for n in nodes if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)]
        bound += [n.arg for n in nodes if isinstance(n, ast.arg)]
        bound += [getattr(n, "name", None) for n in nodes if not isinstance(n, ast.alias)]
        imports = [n for n in getattr(tree, "body", ()) if isinstance(n, ast.Import | ast.ImportFrom)]
        lines = [(alias.asname or alias.name, node.lineno) for node in imports for alias in node.names]
        names = [name for name, _ in lines]
        bound += [n for n in names if names.count(n) > 1]
        known = (it for it in lines if self._moved.get(it[0]) == f"{_XLA}.core.xla_model" and it[0] not in bound)
        return next(((line, f"{name}.xla_device()") for name, line in known), (0, None))

    def _chains(self, tree: ast.AST) -> Iterator[tuple[ast.expr, str, str | None]]:
        """Longest dotted names that begin with an imported one, what they stand for, and what they reach
        after the rewriting."""
        inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute | ast.Name) and id(node) not in inner:
                first, *rest = ast.unparse(node).split(".")
                if first in self._names and all(map(str.isidentifier, rest)):
                    now = self._moved.get(first)
                    yield node, ".".join([self._names[first], *rest]), now and ".".join([now, *rest])

    # -- what comes of it -----------------------------------------------------------------------------------
    def _found(self, line: int, old: str, of: Counterpart, new: str | None) -> None:
        self.findings.append(Finding(line, old, new, of.note))

    def _edit(self, node: ast.stmt | ast.alias, text: str) -> None:
        end = node.end_lineno or 0, node.end_col_offset or 0
        self._edits.append((node.lineno, node.col_offset, *end, text))

    def rewritten(self) -> str:
        """The script with other imports and devices, and with every other byte as it was."""
        lines = [*self._lines]
        for line, column, end_line, end_column, text in sorted(self._edits, reverse=True):
            at = (line, column), (end_line, end_column)
            if any(edit[:2] <= at[0] and at[1] <= edit[2:4] and edit[:4] != (*at[0], *at[1]) for edit in self._edits):
                continue  # in a part that another edit replaces
            new = lines[line - 1][:column] + text.encode() + lines[end_line - 1][end_column:]
            lines[line - 1 : end_line] = new.splitlines(keepends=True)
        return b"".join(lines).decode()


def _imported(tree: ast.AST) -> Iterator[str]:
    """The full names that the script imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            home = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            yield from (f"{home}{alias.name}" for alias in node.names)


def _imported_by_call(call: ast.Call) -> str:
    """The module that ``importlib.import_module("...")`` or ``__import__("...")`` imports, up to the first
    value that is put in; else empty."""
    if not call.args or ast.unparse(call.func).rpartition(".")[2] not in ("import_module", "__import__"):
        return ""
    first = call.args[0]
    if isinstance(first, ast.JoinedStr) and first.values:
        first = first.values[0]
    return str(first.value).rstrip(".") if isinstance(first, ast.Constant) else ""
