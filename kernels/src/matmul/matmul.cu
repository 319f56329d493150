// Products of up to a few rows of activations with a matrix: y[m][n] = sum over k of w[n][k] x[m][k] (+ bias[n]).
// Owner: cuda.rs. Weights are read once, straight from memory into the registers that tensor cores multiply; f32 x is
// taken apart into 16-bit terms, so that it counts in full: 24 bits with f32 and bf16 weights, 22 with f16 weights (for
// |x| < 1.6e7), 15 to 17 with q8 and q4. f32 weights are taken apart as well. Codes are exact in bf16.
// Invariant: a block makes 16 or 32 outputs for 8 or 16 rows of x. Its 8 warps take the stages of columns in turn, and
// their sums are added in the order of the warps. So y[m][n] depends on w[n] and x[m] alone: not on the other rows of x,
// how many there are, the sizes of blocks, or the run.
//
// Which columns meet in a product of the tensor core does not matter as long as w and x agree: lane q of a quad takes a
// run of columns next to each other, in 16-byte loads, and hands them to whatever slots it has.

#include "weights.cuh"

#define WARPS 8u
#define QUAD (threadIdx.x % 4)
#define ROW (threadIdx.x % WARP / 4)

// Rows of x, 8 in a group: the lane reads row ROW of each.
template <u32 GROUPS> struct Input {
    const float* row[GROUPS];  // null where there is none
    u32 cols;
    bool aligned;

    __device__ __forceinline__ Input(const float* x, u32 first, u32 rows, u32 cols) : cols(cols), aligned(cols % 4 == 0) {
#pragma unroll
        for (u32 g = 0; g < GROUPS; g++) {
            u32 at = first + 8 * g + ROW;
            row[g] = at < rows ? x + static_cast<u64>(at) * cols : nullptr;
        }
    }

    // Four columns from `col`, a multiple of 4; zeros where there are none.
    __device__ __forceinline__ float4 fetch(u32 group, u32 col) const {
        float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (row[group] == nullptr || col >= cols) return v;
        const float* at = row[group] + col;
        if (aligned) return *reinterpret_cast<const float4*>(at);
        v.x = at[0];
        if (col + 1 < cols) v.y = at[1];
        if (col + 2 < cols) v.z = at[2];
        if (col + 3 < cols) v.w = at[3];
        return v;
    }
};

// a and b as sums of TERMS bf16 values, the largest first; each pair in one register. All but the last are cut off, so
// that what is left is exact and infinities and NaN stay what they are.
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

// The layouts. Each knows the columns of a stage, loads the weights of a stage into registers and multiplies them.

// f16 and bf16: lane q takes columns 8 q.. of each 32, two products for them.
template <u32 TILES, bool F16> struct Halves {
    static constexpr u32 PARTS = 2, COLS = 32 * PARTS, TERMS = F16 ? 2 : 3, SUMS = F16 ? 2 : 1;
    struct Stage {
        uint4 w[TILES][2][PARTS];
    };
    const uint4* from[TILES][2];
    u32 pitch;

    __device__ __forceinline__ Halves(const Matrix& matrix, u32 tile) : pitch((matrix.cols + 7) / 8 * 8) {
#pragma unroll
        for (u32 i = 0; i < 2 * TILES; i++) {
            u32 row = min(TILE_ROWS * tile + 8 * i + ROW, matrix.rows - 1);
            from[i / 2][i % 2] = static_cast<const uint4*>(matrix.codes) + static_cast<u64>(row) * (pitch / 8) + QUAD;
        }
    }

    __device__ __forceinline__ void load(Stage& stage, u32 col) const {
#pragma unroll
        for (u32 p = 0; p < PARTS; p++) {
            bool inside = col + 32 * p + 8 * QUAD < pitch;
#pragma unroll
            for (u32 i = 0; i < 2 * TILES; i++)
                stage.w[i / 2][i % 2][p] = inside ? __ldg(from[i / 2][i % 2] + col / 8 + 4 * p) : make_uint4(0, 0, 0, 0);
        }
    }

    template <u32 GROUPS>
    __device__ __forceinline__ void multiply(const Stage& stage, const Input<GROUPS>& x, u32 col,
                                             float (&sums)[SUMS][TILES][GROUPS][4]) const {
#pragma unroll
        for (u32 p = 0; p < PARTS; p++) {
#pragma unroll
            for (u32 g = 0; g < GROUPS; g++) {
                u32 at = col + 32 * p + 8 * QUAD, b[TERMS][4];
                float4 first = x.fetch(g, at), second = x.fetch(g, at + 4);
                float v[8] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
#pragma unroll
                for (u32 i = 0; i < 4; i++) {
                    if (F16)
                        split_f16(v[2 * i], v[2 * i + 1], &b[0][i], 4);
                    else
                        split_bf16<TERMS>(v[2 * i], v[2 * i + 1], &b[0][i], 4);
                }
#pragma unroll
                for (u32 t = 0; t < TILES; t++) {
                    uint4 upper = stage.w[t][0][p], lower = stage.w[t][1][p];
                    u32 a[2][4] = {{upper.x, lower.x, upper.y, lower.y}, {upper.z, lower.z, upper.w, lower.w}};
#pragma unroll
                    for (u32 i = 0; i < 2 * TERMS; i++) {
                        if (F16)
                            mma_f16(sums[i / 2 % SUMS][t][g], a[i % 2], &b[i / 2][i % 2 * 2]);
                        else
                            mma_bf16(sums[0][t][g], a[i % 2], &b[i / 2][i % 2 * 2]);
                    }
                }
            }
        }
    }
};

// f32: lane q takes columns 4 q.. of each 16. Of the products of terms, those that count in f32.
template <u32 TILES> struct Floats {
    static constexpr u32 PARTS = 2, COLS = 16 * PARTS, SUMS = 1;
    struct Stage {
        float4 w[TILES][2][PARTS];
    };
    const float4* from[TILES][2];
    u32 pitch;

    __device__ __forceinline__ Floats(const Matrix& matrix, u32 tile) : pitch((matrix.cols + 3) / 4 * 4) {
#pragma unroll
        for (u32 i = 0; i < 2 * TILES; i++) {
            u32 row = min(TILE_ROWS * tile + 8 * i + ROW, matrix.rows - 1);
            from[i / 2][i % 2] = static_cast<const float4*>(matrix.codes) + static_cast<u64>(row) * (pitch / 4) + QUAD;
        }
    }

    __device__ __forceinline__ void load(Stage& stage, u32 col) const {
#pragma unroll
        for (u32 p = 0; p < PARTS; p++) {
            bool inside = col + 16 * p + 4 * QUAD < pitch;
#pragma unroll
            for (u32 i = 0; i < 2 * TILES; i++) {
                float4 none = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                stage.w[i / 2][i % 2][p] = inside ? __ldg(from[i / 2][i % 2] + col / 4 + 4 * p) : none;
            }
        }
    }

    template <u32 GROUPS>
    __device__ __forceinline__ void multiply(const Stage& stage, const Input<GROUPS>& x, u32 col,
                                             float (&sums)[SUMS][TILES][GROUPS][4]) const {
#pragma unroll
        for (u32 p = 0; p < PARTS; p++) {
            u32 b[GROUPS][3][2];
#pragma unroll
            for (u32 g = 0; g < GROUPS; g++) {
                float4 v = x.fetch(g, col + 16 * p + 4 * QUAD);
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
                        if (i / 3 + i % 3 <= 2) mma_bf16(sums[0][t][g], a[i / 3], b[g][i % 3]);
                }
            }
        }
    }
};

__device__ __forceinline__ u32 word_of(const uint4& v, u32 i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// A pair of 4-bit codes of a word, as 16 + code in bf16: the codes become the upper bits of the fraction.
__device__ __forceinline__ u32 pair_of_q4(u32 word, u32 pair) {
    return ((pair == 0 ? word << 3 : word >> (4 * pair - 3)) & 0x00780078u) | 0x41804180u;
}

// q8 and q4: lane q takes columns 4 q.. of each unit of 16. The sums of a unit get its scale.
template <u32 TILES, u32 BITS> struct Codes {
    static constexpr u32 COLS = GROUP_COLS, SUMS = 1, WORDS = BITS / 4;
    struct Stage {
        uint4 w[TILES][WORDS];
        uint2 record[TILES][2];
    };
    const uint4* from[TILES];
    const u32* records[TILES];
    u32 groups, kind, stride;
    float offset;  // that codes carry in products
    bool minima;   // whether the sums of x are needed

    __device__ __forceinline__ Codes(const Matrix& matrix, u32 tile) {
        groups = divide_up(matrix.cols, GROUP_COLS);
        kind = matrix.kind;
        stride = record_words(kind);
        offset = BITS == 4 ? 16.0f + static_cast<float>(matrix.zero) : 0.0f;
        minima = BITS == 4 || kind == HALVES_MIN || kind == FACTORS_32 || kind == FACTORS_16_MIN;
#pragma unroll
        for (u32 t = 0; t < TILES; t++) {
            u64 group = static_cast<u64>(min(tile + t, (matrix.rows - 1) / TILE_ROWS)) * groups;
            from[t] = static_cast<const uint4*>(matrix.codes) + group * (WARP * WORDS) + threadIdx.x % WARP;
            records[t] = matrix.scales + (group * TILE_ROWS + ROW) * stride;
        }
    }

    __device__ __forceinline__ void load(Stage& stage, u32 col) const {
        u32 group = col / GROUP_COLS;
        bool inside = group < groups;
#pragma unroll
        for (u32 t = 0; t < TILES; t++) {
#pragma unroll
            for (u32 i = 0; i < WORDS; i++)
                stage.w[t][i] = inside ? __ldg(from[t] + (group * WORDS + i) * WARP) : make_uint4(0, 0, 0, 0);
#pragma unroll
            for (u32 i = 0; i < 2; i++) {
                const u32* at = records[t] + (group * TILE_ROWS + 8 * i) * stride;
                stage.record[t][i] = inside ? load_record(at, kind) : make_uint2(0, 0);
            }
        }
    }

    // The products of unit j with one pair of terms of x.
    __device__ __forceinline__ void unit(const uint4 (&w)[WORDS], u32 j, const u32 (&b)[2][2], float (&sums)[4]) const {
        if (BITS == 4) {
            u32 upper = word_of(w[0], j / 2), lower = word_of(w[0], 2 + j / 2), pair = j % 2 * 2;
            u32 a[4] = {pair_of_q4(upper, pair), pair_of_q4(lower, pair), pair_of_q4(upper, pair + 1),
                        pair_of_q4(lower, pair + 1)};
            mma_bf16(sums, a, b[1]);
            mma_bf16(sums, a, b[0]);
            return;
        }
        // The lower 7 bits of a code c as 128 + (c & 127) in bf16; its sign bit as -128 or -256: their sum is c.
        u32 upper = word_of(w[0], j), lower = word_of(w[WORDS - 1], j);
        u32 word[4] = {upper, lower, upper >> 8, lower >> 8}, a[4], sign[4];
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            a[i] = (word[i] & 0x007f007fu) | 0x43004300u;
            sign[i] = (word[i] & 0x00800080u) | 0xc300c300u;
        }
        mma_bf16(sums, a, b[1]);
        mma_bf16(sums, sign, b[1]);
        mma_bf16(sums, a, b[0]);
        mma_bf16(sums, sign, b[0]);
    }

    // Scales of a record; the minimum with what the offset of the codes comes to.
    __device__ __forceinline__ Scales scales_of(uint2 record) const {
        Scales scales = decode(record, kind);
#pragma unroll
        for (u32 j = 0; j < 4; j++) scales.minimum[j] = fmaf(scales.scale[j], offset, scales.minimum[j]);
        return scales;
    }

    template <u32 GROUPS>
    __device__ __forceinline__ void multiply(const Stage& stage, const Input<GROUPS>& x, u32 col,
                                             float (&sums)[SUMS][TILES][GROUPS][4]) const {
        const u32 ones[4] = {0x3f803f80u, 0x3f803f80u, 0x3f803f80u, 0x3f803f80u};
        Scales scales[TILES][2];
#pragma unroll
        for (u32 i = 0; i < 2 * TILES; i++) scales[i / 2][i % 2] = scales_of(stage.record[i / 2][i % 2]);
#pragma unroll
        for (u32 i = 0; i < 4 * GROUPS; i++) {
            u32 j = i / GROUPS, g = i % GROUPS, b[2][2];
            float4 v = x.fetch(g, col + 16 * j + 4 * QUAD);
            split_bf16<2>(v.x, v.y, &b[0][0], 2);
            split_bf16<2>(v.z, v.w, &b[0][1], 2);
            float total[4] = {0.0f, 0.0f, 0.0f, 0.0f};  // sums of x, the same in all rows
            if (minima) {
                mma_bf16(total, ones, b[1]);
                mma_bf16(total, ones, b[0]);
            }
#pragma unroll
            for (u32 t = 0; t < TILES; t++) {
                float part[4] = {0.0f, 0.0f, 0.0f, 0.0f};
                unit(stage.w[t], j, b, part);
#pragma unroll
                for (u32 k = 0; k < 4; k++) {
                    const Scales& of = scales[t][k / 2];
                    float scaled = fmaf(of.scale[j], part[k], sums[0][t][g][k]);
                    sums[0][t][g][k] = fmaf(-of.minimum[j], total[k], scaled);
                }
            }
        }
    }
};

__device__ __forceinline__ float whole(const float (&sums)[1]) { return sums[0]; }
__device__ __forceinline__ float whole(const float (&sums)[2]) {
    return fmaf(sums[1], 1.0f / F16_LOW, sums[0]) * (1.0f / F16_SCALE);
}

// Block (i, j) makes the rows 8 GROUPS i.. and the outputs 16 TILES j.. of y.
template <class Layout, u32 TILES, u32 GROUPS>
__device__ __forceinline__ void product(const Matrix& matrix, const float* bias, const float* x, u32 rows, float* y) {
    constexpr u32 OUTPUTS = TILE_ROWS * TILES, STRIDE = OUTPUTS + 4;
    __shared__ float partial[WARPS][8 * GROUPS][STRIDE];
    const u32 warp = threadIdx.x / WARP, first = blockIdx.x * 8 * GROUPS, tile = blockIdx.y * TILES;
    Layout layout(matrix, tile);
    Input<GROUPS> input(x, first, rows, matrix.cols);
    float sums[Layout::SUMS][TILES][GROUPS][4];
#pragma unroll
    for (u32 i = 0; i < Layout::SUMS * TILES * GROUPS * 4; i++) (&sums[0][0][0][0])[i] = 0.0f;
    typename Layout::Stage now, next;
    layout.load(now, warp * Layout::COLS);
    for (u32 col = warp * Layout::COLS; col < matrix.cols; col += WARPS * Layout::COLS) {
        layout.load(next, col + WARPS * Layout::COLS);
        layout.multiply(now, input, col, sums);
        now = next;
    }
#pragma unroll
    for (u32 i = 0; i < TILES * GROUPS * 4; i++) {
        u32 t = i / 4 / GROUPS, g = i / 4 % GROUPS, at = i % 4;
        float terms[Layout::SUMS];
#pragma unroll
        for (u32 s = 0; s < Layout::SUMS; s++) terms[s] = sums[s][t][g][at];
        partial[warp][8 * g + 2 * QUAD + at % 2][TILE_ROWS * t + 8 * (at / 2) + ROW] = whole(terms);
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < 8 * GROUPS * OUTPUTS; i += WARPS * WARP) {
        u32 row = i / OUTPUTS, output = i % OUTPUTS, n = TILE_ROWS * tile + output;
        if (first + row >= rows || n >= matrix.rows) continue;
        float sum = partial[0][row][output];
#pragma unroll
        for (u32 w = 1; w < WARPS; w++) sum += partial[w][row][output];
        if (bias != nullptr) sum += bias[n];
        y[static_cast<u64>(first + row) * matrix.rows + n] = sum;
    }
}

#define LINEAR(NAME, LAYOUT, TILES, GROUPS)                                                                            \
    extern "C" __global__ void __launch_bounds__(256, 2)                                                                \
    NAME(const void* codes, const u32* scales, u32 outputs, u32 cols, u32 kind, u32 zero, const float* bias,           \
         const float* x, u32 rows, float* y) {                                                                         \
        Matrix matrix = {codes, scales, outputs, cols, kind, zero};                                                    \
        product<LAYOUT, TILES, GROUPS>(matrix, bias, x, rows, y);                                                      \
    }

template <u32 TILES> using F16s = Halves<TILES, true>;
template <u32 TILES> using Bf16s = Halves<TILES, false>;
template <u32 TILES> using Q8s = Codes<TILES, 8>;
template <u32 TILES> using Q4s = Codes<TILES, 4>;

// linear_LAYOUT_OUTPUTS_ROWS: outputs and rows per block.
#define LINEARS(NAME, LAYOUT)                                                                                          \
    LINEAR(NAME##_16_8, LAYOUT<1>, 1, 1)                                                                               \
    LINEAR(NAME##_16_16, LAYOUT<1>, 1, 2)                                                                              \
    LINEAR(NAME##_32_8, LAYOUT<2>, 2, 1)

LINEARS(linear_f32, Floats)
LINEARS(linear_f16, F16s)
LINEARS(linear_bf16, Bf16s)
LINEARS(linear_q8, Q8s)
LINEARS(linear_q4, Q4s)
// With scales as well, 32 outputs for 16 rows are more than registers hold.
LINEAR(linear_f32_32_16, Floats<2>, 2, 2)
LINEAR(linear_f16_32_16, F16s<2>, 2, 2)
LINEAR(linear_bf16_32_16, Bf16s<2>, 2, 2)
