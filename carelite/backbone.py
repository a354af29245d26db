import argparse
import re
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import timm
import torch
from jaxtyping import Float
from timm.layers import SelectAdaptivePool2d, trunc_normal_
from timm.models import build_model_with_cfg, load_state_dict, resolve_pretrained_cfg
from timm.models._features import feature_take_indices
from timm.models._manipulate import checkpoint_seq
from torch import Tensor, nn

MIN_SIZE = 32  # pixels; below, the last stage (stride 32) would have none
HEADS = ("head.fc", "dist_head.fc")


class StemConv(nn.Conv2d):
    """The first convolution of a network. Raises ValueError for images under 32 pixels a side."""

    def forward(self, x: Float[Tensor, "B C H W"]) -> Float[Tensor, "B D H2 W2"]:
        if min(x.shape[-2:]) < MIN_SIZE:
            size = " x ".join(map(str, x.shape[-2:]))
            raise ValueError(f"image of {size} pixels is too small: height and width must be at least {MIN_SIZE}.")
        return super().forward(x)


class Head(nn.Module):
    """A classifier on pooled features: activation → norm → dropout → linear, (B, C) → (B, classes).

    Arguments: `dim`, C; `num_classes`; `drop_rate`; `act` and `norm(dim)`, where the family has them.
    """

    def __init__(
        self,
        dim: int,
        num_classes: int,
        drop_rate: float = 0.0,
        act: Callable[[], nn.Module] = nn.Identity,
        norm: Callable[[int], nn.Module] = nn.Identity,
    ):
        super().__init__()
        self.act = act()
        self.norm = norm(dim)
        self.drop = nn.Dropout(drop_rate)
        self.fc = nn.Linear(dim, num_classes)
        trunc_normal_(self.fc.weight, std=0.02)
        nn.init.zeros_(self.fc.bias)

    def forward(self, x: Float[Tensor, "B C"]) -> Float[Tensor, "B K"]:
        return self.fc(self.drop(self.norm(self.act(x))))


class Stage(nn.Sequential):
    """A stage: `downsample` (Identity for none), then `blocks`, checkpointed on request."""

    def __init__(self, downsample: nn.Module, blocks: list[nn.Module]):
        super().__init__()
        self.downsample = downsample
        self.blocks = nn.Sequential(*blocks)
        self.grad_checkpointing = False

    def forward(self, x: Float[Tensor, "B C H W"]) -> Float[Tensor, "B D H2 W2"]:
        x = self.downsample(x)
        if self.grad_checkpointing and not torch.jit.is_scripting():
            return checkpoint_seq(self.blocks, x)
        return self.blocks(x)


class Backbone(nn.Module):
    """What both families share: four stages of stride 4 to 32, two averaged heads, and timm's interface.

    Arguments: `stem` (its first layer a `StemConv`); `stages`; `channels`, what each stage puts out; `norm`,
    applied to the last stage's output; `head(dim, num_classes, drop_rate)`, which builds one classifier;
    `num_classes` (0: pooled features); `global_pool`, "avg", "max", "avgmax" or "" (none); `drop_rate`, before
    the classifiers. In eval mode and, by default, in training the two heads' logits are averaged; after
    `set_distilled_training(True)` a model in training mode returns the pair (labels, teacher).
    """

    def __init__(
        self,
        stem: nn.Sequential,
        stages: list[Stage],
        channels: tuple[int, ...],
        *,
        norm: nn.Module,
        head: Callable[..., nn.Module],
        num_classes: int = 1000,
        global_pool: str = "avg",
        drop_rate: float = 0.0,
    ):
        super().__init__()
        self.num_features = self.head_hidden_size = channels[-1]
        self.feature_info = [
            dict(num_chs=c, reduction=4 * 2**i, module=f"stages.{i}") for i, c in enumerate(channels)
        ]
        self.distilled_training = False
        self.stem = stem
        self.stages = nn.Sequential(*stages)
        self.norm = norm
        self.make_head = partial(head, self.num_features, drop_rate=drop_rate)
        self.reset_classifier(num_classes, global_pool)

    def forward_features(self, x: Float[Tensor, "B C H W"]) -> Float[Tensor, "B D H2 W2"]:
        """The last stage's output, normalised, unpooled."""
        return self.norm(self.stages(self.stem(x)))

    def forward_head(self, x: Float[Tensor, "B D H W"], pre_logits: bool = False):
        """Pooled features where `pre_logits` or without classes; else logits, or the pair of a distilled training."""
        x = self.global_pool(x)
        if pre_logits or not self.num_classes:
            return x
        logits, teacher_logits = self.head(x), self.dist_head(x)
        if self.training and self.distilled_training:
            return logits, teacher_logits
        return (logits + teacher_logits) / 2

    def forward(self, x: Float[Tensor, "B C H W"]):
        return self.forward_head(self.forward_features(x))

    def forward_intermediates(
        self,
        x: Float[Tensor, "B C H W"],
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ):
        """timm's: the chosen stages' outputs, and before them the final features unless `intermediates_only`."""
        if output_fmt != "NCHW":
            raise ValueError(f"output_fmt={output_fmt!r} is not available: these models put out NCHW only.")
        take, last = feature_take_indices(len(self.stages), indices)
        outputs = []
        x = self.stem(x)
        for i, stage in enumerate(self.stages[: last + 1] if stop_early else self.stages):
            x = stage(x)
            if i in take:
                outputs.append(self.norm(x) if norm and i == len(self.stages) - 1 else x)
        if intermediates_only:
            return outputs
        return (self.norm(x) if i == len(self.stages) - 1 else x), outputs

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """timm's: drop what stands behind the last of the stages `indices`; returns the stages kept."""
        take, last = feature_take_indices(len(self.stages), indices)
        if prune_norm or last < len(self.stages) - 1:
            self.norm = nn.Identity()
        self.stages = self.stages[: last + 1]
        if prune_head:
            self.reset_classifier(0, "")
        return take

    def get_classifier(self) -> tuple[nn.Module, nn.Module]:
        """The two heads, (labels, teacher)."""
        return self.head, self.dist_head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None):
        """New heads for `num_classes` (0: none), and another pooling where `global_pool` is given."""
        pool = self.global_pool.pool_type if global_pool is None else global_pool
        if pool not in ("", "avg", "max", "avgmax"):
            raise ValueError(f"global_pool={pool!r} is unknown: choose 'avg', 'max', 'avgmax' or ''.")
        if num_classes < 0 or (num_classes and not pool):
            raise ValueError(
                f"num_classes={num_classes} with global_pool={pool!r}: a classifier needs pooling and "
                "a positive number of classes; num_classes=0 gives features."
            )
        self.num_classes = num_classes
        self.global_pool = SelectAdaptivePool2d(pool_type=pool, flatten=bool(pool))
        self.head = self.make_head(num_classes=num_classes) if num_classes else nn.Identity()
        self.dist_head = self.make_head(num_classes=num_classes) if num_classes else nn.Identity()

    def set_distilled_training(self, enable: bool = True):
        """Whether training returns the pair (labels' logits, teacher's logits) instead of their mean."""
        self.distilled_training = enable

    def set_grad_checkpointing(self, enable: bool = True):
        """Trade time for memory in training: recompute each block in the backward pass."""
        for stage in self.stages:
            stage.grad_checkpointing = enable

    def group_matcher(self, coarse: bool = False) -> dict:
        """timm's: patterns that sort parameters into layers."""
        blocks = [(r"^stages\.(\d+)\.downsample", (0,)), (r"^stages\.(\d+)\.blocks\.(\d+)", None), (r"^norm", (99999,))]
        return dict(stem=r"^stem", blocks=r"^stages\.(\d+)" if coarse else blocks)

    def no_weight_decay(self) -> set[str]:
        """Parameters to keep from weight decay beyond biases, norms and scales, which timm leaves out itself: none."""
        return set()


def read_checkpoint(path: str | Path) -> dict[str, Tensor]:
    """The state dict in a .safetensors or .pth file, bare or nested, wrappers' prefixes removed.

    Reads weights only; `argparse.Namespace`, which official CAS-ViT files contain, is allowed for this one file.
    Raises FileNotFoundError, or ValueError where the file holds no state dict.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no checkpoint at {path}; give the path of a .safetensors or .pth file.")
    with torch.serialization.safe_globals([argparse.Namespace]):
        state_dict = load_state_dict(str(path))
    if not state_dict or not all(isinstance(v, Tensor) for v in state_dict.values()):
        raise ValueError(f"{path} holds no state dict (a mapping from names to tensors); got {list(state_dict)[:5]}.")
    return state_dict


def checkpoint_filter(renames: dict[str, str]) -> Callable[[dict[str, Tensor], nn.Module], dict[str, Tensor]]:
    """timm's `pretrained_filter_fn` for a family: official names become ours, and what does not fit is an error.

    Arguments: `renames`, regular expressions on official keys and their replacements; our own keys match none.
    The filter raises ValueError, listing them, on keys that are missing, unknown or of another shape. Only the
    heads may differ, by class count; that is reported by a warning and the heads start fresh.
    """

    def rename(key: str) -> str:
        key = re.sub(r"^((module|_orig_mod)\.)+", "", key)
        for pattern, replacement in renames.items():
            key = re.sub(pattern, replacement, key)
        return key

    def filter_fn(state_dict: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
        given = {rename(key): value for key, value in state_dict.items()}
        is_head = re.compile(r"^(dist_)?head\.").match
        weight = given.get("head.fc.weight")
        classes = 0 if weight is None else weight.shape[0]
        wanted = {k: v for k, v in model.state_dict().items() if classes or not is_head(k)}
        if not model.num_classes:
            given = {k: v for k, v in given.items() if not is_head(k)}
        # A class count or a number of image channels of one's own is no misfit: timm adapts both.
        adapted = ("stem.0.weight", *(f"{h}.{kind}" for h in HEADS for kind in ("weight", "bias")))
        faults = [f"missing {k}" for k in wanted if k not in given]
        faults += [f"unknown {k}" for k in given if k not in wanted]
        faults += [
            f"{k}: shape {tuple(given[k].shape)}, expected {tuple(v.shape)}"
            for k, v in wanted.items()
            if k in given and given[k].shape != v.shape and k not in adapted
        ]
        if faults:
            more = f"\n  … and {len(faults) - 20} more" if len(faults) > 20 else ""
            raise ValueError(
                f"the checkpoint does not fit {type(model).__name__}: {len(faults)} of its tensors differ. "
                "Is it of another variant?\n  " + "\n  ".join(faults[:20]) + more
            )
        if model.num_classes and classes != model.num_classes:
            warnings.warn(
                f"the checkpoint has {classes} classes, the model {model.num_classes}: both heads start fresh, "
                "everything else is loaded.",
                stacklevel=2,
            )
        model.pretrained_cfg["num_classes"] = classes  # what timm compares the model's own count with
        return given

    return filter_fn


def build_backbone(cls: type[Backbone], variant: str, cfg, renames: dict[str, str], source: str, **kwargs) -> Backbone:
    """Build `cls(cfg)` through timm, which adds loading, `features_only` and adaptation of channels and heads.

    Arguments: `variant`, the registered name; `renames`, see `checkpoint_filter`; `source`, where official files are.
    Raises RuntimeError for `pretrained=True` without a file.
    """
    overlay = kwargs.get("pretrained_cfg_overlay")
    weights = resolve_pretrained_cfg(variant, kwargs.get("pretrained_cfg"), overlay)
    if kwargs.setdefault("pretrained", False) and not (weights.has_weights or weights.state_dict):
        raise RuntimeError(
            f"{variant} comes without weights. The official files are at {source}: download one, then call "
            f'carelite.create_model("{variant}", checkpoint="path/to/file").'
        )
    feature_cfg = dict(out_indices=kwargs.pop("out_indices", (0, 1, 2, 3)), flatten_sequential=True)
    return build_model_with_cfg(
        cls, variant, model_cfg=cfg, feature_cfg=feature_cfg, pretrained_filter_fn=checkpoint_filter(renames), **kwargs
    )


def list_models() -> list[str]:
    """The names of carelite's models, as timm knows them."""
    return timm.list_models(["care_s?", "cas_vit_*"])


def create_model(name: str, *, checkpoint: str | Path | None = None, **kwargs) -> nn.Module:
    """Build a carelite model, from random weights or from a checkpoint file of the official code or of ours.

    Arguments: `name`, one of `list_models()`; `checkpoint`, a .safetensors or .pth file, see `read_checkpoint`;
    keywords as timm's models take them (`num_classes`, by default the checkpoint's; `in_chans`; `drop_rate`;
    `drop_path_rate`; `global_pool`; `features_only` and `out_indices`) and the family's own parts.
    Raises ValueError for an unknown name or a checkpoint that does not fit, TypeError for an unknown keyword.
    """
    if name not in list_models():
        raise ValueError(f"unknown model {name!r}; carelite has {', '.join(list_models())}.")
    if checkpoint is None:
        return timm.create_model(name, **kwargs)
    state_dict = read_checkpoint(checkpoint)
    if not kwargs.get("features_only") and "head.fc.bias" in state_dict:
        kwargs.setdefault("num_classes", len(state_dict["head.fc.bias"]))
    overlay = {**(kwargs.pop("pretrained_cfg_overlay", None) or {}), "state_dict": state_dict}
    kwargs["pretrained"] = True
    model = timm.create_model(name, pretrained_cfg_overlay=overlay, **kwargs)
    model.pretrained_cfg.pop("state_dict")  # it did its work; the model need not carry it twice
    return model
