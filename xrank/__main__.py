"""The program ``xrank``, also as ``python -m xrank``."""

from __future__ import annotations

import atexit
import gc
from typing import NoReturn

_OBJECTS_BETWEEN_COLLECTIONS = 100_000
"""More objects than imports and a small run make."""


def main() -> NoReturn:
    """Run the command line and leave with its exit code."""
    # Imports make objects that stay. Python would look through them for garbage a hundred times while it imports, which
    # is a tenth of a small run, and twice before it ends.
    gc.set_threshold(_OBJECTS_BETWEEN_COLLECTIONS)
    atexit.register(gc.freeze)

    from xrank.cli.main import main as run_command  # here, so that its imports are spared, too

    run_command()


if __name__ == "__main__":
    main()
