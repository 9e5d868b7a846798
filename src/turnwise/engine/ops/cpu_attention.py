"""Attention on a CPU: our C kernels (`cpu_attention.c`, `cpu.c`), or PyTorch's flash kernels where ours do not run.

`attend` and `attend_backward` call the C kernels: float32, heads of up to 512. Their sides are
[batch, heads, tokens, D], strided but for the last axis; with fewer KV heads, query head h reads KV head
h // (heads / KV heads). In a causal call the last query stands at the last key, and a window counts back from there.

The functions of the interface take heads-first tensors [1, heads, tokens, D] and return tokens-first
[1, tokens, heads, D].
"""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from turnwise.engine.ops import build, cpu, torch_attention, waiting
from turnwise.engine.ops.interface import AttentionRule, Saved
from turnwise.engine.ops.torch_attention import merge, slice_forward, with_sinks
from turnwise.errors import DataError

if TYPE_CHECKING:
    from turnwise.engine.attention.plans import Chunk, EqualNodes, PagedPlan, TreePlan

_MAX_HEAD_SIZE = 512  # MAX_D in cpu_attention.c
NO_BLOCK = 2
"""What `tw_attend_cache` returns if a block does not exist."""
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def tree_forward(
    query: Tensor, key: Tensor, value: Tensor, plan: TreePlan, rule: AttentionRule
) -> tuple[Tensor, Tensor]:
    """Output [1, N, H, D] and log-sum-exp [1, H, N] of a packed forest."""
    _, num_heads, num_tokens, head_size = query.shape
    out = query.new_empty(1, num_tokens, num_heads, head_size).transpose(1, 2)
    logsumexp = query.new_empty(1, num_heads, num_tokens, dtype=torch.float32)
    if fits(query, key, value):
        _attend_forest(Saved(query, key, value, out, logsumexp), plan, rule)
        return with_sinks(out, logsumexp, rule)
    if _is_not_for_flash(plan, rule):
        return torch_attention.tree_forward(query, key, value, plan, rule)
    scale = rule.scale
    for run in plan.equal_runs():
        part = _flash(*(equal_rows(side, run) for side in (query, key, value)), 0.0, True, scale=scale)
        equal_rows(out, run).copy_(part[0])
        equal_rows(logsumexp, run).copy_(part[1])
    for q, k in plan.ancestors():
        part = _flash(query[:, :, q], key[:, :, k], value[:, :, k], 0.0, False, scale=scale)
        out[:, :, q], logsumexp[:, :, q] = merge(out[:, :, q], logsumexp[:, :, q], *part)
    return with_sinks(out, logsumexp, rule)


def tree_backward(grad_out: Tensor, saved: Saved, plan: TreePlan, rule: AttentionRule) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value; every part is exact with the whole row's output and log-sum-exp."""
    query, key, value, out, logsumexp = saved
    if not fits(query, key, value) and _is_not_for_flash(plan, rule):
        return torch_attention.tree_backward(grad_out, saved, plan, rule)
    grad_out, out = grad_out.contiguous().transpose(1, 2), out.transpose(1, 2)
    grads = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    if fits(query, key, value):
        _attend_forest_backward(grad_out, saved._replace(out=out), grads, plan, rule)
        return grads
    scale = rule.scale
    for run in plan.equal_runs():
        sides = (equal_rows(side, run) for side in (grad_out, query, key, value, out, logsumexp))
        for grad, piece in zip(grads, _flash_backward(*sides, 0.0, True, scale=scale), strict=True):
            equal_rows(grad, run).copy_(piece)
    for q, k in plan.ancestors():
        sides = (grad_out[:, :, q], query[:, :, q], key[:, :, k], value[:, :, k], out[:, :, q], logsumexp[:, :, q])
        parts = _flash_backward(*sides, 0.0, False, scale=scale)
        for grad, where, piece in zip(grads, (q, k, k), parts, strict=True):
            grad[:, :, where] += piece
    return grads


def _is_not_for_flash(plan: TreePlan, rule: AttentionRule) -> bool:
    """Whether PyTorch's kernels cannot compute this, because they have no windows and no soft caps."""
    return rule.softcap is not None or plan.window_runs(rule.window) is not None


def _attend_forest(sides: Saved, plan: TreePlan, rule: AttentionRule) -> None:
    """Write output and log-sum-exp in place: first attend to the own node, then add each ancestor to the softmax.

    Where a window is shorter than a path, a node attends to the end of its path at once.
    """
    if (windowed := plan.window_runs(rule.window)) is not None:
        for one in windowed:
            attend(rows_over_keys(sides, one.rows, one.keys), rule, is_causal=True)
        return
    for run in plan.equal_runs():
        attend(Saved(*(equal_rows(side, run) for side in sides)), rule, is_causal=True)
    for rows, keys in plan.ancestors():
        attend(rows_over_keys(sides, rows, keys), rule, is_causal=False, is_added=True)


def _attend_forest_backward(
    grad_out: Tensor, sides: Saved, grads: tuple[Tensor, Tensor, Tensor], plan: TreePlan, rule: AttentionRule
) -> None:
    if (windowed := plan.window_runs(rule.window)) is not None:
        for grad in grads:
            grad.zero_()
        for one in windowed:
            parts = grads[0][:, :, one.rows], *(_picked(grad, one.keys) for grad in grads[1:])
            attend_backward(
                grad_out[:, :, one.rows],
                rows_over_keys(sides, one.rows, one.keys),
                parts,
                rule,
                is_causal=True,
                is_added=True,
            )
            if not isinstance(one.keys, slice):
                for grad, part in zip(grads[1:], parts[1:], strict=True):
                    grad[:, :, one.keys] = part
        return
    for run in plan.equal_runs():
        dq, dk, dv = (equal_rows(grad, run) for grad in grads)
        own = Saved(*(equal_rows(side, run) for side in sides))
        attend_backward(equal_rows(grad_out, run), own, (dq, dk, dv), rule, is_causal=True)
    for rows, keys in plan.ancestors():
        parts = grads[0][:, :, rows], grads[1][:, :, keys], grads[2][:, :, keys]
        between = rows_over_keys(sides, rows, keys)
        attend_backward(grad_out[:, :, rows], between, parts, rule, is_causal=False, is_added=True)


def equal_rows(side: Tensor, run: EqualNodes) -> Tensor:
    """Neighbouring nodes of one length as a batch: [1, heads, tokens, ...] -> [count, heads, length, ...], a view."""
    span = side[0, :, run.start : run.start + run.count * run.length]
    return span.unflatten(1, (run.count, run.length)).transpose(0, 1)


def rows_over_keys(sides: Saved, rows: slice, keys: slice | Tensor) -> Saved:
    """The queries of some rows over the keys of others, all heads-first."""
    query, key, value, out, logsumexp = sides
    sides_of_keys = _picked(key, keys), _picked(value, keys)
    return Saved(query[:, :, rows], *sides_of_keys, out[:, :, rows], logsumexp[:, :, rows])


def _picked(side: Tensor, keys: slice | Tensor) -> Tensor:
    """Some tokens of a side: a view if they are neighbours, else a copy that is dense in the last axis."""
    return side[:, :, keys] if isinstance(keys, slice) else side.transpose(1, 2)[:, keys].transpose(1, 2)


def prefill(query: Tensor, key: Tensor, value: Tensor, plan: PagedPlan, layer: int, rule: AttentionRule) -> Tensor:
    """New prompt tokens attend to themselves causally and to their sequence's cached tokens."""
    _, num_heads, num_tokens, head_size = query.shape
    num_new = num_tokens - plan.num_decode
    out = query.new_empty(1, num_new, num_heads, head_size)
    if fits(query, *plan.cache.layer(layer)):
        logsumexp = query.new_empty(1, num_heads, num_new)
        _attend_cache(query[:, :, plan.num_decode :], out.transpose(1, 2), logsumexp, plan, layer, rule)
        return with_sinks(out.transpose(1, 2), logsumexp, rule)[0]
    for chunk in plan.chunks:
        part = slice(chunk.start, chunk.stop)
        own, logsumexp = _read_chunk(chunk, query[:, :, part], (key, value), plan, layer, rule)
        place = slice(chunk.start - plan.num_decode, chunk.stop - plan.num_decode)
        out[:, place], _ = with_sinks(own, logsumexp, rule)
    return out


def _read_chunk(
    chunk: Chunk, query: Tensor, new: tuple[Tensor, Tensor], plan: PagedPlan, layer: int, rule: AttentionRule
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of one chunk's queries, heads first, without our kernels."""
    rule = rule.within(chunk.num_cached + chunk.stop - chunk.start)
    if rule.window is not None or rule.softcap is not None:
        return slice_forward(query, *plan.keys_of(chunk, layer, *new), True, rule)
    key, value = (side[:, :, chunk.start : chunk.stop] for side in new)
    own, logsumexp = _flash(query, key, value, 0.0, True, scale=rule.scale)
    if chunk.num_cached:
        cached = plan.cache.read(layer, chunk.blocks, 0, chunk.num_cached)
        own, logsumexp = merge(own, logsumexp, *_flash(query, *cached, 0.0, False, scale=rule.scale))
    return own, logsumexp


def _attend_cache(
    query: Tensor, out: Tensor, logsumexp: Tensor, plan: PagedPlan, layer: int, rule: AttentionRule
) -> None:
    """All prompts of a pass in one call, over their sequences in the cache; `query` and `out` are heads first."""
    keys, values = plan.cache.layer(layer)
    num_blocks, block_size, kv_heads, size = keys.shape
    heads = query.shape[1]
    if heads % kv_heads or size != query.shape[3] or not (keys[:1].is_contiguous() and values[:1].is_contiguous()):
        raise DataError(
            f"{heads} query heads of {query.shape[3]} over a cache {tuple(keys.shape)} with strides {keys.stride()}: "
            "expected a multiple of its heads, of one size, and dense blocks"
        )
    lines, blocks = plan.prompts()
    sides = query, out, logsumexp, keys, values
    pointers = (ctypes.c_void_p * 5)(*(side.data_ptr() for side in sides))
    strides = (ctypes.c_int64 * 8)(
        *query.stride()[1:3], *out.stride()[1:3], *logsumexp.stride()[1:], keys.stride(0), values.stride(0)
    )
    sizes = (ctypes.c_int64 * 7)(len(lines), heads, kv_heads, size, num_blocks, block_size, rule.window or 0)
    failed = _kernels().cached(
        pointers, strides, sizes, lines.ctypes.data, blocks.ctypes.data, rule.scale, rule.softcap or 0.0,
        waiting.num_threads(),
    )  # fmt: skip
    if failed == NO_BLOCK:
        raise DataError(f"a prompt's block is not among the {num_blocks} blocks of the cache")
    _check_memory(failed)


def paged_decode(query: Tensor, layer: tuple[Tensor, Tensor], plan: PagedPlan, rule: AttentionRule) -> Tensor:
    """One query row [H, D] per sequence over its blocks."""
    is_taken = query.dtype is torch.float32 and query.shape[-1] % 8 == 0 and query.shape[-1] <= _MAX_HEAD_SIZE
    kernels = cpu.load() if is_taken else None
    if kernels is None:
        return torch_attention.paged_decode(query, layer, plan, rule)
    return kernels.paged_decode(query.contiguous(), *layer, plan.block_table, plan.context_lens, rule)


def can_capture_prefill(dtype: torch.dtype, head_size: int) -> bool:  # noqa: ARG001 - a CPU has no graphs
    return False


def fits(*sides: Tensor) -> bool:
    """Whether the C kernels can run on such tensors here."""
    is_read = all(side.is_cpu and side.dtype is torch.float32 and side.stride(-1) == 1 for side in sides)
    return is_read and sides[0].shape[-1] <= _MAX_HEAD_SIZE and build.library() is not None


class AttentionKernels:
    """The functions of one compiled library, with the types of their arguments."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointers, int32 = ctypes.POINTER(ctypes.c_void_p), ctypes.c_int
        int64s = ctypes.POINTER(ctypes.c_int64)
        self.forward = library.tw_attend
        self.backward = library.tw_attend_backward
        self.cached = library.tw_attend_cache
        numbers = ctypes.c_void_p, ctypes.c_void_p
        self.cached.argtypes = [pointers, int64s, int64s, *numbers, ctypes.c_float, ctypes.c_float, int32]
        for function in (self.forward, self.backward):
            function.argtypes = [pointers, int64s, int64s, ctypes.c_float, ctypes.c_float, int32, int32, int32]
        for function in (self.forward, self.backward, self.cached):
            function.restype = int32


_bind = functools.cache(AttentionKernels)


def _kernels() -> AttentionKernels:
    return _bind(build.built_library())


def attend(sides: Saved, rule: AttentionRule, *, is_causal: bool, is_added: bool = False) -> None:
    """Write the attention that `rule` says, without its sinks, and its log-sum-exp [batch, heads, tokens]; all sides
    are heads-first.

    With `is_added`, `out` and `logsumexp` hold the attention of the same queries over other keys, and become those of
    one softmax over all of them.
    """
    if sides.query.numel() == 0:
        return
    arguments = _arguments([*sides], rule, is_causal)
    failed = _kernels().forward(*arguments, is_causal, is_added, waiting.num_threads())
    _check_memory(failed)


def attend_backward(
    grad_out: Tensor,
    sides: Saved,
    grads: tuple[Tensor, ...],
    rule: AttentionRule,
    *,
    is_causal: bool,
    is_added: bool = False,
) -> None:
    """Write the gradients of query, key and value to `grads`, or add to what is there; all tensors are heads-first.

    `out` and `logsumexp` are those of whole rows, also where these keys are only some of what the queries saw.
    """
    if sides.query.numel() == 0:
        for grad in () if is_added else grads:
            grad.zero_()
        return
    arguments = _arguments([*sides, grad_out, *grads], rule, is_causal)
    failed = _kernels().backward(*arguments, is_causal, is_added, waiting.num_threads())
    _check_memory(failed)


def _arguments(
    sides: list[Tensor], rule: AttentionRule, is_causal: bool
) -> tuple[ctypes.Array, ctypes.Array, ctypes.Array, float, float]:
    """Pointers, strides, sizes, scale and soft cap, after a check: C code reads whatever its pointers point to."""
    query, key = sides[0], sides[1]
    batch, heads, queries, size = query.shape
    kv_heads, keys = key.shape[1:3]
    as_query, as_key = (batch, heads, queries, size), (batch, kv_heads, keys, size)
    expected = [as_query, as_key, as_key, as_query, as_query[:3], as_query, as_query, as_key, as_key]
    for side, shape in zip(sides, expected, strict=False):
        is_dense = side.dim() == 3 or size == 1 or side.stride(3) == 1
        if side.shape != shape or side.dtype is not torch.float32 or not side.is_cpu or not is_dense:
            raise DataError(
                f"got {side.dtype} {tuple(side.shape)} with strides {side.stride()} on {side.device} beside queries "
                f"{as_query} and keys {as_key}; expected float32 {shape}, dense in the last axis, on the CPU"
            )
    if heads % kv_heads or size > _MAX_HEAD_SIZE or keys == 0 or (is_causal and queries > keys):
        raise DataError(
            f"queries {as_query} over keys {as_key}: expected a multiple of the KV heads, heads of up to "
            f"{_MAX_HEAD_SIZE}, some keys, and, when causal, at least as many as queries"
        )
    pointers = (ctypes.c_void_p * 9)(*(side.data_ptr() for side in sides))
    strides = (ctypes.c_int64 * 27)(*(stride for side in sides for stride in side.stride()[:3]))
    window = rule.window or 0 if is_causal else 0
    sizes = (ctypes.c_int64 * 7)(batch, heads, kv_heads, queries, keys, size, window)
    return pointers, strides, sizes, rule.scale, rule.softcap or 0.0


def _check_memory(failed: int) -> None:
    if failed:
        raise MemoryError("no memory for the attention of this batch")
