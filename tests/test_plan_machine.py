"""Machines for planning: published figures, files, calibration, simulated failures and pictures."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tpcore.diagnose.plan.machine import LINK_EFFICIENCY, MATMUL_EFFICIENCY, PUBLISHED, Machine, find


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_machine_is_the_same_after_its_file(name: str, tmp_path: Path) -> None:
    machine = find(name, hosts=3)
    machine.write(tmp_path / "machine.json")
    assert find(str(tmp_path / "machine.json"), hosts=3) == machine
    assert Machine.read(tmp_path / "machine.json").devices == 3 * machine.per_host
    measured = {"per_host", "memory", "flops", "memory_bandwidth", "overhead", "inside", "between"}
    assert set(machine.source) == measured  # each figure has a source


def test_a_large_matmul_nears_the_assumed_part_of_the_peak() -> None:
    h100 = find("h100x8")
    assert h100.rate("bfloat16", 1e16) == pytest.approx(MATMUL_EFFICIENCY * 989.4e12, rel=0.05)  # memory's part
    assert h100.rate("bfloat16", 1) < h100.rate("bfloat16", 1e9) < h100.rate("bfloat16", 1e12)
    assert h100.inside.bandwidth == LINK_EFFICIENCY * 450e9
    with pytest.raises(ValueError, match="h100x8 has no matmul rate for 'float8'; it has bfloat16, float16, float32"):
        h100.rate("float8", 1e9)


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("memory", 1.5, "memory must be a whole number above 0, not 1.5"),
        ("per_host", True, "per_host must be a whole number above 0, not True"),
        ("name", 7, "name must be a text, not 7"),
        ("overhead", -1.0, "overhead must be a number of at least 0, not -1.0"),
        ("overlap", "yes", "overlap must be true or false, not 'yes'"),
        ("memory_bandwidth", "fast", "memory_bandwidth must be a number above 0, not 'fast'"),
        ("inside", {"latency": 1}, "inside must be an object of latency and bandwidth, not {'latency': 1}"),
        ("between", {"latency": 0, "bandwidth": 0}, "between.bandwidth must be a number above 0, not 0"),
        ("flops", {}, "flops must name at least one dtype"),
        ("flops", {"float32": [1, 2]}, "flops.float32 must be pairs of FLOPs and FLOP/s, not [1, 2]"),
        ("flops", {"float32": [[2, 1], [2, 1]]}, "flops.float32 must be pairs with ascending FLOPs"),
        ("flops", {"float32": []}, "flops.float32 must be pairs with ascending FLOPs, at least one, not ()"),
        ("colour", "red", "unknown field 'colour' with 'red'"),
    ],
)
def test_a_wrong_file_is_one_error_with_field_and_value(field: str, value: Any, text: str, tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    find("cpu").write(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    with pytest.raises(ValueError, match=re.escape(f"{path} describes no machine: {text}")):
        Machine.read(path)


@pytest.mark.parametrize(
    ("content", "text"), [("[]", r"holds \[\]"), ('{"name": "x"}', "'per_host' is missing"), ("{", "Expecting")]
)
def test_a_file_of_something_else(content: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "m.json").write_text(content)
    with pytest.raises(ValueError, match=text):
        Machine.read(tmp_path / "m.json")


def test_an_unknown_machine_is_named_with_those_there_are() -> None:
    with pytest.raises(
        ValueError, match=r"no machine 'h100x9': it is neither a file nor one of trn1.32xlarge, .*--cal"
    ):
        find("h100x9")
    with pytest.raises(ValueError, match="hosts must be a whole number above 0, not 0"):
        replace(find("cpu"), hosts=0)
