"""The written graph computes what a BERT computes, and no text ever feels its company."""

import json

import numpy as np
import pytest
from onnx_tiny import (
    HIDDEN,
    POSITIONS,
    VOCABULARY,
    reference,
    tiny_weights,
    write_safetensors,
    write_tiny_model,
)

from batchyard.batching.packing import pack_by_tokens
from batchyard.engines.models import DEFAULT_EMBEDDING, resolve
from batchyard.engines.onnx.encoder import Encoder
from batchyard.engines.onnx.graph import GROUPS, cached_graph
from batchyard.engines.onnx.weights import Weights, read_shape
from batchyard.errors import ModelError


def some_texts(count, *, vocabulary=VOCABULARY, longest=40, seed=1):
    chance = np.random.default_rng(seed)
    lengths = np.minimum(longest, 1 + chance.geometric(0.08, count))
    return [chance.integers(0, vocabulary, length) for length in lengths]


def vectors_of(encoder, texts, max_tokens=256):
    vectors = np.empty((len(texts), encoder.shape.hidden), dtype=np.float32)
    for pack in pack_by_tokens([len(text) for text in texts], max_tokens=max_tokens, max_lengths=GROUPS):
        vectors[list(pack)] = encoder.run([texts[index] for index in pack])
    return vectors


@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_fp32_equals_a_plain_numpy_encoder(tmp_path, pooling, activation):
    weights = write_tiny_model(tmp_path / "model", pooling=pooling, hidden_act=activation)
    encoder = Encoder(tmp_path / "model", "fp32", tmp_path / "cache")
    texts = some_texts(40)
    wanted = [reference(weights, text, pooling=pooling, activation=activation) for text in texts]
    np.testing.assert_allclose(vectors_of(encoder, texts), wanted, atol=2e-6)


def test_int8_stays_near_fp32(tmp_path):
    weights = write_tiny_model(tmp_path / "model")
    encoder = Encoder(tmp_path / "model", "int8", tmp_path / "cache")
    texts = some_texts(60)
    cosines = [
        vector @ reference(weights, text)
        for vector, text in zip(vectors_of(encoder, texts), texts, strict=True)
    ]
    assert min(cosines) > 0.99


@pytest.mark.parametrize(("kind", "prefix"), [("F16", ""), ("BF16", "bert.")])
def test_half_precision_weights_and_prefixed_names_are_read(tmp_path, kind, prefix):
    weights = write_tiny_model(tmp_path / "model", kind=kind, prefix=prefix)
    encoder = Encoder(tmp_path / "model", "fp32", tmp_path / "cache")
    texts = some_texts(5)
    for vector, text in zip(vectors_of(encoder, texts), texts, strict=True):
        assert vector @ reference(weights, text) > 0.999


def companies(encoder, *, vocabulary, rounds, longest):
    """Checks one text, bit for bit, alone and in *rounds* random companies."""
    chance = np.random.default_rng(7)
    for _ in range(rounds):
        text = chance.integers(0, vocabulary, chance.integers(1, longest))
        others = some_texts(
            int(chance.integers(1, 12)),
            vocabulary=vocabulary,
            longest=longest,
            seed=int(chance.integers(1 << 30)),
        )
        others = [one for one in others if len(one) == len(text)] + [
            one
            for one in others
            if len(one) in sorted({len(other) for other in others} - {len(text)})[: GROUPS - 1]
        ]
        together = sorted([text, *others], key=len)
        place = next(number for number, one in enumerate(together) if one is text)
        assert np.array_equal(encoder.run([text])[0], encoder.run(together)[place])


@pytest.mark.parametrize("precision", ["fp32", "int8"])
@pytest.mark.parametrize("threads", [1, 2])
def test_no_company_changes_a_bit(tmp_path, precision, threads):
    write_tiny_model(tmp_path / "model")
    encoder = Encoder(tmp_path / "model", precision, tmp_path / "cache", threads=threads)
    assert encoder.is_batch_invariant()
    companies(encoder, vocabulary=VOCABULARY, rounds=200, longest=60)


@pytest.mark.model
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_no_company_changes_a_bit_of_the_default_model_on_one_thread_or_two(tmp_path, precision):
    folder = resolve(DEFAULT_EMBEDDING).path
    one = Encoder(folder, precision, tmp_path)
    two = Encoder(folder, precision, tmp_path, threads=2)
    texts = some_texts(8, vocabulary=30_000)
    for encoder in (one, two):
        companies(encoder, vocabulary=30_000, rounds=200, longest=40)
    assert np.array_equal(vectors_of(one, texts), vectors_of(two, texts))


@pytest.mark.model
def test_int8_of_the_default_model_finds_the_same_neighbours(tmp_path):
    from tokenizers import Tokenizer

    folder = resolve(DEFAULT_EMBEDDING).path
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    subjects = {
        "sea": ["the ship left the harbour", "a sailor mends the sail", "the tide carried our boat"],
        "bread": ["the baker kneads the dough", "warm loaves from the oven", "flour, water, salt and yeast"],
        "stars": ["a comet crossed the sky", "the telescope shows the moons", "planets and their orbits"],
    }
    texts = [text for group in subjects.values() for text in group]
    ids = [np.array(one.ids, dtype=np.int64) for one in tokenizer.encode_batch(texts)]
    exact = vectors_of(Encoder(folder, "fp32", tmp_path), ids)
    quick = vectors_of(Encoder(folder, "int8", tmp_path), ids)
    assert np.einsum("ij,ij->i", exact, quick).min() >= 0.99
    for vectors in (exact, quick):
        likeness = vectors @ vectors.T - 2 * np.eye(len(texts))
        assert [int(near) // 3 for near in likeness.argmax(axis=1)] == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_a_pack_out_of_order_or_of_too_many_lengths_is_refused(tmp_path):
    write_tiny_model(tmp_path / "model")
    encoder = Encoder(tmp_path / "model", "fp32", tmp_path / "cache")
    with pytest.raises(ValueError, match="by length"):
        encoder.run([np.zeros(3, dtype=np.int64), np.zeros(2, dtype=np.int64)])
    with pytest.raises(ValueError, match="at most 8 lengths"):
        encoder.run([np.zeros(length, dtype=np.int64) for length in range(1, 10)])


def test_the_graph_is_written_once_for_each_precision_and_set_of_weights(tmp_path):
    write_tiny_model(tmp_path / "model")
    write_tiny_model(tmp_path / "other", seed=5)
    paths = []
    for name in ("model", "other", "model"):
        folder = tmp_path / name
        weights, shape = Weights(folder / "model.safetensors"), read_shape(folder)
        paths += [
            cached_graph(weights, shape, precision, tmp_path / "cache") for precision in ("fp32", "int8")
        ]
    assert len(set(paths)) == 4
    assert sorted((tmp_path / "cache").iterdir()) == sorted(set(paths))


def test_a_graph_that_was_damaged_in_the_cache_is_written_again(tmp_path):
    weights = write_tiny_model(tmp_path / "model")
    Encoder(tmp_path / "model", "fp32", tmp_path / "cache")
    (path,) = (tmp_path / "cache").iterdir()
    path.write_bytes(path.read_bytes()[:1000])
    encoder = Encoder(tmp_path / "model", "fp32", tmp_path / "cache")
    text = some_texts(1)[0]
    assert encoder.run([text])[0] @ reference(weights, text) > 0.99999


def test_a_cache_that_cannot_be_written_is_told(tmp_path):
    write_tiny_model(tmp_path / "model")
    (tmp_path / "cache").write_text("a file, where a folder should be")
    with pytest.raises(ModelError, match="cannot be written"):
        Encoder(tmp_path / "model", "fp32", tmp_path / "cache")


@pytest.mark.parametrize(
    ("keep", "wanted"),
    [
        (0, "cannot be read"),
        (5, "cut short or damaged"),
        (200, "cut short or damaged"),
        (-100, "cut short: "),
    ],
)
def test_truncated_weights_are_told_in_one_sentence(tmp_path, keep, wanted):
    write_tiny_model(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelError, match=wanted):
        Encoder(tmp_path, "fp32", tmp_path / "cache")


def damaged_header(weights):
    return b"\x10\0\0\0\0\0\0\0" + b"{" * 200


def wrong_range(weights):
    header = json.dumps({"x": {"dtype": "F32", "shape": [4], "data_offsets": [0, 8]}}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(8)


@pytest.mark.parametrize(
    ("content", "wanted"), [(damaged_header, "are damaged"), (wrong_range, "describe tensor x wrongly")]
)
def test_damaged_weights_are_told(tmp_path, content, wanted):
    weights = write_tiny_model(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(content(weights))
    with pytest.raises(ModelError, match=wanted):
        Encoder(tmp_path, "fp32", tmp_path / "cache")


def without(name):
    weights = tiny_weights()
    del weights[name]
    return weights


def test_a_missing_tensor_and_a_value_that_is_no_number_are_told(tmp_path):
    write_tiny_model(tmp_path)
    write_safetensors(tmp_path / "model.safetensors", without("encoder.layer.1.output.dense.bias"))
    with pytest.raises(ModelError, match=r"lack the tensor encoder\.layer\.1\.output\.dense\.bias"):
        Encoder(tmp_path, "fp32", tmp_path / "cache")
    weights = tiny_weights()
    weights["embeddings.LayerNorm.bias"][0] = np.nan
    write_safetensors(tmp_path / "model.safetensors", weights)
    with pytest.raises(ModelError, match="not all values are numbers"):
        Encoder(tmp_path, "fp32", tmp_path / "cache")


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"model_type": "gpt2"}, "of type 'gpt2'"),
        ({"position_embedding_type": "relative_key"}, "relative positions"),
        ({"hidden_act": "silu"}, "uses 'silu'"),
        ({"num_attention_heads": 5}, "5 heads for a width of 32"),
        ({"hidden_size": "wide"}, "lacks or garbles"),
    ],
)
def test_a_model_of_another_kind_is_told(tmp_path, change, wanted):
    write_tiny_model(tmp_path, **change)
    with pytest.raises(ModelError, match=wanted):
        read_shape(tmp_path)


def test_a_folder_without_its_files_is_told(tmp_path):
    with pytest.raises(ModelError, match=r"lacks .*config\.json"):
        read_shape(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ModelError, match="no JSON object"):
        read_shape(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read as JSON"):
        read_shape(tmp_path)


def test_what_the_folder_says_becomes_the_shape(tmp_path):
    write_tiny_model(tmp_path, max_tokens=48, matryoshka_dimensions=[16, 8])
    shape = read_shape(tmp_path)
    assert (shape.max_tokens, shape.positions, shape.dimensions) == (48, POSITIONS, (16, 8))
    assert shape.head * shape.heads == HIDDEN
    (tmp_path / "sentence_bert_config.json").unlink()
    assert read_shape(tmp_path).max_tokens == POSITIONS
