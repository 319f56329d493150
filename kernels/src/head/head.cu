// What is read of rows of logits: the highest token, the softmax of the whole row, lists of the highest entries, and
// whether a row is a distribution at all. The same as reduce.rs says.
// Owner: HeadKernels in cuda.rs. Invariant: chunks of fixed size are put together in fixed order, so an answer depends only
// on its own row. Rows that are padding are left alone. `top_k` and `real_top_k` are at most TOP_MAX: whoever stages a step
// refuses more.

#include "ranks.cuh"

// What minus infinity counts as, relative to the largest entry.
#define FAR (-200.0f)

// The column's value goes to the answer, and minus infinity takes its place, unless it is to be found.
__device__ void take_out(float* row, Answer& answer, float* value, u32 id, u32 column, u32 vocab) {
    if (id == column) {
        answer.column = *value;
        if (*value < INFINITE) row[id] = *value = MINUS_INFINITY;
    } else if (id == 0 && column >= vocab) {
        answer.column = 0.0f;
    }
}

// Grid (chunks, outputs). `runs` is [outputs, chunks + 1, TOP_MAX]: the last run is that of the tokens in the chunk that has
// both tokens and other ids.
KERNEL(256) head_read(float* logits, const Ask* asks, Answer* answers, Part* parts, u64* runs, u32 vocab, u32 column) {
    __shared__ float values[CHUNK];
    Ask ask = asks[blockIdx.y];
    if (!(ask.flags & ASK_PRESENT)) return;
    u32 first = blockIdx.x * CHUNK;
    u32 end = first + CHUNK < vocab ? first + CHUNK : vocab;
    u32 real = real_ids(ask, vocab);
    bool whole = ask.flags & ASK_DISTRIBUTION;
    float* row = logits + static_cast<u64>(blockIdx.y) * vocab;
    u64 best = 0, top = 0;
    u32 bad = 0;
    for (u32 i = threadIdx.x; i < CHUNK; i += CHUNK_THREADS) {
        u32 id = first + i;
        float value = id < end ? row[id] : MINUS_INFINITY;
        if (id < end) {
            take_out(row, answers[blockIdx.y], &value, id, column, vocab);
            u64 key = rank_key(value, id);
            top = Larger()(top, key);
            if (id < real) best = Larger()(best, key);
            if ((whole || id < real) && !(value < INFINITE)) bad = 1;
        }
        values[i] = value;
    }
    Part part;
    part.best = over_block<CHUNK_THREADS>(best, Larger());
    part.top = over_block<CHUNK_THREADS>(top, Larger());
    part.bad = over_block<CHUNK_THREADS>(bad, Larger());
    part.sum = part.weighted = 0.0f;
    part.pad = 0;
    float max = key_logit(part.top);
    if (whole && !part.bad && max > MINUS_INFINITY) {
        float sum = 0.0f, weighted = 0.0f;
        for (u32 i = threadIdx.x; i < end - first; i += CHUNK_THREADS) {
            float shift = fmaxf(values[i] - max, FAR);
            float p = expf(shift);
            sum += p;
            weighted += p * shift;
        }
        part.sum = over_block<CHUNK_THREADS>(sum, Plus());
        part.weighted = over_block<CHUNK_THREADS>(weighted, Plus());
    }
    if (threadIdx.x == 0) parts[blockIdx.y * gridDim.x + blockIdx.x] = part;
    u32 len = ask.top_k > ask.real_top_k ? ask.top_k : ask.real_top_k;
    if (len == 0) return;
    u64* run = runs + (static_cast<u64>(blockIdx.y) * (gridDim.x + 1) + blockIdx.x) * TOP_MAX;
    write_run(values, first, end, run, len);
    if (ask.real_top_k > 0 && first < real && real < end) {
        write_run(values, first, real, run + (gridDim.x - blockIdx.x) * TOP_MAX, len);
    }
}

// The highest entries of a row below id `end`, minus infinity left out. Returns how many there are.
__device__ u32 list_highest(const float* row, const u64* runs, u32 chunks, u32 end, u32 len, u32 want, u32 vocab,
                            Candidate* list) {
    __shared__ u64 keys[ROUND_MAX];
    u32 first = threadIdx.x * CHUNK;
    Run run = {runs, 0};
    if (want > 0 && threadIdx.x < chunks && first < end) {
        u32 last = first + CHUNK < vocab ? first + CHUNK : vocab;
        // All keys of a chunk that has fewer than there are places are followed by zeros.
        run.keys = runs + (last <= end ? threadIdx.x : chunks) * TOP_MAX;
        run.len = count_from(run.keys, lowest_key(MINUS_INFINITY) + (1ull << 32), 0, len);
    }
    u32 found = next_ranks(run, KEY_END, want, keys);
    if (found > want) found = want;
    for (u32 i = threadIdx.x; i < found; i += ROW_THREADS) {
        u32 id = key_id(keys[i]);
        list[i].id = id;
        list[i].logit = row[id];
    }
    __syncthreads();
    return found;
}

// The softmax of a row from its chunks: with M the largest entry, Z the sum of e^(x - M) and W that of (x - M) e^(x - M),
// logsumexp is M + ln Z and the entropy ln Z - W / Z. The first thread has the result.
__device__ void distribution(const Part* parts, u32 chunks, float largest, float* log_sum_exp, float* entropy) {
    __shared__ double sums[ROW_THREADS];
    __shared__ double weights[ROW_THREADS];
    if (threadIdx.x < chunks) {
        Part part = parts[threadIdx.x];
        float max = key_logit(part.top);
        double shift = static_cast<double>(max) - static_cast<double>(largest);
        double factor = part.sum > 0.0f ? exp(shift) : 0.0;
        double sum = static_cast<double>(part.sum);
        sums[threadIdx.x] = factor > 0.0 ? factor * sum : 0.0;
        weights[threadIdx.x] = factor > 0.0 ? factor * (static_cast<double>(part.weighted) + shift * sum) : 0.0;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        double sum = 0.0, weighted = 0.0;
        for (u32 chunk = 0; chunk < chunks; ++chunk) {
            sum += sums[chunk];
            weighted += weights[chunk];
        }
        double ln = log(sum);
        double nats = ln - weighted / sum;
        *log_sum_exp = static_cast<float>(static_cast<double>(largest) + ln);
        *entropy = nats > 0.0 ? static_cast<float>(nats) : 0.0f;
    }
}

// Grid (outputs). Puts the chunks of a row together; `chunks` is at most ROW_THREADS.
KERNEL(512, 1) head_answer(const float* logits, const Ask* asks, const Part* parts, const u64* runs, Answer* answers,
                           Candidate* tops, Candidate* real_tops, u32 vocab, u32 chunks) {
    u32 output = blockIdx.x;
    Ask ask = asks[output];
    if (!(ask.flags & ASK_PRESENT)) return;
    u32 real = real_ids(ask, vocab);
    const float* row = logits + static_cast<u64>(output) * vocab;
    parts += output * chunks;
    runs += static_cast<u64>(output) * (chunks + 1) * TOP_MAX;
    Part own = {};
    if (threadIdx.x < chunks) own = parts[threadIdx.x];
    u64 best = over_block<ROW_THREADS>(own.best, Larger());
    u64 top = over_block<ROW_THREADS>(own.top, Larger());
    u32 bad = over_block<ROW_THREADS>(own.bad, Larger());
    u32 fault = FAULT_NONE;
    if (best <= lowest_key(MINUS_INFINITY) + 0xffffffffull) fault = FAULT_EMPTY;
    if (bad) fault = FAULT_NOT_FINITE;
    Answer& answer = answers[output];
    float log_sum_exp = 0.0f, entropy = 0.0f;
    if (fault == FAULT_NONE && (ask.flags & ASK_DISTRIBUTION)) {
        distribution(parts, chunks, key_logit(top), &log_sum_exp, &entropy);
    }
    u32 found = 0, real_found = 0;
    u32 len = ask.top_k > ask.real_top_k ? ask.top_k : ask.real_top_k;
    if (fault == FAULT_NONE && len > 0) {
        u64 place = static_cast<u64>(output) * TOP_MAX;
        found = list_highest(row, runs, chunks, vocab, len, ask.top_k, vocab, tops + place);
        real_found = list_highest(row, runs, chunks, real, len, ask.real_top_k, vocab, real_tops + place);
    }
    if (threadIdx.x != 0) return;
    answer.fault = fault;
    answer.argmax = fault == FAULT_NONE ? key_id(best) : 0;
    answer.highest = fault == FAULT_NONE ? row[key_id(best)] : 0.0f;
    answer.log_sum_exp = log_sum_exp;
    answer.entropy = entropy;
    answer.target = ask.target < vocab ? row[ask.target] : 0.0f;
    answer.tops = found;
    answer.real_tops = real_found;
}
