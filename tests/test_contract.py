"""The contract of a model: timm's interface, sizes, gradients, batch independence, precision, pickling."""

import copy
import math
import pickle
import warnings
from dataclasses import replace
from functools import partial

import pytest
import timm
import torch
from timm.layers import LayerScale2d
from timm.optim import create_optimizer_v2
from torch.nn import functional as F

import carelite
from carelite.asymmetric_decoupling import LocalBias, Strips
from carelite.cas_vit import CASViTConfig
from carelite.linear_attention import LinearAttention
from carelite.self_attention import SoftmaxAttention
from helpers import MODELS, filled, images

SIZES = ((32, 32), (96, 160), (100, 75), (224, 224), (256, 192))
ROUNDS_UP = {name: name.startswith("cas_vit") for name in MODELS}
each_model = pytest.mark.parametrize("name", MODELS)
create = carelite.create_model


@pytest.fixture(scope="module", params=MODELS)
def case(request):
    return request.param, filled(request.param)


def sizes_of_stages(name: str, height: int, width: int) -> list[tuple[int, int]]:
    """What strides 4, 8, 16 and 32 leave of an image, halving step by step: CARE rounds down, CAS-ViT up."""
    half = (lambda n: -(-n // 2)) if ROUNDS_UP[name] else (lambda n: n // 2)
    quarter = (lambda n: half(half(n))) if ROUNDS_UP[name] else (lambda n: n // 4)
    sizes = [(quarter(height), quarter(width))]
    for _ in range(3):
        sizes.append((half(sizes[-1][0]), half(sizes[-1][1])))
    return sizes


# --- what timm's own tests of models assert ---


@each_model
def test_forward_and_checkpointing(name):
    model = create(name).eval()
    x = torch.randn(1, 3, 224, 224)
    outputs = model(x)
    assert outputs.shape == (1, 1000) and torch.isfinite(outputs).all()
    model.set_grad_checkpointing()
    torch.testing.assert_close(model(x), outputs, rtol=1e-4, atol=1e-5)


@each_model
def test_backward_reaches_every_parameter(name):
    model = timm.create_model(name, num_classes=42).train()
    outputs = model(torch.randn(2, 3, 128, 128))
    assert outputs.shape == (2, 42)
    outputs.mean().backward()
    missing = [n for n, p in model.named_parameters() if p.grad is None or not torch.isfinite(p.grad).all()]
    assert not missing


@each_model
@torch.inference_mode()
def test_default_cfg(name):
    model = create(name).eval()
    keys, cfg = model.state_dict().keys(), model.default_cfg
    assert cfg["input_size"] == (3, 224, 224) and cfg["pool_size"] == (7, 7) and cfg["num_classes"] == 1000
    assert cfg["mean"] == timm.data.IMAGENET_DEFAULT_MEAN and cfg["std"] == timm.data.IMAGENET_DEFAULT_STD
    assert cfg["interpolation"] == "bicubic" and cfg["crop_pct"] == 0.875
    assert cfg["first_conv"] == "stem.0" and cfg["classifier"] == ("head.fc", "dist_head.fc")
    assert {f"{cfg['first_conv']}.weight", *(f"{c}.weight" for c in cfg["classifier"])} <= keys
    x = torch.randn(1, 3, 224, 224)
    features = model.forward_features(x)
    pre_logits = model.forward_head(features, pre_logits=True)
    assert features.shape == (1, model.num_features, 7, 7)
    assert pre_logits.shape == (1, model.head_hidden_size)
    model.reset_classifier(0)
    assert model.num_classes == 0
    torch.testing.assert_close(model(x), pre_logits)
    model.reset_classifier(0, "")
    assert model(x).shape == features.shape
    assert create(name, num_classes=0, global_pool="").eval()(x).shape == features.shape
    model.reset_classifier(5, "avg")
    assert model(x).shape == (1, 5)


@each_model
@pytest.mark.parametrize("feature_cls", ("list", "getter"))
@torch.inference_mode()
def test_features_only(name, feature_cls):
    model = create(name, features_only=True, feature_cls=feature_cls).eval()
    outputs = model(torch.randn(1, 3, 96, 96))
    assert [o.shape[1] for o in outputs] == model.feature_info.channels()
    assert model.feature_info.reduction() == [4, 8, 16, 32]
    assert [o.shape[-1] for o in outputs] == [24, 12, 6, 3]
    two = create(name, features_only=True, out_indices=(1, 3), feature_cls=feature_cls).eval()
    assert (
        [o.shape[1] for o in two(torch.randn(1, 3, 64, 64))]
        == two.feature_info.channels()
        == [model.feature_info.channels()[i] for i in (1, 3)]
    )


@torch.inference_mode()
def test_features_are_memory_and_features_of_each_stage():
    assert create("care_s0", features_only=True).feature_info.channels() == [32, 64, 128, 1024]
    assert create("care_s1", features_only=True).feature_info.channels() == [32, 64, 128, 1024]
    assert create("care_s2", features_only=True).feature_info.channels() == [32, 64, 192, 1536]


@torch.inference_mode()
def test_forward_intermediates(case):
    name, model = case
    x = images(1, 96, 96)
    final, stages = model.forward_intermediates(x)
    assert [s.shape[1] for s in stages] == [info["num_chs"] for info in model.feature_info]
    torch.testing.assert_close(final, model.forward_features(x))
    only = model.forward_intermediates(x, indices=[1], stop_early=True, intermediates_only=True)
    assert len(only) == 1
    torch.testing.assert_close(only[0], stages[1])
    (last,) = model.forward_intermediates(x, indices=1, norm=True, intermediates_only=True)
    torch.testing.assert_close(last, final)
    with pytest.raises(ValueError, match="NCHW"):
        model.forward_intermediates(x, output_fmt="NLC")
    for feature, stage in zip(filled(name, features_only=True)(x), stages):
        torch.testing.assert_close(feature, stage)


@torch.inference_mode()
def test_prune_intermediate_layers(case):
    _, model = case
    model, x = copy.deepcopy(model), images(1, 64, 64)
    expected = model.forward_intermediates(x, indices=[1], intermediates_only=True)[0]
    assert model.prune_intermediate_layers([1]) == [1]
    assert len(model.stages) == 2 and model.num_classes == 0
    torch.testing.assert_close(model(x), expected)


@each_model
def test_groups_of_parameters(name):
    model = create(name)
    assert model.no_weight_decay() == set()
    names = {n for n, _ in model.named_parameters()}
    for coarse in (True, False):
        groups = timm.models.group_parameters(model, model.group_matcher(coarse=coarse))
        assert {n for group in groups.values() for n in group} == names
        layers = timm.models.group_parameters(model, model.group_matcher(coarse=coarse), reverse=True)
        assert layers["stem.0.weight"] == 0
        assert layers["head.fc.weight"] == max(layers.values())
        order = [layers[f"stages.{i}.blocks.0.{key}"] for i in range(4) for key in [first_key(model, i)]]
        assert order == sorted(order) and len(set(order)) == 4
    optimizer = create_optimizer_v2(model, opt="adamw", weight_decay=0.05, layer_decay=0.7)
    assert len({group["lr_scale"] for group in optimizer.param_groups}) > 4


def first_key(model, stage: int) -> str:
    return next(n for n, _ in model.stages[stage].blocks[0].named_parameters())


# --- carelite's own promises ---


@each_model
@pytest.mark.parametrize("keyword", ("img_size", "output_stride", "window", "distilled"))
def test_an_unknown_keyword_is_an_error(name, keyword):
    for function in (create, timm.create_model):
        with pytest.raises(TypeError, match=keyword):
            function(name, **{keyword: 8})


def test_an_unknown_model_is_named():
    with pytest.raises(ValueError, match="care_s9.*care_s0"):
        create("care_s9")


@each_model
def test_bad_arguments(name):
    for kwargs in (dict(global_pool="sum"), dict(global_pool=""), dict(num_classes=-1), dict(global_pool="catavgmax")):
        with pytest.raises(ValueError):
            create(name, **kwargs)
    with pytest.raises(ValueError, match="drop_path_rate"):
        create(name, drop_path_rate=1.5)


@pytest.mark.parametrize(
    "build, message",
    (
        (lambda: carelite.CARE(global_mixers=(Strips,) * 3), "global_mixers has 3 entries.*4 stages"),
        (lambda: carelite.CARE(replace(carelite.CARE_CONFIGS["care_s0"], depths=(1, 1, 1))), "dims has 4.*3 stages"),
        (lambda: carelite.CARE(replace(carelite.CARE_CONFIGS["care_s0"], depths=(1, 1, 1, 0))), "at least one block"),
        (lambda: carelite.CASViT(mixers=(Strips,) * 3), "mixers has 3 entries.*4 stages"),
        (lambda: carelite.CASViT(CASViTConfig((1, 1, 1, 1), (8, 8, 8))), "dims has 3 entries"),
        (lambda: LinearAttention(24, 0), "num_heads=0"),
        (lambda: SoftmaxAttention(24, -2), "num_heads=-2"),
        (lambda: LocalBias(24, (2, 4)), "odd"),
        (lambda: LocalBias(24, ()), "0 kernels"),
    ),
)
def test_parts_that_do_not_fit_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize("size", SIZES, ids=lambda s: f"{s[0]}x{s[1]}")
@torch.inference_mode()
def test_any_size(case, size):
    name, model = case
    x = images(2, *size)
    final, stages = model.forward_intermediates(x)
    assert [tuple(s.shape[-2:]) for s in stages] == sizes_of_stages(name, *size)
    logits = model.forward_head(final)
    assert logits.shape == (2, 1000) and torch.isfinite(logits).all()
    torch.testing.assert_close(model(x[1:]), logits[1:], atol=2e-5, rtol=1e-5)  # independent of its batch
    turned = torch.empty(2, *size, 3).permute(0, 3, 1, 2).copy_(x)
    torch.testing.assert_close(model(turned), logits, atol=2e-5, rtol=1e-5)  # channels_last
    strided = torch.stack([x, x], dim=-1)[..., 0]
    assert not strided.is_contiguous()
    torch.testing.assert_close(model(strided), logits, atol=2e-5, rtol=1e-5)


@torch.inference_mode()
def test_channels_last_is_kept(case):
    _, model = case
    model = copy.deepcopy(model).to(memory_format=torch.channels_last)
    x = images(2, 64, 64).to(memory_format=torch.channels_last)
    for block in (b for stage in model.stages for b in stage.blocks):
        block.register_forward_hook(lambda _, __, y: seen.append(y.is_contiguous(memory_format=torch.channels_last)))
    seen = []
    model(x)
    assert all(seen) and len(seen) == sum(len(stage.blocks) for stage in model.stages)


@pytest.mark.parametrize("size", ((31, 64), (64, 31), (1, 1)))
def test_small_images_are_refused(case, size):
    name, model = case
    for module in (model, create(name, features_only=True)):
        with pytest.raises(ValueError, match="at least 32"):
            module(torch.zeros(1, 3, *size))


@pytest.mark.parametrize("name", ("care_s0", "cas_vit_xs"))
@torch.inference_mode()
def test_image_channels(name):
    for channels in (1, 2, 4, 6):
        model = filled(name, in_chans=channels)
        assert model(images(1, 64, 64, channels)).shape == (1, 1000)
    rgb = images(1, 64, 64)
    grey = filled(name, in_chans=1)
    torch.testing.assert_close(grey(rgb[:, :1]), filled(name)(rgb[:, :1].expand(-1, 3, -1, -1)), atol=1e-5, rtol=0)


def unscaled(name: str, **kwargs):
    """A model whose layer scale (if it has one) is 1, so that no gradient hides."""
    model = create(name, num_classes=3, **kwargs)
    for module in model.modules():
        if isinstance(module, LayerScale2d):
            torch.nn.init.ones_(module.gamma)
    return model


@each_model
@pytest.mark.parametrize("distilled", (False, True))
def test_gradients(name, distilled):
    torch.manual_seed(0)
    for training in (True, False):
        model = unscaled(name).train(training)
        model.set_distilled_training(distilled)
        out = model(images(4, 64, 64))
        assert isinstance(out, tuple) == (distilled and training)
        logits = torch.cat(out) if isinstance(out, tuple) else out
        F.cross_entropy(logits, torch.arange(len(logits)) % 3).backward()
        for n, p in model.named_parameters():
            assert p.grad is not None and torch.isfinite(p.grad).all(), n
            if not training:
                assert p.grad.abs().max() > 0, n


@torch.inference_mode()
def test_two_heads(case):
    _, model = case
    model, x = copy.deepcopy(model), images(2, 64, 64)
    averaged = model(x)
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum = 0.0
    model.set_distilled_training(True)
    torch.testing.assert_close(model(x), averaged)  # in eval mode the mean all the same
    model.train()
    labels, teacher = model(x)
    assert not torch.allclose(labels, teacher)
    model.set_distilled_training(False)
    torch.testing.assert_close(model(x), (labels + teacher) / 2)


@each_model
def test_drop_rates_act_in_training_only(name):
    torch.manual_seed(0)
    x = images(2, 64, 64)
    for kwargs in (dict(drop_rate=0.5), dict(drop_path_rate=0.5)):
        model = unscaled(name, **kwargs).eval()
        torch.testing.assert_close(model(x), model(x))
        for module in model.modules():
            module.training = not isinstance(module, torch.nn.BatchNorm2d)
        assert not torch.allclose(model(x), model(x))


def test_drop_path_rises_linearly_and_spares_the_last_block():
    model = create("care_s0", drop_path_rate=0.17)
    rates = [getattr(block.drop_path, "drop_prob", 0.0) for stage in model.stages for block in stage.blocks]
    torch.testing.assert_close(torch.tensor(rates), torch.tensor([i / 100 for i in range(17)] + [0.0]))
    # with the highest rate the last block still sees every image, in place of zeroing whole ones
    model = unscaled("care_s0", drop_path_rate=0.99).train()
    features = model.forward_features(images(8, 64, 64))
    assert (features.abs().amax(dim=(1, 2, 3)) > 0).all()


def test_the_last_block_ends_expanded():
    block = create("care_s0").stages[-1].blocks[-1]
    assert not hasattr(block.interaction.inter2, "project")
    assert not any("gamma" in n for n, _ in block.named_parameters())
    assert block(torch.zeros(1, 256, 2, 2)).shape == (1, 1024, 2, 2)


@torch.inference_mode()
def test_copies(case):
    _, model = case
    x = images(1, 64, 64)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(twin(x), model(x))


@torch.inference_mode()
def test_bfloat16_and_autocast(case):
    _, model = case
    x = images(2, 64, 64)
    expected = model(x)
    scale = expected.std()
    low = copy.deepcopy(model).bfloat16()(x.bfloat16())
    assert low.dtype == torch.bfloat16 and (low - expected).abs().max() < 0.15 * scale
    for dtype, tolerance in ((torch.bfloat16, 0.15), (torch.float16, 0.02)):
        with torch.autocast("cpu", dtype=dtype):
            assert (model(x).float() - expected).abs().max() < tolerance * scale
    half = copy.deepcopy(model).half()(x.half())
    assert half.dtype == torch.float16 and (half.float() - expected).abs().max() < 0.02 * scale


def attention_cores():
    from carelite.linear_attention import LinearAttention

    return {"elu + 1": LinearAttention, "relu": partial(LinearAttention, phi=F.relu)}


@pytest.mark.parametrize("core", attention_cores().values(), ids=attention_cores())
@pytest.mark.parametrize("tokens", (1, 49, 4096))
@pytest.mark.parametrize("signs", ("mixed", "positive", "negative"))
@pytest.mark.parametrize("magnitude", (1, 30, 1000))
@torch.inference_mode()
def test_attention_in_half_precision(core, tokens, signs, magnitude):
    """Within 2e-2 of float32 for pre-activations of q and k up to 1e3, of one sign or mixed, and N up to 4,096."""
    torch.manual_seed(0)
    mixer = core(32, 2)
    width = math.isqrt(tokens)
    x = torch.rand(2, 32, width, width)
    x = {"mixed": 2 * x - 1, "positive": x, "negative": -x}[signs] * magnitude
    mixer.qk.weight.zero_()
    for i in range(64):  # q and k are channels of x, so that their magnitude is known
        mixer.qk.weight[i, (7 * i) % 32] = 1.0
    mixer.qk.bias.zero_()
    x = x.half().float()  # what float16 sees, exactly
    expected = mixer(x)
    assert torch.isfinite(expected).all()
    half = copy.deepcopy(mixer).half()(x.half())
    assert half.dtype == torch.float16
    with torch.autocast("cpu", dtype=torch.float16):
        cast = mixer(x)
    for actual in (half, cast):
        torch.testing.assert_close(actual.float(), expected, rtol=2e-2, atol=2e-2 * expected.abs().max().item())


def test_no_extra_is_imported(project_python):
    extras = "sklearn matplotlib coremltools onnx onnxruntime accelerate torchinfo nbdev pytest IPython tqdm.notebook"
    code = f"import sys, carelite; print([m for m in {extras.split()!r} if m in sys.modules])"
    assert project_python(code).strip() == "[]"


def test_warnings_are_not_raised_on_import_and_creation(project_python):
    strict = "import warnings; warnings.simplefilter('error', UserWarning); "
    project_python(strict + "import carelite; carelite.create_model('care_s0')")


def test_names():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert set(MODELS) >= {"care_s0", "care_s1", "care_s2"}
        assert all(timm.is_model(name) for name in MODELS)
