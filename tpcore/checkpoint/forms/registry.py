"""All readable forms of checkpoint, and the function that opens any of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack

from ...backend.extensions import manager
from ...errors import CheckpointError
from ..storage.files import MANIFEST, PREFIX
from . import native, whole
from .source import Form, Reading, Source


def forms() -> Iterator[Form]:
    """In the order in which they are tried: tpcore's own, those of extensions, unsharded models."""
    yield native.FORM
    for added in manager().hook.tpcore_checkpoint_forms():
        yield from added
    yield whole.FORM


def open_source(path: str, how: Reading, stack: ExitStack, *, sharded: bool | None = None) -> Source:
    """Open a checkpoint of any form, until ``stack`` closes. ``sharded``: only forms with this property."""
    for form in forms():
        if sharded in (None, form.sharded) and (source := form.open(path, how, stack)) is not None:
            return source
    raise CheckpointError(_unknown(path, sharded))


def _unknown(path: str, sharded: bool | None) -> str:
    if not os.path.exists(path):
        return f"{path} does not exist"
    if not os.path.isdir(path):
        return f"{path} is a file: give sharded=False" if sharded else f"{path} is neither a file nor a directory"
    names = sorted(os.listdir(path))
    if sharded or (sharded is None and any(name.startswith(PREFIX) for name in names)):
        contents = f"it holds {names[:3]}" if names else "it is empty"
        return f"{path} is no checkpoint: {os.path.join(path, MANIFEST)} is missing ({contents})"
    return f"{path} is a directory without model.safetensors or pytorch_model.bin, or an index of either"
