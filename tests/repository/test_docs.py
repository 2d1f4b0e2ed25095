"""Every snippet of README.md and docs/ is run, and the output that a page shows is the output it gave.

A page is a program: its snippets run in order, in one namespace, in a fresh process and an empty
directory. The fence says what happens:

    ```python                   runs
    ```python title="name.py"   is written to that file, for a command below to run
    ```bash                     python, torchrun and tpcore run; make and pip install are checked by name
    ```text title="output"      has to be found in what the snippet before it printed; `...` skips anything

Other languages are only shown. On the line before a fence, `<!-- not run: reason -->` leaves a snippet
out and `<!-- fails -->` says that a command ends with an error, which it then must.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
import time
import traceback
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from importlib.resources import files
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from helpers import programs as forked
from helpers.places import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MARK = "\x1e"  # ASCII record separator: begins each snippet's output
DECIMAL = re.compile(r"[-+]?\d+\.\d+(?:e[-+]?\d+)?")
FENCE = re.compile(r"^ *```(\w*)(.*)$")
STARTS = re.compile(r"\b(launch|parallel_model_trace|trace_causal_lm|run_replicas)\(|\"serve\"")
RUN, CHECKED, SHOWN = {"python", "torchrun", "tpcore"}, {"make", "pip"}, {"text", "toml", "json"}
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
Done = subprocess.CompletedProcess[str]


@dataclass(frozen=True)
class Snippet:
    line: int  # of the first line inside the fence, from 1
    language: str
    title: str
    code: str
    left_out: bool
    fails: bool

    @property
    def commands(self) -> list[list[str]]:
        """The command lines of a bash block, with their leading assignments put through ``env``."""
        lines = self.code.replace("\\\n", " ").splitlines() if self.language == "bash" else []
        found = [words for line in lines if (words := shlex.split(line, comments=True))]
        return [["env", *words] if "=" in words[0] else words for words in found]


def snippets(page: Path) -> Iterator[Snippet]:
    lines = page.read_text().splitlines()
    at = 0
    while at < len(lines):
        fence = FENCE.match(lines[at])
        if fence is None:
            at += 1
            continue
        language, rest = fence.groups()
        end = next(i for i in range(at + 1, len(lines)) if lines[i].strip() == "```")
        title = re.search(r'title="([^"]+)"', rest)
        before = lines[at - 1].strip() if at else ""
        yield Snippet(
            at + 2,
            language,
            title[1] if title else "",
            textwrap.dedent("\n".join(lines[at + 1 : end]) + "\n"),
            left_out=bool(re.fullmatch(r"<!-- not run: \S.* -->", before)),
            fails=before == "<!-- fails -->",
        )
        at = end + 1


def program(words: list[str]) -> str:
    return next(w for w in words if w != "env" and "=" not in w)


# -- inside the fresh process ---------------------------------------------------------------------------


def run_page(page: Path, run: Callable[[list[str]], Done]) -> None:
    module = types.ModuleType("__main__")  # without a file, as in a notebook: functions travel by value
    sys.modules["__main__"] = module
    warnings.simplefilter("error")
    for snippet in snippets(page):
        if snippet.left_out:
            continue
        sys.stdout.write(f"{MARK}{snippet.line}\n")
        sys.stdout.flush()
        for words in snippet.commands:
            if program(words) in RUN:
                done = run(words)
                sys.stdout.write(done.stdout + done.stderr)
                if bool(done.returncode) != snippet.fails:
                    sys.exit(f"{shlex.join(words)} ended with status {done.returncode}")
        if snippet.language == "python" and snippet.title:
            Path(snippet.title).write_text(snippet.code)
        elif snippet.language == "python":
            # moved down so that a traceback names the line of the page
            source = "\n" * (snippet.line - 1) + snippet.code
            exec(compile(source, str(page), "exec", dont_inherit=True), module.__dict__)
        sys.stdout.flush()


def asked_of(parent: Connection) -> Callable[[list[str]], Done]:
    """Runs a line of a bash block in a process forked by the parent's server: one begun here would have to
    import torch first."""

    def run(words: list[str]) -> Done:
        at = words.index(program(words))
        env = dict(word.split("=", 1) for word in words[:at] if "=" in word)
        parent.send((words[at:], Path.cwd(), os.environ | env))
        done: Done = parent.recv()
        return done

    return run


# -- the tests ------------------------------------------------------------------------------------------


def _alone(page: Path, directory: Path, printed_to: Path, parent: Connection) -> None:
    """The page in this process, as a reader would have it: its directory, its environment, its output."""
    for name in ("TPCORE_CHECK", "RANK", "WORLD_SIZE", "PYTHONUNBUFFERED"):  # unbuffered, lines of ranks mix
        os.environ.pop(name, None)
    os.environ |= {"OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    os.chdir(directory)
    sys.path.insert(0, "")
    with printed_to.open("w") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    try:
        run_page(page, asked_of(parent))
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def answer(page: Connection, deadline: float) -> None:
    """Run the commands of a page until it ends."""
    while page.poll(max(0.0, deadline - time.monotonic())):
        try:
            words, directory, env = page.recv()
        except (EOFError, ConnectionResetError):
            return
        page.send(forked.run(words, directory, env))


def play(page: Path, directory: Path) -> str | None:
    """What is wrong with the page, or None."""
    printed_to = directory / "printed"
    method = forked.context()
    ours, theirs = method.Pipe()
    process = method.Process(target=_alone, args=(page, directory, printed_to, theirs), daemon=False)
    process.start()
    theirs.close()
    deadline = time.monotonic() + forked.PATIENCE
    answer(ours, deadline)
    process.join(max(0.0, deadline - time.monotonic()))
    if process.exitcode is None:
        process.kill()
    printed = printed_to.read_text() if printed_to.exists() else ""
    if process.exitcode:
        return f"{page.name} fails\n{printed}"
    if process.exitcode is None:
        return f"{page.name} takes too long\n{printed}"
    outputs = {int(n): text for n, text in re.findall(rf"{MARK}(\d+)\n([^{MARK}]*)", printed)}
    last, mixed = "", False
    for snippet in snippets(page):
        if snippet.language == "text" and snippet.title == "output" and not snippet.left_out:
            if not shown_in(snippet.code, last, mixed=mixed):
                return f"{page.name}:{snippet.line} shows\n{snippet.code}but the snippet printed\n{last}"
        elif snippet.language in ("python", "bash"):
            last = outputs.get(snippet.line, "")
            mixed = any(program(words) == "torchrun" for words in snippet.commands)
    return None


def shown_in(shown: str, printed: str, *, mixed: bool = False) -> bool:
    """Whether the lines of ``shown`` are lines of ``printed`` in that order; ``...`` stands for anything.

    A number with a point may differ by 2 in its last digit: processors round differently.
    ``mixed``: of ranks under torchrun, which starts them unbuffered: a line of one may stand between
    another's line and its end.
    """
    lines = [line.strip() for line in shown.splitlines() if line.strip()]
    found = "\n".join(line.strip() for line in printed.splitlines())
    if mixed:
        match = re.search("(?:.|\n)*?".join(map(_pattern, lines)), found)
    else:
        match = re.search("(?:.*\n)*?".join(f"^{_pattern(line)}$\n?" for line in lines), found, re.MULTILINE)
    return match is not None and all(map(_close, DECIMAL.findall("\n".join(lines)), match.groups()))


def _pattern(line: str) -> str:
    texts = [re.escape(text).replace(r"\.\.\.", ".*?") for text in DECIMAL.split(line)]
    return f"({DECIMAL.pattern})".join(texts)


def _close(shown: str, printed: str) -> bool:
    mantissa, _, exponent = shown.partition("e")
    unit = 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))
    return abs(float(shown) - float(printed)) < 2.5 * unit


def _pages() -> list[object]:
    out = []
    for page in PAGES:
        todo = [s for s in snippets(page) if s.language in ("python", "bash") and not s.left_out]
        starts = any(STARTS.search(s.code) or RUN & set(map(program, s.commands)) for s in todo)
        if todo:
            marks = [pytest.mark.slow, pytest.mark.processes] if starts else []
            out.append(pytest.param(page, id=str(page.relative_to(ROOT)), marks=marks))
    return out


@pytest.mark.parametrize("page", _pages())
def test_snippets_run(page: Path, tmp_path: Path) -> None:
    problem = play(page, tmp_path)
    if problem is not None:
        pytest.fail(problem, pytrace=False)


def test_the_notebook_runs(tmp_path: Path) -> None:
    """Its cells in order, and the texts that it holds; of what rounds, whatever the digits."""
    page = tmp_path / "notebook.md"
    with page.open("w") as out:
        # pictures are drawn, and there is no window to show them in
        silent = ("import matplotlib.pyplot", 'matplotlib.use("svg")', "matplotlib.pyplot.show = lambda: None")
        out.write("\n".join(("```python", *silent, "```\n")))
        for cell in json.loads((ROOT / "docs/assets/first-look.ipynb").read_text())["cells"]:
            text = "".join("".join(output.get("text", "")) for output in cell.get("outputs", ()))
            if cell["cell_type"] == "code":
                out.write(f"```python\n{''.join(cell['source'])}\n```\n")
            if text:
                out.write(f'```text title="output"\n{re.sub(r"[0-9]e-[0-9]+", "...", text)}```\n')
    problem = play(page, tmp_path)
    if problem is not None:
        pytest.fail(problem, pytrace=False)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_snippet_escapes(page: Path) -> None:
    """Only known languages and commands, and a file that a page shows is run by its commands or imported by another."""
    found = [s for s in snippets(page) if not s.left_out]
    ran = [word for s in found for words in s.commands for word in words]
    ran += [f"{name}.py" for s in found for name in re.findall(r"^(?:from|import) (\w+)", s.code, re.MULTILINE)]
    wide = [line for s in snippets(page) if s.language != "text" for line in s.code.splitlines() if len(line) > 92]
    assert wide == [], "a window of 1280 shows 92 columns of code; what a program prints it wraps"
    for snippet in found:
        where = f"{page.name}:{snippet.line}"
        assert snippet.language in {"python", "bash"} | SHOWN, f"{where}: language {snippet.language!r}"
        if snippet.language == "python" and snippet.title:
            assert any(word.partition(":")[0] == snippet.title for word in ran), (
                f"{where}: no command runs {snippet.title}"
            )
        for words in snippet.commands:
            assert program(words) in RUN | CHECKED, f"{where}: {words} would not be run"
            check_names(words, where)


def check_names(words: list[str], where: str) -> None:
    """A make target exists, and so do the extras of a pip line."""
    if program(words) == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        for word in words[1:]:
            assert "=" in word or word in targets, f"{where}: make has no target {word}"
    for extras in re.findall(r"tpcore\[(.+?)\]", " ".join(words)) if program(words) == "pip" else []:
        for extra in extras.split(","):
            assert re.search(rf"^{extra} = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE), (
                f"{where}: no extra {extra}"
            )


DEFAULT = r"`(\w+)` \(default\)|default `(\w+)`\)"


def test_environment_page_has_every_variable() -> None:
    """Each ``Variable`` of ``tpcore.settings``, the backends and ``tpcore_serve`` once, no other, with its default."""
    from tpcore.settings import Variable  # here: a page's process is spared it

    modules = ("tpcore.settings", "tpcore_cpu_gloo.backend", "tpcore_cuda", "tpcore_cuda.backend")
    variables = {
        v.name: v
        for module in (*modules, "tpcore_neuron.settings", "tpcore_serve")
        for v in vars(importlib.import_module(module)).values()
        if isinstance(v, Variable)
    }
    page = (ROOT / "docs/environment.md").read_text()
    values = re.findall(r"^- `(\w+)` (\(.+\)): \S", page, re.MULTILINE)
    assert sorted(name for name, _ in values) == sorted(variables)
    defaults = {name: said[1] or said[2] for name, text in values if (said := re.search(DEFAULT, text))}
    some = {name for name, text in values if "default" in text} - defaults.keys()
    assert some == {"OMP_NUM_THREADS", "THP_MEM_ALLOC_ENABLE"}, "of some processes alone"
    assert [name for name, text in defaults.items() if variables[name].parse(text) != variables[name].default] == []


def test_the_page_on_backends_names_all_that_a_plugin_may_write() -> None:
    import tpcore  # here: a page's process is spared it
    from tpcore.comm.transport import PRIMITIVES

    page = (ROOT / "docs/writing-a-backend.md").read_text()
    own = {name for name in vars(tpcore.backend.Backend) if not name.startswith("_")} - {"comm", "comm_of"}  # final
    own |= {field.name for field in fields(tpcore.backend.Capabilities)}
    own |= {"PeerLostError", "CollectiveTimeoutError", "compares", "eager", "position", "index", *PRIMITIVES}
    assert {name for name in own if not re.search(rf"\b{name}\b", page)} == set()
    table = (ROOT / "docs/reference/backend.md").read_text()
    methods = {name for name, value in vars(tpcore.comm.Transport).items() if callable(value)} - {"at"}
    assert {name for name in methods if name[0] != "_" and f"| `{name}(" not in table} == set()


@pytest.mark.parametrize("page", sorted((ROOT / "docs/reference").glob("*.md")), ids=lambda p: p.stem)
def test_reference_shows_every_class_in_use(page: Path) -> None:
    """In Python that is run with the page, or on a guide that it links."""
    text = page.read_text()
    guides = [page, *(page.parent / link for link in re.findall(r"\]\((\S+\.md)", text))]
    code = "\n".join(s.code for guide in guides for s in snippets(guide) if s.language == "python")
    classes = {name.rpartition(".")[2] for name in re.findall(r"^::: (\S+\.[A-Z]\w+)$", text, re.MULTILINE)}
    assert {name for name in classes if not re.search(rf"\b{name}\b", code)} == set()


def test_reference_has_every_public_name() -> None:
    import tpcore  # here: a page's process is spared it

    text = "\n".join(p.read_text() for p in (ROOT / "docs/reference").glob("*.md"))
    shown = {name.rpartition(".")[2] for name in re.findall(r"^::: (\S+)", text, re.MULTILINE)}
    documented_elsewhere = {"parallel_layers", "parallel_state"}  # in migrating-from-nxd.md
    modules = {"checkpoint", "optim", "random", "trace"}  # their functions are there one by one
    assert set(tpcore.__all__) - shown - documented_elsewhere - modules == set()


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("```python\nprint(1 + 1)\n```\n```text title=\"output\"\n2\n```\n", None),
        ("```python\nprint(1 + 1)\n```\n```text title=\"output\"\n3\n```\n", "shows"),
        ("```python\nx = 1\n```\nand\n```python\nassert x == 2, x\n```\n", "AssertionError: 1"),
        ("<!-- not run: it fails -->\n```python\nraise SystemExit(1)\n```\n", None),
        ("```python title=\"a.py\"\nprint('a', 'b')\n```\n```bash\npython a.py\n```\n"
         "```text title=\"output\"\na ...\n```\n", None),
        ("```bash\npython no_such_file.py\n```\n", "no_such_file.py ended with status 1"),
        ("<!-- fails -->\n```bash\npython no_such_file.py\n```\n", None),
        ("<!-- fails -->\n```bash\npython -m this\n```\n", "ended with status 0"),
    ],
)  # fmt: skip
def test_the_player_itself(text: str, wrong: str | None, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    problem = play(page, tmp_path)
    assert (problem is None) if wrong is None else (problem is not None and wrong in problem)


def test_the_picture_of_the_benchmarks_has_the_figures_of_the_table() -> None:
    """Of all its rows but that of the small size, as lengths too: 85 stand for 1."""
    table = (ROOT / "benchmarks/README.md").read_text().partition("\n\n|")[2].partition("\n\n")[0].splitlines()[2:]
    rows = [re.findall(r"(?<![=\w])\d+(?:\.\d+)?", row.partition(" | ")[2]) for row in table if "the same" not in row]
    drawn = (ROOT / "docs/assets/benchmarks.svg").read_text().split('class="head"')[1:]
    bars = [re.findall(r'<rect .* width="([\d.]+)" .*>([\d.]+)</text>', part) for part in drawn]
    assert [[float(text) for _, text in part] for part in bars] == [[float(figure) for figure in row] for row in rows]
    assert all(float(width) == pytest.approx(85 * float(text)) for part in bars for width, text in part)


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
def test_a_name_in_a_table_stays_in_one_piece(tmp_path: Path) -> None:
    """However narrow the table: Material's own style breaks it anywhere. What breaks it is between its words."""
    style = (files(pytest.importorskip("material")) / "templates/assets/stylesheets").iterdir()
    own = (path.read_text() for path in style if path.name.startswith("main."))
    cell = "<td><code>get_tensor_model_parallel_group(as_list=False)</code></td>"
    page = tmp_path / "page.html"
    page.write_text(
        f"<style>{''.join(own)}{(ROOT / 'docs/assets/site.css').read_text()}</style>"
        '<article class="md-typeset" style="width: 360px"><p><code>a --b</code><span class="doc-object-name">a_b.CdEf'
        f"</span></p><table><tr>{cell}<td>{'a word ' * 30}</td>{cell}</table></article>"
        f"<script>{(ROOT / 'docs/assets/words.js').read_text()}"
        "const codes = [...document.querySelectorAll('code')].map((c) => c.getClientRects().length);"
        "document.title = [...codes, document.querySelector('span').innerHTML.split('<wbr>')]</script>"
    )
    assert titled(page) == "1,1,1,a_,b.,Cd,Ef"


def titled(page: Path) -> str:
    """The title that a page gives itself in a browser."""
    words = ["--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", f"--user-data-dir={page.parent / 'user'}"]
    done = subprocess.run(
        [str(BROWSER), *words, page.as_uri()], capture_output=True, text=True, check=True, timeout=forked.PATIENCE
    )
    return done.stdout.partition("<title>")[2].partition("</title>")[0]


ASK = """
const ask = (selector, value) => {
  const input = document.querySelector(`#families-filter ${selector}`);
  typeof value === "boolean" ? (input.checked = value) : (input.value = value);
  input.dispatchEvent(new Event("input", { bubbles: true }));
  const shown = [...document.querySelectorAll("tbody tr")].filter((row) => row.offsetHeight > 0);
  return shown.map((row) => row.cells[0].textContent).join();
};
document.addEventListener("DOMContentLoaded", () => {
  const all = ask("[type=search]", "").split(",").length;
  const found = [ask("[type=search]", "xtra"), ask("[value=cp]", true), ask("[type=search]", "")];
  document.title = [all, ...found, ask("[value=cp]", false).split(",").length, ask("[type=number]", 50)].join(";");
});
"""


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
def test_the_page_of_families_is_filtered_by_name_words_and_share(tmp_path: Path) -> None:
    """The page itself, with a row that no other is like."""
    markdown = pytest.importorskip("markdown")
    text = (ROOT / "docs" / "families.md").read_text()
    own = "| `xtra` | 50% | sp cp |\n| `xtra2` | 51%: `a.*` | sp |"
    head = "| type | of a rank | also with |\n| --- | --- | --- |"
    text = re.sub(r"^\| `.*\n", "", text, flags=re.M).replace(head, f"{head}\n{own}", 1)
    page = tmp_path / "page.html"
    scripts = f"<script>{(ROOT / 'docs/assets/families.js').read_text()}{ASK}</script>"
    page.write_text(scripts + markdown.markdown(text, extensions=["tables"]))
    assert titled(page) == "2;xtra,xtra2;xtra;xtra;2;xtra"
