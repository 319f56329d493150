// Entries of a row by rank: the higher logit first, the lower id among equals. A row is cut into chunks of CHUNK ids, whose
// highest entries lie sorted in runs; whoever wants the highest of the row takes them from the runs, as many as it needs.
// Owner: head.cu and sample.cu. Invariant: keys of one row differ from each other, so what is taken is exact and does not
// depend on the order in which threads work.

#pragma once
#include "common.cuh"

// Ids of a chunk.
#define CHUNK 1024u
// Threads of a block that reads a chunk, as in KERNEL(256).
#define CHUNK_THREADS 256u
// Threads of a block that reads the runs of a row, as in KERNEL(512, 1): one for each run, so a row has no more chunks.
#define ROW_THREADS 512u
// Keys that are sorted in one go when runs are read.
#define ROUND_MAX 2048u

// Above all keys.
#define KEY_END (~0ull)

#define MINUS_INFINITY __uint_as_float(0xff800000u)
#define INFINITE __uint_as_float(0x7f800000u)

// What a chunk of a row says.
struct Part {
    u64 best;        // key of the highest token
    u64 top;         // key of the highest entry of all
    float sum;       // of e^(x - top)
    float weighted;  // of (x - top) e^(x - top)
    u32 bad;         // whether NaN or plus infinity was read
    u32 pad;
};

// Ids that are tokens: at least one.
__device__ __forceinline__ u32 real_ids(const Ask& ask, u32 vocab) {
    u32 real = ask.real_vocab > 0 ? ask.real_vocab : 1;
    return real < vocab ? real : vocab;
}

// The bits of a number, so that unsigned order is that of the numbers. Both zeros are the same.
__device__ __forceinline__ u32 ordered(float x) {
    u32 bits = __float_as_uint(__fadd_rn(x, 0.0f));
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Larger for an entry that comes before another; 0 for NaN, which has no place.
__device__ __forceinline__ u64 rank_key(float logit, u32 id) {
    if (logit != logit) return 0;
    return static_cast<u64>(ordered(logit)) << 32 | static_cast<u32>(~id);
}

__device__ __forceinline__ u32 key_id(u64 key) { return ~static_cast<u32>(key); }

__device__ __forceinline__ float key_logit(u64 key) {
    u32 order = static_cast<u32>(key >> 32);
    return __uint_as_float(order & 0x80000000u ? order & 0x7fffffffu : ~order);
}

// The lowest key of an entry with this logit.
__device__ __forceinline__ u64 lowest_key(float logit) { return static_cast<u64>(ordered(logit)) << 32; }

struct Plus {
    template <typename T> __device__ T operator()(T a, T b) const { return a + b; }
};
struct Larger {
    template <typename T> __device__ T operator()(T a, T b) const { return a > b ? a : b; }
};
struct Smaller {
    template <typename T> __device__ T operator()(T a, T b) const { return a < b ? a : b; }
};

// All values of a block together, the same in all threads; the order is fixed.
template <u32 THREADS, typename T, typename Operation> __device__ T over_block(T x, Operation operation) {
    __shared__ T parts[THREADS / WARP];
#pragma unroll
    for (u32 distance = WARP / 2; distance > 0; distance /= 2) {
        x = operation(x, __shfl_xor_sync(0xffffffffu, x, distance));
    }
    if (threadIdx.x % WARP == 0) parts[threadIdx.x / WARP] = x;
    __syncthreads();
    T total = parts[0];
    for (u32 warp = 1; warp < THREADS / WARP; ++warp) total = operation(total, parts[warp]);
    __syncthreads();
    return total;
}

// Sorts keys in shared memory, the largest first; `size` is a power of two. Bitonic (Batcher).
template <u32 THREADS> __device__ void sort_descending(u64* keys, u32 size) {
    for (u32 run = 2; run <= size; run *= 2) {
        for (u32 distance = run / 2; distance > 0; distance /= 2) {
            for (u32 pair = threadIdx.x; pair < size / 2; pair += THREADS) {
                u32 low = 2 * pair - (pair & (distance - 1));
                u64 a = keys[low];
                u64 b = keys[low + distance];
                bool descending = (low & run) == 0;
                if ((a < b) == descending) {
                    keys[low] = b;
                    keys[low + distance] = a;
                }
            }
            __syncthreads();
        }
    }
}

// Sorts the keys of a chunk, those of ids from `end` on left out, and writes the highest of them.
__device__ void write_run(const float* values, u32 first, u32 end, u64* run, u32 len) {
    __shared__ u64 keys[CHUNK];
    for (u32 i = threadIdx.x; i < CHUNK; i += CHUNK_THREADS) {
        keys[i] = first + i < end ? rank_key(values[i], first + i) : 0;
    }
    __syncthreads();
    sort_descending<CHUNK_THREADS>(keys, CHUNK);
    for (u32 i = threadIdx.x; i < len; i += CHUNK_THREADS) run[i] = keys[i];
    __syncthreads();
}

// A run, of which the first `len` keys count.
struct Run {
    const u64* keys;
    u32 len;
};

// How many keys of a run are at least `key`: `low` at least, `high` at most.
__device__ __forceinline__ u32 count_from(const u64* keys, u64 key, u32 low, u32 high) {
    while (low < high) {
        u32 middle = (low + high) / 2;
        if (keys[middle] >= key) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

// How many more to take of the thread's run, so that the block takes the highest keys below `end`: at least `want` of them
// and at most ROUND_MAX. `taken` keys of the run are not below `end`. `want` is 1 to ROUND_MAX, and there are so many.
__device__ u32 find_bound(Run run, u64 end, u32 taken, u32 want) {
    u32 left = run.len - taken;
    u32 active = over_block<ROW_THREADS>(left > 0 ? 1u : 0u, Plus());
    // So many of each run are enough; the lowest of them is a first guess.
    u32 share = (want + active - 1) / active;
    u64 guess = left == 0 ? KEY_END : left >= share ? run.keys[taken + share - 1] : 1;
    u64 low = over_block<ROW_THREADS>(guess, Smaller());
    u64 high = end;
    u32 below_high = taken;
    u32 at_low = count_from(run.keys, low, taken, run.len);
    u32 total = over_block<ROW_THREADS>(at_low - taken, Plus());
    // At least `want` from `low` on, fewer from `high` on. Keys differ, so this ends.
    while (total > ROUND_MAX) {
        u64 middle = low + (high - low) / 2;
        u32 at_middle = count_from(run.keys, middle, below_high, at_low);
        u32 found = over_block<ROW_THREADS>(at_middle - taken, Plus());
        if (found >= want) {
            low = middle;
            at_low = at_middle;
            total = found;
        } else {
            high = middle;
            below_high = at_middle;
        }
    }
    return at_low - taken;
}

// The next keys by rank below `end`: `want` of them or more, all if there are fewer, in shared memory, the largest first.
// Each thread of the block, which has ROW_THREADS, has a run, maybe an empty one. Returns how many there are.
__device__ u32 next_ranks(Run run, u64 end, u32 want, u64* keys) {
    __shared__ u32 fill;
    u32 taken = count_from(run.keys, end, 0, run.len);
    u32 count = run.len - taken;
    u32 total = over_block<ROW_THREADS>(count, Plus());
    if (total > ROUND_MAX) {
        count = find_bound(run, end, taken, want);
        total = over_block<ROW_THREADS>(count, Plus());
    }
    if (threadIdx.x == 0) fill = 0;
    __syncthreads();
    u32 at = count > 0 ? atomicAdd(&fill, count) : 0;
    for (u32 i = 0; i < count; ++i) keys[at + i] = run.keys[taken + i];
    u32 size = 1;
    while (size < total) size *= 2;
    for (u32 i = total + threadIdx.x; i < size; i += ROW_THREADS) keys[i] = 0;
    __syncthreads();
    sort_descending<ROW_THREADS>(keys, size);
    return total;
}
