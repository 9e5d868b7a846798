"""Logits -> tokens and their logprobs, in Triton: `torch_draw.draw_torch` without a cut tail, reading the logits once.

The vocabulary is divided into blocks. One kernel takes each block's maximum and sum of exponentials; another picks
the block in which the running sum passes uniform * total, and the entry inside it.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false
# Only the CUDA builds of torch bring Triton.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def _block_sums_kernel(logits, temperature, maxima, sums, places, vocab, num_blocks, BLOCK: tl.constexpr):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    heat = tl.load(temperature + row)
    heat = tl.where(heat == 0.0, 1.0, heat)
    column = block * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocab
    scaled = tl.load(logits + row * vocab + column, mask=inside, other=float("-inf")).to(tl.float32) / heat
    best = tl.max(scaled, 0)
    floor = tl.where(best == float("-inf"), 0.0, best)
    tl.store(maxima + row * num_blocks + block, best)
    tl.store(sums + row * num_blocks + block, tl.sum(tl.exp(scaled - floor), 0))
    tl.store(places + row * num_blocks + block, block * BLOCK + tl.argmax(scaled, 0))


@triton.jit
def _pick_kernel(
    logits, temperature, uniform, maxima, sums, places, tokens, logprobs, vocab, num_blocks,
    BLOCKS_PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    asked = tl.load(temperature + row)
    is_greedy = asked == 0.0
    heat = tl.where(is_greedy, 1.0, asked)
    index = tl.arange(0, BLOCKS_PAD)
    is_block = index < num_blocks
    at = row * num_blocks + index
    block_max = tl.load(maxima + at, mask=is_block, other=float("-inf"))
    best = tl.max(block_max, 0)
    weight = tl.load(sums + at, mask=is_block, other=0.0) * tl.exp(block_max - best)
    total = tl.sum(weight, 0)
    running = tl.cumsum(weight, 0)
    goal = tl.load(uniform + row) * total
    last = tl.max(tl.where(weight > 0, index, 0), 0)
    block = tl.minimum(tl.sum((is_block & (running <= goal)).to(tl.int32), 0), last)
    before = tl.sum(tl.where(index < block, weight, 0.0), 0)
    column = block * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocab
    scaled = tl.load(logits + row * vocab + column, mask=inside, other=float("-inf")).to(tl.float32) / heat
    exps = tl.exp(scaled - best)
    passed = tl.sum((inside & (tl.cumsum(exps, 0) <= goal - before)).to(tl.int32), 0)
    end = tl.max(tl.where(exps > 0, tl.arange(0, BLOCK), 0), 0)
    drawn = block * BLOCK + tl.minimum(passed, end)
    first_best = tl.min(tl.where(is_block & (block_max == best), index, BLOCKS_PAD - 1), 0)
    top = tl.load(places + row * num_blocks + tl.minimum(first_best, num_blocks - 1))
    token = tl.where(is_greedy, top, drawn)
    chosen = tl.load(logits + row * vocab + token).to(tl.float32) / heat
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(logprobs + row, chosen - best - tl.log(total))


def draw_rows(logits_BV: Tensor, temperature_B: Tensor, uniform_B: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens [B] int64 and logprobs [B] float32; a row whose logits are not finite gets a logprob of nan."""
    logits_BV = logits_BV.contiguous()
    rows, vocab = logits_BV.shape
    num_blocks = triton.cdiv(vocab, BLOCK)
    maxima = torch.empty(rows, num_blocks, dtype=torch.float32, device=logits_BV.device)
    sums = torch.empty_like(maxima)
    places = torch.empty(rows, num_blocks, dtype=torch.int32, device=logits_BV.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits_BV.device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=logits_BV.device)
    _block_sums_kernel[(rows, num_blocks)](logits_BV, temperature_B, maxima, sums, places, vocab, num_blocks, BLOCK)
    _pick_kernel[(rows,)](
        logits_BV, temperature_B, uniform_B, maxima, sums, places, tokens, logprobs, vocab, num_blocks,
        triton.next_power_of_2(num_blocks), BLOCK,
    )  # fmt: skip
    return tokens, logprobs
