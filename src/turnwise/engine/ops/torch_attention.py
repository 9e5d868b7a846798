"""Attention in plain torch, few scores at a time: any device, dtype and head size; slower, and the reference.

Every function takes heads-first tensors [1, heads, tokens, D]; grouped query heads read their shared key head. The
functions of the interface return tokens-first [1, tokens, heads, D].
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from turnwise.engine.ops.interface import AttentionRule, Saved

if TYPE_CHECKING:
    from turnwise.engine.attention.plans import PagedPlan, TreePlan

MOST_SCORES = 1 << 27
"""Scores that are computed at once, at most: 512 MiB in float32, of which a backward pass holds a few copies."""


def tree_forward(
    query: Tensor, key: Tensor, value: Tensor, plan: TreePlan, rule: AttentionRule
) -> tuple[Tensor, Tensor]:
    """Output [1, N, H, D] and log-sum-exp [1, H, N] of a packed forest."""
    out, logsumexp = torch.empty_like(query), query.new_empty(query.shape[:-1], dtype=torch.float32)
    if (runs := plan.window_runs(rule.window)) is not None:
        for run in runs:
            q, k = run.rows, run.key_index(query.device)
            out[:, :, q], logsumexp[:, :, q] = slice_forward(query[:, :, q], key[:, :, k], value[:, :, k], True, rule)
        return with_sinks(out, logsumexp, rule)
    for q, k, is_causal in plan.slices():
        part = slice_forward(query[:, :, q], key[:, :, k], value[:, :, k], is_causal, rule)
        if not is_causal:
            part = merge(out[:, :, q], logsumexp[:, :, q], *part)
        out[:, :, q], logsumexp[:, :, q] = part
    return with_sinks(out, logsumexp, rule)


def tree_backward(grad_out: Tensor, saved: Saved, plan: TreePlan, rule: AttentionRule) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value; every part is exact with the whole row's output and log-sum-exp."""
    query, key, value, out, logsumexp = saved
    grad_out, out = grad_out.transpose(1, 2), out.transpose(1, 2)
    grads = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    runs = plan.window_runs(rule.window)
    parts = plan.slices() if runs is None else ((run.rows, run.key_index(query.device), True) for run in runs)
    for q, k, is_causal in parts:
        part = Saved(query[:, :, q], key[:, :, k], value[:, :, k], out[:, :, q], logsumexp[:, :, q])
        pieces = _slice_backward(grad_out[:, :, q], part, is_causal, rule)
        for grad, where, piece in zip(grads, (q, k, k), pieces, strict=True):
            grad[:, :, where] += piece
    return grads


def prefill(query: Tensor, key: Tensor, value: Tensor, plan: PagedPlan, layer: int, rule: AttentionRule) -> Tensor:
    """New prompt tokens attend to themselves causally and to their sequence's cached tokens."""
    first = plan.num_decode
    out = torch.empty_like(query[0, :, first:].transpose(0, 1))
    for chunk in plan.chunks:
        part = slice(chunk.start, chunk.stop)
        keys, values = plan.keys_of(chunk, layer, key, value)
        own, _ = with_sinks(*slice_forward(query[:, :, part], keys, values, True, rule), rule)
        out[chunk.start - first : chunk.stop - first] = own[0]
    return out[None]


def paged_decode(query: Tensor, layer: tuple[Tensor, Tensor], plan: PagedPlan, rule: AttentionRule) -> Tensor:
    """Gather the blocks that every row sees side by side, and mask what is outside its window or its context."""
    size = layer[0].shape[1]
    lengths = plan.context_lens.long()
    firsts = (lengths - rule.window).clamp_min(0) if rule.window is not None else torch.zeros_like(lengths)
    seen = plan.max_context if rule.window is None else min(plan.max_context, rule.window + size - 1)
    columns = firsts[:, None] // size + torch.arange(-(-seen // size), device=query.device)
    table = plan.block_table.long().gather(1, columns.clamp_max(plan.block_table.shape[1] - 1))
    keys, values = (side[table].flatten(1, 2).transpose(1, 2) for side in layer)
    positions = (firsts // size * size)[:, None] + torch.arange(keys.shape[2], device=query.device)
    visible = (positions < lengths[:, None]) & (positions >= firsts[:, None])
    rows = query.unsqueeze(2)
    if rule.softcap is None and rule.sinks is None:
        mask = visible[:, None, None]
        out = scaled_dot_product_attention(rows, keys, values, attn_mask=mask, scale=rule.scale, enable_gqa=True)
        return out.squeeze(2)
    scores = cap((rows @ _repeat(keys, rows).transpose(-1, -2)).float() * rule.scale, rule)
    scores = scores.masked_fill(~visible[:, None, None], float("-inf"))
    logsumexp = torch.logsumexp(scores, dim=-1)
    probs = (scores - logsumexp.unsqueeze(-1)).exp().to(values.dtype)
    out, _ = with_sinks(probs @ _repeat(values, rows), logsumexp, rule)
    return out.squeeze(1)


def can_capture_prefill(dtype: torch.dtype, head_size: int) -> bool:  # noqa: ARG001 - slices depend on the prompts
    return False


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """One softmax over two disjoint sets of keys, from each set's output [.., H, N, D] and log-sum-exp [.., H, N]."""
    lse = torch.logaddexp(lse_a, lse_b)
    weight_a, weight_b = (lse_a - lse).exp().unsqueeze(-1), (lse_b - lse).exp().unsqueeze(-1)
    return (out_a * weight_a + out_b * weight_b).to(out_a.dtype), lse


def with_sinks(out: Tensor, logsumexp: Tensor, rule: AttentionRule) -> tuple[Tensor, Tensor]:
    """The same attention with the rule's sinks in its softmax, tokens first; `out` comes heads-first [.., H, N, D]."""
    if rule.sinks is None:
        return out.transpose(-3, -2), logsumexp
    lse = torch.logaddexp(logsumexp, rule.sinks.detach().float()[:, None])
    return (out * (logsumexp - lse).exp().unsqueeze(-1)).to(out.dtype).transpose(-3, -2), lse


def sink_gradients(grad_out: Tensor, out: Tensor, logsumexp: Tensor, sinks: Tensor) -> Tensor:
    """[H]; a sink has no value, so it only takes its share away. `grad_out` and `out` are tokens-first."""
    delta = (grad_out.float() * out.float()).sum(dim=-1).transpose(1, 2)
    share = (sinks.float()[:, None] - logsumexp).exp()
    return -(share * delta).sum(dim=(0, 2)).to(sinks.dtype)


def cap(scores: Tensor, rule: AttentionRule) -> Tensor:
    return scores if rule.softcap is None else (scores / rule.softcap).tanh() * rule.softcap


def slice_forward(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, rule: AttentionRule
) -> tuple[Tensor, Tensor]:
    """Output like `query`, and log-sum-exp [1, H, tokens] in float32, without sinks.

    Causal: the last query stands at the last key, and a window counts back from there.
    """
    parts: list[tuple[Tensor, Tensor]] = []
    for q, k in _blocks(query, key, is_causal):
        scores = _scores(query[:, :, q], key[:, :, k], is_causal, rule)
        logsumexp = torch.logsumexp(scores, dim=-1)
        probs = (scores - logsumexp.unsqueeze(-1)).exp().to(value.dtype)
        parts.append((probs @ _repeat(value[:, :, k], query), logsumexp))
    if len(parts) == 1:
        return parts[0]
    outs, logsumexps = zip(*parts, strict=True)
    return torch.cat(outs, dim=2), torch.cat(logsumexps, dim=2)


def _blocks(query: Tensor, key: Tensor, is_causal: bool) -> Iterator[tuple[slice, slice]]:
    """Queries few enough for their scores to stay small, and the keys that they see."""
    heads, queries, keys = query.shape[1], query.shape[2], key.shape[2]
    size = max(1, MOST_SCORES // max(1, heads * keys))
    for start in range(0, queries, size):
        stop = min(queries, start + size)
        yield slice(start, stop), slice(0, keys - queries + stop if is_causal else keys)


def _slice_backward(
    grad_out: Tensor, part: Saved, is_causal: bool, rule: AttentionRule
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of one part of a softmax whose whole has the part's `out` and `logsumexp`, all heads-first."""
    sums = [torch.zeros_like(side, dtype=torch.float32) for side in part[:3]]
    for q, k in _blocks(part.query, part.key, is_causal):
        sides = Saved(
            part.query[:, :, q], part.key[:, :, k], part.value[:, :, k], part.out[:, :, q], part.logsumexp[:, :, q]
        )
        pieces = _block_backward(grad_out[:, :, q], sides, is_causal, rule)
        for total, where, piece in zip(sums, (q, k, k), pieces, strict=True):
            total[:, :, where] += piece
    dq, dk, dv = (total.to(side.dtype) for total, side in zip(sums, part[:3], strict=True))
    return dq, dk, dv


def _block_backward(
    grad_out: Tensor, part: Saved, is_causal: bool, rule: AttentionRule
) -> tuple[Tensor, Tensor, Tensor]:
    """The same for few queries, in float32."""
    query, key, value, out, logsumexp = part
    scores = _scores(query, key, is_causal, rule)
    probs = (scores - logsumexp.unsqueeze(-1)).exp()
    grad_f32 = grad_out.float()
    delta = (grad_f32 * out.float()).sum(dim=-1, keepdim=True)
    grad_scores = probs * (grad_f32 @ _repeat(value, query).float().transpose(-1, -2) - delta) * rule.scale
    if rule.softcap is not None:
        grad_scores *= 1 - (scores.masked_fill(probs == 0, 0.0) / rule.softcap) ** 2
    grad_query = grad_scores @ _repeat(key, query).float()
    grad_key = _sum_groups(grad_scores.transpose(-1, -2) @ query.float(), key)
    grad_value = _sum_groups(probs.transpose(-1, -2) @ grad_f32, value)
    return grad_query, grad_key, grad_value


def _scores(query: Tensor, key: Tensor, is_causal: bool, rule: AttentionRule) -> Tensor:
    scores = cap((query @ _repeat(key, query).transpose(-1, -2)).float() * rule.scale, rule)
    if is_causal:
        queries, keys = scores.shape[-2:]
        everywhere = torch.ones(queries, keys, dtype=torch.bool, device=scores.device)
        unseen = everywhere.triu(keys - queries + 1)
        if rule.window is not None:
            unseen |= everywhere.tril(keys - queries - rule.window)
        scores.masked_fill_(unseen, float("-inf"))
    return scores


def _repeat(side: Tensor, query: Tensor) -> Tensor:
    return side.repeat_interleave(query.shape[1] // side.shape[1], dim=1)


def _sum_groups(grad: Tensor, side: Tensor) -> Tensor:
    return grad.view(1, side.shape[1], -1, *grad.shape[2:]).sum(dim=2)
