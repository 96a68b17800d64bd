"""Imports without the collector of cycles: it is as it was afterwards, and does not look at what was imported."""

import gc
import sys
from pathlib import Path

import pytest

from eyas.imports import uncollected


def test_the_collector_rests_while_modules_are_imported_and_then_passes_them_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "eyas_newly_imported.py").write_text("import gc\ncollected = gc.isenabled()\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = gc.get_freeze_count()
    try:
        with uncollected():
            import eyas_newly_imported  # pyrefly: ignore

        assert not eyas_newly_imported.collected
        assert gc.isenabled()
        assert gc.get_freeze_count() > before
    finally:
        gc.unfreeze()
        sys.modules.pop("eyas_newly_imported", None)


def test_nothing_is_frozen_where_nothing_was_imported() -> None:
    before = gc.get_freeze_count()
    with uncollected():
        import json  # noqa: F401
    assert gc.isenabled() and gc.get_freeze_count() == before


def test_the_collector_is_as_it_was_after_an_import_that_fails_or_where_it_was_off() -> None:
    with pytest.raises(ModuleNotFoundError), uncollected():
        import eyas_of_nowhere  # pyrefly: ignore  # noqa: F401
    assert gc.isenabled()
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
