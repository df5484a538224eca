"""Floor 9. `batchyard.toml`: what a server serves, and where it keeps everything."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Any

import msgspec

from batchyard.cli.values import duration_s
from batchyard.errors import UsageError
from batchyard.scheduling.tiers import Tier

DEFAULT_CONFIG = Path("batchyard.toml")
DEFAULT_STATE = Path("batchyard-server")


class ModelSettings(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """One `[[model]]` of `batchyard.toml`."""

    #: What clients call it; those of one name serve it together.
    name: str
    engine: str | None = None
    model: str | None = None
    base_url: str | None = None
    api_key_env: str = "OPENAI_API_KEY"
    concurrency: int | None = None
    #: Slots that are kept free for interactive requests; by default as many as their arrivals ask for.
    reserve: Annotated[int, msgspec.Meta(ge=0)] | None = None
    timeout_s: float = 600.0
    #: What the upstream allows, if it is not to be found out.
    requests_per_minute: Annotated[float, msgspec.Meta(gt=0)] | None = None
    #: Tokens of prompts and answers together.
    tokens_per_minute: Annotated[float, msgspec.Meta(gt=0)] | None = None
    #: Where several serve one model: after so long, such as 2s, an interactive request is asked of a second
    #: one too, and the first answer counts.
    hedge_after: str | None = None


class TierSettings(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """One `[[tier]]` of `batchyard.toml`: of deferred work with its `window`, or else interactive."""

    #: What requests call it, in `service_tier` or the header `x-batchyard-tier`.
    name: str
    #: Until when a request must be answered, such as 10m.
    window: str | None = None
    #: The longest that an interactive request should wait and run, such as 2s; bulk makes room for it.
    ceiling: str | None = None

    def tier(self) -> Tier:
        """As the scheduler knows it.

        Raises:
            UsageError: its times are none.
        """
        window_s = None if self.window is None else duration_s(self.window, f"window of the tier {self.name}")
        ceiling_s = (
            None if self.ceiling is None else duration_s(self.ceiling, f"ceiling of the tier {self.name}")
        )
        return Tier(self.name, window_s, ceiling_s)


class Settings(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """`batchyard.toml`."""

    host: str = "127.0.0.1"
    port: int = 8000
    #: What clients reach the server by, where it stands behind a proxy.
    public_url: str | None = None
    state: str = str(DEFAULT_STATE)
    #: The URL of a PostgreSQL database, for several server processes.
    database: str | None = None
    #: Where files and results are kept, if not in the state folder, such as `s3://bucket/prefix`.
    blobs: str | None = None
    #: After so many seconds without a sign of life, others take over what a server process works on.
    lease_s: Annotated[float, msgspec.Meta(ge=0.5, le=600)] = 15.0
    #: Deliver webhooks to private addresses and over plain HTTP too.
    private_webhooks: bool = False
    #: How often a live request is sent to an upstream that fails, within ten seconds.
    live_attempts: Annotated[int, msgspec.Meta(ge=1, le=10)] = 3
    #: Relative shares of tenants; 1 for those that are not named.
    weights: dict[str, Annotated[float, msgspec.Meta(gt=0)]] = {}
    tier: list[TierSettings] = []
    model: list[ModelSettings] = []


def read_settings(path: Path | None = None) -> Settings:
    """The settings in *path*, or in `batchyard.toml` of this folder where there is one.

    Raises:
        UsageError: they cannot be read or understood.
    """
    if path is None:
        if not DEFAULT_CONFIG.exists():
            return Settings()
        path = DEFAULT_CONFIG
    try:
        found: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
        settings = msgspec.convert(found, Settings)
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}). Check the path.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is no TOML: {error}.") from error
    except msgspec.ValidationError as error:
        raise UsageError(f"{path} is not understood: {error}.") from error
    return settings
