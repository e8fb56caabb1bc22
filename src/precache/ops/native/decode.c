/* One query per sequence over cached keys: softmax(q k^T) v_base + (softmax(q k^T) z) b, in one pass over k, v and z;
 * k may have a low-rank part of its own, which is expanded and rotated a tile at a time.
 *
 * Every row of k, v and z is read once for all query heads of its KV head, widened in registers if it is stored in 16
 * bits, and the two sums, head_dim and rank wide, are kept beside each other; b is applied to the second one at the
 * end. Work is cut into pieces of PIECE keys (flash-decoding), which are merged by their log-sum-exp.
 *
 * Plain C without Python or torch: precache.ops.native loads it with ctypes, and falls back to torch without it.
 */
#define TILE 32 /* keys whose scores and probabilities are held at a time */
#include "common.h"

#define PIECE 512
#define WIDE 8 /* vectors of sums that are held in registers */

/* Strides count elements; the last dimension of every tensor is contiguous, but for keys that lie column by column
 * (k_token 1, as in vLLM's cache for CPUs; then block_size is a multiple of LANES, and whole vectors are read). */
struct decode_call {
    const void *q;              /* [num_seqs, num_heads, head_dim] */
    const void *k, *v;          /* [blocks, num_kv_heads, block_size, head_dim] */
    const void *z;              /* [blocks, block_size, slots, rank]; unused, as b and slots, with rank 0 */
    const void *b;              /* [slots, num_kv_heads, rank, head_dim] */
    void *out;                  /* as q */
    float *lse;                 /* [num_seqs, num_heads] or NULL */
    const int32_t *block_table; /* [num_seqs, max_blocks]; NULL: one block */
    const int32_t *first;       /* [num_seqs], the first key that is seen; NULL: 0 */
    const int32_t *end;         /* [num_seqs], one behind the last, at most max_blocks * block_size */
    const int32_t *slots;       /* [num_seqs], whose z and b; negative: no low-rank part */
    struct key_strip key;       /* for one block without a table */
    int64_t num_seqs, num_heads, num_kv_heads, head_dim, rank;
    int64_t block_size, max_blocks;
    int64_t q_seq, q_head, out_seq, out_head;
    int64_t k_block, k_head, k_token, k_dim, v_block, v_head, v_token;
    int64_t z_block, z_token, z_slot, b_slot, b_head, b_rank;
    float scale, softcap; /* softcap 0: none */
    int32_t dtype, threads;
};

/* A piece's sums: of probabilities relative to their maximum. */
struct sums {
    float maximum, total;
};

struct piece {
    int32_t seq, kv_head, start, end;
};

/* Scores of KEYS rows; the query is read once for all of them. */
INLINE void score_rows(float *scores, const float *q, const float *rows, int64_t distance, int64_t width, int keys)
{
    vec sums[KEYS];
    for (int t = 0; t < keys; t++)
        sums[t] = (vec){0};
    for (int64_t d = 0; d < width; d += LANES) {
        const vec query = *(const vec *)(q + d);
        for (int t = 0; t < keys; t++)
            sums[t] += query * *(const vec *)(rows + t * distance + d);
    }
    for (int t = 0; t < keys; t++)
        scores[t] = sum_lanes(sums[t]);
}

INLINE void score_tile(float *scores, const float *q, const float *rows, int64_t distance, int64_t count, int64_t width)
{
    int64_t t = 0;
    for (; t + KEYS <= count; t += KEYS)
        score_rows(scores + t, q, rows + t * distance, distance, width, KEYS);
    for (; t < count; t++)
        score_rows(scores + t, q, rows + t * distance, distance, width, 1);
}

/* The same for keys that lie column by column: `columns` [width, at least count rounded up to LANES]. */
INLINE void score_columns(float *scores, const float *q, const float *columns, int64_t distance, int64_t count,
                          int64_t width)
{
    for (int64_t t = 0; t < count; t += LANES) {
        vec even = {0}, odd = {0};
        for (int64_t d = 0; d < width; d += 2) {
            even += q[d] * *(const vec *)(columns + d * distance + t);
            odd += q[d + 1] * *(const vec *)(columns + (d + 1) * distance + t);
        }
        *(vec *)(scores + t) = even + odd;
    }
}

/* sums[d] = sums[d] * keep + sum over t of probs[t] rows[t][d], `count` vectors from column `column` on. */
INLINE void weigh_columns(float *sums, float keep, const float *probs, const float *rows, int64_t distance,
                          int64_t num_rows, int64_t column, int count)
{
    vec held[WIDE];
    for (int c = 0; c < count; c++)
        held[c] = *(vec *)(sums + column + c * LANES) * keep;
    for (int64_t t = 0; t < num_rows; t++) {
        const vec *row = (const vec *)(rows + t * distance + column);
        for (int c = 0; c < count; c++)
            held[c] += probs[t] * row[c];
    }
    for (int c = 0; c < count; c++)
        *(vec *)(sums + column + c * LANES) = held[c];
}

INLINE void weigh_tile(float *sums, float keep, const float *probs, const float *rows, int64_t distance,
                       int64_t num_rows, int64_t width)
{
    int64_t column = 0;
    for (; column + WIDE * LANES <= width; column += WIDE * LANES)
        weigh_columns(sums, keep, probs, rows, distance, num_rows, column, WIDE);
    for (; column + LANES <= width; column += LANES)
        weigh_columns(sums, keep, probs, rows, distance, num_rows, column, 1);
    for (; column < width; column++) {
        float held = sums[column] * keep;
        for (int64_t t = 0; t < num_rows; t++)
            held += probs[t] * rows[t * distance + column];
        sums[column] = held;
    }
}

/* Scores to probabilities relative to the maximum so far; returns what earlier sums have to be multiplied by. */
INLINE float normalise_tile(float *scores, int64_t count, struct sums *sums, float scale, float softcap)
{
    float maximum = sums->maximum, total = 0.0f;
    for (int64_t t = 0; t < count; t++) {
        float score = scores[t] * scale;
        scores[t] = softcap > 0.0f ? softcap * tanhf(score / softcap) : score;
        maximum = scores[t] > maximum ? scores[t] : maximum;
    }
    for (int64_t t = 0; t < count; t++)
        scores[t] = exp_negative(scores[t] - maximum);
    for (int64_t t = 0; t < count; t++)
        total += scores[t];
    float keep = sums->total > 0.0f ? exp_negative(sums->maximum - maximum) : 0.0f;
    sums->total = sums->total * keep + total;
    sums->maximum = maximum;
    return keep;
}

/* One piece of one KV head, for all its query heads. `into`, a group's sums after another: [group, head_dim + rank]. */
FOR_EACH_CPU
static void attend_piece(const struct decode_call *call, const struct piece *piece, float *into, struct sums *sums)
{
    const int64_t width = call->head_dim, group = call->num_heads / call->num_kv_heads;
    const int64_t slot = call->rank ? call->slots[piece->seq] : -1;
    const int64_t rank = slot >= 0 ? call->rank : 0, each = width + call->rank;
    const int32_t *table = call->block_table ? call->block_table + piece->seq * call->max_blocks : NULL;
    const int by_column = call->k_dim != 1;
    float q[MAX_GROUP * MAX_HEAD_DIM], buffer[TILE * MAX_HEAD_DIM], probs[MAX_GROUP][TILE], keep[MAX_GROUP];
    float expanded[TILE * MAX_HEAD_DIM], key_b_rows[MAX_KEY_RANK * MAX_HEAD_DIM];
    int64_t key_b_distance;
    const float *key_b = read_rows(call->key.b, piece->kv_head * call->key.b_head, call->key.b_rank, call->key.rank, width,
                                   call->dtype, key_b_rows, &key_b_distance);

    for (int64_t g = 0; g < group; g++) {
        int64_t at = piece->seq * call->q_seq + (piece->kv_head * group + g) * call->q_head;
        for (int64_t d = 0; d < width; d++)
            q[g * width + d] = read_one(call->q, at + d, call->dtype);
        sums[g] = (struct sums){-FLT_MAX, 0.0f}; /* not -INFINITY, from which a score of -INFINITY has no distance */
    }
    memset(into, 0, (size_t)(group * each) * sizeof *into);
    for (int64_t key = piece->start; key < piece->end;) {
        const int64_t block = key / call->block_size, offset = key % call->block_size;
        const int64_t page = table ? table[block] : block;
        /* Of columns whole vectors are read, and a window may start within one. */
        const int64_t skipped = by_column ? offset % LANES : 0;
        int64_t count = piece->end - key;
        count = count < TILE - skipped ? count : TILE - skipped;
        count = count < call->block_size - offset ? count : call->block_size - offset;
        int64_t distance;
        const float *rows;
        const int64_t keys_at =
            page * call->k_block + piece->kv_head * call->k_head + (offset - skipped) * call->k_token;
        if (by_column)
            rows = read_rows(call->k, keys_at, call->k_dim, width, (skipped + count + LANES - 1) / LANES * LANES,
                             call->dtype, buffer, &distance);
        else
            rows = read_rows(call->k, keys_at, call->k_token, count, width, call->dtype, buffer, &distance);
        if (call->key.rank) {
            rows = expand_keys(&call->key, rows, distance, key_b, key_b_distance, key, count, width, call->dtype, expanded);
            distance = width;
        }
        for (int64_t g = 0; g < group; g++) {
            if (by_column) {
                score_columns(probs[g], q + g * width, rows, distance, skipped + count, width);
                memmove(probs[g], probs[g] + skipped, (size_t)count * sizeof probs[g][0]);
            } else
                score_tile(probs[g], q + g * width, rows, distance, count, width);
            keep[g] = normalise_tile(probs[g], count, &sums[g], call->scale, call->softcap);
        }
        rows = read_rows(call->v, page * call->v_block + piece->kv_head * call->v_head + offset * call->v_token,
                         call->v_token, count, width, call->dtype, buffer, &distance);
        for (int64_t g = 0; g < group; g++)
            weigh_tile(into + g * each, keep[g], probs[g], rows, distance, count, width);
        if (rank) {
            rows = read_rows(call->z, page * call->z_block + offset * call->z_token + slot * call->z_slot,
                             call->z_token, count, rank, call->dtype, buffer, &distance);
            for (int64_t g = 0; g < group; g++)
                weigh_tile(into + g * each + width, keep[g], probs[g], rows, distance, count, rank);
        }
        key += count;
    }
}

/* Merge the pieces of one query head, apply b and write. `stride` floats and `group` sums lie between two pieces. */
FOR_EACH_CPU
static void finish_head(const struct decode_call *call, int64_t seq, int64_t head, const float *from,
                        const struct sums *sums, int64_t num_pieces, int64_t stride)
{
    const int64_t width = call->head_dim, group = call->num_heads / call->num_kv_heads;
    const int64_t slot = call->rank ? call->slots[seq] : -1;
    float merged[MAX_HEAD_DIM + MAX_RANK], maximum = -FLT_MAX, total = 0.0f;

    for (int64_t i = 0; i < num_pieces; i++)
        maximum = sums[i * group].maximum > maximum ? sums[i * group].maximum : maximum;
    memset(merged, 0, sizeof merged);
    for (int64_t i = 0; i < num_pieces; i++) {
        float weight = exp_negative(sums[i * group].maximum - maximum);
        total += weight * sums[i * group].total;
        for (int64_t d = 0; d < width + call->rank; d++)
            merged[d] += weight * from[i * stride + d];
    }
    if (slot >= 0) {
        const int64_t b = slot * call->b_slot + head / group * call->b_head;
        for (int64_t r = 0; r < call->rank; r++)
            for (int64_t d = 0; d < width; d++)
                merged[d] += merged[width + r] * read_one(call->b, b + r * call->b_rank + d, call->dtype);
    }
    const float share = total > 0.0f ? 1.0f / total : 0.0f;
    for (int64_t d = 0; d < width; d++)
        write_one(call->out, seq * call->out_seq + head * call->out_head + d, merged[d] * share, call->dtype);
    if (call->lse)
        call->lse[seq * call->num_heads + head] = maximum + logf(total);
}

/* Of this file, as the compiler was told: by which the caller notices a library of an older one. */
#ifndef SOURCE_ID
#define SOURCE_ID 0
#endif
uint64_t precache_source_id(void) { return SOURCE_ID; }

/* Returns 0; 1 for shapes beyond the limits above, 2 without memory. Writes out and lse only if it returns 0. */
int precache_decode(const struct decode_call *call)
{
    const int64_t group = call->num_heads / call->num_kv_heads, each = call->head_dim + call->rank;
    const int by_row = call->k_dim == 1 && !call->block_table;
    if (beyond_limits(group, call->head_dim, call->rank, call->key.rank) || (call->key.rank && !by_row))
        return 1;
    int64_t num_pieces = 0, keys = 0;
    for (int64_t s = 0; s < call->num_seqs; s++) {
        int64_t seen = call->end[s] - (call->first ? call->first[s] : 0);
        seen = seen > 0 ? seen : 0;
        num_pieces += call->num_kv_heads * ((seen + PIECE - 1) / PIECE);
        keys += seen;
    }
    struct piece *pieces = malloc((size_t)(num_pieces + 1) * sizeof *pieces);
    struct sums *sums = malloc((size_t)(num_pieces * group + 1) * sizeof *sums);
    float *partial = malloc((size_t)(num_pieces * group * each + 1) * sizeof *partial);
    int64_t *starts = malloc((size_t)(call->num_seqs * call->num_kv_heads + 1) * sizeof *starts);
    if (!pieces || !sums || !partial || !starts) {
        free(pieces), free(sums), free(partial), free(starts);
        return 2;
    }
    int64_t count = 0;
    for (int64_t s = 0; s < call->num_seqs; s++)
        for (int64_t h = 0; h < call->num_kv_heads; h++) {
            starts[s * call->num_kv_heads + h] = count;
            for (int64_t at = call->first ? call->first[s] : 0; at < call->end[s]; at += PIECE) {
                int64_t stop = at + PIECE < call->end[s] ? at + PIECE : call->end[s];
                pieces[count++] = (struct piece){(int32_t)s, (int32_t)h, (int32_t)at, (int32_t)stop};
            }
        }
    starts[call->num_seqs * call->num_kv_heads] = count;
    /* Waking other threads costs more than a few hundred keys. */
    const int threads = keys * call->num_kv_heads * call->head_dim < 65536 ? 1 : call->threads;
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < count; i++)
        attend_piece(call, &pieces[i], partial + i * group * each, sums + i * group);
    for (int64_t s = 0; s < call->num_seqs; s++)
        for (int64_t head = 0; head < call->num_heads; head++) {
            const int64_t owner = s * call->num_kv_heads + head / group, first = starts[owner];
            finish_head(call, s, head, partial + (first * group + head % group) * each,
                        sums + first * group + head % group, starts[owner + 1] - first, group * each);
        }
    free(pieces), free(sums), free(partial), free(starts);
    return 0;
}
