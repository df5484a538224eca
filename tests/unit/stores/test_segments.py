"""Segments keep every whole record and pass over torn ones."""

import os
import resource
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchyard.errors import StorageFull
from batchyard.stores.segments import SegmentFolder, decode_records, encode_record
from batchyard.types import Usage

LINES = st.lists(st.binary(max_size=60).map(lambda raw: raw.replace(b"\n", b" ")), max_size=8)


@given(LINES, st.integers(min_value=0, max_value=400))
def test_a_cut_at_any_byte_loses_only_the_torn_record(lines, cut):
    records = [
        encode_record(i, succeeded=i % 2 == 0, usage=Usage(i, 2 * i, 0), line=line)
        for i, line in enumerate(lines)
    ]
    data = b"".join(records)[:cut]
    whole = 0
    while whole < len(records) and sum(map(len, records[: whole + 1])) <= len(data):
        whole += 1
    found = list(decode_records(data))
    assert [one.line for one in found] == lines[:whole]
    assert [one.usage for one in found] == [Usage(i, 2 * i, 0) for i in range(whole)]


@given(LINES.filter(bool), st.data())
def test_a_changed_line_fails_its_checksum(lines, data):
    record = bytearray(encode_record(0, succeeded=True, usage=Usage(), line=lines[0] + b"{}"))
    place = data.draw(st.integers(min_value=len(record) - len(lines[0]) - 3, max_value=len(record) - 2))
    record[place] ^= 0x55
    assert [one for one in decode_records(bytes(record)) if one.line == lines[0] + b"{}"] == []


def test_zero_filled_tail_after_a_power_cut_is_passed_over():
    good = encode_record(0, succeeded=True, usage=Usage(), line=b"{}")
    assert [one.index for one in decode_records(good + b"\0" * 4096 + b"\n")] == [0]


def test_salvage_takes_the_first_record_of_each_index_over_all_attempts(tmp_path):
    folder = SegmentFolder(tmp_path / "segments")
    for epoch, lines in ((1, [(0, b"first"), (1, b"one")]), (2, [(0, b"again"), (2, b"two")])):
        writer = folder.create(7, epoch)
        for index, line in lines:
            writer.append(encode_record(index, succeeded=True, usage=Usage(), line=line))
        writer.sync()
        assert writer.synced_bytes == writer.written_bytes
        writer.close()
    assert {one.index: one.line for one in folder.salvage(7)} == {0: b"first", 1: b"one", 2: b"two"}
    assert {one.index for one in folder.salvage(7, 2)} == {0, 1}
    folder.drop_before(7, 2)
    assert folder.numbers() == {7}
    assert not folder.path(7, 1).exists()


def test_epochs_are_ordered_as_numbers(tmp_path):
    folder = SegmentFolder(tmp_path)
    for epoch in (10, 9):
        writer = folder.create(0, epoch)
        writer.append(encode_record(0, succeeded=True, usage=Usage(), line=b"%d" % epoch))
        writer.close()
    assert folder.salvage(0)[0].line == b"9"


def test_a_full_disk_is_named_and_leaves_whole_records(tmp_path):
    if not os.path.exists("/dev/full"):
        pytest.skip("this system has no /dev/full")
    from batchyard.stores.segments import SegmentWriter

    writer = SegmentWriter(tmp_path / "x.seg", os.open("/dev/full", os.O_WRONLY))
    with pytest.raises(StorageFull, match="full"):
        writer.append(b"x")
    writer.close()


def test_records_after_a_torn_one_are_whole(tmp_path):
    """A disk that was full for a moment: what is written again afterwards must not merge with the torn rest."""
    folder = SegmentFolder(tmp_path)
    writer = folder.create(0, 1)
    record = encode_record(0, succeeded=True, usage=Usage(), line=b"x" * 5000)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    try:
        with pytest.raises(StorageFull):
            writer.append(record)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert 0 < writer.written_bytes < len(record)
    writer.append(record)
    writer.append(encode_record(1, succeeded=False, usage=Usage(), line=b"y"))
    writer.close()
    assert [(one.index, one.line) for one in folder.read(0, 1)] == [(0, b"x" * 5000), (1, b"y")]
