from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F


def elu_plus_one(x: Tensor) -> Tensor:
    """φ(x) = elu(x) + 1 > 0, the feature map of the official CARE code (Katharopoulos et al. 2020)."""
    return F.elu(x) + 1


def linear_attention(
    q: Float[Tensor, "B heads head_dim N"],
    k: Float[Tensor, "B heads head_dim N"],
    v: Float[Tensor, "B heads head_dim N"],
    eps: float = 1e-6,
) -> Float[Tensor, "B heads head_dim N"]:
    """Linear attention o_i = q_i KV / (q_i·k̄ + eps), KV = Σ_j k_jᵀ v_j / N, k̄ = Σ_j k_j / N.

    Arguments: queries and keys that already went through φ, and values, channels before tokens.
    No N×N matrix is formed and nothing is transposed in memory. k is divided by N *before* the sums,
    so that they stay of the size of one term. Source: CARE, section 3.1, and the official code.
    """
    k = k / k.shape[-1]
    kv = v @ k.transpose(-2, -1)  # (B, heads, head_dim, head_dim)
    normaliser = k.sum(dim=-1, keepdim=True).transpose(-2, -1) @ q  # (B, heads, 1, N)
    return kv @ q / (normaliser + eps)  # (B, heads, head_dim, N)


class LinearAttention(nn.Module):
    """CARE's linear attention on a feature map: a mixer (B, C, H, W) → (B, C, H, W).

    One 1×1 convolution gives q and k; v is the input itself and there is no output projection.
    In half precision and under autocast, φ and the sums run in float32.
    Arguments: `dim`, channels; `num_heads`, which must divide `dim` (else ValueError);
    `phi`, the feature map applied to q and k. Source: official CARE code (the paper writes φ = identity).
    """

    def __init__(self, dim: int, num_heads: int = 1, phi: Callable[[Tensor], Tensor] = elu_plus_one):
        super().__init__()
        if dim % num_heads:
            raise ValueError(f"dim={dim} is not divisible by num_heads={num_heads}; choose a divisor of dim.")
        self.num_heads = num_heads
        self.phi = phi
        self.qk = nn.Conv2d(dim, 2 * dim, 1)

    def forward(self, x: Float[Tensor, "B C H W"]) -> Float[Tensor, "B C H W"]:
        qk, device = self.qk(x), x.device.type
        if qk.dtype in (torch.float16, torch.bfloat16):
            with torch.autocast(device, enabled=False):
                return self.attend(qk.float(), x.float()).to(x.dtype)
        return self.attend(qk, x)

    def attend(self, qk: Float[Tensor, "B C2 H W"], x: Float[Tensor, "B C H W"]) -> Float[Tensor, "B C H W"]:
        """Attention from the pre-activations of q and k (2C channels, q first) and the values x."""
        heads = self.num_heads
        q, k = self.phi(qk.unflatten(1, (2 * heads, -1)).flatten(-2)).chunk(2, dim=1)  # (B, heads, head_dim, N)
        v = x.unflatten(1, (heads, -1)).flatten(-2)  # (B, heads, head_dim, N)
        out = linear_attention(q, k, v).reshape(x.shape)  # (B, C, H, W)
        if qk.is_contiguous(memory_format=torch.channels_last):  # matrix products forget the layout: keep it
            out = out.contiguous(memory_format=torch.channels_last)
        return out
