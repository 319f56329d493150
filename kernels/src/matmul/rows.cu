// Rows of matrices: embeddings, gathers, conversions around large products, and random weights for measuring.
// Owner: cuda.rs and cuda/*.rs. Invariant: every value is made by one thread from its own inputs, so nothing depends on
// the rest of the batch; rows that do not exist read as zeros.

#include "weights.cuh"

#define COLS_PER_BLOCK 1024u

__device__ __forceinline__ Scales any_scales(uint2 record, u32 kind) {
    switch (kind) {
        case HALVES: return decode<HALVES>(record);
        case HALVES_MIN: return decode<HALVES_MIN>(record);
        case FACTORS_32: return decode<FACTORS_32>(record);
        case FACTORS_16: return decode<FACTORS_16>(record);
        default: return decode<FACTORS_16_MIN>(record);
    }
}

// One weight of a layout.
struct F32Value {
    __device__ static float get(const Matrix& m, u32 row, u32 col) {
        return static_cast<const float*>(m.codes)[static_cast<u64>(row) * ((m.cols + 3) / 4 * 4) + col];
    }
};

template <bool F16> struct HalfValue {
    __device__ static float get(const Matrix& m, u32 row, u32 col) {
        u16 value = static_cast<const u16*>(m.codes)[static_cast<u64>(row) * ((m.cols + 7) / 8 * 8) + col];
        return F16 ? f16_to_f32(value) : bf16_to_f32(value);
    }
};

template <u32 BITS> struct CodeValue {
    // Four columns from `col`, a multiple of 4.
    __device__ static float4 four(const Matrix& m, u32 row, u32 col) {
        u64 group = static_cast<u64>(row / TILE_ROWS) * divide_up(m.cols, GROUP_COLS) + col / GROUP_COLS;
        u32 j = col / 16 % 4, half = row % TILE_ROWS / 8, lane = 4 * (row % 8) + col / 4 % 4, zero = m.zero;
        const u32* words = static_cast<const u32*>(m.codes);
        i32 code[4];
        if (BITS == 8) {
            u32 word = words[(2 * group + half) * 128 + 4 * lane + j];
#pragma unroll
            for (u32 i = 0; i < 4; i++) code[i] = static_cast<signed char>(word >> (8 * (i / 2 + i % 2 * 2)));
        } else {
            u32 word = words[group * 128 + 4 * lane + 2 * half + j / 2] >> (8 * (j % 2));
#pragma unroll
            for (u32 i = 0; i < 4; i++) code[i] = static_cast<i32>(word >> (4 * (i / 2) + 16 * (i % 2)) & 15u);
        }
        const u32* record = m.scales + (group * TILE_ROWS + row % TILE_ROWS) * record_words(m.kind);
        Scales scales = any_scales(load_record(record, m.kind), m.kind);
        float scale = scales.scale[0], minimum = scales.minimum[0], v[4];
#pragma unroll
        for (u32 i = 1; i < 4; i++) {
            scale = i == j ? scales.scale[i] : scale;
            minimum = i == j ? scales.minimum[i] : minimum;
        }
        // The product is exact: fused or not, the difference is rounded once.
#pragma unroll
        for (u32 i = 0; i < 4; i++) v[i] = scale * static_cast<float>(code[i] - static_cast<i32>(zero)) - minimum;
        return make_float4(v[0], v[1], v[2], v[3]);
    }

    __device__ static float get(const Matrix& m, u32 row, u32 col) {
        float4 v = four(m, row, col / 4 * 4);
        return col % 4 == 0 ? v.x : col % 4 == 1 ? v.y : col % 4 == 2 ? v.z : v.w;
    }
};

// out[i][..] = row ids[i * stride + at] of the matrix. Block (i, c) makes columns 1024 c.. of row i.
template <class Value>
__device__ __forceinline__ void embed(const Matrix& matrix, const u32* ids, u32 stride, u32 at, float* out) {
    u32 row = ids[static_cast<u64>(blockIdx.x) * stride + at];
    float* to = out + static_cast<u64>(blockIdx.x) * matrix.cols;
    for (u32 i = 0; i < COLS_PER_BLOCK; i += 256) {
        u32 col = blockIdx.y * COLS_PER_BLOCK + i + threadIdx.x;
        if (col < matrix.cols) to[col] = row < matrix.rows ? Value::get(matrix, row, col) : 0.0f;
    }
}

#define EMBED(NAME, VALUE)                                                                                             \
    KERNEL(256)                                                                                                        \
    NAME(const void* codes, const u32* scales, u32 rows, u32 cols, u32 kind, u32 zero, const u32* ids, u32 stride,     \
         u32 at, float* out) {                                                                                         \
        Matrix matrix = {codes, scales, rows, cols, kind, zero};                                                       \
        embed<VALUE>(matrix, ids, stride, at, out);                                                                    \
    }

EMBED(embed_f32, F32Value)
EMBED(embed_f16, HalfValue<true>)
EMBED(embed_bf16, HalfValue<false>)
EMBED(embed_q8, CodeValue<8>)
EMBED(embed_q4, CodeValue<4>)

// out[i][..] = x[index[i]][..].
KERNEL(256) gather_rows(const float* x, u32 rows, u32 cols, const u32* index, float* out) {
    u32 row = index[blockIdx.x];
    for (u32 i = 0; i < COLS_PER_BLOCK; i += 256) {
        u32 col = blockIdx.y * COLS_PER_BLOCK + i + threadIdx.x;
        if (col >= cols) return;
        out[static_cast<u64>(blockIdx.x) * cols + col] = row < rows ? x[static_cast<u64>(row) * cols + col] : 0.0f;
    }
}

// out[m][..] = x[m][..] * scale in 16 bits, padded with zeros to `pitch` columns.
template <bool F16> __device__ __forceinline__ void to_halves(const float* x, float scale, u16* out, u32 cols, u32 pitch) {
    for (u32 i = 0; i < COLS_PER_BLOCK; i += 256) {
        u32 col = blockIdx.y * COLS_PER_BLOCK + i + threadIdx.x;
        if (col >= pitch) return;
        float value = col < cols ? x[static_cast<u64>(blockIdx.x) * cols + col] * scale : 0.0f;
        out[static_cast<u64>(blockIdx.x) * pitch + col] = F16 ? f32_to_f16(value) : f32_to_bf16(value);
    }
}

KERNEL(256) to_f16(const float* x, float scale, u16* out, u32 cols, u32 pitch) {
    to_halves<true>(x, scale, out, cols, pitch);
}

KERNEL(256) to_bf16(const float* x, float scale, u16* out, u32 cols, u32 pitch) {
    to_halves<false>(x, scale, out, cols, pitch);
}

// Rows first.. of a quantised matrix in bf16, padded with zeros to `pitch` columns, a multiple of 4.
template <u32 BITS> __device__ __forceinline__ void widen(const Matrix& matrix, u32 first, u16* out, u32 pitch) {
    u32 row = first + blockIdx.x, col = blockIdx.y * COLS_PER_BLOCK + 4 * threadIdx.x;
    if (col >= pitch) return;
    float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (row < matrix.rows && col < matrix.cols) v = CodeValue<BITS>::four(matrix, row, col);
    uint2 halves = make_uint2(pack2(f32_to_bf16(v.x), f32_to_bf16(v.y)), pack2(f32_to_bf16(v.z), f32_to_bf16(v.w)));
    *reinterpret_cast<uint2*>(out + static_cast<u64>(blockIdx.x) * pitch + col) = halves;
}

#define WIDEN(NAME, BITS)                                                                                              \
    KERNEL(256)                                                                                                        \
    NAME(const void* codes, const u32* scales, u32 rows, u32 cols, u32 kind, u32 zero, u32 first, u16* out,            \
         u32 pitch) {                                                                                                  \
        Matrix matrix = {codes, scales, rows, cols, kind, zero};                                                       \
        widen<BITS>(matrix, first, out, pitch);                                                                        \
    }

WIDEN(widen_q8, 8)
WIDEN(widen_q4, 4)

// y[m][n] += bias[n].
KERNEL(256) add_bias(float* y, const float* bias, u32 cols) {
    for (u32 i = 0; i < COLS_PER_BLOCK; i += 256) {
        u32 col = blockIdx.y * COLS_PER_BLOCK + i + threadIdx.x;
        if (col < cols) y[static_cast<u64>(blockIdx.x) * cols + col] += bias[col];
    }
}

// Number i of a stream (splitmix64).
__device__ __forceinline__ u64 random_at(u64 seed, u64 i) {
    u64 z = seed + (i + 1) * 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

__device__ __forceinline__ float uniform(u64 bits, float limit) {
    return (static_cast<float>(static_cast<u32>(bits >> 40)) * (2.0f / 16777216.0f) - 1.0f) * limit;
}

// Uniform values in -limit..limit.
KERNEL(256) random_bf16(u16* out, u64 count, u64 seed, float limit) {
    u64 step = static_cast<u64>(gridDim.x) * 256;
    for (u64 i = static_cast<u64>(blockIdx.x) * 256 + threadIdx.x; i < count; i += step)
        out[i] = f32_to_bf16(uniform(random_at(seed, i), limit));
}

// Random words, or the same word.
KERNEL(256) random_words(u32* out, u64 count, u64 seed) {
    u64 step = static_cast<u64>(gridDim.x) * 256;
    for (u64 i = static_cast<u64>(blockIdx.x) * 256 + threadIdx.x; i < count; i += step)
        out[i] = static_cast<u32>(random_at(seed, i) >> 32);
}

KERNEL(256) fill_words(u32* out, u64 count, u32 word) {
    u64 step = static_cast<u64>(gridDim.x) * 256;
    for (u64 i = static_cast<u64>(blockIdx.x) * 256 + threadIdx.x; i < count; i += step) out[i] = word;
}
