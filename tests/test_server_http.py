"""Connections that never become a request end; those that are merely idle do not."""

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvicorn

from eyas.engine.server.http import Connection
from eyas.engine.server.program import Server

HEAD = b"POST /read HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\n"


class Quick(Connection):
    unfinished_s = 0.3


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Reads a body that is sent to /read, and answers before any other's."""
    if scope["path"] == "/read":
        while (await receive()).get("more_body"):
            pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok", "more_body": False})


def served(
    ask: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[bytes]],
) -> bytes:
    """What `ask` heard on a connection of its own."""

    async def run() -> bytes:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            config = uvicorn.Config(app, http=Quick, lifespan="off", log_level="critical", timeout_keep_alive=60)
            server = Server(config)
            serving = asyncio.ensure_future(server.serve(sockets=[listener]))
            while not server.started:
                await asyncio.sleep(0.01)
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            try:
                return await asyncio.wait_for(ask(reader, writer), 20)
            finally:
                writer.close()
                server.should_exit = True
                await serving

    return asyncio.run(run())


async def dribble(writer: asyncio.StreamWriter, byte: bytes) -> None:
    """One byte after the other for as long as anybody listens."""
    while not writer.is_closing():
        writer.write(byte)
        await asyncio.sleep(0.05)


async def heard(reader: asyncio.StreamReader) -> bytes:
    """All until the other side ends."""
    found = b""
    try:
        while part := await reader.read(2**16):
            found += part
    except ConnectionResetError:  # it closed while we were still writing
        pass
    return found


def refusal(answer: bytes) -> tuple[bytes, str]:
    head, _, body = answer.partition(b"\r\n\r\n")
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"} and b"connection: close" in head
    return head.split()[1], error["code"]


@pytest.mark.parametrize("before", [b"", HEAD + b"1234"], ids=["the first request", "a later one"])
def test_a_head_that_comes_byte_by_byte_is_given_up(before: bytes) -> None:
    async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        if before:
            writer.write(before)
            await reader.readuntil(b"ok")
        writer.write(b"GET /one HTTP/1.1\r\nHost: x\r\nX-Long: ")
        dribbling = asyncio.ensure_future(dribble(writer, b"a"))
        answer = await heard(reader)
        dribbling.cancel()
        return answer

    assert refusal(served(ask)) == (b"408", "head_timeout")


def test_connections_without_a_byte_stay_open_before_and_after_an_answer() -> None:
    async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        answers = b""
        for _ in range(2):
            await asyncio.sleep(3 * Quick.unfinished_s)
            writer.write(HEAD + b"1234")
            answers += await reader.readuntil(b"ok")
        return answers

    assert served(ask).count(b" 200 OK") == 2


def test_a_body_that_is_read_has_its_own_time() -> None:
    async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(HEAD)
        for _ in range(4):
            await asyncio.sleep(Quick.unfinished_s / 2)
            writer.write(b"1")
        return await reader.readuntil(b"ok")

    assert b" 200 OK" in served(ask)


def test_a_body_that_nobody_reads_any_more_ends_its_connection() -> None:
    async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(b"POST /refused HTTP/1.1\r\nHost: x\r\nContent-Length: 99999\r\n\r\n")
        dribbling = asyncio.ensure_future(dribble(writer, b"a"))
        answer = await heard(reader)
        dribbling.cancel()
        return answer

    assert served(ask).endswith(b"ok")


def test_what_is_no_http_is_told_in_openais_shape() -> None:
    async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(b"\x16\x03\x01\x02\x00 this is no request\r\n\r\n")
        return await heard(reader)

    assert refusal(served(ask)) == (b"400", "invalid_http")
