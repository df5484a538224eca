"""Runs inside the peers' own environment: answers `measure` lines of `bench_embedding.py` on a pipe.

    python embedding_peers.py MODEL_FOLDER TEXTS_JSON VECTORS_NPY THREADS

Each line names a method and a number of texts; the reply is JSON with the seconds it took. Methods that do
not load are missing from the first reply.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import numpy as np

LONGEST = 512


def sorted_budget(lengths, max_tokens):
    """Runs of the length-sorted list, padded cost within the budget."""
    batch = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batch and lengths[index] * (len(batch) + 1) > max_tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def chunks(count, size):
    return (range(start, min(start + size, count)) for start in range(0, count, size))


def pooled(hidden, mask):
    summed = (hidden * mask[..., None]).sum(axis=1) / mask.sum(axis=1)[:, None]
    return summed / np.linalg.norm(summed, axis=1, keepdims=True)


def methods(folder, threads, said):
    """Name → function of texts, for whatever can be loaded here."""
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(threads)
    found = {}
    model = SentenceTransformer(str(folder), device="cpu")
    model.max_seq_length = LONGEST

    def encode(batch_size):
        return lambda texts: model.encode(texts, batch_size=batch_size, normalize_embeddings=True)

    found["sentence-transformers torch, its own sort, batch 32"] = encode(32)
    found["sentence-transformers torch, its own sort, batch 8"] = encode(8)

    def transformers_budget(texts):
        lengths = [
            len(ids) for ids in model.tokenizer(texts, truncation=True, max_length=LONGEST)["input_ids"]
        ]
        for batch in sorted_budget(lengths, 1024):
            model.encode([texts[index] for index in batch], batch_size=len(batch), normalize_embeddings=True)

    found["sentence-transformers torch, token budget 1024"] = transformers_budget

    def online(size):
        def run(texts):
            for batch in chunks(len(texts), size):
                model.encode([texts[index] for index in batch], batch_size=32, normalize_embeddings=True)

        return run

    for waiting in (8, 32, 128):
        found[f"sentence-transformers torch, {waiting} waiting"] = online(waiting)

    graph = Path(tempfile.mkdtemp()) / "model.onnx"
    try:
        import onnxruntime

        export(model, graph)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokenizer.no_padding()
        tokenizer.enable_truncation(LONGEST)

        def padded(texts, batches):
            encoded = [one.ids for one in tokenizer.encode_batch(texts)]
            for batch in batches([len(ids) for ids in encoded]):
                longest = max(len(encoded[index]) for index in batch)
                ids = np.zeros((len(batch), longest), dtype=np.int64)
                mask = np.zeros_like(ids)
                for row, index in enumerate(batch):
                    ids[row, : len(encoded[index])] = encoded[index]
                    mask[row, : len(encoded[index])] = 1
                feed = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
                pooled(session.run(None, feed)[0], mask)

        def arrival(size):
            return lambda texts: padded(texts, lambda lengths: chunks(len(lengths), size))

        found["plain ONNX Runtime, arrival order, batch 32"] = arrival(32)
        found["plain ONNX Runtime, batch 1"] = arrival(1)
        found["plain ONNX Runtime, token budget 512"] = lambda texts: padded(
            texts, lambda lengths: sorted_budget(lengths, 512)
        )
        for waiting in (8, 32, 128):
            found[f"plain ONNX Runtime, {waiting} waiting"] = lambda texts, waiting=waiting: padded(
                texts, lambda lengths: chunks(len(lengths), min(waiting, 32))
            )
        found["fastembed, batch 32"] = fastembed(folder, graph, threads)
    except Exception as error:
        said.append(f"{type(error).__name__}: {error}"[:300])
    try:
        found["infinity, torch, batch 32"] = infinity(folder)
    except Exception as error:
        said.append(f"infinity: {type(error).__name__}: {error}"[:300])
    return found, model


def infinity(folder):
    """Its engine in this process, without its HTTP server."""
    import asyncio

    from infinity_emb import AsyncEmbeddingEngine, EngineArgs

    settings = {
        "engine": "torch",
        "device": "cpu",
        "batch_size": 32,
        "model_warmup": False,
        "dtype": "float32",
    }

    def run(texts):
        async def main():
            args = EngineArgs(model_name_or_path=str(folder), bettertransformer=False, **settings)
            engine = AsyncEmbeddingEngine.from_args(args)
            async with engine:
                begun = time.perf_counter()
                await engine.embed(sentences=list(texts))
                return time.perf_counter() - begun

        # It loads its model each time; the time of the embedding alone counts.
        return asyncio.run(main())

    return run


def export(model, graph):
    """The usual export of the encoder, padded, with a mask."""
    import torch

    class Encoder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model[0].auto_model

        def forward(self, input_ids, attention_mask, token_type_ids):
            return self.model(
                input_ids=input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids
            ).last_hidden_state

    model[0].auto_model.set_attn_implementation("eager")
    example = (torch.ones(2, 7, dtype=torch.int64),) * 3
    axes = {0: "batch", 1: "tokens"}
    names = ["input_ids", "attention_mask", "token_type_ids"]
    torch.onnx.export(
        Encoder().eval(),
        example,
        str(graph),
        input_names=names,
        output_names=["last_hidden_state"],
        dynamic_axes=dict.fromkeys([*names, "last_hidden_state"], axes),
        opset_version=17,
        dynamo=False,
    )
    model[0].auto_model.set_attn_implementation("sdpa")


def fastembed(folder, graph, threads):
    """fastembed on the same weights: its own graph file is not to be had offline."""
    from fastembed import TextEmbedding
    from fastembed.common.model_description import ModelSource, PoolingType

    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        if (folder / name).exists():
            (graph.parent / name).write_bytes((folder / name).read_bytes())
    if not (graph.parent / "tokenizer_config.json").exists():
        settings = {"model_max_length": LONGEST, "pad_token": "[PAD]"}
        (graph.parent / "tokenizer_config.json").write_text(json.dumps(settings))
    if not (graph.parent / "special_tokens_map.json").exists():
        tokens = {f"{one}_token": f"[{one.upper()}]" for one in ("unk", "sep", "pad", "cls", "mask")}
        (graph.parent / "special_tokens_map.json").write_text(json.dumps(tokens))
    TextEmbedding.add_custom_model(
        model="local/minilm",
        pooling=PoolingType.MEAN,
        normalization=True,
        sources=ModelSource(hf="local/minilm"),
        dim=384,
        model_file="model.onnx",
    )
    model = TextEmbedding("local/minilm", specific_model_path=str(graph.parent), threads=threads)
    return lambda texts: list(model.embed(texts, batch_size=32))


def main():
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    folder, texts_path, vectors_path, threads = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
    texts = json.loads(Path(texts_path).read_text())
    said = []
    found, model = methods(folder, threads, said)
    np.save(vectors_path, model.encode(texts[:200], batch_size=1, normalize_embeddings=True))
    for name, run in list(found.items()):
        try:
            run(texts[:8])
        except Exception as error:
            said.append(f"{name}: {type(error).__name__}: {error}"[:300])
            del found[name]
    out.write(json.dumps({"methods": list(found), "said": said}) + "\n")
    for line in sys.stdin:
        asked = json.loads(line)
        begun = time.perf_counter()
        own = found[asked["method"]](texts[: asked["count"]])
        took = own if isinstance(own, float) else time.perf_counter() - begun
        out.write(json.dumps(took) + "\n")


if __name__ == "__main__":
    main()
