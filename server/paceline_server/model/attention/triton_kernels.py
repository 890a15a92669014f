"""The GPU kernels of paged attention, in Triton. `triton` launches them; `tasks` says what a task is.

`attend` is the flash-attention loop over keys that are found through the block table: scores of a tile, softmax in
powers of two with a running maximum, float32 sums. The query heads that share a key head are rows of one tile (GQA), so
that a key is read once for all of them, and a decode's tile is no thinner than the tensor cores want it. What differs
between models is a compile-time constant: each has its own kernel, without branches.
"""

from __future__ import annotations

import triton
import triton.language as tl

_LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
_MASKED: tl.constexpr = tl.constexpr(-1.0e30)  # finite: the difference of two of them is a number


@triton.jit
def _product(a, b, WIDEN: tl.constexpr):
    """Of two matrices, in float32."""
    if WIDEN:  # Triton's interpreter multiplies the bits of bfloat16 as integers
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def write(cache, slots, key, value, key_stride, value_stride, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Store a token: cache [slots, 2, WIDTH] of one layer, key and value [T, WIDTH] with their row strides.

    A negative slot is that of a row that only pads a captured step.
    """
    row = tl.program_id(0)
    column = tl.arange(0, PADDED)
    slot = tl.load(slots + row)
    inside = column < tl.where(slot >= 0, WIDTH, 0)
    place = cache + slot * (2 * WIDTH) + column
    tl.store(place, tl.load(key + row * key_stride + column, mask=inside), mask=inside)
    tl.store(place + WIDTH, tl.load(value + row * value_stride + column, mask=inside), mask=inside)


@triton.jit
def attend(
    query,  # [T, H, HEAD], rows query_stride apart
    cache,  # [blocks, BLOCK, 2, K, HEAD] of one layer
    block_table,  # [S, table_stride]
    tasks,  # [N, 7]
    out,  # [T, H, HEAD]
    parts,  # [places, H, HEAD + 2] float32: sums of values, maximum, sum of weights
    scale,
    query_stride,
    table_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of a key head
    HEAD: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,  # tokens in a block of the cache
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,  # of a tile
    WINDOW: tl.constexpr,  # 0: none
    SOFTCAP: tl.constexpr,  # 0.0: none
    WIDEN: tl.constexpr,
):
    """One task of one key head: program (task, key head)."""
    task = tasks + tl.program_id(0) * 7
    kv_head = tl.program_id(1)
    owner = tl.load(task)
    first = tl.load(task + 1)
    tokens = tl.load(task + 2)
    position = tl.load(task + 3)
    begin = tl.load(task + 4)
    end = tl.load(task + 5)
    part = tl.load(task + 6)

    row = tl.arange(0, ROWS)
    token = row // GROUP
    head = kv_head * GROUP + row % GROUP
    d = tl.arange(0, HEAD_PADDED)
    inside = (token < tokens)[:, None] & (d < HEAD)[None, :]
    at = query + (first + token).to(tl.int64)[:, None] * query_stride + head[:, None] * HEAD + d[None, :]
    q = tl.load(at, mask=inside, other=0.0)  # [ROWS, HEAD_PADDED]

    highest = tl.full((ROWS,), _MASKED, tl.float32)
    weight = tl.zeros((ROWS,), tl.float32)
    gathered = tl.zeros((ROWS, HEAD_PADDED), tl.float32)
    table = block_table + owner.to(tl.int64) * table_stride
    for start in range(begin, end, KEYS):
        n = start + tl.arange(0, KEYS)
        present = n < end
        block = tl.load(table + n // BLOCK, mask=present, other=0).to(tl.int64)
        slot = (block * BLOCK + n % BLOCK) * (2 * KV_HEADS * HEAD) + kv_head * HEAD
        readable = present[:, None] & (d < HEAD)[None, :]
        k = tl.load(cache + slot[:, None] + d[None, :], mask=readable, other=0.0)  # [KEYS, HEAD_PADDED]
        v = tl.load(cache + slot[:, None] + KV_HEADS * HEAD + d[None, :], mask=readable, other=0.0)
        scores = _product(q, tl.trans(k), WIDEN) * scale
        if SOFTCAP > 0.0:
            # tanh(x) = sign(x) (1 - e) / (1 + e), e = exp(-2 |x|): never overflows
            shrunk = tl.exp2(tl.abs(scores) * (-2.0 * _LOG2E / SOFTCAP))
            tanh = (1.0 - shrunk) / (1.0 + shrunk)
            scores = SOFTCAP * tl.where(scores < 0.0, -tanh, tanh)
        distance = (position + token)[:, None] - n[None, :]
        seen = present[None, :] & (distance >= 0)
        if WINDOW > 0:
            seen = seen & (distance < WINDOW)
        scores = tl.where(seen, scores * _LOG2E, _MASKED)
        higher = tl.maximum(highest, tl.max(scores, 1))
        shrink = tl.exp2(highest - higher)
        weights = tl.where(seen, tl.exp2(scores - higher[:, None]), 0.0)
        highest = higher
        weight = weight * shrink + tl.sum(weights, 1)
        gathered = gathered * shrink[:, None]
        gathered += _product(weights.to(v.dtype), v, WIDEN)

    if part < 0:
        result = gathered / tl.where(token < tokens, weight, 1.0)[:, None]
        to = out + ((first + token).to(tl.int64)[:, None] * (KV_HEADS * GROUP) + head[:, None]) * HEAD + d[None, :]
        tl.store(to, result.to(out.dtype.element_ty), mask=inside)
    else:
        base = parts + (part.to(tl.int64) * (KV_HEADS * GROUP) + head) * (HEAD + 2)
        tl.store(base[:, None] + d[None, :], gathered, mask=inside)
        tl.store(base + HEAD, highest, mask=token < tokens)
        tl.store(base + HEAD + 1, weight, mask=token < tokens)


@triton.jit
def merge(
    out,  # [T, H, HEAD]
    parts,  # [places, H, HEAD + 2]
    merges,  # [M, 2]
    HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_PADDED: tl.constexpr,
):
    """Put one row's parts together: program (merge, head). A part without keys has no weight."""
    row = tl.load(merges + tl.program_id(0) * 2).to(tl.int64)
    first = tl.load(merges + tl.program_id(0) * 2 + 1).to(tl.int64)
    head = tl.program_id(1)
    number = tl.arange(0, SPLITS_PADDED)
    d = tl.arange(0, HEAD_PADDED)
    base = parts + ((first + number) * HEADS + head) * (HEAD + 2)
    highest = tl.load(base + HEAD, mask=number < SPLITS, other=_MASKED)
    factor = tl.exp2(highest - tl.max(highest, 0))
    weight = tl.sum(factor * tl.load(base + HEAD + 1, mask=number < SPLITS, other=0.0), 0)
    inside = (number < SPLITS)[:, None] & (d < HEAD)[None, :]
    gathered = tl.load(base[:, None] + d[None, :], mask=inside, other=0.0)
    result = tl.sum(gathered * factor[:, None], 0) / weight
    tl.store(out + (row * HEADS + head) * HEAD + d, result.to(out.dtype.element_ty), mask=d < HEAD)
