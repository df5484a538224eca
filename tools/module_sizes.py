"""Fail when a module grows past 600 lines: most should stay under 400."""

import sys
from pathlib import Path

LIMIT = 600


def main() -> int:
    """Print every module over the limit; return the exit code."""
    root = Path(__file__).resolve().parent.parent
    over = [
        (len(path.read_text().splitlines()), path.relative_to(root))
        for folder in ("src", "tests", "benchmarks", "tools")
        for path in sorted((root / folder).rglob("*.py"))
    ]
    over = [(lines, path) for lines, path in over if lines > LIMIT]
    for lines, path in over:
        print(f"{path}: {lines} lines; split it by what it decides (limit {LIMIT}).")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
