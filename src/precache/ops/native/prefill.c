/* Several queries of one sequence over cached keys: softmax(q k^T) (v_base + z b), causal, in one pass over the keys.
 *
 * Rows are (query, head of the group) pairs of one KV head, query first. A tile of keys is laid out by column and its
 * values are made once for a block of rows; ROWS of them at a time are scored, normalised and summed in registers, so
 * that no score leaves the first cache. Where there are few blocks, the keys are cut too, and the pieces merged.
 */
#define TILE 96 /* keys that are laid out at a time */
#include "common.h"
#ifdef _OPENMP
#include <omp.h>
#else
#define omp_get_thread_num() 0
#endif

#define ROWS 6        /* whose scores are held in registers, */
#define VECTORS 2     /* by so many vectors of keys, or of columns of the values */
#define MAX_ROWS 384  /* of a block */
#define MIN_PIECE 512 /* keys of a piece, where keys are cut */
#define PIECES 4      /* wanted for a thread */
#define WIDTH (VECTORS * LANES)
#define LINE 16 /* floats of a cache line */

typedef int32_t ints __attribute__((vector_size(LANES * 4), aligned(4)));

/* Strides count elements; the last dimension of every tensor is contiguous. */
struct prefill_call {
    const void *q;        /* [num_heads, q_len, head_dim] */
    const void *k, *v;    /* [num_kv_heads, kv_len, head_dim] */
    const void *z;        /* [kv_len, rank]; unused, as b, with rank 0 */
    const void *b;        /* [num_kv_heads, rank, head_dim] */
    void *out;            /* as q */
    float *lse;           /* [num_heads, q_len] */
    struct key_strip key;
    int64_t num_heads, num_kv_heads, q_len, kv_len, head_dim, rank;
    int64_t position; /* of the first query, counted from the first key */
    int64_t window;   /* 0: none */
    int64_t q_head, q_row, out_head, out_row, k_head, k_token, v_head, v_token, z_token, b_head, b_rank;
    float scale, softcap; /* softcap 0: none */
    int32_t dtype, threads;
};

/* Rows of a KV head over some keys. Their sums are kept behind `at`: [rows, head_dim], maxima and totals. */
struct block {
    int64_t kv_head, query, queries, start, end, at;
};

/* What a thread works in; only the queries outlive a tile. */
struct room {
    float *q;                                   /* [rows, head_dim] */
    float *columns, *values, *buffer, *expanded; /* [TILE, head_dim] */
    float *key_b, *b;                           /* [key rank or rank, head_dim] */
    float *z;                                   /* [TILE, rank] */
};

/* The part of the keys from `start` to `end` that a query sees. */
struct range {
    int64_t start, end;
};

INLINE int64_t at_least(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }

INLINE int64_t whole_lines(int64_t floats) { return (floats + LINE - 1) / LINE * LINE; }

INLINE struct range seen_by(const struct prefill_call *call, int64_t query, int64_t start, int64_t end)
{
    const int64_t position = call->position + query;
    const int64_t first = call->window ? at_least(position - call->window + 1, start) : start;
    return (struct range){first, at_least(at_most(position + 1, end), first)};
}

INLINE vec all(float value) { return (vec){0} + value; }

/* Lane by lane; `b` where one of them is NaN. With masks: GCC takes a loop over the lanes apart. */
INLINE vec larger(vec a, vec b)
{
    const ints which = a > b;
    return (vec)((which & (ints)a) | (~which & (ints)b));
}

/* exp_negative of common.h for a vector. */
INLINE vec exp_negatives(vec x)
{
    const vec bounded = larger(all(-87.0f), x);
    /* Adding and taking away 1.5 * 2^23 rounds to a whole number. */
    const vec n = (bounded * 1.44269504f + 12582912.0f) - 12582912.0f;
    const vec r = (bounded - n * 0.693359375f) + n * 2.12194440e-4f;
    vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const ints power = (__builtin_convertvector(n, ints) + 127) << 23;
    return p * (vec)(power & ~(x < -87.0f));
}

/* rows[t] = values[t] + z[t] b for `count` tokens. */
INLINE void add_low_rank(float *rows, const float *values, int64_t distance, const float *z, int64_t z_distance,
                         const float *b, int64_t b_distance, int64_t rank, int64_t width, int count)
{
    for (int64_t d = 0; d < width; d += LANES) {
        vec sums[KEYS];
        for (int t = 0; t < count; t++)
            sums[t] = *(const vec *)(values + t * distance + d);
        for (int64_t r = 0; r < rank; r++) {
            const vec column = *(const vec *)(b + r * b_distance + d);
            for (int t = 0; t < count; t++)
                sums[t] += z[t * z_distance + r] * column;
        }
        for (int t = 0; t < count; t++)
            *(vec *)(rows + t * width + d) = sums[t];
    }
}

/* columns[d][t] = rows[t][d] for LANES of each. */
#if defined(__clang__) || __GNUC__ >= 12
#define MIX __builtin_shufflevector
INLINE void turn(float *columns, const float *rows, int64_t distance)
{
    vec pairs[LANES], fours[LANES];
    for (int i = 0; i < LANES; i += 2) {
        const vec a = *(const vec *)(rows + i * distance), b = *(const vec *)(rows + (i + 1) * distance);
        pairs[i] = MIX(a, b, 0, 8, 1, 9, 4, 12, 5, 13);
        pairs[i + 1] = MIX(a, b, 2, 10, 3, 11, 6, 14, 7, 15);
    }
    for (int i = 0; i < LANES; i += 4)
        for (int j = 0; j < 2; j++) {
            fours[i + 2 * j] = MIX(pairs[i + j], pairs[i + j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
            fours[i + 2 * j + 1] = MIX(pairs[i + j], pairs[i + j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
        }
    for (int i = 0; i < 4; i++) {
        *(vec *)(columns + i * TILE) = MIX(fours[i], fours[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
        *(vec *)(columns + (i + 4) * TILE) = MIX(fours[i], fours[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    }
}
#else
INLINE void turn(float *columns, const float *rows, int64_t distance)
{
    for (int i = 0; i < LANES; i++)
        for (int d = 0; d < LANES; d++)
            columns[d * TILE + i] = rows[i * distance + d];
}
#endif

/* The same for `count` rows; 0 behind them up to whole vectors of keys. */
INLINE void lay_out(float *columns, const float *rows, int64_t distance, int64_t count, int64_t width)
{
    const int64_t padded = (count + WIDTH - 1) / WIDTH * WIDTH, whole = count / LANES * LANES;
    for (int64_t d = 0; d < width; d += LANES)
        for (int64_t t = 0; t < whole; t += LANES)
            turn(columns + d * TILE + t, rows + t * distance + d, distance);
    for (int64_t d = 0; d < width; d++)
        for (int64_t t = whole; t < padded; t++)
            columns[d * TILE + t] = t < count ? rows[t * distance + d] : 0.0f;
}

/* scores[r][t] of ROWS queries, which lie as [width][ROWS], and `count` keys up to whole vectors. */
INLINE void score_rows(float *scores, const float *q, const float *columns, int64_t count, int64_t width)
{
    for (int64_t t = 0; t < count; t += WIDTH) {
        vec sums[ROWS][VECTORS];
        for (int r = 0; r < ROWS; r++)
            for (int i = 0; i < VECTORS; i++)
                sums[r][i] = (vec){0};
        for (int64_t d = 0; d < width; d++) {
            const float *column = columns + d * TILE + t;
            const vec low = *(const vec *)column, high = *(const vec *)(column + LANES);
            for (int r = 0; r < ROWS; r++) {
                sums[r][0] += q[d * ROWS + r] * low;
                sums[r][1] += q[d * ROWS + r] * high;
            }
        }
        for (int r = 0; r < ROWS; r++)
            for (int i = 0; i < VECTORS; i++)
                *(vec *)(scores + r * TILE + t + i * LANES) = sums[r][i];
    }
}

/* sums[r] = sums[r] keep[r] + sum over t of probs[r][t] values[t], `vectors` vectors from a column on. */
INLINE void weigh_rows(float *sums, const float *keep, const float *probs, const float *values, int64_t distance,
                       int64_t count, int64_t width, int vectors)
{
    vec held[ROWS][VECTORS];
    for (int r = 0; r < ROWS; r++)
        for (int i = 0; i < vectors; i++)
            held[r][i] = *(const vec *)(sums + r * width + i * LANES) * keep[r];
    for (int64_t t = 0; t < count; t++) {
        vec value[VECTORS];
        for (int i = 0; i < vectors; i++)
            value[i] = *(const vec *)(values + t * distance + i * LANES);
        for (int r = 0; r < ROWS; r++)
            for (int i = 0; i < vectors; i++)
                held[r][i] += probs[r * TILE + t] * value[i];
    }
    for (int r = 0; r < ROWS; r++)
        for (int i = 0; i < vectors; i++)
            *(vec *)(sums + r * width + i * LANES) = held[r][i];
}

/* Scores of one row to probabilities relative to its maximum so far; returns what earlier sums are multiplied by. The
 * keys outside `seen`, counted from the tile's first, get 0. */
INLINE float normalise_row(float *scores, int64_t count, struct range seen, float softcap, float *maximum, float *total)
{
    const int64_t padded = (count + WIDTH - 1) / WIDTH * WIDTH;
    if (softcap > 0.0f)
        for (int64_t t = 0; t < count; t++)
            scores[t] = softcap * tanhf(scores[t] / softcap);
    for (int64_t t = 0; t < seen.start; t++)
        scores[t] = -INFINITY;
    for (int64_t t = seen.end; t < padded; t++)
        scores[t] = -INFINITY;
    vec highest = all(*maximum), sum = {0};
    for (int64_t t = 0; t < padded; t += LANES)
        highest = larger(*(const vec *)(scores + t), highest);
    float now = highest[0];
    for (int i = 1; i < LANES; i++)
        now = highest[i] > now ? highest[i] : now;
    for (int64_t t = 0; t < padded; t += LANES) {
        const vec prob = exp_negatives(*(const vec *)(scores + t) - now);
        *(vec *)(scores + t) = prob;
        sum += prob;
    }
    const float keep = *total > 0.0f ? exp_negative(*maximum - now) : 0.0f;
    *total = *total * keep + sum_lanes(sum);
    *maximum = now;
    return keep;
}

/* A block's queries, scaled, by ROWS: [rows / ROWS, head_dim, ROWS]; 0 behind the last. */
INLINE void read_queries(const struct prefill_call *call, const struct block *block, int64_t rows, float *q)
{
    const int64_t width = call->head_dim, group = call->num_heads / call->num_kv_heads;
    for (int64_t row = 0; row < rows; row++) {
        const int64_t query = block->query + row / group, head = block->kv_head * group + row % group;
        float *to = q + row / ROWS * ROWS * width + row % ROWS;
        for (int64_t d = 0; d < width; d++)
            to[d * ROWS] = query < block->query + block->queries
                               ? call->scale * read_one(call->q, head * call->q_head + query * call->q_row + d, call->dtype)
                               : 0.0f;
    }
}

/* One block: `sums` [rows, head_dim], `maxima` and `totals` [rows]. */
FOR_EACH_CPU
static void attend_block(const struct prefill_call *call, const struct block *block, int64_t rows, struct room room,
                         float *sums, float *maxima, float *totals)
{
    const int64_t width = call->head_dim, group = call->num_heads / call->num_kv_heads, rank = call->rank;
    _Alignas(64) float scores[ROWS * TILE];
    float keep[ROWS];
    int64_t b_distance, key_b_distance;
    const float *b =
        read_rows(call->b, block->kv_head * call->b_head, call->b_rank, rank, width, call->dtype, room.b, &b_distance);
    const float *key_b = read_rows(call->key.b, block->kv_head * call->key.b_head, call->key.b_rank, call->key.rank, width,
                                   call->dtype, room.key_b, &key_b_distance);

    read_queries(call, block, rows, room.q);
    memset(sums, 0, (size_t)(rows * width) * sizeof *sums);
    for (int64_t row = 0; row < rows; row++) {
        maxima[row] = -FLT_MAX; /* not -INFINITY, from which a score of -INFINITY has no distance */
        totals[row] = 0.0f;
    }
    for (int64_t key = block->start; key < block->end; key += TILE) {
        const int64_t count = at_most(block->end - key, TILE);
        int64_t distance, v_distance, z_distance;
        const float *k = read_rows(call->k, block->kv_head * call->k_head + key * call->k_token, call->k_token, count,
                                   width, call->dtype, room.buffer, &distance);
        if (call->key.rank) {
            k = expand_keys(&call->key, k, distance, key_b, key_b_distance, key, count, width, call->dtype, room.expanded);
            distance = width;
        }
        lay_out(room.columns, k, distance, count, width);
        const float *v = read_rows(call->v, block->kv_head * call->v_head + key * call->v_token, call->v_token, count,
                                   width, call->dtype, room.buffer, &v_distance);
        if (rank) {
            const float *z =
                read_rows(call->z, key * call->z_token, call->z_token, count, rank, call->dtype, room.z, &z_distance);
            int64_t t = 0;
            for (; t + KEYS <= count; t += KEYS)
                add_low_rank(room.values + t * width, v + t * v_distance, v_distance, z + t * z_distance, z_distance, b,
                             b_distance, rank, width, KEYS);
            for (; t < count; t++)
                add_low_rank(room.values + t * width, v + t * v_distance, v_distance, z + t * z_distance, z_distance, b,
                             b_distance, rank, width, 1);
            v = room.values;
            v_distance = width;
        }
        for (int64_t row = 0; row < rows; row += ROWS) {
            const int64_t last = at_most((row + ROWS - 1) / group, block->queries - 1);
            const struct range any = {seen_by(call, block->query + row / group, key, key + count).start,
                                      seen_by(call, block->query + last, key, key + count).end};
            if (any.start >= any.end)
                continue;
            score_rows(scores, room.q + row * width, room.columns, count, width);
            for (int r = 0; r < ROWS; r++) {
                struct range seen = seen_by(call, block->query + at_most((row + r) / group, last), key, key + count);
                seen = (struct range){at_most(seen.start - key, count), at_most(seen.end - key, count)};
                keep[r] = normalise_row(scores + r * TILE, count, seen, call->softcap, maxima + row + r, totals + row + r);
            }
            int64_t d = 0;
            for (; d + WIDTH <= width; d += WIDTH)
                weigh_rows(sums + row * width + d, keep, scores, v + d, v_distance, count, width, VECTORS);
            for (; d < width; d += LANES)
                weigh_rows(sums + row * width + d, keep, scores, v + d, v_distance, count, width, 1);
        }
    }
}

/* Merge the `pieces` of a block, which lie one after the other, and write its rows. */
FOR_EACH_CPU
static void finish_block(const struct prefill_call *call, const struct block *block, int64_t pieces, int64_t rows,
                         const float *memory)
{
    const int64_t width = call->head_dim, group = call->num_heads / call->num_kv_heads, each = whole_lines(rows * (width + 2));
    for (int64_t row = 0; row < block->queries * group; row++) {
        const float *sums = memory + block->at + row * width, *maxima = memory + block->at + rows * width + row;
        float merged[MAX_HEAD_DIM] = {0}, maximum = -FLT_MAX, total = 0.0f;
        for (int64_t i = 0; i < pieces; i++)
            maximum = maxima[i * each] > maximum ? maxima[i * each] : maximum;
        for (int64_t i = 0; i < pieces; i++) {
            const float weight = exp_negative(maxima[i * each] - maximum);
            total += weight * maxima[i * each + rows];
            for (int64_t d = 0; d < width; d++)
                merged[d] += weight * sums[i * each + d];
        }
        const int64_t query = block->query + row / group, head = block->kv_head * group + row % group;
        const float share = total > 0.0f ? 1.0f / total : 0.0f;
        for (int64_t d = 0; d < width; d++)
            write_one(call->out, head * call->out_head + query * call->out_row + d, merged[d] * share, call->dtype);
        call->lse[head * call->q_len + query] = maximum + logf(total);
    }
}

/* Floats at the start of a cache line: vectors that lie across two take twice as long. */
static float *allocate(int64_t floats) { return aligned_alloc(LINE * sizeof(float), (size_t)floats * sizeof(float)); }

/* The room of thread `number` in `memory`, or with NULL only its size in floats. */
static int64_t lay_room(const struct prefill_call *call, int64_t rows, int64_t number, float *memory, struct room *room)
{
    const int64_t width = call->head_dim;
    const int64_t sizes[] = {rows * width,         TILE * width,       TILE * width,         TILE * width,
                             TILE * width,         call->key.rank * width, call->rank * width, TILE * call->rank};
    float **const parts[] = {&room->q,        &room->columns, &room->values, &room->buffer,
                             &room->expanded, &room->key_b,   &room->b,      &room->z};
    int64_t size = 0;
    for (int i = 0; i < 8; i++)
        size += whole_lines(sizes[i]);
    float *at = memory ? memory + number * size : NULL;
    for (int i = 0; memory && i < 8; at += whole_lines(sizes[i++]))
        *parts[i] = at;
    return size;
}

/* Returns 0; 1 for shapes beyond the limits of common.h, 2 without memory. Writes out and lse only if it returns 0. */
int precache_prefill(const struct prefill_call *call)
{
    const int64_t group = call->num_heads / call->num_kv_heads, width = call->head_dim;
    if (beyond_limits(group, width, call->rank, call->key.rank))
        return 1;
    const int64_t queries = at_most(MAX_ROWS / group, call->q_len); /* of a block */
    const int64_t rows = (queries * group + ROWS - 1) / ROWS * ROWS;
    const int64_t blocks = (call->q_len + queries - 1) / queries * call->num_kv_heads;
    const int64_t wanted = call->threads > 1 ? (PIECES * call->threads + blocks - 1) / blocks : 1;
    const int64_t cuts = at_least(at_most(wanted, call->kv_len / MIN_PIECE), 1);
    const int64_t each = whole_lines(rows * (width + 2)), count = blocks * cuts;
    struct block *all_blocks = malloc((size_t)count * sizeof *all_blocks);
    struct room room;
    const int64_t room_size = lay_room(call, rows, 0, NULL, &room);
    float *memory = allocate(count * each), *rooms = allocate(at_least(call->threads, 1) * room_size);
    if (!all_blocks || !memory || !rooms) {
        free(all_blocks), free(memory), free(rooms);
        return 2;
    }
    for (int64_t i = 0; i < count; i++) {
        const int64_t query = i / cuts / call->num_kv_heads * queries, cut = i % cuts;
        struct block block = {i / cuts % call->num_kv_heads, query, at_most(queries, call->q_len - query), 0, 0, i * each};
        /* A window may lie behind all keys. */
        const int64_t end = at_most(seen_by(call, query + block.queries - 1, 0, call->kv_len).end, call->kv_len);
        const int64_t start = at_most(seen_by(call, query, 0, call->kv_len).start, end);
        const int64_t step = ((end - start + cuts - 1) / cuts + TILE - 1) / TILE * TILE;
        block.start = at_most(start + cut * step, end);
        block.end = at_most(block.start + step, end);
        all_blocks[i] = block;
    }
#pragma omp parallel for schedule(dynamic) num_threads(call->threads) if (call->threads > 1) private(room)
    for (int64_t i = count - 1; i >= 0; i--) { /* the last queries see the most keys */
        float *sums = memory + all_blocks[i].at;
        lay_room(call, rows, omp_get_thread_num(), rooms, &room);
        attend_block(call, &all_blocks[i], rows, room, sums, sums + rows * width, sums + rows * width + rows);
    }
#pragma omp parallel for schedule(dynamic) num_threads(call->threads) if (call->threads > 1)
    for (int64_t i = 0; i < blocks; i++)
        finish_block(call, &all_blocks[i * cuts], cuts, rows, memory);
    free(all_blocks), free(memory), free(rooms);
    return 0;
}
