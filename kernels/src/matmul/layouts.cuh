// How a warp multiplies weights of each layout with rows of x on tensor cores.
// Owner: matmul.cu includes it. Invariant: what a lane adds up, and in which order, depends on the columns alone, not on
// how many rows or outputs there are. A stage that begins beyond the last column is loaded as well (from anywhere inside
// of the matrix), but not multiplied.
//
// Which columns meet in a product of the tensor core does not matter as long as w and x agree: lane q of a quad takes a
// run of columns next to each other, in 16-byte loads, and hands them to whatever slots it has.

#pragma once
#include "weights.cuh"

#define QUAD (threadIdx.x % 4)
#define ROW (threadIdx.x % WARP / 4)

// Rows of x, 8 in a group: the lane reads row ROW of each. Where there is none it reads the last one, whose products in
// those columns nobody keeps. ALIGNED: a row has a multiple of 4 columns, so that it can be read in 16 bytes.
template <u32 GROUPS, bool ALIGNED> struct Input {
    const float* row[GROUPS];
    u32 cols;

    __device__ __forceinline__ Input(const float* x, u32 first, u32 rows, u32 cols) : cols(cols) {
#pragma unroll
        for (u32 g = 0; g < GROUPS; g++) row[g] = x + static_cast<u64>(min(first + 8 * g + ROW, rows - 1)) * cols;
    }

    // Four columns from `col`, a multiple of 4. Where the last column is among them, values of the row stand in for what
    // follows it: weights are padded with zeros.
    __device__ __forceinline__ float4 fetch(u32 group, u32 col) const {
        const float* from = row[group];
        if (ALIGNED) return *reinterpret_cast<const float4*>(from + min(col, cols - 4));
        u32 last = cols - 1;
        return make_float4(from[min(col, last)], from[min(col + 1, last)], from[min(col + 2, last)], from[min(col + 3, last)]);
    }

    // The same; zeros if all four are beyond the last column.
    __device__ __forceinline__ float4 fetch_inside(u32 group, u32 col) const {
        return col < cols ? fetch(group, col) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
};

// a and b as sums of TERMS bf16 values, the largest first; each pair in one register. All but the last are cut off, so
// that what is left is exact; infinities and NaN do not become numbers.
template <u32 TERMS> __device__ __forceinline__ void split_bf16(float a, float b, u32* terms, u32 stride) {
#pragma unroll
    for (u32 t = 0; t + 1 < TERMS; t++) {
        u32 high_a = __float_as_uint(a) & 0xffff0000u, high_b = __float_as_uint(b) & 0xffff0000u;
        terms[t * stride] = (high_a >> 16) | high_b;
        a -= __uint_as_float(high_a);
        b -= __uint_as_float(high_b);
    }
    u32 last_a = __float_as_uint(a) + 0x8000u, last_b = __float_as_uint(b) + 0x8000u;
    terms[(TERMS - 1) * stride] = (last_a >> 16) | (last_b & 0xffff0000u);
}

// Scale of x with f16 weights, so that large activations fit, and of its second term, so that small ones do.
#define F16_SCALE 0.00390625f
#define F16_LOW 4096.0f

__device__ __forceinline__ void split_f16(float a, float b, u32* terms, u32 stride) {
    a *= F16_SCALE;
    b *= F16_SCALE;
    u16 high_a = f32_to_f16(a), high_b = f32_to_f16(b);
    terms[0] = pack2(high_a, high_b);
    terms[stride] = pack2(f32_to_f16((a - f16_to_f32(high_a)) * F16_LOW), f32_to_f16((b - f16_to_f32(high_b)) * F16_LOW));
}

// The layouts. Each knows the columns of a stage, loads the weights of a stage into registers, multiplies them, and knows
// where in a block its sums belong.

// Sums of a warp in shared memory: [row of x][output].
template <u32 TILES, u32 GROUPS> struct Partial {
    float value[8 * GROUPS][TILE_ROWS * TILES + 8];
};

// f16 and bf16: lane q takes columns 8 q.. of each 32, two products for them. Weights are the operand with 8 columns: a
// load of 16 bytes is two of its fragments. The other operand has 16 rows: 16 rows of x, or 8 rows twice, once for the
// first term and once for the others. Either way first terms have a sum of their own: tensor cores cut off what does not fit
// at each step, and sums of the other terms are too small for that to count.
template <u32 TILES, bool F16> struct Halves {
    static constexpr u32 PARTS = 2, COLS = 32 * PARTS, TERMS = F16 ? 2 : 3, EIGHTS = 2 * TILES;
    static constexpr bool ALIGNED = false;  // not always
    struct Stage {
        uint4 w[EIGHTS][PARTS];
    };
    // With 8 rows of x: [g][2 q..] of first terms, [g + 8] of the others. With 16: one after the other.
    template <u32 GROUPS> struct Sums {
        float value[GROUPS][EIGHTS][4];
    };
    const uint4* from[EIGHTS];
    u32 pitch;

    __device__ __forceinline__ Halves(const Matrix& matrix, u32 tile) : pitch((matrix.cols + 7) / 8 * 8) {
#pragma unroll
        for (u32 i = 0; i < EIGHTS; i++) {
            u32 row = min(TILE_ROWS * tile + 8 * i + ROW, matrix.rows - 1);
            from[i] = static_cast<const uint4*>(matrix.codes) + static_cast<u64>(row) * (pitch / 8);
        }
    }

    // Beyond the last column x is 0, and other weights stand in.
    __device__ __forceinline__ void load(Stage& stage, u32 col) const {
#pragma unroll
        for (u32 p = 0; p < PARTS; p++) {
            u32 at = min(col / 8 + 4 * p + QUAD, pitch / 8 - 1);
#pragma unroll
            for (u32 i = 0; i < EIGHTS; i++) stage.w[i][p] = load_once(from[i] + at);
        }
    }

    __device__ __forceinline__ static void mma(float (&sums)[4], const u32 (&a)[4], const uint4& w, u32 i) {
        u32 b[2] = {i == 0 ? w.x : w.z, i == 0 ? w.y : w.w};
        if (F16)
            mma_f16(sums, a, b);
        else
            mma_bf16(sums, a, b);
    }

    template <u32 GROUPS, bool ALIGNED>
    __device__ __forceinline__ void multiply(const Stage& stage, const Input<GROUPS, ALIGNED>& x, u32 col,
                                             Sums<GROUPS>& sums) const {
#pragma unroll
        for (u32 step = 0; step < 2 * PARTS; step++) {
            u32 p = step / 2, i = step % 2, term[GROUPS][3][2];
#pragma unroll
            for (u32 g = 0; g < GROUPS; g++) {
                float4 v = x.fetch_inside(g, col + 32 * p + 8 * QUAD + 4 * i);
                if (F16) {
                    split_f16(v.x, v.y, &term[g][0][0], 2);
                    split_f16(v.z, v.w, &term[g][0][1], 2);
                } else {
                    split_bf16<3>(v.x, v.y, &term[g][0][0], 2);
                    split_bf16<3>(v.z, v.w, &term[g][0][1], 2);
                }
            }
            if (GROUPS == 1) {
                u32 both[4] = {term[0][0][0], term[0][1][0], term[0][0][1], term[0][1][1]};
                u32 third[4] = {0, term[0][2][0], 0, term[0][2][1]};
#pragma unroll
                for (u32 n = 0; n < EIGHTS; n++) mma(sums.value[0][n], both, stage.w[n][p], i);
#pragma unroll
                for (u32 n = 0; n < EIGHTS; n++)
                    if (TERMS == 3) mma(sums.value[0][n], third, stage.w[n][p], i);
            } else {
#pragma unroll
                for (u32 t = 0; t < TERMS; t++) {
                    u32 a[4] = {term[0][t][0], term[GROUPS - 1][t][0], term[0][t][1], term[GROUPS - 1][t][1]};
#pragma unroll
                    for (u32 n = 0; n < EIGHTS; n++) mma(sums.value[t == 0 ? 0 : GROUPS - 1][n], a, stage.w[n][p], i);
                }
            }
        }
    }

    __device__ __forceinline__ static float whole(float first, float second) {
        return F16 ? fmaf(second, 1.0f / F16_LOW, first) * (1.0f / F16_SCALE) : first + second;
    }

    template <u32 GROUPS> __device__ __forceinline__ static void put(const Sums<GROUPS>& sums, Partial<TILES, GROUPS>& to) {
#pragma unroll
        for (u32 n = 0; n < EIGHTS; n++) {
#pragma unroll
            for (u32 i = 0; i < 2 * GROUPS; i++) {
                float second = GROUPS == 1 ? sums.value[0][n][2 + i % 2] : sums.value[GROUPS - 1][n][i];
                to.value[8 * (i / 2) + ROW][8 * n + 2 * QUAD + i % 2] = whole(sums.value[0][n][i], second);
            }
        }
    }
};

// Sums where weights are the operand with 16 rows: [g or g + 8][2 q..].
template <u32 TILES, u32 GROUPS> struct TileSums {
    float value[TILES][GROUPS][4];

    __device__ __forceinline__ void put(Partial<TILES, GROUPS>& to) const {
#pragma unroll
        for (u32 i = 0; i < TILES * GROUPS * 4; i++) {
            u32 t = i / 4 / GROUPS, g = i / 4 % GROUPS, at = i % 4;
            to.value[8 * g + 2 * QUAD + at % 2][TILE_ROWS * t + 8 * (at / 2) + ROW] = value[t][g][at];
        }
    }
};

// f32: lane q takes columns 4 q.. of each 16. Of the products of terms, those that count in f32.
template <u32 TILES> struct Floats {
    static constexpr u32 PARTS = 2, COLS = 16 * PARTS;
    static constexpr bool ALIGNED = false;
    struct Stage {
        float4 w[TILES][2][PARTS];
    };
    template <u32 GROUPS> using Sums = TileSums<TILES, GROUPS>;
    const float4* from[TILES][2];
    u32 pitch;

    __device__ __forceinline__ Floats(const Matrix& matrix, u32 tile) : pitch((matrix.cols + 3) / 4 * 4) {
#pragma unroll
        for (u32 i = 0; i < 2 * TILES; i++) {
            u32 row = min(TILE_ROWS * tile + 8 * i + ROW, matrix.rows - 1);
            from[i / 2][i % 2] = static_cast<const float4*>(matrix.codes) + static_cast<u64>(row) * (pitch / 4);
        }
    }

    // Beyond the last column x is 0, and other weights stand in.
    __device__ __forceinline__ void load(Stage& stage, u32 col) const {
#pragma unroll
        for (u32 p = 0; p < PARTS; p++) {
            u32 at = min(col / 4 + 4 * p + QUAD, pitch / 4 - 1);
#pragma unroll
            for (u32 i = 0; i < 2 * TILES; i++) stage.w[i / 2][i % 2][p] = __ldg(from[i / 2][i % 2] + at);
        }
    }

    template <u32 GROUPS, bool ALIGNED>
    __device__ __forceinline__ void multiply(const Stage& stage, const Input<GROUPS, ALIGNED>& x, u32 col,
                                             Sums<GROUPS>& sums) const {
#pragma unroll
        for (u32 p = 0; p < PARTS; p++) {
            u32 b[GROUPS][3][2];
#pragma unroll
            for (u32 g = 0; g < GROUPS; g++) {
                float4 v = x.fetch_inside(g, col + 16 * p + 4 * QUAD);
                split_bf16<3>(v.x, v.y, &b[g][0][0], 2);
                split_bf16<3>(v.z, v.w, &b[g][0][1], 2);
            }
#pragma unroll
            for (u32 t = 0; t < TILES; t++) {
                float4 upper = stage.w[t][0][p], lower = stage.w[t][1][p];
                u32 a[3][4];
                split_bf16<3>(upper.x, upper.y, &a[0][0], 4);
                split_bf16<3>(lower.x, lower.y, &a[0][1], 4);
                split_bf16<3>(upper.z, upper.w, &a[0][2], 4);
                split_bf16<3>(lower.z, lower.w, &a[0][3], 4);
#pragma unroll
                for (u32 g = 0; g < GROUPS; g++) {
#pragma unroll
                    for (u32 i = 0; i < 9; i++)
                        if (i / 3 + i % 3 <= 2) mma_bf16(sums.value[t][g], a[i / 3], b[g][i % 3]);
                }
            }
        }
    }

    template <u32 GROUPS> __device__ __forceinline__ static void put(const Sums<GROUPS>& sums, Partial<TILES, GROUPS>& to) {
        sums.put(to);
    }
};

__device__ __forceinline__ u32 word_of(const uint4& v, u32 i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// A pair of 4-bit codes of a word, as 16 + code in bf16: the codes become the upper bits of the fraction.
__device__ __forceinline__ u32 pair_of_q4(u32 word, u32 pair) {
    return ((pair == 0 ? word << 3 : word >> (4 * pair - 3)) & 0x00780078u) | 0x41804180u;
}

// q8 and q4: lane q takes columns 4 q.. of each unit of 16. Sums over the columns of a scale are multiplied with it.
template <u32 TILES, u32 BITS, u32 KIND> struct Codes {
    static constexpr u32 COLS = GROUP_COLS, WORDS = BITS / 4;
    static constexpr bool ALIGNED = true;
    // Signed codes take two products; others get by with one and the sums of x, with which minima are multiplied.
    static constexpr bool SIGNED = BITS == 8 && KIND == HALVES;
    // Scales of a group, and the units that each is for.
    static constexpr u32 BLOCKS = KIND >= FACTORS_16 ? 4 : 2, UNITS = 4 / BLOCKS, STRIDE = KIND == HALVES ? 1 : 2;
    struct Stage {
        uint4 w[TILES][WORDS];
        uint2 record[TILES][2];
    };
    template <u32 GROUPS> using Sums = TileSums<TILES, GROUPS>;
    const uint4* from[TILES];
    const u32* records[TILES];
    u32 last;      // group
    float offset;  // that codes have in products

    __device__ __forceinline__ Codes(const Matrix& matrix, u32 tile) {
        u32 groups = divide_up(matrix.cols, GROUP_COLS);
        last = groups - 1;
        offset = (BITS == 4 ? 16.0f : 128.0f) + static_cast<float>(matrix.zero);
#pragma unroll
        for (u32 t = 0; t < TILES; t++) {
            u64 group = static_cast<u64>(min(tile + t, (matrix.rows - 1) / TILE_ROWS)) * groups;
            from[t] = static_cast<const uint4*>(matrix.codes) + group * (WARP * WORDS) + threadIdx.x % WARP;
            records[t] = matrix.scales + (group * TILE_ROWS + ROW) * STRIDE;
        }
    }

    // A stage is a group; beyond the last one nobody multiplies it.
    __device__ __forceinline__ void load(Stage& stage, u32 col) const {
        u32 group = min(col / GROUP_COLS, last);
#pragma unroll
        for (u32 t = 0; t < TILES; t++) {
#pragma unroll
            for (u32 i = 0; i < WORDS; i++) stage.w[t][i] = load_once(from[t] + (group * WORDS + i) * WARP);
#pragma unroll
            for (u32 i = 0; i < 2; i++)
                stage.record[t][i] = load_record(records[t] + (group * TILE_ROWS + 8 * i) * STRIDE, KIND);
        }
    }

    // The products of unit j with both terms of x.
    __device__ __forceinline__ void unit(const uint4 (&w)[WORDS], u32 j, const u32 (&b)[2][2], float (&sums)[4]) const {
        u32 a[4];
        if (BITS == 4) {
            u32 upper = word_of(w[0], j / 2), lower = word_of(w[0], 2 + j / 2), pair = j % 2 * 2;
#pragma unroll
            for (u32 i = 0; i < 4; i++) a[i] = pair_of_q4(i % 2 == 0 ? upper : lower, pair + i / 2);
        } else {
            // The lower 7 bits of a code c as 128 + (c & 127) in bf16.
            u32 upper = word_of(w[0], j), lower = word_of(w[WORDS - 1], j), word[4] = {upper, lower, upper >> 8, lower >> 8};
#pragma unroll
            for (u32 i = 0; i < 4; i++) a[i] = (word[i] & 0x007f007fu) | 0x43004300u;
            if (SIGNED) {
                // The sign bit as -128 or -256: the sum of both is c.
                u32 sign[4];
#pragma unroll
                for (u32 i = 0; i < 4; i++) sign[i] = (word[i] & 0x00800080u) | 0xc300c300u;
                mma_bf16(sums, sign, b[1]);
                mma_bf16(sums, sign, b[0]);
            }
        }
        mma_bf16(sums, a, b[1]);
        mma_bf16(sums, a, b[0]);
    }

    template <u32 GROUPS, bool ALIGNED>
    __device__ __forceinline__ void multiply(const Stage& stage, const Input<GROUPS, ALIGNED>& x, u32 col,
                                             Sums<GROUPS>& sums) const {
        const u32 ones[4] = {0x3f803f80u, 0x3f803f80u, 0x3f803f80u, 0x3f803f80u};
        u32 b[GROUPS][4][2][2];
        float totals[GROUPS][BLOCKS][4];  // sums of x, the same in all rows
#pragma unroll
        for (u32 i = 0; i < 4 * GROUPS; i++) {
            u32 g = i / 4, j = i % 4, block = j / UNITS;
            float4 v = x.fetch(g, col + 16 * j + 4 * QUAD);
            split_bf16<2>(v.x, v.y, &b[g][j][0][0], 2);
            split_bf16<2>(v.z, v.w, &b[g][j][0][1], 2);
            if (SIGNED) continue;
            if (j % UNITS == 0) totals[g][block][0] = totals[g][block][1] = totals[g][block][2] = totals[g][block][3] = 0.0f;
            mma_bf16(totals[g][block], ones, b[g][j][1]);
            mma_bf16(totals[g][block], ones, b[g][j][0]);
        }
#pragma unroll
        for (u32 t = 0; t < TILES; t++) {
            Scales scales[2] = {decode<KIND>(stage.record[t][0]), decode<KIND>(stage.record[t][1])};
#pragma unroll
            for (u32 i = 0; i < BLOCKS * GROUPS; i++) {
                u32 block = i / GROUPS, g = i % GROUPS, first = block * UNITS;
                float part[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
                for (u32 j = first; j < first + UNITS; j++) unit(stage.w[t], j, b[g][j], part);
#pragma unroll
                for (u32 k = 0; k < 4; k++) {
                    float scale = scales[k / 2].scale[first], minimum = fmaf(scale, offset, scales[k / 2].minimum[first]);
                    float scaled = fmaf(scale, part[k], sums.value[t][g][k]);
                    sums.value[t][g][k] = SIGNED ? scaled : fmaf(-minimum, totals[g][block][k % 2], scaled);
                }
            }
        }
    }

    template <u32 GROUPS> __device__ __forceinline__ static void put(const Sums<GROUPS>& sums, Partial<TILES, GROUPS>& to) {
        sums.put(to);
    }
};
