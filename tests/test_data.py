"""Image folders and their dirt, Fashion-MNIST's files, and changes of images that follow from (seed, epoch, index)."""

import gzip
import os
import random
import struct

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, StackDataset

from carelite.data import (
    AugmentedImages,
    EpochSampler,
    ImageFiles,
    fit,
    image_files,
    load_digits_splits,
    load_folder_splits,
    load_image,
    load_splits,
    load_test_images,
    seeded,
    split_sides,
    training_transform,
)


def picture(path, colour, size=(40, 30)):
    """A noisy picture of one colour."""
    noise = np.random.default_rng(len(str(path))).integers(-40, 40, (*size[::-1], 3))
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray((np.array(colour) + noise).clip(0, 255).astype(np.uint8)).save(path)


@pytest.fixture
def folder(tmp_path):
    """PATH/train and PATH/val with two classes, and clutter that is none."""
    for part, count in (("train", 6), ("val", 3)):
        for name, colour in (("blue", (40, 40, 200)), ("red", (200, 40, 40))):
            for i in range(count):
                picture(tmp_path / part / name / f"{i}.jpg", colour)
    for clutter in (".git", "__MACOSX", "@eaDir"):
        picture(tmp_path / "train" / clutter / "0.jpg", (0, 0, 0))
    picture(tmp_path / "train/blue/.thumbnails/0.jpg", (0, 0, 0))
    (tmp_path / "train/blue/._0.jpg").write_bytes(b"a Mac's resource fork")
    (tmp_path / "train/blue/notes.txt").write_text("no picture")
    return tmp_path


def test_a_folder_in_imagenets_layout(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder))
    splits = load_splits("folder:~", 32)
    assert splits.classes == ("blue", "red") and (len(splits.train), len(splits.val)) == (12, 6)
    assert [label for _, label in splits.train] == [0] * 6 + [1] * 6
    image, label = splits.val[5]
    assert label == 1 and image.shape == (3, 32, 32) and image.dtype == torch.uint8
    assert image[0].float().mean() > 150 > 80 > image[2].float().mean()  # red, not blue
    assert splits.train[0][0].size == (40, 30)  # uncut: training cuts
    assert [path.name for path in image_files(folder / "val" / "red")] == ["0.jpg", "1.jpg", "2.jpg"]


def test_a_folder_without_a_validation_split_holds_the_same_files_out_whatever_is_added(folder):
    path, found = folder / "train", []
    for count in (6, 30):
        for i in range(count):
            picture(path / "red" / f"{i}.jpg", (200, 40, 40))
        splits = load_folder_splits(path, 32)
        files = [{file for file, _ in part.samples} for part in (splits.train, splits.val.dataset)]
        assert files[0].isdisjoint(files[1]) and {label for _, label in splits.val} == {0, 1}
        found.append((*files, splits.listing))
    (train, val, listing), (more_train, more_val, other_listing) = found
    assert train < more_train and val <= more_val and len(more_train | more_val) == 36 and listing != other_listing
    assert 3 <= sum("red" in file.parts for file in more_val) <= 9  # about a fifth of 30


def test_the_images_of_an_evaluation(folder, capsys):
    """val of a folder that has one; of other folders all, unless the training held some of these very images out."""
    classes, names = ("blue", "green", "red"), (f"folder:{folder}", f"folder:{folder / 'train'}")
    for data, own, count, what in (
        (names[0], False, 6, "held-out images"),
        (names[0], True, 6, "held-out images"),
        (names[1], False, 12, f"images (all in {folder / 'train'})"),
        (names[1], True, len(load_folder_splits(folder / "train", 32).val), "held-out images"),
        ("digits", False, 360, "held-out images"),
    ):
        images, said = load_test_images(data, 32, tuple("0123456789") if data == "digits" else classes, own=own)
        assert (len(images), said) == (count, what)
    assert {label for _, label in load_test_images(names[1], 32, classes)[0]} == {0, 2}
    for data, other in (("digits", classes), (names[1], ("blue", "green"))):
        with pytest.raises(ValueError, match="'red'"):
            load_test_images(data, 32, other)
    assert len(load_test_images(names[1], 32, ("blue",), skip_faults=True)[0]) == 6


def spoil(folder):
    """Every fault at once; returns what each report must name."""
    (folder / "train/empty").mkdir()
    picture(folder / "train/green/0.jpg", (40, 200, 40))
    picture(folder / "val/yellow/0.jpg", (200, 200, 40))
    (folder / "train/red/text.png").write_text("no picture")
    whole = (folder / "val/blue/0.jpg").read_bytes()
    (folder / "val/blue/cut.jpg").write_bytes(whole[: len(whole) // 2])
    return {
        "'empty'": "no images to train on",
        "'green'": "no held-out images",
        "'yellow'": "unknown in training",
        "text.png": "cannot be read",
        "cut.jpg": "cannot be read",
    }


def test_faults_are_reported_by_name_before_training(folder):
    faults = spoil(folder)
    with pytest.raises(ValueError, match="5 faults(.|\n)*skip_faults") as error:
        load_folder_splits(folder, 32)
    lines = str(error.value).splitlines()
    for name, what in faults.items():
        assert any(name in line and what in line for line in lines), name


def test_faults_are_left_out_on_demand(folder, capsys):
    faults = spoil(folder)
    splits = load_splits(f"folder:{folder}", 32, skip_faults=True)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(faults) and all(any(name in line for line in lines) for name in faults)
    assert splits.classes == ("blue", "green", "red") and (len(splits.train), len(splits.val)) == (13, 6)
    for part in (splits.train, splits.val):
        assert len([label for _, label in part]) == len(part)  # everything left can be read


def test_the_sides_of_a_folder_and_classes_of_their_names(folder):
    expected = load_folder_splits(folder, 32)
    for side in ("train", "val"):
        (folder / side).rename(folder / "between")
        (folder / "between").rename(folder / side.capitalize())
    splits = load_folder_splits(folder, 32)
    assert (splits.classes, len(splits.train), len(splits.val)) == (expected.classes, 12, 6)
    for name in ("train", "val", "bus"):  # a class with pictures of trains
        (
            picture(folder / "vehicles" / name / "0.jpg", (0, 0, 0)),
            picture(folder / "vehicles" / name / "1.jpg", (9, 9, 9)),
        )
    assert load_folder_splits(folder / "vehicles", 32).classes == ("bus", "train", "val")


def test_sides_of_other_names_are_no_classes(tmp_path):
    for side in ("Testing", "Training", ".git"):
        for name in ("cats", "dogs"):
            (tmp_path / side / name).mkdir(parents=True)
    for load in (lambda: load_folder_splits(tmp_path, 32), lambda: load_test_images(f"folder:{tmp_path}", 32, ("a",))):
        with pytest.raises(ValueError, match="Testing, Training, .*Rename them train and val"):
            load()
    (tmp_path / "Training" / "0.jpg").touch()  # now it may be a class
    assert split_sides(tmp_path) == []


def test_links_are_followed_once_and_not_round_and_round(folder, tmp_path):
    blue = folder / "train" / "blue"
    picture(tmp_path / "elsewhere" / "0.jpg", (40, 40, 200))
    for name, target in (("up", folder), ("same", blue), ("more", tmp_path / "elsewhere"), ("again", blue / "more")):
        (blue / name).symlink_to(target, target_is_directory=True)
    assert [str(path.relative_to(blue)) for path in image_files(blue)] == [
        *(f"{i}.jpg" for i in range(6)),
        "again/0.jpg",
    ]


def test_folders_that_are_none(folder, tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load_folder_splits(tmp_path / "nowhere", 32)
    with pytest.raises(ValueError, match="train and val"):
        (folder / "val").rename(folder / "validation")
        load_folder_splits(folder, 32)
    with pytest.raises(ValueError, match="no folders of images"):
        load_folder_splits(folder / "train" / "red", 32)
    with pytest.raises(ValueError, match="digits, fashion_mnist(.|\n)*mnist7"):
        load_splits("mnist7", 32)
    (folder / "train" / os.fsdecode(b"caf\xe9")).mkdir()
    with pytest.raises(ValueError, match="UTF-8: 'caf.udce9'"):
        load_folder_splits(folder / "train", 32)


def test_training_and_prediction_read_a_file_the_same_way(tmp_path):
    rng = np.random.default_rng(0)
    pixels = Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8))
    exif = pixels.getexif()
    exif[0x0112] = 6
    pixels.save(tmp_path / "turned.jpg", exif=exif)
    pixels.convert("CMYK").save(tmp_path / "cmyk.jpg")
    for mode in ("L", "P", "RGBA"):
        pixels.convert(mode).save(tmp_path / f"{mode}.png")
    Image.fromarray(rng.integers(0, 2**16, (32, 32), dtype=np.uint16)).save(tmp_path / "deep.png")
    transform = training_transform(32)  # nothing random
    for path in image_files(tmp_path):
        image, _ = ImageFiles([(path, 0)])[0]
        assert torch.equal(transform(image), load_image(path, 32)), path


def idx(array, path, compress):
    head = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}i", *array.shape)
    with (gzip.open if compress else open)(path, "wb") as file:
        file.write(head + array.tobytes())


@pytest.mark.parametrize("layout", ("torchvision", "Debian"))
def test_fashion_mnist_from_files(layout, tmp_path):
    place = tmp_path / "FashionMNIST" / "raw" if layout == "torchvision" else tmp_path
    place.mkdir(parents=True, exist_ok=True)
    rng, suffix = np.random.default_rng(0), ".gz" if layout == "Debian" else ""
    arrays = {part: rng.integers(0, 256, (n, 28, 28), dtype=np.uint8) for part, n in (("train", 5), ("t10k", 3))}
    for part, images in arrays.items():
        idx(images, place / f"{part}-images-idx3-ubyte{suffix}", bool(suffix))
        idx(np.arange(len(images), dtype=np.uint8), place / f"{part}-labels-idx1-ubyte{suffix}", bool(suffix))
    splits = load_splits(f"fashion_mnist:{tmp_path}", 32)
    assert (len(splits.train), len(splits.val), len(splits.classes)) == (5, 3, 10) and splits.classes[9] == "Ankle boot"
    image, label = splits.val[2]
    assert label == 2 and image.shape == (3, 32, 32)
    assert np.array_equal(image[1, 2:30, 2:30], arrays["t10k"][2]) and not image[:, :2].any()
    assert len(load_splits(f"fashion_mnist:{tmp_path}", 32, train_images=2).train) == 2
    assert load_splits(f"fashion_mnist:{tmp_path}", 64).val[0][0].shape == (3, 64, 64)

    labels = place / f"t10k-labels-idx1-ubyte{suffix}"
    for damage in (labels.read_bytes()[:-1], b"", None):
        labels.write_bytes(damage) if damage is not None else labels.unlink()
        with pytest.raises((ValueError, FileNotFoundError), match="t10k-labels-idx1"):
            load_splits(f"fashion_mnist:{tmp_path}", 32)


def test_seeded_leaves_no_trace():
    def draw():
        return random.random(), np.random.rand(), torch.rand(1).item()

    torch.manual_seed(0), np.random.seed(0), random.seed(0)
    with seeded(1, 2, 3):
        inside = draw()
    outside = draw()
    torch.manual_seed(0), np.random.seed(0), random.seed(0)
    assert draw() == outside
    with seeded(1, 2, 3):
        assert draw() == inside
    with seeded(1, 2, 4):
        assert not set(draw()) & set(inside)


RECIPE = dict(crop_scale=0.08, flip=0.5, auto_augment="rand-m9-mstd0.5-inc1")


def loader(workers, epoch, recipe=RECIPE, seed=0, skip=0, rank=0, processes=1):
    images = load_digits_splits(32).train
    images = StackDataset(images.datasets[0][:40], images.datasets[1][:40])
    changed = AugmentedImages(images, training_transform(32, **recipe), seed)
    sampler = EpochSampler(changed, processes, rank, seed=seed, drop_last=True)
    sampler.set_epoch(epoch, skip)
    return DataLoader(changed, 4, sampler=sampler, num_workers=workers)


def batch_of(*args, **kwargs):
    images, labels = zip(*loader(*args, **kwargs))
    return torch.cat(images), torch.cat(labels)


@pytest.mark.parametrize("recipe", (RECIPE, dict(shift=0.1, rotation=10.0), dict(color_jitter=0.4)), ids=str)
def test_changes_repeat_with_the_seed_and_differ_between_epochs(recipe):
    first, again, later = (batch_of(0, epoch, recipe) for epoch in (1, 1, 2))
    other = batch_of(0, 1, recipe, seed=1)
    assert torch.equal(first[0], again[0]) and first[0].shape == (40, 3, 32, 32) and first[0].dtype == torch.uint8
    assert sorted(first[1].tolist()) == sorted(later[1].tolist())  # the same images
    for images, _ in (later, other):
        assert not torch.equal(first[0], images)
    changed = AugmentedImages(StackDataset(torch.zeros(1, 3, 8, 8), [0]), lambda image: torch.rand(1), 0)
    assert len({changed[epoch, 0][0].item() for epoch in range(5)}) == 5


def test_workers_change_nothing_and_share_no_random_numbers():
    alone, shared = batch_of(0, 1), batch_of(2, 1)
    assert torch.equal(alone[0], shared[0]) and torch.equal(alone[1], shared[1])
    same = StackDataset(
        torch.arange(3 * 32 * 32).remainder(256).byte().reshape(1, 3, 32, 32).repeat(8, 1, 1, 1), [0] * 8
    )
    changed = AugmentedImages(same, training_transform(32, **RECIPE), 0)
    sampler = EpochSampler(changed, 1, 0)
    images = torch.cat([images for images, _ in DataLoader(changed, 1, sampler=sampler, num_workers=2)])
    assert len({image.numpy().tobytes() for image in images}) == 8  # eight copies of a picture, by two workers


def test_an_epoch_goes_on_where_it_stopped_and_processes_share_it():
    whole, rest = batch_of(0, 3), batch_of(0, 3, skip=12)
    assert torch.equal(whole[0][12:], rest[0])
    shares = [list(loader(0, 3, rank=rank, processes=2).sampler) for rank in (0, 1)]
    assert sorted(index for share in shares for _, index in share) == list(range(40))


def test_fit():
    image = torch.randint(0, 256, (3, 32, 32), dtype=torch.uint8)
    assert fit(image, 32) is image or torch.equal(fit(image, 32), image)
    assert fit(Image.new("RGB", (50, 20)), 32).shape == (3, 32, 32)


@pytest.mark.parametrize("policy, times", (("rand-m10-n6-inc1", 40), ("v0", 200)))
def test_policies_whose_posterizing_would_keep_no_bit_never_fail(policy, times):
    transform, image = training_transform(32, auto_augment=policy), Image.new("RGB", (40, 32), "orange")
    with seeded(0):
        assert all(transform(image).shape == (3, 32, 32) for _ in range(times))


def test_unknown_policies_are_refused():
    with pytest.raises(ValueError, match="auto_augment='rand-q9'"):
        training_transform(32, auto_augment="rand-q9")
