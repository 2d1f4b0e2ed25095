"""All commands, of the core and of extensions, have one style: of their help, their errors, and ``--json``."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from helpers.places import ROOT
from safetensors.torch import save_file
from torch import ones
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from tpcore.cli.app import app

WIDTH = 80


def walk(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield path, group
    for name, command in getattr(group, "commands", {}).items():
        yield from walk(command, (*path, name))


ALL = dict(walk(typer.main.get_command(app)))
COMMANDS = {path: command for path, command in ALL.items() if not hasattr(command, "commands")}


@pytest.mark.parametrize("path", ALL, ids=" ".join)
def test_help(path: tuple[str, ...]) -> None:
    """At 80 columns no name and no sentence is cut; there is an example, and a page that is there."""
    result = CliRunner().invoke(app, [*path, "--help"], terminal_width=WIDTH)
    assert result.exit_code == 0
    assert max(map(len, result.output.splitlines())) <= WIDTH
    assert "..." not in re.sub(r"(command|paths|arguments|ARGS)\W*\.\.\.", "", result.output)
    assert "…" not in result.output
    for parameter in ALL[path].params:
        options = [*parameter.opts, *parameter.secondary_opts]
        assert all(option in result.output for option in options if option.startswith("-"))
    examples = re.findall(r"^ +tpcore (.*)$", result.output.partition("Examples:\n")[2], re.MULTILINE)
    assert examples
    assert all(example.startswith(" ".join(path)) for example in examples)
    (page,) = re.findall(r"^ +Docs: (docs/\S+)$", result.output, re.MULTILINE)
    assert (ROOT / page).is_file()


def defaults() -> Iterator[Any]:
    for path, command in COMMANDS.items():
        for parameter in command.params:
            yield pytest.param(parameter, id=" ".join((*path, str(parameter.name))))


@pytest.mark.parametrize("parameter", [*defaults()])
def test_options(parameter: Any) -> None:
    """``--json`` is a flag, numbers are round, and every argument says what it is."""
    assert parameter.help
    assert "--json" not in parameter.opts or parameter.is_flag
    assert not isinstance(parameter.default, float) or len(f"{parameter.default:g}") <= 4


def refused(*words: str) -> str:
    """The one line on stderr."""
    result = CliRunner().invoke(app, [*words], terminal_width=WIDTH)
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    return line


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_wrong_words(path: tuple[str, ...]) -> None:
    name = " ".join(("tpcore", *path))
    assert refused(*path, "--no-such-option").startswith(f"{name}: ")
    for option in re.findall(r"(--[\w-]+) <int", CliRunner().invoke(app, [*path, "--help"]).output):
        line = refused(*path, option, "many")
        assert line.startswith(f"{name}: ")
        assert option in line
        assert "'many'" in line
        assert line.endswith(f"see {name} --help")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("doctor --json=1", "tpcore doctor: Option '--json' does not take a value; see tpcore doctor --help"),
        ("checkpoint diff a b --json=1", "tpcore checkpoint diff: Option '--json' does not take a value; see "),
        ("checkpoint --help=1", "tpcore checkpoint: Option '--help' does not take a value; see tpcore checkpoint "),
        ("plna", "tpcore: No such command 'plna'. Did you mean 'plan'?; see tpcore --help"),
        (
            "checkpoint dif",
            "tpcore checkpoint: No such command 'dif'. Did you mean 'diff'?; see tpcore checkpoint --help",
        ),
        ("compile --backend no -- x", "tpcore compile: no backend 'no' is installed; there are "),
        ("verify --backend no", "tpcore verify: no backend 'no' is installed; there are "),
        ("verify --model no", "tpcore verify: --model no has no config.json: name a folder of a transformers model"),
        ("plan no", "tpcore plan: there is no file, folder or model class of transformers no; "),
        ("explain no", "tpcore explain: there is no file, folder or model class of transformers no; "),
        ("explain no --dtype int", "tpcore explain: torch has no floating dtype 'int'"),
        ("serve no", "tpcore serve: no has no config.json: it is no model in transformers' files"),
        ("export no", "tpcore export: "),
        ("export no --for no", "tpcore export: --for no: there are "),
        ("migrate no", "tpcore migrate: there is no no"),
        ("checkpoint inspect no", "tpcore checkpoint inspect: no does not exist"),
        ("checkpoint inspect no --cut x", "tpcore checkpoint inspect: --cut x: PATTERN=DIM or PATTERN=DIM:STRIDE"),
        ("checkpoint reshard no out --tp 2", "tpcore checkpoint reshard: no does not exist"),
    ],
)
def test_wrong_values(words: str, said: str) -> None:
    told = refused(*words.split())
    assert told.startswith(said)
    assert "(rank" not in told  # a command is one process


def test_a_file_that_is_no_python(tmp_path: Path) -> None:
    """In each call, of one process too."""
    path = tmp_path / "no_python.py"
    path.write_text("def f(:\n")
    for name in ("plan", "explain"):
        assert refused(name, f"{path}:f") == f"tpcore {name}: SyntaxError: invalid syntax (no_python.py, line 1)"


@pytest.mark.parametrize("words", ["", "checkpoint"])
def test_a_name_alone_shows_its_help(words: str) -> None:
    result = CliRunner().invoke(app, words.split())
    assert result.output.startswith(f"Usage: {' '.join(('tpcore', *words.split()))}")


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, and a file to compare."""
    folder = tmp_path_factory.mktemp("there")
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 16}
    LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)).save_pretrained(folder)
    save_file({"a": ones(2)}, folder / "a.safetensors", metadata={"format": "pt"})
    return folder


PATHS = [
    *(
        (
            f"checkpoint {name} {{}} {{}}/{out}",
            f"{{}}/{out} is the name of a file, and a folder is written: give {give}",
        )
        for name, give in (("consolidate", "{}/"), ("convert", "{}/o.safetensors, or for a folder {}/"))
        for out in ("o.bin", "o.pt/")
    ),
    *(
        (f"checkpoint {name} {{}} {{}}/a.safetensors/o", "a.safetensors is there already, a file")
        for name in ("convert", "consolidate")
    ),
    ("checkpoint reshard {} {}/config.json/o --tp 1", "{}/config.json is there already, a file: give another name"),
    ("checkpoint verify no", "no does not exist"),
    ("checkpoint inspect {}/a.safetensors/", "{}/a.safetensors/ is a file: leave out the slash at its end"),
    ("checkpoint inspect {}/config.json", "has written: give one, or a checkpoint's folder"),
    ("checkpoint inspect --model-key=", "word 3 is empty, '--model-key=': give a value"),
    ("plan {} --html=~/no/p.html", "/no: make it, or give another"),
    *((f"{name} no/config.json", "there is no file or folder no/config.json") for name in ("plan", "explain")),
    *(
        (f"plan {{}} --html={path}", f"--html {told}")
        for path, told in (
            ("{}/config.json", "{}/config.json: name a file that ends in .html"),
            ("{}", "{}: name a file that ends in .html"),
        )
    ),
    *(
        (f"{name} {{}} --plot {{}}/config.json/p.svg", "there is no folder {}/config.json: make it")
        for name in ("plan", "explain")
    ),
    ("verify --save {}/config.py", "--save {}/config.py: name a file that ends in .json"),
    ("explain {} --tp 2 --plan {}/a.safetensors", "{}/a.safetensors is no JSON"),
    ("export {}/config.json", "there is no {}/config.json/config.json, which save_pretrained writes: give its folder"),
    ("migrate {}", "no Python file (.py) is in {}"),
]


@pytest.mark.parametrize(("words", "said"), PATHS)
def test_paths(words: str, said: str, there: Path) -> None:
    """A folder for a file, a file for a folder, ``~``, a slash at the end: told before anything is read or written."""
    before = {path: path.stat().st_mtime_ns for path in there.rglob("*")}
    line = refused(*words.replace("{}", str(there)).split())
    assert said.replace("{}", str(there)) in line
    assert "~" not in line
    assert {path: path.stat().st_mtime_ns for path in there.rglob("*")} == before


TABLES = (
    "backends",
    "explain {} --plan auto --tp 2 --seq-len 4",
    "export {} --tp 3",
    "plan {} --devices 2 --seq-len 4 --batch 4 --all",
)


@pytest.mark.parametrize("words", TABLES)
def test_tables(words: str, there: Path) -> None:
    """On a terminal of 80 columns no cell is broken within a word."""
    words = words.format(there)
    narrow, wide = (
        CliRunner()
        .invoke(app, words.split(), env={"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": str(columns)})
        .stdout
        for columns in (WIDTH, 1000)
    )
    said = [re.sub(r"\x1b\[[\d;]*m", "", text).split() for text in (narrow, wide)]
    assert sorted(said[0]) == sorted(said[1])
    assert any("\x1b[1m" in line for line in narrow.splitlines())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("explain {} --seq-len 4", "recording a training step"),
        ("export {} --for transformers", "reading the files"),
        ("plan {} --devices 2 --seq-len 4 --batch 4", "predicting steps on every mesh"),
        ("verify --backend cpu_gloo", "verifying"),
        ("verify --backend cpu_gloo --model {}", "verifying"),
        ("verify {}/train.py", "verifying"),
    ],
)
def test_a_line_while_it_works(words: str, said: str, there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes seconds says so, on a terminal alone."""

    def full(*args: Any, **options: Any) -> None:
        raise OSError("no process can be started")

    for module in ("command", "script.run"):
        monkeypatch.setattr(f"tpcore_explain.verify.{module}.launch", full)
    for env in ({"FORCE_COLOR": "1", "TERM": "xterm"}, {}):
        shown = CliRunner().invoke(app, words.format(there).split(), env=env).stderr
        assert (said in shown) == bool(env)


@pytest.mark.parametrize(
    "words",
    [
        "backends",
        "doctor",
        "export {} --for transformers",
        "explain {} --seq-len 4",
        "plan {} --devices 2 --seq-len 4 --batch 4",
        "checkpoint inspect {}/a.safetensors",
        "checkpoint diff {0}/a.safetensors {0}/a.safetensors",
        "checkpoint verify {}/a.safetensors",
    ],
)
def test_json(words: str, there: Path) -> None:
    result = CliRunner().invoke(app, [*words.format(there).split(), "--json"])
    assert result.exit_code in (0, 1), result.output
    json.loads(result.stdout)
