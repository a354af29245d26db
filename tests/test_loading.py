"""Checkpoints: every accepted form gives the same model, everything else is refused by name."""

import argparse

import pytest
import timm
import torch
from safetensors.torch import save_file

import carelite
from helpers import MODELS, filled, images, official_state_dict

X = images(1, 64, 64)
SMALLEST = ("care_s0", "cas_vit_xs")  # one of each family: the loader is the same for all, and parity loads all
each_family = pytest.mark.parametrize("name", SMALLEST)
each_model = pytest.mark.parametrize("name", MODELS)


@pytest.fixture(scope="module")
def expected():
    with torch.inference_mode():
        return {name: filled(name)(X) for name in SMALLEST}


def logits(model):
    with torch.inference_mode():
        return model.eval()(X)


FORMS = {
    "bare": lambda sd: sd,
    "model and Namespace": lambda sd: {"model": sd, "args": argparse.Namespace(lr=0.1), "epoch": 3},
    "state_dict": lambda sd: {"state_dict": sd},
    "model_ema first": lambda sd: {"model": {k: torch.zeros_like(v) for k, v in sd.items()}, "model_ema": sd},
    "module.": lambda sd: {f"module.{k}": v for k, v in sd.items()},
    "_orig_mod.": lambda sd: {f"_orig_mod.{k}": v for k, v in sd.items()},
    "_orig_mod.module.": lambda sd: {"model": {f"_orig_mod.module.{k}": v for k, v in sd.items()}},
}


@each_family
@pytest.mark.parametrize("form", FORMS)
def test_official_files(name, form, tmp_path, expected):
    path = tmp_path / "official.pth"
    torch.save(FORMS[form](official_state_dict(name)), path)
    torch.testing.assert_close(logits(carelite.create_model(name, checkpoint=path)), expected[name])


@each_family
def test_own_files(name, tmp_path, expected):
    model = filled(name)
    torch.save(model.state_dict(), tmp_path / "own.pth")
    save_file(model.state_dict(), tmp_path / "own.safetensors")
    for path in tmp_path.iterdir():
        torch.testing.assert_close(logits(carelite.create_model(name, checkpoint=path)), expected[name])
        overlay = {"file": str(path)}
        again = timm.create_model(name, pretrained=True, pretrained_cfg_overlay=overlay)
        torch.testing.assert_close(logits(again), expected[name])


@each_family
def test_official_file_through_timm(name, tmp_path, expected):
    path = tmp_path / "official.pth"
    torch.save(official_state_dict(name), path)
    model = timm.create_model(name, pretrained=True, pretrained_cfg_overlay={"file": str(path)})
    torch.testing.assert_close(logits(model), expected[name])


def test_namespace_is_allowed_for_the_one_load_only(tmp_path):
    class Evil:
        def __reduce__(self):
            return print, ("run",)

    before = torch.serialization.get_safe_globals()
    good, bad = tmp_path / "good.pth", tmp_path / "bad.pth"
    torch.save({"model": official_state_dict("care_s0"), "args": argparse.Namespace(a=1)}, good)
    torch.save({"model": official_state_dict("care_s0"), "args": Evil()}, bad)
    carelite.create_model("care_s0", checkpoint=good)
    assert torch.serialization.get_safe_globals() == before
    with pytest.raises(Exception, match="[Ww]eights"):
        torch.load(good, weights_only=True)
    with pytest.raises(Exception, match="[Ww]eights"):
        carelite.create_model("care_s0", checkpoint=bad)


@each_family
def test_class_counts(name, tmp_path):
    path = tmp_path / "ten.safetensors"
    ten = carelite.create_model(name, num_classes=10)
    save_file(ten.state_dict(), path)
    same = carelite.create_model(name, checkpoint=path)  # the file says how many
    assert same.num_classes == 10
    torch.testing.assert_close(logits(same), logits(ten))
    # timm's own way with the file's own count: nothing may be dropped
    through_timm = timm.create_model(name, pretrained=True, num_classes=10, pretrained_cfg_overlay={"file": str(path)})
    torch.testing.assert_close(logits(through_timm), logits(ten))
    with pytest.warns(UserWarning, match="10 classes.*7.*fresh"):
        other = carelite.create_model(name, checkpoint=path, num_classes=7)
    with torch.inference_mode():
        torch.testing.assert_close(other.eval().forward_features(X), ten.eval().forward_features(X))
    headless = carelite.create_model(name, checkpoint=path, num_classes=0)
    assert logits(headless).shape == (1, ten.num_features)
    features = carelite.create_model(name, checkpoint=path, features_only=True).eval()
    with torch.inference_mode():
        for a, b in zip(features(X), ten.forward_intermediates(X, intermediates_only=True)):
            torch.testing.assert_close(a, b)


def drop(sd, key):
    return {k: v for k, v in sd.items() if k != key}


@each_family
@pytest.mark.parametrize("kwargs", ({}, {"num_classes": 7}, {"num_classes": 0}, {"features_only": True}), ids=str)
def test_misfits_are_refused_and_listed(name, kwargs, tmp_path):
    official = official_state_dict(name)
    body = [k for k in official if k.endswith("weight") and "head" not in k][3]
    renamed = {("stranger.weight" if k == body else k): v for k, v in official.items()}
    faults = {
        "missing": drop(official, body),
        "unknown stranger.weight": renamed,
        "shape": {**official, body: torch.zeros(3, 2)},
        "unknown nonsense": {"nonsense": torch.zeros(1)},
        "missing stem.0.weight": {k: v for k, v in official.items() if "head" in k},
    }
    path = tmp_path / "bad.pth"
    for message, state_dict in faults.items():
        torch.save(state_dict, path)
        with pytest.raises(ValueError, match=f"does not fit(.|\n)*{message}"):
            carelite.create_model(name, checkpoint=path, **kwargs)
        with pytest.raises(ValueError, match=f"does not fit(.|\n)*{message}"):
            timm.create_model(name, pretrained=True, pretrained_cfg_overlay={"file": str(path)}, **kwargs)


@pytest.mark.parametrize("kwargs", ({}, {"features_only": True}))
def test_image_channels_and_missing_heads_are_the_files(kwargs, tmp_path):
    original = carelite.create_model("cas_vit_xs", in_chans=1, num_classes=0).eval()
    torch.save(original.state_dict(), tmp_path / "grey.pth")
    model = carelite.create_model("cas_vit_xs", checkpoint=tmp_path / "grey.pth", **kwargs).eval()
    x = torch.randn(1, 1, 64, 64)
    with torch.no_grad():
        result = model(x)[-1].mean((2, 3)) if kwargs else model(x)
        expected = original.stages(original.stem(x)).mean((2, 3)) if kwargs else original(x)
    torch.testing.assert_close(result, expected)


def test_weights_that_are_not_asked_for_change_nothing():
    overlay = {"state_dict": carelite.create_model("cas_vit_xs", num_classes=7).state_dict()}
    assert timm.create_model("cas_vit_xs", pretrained_cfg_overlay=overlay).num_classes == 1000


def test_a_head_of_another_width_is_refused(tmp_path):
    state_dict = official_state_dict("care_s0")
    state_dict["head.norm.weight"] = torch.ones(7)
    torch.save(state_dict, tmp_path / "bad.pth")
    with pytest.raises(ValueError, match="head.norm.weight"):
        carelite.create_model("care_s0", checkpoint=tmp_path / "bad.pth")


def test_heads_of_two_class_counts_are_refused(tmp_path):
    state_dict = official_state_dict("care_s0")
    state_dict["dist_head.fc.weight"], state_dict["dist_head.fc.bias"] = torch.ones(7, 1024), torch.ones(7)
    torch.save(state_dict, tmp_path / "bad.pth")
    with pytest.raises(ValueError, match="dist_head.fc"):
        carelite.create_model("care_s0", checkpoint=tmp_path / "bad.pth")


@each_model
def test_another_variant_is_refused(name, tmp_path):
    other = MODELS[MODELS.index(name) - 1]
    torch.save(official_state_dict(other), tmp_path / "other.pth")
    with pytest.raises(ValueError, match="another model"):
        carelite.create_model(name, checkpoint=tmp_path / "other.pth")


@each_model
def test_pretrained_without_a_file_says_what_to_do(name):
    for function in (carelite.create_model, timm.create_model):
        with pytest.raises(RuntimeError, match="github.com(.|\n)*checkpoint="):
            function(name, pretrained=True)


def test_unreadable_files(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere.pth"):
        carelite.create_model("care_s0", checkpoint=tmp_path / "nowhere.pth")
    with pytest.raises(FileNotFoundError, match="checkpoint"):
        carelite.create_model("care_s0", checkpoint=tmp_path)
    weight = {"stem.0.weight": torch.ones(1)}
    for content in ({}, {"model": {}}, {"epoch": 3}, [1, 2], {"model": {"a": "b"}}, {"model": "s0", "weights": weight}):
        torch.save(content, tmp_path / "odd.pth")
        with pytest.raises(ValueError, match="odd.pth"):
            carelite.create_model("care_s0", checkpoint=tmp_path / "odd.pth")
    torch.save({**weight, "epoch": 3}, tmp_path / "odd.pth")
    with pytest.raises(ValueError, match=r"\['epoch'\] are no tensors"):
        carelite.create_model("care_s0", checkpoint=tmp_path / "odd.pth")
    for suffix in (".pth", ".safetensors"):
        garbage = tmp_path / f"garbage{suffix}"
        garbage.write_bytes(b"not a checkpoint")
        with pytest.raises(ValueError, match="garbage"):
            carelite.create_model("care_s0", checkpoint=garbage)
