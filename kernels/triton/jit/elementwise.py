"""Norms, activation, rotary embedding with the KV write, and moves of whole blocks."""

import triton
import triton.language as tl


@triton.jit
def add_rms_norm(
    x_ptr,  # [num_rows, width], rows contiguous; overwritten by the sum
    other_ptr,  # like x, contiguous, or None
    weight_ptr,  # [width]
    out_ptr,  # [num_rows, width] contiguous
    x_stride,
    eps,
    width: tl.constexpr,
    columns: tl.constexpr,  # width, filled up to a power of two
):
    """Root mean square layer normalisation (Zhang, Sennrich 2019) of `x + other`, as rounded; one program per row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, columns)
    is_column = column < width
    x = tl.load(x_ptr + row * x_stride + column, mask=is_column, other=0.0).to(tl.float32)
    if other_ptr is not None:
        x += tl.load(other_ptr + row * width + column, mask=is_column, other=0.0).to(tl.float32)
        rounded = x.to(x_ptr.dtype.element_ty)
        tl.store(x_ptr + row * x_stride + column, rounded, mask=is_column)
        x = rounded.to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=is_column, other=0.0).to(tl.float32)
    normed = x * (1 / tl.sqrt(tl.sum(x * x, 0) / width + eps)) * weight
    tl.store(out_ptr + row * width + column, normed.to(out_ptr.dtype.element_ty), mask=is_column)


@triton.jit
def silu_and_mul(gate_up_ptr, out_ptr, width, columns: tl.constexpr):
    """`gate_up` [num_rows, 2 * width] contiguous, gates first -> [num_rows, width] (SwiGLU, Shazeer 2020)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    is_column = column < width
    gate = tl.load(gate_up_ptr + row * 2 * width + column, mask=is_column, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * width + width + column, mask=is_column, other=0.0).to(tl.float32)
    out = gate / (1 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * width + column, out.to(out_ptr.dtype.element_ty), mask=is_column)


@triton.jit
def rotary_and_write_kv(
    qkv_ptr,  # [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim] contiguous; queries are overwritten
    cos_sin_ptr,  # float32 [num_tokens, head_dim] contiguous
    pool_ptr,  # [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]
    slots_ptr,  # int64 [num_tokens], negative: written nowhere
    q_norm_ptr,  # [head_dim] or None
    k_norm_ptr,  # [head_dim] or None
    layer_offset,  # of the layer's keys in a block, in elements
    block_stride,
    eps,
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    block_size: tl.constexpr,
    head_dim: tl.constexpr,
    half: tl.constexpr,  # head_dim / 2, filled up to a power of two
):
    """Rotary position embedding (Su et al. 2021), halves paired; one program per token and head of the projection."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    column = tl.arange(0, half)
    is_column = column < head_dim // 2
    head_ptr = qkv_ptr + (token * (num_heads + 2 * num_kv_heads) + head) * head_dim
    first = tl.load(head_ptr + column, mask=is_column, other=0.0)
    second = tl.load(head_ptr + head_dim // 2 + column, mask=is_column, other=0.0)
    if head < num_heads + num_kv_heads:
        if q_norm_ptr is not None:  # noqa: SIM102 - known to the compiler, the next one is not
            if head < num_heads:
                first, second = _normalised(first, second, q_norm_ptr, eps, column, is_column, head_dim)
        if k_norm_ptr is not None:  # noqa: SIM102
            if head >= num_heads:
                first, second = _normalised(first, second, k_norm_ptr, eps, column, is_column, head_dim)
        cos = tl.load(cos_sin_ptr + token * head_dim + column, mask=is_column, other=0.0)
        sin = tl.load(cos_sin_ptr + token * head_dim + head_dim // 2 + column, mask=is_column, other=0.0)
        left, right = first.to(tl.float32), second.to(tl.float32)
        first = (left * cos - right * sin).to(qkv_ptr.dtype.element_ty)
        second = (right * cos + left * sin).to(qkv_ptr.dtype.element_ty)
    if head < num_heads:
        tl.store(head_ptr + column, first, mask=is_column)
        tl.store(head_ptr + head_dim // 2 + column, second, mask=is_column)
    else:
        slot = tl.load(slots_ptr + token)
        piece = layer_offset + (head - num_heads) * block_size * head_dim  # values follow on the last head's keys
        slot_ptr = pool_ptr + slot // block_size * block_stride + piece + slot % block_size * head_dim
        is_written = is_column & (slot >= 0)
        tl.store(slot_ptr + column, first.to(pool_ptr.dtype.element_ty), mask=is_written)
        tl.store(slot_ptr + head_dim // 2 + column, second.to(pool_ptr.dtype.element_ty), mask=is_written)


@triton.jit
def _normalised(first, second, weight_ptr, eps, column, is_column, head_dim: tl.constexpr):
    """A head's two halves after its rms_norm, rounded to their dtype."""
    left, right = first.to(tl.float32), second.to(tl.float32)
    factor = 1 / tl.sqrt((tl.sum(left * left, 0) + tl.sum(right * right, 0)) / head_dim + eps)
    left_weight = tl.load(weight_ptr + column, mask=is_column, other=0.0).to(tl.float32)
    right_weight = tl.load(weight_ptr + head_dim // 2 + column, mask=is_column, other=0.0).to(tl.float32)
    return (left * factor * left_weight).to(first.dtype), (right * factor * right_weight).to(first.dtype)


@triton.jit
def move_blocks(
    source_ptr,  # [., num_words]
    target_ptr,  # [., num_words]
    sources_ptr,  # int64 [n] which blocks of the source, or None: the first n
    targets_ptr,  # int64 [n] where they go, or None: the first n
    num_words,
    words: tl.constexpr,
):
    """Copies n whole blocks as words, whatever they hold."""
    index = tl.program_id(0).to(tl.int64)
    source, target = index, index
    if sources_ptr is not None:
        source = tl.load(sources_ptr + index)
    if targets_ptr is not None:
        target = tl.load(targets_ptr + index)
    word = tl.program_id(1) * words + tl.arange(0, words)
    content = tl.load(source_ptr + source * num_words + word, mask=word < num_words)
    tl.store(target_ptr + target * num_words + word, content, mask=word < num_words)
