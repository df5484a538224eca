"""Vectors are written short and read back as the same bits."""

import json

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from batchyard.engines.onnx.bodies import EmbeddingRequest, write_body

FLOATS = EmbeddingRequest(inputs=["x"], base64=False, dimensions=None)


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=50))
def test_any_float32_is_read_back_exactly(values):
    vector = np.array([values], dtype=np.float32)
    (read,) = json.loads(write_body(FLOATS, vector, 1, "m", []))["data"]
    assert np.array(read["embedding"], dtype=np.float32).tobytes() == vector.tobytes()


def test_values_of_a_unit_vector_take_nine_digits_at_most():
    vector = np.random.default_rng(0).standard_normal((1, 384)).astype(np.float32) / 20
    body = write_body(FLOATS, vector, 1, "m", []).decode()
    numbers = body.split("[")[2].split("]")[0].split(",")
    digits = [len(one.split("e")[0].lstrip("-").replace(".", "").lstrip("0")) for one in numbers]
    assert max(digits) <= 9
