"""The C softmax over a vocabulary against torch in float64."""

import pytest
import torch
from torch import Tensor

from cases import for_each
from turnwise.engine.ops import cpu_head
from turnwise.engine.ops.interface import SoftmaxGradients
from turnwise.errors import DataError

pytestmark = pytest.mark.usefixtures("library")

VOCABS = [1, 5, 1023, 1024, 1500, 5001]


def make_rows(vocab: int) -> tuple[Tensor, Tensor]:
    """Logits [4, V] and temperatures [4]; 1 among them."""
    generator = torch.Generator().manual_seed(vocab)
    return torch.randn(4, vocab, generator=generator) * 6, torch.tensor([1.0, 0.5, 1.7, 1.0])


@for_each("vocab", VOCABS)
def test_log_sum_exp_and_mean_equal_float64(vocab: int) -> None:
    logits, temperature = make_rows(vocab)
    logsumexps, means = cpu_head.row_stats(logits, temperature)
    scaled = logits.double() / temperature[:, None]
    torch.testing.assert_close(logsumexps.double(), scaled.logsumexp(-1), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(means.double(), (scaled.softmax(-1) * scaled).sum(-1), rtol=1e-5, atol=1e-5)


@for_each("order", ["rising", "falling"])
def test_log_sum_exp_does_not_depend_on_where_the_largest_logit_stands(order: str) -> None:
    logits = torch.linspace(-300, 300, 4000)[None]
    logits = logits if order == "rising" else logits.flip(1)
    logsumexps, means = cpu_head.row_stats(logits.contiguous(), torch.ones(1))
    exact = logits.double()
    torch.testing.assert_close(logsumexps.double(), exact.logsumexp(-1), rtol=1e-6, atol=0)
    torch.testing.assert_close(means.double(), (exact.softmax(-1) * exact).sum(-1), rtol=1e-6, atol=0)


@for_each("vocab", VOCABS)
@for_each("has_entropy", [False, True])
def test_gradients_equal_autograd_in_float64(vocab: int, has_entropy: bool) -> None:
    logits, temperature = make_rows(vocab)
    target, grads, grad_entropies = torch.arange(4) % vocab, torch.randn(4), torch.randn(4)
    exact = logits.double().requires_grad_()
    logprobs = (exact / temperature[:, None]).log_softmax(-1)
    loss = (logprobs.gather(1, target[:, None])[:, 0] * grads).sum()
    if has_entropy:
        loss = loss + (-(logprobs.exp() * logprobs).sum(-1) * grad_entropies).sum()
    (expected,) = torch.autograd.grad(loss, exact)
    logsumexps, means = cpu_head.row_stats(logits, temperature)
    more = (logsumexps - means, grad_entropies) if has_entropy else (None, None)
    actual = cpu_head.row_gradients(logits, SoftmaxGradients(temperature, logsumexps, grads, *more))
    assert actual is logits
    actual[torch.arange(4), target] += grads / temperature
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)


def test_masked_logits_have_no_mass_and_no_gradient() -> None:
    logits = torch.randn(1, 2500)
    logits[0, 1000:2100] = -float("inf")
    exact = torch.cat([logits[0, :1000], logits[0, 2100:]]).double()
    logsumexps, means = cpu_head.row_stats(logits, torch.ones(1))
    torch.testing.assert_close(logsumexps[0].double(), exact.logsumexp(0), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(means[0].double(), (exact.softmax(0) * exact).sum(), rtol=1e-5, atol=1e-5)
    rows = SoftmaxGradients(torch.ones(1), logsumexps, torch.ones(1), logsumexps - means, torch.ones(1))
    grad = cpu_head.row_gradients(logits, rows)
    assert (grad[0, 1000:2100] == 0).all()
    assert grad.isfinite().all()


@for_each("bad", [float("nan"), float("inf")])
@for_each("at", [0, 1700])
def test_a_row_without_a_distribution_gives_nan(bad: float, at: int) -> None:
    logits = torch.full((2, 2000), -float("inf"))
    logits[:, 5] = 1.0
    logits[1, at] = bad
    logsumexps, _ = cpu_head.row_stats(logits, torch.ones(2))
    assert logsumexps[0] == 1.0
    assert logsumexps[1].isnan()


def test_sides_of_another_size_are_refused() -> None:
    with pytest.raises(DataError, match=r"beside logits \(3, 7\); expected contiguous float32 \(3,\)"):
        cpu_head.row_stats(torch.ones(3, 7), torch.ones(2))
