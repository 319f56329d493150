// Norms of rows: root mean square (with and without the sum of a residual), and layer norm.
// Owner: NormKernels. Invariant: one block per row, which it sums in one fixed order that depends on the width alone, so
// a row's result depends on that row alone. Rows are aligned to 16 bytes where their width is a multiple of 4.

#include "common.cuh"

#define THREADS 256u
// Pieces of a row that a thread keeps between its two passes; what is beyond is read again.
#define KEEP 8u

// Sum over the block, the same in all threads.
template <typename T>
__device__ __forceinline__ T block_sum(T x, T* sums) {
#pragma unroll
    for (u32 distance = WARP / 2; distance > 0; distance /= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
    if (threadIdx.x % WARP == 0) sums[threadIdx.x / WARP] = x;
    __syncthreads();
    T total = 0;
#pragma unroll
    for (u32 warp = 0; warp < THREADS / WARP; warp++) total += sums[warp];
    return total;
}

// W consecutive values.
template <u32 W>
struct Piece {
    float v[W];
};

template <u32 W>
__device__ __forceinline__ Piece<W> load(const float* row, u32 index) {
    Piece<W> piece;
    if (W == 4) {
        const float4 four = reinterpret_cast<const float4*>(row)[index];
        piece.v[0] = four.x, piece.v[1 % W] = four.y, piece.v[2 % W] = four.z, piece.v[3 % W] = four.w;
    } else {
        piece.v[0] = row[index];
    }
    return piece;
}

template <u32 W>
__device__ __forceinline__ void store(float* row, u32 index, const Piece<W>& piece) {
    if (W == 4) {
        reinterpret_cast<float4*>(row)[index] =
            make_float4(piece.v[0], piece.v[1 % W], piece.v[2 % W], piece.v[3 % W]);
    } else {
        row[index] = piece.v[0];
    }
}

// A piece of the row, to which delta is added first where there is one.
template <bool ADD, u32 W>
__device__ __forceinline__ Piece<W> take(float* x, const float* delta, u32 index, float& sum) {
    Piece<W> piece = load<W>(x, index);
    if (ADD) {
        const Piece<W> more = load<W>(delta, index);
#pragma unroll
        for (u32 i = 0; i < W; i++) piece.v[i] = __fadd_rn(piece.v[i], more.v[i]);
        store<W>(x, index, piece);
    }
#pragma unroll
    for (u32 i = 0; i < W; i++) sum = __fmaf_rn(piece.v[i], piece.v[i], sum);
    return piece;
}

template <u32 W>
__device__ __forceinline__ void put(float* out, const float* weight, u32 index, Piece<W> piece, float scale) {
    const Piece<W> factor = load<W>(weight, index);
#pragma unroll
    for (u32 i = 0; i < W; i++) piece.v[i] = __fmul_rn(__fmul_rn(piece.v[i], scale), factor.v[i]);
    store<W>(out, index, piece);
}

template <bool ADD, u32 W>
__device__ __forceinline__ void rms(float* x, const float* delta, const float* weight, float* out, u32 cols, float eps) {
    __shared__ float sums[THREADS / WARP];
    const u64 at = static_cast<u64>(blockIdx.x) * cols;
    const u32 pieces = cols / W;
    x += at, out += at;
    if (ADD) delta += at;
    Piece<W> kept[KEEP];
    float sum = 0.0f;
#pragma unroll
    for (u32 j = 0; j < KEEP; j++) {
        const u32 index = threadIdx.x + j * THREADS;
        if (index < pieces) kept[j] = take<ADD, W>(x, delta, index, sum);
    }
    for (u32 index = threadIdx.x + KEEP * THREADS; index < pieces; index += THREADS) take<ADD, W>(x, delta, index, sum);
    const float mean = block_sum(sum, sums) / static_cast<float>(cols);
    const float scale = 1.0f / sqrtf(__fadd_rn(mean, eps));
#pragma unroll
    for (u32 j = 0; j < KEEP; j++) {
        const u32 index = threadIdx.x + j * THREADS;
        if (index < pieces) put<W>(out, weight, index, kept[j], scale);
    }
    for (u32 index = threadIdx.x + KEEP * THREADS; index < pieces; index += THREADS) {
        put<W>(out, weight, index, load<W>(x, index), scale);
    }
}

// out[r] = x[r] / sqrt(mean(x[r]^2) + eps) * weight. Grid: a block per row.
KERNEL(THREADS) rms_norm(const float* x, const float* weight, float* out, u32 cols, float eps) {
    float* rows = const_cast<float*>(x);
    if (cols % 4 == 0) rms<false, 4>(rows, nullptr, weight, out, cols, eps);
    else rms<false, 1>(rows, nullptr, weight, out, cols, eps);
}

// sum[r] += delta[r]; out[r] = the same of sum[r]. Grid: a block per row.
KERNEL(THREADS) add_rms_norm(float* sum, const float* delta, const float* weight, float* out, u32 cols, float eps) {
    if (cols % 4 == 0) rms<true, 4>(sum, delta, weight, out, cols, eps);
    else rms<true, 1>(sum, delta, weight, out, cols, eps);
}

// out[r] = (x[r] - mean) / sqrt(variance + eps) * weight + bias, with the biased variance; sums in f64. Grid: a block per
// row. (Learned heads use it; their rows are few.)
KERNEL(THREADS) layer_norm(const float* x, const float* weight, const float* bias, float* out, u32 cols, float eps) {
    __shared__ double sums[2][THREADS / WARP];
    const u64 at = static_cast<u64>(blockIdx.x) * cols;
    x += at, out += at;
    double sum = 0.0;
    for (u32 i = threadIdx.x; i < cols; i += THREADS) sum += x[i];
    const double mean = block_sum(sum, sums[0]) / cols;
    sum = 0.0;
    for (u32 i = threadIdx.x; i < cols; i += THREADS) sum += (x[i] - mean) * (x[i] - mean);
    const float variance = static_cast<float>(block_sum(sum, sums[1]) / cols);
    const double scale = 1.0f / sqrtf(variance + eps);
    for (u32 i = threadIdx.x; i < cols; i += THREADS) {
        out[i] = __fadd_rn(__fmul_rn(static_cast<float>((x[i] - mean) * scale), weight[i]), bias[i]);
    }
}
