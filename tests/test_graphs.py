"""torch.compile and torch.export. In a process of its own: the run-time check of shapes breaks graphs."""

import copy
from dataclasses import replace

import pytest
import torch

import carelite
from helpers import MODELS, fill_in_place, filled, images

pytestmark = pytest.mark.unchecked


def shallow(name: str):
    """The model `name` with one block per stage, filled by the rule."""
    family, configs = (
        (carelite.CARE, carelite.CARE_CONFIGS)
        if name.startswith("care")
        else (carelite.CASViT, carelite.CAS_VIT_CONFIGS)
    )
    return fill_in_place(family(replace(configs[name], depths=(1, 1, 1, 1)), num_classes=10))


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_export_with_dynamic_batch(name):
    model = filled(name)
    program = torch.export.export(
        model, (images(2, 64, 96),), dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=64)},)
    )
    for batch in (1, 2, 5):
        x = images(batch, 64, 96)
        torch.testing.assert_close(program.module()(x), model(x), atol=1e-5, rtol=1e-5)


@pytest.fixture(autouse=True)
def empty_cache():
    """torch.compile counts recompilations per function, across models: start each test from none."""
    torch.compiler.reset()


SMALLEST = ("care_s0", "cas_vit_xs")
OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in MODELS if name not in SMALLEST]


@pytest.mark.parametrize("name", [*SMALLEST, *OTHERS])
@torch.no_grad()
def test_one_dynamic_graph_captures_the_model(name):
    model = filled(name)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="eager")
    for size in ((2, 64, 64), (3, 96, 64)):
        x = images(*size)
        torch.testing.assert_close(compiled(x), model(x), atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALLEST)
@torch.no_grad()
def test_compiled_code_agrees(name):
    model = shallow(name)
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    for size in ((2, 64, 64), (3, 96, 64)):
        x = images(*size)
        torch.testing.assert_close(compiled(x), model(x), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ("care_s0", "cas_vit_xs"))
def test_checkpointing_compiles_and_counts_statistics_once(name):
    model = shallow(name).train()
    reference = copy.deepcopy(model)
    model.set_grad_checkpointing()
    x = images(2, 64, 64)
    torch.compile(model, backend="aot_eager_decomp_partition")(x).square().mean().backward()
    reference(x).square().mean().backward()
    for (key, p), q in zip(model.named_parameters(), reference.parameters()):
        torch.testing.assert_close(p.grad, q.grad, atol=1e-4, rtol=1e-3, msg=lambda m, key=key: f"{key}: {m}")
    for p, q in zip(model.buffers(), reference.buffers()):
        torch.testing.assert_close(p, q)
