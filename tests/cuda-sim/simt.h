// The CUDA language as far as our kernels use it, for g++: included before a .cu file by the software device.
// Owner: tests/cuda-sim. Collectives are in simt_run.h terms; arithmetic is plain IEEE f32/f64 of the CPU.
// Invariant: what is not offered here is not allowed in kernels (see the list in kernels/src/cuda/common.cuh).
#pragma once
#include <math.h>
#include "simt_run.h"
#include "simt_try.h"

#ifndef SIMT
#define SIMT 1
#endif
#undef INFINITY
#undef NAN
#undef HUGE_VALF

#define __global__ __attribute__((visibility("default"), noinline, noclone))
#define __device__
#define __host__
#define __constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...) __attribute__((simt_bounds(__VA_ARGS__)))
// Thread-local variables of a kernel file lie in one block, also those of templates: it is filled before every block.
#define __shared__ static __thread
#define SHARED_DYNAMIC(type, name) type* name = reinterpret_cast<type*>(simt::state.dynamic)
#define __align__(n) __attribute__((aligned(n)))

struct __align__(8) uint2 { unsigned x, y; };
struct __align__(16) uint4 { unsigned x, y, z, w; };
struct __align__(8) int2 { int x, y; };
struct __align__(16) int4 { int x, y, z, w; };
struct __align__(8) float2 { float x, y; };
struct __align__(16) float4 { float x, y, z, w; };
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

constexpr int warpSize = 32;

// --- Barriers and warp-collectives; file and line tell one call from another. -----------------------------------
#define SIMT_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()
inline void __syncthreads(SIMT_SITE) { simt::barrier(file, line); }
inline void __syncwarp(unsigned mask = ~0u, SIMT_SITE) { simt::meet(simt::SYNCWARP, mask, file, line); }

namespace simt {
template <class T> inline unsigned long long to_bits(T value) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "shuffles take 4 or 8 bytes");
    unsigned long long bits = 0;
    memcpy(&bits, &value, sizeof value);
    return bits;
}
template <class T> inline T from_bits(unsigned long long bits) {
    T value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
// What lane `from` handed in; of a lane that does not exist, a value that shows.
template <class T> inline T exchange(unsigned mask, T value, unsigned from, const char* file, int line) {
    unsigned self = state.current % LANES;
    Warp& warp = state.warps[state.current / LANES];
    unsigned turn = warp.turn;
    warp.slot[turn][self] = to_bits(value);
    meet(SHUFFLE, mask, file, line);
    return from_bits<T>(warp.lanes >> (from % LANES) & 1 ? warp.slot[turn][from % LANES] : ~0ull);
}
inline unsigned source(unsigned from, unsigned low, unsigned high) {
    return from >= low && from <= high ? from : state.current % LANES;
}
inline unsigned vote(unsigned mask, bool predicate, const char* file, int line) {
    Warp& warp = state.warps[state.current / LANES];
    unsigned turn = warp.turn, votes = 0;
    warp.slot[turn][state.current % LANES] = predicate;
    meet(VOTE, mask, file, line);
    for (unsigned i = 0; i < LANES; i++)
        if (warp.lanes >> i & 1) votes |= unsigned(warp.slot[turn][i]) << i;
    return votes;
}
} // namespace simt

template <class T> inline T __shfl_sync(unsigned mask, T value, int from, int width = 32, SIMT_SITE) {
    unsigned base = simt::state.current % 32 & ~(width - 1u);
    return simt::exchange(mask, value, base | (from & (width - 1)), file, line);
}
template <class T> inline T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32, SIMT_SITE) {
    unsigned self = simt::state.current % 32, from = self ^ lanes;
    return simt::exchange(mask, value, simt::source(from, 0, self | (width - 1u)), file, line);
}
template <class T> inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, SIMT_SITE) {
    unsigned self = simt::state.current % 32;
    return simt::exchange(mask, value, simt::source(self + delta, 0, self | (width - 1u)), file, line);
}
template <class T> inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, SIMT_SITE) {
    unsigned self = simt::state.current % 32;
    return simt::exchange(mask, value, simt::source(self - delta, self & ~(width - 1u), 31), file, line);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, SIMT_SITE) {
    return simt::vote(mask, predicate != 0, file, line);
}
inline int __any_sync(unsigned mask, int predicate, SIMT_SITE) {
    return simt::vote(mask, predicate != 0, file, line) != 0;
}
inline int __all_sync(unsigned mask, int predicate, SIMT_SITE) {
    return simt::vote(mask, predicate == 0, file, line) == 0;
}

// --- mma.sync.aligned.m16n8k16.row.col.f32.{bf16,f16}.{bf16,f16}.f32: d += a * b (PTX ISA, fragments). -----------
namespace simt {
inline float wide_f16(unsigned half) {
    unsigned sign = (half & 0x8000) << 16, rest = half & 0x7FFF;
    if (rest >= 0x7C00) return from_bits<float>(sign | 0x7F800000 | (rest & 0x3FF) << 13);
    return from_bits<float>(sign | unsigned(to_bits(from_bits<float>(rest << 13) * 0x1p112f)));
}
// Group g = lane / 4 and t = lane % 4. a[r]: row g + 8 (r & 1), columns 2 t + 8 (r >> 1) and the next; b[r]: rows
// 2 t + 8 r and the next of column g; d[i]: row g + 8 (i >> 1), column 2 t + (i & 1). So register r of all lanes in
// order is a block of 8 x 8 halves: of `a` by rows, of `b` by columns.
typedef float Row __attribute__((vector_size(32)));
typedef unsigned Words __attribute__((vector_size(32)));
typedef unsigned short Halves __attribute__((vector_size(16)));

template <bool BF16> inline void widen(const unsigned* block, float (*to)[8]) {
    for (unsigned i = 0; i < 8; i++) {
        Halves halves;
        memcpy(&halves, block + 4 * i, sizeof halves);
        Words word = __builtin_convertvector(halves, Words), rest = word & 0x7FFF;
        if (BF16) {
            word <<= 16;
        } else {
            Words large = reinterpret_cast<Words>(rest >= 0x7C00);
            Words small = reinterpret_cast<Words>(reinterpret_cast<Row>(rest << 13) * 0x1p112f);
            word = (word & 0x8000) << 16 | (small & ~large) | ((0x7F800000 | (rest & 0x3FF) << 13) & large);
        }
        memcpy(to[i], &word, sizeof word);
    }
}
template <bool BF16> inline void multiply(Warp& warp) {
    float a[4][8][8], b[2][8][8];
    for (unsigned r = 0; r < 4; r++) widen<BF16>(warp.fragment[r], a[r]);
    for (unsigned r = 0; r < 2; r++) widen<BF16>(warp.fragment[4 + r], b[r]);
    Row columns[16];
    for (unsigned k = 0; k < 16; k++)
        for (unsigned n = 0; n < 8; n++) columns[k][n] = b[k / 8][n][k % 8];
    for (unsigned row = 0; row < 16; row++) {
        const float *low = a[row / 8][row % 8], *high = a[2 + row / 8][row % 8];
        Row sum = {};
        for (unsigned k = 0; k < 8; k++) sum += low[k] * columns[k];
        for (unsigned k = 0; k < 8; k++) sum += high[k] * columns[8 + k];
        memcpy(&warp.product[warp.turn][row * 8], &sum, sizeof sum);
    }
}
} // namespace simt
inline float simt_f16_to_f32(unsigned short half) { return simt::wide_f16(half); }
inline unsigned short simt_f32_to_f16(float x) { // to nearest even
    _Float16 half = static_cast<_Float16>(x);
    unsigned short bits;
    memcpy(&bits, &half, sizeof bits);
    return bits;
}
inline void simt_mma_16816(float d[4], const unsigned a[4], const unsigned b[2], bool bf16, SIMT_SITE) {
    unsigned lane = simt::state.current % 32, g = lane / 4, t = lane % 4;
    simt::Warp& warp = simt::state.warps[simt::state.current / 32];
    if (warp.lanes != ~0u) simt::fail("mma at %s:%d in a warp of fewer than 32 lanes", file, line);
    unsigned turn = warp.turn;
    for (unsigned i = 0; i < 6; i++) warp.fragment[i][lane] = i < 4 ? a[i] : b[i - 4];
    warp.finish = bf16 ? simt::multiply<true> : simt::multiply<false>;
    simt::meet(simt::MMA, ~0u, file, line);
    for (unsigned i = 0; i < 4; i++) d[i] += warp.product[turn][(g + 8 * (i >> 1)) * 8 + 2 * t + (i & 1)];
}

// --- Atomics. ---------------------------------------------------------------------------------------------------
#define SIMT_ATOMICS(T)                                                                                               \
    inline T atomicAdd(T* at, T v) { return __atomic_fetch_add(at, v, __ATOMIC_RELAXED); }                            \
    inline T atomicOr(T* at, T v) { return __atomic_fetch_or(at, v, __ATOMIC_RELAXED); }                              \
    inline T atomicAnd(T* at, T v) { return __atomic_fetch_and(at, v, __ATOMIC_RELAXED); }                            \
    inline T atomicExch(T* at, T v) { return __atomic_exchange_n(at, v, __ATOMIC_RELAXED); }                          \
    inline T atomicCAS(T* at, T expected, T v) {                                                                      \
        __atomic_compare_exchange_n(at, &expected, v, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);                     \
        return expected;                                                                                              \
    }                                                                                                                 \
    inline T atomicMax(T* at, T v) {                                                                                  \
        T old = *at;                                                                                                  \
        while (old < v && !__atomic_compare_exchange_n(at, &old, v, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}    \
        return old;                                                                                                   \
    }                                                                                                                 \
    inline T atomicMin(T* at, T v) {                                                                                  \
        T old = *at;                                                                                                  \
        while (v < old && !__atomic_compare_exchange_n(at, &old, v, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}    \
        return old;                                                                                                   \
    }
SIMT_ATOMICS(int)
SIMT_ATOMICS(unsigned)
SIMT_ATOMICS(unsigned long long)
inline void __threadfence() {}
inline void __threadfence_block() {}

// --- Arithmetic. ------------------------------------------------------------------------------------------------
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return sqrtf(a); }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }
inline unsigned __float_as_uint(float x) { return unsigned(simt::to_bits(x)); }
inline int __float_as_int(float x) { return int(simt::to_bits(x)); }
inline float __uint_as_float(unsigned x) { return simt::from_bits<float>(x); }
inline float __int_as_float(int x) { return simt::from_bits<float>(unsigned(x)); }
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned((unsigned long long)a * b >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)((unsigned __int128)a * b >> 64);
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
template <class T> inline T __ldg(const T* at) { return *at; }
#define SIMT_MIN_MAX(T)                                                                                               \
    inline T min(T a, T b) { return b < a ? b : a; }                                                                  \
    inline T max(T a, T b) { return a < b ? b : a; }
SIMT_MIN_MAX(int)
SIMT_MIN_MAX(unsigned)
SIMT_MIN_MAX(long long)
SIMT_MIN_MAX(unsigned long long)
inline unsigned min(int a, unsigned b) { return min(unsigned(a), b); }
inline unsigned min(unsigned a, int b) { return min(a, unsigned(b)); }
inline unsigned max(int a, unsigned b) { return max(unsigned(a), b); }
inline unsigned max(unsigned a, int b) { return max(a, unsigned(b)); }
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }

// Names that the real compiler does not know.
#ifdef SIMT_STRICT
#pragma GCC poison std printf assert uint8_t uint16_t uint32_t uint64_t int8_t int16_t int32_t int64_t
#endif
