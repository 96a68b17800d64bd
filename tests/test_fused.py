"""Operations with a backward pass of their own, against transformers' and autograd."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from eyas.models.fused import RMSNorm, rotated


@given(rows=st.integers(1, 5), width=st.integers(1, 9), seed=st.integers(0, 1000))
def test_the_norm_and_its_gradients_are_transformers(rows: int, width: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, into = (torch.randn(2, rows, width, generator=generator) for _ in range(2))
    found = []
    for made in (RMSNorm(width, 1e-5), LlamaRMSNorm(width, 1e-5)):
        made.weight.data = torch.linspace(0.5, 2.0, width)
        leaf = x.clone().requires_grad_()
        y = made(leaf)
        found.append((y, *torch.autograd.grad(y, (leaf, made.weight), into)))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@given(rows=st.integers(1, 5), half=st.integers(1, 4), seed=st.integers(0, 1000))
def test_turned_heads_and_their_gradient_are_transformers(rows: int, half: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    angles = torch.rand(2, rows, half, generator=generator).repeat(1, 1, 2)
    x, into = (torch.randn(2, 3, rows, 2 * half, generator=generator) for _ in range(2))
    x.requires_grad_()
    found = rotated(x, angles.cos(), angles.sin())
    wanted = apply_rotary_pos_emb(x, x[:, :0], angles.cos(), angles.sin())[0]
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    gradients = (torch.autograd.grad(y, x, into)[0] for y in (found, wanted))
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)


def test_without_a_gradient_both_are_transformers_to_the_bit() -> None:
    torch.manual_seed(0)
    x, angles = torch.randn(1, 2, 3, 8), torch.rand(1, 3, 4).repeat(1, 1, 2)
    with torch.no_grad():
        assert torch.equal(RMSNorm(8, 1e-5)(x), LlamaRMSNorm(8, 1e-5)(x))
        turned = apply_rotary_pos_emb(x, x, angles.cos(), angles.sin())[0]
        assert torch.equal(rotated(x, angles.cos(), angles.sin()), turned)
