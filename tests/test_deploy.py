"""Fusion, Core ML packages, ONNX files and their verification, at sizes that convert fast. In a process of its own: the
run-time check of shapes breaks graphs."""

import json
import shutil
from dataclasses import replace
from math import prod
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from timm.layers import BatchNormAct2d, LayerScale2d, Mlp
from torch import nn
from torch.nn.utils import prune

import carelite
from carelite import export, fusion
from carelite.additive_attention import CATM
from carelite.dual_interaction import Interaction
from carelite.export import export_coreml, export_onnx
from carelite.fusion import fuse
from carelite.linear_attention import LinearAttention
from carelite.self_attention import count_macs
from carelite.verification import (
    PackageError,
    Recorder,
    Report,
    StoredProgram,
    compare_classes,
    load_program,
    read_weights,
    real_images,
    verify,
)
from helpers import MODELS, fill_in_place, filled, images

pytestmark = pytest.mark.unchecked
CLASSES = tuple("0123456789")
PICTURES = torch.randint(0, 256, (6, 3, 64, 96), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
COUNTS = json.loads(Path(__file__).with_name("operations.json").read_text())
HALVES: dict[type, Path] = {}  # pytest makes a fixture anew at every change of its parameters
each_model = pytest.mark.parametrize("name", MODELS)


def shallow(name: str, dims: tuple[int, ...] = (), **kwargs) -> nn.Module:
    """The model `name` with one block per stage, ten classes and perhaps other widths, filled by the rule."""
    care = name.startswith("care")
    cls, configs = (carelite.CARE, carelite.CARE_CONFIGS) if care else (carelite.CASViT, carelite.CAS_VIT_CONFIGS)
    config = replace(configs[name], depths=(1, 1, 1, 1), dims=dims or configs[name].dims)
    model = fill_in_place(cls(config, **{"num_classes": 10} | kwargs))
    model.pretrained_cfg = carelite.create_model(name).pretrained_cfg
    return model


@pytest.fixture(scope="module", params=("care_s0", "cas_vit_xs"))
def model(request):
    return shallow(request.param)


@pytest.fixture(scope="module")
def half(model, tmp_path_factory):
    if type(model) not in HALVES:
        path = tmp_path_factory.mktemp("package") / "model.mlpackage"
        HALVES[type(model)] = export_coreml(model, path, image_size=(64, 96), classes=CLASSES, source="the rule")
    return HALVES[type(model)]


@pytest.fixture(scope="module", params=("float16", "float32"))
def package(request, model, half, tmp_path_factory):
    path = tmp_path_factory.mktemp("package") / "model.mlpackage"
    if request.param == "float16":
        return half
    return export_coreml(model, path, image_size=(64, 96), classes=CLASSES, precision="float32", source="the rule")


@each_model
@torch.inference_mode()
def test_fusion_keeps_the_function(name):
    original = filled(name)
    before = {key: value.clone() for key, value in original.state_dict().items()}
    fused = fuse(original)
    assert not any(isinstance(m, nn.BatchNorm2d | nn.Dropout) for m in fused.modules())
    for batch, height, width in ((2, 64, 64), (2, 100, 75), (1, 224, 224)):
        x = images(batch, height, width)
        torch.testing.assert_close(fused(x), original(x), atol=1e-5, rtol=0)
    assert all(torch.equal(before[key], value) for key, value in original.state_dict().items())
    parameters = sum(p.numel() for p in fused.parameters())
    assert parameters < {"care_s0": 6.32e6, "care_s2": 17.95e6}.get(name, 22e6)


@pytest.mark.parametrize("kwargs", ({"num_classes": 0}, {"global_pool": "max"}, {"num_classes": 0, "global_pool": ""}))
@torch.inference_mode()
def test_fusion_without_heads_and_with_another_pooling(model, kwargs):
    original = shallow("care_s0" if isinstance(model, carelite.CARE) else "cas_vit_xs", **kwargs)
    if isinstance(original.norm, nn.BatchNorm2d):
        original.norm.weight.neg_()  # a maximum lets positive scales through
    torch.testing.assert_close(fuse(original)(images(2, 64, 64)), original(images(2, 64, 64)), atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_fusion_takes_the_normalisation_in(model):
    mean, std = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)
    x = (PICTURES / 255 - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    torch.testing.assert_close(fuse(model, mean, std)(PICTURES.float()), model(x), atol=2e-5, rtol=1e-5)


class TwiceReading(CATM):
    """Reads its input twice: what stands before it cannot move into `qkv`."""

    def forward(self, x):
        return x + super().forward(x)


class TwiceReadingMlp(Mlp):
    def forward(self, x):
        return x * super().forward(x)


class Doubling(nn.Conv2d):
    def forward(self, x):
        return 2 * super().forward(x + 1) + 1


def local_of_strange_parts(dim: int) -> nn.Sequential:
    """BatchNorms beside what looks like a convolution, around one activation at two places, and before a padding."""
    act = nn.Tanh()
    return nn.Sequential(
        *(nn.BatchNorm2d(dim), Doubling(dim, dim, 1), nn.BatchNorm2d(dim), nn.Conv2d(dim, dim, 1), act),
        *(nn.Conv2d(dim, dim, 1), act, nn.BatchNorm2d(dim), nn.Conv2d(dim, dim, 3, padding=1), BatchNormAct2d(dim)),
    )


class Walked(nn.Module):
    """Goes through its layers in a way of its own."""

    def __init__(self, dim: int, num_heads: int = 1):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(dim, dim, 1), nn.BatchNorm2d(dim))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


STRANGE = {
    "walk": ("cas_vit_xs", dict(mixers=(Walked,) * 4)),
    "mixer": ("cas_vit_xs", dict(mixers=(TwiceReading,) * 4)),
    "mlp": ("cas_vit_xs", dict(mlp=lambda dim, hidden: TwiceReadingMlp(dim, hidden, use_conv=True))),
    "local": ("cas_vit_xs", dict(local=local_of_strange_parts)),
    "inter2": ("care_s0", dict(inter2=lambda dim, ratio: with_norm(Interaction(dim, ratio)))),
    "convolution": ("care_s0", dict(inter2=lambda dim, ratio: with_convolution(Interaction(dim, ratio)))),
}


def with_norm(interaction: Interaction) -> Interaction:
    interaction.norm = nn.GroupNorm(4, interaction.norm.num_features)
    return interaction


def with_convolution(interaction: Interaction) -> Interaction:
    interaction.expand.__class__ = Doubling
    return interaction


@pytest.mark.parametrize("part", STRANGE)
@torch.inference_mode()
def test_fusion_does_not_guess(part):
    name, kwargs = STRANGE[part]
    model = shallow(name, **kwargs).double()
    fused, x = fuse(model), images(2, 64, 64).double()
    torch.testing.assert_close(fused(x), model(x), atol=1e-9, rtol=0)
    assert not any(type(m) is nn.BatchNorm2d for m in fused.modules())


def test_fusion_refuses(model):
    with pytest.raises(ValueError, match="training mode"):
        fuse(shallow("care_s0").train())
    with pytest.raises(TypeError, match="Linear"):
        fuse(nn.Linear(3, 3))
    with pytest.raises(ValueError, match="together"):
        fuse(model, mean=(0.5, 0.5, 0.5))
    for spoil, message in (
        (lambda m: prune.l1_unstructured(m.stem[0], "weight", 0.5), "'stem.0'.*permanent"),
        (lambda m: nn.utils.parametrizations.weight_norm(m.head.fc), "'head.fc'.*permanent"),
        (lambda m: setattr(m.head, "fc", nn.Sequential(m.head.fc)), "Linear"),
        (lambda m: setattr(m, "head", m.head.fc), "Head"),
        (lambda m: [setattr(h, "fc", nn.Linear(m.num_features, 7)) for h in m.get_classifier()], "7.*reset_classifier"),
    ):
        spoilt = shallow("care_s0")
        spoil(spoilt)
        for take in (lambda m: fuse(m.eval()), lambda m: export_coreml(m, "never.mlpackage", image_size=64)):
            with pytest.raises(ValueError, match=message):
                take(spoilt)


@torch.inference_mode()
def test_fusion_takes_other_norms(model):
    other = nn.SyncBatchNorm.convert_sync_batchnorm(
        shallow("care_s0" if isinstance(model, carelite.CARE) else "cas_vit_xs")
    )
    for head in other.get_classifier():
        head.norm = nn.LayerNorm(other.num_features, elementwise_affine=False)
    fused, x = fuse(other.eval()), images(2, 64, 64)
    torch.testing.assert_close(fused(x), other(x), atol=1e-5, rtol=1e-5)
    assert not any(isinstance(m, nn.SyncBatchNorm) for m in fused.modules())


def test_a_package_is_right(package, model):
    report = verify(package, model, PICTURES)
    assert report.ok, str(report)
    assert report.agreement == 1.0 and report.images == len(PICTURES) and report.labels == 10
    assert report.precision == ("float16" if report.difference < 2e-5 and "float16" in str(report) else "float32")
    program = load_program(package)
    assert program.operations()["conv"] and not {"batch_norm", "transpose", "inverse"} & set(program.operations())
    assert json.loads(program.metadata["classes"]) == list(CLASSES) and program.metadata["source"] == "the rule"
    assert program.metadata["author"] and "MIT" in program.metadata["licence"]
    assert not list(package.rglob("executorch*"))
    with torch.inference_mode():
        cfg = model.pretrained_cfg
        mean, std = (torch.tensor(cfg[key]).view(3, 1, 1) for key in ("mean", "std"))
        logits = model((PICTURES / 255 - mean) / std)
    tolerance = 1e-4 if report.precision == "float32" else 2e-2
    torch.testing.assert_close(program(PICTURES)["logits"], logits, atol=tolerance, rtol=0)


def test_a_hundred_real_images(package, model):
    """float32: to 1e-4 and every class; float16: 2e-5 from the rounded weights, and 99 classes of 100."""
    pictures = real_images((64, 96))
    assert pictures.shape == (100, 3, 64, 96) and len(pictures.flatten(1).unique(dim=0)) == 100
    report = verify(package, model, pictures)
    assert report.ok and not report.departure, str(report)
    assert report.equal_constants == report.constants > 50
    assert report.agreement >= (1.0 if report.precision == "float32" else 0.99)


@pytest.mark.parametrize("name, compress", (("care_s0", "palettize6"), ("cas_vit_xs", "int8")))
def test_compressed_packages(name, compress, tmp_path):
    """Small, run right with their own weights, and every weight the nearest that could be stored."""
    path, model = tmp_path / "model.mlpackage", shallow(name, dims=(24, 48, 48, 96))  # k-means takes its time
    export_coreml(model, path, image_size=64, classes=CLASSES, compress=compress)
    report = verify(path, model, PICTURES[..., :64])
    assert report.ok and report.compression == compress and report.compressed_constants > 15, str(report)
    numbers = sum(p.numel() for p in fuse(model).parameters())
    assert weight_file(path).stat().st_size < 0.7 * 2 * numbers  # two bytes each, uncompressed
    data = bytearray(weight_file(path).read_bytes())
    code, start, size = max(payloads(data), key=lambda p: p[2])
    assert code in (3, 4)  # the numbers of groups, or whole numbers
    data[start + size // 2] ^= 1
    weight_file(path).write_bytes(data)
    found = verify(path, model, PICTURES[:1, ..., :64])
    assert not found.ok and "nearest" in str(found)
    for code, start, size in payloads(data):
        if code == 1:  # among them every table, or every scale
            data[start : start + size] = bytes(size)
    weight_file(path).write_bytes(data)
    faults = verify(path, model, PICTURES[:1, ..., :64]).faults
    assert sum("its table" in f or "scales are not" in f for f in faults) == report.compressed_constants


class OwnParts(nn.Module):
    """A mixer with capital letters, and scale and shift behind a convolution, which the converter would put into it."""

    def __init__(self, dim: int, num_heads: int = 1):
        super().__init__()
        self.Wq, self.wq = (nn.Conv2d(dim, dim, 1, bias=False) for _ in range(2))
        self.gamma, self.beta = LayerScale2d(dim), nn.Parameter(torch.zeros(dim, 1, 1))

    def forward(self, x):
        return self.gamma(self.Wq(x)) + (self.wq(x) + self.beta)


@torch.inference_mode()
def test_a_pyramid_of_features(tmp_path):
    model = shallow("cas_vit_xs", mixers=(OwnParts,) * 4)
    path = export_coreml(model, tmp_path / "maps.mlpackage", image_size=64, pyramid=True, precision="float32")
    pictures = PICTURES[..., :64]
    report = verify(path, model, pictures)
    assert report.ok, str(report)
    cfg = model.pretrained_cfg
    mean, std = (torch.tensor(cfg[key]).view(3, 1, 1) for key in ("mean", "std"))
    maps = model.forward_intermediates((pictures / 255 - mean) / std, intermediates_only=True)
    found = load_program(path)(pictures)
    assert list(found) == ["stage1", "stage2", "stage3", "stage4"]
    for ours, theirs in zip(found.values(), maps):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def verdict(package: Path, model: nn.Module) -> bool:
    return verify(package, model, PICTURES).ok


def weight_file(package: Path) -> Path:
    (path,) = package.rglob("weight.bin")
    return path


def payloads(data: bytes) -> list[tuple[int, int, int]]:
    """(type code, start, size) of every record's numbers."""
    import struct

    found, start = [], 64
    for _ in range(struct.unpack_from("<I", data)[0]):
        _, code, size, offset = struct.unpack_from("<IIQQ", data, start)
        found.append((code, offset, size))
        start = -(-(offset + size) // 64) * 64
    return found


def scaled_tensor(data: bytearray) -> None:
    import numpy as np

    code, start, size = max(payloads(data), key=lambda p: p[2])
    values = np.frombuffer(data, {1: np.float16, 2: np.float32}[code], size // (2 * code), start)
    data[start : start + size] = (values * 1.01).astype(values.dtype).tobytes()


def flipped_byte(position: float):
    def plant(data: bytearray) -> None:
        _, start, size = payloads(data)[int(position * (len(payloads(data)) - 1))]
        data[start + size // 2] ^= 1

    return plant


def exchanged_tensors(data: bytearray) -> None:
    records = payloads(data)
    a, b = next(
        (x, y)
        for i, x in enumerate(records)
        for y in records[i + 1 :]
        if x[2] == y[2] and x[2] > 200 and data[x[1] : x[1] + x[2]] != data[y[1] : y[1] + y[2]]
    )
    first, second = (bytes(data[start : start + size]) for _, start, size in (a, b))
    data[a[1] : a[1] + a[2]], data[b[1] : b[1] + b[2]] = second, first


FAULTS = {
    "one weight tensor times 1.01": scaled_tensor,
    "one flipped bit, first record": flipped_byte(0.0),
    "one flipped bit, a record in the middle": flipped_byte(0.5),
    "one flipped bit, last record": flipped_byte(1.0),
    "two tensors of one shape exchanged": exchanged_tensors,
    "a damaged header": lambda data: data.__setitem__(64, data[64] ^ 1),
    "the file cut short": lambda data: data.__delitem__(slice(len(data) - 64, None)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_weight_file_is_found(half, model, fault, tmp_path):
    copy = tmp_path / "damaged.mlpackage"
    shutil.copytree(half, copy)
    data = bytearray(weight_file(copy).read_bytes())
    FAULTS[fault](data)
    assert bytes(data) != weight_file(copy).read_bytes()
    weight_file(copy).write_bytes(data)
    assert not verdict(copy, model), "the fault went unseen"


def edit_program(package: Path, change) -> None:
    """Apply `change(operations)` to the saved program."""
    from coremltools.proto import Model_pb2

    (path,) = package.rglob("*.mlmodel")
    model = Model_pb2.Model.FromString(path.read_bytes())
    (block,) = model.mlProgram.functions["main"].block_specializations.values()
    assert change(block.operations), "nothing to change"
    path.write_bytes(model.SerializeToString())


def swapped_division(operations) -> bool:
    division = next((op for op in operations if op.type == "real_div" and op.inputs["y"].arguments[0].name), None)
    if division is None:
        return False
    x, y = (division.inputs[key].arguments[0].name for key in "xy")
    division.inputs["x"].arguments[0].name, division.inputs["y"].arguments[0].name = y, x
    return True


def unknown_operation(operations) -> bool:
    next(op for op in operations if op.type == "conv").type = "conv_of_tomorrow"
    return True


@pytest.mark.parametrize("change", (swapped_division, unknown_operation))
def test_a_changed_program_is_found(half, model, tmp_path, change):
    if change is swapped_division and isinstance(model, carelite.CASViT):
        pytest.skip("CAS-ViT divides nothing")
    copy = tmp_path / "changed.mlpackage"
    shutil.copytree(half, copy)
    edit_program(copy, change)
    report = verify(copy, model, PICTURES[:2])
    assert not report.ok
    assert ("conv_of_tomorrow" in str(report)) if change is unknown_operation else ("real_div" in report.departure)


def swapped_channels(package: Path) -> None:
    """Ask for the image as BGR."""
    from coremltools.proto import Model_pb2

    (path,) = package.rglob("*.mlmodel")
    model = Model_pb2.Model.FromString(path.read_bytes())
    image = model.description.input[0].type.imageType
    image.colorSpace = image.ColorSpace.Value("BGR")
    path.write_bytes(model.SerializeToString())


def test_swapped_channels_are_found(half, model, tmp_path):
    copy = tmp_path / "swapped.mlpackage"
    shutil.copytree(half, copy)
    swapped_channels(copy)
    report = verify(copy, model, PICTURES[:2])
    first = "conv" if isinstance(model, carelite.CARE) else "sub"  # what the image meets first
    assert not report.ok and report.equal_constants == report.constants and f", {first} " in report.departure


def test_a_wrong_description_is_found(half, tmp_path):
    from coremltools.proto import Model_pb2

    (path,) = half.rglob("*.mlmodel")
    saved = path.read_bytes()

    def first_step(model):
        (block,) = model.mlProgram.functions["main"].block_specializations.values()
        return next(op for op in block.operations if op.type == "conv").outputs[0].type.tensorType

    for spoil in (
        lambda m: setattr(m.description.output[0], "name", "scores"),
        lambda m: m.description.output[0].type.multiArrayType.shape.append(2),
        lambda m: setattr(m.description, "predictedFeatureName", "logits"),
        lambda m: setattr(m.description.input[0].type.imageType, "width", 95),
        lambda m: setattr(first_step(m), "dataType", 11),  # FLOAT32
    ):
        model = Model_pb2.Model.FromString(saved)
        spoil(model)
        with pytest.raises(PackageError):
            StoredProgram(model, read_weights(weight_file(half)))
    with pytest.raises(ValueError, match="ONNX"):
        load_program("model.onnx")


def test_a_wrong_mean_is_found(half, model):
    """The package has the right one; a model with another mean is what such a package would be compared with."""
    mean = model.pretrained_cfg["mean"]
    assert not verify(half, model, PICTURES[:1], mean=(*mean[:2], 0.4)).ok


def test_a_fault_in_the_fusion_is_found(monkeypatch, tmp_path):
    """The fused network is held to the model in every precision, so that a wrong fold cannot hide behind itself."""
    model, true = shallow("care_s0"), fusion.fold_before
    wrong = lambda scale, shift, conv: true(scale, 0.9 * shift, conv)  # noqa: E731
    monkeypatch.setattr(fusion, "fold_before", wrong)
    package = export_coreml(model, tmp_path / "model.mlpackage", image_size=(64, 96), classes=CLASSES)
    assert "fuse is wrong" in str(verify(package, model, PICTURES))


def test_numbers_in_the_graph_are_rounded_like_the_converters():
    class Scaled(nn.Module):
        def forward(self, x):
            return 0.3 * x + x / 7

    x, (a, b) = torch.rand(1, 3, 8, 8), torch.tensor([0.3, 1 / 7]).half().float()
    (found,) = Recorder(export.trace(Scaled(), (8, 8), ("logits",)).module(), half=True).run(x)
    torch.testing.assert_close(found, a * x + b * x, atol=1e-7, rtol=0)


def test_probabilities_are_the_softmax_of_the_logits():
    logits = torch.tensor([[1.0, 3.0], [2.0, 0.0]])
    for temperature, faults in ((1, 0), (1.1, 1)):
        report, rows = Report("package", precision="float16"), (logits / temperature).softmax(1).tolist()
        results = dict(logits=logits, classLabel=["b", "a"], classLabel_probs=[dict(zip("ab", row)) for row in rows])
        compare_classes(SimpleNamespace(labels=["a", "b"]), results, logits, report)
        assert len(report.faults) == faults


def rounded(x: torch.Tensor) -> torch.Tensor:
    return x.half().float()


def official_order(qk: torch.Tensor, x: torch.Tensor, heads: int) -> torch.Tensor:
    """Linear attention in float16 as the official code orders it: sums over the tokens first, then divided by N."""
    q, k = rounded(nn.functional.elu(rounded(qk)) + 1).unflatten(1, (2 * heads, -1)).flatten(-2).chunk(2, dim=1)
    kv = rounded(rounded(rounded(x).unflatten(1, (heads, -1)).flatten(-2) @ k.mT) / k.shape[-1])
    z = 1 / rounded(rounded(rounded(k.mean(-1, keepdim=True)).mT @ q) + 1e-6)
    return rounded(rounded(kv @ q) * z)


@torch.no_grad()
def test_attention_stays_finite_in_float16_where_the_official_order_overflows(tmp_path):
    model, scale = shallow("care_s0"), 1
    attentions = [module for module in model.modules() if isinstance(module, LinearAttention)]
    caught, x = [], (PICTURES / 255 - 0.45) / 0.225
    for attention in attentions:
        attention.register_forward_pre_hook(lambda module, args: caught.append((module, args[0])))
    finite = True
    while finite:  # double the weights of q and k until the official order is no longer finite
        scale *= 2
        caught.clear()
        for attention in attentions:
            attention.qk.weight.mul_(2)
            attention.qk.bias.mul_(2)
        model(x)
        finite = all(official_order(m.qk(x), x, m.num_heads).isfinite().all() for m, x in caught)
    path = export_coreml(model, tmp_path / "model.mlpackage", image_size=(64, 96))
    program = load_program(path)
    for picture in PICTURES[:3]:
        values = program.run(picture, rounding=True)
        sums = [
            values[step.outputs[0][0]] for step in program.steps if step.type in ("matmul", "reduce_sum", "real_div")
        ]
        assert len(sums) >= 8 and all(value.isfinite().all() for value in sums), f"at {scale} times the weights"
        assert max(float(value.abs().max()) for value in sums) > 1000  # the test reached large numbers
    assert verify(path, model, PICTURES).ok


BAD_REQUESTS = {
    "suffix": (dict(path="model.mlmodel"), "mlpackage"),
    "precision": (dict(precision="int3"), "int3"),
    "compression": (dict(compress="zip"), "zip"),
    "labels": (dict(classes=CLASSES[:9]), "9 labels"),
    "labels of a pyramid": (dict(pyramid=True), "pyramid"),
    "twice": (dict(classes=(*CLASSES[:9], "0")), "differ"),
    "size": (dict(image_size=16), "32"),
    "no size": (dict(image_size=0), "32"),
    "half a size": (dict(image_size=(64.5, 64)), "64.5"),
    "three sizes": (dict(image_size=(64, 64, 64)), "height"),
    "a folder in the way": (dict(path="folder.mlpackage"), "no earlier export"),
    "a file in the way": (dict(path="file.mlpackage"), "no earlier export"),
    "a link to nothing": (dict(path="link.mlpackage"), "no earlier export"),
    "std": (dict(mean=(0.5,) * 3, std=(0.0,) * 3), "std"),
    "channels": (dict(mean=(0.5,), std=(0.5,)), "3 numbers"),
}


@pytest.mark.parametrize("request_", BAD_REQUESTS)
def test_a_bad_request_is_refused_and_leaves_nothing(model, request_, tmp_path, monkeypatch):
    kwargs, message = BAD_REQUESTS[request_]
    monkeypatch.setattr(export, "convert", lambda *args: pytest.fail("the slow work began"))
    monkeypatch.setattr(export, "save_onnx", lambda *args: pytest.fail("the slow work began"))
    (tmp_path / "folder.mlpackage").mkdir()
    (tmp_path / "folder.mlpackage" / "letter.txt").write_text("mine")
    (tmp_path / "file.mlpackage").write_text("mine")
    shutil.copytree(tmp_path / "folder.mlpackage", tmp_path / "folder.onnx")
    (tmp_path / "link.mlpackage").symlink_to("nowhere")
    (tmp_path / "link.onnx").symlink_to("nowhere")
    before = sorted(tmp_path.rglob("*"))
    kwargs = {"path": "model.mlpackage", "image_size": 64, "classes": CLASSES} | kwargs
    path = tmp_path / kwargs.pop("path")
    with pytest.raises(ValueError, match=message):
        export_coreml(model, path, **kwargs)
    if not {"precision", "compress"} & set(kwargs) and "file" not in request_:
        with pytest.raises(ValueError, match=message.replace("mlpackage", "onnx")):
            export_onnx(model, path.with_suffix(".onnx" if path.suffix == ".mlpackage" else path.suffix), **kwargs)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_failed_export_keeps_the_old_package(half, model, tmp_path, monkeypatch):
    old = tmp_path / "model.mlpackage"
    shutil.copytree(half, old)

    def broken(*args):
        raise RuntimeError("no space left")

    monkeypatch.setattr(export, "convert", broken)
    model.train()
    with pytest.raises(RuntimeError, match="no space"):
        export_coreml(model, old, image_size=(64, 96), classes=CLASSES)
    assert model.training  # left as it was
    model.eval()
    assert verdict(old, model) and [p.name for p in tmp_path.iterdir()] == ["model.mlpackage"]


def test_labels_in_another_order_are_found(half, model):
    assert verify(half, model, PICTURES[:1], classes=range(10)).ok
    for classes, message in (
        (CLASSES[::-1], "label 0 of the package is '0', class 0 of the model '9'"),
        (CLASSES[:9], "label 9 of the package is '9', class 9 of the model 'missing'"),
    ):
        report = verify(half, model, PICTURES[:1], classes=classes)
        assert len(report.faults) == 1 and message in str(report)


def test_verify_names_a_missing_package_and_another_model(half, model, tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        verify(tmp_path / "nowhere.mlpackage", model, PICTURES)
    other = carelite.CARE if isinstance(model, carelite.CASViT) else carelite.CASViT
    stranger = shallow("care_s0" if other is carelite.CARE else "cas_vit_xs")
    assert not verdict(half, stranger)
    with pytest.raises(ValueError, match="uint8"):
        verify(half, model, PICTURES.float())
    assert not verify(half, model, PICTURES[..., :64]).ok  # another size


def test_onnx_runtime_agrees(model, tmp_path):
    import onnxruntime

    (tmp_path / "model.ONNX").write_text("an earlier export gives way")
    path = export_onnx(model, tmp_path / "model.ONNX", image_size=(64, 96), classes=CLASSES, source="the rule")
    assert [p.name for p in tmp_path.iterdir()] == ["model.ONNX"]
    session = onnxruntime.InferenceSession(path)
    notes = session.get_modelmeta().custom_metadata_map
    assert notes["opset"] == "18" and notes["exporter"].startswith("torch.onnx") and notes["source"] == "the rule"
    cfg = model.pretrained_cfg
    mean, std = (torch.tensor(cfg[key]).view(3, 1, 1) for key in ("mean", "std"))
    for batch in (1, 2, 5):
        logits, probabilities = map(torch.tensor, session.run(None, {"image": PICTURES[:batch].float().numpy()}))
        with torch.inference_mode():
            expected = model((PICTURES[:batch] / 255 - mean) / std)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
        torch.testing.assert_close(probabilities, expected.softmax(1), atol=1e-4, rtol=0)


def test_a_mismatch_leaves_no_onnx_file(monkeypatch, tmp_path):
    """A fault of the fusion, which stands on one side of the comparison only."""
    model, true = shallow("cas_vit_xs"), export.prepare

    def wrong(*args):
        network = true(*args)
        network.stem[0].weight.mul_(1.01)
        return network

    monkeypatch.setattr(export, "prepare", wrong)
    with pytest.raises(ArithmeticError, match="differ by"):
        export_onnx(model, tmp_path / "model.onnx", image_size=64)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match=".onnx"):
        export_onnx(model, tmp_path / "model.mlpackage", image_size=64)


def macs(program) -> int:
    """The multiply-accumulates of a saved program: convolutions, linear layers and matrix products."""
    shapes = {name: shape for step in program.steps for name, _, shape in step.outputs}
    shapes |= {name: tuple(value.shape) for name, value in program.constants().items()}
    total = 0
    for step in program.steps:
        out = prod(step.outputs[0][2])
        if step.type in ("conv", "linear"):
            total += out * prod(shapes[step.arguments["weight"][0]][1:])
        elif step.type == "matmul":
            x, transposed = (step.arguments[key][0] for key in ("x", "transpose_x"))
            total += out * shapes[x][-2 if program.stored[transposed] else -1]
    return total


SMALLEST = ("care_s0", "cas_vit_xs")


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in SMALLEST else pytest.mark.slow) for n in MODELS])
def test_full_models_have_the_operations_of_the_table(name, tmp_path):
    """224×224, float16, classifier with the normalisation inside; and no more multiply-accumulates than the model."""
    model = filled(name)
    path = export_coreml(model, tmp_path / "model.mlpackage", image_size=224, classes=range(1000))
    program = load_program(path)
    counts = program.operations()
    assert dict(counts) == COUNTS[name]
    assert not {"batch_norm", "transpose", "inverse"} & set(counts)
    assert sum(counts.values()) <= {"care_s0": 505, "cas_vit_xs": 360}.get(name, 1000)
    second_head = model.num_features * model.num_classes
    assert macs(program) == count_macs(model, torch.zeros(1, 3, 224, 224)) - second_head
    report = verify(path, model, real_images((224, 224), 4))
    assert report.ok, str(report)


@pytest.mark.slow
@each_model
@pytest.mark.parametrize("kind", ("float16", "float32", "palettize6", "int8"))
def test_full_models_on_a_hundred_real_images(name, kind, tmp_path):
    model = filled(name)
    how = dict(precision=kind) if kind.startswith("float") else dict(compress=kind)
    path = export_coreml(model, tmp_path / "model.mlpackage", image_size=96, classes=range(1000), **how)
    report = verify(path, model, real_images((96, 96)))
    print(report)  # 96×96 pixels: the same operations as at 224, a fifth of the work
    assert report.ok, str(report)
    if name in SMALLEST and "compress" in how:
        row = f"| `{name}` | {kind} | {report.size / 1e6:.1f} | {report.agreement:.0%} |"
        notebook = Path(__file__).parents[1] / "notebooks" / "13_export.ipynb"
        assert row in notebook.read_text(), f"notebook 13 states something else than {row}"
