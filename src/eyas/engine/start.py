"""Which forward an engine runs its target by: compiled kernels where they fit, else the plain path, with the reason."""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from eyas.engine.forward import Forward, ModuleForward, TargetForward
from eyas.engine.graphed_forward import GraphedForward
from eyas.engine.graphs import Recording
from eyas.engine.linear import uninstall
from eyas.engine.native_build import load_native
from eyas.engine.native_forward import NativeForward, unsupported
from eyas.engine.own_past import CacheForward, StateForward
from eyas.engine.selftest import OWN_ERROR, check_rows, error_of, own_states
from eyas.engine.settle import EngineFacts, layer_linears, precision_name, settle
from eyas.errors import InputError
from eyas.models.target import Target
from eyas.progress import say


def start(
    target: Target,
    boundaries: Sequence[int],
    most: int,
    *,
    kernels: str = "auto",
    int8: bool = False,
    plain: str | None = None,
    recording: Recording | None = None,
) -> tuple[Forward, EngineFacts]:
    """A forward for up to `most` rows that has passed its self-test, and what was settled.

    `kernels` "auto" tries the compiled ones, any other name means the plain path with these linears. `plain`: a reason
    to run the plain path all the same. `recording`: how the plain path's steps are recorded (None: they are not).
    Raises InputError for a target that neither can run.
    """
    own = own_states(target)
    native = _native(target, boundaries, most, int8, own) if kernels == "auto" and plain is None else plain or ""
    if not isinstance(native, str):
        return native
    ways = WAYS if recording is None else (GraphedForward, *WAYS[1:])
    forward = _through_modules(ways, target, boundaries, own)
    try:
        why = "; ".join(reason for reason in (native, forward.reason) if reason)
        facts = settle(forward, most, kernels, int8=int8, why=why)
        return forward, facts if recording is None else _record(forward, facts, recording)
    except InputError:
        forward.close()
        uninstall([*layer_linears(target), target.head])
        raise


WAYS: tuple[type[ModuleForward], ...] = (TargetForward, CacheForward, StateForward)
"""Through transformers' modules, the fastest first."""
MISFITS = (InputError, RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError, NotImplementedError)
"""What an architecture's code raises that is handed a past it was not written for."""


def _record(forward: ModuleForward, facts: EngineFacts, recording: Recording) -> EngineFacts:
    """Let `forward` replay its steps from now on, where rows keep their bits so."""
    if not isinstance(forward, GraphedForward):
        return replace(facts, graphs=f"not on the {forward.name} path")
    graphs = forward.use_graphs(recording)
    if facts.lossless and not check_rows(forward, facts.rows or 1) and not graphs.why:
        graphs.refuse("replayed rows differ in the self-test")
    return replace(facts, graphs=graphs.why or "used")


def _through_modules(
    ways: Sequence[type[ModuleForward]], target: Target, boundaries: Sequence[int], own: Tensor
) -> ModuleForward:
    """The first way whose rows are the target's own; its `reason` says why not those before it.

    Raises InputError where there is none.
    """
    reasons: list[str] = []
    for way in ways:
        forward = _made(way, target, boundaries, own)
        if not isinstance(forward, str):
            forward.reason = "; ".join(reasons)
            return forward
        reasons += [forward] if forward not in reasons else []
    raise InputError(
        wanted="a target whose past is keys and values, or a state that its own forward takes and gives",
        got=f"{type(target.model).__name__}: {'; '.join(reasons)}",
        where="the embedded engine",
        next="serve this target with --engine sglang or vllm",
    )


def _made(way: type[ModuleForward], target: Target, boundaries: Sequence[int], own: Tensor) -> ModuleForward | str:
    """A forward that has given the target's own rows, or why it is none."""
    if reason := way.unfit(target):
        return reason
    forward = way(target, boundaries)
    try:
        error = error_of(forward, own)
        if error < OWN_ERROR:
            return forward
        reason = f"rows over the engine's cache are off its own forward's by {error:.0%}"
    except MISFITS as error:
        told = error.got if isinstance(error, InputError) else f"{type(error).__name__}: {error}"
        reason = f"its code does not take the engine's cache ({told.strip().splitlines()[0]})"
    forward.close()
    return reason


def _native(
    target: Target, boundaries: Sequence[int], most: int, int8: bool, own: Tensor
) -> tuple[Forward, EngineFacts] | str:
    """The compiled forward, or why it is not run."""
    reason = unsupported(target)
    library = load_native() if reason is None else reason
    if isinstance(library, str):
        return library
    forward = NativeForward(target, library, boundaries, int8=int8)
    # Weights rounded to int8 are another function, by as much as they are.
    right = int8 or error_of(forward, own) < OWN_ERROR
    if not right or not check_rows(forward, most, borders=False):
        reason = "compiled kernels fail the self-test of rows" if right else "compiled kernels compute something else"
        say(f"engine: {reason}: plain path")
        return reason
    return forward, EngineFacts(
        precision=precision_name(target, int8), most=most, rows=None, lossless=True, path="compiled"
    )
