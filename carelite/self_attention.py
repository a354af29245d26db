from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn


def softmax_attention(
    q: Float[Tensor, "B heads N head_dim"],
    k: Float[Tensor, "B heads N head_dim"],
    v: Float[Tensor, "B heads N head_dim"],
) -> Float[Tensor, "B heads N head_dim"]:
    """Softmax attention, with its N×N matrix formed in the open.

    Arguments: queries, keys and values, each (B, heads, N, head_dim).
    Source: CARE, section 3.1; Vaswani et al. 2017, equation 1.
    """
    similarity = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5  # (B, heads, N, N)
    return similarity.softmax(dim=-1) @ v  # (B, heads, N, head_dim)


class SoftmaxAttention(nn.Module):
    """Multi-head softmax self-attention on a feature map: a mixer (B, C, H, W) → (B, C, H, W).

    Arguments: `dim`, channels; `num_heads`, which must divide `dim` (else ValueError).
    Memory and time grow with (H·W)². Source: Vaswani et al. 2017, section 3.2.
    """

    def __init__(self, dim: int, num_heads: int = 1):
        super().__init__()
        if dim % num_heads:
            raise ValueError(f"dim={dim} is not divisible by num_heads={num_heads}; choose a divisor of dim.")
        self.num_heads = num_heads
        self.qkv = nn.Conv2d(dim, 3 * dim, 1)
        self.proj = nn.Conv2d(dim, dim, 1)

    def forward(self, x: Float[Tensor, "B C H W"]) -> Float[Tensor, "B C H W"]:
        pattern = "B (three heads c) H W -> three B heads (H W) c"
        q, k, v = rearrange(self.qkv(x), pattern, three=3, heads=self.num_heads)
        out = softmax_attention(q, k, v)  # (B, heads, N, head_dim)
        return self.proj(rearrange(out, "B heads (H W) c -> B (heads c) H W", H=x.shape[2]))
