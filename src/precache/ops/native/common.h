/* What the kernels share: vectors, 16-bit numbers, e^x, and keys with a low-rank part. */
#ifndef PRECACHE_COMMON_H
#define PRECACHE_COMMON_H

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define LANES 8
#define KEYS 4 /* keys that are scored or expanded at a time */
#define MAX_GROUP 16
#define MAX_HEAD_DIM 256
#define MAX_RANK 256
#define MAX_KEY_RANK 64

typedef float vec __attribute__((vector_size(LANES * 4), aligned(4)));

/* Chosen when the library is loaded, which takes glibc. GCC before 12 knows no levels; there avx2 comes without fma. */
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__) && __GNUC__ >= 12
#define FOR_EACH_CPU __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#elif defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__)
#define FOR_EACH_CPU __attribute__((target_clones("avx512f", "avx2", "default")))
#elif defined(__x86_64__)
#error "on x86 this takes GCC and glibc, for code of several kinds of processor: that of the oldest is slower than torch"
#else
#define FOR_EACH_CPU
#endif
#define INLINE static inline __attribute__((always_inline))

enum { FLOAT32, BFLOAT16, FLOAT16 };

INLINE float float_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

INLINE uint32_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

INLINE float widen_bfloat16(uint16_t bits) { return float_of((uint32_t)bits << 16); }

/* By hand, because not every compiler has a half type. */
INLINE float widen_float16(uint16_t bits)
{
    uint32_t sign = (uint32_t)(bits & 0x8000) << 16, rest = bits & 0x7fff;
    float normal = float_of((rest << 13) + (rest >= 0x7c00 ? 0x70000000u : 0x38000000u));
    return float_of(sign | bits_of(rest < 0x400 ? (float)rest * 0x1p-24f : normal));
}

INLINE float read_one(const void *from, int64_t at, int dtype)
{
    if (dtype == FLOAT32)
        return ((const float *)from)[at];
    uint16_t bits = ((const uint16_t *)from)[at];
    return dtype == BFLOAT16 ? widen_bfloat16(bits) : widen_float16(bits);
}

INLINE uint16_t narrow_bfloat16(float value)
{
    uint32_t bits = bits_of(value);
    return value != value ? 0x7fc0 : (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

INLINE uint16_t narrow_float16(float value)
{
    uint32_t bits = bits_of(value), sign = (bits >> 16) & 0x8000;
    float magnitude = fabsf(value);
    if (value != value)
        return (uint16_t)(sign | 0x7e00);
    if (magnitude >= 65520.0f)
        return (uint16_t)(sign | 0x7c00);
    if (magnitude < 0x1p-14f)
        return (uint16_t)(sign | (uint32_t)rintf(magnitude * 0x1p24f));
    bits = (bits & 0x7fffffff) - 0x38000000;
    return (uint16_t)(sign | ((bits + 0xfff + ((bits >> 13) & 1)) >> 13));
}

INLINE void write_one(void *to, int64_t at, float value, int dtype)
{
    if (dtype == FLOAT32)
        ((float *)to)[at] = value;
    else
        ((uint16_t *)to)[at] = dtype == BFLOAT16 ? narrow_bfloat16(value) : narrow_float16(value);
}

/* Rows as float32: where they lie, or widened into `buffer`. Returns them and sets their distance. */
INLINE const float *read_rows(const void *from, int64_t at, int64_t distance, int64_t count, int64_t width, int dtype,
                              float *buffer, int64_t *found)
{
    if (dtype == FLOAT32) {
        *found = distance;
        return (const float *)from + at;
    }
    const uint16_t *rows = (const uint16_t *)from + at;
    for (int64_t t = 0; t < count; t++)
        for (int64_t d = 0; d < width; d++)
            buffer[t * width + d] =
                dtype == BFLOAT16 ? widen_bfloat16(rows[t * distance + d]) : widen_float16(rows[t * distance + d]);
    *found = width;
    return buffer;
}

/* e^x for x <= 0, to 2e-7: 2^n times a polynomial; 0 where that would be no normal number. */
INLINE float exp_negative(float x)
{
    float bounded = x < -87.0f ? -87.0f : x;
    float n = rintf(bounded * 1.44269504f);
    float r = (bounded - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return x < -87.0f ? 0.0f : p * float_of((uint32_t)((int32_t)n + 127) << 23);
}

INLINE float sum_lanes(vec x)
{
    return ((x[0] + x[4]) + (x[1] + x[5])) + ((x[2] + x[6]) + (x[3] + x[7]));
}

/* What k lacks: rotate(z b) with rotate(x) = x cos + rotate_half(x) sin, for head_dim a multiple of 2 LANES. Strides count
 * elements; the last dimension of every tensor is contiguous. */
struct key_strip {
    const void *z;         /* [keys, rank]; everything is unused with rank 0 */
    const void *b;         /* [num_kv_heads, rank, head_dim] */
    const void *cos, *sin; /* [keys, head_dim] */
    int64_t rank, z_token, b_head, b_rank, cos_token, sin_token;
};

/* Whether a call's shapes are more than the kernels take. */
INLINE int beyond_limits(int64_t group, int64_t width, int64_t rank, int64_t key_rank)
{
    if (group > MAX_GROUP || width > MAX_HEAD_DIM || width % LANES || rank > MAX_RANK || key_rank > MAX_KEY_RANK)
        return 1;
    return key_rank && width % (2 * LANES);
}

/* rows[t] = keys[t] + rotate(z[t] b) for `keys` tokens, with rotate(x) = x cos + rotate_half(x) sin. The vectors of b are
 * read once for all of them. */
INLINE void rotate_rows(float *rows, const float *k, int64_t k_distance, const float *z, int64_t z_distance,
                        const float *b, int64_t b_distance, int64_t rank, const float *cos, int64_t cos_distance,
                        const float *sin, int64_t sin_distance, int64_t width, int keys)
{
    const int64_t half = width / 2;
    for (int64_t d = 0; d < half; d += LANES) {
        vec low[KEYS], high[KEYS];
        for (int t = 0; t < keys; t++)
            low[t] = high[t] = (vec){0};
        for (int64_t r = 0; r < rank; r++) {
            const float *at = b + r * b_distance + d;
            const vec b_low = *(const vec *)at, b_high = *(const vec *)(at + half);
            for (int t = 0; t < keys; t++) {
                low[t] += z[t * z_distance + r] * b_low;
                high[t] += z[t * z_distance + r] * b_high;
            }
        }
        for (int t = 0; t < keys; t++) {
            const float *key = k + t * k_distance + d, *c = cos + t * cos_distance + d, *s = sin + t * sin_distance + d;
            float *row = rows + t * width + d;
            *(vec *)row = *(const vec *)key + low[t] * *(const vec *)c - high[t] * *(const vec *)s;
            *(vec *)(row + half) =
                *(const vec *)(key + half) + high[t] * *(const vec *)(c + half) + low[t] * *(const vec *)(s + half);
        }
    }
}

/* Keys with their low-rank part, `count` of them from the token `key` on, TILE at most; `b` is that of the KV head. */
INLINE const float *expand_keys(const struct key_strip *strip, const float *k, int64_t k_distance, const float *b,
                                int64_t b_distance, int64_t key, int64_t count, int64_t width, int dtype, float *rows)
{
    const int64_t rank = strip->rank;
    float z_rows[TILE * MAX_KEY_RANK], cos_rows[TILE * MAX_HEAD_DIM], sin_rows[TILE * MAX_HEAD_DIM];
    int64_t z_distance, cos_distance, sin_distance, t = 0;
    const float *z =
        read_rows(strip->z, key * strip->z_token, strip->z_token, count, rank, dtype, z_rows, &z_distance);
    const float *cos =
        read_rows(strip->cos, key * strip->cos_token, strip->cos_token, count, width, dtype, cos_rows, &cos_distance);
    const float *sin =
        read_rows(strip->sin, key * strip->sin_token, strip->sin_token, count, width, dtype, sin_rows, &sin_distance);
    for (; t + KEYS <= count; t += KEYS)
        rotate_rows(rows + t * width, k + t * k_distance, k_distance, z + t * z_distance, z_distance, b,
                    b_distance, rank, cos + t * cos_distance, cos_distance, sin + t * sin_distance, sin_distance, width, KEYS);
    for (; t < count; t++)
        rotate_rows(rows + t * width, k + t * k_distance, k_distance, z + t * z_distance, z_distance, b,
                    b_distance, rank, cos + t * cos_distance, cos_distance, sin + t * sin_distance, sin_distance, width, 1);
    return rows;
}

#endif
