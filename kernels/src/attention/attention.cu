// Causal grouped-query attention over pages of KV memory, for decode, extend and prefill alike.
// Owner: AttentionKernels, which defines DIM (values of a head in KV memory) and KV_F16 (0: bf16) before. Queries of a
// span and key head, (token, head of the group) pairs by token, are taken in tiles of 16 M. The context is cut into chunks
// of positions; in a chunk the warps of a block take the pages in turn, each with a running softmax of its own (Milakov
// and Gimelshein, 2018; Dao et al., 2022); they are joined in the order of the warps, and chunks are folded one after the
// other: either chunks have blocks of their own, whose results `join` folds, or a block does all of them.
// Invariant: for given chunks, a query's result is bit for bit the same both ways, for any M, any place in its tile and
// any other queries. (Except that a NaN in a value spoils the queries of its tile that do not see it.) Rows of padding
// are not written.

#include "fragments.cuh"

// Results of two sets of positions become one: m are largest scores, l sums of weights.
struct Fold {
    float m, l, mine, other;
};
__device__ __forceinline__ Fold fold(float m, float l, float m_other, float l_other) {
    Fold f;
    f.m = fmaxf(m, m_other);
    f.mine = exp2f(__fsub_rn(m, f.m));
    f.other = exp2f(__fsub_rn(m_other, f.m));
    f.l = __fadd_rn(__fmul_rn(l, f.mine), __fmul_rn(l_other, f.other));
    return f;
}
__device__ __forceinline__ float folded(float x, float mine, float x_other, float other) {
    return __fadd_rn(__fmul_rn(x, mine), __fmul_rn(x_other, other));
}

// Positions of a chunk: as said, or the share of each of `splits` in a context, in whole tiles of 64.
__device__ __forceinline__ u32 chunk_positions(u32 fixed, u32 splits, u32 context) {
    return fixed ? fixed : ((context + 63) / 64 + splits - 1) / splits * 64;
}

struct Pages {
    const u16* k;
    const u16* v;
    const u32* table;
    u64 head; // offset of the key head in a page
    u64 page; // numbers in a page
};

// The pages of this warp among positions from..to; then the warps' results are joined in shared.sum, m[0] and l[0].
template <u32 M>
__device__ __forceinline__ void chunk_of(Shared<M>& shared, const Pages& pages, u32 from, u32 to) {
    const u32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, g = lane / 4;
    State<M> state = {};
    u32 visible[M][2];
    float down[M][2];
#pragma unroll
    for (u32 m = 0; m < M; m++) {
#pragma unroll
        for (u32 r = 0; r < 2; r++) {
            state.m[m][r] = MINUS_INFINITY;
            visible[m][r] = shared.visible[16 * m + 8 * r + g];
            down[m][r] = shared.down[16 * m + 8 * r + g];
        }
    }
    const u32 end = (to + PAGE_TOKENS - 1) / PAGE_TOKENS;
    u32 page = from / PAGE_TOKENS + warp;
    u32 next = page < end ? pages.table[page] : 0;
    for (; page < end; page += WARPS) {
        const u64 at = next * pages.page + pages.head;
        if (page + WARPS < end) next = pages.table[page + WARPS];
        const u32 start = page * PAGE_TOKENS;
        u32 seen[M][2];
#pragma unroll
        for (u32 m = 0; m < M; m++) {
#pragma unroll
            for (u32 r = 0; r < 2; r++) seen[m][r] = visible[m][r] > start ? visible[m][r] - start : 0;
        }
        page_of<M>(state, shared, pages.k + at, pages.v + at, to - start, seen, down);
    }
#pragma unroll
    for (u32 m = 0; m < M; m++) {
#pragma unroll
        for (u32 r = 0; r < 2; r++) {
            float l = state.l[m][r];
            l = __fadd_rn(l, __shfl_xor_sync(ALL, l, 1));
            l = __fadd_rn(l, __shfl_xor_sync(ALL, l, 2));
            if (lane % 4 == 0) {
                shared.m[warp][16 * m + 8 * r + g] = state.m[m][r];
                shared.l[warp][16 * m + 8 * r + g] = l;
            }
        }
    }
    __syncthreads();
    float factor[M][2];
#pragma unroll
    for (u32 m = 0; m < M; m++) {
#pragma unroll
        for (u32 r = 0; r < 2; r++) {
            float top = MINUS_INFINITY;
#pragma unroll
            for (u32 w = 0; w < WARPS; w++) top = fmaxf(top, shared.m[w][16 * m + 8 * r + g]);
            // A warp that has seen nothing adds its zeros.
            factor[m][r] = state.m[m][r] == MINUS_INFINITY ? 1.0f : exp2f(__fsub_rn(state.m[m][r], top));
        }
    }
    for (u32 turn = 0; turn < WARPS; turn++) {
        if (warp == turn) {
#pragma unroll
            for (u32 m = 0; m < M; m++) {
#pragma unroll
                for (u32 e = 0; e < EIGHTS; e++) {
#pragma unroll
                    for (u32 i = 0; i < 4; i++) {
                        float* sum = &shared.sum[(m * EIGHTS + e) * STRIDE + i * WARP + lane];
                        const float x = __fmul_rn(state.acc[m][e][i], factor[m][i / 2]);
                        *sum = turn == 0 ? x : __fadd_rn(*sum, x);
                    }
                }
            }
        }
        __syncthreads();
    }
}

// Largest score and sum of weights of a row over the warps.
template <u32 M>
__device__ __forceinline__ void total_of(const Shared<M>& shared, u32 row, float& m, float& l) {
    m = MINUS_INFINITY;
    for (u32 w = 0; w < WARPS; w++) m = fmaxf(m, shared.m[w][row]);
    l = 0.0f;
    for (u32 w = 0; w < WARPS; w++) {
        const float factor = shared.m[w][row] == MINUS_INFINITY ? 1.0f : exp2f(__fsub_rn(shared.m[w][row], m));
        l = __fadd_rn(l, __fmul_rn(shared.l[w][row], factor));
    }
}

// Joins the sums of the chunk with those before it, if it is not the first. A thread has a row.
template <u32 M>
__device__ __forceinline__ void advance(Shared<M>& shared, bool first) {
    const u32 row = threadIdx.x;
    if (row < 16 * M) {
        float m, l;
        total_of<M>(shared, row, m, l);
        if (!first) {
            const Fold f = fold(shared.run_m[row], shared.run_l[row], m, l);
            m = f.m, l = f.l;
            shared.mine[row] = f.mine, shared.other[row] = f.other;
        }
        shared.run_m[row] = m, shared.run_l[row] = l;
        shared.inverse[row] = 1.0f / l;
    }
    __syncthreads();
}

// Results of one chunk, for `join`.
template <u32 M>
__device__ __forceinline__ void give(const Shared<M>& shared, float* partial, float* sums, u32 from) {
    const u32 row = threadIdx.x;
    if (row < 16 * M && shared.visible[row] > from) {
        const float2 both = make_float2(shared.run_m[row], shared.run_l[row]);
        reinterpret_cast<float2*>(sums)[shared.index[row]] = both;
    }
    for (u32 i = threadIdx.x; i < 16 * M * DIM; i += THREADS) {
        const u32 row = i / DIM, d = i % DIM;
        if (shared.visible[row] > from) {
            partial[static_cast<u64>(shared.index[row]) * DIM + d] = shared.sum[place_of(row, d)];
        }
    }
}

// Folds a chunk into what `out` has from those before it, in place; divides when the row sees no more.
template <u32 M>
__device__ __forceinline__ void keep(const Shared<M>& shared, float* out, u32 head_dim, u32 from, u32 to) {
    for (u32 i = threadIdx.x; i < 16 * M * DIM; i += THREADS) {
        const u32 row = i / DIM, d = i % DIM, visible = shared.visible[row];
        if (visible <= from || d >= head_dim) continue;
        float* at = out + static_cast<u64>(shared.index[row]) * head_dim + d;
        float x = shared.sum[place_of(row, d)];
        if (from > 0) x = folded(*at, shared.mine[row], x, shared.other[row]);
        *at = visible <= to ? __fmul_rn(x, shared.inverse[row]) : x;
    }
}

template <u32 M>
__device__ __forceinline__ void attend(
    const float* q, const u16* k, const u16* v, const Span* spans, const u32* pages, float* out, float* partial,
    float* sums, u32 span_count, u32 kv_heads, u32 group, u32 head_dim, u32 tokens, float scale, u32 fixed, u32 splits) {
    __shared__ __align__(16) Shared<M> shared;
    const u32 columns = span_count * kv_heads, tiles = gridDim.x / columns;
    // Late tiles read most and come first.
    const u32 number = tiles - 1 - blockIdx.x / columns, column = blockIdx.x % columns;
    const Tile tile = {spans[column / kv_heads], column % kv_heads, group, kv_heads * group, number * 16 * M};
    const u32 queries = tile.span.len * group;
    if (tile.first >= queries) return;
    const u32 last = min(tile.first + 16 * M, queries) - 1;
    const u32 end = tile.visible(last - tile.first);
    const u32 positions = chunk_positions(fixed, splits, tile.span.start + tile.span.len);
    u32 from = blockIdx.y * positions;
    if (from >= end) return;
    load_queries<M>(shared, tile, q, scale, head_dim);
    __syncthreads();
    const u64 numbers = static_cast<u64>(PAGE_TOKENS) * DIM;
    const Pages memory = {k, v, pages + tile.span.table, tile.head * numbers, kv_heads * numbers};
    if (gridDim.y > 1) {
        const u64 rows = static_cast<u64>(tokens) * tile.heads;
        chunk_of<M>(shared, memory, from, min(from + positions, end));
        advance<M>(shared, true);
        give<M>(shared, partial + blockIdx.y * rows * DIM, sums + 2 * blockIdx.y * rows, from);
        return;
    }
    for (; from < end; from += positions) {
        chunk_of<M>(shared, memory, from, min(from + positions, end));
        advance<M>(shared, from == 0);
        keep<M>(shared, out, head_dim, from, from + positions);
    }
}

// Grid: (tiles of the longest span * spans * kv_heads, chunks), or one for the chunks: then each block takes all of its
// tile in turn. k and v are [page][kv_heads][16][DIM], partial is [chunks][tokens][heads][DIM], sums
// [chunks][tokens][heads] of (largest score, sum of weights). scale includes log2(e). fixed: positions of a chunk, or 0
// for the share of each of `splits` in the context of the span.
#define ATTEND(M) \
    KERNEL(BOUNDS) attend_##M( \
        const float* q, const u16* k, const u16* v, const Span* spans, const u32* pages, float* out, float* partial, \
        float* sums, u32 span_count, u32 kv_heads, u32 group, u32 head_dim, u32 tokens, float scale, u32 fixed, \
        u32 splits) { \
        attend<M>(q, k, v, spans, pages, out, partial, sums, span_count, kv_heads, group, head_dim, tokens, scale, \
                  fixed, splits); \
    }
ATTEND(1)
// Twice the queries for the same keys and values; with larger heads there are not enough registers.
#if DIM <= 128
ATTEND(2)
#endif

// Chunks whose results `join` has in flight.
#define AHEAD 8u
#define VALUES ((DIM + WARP - 1) / WARP)

// Folds the chunks that a query sees, in order. Grid: a block per 4 rows of [tokens, heads].
KERNEL(THREADS) join(
    const float* partial, const float* sums, const Span* spans, const u32* positions, const u32* row_of, float* out,
    u32 tokens, u32 heads, u32 head_dim, u32 fixed, u32 splits) {
    const u32 index = blockIdx.x * WARPS + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const u64 rows = static_cast<u64>(tokens) * heads;
    if (index >= rows) return;
    const u32 position = positions[index / heads];
    if (position == NONE) return;
    const Span span = spans[row_of[index / heads]];
    const u32 chunk = chunk_positions(fixed, splits, span.start + span.len);
    const u32 count = position / chunk + 1;
    float m = MINUS_INFINITY, l = 0.0f, x[VALUES] = {};
    for (u32 first = 0; first < count; first += AHEAD) {
        float2 both[AHEAD];
        float more[AHEAD][VALUES];
#pragma unroll
        for (u32 c = 0; c < AHEAD; c++) {
            const u64 row = (first + c) * rows + index;
            const bool present = first + c < count;
            both[c] = present ? reinterpret_cast<const float2*>(sums)[row] : make_float2(0.0f, 0.0f);
#pragma unroll
            for (u32 i = 0; i < VALUES; i++) {
                const u32 d = lane + WARP * i;
                more[c][i] = present && d < head_dim ? partial[row * DIM + d] : 0.0f;
            }
        }
#pragma unroll
        for (u32 c = 0; c < AHEAD; c++) {
            if (first + c >= count) break;
            if (first + c == 0) {
                m = both[c].x, l = both[c].y;
#pragma unroll
                for (u32 i = 0; i < VALUES; i++) x[i] = more[c][i];
                continue;
            }
            const Fold f = fold(m, l, both[c].x, both[c].y);
            m = f.m, l = f.l;
#pragma unroll
            for (u32 i = 0; i < VALUES; i++) x[i] = folded(x[i], f.mine, more[c][i], f.other);
        }
    }
    const float inverse = 1.0f / l;
#pragma unroll
    for (u32 i = 0; i < VALUES; i++) {
        const u32 d = lane + WARP * i;
        if (d < head_dim) out[static_cast<u64>(index) * head_dim + d] = __fmul_rn(x[i], inverse);
    }
}
