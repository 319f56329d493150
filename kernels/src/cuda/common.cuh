// What every kernel includes: types, the arrays of a step, 16-bit floats, tensor-core products, warp reductions.
// Owner: the .cu files of this crate; handed to the compiler in memory, so it needs no header of a CUDA toolkit.
// Invariant: the structs are those of step.rs, field by field. SIMT is defined where the software device of the tests
// compiles kernels for the processor: the only place that knows the difference is this file.

#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;

#define NONE 0xffffffffu
#define WARP 32u

// An entry point for blocks of so many threads. With a 1 behind the number, the compiler keeps values in registers rather
// than make room for more blocks on a multiprocessor: for kernels of few blocks.
#define KERNEL(...) extern "C" __global__ void __launch_bounds__(__VA_ARGS__)

#ifndef SIMT
#define SHARED_DYNAMIC(type, name) extern __shared__ __align__(16) unsigned char name##_bytes[]; \
    type* name = reinterpret_cast<type*>(name##_bytes)
#endif

// Tokens whose keys and values share a page of KV memory.
#define PAGE_TOKENS 16u
// Entries in the lists of highest logits.
#define TOP_MAX 128u

struct Span {
    u32 first;  // index of its first token
    u32 len;    // tokens, 0 = padding
    u32 start;  // position of the first token
    u32 table;  // offset of its page table
};

#define ASK_PRESENT 1u
#define ASK_DISTRIBUTION 2u

struct Ask {
    u32 flags;
    u32 real_vocab;
    u32 top_k;
    u32 real_top_k;
    u32 target;
};

#define DRAW_ADJUSTED 1u
#define DRAW_GREEDY 2u

struct Draw {
    u32 flags;
    float temperature;
    float log_min_p;  // logarithm of min-p, -45 to 0
    float top_p;
    u32 top_k;
    u32 edit_first;
    u32 edit_count;
    u32 mask_first;
    double unit;
};

struct Edit {
    u32 id;
    float bias;
    float repetition;
    float minus;
    u32 ban;
};

#define FAULT_NONE 0u
#define FAULT_NOT_FINITE 1u
#define FAULT_EMPTY 2u

#define DRAW_FAULT_NONE 0u
#define DRAW_FAULT_NOTHING_LEFT 1u
#define DRAW_FAULT_NOT_FINITE 2u

struct Answer {
    u32 fault;
    u32 argmax;
    float highest;
    float log_sum_exp;
    float entropy;
    float target;
    float column;
    u32 token;
    float token_logit;
    u32 draw_fault;
    float draw_value;
    float score;
    u32 tops;
    u32 real_tops;
    u32 pad[2];
};

struct Candidate {
    u32 id;
    float logit;
};

// 16-bit floats are carried as u16.

__device__ __forceinline__ float bf16_to_f32(u16 x) { return __uint_as_float(static_cast<u32>(x) << 16); }

// Round to nearest even; NaN stays NaN.
__device__ __forceinline__ u16 f32_to_bf16(float x) {
    u32 bits = __float_as_uint(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<u16>((bits >> 16) | 0x40u);
    return static_cast<u16>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

#ifdef SIMT
__device__ __forceinline__ float f16_to_f32(u16 x) { return simt_f16_to_f32(x); }
__device__ __forceinline__ u16 f32_to_f16(float x) { return simt_f32_to_f16(x); }
__device__ __forceinline__ void mma_bf16(float d[4], const u32 a[4], const u32 b[2]) { simt_mma_16816(d, a, b, true); }
__device__ __forceinline__ void mma_f16(float d[4], const u32 a[4], const u32 b[2]) { simt_mma_16816(d, a, b, false); }
__device__ __forceinline__ uint4 load_once(const uint4* at) { return *at; }
#else
__device__ __forceinline__ float f16_to_f32(u16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
}

// Round to nearest even, as the conversion of the host.
__device__ __forceinline__ u16 f32_to_f16(float x) {
    u16 y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}

// d += a b on a tile of 16 x 8 with 16 products: a is row-major 16 x 16, b column-major 16 x 8. With g = lane / 4 and
// q = lane % 4, each register holding two values, the lower index in the lower half:
// a[0] = a[g][2q..], a[1] = a[g + 8][2q..], a[2] = a[g][2q + 8..], a[3] = a[g + 8][2q + 8..];
// b[0] = b[2q..][g], b[1] = b[2q + 8..][g]; d[0..2] = d[g][2q..], d[2..4] = d[g + 8][2q..]. (PTX ISA, mma.m16n8k16.)
__device__ __forceinline__ void mma_bf16(float d[4], const u32 a[4], const u32 b[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ void mma_f16(float d[4], const u32 a[4], const u32 b[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Memory that nothing writes meanwhile and this multiprocessor reads once: it does not push what is read often out of the
// L1 cache. Volatile, so that a load stays where it was put: ahead of the work that hides it.
__device__ __forceinline__ uint4 load_once(const uint4* at) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(at));
    return v;
}
#endif

__device__ __forceinline__ u32 pack2(u16 lo, u16 hi) { return static_cast<u32>(lo) | (static_cast<u32>(hi) << 16); }

// Sum over the lanes of a warp, the same in all of them: a butterfly, so its order is fixed.
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (u32 distance = WARP / 2; distance > 0; distance /= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
    return x;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (u32 distance = WARP / 2; distance > 0; distance /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, distance));
    return x;
}
