"""The compiled library: which machine it belongs to, and what becomes of a broken one."""

from pathlib import Path

import pytest

from eyas.engine import native_build
from eyas.engine.native_build import load_native


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of its own, and nothing loaded yet."""
    monkeypatch.setenv("EYAS_CACHE", str(tmp_path / "cache"))
    load_native.cache_clear()
    yield tmp_path
    load_native.cache_clear()


def compiler(folder: Path, version: str = "cc 1.0") -> Path:
    """A compiler that says its version and writes no library."""
    script = folder / "cc"
    script.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && echo "{version}" && exit 0\necho "no such target" >&2\nexit 1\n'
    )
    script.chmod(0o755)
    return script


def test_a_library_is_of_one_processor_one_compiler_and_one_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info, source = tmp_path / "cpuinfo", tmp_path / "native.cpp"
    source.write_text("int one;")
    monkeypatch.setattr(native_build, "CPU", info)
    monkeypatch.setattr(native_build, "SOURCE", source)

    def key(flags: str = "avx2 avx512f", model: str = "One", mhz: int = 2000, version: str = "cc 1.0") -> str:
        info.write_text(f"processor : 0\nmodel name : {model}\ncpu MHz : {mhz}\nflags : {flags}\n\nprocessor : 1\n")
        return native_build._key(str(compiler(tmp_path, version)))

    first = key()
    assert key(mhz=3100) == first
    others = [key(flags="avx2"), key(model="Two"), key(version="cc 2.0")]
    source.write_text("int two;")
    assert len({first, *others, key()}) == 5


def test_no_compiler_and_a_wrong_one_are_reasons(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def why() -> str:
        load_native.cache_clear()
        found = load_native()
        assert isinstance(found, str)
        return found

    monkeypatch.setenv("CXX", "no-such-compiler")
    assert why() == "no C++ compiler (no-such-compiler)"
    monkeypatch.setenv("CXX", str(compiler(fresh)))
    assert why().endswith("cc: no such target")
    assert not (fresh / "cache").exists()


@pytest.mark.parametrize("broken", ["a file", "read only", "full"])
def test_a_cache_that_cannot_be_written_costs_no_kernels(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """The library is built in a folder of this process, which is said."""
    said: list[str] = []
    script = compiler(fresh)
    script.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exit 0\nwhile [ "$1" != -o ]; do shift; done\necho library > "$2"\n'
    )
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setattr(native_build, "say", said.append)
    monkeypatch.setattr(native_build, "_declared", lambda library: library)
    monkeypatch.setattr(native_build.ctypes, "CDLL", lambda path: Path(path).read_text() and Path(path))
    monkeypatch.setattr(native_build.tempfile, "tempdir", str(fresh))

    def refuse(*paths: Path) -> None:
        raise OSError(28 if broken == "full" else 13, "No space left on device" if broken == "full" else "Permission")

    if broken == "a file":
        (fresh / "cache").touch()
    else:
        monkeypatch.setattr(native_build.shutil, "copyfile", refuse)
    library = load_native()
    assert isinstance(library, Path)
    assert library.parent.parent == fresh
    assert "for this process only: they cannot be kept in" in said[0]
    assert not list((fresh / "cache").rglob("*.tmp"))


def test_a_library_cut_short_is_compiled_again_aloud(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(native_build, "say", said.append)
    monkeypatch.setenv("CXX", str(compiler(fresh)))
    library = fresh / "cache" / "native" / f"{native_build._key(str(fresh / 'cc'))}.so"
    library.parent.mkdir(parents=True)
    library.write_bytes(b"\x7fELF")
    assert "no such target" in str(load_native())
    assert "compiled again" in said[0]
