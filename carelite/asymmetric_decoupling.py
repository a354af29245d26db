from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from carelite.linear_attention import LinearAttention


def depthwise(dim: int, kernel_size: int | tuple[int, int]) -> nn.Conv2d:
    """A depthwise convolution that keeps the size (odd sides, zero padding), with bias."""
    sides = kernel_size if isinstance(kernel_size, tuple) else (kernel_size, kernel_size)
    return nn.Conv2d(dim, dim, sides, padding=tuple(side // 2 for side in sides), groups=dim)


class LocalBias(nn.Module):
    """Multi-scale local bias: equal parts of the channels, each through its own depthwise kernel.

    A mixer (B, C, H, W) → (B, C, H, W). Arguments: `dim`, channels; `kernel_sizes`, odd sides.
    Raises ValueError where the kernels do not share `dim` evenly.
    Source: CARE, section 3.3 (3×3 and 7×7).
    """

    def __init__(self, dim: int, kernel_sizes: tuple[int, ...] = (3, 7)):
        super().__init__()
        if dim % len(kernel_sizes):
            raise ValueError(f"dim={dim} cannot be shared evenly by {len(kernel_sizes)} kernels; change one of them.")
        part = dim // len(kernel_sizes)
        self.convs = nn.ModuleList(depthwise(part, k) for k in kernel_sizes)

    def forward(self, x: Float[Tensor, "B C H W"]) -> Float[Tensor, "B C H W"]:
        parts = x.chunk(len(self.convs), dim=1)
        return torch.cat([conv(part) for conv, part in zip(self.convs, parts)], dim=1)


class Strips(nn.Module):
    """The sum of a k×1 and a 1×k depthwise convolution: the global learner of stages 1 and 2.

    A mixer (B, C, H, W) → (B, C, H, W); `num_heads` is part of the mixer protocol and has no effect here.
    Source: CARE, section 3.3; the official code has k = 11.
    """

    def __init__(self, dim: int, num_heads: int = 1, kernel_size: int = 11):
        super().__init__()
        self.vertical = depthwise(dim, (kernel_size, 1))
        self.horizontal = depthwise(dim, (1, kernel_size))

    def forward(self, x: Float[Tensor, "B C H W"]) -> Float[Tensor, "B C H W"]:
        return self.vertical(x) + self.horizontal(x)


class DecoupledMixer(nn.Module):
    """Asymmetric feature decoupling: the first d₁ channels mix globally, the other d₂ locally.

    A mixer (B, d, H, W) → (B, d, H, W), output channels in the order [global, local].
    Arguments: `dim`, d; `num_heads` of the global mixer; `global_mixer(d₁, num_heads)` and
    `local_mixer(d₂)`, which build the two learners; `global_dim`, d₁, by default d/3 (ValueError
    where that is no whole number). Source: CARE, section 3.3.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 1,
        global_mixer: Callable[[int, int], nn.Module] = LinearAttention,
        local_mixer: Callable[[int], nn.Module] = LocalBias,
        global_dim: int | None = None,
    ):
        super().__init__()
        if global_dim is None and dim % 3:
            raise ValueError(f"dim={dim} is not divisible by 3; give global_dim, the channels of the global mixer.")
        global_dim = dim // 3 if global_dim is None else global_dim
        if not 0 < global_dim < dim:
            raise ValueError(f"global_dim={global_dim} must lie between 1 and dim - 1 = {dim - 1}.")
        self.dims = (global_dim, dim - global_dim)
        self.global_mixer = global_mixer(global_dim, num_heads)
        self.local_mixer = local_mixer(dim - global_dim)

    def forward(self, x: Float[Tensor, "B d H W"]) -> Float[Tensor, "B d H W"]:
        to_global, to_local = x.split(self.dims, dim=1)  # (B, d₁, H, W), (B, d₂, H, W)
        return torch.cat([self.global_mixer(to_global), self.local_mixer(to_local)], dim=1)
