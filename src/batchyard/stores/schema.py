"""Floor 3. The tables: state per Batch and per chunk, never per request.

Portable types only. Times are Unix seconds. Knows nothing of what a status
means: `service.lifecycle` does.
"""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    BigInteger,
    Column,
    Float,
    Index,
    Integer,
    MetaData,
    PrimaryKeyConstraint,
    String,
    Table,
    Text,
    text,
)

#: Raised with every change that an older Batchyard could not read.
SCHEMA_VERSION = 2

OPEN, LEASED, DONE = 0, 1, 2

metadata = MetaData()

batches = Table(
    "batches",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("tenant", String(64), nullable=False, default=""),
    # Through which dialect it came, as its owner sees only those of the dialect that is spoken.
    Column("dialect", String(16), nullable=False, default=""),
    Column("status", String(16), nullable=False),
    Column("created_at", Float, nullable=False),
    Column("in_progress_at", Float),
    Column("finalizing_at", Float),
    Column("cancelling_at", Float),
    Column("ended_at", Float),
    Column("deadline_at", Float),
    # What the input is: where it lies and how to tell that it is still the same.
    Column("input_path", Text, nullable=False),
    Column("input_bytes", BigInteger, nullable=False, default=0),
    Column("input_mtime_ns", BigInteger, nullable=False, default=0),
    Column("input_sha256", String(64), nullable=False, default=""),
    Column("total", BigInteger, nullable=False, default=0),
    # What the Batch was asked to do, as its maker said it; compared when it is resumed.
    Column("settings", JSON, nullable=False),
    # Where its results went, once it has ended.
    Column("output_path", Text),
    Column("error_path", Text),
    # For Batches of a server: the files of its results, the model, why the input was refused, and how
    # many requests never ran because it was cancelled or expired.
    Column("output_file_id", String(64)),
    Column("error_file_id", String(64)),
    Column("model", Text),
    Column("errors", JSON, nullable=False, default=list),
    Column("never_ran", BigInteger, nullable=False, default=0),
)

# Pages of a tenant's Batches, newest first.
Index("batches_of_tenant", batches.c.tenant, batches.c.created_at, batches.c.id)

files = Table(
    "files",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("tenant", String(64), nullable=False),
    Column("purpose", String(32), nullable=False),
    Column("filename", Text, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("expires_at", Float),
)

Index("files_of_tenant", files.c.tenant, files.c.created_at, files.c.id)

keys = Table(
    "keys",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("tenant", String(64), nullable=False),
    Column("name", Text, nullable=False),
    # SHA-256 of the key. Keys are 256 random bits, so no slow hash is needed to keep them safe.
    Column("digest", String(64), nullable=False, unique=True),
    # Its last characters, to tell keys apart.
    Column("hint", String(8), nullable=False),
    Column("created_at", Float, nullable=False),
    Column("revoked_at", Float),
)

chunks = Table(
    "chunks",
    metadata,
    Column("batch_id", String(64), nullable=False),
    Column("no", Integer, nullable=False),
    Column("state", Integer, nullable=False),
    # The byte range of the input that holds this chunk, and what it starts with.
    Column("offset", BigInteger, nullable=False),
    Column("length", BigInteger, nullable=False),
    Column("first_index", BigInteger, nullable=False),
    Column("first_line", BigInteger, nullable=False),
    Column("count", Integer, nullable=False),
    # The fence: raised by each claim, repeated by each commit.
    Column("epoch", Integer, nullable=False, default=0),
    Column("owner", String(64)),
    Column("lease_until", Float),
    # Progress: written by the heartbeat while leased, final once done.
    Column("succeeded", Integer, nullable=False, default=0),
    Column("failed", Integer, nullable=False, default=0),
    Column("input_tokens", BigInteger, nullable=False, default=0),
    Column("output_tokens", BigInteger, nullable=False, default=0),
    Column("cached_tokens", BigInteger, nullable=False, default=0),
    # How much of the segment file of this epoch counts, and the order of commits.
    Column("segment_bytes", BigInteger, nullable=False, default=0),
    Column("done_at", Float),
    PrimaryKeyConstraint("batch_id", "no"),
)

# SQLite uses a partial index only for a query that repeats its exact term, so claims ask for
# `state = 0` and, apart from it, for `state = 1` (a test asserts the query plan).
Index(
    "chunks_open",
    chunks.c.batch_id,
    chunks.c.no,
    sqlite_where=text("state = 0"),
)
Index(
    "chunks_leased",
    chunks.c.batch_id,
    chunks.c.no,
    sqlite_where=text("state = 1"),
)
