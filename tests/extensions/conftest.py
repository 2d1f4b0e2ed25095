"""What programs of the extensions' tests import is in the server that forks them."""

from __future__ import annotations

from helpers.programs import PRELOAD

PRELOAD += ["tpcore_hf.trainer", "transformers.models.llama.modeling_llama"]  # twice as long as the rest
