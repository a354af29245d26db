"""The models compute what the official ones compute, through our own loader."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from helpers import MODELS, SIZES, assert_figures, filled, images, official


@pytest.fixture(scope="module", params=MODELS)
def case(request):
    return request.param, filled(request.param)


@torch.inference_mode()
def test_parameters_and_macs(case):
    name, model = case
    assert sum(p.numel() for p in model.parameters()) == official(name)["params"]
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, 3, 224, 224))
    assert counter.get_total_flops() == 2 * official(name)["macs_224"]


@pytest.mark.parametrize("size", SIZES, ids=lambda s: f"{s[0]}x{s[1]}")
@torch.inference_mode()
def test_logits(case, size):
    name, model = case
    key = "224" if size == (224, 224) else f"{size[0]}x{size[1]}"
    logits = model(images(2 if key == "224" else 1, *size))
    assert_figures(logits, official(name)[f"eval_logits_{key}"], 1e-5, f"{name} at {key}")
    if key == "224":
        assert logits.argmax(1).tolist() == official(name)["argmax_224"]


@torch.inference_mode()
def test_each_head(case):
    name, model = case
    pooled = model.forward_head(model.forward_features(images(1, 100, 75)), pre_logits=True)
    for key, head in zip(("head", "dist_head"), model.get_classifier()):
        assert_figures(head(pooled), official(name)["heads_100x75"][key], 1e-5, f"{name}, {key}")


@torch.inference_mode()
def test_stages(case):
    name, model = case
    stages = model.forward_intermediates(images(2, 224, 224), intermediates_only=True)
    for i, stage in enumerate(stages):
        figures = official(name)["stages_224"][f"stage{i}"]
        assert_figures(stage, figures, 2e-5 * figures["std"], f"{name}, stage {i}")


def test_eps(case):
    """What the figures cannot see: the small constants of the norms and of the attention."""
    _, model = case
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            assert module.eps == 1e-5
        if isinstance(module, torch.nn.LayerNorm):
            assert module.eps == 1e-6


def test_attention_eps():
    """With q·k̄ = 1e-6 the official eps of 1e-6 halves the output."""
    from carelite.linear_attention import linear_attention

    q, k, v = torch.full((1, 1, 1, 4), 1e-6), torch.ones(1, 1, 1, 4), torch.ones(1, 1, 1, 4)
    torch.testing.assert_close(linear_attention(q, k, v), torch.full((1, 1, 1, 4), 0.5))
