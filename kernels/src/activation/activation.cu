// Elementwise operations, and the small operations of learned heads.
// Owner: ActivationKernels. Invariant: a value, or a row of a softmax, is computed by itself in one fixed order. NaN stays.

#include "common.cuh"

#define THREADS 256u
#define INFINITY_ __uint_as_float(0x7f800000u)

__device__ __forceinline__ float silu(float x) { return x / (1.0f + expf(-x)); }

// The error function: x P(x^2) below 1; above, 1 - e^-Q(|x|), Q being the negative logarithm of its complement. P and Q
// are least-squares fits on Chebyshev nodes; both are within 1.3e-7.
__device__ __forceinline__ float erf_(float x) {
    const float a = fabsf(x), u = x * x;
    float p = 7.88249711e-05f;
    p = __fmaf_rn(p, u, -0.000801885499f);
    p = __fmaf_rn(p, u, 0.00518931194f);
    p = __fmaf_rn(p, u, -0.0268543288f);
    p = __fmaf_rn(p, u, 0.112835975f);
    p = __fmaf_rn(p, u, -0.376126269f);
    p = __fmaf_rn(p, u, 1.12837917f);
    if (!(a >= 1.0f)) return x * p;
    // From 4 on it is 1 to rounding.
    const float b = fminf(a, 4.0f);
    float q = -1.6140616e-06f;
    q = __fmaf_rn(q, b, 4.55906224e-05f);
    q = __fmaf_rn(q, b, -0.000592769537f);
    q = __fmaf_rn(q, b, 0.00474022234f);
    q = __fmaf_rn(q, b, -0.0263647174f);
    q = __fmaf_rn(q, b, 0.109978245f);
    q = __fmaf_rn(q, b, 0.631937094f);
    q = __fmaf_rn(q, b, 1.13016668f);
    q = __fmaf_rn(q, b, -0.000303212967f);
    const float y = 1.0f - expf(-q);
    return x < 0.0f ? -y : y;
}

struct SiluMul {
    static __device__ __forceinline__ float apply(float gate, float up) { return silu(gate) * up; }
};
struct Add {
    static __device__ __forceinline__ float apply(float x, float y) { return __fadd_rn(x, y); }
};
// x / 2 (1 + erf(x / sqrt 2)), as the processor does it.
struct Gelu {
    static __device__ __forceinline__ float apply(float x, float) {
        return 0.5f * x * (1.0f + erf_(x * 0.70710678118654752f));
    }
};
struct Relu {
    static __device__ __forceinline__ float apply(float x, float) { return x < 0.0f ? 0.0f : x; }
};

// x[i] = F(x[i], y[i]), four values a thread.
template <typename F>
__device__ __forceinline__ void each(float* x, const float* y, u32 count) {
    const u32 first = (blockIdx.x * THREADS + threadIdx.x) * 4;
    if (first + 4 <= count) {
        float4 a = *reinterpret_cast<const float4*>(x + first);
        const float4 b = y == nullptr ? a : *reinterpret_cast<const float4*>(y + first);
        a = make_float4(F::apply(a.x, b.x), F::apply(a.y, b.y), F::apply(a.z, b.z), F::apply(a.w, b.w));
        *reinterpret_cast<float4*>(x + first) = a;
    } else {
        for (u32 i = first; i < count; i++) x[i] = F::apply(x[i], y == nullptr ? 0.0f : y[i]);
    }
}

// gate *= sigmoid(gate) up. Grid of these four: a block per 1024 values.
KERNEL(THREADS) silu_mul(float* gate, const float* up, u32 count) { each<SiluMul>(gate, up, count); }

// sum += delta
KERNEL(THREADS) add(float* sum, const float* delta, u32 count) { each<Add>(sum, delta, count); }

KERNEL(THREADS) gelu(float* x, u32 count) { each<Gelu>(x, nullptr, count); }

KERNEL(THREADS) relu(float* x, u32 count) { each<Relu>(x, nullptr, count); }

// Columns column.. of the rows of out become those of part. Grid: a block per 256 values of part.
KERNEL(THREADS) place(const float* part, float* out, u32 count, u32 width, u32 column, u32 out_width) {
    const u32 i = blockIdx.x * THREADS + threadIdx.x;
    if (i < count) out[static_cast<u64>(i / width) * out_width + column + i % width] = part[i];
}

// Softmax of the row of this warp in place; the sum of exponentials in f64.
__device__ __forceinline__ void softmax_row(float* row, u32 width) {
    const u32 lane = threadIdx.x % WARP;
    float top = -INFINITY_;
    for (u32 i = lane; i < width; i += WARP) top = fmaxf(top, row[i]);
    top = warp_max(top);
    double total = 0.0;
    for (u32 i = lane; i < width; i += WARP) total += expf(row[i] - top);
#pragma unroll
    for (u32 distance = WARP / 2; distance > 0; distance /= 2) {
        total += __shfl_xor_sync(0xffffffffu, total, distance);
    }
    for (u32 i = lane; i < width; i += WARP) row[i] = static_cast<float>(expf(row[i] - top) / total);
}

// Grid of these three: a block per 8 rows.
KERNEL(THREADS) softmax(float* x, u32 rows, u32 width) {
    const u32 row = blockIdx.x * (THREADS / WARP) + threadIdx.x / WARP;
    if (row < rows) softmax_row(x + static_cast<u64>(row) * width, width);
}

// out[i][j] = the logit of rank j in the list of answer i, minus infinity where the list is shorter, and then, where
// wanted, the softmax of the row: NaN where the list is empty.
KERNEL(THREADS) top_rows(const Answer* answers, const Candidate* tops, float* out, u32 rows, u32 width, u32 normalise) {
    const u32 row = blockIdx.x * (THREADS / WARP) + threadIdx.x / WARP;
    if (row >= rows) return;
    const u32 count = min(answers[row].tops, TOP_MAX);
    out += static_cast<u64>(row) * width;
    tops += static_cast<u64>(row) * TOP_MAX;
    for (u32 i = threadIdx.x % WARP; i < width; i += WARP) out[i] = i < count ? tops[i].logit : -INFINITY_;
    // A lane reads what it wrote itself.
    if (normalise) softmax_row(out, width);
}

// answers[i].score = 1 / (1 + e^-x[i]). Grid: a block per 256 answers.
KERNEL(THREADS) scores(const float* x, Answer* answers, u32 rows) {
    const u32 row = blockIdx.x * THREADS + threadIdx.x;
    if (row < rows) answers[row].score = 1.0f / (1.0f + expf(-x[row]));
}
