"""A PostgreSQL server of the tests' own, in a folder of its own, on a socket that nobody else uses."""

import os
import shutil
import signal
import subprocess
import tempfile
from glob import glob
from pathlib import Path

import sqlalchemy as sa


def binaries():
    """Where `initdb` and `postgres` lie; None where PostgreSQL is not installed."""
    found = shutil.which("initdb")
    if found:
        return Path(found).parent
    folders = sorted(glob("/usr/lib/postgresql/*/bin"))
    return Path(folders[-1]) if folders else None


class Postgres:
    """Starts when entered. The server refuses to run as root, so root lends it another user."""

    def __init__(self):
        self._user = (
            {"user": "postgres", "group": "postgres", "extra_groups": []} if os.geteuid() == 0 else {}
        )
        self.folder = Path(tempfile.mkdtemp(prefix="batchyard-postgres-"))
        self.process = None
        self._made = 0

    def __enter__(self):
        if self._user:
            shutil.chown(self.folder, "postgres", "postgres")
        command = [binaries() / "initdb", "-D", self.folder / "data", "-U", "batchyard", "-A", "trust", "-N"]
        subprocess.run(command, check=True, capture_output=True, cwd="/", **self._user)
        self.start()
        return self

    def __exit__(self, *_):
        self.stop()
        shutil.rmtree(self.folder)

    def start(self):
        settings = {
            "listen_addresses": "",
            "unix_socket_directories": str(self.folder),
            "fsync": "off",
            "max_connections": "60",
        }
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        self.process = subprocess.Popen(
            [binaries() / "postgres", "-D", self.folder / "data", *options],
            stderr=subprocess.PIPE,
            text=True,
            cwd="/",
            **self._user,
        )
        for line in self.process.stderr:
            if "ready to accept connections" in line:
                return
        raise AssertionError("PostgreSQL did not start")

    def stop(self):
        """Let go of every connection at once, as a crash would."""
        self.process.send_signal(signal.SIGINT)
        self.process.communicate(timeout=30)

    def url(self, database="postgres"):
        return f"postgresql://batchyard@/{database}?host={self.folder}"

    def new_database(self):
        """The URL of a database that holds nothing."""
        self._made += 1
        name = f"test{self._made}"
        engine = sa.create_engine(
            self.url().replace("postgresql://", "postgresql+psycopg://"),
            isolation_level="AUTOCOMMIT",
            poolclass=sa.NullPool,
        )
        with engine.connect() as connection:
            connection.execute(sa.text(f"create database {name}"))
        return self.url(name)
