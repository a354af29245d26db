"""The family of attentions: what defines each, what all keep, and what they cost; swapped into models, and exported."""

import copy
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close

import carelite
from carelite import attention_family as family
from carelite.attention_family import ATTENTIONS
from carelite.self_attention import AllocatedBytes, count_macs
from helpers import fill_in_place, images

CORES = {name: ATTENTIONS[name] for name in ("softmax", "efficient", "performer", "nystrom", "focused", "agent")}
MIXERS = CORES | {"mlla": ATTENTIONS["mlla"]}
each_core = pytest.mark.parametrize("name", CORES)
each_mixer = pytest.mark.parametrize("name", MIXERS)
SIZES = ((1, 1), (1, 2), (2, 2), (3, 7), (9, 5), (14, 14))


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def implied_rows(mixer, q, k):
    """The N×N weights of every head, read off by giving each token in turn the value 1: (heads, N, N)."""
    _, dim, height, width = q.shape
    tokens, head_dim = height * width, dim // mixer.num_heads
    images_ = -(-tokens // head_dim)  # each channel of a head carries one token
    v = torch.eye(images_ * head_dim, tokens, dtype=q.dtype).view(images_, 1, head_dim, tokens)
    v = v.expand(-1, mixer.num_heads, -1, -1).reshape(images_, dim, height, width)
    q, k = (x.expand(images_, -1, -1, -1) for x in (q, k))
    out = mixer.attend(torch.cat([q, k], 1), v) if isinstance(mixer, MIXERS["mlla"]) else mixer.attend(q, k, v)
    out = out.reshape(images_, mixer.num_heads, head_dim, tokens)
    return out.permute(1, 3, 0, 2).flatten(2)[..., :tokens]


def queries_and_keys(dim=32, height=5, width=6, scale=1.0):
    return (scale * torch.randn(1, dim, height, width, dtype=torch.float64) for _ in range(2))


def softmax_rows(q, k, heads=2):
    q, k = (x.unflatten(1, (heads, -1)).flatten(-2)[0] for x in (q, k))  # (heads, head_dim, N)
    return (q.mT @ k / q.shape[1] ** 0.5).softmax(dim=-1)


# --- what defines each ---


@pytest.mark.parametrize("name", ("softmax", "efficient", "performer", "focused", "agent"))
def test_rows_are_means(name):
    rows = implied_rows(CORES[name](32, 2).double(), *queries_and_keys())
    assert_close(rows.sum(dim=-1), torch.ones_like(rows[..., 0]), atol=1e-4, rtol=0)
    assert (rows >= 0).all()


def test_efficient_attention_is_two_softmaxes():
    q, k = queries_and_keys()
    mixer = CORES["efficient"](32, 2).double()
    q_, k_ = (x.unflatten(1, (2, -1)).flatten(-2)[0] for x in (q, k))
    expected = q_.exp().mT / q_.exp().sum(1)[..., None] @ (k_.exp() / k_.exp().sum(-1, keepdim=True))
    assert_close(implied_rows(mixer, q, k), expected)


def test_features_are_orthogonal_and_point_everywhere():
    features = family.orthogonal_features(40, 16).double()
    for block in features.split(16):
        gram = block @ block.T
        assert_close(gram, gram.diagonal().diag(), atol=1e-4, rtol=0)
    many = torch.cat([family.orthogonal_features(16, 16) for _ in range(400)])
    assert many.mean(0).abs().max() < 5 / len(many) ** 0.5  # QR's own signs would leave a mean
    assert_close(many.square().mean(0), torch.ones(16), atol=0.12, rtol=0)


def test_performer_converges_to_softmax():
    q, k = queries_and_keys(scale=0.5)
    errors = []
    for num_features in (16, 256, 4096):
        rows = [implied_rows(CORES["performer"](32, 2, num_features).double(), q, k) for _ in range(4)]
        errors.append(max((r - softmax_rows(q, k)).norm() / softmax_rows(q, k).norm() for r in rows))
    assert errors[2] < errors[1] / 2 < errors[0] / 4 and errors[2] < 0.15


def test_performers_rows_are_quotients_of_its_features():
    mixer = CORES["performer"](32, 2).double()
    q, k = queries_and_keys()
    x, y = (z[0, :16].flatten(1) / 2 for z in (q, k))  # the first head; 16^(1/4) = 2
    phi_q, phi_k = ((mixer.features @ z - z.square().sum(0) / 2).exp() for z in (x, y))  # (m, N)
    quotient = phi_q.T @ phi_k
    assert_close(implied_rows(mixer, q, k)[0], quotient / quotient.sum(1, keepdim=True))


def test_performers_kernel_is_unbiased():
    x, y = torch.randn(2, 16, dtype=torch.float64) / 2
    features = torch.stack([family.orthogonal_features(16, 16) for _ in range(4000)]).double()  # (draws, m, dim)
    estimates = ((features @ x - x @ x / 2).exp() * (features @ y - y @ y / 2).exp()).mean(1)  # (draws,)
    standard_error = estimates.std() / len(estimates) ** 0.5
    assert abs(estimates.mean() - (x @ y).exp()) < 4 * standard_error < 0.2 * (x @ y).exp()


def test_performer_does_not_overflow():
    mixer = CORES["performer"](32, 2)
    for scale in (1e-3, 1, 1e3):
        q, k = (x.float() for x in queries_and_keys(scale=scale))
        rows = implied_rows(mixer, q, k)
        assert_close(rows.sum(-1), torch.ones_like(rows[..., 0]))


def test_nystrom_with_all_tokens_as_landmarks_is_softmax():
    q, k = queries_and_keys(scale=2)
    mixer = CORES["nystrom"](32, 2, grid=6, iterations=25).double()  # 5 × 6 tokens: each is a landmark
    assert_close(implied_rows(mixer, q, k), softmax_rows(q, k), atol=1e-6, rtol=0)
    fewer = CORES["nystrom"](32, 2, grid=2, iterations=25).double()
    assert (implied_rows(fewer, q, k) - softmax_rows(q, k)).norm() > 1


def test_pseudo_inverse():
    a = torch.randn(3, 8, 8, dtype=torch.float64).softmax(-1)
    errors = [(family.pseudo_inverse(a, n) - torch.linalg.pinv(a)).norm() for n in (6, 12, 30)]
    assert errors[2] < 1e-8 and errors[0] > errors[1] > errors[2]
    assert_close(family.pseudo_inverse(torch.eye(4)), torch.eye(4))


def test_the_focused_map_keeps_the_length_and_turns_the_direction():
    x = torch.randn(1, 2, 16, 50, dtype=torch.float64)
    x[..., 0] = -1  # a token that ReLU empties
    y = family.focused(x)
    assert_close(y.norm(dim=-2), x.relu().norm(dim=-2))
    assert_close(family.focused(7 * x), 7 * y)
    largest = x.relu() == x.relu().amax(-2, keepdim=True)
    assert (y[largest] >= x.relu()[largest]).all()
    assert_close(F.cosine_similarity(y, x.relu() ** 3, dim=-2)[..., 1:], torch.ones(1, 2, 49, dtype=torch.float64))
    assert (y[..., 0] == 0).all()


def test_agents_of_all_tokens():
    """Two hops through the tokens themselves; softmax attention where each query finds only itself."""
    mixer = CORES["agent"](32, 2, grid=6).double()
    q, k = queries_and_keys()
    assert_close(implied_rows(mixer, q, k), softmax_rows(q, q) @ softmax_rows(q, k))
    basis = torch.eye(16, dtype=torch.float64).repeat(2, 1)[None].view(1, 32, 4, 4)  # 16 tokens, each its own direction
    k = torch.randn_like(basis) / 20
    assert_close(implied_rows(mixer, 20 * basis, k), softmax_rows(20 * basis, k), atol=1e-6, rtol=0)
    assert not torch.allclose(implied_rows(mixer, basis, k), softmax_rows(basis, k), atol=1e-6)


def test_few_agents_bound_the_rank():
    q, k = queries_and_keys(height=8, width=8)
    for name in ("agent", "nystrom"):
        rank = torch.linalg.matrix_rank(implied_rows(CORES[name](32, 2, grid=2).double(), q, k), atol=1e-9)
        assert (rank <= 4).all()


def test_rotation_sees_distances_only():
    angles = family.rotary_angles(8, 6, 7).view(8, 6, 7).double()
    q, k = torch.randn(2, 1, 1, 16, 1, dtype=torch.float64)

    def product(i, j):
        a, b = (family.rotate(x, angles[:, row, column, None]) for x, (row, column) in ((q, i), (k, j)))
        return (a * b).sum()

    assert_close(product((0, 0), (2, 3)), product((3, 3), (5, 6)), atol=1e-5, rtol=1e-5)
    assert abs(product((0, 0), (2, 3)) - product((0, 0), (3, 2))) > 1e-3
    assert_close(family.rotate(q, angles[:, 4, 5, None]).norm(), q.norm())


def test_mlla_without_its_terms_is_linear_attention():
    mixer, plain = MIXERS["mlla"](32, 2), ATTENTIONS["linear"](32, 2)
    plain.qk.load_state_dict(mixer.qk.state_dict())
    for conv in (mixer.before, mixer.position, mixer.after):
        torch.nn.init.zeros_(conv.weight), torch.nn.init.zeros_(conv.bias)
    x = torch.randn(2, 32, 1, 1)  # one token, at the origin, does not turn
    assert_close(mixer(x), plain(x))
    x = torch.randn(2, 32, 4, 5)
    assert not torch.allclose(mixer(x), plain(x), atol=1e-3)
    with pytest.raises(ValueError, match="multiple of 4"):
        MIXERS["mlla"](12, 2)


@each_core
def test_heads_must_divide(name):
    with pytest.raises(ValueError, match="divisible"):
        CORES[name](32, 3)
    for heads in (0, -2):
        with pytest.raises(ValueError, match=f"num_heads={heads}"):
            CORES[name](32, heads)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("performer", "num_features"),
        ("nystrom", "grid"),
        ("nystrom", "iterations"),
        ("agent", "grid"),
        ("focused", "power"),
    ],
)
def test_a_size_below_one_is_refused(name, size):
    with pytest.raises(ValueError, match=f"{size}=0"):
        CORES[name](32, 2, **{size: 0})


# --- what all keep ---


@each_mixer
def test_any_size_alone_or_in_a_batch(name):
    mixer = MIXERS[name](32, 2).eval()
    for size in SIZES:
        x = torch.randn(3, 32, *size)
        x[0] *= 5
        out = mixer(x)
        assert out.shape == x.shape and out.isfinite().all()
        assert_close(mixer(x[1:2]), out[1:2], atol=1e-5, rtol=1e-4)
        assert_close(mixer(x.contiguous(memory_format=torch.channels_last)), out, atol=1e-5, rtol=1e-4)


@each_mixer
def test_gradients(name):
    mixer = MIXERS[name](32, 2)
    x = torch.randn(2, 32, 5, 6, requires_grad=True)
    mixer(x).square().sum().backward()
    assert x.grad.isfinite().all() and x.grad.abs().amax((0, 1)).min() > 0
    for parameter_name, parameter in mixer.named_parameters():
        grad = parameter.grad
        assert grad.isfinite().all(), parameter_name
        parts = {"weight": grad.chunk(3) if "qkv" in parameter_name else [grad], "bias": [grad]}
        assert all(part.abs().max() > 0 for part in parts[parameter_name.split(".")[-1]]), parameter_name


@each_mixer
@torch.inference_mode()
def test_half_precision(name):
    mixer = fill_in_place(MIXERS[name](32, 2)).half().float()
    x = torch.randn(2, 32, 12, 12).half().float()
    expected = mixer(x)
    for dtype, tolerance in ((torch.float16, 1e-2), (torch.bfloat16, 6e-2)):
        half = copy.deepcopy(mixer).to(dtype)(x.to(dtype))
        assert half.dtype == dtype and (half.float() - expected).norm() < tolerance * expected.norm()
        with torch.autocast("cpu", dtype=dtype):
            assert (mixer(x).float() - expected).norm() < tolerance * expected.norm()
    huge = copy.deepcopy(mixer).half()(1000 * torch.rand(1, 32, 64, 64).half())
    assert huge.isfinite().all()


LINEAR_IN_MAGNITUDE = ("focused", "mlla")  # the others take exponentials of q and k, which blow an error of q up


@pytest.mark.parametrize("name", LINEAR_IN_MAGNITUDE)
@pytest.mark.parametrize("magnitude", (1, 30, 1000))
@torch.inference_mode()
def test_half_precision_at_any_magnitude(name, magnitude):
    mixer = MIXERS[name](32, 2)
    convolution = mixer.qkv if name == "focused" else mixer.qk
    convolution.weight[:64] *= magnitude
    mixer, x = mixer.half().float(), torch.randn(1, 32, 64, 64).half().float()
    expected, half = mixer(x), copy.deepcopy(mixer).half()(x.half())
    assert (half.float() - expected).norm() < 2e-2 * expected.norm()


def formula(name, d, tokens, heads=2, m=64, landmarks=16):
    """MACs, as derived in the notebook."""
    head_dim = d // heads
    per_token = {
        "softmax": 4 * d * d + 2 * d * tokens,
        "efficient": 4 * d * d + 2 * d * head_dim,
        "performer": 4 * d * d + 4 * m * d,
        "nystrom": 4 * d * d + 4 * landmarks * d,
        "focused": 4 * d * d + 2 * d * head_dim + d + 25 * d,
        "agent": 4 * d * d + 4 * landmarks * d + 9 * d,
        "mlla": 2 * d * d + 2 * d * head_dim + d + 27 * d,
    }[name]
    fixed = heads * 24 * landmarks**3 + 2 * landmarks**2 * d if name == "nystrom" else 0
    return per_token * tokens + fixed


@each_mixer
def test_macs_are_the_formulas(name):
    for d, side in ((32, 8), (64, 14)):
        assert count_macs(MIXERS[name](d, 2), torch.zeros(1, d, side, side)) == formula(name, d, side * side)


@each_mixer
def test_only_softmax_is_quadratic_in_tokens(name):
    mixer = MIXERS[name](32, 2)
    with torch.no_grad():
        totals = []
        for width in (8, 16, 24):  # equal steps; 64, 128 and 192 tokens
            with AllocatedBytes() as count:
                mixer(torch.zeros(1, 32, 8, width))
            totals.append(count.total)
    assert (totals[2] - totals[1] == totals[1] - totals[0]) == (name != "softmax")


# --- swapped into models ---


def shallow(name, attention, **kwargs):
    """A model of one block per stage, with `attention` in stages 3 and 4, filled by the rule of the figures."""
    cls, config = (
        (carelite.CARE, carelite.CARE_CONFIGS[name])
        if name.startswith("care")
        else (carelite.CASViT, carelite.CAS_VIT_CONFIGS[name])
    )
    parts = family.attention_parts(name, attention)
    return fill_in_place(cls(replace(config, depths=(1,) * 4), num_classes=10, **parts, **kwargs))


def test_by_name_into_stages_three_and_four():
    def kinds(model):
        return [{type(block.mixer.global_mixer) for block in stage.blocks} for stage in model.stages]

    default = carelite.create_model("care_s0", num_classes=3)
    by_name = carelite.create_model("care_s0", attention="linear", num_classes=3)
    assert by_name.state_dict().keys() == default.state_dict().keys()
    assert kinds(carelite.create_model("care_s0", attention="agent"))[2:] == [{ATTENTIONS["agent"]}] * 2
    for name, mixer in ATTENTIONS.items():
        assert kinds(shallow("care_s0", name)) == kinds(default)[:2] + [{mixer}] * 2


def test_a_class_works_too_and_in_cas_vit(tmp_path):
    from carelite.training import save_checkpoint

    class Doubled(torch.nn.Module):
        def __init__(self, dim, num_heads):
            super().__init__()

        def forward(self, x):
            return 2 * x

    for model in ("care_s0", "cas_vit_xs"):
        built = shallow(model, Doubled)
        assert [sum(isinstance(m, Doubled) for m in s.modules()) > 0 for s in built.stages] == [
            False,
            False,
            True,
            True,
        ]
    for name in ATTENTIONS:
        built = shallow("cas_vit_xs", name)
        assert built(images(1, 32, 48)).isfinite().all()
        notes = dict(name="", classes="0123456789", image_size=32, mean=(0.5,) * 3, std=(0.5,) * 3)
        save_checkpoint(built, tmp_path / "model.safetensors", **notes)


def test_bad_requests():
    with pytest.raises(ValueError, match="unknown attention 'agnet'.*agent"):
        carelite.create_model("care_s0", attention="agnet")
    with pytest.raises(TypeError, match="global_mixers"):
        carelite.create_model("care_s0", attention="agent", global_mixers=())


@pytest.mark.unchecked
def test_the_family_is_imported_only_when_asked_for(project_python):
    code = "import sys, carelite; print('carelite.attention_family' in sys.modules)"
    assert project_python(code).strip() == "False"


@each_mixer
@torch.inference_mode()
def test_in_a_model_at_every_size(name):
    model = shallow("care_s0", name)
    for size in ((32, 32), (96, 160), (100, 75)):  # stage 4 of the first has one token
        x = images(2, *size)
        expected = model(x)
        assert expected.isfinite().all()
        assert_close(model(x[1:]), expected[1:], atol=2e-5, rtol=1e-4)


@each_mixer
@torch.inference_mode()
def test_channels_last_is_kept(name):
    model, x, seen = shallow("care_s0", name), images(2, 96, 64), []
    expected = model(x)
    turned, x = (thing.to(memory_format=torch.channels_last) for thing in (model, x))
    turned.stages[2].register_forward_hook(lambda _, __, y: seen.append(y))
    assert_close(turned(x), expected, atol=2e-5, rtol=1e-4)
    assert seen[0].is_contiguous(memory_format=torch.channels_last)


FOURS = (("efficient", "performer", "nystrom", "agent"), ("softmax", "mlla", "focused", "linear"), ("identity",) * 4)


def of_four(name, four):
    """A shallow model with one mixer of the family in each stage, filled by the rule."""
    cls, configs = (carelite.CARE, carelite.CARE_CONFIGS)
    parts = dict(global_mixers=tuple(ATTENTIONS[mixer] for mixer in four))
    if not name.startswith("care"):
        cls, configs, parts = carelite.CASViT, carelite.CAS_VIT_CONFIGS, dict(mixers=parts["global_mixers"])
    return fill_in_place(cls(replace(configs[name], depths=(1,) * 4), num_classes=10, **parts))


@pytest.mark.parametrize("name", ("care_s0", "cas_vit_xs"))
@torch.inference_mode()
def test_fusion_is_exact_with_every_mixer(name):
    from carelite.fusion import fuse

    assert {mixer for four in FOURS for mixer in four} == set(ATTENTIONS)
    for four in FOURS:
        model = of_four(name, four).double()
        fused, x = fuse(model), images(2, 64, 64).double()
        assert_close(fused(x), model(x), atol=1e-9, rtol=0)  # float32's 1e-5, without its rounding
        assert not any(isinstance(m, torch.nn.BatchNorm2d) for m in fused.modules())


@pytest.mark.unchecked
@each_mixer
@torch.inference_mode()
def test_graph_with_dynamic_batch(name):
    mixer, batch = MIXERS[name](32, 2), torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(mixer, (torch.randn(2, 32, 5, 6),), dynamic_shapes=({0: batch},)).module()
    for count in (1, 3):
        x = torch.randn(count, 32, 5, 6)
        assert_close(program(x), mixer(x), atol=2e-5, rtol=1e-4)


EXPORTS = [("care_s0", FOURS[0]), ("cas_vit_xs", FOURS[1])]
EXPORTS += [pytest.param(*e, marks=pytest.mark.slow) for e in zip(("cas_vit_xs", "care_s0", "care_s0"), FOURS)]


@pytest.mark.unchecked
@pytest.mark.parametrize("name, four", EXPORTS)
def test_core_ml(name, four, tmp_path):
    pytest.importorskip("coremltools")
    from carelite.export import export_coreml
    from carelite.verification import load_program, verify

    ends = dict(mean=(0.5,) * 3, std=(0.2,) * 3)
    model, size = of_four(name, four), (192, 128)  # 12×8 and 6×4 tokens at last: windows of equal and unequal sizes
    package = export_coreml(model, tmp_path / "model.mlpackage", image_size=size, **ends)
    pixels = torch.randint(0, 256, (2, 3, *size), dtype=torch.uint8)
    report = verify(package, model, pixels, **ends)
    assert report.ok, str(report)
    assert report.equal_constants == report.constants >= 70 and report.agreement == 1
    if "mlla" not in four:
        return
    place = load_program(package).from_file["cos_to_fp16"]  # a table that the converter computed, no weight
    (weights,) = package.rglob("weight.bin")
    data = bytearray(weights.read_bytes())
    data[place + 64 + 1] ^= 4
    weights.write_bytes(data)
    assert "'cos_to_fp16' is not what" in str(verify(package, model, pixels[:1], **ends))


@pytest.mark.slow
@each_mixer
def test_it_trains(name, tmp_path):
    from carelite.data import load_digits_splits
    from carelite.training import TrainConfig, evaluate, train

    splits = load_digits_splits(32)
    model = train(TrainConfig(attention=name, epochs=3, warmup_epochs=0), splits, tmp_path)
    assert evaluate(model, splits.val).accuracy > 0.3
