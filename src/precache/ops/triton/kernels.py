"""The Triton kernels: one pass over the keys with two accumulators, and the merge of split passes.

A program owns BLOCK_M rows of one KV head of one sequence. Rows are (query, head of the group)
pairs, query first, as in the CPU backend, so that grouped heads share each key they read. The keys
lie in rows of one buffer (PAGE == 0), or in pages of PAGE rows that a block table lists.

Beside `acc` = P v_base runs `acc_z` = P z, rank wide, under the same online softmax; `b` is applied
once at the end. With NUM_SPLITS > 1 the keys of a sequence are shared out over as many programs,
which leave both accumulators unscaled for `merge_kernel`. Exponentials are to base 2.

Upper case arguments are compile-time constants; positions are relative to the first key.
"""

import triton
import triton.language as tl

from precache.ops.triton.steps import capped, dot, load_key_b, lora_keys, narrow

LN_2 = tl.constexpr(0.6931471805599453)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _attend_keys(
    acc, acc_z, maximum, total,  # the running softmax
    q, position, start, end,  # keys start..end; position [BLOCK_M] of the rows
    k, v, z, table_ptr,  # k, v and z are (pointer, page stride, row stride)
    key_strip, columns, scale, softcap,
    MASKED: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PAGE: tl.constexpr,
    HEAD_DIM: tl.constexpr, RANK: tl.constexpr, KEY_RANK: tl.constexpr,
    BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Meet a range of keys; without MASKED every row sees all of them, and they fill the blocks."""
    k_ptr, k_page, k_row = k
    v_ptr, v_page, v_row = v
    z_ptr, z_page, z_row = z
    d = tl.arange(0, q.shape[1])
    r = tl.arange(0, acc_z.shape[1])
    for first in range(start, end, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        loaded = n < end
        if PAGE > 0:
            page = tl.load(table_ptr + n // PAGE, mask=loaded, other=0).to(tl.int64)
            row = n % PAGE
            k_at, v_at, z_at = (
                page * k_page + row * k_row,
                page * v_page + row * v_row,
                page * z_page + row * z_row,
            )
        else:
            k_at, v_at, z_at = n * k_row, n * v_row, n * z_row

        keys = tl.load(
            k_ptr + k_at[None, :] + d[:, None],
            mask=loaded[None, :] & (d < HEAD_DIM)[:, None],
            other=0.0,
        )
        if KEY_RANK > 0:
            keys = lora_keys(keys, n, d, loaded, key_strip, KEY_RANK, HEAD_DIM, PRECISION, WIDEN)
        scores = tl.zeros([q.shape[0], BLOCK_N], tl.float32)
        scores = dot(q, keys, scores, PRECISION, WIDEN) * scale
        if SOFTCAP:
            scores = capped(scores, softcap)
        scores *= LOG2_E
        if MASKED:
            distance = position[:, None] - n[None, :]
            visible = loaded[None, :] & (distance >= 0)
            if WINDOW > 0:
                visible = visible & (distance < WINDOW)
            scores = tl.where(visible, scores, float("-inf"))

        raised = tl.maximum(maximum, tl.max(scores, 1))
        # A row that sees no key yet has maximum -inf, and -inf - -inf is not a number.
        finite = tl.where(raised == float("-inf"), 0.0, raised)
        probs = tl.exp2(scores - finite[:, None])
        shrink = tl.exp2(maximum - finite)
        maximum = raised
        total = total * shrink + tl.sum(probs, 1)
        weights = narrow(probs, v_ptr.dtype.element_ty, WIDEN)
        values = tl.load(
            v_ptr + v_at[:, None] + d[None, :],
            mask=loaded[:, None] & (d < HEAD_DIM)[None, :],
            other=0.0,
        )
        acc = dot(weights, values, acc * shrink[:, None], PRECISION, WIDEN)
        if RANK > 0:
            low_rank = tl.load(
                z_ptr + z_at[:, None] + r[None, :],
                mask=loaded[:, None] & (r < columns)[None, :],
                other=0.0,
            )
            acc_z = dot(weights, low_rank, acc_z * shrink[:, None], PRECISION, WIDEN)
    return acc, acc_z, maximum, total


@triton.jit
def _store_result(
    acc, acc_z, maximum, total, rows, valid,  # rows: (out row pointers, lse pointers)
    b_ptr, b_rank, columns, d, r,
    HEAD_DIM: tl.constexpr, RANK: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Scale by the softmax's sum, apply `b`, and write the output rows and their log-sum-exp."""
    out_rows, lse_rows = rows
    empty = total == 0.0
    share = 1.0 / tl.where(empty, 1.0, total)[:, None]
    acc *= share
    if RANK > 0:
        b = tl.load(
            b_ptr + r[:, None] * b_rank + d[None, :],
            mask=(r < columns)[:, None] & (d < HEAD_DIM)[None, :],
            other=0.0,
        )
        acc = dot(narrow(acc_z * share, b.dtype, WIDEN), b, acc, PRECISION, WIDEN)
    lse = tl.where(empty, float("-inf"), (maximum + tl.log2(tl.where(empty, 1.0, total))) * LN_2)
    tl.store(lse_rows, lse, mask=valid)
    tl.store(
        out_rows[:, None] + d[None, :],
        narrow(acc, out_rows.dtype.element_ty, WIDEN),
        mask=valid[:, None] & (d < HEAD_DIM)[None, :],
    )


@triton.jit(do_not_specialize=["q_len", "kv_len", "first_position", "num_tokens"])
def attend_kernel(
    q_ptr, k_ptr, v_ptr, z_ptr, b_ptr, kz_ptr, kb_ptr, cos_ptr, sin_ptr,
    out_ptr, lse_ptr, part_ptr, part_z_ptr, part_max_ptr, part_sum_ptr,
    positions_ptr, query_start_ptr, kv_lens_ptr, table_ptr, adapters_ptr,
    q_len, kv_len, first_position, num_tokens,
    q_row, q_head, k_page, k_row, k_head, v_page, v_row, v_head,
    z_page, z_row, z_adapter, b_adapter, b_head, b_rank,
    kz_row, kb_head, kb_rank, cos_row, sin_row, out_row, out_head, table_row,
    scale, softcap,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr,
    RANK: tl.constexpr, RANK_PAD: tl.constexpr,
    KEY_RANK: tl.constexpr, KEY_RANK_PAD: tl.constexpr,
    PAGE: tl.constexpr, SCATTERED: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    NUM_SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Attention of BLOCK_M rows to all keys they see, or to one split of them."""
    first_row = tl.program_id(0) * BLOCK_M
    head = tl.program_id(1)
    seq = tl.program_id(2) // NUM_SPLITS
    split = tl.program_id(2) % NUM_SPLITS
    first_token = 0
    columns = RANK  # of z that are read: none for the base model
    adapter = 0
    if PAGE > 0:
        first_token = tl.load(query_start_ptr + seq)
        q_len = tl.load(query_start_ptr + seq + 1) - first_token
        kv_len = tl.load(kv_lens_ptr + seq)
        first_position = kv_len - q_len
        table_ptr += seq * table_row
        if RANK > 0:
            adapter = tl.load(adapters_ptr + seq)
            columns = tl.where(adapter >= 0, RANK, 0)
            adapter = tl.maximum(adapter, 0).to(tl.int64)
    if first_row >= q_len * GROUP:
        return

    row = first_row + tl.arange(0, BLOCK_M)
    token = row // GROUP
    valid = token < q_len
    nearest = first_row // GROUP
    furthest = tl.minimum((first_row + BLOCK_M - 1) // GROUP, q_len - 1)
    if SCATTERED:
        position = tl.load(positions_ptr + token, mask=valid, other=0)
        lowest = tl.load(positions_ptr + nearest)
        highest = tl.load(positions_ptr + furthest)
    else:
        position = first_position + token
        lowest = first_position + nearest
        highest = first_position + furthest
    end = tl.maximum(tl.minimum(highest + 1, kv_len), 0)
    start = 0
    if WINDOW > 0:
        start = tl.minimum(tl.maximum(lowest - WINDOW + 1, 0), end)
    if NUM_SPLITS > 1:
        part = tl.cdiv(tl.cdiv(end - start, NUM_SPLITS), BLOCK_N) * BLOCK_N
        start += split * part
        end = tl.minimum(end, start + part)

    d = tl.arange(0, HEAD_PAD)
    r = tl.arange(0, RANK_PAD)
    token += first_token
    q_at = token.to(tl.int64) * q_row + (head * GROUP + row % GROUP) * q_head
    q = tl.load(
        q_ptr + q_at[:, None] + d[None, :],
        mask=valid[:, None] & (d < HEAD_DIM)[None, :],
        other=0.0,
    )
    far_head = head.to(tl.int64)
    k = (k_ptr + far_head * k_head, k_page, k_row)
    v = (v_ptr + far_head * v_head, v_page, v_row)
    z = (z_ptr, z_page, z_row)
    if RANK > 0:
        z = (z_ptr + adapter * z_adapter, z_page, z_row)
    key_strip = (kz_ptr, kz_row, q, q, cos_ptr, cos_row, sin_ptr, sin_row)
    if KEY_RANK > 0:
        key_r = tl.arange(0, KEY_RANK_PAD)
        kb, kb_turned = load_key_b(kb_ptr + head * kb_head, kb_rank, key_r, d, KEY_RANK, HEAD_DIM)
        key_strip = (kz_ptr, kz_row, kb, kb_turned, cos_ptr, cos_row, sin_ptr, sin_row)

    acc = tl.zeros([BLOCK_M, HEAD_PAD], tl.float32)
    acc_z = tl.zeros([BLOCK_M, RANK_PAD], tl.float32)
    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    clear = start
    if WINDOW == 0:
        # Whole blocks that every row sees.
        clear += tl.maximum(tl.minimum(lowest + 1, end) - start, 0) // BLOCK_N * BLOCK_N
        acc, acc_z, maximum, total = _attend_keys(
            acc, acc_z, maximum, total, q, position, start, clear,
            k, v, z, table_ptr, key_strip, columns, scale, softcap,
            False, WINDOW, SOFTCAP, PAGE, HEAD_DIM, RANK, KEY_RANK, BLOCK_N, PRECISION, WIDEN,
        )  # fmt: skip
    acc, acc_z, maximum, total = _attend_keys(
        acc, acc_z, maximum, total, q, position, clear, end,
        k, v, z, table_ptr, key_strip, columns, scale, softcap,
        True, WINDOW, SOFTCAP, PAGE, HEAD_DIM, RANK, KEY_RANK, BLOCK_N, PRECISION, WIDEN,
    )  # fmt: skip

    q_heads = tl.num_programs(1) * GROUP
    q_head_at = head * GROUP + row % GROUP
    if NUM_SPLITS > 1:
        slot = (split.to(tl.int64) * num_tokens + token) * q_heads + q_head_at
        whole = valid[:, None] & (d < HEAD_DIM)[None, :]
        tl.store(part_ptr + slot[:, None] * HEAD_DIM + d[None, :], acc, mask=whole)
        if RANK > 0:
            whole = valid[:, None] & (r < RANK)[None, :]
            tl.store(part_z_ptr + slot[:, None] * RANK + r[None, :], acc_z, mask=whole)
        tl.store(part_max_ptr + slot, maximum, mask=valid)
        tl.store(part_sum_ptr + slot, total, mask=valid)
    else:
        out_at = token.to(tl.int64) * out_row + q_head_at * out_head
        lse_at = q_head_at.to(tl.int64) * num_tokens + token
        b_at = b_ptr
        if RANK > 0:
            b_at += adapter * b_adapter + head * b_head
        _store_result(
            acc, acc_z, maximum, total, (out_ptr + out_at, lse_ptr + lse_at), valid,
            b_at, b_rank, columns, d, r, HEAD_DIM, RANK, PRECISION, WIDEN,
        )  # fmt: skip


@triton.jit(do_not_specialize=["q_len", "num_tokens"])
def merge_kernel(
    part_ptr, part_z_ptr, part_max_ptr, part_sum_ptr, b_ptr, out_ptr, lse_ptr,
    query_start_ptr, adapters_ptr, q_len, num_tokens,
    b_adapter, b_head, b_rank, out_row, out_head,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr,
    RANK: tl.constexpr, RANK_PAD: tl.constexpr, PAGED: tl.constexpr,
    NUM_SPLITS: tl.constexpr, BLOCK_M: tl.constexpr,
    PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Join the splits that `attend_kernel` left, and apply `b` to the joined acc_z."""
    first_row = tl.program_id(0) * BLOCK_M
    head = tl.program_id(1)
    seq = tl.program_id(2)
    first_token = 0
    columns = RANK  # of z that are read: none for the base model
    adapter = 0
    if PAGED:
        first_token = tl.load(query_start_ptr + seq)
        q_len = tl.load(query_start_ptr + seq + 1) - first_token
        if RANK > 0:
            adapter = tl.load(adapters_ptr + seq)
            columns = tl.where(adapter >= 0, RANK, 0)
            adapter = tl.maximum(adapter, 0).to(tl.int64)
    if first_row >= q_len * GROUP:
        return
    row = first_row + tl.arange(0, BLOCK_M)
    token = first_token + row // GROUP
    valid = row // GROUP < q_len
    q_head_at = head * GROUP + row % GROUP
    q_heads = tl.num_programs(1) * GROUP
    d = tl.arange(0, HEAD_PAD)
    r = tl.arange(0, RANK_PAD)

    acc = tl.zeros([BLOCK_M, HEAD_PAD], tl.float32)
    acc_z = tl.zeros([BLOCK_M, RANK_PAD], tl.float32)
    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    slot = token.to(tl.int64) * q_heads + q_head_at
    for _ in range(NUM_SPLITS):
        part_max = tl.load(part_max_ptr + slot, mask=valid, other=float("-inf"))
        raised = tl.maximum(maximum, part_max)
        finite = tl.where(raised == float("-inf"), 0.0, raised)
        shrink = tl.exp2(maximum - finite)
        weight = tl.exp2(part_max - finite)
        maximum = raised
        part_sum = tl.load(part_sum_ptr + slot, mask=valid, other=0.0)
        total = total * shrink + part_sum * weight
        whole = valid[:, None] & (d < HEAD_DIM)[None, :]
        part = tl.load(part_ptr + slot[:, None] * HEAD_DIM + d[None, :], mask=whole, other=0.0)
        acc = acc * shrink[:, None] + part * weight[:, None]
        if RANK > 0:
            whole = valid[:, None] & (r < RANK)[None, :]
            part_z = tl.load(part_z_ptr + slot[:, None] * RANK + r[None, :], mask=whole, other=0.0)
            acc_z = acc_z * shrink[:, None] + part_z * weight[:, None]
        slot += num_tokens * q_heads

    out_at = token.to(tl.int64) * out_row + q_head_at * out_head
    lse_at = q_head_at.to(tl.int64) * num_tokens + token
    b_at = b_ptr
    if RANK > 0:
        b_at += adapter * b_adapter + head * b_head
    _store_result(
        acc, acc_z, maximum, total, (out_ptr + out_at, lse_ptr + lse_at), valid,
        b_at, b_rank, columns, d, r, HEAD_DIM, RANK, PRECISION, WIDEN,
    )  # fmt: skip
