"""Servers: start one, watch it, stop it."""

import sys
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from cyclopts.validators import Number
from rich.console import Console

from eyas.cli.app import (
    FLAGS,
    OUT,
    TARGET,
    Common,
    Flat,
    NamedTarget,
    Overrides,
    RecipeName,
    TargetFlags,
    Trust,
    app,
    finish,
)
from eyas.clients.chat import ServerChat
from eyas.clients.openai import server_key
from eyas.imports import uncollected
from eyas.launch.arguments import split_words
from eyas.pipeline.chat import Chat, Source, asked_of_server, converse, said, typed
from eyas.pipeline.plan import Plan
from eyas.pipeline.serve import prepare, serve, to_convert
from eyas.pipeline.watch import (
    failed,
    find,
    stop_all,
    targets,
    watch_all_following,
    watch_all_once,
    watch_following,
    watch_once,
)
from eyas.progress import say
from eyas.recipe import ChatSettings, ServeSettings, load_recipe, recipe_of
from eyas.shipped import chosen_draft

Many = Parameter(negative="")
SERVER_DIED = 3
BAD_INPUT = 2


def of_setting(name: str) -> Parameter:
    """A flag whose help is that of the recipe's key."""
    return Parameter(help=ServeSettings.model_fields[name].description)


@app.command(name="serve")
def serve_command(
    recipe: Annotated[RecipeName | None, Parameter(help="A recipe whose [serve] section says what to start.")] = None,
    *,
    engine: Annotated[str | None, of_setting("engine")] = None,
    target: NamedTarget = None,
    draft: Annotated[str | None, of_setting("draft")] = None,
    plain: Annotated[bool, of_setting("plain")] = False,
    python: Annotated[str | None, of_setting("python")] = None,
    host: Annotated[str | None, of_setting("host")] = None,
    port: Annotated[int | None, of_setting("port")] = None,
    num_steps: Annotated[int | None, of_setting("num_steps")] = None,
    topk: Annotated[int | None, of_setting("topk")] = None,
    num_draft_tokens: Annotated[int | None, of_setting("num_draft_tokens")] = None,
    tensor_parallel: Annotated[int | None, of_setting("tensor_parallel")] = None,
    engine_args: Annotated[str | None, of_setting("engine_args"), Parameter(allow_leading_hyphen=True)] = None,
    trace: Annotated[bool, of_setting("trace")] = False,
    trust_remote_code: Trust = False,
    out: Annotated[
        Path | None, OUT, Parameter(help="The folder of log and state; none means runs/NAME/serve, or serve-plain.")
    ] = None,
    detach: Annotated[bool, Parameter(help="Leave the server running once it is ready.")] = False,
    force: Annotated[bool, Parameter(help="Start in spite of what preflight found.")] = False,
    set_: Overrides = None,
    common: Common = FLAGS,
) -> None:
    """Start a server with its draft, and say in a second whether it is loading, stuck, dead or ready, and why.

    From a recipe (its [serve] section), from flags, or both: flags win. What speculation needs follows from the draft;
    --engine-args '--max-model-len 8192' is passed through, and refused where it contradicts. Stays with the server and
    stops it at Ctrl-C; with --detach leaves it running and prints url, pid, log and times. --force starts it in spite
    of what preflight found.
    """
    flags = {
        "engine": engine,
        "draft": draft,
        "plain": plain or None,
        "python": python,
        "host": host,
        "port": port,
        "num_steps": num_steps,
        "topk": topk,
        "num_draft_tokens": num_draft_tokens,
        "tensor_parallel": tensor_parallel,
        "engine_args": None if engine_args is None else split_words(engine_args),
        "trace": trace or None,
    }
    overrides = [f"serve.{name}={value!r}" for name, value in flags.items() if value is not None]
    overrides += [] if target is None else [f"target.name={target!r}"]
    overrides += ["target.trust_remote_code=true"] if trust_remote_code else []
    laid = (*(set_ or ()), *overrides)
    loaded = recipe_of(laid) if recipe is None else load_recipe(recipe, laid)
    if not common.plan and to_convert(loaded):
        with uncollected():
            from eyas.models.resolve import resolve_target

        resolve_target(loaded.target.name)
    launch = prepare(loaded, out, planning=common.plan)
    finish(common, launch.plan, lambda: serve(launch, detach=detach, force=force))


@app.command
def watch(
    folder: Annotated[
        str | None, Parameter(help="The folder that `eyas serve` wrote, or the server's address.")
    ] = None,
    *,
    log: Annotated[Path | None, Parameter(help="A file that the server's output goes, or went, to.")] = None,
    pid: Annotated[int | None, Parameter(help="The server's process.")] = None,
    url: Annotated[str | None, Parameter(help="Where it listens: http://127.0.0.1:8000.")] = None,
    all_: Annotated[bool, Parameter(name="--all", negative="", help="Every engine on this machine.")] = False,
    once: Annotated[bool, Parameter(help="One look, and status 3 for crashed or stuck.")] = False,
    draft: Annotated[
        str | None, Parameter(help="The draft's folder, for the layers that a loading engine says it reads.")
    ] = None,
    common: Common = FLAGS,
) -> int:
    """Is it loading, stuck, dead or ready, and why: a server of anybody's, by its folder, log, pid or url, or --all.

    Follows until it ends; with --once one look, and exit status 3 for crashed or stuck. Where a starting engine says
    which layers it reads, they are held against the draft's own: the one it was started with, else --draft.
    """

    found = find(folder, log, pid, url, every=all_)

    def work() -> dict[str, Any]:
        if found is None:
            return watch_all_once() if once else watch_all_following()
        return watch_once(found, draft) if once else watch_following(found, draft)

    known = {} if found is None else {"engine": found.engine, "pid": found.pid, "url": found.url}
    reads = [folder, log, url] if found is None else [found.folder, found.log, found.url]
    result = finish(common, Plan("watch", reads, [], more=known), work)
    return SERVER_DIED if not common.plan and failed(result) else 0


@app.command(name="chat")
def chat_command(
    *,
    url: Annotated[str | None, Parameter(help="A server to talk to, instead of an engine in this process.")] = None,
    prompt: Annotated[
        list[str] | None, Many, Parameter(help="A turn to ask instead of reading lines; repeatable.")
    ] = None,
    target: TargetFlags = TARGET,
    settings: Annotated[ChatSettings, Flat] = ChatSettings(),
    common: Common = FLAGS,
) -> int:
    """Talk to the target, with its draft: streaming, turn by turn, tokens/s and accept length after every answer.

    The engine runs in this process, or with --url is a server of any kind (EYAS_API_KEY is its key). --prompt asks one
    turn instead of reading lines, and may be repeated; lines that begin with / are commands (/help), // stands for a /
    to be said.
    """

    asked_for = None if prompt is None else said(prompt)
    request = {} if url is None else asked_of_server(settings, target.target)
    chosen, words = (None, None) if url is not None else chosen_draft(settings.draft, settings.plain, target.target)

    def work() -> dict[str, Any]:
        if url is not None:
            source: Source = ServerChat(url, request, server_key())
        else:
            with uncollected():
                from eyas.pipeline.chat_engine import EngineChat

            if words is not None:
                say(f"chat: {target.target} {words}")
            source = EngineChat(target.settings, settings, chosen)
        console = Console(highlight=False, stderr=common.json)
        with closing(source):
            patient = asked_for is None and sys.stdin.isatty()
            return converse(Chat(source, settings, patient), asked_for or typed(), console)

    plan = Plan("chat", [url or target.target, chosen], [], settings)
    result = finish(common, plan, work) if common.plan or common.json else work()
    return BAD_INPUT if "error" in result else 0


@app.command
def stop(
    folder: Annotated[
        list[str] | None, Many, Parameter(help="Folders that `eyas serve` wrote, or servers' addresses.")
    ] = None,
    /,
    *,
    pid: Annotated[list[int] | None, Many, Parameter(help="A server's process; may be repeated.")] = None,
    url: Annotated[list[str] | None, Many, Parameter(help="Where a server listens; may be repeated.")] = None,
    grace_s: Annotated[float, Parameter(help="Seconds between TERM and KILL.", validator=Number(gte=0))] = 20.0,
    common: Common = FLAGS,
) -> int:
    """Stop a server's whole tree, then see that its port is free and its GPUs' memory is back.

    Names the server by the folder that serve wrote, its pid or its url; without a name, the one under runs/.
    """

    doomed = targets(folder or (), pid or (), url or ())
    more = {"pids": [one.pid for one in doomed], "ports": [one.port for one in doomed]}
    plan = Plan("stop", [one.folder for one in doomed], [], more=more)
    result = finish(common, plan, lambda: stop_all(doomed, grace_s))
    return 0 if common.plan or (result["stopped"] and result["port_free"] is not False) else 1
