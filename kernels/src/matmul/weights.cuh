// Weight matrices on a device: five layouts, and how codes and scales are decoded.
// Owner: matmul.cu and rows.cu include it. Invariant: cuda/repack.rs writes what is read here.
//
// f32, f16, bf16: row-major, rows padded with zeros to a multiple of 16 bytes.
// q8, q4: tiles of 16 rows, in them groups of 64 columns, padded with codes and scales of 0. Column c of a group is slot
// c % 4 of quad lane q = c / 4 % 4 in unit j = c / 16, which is how the tensor cores take it (16 columns in a product).
// q8: a group is [row / 8][lane 4 (row % 8) + q][unit][byte]; bytes hold the slots 0, 2, 1, 3. Codes are signed with
// records of kind HALVES, and below 128 with others.
// q4: a group is [lane 4 (row % 8) + q] of 4 words, word 2 (row / 8) + j / 2; slot s of unit j is in nibble
// 2 (j % 2) + s / 2 of the lower (s even) or upper (s odd) half of the word.
// Scales: a record for each tile, group and row, of one word (HALVES) or two:
//   HALVES           two f16 scales, for 32 columns each
//   HALVES_MIN       the same, then two f16 minima
//   FACTORS_32       bytes: two scale factors, two factors of minima, for 32 columns each; then f16 d, f16 dmin
//   FACTORS_16       four signed bytes: scale factors for 16 columns each; then f16 d
//   FACTORS_16_MIN   four bytes: scale factor (lower nibble) and factor of the minimum; then f16 d, f16 dmin
// A weight is scale * (code - zero) - minimum, the scale being d * factor: exact in f32.

#pragma once
#include "common.cuh"

#define HALVES 0u
#define HALVES_MIN 1u
#define FACTORS_32 2u
#define FACTORS_16 3u
#define FACTORS_16_MIN 4u

#define TILE_ROWS 16u
#define GROUP_COLS 64u

// A matrix as the kernels get it.
struct Matrix {
    const void* codes;
    const u32* scales;
    u32 rows;
    u32 cols;
    u32 kind;  // of the scales
    u32 zero;  // subtracted from codes
};

__device__ __forceinline__ u32 divide_up(u32 a, u32 b) { return (a + b - 1) / b; }
__device__ __forceinline__ u32 record_words(u32 kind) { return kind == HALVES ? 1 : 2; }

// Scales and minima of the four units of a record.
struct Scales {
    float scale[4];
    float minimum[4];
};

__device__ __forceinline__ float low_half(u32 word) { return f16_to_f32(static_cast<u16>(word)); }
__device__ __forceinline__ float high_half(u32 word) { return f16_to_f32(static_cast<u16>(word >> 16)); }
__device__ __forceinline__ float byte_of(u32 word, u32 i) { return static_cast<float>((word >> (8 * i)) & 0xffu); }

// Minima are 0 where the kind has none.
template <u32 KIND> __device__ __forceinline__ Scales decode(uint2 record) {
    Scales out;
    float d = low_half(record.y), dmin = high_half(record.y);
#pragma unroll
    for (u32 j = 0; j < 4; j++) {
        u32 half = j / 2, factor = (record.x >> (8 * j)) & 0xffu;
        if (KIND == HALVES || KIND == HALVES_MIN) {
            out.scale[j] = half == 0 ? low_half(record.x) : high_half(record.x);
            out.minimum[j] = KIND == HALVES ? 0.0f : half == 0 ? d : dmin;
        } else if (KIND == FACTORS_32) {
            out.scale[j] = d * byte_of(record.x, half);
            out.minimum[j] = dmin * byte_of(record.x, 2 + half);
        } else if (KIND == FACTORS_16) {
            out.scale[j] = d * static_cast<float>(static_cast<signed char>(factor));
            out.minimum[j] = 0.0f;
        } else {
            out.scale[j] = d * static_cast<float>(factor & 15u);
            out.minimum[j] = dmin * static_cast<float>(factor >> 4);
        }
    }
    return out;
}

__device__ __forceinline__ uint2 load_record(const u32* at, u32 kind) {
    return kind == HALVES ? make_uint2(*at, 0u) : *reinterpret_cast<const uint2*>(at);
}
