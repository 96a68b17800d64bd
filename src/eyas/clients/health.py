"""Is a server ready? By status code, never by body; one probe at a time; no token is generated on a ready server.

| engine | ready | alive once ready |
|---|---|---|
| SGLang from 0.5.2x | GET /ready 200 (503 before; generates nothing) | the same |
| SGLang without it (404) | GET /health 200, asked until it is (503 before; 200 costs a token) | GET /model_info |
| vLLM, embedded | GET /health 200 (refused until the start is complete; generates nothing) | the same |

Read in SGLang 0.5.11 to 0.5.23 entrypoints/http_server.py (0.5.17 and before have no /ready) and vLLM 0.33.
"""

import json
import time
from dataclasses import dataclass
from typing import Any

import httpx2

from eyas.clients.background import Background

TIMEOUT_S = 5.0
"""At the least: SGLang's /health alone takes a second, and a busy server answers late."""
WHOLE_S = 10.0
"""A body that comes in drops is read no longer; its status stands."""
LARGEST = 16 << 20
"""Bytes of a body that are read."""
ENGINES_BY_OWNER = {"sglang": "sglang", "vllm": "vllm", "eyas": "embedded"}


@dataclass(frozen=True)
class Health:
    """One probe's outcome. `status` None: no HTTP answer, `error` says why."""

    time: float
    """Monotonic, when the answer came."""
    status: int | None = None
    error: str | None = None
    path: str = "/health"

    @property
    def ready(self) -> bool:
        return self.status == 200

    @property
    def words(self) -> str:
        return f"GET {self.path}: {self.status if self.status is not None else self.error}"


def client(url: str, timeout_s: float = TIMEOUT_S) -> httpx2.Client:
    """A client for one server. Proxies of the environment are left out: they catch even localhost."""
    return httpx2.Client(base_url=url, timeout=max(timeout_s, TIMEOUT_S), trust_env=False)


def get(http: httpx2.Client, path: str) -> tuple[int | None, str, str | None]:
    """(status, body, error) of one GET; status None where no answer came. A body that drips is left after WHOLE_S."""
    begun = time.monotonic()
    try:
        with http.stream("GET", path) as answer:
            pieces, size = [], 0
            for piece in answer.iter_bytes():
                pieces.append(piece)
                size += len(piece)
                if size > LARGEST or time.monotonic() - begun > WHOLE_S:
                    break
        return answer.status_code, b"".join(pieces).decode(errors="replace"), None
    except httpx2.HTTPError as error:
        return None, "", type(error).__name__ + (f": {error}" if str(error) else "")


def get_json(http: httpx2.Client, path: str) -> dict[str, Any]:
    """A server's JSON object at `path`; an empty one where it has none."""
    status, body, _ = get(http, path)
    try:
        found = json.loads(body) if status == 200 else {}
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


class Prober:
    """Asks one server whether it is ready, never twice at once."""

    def __init__(self, url: str, every_s: float = 1.0, timeout_s: float = TIMEOUT_S) -> None:
        self.url = url
        self._http = client(url, timeout_s)
        self._path, self._told_apart = "/ready", False
        self._asking = Background(self._probe, every_s)

    def poll(self, every_s: float | None = None) -> Health | None:
        """The latest answer; begins the next probe where none is under way and it is time."""
        if every_s is not None:
            self._asking.every_s = every_s
        return self._asking.poll()

    def wait(self) -> Health:
        """One probe, to its end."""
        return self._asking.wait()

    def close(self) -> None:
        """Let a probe under way end, then close the connections."""
        self._asking.join()
        self._http.close()

    def _probe(self) -> Health:
        path = self._path
        status, _, error = get(self._http, path)
        if status == 404 and path == "/ready":
            path = "/health"
            status, _, error = get(self._http, path)
            if status is not None:
                self._path = path
        if status == 200 and path == "/health" and not self._told_apart:
            self._told_apart = True
            if get(self._http, "/model_info")[0] == 200:
                self._path = "/model_info"  # an older SGLang that is ready: /health would cost it a token each time
        return Health(time.monotonic(), status, error, path)


def probe(url: str, timeout_s: float = TIMEOUT_S) -> Health:
    """One probe of one server."""
    prober = Prober(url, timeout_s=timeout_s)
    try:
        return prober.wait()
    finally:
        prober.close()


def engine_of(url: str, key: str | None = None) -> str | None:
    """Which engine answers: sglang, vllm, embedded; None where it does not say. Generates nothing."""
    with client(url) as http:
        if key is not None:
            http.headers["Authorization"] = f"Bearer {key}"
        models = get_json(http, "/v1/models").get("data")
    return engine_of_models(models)


def engine_of_models(models: object) -> str | None:
    """The same, from what /v1/models lists under `data`."""
    first = models[0] if isinstance(models, list) and models else None
    owner = first.get("owned_by") if isinstance(first, dict) else None
    return ENGINES_BY_OWNER.get(owner) if isinstance(owner, str) else None
