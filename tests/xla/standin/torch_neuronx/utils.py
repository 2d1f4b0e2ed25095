from __future__ import annotations

import os


def get_platform_target() -> str:
    return os.environ.get("STANDIN_PLATFORM", "trn2")
