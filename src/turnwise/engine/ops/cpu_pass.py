"""A sampler's pass through decoder blocks in few calls (`cpu_pass.c`): the numbers of the single kernels, bit for bit.

Shape legend: M rows (tokens of the pass), H hidden size, Q query heads, K key (and value) heads, D head size, I inner
size.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from turnwise.engine.ops import build, cpu, cpu_products, waiting
from turnwise.engine.ops.interface import BlockTensors, Heads, Rotation
from turnwise.errors import DataError

if TYPE_CHECKING:
    from turnwise.engine.attention.plans import PagedPlan

MOST_PRODUCTS = 1 << 30
"""Multiplications in one call; then the next look at how threads wait is due (`waiting.py`)."""
LINE = 16
"""Floats of a cache line, at which every part of the room begins."""
_SIZES = (
    "rows", "num_decode", "hidden", "heads", "kv_heads", "size", "inner", "num_positions", "cache_blocks", "block_size",
    "max_blocks", "num_prompts", "window", "num_wanted", "is_paired",
)  # fmt: skip
_POINTERS = (
    "cos", "sin", "positions", "slots", "block_table", "contexts", "prompts", "prompt_blocks", "wanted", "h", "normed",
    "rstd", "qkv", "query", "key", "mixed", "logsumexp", "gate_up", "act", "delta", "linear_scratch", "product_scratch",
)  # fmt: skip


class _StackCall(ctypes.Structure):
    """`Pass` of cpu_pass.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in _SIZES),
        *((name, ctypes.c_void_p) for name in _POINTERS),
        ("eps", ctypes.c_double),
        ("scale", ctypes.c_double),
    )


@functools.cache
def _bind(library: ctypes.CDLL) -> ctypes._NamedFuncPointer:
    function = library.tw_run_blocks
    int32, pointer = ctypes.c_int, ctypes.c_void_p
    function.argtypes = [ctypes.POINTER(_StackCall), pointer, ctypes.c_int64, int32, pointer, int32]
    function.restype = int32
    return function


def run(
    h_MH: Tensor,
    blocks: Sequence[BlockTensors],
    heads: Heads,
    rotation: Rotation,
    plan: PagedPlan,
    last_norm: Tensor,
    wanted: Tensor | None,
) -> Tensor | None:
    """Normed hidden states of the wanted rows, written over `h`'s room too; None where the kernels cannot run."""
    library = build.library()
    if library is None or not _fits(h_MH, blocks, heads, rotation, plan, last_norm):
        return None
    (rows, hidden), first = h_MH.shape, blocks[0]
    inner, width, kv_width = first.down.shape[1], heads.num_query * heads.size, heads.num_kv * heads.size
    threads, num_new = waiting.num_threads(), rows - plan.num_decode
    floats = {
        "rstd": rows,
        "qkv": rows * (width + 2 * kv_width),
        "query": rows * width,
        "key": rows * kv_width,
        "mixed": rows * width,
        "logsumexp": heads.num_query * num_new,
        "gate_up": 2 * rows * inner,
        "act": rows * inner,
        "delta": rows * hidden,
        "linear_scratch": cpu.SCRATCH_COLUMNS * max(hidden, width, inner),
    }
    starts, total = {}, 0
    for name, count in floats.items():
        starts[name], total = total, total + -(-count // LINE) * LINE
    is_paired = first.down.dtype is torch.bfloat16
    products = None
    if rows > cpu_products.MAX_FEW_ROWS:
        products = cpu_products.kernel().room(threads, rows if is_paired else 0, max(hidden, width, inner))
    room, normed = torch.empty(total), torch.empty(rows, hidden)
    prompts, prompt_blocks = plan.prompts() if plan.chunks else (None, None)
    num_blocks, block_size = first.keys.shape[:2]
    given = _StackCall(
        rows=rows, num_decode=plan.num_decode, hidden=hidden, heads=heads.num_query, kv_heads=heads.num_kv,
        size=heads.size, inner=inner, num_positions=len(rotation.cos), cache_blocks=num_blocks, block_size=block_size,
        max_blocks=plan.block_table.shape[1], num_prompts=len(plan.chunks), window=plan.window or 0,
        num_wanted=0 if wanted is None else len(wanted), is_paired=is_paired,
        cos=rotation.cos.data_ptr(), sin=rotation.sin.data_ptr(), positions=rotation.positions.data_ptr(),
        slots=plan.slots.data_ptr(), block_table=plan.block_table.data_ptr(), contexts=plan.context_lens.data_ptr(),
        prompts=None if prompts is None else prompts.ctypes.data,
        prompt_blocks=None if prompt_blocks is None else prompt_blocks.ctypes.data,
        wanted=None if wanted is None else wanted.data_ptr(), h=h_MH.data_ptr(), normed=normed.data_ptr(),
        product_scratch=products, eps=heads.eps, scale=heads.size**-0.5,
        **{name: room.data_ptr() + 4 * start for name, start in starts.items()},
    )  # fmt: skip
    _run_all(_bind(library), given, blocks, last_norm, threads)
    return normed if wanted is None else normed[: len(wanted)]


def _run_all(
    function: ctypes._NamedFuncPointer, given: _StackCall, blocks: Sequence[BlockTensors], norm: Tensor, threads: int
) -> None:
    """Call the kernel with as many threads as there is room for, whatever another thread of this process sets."""
    width = len(BlockTensors._fields)
    flat = [None if tensor is None else tensor.data_ptr() for block in blocks for tensor in block]
    pointers = (ctypes.c_void_p * len(flat))(*flat)
    products = given.rows * sum(tensor.numel() for tensor in blocks[0].matrices)
    step = max(1, MOST_PRODUCTS // products)
    for start in range(0, len(blocks), step):
        stop = min(start + step, len(blocks))
        own = ctypes.addressof(pointers) + start * width * ctypes.sizeof(ctypes.c_void_p)
        last = norm.data_ptr() if stop == len(blocks) else None
        if start > 0:
            waiting.num_threads()  # looks at how threads wait
        failed = function(ctypes.byref(given), own, stop - start, start > 0, last, threads)
        if failed == 1:
            raise MemoryError(f"no memory for the attention of {given.rows} tokens")
        if failed:
            raise DataError(
                f"positions must be within 0..{given.num_positions - 1}, and blocks and slots within the "
                f"{given.cache_blocks} blocks of the KV cache"
            )


def _fits(
    h: Tensor, blocks: Sequence[BlockTensors], heads: Heads, rotation: Rotation, plan: PagedPlan, last_norm: Tensor
) -> bool:
    """Whether the kernels read all these tensors as they lie, and would be taken one by one too."""
    if not blocks or len(h) == 0 or (len(h) > cpu_products.MAX_FEW_ROWS and not cpu_products.is_built()):
        return False
    if heads.size % 8 or heads.size > cpu.MAX_HEAD_SIZE or heads.num_query > cpu.MAX_HEADS:
        return False
    dtype = blocks[0].down.dtype
    is_even = all(tensor.shape[1] % 2 == 0 for tensor in blocks[0].matrices)
    if dtype is not torch.float32 and not (dtype is torch.bfloat16 and is_even):
        return False
    matrices = [tensor for block in blocks for tensor in block.matrices]
    others = [h, rotation.cos, rotation.sin, last_norm, *(one for block in blocks for one in block.others)]
    return (
        all(_lies(tensor, dtype) for tensor in matrices)
        and all(_lies(tensor, torch.float32) for tensor in others)
        and all(_lies(tensor, torch.int64) for tensor in (rotation.positions, plan.slots))
        and all(_lies(tensor, torch.int32) for tensor in (plan.block_table, plan.context_lens))
    )


def _lies(tensor: Tensor, dtype: torch.dtype) -> bool:
    return tensor.dtype is dtype and tensor.is_cpu and tensor.is_contiguous()
