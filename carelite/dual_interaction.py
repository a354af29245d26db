import torch
from jaxtyping import Float
from torch import Tensor, nn

from carelite.asymmetric_decoupling import depthwise


class Expansion(nn.Module):
    """BatchNorm → 1×1 convolution to r·C channels → GELU → 3×3 depthwise convolution.

    (B, C, H, W) → (B, r·C, H, W). The first half of an interaction block, and by itself the Inter₂ of the
    network's last block. Arguments: `dim`, C; `ratio`, r. Source: CARE, equations 12 and 13; official code.
    """

    def __init__(self, dim: int, ratio: int):
        super().__init__()
        self.norm = nn.BatchNorm2d(dim)
        self.expand = nn.Conv2d(dim, ratio * dim, 1)
        self.act = nn.GELU()
        self.depthwise = depthwise(ratio * dim, 3)

    def forward(self, x: Float[Tensor, "B C H W"]) -> Float[Tensor, "B rC H W"]:
        return self.depthwise(self.act(self.expand(self.norm(x))))


class Interaction(Expansion):
    """An interaction block: an expansion, a 1×1 convolution back to C channels, plus the input.

    (B, C, H, W) → (B, C, H, W). Arguments: `dim`, C; `ratio`, r. Source: CARE, equations 12 and 13.
    """

    def __init__(self, dim: int, ratio: int):
        super().__init__(dim, ratio)
        self.project = nn.Conv2d(ratio * dim, dim, 1)

    def forward(self, x: Float[Tensor, "B C H W"]) -> Float[Tensor, "B C H W"]:
        return x + self.project(super().forward(x))


class DualInteraction(nn.Module):
    """Inter₁ on the mixed features, then Inter₂ on memory and features together.

    Z of (B, m, H, W) and the mixer's output of (B, d, H, W) give [Z, X] of (B, m + d, H, W), memory first.
    Arguments: `inter1` and `inter2`, modules on d and on m + d channels. Source: CARE, section 3.4.
    """

    def __init__(self, inter1: nn.Module, inter2: nn.Module):
        super().__init__()
        self.inter1 = inter1
        self.inter2 = inter2

    def forward(
        self, memory: Float[Tensor, "B m H W"], features: Float[Tensor, "B d H W"]
    ) -> Float[Tensor, "B C H W"]:
        return self.inter2(torch.cat([memory, self.inter1(features)], dim=1))


class HandOver(nn.Sequential):
    """BatchNorm → 2×2 convolution of stride 2 on [Z, X]: old features are replayed into the new memory.

    (B, C, H, W) → (B, C', ⌊H/2⌋, ⌊W/2⌋). Arguments: `in_channels`, C, and `out_channels`, C', each memory
    plus features of its stage. Source: CARE, section 3.4; official code (no padding, with bias).
    """

    def __init__(self, in_channels: int, out_channels: int):
        super().__init__(nn.BatchNorm2d(in_channels), nn.Conv2d(in_channels, out_channels, 2, stride=2))
