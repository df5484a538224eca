"""The batcher beside a bare asyncio future and its peers: cost of a call, memory, latency under load.

    python benchmarks/bench_batcher.py [--peers-python PATH] [--rounds 5] [--quick] [--real]

Each figure comes from a process of its own; rounds of all contenders alternate, so that a slow spell of the
machine meets all of them, and the best round of each counts. Peers are measured where *PATH* is the Python
of an environment made from `requirements/peers-batcher.txt`; each gets the best of its settings: no delay
or 1 ms for the cost of a call; 0, 2 or 10 ms under load, as some of them need a delay to batch at all.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
FLOOR, OURS, ALL_ON = "bare asyncio future", "batchyard", "batchyard, tiers + budget + deadlines"
#: Without its peers, it is measured beside the floor alone.
PEERS = (
    "aiodataloader",
    "batchlet",
    "bentoml CorkDispatcher",
    "async-batcher",
    "batched",
    "aioautobatch",
    "ray @serve.batch",
    "litserve BatchedLoop",
)
#: Take-all on the queueing model, mean and p99 in ms at 30, 60 and 90 % of capacity: 200,000 simulated
#: arrivals, computed apart from this code.
TAKE_ALL = {0.3: (9.24, 12.98), 0.6: (11.56, 16.88), 0.9: (15.80, 24.78)}


def measure(python: str, *args: object, timeout_s: float = 120) -> dict[str, float]:
    """One contender in a process of its own; empty where it is missing, failed or never finished."""
    command = [python, str(HERE / "batcher_contenders.py"), *map(str, args)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return {}
    if done.returncode == 3:
        return {}
    if done.returncode or not done.stdout.strip():
        print(f"  {args[1]} failed: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
        return {}
    found: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def overhead(python: str, peers: tuple[str, ...], callers: int, rounds: int, loop: str) -> None:
    """CPU and wall a call in a closed loop, beside the floor of the same run."""
    calls = {1: 10_000, 100: 60_000}.get(callers, 100_000)
    best: dict[str, tuple[float, float]] = {}
    for _ in range(rounds):
        for name in (FLOOR, OURS, ALL_ON, *peers):
            # A slow one would make the round long, and needs no precision.
            for wait_ms in (0, 1) if name in peers else (0,):
                if wait_ms == 1 and callers == 1:
                    continue
                found = measure(python, "overhead", name, callers, calls, wait_ms, loop)
                if found and found["cpu_us"] < best.get(name, (1e9, 0.0))[0]:
                    best[name] = (found["cpu_us"], found["wall_us"])
    floor = best[FLOOR][0]
    print(f"\n{callers:,} concurrent callers, {loop}: CPU microseconds a call\n")
    for name, (cpu, wall) in sorted(best.items(), key=lambda one: one[1]):
        print(f"  {name:40} {cpu:8.2f}  {cpu / floor:7.2f} x floor   (wall {wall:.2f})", flush=True)


def memory(python: str, peers: tuple[str, ...], items: int) -> None:
    """Bytes a queued item."""
    print(f"\nBytes for each of {items:,} queued items, without the caller's task\n")
    for name in (FLOOR, OURS, ALL_ON, *peers):
        if name == "litserve BatchedLoop":
            # Its queue lies in another thread that keeps emptying it.
            continue
        found = measure(python, "memory", name, items)
        if found:
            print(f"  {name:40} {found['bytes']:8.0f}", flush=True)


def poisson(python: str, peers: tuple[str, ...], arrivals: int, clock: str) -> None:
    """Latency under Poisson load beside take-all."""
    print(f"\nPoisson arrivals, one server, 5 ms + 0.2 ms x n, at most 32: latency in ms, {clock} time")
    for load, (mean_ms, p99_ms) in TAKE_ALL.items():
        print(f"\n  {load:.0%} of capacity{'mean':>26} {'p99':>9} {'batch':>8}")
        if clock == "virtual":
            print(f"    {'take-all, simulated':34} {mean_ms:7.2f} {p99_ms:9.2f}")
        for name in (OURS, ALL_ON, *peers):
            if clock == "virtual" and name in {"batched", "litserve BatchedLoop"}:
                # Their timing is that of threads, which know no virtual clock.
                continue
            found = [
                one
                for wait_ms in ((0, 2, 10) if name in peers else (0,))
                if (one := measure(python, "poisson", name, load, arrivals, wait_ms, clock))
            ]
            if not found:
                continue
            one = min(found, key=lambda figures: figures["mean_ms"])
            if one["diverges"]:
                print(f"    {name:34} {'grows without end':>17} {one['batch']:8.1f}", flush=True)
                continue
            line = f"    {name:34} {one['mean_ms']:7.2f} {one['p99_ms']:9.2f} {one['batch']:8.1f}"
            print(line, flush=True)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--peers-python", help="Python of an environment with the peers")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one round, fewer arrivals")
    parser.add_argument("--real", action="store_true", help="latency in real time too (minutes)")
    parser.add_argument("--loop", default="asyncio", choices=("asyncio", "uvloop"))
    parser.add_argument("--only", choices=("overhead", "memory", "poisson"))
    args = parser.parse_args()
    python = args.peers_python or sys.executable
    peers = PEERS if args.peers_python else ()
    if not peers:
        print("No peers: give --peers-python the Python of an environment with them.")
    rounds = 1 if args.quick else args.rounds
    if args.only in {None, "overhead"}:
        for callers in (1, 100, 10_000):
            overhead(python, peers, callers, rounds, args.loop)
    if args.only in {None, "memory"}:
        memory(python, peers, 50_000 if args.quick else 300_000)
    if args.only in {None, "poisson"}:
        poisson(python, peers, 4_000 if args.quick else 20_000, "virtual")
        if args.real:
            poisson(python, peers, 6_000, "real")
    return 0


if __name__ == "__main__":
    sys.exit(main())
