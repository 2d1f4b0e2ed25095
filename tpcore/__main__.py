"""``python -m tpcore``: the command line where no script of that name is on the path."""

from __future__ import annotations

from .cli import main

if __name__ == "__main__":
    main()
