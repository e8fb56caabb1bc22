"""What the Triton kernels compute on one tile: products, rounding, softcap, an adapter's keys."""

import triton
import triton.language as tl


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr, WIDEN: tl.constexpr):
    """acc + a b. Triton's interpreter cannot multiply bfloat16; widened products are the same."""
    if WIDEN:
        return acc + tl.dot(a.to(tl.float32), b.to(tl.float32))
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def narrow(x, dtype: tl.constexpr, WIDEN: tl.constexpr):
    """float32 to `dtype`, to nearest even; the interpreter would cut bfloat16 off."""
    if WIDEN:
        bits = x.to(tl.int32, bitcast=True)
        x = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def capped(scores, softcap):
    """softcap * tanh(scores / softcap), without overflow."""
    shrunk = tl.exp(-2.0 * tl.abs(scores) / softcap)
    size = softcap * (1.0 - shrunk) / (1.0 + shrunk)
    return tl.where(scores < 0, -size, size)


@triton.jit
def lora_keys(k, n, d, seen, key_strip, KEY_RANK: tl.constexpr, HEAD_DIM: tl.constexpr,
               PRECISION: tl.constexpr, WIDEN: tl.constexpr):  # fmt: skip
    """k [head_dim, keys] + rotate(z b), with rotate(x) = x * cos + rotate_half(x) * sin."""
    z_ptr, z_row, b, b_turned, cos_ptr, cos_row, sin_ptr, sin_row = key_strip
    r = tl.arange(0, b.shape[1])
    z = tl.load(
        z_ptr + n[None, :] * z_row + r[:, None],
        mask=seen[None, :] & (r < KEY_RANK)[:, None],
        other=0.0,
    )
    whole = seen[None, :] & (d < HEAD_DIM)[:, None]
    cos = tl.load(cos_ptr + n[None, :] * cos_row + d[:, None], mask=whole, other=0.0)
    sin = tl.load(sin_ptr + n[None, :] * sin_row + d[:, None], mask=whole, other=0.0)
    zero = tl.zeros([d.shape[0], n.shape[0]], tl.float32)
    x = dot(b, z, zero, PRECISION, WIDEN) * cos.to(tl.float32)
    turned = dot(b_turned, z, zero, PRECISION, WIDEN) * sin.to(tl.float32)
    return narrow(k.to(tl.float32) + x + turned, k.dtype, WIDEN)


@triton.jit
def load_key_b(ptr, rank_stride, r, d, KEY_RANK: tl.constexpr, HEAD_DIM: tl.constexpr):
    """b of the keys [head_dim, rank], and the same with rotate_half applied to head_dim."""
    half: tl.constexpr = HEAD_DIM // 2
    inside = (d < HEAD_DIM)[:, None] & (r < KEY_RANK)[None, :]
    partner = tl.where(d < half, d + half, d - half)
    b = tl.load(ptr + r[None, :] * rank_stride + d[:, None], mask=inside, other=0.0)
    turned = tl.load(ptr + r[None, :] * rank_stride + partner[:, None], mask=inside, other=0.0)
    sign = tl.where(d < half, -1.0, 1.0)[:, None]
    return b, (turned.to(tl.float32) * sign).to(b.dtype)
