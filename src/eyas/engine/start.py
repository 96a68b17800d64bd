"""Which forward an engine runs its target by: compiled kernels where they fit, else the plain path, with the reason."""

from collections.abc import Sequence

from eyas.engine.forward import Forward, TargetForward
from eyas.engine.linear import uninstall
from eyas.engine.native_build import load_native
from eyas.engine.native_forward import NativeForward, unsupported
from eyas.engine.selftest import check_rows
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
) -> tuple[Forward, EngineFacts]:
    """A forward for up to `most` rows that has passed its self-test, and what was settled.

    `kernels` "auto" tries the compiled ones, any other name means the plain path with these linears. `plain`: a reason
    to run the plain path all the same. Raises InputError for a target that neither can run.
    """
    native = _native(target, boundaries, most, int8) if kernels == "auto" and plain is None else plain or ""
    if not isinstance(native, str):
        return native
    forward = TargetForward(target, boundaries)
    try:
        return forward, settle(forward, most, kernels, int8=int8, why=native)
    except InputError:
        forward.close()
        uninstall([*layer_linears(target), target.head])
        raise


def _native(target: Target, boundaries: Sequence[int], most: int, int8: bool) -> tuple[Forward, EngineFacts] | str:
    """The compiled forward, or why it is not run."""
    reason = unsupported(target)
    library = load_native() if reason is None else reason
    if isinstance(library, str):
        return library
    forward = NativeForward(target, library, boundaries, int8=int8)
    if not check_rows(forward, most, borders=False):
        reason = "compiled kernels fail the self-test of rows"
        say(f"engine: {reason}: plain path")
        return reason
    return forward, EngineFacts(
        precision=precision_name(target, int8), most=most, rows=None, lossless=True, path="compiled"
    )
