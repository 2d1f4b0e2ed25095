"""Private names of torch_xla that the product uses: each is there."""

from __future__ import annotations

import pytest
import torch_xla
from helpers.xla_names import XLAC


@pytest.mark.parametrize("name", XLAC)
def test_it_is_there(name: str) -> None:
    assert callable(getattr(torch_xla._XLAC, name))
