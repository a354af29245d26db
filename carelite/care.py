from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from jaxtyping import Float
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import DropPath, LayerScale2d, calculate_drop_path_rates, trunc_normal_
from timm.models import generate_default_cfgs, register_model
from torch import Tensor, nn

from carelite.asymmetric_decoupling import DecoupledMixer, LocalBias, Strips
from carelite.backbone import Backbone, Head, Stage, StemConv, build_backbone
from carelite.dual_interaction import DualInteraction, Expansion, HandOver, Interaction
from carelite.linear_attention import LinearAttention


@dataclass(frozen=True)
class CAREConfig:
    """One CARE model: per stage the blocks, feature channels d, expansion ratios (r₁, r₂) and attention heads."""

    depths: tuple[int, ...]
    dims: tuple[int, ...]
    ratios: tuple[tuple[int, int], ...]
    num_heads: tuple[int, ...]  # of the linear attention in stages 3 and 4, head widths 16 and 32

    @property
    def memory_dims(self) -> tuple[int, ...]:
        """Memory channels m = d/3 of each stage."""
        return tuple(d // 3 for d in self.dims)


CARE_CONFIGS = {
    "care_s0": CAREConfig((2, 4, 8, 4), (24, 48, 96, 192), ((2, 2), (2, 4), (4, 4), (4, 4)), (1, 1, 2, 2)),
    "care_s1": CAREConfig((3, 6, 10, 6), (24, 48, 96, 192), ((2, 4), (2, 4), (4, 4), (4, 4)), (1, 1, 2, 2)),
    "care_s2": CAREConfig((3, 6, 10, 6), (24, 48, 144, 288), ((4, 4), (4, 4), (4, 4), (4, 4)), (1, 1, 3, 3)),
}


class CAREBlock(nn.Module):
    """[Z, X] → split → mixer on X → Inter₁ → Inter₂ with Z → layer scale → drop path → plus the input.

    (B, m + d, H, W) → (B, m + d, H, W), memory channels first. Arguments: `memory_dim`, m; `mixer` on d channels;
    `interaction` of memory and mixed features; `layer_scale`; `drop_path`, the chance to skip the block in training.
    Source: CARE, figure 3; official code.
    """

    def __init__(
        self, memory_dim: int, mixer: nn.Module, interaction: nn.Module, layer_scale: nn.Module, drop_path: float = 0.0
    ):
        super().__init__()
        self.memory_dim = memory_dim
        self.mixer = mixer
        self.interaction = interaction
        self.layer_scale = layer_scale
        self.drop_path = DropPath(drop_path)

    def update(self, x: Float[Tensor, "B C H W"]) -> Float[Tensor, "B D H W"]:
        """The block without scale and shortcut."""
        memory, features = x.tensor_split((self.memory_dim,), dim=1)
        return self.interaction(memory, self.mixer(features))

    def forward(self, x: Float[Tensor, "B C H W"]) -> Float[Tensor, "B C H W"]:
        return x + self.drop_path(self.layer_scale(self.update(x)))


class LastCAREBlock(CAREBlock):
    """The network's last block: Inter₂ ends expanded, so there is no shortcut to add to, no scale and no drop path.

    (B, m + d, H, W) → (B, r·(m + d), H, W). The official code applies drop path here all the same, which zeroes
    whole images in training; carelite does not. Source: official code.
    """

    def __init__(self, memory_dim: int, mixer: nn.Module, interaction: nn.Module):
        super().__init__(memory_dim, mixer, interaction, nn.Identity())

    def forward(self, x: Float[Tensor, "B C H W"]) -> Float[Tensor, "B D H W"]:
        return self.update(x)


class CARE(Backbone):
    """The CARE transformer: image (B, in_chans, H, W), H and W ≥ 32, to logits (B, num_classes).

    Arguments: `cfg`, a row of `CARE_CONFIGS`; `num_classes`, `global_pool`, `drop_rate` as in `Backbone`; `in_chans`;
    `drop_path_rate`, reached linearly at the last block; and the parts, the paper's by default: `global_mixers`
    (one `(d₁, num_heads)` builder per stage), `local_mixer(d₂)`, `mixer` that joins them,
    `inter1(d, r₁)`, `inter2(d + m, r₂)`, `last_inter2(d + m, r₂)` of the last block, `layer_scale(channels)`.
    Source: CARE, section 3 and table 1; official code.
    """

    def __init__(
        self,
        cfg: CAREConfig = CARE_CONFIGS["care_s0"],
        *,
        num_classes: int = 1000,
        in_chans: int = 3,
        global_pool: str = "avg",
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        global_mixers: tuple[Callable[[int, int], nn.Module], ...] = (Strips, Strips, LinearAttention, LinearAttention),
        local_mixer: Callable[[int], nn.Module] = LocalBias,
        mixer: Callable[..., nn.Module] = DecoupledMixer,
        inter1: Callable[[int, int], nn.Module] = Interaction,
        inter2: Callable[[int, int], nn.Module] = Interaction,
        last_inter2: Callable[[int, int], nn.Module] = Expansion,
        layer_scale: Callable[[int], nn.Module] = partial(LayerScale2d, init_values=1e-6),
    ):
        channels = [m + d for m, d in zip(cfg.memory_dims, cfg.dims)]
        drop_paths = iter(calculate_drop_path_rates(drop_path_rate, sum(cfg.depths)))
        stages = []
        for s, depth in enumerate(cfg.depths):
            blocks = []
            for t in range(depth):
                last = (s, t) == (len(cfg.depths) - 1, depth - 1)
                r1, r2 = cfg.ratios[s]
                parts = (
                    cfg.memory_dims[s],
                    mixer(cfg.dims[s], cfg.num_heads[s], global_mixers[s], local_mixer),
                    DualInteraction(inter1(cfg.dims[s], r1), (last_inter2 if last else inter2)(channels[s], r2)),
                )
                blocks.append(
                    LastCAREBlock(*parts) if last else CAREBlock(*parts, layer_scale(channels[s]), next(drop_paths))
                )
            stages.append(Stage(HandOver(channels[s - 1], channels[s]) if s else nn.Identity(), blocks))
        super().__init__(
            nn.Sequential(StemConv(in_chans, channels[0], 4, stride=4), nn.BatchNorm2d(channels[0])),
            stages,
            (*channels[:-1], cfg.ratios[-1][1] * channels[-1]),
            norm=nn.Identity(),
            head=partial(Head, act=nn.GELU, norm=partial(nn.LayerNorm, eps=1e-6)),
            num_classes=num_classes,
            global_pool=global_pool,
            drop_rate=drop_rate,
        )
        self.apply(init_weights)


def init_weights(module: nn.Module):
    """Convolutions and linear layers as the official code starts them: truncated normal, std 0.02; biases 0."""
    if isinstance(module, nn.Conv2d | nn.Linear):
        trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


CARE_RENAMES = {
    r"\.gamma$": ".layer_scale.gamma",
    r"\.token_mixer\.dwconvatt_1\.": ".mixer.global_mixer.vertical.",
    r"\.token_mixer\.dwconvatt_2\.": ".mixer.global_mixer.horizontal.",
    r"\.token_mixer\.qk\.": ".mixer.global_mixer.qk.",
    r"\.token_mixer\.dwconv1\.": ".mixer.local_mixer.convs.0.",
    r"\.token_mixer\.dwconv2\.": ".mixer.local_mixer.convs.1.",
    r"\.inter_layer\.inter(\d)_norm\.": r".interaction.inter\1.norm.",
    r"\.inter_layer\.inter(\d)_fc1\.": r".interaction.inter\1.expand.",
    r"\.inter_layer\.inter(\d)_conv\.": r".interaction.inter\1.depthwise.",
    r"\.inter_layer\.inter(\d)_fc2\.": r".interaction.inter\1.project.",
}

default_cfgs = generate_default_cfgs(
    {
        f"{name}.in1k": dict(
            num_classes=1000,
            input_size=(3, 224, 224),
            pool_size=(7, 7),
            crop_pct=0.875,
            interpolation="bicubic",
            mean=IMAGENET_DEFAULT_MEAN,
            std=IMAGENET_DEFAULT_STD,
            first_conv="stem.0",
            classifier=("head.fc", "dist_head.fc"),
        )
        for name in CARE_CONFIGS
    }
)


def build_care(variant: str, **kwargs) -> CARE:
    """Build a row of `CARE_CONFIGS` through timm."""
    source = "https://github.com/zhouyuan888888/CARE-Transformer"
    return build_backbone(CARE, variant, CARE_CONFIGS[variant], CARE_RENAMES, source, **kwargs)


@register_model
def care_s0(pretrained: bool = False, **kwargs) -> CARE:
    """CARE-S0: 7.340 M parameters (two heads, 1000 classes), 0.718 GMACs at 224×224."""
    return build_care("care_s0", pretrained=pretrained, **kwargs)


@register_model
def care_s1(pretrained: bool = False, **kwargs) -> CARE:
    """CARE-S1: 9.602 M parameters (two heads, 1000 classes), 1.029 GMACs at 224×224."""
    return build_care("care_s1", pretrained=pretrained, **kwargs)


@register_model
def care_s2(pretrained: bool = False, **kwargs) -> CARE:
    """CARE-S2: 19.481 M parameters (two heads, 1000 classes), 1.923 GMACs at 224×224."""
    return build_care("care_s2", pretrained=pretrained, **kwargs)
