"""Chunked cross-entropy with z-loss against whole logits; the auxiliary losses at their known values."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from spes_p2p.core.plan import LOSS_CHUNK_TOKENS, Device, logits_bytes
from spes_p2p.model.loss import chunked_cross_entropy, load_balance_loss, router_z_loss
from spes_p2p.model.moe import Routing
from tests.unit.model_support import MODEL


@pytest.mark.parametrize("chunk", [1, 16, 50, 1000])
def test_chunked_loss_and_gradients_equal_whole_logits(chunk: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50, 12, dtype=torch.float64, generator=generator, requires_grad=True)
    weight = torch.randn(301, 12, dtype=torch.float64, generator=generator, requires_grad=True)
    targets = torch.randint(0, 301, (50,), generator=generator)
    logits = x @ weight.T
    expected = F.cross_entropy(logits, targets, reduction="sum") + 0.01 * logits.logsumexp(-1).pow(2).sum()
    (expected * 3.0).backward()
    expected_gradients = (x.grad, weight.grad)
    x.grad = weight.grad = None

    with_z, plain = chunked_cross_entropy(x, weight, targets, z_factor=0.01, chunk=chunk)
    (with_z * 3.0).backward()
    assert with_z.item() == pytest.approx(expected.item(), rel=1e-13)
    assert plain.item() == pytest.approx(F.cross_entropy(logits, targets, reduction="sum").item(), rel=1e-13)
    assert not plain.requires_grad
    for found, wanted in zip((x.grad, weight.grad), expected_gradients, strict=True):
        assert torch.allclose(found, wanted, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(("device", "dtype"), [("cpu", torch.float32), ("cuda", torch.bfloat16)])
def test_one_chunk_of_logits_is_there_at_a_time(device: Device, dtype: torch.dtype) -> None:
    """What the loss takes at its fullest moment is what the plan says, of a device whose compute dtype this is."""
    chunk = LOSS_CHUNK_TOKENS[device]
    model = replace(MODEL, vocab_size=3000)
    x = torch.randn(3 * chunk, model.hidden_size).to(dtype).requires_grad_()
    weight = torch.nn.Parameter(torch.randn(model.vocab_size, model.hidden_size))
    targets = torch.randint(0, model.vocab_size, (3 * chunk,))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        total, _ = chunked_cross_entropy(x, weight, targets, z_factor=1e-4, chunk=chunk)
        total.backward()
    events = profile.profiler.kineto_results.events()
    changes = [event.nbytes() for event in events if event.name() == "[memory]"]
    peak, expected = max(itertools.accumulate(changes)), logits_bytes(model, tokens=3 * chunk, device=device)
    assert 0.9 * expected < peak < 1.02 * expected


def test_large_logits_do_not_overflow() -> None:
    x = torch.full((4, 2), 300.0, requires_grad=True)
    weight = torch.tensor([[1.0, 1.0], [-1.0, -1.0], [0.5, 1.0]], requires_grad=True)
    total, _ = chunked_cross_entropy(x, weight, torch.tensor([0, 1, 2, 0]))
    total.backward()
    assert total.item() == pytest.approx(F.cross_entropy(x @ weight.T, torch.tensor([0, 1, 2, 0])).item() * 4)
    assert x.grad.isfinite().all()


def test_bf16_hidden_states_give_fp32_weight_gradients() -> None:
    x = torch.randn(40, 16, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
    weight = torch.randn(90, 16, generator=torch.Generator().manual_seed(1), requires_grad=True)
    targets = torch.arange(40)
    F.cross_entropy(x.float() @ weight.T, targets, reduction="sum").backward()
    wanted = weight.grad.clone()
    weight.grad = None
    chunked_cross_entropy(x, weight, targets, chunk=16)[0].backward()
    assert x.grad.dtype == torch.bfloat16
    assert weight.grad.dtype == torch.float32
    assert torch.cosine_similarity(weight.grad.flatten(), wanted.flatten(), dim=0) > 0.999


def routing(logits: torch.Tensor, counts: list[int]) -> Routing:
    return Routing(logits, logits.softmax(-1), torch.tensor(counts))


def test_load_balance_is_one_when_balanced_and_the_number_of_experts_when_one_takes_all() -> None:
    balanced = routing(torch.zeros(6, 4), [3, 3, 3, 3])
    one = routing(torch.tensor([[50.0, 0.0, 0.0, 0.0]] * 6), [6, 0, 0, 0])
    assert load_balance_loss([balanced]).item() == pytest.approx(1.0)
    assert load_balance_loss([one]).item() == pytest.approx(4.0)
    assert load_balance_loss([balanced, one]).item() == pytest.approx(2.5)


def test_router_z_loss_is_the_mean_square_of_logsumexp() -> None:
    first = routing(torch.zeros(5, 4), [5, 5, 0, 0])
    second = routing(torch.full((5, 4), 2.0), [5, 5, 0, 0])
    expected = (torch.tensor(4.0).log() ** 2 + (2.0 + torch.tensor(4.0).log()) ** 2) / 2
    assert router_z_loss([first, second]).item() == pytest.approx(expected.item(), rel=1e-6)
