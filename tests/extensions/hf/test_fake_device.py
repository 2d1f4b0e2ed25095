"""Models of transformers, with contexts and experts, on a device that is not the CPU, whose values nobody may read."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from helpers.places import TESTS


@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"), reason="torch is older"
)
def test_no_tensor_of_a_model_is_on_a_wrong_device() -> None:
    script = TESTS / "scripts" / "fake_device_models.py"
    done = subprocess.run([sys.executable, "-W", "ignore", script], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["llama", "context", "experts"], done.stderr
