"""Training: the recipe, what a run leaves, resuming, several processes, distillation, evaluation."""

import io
import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import SafetensorError
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, StackDataset, Subset

import carelite
from carelite import data, training
from carelite.cas_vit import CAS_VIT_CONFIGS
from carelite.data import ImageSplits, load_digits_splits, load_image, normalise
from carelite.training import (
    PRESETS,
    Evaluation,
    TrainConfig,
    augment_batch,
    create_accelerator,
    create_optimizer,
    create_run,
    distillation_loss,
    evaluate,
    load_checkpoint,
    load_teacher,
    read_config,
    save_checkpoint,
    teach,
    train,
    training_batches,
    training_step,
)

TINY = TrainConfig(epochs=2, batch_size=32, warmup_epochs=1)
FULL = replace(  # everything that a recipe has
    TINY, model="cas_vit_xs", crop_scale=0.3, flip=0.5, auto_augment="rand-m9-mstd0.5-inc1", erasing=0.25, mixup=0.8,
    cutmix=1.0, drop_path_rate=0.2, ema_decay=0.9, clip_grad=5.0, min_size=32, max_size=64,
)  # fmt: skip


def shallow(classes: int = 10, seed: int = 0) -> nn.Module:
    """A small model, always with the same weights."""
    torch.manual_seed(seed)
    return carelite.CASViT(replace(CAS_VIT_CONFIGS["cas_vit_xs"], depths=(1, 1, 1, 1)), num_classes=classes)


def equal(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def lines(folder) -> list[dict]:
    """A run's log, without the times."""
    log = [json.loads(line) for line in Path(folder, "log.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in log]


@pytest.fixture(scope="module")
def digits():
    return load_digits_splits(32)


@pytest.fixture(scope="module")
def few(digits):
    return ImageSplits(Subset(digits.train, range(96)), Subset(digits.val, range(50)), digits.classes)


@pytest.fixture(scope="module")
def run(few, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    return train(replace(TINY, model="cas_vit_xs"), few, folder), folder


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
    assert {p.name for p in folder.iterdir()} == {
        "config.json", "model.safetensors", "log.jsonl", "learning_curve.png",
    }  # fmt: skip
    log = lines(folder)
    assert [line["epoch"] for line in log] == [1, 2] and all(line["val_images"] == 50 for line in log)
    assert Image.open(folder / "learning_curve.png").width > 300


def test_training_learns(digits, tmp_path):
    memorise = ImageSplits(Subset(digits.train, range(64)), Subset(digits.train, range(64)), digits.classes)
    still = replace(TINY, epochs=10, lr=1e-2, shift=0.0, rotation=0.0, zoom=0.0)
    model = train(still, memorise, tmp_path, model=shallow())
    assert evaluate(model, memorise.val).accuracy > 0.5  # chance is 0.1


def test_the_file_beside_a_run_reproduces_it_and_another_seed_does_not(few, tmp_path):
    once, few = replace(FULL, epochs=1), replace(few, train=Subset(few.train, range(64)))
    first = train(once, few, tmp_path / "a")
    config = read_config(tmp_path / "a" / "config.json")
    assert config == once
    again, other = train(config, few, tmp_path / "b"), train(replace(once, seed=1), few, tmp_path / "c")
    assert equal(first, again) and lines(tmp_path / "a") == lines(tmp_path / "b")
    assert not torch.equal(first.head.fc.weight, other.head.fc.weight)


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
    assert (meta.name, meta.image_size, meta.attention) == ("cas_vit_xs", 32, "")
    for (name, a), b in zip(model.state_dict().items(), again.state_dict().values()):
        assert torch.equal(a, b), name
    (tmp_path / "new").touch()
    assert (folder / "model.safetensors").stat().st_mode == (tmp_path / "new").stat().st_mode  # for others to read
    from safetensors.torch import save_file

    save_file({k: v.contiguous() for k, v in model.state_dict().items()}, tmp_path / "bare.safetensors")
    with pytest.raises(ValueError, match="bare.safetensors"):
        load_checkpoint(tmp_path / "bare.safetensors")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load_checkpoint(tmp_path / "nowhere.safetensors")


def test_a_checkpoint_builds_the_model_it_was_saved_from_or_is_refused(tmp_path):
    from carelite.attention_family import Softmax, attention_parts

    path, notes = tmp_path / "model.safetensors", dict(classes=("a", "b"), image_size=32)
    images = torch.rand(2, 3, 64, 64)
    bare = carelite.CARE(num_classes=2, global_pool="max", drop_path_rate=0.1).eval()  # without a pretrained_cfg
    mixed = carelite.create_model("cas_vit_xs", attention="softmax", num_classes=2, in_chans=1).eval()
    for model, name, attention, channels in ((bare, "care_s0", "", 3), (mixed, "cas_vit_xs", "softmax", 1)):
        for p in model.parameters():
            p.data.add_(0.01)  # so that the layer scale hides nothing
        save_checkpoint(model, path, name=name, attention=attention, **notes)
        again, meta = load_checkpoint(path)
        assert (meta.global_pool, meta.attention) == (model.global_pool.pool_type, attention)
        assert torch.equal(again(images[:, :channels]), model(images[:, :channels]))
    own = carelite.create_model("care_s0", num_classes=2, **attention_parts("care_s0", partial(Softmax)))
    for model, name in ((own, "care_s0"), (mixed, "cas_vit_xs"), (bare, "care_s1"), (shallow(2), "cas_vit_xs")):
        with pytest.raises(ValueError, match=f"not what create_model builds as {name}"):
            save_checkpoint(model, tmp_path / "none.safetensors", name=name, **notes)
    save_checkpoint(shallow(2), path, name="", **notes)  # the weights alone
    with pytest.raises(ValueError, match="no name builds"):
        load_checkpoint(path)
    bare.stem[0].bias.data[0] = float("nan")
    save_checkpoint(bare, path, name="care_s0", **notes)
    with pytest.raises(ValueError, match="not finite"):
        load_checkpoint(path)
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize("kind", (OSError, RuntimeError, SafetensorError))
def test_a_failed_save_keeps_the_old_file(kind, run, tmp_path, monkeypatch):
    model, folder = run
    path = tmp_path / "model.safetensors"
    path.write_bytes((folder / "model.safetensors").read_bytes())
    before = path.read_bytes()

    def broken(model, filename, metadata):
        open(filename, "wb").write(b"half a file")
        raise kind("disk full\nand more")

    monkeypatch.setattr(training, "save_model", broken)
    with pytest.raises(OSError, match=f"^{path} cannot be written .*disk full[^\n]*$"):
        save_checkpoint(
            model, path, name="cas_vit_xs", classes=tuple("0123456789"), image_size=32, mean=(0.0,) * 3, std=(1.0,) * 3
        )
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_what_was_saved(few, tmp_path, monkeypatch):
    true, count = training.F.cross_entropy, iter(range(1, 99))

    def fails_at_the_fifth(*args, **kwargs):  # 3 steps and an evaluation, then the second step
        return true(*args, **kwargs) * (float("nan") if next(count) == 6 else 1)

    init = tmp_path / "init.safetensors"
    other = carelite.create_model("cas_vit_xs", num_classes=10)
    save_checkpoint(other, init, name="", classes=few.classes, image_size=32)
    config = replace(TINY, model="cas_vit_xs", init=str(init))
    whole = train(config, few, tmp_path / "whole")
    monkeypatch.setattr(training.F, "cross_entropy", fails_at_the_fifth)
    with pytest.raises(ArithmeticError, match="nan in epoch 2, step 5 .batch 2 of 3"):
        train(config, few, tmp_path)
    monkeypatch.undo()
    assert [line["epoch"] for line in lines(tmp_path)] == [1]
    load_checkpoint(tmp_path / "model.safetensors")
    init.unlink()  # a state has all weights
    assert equal(train(config, few, tmp_path, resume=True), whole)


def test_weights_that_are_not_finite_are_never_saved(run, few, tmp_path):
    """One step with lr 1e30 leaves a finite training loss behind it, and nothing else that is."""
    import shutil

    folder = shutil.copytree(run[1], tmp_path / "run")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    one = replace(TINY, model="cas_vit_xs", epochs=1, warmup_epochs=0, lr=1e30)
    images = replace(few, train=Subset(few.train, range(32)))
    for config, message in ((one, "finite|loss is (nan|inf)"), (replace(one, lr=1e39, checkpoint_steps=1), "finite")):
        with pytest.raises(ArithmeticError, match=f"({message})(.|\n)*what was saved is kept"):
            train(config, images, folder)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before  # also config.json


BAD = [
    dict(epochs=0), dict(batch_size=0), dict(lr=-1.0), dict(image_size=16), dict(model="care_s9"), dict(shift=1.0),
    dict(max_size=40), dict(accumulation=3), dict(crop_scale=0.0), dict(mixup=-0.5), dict(distillation="firm"),
    dict(mixed_precision="fp8"), dict(seed=-1), dict(erasing=1.5), dict(seed=2**64),
    dict(lr=float("nan")),
]  # fmt: skip
MISTYPED = [  # the run-time check of shapes would refuse them too, before us
    dict(epochs=1.5), dict(skip_faults="no"), dict(data=5), dict(seed=1.5), dict(lr="0.1"), dict(flip=True),
    dict(teacher=None),
]  # fmt: skip
BAD += [pytest.param(change, marks=pytest.mark.unchecked) for change in MISTYPED]


@pytest.mark.parametrize("change", BAD, ids=str)
def test_bad_settings_are_refused(change):
    ((field, value),) = change.items()
    with pytest.raises(ValueError, match=f"{field}(.|\n)*{value}"):
        replace(TINY, **change)


def test_images_of_another_size_are_refused(few, tmp_path):
    with pytest.raises(ValueError, match="32(.|\n)*image_size is 64"):
        train(replace(TINY, image_size=64), few, tmp_path / "run")


def test_a_run_keeps_clear_of_its_images_and_of_the_checkpoints_it_needs(few, tmp_path):
    with pytest.raises(ValueError, match="choose another --output"):
        train(replace(TINY, data=f"folder:{tmp_path}"), few, tmp_path / "run")
    weights = tmp_path / "run" / ".." / "run" / "model.safetensors"
    for field, spec in (("init", weights), ("teacher", weights), ("teacher", f"resnet18={weights}")):
        with pytest.raises(ValueError, match=f"overwrite its {field}, (.|\n)*choose another --output"):
            train(replace(TINY, **{field: str(spec)}), few, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_models_that_do_not_fit_the_images_are_refused(few, tmp_path):
    grey = carelite.CASViT(CAS_VIT_CONFIGS["cas_vit_xs"], num_classes=10, in_chans=1)
    for model, message in ((shallow(9), "9 classes"), (grey, "1 channels"), (nn.Linear(1, 1), "a Linear")):
        with pytest.raises(ValueError, match=message):
            train(TINY, few, tmp_path / "run", model=model)


def test_too_few_images_are_refused(digits, tmp_path):
    for train_images, val_images, message in ((1, 9, "1 "), (99, 0, "no held-out images")):
        parts = Subset(digits.train, range(train_images)), Subset(digits.val, range(val_images))
        with pytest.raises(ValueError, match=message):
            train(TINY, ImageSplits(*parts, digits.classes), tmp_path)


# --- the recipe ---


def test_the_presets_are_the_papers():
    care, cas_vit, finetune = (PRESETS[name] for name in ("care", "cas_vit", "finetune"))
    assert (care.lr, care.lr_batch, care.min_lr, care.mixup, care.cutmix, care.erasing) == (
        2.5e-3,
        1536,
        1e-5,
        0.8,
        1,
        0.25,
    )
    assert (cas_vit.lr, cas_vit.lr_batch, cas_vit.min_lr, cas_vit.ema_decay) == (6e-3, 2048, 1e-6, 0.9995)
    assert (cas_vit.min_size, cas_vit.max_size, cas_vit.mixup, cas_vit.erasing) == (160, 320, 0, 0)
    for preset in (care, cas_vit):
        assert (preset.epochs, preset.warmup_epochs, preset.weight_decay, preset.label_smoothing) == (
            300,
            20,
            0.05,
            0.1,
        )
        assert (preset.auto_augment, preset.crop_scale, preset.drop_path_rate) == ("rand-m9-mstd0.5-inc1", 0.08, 0.1)
    assert (finetune.epochs, finetune.image_size, finetune.drop_path_rate, finetune.ema_decay) == (30, 384, 0, 0.9995)
    optimizer = create_optimizer(shallow(), finetune)
    schedule = training.create_schedule(optimizer, finetune, 10)
    for step in (0, 1, 150, 299):
        schedule.step_update(step)
        assert {group["lr"] for group in optimizer.param_groups} == {5e-5}  # constant
    assert create_optimizer(shallow(), care, processes=12).param_groups[0]["lr"] == pytest.approx(2.5e-3)
    assert create_optimizer(shallow(), care).param_groups[0]["lr"] == pytest.approx(2.5e-3 / 12)


@pytest.mark.parametrize("batch", (5, 6))
@pytest.mark.parametrize("change", (dict(mixup=0.8), dict(cutmix=1.0), dict(mixup=0.8, cutmix=1.0), {}), ids=str)
def test_targets_sum_to_one_also_for_an_odd_batch(batch, change):
    torch.manual_seed(0)
    images, labels = torch.randn(batch, 3, 32, 32), torch.arange(batch)
    mixed, targets = augment_batch(images.clone(), labels, 10, replace(TINY, **change), step=1)
    torch.testing.assert_close(targets.sum(dim=1), torch.ones(batch))
    assert targets.min() == pytest.approx(0.01) and mixed.shape == images.shape
    assert (not torch.equal(mixed, images)) == bool(change)
    if batch % 2:
        assert torch.equal(mixed[-1], images[-1]) and targets[-1].argmax() == labels[-1]


def test_an_odd_batch_trains_with_mixup(few, tmp_path):
    train(replace(TINY, epochs=1, batch_size=33, mixup=0.8, cutmix=1.0), few, tmp_path, model=shallow())
    assert torch.tensor(lines(tmp_path)[0]["train_loss"]).isfinite()


def test_erasing_and_sizes():
    images = torch.randn(8, 3, 64, 64)
    erased, _ = augment_batch(images.clone(), torch.arange(8), 10, replace(TINY, erasing=1.0), step=1)
    shares = (erased != images).any(dim=1).float().mean(dim=(1, 2))
    assert 0 < shares.min() and shares.max() < 0.5
    many = replace(TINY, min_size=32, max_size=96)
    sizes = [augment_batch(images, torch.arange(8), 10, many, step)[0].shape[-1] for step in range(20)]
    assert set(sizes) == {32, 64, 96}


def test_a_last_batch_of_one_image_is_left_out_with_a_notice(digits, tmp_path, capsys):
    odd = ImageSplits(Subset(digits.train, range(33)), Subset(digits.val, range(10)), digits.classes)
    train(replace(TINY, epochs=1), odd, tmp_path, model=shallow())
    assert capsys.readouterr().out.startswith("1 of 33 images")
    assert [len(labels) for _, labels in training_batches(odd, TINY)] == [32]


def test_accumulation_gives_the_gradient_of_the_whole_batch(few):
    norms = []
    for parts in (1, 4):
        config = replace(TINY, accumulation=parts)
        torch.manual_seed(0)
        model = shallow()
        for norm in model.modules():  # BatchNorm sees parts, so it must not matter here
            if isinstance(norm, nn.BatchNorm2d):
                norm.momentum, norm.track_running_stats = 0.0, True
        run = create_run(config, create_accelerator(config), model.eval(), None, 3)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        images, labels = next(iter(training_batches(few, config)))
        training_step(run, images, labels, 1)
        norms.append({name: (p - before[name]) for name, p in model.named_parameters()})
    for name, step in norms[0].items():
        torch.testing.assert_close(norms[1][name], step, atol=2e-7, rtol=0.02), name


def test_clipping(few):
    seen = []
    config = replace(TINY, clip_grad=1e-3)
    run = create_run(config, create_accelerator(config), shallow().train(), None, 3)
    true = run.optimizer.step
    run.optimizer.step = lambda: (seen.append(nn.utils.get_total_norm(p.grad for p in run.plain.parameters())), true())
    training_step(run, *next(iter(training_batches(few, config))), 1)
    assert seen[0] == pytest.approx(1e-3, rel=1e-3)


def test_mixed_precision(few, tmp_path):
    model = train(replace(TINY, epochs=1, mixed_precision="bf16"), few, tmp_path, model=shallow())
    assert {p.dtype for p in model.parameters()} == {torch.float32} and "forward" not in vars(model)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="fp16 needs a GPU"):
            train(replace(TINY, mixed_precision="fp16"), few, tmp_path)


def test_the_average_follows_batchnorm_and_keeps_integers(few):
    config = replace(TINY, ema_decay=0.5)
    run = create_run(config, create_accelerator(config), shallow().train(), None, 3)
    expected = {key: value.clone() for key, value in run.plain.state_dict().items()}
    images, labels = next(iter(training_batches(few, config)))
    for step in range(1, 5):
        training_step(run, images, labels, step)
        decay = min(0.5, 1 - step ** (-2 / 3)) if step > 1 else 0.0  # it begins as a copy
        for key, value in run.plain.state_dict().items():
            new = decay * expected[key] + (1 - decay) * value if value.is_floating_point() else value
            expected[key] = new.clone()
    for key, value in run.ema.module.state_dict().items():
        torch.testing.assert_close(value, expected[key], atol=1e-5, rtol=1e-4), key
    assert run.ema.module.stem[1].num_batches_tracked.dtype == torch.int64
    assert run.result is run.ema.module and not torch.equal(run.result.head.fc.weight, run.plain.head.fc.weight)


# --- resuming ---

KILLED = """
import os, signal, sys
from dataclasses import replace
from test_training import FULL, few_digits, shallow
from carelite import training

folder, config = sys.argv[1], replace(FULL, checkpoint_steps=2)
for kill_at in (2, 3, 5):  # before the first state; between two; in the second epoch, right behind a state
    if os.fork():
        assert os.waitstatus_to_exitcode(os.wait()[1]) == -signal.SIGKILL
        continue
    true = training.training_step
    def step(run, images, labels, number):
        if number == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return true(run, images, labels, number)
    training.training_step = step
    training.train(config, few_digits(), folder, model=shallow(), resume=os.path.exists(folder + "/state.pt"))
"""


def few_digits() -> ImageSplits:
    digits = load_digits_splits(32)
    return ImageSplits(Subset(digits.train, range(96)), Subset(digits.val, range(50)), digits.classes)


@pytest.mark.unchecked
def test_a_run_killed_three_times_ends_where_the_uninterrupted_one_does(tmp_path):
    config = replace(FULL, checkpoint_steps=2)
    whole = train(config, few_digits(), tmp_path / "whole", model=shallow())
    command = [sys.executable, "-c", KILLED, str(tmp_path / "killed")]
    subprocess.run(command, check=True, cwd=Path(__file__).parent, timeout=120)
    state = torch.load(tmp_path / "killed" / "state.pt", weights_only=True)
    assert (state["progress"]["epoch"], state["progress"]["step"]) == (2, 1)
    resumed = train(config, few_digits(), tmp_path / "killed", resume=True, model=shallow())
    assert equal(resumed, whole) and lines(tmp_path / "killed") == lines(tmp_path / "whole")
    assert not (tmp_path / "killed" / "state.pt").exists()


class Stop(Exception):
    pass


@pytest.fixture
def interrupted(few, tmp_path, monkeypatch):
    """A folder with the state of a run that stopped in its second epoch."""
    true = training.train_epoch

    def stop(run, batches, progress, *args):
        if progress.epoch == 2:
            raise Stop
        return true(run, batches, progress, *args)

    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(training, "train_epoch", stop)
        train(TINY, few, tmp_path / "run", model=shallow())
    return tmp_path / "run"


def test_resuming_is_refused_where_it_would_be_wrong(interrupted, few, tmp_path):
    with pytest.raises(FileNotFoundError, match="no unfinished run"):
        train(TINY, few, tmp_path / "nowhere", resume=True)
    with pytest.raises(ValueError, match="model was 'care_s0', now 'cas_vit_xs'"):
        train(replace(TINY, model="cas_vit_xs"), few, interrupted, resume=True)
    with pytest.raises(ValueError, match="lr was 0.004, now 0.1"):
        train(replace(TINY, lr=0.1), few, interrupted, resume=True)
    with pytest.raises(ValueError, match="another model"):
        train(TINY, few, interrupted, resume=True, model=carelite.CASViT(num_classes=10))
    with pytest.raises(ValueError, match="images was '96 . 50 images', now '96 . 50 images abc'"):
        train(TINY, replace(few, listing="abc"), interrupted, resume=True, model=shallow())
    with pytest.raises(FileExistsError, match="unfinished run"):
        train(TINY, few, interrupted)
    state = training.read_state(interrupted / "state.pt") | dict(config=replace(TINY, data="folder:images"))
    training.check_state(state, replace(TINY, data="folder:elsewhere/images"), few, 1)  # the listing is the same
    with pytest.raises(ValueError, match="data was 'folder', now 'digits'"):
        training.check_state(state, TINY, few, 1)
    whole = (interrupted / "state.pt").read_bytes()
    torch.save(dict(config={"epochs": 1}), tmp_path / "other.pt")
    for damaged in (b"", b"junk", whole[: len(whole) // 2], (tmp_path / "other.pt").read_bytes()):
        (interrupted / "state.pt").write_bytes(damaged)
        with pytest.raises(ValueError, match="state.pt is damaged"):
            train(TINY, few, interrupted, resume=True, model=shallow())
    (interrupted / "state.pt").write_bytes(whole)
    train(replace(TINY, workers=0, checkpoint_steps=7), few, interrupted, resume=True, model=shallow())


def test_a_state_that_fails_to_be_written_leaves_the_last_one(interrupted, few, monkeypatch):
    before = (interrupted / "state.pt").read_bytes()

    def half(state, path):
        Path(path).write_bytes(b"half a state")
        raise Stop

    monkeypatch.setattr(training.torch, "save", half)
    with pytest.raises(Stop):
        train(TINY, few, interrupted, resume=True, model=shallow())
    assert (interrupted / "state.pt").read_bytes() == before


# --- several processes ---

TWO_RANKS = """
import sys, torch
from dataclasses import replace
from test_training import FULL, Stop, few_digits, shallow
from carelite import training
from carelite.training import train

splits, folder = few_digits(), sys.argv[1]
config = replace(FULL, batch_size=16, min_size=0, max_size=0, accumulation=2, checkpoint_steps=2)
def run(name, config=config, teacher=None, **kwargs):
    model = shallow()
    train(config, splits, f"{folder}/{name}", model=model, teacher=teacher, **kwargs)
    return model
taught = run("taught", replace(config, epochs=1), shallow())
plain = run("plain")
torch.save([plain.state_dict(), taught.state_dict()], f"{folder}/{torch.distributed.get_rank()}.pt")
true = training.training_step
def stop(run, images, labels, step):
    if step == 4:
        raise Stop
    return true(run, images, labels, step)
training.training_step = stop
try:
    run("resumed")
except Stop:
    training.training_step = true
    torch.distributed.barrier()  # until the state is written
again = run("resumed", resume=True)
for key, value in plain.state_dict().items():
    assert torch.equal(value, again.state_dict()[key]), key
torch.distributed.destroy_process_group()
"""


@pytest.mark.unchecked
def test_two_processes(tmp_path):
    """As torchrun starts them, without torchrun."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = ":".join([str(Path(__file__).parent), str(Path(__file__).parents[1])])
    env = dict(os.environ, PYTHONPATH=path, WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    env |= dict(OMP_NUM_THREADS="1", LOCAL_WORLD_SIZE="2")
    command = [sys.executable, "-c", TWO_RANKS, str(tmp_path)]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    ranks = [subprocess.Popen(command, env=env | dict(RANK=rank, LOCAL_RANK=rank), **pipes) for rank in "01"]
    try:
        outputs = [process.communicate(timeout=200)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0, 0], outputs
    for one, other in zip(*(torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))):
        for key, value in one.items():  # without and with a teacher
            assert torch.equal(value, other[key]), key
    for name, epochs in (("plain", 2), ("taught", 1), ("resumed", 2)):
        assert [line["val_images"] for line in lines(tmp_path / name)] == [50] * epochs  # no multiple of 2 x 256
    assert lines(tmp_path / "plain") == lines(tmp_path / "resumed")
    assert "do not fill a step" not in "".join(outputs)  # 96 = 3 x 2 x 16


@pytest.mark.unchecked
def test_workers_that_are_spawned(few, tmp_path, monkeypatch):
    config = replace(FULL, epochs=1)
    train(config, few, tmp_path / "none", model=shallow())

    def spawning(dataset, batch_size, sampler=None, num_workers=0, **kwargs):  # two for training, none for evaluation
        own = dict(num_workers=num_workers, multiprocessing_context="spawn") if sampler else {}
        kwargs["persistent_workers"] = bool(own)
        return DataLoader(dataset, batch_size, sampler=sampler, **own, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(training, "DataLoader", spawning)
        train(replace(config, workers=2), few, tmp_path / "two", model=shallow())
    assert lines(tmp_path / "two") == lines(tmp_path / "none")


# --- distillation and fine-tuning ---


def test_the_soft_loss():
    logits = torch.randn(4, 10)
    targets = F.one_hot(torch.arange(4), 10).float()
    soft = replace(TINY, distillation="soft", temperature=3.0, alpha=1.0)
    assert distillation_loss((torch.randn(4, 10), logits), targets, logits.clone(), soft) == pytest.approx(0, abs=1e-6)
    teacher = torch.randn(4, 10)
    p, q = (logits / 3).softmax(1), (teacher / 3).softmax(1)
    expected = 9 * (q * (q / p).log()).sum() / 4
    torch.testing.assert_close(distillation_loss((teacher, logits), targets, teacher, soft), expected)


def test_the_hard_loss_is_half_labels_half_teacher():
    pair, teacher = (torch.randn(4, 10), torch.randn(4, 10)), torch.randn(4, 10)
    labels = torch.arange(4)
    loss = distillation_loss(pair, F.one_hot(labels, 10).float(), teacher, TINY)
    expected = (F.cross_entropy(pair[0], labels) + F.cross_entropy(pair[1], teacher.argmax(1))) / 2
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize("kind", ("hard", "soft"))
def test_the_teacher_changes_the_students_gradient_and_gets_none(kind, few):
    config = replace(TINY, distillation=kind)
    images, labels = next(iter(training_batches(few, config)))
    gradients = []
    for seed in (1, 1, 2):
        teacher = shallow(seed=seed).eval()
        teacher.dist_head.fc.weight.data *= 50
        run = create_run(config, create_accelerator(config), shallow().train(), teacher, 3)
        run.optimizer.zero_grad = lambda: None
        training_step(run, images, labels, 1)
        assert all(p.grad is None for p in teacher.parameters())
        gradients.append(torch.cat([p.grad.flatten() for p in run.plain.parameters()]))
    assert torch.equal(gradients[0], gradients[1]) and not torch.equal(gradients[0], gradients[2])


def test_a_teacher_gets_images_normalised_as_it_wants():
    teacher = nn.Flatten()
    teacher.pretrained_cfg = dict(mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6))
    images = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    student = carelite.create_model("cas_vit_xs", num_classes=10)
    inputs = normalise(images, student.pretrained_cfg["mean"], student.pretrained_cfg["std"])
    wanted = normalise(images, **teacher.pretrained_cfg).flatten(1)
    torch.testing.assert_close(teach(teacher, inputs, student), wanted)


def test_teachers(run, few, tmp_path):
    _, folder = run
    teacher = load_teacher(str(folder / "model.safetensors"), few.classes)
    assert not teacher.training and not any(p.requires_grad for p in teacher.parameters())
    import timm

    torch.save(timm.create_model("resnet18", num_classes=10).state_dict(), tmp_path / "resnet.pth")
    assert load_teacher(f"resnet18={tmp_path / 'resnet.pth'}", few.classes).num_classes == 10
    (tmp_path / "junk.pth").write_bytes(b"junk")
    for spec, message in (
        ("resnet_of_mine", "neither a file nor a model"),
        ("cas_vit_xs", "comes without weights"),
        (f"cas_vit_xs={tmp_path / 'resnet.pth'}", "does not fit"),
        ("resnet18=nowhere.pth", "cannot be loaded"),
        (f"resnet18={tmp_path / 'junk.pth'}", "cannot be loaded"),
    ):
        with pytest.raises(ValueError, match=message) as error:
            load_teacher(spec, few.classes)
        assert len(str(error.value).splitlines()) == 1
    ours = load_teacher(f"cas_vit_xs={folder / 'model.safetensors'}", few.classes)
    assert equal(ours, teacher)
    vit = timm.create_model("vit_tiny_patch16_224", num_classes=10)
    for other, message in ((vit, "32 x 32: AssertionError"), (nn.Sequential(nn.Flatten(), nn.Linear(3072, 4)), "1, 4")):
        with pytest.raises(ValueError, match=message):
            train(TINY, few, tmp_path / "none", model=shallow(), teacher=other)
    with pytest.raises(ValueError, match="knows the classes"):
        load_teacher(str(folder / "model.safetensors"), ("a", "b"))
    config = replace(TINY, epochs=1, model="cas_vit_xs", teacher=str(folder / "model.safetensors"))
    student = train(config, few, tmp_path / "student")
    assert isinstance(student.train()(torch.zeros(2, 3, 32, 32)), torch.Tensor)  # no pair afterwards


def test_fine_tuning_replaces_both_heads_and_says_so(run, few, tmp_path, capsys):
    source, folder = run
    parts = (
        StackDataset([image for image, _ in part], [label % 3 for _, label in part]) for part in (few.train, few.val)
    )
    three = ImageSplits(*parts, tuple("abc"))
    config = replace(TINY, epochs=1, model="cas_vit_xs", lr=1e-9, warmup_epochs=0, min_lr=0.0,
                     init=str(folder / "model.safetensors"))  # fmt: skip
    model = train(config, three, tmp_path / "three")
    out = capsys.readouterr().out
    assert f"{len(source.state_dict()) - 4} tensors kept, 4 new" in out and "10 classes, the model 3" in out
    assert model.head.fc.out_features == model.dist_head.fc.out_features == 3
    torch.testing.assert_close(model.stem[0].weight, source.stem[0].weight, atol=1e-6, rtol=0)
    same_count = replace(few, classes=tuple("abcdefghij"))
    _, said = training.start_model(config, same_count.classes)
    assert "4 new" in said and "other classes" in said
    kept, said = training.start_model(config, few.classes)
    assert "0 new" in said and torch.equal(kept.head.fc.weight, source.head.fc.weight)


def test_evaluation_in_numbers():
    logits = torch.tensor([[9.0, 1, 0], [0, 1, 2], [1, 0, 2], [0, 1, 5]])
    result = Evaluation(logits, torch.tensor([0, 1, 1, 2]))
    assert result.accuracy == 0.5 and result.top(2) == 0.75 and result.top(5) == 1
    assert result.confusion.tolist() == [[1, 0, 0], [0, 0, 2], [0, 0, 1]]
    assert result.class_accuracy.tolist() == [1, 0, 1]
    training.plot_confusion(result, ("$", "a$b$", "$^$")).savefig(io.BytesIO(), dpi=20)  # no formulas


def test_two_classes_of_pictures_are_learnt(tmp_path):
    rng = np.random.default_rng(0)
    for name, axis in (("rows", 0), ("columns", 1)):
        (tmp_path / name).mkdir()
        for i in range(60):
            stripes = np.sin(np.arange(40) / rng.uniform(1.5, 3) + rng.uniform(0, 6))
            picture = 127 + 90 * (stripes[:, None] if axis == 0 else stripes[None]) + rng.normal(0, 20, (40, 40))
            Image.fromarray(picture.clip(0, 255).astype(np.uint8)).save(tmp_path / name / f"{i}.png")
    splits = data.load_splits(f"folder:{tmp_path}", 32)
    config = replace(TINY, epochs=4, batch_size=16, crop_scale=0.5, flip=0.5, shift=0.0, rotation=0.0, zoom=0.0)
    train(config, splits, tmp_path / ".run", model=shallow(2))
    assert lines(tmp_path / ".run")[-1]["val_accuracy"] >= 0.95


def test_the_readme_quotes_the_stored_results():
    root = Path(__file__).parents[1]
    report = json.loads((root / "carelite" / "results" / "fashion_mnist.json").read_text())
    readme = (root / "README.md").read_text()
    assert set(report["models"]) == set(carelite.list_models()) and report["command"] in readme
    for name, entry in report["models"].items():
        (row,) = [line for line in readme.splitlines() if line.startswith(f'| `"{name}"`')]
        assert row.endswith(f"| {100 * entry['log'][-1]['val_accuracy']:.1f} % |"), row
        assert len(entry["log"]) == report["recipe"]["epochs"] and entry["log"][-1]["val_images"] == 10_000
