// Products of up to a few rows of activations with a matrix: y[m][n] = sum over k of w[n][k] x[m][k] (+ bias[n]).
// Owner: cuda.rs. Weights are read once, straight from memory into the registers that tensor cores multiply; f32 x is
// taken apart into 16-bit terms, so that it counts in full: 24 bits with f32 and bf16 weights, 22 with f16 weights (for
// |x| < 1.6e7), 15 to 17 with q8 and q4. f32 weights are taken apart as well. Codes are exact in bf16.
// Invariant: a block makes 16 or 32 outputs for 8 or 16 rows of x. Its 8 warps take the stages of columns in turn, and
// their sums are added in the order of the warps. So y[m][n] depends on w[n] and x[m] alone: not on the other rows of x,
// how many there are, the sizes of blocks, or the run.

#include "layouts.cuh"

#define WARPS 8u

// The sums of a warp: the stages of columns that are its.
template <class Layout, u32 GROUPS, bool ALIGNED>
__device__ __forceinline__ void sum_stages(const Layout& layout, const Input<GROUPS, ALIGNED>& input, u32 col, u32 cols,
                                           typename Layout::template Sums<GROUPS>& sums) {
    // The weights of a stage are on their way while those of the one before are multiplied.
    constexpr u32 STEP = WARPS * Layout::COLS;
    typename Layout::Stage even, odd;
    layout.load(even, col);
    while (col < cols) {
        layout.load(odd, col + STEP);
        layout.multiply(even, input, col, sums);
        col += STEP;
        if (col >= cols) break;
        layout.load(even, col + STEP);
        layout.multiply(odd, input, col, sums);
        col += STEP;
    }
}

// One of the products of a launch: all read the same x, and their matrices have the same columns and kind of scales.
struct Product {
    const void* codes;
    const u32* scales;
    u32 outputs;
    const float* bias;
    float* y;
};

// A block makes the outputs 16 TILES j.. of 8 GROUPS rows of y.
template <class Layout, u32 TILES, u32 GROUPS>
__device__ __forceinline__ void multiply(const Product& product, u32 cols, u32 zero, const float* x, u32 rows, u32 j) {
    constexpr u32 OUTPUTS = TILE_ROWS * TILES;
    __shared__ Partial<TILES, GROUPS> partial[WARPS];
    const u32 warp = threadIdx.x / WARP, first = blockIdx.x * 8 * GROUPS, tile = j * TILES, col = warp * Layout::COLS;
    Layout layout(Matrix{product.codes, product.scales, product.outputs, cols, 0, zero}, tile);
    typename Layout::template Sums<GROUPS> sums = {};
    if (Layout::ALIGNED || cols % 4 == 0) {
        Input<GROUPS, true> input(x, first, rows, cols);
        sum_stages<Layout, GROUPS>(layout, input, col, cols, sums);
    } else {
        Input<GROUPS, false> input(x, first, rows, cols);
        sum_stages<Layout, GROUPS>(layout, input, col, cols, sums);
    }
    Layout::put(sums, partial[warp]);
    __syncthreads();
    for (u32 i = threadIdx.x; i < 8 * GROUPS * OUTPUTS; i += WARPS * WARP) {
        u32 row = i / OUTPUTS, output = i % OUTPUTS, n = TILE_ROWS * tile + output;
        if (first + row >= rows || n >= product.outputs) continue;
        float sum = partial[0].value[row][output];
#pragma unroll
        for (u32 w = 1; w < WARPS; w++) sum += partial[w].value[row][output];
        if (product.bias != nullptr) sum += product.bias[n];
        product.y[static_cast<u64>(first + row) * product.outputs + n] = sum;
    }
}

// Up to three products; those that there are not have no outputs. Blocks (i, 0..) are for rows 8 GROUPS i.. of the first,
// then of the second, then of the third. BLOCKS at once on a multiprocessor, so that enough loads are on their way.
#define LINEAR(NAME, LAYOUT, TILES, GROUPS, BLOCKS)                                                                    \
    extern "C" __global__ void __launch_bounds__(256, BLOCKS)                                                          \
    NAME(const float* x, u32 rows, u32 cols, u32 zero, const void* codes_a, const u32* scales_a, u32 outputs_a,        \
         const float* bias_a, float* y_a, const void* codes_b, const u32* scales_b, u32 outputs_b, const float* bias_b, \
         float* y_b, const void* codes_c, const u32* scales_c, u32 outputs_c, const float* bias_c, float* y_c) {       \
        u32 j = blockIdx.y, blocks_a = divide_up(outputs_a, TILE_ROWS * TILES);                                        \
        u32 blocks_b = divide_up(outputs_b, TILE_ROWS * TILES);                                                        \
        Product product = {codes_a, scales_a, outputs_a, bias_a, y_a};                                                 \
        if (j >= blocks_a + blocks_b) {                                                                                \
            product = {codes_c, scales_c, outputs_c, bias_c, y_c};                                                     \
            j -= blocks_a + blocks_b;                                                                                  \
        } else if (j >= blocks_a) {                                                                                    \
            product = {codes_b, scales_b, outputs_b, bias_b, y_b};                                                     \
            j -= blocks_a;                                                                                             \
        }                                                                                                              \
        multiply<LAYOUT, TILES, GROUPS>(product, cols, zero, x, rows, j);                                              \
    }

template <u32 TILES> using F16s = Halves<TILES, true>;
template <u32 TILES> using Bf16s = Halves<TILES, false>;
template <u32 TILES> using Q8Halves = Codes<TILES, 8, HALVES>;
template <u32 TILES> using Q8HalvesMin = Codes<TILES, 8, HALVES_MIN>;
template <u32 TILES> using Q8Factors32 = Codes<TILES, 8, FACTORS_32>;
template <u32 TILES> using Q8Factors16 = Codes<TILES, 8, FACTORS_16>;
template <u32 TILES> using Q4Halves = Codes<TILES, 4, HALVES>;
template <u32 TILES> using Q4HalvesMin = Codes<TILES, 4, HALVES_MIN>;
template <u32 TILES> using Q4Factors32 = Codes<TILES, 4, FACTORS_32>;
template <u32 TILES> using Q4Factors16 = Codes<TILES, 4, FACTORS_16>;
template <u32 TILES> using Q4Factors16Min = Codes<TILES, 4, FACTORS_16_MIN>;

// linear_LAYOUT_OUTPUTS_ROWS: outputs and rows per block. For 32 outputs and 16 rows there are too few registers.
#define LINEARS(NAME, LAYOUT, BLOCKS)                                                                                  \
    LINEAR(NAME##_16_8, LAYOUT<1>, 1, 1, BLOCKS)                                                                       \
    LINEAR(NAME##_16_16, LAYOUT<1>, 1, 2, 2)                                                                           \
    LINEAR(NAME##_32_8, LAYOUT<2>, 2, 1, 2)

LINEARS(linear_f32, Floats, 3)
LINEARS(linear_f16, F16s, 3)
LINEARS(linear_bf16, Bf16s, 3)
LINEARS(linear_q8_halves, Q8Halves, 3)
LINEARS(linear_q8_halves_min, Q8HalvesMin, 3)
LINEARS(linear_q8_factors_32, Q8Factors32, 2)
LINEARS(linear_q8_factors_16, Q8Factors16, 2)
LINEARS(linear_q4_halves, Q4Halves, 3)
LINEARS(linear_q4_halves_min, Q4HalvesMin, 3)
LINEARS(linear_q4_factors_32, Q4Factors32, 3)
LINEARS(linear_q4_factors_16, Q4Factors16, 3)
LINEARS(linear_q4_factors_16_min, Q4Factors16Min, 3)
