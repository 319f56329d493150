// Between the projections and attention: norms of the heads of q and k where a model has them, rotation of q and k by
// their position, and k and v into the pages of KV memory.
// Owner: RopeKernels. Invariant: a warp per token and head, so a head depends on itself and its position alone; without
// head norms the rotated values are bit for bit those of the processor. Tokens without a position are left alone, and
// k and v of tokens without a slot go nowhere.

#include "common.cuh"

#define THREADS 256u
#define WARPS (THREADS / WARP)
#define HEAD_MAX 256u
#define VALUES (HEAD_MAX / WARP)

#define FLAG_NORMS 1u
#define FLAG_INTERLEAVED 2u
#define FLAG_F16 4u

// Values beyond the largest of the format become it; NaN stays.
__device__ __forceinline__ u16 stored(float x, u32 flags) {
    const float bound = flags & FLAG_F16 ? 65504.0f : __uint_as_float(0x7f7f0000u);
    if (x > bound) x = bound;
    if (x < -bound) x = -bound;
    return flags & FLAG_F16 ? f32_to_f16(x) : f32_to_bf16(x);
}

// Normalises a head, of which this lane has values lane, lane + 32, ...
__device__ __forceinline__ void normalise(float x[VALUES], const float* weight, u32 head_dim, float eps) {
    const u32 lane = threadIdx.x % WARP;
    float sum = 0.0f;
#pragma unroll
    for (u32 j = 0; j < VALUES; j++) sum = __fmaf_rn(x[j], x[j], sum);
    const float scale = 1.0f / sqrtf(__fadd_rn(warp_sum(sum) / static_cast<float>(head_dim), eps));
#pragma unroll
    for (u32 j = 0; j < VALUES; j++) {
        const u32 i = lane + j * WARP;
        if (i < head_dim) x[j] = __fmul_rn(__fmul_rn(x[j], scale), weight[i]);
    }
}

// Value i of the rotated head.
__device__ __forceinline__ float rotated(const float* head, u32 i, const float* cos, const float* sin, u32 pairs, u32 flags) {
    if (i >= 2 * pairs) return head[i];
    const bool interleaved = flags & FLAG_INTERLEAVED;
    const u32 pair = interleaved ? i / 2 : i % pairs;
    const bool second = interleaved ? i % 2 : i >= pairs;
    const float a = head[interleaved ? 2 * pair : pair];
    const float b = head[interleaved ? 2 * pair + 1 : pair + pairs];
    const float c = cos[pair], s = sin[pair];
    if (second) return __fadd_rn(__fmul_rn(b, c), __fmul_rn(a, s));
    return __fsub_rn(__fmul_rn(a, c), __fmul_rn(b, s));
}

// Grid: (tokens, heads / 8 rounded up), where the heads are those of q, then of k, then of v. k_pages and v_pages are
// [page][kv_heads][16][padded], the values of a head padded with zeros.
KERNEL(THREADS) rotate_and_store(
    float* q, const float* k, const float* v, u16* k_pages, u16* v_pages, const u32* positions, const u32* slots,
    const float* cos, const float* sin, const float* q_norm, const float* k_norm, float q_eps, float k_eps,
    u32 heads, u32 kv_heads, u32 head_dim, u32 padded, u32 pairs, u32 flags) {
    __shared__ float shared[WARPS][HEAD_MAX];
    const u32 lane = threadIdx.x % WARP, token = blockIdx.x;
    u32 index = blockIdx.y * WARPS + threadIdx.x / WARP;
    const u32 position = positions[token];
    // Nothing below concerns other warps.
    if (index >= heads + 2 * kv_heads || position == NONE) return;
    const bool is_q = index < heads, is_v = index >= heads + kv_heads;
    if (!is_q) index -= is_v ? heads + kv_heads : heads;
    const u64 row = static_cast<u64>(token) * (is_q ? heads : kv_heads) + index;
    const float* from = (is_q ? q : is_v ? v : k) + row * head_dim;
    float x[VALUES];
#pragma unroll
    for (u32 j = 0; j < VALUES; j++) x[j] = lane + j * WARP < head_dim ? from[lane + j * WARP] : 0.0f;
    if (!is_v) {
        if (flags & FLAG_NORMS) normalise(x, is_q ? q_norm : k_norm, head_dim, is_q ? q_eps : k_eps);
        float* head = shared[threadIdx.x / WARP];
#pragma unroll
        for (u32 j = 0; j < VALUES; j++) head[lane + j * WARP] = x[j];
        __syncwarp();
        const u64 at = static_cast<u64>(position) * pairs;
#pragma unroll
        for (u32 j = 0; j < VALUES; j++) {
            const u32 i = lane + j * WARP;
            if (i < head_dim) x[j] = rotated(head, i, cos + at, sin + at, pairs, flags);
        }
    }
    if (is_q) {
        float* to = q + row * head_dim;
#pragma unroll
        for (u32 j = 0; j < VALUES; j++) {
            if (lane + j * WARP < head_dim) to[lane + j * WARP] = x[j];
        }
        return;
    }
    const u32 slot = slots[token];
    if (slot == NONE) return;
    const u64 page_head = static_cast<u64>(slot / PAGE_TOKENS) * kv_heads + index;
    u16* to = (is_v ? v_pages : k_pages) + (page_head * PAGE_TOKENS + slot % PAGE_TOKENS) * padded;
#pragma unroll
    for (u32 j = 0; j < VALUES; j++) {
        if (lane + j * WARP < padded) to[lane + j * WARP] = stored(x[j], flags);
    }
}
