"""The CPU kernels of `cpu.c` and `cpu_linear.c`, called on torch tensors; None where `build.py` cannot build them.

Axes: B rows of the batch; N outputs and K inputs of a layer; Hq query and Hkv KV heads of size D; V vocabulary.
"""

import ctypes
import functools
import threading

import torch
from torch import Tensor

from turnwise.engine.ops import build, waiting
from turnwise.engine.ops.interface import AttentionRule
from turnwise.errors import DataError

SCRATCH_COLUMNS = 160  # BLOCK_COLS + 32 in cpu_linear.c
MAX_HEADS, MAX_HEAD_SIZE = 1024, 512  # of decode attention; the first is the same in cpu.c


class CpuKernels:
    """The functions of one compiled library. Tensors are float32, on the CPU and contiguous unless said otherwise.

    Nothing here records gradients. Each call uses up to `torch.get_num_threads()` threads and releases the GIL.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, int64, int32, float32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
        self._linear, self._linear_pairs = library.tw_linear, library.tw_linear_pairs
        for function in (self._linear, self._linear_pairs):
            function.argtypes = [pointer, int64, int64, pointer, int64, *[pointer] * 3, int32]
            function.restype = None
        library.tw_has_pair_dots.restype = int32
        self.has_pair_dots = bool(library.tw_has_pair_dots())
        """Whether products with bfloat16 weights use the processor's own dot products; else they are emulated."""
        self._paged_decode = library.tw_paged_decode
        rule = float32, float32, int64, pointer
        self._paged_decode.argtypes = [*[pointer, int64] * 3, *[pointer] * 3, *[int64] * 7, *rule, int32]
        self._paged_decode.restype = int32
        self._sample_rows = library.tw_sample_rows
        self._sample_rows.argtypes = [*[pointer] * 5, int64, int64, int32]
        self._sample_rows.restype = int32
        self._count_threads = library.tw_count_threads
        self._count_threads.argtypes = [int32]
        self._count_threads.restype = int32
        self._scratch = threading.local()

    def num_threads(self) -> int:
        """The threads that a call gets now: `torch.get_num_threads()`, or 1 without OpenMP."""
        return self._count_threads(torch.get_num_threads())

    def linear_small(self, weight: Tensor, x: Tensor, out: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        """x [B, K] times weight [N, K] transposed, plus bias [N]; meant for B up to about 128.

        A weight may be bfloat16, if K is even: then x is rounded to bfloat16, and the products are summed in float32.
        """
        rows, inputs = x.shape
        outputs = weight.shape[0]
        if out is None:
            out = x.new_empty(rows, outputs)
        is_paired = weight.dtype is torch.bfloat16
        _check("weight", weight, (outputs, inputs), torch.bfloat16 if is_paired else torch.float32)
        if is_paired and inputs % 2:
            raise DataError(f"a bfloat16 weight of {outputs} x {inputs}: expected an even number of inputs")
        _check("x", x, (rows, inputs))
        _check("out", out, (rows, outputs))
        bias_pointer = None
        if bias is not None:
            _check("bias", bias, (outputs,))
            bias_pointer = bias.data_ptr()
        function = self._linear_pairs if is_paired else self._linear
        function(
            x.data_ptr(), rows, inputs, weight.data_ptr(), outputs, bias_pointer, out.data_ptr(),
            self._linear_scratch(inputs), waiting.num_threads(),
        )  # fmt: skip
        return out

    def paged_decode(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        block_table: Tensor,
        context_lens: Tensor,
        rule: AttentionRule,
        out: Tensor | None = None,
    ) -> Tensor:
        """Softmax attention of one query token per row over its context in the paged KV cache.

        Blocks before a row's window are not read; their places in the table may hold any number.

        Args:
            query: [B, Hq, D]; rows may be strided. Query head h reads KV head h // (Hq / Hkv).
            key_cache: [num_blocks, block_size, Hkv, D], the current token included; blocks may be strided.
            value_cache: same shape as `key_cache`.
            block_table: [B, max_blocks] int32: the blocks of each row in the order of its tokens.
            context_lens: [B] int32: tokens to attend to, the current one included; 0 gives zeros.
        """
        batch, heads, head_size = query.shape
        num_blocks, block_size, kv_heads, _ = key_cache.shape
        if head_size % 8 or not 0 < head_size <= MAX_HEAD_SIZE:
            raise DataError(f"head size {head_size}: expected a multiple of 8 up to {MAX_HEAD_SIZE}")
        if heads % kv_heads or heads > MAX_HEADS:
            raise DataError(f"{heads} query heads over {kv_heads} KV heads: expected a multiple, at most {MAX_HEADS}")
        if out is None:
            out = query.new_empty(batch, heads, head_size)
        max_blocks = block_table.shape[1]
        _check_strided("query", query, (batch, heads, head_size))
        _check_strided("key_cache", key_cache, (num_blocks, block_size, kv_heads, head_size))
        _check_strided("value_cache", value_cache, (num_blocks, block_size, kv_heads, head_size))
        _check("block_table", block_table, (batch, max_blocks), torch.int32)
        _check("context_lens", context_lens, (batch,), torch.int32)
        _check("out", out, (batch, heads, head_size))
        sinks = None if rule.sinks is None else rule.sinks.contiguous()
        if sinks is not None:
            _check("sinks", sinks, (heads,))
        failed = self._paged_decode(
            query.data_ptr(), query.stride(0), key_cache.data_ptr(), key_cache.stride(0), value_cache.data_ptr(),
            value_cache.stride(0), block_table.data_ptr(), context_lens.data_ptr(), out.data_ptr(), batch, heads,
            kv_heads, head_size, num_blocks, block_size, max_blocks, rule.scale, rule.softcap or 0.0,
            rule.window or 0, None if sinks is None else sinks.data_ptr(), waiting.num_threads(),
        )  # fmt: skip
        if failed:
            raise DataError(
                f"block table does not cover the contexts: every length must be within 0..{max_blocks * block_size} "
                f"and every block in use within 0..{num_blocks - 1}"
            )
        return out

    def sample_rows(self, logits: Tensor, temperature: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """Draw a token per row of softmax(logits [B, V] / T [B]) by inverse CDF; returns int64 tokens and logprobs.

        T = 0 takes the largest logit, the first one on ties, with its logprob at T = 1. A row that is no distribution
        (it has a NaN or +inf, or only -inf) gives token -1 with logprob NaN.

        Args:
            uniform: [B] numbers in [0, 1), float32 or float64. float32 steps are coarser than rare tokens of
                a large vocabulary are likely; prefer float64.
        """
        batch, vocab_size = logits.shape
        uniform = uniform.double()
        tokens = logits.new_empty(batch, dtype=torch.int64)
        logprobs = logits.new_empty(batch)
        _check("logits", logits, (batch, vocab_size))
        _check("temperature", temperature, (batch,))
        _check("uniform", uniform, (batch,), torch.float64)
        failed = self._sample_rows(
            logits.data_ptr(), temperature.data_ptr(), uniform.data_ptr(), tokens.data_ptr(),
            logprobs.data_ptr(), batch, vocab_size, waiting.num_threads(),
        )  # fmt: skip
        if failed == 2:
            raise MemoryError(f"no memory to sample from {vocab_size} logits")
        if failed:
            raise DataError("expected temperatures that are finite and >= 0 and uniform numbers in [0, 1)")
        return tokens, logprobs

    def _linear_scratch(self, inputs: int) -> int:
        """Address of this thread's buffer for the packed x."""
        buffer: Tensor | None = getattr(self._scratch, "buffer", None)
        needed = inputs * SCRATCH_COLUMNS
        if buffer is None or buffer.numel() < needed:
            buffer = self._scratch.buffer = torch.empty(needed, dtype=torch.float32, device="cpu")
        return buffer.data_ptr()


def _check(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> None:
    """Check what C code cannot check: it reads whatever its pointers point to."""
    if tensor.shape != shape or tensor.dtype is not dtype or not tensor.is_contiguous() or not tensor.is_cpu:
        raise DataError(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()} on {tensor.device}; "
            f"expected contiguous {dtype} {shape} on the CPU"
        )


def _check_strided(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """Like `_check`, but rows may be strided: only the axes after the first must be contiguous."""
    if tensor.is_contiguous() or tensor.shape != shape:
        _check(name, tensor, shape)
    else:
        _check(name, tensor[0], shape[1:])


def load() -> CpuKernels | None:
    """The kernels; the first call builds them. None where this machine cannot build them."""
    library = build.library()
    return None if library is None else _bind(library)


_bind = functools.cache(CpuKernels)
