"""The official models' figures and the rule that fills a state dict (tests/official/README.md)."""

import functools
import json
import math
import zlib
from pathlib import Path

import numpy as np
import timm
import torch
from torch import Tensor, nn

import carelite

OFFICIAL = Path(__file__).with_name("official")
MODELS = carelite.list_models()
SIZES = ((224, 224), (256, 192), (96, 160), (100, 75))


@functools.cache
def official(name: str) -> dict:
    """The figures of the official model `name`."""
    return json.loads((OFFICIAL / f"{name}.json").read_text())


def fill(key: str, shape: list[int]) -> Tensor:
    """The tensor that the rule gives an official key of this shape."""
    if key.endswith("num_batches_tracked"):
        return torch.tensor(0)
    rng = np.random.default_rng(zlib.crc32(key.encode()))
    if key.endswith("gamma"):
        values = rng.uniform(0.05, 0.3, shape)
    elif key.endswith("running_var") or (len(shape) == 1 and key.endswith("weight")):
        values = rng.uniform(0.5, 1.5, shape)
    elif len(shape) == 1:
        values = 0.1 * rng.standard_normal(shape)
    else:
        values = 0.7 * rng.standard_normal(shape) / math.sqrt(np.prod(shape[1:]))
    return torch.from_numpy(np.asarray(values, dtype=np.float32))


@functools.cache
def _official_state_dict(name: str) -> dict[str, Tensor]:
    return {key: fill(key, shape) for key, shape in official(name)["state_dict"]}


def official_state_dict(name: str) -> dict[str, Tensor]:
    """A state dict with the official keys, filled by the rule (a fresh mapping; the tensors are shared)."""
    return dict(_official_state_dict(name))


def filled(name: str, **kwargs) -> nn.Module:
    """The model `name` in eval mode, loaded through our loader from the official state dict filled by the rule."""
    overlay = {"state_dict": {k: v.clone() for k, v in official_state_dict(name).items()}}
    return timm.create_model(name, pretrained=True, pretrained_cfg_overlay=overlay, **kwargs).eval()


def fill_in_place(model: nn.Module) -> nn.Module:
    """Fill any model by the rule applied to its own keys: for shallow models and other class counts."""
    state_dict = {key: fill(key, list(value.shape)) for key, value in model.state_dict().items()}
    model.load_state_dict(state_dict)
    return model.eval()


def images(batch: int, height: int, width: int, channels: int = 3) -> Tensor:
    """The images of the figures: normal noise, for every image but the first stronger and on a ramp."""
    x = np.random.default_rng(0).standard_normal((batch, channels, height, width))
    x[1:] = 2 * x[1:] + np.linspace(-2, 2, width)
    return torch.from_numpy(x.astype(np.float32))


def assert_figures(actual: Tensor, figures: dict, atol: float, what: str) -> None:
    """Assert shape, mean, std and the 24 probed values of `actual` against official `figures`."""
    assert list(actual.shape) == figures["shape"], f"{what}: shape {list(actual.shape)}, expected {figures['shape']}"
    where = np.random.default_rng(7).integers(0, actual.numel(), 24)
    values = actual.detach().double().flatten()
    found = torch.cat([values[where], values.mean()[None], values.std()[None]])
    expected = torch.tensor([*figures["probe"], figures["mean"], figures["std"]], dtype=torch.float64)
    torch.testing.assert_close(found, expected, atol=atol, rtol=0, msg=lambda text: f"{what}: {text}")
