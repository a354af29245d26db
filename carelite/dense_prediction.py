import copy
import importlib
import json
import math
import shutil
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass, replace
from functools import partial
from io import StringIO
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64, UInt8
from PIL import Image
from safetensors.torch import save_model
from timm.scheduler import create_scheduler_v2
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, RandomSampler


from torchvision import tv_tensors
from torchvision.models.detection import MaskRCNN, RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.retinanet import RetinaNetHead
from torchvision.ops import FeaturePyramidNetwork
from torchvision.ops.feature_pyramid_network import ExtraFPNBlock, LastLevelMaxPool, LastLevelP6P7
from torchvision.transforms.v2 import functional as VF

from carelite.backbone import create_model
from carelite.data import to_rgb
from carelite.training import TrainConfig, create_optimizer


def import_dense(module: str) -> ModuleType:
    """Import a module that only dense prediction needs. Raises ImportError with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        message = f'dense prediction needs {module.split(".")[0]}: pip install "carelite[dense]"'
        raise ImportError(message) from error


SHAPES = {"disc": (215, 75, 65), "square": (70, 175, 85), "triangle": (70, 95, 215)}  # name → typical colour


def draw_shape(kind: str, size: tuple[int, int], centre: tuple[float, float], radius: float, angle: float) -> np.ndarray:
    """The pixels, True in an array of `size` (height, width), whose centres lie in a shape.

    Arguments: `kind`, one of `SHAPES`; `centre` (x, y) and `radius`, of the circle around it, in pixels; `angle` in
    radians.
    """
    y, x = np.ogrid[: size[0], : size[1]]
    x, y = (x + 0.5 - centre[0]) / radius, (y + 0.5 - centre[1]) / radius
    if kind == "disc":
        return x * x + y * y <= 1
    u, v = x * math.cos(angle) + y * math.sin(angle), y * math.cos(angle) - x * math.sin(angle)
    if kind == "square":
        return np.maximum(abs(u), abs(v)) <= math.sqrt(0.5)
    return np.maximum.reduce([-v, v / 2 + u * math.sqrt(0.75), v / 2 - u * math.sqrt(0.75)]) <= 0.5


def texture(rng: np.random.Generator, size: tuple[int, int], colour: np.ndarray) -> np.ndarray:
    """A pattern of waves and noise around `colour`, (height, width, 3), on the scale 0..255."""
    y, x = np.ogrid[: size[0], : size[1]]
    waves = np.zeros(size, np.float32)
    for _ in range(2):
        along_x, along_y = rng.uniform(-0.5, 0.5, 2)
        waves += np.sin(along_x * x) * np.cos(along_y * y + rng.uniform(0, 2 * math.pi))
    noise = 5 * rng.standard_normal((*size, 1), np.float32)
    return colour.astype(np.float32) + waves[..., None] * rng.uniform(-15, 15, 3).astype(np.float32) + noise


def as_targets(
    boxes: Tensor, labels: Tensor, masks: Tensor | None, iscrowd: Tensor, area: Tensor, image_id: int, size
) -> dict:
    """What is true about an image of `size` (height, width), in torchvision's form: see `ShapesDataset`."""
    boxes = tv_tensors.BoundingBoxes(boxes.reshape(-1, 4), format="XYXY", canvas_size=size)
    target = dict(boxes=boxes, labels=labels, iscrowd=iscrowd, area=area, image_id=image_id)
    return target if masks is None else target | dict(masks=tv_tensors.Mask(masks))


class ShapesDataset(Dataset):
    """Generated images of discs, squares and triangles, a little tilted, that hide each other, on textured ground.

    Each class has a typical colour, give or take 40 of 255.

    Element i is (image (3, H, W), bytes; target), always the same for the same `seed`. A target has, for N objects,
    `boxes` (N, 4), x and y of two corners in pixels; `labels` (N,), from 1 on; `masks` (N, H, W), what is visible of
    each, 0 or 1; `area` (N,) in pixels; `iscrowd` (N,), 0; `image_id`; and `semantic` (H, W), the label of each pixel,
    0 for the ground.
    Arguments: `length`, number of images; `image_size`, one number or (height, width), at least 64; `seed`;
    `max_objects` of an image; `transform(image, target)`, such as one of torchvision.transforms.v2.
    """

    classes = ("background", *SHAPES)
    category_ids = (1, 2, 3)

    def __init__(self, length: int, image_size=128, *, seed: int = 0, max_objects: int = 5, transform=None):
        self.length, self.seed, self.max_objects, self.transform = length, seed, max_objects, transform
        self.size = (image_size, image_size) if isinstance(image_size, int) else tuple(image_size)
        if min(self.size) < 64:
            raise ValueError(f"image_size={image_size}: shapes need at least 64 pixels in height and width.")

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, dict]:
        if not 0 <= index < self.length:
            raise IndexError(f"there are {self.length} images; {index} is none.")
        rng = np.random.default_rng((self.seed, index))
        ground = rng.uniform(80, 170, 3)
        image, masks, labels = texture(rng, self.size, ground), np.zeros((0, *self.size), bool), []
        objects = rng.integers(1, self.max_objects + 1) if self.max_objects and rng.random() < 0.9 else 0
        for _ in range(objects):
            label, mask = self.place(rng)
            visible = masks & ~mask
            if (visible.sum((1, 2)) < 0.5 * masks.sum((1, 2))).any():
                continue  # it would hide most of another one
            colour = SHAPES[self.classes[label]] + rng.uniform(-40, 40, 3)
            image[mask] = texture(rng, self.size, colour)[mask]
            masks, labels = np.concatenate([visible, mask[None]]), [*labels, label]
        image = torch.from_numpy(image.clip(0, 255).astype(np.uint8)).permute(2, 0, 1).contiguous()
        target = self.target(torch.from_numpy(masks), torch.tensor(labels, dtype=torch.int64), index)
        return (image, target) if self.transform is None else self.transform(tv_tensors.Image(image), target)

    def place(self, rng: np.random.Generator) -> tuple[int, np.ndarray]:
        """Label and pixels of a random shape that lies in the image."""
        label, radius = int(rng.integers(1, 4)), rng.uniform(12, 26)
        centre = tuple(rng.uniform(radius, side - radius) for side in reversed(self.size))
        return label, draw_shape(self.classes[label], self.size, centre, radius, rng.uniform(-0.25, 0.25))

    def target(self, masks: Tensor, labels: Tensor, index: int) -> dict:
        """The target that follows from the visible pixels of each object."""
        corners = [(*m.any(0).nonzero()[[0, -1], 0].tolist(), *m.any(1).nonzero()[[0, -1], 0].tolist()) for m in masks]
        boxes = torch.tensor([(x1, y1, x2 + 1, y2 + 1) for x1, x2, y1, y2 in corners], dtype=torch.float32)
        semantic = (masks * labels.view(-1, 1, 1)).sum(0)
        area = masks.sum((1, 2)).float()
        target = as_targets(boxes, labels, masks.byte(), torch.zeros_like(labels), area, index, self.size)
        return target | dict(semantic=tv_tensors.Mask(semantic))


class StageMaps(nn.Module):
    """A classifier's four stages as an encoder: image (B, 3, H, W) to maps of strides 4, 8, 16 and 32.

    Arguments: `name`, one of `carelite.list_models()`; `checkpoint`, a classifier's file, see `carelite.create_model`,
    which raises where it does not fit; `norms`, whether a BatchNorm follows each stage, as in CAS-ViT's official code
    for dense prediction; `first`, the first stage whose map is given; `drop_path_rate`.
    """

    def __init__(self, name: str, *, checkpoint=None, norms: bool = False, first: int = 0, drop_path_rate: float = 0.0):
        super().__init__()
        self.backbone = create_model(name, checkpoint=checkpoint, num_classes=0, drop_path_rate=drop_path_rate)
        self.backbone.prune_intermediate_layers(4, prune_norm=True)  # what stands behind the last stage has no use here
        self.channels = [info["num_chs"] for info in self.backbone.feature_info[first:]]
        self.norms = nn.ModuleList(nn.BatchNorm2d(c) if norms else nn.Identity() for c in self.channels)

    def forward(self, x: Float[Tensor, "B 3 H W"]) -> list[Tensor]:
        x = x.contiguous(memory_format=torch.channels_last)
        maps = self.backbone.forward_intermediates(x, len(self.norms), intermediates_only=True)
        return [norm(x) for norm, x in zip(self.norms, maps)]


class Pyramid(nn.Module):
    """An encoder under a feature pyramid: image (B, 3, H, W) to a dictionary of maps with `width` channels each.

    Arguments: `maps`; `width`; `extra`, which adds coarser maps. Source: Lin et al. 2017; torchvision's detectors.
    """

    def __init__(self, maps: StageMaps, width: int, extra: ExtraFPNBlock):
        super().__init__()
        self.maps = maps
        self.fpn = FeaturePyramidNetwork(maps.channels, width, extra)
        self.out_channels = width

    def forward(self, x: Float[Tensor, "B 3 H W"]) -> dict[str, Tensor]:
        return self.fpn(OrderedDict((str(i), x) for i, x in enumerate(self.maps(x))))


ANCHOR_SIZES = (32, 64, 128, 256, 512)  # pixels, one per level of the pyramid, from fine to coarse


def detector_options(maps: StageMaps, min_size: int, max_size: int) -> dict:
    """What both detectors ask for: the size images are brought to, and the backbone's mean and std."""
    cfg = maps.backbone.pretrained_cfg
    return dict(min_size=min_size, max_size=max_size, image_mean=list(cfg["mean"]), image_std=list(cfg["std"]))


def anchors(sizes: Sequence[int], octaves: int = 1) -> AnchorGenerator:
    """Boxes of three aspect ratios on each of five levels; `octaves` sizes a level, between one and the next."""
    if len(sizes) != 5:
        raise ValueError(f"the pyramid has 5 levels and needs as many anchor sizes, got {len(sizes)}.")
    per_level = tuple(tuple(int(s * 2 ** (i / octaves)) for i in range(octaves)) for s in sizes)
    return AnchorGenerator(per_level, ((0.5, 1.0, 2.0),) * 5)


def mask_rcnn(
    name: str,
    num_classes: int,
    *,
    checkpoint: str | Path | None = None,
    width: int = 256,
    norms: bool = False,
    anchor_sizes: Sequence[int] = ANCHOR_SIZES,
    min_size: int = 800,
    max_size: int = 1333,
    box_samples: int = 512,
    drop_path_rate: float = 0.0,
) -> MaskRCNN:
    """Mask R-CNN on a carelite backbone: torchvision's, with a pyramid over strides 4 to 32 and one level more.

    Arguments: `num_classes`, the background, class 0, among them; `checkpoint`, `norms` and `drop_path_rate` as in
    `StageMaps`; `width`, channels of the pyramid and of the mask head (the box head has four times as many);
    `anchor_sizes` in pixels, one per level; images are enlarged or reduced until the shorter side has `min_size` or the
    longer one `max_size` pixels; `box_samples`, proposals of an image that the box head learns from.
    Takes images in 0..1. Source: He et al. 2017; both papers' COCO results.
    """
    maps = StageMaps(name, checkpoint=checkpoint, norms=norms, drop_path_rate=drop_path_rate)
    return MaskRCNN(
        Pyramid(maps, width, LastLevelMaxPool()),
        **detector_options(maps, min_size, max_size),
        rpn_anchor_generator=anchors(anchor_sizes),
        box_batch_size_per_image=box_samples,
        box_head=TwoMLPHead(width * 7 * 7, 4 * width),
        box_predictor=FastRCNNPredictor(4 * width, num_classes),
        mask_head=MaskRCNNHeads(width, (width,) * 4, 1),
        mask_predictor=MaskRCNNPredictor(width, width, num_classes),
    )


def retinanet(
    name: str,
    num_classes: int,
    *,
    checkpoint: str | Path | None = None,
    width: int = 256,
    norms: bool = False,
    head_norms: bool = True,
    anchor_sizes: Sequence[int] = ANCHOR_SIZES,
    min_size: int = 800,
    max_size: int = 1333,
    drop_path_rate: float = 0.0,
) -> RetinaNet:
    """RetinaNet on a carelite backbone: torchvision's, with a pyramid over strides 8 to 32 and two levels more.

    Arguments as in `mask_rcnn`; `width`, a multiple of 8, is the heads' too; each level has anchors of its size and of
    two more, a third of an octave apart; `head_norms`, whether the heads have GroupNorm (the papers' have none, but
    learn from pretrained backbones: from random weights the norms are needed). Source: Lin et al. 2017, focal loss.
    """
    maps = StageMaps(name, checkpoint=checkpoint, norms=norms, first=1, drop_path_rate=drop_path_rate)
    generator = anchors(anchor_sizes, octaves=3)
    norm = partial(nn.GroupNorm, width // 8) if head_norms else None
    return RetinaNet(
        Pyramid(maps, width, LastLevelP6P7(maps.channels[-1], width)),
        num_classes,
        **detector_options(maps, min_size, max_size),
        anchor_generator=generator,
        head=RetinaNetHead(width, generator.num_anchors_per_location()[0], num_classes, norm_layer=norm),
    )


def padded(images: Sequence[Tensor], value: int = 0, multiple: int = 32) -> Tensor:
    """Maps (…, H, W) of any sizes as one batch: `value` is added on the right and below, to a `multiple` of pixels."""
    height, width = (-(-max(x.shape[side] for x in images) // multiple) * multiple for side in (-2, -1))
    return torch.stack([F.pad(x, (0, width - x.shape[-1], 0, height - x.shape[-2]), value=value) for x in images])


IGNORE = 255  # the label of pixels that no loss and no metric looks at


class SemanticFPN(nn.Module):
    """Semantic FPN, called as torchvision's detectors are: with a list of images (3, H, W) in 0..1, of any sizes.

    In training it takes targets with `semantic` (H, W) too and returns {"cross_entropy": loss}, a mean over the pixels
    that are not `IGNORE`; in eval mode a dictionary per image with `semantic`, the classes (H, W). Each image is then
    run alone, since the padding beside a larger one would reach the backbone's global mixers.
    Arguments: `maps`; `num_classes`; `width`, channels of the pyramid (its branches have half as many, at least 32).
    Source: Kirillov et al. 2019; the decoder is that of segmentation-models-pytorch.
    """

    def __init__(self, maps: StageMaps, num_classes: int, width: int = 256):
        super().__init__()
        smp = import_dense("segmentation_models_pytorch.decoders.fpn.decoder")
        branch = max(32, width // 2)
        self.maps = maps
        self.decoder = smp.FPNDecoder(maps.channels, 4, pyramid_channels=width, segmentation_channels=branch)
        self.head = nn.Conv2d(branch, num_classes, 1)
        for name in ("mean", "std"):
            values = torch.tensor(maps.backbone.pretrained_cfg[name]).view(3, 1, 1)
            self.register_buffer(name, values, persistent=False)

    def logits(self, x: Float[Tensor, "B 3 H W"]) -> Float[Tensor, "B K H W"]:
        """The classes' scores at every pixel of normalised images whose sides are multiples of 32."""
        x = self.head(self.decoder(self.maps(x)))  # at stride 4
        return F.interpolate(x, scale_factor=4.0, mode="bilinear")

    def forward(self, images: Sequence[Tensor], targets: Sequence[dict] | None = None):
        images = [(image - self.mean) / self.std for image in images]
        if not self.training:
            maps = [self.logits(padded([x]))[0, :, : x.shape[-2], : x.shape[-1]].argmax(0) for x in images]
            return [dict(semantic=labels) for labels in maps]
        if targets is None:
            raise ValueError("in training mode the model needs targets.")
        semantic = padded([target["semantic"] for target in targets], IGNORE)
        loss = F.cross_entropy(self.logits(padded(images)), semantic, ignore_index=IGNORE, reduction="sum")
        return dict(cross_entropy=loss / (semantic != IGNORE).sum().clamp(min=1))


def semantic_fpn(
    name: str,
    num_classes: int,
    *,
    checkpoint: str | Path | None = None,
    width: int = 256,
    norms: bool = False,
    drop_path_rate: float = 0.0,
) -> SemanticFPN:
    """Semantic FPN on a carelite backbone; arguments as in `mask_rcnn` and `SemanticFPN`."""
    return SemanticFPN(
        StageMaps(name, checkpoint=checkpoint, norms=norms, drop_path_rate=drop_path_rate), num_classes, width
    )


def intersection_over_union(confusion: Int64[Tensor, "K K"]) -> Float[Tensor, " K"]:
    """Per class, pixels of the class that were found over pixels that are of the class or were called so.

    Argument: how many pixels of class i (row) were called j (column). A class that is neither in the truth nor in the
    predictions has none: NaN.
    """
    right = confusion.diag().double()
    return right / (confusion.sum(0) + confusion.sum(1) - confusion.diag())


def evaluate_segmentation(model: nn.Module, dataset: Dataset) -> tuple[dict[str, float], Int64[Tensor, "K K"]]:
    """"miou", the mean IoU of the classes that occur, and "pixel_accuracy", 0..1, and the confusion matrix.

    One matrix is summed over all images, so neither depends on how they are batched; pixels labelled `IGNORE` do not
    count. Raises ValueError for an empty data set.
    """
    if not len(dataset):
        raise ValueError("there are no images to evaluate on.")
    classification = import_dense("torchmetrics.classification")
    metric = classification.MulticlassConfusionMatrix(len(dataset.classes), ignore_index=IGNORE)
    for image, target in dataset:
        metric.update(predict_dense(model, image)["semantic"], target["semantic"].as_subclass(Tensor))
    confusion = metric.compute()
    accuracy = confusion.diag().sum() / confusion.sum()
    miou = intersection_over_union(confusion).nanmean()
    return dict(miou=miou.item(), pixel_accuracy=accuracy.item()), confusion


@torch.no_grad()
def predict_dense(model: nn.Module, image: UInt8[Tensor, "3 H W"]) -> dict[str, Tensor]:
    """What `model` says about one image, on the CPU: `semantic` (H, W), or for N objects, the surest first,
    `boxes` (N, 4), `labels` (N,), `scores` (N,) and of a Mask R-CNN `masks` (N, H, W), true or false.

    An image at a time, so that what is said about it does not depend on others. The model's mode is restored.
    """
    training, device = model.training, next(model.parameters()).device
    model.eval()
    try:
        (result,) = model([VF.to_dtype(image.as_subclass(Tensor), torch.float32, scale=True).to(device)])
    finally:
        model.train(training)
    if "labels" in result:  # RetinaNet scores the background too, which is no object
        result = {key: value[result["labels"] > 0] for key, value in result.items()}
    if "masks" in result:
        result["masks"] = result["masks"][:, 0] > 0.5
    return {key: value.cpu() for key, value in result.items()}


def run_lengths(masks: Bool[Tensor, "N H W"]) -> list[dict]:
    """Masks in COCO's run-length code, as it stands in its JSON files."""
    columns = np.asfortranarray(masks.permute(1, 2, 0).byte().numpy())
    codes = import_dense("pycocotools.mask").encode(columns)
    return [code | dict(counts=code["counts"].decode()) for code in codes]


def coco_objects(objects: dict, image_id: int, category_ids: Sequence[int]) -> list[dict]:
    """Objects of a prediction or a target in COCO's form: box as x, y, width, height; category by its own id."""
    boxes = objects["boxes"].clone().as_subclass(Tensor)
    boxes[:, 2:] -= boxes[:, :2]
    rows = [
        dict(image_id=image_id, category_id=category_ids[label - 1], bbox=box)
        for box, label in zip(boxes.tolist(), objects["labels"].tolist())
    ]
    for key in ("scores", "iscrowd", "area"):
        for row, value in zip(rows, objects[key].tolist() if key in objects else ()):
            row[key.removesuffix("s")] = value
    for row, code in zip(rows, run_lengths(objects["masks"].as_subclass(Tensor).bool()) if "masks" in objects else ()):
        row["segmentation"] = code
    return rows


def coco_ground_truth(dataset: Dataset) -> dict:
    """The objects of a data set as the contents of a COCO annotation file."""
    images, annotations = [], []
    for image, target in dataset:
        height, width = image.shape[-2:]
        images.append(dict(id=target["image_id"], height=height, width=width))
        annotations += coco_objects(target, target["image_id"], dataset.category_ids)
    annotations = [row | dict(id=i) for i, row in enumerate(annotations, 1)]
    categories = [dict(id=i, name=name) for i, name in zip(dataset.category_ids, dataset.classes[1:])]
    return dict(images=images, annotations=annotations, categories=categories)


def evaluate_detection(model: nn.Module, dataset: Dataset) -> tuple[dict[str, float], list[dict]]:
    """COCO's average precision of a detector, and its objects as the contents of a COCO results file.

    The figures are "box_map" (mean over IoU 0.5 to 0.95), "box_map_50", "box_map_75" and, for Mask R-CNN, the same of
    masks, "mask_map" and so on: 0..1, and -1 where there is nothing to find. Computed by pycocotools.
    Raises ValueError for an empty data set.
    """
    if not len(dataset):
        raise ValueError("there are no images to evaluate on.")
    kinds = {"bbox": "box"} | ({"segm": "mask"} if isinstance(model, MaskRCNN) else {})
    # COCO's own thresholds: torchmetrics' defaults are rounded to float32, and a recall of exactly 0.8 falls below 0.8
    thresholds = dict(iou_thresholds=np.linspace(0.5, 0.95, 10).tolist(), rec_thresholds=np.linspace(0, 1, 101).tolist())
    average_precision = import_dense("torchmetrics.detection").MeanAveragePrecision
    metric = average_precision(iou_type=tuple(kinds), backend="pycocotools", **thresholds)
    metric.warn_on_many_detections = False  # COCO's metric looks at an image's 100 surest finds
    rows = []
    for image, target in dataset:
        found = predict_dense(model, image)
        true = {key: v.as_subclass(Tensor) for key, v in target.items() if isinstance(v, Tensor)}
        if "masks" in true:
            true["masks"] = true["masks"].bool()
        metric.update([found], [true])
        rows += coco_objects(found, target["image_id"], dataset.category_ids)
    with redirect_stdout(StringIO()):
        values = metric.compute()
    prefixes = {f"{kind}_" if len(kinds) > 1 else "": name for kind, name in kinds.items()}
    names = ("map", "map_50", "map_75")
    return {f"{name}_{n}": float(values[prefix + n]) for prefix, name in prefixes.items() for n in names}, rows


@dataclass(frozen=True)
class DenseSchedule:
    """How long and how fast a model is trained, by AdamW.

    `steps` of `batch_size` images; `lr`, the peak learning rate, reached after `warmup_steps`; `weight_decay`; `decay`,
    "multistep" (a tenth after each of `milestones`), "poly" ((1 - t/T) to the power 0.9) or "cosine".
    """

    steps: int
    batch_size: int
    lr: float
    weight_decay: float
    warmup_steps: int
    decay: str
    milestones: tuple[int, ...] = ()

    def __post_init__(self):
        if self.decay not in ("multistep", "poly", "cosine"):
            raise ValueError(f"decay={self.decay!r} is unknown: choose 'multistep', 'poly' or 'cosine'.")


SCHEDULES = {
    # 12 epochs of COCO's 117,266 training images with objects; rates fall after epochs 8 and 11
    "coco_1x": DenseSchedule(12 * 7330, 16, 2e-4, 1e-4, 500, "multistep", (8 * 7330, 11 * 7330)),
    "ade20k_40k": DenseSchedule(40_000, 16, 2e-4, 1e-4, 0, "poly"),
    "shapes": DenseSchedule(300, 8, 1.5e-3, 0.05, 50, "cosine"),  # the runs of this notebook, from random weights
}


def create_dense_schedule(optimizer: torch.optim.Optimizer, schedule: DenseSchedule):
    """timm's scheduler for a `DenseSchedule`; call `step_update(t)` after step t."""
    return create_scheduler_v2(
        optimizer,
        schedule.decay,
        num_epochs=schedule.steps,
        decay_milestones=list(schedule.milestones),
        decay_rate=0.9 if schedule.decay == "poly" else 0.1,
        warmup_lr=schedule.lr / 1000,
        warmup_epochs=schedule.warmup_steps,
        step_on_epochs=False,
        updates_per_epoch=1,
    )[0]


def for_training(image: UInt8[Tensor, "3 H W"], target: dict) -> tuple[Float[Tensor, "3 H W"], dict]:
    """An element of a data set as a model takes it in training: 0..1, plain tensors, no crowds, no empty boxes."""
    target = {key: v.as_subclass(Tensor) for key, v in target.items() if isinstance(v, Tensor)}
    if "boxes" in target:
        boxes, objects = target["boxes"], ("boxes", "labels", "masks", "iscrowd", "area")
        keep = (boxes[:, 2:] > boxes[:, :2]).all(1) & (target["iscrowd"] == 0)
        target |= {key: target[key][keep] for key in objects if key in target}
    return VF.to_dtype(image.as_subclass(Tensor), torch.float32, scale=True), target


def collate(batch: Sequence[tuple]) -> tuple[tuple[Tensor, ...], tuple[dict, ...]]:
    """Elements of a data set as the images and the targets of a batch."""
    images, targets = zip(*(for_training(*element) for element in batch))
    return images, targets


def dense_batches(
    dataset: Dataset, schedule: DenseSchedule, seed: int = 0, workers: int = 0, done: int = 0
) -> DataLoader:
    """The batches of a training behind the first `done`, in an order that `seed` decides, read by `workers`."""
    random = torch.Generator().manual_seed(seed)
    order = list(RandomSampler(dataset, num_samples=schedule.steps * schedule.batch_size, generator=random))
    order = order[done * schedule.batch_size :]
    return DataLoader(dataset, schedule.batch_size, sampler=order, collate_fn=collate, num_workers=workers)


@contextmanager
def written(path: Path) -> Iterator[Path]:
    """A temporary name beside `path`, for a file or folder that takes its place at the end unless something fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.stem}.partial{path.suffix}")
    try:
        yield partial
        if path.is_dir():
            shutil.rmtree(path)
        partial.replace(path)
    finally:
        shutil.rmtree(partial, ignore_errors=True) if partial.is_dir() else partial.unlink(missing_ok=True)


def save_state(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, schedule: DenseSchedule, lines: list):
    """Write what `restore` needs to go on with a training."""
    state = dict(model=model.state_dict(), optimizer=optimizer.state_dict(), random=torch.get_rng_state())
    with written(path) as partial:
        torch.save(state | dict(schedule=asdict(schedule), lines=lines), partial)


def restore(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, schedule: DenseSchedule) -> list[dict]:
    """Put model, optimizer and the random state where the training in `path` was; returns its lines, [] without a file.

    Raises ValueError where it had another schedule.
    """
    if not path.exists():
        return []
    state = torch.load(path, weights_only=True)
    if state["schedule"] != asdict(schedule):
        raise ValueError(f"{path} is the state of a training by {state['schedule']}: remove it, or use its schedule.")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["random"])
    return state["lines"]


def dense_step(model: nn.Module, images: Sequence[Tensor], targets: Sequence[dict], optimizer, step: int) -> dict:
    """One step of a training, the `step`-th; returns the value of each loss. Raises as `train_dense` does."""
    device = next(model.parameters()).device
    targets = [{key: value.to(device) for key, value in target.items()} for target in targets]
    losses = model([image.to(device) for image in images], targets)
    values = {name: loss.item() for name, loss in losses.items()}
    if not all(map(math.isfinite, values.values())):
        raise FloatingPointError(f"the losses are {values} in step {step}: stopped before it. Try a lower lr.")
    optimizer.zero_grad()
    sum(losses.values()).backward()
    optimizer.step()
    return values


def train_dense(
    model: nn.Module,
    dataset: Dataset,
    schedule: DenseSchedule,
    *,
    seed: int = 0,
    workers: int = 0,
    state: str | Path | None = None,
    log: Callable[[dict], None] = print,
) -> list[dict]:
    """Train any of the three models in place and leave it in eval mode; returns a line per 10 steps.

    A line has the `step`, `seconds` of training so far, and the mean of each loss over these steps; `log` gets it at
    once. Arguments: `seed` of the order of the images and of what the model draws; `workers`, processes that read
    images; `state`, a file written with every line: where it exists, the training goes on from it, on the CPU as if it
    had never stopped. Raises FloatingPointError, naming the step, for a loss that is not finite; ValueError for the
    state of a training with another schedule.
    """
    torch.manual_seed(seed)
    model.train().to(memory_format=torch.channels_last)
    optimizer = create_optimizer(model, TrainConfig(lr=schedule.lr, weight_decay=schedule.weight_decay))
    lines = [] if state is None else restore(Path(state), model, optimizer, schedule)
    done, before = (lines[-1]["step"], lines[-1]["seconds"]) if lines else (0, 0.0)
    rates, sums, begin = create_dense_schedule(optimizer, schedule), Counter(), time.perf_counter() - before
    rates.step_update(done)
    for step, (images, targets) in enumerate(dense_batches(dataset, schedule, seed, workers, done), done + 1):
        sums.update(dense_step(model, images, targets, optimizer, step) | {"steps": 1})
        rates.step_update(step)
        if step % 10 == 0 or step == schedule.steps:
            means = {name: round(total / sums["steps"], 4) for name, total in sums.items() if name != "steps"}
            lines.append(dict(step=step, seconds=round(time.perf_counter() - begin, 1)) | means)
            log(lines[-1])
            sums.clear()
            if state is not None:
                save_state(Path(state), model, optimizer, schedule, lines)
    model.eval()
    return lines


HEADS = {"mask_rcnn": mask_rcnn, "retinanet": retinanet, "semantic_fpn": semantic_fpn}
SMALL = {  # what makes the heads fit images of 128 pixels
    "mask_rcnn": dict(width=64, norms=True, anchor_sizes=(12, 24, 48, 72, 96), min_size=128, max_size=128, box_samples=64),
    "retinanet": dict(width=64, norms=True, anchor_sizes=(16, 32, 64, 96, 128), min_size=128, max_size=128),
    "semantic_fpn": dict(width=64),
}


RUNS = (  # head, backbone, steps
    ("mask_rcnn", "care_s0", 250),
    ("retinanet", "cas_vit_xs", 500),
    ("semantic_fpn", "care_s0", 200),
    ("semantic_fpn", "cas_vit_xs", 200),
)


def judged(model: nn.Module, dataset: Dataset, shown: int) -> dict:
    """The figures of a trained model, and what it says about the first `shown` images, as JSON can hold it."""
    if isinstance(model, SemanticFPN):
        figures, confusion = evaluate_segmentation(model, dataset)
        labels = torch.arange(len(dataset.classes)).view(-1, 1, 1)
        maps = [predict_dense(model, dataset[i][0])["semantic"] for i in range(shown)]
        predictions = [run_lengths(semantic == labels) for semantic in maps]
        return dict(figures=figures, confusion=confusion.tolist(), predictions=predictions)
    figures, rows = evaluate_detection(model, dataset)
    predictions = [row for row in rows if row["image_id"] < shown and row["score"] >= 0.3]
    return dict(figures=figures, predictions=predictions)


def run_shapes(
    head: str,
    name: str,
    steps: int,
    folder: str | Path,
    *,
    held_out: int = 100,
    shown: int = 24,
    weights: str | Path | None = None,
) -> Path:
    """Train one model on generated shapes, evaluate it on others, and write `folder`/HEAD_NAME.json; returns its path.

    Arguments: `head`, a name of `HEADS`; `name`, a backbone; `steps` of the schedule "shapes"; `held_out`,
    images to evaluate on, of which the first `shown` are stored with what is predicted; `weights`, a safetensors file
    for the weights, by default none. The file has schedule, losses, figures, predictions and seconds. Both files are
    written whole or not at all; until then HEAD_NAME.state lets the same call go on after an interruption.
    """
    if head not in HEADS:
        raise ValueError(f"head={head!r} is unknown: choose {', '.join(HEADS)}.")
    torch.manual_seed(0)
    schedule = replace(SCHEDULES["shapes"], steps=steps)
    train, val = ShapesDataset(schedule.steps * schedule.batch_size), ShapesDataset(held_out, seed=1)
    model, path = HEADS[head](name, len(train.classes), **SMALL[head]), Path(folder, f"{head}_{name}.json")
    lines = train_dense(model, train, schedule, state=path.with_suffix(".state"))
    begin = time.perf_counter()
    found = judged(model, val, shown)
    seconds = dict(training=lines[-1]["seconds"], evaluation=round(time.perf_counter() - begin, 1))
    result = dict(head=head, model=name, schedule=asdict(schedule), options=SMALL[head], held_out=held_out)
    result |= dict(seconds=seconds, threads=torch.get_num_threads(), log=lines) | found
    with written(path) as partial:
        partial.write_text(json.dumps(result))
    if weights is not None:
        with written(Path(weights)) as partial:
            save_model(model, str(partial))
    path.with_suffix(".state").unlink()
    return path


def open_as_annotated(path: Path, size: tuple[int, int]) -> Image.Image:
    """The image at `path` as RGB, turned so that it has the `size` (height, width) of its annotation.

    Upright, as its EXIF tag says, where that has this size (whoever drew the annotation saw it so); as it is stored
    where only that has it. Raises ValueError, naming the file, where neither does, or where it cannot be read.
    """
    try:
        with Image.open(path) as file:
            file.load()
            upright = to_rgb(file)
    except Exception as error:  # Pillow's decoders raise errors of many kinds
        raise ValueError(f"{path} cannot be read as an image: {error}") from error
    for image in (upright, file):
        if (image.height, image.width) == tuple(size):
            return image.convert("RGB")
    raise ValueError(f"{path} has {file.height} x {file.width} pixels, its annotation {size[0]} x {size[1]}.")


def header_faults(path: Path, size: tuple[int, int] | None = None) -> tuple[str | None, bool]:
    """What keeps the image at `path` from being used, from its header alone, and whether an EXIF tag turns it."""
    try:
        with Image.open(path) as file:
            turned = file.getexif().get(0x0112, 1) != 1
            sides = {file.height, file.width}
    except Exception as error:  # Pillow's decoders raise errors of many kinds
        return f"{path} cannot be read as an image: {error}", False
    if size is not None and sides != set(size):
        return f"{path} does not have the {size[0]} x {size[1]} pixels of its annotation", turned
    return None, turned


def read_coco(source: Path | dict):
    """pycocotools' COCO of a file, or of what such a file holds, without its prints. Raises ValueError for another."""
    coco = import_dense("pycocotools.coco").COCO()
    try:
        with redirect_stdout(StringIO()):
            coco.dataset = source if isinstance(source, dict) else json.loads(source.read_text())
            for part in ("images", "annotations", "categories"):
                coco.dataset[part]
            coco.createIndex()
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{source} is not in COCO's format ({type(error).__name__}: {error}).") from error
    return coco


class CocoDataset(Dataset):
    """The images and objects of a file in COCO's JSON format; elements as in `ShapesDataset`, without `semantic`.

    Arguments: `annotations`, the file; `images`, the folder; `masks`, False where there are boxes only; `transform`,
    as in `ShapesDataset`. Labels 1, 2, … stand for the categories in the order of their ids: `category_ids[label - 1]`.
    `counts` says what was found: "crowd" regions (kept, with `iscrowd` 1: training leaves them out, the metric forgives
    what lies in them), objects "without area" and objects "without polygon" of three points or more (both left out),
    images "without objects" (kept) and images "turned" by an EXIF tag (see `open_as_annotated`).
    Raises FileNotFoundError; ValueError for a file that is not COCO's, for an unknown category, and for images that
    are missing, unreadable or of another size, naming the file.
    """

    def __init__(self, annotations: str | Path, images: str | Path, *, masks: bool = True, transform=None):
        if not Path(annotations).is_file():
            raise FileNotFoundError(f"there is no annotation file at {annotations}.")
        self.coco = read_coco(Path(annotations))
        self.masks, self.transform, self.counts, self.items = masks, transform, Counter(), []
        categories = sorted(self.coco.cats.values(), key=lambda c: c["id"])
        self.category_ids = tuple(c["id"] for c in categories)
        self.classes = ("background", *(c["name"] for c in categories))
        faults = []
        for image_id, info in sorted(self.coco.imgs.items()):
            path = Path(images, info["file_name"])
            fault, turned = header_faults(path, (info["height"], info["width"]))
            faults += [fault] if fault else []
            objects = [self.checked(a, info, annotations) for a in self.coco.imgToAnns[image_id]]
            objects = [a for a in objects if a is not None]
            self.counts.update({"turned": turned, "without objects": not objects})
            self.items.append((path, info, objects))
        if faults:
            raise ValueError(f"{len(faults)} images cannot be used: " + "; ".join(faults[:5]))

    def checked(self, annotation: dict, info: dict, file) -> dict | None:
        """The annotation with its box cut at the image's border and its usable polygons; None where nothing is left."""
        if annotation["category_id"] not in self.category_ids:
            raise ValueError(f"{file}: annotation {annotation['id']} has the unknown category {annotation['category_id']}.")
        x, y, width, height = annotation["bbox"]
        x1, y1, x2, y2 = max(x, 0), max(y, 0), min(x + width, info["width"]), min(y + height, info["height"])
        if x2 <= x1 or y2 <= y1:
            self.counts["without area"] += 1
            return None
        annotation = annotation | dict(corners=(x1, y1, x2, y2))
        parts = annotation.get("segmentation")
        if self.masks and not isinstance(parts, dict):  # a dict is run-length encoded
            parts = [p for p in parts or () if len(p) >= 6]
            if not parts:
                self.counts["without polygon"] += 1
                return None
        self.counts["crowd"] += annotation.get("iscrowd", 0)
        return annotation | dict(segmentation=parts)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> tuple[Tensor, dict]:
        path, info, objects = self.items[index]
        size = info["height"], info["width"]
        image = VF.pil_to_tensor(open_as_annotated(path, size))
        masks = None
        if self.masks:
            masks = [torch.from_numpy(self.coco.annToMask(a)) for a in objects]
            masks = torch.stack(masks) if masks else torch.zeros(0, *size, dtype=torch.uint8)
        target = as_targets(
            torch.tensor([a["corners"] for a in objects], dtype=torch.float32),
            torch.tensor([self.category_ids.index(a["category_id"]) + 1 for a in objects], dtype=torch.int64),
            masks,
            torch.tensor([a.get("iscrowd", 0) for a in objects], dtype=torch.int64),
            torch.tensor([a.get("area", a["bbox"][2] * a["bbox"][3]) for a in objects], dtype=torch.float32),
            info["id"],
            size,
        )
        return (image, target) if self.transform is None else self.transform(tv_tensors.Image(image), target)


class ADE20KDataset(Dataset):
    """Images and label maps in the folders of ADE20K's scene parsing challenge: images/SPLIT and annotations/SPLIT.

    Elements are (image (3, H, W), bytes; target with `semantic` (H, W)). In the files 0 means unlabelled and 1 to
    `num_classes` are classes; here they are 255, which is ignored, and 0 to `num_classes` - 1. `counts["turned"]` are
    images that an EXIF tag turns, see `open_as_annotated`.
    Raises FileNotFoundError where a folder or label maps are missing; ValueError, naming the file, for a label map that
    has another size than its image or labels outside the range.
    """

    def __init__(self, root: str | Path, split: str = "training", *, num_classes: int = 150, transform=None):
        folders = Path(root, "images", split), Path(root, "annotations", split)
        if missing := [folder for folder in folders if not folder.is_dir()]:
            raise FileNotFoundError(f"there is no folder {missing[0]}.")
        images = sorted(p for p in folders[0].iterdir() if p.suffix.lower() in (".jpg", ".jpeg", ".png"))
        self.items = [(path, folders[1] / f"{path.stem}.png") for path in images]
        if missing := [maps for _, maps in self.items if not maps.is_file()]:
            raise FileNotFoundError(f"{len(missing)} images have no label map, such as {missing[0]}.")
        self.classes, self.transform = tuple(map(str, range(num_classes))), transform
        self.counts = Counter(turned=sum(header_faults(path)[1] for path in images))

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> tuple[Tensor, dict]:
        path, maps = self.items[index]
        with Image.open(maps) as file:
            semantic = torch.from_numpy(np.asarray(file).astype(np.int64))
        if semantic.dim() != 2 or semantic.max() > len(self.classes):
            raise ValueError(f"{maps} must hold one label per pixel, 0 to {len(self.classes)}, got {int(semantic.max())}.")
        image = VF.pil_to_tensor(open_as_annotated(path, tuple(semantic.shape)))
        target = dict(semantic=tv_tensors.Mask(torch.where(semantic > 0, semantic - 1, IGNORE)), image_id=index)
        return (image, target) if self.transform is None else self.transform(tv_tensors.Image(image), target)


class ExportedGroupNorm(nn.LayerNorm):
    """What a GroupNorm computes, (B, C, H, W) → (B, C, H, W), in operations that Core ML has: a LayerNorm over each
    group's numbers, then scale and shift as a depthwise 1×1 convolution."""

    def __init__(self, norm: nn.GroupNorm):
        super().__init__(norm.num_channels, norm.eps, elementwise_affine=False)
        self.num_groups = norm.num_groups
        self.affine = nn.Conv2d(norm.num_channels, norm.num_channels, 1, groups=norm.num_channels)
        self.affine.weight.data = norm.weight.detach().view(-1, 1, 1, 1).clone()
        self.affine.bias.data = norm.bias.detach().clone()

    def forward(self, x: Float[Tensor, "B C H W"]) -> Float[Tensor, "B C H W"]:
        groups = x.reshape(x.shape[0], self.num_groups, -1)
        return self.affine(F.layer_norm(groups, groups.shape[-1:], eps=self.eps).reshape(x.shape))


class Sum(nn.Module):
    """The sum of maps of one shape, (B, C, H, W) each, one after the other."""

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        total, *rest = maps
        for x in rest:
            total = total + x
        return total


class FusedSemanticFPN(nn.Module):
    """What a package of a Semantic FPN computes: an image (1, 3, H, W) in 0..255 to logits (1, K, H, W)."""

    def __init__(self, model: SemanticFPN):
        from carelite.fusion import batchnorm_as_affine, fold_before, fuse  # notebook 12, which comes later

        super().__init__()
        model = copy.deepcopy(model).cpu().float().eval()
        cfg = model.maps.backbone.pretrained_cfg
        self.backbone = fuse(model.maps.backbone, cfg["mean"], cfg["std"])
        self.decoder, self.head = model.decoder, model.head
        lateral = [self.decoder.p2.skip_conv, self.decoder.p3.skip_conv, self.decoder.p4.skip_conv, self.decoder.p5]
        for norm, conv in zip(model.maps.norms, lateral):
            if isinstance(norm, nn.BatchNorm2d):
                folded = fold_before(*batchnorm_as_affine(norm), conv)
                conv.weight, conv.bias = folded.weight, folded.bias
        for name, norm in list(self.decoder.named_modules()):
            if isinstance(norm, nn.GroupNorm):
                self.decoder.set_submodule(name, ExportedGroupNorm(norm))
        self.decoder.merge = Sum()
        self.eval().requires_grad_(False).to(memory_format=torch.contiguous_format)

    def forward(self, image: Float[Tensor, "1 3 H W"]) -> Float[Tensor, "1 K H W"]:
        x = image if self.backbone.offset is None else image - self.backbone.offset
        x = self.backbone.stem(x)
        maps = []
        for stage in self.backbone.stages:
            x = stage(x)
            maps.append(x)
        return F.interpolate(self.head(self.decoder(maps)), scale_factor=4.0, mode="bilinear")


def export_semantic_fpn(model: SemanticFPN, path: str | Path, *, image_size, precision: str = "float16") -> Path:
    """Write a Core ML package that takes an RGB image as it is and puts out logits (1, K, H, W); returns its path.

    Arguments: `model`, left as it is; `path`, ending in .mlpackage; `image_size`, one number or (height, width),
    multiples of 32; `precision`, "float16" or "float32", of weights and arithmetic.
    Raises ValueError for another size, suffix or precision, before any slow work.
    """
    path, size = Path(path), (image_size, image_size) if isinstance(image_size, int) else tuple(image_size)
    if len(size) != 2 or min(size) < 32 or any(side % 32 for side in size):
        raise ValueError(f"image_size={image_size}: a package takes one size, of multiples of 32 pixels.")
    if path.suffix != ".mlpackage" or precision not in ("float16", "float32"):
        raise ValueError(f"{path.name!r} must end in .mlpackage and {precision!r} be 'float16' or 'float32'.")
    from carelite.export import convert, quiet, trace  # notebook 13, which comes later

    network = FusedSemanticFPN(model)
    if precision == "float16":
        network = network.half().float()  # rounded here: the converter would turn what underflows into ±1e-7
    with quiet(), written(path) as partial:
        package = convert(trace(network, size, ("logits",)), size, precision, ["logits"])
        package.short_description = "Semantic FPN: an RGB image in 0..255, normalised inside; a score per class and pixel."
        package.save(str(partial))
        (partial / "executorch_debug_handle_mapping.json").unlink(missing_ok=True)
    return path


@torch.no_grad()
def verify_semantic_fpn(package: str | Path, model: SemanticFPN, images: UInt8[Tensor, "B 3 H W"]):
    """Check a package against the model it was made from, without Core ML; returns a `carelite.verification.Report`.

    Compared are the constants, bit for bit, the logits at every pixel, and the share of pixels with the same class.
    """
    from carelite import verification as check  # notebook 14, which comes later

    package, network = Path(package), FusedSemanticFPN(model)
    report = check.Report(package.name, images=len(images))
    model = copy.deepcopy(model).cpu().float().eval()
    try:
        program = check.load_program(package)
        half = any(constant.dtype == torch.float16 for constant in program.constants().values())
        report.precision, report.operations = "float16" if half else "float32", len(program.steps)
        report.image_size = program.image_size
        check.compare_constants(program, network, report)
        network = check.rounded_to_half(network) if half else network
        wanted = torch.cat([model.logits(((x / 255 - model.mean) / model.std)[None]) for x in images])
        reference = torch.cat([network(x[None].float()) for x in images])
        check.compare_outputs(program, images, {"logits": wanted}, {"logits": reference}, report)
    except check.PackageError as error:
        report.faults.append(str(error))
    return report
