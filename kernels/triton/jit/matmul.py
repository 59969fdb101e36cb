"""A matrix product whose rows keep their bits whatever the number of rows, in two schedules with the same bits.

The sum over the depth is taken in chunks of a fixed length: inside a chunk in tiles, in order, then chunk after chunk
onto the total. One program does all chunks of its tile, or (`is_split`, for few rows, where the tiles alone would leave
most of the device idle) every chunk has its own and `add_chunks` adds them in the same order. The idea of a fixed order
at fixed tile sizes: "Defeating Nondeterminism in LLM Inference" (He, 2025); the split: split-K as in CUTLASS.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows"])
def matmul(
    x_ptr,  # [num_rows, depth], rows contiguous
    weight_ptr,  # [num_columns, depth] contiguous
    bias_ptr,  # [num_columns] or None
    out_ptr,  # [num_rows, num_columns] contiguous; float32 [num_chunks, num_rows, num_columns] if is_split
    num_rows,
    num_columns,
    depth,
    x_stride,
    rows: tl.constexpr,
    columns: tl.constexpr,
    tile: tl.constexpr,
    chunk: tl.constexpr,
    is_split: tl.constexpr,
):
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    is_row, is_column = row < num_rows, column < num_columns
    x_row_ptr = x_ptr + row.to(tl.int64)[:, None] * x_stride
    weight_column_ptr = weight_ptr + column.to(tl.int64)[None, :] * depth
    first, last = 0, (depth + chunk - 1) // chunk
    if is_split:
        first = tl.program_id(2)
        last = first + 1
    total = tl.full((rows, columns), 0.0, tl.float32)
    for index in range(first, last):
        part = tl.full((rows, columns), 0.0, tl.float32)
        for start in range(index * chunk, tl.minimum(index * chunk + chunk, depth), tile):
            at = start + tl.arange(0, tile)
            is_deep = at < depth
            x = tl.load(x_row_ptr + at[None, :], mask=is_row[:, None] & is_deep[None, :], other=0.0)
            weight = tl.load(weight_column_ptr + at[:, None], mask=is_column[None, :] & is_deep[:, None], other=0.0)
            part = tl.dot(x, weight, part, input_precision="ieee")
        total = part if is_split else total + part
    out_row = row.to(tl.int64)
    if is_split:
        out_row += first.to(tl.int64) * num_rows
    elif bias_ptr is not None:
        total += tl.load(bias_ptr + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    out_at = out_row[:, None] * num_columns + column[None, :]
    tl.store(out_ptr + out_at, total.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def add_chunks(part_ptr, bias_ptr, out_ptr, num_rows, num_columns, num_chunks, columns: tl.constexpr):
    """`part_ptr` float32 [num_chunks, num_rows, num_columns] -> `out_ptr` [num_rows, num_columns]; bias as above."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    is_column = column < num_columns
    total = tl.full((columns,), 0.0, tl.float32)
    for index in range(num_chunks):
        total += tl.load(part_ptr + (row + index * num_rows) * num_columns + column, mask=is_column, other=0.0)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + column, mask=is_column, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * num_columns + column, total.to(out_ptr.dtype.element_ty), mask=is_column)
