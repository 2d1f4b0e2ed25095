"""One script: its imports from other libraries, their uses, and the script rewritten."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from .calls import Edit, rewritten_call
from .names import NXD, Counterpart, counterpart, notes_on, old_library


@dataclass(frozen=True)
class Finding:
    """One line of a script. ``new`` None: nothing takes the place of ``old``."""

    line: int
    old: str
    new: str | None
    note: str = ""


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
            # without a name of its own the script goes on by the old package's name, of which NxD's is kept
            if new.new and new.same_call and (alias.asname or first == NXD):
                self._moved[local] = new.new if alias.asname else "tpcore_nxd"
                text = f"{new.new} as {alias.asname}" if alias.asname else f"tpcore_nxd as {NXD}"
                rest = "" if alias.asname or new.new == "tpcore_nxd" else f", {new.new}"
                self._edit(alias, text + rest)
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
        self._calls(tree, calls)
        for call in calls.values():
            dynamic = _imported_by_call(call)
            if old_library(dynamic):
                of = counterpart(dynamic) or Counterpart(None)
                self._found(call.lineno, ast.unparse(call), of, of.new)
                self.stays += 1
        self._xla(tree, [call for call in calls.values() if ast.unparse(call.func).endswith("init_process_group")])

    def _xla(self, tree: ast.AST, starts: list[ast.Call]) -> None:
        """Every device of xla, in whatever call or comparison; of groups, which ``starts`` make, the call."""
        groups = {id(node): call for call in starts for node in ast.walk(call)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr in ("is_xla", "xla"):
                self.by_hand += 1
                self.findings.append(Finding(node.lineno, ast.unparse(node), "tpcore.current().device", _DEVICE))
            if not (isinstance(node, ast.Constant) and re.fullmatch(r"xla(:\d*)?", str(node.value))):
                continue
            self.by_hand += 1
            if call := groups.get(id(node)):
                note = "tpcore joins the job by itself; a group that the script makes otherwise is used"
                self.findings.append(Finding(call.lineno, ast.unparse(call), "nothing", note))
            else:
                self.findings.append(Finding(node.lineno, repr(node.value), "tpcore.current().device", _DEVICE))

    def _calls(self, tree: ast.AST, calls: dict[int, ast.Call]) -> None:
        """Rewrite calls of torch_xla that have a counterpart, and the imports of names that nothing uses then."""
        names = [n for n in ast.walk(tree) if isinstance(n, ast.Name)]
        left, homes = Counter(n.id for n in names), defaultdict(set)
        bound = {n.id for n in names if not isinstance(n.ctx, ast.Load)}  # may be something else where it is called
        bound |= {n.arg for n in ast.walk(tree) if isinstance(n, ast.arg)}
        for node, name, _ in self._chains(tree):
            call, to = calls.get(id(node)), counterpart(name)
            edits = rewritten_call(call, to) if call is not None and to is not None and to.new else None
            # in an f-string a node has another place before Python 3.12
            local = ast.unparse(node).split(".")[0]
            if to is None or edits is None or self._text(node) != ast.unparse(node) or local in bound:
                continue
            self._edits += edits
            left[local] -= 1
            homes[local].add(str(to.new).partition("(")[0].rpartition(".")[0])
        for statement in ast.walk(tree):
            if isinstance(statement, ast.Import | ast.ImportFrom):
                whole = isinstance(statement, ast.ImportFrom)
                local_names = {a: a.asname or (a.name if whole else a.name.partition(".")[0]) for a in statement.names}
                if new := {home for local in local_names.values() for home in homes[local]}:
                    unused = [a for a, local in local_names.items() if homes[local] and not left[local]]
                    self._import_new(statement, unused, new)

    def _import_new(self, node: ast.Import | ast.ImportFrom, unused: list[ast.alias], homes: set[str]) -> None:
        """Import ``homes`` beside what ``node`` imports, or instead, where nothing of it is used any more."""
        new = f"import {', '.join(sorted(homes))}"
        end = node.end_lineno or 0, node.end_col_offset or 0
        if unused and not any((node.lineno, node.col_offset) <= edit[:2] < end for edit in self._edits):
            self.stays -= len(unused)
            names = {f"import {a.name}" for a in unused} | {
                f"from {getattr(node, 'module', '')} import {a.name}" for a in unused
            }
            here = range(node.lineno, end[0] + 1)
            gone = [f for f in self.findings if f.line in here and f.old in names]
            self.findings = [Finding(f.line, f.old, new) if f in gone else f for f in self.findings]
            kept = [a for a in node.names if a not in unused]
            if kept:
                rest: ast.stmt = ast.Import(kept)
                if isinstance(node, ast.ImportFrom):
                    rest = ast.ImportFrom(node.module, kept, node.level)
                new = f"{ast.unparse(rest)}; {new}"
            self._edit(node, new)
        else:
            self._edits.append((*end, *end, f"; {new}"))

    def _text(self, node: ast.expr) -> str:
        if node.lineno != node.end_lineno:
            return ""
        return self._lines[node.lineno - 1][node.col_offset : node.end_col_offset].decode()

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
        """The script with other imports and calls, and with every other byte as it was."""
        lines = [*self._lines]
        for line, column, end_line, end_column, text in sorted(self._edits, reverse=True):
            at = (line, column), (end_line, end_column)
            if any(edit[:2] <= at[0] and at[1] <= edit[2:4] and edit[:4] != (*at[0], *at[1]) for edit in self._edits):
                continue  # in a part that another edit replaces
            new = lines[line - 1][:column] + text.encode() + lines[end_line - 1][end_column:]
            lines[line - 1 : end_line] = new.splitlines(keepends=True)
        return b"".join(lines).decode()


def _imported_by_call(call: ast.Call) -> str:
    """The module that ``importlib.import_module("...")`` or ``__import__("...")`` imports, up to the first
    value that is put in; else empty."""
    if not call.args or ast.unparse(call.func).rpartition(".")[2] not in ("import_module", "__import__"):
        return ""
    first = call.args[0]
    if isinstance(first, ast.JoinedStr) and first.values:
        first = first.values[0]
    return str(first.value).rstrip(".") if isinstance(first, ast.Constant) else ""
