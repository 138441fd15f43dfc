"""Who may ask: API keys, and the Host that a browser was told."""
from __future__ import annotations

import hmac
from hashlib import sha256
from ipaddress import ip_address
from pathlib import Path

from ..config import ConfigError
from .errors import ApiError

__all__ = ["ApiKeys", "check_host", "is_loopback"]


class ApiKeys:
    """The keys of a file in UTF-8, with a byte order mark or without: one a line, `#` begins a comment line. Only their digests are kept.

    Raises:
        ConfigError: the file cannot be read, or holds no key, or one that no header can carry.
    """

    def __init__(self, path: str) -> None:
        try:
            lines = [line.strip() for line in Path(path).read_text(encoding="utf-8-sig").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"api_key_file={path!r}: cannot be read ({error}); give a text file with one key a line") from error
        keys = [line for line in lines if line and not line.startswith("#")]
        if not keys:
            raise ConfigError(f"api_key_file={path!r}: holds no key; write one a line")
        for number, line in enumerate(lines, 1):
            if line in keys and not (line.isascii() and line.isprintable() and " " not in line):
                raise ConfigError(f"api_key_file={path!r}: line {number} is no key; use printable ASCII without spaces, and a line of its own for a comment")
        self._digests = [sha256(key.encode()).digest() for key in keys]

    def check(self, authorization: bytes | None) -> None:
        """Raise a 401 unless the header says `Bearer KEY` with a key of the file. Takes the same time whichever key it is, and
        however much of a wrong one is right: digests are compared, all of them, to the end."""
        scheme, _, key = (authorization or b"").partition(b" ")
        given = sha256(key.strip()).digest()
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        if scheme.lower() != b"bearer" or not any(matches):
            told = "Authorization: is missing; send Authorization: Bearer KEY" if authorization is None else (
                "Authorization: holds no key of this server; send Authorization: Bearer KEY with one that its owner gave out")
            raise ApiError(401, told, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def is_loopback(host: str) -> bool:
    """Whether an address or name is one that only this machine can reach."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_host(header: bytes | None) -> None:
    """Raise a 403 unless the Host header names this machine, for a server on loopback without keys.

    A page whose name was made to resolve to 127.0.0.1 is of the same origin as this server to its browser: the name in the Host
    header is then all that tells its requests from those of the machine's own user.
    """
    if header is None:  # HTTP/1.0; browsers always send one
        return
    host = header.decode("latin-1").strip().lower()
    name = host[: host.index("]") + 1] if host.startswith("[") and "]" in host else host.partition(":")[0]
    if not is_loopback(name):
        raise ApiError(403, f"Host={host[:80]!r}: this server listens on loopback and answers to localhost only; ask for it by that name, "
                            "or start it with --api-key-file or another --host", code="host_not_allowed")
