"""A server's address as people type it."""

from dataclasses import dataclass
from urllib.parse import urlsplit

from eyas.errors import InputError

PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True)
class Address:
    """Where a server is."""

    base: str
    """Scheme, host and port, without a path."""
    path: str
    """What stands before /v1; usually empty."""
    host: str
    port: int

    @property
    def url(self) -> str:
        """What /v1 and the other routes are put behind."""
        return self.base + self.path


def address(text: str) -> Address:
    """HOST:PORT is taken for http; a /v1 at the end, as OpenAI's clients want it, is left off.

    Raises InputError for what is no address.
    """
    schemed = "//" in text
    try:
        parts = urlsplit(text if schemed else f"http://{text}")
        port = parts.port
    except ValueError as error:
        raise _no_address(text) from error
    if not parts.hostname or parts.scheme not in PORTS or (port is None and not schemed):
        raise _no_address(text)
    path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    return Address(f"{parts.scheme}://{parts.netloc}", path, parts.hostname, port or PORTS[parts.scheme])


def is_address(text: str) -> bool:
    """Whether a word is meant for an address and not for a folder: it has a scheme, or begins with HOST:PORT."""
    host, colon, port = text.partition("/")[0].rpartition(":")
    return "://" in text or bool(host and colon and port.isdecimal())


def _no_address(text: str) -> InputError:
    return InputError(wanted="a server's address", got=text, where="--url", next="--url http://127.0.0.1:8000")
