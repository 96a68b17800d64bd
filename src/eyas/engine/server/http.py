"""Connections: uvicorn's HTTP over h11, with an end to requests that never become whole; refusals in OpenAI's shape.

uvicorn closes what is idle after an answer, but waits for ever for the rest of a head, and for the rest of a body that
nobody reads any more (its request was refused): either would hold a connection for one byte a minute.
"""

import asyncio
import json
from typing import ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from eyas.engine.server.errors import ApiError


class Connection(H11Protocol):
    """A connection that was never spoken on stays open: it may be a client's pool."""

    unfinished_s: ClassVar[float] = 30.0
    """For the rest of a head, or of an unread body."""
    _late: asyncio.TimerHandle | None = None

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, msg, code="invalid_http"))

    def _watch(self) -> None:
        """Time runs from the first byte, whatever more of it comes."""
        waiting = self._half_head or self._unread
        if not waiting or self.transport.is_closing():
            self._forget()
        elif self._late is None:
            self._late = self.loop.call_later(self.unfinished_s, self._give_up)

    @property
    def _half_head(self) -> bool:
        return self.conn.their_state is h11.IDLE and bool(self.conn.trailing_data[0])

    @property
    def _unread(self) -> bool:
        """The answer is whole, its request is not."""
        answered = self.cycle is not None and self.cycle.response_complete
        return answered and self.conn.their_state is h11.SEND_BODY

    def _give_up(self) -> None:
        if self.transport.is_closing():
            return
        if self._half_head:
            self._refuse(ApiError(408, "The request's head did not arrive in time.", code="head_timeout"))
        else:
            self.transport.close()

    def _forget(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _refuse(self, error: ApiError) -> None:
        """Say why, outside of any request, and close."""
        body = json.dumps(error.body).encode()
        phrase = {400: "Bad Request", 408: "Request Timeout"}[error.status]
        head = f"HTTP/1.1 {error.status} {phrase}\r\ncontent-type: application/json\r\nconnection: close\r\n"
        self.transport.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        self.transport.close()
