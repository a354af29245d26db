"""Detection, instance and semantic segmentation: heads, data, metrics, training and export."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torchvision.transforms import v2

import carelite
from carelite import dense_prediction as dense
from carelite.dense_prediction import (
    HEADS,
    IGNORE,
    ADE20KDataset,
    CocoDataset,
    DenseSchedule,
    ShapesDataset,
    StageMaps,
    for_training,
    predict_dense,
)
from carelite.training import save_checkpoint
from helpers import MODELS, fill_in_place

TINY = {
    "mask_rcnn": dict(width=32, anchor_sizes=(8, 16, 24, 32, 48), min_size=64, max_size=128, box_samples=32),
    "retinanet": dict(width=32, anchor_sizes=(8, 16, 24, 32, 48), min_size=64, max_size=128),
    "semantic_fpn": dict(width=32),
}
WITHOUT_GRADIENT = {}  # head: names of parameters that a training step does not reach; there are none
each_head = pytest.mark.parametrize("head", HEADS)


def build(head: str, name: str = "cas_vit_xs", **kwargs) -> nn.Module:
    torch.manual_seed(0)
    return HEADS[head](name, 4, **TINY[head] | kwargs)


@pytest.fixture(scope="module")
def models():
    """One small model per head, in eval mode; not to be changed."""
    return {head: build(head).eval() for head in HEADS}


def batch(*sizes, max_objects: int = 5) -> tuple[list, list]:
    """One training element per image size."""
    elements = [ShapesDataset(1, size, seed=i, max_objects=max_objects)[0] for i, size in enumerate(sizes)]
    images, targets = zip(*(for_training(*element) for element in elements))
    return list(images), list(targets)


# --- heads ---


@pytest.mark.parametrize("name", MODELS)
def test_every_backbone_learns_under_every_head(name):
    images, targets = batch((64, 64), (64, 64))
    for head in HEADS:
        model = build(head, name, norms=name == "cas_vit_s")
        losses = model.train()(images, targets)
        sum(losses.values()).backward()
        faults = [k for k, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
        assert faults == WITHOUT_GRADIENT.get(head, [])
        assert any(p.grad.any() for k, p in model.named_parameters() if "backbone" in k and "stem" in k)


@each_head
def test_images_of_different_sizes_and_without_objects(head, models):
    sizes = (64, 64), (75, 101), (110, 70)
    model = build(head).train()
    for objects in (5, 0):
        images, targets = batch(*sizes, max_objects=objects)
        assert objects or not any(len(t["labels"]) for t in targets)
        losses = model(images, targets)
        assert all(loss.isfinite() for loss in losses.values())
        sum(losses.values()).backward()
    for size, image in zip(sizes, images):
        found = predict_dense(models[head], (image * 255).byte())
        if head == "semantic_fpn":
            assert found["semantic"].shape == size
            continue
        boxes = found["boxes"]
        assert (boxes >= 0).all() and (boxes[:, 2:] <= torch.tensor(size[::-1])).all() and (found["labels"] > 0).all()
        if head == "mask_rcnn":
            assert found["masks"].shape == (len(boxes), *size) and len(boxes)


def test_what_is_said_about_an_image_does_not_depend_on_others(models):
    images, _ = batch((64, 64), (75, 101))
    together = models["semantic_fpn"](images)
    for image, found in zip(images, together):
        torch.testing.assert_close(models["semantic_fpn"]([image])[0], found)
    assert predict_dense(models["semantic_fpn"], torch.zeros(3, 1, 1, dtype=torch.uint8))["semantic"].shape == (1, 1)


def test_half_precision_answers_in_float32():
    found = predict_dense(build("retinanet").bfloat16(), torch.zeros(3, 64, 64, dtype=torch.uint8))
    assert found["boxes"].dtype == found["scores"].dtype == torch.float32


@each_head
def test_images_are_normalised_once(head, models):
    model, seen = models[head], []
    backbone = (model.maps if head == "semantic_fpn" else model.backbone.maps).backbone
    hook = backbone.register_forward_pre_hook(lambda module, x: seen.append(x[0]))
    handle = backbone.stem.register_forward_pre_hook(lambda module, x: seen.append(x[0]))
    image = torch.rand(3, 64, 64)
    with torch.no_grad():
        model([image])
    hook.remove(), handle.remove()
    mean, std = (torch.tensor(backbone.pretrained_cfg[key]).view(3, 1, 1) for key in ("mean", "std"))
    torch.testing.assert_close(seen[0][0].contiguous(), (image - mean) / std, atol=1e-5, rtol=0)


def test_semantic_loss_looks_at_labelled_pixels_only():
    model = build("semantic_fpn").train()
    for module in model.modules():
        if isinstance(module, nn.Dropout2d):
            module.p = 0.0
    images, targets = batch((64, 90), (64, 96))  # the first is padded
    targets[0]["semantic"][:, 40:50] = IGNORE
    (loss,) = model(images, targets).values()
    inputs = dense.padded([(image - model.mean) / model.std for image in images])
    scores = model.logits(inputs).log_softmax(1)
    right = torch.stack([scores[i, :, y, x][label] for i, t in enumerate(targets) for y, x, label in labelled(t)])
    torch.testing.assert_close(loss, -right.mean())
    targets[0]["semantic"].fill_(IGNORE), targets[1]["semantic"].fill_(IGNORE)
    assert model(images, targets)["cross_entropy"] == 0


def labelled(target: dict):
    """(y, x, label) of the pixels of a target that are not ignored."""
    return [(*at, target["semantic"][tuple(at)]) for at in (target["semantic"] != IGNORE).nonzero().tolist()]


def test_stage_norms_and_levels():
    x = torch.randn(2, 3, 64, 96)
    maps = StageMaps("cas_vit_xs", norms=True, first=1).train()(x)
    assert [m.shape[1:] for m in maps] == [(56, 8, 12), (112, 4, 6), (220, 2, 3)]
    for m in maps:
        torch.testing.assert_close(m.mean((0, 2, 3)), torch.zeros(m.shape[1]), atol=1e-4, rtol=0)
    model = build("retinanet")
    for part in (model.head.classification_head, model.head.regression_head):  # of the usual size, behind a norm
        assert all(conv[0].weight.std().item() == pytest.approx((2 / (9 * 32)) ** 0.5, rel=0.05) for conv in part.conv)
    maps = model.backbone(x)
    assert [tuple(m.shape[-2:]) for m in maps.values()] == [(8, 12), (4, 6), (2, 3), (1, 2), (1, 1)]
    maps = build("mask_rcnn").backbone(x)
    assert [tuple(m.shape[-2:]) for m in maps.values()] == [(16, 24), (8, 12), (4, 6), (2, 3), (1, 2)]


def test_a_classifier_checkpoint_is_loaded_or_refused(tmp_path):
    classifier = fill_in_place(carelite.create_model("cas_vit_xs", num_classes=5))
    path = tmp_path / "classifier.safetensors"
    save_checkpoint(classifier, path, name="cas_vit_xs", classes=list("abcde"), image_size=64)
    for head in HEADS:
        model = build(head, checkpoint=path)
        loaded = (model.maps if head == "semantic_fpn" else model.backbone.maps).backbone.state_dict()
        assert len(loaded) > 200 and any(key.startswith("stages.3") for key in loaded)
        torch.testing.assert_close(loaded, {key: classifier.state_dict()[key] for key in loaded})
    with pytest.raises(ValueError, match="missing stages.0.blocks.2"):
        build("semantic_fpn", "cas_vit_s", checkpoint=path)


def test_heads_refuse():
    with pytest.raises(ValueError, match="unknown model"):
        build("retinanet", "resnet50")
    with pytest.raises(ValueError, match="5 levels"):
        build("mask_rcnn", anchor_sizes=(8, 16))
    with pytest.raises(ValueError, match="targets"):
        build("semantic_fpn").train()(batch((64, 64))[0])
    maps = StageMaps("cas_vit_xs")
    with pytest.raises(ValueError, match="255"):
        dense.SemanticFPN(maps, 256)
    with pytest.raises(ValueError, match="multiple of 64"):
        dense.SemanticFPN(maps, 4, 100)
    with pytest.raises(ValueError, match="multiple of 8"):
        build("retinanet", width=36)
    for sizes in (dict(min_size=200), dict(max_size=63)):
        with pytest.raises(ValueError, match="min_size="):
            build("mask_rcnn", **sizes)
    with pytest.raises(ValueError, match="2 or more"):
        dense.detector_options(maps, 1, 64, 128)


@each_head
def test_classes_of_model_and_data_must_agree(head, models, monkeypatch):
    evaluate = dense.evaluate_segmentation if head == "semantic_fpn" else dense.evaluate_detection
    train = partial(dense.train_dense, schedule=dense.SCHEDULES["shapes"])
    for use in (evaluate, train):
        with pytest.raises(ValueError, match="no images"):
            use(models[head], ShapesDataset(0))
    monkeypatch.setattr(ShapesDataset, "classes", ("background", "disc", "square"))
    for use in (evaluate, train):
        with pytest.raises(ValueError, match="the model has 4 classes, the data set 3"):
            use(models[head], ShapesDataset(2, 64))


# --- data ---


def test_shapes_are_exact():
    dataset = ShapesDataset(30, (96, 128))
    assert torch.equal(dataset[3][0], ShapesDataset(30, (96, 128))[3][0])
    assert not torch.equal(dataset[3][0], ShapesDataset(30, (96, 128), seed=1)[3][0])
    empty = 0
    for image, target in dataset:
        assert image.dtype == torch.uint8 and image.shape == (3, 96, 128)
        assert target["masks"].sum(0).max() <= 1  # an object hides what lies under it
        covered = torch.zeros(96, 128, dtype=torch.int64)
        for box, mask, label, area in zip(*(target[k] for k in ("boxes", "masks", "labels", "area"))):
            x1, y1, x2, y2 = box.int().tolist()
            assert mask[y1:y2, x1:x2].sum() == mask.sum() == area > 0
            assert mask[y1].any() and mask[y2 - 1].any() and mask[:, x1].any() and mask[:, x2 - 1].any()
            covered += mask * label
        assert torch.equal(covered, target["semantic"].as_subclass(torch.Tensor))
        empty += not len(target["labels"])
    assert 0 < empty < 10
    area = dense.draw_shape("disc", (96, 96), (48.0, 48.0), 40.0, 0.0).sum()
    assert area == pytest.approx(np.pi * 40**2, rel=0.01)
    area = dense.draw_shape("square", (96, 96), (48.0, 48.0), 40.0, 0.3).sum()
    assert area == pytest.approx(2 * 40**2, rel=0.01)
    area = dense.draw_shape("triangle", (96, 96), (48.0, 48.0), 40.0, 0.3).sum()
    assert area == pytest.approx(0.75 * 3**0.5 * 40**2, rel=0.01)


def square(x: float, y: float, side: float) -> list[float]:
    return [x, y, x + side, y, x + side, y + side, x, y + side]


@pytest.fixture
def coco(tmp_path):
    """A COCO file with what real ones contain, its images, and a function that writes it changed."""
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees
    picture = Image.fromarray(np.arange(60 * 80, dtype=np.uint8).reshape(60, 80))
    for i in (1, 2):
        picture.save(tmp_path / f"{i}.png")
    for i in (3, 4):
        picture.save(tmp_path / f"{i}.jpg", exif=exif)
    images = [dict(id=10 * i, file_name=f"{i}.png", width=80, height=60) for i in (1, 2)]
    images += [dict(id=30, file_name="3.jpg", width=60, height=80), dict(id=40, file_name="4.jpg", width=80, height=60)]
    whole = dict(size=[60, 80], counts=[0, 80 * 60])
    rows = [
        (10, 7, [10, 20, 8, 8], [square(10, 20, 8)], 0),
        (10, 90, [0, 0, 80, 60], whole, 1),  # a crowd
        (10, 7, [5, 5, 10, 10], [[5, 5, 15, 15]], 0),  # two points
        (10, 7, [5, 5, 10, 10], [], 0),
        (10, 90, [5, 5, 0, 10], [square(5, 5, 1)], 0),  # no area
        (10, 90, [90, 5, 10, 10], [square(90, 5, 10)], 0),  # beside the image
        (30, 90, [50, 70, 20, 20], [square(50, 70, 20), [1, 2]], 0),  # reaches out of the image
        (40, 7, [70, 50, 10, 10], [square(70, 50, 10)], 0),
        (99, 7, [70, 50, 10, 10], [square(70, 50, 10)], 0),  # of an image that is not listed
    ]
    keys = "image_id", "category_id", "bbox", "segmentation", "iscrowd"
    annotations = [dict(zip(keys, row), id=i, area=row[2][2] * row[2][3]) for i, row in enumerate(rows, 1)]
    categories = [dict(id=90, name="toothbrush"), dict(id=7, name="train")]
    content = dict(images=images, annotations=annotations, categories=categories)

    def write(change=lambda content: None):
        changed = json.loads(json.dumps(content))
        change(changed)
        (tmp_path / "instances.json").write_text(json.dumps(changed))
        return tmp_path / "instances.json", tmp_path

    return write


def test_coco_file_with_everything_real_ones_have(coco):
    dataset = CocoDataset(*coco())
    assert dataset.classes == ("background", "train", "toothbrush") and dataset.category_ids == (7, 90)
    expected = {"crowd": 1, "without polygon": 2, "without area": 2, "without objects": 1, "turned": 2}
    assert dict(dataset.counts) == expected | {"without image": 1} and len(dataset) == 4
    _, first = dataset[0]
    assert first["labels"].tolist() == [1, 2] and first["iscrowd"].tolist() == [0, 1] and first["image_id"] == 10
    assert first["masks"][0].sum() == 64 and first["masks"][0, 20:28, 10:18].all() and first["masks"][1].all()
    _, training = for_training(*dataset[0])
    assert training["labels"].tolist() == [1] and training["masks"].shape == (1, 60, 80)
    image, empty = dataset[1]
    assert empty["boxes"].shape == (0, 4) and empty["masks"].shape == (0, 60, 80) and image.shape == (3, 60, 80)
    turned, target = dataset[2]
    assert turned.shape == (3, 80, 60) and target["boxes"].tolist() == [[50, 70, 60, 80]]
    assert target["masks"][0].sum() == 100
    stored, _ = dataset[3]
    assert stored.shape == (3, 60, 80)
    assert (turned.float() - stored.rot90(-1, (1, 2)).float()).abs().max() == 0


def test_an_image_that_stands_on_its_head_is_turned(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 3
    Image.fromarray(np.arange(60 * 80, dtype=np.uint8).reshape(60, 80)).save(tmp_path / "a.jpg", exif=exif)
    stored = np.asarray(Image.open(tmp_path / "a.jpg").convert("RGB"))
    assert (np.asarray(dense.open_as_annotated(tmp_path / "a.jpg", (60, 80))) == stored[::-1, ::-1]).all()


def test_coco_boxes_alone_need_no_polygons(coco):
    dataset = CocoDataset(*coco(lambda c: c["annotations"][0].update(segmentation="none")), masks=False)
    assert dataset.counts["without polygon"] == 0 and "masks" not in dataset[0][1]
    assert len(dataset[0][1]["labels"]) == 4


def test_coco_compressed_masks_and_what_may_be_missing(coco):
    mask = torch.rand(1, 60, 80, generator=torch.Generator().manual_seed(0)) < 0.5
    mask[:, :, 40:] = True
    (code,) = dense.run_lengths(mask)
    _, target = CocoDataset(
        *coco(lambda c: c["annotations"][1].update(segmentation=code, iscrowd=None, area=None, bbox=[0, 0, 80, 50]))
    )[0]
    assert torch.equal(target["masks"][1].bool(), mask[0])
    assert target["iscrowd"].tolist() == [0, 0] and target["area"].tolist() == [64, 4000]


@pytest.mark.parametrize(
    "change, message",
    [
        *[
            (
                lambda c, counts=counts: c["annotations"][1]["segmentation"].update(counts=counts),
                "annotation 2 .*counts",
            )
            for counts in ([100, 50], [-1, 4801], [0, 4801], [0.5, 4799.5], ["0", 4800], [], "", "0", "PP")
        ],
        (lambda c: c["annotations"][0].update(iscrowd="1"), "annotation 1 .*iscrowd"),
        (lambda c: c["annotations"][0].update(area="900"), "annotation 1 .*area '900'"),
        (lambda c: c["annotations"][0].update(bbox=[1, 2, 3, float("nan")]), "annotation 1 .*finite"),
        (lambda c: c["annotations"][0].update(segmentation=[[1, 2, 3, 4, 5, float("nan")]]), "annotation 1 .*finite"),
        (lambda c: c["images"][1].update(width=60, height=80), "2.png does not have the 80 x 60 pixels"),
        (lambda c: c["annotations"][0].update(category_id=3), "instances.json: annotation 1 .*category 3"),
        (lambda c: c["annotations"][0].pop("bbox"), "instances.json: annotation 1 .*bbox"),
        (lambda c: c["annotations"][0].update(bbox=[1, 2, 3]), "annotation 1 "),
        (lambda c: c["annotations"][0].update(bbox=["1", 2, 3, 4]), "annotation 1 "),
        (lambda c: c["annotations"][0].update(segmentation=square(10, 20, 8)), "annotation 1 "),  # not in a list
        (lambda c: c["annotations"][0].update(segmentation=[[1, 2, 3, 4, 5, 6, 7]]), "annotation 1 "),
        (lambda c: c["annotations"][1]["segmentation"].update(size=[60, 81]), r"annotation 2 .*\[60, 81\]"),
        (lambda c: c["annotations"][0].pop("image_id"), "not in COCO's format.*image_id"),
        (lambda c: c["images"][0].pop("height"), "image 10 .*height"),
        (lambda c: c["images"][1].update(id=10), "an id occurs twice"),
        (lambda c: c["categories"][0].pop("name"), "instances.json .*name"),
        (lambda c: c["images"][1].update(width=81), "2.png does not have the 60 x 81 pixels"),
        (lambda c: c["images"][0].update(file_name="none.png"), "none.png cannot be read"),
        (lambda c: c.pop("categories"), "not in COCO's format"),
    ],
)
def test_coco_faults_name_the_file(coco, change, message):
    with pytest.raises(ValueError, match=message):
        CocoDataset(*coco(change))
    with pytest.raises(FileNotFoundError, match="no annotation file"):
        CocoDataset("nowhere.json", "images")


@pytest.fixture
def ade(tmp_path):
    for part in ("images", "annotations"):
        (tmp_path / part / "validation").mkdir(parents=True)
    labels = np.zeros((40, 50), np.uint8)
    labels[:, 10:20], labels[:, 20:] = 1, 150
    for name in ("a", "b"):
        Image.fromarray(np.zeros((40, 50, 3), np.uint8)).save(tmp_path / f"images/validation/{name}.jpg")
        Image.fromarray(labels).save(tmp_path / f"annotations/validation/{name}.png")
    return tmp_path


def test_ade20k_folders(ade):
    dataset = ADE20KDataset(ade, "validation")
    semantic = dataset[0][1]["semantic"]
    assert semantic[0, [0, 10, 20]].tolist() == [IGNORE, 0, 149] and len(dataset.classes) == 150
    Image.fromarray(np.full((40, 50), 151, np.uint8)).save(ade / "annotations/validation/b.png")
    with pytest.raises(ValueError, match="b.png .* 151"):
        dataset[1]
    Image.fromarray(np.ones((40, 51), np.uint8)).save(ade / "annotations/validation/b.png")
    with pytest.raises(ValueError, match="b.jpg has 40 x 50 pixels, its annotation 40 x 51"):
        dataset[1]
    Image.fromarray(np.ones((40, 50, 3), np.uint8)).save(ade / "annotations/validation/b.png")
    with pytest.raises(ValueError, match="b.png .* mode RGB"):
        dataset[1]
    (ade / "annotations/validation/b.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match="b.png"):
        dataset[1]
    (ade / "images/validation/._c.jpg").write_bytes(b"left by a file manager")
    assert len(ADE20KDataset(ade, "validation")) == 2
    with pytest.raises(ValueError, match="255"):
        ADE20KDataset(ade, "validation", num_classes=256)
    (ade / "annotations/validation/b.png").unlink()
    with pytest.raises(FileNotFoundError, match="b.png"):
        ADE20KDataset(ade, "validation")
    with pytest.raises(FileNotFoundError, match="training"):
        ADE20KDataset(ade)


def test_targets_of_other_types_become_what_models_take():
    image, target = ShapesDataset(1, 64, seed=2)[0]
    wanted = for_training(image, target)[1]
    del target["iscrowd"], wanted["iscrowd"]
    for key, dtype in dict(boxes=torch.float64, labels=torch.int32, semantic=torch.uint8).items():
        target[key] = target[key].to(dtype)
    torch.testing.assert_close(for_training(image, target)[1], wanted, atol=0, rtol=0)


def test_resizing_invents_no_label(ade):
    resize = v2.Compose([v2.Resize((64, 64)), v2.RandomHorizontalFlip(1.0)])
    image, target = ADE20KDataset(ade, "validation", transform=resize)[0]
    assert image.shape == (3, 64, 64) and set(target["semantic"].unique().tolist()) == {IGNORE, 0, 149}
    plain = ShapesDataset(1, (64, 128), seed=2)[0][1]
    _, target = ShapesDataset(1, (64, 128), seed=2, transform=v2.Compose([v2.Resize((96, 96)), resize.transforms[1]]))[
        0
    ]
    assert target["masks"].shape[1:] == (96, 96) and set(target["masks"].unique().tolist()) <= {0, 1}
    x1, y1, x2, y2 = (plain["boxes"] * torch.tensor([0.75, 1.5, 0.75, 1.5])).T
    torch.testing.assert_close(target["boxes"].as_subclass(torch.Tensor), torch.stack([96 - x2, y1, 96 - x1, y2], 1))


# --- metrics ---


def test_iou_leaves_absent_classes_out():
    confusion = torch.tensor([[6, 2, 0, 0], [1, 3, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]])
    found = dense.intersection_over_union(confusion)
    torch.testing.assert_close(found[:2], torch.tensor([6 / 9, 3 / 6], dtype=torch.float64))
    assert found[2:].isnan().all()


def test_segmentation_figures_equal_loops_over_pixels(models):
    dataset, model = ShapesDataset(2, 64, seed=5), models["semantic_fpn"]

    class Ignoring(ShapesDataset):
        def __getitem__(self, index):
            image, target = super().__getitem__(index)
            target["semantic"][:10] = IGNORE
            return image, target

    figures, confusion = dense.evaluate_segmentation(model, Ignoring(2, 64, seed=5))
    counts = torch.zeros(4, 4, dtype=torch.int64)
    for image, target in dataset:
        called = predict_dense(model, image)["semantic"]
        for true, said in zip(target["semantic"][10:].flatten().tolist(), called[10:].flatten().tolist()):
            counts[true, said] += 1
    assert torch.equal(confusion, counts)
    ious = []
    for k in range(4):
        union = int(counts[k].sum() + counts[:, k].sum() - counts[k, k])
        ious += [int(counts[k, k]) / union] if union else []
    assert figures["miou"] == pytest.approx(sum(ious) / len(ious))


def shaky(dataset):
    """Predictions near the truth: boxes and masks moved, some labels wrong, some objects twice, some missed."""
    random = torch.Generator().manual_seed(0)
    answers = {}
    for image, target in dataset:
        n = len(target["labels"])
        keep = (torch.rand(n, generator=random) < 0.8).nonzero()[:, 0].repeat(2)
        move = torch.randint(-3, 4, (len(keep), 2), generator=random)
        masks = [target["masks"][k].roll(m.tolist(), (1, 0)).bool() for k, m in zip(keep, move)]
        labels = target["labels"][keep]
        wrong = torch.rand(len(keep), generator=random) < 0.2
        answers[image.numpy().tobytes()] = dict(
            boxes=target["boxes"].as_subclass(torch.Tensor)[keep] + move.repeat(1, 2),
            labels=torch.where(wrong, labels % 3 + 1, labels),
            scores=torch.rand(len(keep), generator=random),
            masks=torch.stack(masks).as_subclass(torch.Tensor) if masks else torch.zeros(0, 64, 96, dtype=torch.bool),
        )
    return answers


class Crowded(ShapesDataset):
    """Shapes of which the first in every image is a crowd; categories with COCO-like ids."""

    category_ids = (3, 17, 90)

    def __getitem__(self, index):
        image, target = super().__getitem__(index)
        target["iscrowd"][:1] = 1
        return image, target


@pytest.mark.parametrize("head", ["mask_rcnn", "retinanet"])
def test_precision_is_that_of_pycocotools(head, models, monkeypatch, tmp_path):
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    dataset = Crowded(12, (64, 96), seed=3)
    answers = shaky(dataset)
    parts = ("boxes", "labels", "scores") + ("masks",) * (head == "mask_rcnn")
    answer = lambda model, image: {k: answers[image.numpy().tobytes()][k] for k in parts}  # noqa: E731
    monkeypatch.setattr(dense, "predict_dense", answer)
    figures, rows = dense.evaluate_detection(models[head], dataset)
    assert set(row["category_id"] for row in rows) == {3, 17, 90}
    (tmp_path / "truth.json").write_text(json.dumps(dense.coco_ground_truth(dataset)))
    (tmp_path / "results.json").write_text(json.dumps(rows))
    truth = COCO(tmp_path / "truth.json")
    for kind, name in {"bbox": "box", "segm": "mask"}.items():
        if head == "retinanet" and kind == "segm":
            continue
        own = COCOeval(truth, truth.loadRes(str(tmp_path / "results.json")), kind)
        own.evaluate(), own.accumulate(), own.summarize()
        assert 0.1 < own.stats[0] < 0.9
        for key, wanted in zip(("map", "map_50", "map_75"), own.stats):
            assert figures[f"{name}_{key}"] == pytest.approx(wanted, abs=1e-6)


# --- training ---


def test_schedules_are_the_papers():
    def rates(schedule):
        optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=schedule.lr)
        scheduler = dense.create_dense_schedule(optimizer, schedule)
        scheduler.step_update(0)

        def at(step):
            scheduler.step_update(step)
            return optimizer.param_groups[0]["lr"]

        return at

    coco, ade = dense.SCHEDULES["coco_1x"], dense.SCHEDULES["ade20k_40k"]
    at = rates(coco)
    assert [at(s) for s in (500, 8 * 7330 - 2, 8 * 7330, 11 * 7330)] == pytest.approx([2e-4, 2e-4, 2e-5, 2e-6])
    assert at(250) == pytest.approx(1e-4, rel=0.01)
    at = rates(ade)
    for step in (1, 10_000, 39_000):
        assert at(step) == pytest.approx(2e-4 * (1 - step / 40_000) ** 0.9)
    for wrong in (dict(decay="linear"), dict(steps=0), dict(batch_size=0), dict(warmup_steps=-1), dict(steps=9)):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            replace(coco, **wrong)


def test_training_learns_and_reports():
    model, lines = build("semantic_fpn"), []
    schedule = DenseSchedule(20, 4, 2e-3, 0.05, 5, "cosine")
    result = dense.train_dense(model, ShapesDataset(16, 64), schedule, log=lines.append)
    assert lines == result and [line["step"] for line in lines] == [10, 20] and not model.training
    assert lines[1]["cross_entropy"] < 0.8 * lines[0]["cross_entropy"]


def test_an_interrupted_training_goes_on_exactly(tmp_path):
    schedule, state = DenseSchedule(11, 2, 1e-3, 0.05, 1, "poly"), tmp_path / "new" / "run.state"

    def stop(line):
        if line["step"] == 11:
            raise KeyboardInterrupt

    whole, stopped = build("semantic_fpn"), build("semantic_fpn")  # with dropout
    lines = dense.train_dense(whole, ShapesDataset(8, 64), schedule, log=lambda line: None)
    with pytest.raises(KeyboardInterrupt):
        dense.train_dense(stopped, ShapesDataset(8, 64), schedule, state=state, log=stop)
    resumed, log = build("semantic_fpn"), []
    found = dense.train_dense(resumed, ShapesDataset(8, 64), schedule, state=state, log=log.append)
    assert [line["step"] for line in log] == [11]
    assert [line | {"seconds": 0} for line in found] == [line | {"seconds": 0} for line in lines]
    torch.testing.assert_close(resumed.state_dict(), whole.state_dict(), atol=0, rtol=0)
    for other in (dict(schedule=replace(schedule, steps=30)), dict(schedule=schedule, seed=1)):
        with pytest.raises(ValueError, match="another training"):
            dense.train_dense(resumed, ShapesDataset(8, 64), state=state, **other)
    resumed.extra, content = nn.Identity(), state.read_bytes()
    resumed.extra.register_buffer("more", torch.zeros(1))  # another model
    for damaged in (content, content[:-1000], b""):
        state.write_bytes(damaged)
        with pytest.raises(ValueError, match="run.state is damaged, or of another model"):
            dense.train_dense(resumed, ShapesDataset(8, 64), schedule, state=state)
    assert list(state.parent.iterdir()) == [state]


def test_what_a_transform_draws_follows_from_seed_and_position():
    dataset, schedule = ShapesDataset(8, 64, transform=v2.ColorJitter(0.9)), DenseSchedule(3, 2, 1e-3, 0.05, 0, "poly")
    whole = list(dense.dense_batches(dataset, schedule))
    torch.manual_seed(7)
    for workers in (0, 1):
        rest = list(dense.dense_batches(dataset, schedule, workers=workers, done=1))
        torch.testing.assert_close(rest, whole[1:], atol=0, rtol=0)


def test_a_loss_that_is_not_finite_stops_the_training():
    model = build("semantic_fpn")
    model.head.bias.data[0] = torch.nan
    before = model.head.weight.clone()
    with pytest.raises(FloatingPointError, match="step 1"):
        dense.train_dense(model, ShapesDataset(8, 64), DenseSchedule(2, 2, 1e-3, 0.0, 0, "cosine"))
    assert torch.equal(before, model.head.weight)


def test_a_run_is_stored_whole_or_not_at_all(tmp_path, monkeypatch):
    monkeypatch.setitem(dense.SMALL, "semantic_fpn", TINY["semantic_fpn"])
    arguments = dict(held_out=3, shown=2)
    path = dense.run_shapes("semantic_fpn", "cas_vit_xs", 1, tmp_path, **arguments)
    stored = json.loads(path.read_text())
    assert len(stored["predictions"]) == 2 and len(stored["predictions"][0]) == 4 and stored["log"][-1]["step"] == 1
    assert list(tmp_path.iterdir()) == [path]
    monkeypatch.setattr(dense.json, "dumps", lambda _: 1 / 0)
    before = path.read_bytes()
    with pytest.raises(ZeroDivisionError):
        dense.run_shapes("semantic_fpn", "cas_vit_xs", 1, tmp_path, **arguments)
    assert path.read_bytes() == before
    assert set(tmp_path.iterdir()) == {path, path.with_suffix(".state")}
    with pytest.raises(ValueError, match="unknown"):
        dense.run_shapes("yolo", "care_s0", 2, tmp_path)


def test_import_without_the_extra(project_python):
    code = (
        "import sys\n"
        "for name in ('pycocotools', 'torchmetrics', 'segmentation_models_pytorch'): sys.modules[name] = None\n"
        "from carelite.dense_prediction import retinanet, semantic_fpn\n"
        "retinanet('care_s0', 4, width=32)\n"
        "try: semantic_fpn('care_s0', 4)\n"
        "except ImportError as error: print(error)\n"
    )
    assert 'pip install "carelite[dense]"' in project_python(code)


# --- export ---


@pytest.fixture(scope="module")
def shallow_fpn():
    """A Semantic FPN of each family on one block per stage, filled by the rule, with norms on its maps."""

    def make(name):
        care = name.startswith("care")
        cls, configs = (carelite.CARE, carelite.CARE_CONFIGS) if care else (carelite.CASViT, carelite.CAS_VIT_CONFIGS)
        backbone = cls(replace(configs[name], depths=(1, 1, 1, 1)), num_classes=0)
        backbone.pretrained_cfg = carelite.create_model(name).pretrained_cfg
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dense, "create_model", lambda name, **kwargs: backbone)
            return fill_in_place(dense.semantic_fpn(name, 4, width=32, norms=True))

    return make


@pytest.mark.unchecked
@pytest.mark.parametrize("name, precision", [("care_s0", "float16"), ("cas_vit_xs", "float32")])
def test_package_of_the_semantic_model(name, precision, shallow_fpn, tmp_path):
    pytest.importorskip("coremltools")
    model = shallow_fpn(name)
    images = torch.randint(0, 256, (3, 3, 64, 96), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    network = dense.FusedSemanticFPN(model)
    inputs = (images / 255 - model.mean) / model.std
    with torch.inference_mode():
        wanted = model.logits(inputs)
        torch.testing.assert_close(network(images.float()), wanted, atol=1e-4 * float(wanted.abs().max()), rtol=0)
    path = dense.export_semantic_fpn(model, tmp_path / "fpn.mlpackage", image_size=(64, 96), precision=precision)
    assert [p.name for p in tmp_path.iterdir()] == ["fpn.mlpackage"]
    report = dense.verify_semantic_fpn(path, model, images)
    assert report.ok and report.precision == precision and report.agreement > 0.99, str(report)
    assert report.size == sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    with pytest.raises(ValueError, match="one or more"):
        dense.verify_semantic_fpn(path, model, images[:0])
    model.head.weight.data[1] *= 1.01
    assert not dense.verify_semantic_fpn(path, model, images).ok


@pytest.mark.parametrize(
    "kwargs", [dict(image_size=np.int64(60)), dict(image_size=64, precision="int8"), dict(image_size=(64,))]
)
def test_export_refuses_before_slow_work(kwargs, models, tmp_path):
    with pytest.raises(ValueError, match="multiples of 32|float16"):
        dense.export_semantic_fpn(models["semantic_fpn"], tmp_path / "x.mlpackage", **kwargs)


def test_the_readme_quotes_the_stored_runs():
    root = Path(__file__).parents[1]
    rows = [
        line for line in (root / "README.md").read_text().splitlines() if line.startswith(("| Mask", "| Ret", "| Sem"))
    ]
    assert len(rows) == len(dense.RUNS)
    for head, name, steps in dense.RUNS:
        run = json.loads((root / "carelite" / "results" / "dense" / f"{head}_{name}.json").read_text())
        figures = {"box_map_50": "box mAP@50", "mask_map_50": "mask mAP@50", "miou": "mIoU"}
        quoted = ", ".join(
            f"{word} {run['figures'][key]:.3f}" for key, word in figures.items() if key in run["figures"]
        )
        assert any(row.endswith(f"| {steps} | {quoted} |") for row in rows), (head, name, quoted)
