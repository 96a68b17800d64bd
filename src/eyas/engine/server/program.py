"""The server's process: load, warm up, serve until told to stop."""

import asyncio
import contextlib
import errno
import os
import signal
import socket
import time
from argparse import Namespace
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor

import uvicorn

from eyas.engine.batching import Scheduler
from eyas.engine.server.app import make_app
from eyas.engine.server.arguments import parse
from eyas.engine.server.http import Connection
from eyas.engine.server.service import Limits, Service
from eyas.engine.server.start import check_cache_rows, context_for, start
from eyas.engine.server.worker import Call, Worker
from eyas.errors import EyasError, InputError
from eyas.launch.own_lines import failed_line, phase_line, ready_line, stopped_line
from eyas.progress import say

KEEP_ALIVE_S = 75
SLOW_READERS_S = 3
"""For clients to take what is left for them, at the end."""


class Server(uvicorn.Server):
    """uvicorn without its signal handlers: they would end the process by the signal and not with status 0."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def main(words: Sequence[str]) -> int:
    try:
        arguments = parse(words)
        check_cache_rows(arguments)
        say(phase_line("args"))
        listener = bind(arguments.host, arguments.port)
    except EyasError as error:
        return failed(error, "wrong_flag")
    try:
        return run(arguments, listener)
    except EyasError as error:
        return failed(error, "unexplained")


def failed(error: EyasError, cause: str) -> int:
    """Say why, as launch/own_lines has it; the process's status."""
    say(failed_line(error.code or cause, str(error)))
    return error.exit_code


def run(arguments: Namespace, listener: socket.socket) -> int:
    """Load, then serve. Raises EyasError for what cannot be loaded."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop_loading)
    with listener, ThreadPoolExecutor(1, thread_name_prefix="engine") as thread:
        scheduler = thread.submit(start, arguments).result()
        listen(listener)
        why = asyncio.run(serve(arguments, scheduler, thread, listener))
        thread.submit(scheduler.engine.close).result()
    if why is None:
        return 0
    say(failed_line("unexplained", why))
    return 1


def bind(host: str, port: int) -> socket.socket:
    """A socket that has its port and does not listen yet: who connects is refused until the start is complete.

    Alone, where it can: with SO_REUSEADDR a second server could take the same port while neither listens. That is only
    for a port on which a last server's connections have not run out. Raises InputError for a port or address that
    cannot be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        try:
            listener.bind((host, port))
        except OSError:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise taken(host, port) from error
        raise InputError(
            wanted="an address of this machine, and a port that may be listened on",
            got=f"{host_words(host)}:{port}: {error.strerror}",
            where="--host, --port",
            next="--host 127.0.0.1 --port 8000",
        ) from error
    return listener


def listen(listener: socket.socket) -> None:
    """Raises InputError where another server was faster on a port that neither had alone."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # its connections are not to keep the next one out
    try:
        listener.listen()
    except OSError as error:
        raise taken(*listener.getsockname()[:2]) from error


def taken(host: str, port: int) -> InputError:
    return InputError(
        wanted="a free port",
        got=f"{host_words(host)}:{port}, which is taken",
        where="--port",
        next=f"--port {port + 1 if port < 65535 else 8000}, or stop what holds it: ss -ltnp",
        code="port_busy",
    )


def _stop_loading(number: int, frame: object) -> None:
    """Before there is anything to finish."""
    say(stopped_line(signal.Signals(number).name))
    os._exit(0)


async def serve(
    arguments: Namespace, scheduler: Scheduler, thread: ThreadPoolExecutor, listener: socket.socket
) -> str | None:
    """Serve until a signal, or until the engine fails: then why."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[str] = loop.create_future()

    def failed(error: str) -> None:
        loop.call_soon_threadsafe(_end, ended, f"failed: {error}")

    def hand_over(left: list[Call]) -> None:
        loop.call_soon_threadsafe(_all, left)

    worker = Worker(scheduler, thread, failed, hand_over)
    service = make_service(arguments, scheduler, worker)
    worker.start()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _end, ended, signal.Signals(number).name)
    say(phase_line("http"))
    config = uvicorn.Config(
        make_app(service),
        http=Connection,
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=SLOW_READERS_S,
    )
    server = Server(config)
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    while not server.started and not serving.done():
        await asyncio.sleep(0.01)
    say(ready_line(f"http://{host_words(arguments.host)}:{arguments.port}"))
    why = await ended
    service.closing = True
    say(stopped_line(why) if worker.failure is None else why)
    await drain(service, arguments.grace_s)
    server.should_exit = True
    await serving
    service.close()
    return worker.failure


async def drain(service: Service, grace_s: float) -> None:
    """Let what runs finish; after `grace_s` cancel it, so that its clients are told."""
    deadline = time.monotonic() + grace_s
    while service.open_jobs and service.worker.alive and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
    service.worker.cancel_all()


def make_service(arguments: Namespace, scheduler: Scheduler, worker: Worker) -> Service:
    limits = Limits(
        body_bytes=arguments.max_body,
        output_tokens=arguments.max_output,
        waiting=arguments.max_waiting,
        running=arguments.max_running,
    )
    engine = scheduler.engine
    return Service(
        target=engine.target,
        name=arguments.served_model_name or arguments.target,
        worker=worker,
        limits=limits,
        num_steps=engine.num_steps if engine.proposer is not None else 0,
        context=context_for(scheduler, arguments.max_model_len),
        api_key=arguments.api_key,
    )


def host_words(host: str) -> str:
    """As it stands in an address."""
    return f"[{host}]" if ":" in host else host


def _all(left: list[Call]) -> None:
    for call in left:
        call()


def _end(ended: asyncio.Future[str], why: str) -> None:
    if not ended.done():
        ended.set_result(why)
