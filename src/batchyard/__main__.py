"""`python -m batchyard`, and a clear word where the command line's packages are missing."""

from __future__ import annotations

import sys


def main() -> None:
    """Start the command line, or say which extra to install."""
    try:
        from batchyard.cli import app  # noqa: PLC0415 - the message below must not need the packages
    except KeyboardInterrupt:
        sys.stderr.write("Interrupted before anything ran.\n")
        raise SystemExit(3) from None
    except ModuleNotFoundError as missing:
        if missing.name is not None and missing.name.startswith("batchyard"):
            raise
        sys.stderr.write(
            f"The batchyard command needs the package {missing.name!r}, which is not installed. "
            "Install it with: pip install 'batchyard[local]' (with embedded models) "
            "or 'batchyard[server]' (without).\n"
        )
        raise SystemExit(2) from None
    app()


if __name__ == "__main__":
    main()
