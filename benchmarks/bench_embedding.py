"""Embeddings of texts of mixed length: the engine `onnx` beside padded batching and, where installed, peers.

    python benchmarks/bench_embedding.py [--texts 300] [--all] [--rounds 3] [--peers-python PATH]

All methods use the same MiniLM weights and the same threads, and take turns; the best round of each counts.
The engine is measured whole: JSON bodies in, JSON bodies out, from its child process. The padded rows run the
engine's own graph on padded texts, without a mask, in one session: less work than a padded server has.

Peers need an environment with torch, sentence-transformers, onnx, onnxruntime and fastembed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from time import perf_counter

import corpus_mixed
import numpy as np
import onnxruntime
from onnx import TensorProto, helper, numpy_helper
from tokenizers import Tokenizer

from batchyard.batching.packing import pack_by_tokens, padding_ratio
from batchyard.engines.models import DEFAULT_EMBEDDING, resolve
from batchyard.engines.models.cache import cache_folder
from batchyard.engines.onnx import OnnxEngine
from batchyard.engines.onnx.encoder import Encoder
from batchyard.engines.protocol import Engine
from batchyard.types import Endpoint, Request

LONGEST = 512
#: A peer that is slower than this share of ours on the first texts is measured on them alone.
SLOW, SAMPLE = 0.45, 300
HERE = Path(__file__).resolve().parent


class Peers:
    """The peers' process; answers how long a method took."""

    def __init__(self, python: str, folder: Path, texts: list[str], threads: int) -> None:
        self.work = Path(tempfile.mkdtemp(prefix="batchyard-bench-"))
        self.reference = self.work / "reference.npy"
        (self.work / "texts.json").write_text(json.dumps(texts))
        arguments = [folder, self.work / "texts.json", self.reference, threads]
        self.process = subprocess.Popen(
            [python, str(HERE / "embedding_peers.py"), *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.input, self.output = self.process.stdin, self.process.stdout
        first = self.output.readline()
        if not first:
            raise SystemExit(f"The peers do not load in {python}: run embedding_peers.py by hand to see why.")
        ready = json.loads(first)
        self.methods: list[str] = ready["methods"]
        for message in ready["said"]:
            print(f"  not measured: {message}")

    def seconds(self, method: str, count: int) -> float:
        self.input.write(json.dumps({"method": method, "count": count}) + "\n")
        self.input.flush()
        return float(json.loads(self.output.readline()))

    def close(self) -> None:
        self.input.close()
        self.process.wait()


def peak_gflops(kind: str, threads: int) -> float:
    """Multiply-adds a second, times two, of a large matrix product on *threads* threads, in 10^9."""
    size = 1024
    chance = np.random.default_rng(0)
    if kind == "fp32":
        right = chance.standard_normal((size, size)).astype(np.float32)
        left = chance.standard_normal((size, size)).astype(np.float32)
        node = helper.make_node("MatMul", ["left", "right"], ["out"])
        types = TensorProto.FLOAT, TensorProto.FLOAT
    else:
        right = chance.integers(-63, 64, (size, size)).astype(np.int8)
        left = chance.integers(0, 255, (size, size)).astype(np.uint8)
        node = helper.make_node("MatMulInteger", ["left", "right"], ["out"])
        types = TensorProto.UINT8, TensorProto.INT32
    graph = helper.make_graph(
        [node],
        "peak",
        [helper.make_tensor_value_info("left", types[0], [size, size])],
        [helper.make_tensor_value_info("out", types[1], [size, size])],
        [numpy_helper.from_array(right, "right")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    repeats = 12

    def work() -> None:
        for _ in range(repeats):
            session.run(None, {"left": left})

    best = 0.0
    for _ in range(5):
        workers = [threading.Thread(target=work) for _ in range(threads)]
        begun = perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        best = max(best, threads * repeats * 2 * size**3 / (perf_counter() - begun) / 1e9)
    return best


def requests_of(texts: list[str], form: str = "float") -> list[Request]:
    return [
        Request(
            str(place), Endpoint.EMBEDDINGS, json.dumps({"input": text, "encoding_format": form}).encode()
        )
        for place, text in enumerate(texts)
    ]


async def all_at_once(engine: Engine, requests: list[Request]) -> float:
    """Dispatches of the engine's own size, as many in flight as it asks for: how a worker drives it."""
    size, slots = engine.capabilities.max_batch, engine.capabilities.slots or 1
    waiting = iter([requests[start : start + size] for start in range(0, len(requests), size)])

    async def lane() -> None:
        for batch in waiting:
            assert all(outcome.succeeded for outcome in await engine.dispatch(batch))

    begun = perf_counter()
    await asyncio.gather(*(lane() for _ in range(slots)))
    return perf_counter() - begun


async def one_by_one(engine: Engine, requests: list[Request], waiting: int) -> float:
    """*waiting* callers, each with one text at a time."""
    queue = iter(requests)

    async def caller() -> None:
        for request in queue:
            (outcome,) = await engine.dispatch([request])
            assert outcome.succeeded

    begun = perf_counter()
    await asyncio.gather(*(caller() for _ in range(waiting)))
    return perf_counter() - begun


class Padded:
    """The same graph on padded texts, on one session of all threads."""

    def __init__(self, folder: Path, ids: list[np.ndarray], threads: int) -> None:
        self.encoder = Encoder(folder, "fp32", cache_folder() / "graphs", threads=threads)
        self.ids = ids

    def seconds(self, packs: list[tuple[int, ...]]) -> float:
        begun = perf_counter()
        for pack in packs:
            longest = max(len(self.ids[index]) for index in pack)
            self.encoder.run([np.resize(self.ids[index], longest) for index in pack])
        return perf_counter() - begun


def arrival(count: int, size: int) -> list[tuple[int, ...]]:
    return [tuple(range(start, min(start + size, count))) for start in range(0, count, size)]


async def vectors_of(engine: Engine, texts: list[str]) -> np.ndarray:
    outcomes = []
    for start in range(0, len(texts), 64):
        outcomes += await engine.dispatch(requests_of(texts[start : start + 64]))
    return np.array([json.loads(one.body)["data"][0]["embedding"] for one in outcomes], dtype=np.float32)


def quality(exact: np.ndarray, quick: np.ndarray) -> str:
    """How near int8 is to fp32, and whether a search finds the same ten texts."""
    cosines = np.einsum("ij,ij->i", exact, quick)

    def nearest(vectors: np.ndarray) -> np.ndarray:
        likeness = vectors @ vectors.T
        np.fill_diagonal(likeness, -1)
        return np.argsort(-likeness, axis=1)[:, :10]

    same = np.mean([len(set(a) & set(b)) / 10 for a, b in zip(nearest(exact), nearest(quick), strict=True)])
    first = np.mean([a[0] in b for a, b in zip(nearest(exact), nearest(quick), strict=True)])
    return (
        f"cosine to fp32 mean {cosines.mean():.4f}, min {cosines.min():.4f}; of the ten nearest texts "
        f"{same:.0%} are the same, and the nearest is among the ten in {first:.0%} of searches"
    )


async def main() -> None:
    parser = argparse.ArgumentParser(description="Embeddings of texts of mixed length.")
    parser.add_argument("--texts", type=int, default=300)
    parser.add_argument("--all", action="store_true", help="all 5,000 texts")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--peers-python", help="the Python of an environment with the peers")
    options = parser.parse_args()
    count = 5_000 if options.all else options.texts
    texts = corpus_mixed.texts(count)
    folder = resolve(DEFAULT_EMBEDDING).path
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(LONGEST)
    ids = [np.array(one.ids, dtype=np.int64) for one in tokenizer.encode_batch(texts)]
    lengths = [len(one) for one in ids]
    print(
        f"{count:,} texts of {min(lengths)} to {max(lengths)} tokens, median {np.median(lengths):.0f}, "
        f"mean {np.mean(lengths):.0f}; {options.threads} threads"
    )
    requests = requests_of(texts)
    padded = Padded(folder, ids, options.threads)
    budget = pack_by_tokens(lengths, max_tokens=512, padded=True)
    plain = {
        "padded, arrival order, batch 32": arrival(count, 32),
        "padded, batch 1": arrival(count, 1),
        "padded, sorted, token budget 512": budget,
    }
    best: dict[str, float] = {}
    sampled: set[str] = set()
    padding = {name: padding_ratio(lengths, packs) for name, packs in plain.items()}
    peers = Peers(options.peers_python, folder, texts, options.threads) if options.peers_python else None
    peaks = dict.fromkeys(("fp32", "int8"), 0.0)
    engines = {
        precision: OnnxEngine(precision=precision, workers=options.threads, max_input_tokens=LONGEST)
        for precision in ("fp32", "int8")
    }

    def note(name: str, seconds: float) -> None:
        best[name] = min(best.get(name, seconds), seconds)

    try:
        for engine in engines.values():
            await engine.start()
            await all_at_once(engine, requests[:64])
        for _ in range(options.rounds):
            for precision, engine in engines.items():
                peaks[precision] = max(peaks[precision], peak_gflops(precision, options.threads))
                note(f"batchyard {precision}", await all_at_once(engine, requests))
                for waiting in (8, 32, 128):
                    note(
                        f"batchyard {precision}, {waiting} waiting",
                        await one_by_one(engine, requests, waiting),
                    )
            for name, packs in plain.items():
                note(name, padded.seconds(packs))
            for method in peers.methods if peers else ():
                assert peers is not None
                rate = SAMPLE / peers.seconds(method, SAMPLE) if count > SAMPLE else 0.0
                if rate and rate < SLOW * count / best["batchyard fp32"]:
                    # Hours for a figure that is not close: its rate on the first texts stands.
                    sampled.add(method)
                    note(method, count / rate)
                else:
                    note(method, peers.seconds(method, count))
        exact, quick = [await vectors_of(engine, texts) for engine in engines.values()]
    finally:
        for engine in engines.values():
            await engine.close()
        if peers:
            peers.close()
    shape = padded.encoder.shape
    work = sum(2 * length * shape.multiply_adds_per_token(length) for length in lengths) / 1e9
    floor = best["padded, arrival order, batch 32"]
    print(f"\n{'':64} {'texts/s':>8} {'tokens computed':>16} {'of arrival 32':>14} {'of the peak':>12}")
    for name, seconds in sorted(best.items(), key=lambda item: item[1]):
        ours = name.startswith("batchyard")
        kind = "int8" if "int8" in name else "fp32"
        ratio = 1.0 if ours or "batch 1" in name else padding.get(name)
        shown = "" if ratio is None else f"{ratio:.3f} x real"
        share = f"{work / seconds / peaks[kind]:.0%}"
        label = name + (f" (first {SAMPLE} texts)" if name in sampled else "")
        print(f"{label:64} {count / seconds:8.1f} {shown:>16} {floor / seconds:13.1f}x {share:>12}")
    print("\nint8:", quality(exact, quick))
    print(
        "Peak of a large matrix product on these threads: "
        + ", ".join(f"{kind} {value:.0f} G/s" for kind, value in peaks.items())
        + ". The share counts real tokens only."
    )
    if peers:
        reference = np.load(peers.reference)[:count]
        cosines = np.einsum("ij,ij->i", reference, exact[: len(reference)])
        print(f"fp32 beside sentence-transformers, one text at a time: cosine at least {cosines.min():.6f}")


if __name__ == "__main__":
    if not __debug__:
        sys.exit("Run without -O: the benchmark checks what it measures.")
    asyncio.run(main())
