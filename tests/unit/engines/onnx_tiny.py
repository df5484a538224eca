"""A tiny BERT with random weights, its tokenizer, and a plain numpy encoder to compare with."""

import json
import math
import struct

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers, processors

SENTENCE = (
    "the a sea ship captain storm harbour sail bread oven baker salt comet star orbit night dawn letter reply "
    "debt clerk ledger field plough rain barn flock sheep shepherd gate mill river stone house window door key"
)
WORDS = SENTENCE.split()
HIDDEN, HEADS, LAYERS, WIDE, POSITIONS = 32, 4, 2, 64, 96
SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
VOCABULARY = len(SPECIALS) + len(WORDS)


def tiny_weights(seed=0):
    """Tensors by name, as a BERT checkpoint calls them, large enough that texts differ."""
    chance = np.random.default_rng(seed)

    def tensor(*shape, scale=0.3):
        return (chance.standard_normal(shape) * scale).astype(np.float32)

    def norm(at):
        return {f"{at}.weight": 1 + tensor(HIDDEN, scale=0.1), f"{at}.bias": tensor(HIDDEN, scale=0.1)}

    weights = {
        "embeddings.word_embeddings.weight": tensor(VOCABULARY, HIDDEN, scale=1.0),
        "embeddings.position_embeddings.weight": tensor(POSITIONS, HIDDEN),
        "embeddings.token_type_embeddings.weight": tensor(2, HIDDEN),
        **norm("embeddings.LayerNorm"),
    }
    for layer in range(LAYERS):
        at = f"encoder.layer.{layer}."
        for name, out, inside in (
            ("attention.self.query", HIDDEN, HIDDEN),
            ("attention.self.key", HIDDEN, HIDDEN),
            ("attention.self.value", HIDDEN, HIDDEN),
            ("attention.output.dense", HIDDEN, HIDDEN),
            ("intermediate.dense", WIDE, HIDDEN),
            ("output.dense", HIDDEN, WIDE),
        ):
            weights[f"{at}{name}.weight"] = tensor(out, inside)
            weights[f"{at}{name}.bias"] = tensor(out, scale=0.1)
        weights |= norm(at + "attention.output.LayerNorm") | norm(at + "output.LayerNorm")
    return weights


def write_safetensors(path, weights, kind="F32", prefix=""):
    """A safetensors file, written by hand: length, JSON header, bytes."""
    header, parts, at = {"__metadata__": {"format": "pt"}}, [], 0
    for name, value in weights.items():
        if kind == "F16":
            raw = value.astype("<f2").tobytes()
        elif kind == "BF16":
            raw = (value.view(np.uint32) >> 16).astype("<u2").tobytes()
        else:
            raw = value.astype("<f4").tobytes()
        header[prefix + name] = {
            "dtype": kind,
            "shape": list(value.shape),
            "data_offsets": [at, at + len(raw)],
        }
        parts.append(raw)
        at += len(raw)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(parts))


def write_tiny_model(folder, *, seed=0, kind="F32", prefix="", pooling="mean", max_tokens=64, **changes):
    """A whole model folder; *changes* go into `config.json`. Returns its weights."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = tiny_weights(seed)
    write_safetensors(folder / "model.safetensors", weights, kind, prefix)
    config = {
        "model_type": "bert",
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "intermediate_size": WIDE,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": POSITIONS,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
    } | changes
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    modes = {"pooling_mode_cls_token": pooling == "cls", "pooling_mode_mean_tokens": pooling == "mean"}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(modes))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": max_tokens}))
    tokenizer = Tokenizer(
        models.WordLevel({word: place for place, word in enumerate(SPECIALS + WORDS)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return weights


_erf = np.vectorize(math.erf)


def reference(weights, ids, *, pooling="mean", activation="gelu"):
    """The vector of one text in plain numpy and double precision."""
    get = {name: value.astype(np.float64) for name, value in weights.items()}

    def norm(x, at):
        centred = x - x.mean(axis=1, keepdims=True)
        return (
            centred / np.sqrt(np.square(centred).mean(axis=1, keepdims=True) + 1e-12) * get[at + ".weight"]
            + get[at + ".bias"]
        )

    def linear(x, at):
        return x @ get[at + ".weight"].T + get[at + ".bias"]

    embeddings = "embeddings.{}_embeddings.weight"
    x = get[embeddings.format("word")][ids]
    x = x + get[embeddings.format("position")][: len(ids)] + get[embeddings.format("token_type")][0]
    x = norm(x, "embeddings.LayerNorm")
    for layer in range(LAYERS):
        at = f"encoder.layer.{layer}."
        q, k, v = (linear(x, f"{at}attention.self.{one}") for one in ("query", "key", "value"))
        width = HIDDEN // HEADS
        heads = []
        for head in range(HEADS):
            part = slice(head * width, (head + 1) * width)
            scores = np.exp(q[:, part] @ k[:, part].T / math.sqrt(width))
            heads.append(scores / scores.sum(axis=1, keepdims=True) @ v[:, part])
        x = norm(
            x + linear(np.concatenate(heads, axis=1), at + "attention.output.dense"),
            at + "attention.output.LayerNorm",
        )
        wide = linear(x, at + "intermediate.dense")
        wide = wide * 0.5 * (1 + _erf(wide / math.sqrt(2))) if activation == "gelu" else np.maximum(wide, 0)
        x = norm(x + linear(wide, at + "output.dense"), at + "output.LayerNorm")
    pooled = x[0] if pooling == "cls" else x.mean(axis=0)
    return pooled / np.linalg.norm(pooled)
