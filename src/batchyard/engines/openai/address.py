"""Floor 3. From the base URL that a user gives to the URLs that are called. Pure."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from batchyard.errors import UsageError
from batchyard.types import Endpoint

_VERSION = re.compile(r"v\d")


def read_base_url(given: str) -> str:
    """*given* in the form that paths such as `/chat/completions` are appended to.

    A missing `/v1` is added, where no part of the path names a version; a pasted endpoint path is cut.

    Raises:
        UsageError: it is no HTTP URL.
    """
    url = given.strip()
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        usable = usable and not parts.query and not parts.fragment
    except ValueError:
        usable = False
    if not usable:
        raise UsageError(
            f"The base URL {given!r} is not usable. Give one that begins with http:// or https://, "
            "such as http://127.0.0.1:8000/v1, without a query."
        )
    url = url.rstrip("/")
    for endpoint in Endpoint:
        url = url.removesuffix(endpoint.value.removeprefix("/v1"))
    if any(_VERSION.match(part) for part in urlsplit(url).path.split("/")):
        return url
    return f"{url}/v1"


def without_password(url: str) -> str:
    """*url* as it may be shown."""
    parts = urlsplit(url)
    if "@" not in parts.netloc:
        return url
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
