"""The C kernels against plain torch in float64, for every instruction set that this processor can run."""

import ctypes
import logging
import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from cases import for_each
from turnwise.engine.ops import build, cpu
from turnwise.engine.ops.interface import AttentionRule
from turnwise.errors import DataError

_PRINT_THREADS = """
from turnwise.engine.ops import cpu
kernels = cpu.load()
print("none" if kernels is None else kernels.num_threads())
"""


@pytest.fixture
def kernels(library: ctypes.CDLL) -> cpu.CpuKernels:
    return cpu.CpuKernels(library)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """Equal to 1e-5 of the largest value: sums of signed terms have no relative accuracy of their own."""
    assert actual.dtype is torch.float32
    assert actual.shape == expected.shape
    assert (actual.double() - expected).abs().max() <= 1e-5 * expected.abs().max()


# ---- linear_small


@for_each("rows", [*range(1, 35), 48, 57, 64, 120, 127, 128, 129, 133])
def test_linear_equals_float64_for_any_number_of_rows(kernels: cpu.CpuKernels, rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight, x, bias = (torch.randn(*shape, generator=generator) for shape in ((83, 45), (rows, 45), (83,)))
    expected = x.double() @ weight.double().T
    assert_close(kernels.linear_small(weight, x), expected)
    assert_close(kernels.linear_small(weight, x, bias=bias), expected + bias.double())


@for_each("outputs", [1, 2, 7, 8, 9, 15, 16, 17, 24, 31, 200])
@for_each("inputs", [1, 3, 4, 8, 16, 23, 64, 576])
def test_linear_equals_float64_for_any_shape_of_the_weight(kernels: cpu.CpuKernels, outputs: int, inputs: int) -> None:
    generator = torch.Generator().manual_seed(outputs * inputs)
    weight = torch.randn(outputs, inputs, generator=generator)
    for rows in (1, 4, 11):
        x = torch.randn(rows, inputs, generator=generator)
        assert_close(kernels.linear_small(weight, x), x.double() @ weight.double().T)


def test_linear_large_enough_for_threads_equals_float64(kernels: cpu.CpuKernels) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(1003, 517, generator=generator)
    for rows in (1, 3, 40):
        x = torch.randn(rows, 517, generator=generator)
        assert_close(kernels.linear_small(weight, x), x.double() @ weight.double().T)


@for_each("rows", [2, 21])
def test_linear_fills_the_given_output_and_nothing_around_it(kernels: cpu.CpuKernels, rows: int) -> None:
    weight, x = torch.randn(37, 19), torch.randn(rows, 19)
    around = torch.full((rows + 2, 37), 7.0)
    out = kernels.linear_small(weight, x, around[1:-1])
    assert out.data_ptr() == around[1:-1].data_ptr()
    assert_close(out, x.double() @ weight.double().T)
    assert torch.equal(around[[0, -1]], torch.full((2, 37), 7.0))


def test_linear_keeps_nan_and_infinity(kernels: cpu.CpuKernels) -> None:
    for rows in (2, 12):
        x = torch.ones(rows, 8)
        x[0, 3], x[1, 3] = float("nan"), float("inf")
        out = kernels.linear_small(torch.ones(9, 8), x)
        assert out[0].isnan().all()
        assert (out[1] == float("inf")).all()
        assert (out[2:] == 8).all()


@for_each(
    ("weight", "x"),
    [
        (torch.ones(4, 6), torch.ones(2, 5)),
        (torch.ones(6, 4).T, torch.ones(2, 6)),
        (torch.ones(4, 6).double(), torch.ones(2, 6)),
        (torch.ones(4, 6), torch.ones(2, 6).bfloat16()),
        (torch.ones(4, 6, device="meta"), torch.ones(2, 6)),
    ],
)
def test_linear_rejects_tensors_it_cannot_read(kernels: cpu.CpuKernels, weight: Tensor, x: Tensor) -> None:
    with pytest.raises(DataError, match="expected contiguous"):
        kernels.linear_small(weight, x)


# ---- paged_decode


def paged_inputs(
    heads: int, kv_heads: int, head_size: int, block_size: int, contexts: list[int], seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Random caches with the blocks of every row in scrambled order; table entries that are not in use are invalid."""
    generator = torch.Generator().manual_seed(seed)
    used = [-(-context // block_size) for context in contexts]
    num_blocks = sum(used) + 2
    free = torch.randperm(num_blocks, generator=generator).tolist()
    table = torch.full((len(contexts), max(used) + 1), -1, dtype=torch.int32)
    for row, count in enumerate(used):
        table[row, :count] = torch.tensor([free.pop() for _ in range(count)], dtype=torch.int32)
    query = torch.randn(len(contexts), heads, head_size, generator=generator) * 2
    key_cache, value_cache = torch.randn(2, num_blocks, block_size, kv_heads, head_size, generator=generator)
    return query, key_cache, value_cache, table, torch.tensor(contexts, dtype=torch.int32)


def naive_decode(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, table: Tensor, contexts: Tensor, scale: float
) -> Tensor:
    out = torch.zeros_like(query, dtype=torch.float64)
    block_size, kv_heads = key_cache.shape[1:3]
    for row, context in enumerate(contexts.tolist()):
        for head in range(query.shape[1] if context else 0):
            kv_head = head // (query.shape[1] // kv_heads)
            tokens = [(int(table[row, t // block_size]), t % block_size) for t in range(context)]
            keys = torch.stack([key_cache[block, slot, kv_head] for block, slot in tokens]).double()
            values = torch.stack([value_cache[block, slot, kv_head] for block, slot in tokens]).double()
            out[row, head] = torch.softmax(keys @ query[row, head].double() * scale, 0) @ values
    return out


@for_each("head_size", [8, 16, 24, 32, 64, 72, 128, 256, 512])
@for_each(("heads", "kv_heads"), [(3, 3), (6, 2), (5, 1), (8, 2), (7, 1)])
def test_decode_equals_softmax_attention(kernels: cpu.CpuKernels, heads: int, kv_heads: int, head_size: int) -> None:
    inputs = paged_inputs(heads, kv_heads, head_size, 16, [1, 37, 16, 65, 0], seed=head_size)
    scale = head_size**-0.5
    assert_close(kernels.paged_decode(*inputs, AttentionRule(scale)), naive_decode(*inputs, scale))


@for_each("block_size", [1, 5, 16, 64])
def test_decode_follows_the_block_table_for_any_block_size(kernels: cpu.CpuKernels, block_size: int) -> None:
    contexts = [33, 2, 31, 32, 64, 5, 0, 100, 8, 7, 129, 1]
    inputs = paged_inputs(4, 2, 16, block_size, contexts)
    assert_close(kernels.paged_decode(*inputs, AttentionRule(0.25)), naive_decode(*inputs, 0.25))


def test_decode_large_enough_for_threads_equals_softmax_attention(kernels: cpu.CpuKernels) -> None:
    for contexts in ([300, 7], [40 + 13 * row for row in range(16)]):
        inputs = paged_inputs(6, 2, 64, 16, contexts)
        assert_close(kernels.paged_decode(*inputs, AttentionRule(0.125)), naive_decode(*inputs, 0.125))


def test_decode_survives_scores_far_outside_the_range_of_exp(kernels: cpu.CpuKernels) -> None:
    inputs = paged_inputs(4, 2, 32, 16, [70, 3])
    for scale in (40.0, -40.0):
        assert_close(kernels.paged_decode(*inputs, AttentionRule(scale)), naive_decode(*inputs, scale))


def test_decode_reads_strided_queries_and_blocks(kernels: cpu.CpuKernels) -> None:
    query, key_cache, value_cache, table, contexts = paged_inputs(4, 2, 16, 8, [20, 9])
    pool = torch.stack([key_cache, value_cache], dim=1)  # [num_blocks, 2, block_size, kv heads, D]
    fused = torch.cat([query.flatten(1), torch.randn(2, 32)], dim=1)
    out = kernels.paged_decode(
        fused[:, :64].unflatten(1, (4, 16)), pool[:, 0], pool[:, 1], table, contexts, AttentionRule(0.25)
    )
    assert_close(out, naive_decode(query, key_cache, value_cache, table, contexts, 0.25))


def test_decode_of_an_empty_context_is_zero(kernels: cpu.CpuKernels) -> None:
    inputs = paged_inputs(4, 2, 16, 8, [0, 3])
    out = torch.full((2, 4, 16), float("nan"))
    kernels.paged_decode(*inputs, AttentionRule(0.25), out)
    assert (out[0] == 0).all()
    assert out[1].isfinite().all()


def test_decode_shows_a_nan_in_the_cache(kernels: cpu.CpuKernels) -> None:
    query, key_cache, value_cache, table, contexts = paged_inputs(4, 2, 16, 8, [20, 20])
    key_cache[table[0, 1], 2, 0] = float("nan")
    out = kernels.paged_decode(query, key_cache, value_cache, table, contexts, AttentionRule(0.25))
    assert out[0, :2].isnan().all()
    assert out[0, 2:].isfinite().all()
    assert out[1].isfinite().all()


@for_each(("block", "context"), [(-1, 3), (99, 3), (0, 1000), (0, -1)])
def test_decode_rejects_a_table_that_does_not_cover_the_context(
    kernels: cpu.CpuKernels, block: int, context: int
) -> None:
    query, key_cache, value_cache, table, contexts = paged_inputs(4, 2, 16, 8, [3])
    table[0, 0], contexts[0] = block, context
    with pytest.raises(DataError, match="block table"):
        kernels.paged_decode(query, key_cache, value_cache, table, contexts, AttentionRule(0.25))


def test_decode_rejects_heads_it_has_no_code_for(kernels: cpu.CpuKernels) -> None:
    with pytest.raises(DataError, match="head size 12"):
        kernels.paged_decode(*paged_inputs(4, 2, 12, 8, [3]), AttentionRule(0.25))
    with pytest.raises(DataError, match="5 query heads over 2 KV heads"):
        kernels.paged_decode(*paged_inputs(5, 2, 16, 8, [3]), AttentionRule(0.25))


def test_decode_rejects_tensors_it_cannot_read(kernels: cpu.CpuKernels) -> None:
    query, key_cache, value_cache, table, contexts = paged_inputs(4, 2, 16, 8, [3, 9])
    with pytest.raises(DataError, match="context_lens"):
        kernels.paged_decode(query, key_cache, value_cache, table, contexts.long(), AttentionRule(0.25))
    with pytest.raises(DataError, match="value_cache"):
        kernels.paged_decode(query, key_cache, value_cache[:, :4], table, contexts, AttentionRule(0.25))
    by_head = query.transpose(0, 1).contiguous().transpose(0, 1)
    with pytest.raises(DataError, match="query"):
        kernels.paged_decode(by_head, key_cache, value_cache, table, contexts, AttentionRule(0.25))


# ---- sample_rows


def draw(kernels: cpu.CpuKernels, logits: Tensor, temperature: float, uniform: Tensor) -> tuple[Tensor, Tensor]:
    return kernels.sample_rows(logits, torch.full((len(logits),), temperature), uniform)


@for_each("vocab_size", [1, 2, 255, 256, 257, 1000, 49152])
@for_each("temperature", [0.3, 1.0, 1.7])
def test_sampling_is_the_inverse_cdf(kernels: cpu.CpuKernels, vocab_size: int, temperature: float) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(40, vocab_size, generator=generator) * 4
    uniform = torch.rand(40, generator=generator, dtype=torch.float64)
    tokens, logprobs = draw(kernels, logits, temperature, uniform)
    log_softmax = torch.log_softmax(logits.double() / torch.tensor(temperature).double(), -1)
    cdf = np.cumsum(log_softmax.exp().numpy(), axis=1)
    drawn, u = tokens.numpy(), uniform.numpy()
    expected = (cdf <= u[:, None]).sum(axis=1)  # the first token whose cumulative mass exceeds u
    # Where u is closer to a step of the CDF than float sums resolve, a neighbour is as right.
    is_clear = np.abs(cdf - u[:, None]).min(axis=1) > 1e-6
    assert is_clear.sum() > 20
    assert (drawn[is_clear] == expected[is_clear]).all()
    mass = log_softmax.exp().gather(1, tokens[:, None])[:, 0].numpy()
    upper = cdf[np.arange(40), drawn]
    assert ((upper - mass - 1e-6 <= u) & (u <= upper + 1e-6)).all()
    assert tokens.dtype is torch.int64
    assert (logprobs.double() - log_softmax.gather(1, tokens[:, None])[:, 0]).abs().max() < 2e-6


def test_sampling_frequencies_match_the_softmax(kernels: cpu.CpuKernels) -> None:
    generator = torch.Generator().manual_seed(5)
    num_draws, vocab_size = 20000, 300
    logits = torch.randn(vocab_size, generator=generator)
    expected = torch.softmax(logits.double() / 0.7, 0) * num_draws
    uniform = torch.rand(num_draws, generator=generator, dtype=torch.float64)
    tokens, _ = draw(kernels, logits.expand(num_draws, -1).contiguous(), 0.7, uniform)
    counts = torch.bincount(tokens, minlength=vocab_size)
    chi_square = ((counts - expected).square() / expected).sum().item()
    # 299 degrees of freedom: mean 299, standard deviation 24.
    assert 200 < chi_square < 420


def test_zero_temperature_takes_the_first_maximum_with_its_logprob_at_one(kernels: cpu.CpuKernels) -> None:
    logits = torch.randn(3, 1000)
    logits[0, [301, 700, 999]] = 9.0
    logits[1, [0, 5]] = 9.0
    logits[2, 999] = 9.0
    tokens, logprobs = draw(kernels, logits, 0.0, torch.tensor([0.0, 0.5, 0.999]))
    assert tokens.tolist() == [301, 0, 999]
    expected = torch.log_softmax(logits.double(), -1).gather(1, tokens[:, None])[:, 0]
    assert (logprobs.double() - expected).abs().max() < 2e-6


def test_each_row_has_its_own_temperature(kernels: cpu.CpuKernels) -> None:
    logits = torch.randn(1, 5000).expand(3, -1).contiguous()
    temperature = torch.tensor([0.0, 1e-3, 2.0])
    tokens, logprobs = kernels.sample_rows(logits, temperature, torch.tensor([0.9, 0.5, 0.5]))
    assert tokens[0] == tokens[1] == logits[0].argmax()
    assert logprobs[1] > logprobs[0]
    expected = torch.log_softmax(logits[2].double() / 2, -1)[tokens[2]]
    assert (logprobs[2].double() - expected).abs() < 2e-6


def test_masked_tokens_are_never_drawn(kernels: cpu.CpuKernels) -> None:
    logits = torch.full((5, 2000), float("-inf"))
    allowed = torch.tensor([3, 700, 701, 1999])
    logits[:, allowed] = torch.tensor([1.0, 1.0, 1.0, 1.0])
    uniform = torch.tensor([0.0, 0.3, 0.6, 0.9, 1 - 2**-53], dtype=torch.float64)
    for temperature in (1e-40, 0.5, 1.0, 1e30):
        tokens, logprobs = draw(kernels, logits, temperature, uniform)
        assert tokens.tolist() == [3, 700, 701, 1999, 1999]
        assert torch.allclose(logprobs, torch.full((5,), 0.25).log())


def test_extreme_draws_stay_on_tokens_that_have_mass(kernels: cpu.CpuKernels) -> None:
    logits = torch.full((2, 600), -1e4)
    logits[:, [10, 300]] = torch.tensor([0.0, 1.0])
    tokens, _ = draw(kernels, logits, 1.0, torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64))
    assert tokens.tolist() == [10, 300]


@for_each("bad", [float("nan"), float("inf")])
@for_each("position", [0, 100, 511, 599])
def test_a_row_that_is_no_distribution_gives_token_minus_one(
    kernels: cpu.CpuKernels, bad: float, position: int
) -> None:
    logits = torch.randn(3, 600)
    logits[1, position] = bad
    for temperature in (0.0, 1.0):
        tokens, logprobs = draw(kernels, logits, temperature, torch.full((3,), 0.5))
        assert tokens[1] == -1
        assert logprobs[1].isnan()
        assert (tokens[[0, 2]] >= 0).all()
        assert logprobs[[0, 2]].isfinite().all()


def test_a_row_with_everything_masked_gives_token_minus_one(kernels: cpu.CpuKernels) -> None:
    tokens, logprobs = draw(kernels, torch.full((1, 600), float("-inf")), 1.0, torch.tensor([0.5]))
    assert tokens.tolist() == [-1]
    assert logprobs.isnan().all()


def test_sampling_leaves_the_logits_alone(kernels: cpu.CpuKernels) -> None:
    logits = torch.randn(4, 999)
    before = logits.clone()
    draw(kernels, logits, 0.5, torch.rand(4))
    assert torch.equal(logits, before)


@for_each(("temperature", "uniform"), [(-1.0, 0.5), (float("nan"), 0.5), (1.0, 1.0), (1.0, -0.1)])
def test_sampling_rejects_settings_out_of_range(kernels: cpu.CpuKernels, temperature: float, uniform: float) -> None:
    with pytest.raises(DataError, match=r"temperatures that are finite and >= 0"):
        draw(kernels, torch.randn(1, 10), temperature, torch.tensor([uniform]))


# ---- build and load


def test_the_kernels_are_built_where_there_is_a_compiler() -> None:
    assert build.find_compiler() is not None, "these tests need a C compiler"
    assert cpu.load() is not None
    assert cpu.load() is cpu.load()


@pytest.mark.skipif(platform.system() != "Linux", reason="reads /proc")
def test_calls_use_the_threads_of_torch_and_no_second_openmp_runtime() -> None:
    script = """
import re, torch
from pathlib import Path
from turnwise.engine.ops import cpu
torch.set_num_threads(2)
kernels = cpu.load()
assert kernels is not None
threads = [kernels.num_threads()]
torch.set_num_threads(1)
threads.append(kernels.num_threads())
runtimes = set(re.findall(r"\\S*lib(?:g|i|)omp\\S*", Path("/proc/self/maps").read_text()))
print(threads, len(runtimes))
"""
    assert run_python(script, dict(os.environ)) == "[2, 1] 1"


def test_without_a_compiler_load_gives_none_and_one_warning() -> None:
    script = """
import logging, sys
from turnwise.engine.ops import cpu
logging.basicConfig(format="%(message)s", stream=sys.stdout)
print(cpu.load(), cpu.load())
"""
    assert run_python(script, {**os.environ, "CC": "/does/not/exist/cc"}).splitlines() == [
        "no C compiler ($CC, cc, gcc, clang): the CPU uses the slower torch path",
        "None None",
    ]


def test_a_compiler_that_fails_gives_none_and_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path, own_home: Path
) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "fatal: no room on device" >&2\nexit 1\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    with caplog.at_level(logging.WARNING):
        assert build.open_library() is None
    (record,) = caplog.records
    assert "fatal: no room on device" in record.getMessage()
    assert not list(own_home.rglob("*.so"))


def test_without_openmp_one_thread_does_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "VARIANTS", ((("--no-such-flag",), ()), ((), ())))
    opened = build.open_library()
    assert opened is not None
    kernels = cpu.CpuKernels(opened)
    assert kernels.num_threads() == 1
    weight, x = torch.randn(300, 200), torch.randn(9, 200)
    assert_close(kernels.linear_small(weight, x), x.double() @ weight.double().T)


def test_of_two_processes_with_an_empty_cache_one_builds_for_both(tmp_path: Path) -> None:
    real = build.find_compiler()
    assert real is not None
    compiler, calls = tmp_path / "cc", tmp_path / "calls"
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {calls}\nexec {" ".join(real)} -O0 "$@" -O0\n')
    compiler.chmod(0o755)
    environment = {**os.environ, "TURNWISE_HOME": str(tmp_path), "CC": str(compiler)}
    both = [start_python(_PRINT_THREADS, environment) for _ in range(2)]
    outputs = [process.communicate(timeout=120)[0].strip() for process in both]
    assert all(output.isdigit() for output in outputs)
    assert [path.suffix for path in (tmp_path / "kernels").iterdir()] == [".so"]
    assert sum("-shared" in call for call in calls.read_text().splitlines()) == 1


def test_a_library_in_the_cache_is_not_built_again(own_home: Path) -> None:
    compiler = build.find_compiler()
    assert compiler is not None
    path = build.build(compiler, ("-O0", "-fPIC"), build.LINK_FLAGS)
    built = path.stat().st_mtime_ns
    assert own_home in path.parents
    assert build.build(compiler, ("-O0", "-fPIC"), build.LINK_FLAGS) == path
    assert path.stat().st_mtime_ns == built
    assert build.build(compiler, ("-O0", "-fPIC", "-g"), build.LINK_FLAGS) != path


def start_python(script: str, environment: dict[str, str]) -> subprocess.Popen[str]:
    source = str(Path(cpu.__file__).parents[3])
    environment = {**environment, "PYTHONPATH": source}
    return subprocess.Popen([sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True)


def run_python(script: str, environment: dict[str, str]) -> str:
    process = start_python(script, environment)
    output = process.communicate(timeout=120)[0].strip()
    assert process.returncode == 0
    return output
