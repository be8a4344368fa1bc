"""The command `torch-nimble`, which is also `python -m torch_nimble`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line. Ctrl-C leaves no traceback while that is loaded, either."""
    try:
        from torch_nimble.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
