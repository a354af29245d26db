"""Data, training, evaluation and saved runs."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Subset

from carelite import training
from carelite.data import ImageSplits, load_digits_splits, load_image, normalise
from carelite.training import TrainConfig, evaluate, load_checkpoint, save_checkpoint, train

TINY = TrainConfig(epochs=2, batch_size=32, warmup_epochs=1)


@pytest.fixture(scope="module")
def digits():
    return load_digits_splits(32)


@pytest.fixture(scope="module")
def few(digits):
    return ImageSplits(Subset(digits.train, range(96)), Subset(digits.val, range(50)), digits.classes)


@pytest.fixture(scope="module")
def run(few, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    return train(TINY, few, folder), folder


def test_the_split_is_the_stated_one(digits):
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    raw = load_digits()
    _, held_out, _, labels = train_test_split(
        raw.images, raw.target, test_size=360, stratify=raw.target, random_state=0
    )
    assert len(digits.train) == 1437 and len(digits.val) == 360 and digits.classes == tuple("0123456789")
    assert [label for _, label in digits.val] == labels.tolist()
    plain = load_digits_splits(8).val
    torch.testing.assert_close(
        torch.stack([image for image, _ in plain]).float(),
        torch.from_numpy(held_out).float()[:, None].expand(-1, 3, -1, -1) * 255 / 16,
        atol=0.51,
        rtol=0,
    )


def test_normalise():
    x = torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8)
    out = normalise(x, (0.1, 0.2, 0.3), (0.5, 0.6, 0.7))
    expected = (x.double() / 255 - torch.tensor([0.1, 0.2, 0.3]).view(3, 1, 1)) / torch.tensor([0.5, 0.6, 0.7]).view(
        3, 1, 1
    )
    torch.testing.assert_close(out.double(), expected, atol=1e-6, rtol=1e-6)
    assert out.dtype == torch.float32 and out.is_contiguous(memory_format=torch.channels_last)


def test_load_image(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    image.save(tmp_path / "plain.png")
    plain = load_image(tmp_path / "plain.png", 40)
    torch.testing.assert_close(plain, torch.from_numpy(pixels[:, 10:50]).permute(2, 0, 1))
    exif = image.getexif()
    exif[0x0112] = 6  # to be turned by a quarter
    image.transpose(Image.Transpose.ROTATE_90).save(tmp_path / "turned.png", exif=exif)
    torch.testing.assert_close(load_image(tmp_path / "turned.png", 40), plain)
    for mode in ("L", "P", "RGBA", "CMYK", "1", "LA", "I;16"):
        suffix = "tiff" if mode == "CMYK" else "png"
        converted = image.convert("L").convert("I;16") if mode == "I;16" else image.convert(mode)
        converted.save(tmp_path / f"image.{suffix}")
        assert load_image(tmp_path / f"image.{suffix}", 32).shape == (3, 32, 32)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load_image(tmp_path / "nowhere.png", 32)
    (tmp_path / "broken.png").write_bytes(b"\x89PNG")
    with pytest.raises(ValueError, match="broken.png"):
        load_image(tmp_path / "broken.png", 32)


def test_a_run_leaves_weights_log_and_curve(run):
    model, folder = run
    assert {p.name for p in folder.iterdir()} >= {"model.safetensors", "log.jsonl", "learning_curve.png"}
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [1, 2]
    assert Image.open(folder / "learning_curve.png").width > 300
    assert not [p for p in folder.rglob("*") if "tmp" in p.name or "partial" in p.name]


def test_training_learns(digits, tmp_path):
    memorise = ImageSplits(Subset(digits.train, range(64)), Subset(digits.train, range(64)), digits.classes)
    model = train(replace(TINY, epochs=20, shift=0.0, rotation=0.0), memorise, tmp_path)
    assert evaluate(model, memorise.val).accuracy > 0.5  # chance is 0.1


def test_the_same_seed_gives_the_same_weights(run, few, tmp_path):
    again, other = train(TINY, few, tmp_path / "a"), train(replace(TINY, seed=1), few, tmp_path / "b")
    for (name, a), b, c in zip(run[0].state_dict().items(), again.state_dict().values(), other.state_dict().values()):
        assert torch.equal(a, b), name
        if name == "head.fc.weight":
            assert not torch.equal(a, c)


def test_evaluate_counts_every_image_once_and_restores_the_mode(run, few):
    model, _ = run
    model.train()
    result = evaluate(model, few.val, batch_size=32)
    assert model.training
    model.eval()
    images = torch.stack([image for image, _ in few.val])
    labels = torch.tensor([label for _, label in few.val])
    cfg = model.pretrained_cfg
    with torch.inference_mode():
        logits = model(normalise(images, cfg["mean"], cfg["std"]))
    torch.testing.assert_close(result.logits, logits, atol=1e-4, rtol=1e-4)
    assert result.accuracy == pytest.approx((logits.argmax(1) == labels).float().mean().item())
    assert result.loss == pytest.approx(torch.nn.functional.cross_entropy(logits, labels).item(), rel=1e-4)


def test_checkpoints(run, tmp_path):
    model, folder = run
    again, meta = load_checkpoint(folder / "model.safetensors")
    assert not again.training and tuple(meta.classes) == tuple("0123456789")
    assert (meta.name, meta.image_size) == ("care_s0", 32)
    for (name, a), b in zip(model.state_dict().items(), again.state_dict().values()):
        assert torch.equal(a, b), name
    from safetensors.torch import save_file

    save_file({k: v.contiguous() for k, v in model.state_dict().items()}, tmp_path / "bare.safetensors")
    with pytest.raises(ValueError, match="bare.safetensors"):
        load_checkpoint(tmp_path / "bare.safetensors")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load_checkpoint(tmp_path / "nowhere.safetensors")


def test_a_failed_save_keeps_the_old_file(run, tmp_path, monkeypatch):
    model, folder = run
    path = tmp_path / "model.safetensors"
    path.write_bytes((folder / "model.safetensors").read_bytes())
    before = path.read_bytes()

    def broken(model, filename, metadata):
        open(filename, "wb").write(b"half a file")
        raise OSError("disk full")

    monkeypatch.setattr(training, "save_model", broken)
    with pytest.raises(OSError, match="disk full"):
        save_checkpoint(
            model, path, name="care_s0", classes=tuple("0123456789"), image_size=32, mean=(0.0,) * 3, std=(1.0,) * 3
        )
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]


def test_a_loss_that_is_not_finite_stops_the_run(few, tmp_path, monkeypatch):
    true = training.F.cross_entropy
    monkeypatch.setattr(training.F, "cross_entropy", lambda *a, **k: true(*a, **k) * float("nan"))
    with pytest.raises(ArithmeticError, match="epoch 1(.|\n)*step"):
        train(TINY, few, tmp_path)


BAD = [dict(epochs=0), dict(batch_size=0), dict(lr=-1.0), dict(image_size=16), dict(model="care_s9"), dict(shift=1.0)]


@pytest.mark.parametrize("change", BAD, ids=str)
def test_bad_settings_are_refused(change):
    ((field, value),) = change.items()
    with pytest.raises(ValueError, match=f"{field}(.|\n)*{value}"):
        replace(TINY, **change)


def test_images_of_another_size_are_refused(few, tmp_path):
    with pytest.raises(ValueError, match="32(.|\n)*64"):
        train(replace(TINY, image_size=64), few, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_too_few_images_are_refused(digits, tmp_path):
    one = ImageSplits(Subset(digits.train, range(1)), digits.val, digits.classes)
    with pytest.raises(ValueError, match="1 "):
        train(TINY, one, tmp_path)
