"""What tests of every kind share."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from object_store import ObjectStore
from postgres import Postgres, binaries


@pytest.fixture(scope="session")
def postgres():
    """A PostgreSQL server; each test asks it for a database of its own."""
    if binaries() is None:
        pytest.skip("PostgreSQL is not installed (Debian: apt-get install postgresql)")
    with Postgres() as server:
        yield server


@pytest.fixture(scope="session")
def object_store():
    """An S3 server; each test asks it for a place of its own."""
    with ObjectStore() as server:
        yield server
