"""Fusion, Core ML packages and their verification, at sizes that convert fast. In a process of its own: the run-time
check of shapes breaks graphs."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import carelite
from carelite import export, fusion
from carelite.export import export_coreml
from carelite.fusion import fuse
from carelite.verification import load_program, verify
from helpers import MODELS, fill_in_place, filled, images

pytestmark = pytest.mark.unchecked
CLASSES = tuple("0123456789")
PICTURES = torch.randint(0, 256, (6, 3, 64, 96), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
each_model = pytest.mark.parametrize("name", MODELS)


def shallow(name: str, **kwargs) -> nn.Module:
    """The model `name` with one block per stage and ten classes, filled by the rule."""
    care = name.startswith("care")
    cls, configs = (carelite.CARE, carelite.CARE_CONFIGS) if care else (carelite.CASViT, carelite.CAS_VIT_CONFIGS)
    model = fill_in_place(cls(replace(configs[name], depths=(1, 1, 1, 1)), **{"num_classes": 10} | kwargs))
    model.pretrained_cfg = carelite.create_model(name).pretrained_cfg
    return model


@pytest.fixture(scope="module", params=("care_s0", "cas_vit_xs"))
def model(request):
    return shallow(request.param)


@pytest.fixture(scope="module", params=("float16", "float32"))
def package(request, model, tmp_path_factory):
    path = tmp_path_factory.mktemp("package") / "model.mlpackage"
    return export_coreml(model, path, image_size=(64, 96), classes=CLASSES, precision=request.param)


@each_model
@torch.inference_mode()
def test_fusion_keeps_the_function(name):
    original = filled(name)
    before = {key: value.clone() for key, value in original.state_dict().items()}
    fused = fuse(original)
    assert not any(isinstance(m, nn.BatchNorm2d | nn.Dropout) for m in fused.modules())
    for size in ((64, 64), (100, 75)):
        torch.testing.assert_close(fused(images(2, *size)), original(images(2, *size)), atol=1e-5, rtol=0)
    assert all(torch.equal(before[key], value) for key, value in original.state_dict().items())
    parameters = sum(p.numel() for p in fused.parameters())
    assert parameters < {"care_s0": 6.32e6, "care_s2": 17.95e6}.get(name, 22e6)


@pytest.mark.parametrize("kwargs", ({"num_classes": 0}, {"global_pool": "max"}, {"num_classes": 0, "global_pool": ""}))
@torch.inference_mode()
def test_fusion_without_heads_and_with_another_pooling(model, kwargs):
    original = shallow("care_s0" if isinstance(model, carelite.CARE) else "cas_vit_xs", **kwargs)
    torch.testing.assert_close(fuse(original)(images(2, 64, 64)), original(images(2, 64, 64)), atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_fusion_takes_the_normalisation_in(model):
    mean, std = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)
    x = (PICTURES / 255 - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    torch.testing.assert_close(fuse(model, mean, std)(PICTURES.float()), model(x), atol=2e-5, rtol=1e-5)


def test_fusion_refuses(model):
    with pytest.raises(ValueError, match="training mode"):
        fuse(shallow("care_s0").train())
    with pytest.raises(TypeError, match="Linear"):
        fuse(nn.Linear(3, 3))
    with pytest.raises(ValueError, match="together"):
        fuse(model, mean=(0.5, 0.5, 0.5))


def test_a_package_is_right(package, model):
    report = verify(package, model, PICTURES)
    assert report.ok, str(report)
    assert report.agreement == 1.0 and report.images == len(PICTURES) and report.labels == 10
    assert report.precision == ("float16" if report.difference < 2e-5 and "float16" in str(report) else "float32")
    program = load_program(package)
    assert program.operations()["conv"] and not {"batch_norm", "transpose", "inverse"} & set(program.operations())
    assert not list(package.rglob("executorch*"))
    with torch.inference_mode():
        cfg = model.pretrained_cfg
        mean, std = (torch.tensor(cfg[key]).view(3, 1, 1) for key in ("mean", "std"))
        logits = model((PICTURES / 255 - mean) / std)
    tolerance = 1e-4 if report.precision == "float32" else 2e-2
    torch.testing.assert_close(program(PICTURES)["logits"], logits, atol=tolerance, rtol=0)


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
def test_a_damaged_weight_file_is_found(package, model, fault, tmp_path):
    copy = tmp_path / "damaged.mlpackage"
    shutil.copytree(package, copy)
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
def test_a_changed_program_is_found(tmp_path, change):
    model = shallow("care_s0")
    package = export_coreml(model, tmp_path / "model.mlpackage", image_size=64, classes=CLASSES)
    edit_program(package, change)
    report = verify(package, model, PICTURES[..., :64])
    assert not report.ok
    if change is unknown_operation:
        assert "conv_of_tomorrow" in str(report)


def test_mean_and_std_exchanged_in_the_export_is_found(model, monkeypatch, tmp_path):
    true = export.normalisation_of
    monkeypatch.setattr(export, "normalisation_of", lambda *args: true(*args)[::-1])
    package = export_coreml(model, tmp_path / "model.mlpackage", image_size=(64, 96), classes=CLASSES)
    monkeypatch.undo()
    assert not verdict(package, model)


def test_a_wrong_mean_and_swapped_channels_are_found(model, tmp_path):
    path = tmp_path / "model.mlpackage"
    package = export_coreml(model, path, image_size=(64, 96), classes=CLASSES, mean=(0.485, 0.456, 0.4))
    assert not verdict(package, model)
    cfg = model.pretrained_cfg
    turned = export_coreml(
        model, path, image_size=(64, 96), classes=CLASSES, mean=cfg["mean"][::-1], std=cfg["std"][::-1]
    )
    assert not verdict(turned, model)


def test_a_fault_in_the_fusion_is_found(model, monkeypatch, tmp_path):
    """The reference of float32 packages is the unfused model, so that a wrong fold cannot hide behind itself."""
    true = fusion.fold_before
    wrong = lambda scale, shift, conv: true(scale, 0.9 * shift, conv)  # noqa: E731
    monkeypatch.setattr(fusion, "fold_before", wrong)
    package = export_coreml(
        model, tmp_path / "model.mlpackage", image_size=(64, 96), classes=CLASSES, precision="float32"
    )
    assert not verdict(package, model)


BAD_REQUESTS = {
    "suffix": (dict(path="model.mlmodel"), "mlpackage"),
    "precision": (dict(precision="int3"), "int3"),
    "labels": (dict(classes=CLASSES[:9]), "9 labels"),
    "twice": (dict(classes=(*CLASSES[:9], "0")), "differ"),
    "size": (dict(image_size=16), "32"),
    "std": (dict(mean=(0.5,) * 3, std=(0.0,) * 3), "std"),
    "channels": (dict(mean=(0.5,), std=(0.5,)), "3 numbers"),
}


@pytest.mark.parametrize("request_", BAD_REQUESTS)
def test_a_bad_request_is_refused_and_leaves_nothing(model, request_, tmp_path, monkeypatch):
    kwargs, message = BAD_REQUESTS[request_]
    monkeypatch.setattr(export, "convert", lambda *args: pytest.fail("the slow work began"))
    kwargs = {"path": "model.mlpackage", "image_size": 64, "classes": CLASSES} | kwargs
    with pytest.raises(ValueError, match=message):
        export_coreml(model, tmp_path / kwargs.pop("path"), **kwargs)
    assert not list(tmp_path.iterdir())


def test_a_failed_export_keeps_the_old_package(package, model, tmp_path, monkeypatch):
    old = tmp_path / "model.mlpackage"
    shutil.copytree(package, old)

    def broken(*args):
        raise RuntimeError("no space left")

    monkeypatch.setattr(export, "convert", broken)
    model.train()
    with pytest.raises(RuntimeError, match="no space"):
        export_coreml(model, old, image_size=(64, 96), classes=CLASSES)
    assert model.training  # left as it was
    model.eval()
    assert verdict(old, model) and [p.name for p in tmp_path.iterdir()] == ["model.mlpackage"]


def test_verify_names_a_missing_package_and_another_model(package, model, tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        verify(tmp_path / "nowhere.mlpackage", model, PICTURES)
    other = carelite.CARE if isinstance(model, carelite.CASViT) else carelite.CASViT
    stranger = shallow("care_s0" if other is carelite.CARE else "cas_vit_xs")
    assert not verdict(package, stranger)
    with pytest.raises(ValueError, match="uint8"):
        verify(package, model, PICTURES.float())
    assert not verify(package, model, PICTURES[..., :64]).ok  # another size


@pytest.mark.slow
@each_model
@pytest.mark.parametrize("precision", ("float16", "float32"))
def test_full_models(name, precision, tmp_path):
    model = filled(name)
    package = export_coreml(model, tmp_path / "model.mlpackage", image_size=224, precision=precision)
    pictures = torch.randint(0, 256, (2, 3, 224, 224), dtype=torch.uint8)
    report = verify(package, model, pictures)
    assert report.ok, str(report)
