"""Faults planted one by one: parity must see each of them."""

import pytest
import torch
from torch import nn

from carelite import additive_attention, cas_vit, dual_interaction, linear_attention
from carelite.additive_attention import CATM, SpatialInteraction
from carelite.asymmetric_decoupling import LocalBias, Strips
from carelite.care import CAREBlock
from carelite.dual_interaction import DualInteraction, Expansion, Interaction
from helpers import MODELS, assert_figures, filled, images, official

CARE_MODELS = [m for m in MODELS if m.startswith("care")]
CAS_VIT_MODELS = [m for m in MODELS if m.startswith("cas_vit")]


@torch.inference_mode()
def parity(name: str) -> None:
    """Logits and stages as the official model has them, at the sizes that cost least."""
    model = filled(name)
    assert_figures(model(images(1, 100, 75)), official(name)["eval_logits_100x75"], 1e-5, name)
    assert_figures(model(images(1, 96, 160)), official(name)["eval_logits_96x160"], 1e-5, name)


def method(cls, name, function):
    """A mutation that replaces a method."""
    return lambda patch: patch.setattr(cls, name, function)


def attention(function):
    """A mutation that replaces the linear attention operator."""
    return lambda patch: patch.setattr(linear_attention, "linear_attention", function)


true_linear_attention = linear_attention.linear_attention


def unnormalised(q, k, v, eps=1e-6):
    return v @ (k / k.shape[-1]).transpose(-2, -1) @ q


def exchanged_kernels(self, x):
    small, large = x.chunk(2, dim=1)
    return torch.cat([self.convs[1](small), self.convs[0](large)], dim=1)


CARE_MUTATIONS = {
    "the interaction's residual dropped": method(
        Interaction, "forward", lambda s, x: s.project(Expansion.forward(s, x))
    ),
    "the block's residual dropped": method(CAREBlock, "forward", lambda s, x: s.layer_scale(s.update(x))),
    "layer scale dropped": method(CAREBlock, "forward", lambda s, x: x + s.update(x)),
    "q and k swapped": attention(lambda q, k, v: true_linear_attention(k, q, v)),
    "the normaliser removed": attention(unnormalised),
    "memory and features swapped": method(
        DualInteraction, "forward", lambda s, z, x: s.inter2(torch.cat([s.inter1(x), z], dim=1))
    ),
    "3x3 and 7x7 exchanged": method(LocalBias, "forward", exchanged_kernels),
    "one strip dropped": method(Strips, "forward", lambda s, x: s.vertical(x)),
    "GELU replaced by SiLU": lambda patch: patch.setattr(dual_interaction.nn, "GELU", lambda: nn.SiLU()),
}


def shared_interactions(self, x):
    q, k, v = self.qkv(x).chunk(3, dim=1)
    return self.proj(self.gamma(self.context_q(q) + self.context_q(k)) * v)


def gamma_after_product(self, x):
    q, k, v = self.qkv(x).chunk(3, dim=1)
    return self.proj(self.gamma((self.context_q(q) + self.context_k(k)) * v))


def without_norm(patch):
    patch.setattr(cas_vit.CASViT, "forward_features", lambda s, x: s.stages(s.stem(x)))


CAS_VIT_MUTATIONS = {
    "sigmoid dropped from the spatial interaction": method(
        SpatialInteraction, "forward", lambda s, x: x * s.gate(s.act(s.norm(s.depthwise(x))))
    ),
    "q's and k's interactions shared": method(CATM, "forward", shared_interactions),
    "gamma applied after the product": method(CATM, "forward", gamma_after_product),
    "the BatchNorm before the head removed": without_norm,
    "the channel interaction dropped": method(additive_attention.ChannelInteraction, "forward", lambda s, x: x),
    "the block's first residual dropped": method(
        cas_vit.CASBlock, "forward", lambda s, x: (lambda y: y + s.mlp(s.norm2(y)))(s.local(x) + s.mixer(s.norm1(x)))
    ),
}


@pytest.mark.parametrize("name", (CARE_MODELS[0], CAS_VIT_MODELS[0]))
def test_parity_holds_without_a_mutation(name):
    parity(name)


@pytest.mark.parametrize("mutation", CARE_MUTATIONS)
def test_care(mutation, monkeypatch):
    CARE_MUTATIONS[mutation](monkeypatch)
    with pytest.raises(AssertionError):
        parity(CARE_MODELS[0])


@pytest.mark.parametrize("mutation", CAS_VIT_MUTATIONS)
def test_cas_vit(mutation, monkeypatch):
    CAS_VIT_MUTATIONS[mutation](monkeypatch)
    with pytest.raises(AssertionError):
        parity(CAS_VIT_MODELS[0])
