"""Paged attention as one kernel in two schedules with the same bits, and the merge that the second one needs.

Online softmax as in FlashAttention-2 (Dao 2023), keys split among programs as in Flash-Decoding (Dao, Haziza, Massa,
Sizov 2023), block tables as in PagedAttention (Kwon et al. 2023). What differs: the split is a fixed number of keys
counted from position 0, it exists in both schedules, and every tile has one size. One program walks the splits of its
rows in order and merges each into the total (`is_split` False), or several programs take the splits in turn and write
each of them down, and `merge_splits` does the same merges in the same order. So a row's bits depend neither on what is
beside it nor on whether it was a decode or part of a prompt's chunk.

Launched with `enable_fp_fusion=False`: which multiplication and addition a compiler fuses must not differ between the
schedules.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["table_stride", "num_splits"])
def paged_attention(
    query_ptr,  # [num_tokens, num_heads, head_dim], heads contiguous
    pool_ptr,  # [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]
    out_ptr,  # [num_tokens, num_heads, head_dim] contiguous
    partial_ptr,  # float32 [num_split_tokens, num_heads, num_splits, head_dim]: each split's sum of weighted values
    stats_ptr,  # float32 [num_split_tokens, num_heads, num_splits, 2]: its maximum and its sum of weights
    items_ptr,  # int32 [num_items, 5]: block table, first query row, number of tokens, context length, first partial
    tables_ptr,  # int64 [num_seqs, table_stride]
    scale,  # of the scores, times log2(e)
    layer_offset,  # of the layer's keys in a block, in elements
    query_stride,
    block_stride,
    table_stride,
    num_splits,
    group: tl.constexpr,  # query heads that share a kv head
    num_kv_heads: tl.constexpr,
    block_size: tl.constexpr,
    head_dim: tl.constexpr,
    dim: tl.constexpr,  # head_dim, filled up to a power of two
    rows: tl.constexpr,  # query rows of a tile: tokens * group
    tile: tl.constexpr,  # keys of a tile
    split: tl.constexpr,  # keys of a split
    is_split: tl.constexpr,
):
    item_ptr = items_ptr + tl.program_id(0) * 5
    kv_head = tl.program_id(1)
    num_tokens = tl.load(item_ptr + 2)
    context_len = tl.load(item_ptr + 3)
    num_keys = context_len + num_tokens
    first_split = 0
    stride = 1
    last_split = (num_keys + split - 1) // split
    if is_split:
        first_split = tl.program_id(2)
        stride = tl.num_programs(2)
        if first_split >= last_split:
            return
    table_ptr = tables_ptr + tl.load(item_ptr).to(tl.int64) * table_stride

    row = tl.arange(0, rows)
    column = tl.arange(0, dim)
    token = row // group
    head = kv_head * group + row % group
    is_row = token < num_tokens
    is_column = column < head_dim
    is_cell = is_row[:, None] & is_column[None, :]
    position = context_len + token
    query_row = (tl.load(item_ptr + 1) + token).to(tl.int64)
    query_at = query_row[:, None] * query_stride + head[:, None] * head_dim + column[None, :]
    query = tl.load(query_ptr + query_at, mask=is_cell, other=0.0)
    kv_stride = num_kv_heads * block_size * head_dim
    key_ptr = pool_ptr + layer_offset + kv_head * block_size * head_dim

    total_max = tl.full((rows,), float("-inf"), tl.float32)
    total_sum = tl.full((rows,), 0.0, tl.float32)
    total = tl.full((rows, dim), 0.0, tl.float32)
    for index in range(first_split, last_split, stride):
        part_max = tl.full((rows,), float("-inf"), tl.float32)
        part_sum = tl.full((rows,), 0.0, tl.float32)
        part = tl.full((rows, dim), 0.0, tl.float32)
        for start in range(index * split, tl.minimum(index * split + split, num_keys), tile):
            key_position = start + tl.arange(0, tile)
            is_key = key_position < num_keys  # no other slot is read: it may hold NaN
            block = tl.load(table_ptr + key_position // block_size, mask=is_key, other=0).to(tl.int64)
            slot_at = block * block_stride + key_position % block_size * head_dim
            kv_at = slot_at[:, None] + column[None, :]
            is_slot = is_key[:, None] & is_column[None, :]
            key = tl.load(key_ptr + kv_at, mask=is_slot, other=0.0)
            scores = tl.dot(query, tl.trans(key.to(query.dtype)), input_precision="ieee") * scale
            scores = tl.where(key_position[None, :] <= position[:, None], scores, float("-inf"))
            highest = tl.maximum(part_max, tl.max(scores, 1))
            shift = tl.where(highest == float("-inf"), 0.0, highest)  # a row may see no key of this split
            weights = tl.exp2(scores - shift[:, None])
            decay = tl.exp2(part_max - shift)
            value = tl.load(key_ptr + kv_stride + kv_at, mask=is_slot, other=0.0)
            part_sum = part_sum * decay + tl.sum(weights, 1)
            weights = weights.to(query.dtype)
            part = tl.dot(weights, value.to(query.dtype), part * decay[:, None], input_precision="ieee")
            part_max = highest
        if is_split:
            partial_row = (tl.load(item_ptr + 4) + token).to(tl.int64) * (num_kv_heads * group) + head
            partial_row = partial_row * num_splits + index
            tl.store(partial_ptr + partial_row[:, None] * head_dim + column[None, :], part, mask=is_cell)
            tl.store(stats_ptr + partial_row * 2, part_max, mask=is_row)
            tl.store(stats_ptr + partial_row * 2 + 1, part_sum, mask=is_row)
        else:
            highest = tl.maximum(total_max, part_max)  # never -inf: split 0 holds position 0, which every row sees
            decay, weight = tl.exp2(total_max - highest), tl.exp2(part_max - highest)
            total_sum = total_sum * decay + part_sum * weight
            total = total * decay[:, None] + part * weight[:, None]
            total_max = highest
    if not is_split:
        out_at = (query_row * (num_kv_heads * group) + head)[:, None] * head_dim + column[None, :]
        tl.store(out_ptr + out_at, (total / total_sum[:, None]).to(out_ptr.dtype.element_ty), mask=is_cell)


@triton.jit(do_not_specialize=["num_splits"])
def merge_splits(
    partial_ptr,
    stats_ptr,
    out_ptr,
    rows_ptr,  # int32 [num_split_tokens, 2]: query row, number of keys
    num_splits,
    num_heads: tl.constexpr,
    head_dim: tl.constexpr,
    dim: tl.constexpr,
    split: tl.constexpr,
):
    """One program per token and head. The arithmetic is that of the walk above, word for word."""
    token, head = tl.program_id(0), tl.program_id(1)
    query_row = tl.load(rows_ptr + token * 2).to(tl.int64)
    num_keys = tl.load(rows_ptr + token * 2 + 1)
    column = tl.arange(0, dim)
    is_column = column < head_dim
    first = (token.to(tl.int64) * num_heads + head) * num_splits
    total_max = tl.full((1,), float("-inf"), tl.float32)
    total_sum = tl.full((1,), 0.0, tl.float32)
    total = tl.full((dim,), 0.0, tl.float32)
    for index in range(0, (num_keys + split - 1) // split):
        one = first + index + tl.arange(0, 1)
        part_max = tl.load(stats_ptr + one * 2)
        part_sum = tl.load(stats_ptr + one * 2 + 1)
        part = tl.load(partial_ptr + (first + index) * head_dim + column, mask=is_column, other=0.0)
        highest = tl.maximum(total_max, part_max)
        decay, weight = tl.exp2(total_max - highest), tl.exp2(part_max - highest)
        total_sum = total_sum * decay + part_sum * weight
        total = total * decay + part * weight
        total_max = highest
    out_at = (query_row * num_heads + head) * head_dim + column
    tl.store(out_ptr + out_at, (total / total_sum).to(out_ptr.dtype.element_ty), mask=is_column)
