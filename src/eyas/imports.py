"""Imports of what takes seconds to import."""

import gc
import sys
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Generator[None, None, None]:
    """Import inside without Python's collector of cycles, and let it look at none of it afterwards.

    It would walk all that lives again and again while hundreds of thousands of objects are made that stay to the end: a
    fifth of the time in which torch and transformers are imported, and 0.2 s at every full collection of a program that
    has imported them (docs/lab.md).
    """
    collects, before = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
        if len(sys.modules) > before:
            gc.freeze()
    finally:
        if collects:
            gc.enable()
