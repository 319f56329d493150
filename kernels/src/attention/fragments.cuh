// A tile of queries against a page of keys and values, in fragments of tensor-core products.
// Owner: attention.cu; DIM (values of a head in KV memory) and KV_F16 (0: bf16) are defined before. Invariant: what happens
// to a row does not depend on the others of its tile: all arithmetic is spelled out, and what a row does not see has weight
// 0 and leaves its maximum alone. Queries and weights are split into two 16-bit parts, so that only keys and values are
// rounded. Positions beyond the last that the tile sees are not read.

#pragma once
#include "common.cuh"

#define WARPS 4u
#define THREADS (WARPS * WARP)
// One block per multiprocessor is enough, so that the compiler takes registers before it spills.
#define BOUNDS THREADS, 1
// Steps of 16 dimensions; eights of dimensions.
#define STEPS (DIM / 16u)
#define EIGHTS (DIM / 8u)
// Dimensions come in chunks of 32 with keys, in blocks of 64 with values; what remains is taken apart.
#define KEYS_32 static_cast<i32>(DIM / 32u)
#define VALUES_64 static_cast<i32>(DIM / 64u)
#define VALUES_REST (DIM % 64u)
// Whether values are fetched before the scores are known: where there are registers for it.
#define EARLY (M * DIM <= 128u)
// Floats between the eights of joined results in shared memory: fragments of 128, spread over the banks.
#define STRIDE 132u
#define MINUS_INFINITY __uint_as_float(0xff800000u)
#define ALL 0xffffffffu

__device__ __forceinline__ u16 narrow(float x) { return KV_F16 ? f32_to_f16(x) : f32_to_bf16(x); }
__device__ __forceinline__ float wide(u16 x) { return KV_F16 ? f16_to_f32(x) : bf16_to_f32(x); }
__device__ __forceinline__ void mma(float d[4], const u32 a[4], const u32 b[2]) {
    if (KV_F16) mma_f16(d, a, b);
    else mma_bf16(d, a, b);
}

// Two numbers as two parts each: x = high + low, but for 2^-17 of it (2^-22 with f16).
__device__ __forceinline__ void split(float x, float y, u32& high, u32& low) {
    const u16 x_high = narrow(x), y_high = narrow(y);
    high = pack2(x_high, y_high);
    low = pack2(narrow(__fsub_rn(x, wide(x_high))), narrow(__fsub_rn(y, wide(y_high))));
}

// Powers of two that bring the largest query to about 2^10, where f16 has both range and precision, and back.
__device__ __forceinline__ void powers(float largest, float& up, float& down) {
    i32 exponent = static_cast<i32>(__float_as_uint(largest) >> 23) - 127;
    exponent = exponent < -100 ? -100 : exponent > 120 ? 120 : exponent;
    up = __uint_as_float(static_cast<u32>(127 + 10 - exponent) << 23);
    down = __uint_as_float(static_cast<u32>(127 - 10 + exponent) << 23);
}

// The tile of a block.
struct Tile {
    Span span;
    u32 head;  // key head
    u32 group; // query heads per key head
    u32 heads; // query heads
    u32 first; // number of the first query in the span

    // Positions that query `row` of the tile sees, 0 where there is none.
    __device__ __forceinline__ u32 visible(u32 row) const {
        const u32 token = (first + row) / group;
        return token < span.len ? span.start + token + 1 : 0;
    }
    // Its row in [tokens, heads].
    __device__ __forceinline__ u32 index(u32 row) const {
        const u32 token = (first + row) / group;
        return (span.first + token) * heads + head * group + (first + row) % group;
    }
};

template <u32 M>
struct Shared {
    uint4 q[M][STEPS][2][WARP]; // fragments of both parts
    u32 visible[16 * M]; // positions that a row sees, 0 where there is no query
    u32 index[16 * M];   // its row in [tokens, heads]
    float down[16 * M];
    float m[WARPS][16 * M];
    float l[WARPS][16 * M];
    float sum[M * EIGHTS * STRIDE]; // of the warps
    // Of all chunks so far: largest score, sum of weights and 1 over it, and the factors of the last fold.
    float run_m[16 * M];
    float run_l[16 * M];
    float inverse[16 * M];
    float mine[16 * M];
    float other[16 * M];
};

// What a warp knows of its tile in a chunk, as fragments of mma: lane (g, q) has rows g and g + 8 of each 16.
template <u32 M>
struct State {
    float acc[M][EIGHTS][4];
    float m[M][2];
    float l[M][2];
};

// Queries, scaled, as fragments. Lane (g, q) gets dimensions d.. d + 3 of rows g and g + 8 for a step: those of which it
// reads the keys. d is 32 c + 8 q in step 2 c, 4 more in step 2 c + 1, and 4 q in the last step of an odd number.
template <u32 M>
__device__ __forceinline__ void load_queries(Shared<M>& shared, const Tile& tile, const float* q, float scale, u32 head_dim) {
    const u32 lane = threadIdx.x % WARP;
    for (u32 row = threadIdx.x / WARP; row < 16 * M; row += WARPS) {
        const bool present = tile.visible(row) > 0;
        const u32 index = present ? tile.index(row) : 0;
        const float* from = q + static_cast<u64>(index) * head_dim;
        constexpr u32 TURNS = (DIM + 127) / 128;
        float x[TURNS][4];
        float largest = 0.0f;
#pragma unroll
        for (u32 turn = 0; turn < TURNS; turn++) {
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                const u32 d = 4 * (lane + WARP * turn) + i;
                x[turn][i] = present && d < head_dim ? __fmul_rn(from[d], scale) : 0.0f;
                largest = fmaxf(largest, fabsf(x[turn][i]));
            }
        }
        float up, down;
        powers(warp_max(largest), up, down);
        if (lane == 0) shared.down[row] = down, shared.visible[row] = tile.visible(row), shared.index[row] = index;
#pragma unroll
        for (u32 turn = 0; turn < TURNS; turn++) {
            const u32 d = 4 * (lane + WARP * turn);
            if (d >= DIM) continue;
            const bool paired = static_cast<i32>(d) < 32 * KEYS_32;
            const u32 step = paired ? d / 32 * 2 + d % 8 / 4 : STEPS - 1;
            const u32 to = row % 8 * 4 + (paired ? d % 32 / 8 : (d - 32 * KEYS_32) / 4);
            u32* high = &shared.q[row / 16][step][0][to].x + row % 16 / 8;
            u32* low = &shared.q[row / 16][step][1][to].x + row % 16 / 8;
            split(__fmul_rn(x[turn][0], up), __fmul_rn(x[turn][1], up), high[0], low[0]);
            split(__fmul_rn(x[turn][2], up), __fmul_rn(x[turn][3], up), high[2], low[2]);
        }
    }
}

// WORDS words from memory, zeros where there is nothing to read.
template <u32 WORDS>
__device__ __forceinline__ void fetch(u32* words, const u16* at, bool present) {
    if (WORDS == 4) {
        const uint4 w = present ? *reinterpret_cast<const uint4*>(at) : make_uint4(0, 0, 0, 0);
        words[0] = w.x, words[1 % WORDS] = w.y, words[2 % WORDS] = w.z, words[3 % WORDS] = w.w;
    } else if (WORDS == 2) {
        const uint2 w = present ? *reinterpret_cast<const uint2*>(at) : make_uint2(0, 0);
        words[0] = w.x, words[1 % WORDS] = w.y;
    } else {
        words[0] = present ? *reinterpret_cast<const u32*>(at) : 0;
    }
}

// One step: both parts of all queries with the keys of both halves of a page.
template <u32 M>
__device__ __forceinline__ void score_step(float scores[M][2][4], const Shared<M>& shared, u32 step, const u32 keys[2][2]) {
#pragma unroll
    for (u32 m = 0; m < M; m++) {
#pragma unroll
        for (u32 part = 0; part < 2; part++) {
            const uint4 f = shared.q[m][step][part][threadIdx.x % WARP];
            const u32 a[4] = {f.x, f.y, f.z, f.w};
            mma(scores[m][0], a, keys[0]);
            mma(scores[m][1], a, keys[1]);
        }
    }
}

// Scores of a page. `keys` is its [16][DIM], of which `left` positions are there.
template <u32 M>
__device__ __forceinline__ void score(float scores[M][2][4], const Shared<M>& shared, const u16* keys, u32 left) {
    const u32 g = threadIdx.x % WARP / 4, q = threadIdx.x % 4;
    u32 words[KEYS_32 + 1][2][4];
#pragma unroll
    for (i32 c = 0; c < KEYS_32; c++) {
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            const u32 position = 8 * half + g;
            fetch<4>(words[c][half], keys + position * DIM + 32 * c + 8 * q, position < left);
        }
    }
    if (STEPS % 2) {
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            const u32 position = 8 * half + g;
            fetch<2>(words[KEYS_32][half], keys + position * DIM + 32 * KEYS_32 + 4 * q, position < left);
        }
    }
#pragma unroll
    for (u32 step = 0; step < STEPS; step++) {
        const u32 c = step / 2, w = step % 2 * 2;
        const u32 b[2][2] = {{words[c][0][w], words[c][0][w + 1]}, {words[c][1][w], words[c][1][w + 1]}};
        score_step<M>(scores, shared, step, b);
    }
}

// Scores become weights, in two parts; what was known is shrunk to the new maximum. `seen`: how many positions of the
// page rows g and g + 8 see.
template <u32 M>
__device__ __forceinline__ void weigh(
    State<M>& state, u32 m, const float scores[2][4], const u32 seen[2], const float down[2], u32 high[4], u32 low[4]) {
#pragma unroll
    for (u32 r = 0; r < 2; r++) {
        float s[2][2];
        float top = MINUS_INFINITY;
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
#pragma unroll
            for (u32 i = 0; i < 2; i++) {
                const u32 position = 8 * half + 2 * (threadIdx.x % 4) + i;
                s[half][i] = position < seen[r] ? __fmul_rn(scores[half][2 * r + i], down[r]) : MINUS_INFINITY;
                top = fmaxf(top, s[half][i]);
            }
        }
        top = fmaxf(top, __shfl_xor_sync(ALL, top, 1));
        top = fmaxf(top, __shfl_xor_sync(ALL, top, 2));
        top = fmaxf(top, state.m[m][r]);
        // A row that has seen nothing yet keeps its zeros.
        const float reference = top == MINUS_INFINITY ? 0.0f : top;
        const float shrink = exp2f(__fsub_rn(state.m[m][r], reference));
        state.m[m][r] = top;
        float p[2][2];
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
#pragma unroll
            for (u32 i = 0; i < 2; i++) p[half][i] = exp2f(__fsub_rn(s[half][i], reference));
            split(p[half][0], p[half][1], high[r + 2 * half], low[r + 2 * half]);
        }
        const float sum = __fadd_rn(__fadd_rn(p[0][0], p[0][1]), __fadd_rn(p[1][0], p[1][1]));
        state.l[m][r] = __fmaf_rn(state.l[m][r], shrink, sum);
#pragma unroll
        for (u32 e = 0; e < EIGHTS; e++) {
            state.acc[m][e][2 * r] = __fmul_rn(state.acc[m][e][2 * r], shrink);
            state.acc[m][e][2 * r + 1] = __fmul_rn(state.acc[m][e][2 * r + 1], shrink);
        }
    }
}

// WORDS words of each of the four positions whose weights this lane has.
template <u32 WORDS>
__device__ __forceinline__ void fetch_values(u32 words[4][WORDS], const u16* values, u32 base, u32 left) {
    const u32 g = threadIdx.x % WARP / 4, q = threadIdx.x % 4;
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        const u32 position = 2 * q + i % 2 + i / 2 * 8;
        fetch<WORDS>(words[i], values + position * DIM + base + 2 * WORDS * g, position < left);
    }
}

// Adds weights times values: 16 WORDS dimensions from eight `first` on. Column n of eight first + j is dimension
// 2 WORDS n + j of them, so that a lane reads its columns of a position at once.
template <u32 M, u32 WORDS>
__device__ __forceinline__ void add_values(
    State<M>& state, u32 first, const u32 words[4][WORDS], const u32 high[M][4], const u32 low[M][4]) {
#pragma unroll
    for (u32 j = 0; j < 2 * WORDS; j++) {
        u32 b[2];
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            const u32 x = words[2 * i][j / 2], y = words[2 * i + 1][j / 2];
            b[i] = j % 2 ? (x >> 16) | (y & 0xffff0000u) : (x & 0xffffu) | (y << 16);
        }
#pragma unroll
        for (u32 m = 0; m < M; m++) {
            mma(state.acc[m][first + j], high[m], b);
            mma(state.acc[m][first + j], low[m], b);
        }
    }
}

// Where shared.sum has dimension d of a row.
__device__ __forceinline__ u32 place_of(u32 row, u32 d) {
    const u32 base = d / 64 * 64;
    // Words per position and lane in this block: 4, or what add_values was called with for the rest.
    u32 words = 4, at = base;
    if (base + 64 > DIM) {
        words = VALUES_REST >= 32 && d - base < 32 ? 2 : 1;
        if (VALUES_REST == 48 && d - base >= 32) at += 32;
    }
    const u32 n = (d - at) / (2 * words), j = (d - at) % (2 * words);
    const u32 lane = row % 8 * 4 + n / 2, i = row % 16 / 8 * 2 + n % 2;
    return (row / 16 * EIGHTS + at / 8 + j) * STRIDE + i * WARP + lane;
}

// One page: `left` positions of it are there for the tile, `seen` says how many the rows of this lane see.
template <u32 M>
__device__ __forceinline__ void page_of(
    State<M>& state, const Shared<M>& shared, const u16* keys, const u16* values, u32 left, const u32 seen[M][2],
    const float down[M][2]) {
    u32 words[VALUES_64 + 1][4][4];
    if (EARLY) {
#pragma unroll
        for (i32 b = 0; b < VALUES_64; b++) fetch_values<4>(words[b], values, 64 * b, left);
    }
    float scores[M][2][4] = {};
    score<M>(scores, shared, keys, left);
    u32 high[M][4], low[M][4];
#pragma unroll
    for (u32 m = 0; m < M; m++) weigh<M>(state, m, scores[m], seen[m], down[m], high[m], low[m]);
#pragma unroll
    for (i32 b = 0; b < VALUES_64; b++) {
        if (!EARLY) fetch_values<4>(words[b], values, 64 * b, left);
        add_values<M, 4>(state, 8 * b, words[b], high, low);
    }
    if (VALUES_REST >= 32) {
        u32 rest[4][2];
        fetch_values<2>(rest, values, 64 * VALUES_64, left);
        add_values<M, 2>(state, 8 * VALUES_64, rest, high, low);
    }
    if (VALUES_REST % 32 != 0) {
        u32 rest[4][1];
        fetch_values<1>(rest, values, DIM - 16, left);
        add_values<M, 1>(state, EIGHTS - 2, rest, high, low);
    }
}
