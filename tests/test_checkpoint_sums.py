"""Checksums of what is written in parts are those of the whole."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpcore.checkpoint.storage import files
from tpcore.checkpoint.storage.files import combined_crc32


@given(st.lists(st.binary(max_size=300), max_size=6), st.integers(0, 5000))
def test_joined(parts: list[bytes], zeros: int) -> None:
    parts.append(bytes(zeros))
    assert combined_crc32((zlib.crc32(p), len(p)) for p in parts) == zlib.crc32(b"".join(parts))


@pytest.mark.parametrize("sizes", [(), (0,), (5, 0, 7), (10, 23, 1, 40)])
def test_write_parts(sizes: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks of all sizes, some of which have the disk begin early."""
    monkeypatch.setattr(files, "CHUNK", 7)
    monkeypatch.setattr(files, "_EARLY", 14)
    parts = [bytes(range(size)) for size in sizes]
    record, crcs = files.write_parts(str(tmp_path / "f"), ([part[:5], part[5:]] for part in parts))
    assert (tmp_path / "f").read_bytes() == b"".join(parts)
    assert record == (sum(sizes), f"{zlib.crc32(b''.join(parts)):08x}")
    assert crcs == [f"{zlib.crc32(part):08x}" for part in parts]
