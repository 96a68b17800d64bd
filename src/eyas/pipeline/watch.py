"""`eyas watch` and `eyas stop`: a server somebody started, by folder, pid, url or log; or every one on this machine."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Group
from rich.live import Live

from eyas.clients.address import is_address
from eyas.errors import InputError
from eyas.launch.evidence import stack
from eyas.launch.find import Found, all_servers, of_folder, of_pid, of_url
from eyas.launch.history import Expectation, expect
from eyas.launch.log_state import LogReader
from eyas.launch.process import SERVER, is_same, read_server
from eyas.launch.recall import recall, remember
from eyas.launch.state import Status
from eyas.launch.stop import Doomed, by_pid, gpu_words, stop
from eyas.launch.watch import LOOK_S, Watch
from eyas.pipeline.live import LiveAcceptance, acceptance_of
from eyas.pipeline.said_taps import TapsWatch, taps_of
from eyas.pipeline.serve import ENDED, live_words
from eyas.pipeline.watch_view import Screen, panel, taps_words
from eyas.progress import console, say

T = TypeVar("T")
FAILED = ("crashed", "stuck")


def find(
    place: str | None = None,
    log: Path | None = None,
    pid: int | None = None,
    url: str | None = None,
    every: bool = False,
) -> Found | None:
    """What the person named, completed by what this machine shows; what was named stands. None: every server.

    `place`: a serve folder, or a server's address. Raises InputError where nothing is named, two servers are, or it is
    not there.
    """
    if every:
        _only("eyas watch", all=True, folder=place, log=log, pid=pid, url=url)
        return None
    if place is not None and _is_url(place):
        place, url = None, _only("eyas watch", address=place, url=url)
    if place is not None:
        _only("eyas watch", folder=place, pid=pid, url=url)
        found = of_folder(Path(place))
    elif pid is not None:
        found = of_pid(pid)
    elif url is not None:
        found = of_url(url)
    elif log is not None:
        found = Found(log=log)
        LogReader(log).close()
    else:
        raise InputError(
            wanted="a server to watch",
            got="neither folder, address, --log, --pid nor --url",
            where="eyas watch",
            next="eyas watch --all, or eyas watch --log FILE",
        )
    base = found.url if url is None else of_url(url).url
    return Found(found.pid, found.created, found.engine, base, log or found.log, found.folder, found.server)


def _is_url(place: str) -> bool:
    return is_address(place) and not Path(place).exists()


def _only(command: str, **named: T | None) -> T:
    """The one thing that is named. Raises InputError for two."""
    given = {name: value for name, value in named.items() if value is not None}
    if len(given) > 1:
        words = " and ".join(f"{name} {value}" for name, value in given.items())
        raise InputError(wanted="one server", got=words, where=command, next=f"one of them: {command} --help")
    return next(iter(given.values()))


def expectation(found: Found) -> Expectation:
    """What history says of a server that Eyas started; of another one its model and flags are not known."""
    return expect(found.server.key) if found.server is not None else Expectation()


def watch_once(found: Found, draft: str | None = None) -> dict[str, Any]:
    """One look, as `eyas watch --once --json` prints it; it goes on from what the last one saw of the process.

    `draft`: what the layers that the log tells are held against; None: the draft that the server was started with.
    """
    before = None if found.pid is None or found.created is None else recall(found.pid, found.created)
    watch, live = Watch(found, expectation(found), memory=before), acceptance_of(found)
    try:
        status = watch.once()
        if found.pid is not None and found.created is not None and status.state not in ENDED:
            remember(found.pid, found.created, watch.memory)
        if status.state == "ready":
            live.once(watch.log)
        return described(watch, status, live, taps_of(found, draft))
    finally:
        watch.close()
        live.close()


def described(watch: Watch, status: Status, live: LiveAcceptance, taps: TapsWatch) -> dict[str, Any]:
    """A status with its surroundings; the keys of docs/commands.md first."""
    found, log = watch.found, watch.log
    warning = live.warning()
    taps.look(log)
    notes = [*status.notes, *([warning] if warning is not None else [])]
    where = stack(found.pid) if status.state == "stuck" and found.pid is not None else None
    return {
        "engine": status.engine,
        "state": status.state,
        "phase": status.phase,
        "progress": status.progress,
        "eta_s": None if status.eta_s is None else round(status.eta_s, 1),
        "cause": status.cause,
        "evidence": status.evidence,
        "advice": status.advice,
        "shards": None if status.shards is None else list(status.shards),
        "shards_s": None if status.rate is None else round(status.rate, 3),
        "phase_eta_s": None if status.phase_eta_s is None else round(status.phase_eta_s, 1),
        "eta_source": status.eta_source,
        "elapsed_s": None if status.elapsed_s is None else round(status.elapsed_s, 1),
        "idle_s": None if status.idle_s is None else round(status.idle_s, 1),
        "moving": list(status.moving),
        "url": found.url,
        "pid": found.pid,
        "pids": list(watch.pids),
        "log": None if found.log is None else str(found.log.absolute()),
        "folder": None if found.folder is None else str(found.folder),
        "gpus": None if watch.gpus is None else [gpu_words(gpu) for gpu in watch.gpus],
        "acceptance": None if live.latest is None else live.latest.as_dict,
        **taps.as_dict,
        "notes": notes,
        "stack": where,
        "last_lines": [] if log is None else list(log.last_lines),
    }


def watch_following(found: Found, draft: str | None = None) -> dict[str, Any]:
    """Follow one server until it ends or the person has seen enough; returns the last look. `draft`: as for once."""
    watch, live, taps = Watch(found, expectation(found)), acceptance_of(found), taps_of(found, draft)
    status = watch.once()
    try:
        with Screen(console, say) as screen:
            while status.state not in ENDED:
                more = live_words(live, watch) if status.state == "ready" else ()
                screen.show(status, found.url, watch.log, watch.gpus, more, taps_words(taps.look(watch.log)))
                time.sleep(LOOK_S)
                status = watch.look()
            screen.show(status, found.url, watch.log, watch.gpus, told=taps_words(taps.look(watch.log)))
    except KeyboardInterrupt:
        say("left it as it was")
    finally:
        watch.close()
        live.close()
    return described(watch, status, live, taps)


def watch_all_once() -> dict[str, Any]:
    """One look at every engine on this machine."""
    return {"servers": [watch_once(found) for found in all_servers()]}


def watch_all_following() -> dict[str, Any]:
    """Follow every engine found at the start until all have ended or the person has seen enough."""
    watches = [Watch(found, expectation(found)) for found in all_servers()]
    taps = [taps_of(watch.found) for watch in watches]
    looks: list[Status] = []
    try:
        with Live(console=console, refresh_per_second=2, transient=True) as live:
            while watches:
                looks = [watch.look() for watch in watches]
                rows = zip(watches, looks, taps, strict=True)
                live.update(Group(*(_panel(*row) for row in rows)))
                if all(status.state in ENDED for status in looks):
                    break
                time.sleep(LOOK_S * 2)
    except KeyboardInterrupt:
        say("left them as they were")
    finally:
        for watch in watches:
            watch.close()
    rows = zip(watches, looks, taps, strict=False)
    states = [described(watch, status, acceptance_of(watch.found), one) for watch, status, one in rows]
    return {"servers": states}


def _panel(watch: Watch, status: Status, taps: TapsWatch) -> Group:
    """One of several servers: without log and GPUs."""
    return panel(status, watch.found.url, None, None, taps_words(taps.look(watch.log)))


def failed(result: dict[str, Any]) -> bool:
    """Whether a look's exit status is 3: something crashed or is stuck."""
    return any(one["state"] in FAILED for one in result.get("servers", [result]))


def targets(places: Sequence[str], pids: Sequence[int], urls: Sequence[str]) -> list[Doomed]:
    """What to stop: what was named (`places`: serve folders and addresses), else the one server that this folder's runs
    hold.

    Raises InputError where a name is nobody's, or nothing is named and not exactly one server runs.
    """
    named = [Doomed.of(read_server(Path(place))) for place in places if not _is_url(place)]
    named += [_by_id(pid) for pid in pids]
    for url in (*urls, *(place for place in places if _is_url(place))):
        found = of_url(url)
        if found.pid is None:
            raise InputError(
                wanted="a server on this machine",
                got=f"nobody here listens at {url}",
                where="--url",
                next="eyas watch --all",
            )
        named.append(Doomed.of(found.server) if found.server is not None else by_pid(found.pid))
    return named or [_only_one()]


def _by_id(pid: int) -> Doomed:
    """A pid that was named; where Eyas started it, with all that is known of it."""
    doomed = by_pid(pid)
    found = of_pid(pid)
    return Doomed.of(found.server) if found.server is not None and found.server.pid == pid else doomed


def _only_one() -> Doomed:
    servers = [read_server(path.parent) for path in sorted(Path("runs").glob(f"*/*/{SERVER}"))]
    running = [one for one in servers if is_same(one.pid, one.created)]
    if len(running) != 1:
        listed = ", ".join(one.folder for one in running) or "none running under runs/"
        raise InputError(
            wanted="one server to stop", got=listed, where="eyas stop", next="eyas stop FOLDER, or eyas stop --pid PID"
        )
    return Doomed.of(running[0])


def stop_all(doomed: Sequence[Doomed], grace_s: float) -> dict[str, Any]:
    """Stop each; `stopped` and `port_free` hold for all, `gpus` are those after the last."""
    ended: list[dict[str, Any]] = [{"pid": one.pid, **stop(one, grace_s=grace_s, say=say)} for one in doomed]
    if len(ended) == 1:
        return ended[0]
    return {
        "stopped": all(one["stopped"] for one in ended),
        "port_free": all(one["port_free"] is not False for one in ended),
        "gpus": ended[-1]["gpus"],
        "holders": [holder for one in ended for holder in one["holders"]],
        "servers": ended,
    }
