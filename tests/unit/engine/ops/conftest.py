"""Every C kernel is tested for every instruction set that this processor can run."""

import ctypes
import platform
from collections.abc import Iterator

import pytest
import torch

from turnwise.engine.ops import build, cpu_attention, cpu_head, cpu_layers, cpu_low_rank, cpu_products

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
    before, build._loaded[:] = list(build._loaded), [opened]
    _forget()
    yield opened
    build._loaded[:] = before
    _forget()


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    torch.manual_seed(0)


def _forget() -> None:
    for module in (cpu_layers, cpu_head, cpu_attention):
        module._kernels.cache_clear()
    for module in (cpu_products, cpu_low_rank):
        module._kernel.cache_clear()
