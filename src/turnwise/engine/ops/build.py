"""The C kernels as one library: compiled on first use, cached, opened with ctypes.

`library()` compiles every `cpu*.c` of this folder with the system compiler, for the processor of this machine. It keeps
the result under `$TURNWISE_HOME/kernels` (or `~/.cache/turnwise/kernels`); the file name is a hash of the sources, the
compiler and the processor. Where nothing can be built it returns None, and the callers use plain torch.

Threads come from the OpenMP runtime that torch has loaded: the library is compiled for OpenMP but linked without one,
so its calls bind to torch's. A second runtime would keep its own pool spinning on the same cores.
"""

import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import torch  # noqa: F401 - torch's OpenMP runtime must be loaded before the library asks for one

from turnwise.engine.ops.processor import find_compiler

_log = logging.getLogger(__name__)

_FOLDER = Path(__file__).parent
# No -ffast-math: the kernels read -inf (masked logits) and must report NaN.
COMPILE_FLAGS = ("-O3", "-std=gnu11", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi")
LINK_FLAGS = ("-shared", *(("-undefined", "dynamic_lookup") if platform.system() == "Darwin" else ()))
# More flags to (compile, link), best first: torch's OpenMP, a runtime of our own, one thread, any processor.
VARIANTS = (
    (("-march=native", "-fopenmp"), ()),
    (("-march=native", "-fopenmp"), ("-fopenmp",)),
    (("-march=native",), ()),
    ((), ()),
)

_load_lock = threading.Lock()
_loaded: list[ctypes.CDLL | None] = []


def library() -> ctypes.CDLL | None:
    """The library; the first call builds it. None where this machine cannot build it, which is logged once."""
    if not _loaded:  # every call of a kernel asks, so only the first calls take the lock
        with _load_lock:
            if not _loaded:
                _loaded.append(open_library())
    return _loaded[0]


def built_library() -> ctypes.CDLL:
    """The library, for kernels that are chosen only where it could be built."""
    found = library()
    assert found is not None, "chosen only where the library is built"
    return found


def open_library() -> ctypes.CDLL | None:
    """Build and open the library; None, with a warning, where that fails."""
    compiler = find_compiler()
    if compiler is None:
        _log.warning("no C compiler ($CC, cc, gcc, clang): the CPU uses the slower torch path")
        return None
    why = ""
    for compile_flags, link_flags in VARIANTS:
        try:
            path = build(compiler, (*COMPILE_FLAGS, *compile_flags), (*LINK_FLAGS, *link_flags))
            return ctypes.CDLL(str(path))
        except subprocess.CalledProcessError as error:
            why = error.stderr.strip().splitlines()[-1] if error.stderr.strip() else str(error)
        except OSError as error:  # the disk is full, or the library lacks a symbol
            why = str(error)
    _log.warning("%s cannot build the CPU kernels (%s): the slower torch path is used", compiler[0], why)
    return None


def build(compiler: list[str], compile_flags: tuple[str, ...], link_flags: tuple[str, ...]) -> Path:
    """Path of the library for these sources, compiler and processor; compiled if it is not there yet."""
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=True).stdout
    sources = sorted(_FOLDER.glob("cpu*.c"))
    texts = [path.read_text() for path in (*sources, *sorted(_FOLDER.glob("cpu*.h")))]
    parts = (texts, compiler, version, compile_flags, link_flags, _processor())
    name = hashlib.sha256(repr(parts).encode()).hexdigest()[:32]
    folder = kernels_folder()
    path = folder / f"{name}.so"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    # We rename the file when it is complete, so another process sees a whole library or none.
    with _one_builder(folder), tempfile.TemporaryDirectory(dir=folder) as temporary:
        if path.exists():
            return path
        objects = [Path(temporary) / f"{source.stem}.o" for source in sources]
        shared = Path(temporary) / "cpu.so"
        pairs = zip(sources, objects, strict=True)
        with ThreadPoolExecutor(len(sources)) as pool:
            list(pool.map(_run, [[*compiler, *compile_flags, "-c", str(c), "-o", str(o)] for c, o in pairs]))
        _run([*compiler, *map(str, objects), *link_flags, "-lm", "-o", str(shared)])
        shared.replace(path)
    return path


@contextmanager
def _one_builder(folder: Path) -> Iterator[None]:
    """Let one process build while others wait for what it makes; where the file system has no locks, all build."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def kernels_folder() -> Path:
    """The directory of compiled kernels."""
    home = Path(os.environ.get("TURNWISE_HOME") or "~/.cache/turnwise")
    return home.expanduser().absolute() / "kernels"


def _run(command: list[str]) -> None:
    subprocess.run(command, capture_output=True, text=True, check=True)


def _processor() -> str:
    """What -march=native depends on. Several machines may share one cache directory, and each needs its own build."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
        return "\n".join(line for line in lines if line.startswith(("vendor", "model", "cpu family", "flags", "CPU")))
    except OSError:
        return f"{platform.machine()} {platform.processor()} {platform.version()}"
