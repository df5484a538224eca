"""Run every benchmark, one after another; each prints its figures beside a floor and its peers.

python benchmarks/run_all.py [--quick]
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
QUICK = {
    "bench_batch_api.py": ["--upload-mb", "50"],
    "bench_batcher.py": ["--quick"],
    "bench_gateway.py": ["--requests", "2000", "--rounds", "1"],
    "bench_million.py": ["--requests", "100000"],
    "bench_run.py": ["--requests", "4000", "--rounds", "1"],
}


def main() -> int:
    """Run them; returns the number that failed."""
    failed = 0
    for path in sorted(HERE.glob("bench_*.py")):
        print(f"\n=== {path.stem} ===\n", flush=True)
        more = QUICK.get(path.name, []) if "--quick" in sys.argv else []
        failed += bool(subprocess.run([sys.executable, str(path), *more], check=False).returncode)
    return failed


if __name__ == "__main__":
    sys.exit(main())
