"""Every C kernel is tested for every instruction set that this processor can run."""

import ctypes
import platform
from collections.abc import Iterator

import pytest
import torch

from turnwise.engine.ops import build

# The C files have branches for AVX-512, for AVX2 and portable ones; an older target takes the lower branches.
_TARGETS = {"native": ("-march=native",)}
if platform.machine() in ("x86_64", "AMD64"):
    _TARGETS |= {"avx2": ("-march=native", "-mno-avx512f"), "portable": ("-march=x86-64",)}


@pytest.fixture(scope="module", params=list(_TARGETS))
def library(request: pytest.FixtureRequest) -> Iterator[ctypes.CDLL]:
    """The compiled library of one target; the Python modules around it use it while a test runs."""
    compiler = build.find_compiler()
    assert compiler is not None, "these tests need a C compiler"
    flags = (*build.COMPILE_FLAGS, *_TARGETS[request.param])
    openmp = ("-fopenmp",) if platform.system() == "Linux" else ()
    opened = ctypes.CDLL(str(build.build(compiler, (*flags, *openmp), build.LINK_FLAGS)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "library", lambda: opened)
        yield opened


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    torch.manual_seed(0)
