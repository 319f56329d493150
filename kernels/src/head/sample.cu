// Drawing tokens from rows of logits. The order of the rules, the weights and all sums are those of the sampler on the host,
// operation by operation, so that equal logits give the same token there and here.
// Owner: HeadKernels in cuda.rs. Invariant: no product is fused with a sum here (the program is compiled with --fmad=false),
// sums have the order of the host's, and `Draw::log_min_p` comes from the host, whose logarithm may differ from that of a
// device. Rows that are padding or no distribution, and plain greedy ones, cost nothing but the launch. A row without a token
// has token 0, so that whoever embeds tokens needs to know nothing of faults.

#include "ranks.cuh"

// Weights below exp(-45) of the highest are dropped.
#define LOG_WEIGHT_MIN (-45.0f)
// Tokens per partial sum of weights, and numbers that are summed next to each other in it.
#define SUM_BLOCK 512u
#define LANES 16u
// From so many tokens on, top-p without top-k is measured on the partial sums.
#define SCAN_MAX 128u
// Tokens that a round beyond the first takes at least.
#define ROUND_MIN 1024u
// Most rounds of a row.
#define ROUNDS (2u + ROW_THREADS * CHUNK / ROUND_MIN)

// Turns logits into weights relative to the highest.
struct Scale {
    float max;
    float inverse_temperature;
    float floor;  // logits below this weigh nothing
};

__device__ __forceinline__ Scale make_scale(float max, const Draw& draw) {
    float drop = __fmul_rn(draw.log_min_p, draw.temperature);
    return {max, 1.0f / draw.temperature, fminf(__fadd_rn(max, drop), max)};
}

// e^x for -90 <= x <= 0, as on the host: 2^n e^r with a polynomial for e^r (Cephes expf).
__device__ __forceinline__ float weight_exp(float x) {
    const float magic = 12582912.0f;
    float shifted = __fadd_rn(__fmul_rn(x, 1.44269504088896340736f), magic);
    float n = __fsub_rn(shifted, magic);
    float r = __fadd_rn(__fsub_rn(x, __fmul_rn(n, 0.6933594f)), __fmul_rn(n, 2.1219444e-4f));
    float p = 1.9875692e-4f;
    p = __fadd_rn(__fmul_rn(p, r), 1.3981999e-3f);
    p = __fadd_rn(__fmul_rn(p, r), 8.333452e-3f);
    p = __fadd_rn(__fmul_rn(p, r), 4.1665796e-2f);
    p = __fadd_rn(__fmul_rn(p, r), 1.6666665e-1f);
    p = __fadd_rn(__fmul_rn(p, r), 5e-1f);
    u32 exponent = (__float_as_uint(shifted) << 23) + 0x3f800000u;
    float y = __fadd_rn(__fadd_rn(__fmul_rn(__fmul_rn(p, r), r), r), 1.0f);
    return __fmul_rn(y, __uint_as_float(exponent));
}

__device__ __forceinline__ float weigh(const Scale& scale, float logit) {
    if (!(logit >= scale.floor)) return 0.0f;
    float power = __fmul_rn(__fsub_rn(logit, scale.max), scale.inverse_temperature);
    return weight_exp(fmaxf(power, 2.0f * LOG_WEIGHT_MIN));
}

// Whether the draw of an output is to be worked out here: not by the highest raw logit.
__device__ __forceinline__ bool is_adjusted(const Ask& ask, const Draw& draw, const Answer& answer) {
    return (ask.flags & ASK_PRESENT) && (draw.flags & DRAW_ADJUSTED) && answer.fault == FAULT_NONE;
}

// Whether all tokens of some weight are drawn from, in the order of their ids.
__device__ __forceinline__ bool draws_from_all(const Draw& draw) { return draw.top_k == 0 && draw.top_p >= 1.0f; }

__device__ __forceinline__ float edited(float logit, const Edit& edit) {
    logit = __fadd_rn(logit, edit.bias);
    if (logit != MINUS_INFINITY) {
        if (edit.repetition != 1.0f) {
            logit = logit > 0.0f ? logit / edit.repetition : __fmul_rn(logit, edit.repetition);
        }
        logit = __fsub_rn(logit, edit.minus);
    }
    return edit.ban ? MINUS_INFINITY : logit;
}

// The first edit of an id that is not below `id`; edits are in the order of their ids.
__device__ u32 first_edit(const Edit* edits, u32 count, u32 id) {
    u32 low = 0, high = count;
    while (low < high) {
        u32 middle = (low + high) / 2;
        if (edits[middle].id < id) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

// Applies the edits of the ids of a chunk. Edits of the same id are next to each other and belong to one thread.
__device__ void apply_edits(float* values, u32 first, u32 end, const Edit* edits, u32 count) {
    u32 from = first_edit(edits, count, first);
    u32 to = first_edit(edits, count, end);
    for (u32 i = from + threadIdx.x; i < to; i += CHUNK_THREADS) {
        u32 id = edits[i].id;
        if (i > from && edits[i - 1].id == id) continue;
        float value = values[id - first];
        for (u32 next = i; next < to && edits[next].id == id; ++next) value = edited(value, edits[next]);
        values[id - first] = value;
    }
}

// Grid (chunks, outputs). The adjusted logits of the tokens go to `work` [outputs, vocab], what is highest and whether
// there is a NaN to `parts`, and where ranks matter the sorted keys to `runs` [outputs, chunks, CHUNK].
KERNEL(256) sample_adjust(const float* logits, const Ask* asks, const Draw* draws, const Edit* edits, const u32* masks,
                          const Answer* answers, float* work, Part* parts, u64* runs, u32 vocab) {
    __shared__ float values[CHUNK];
    u32 output = blockIdx.y;
    Ask ask = asks[output];
    Draw draw = draws[output];
    u32 real = real_ids(ask, vocab);
    u32 first = blockIdx.x * CHUNK;
    if (!is_adjusted(ask, draw, answers[output]) || first >= real) return;
    u32 end = first + CHUNK < real ? first + CHUNK : real;
    u64 row = static_cast<u64>(output) * vocab;
    for (u32 i = threadIdx.x; i < CHUNK; i += CHUNK_THREADS) {
        values[i] = first + i < end ? logits[row + first + i] : MINUS_INFINITY;
    }
    __syncthreads();
    apply_edits(values, first, end, edits + draw.edit_first, draw.edit_count);
    __syncthreads();
    u64 best = 0;
    u32 bad = 0;
    for (u32 i = threadIdx.x; i < CHUNK; i += CHUNK_THREADS) {
        u32 id = first + i;
        if (id >= end) continue;
        float value = values[i];
        if (draw.mask_first != NONE && !(masks[draw.mask_first + id / 32] >> (id % 32) & 1)) {
            values[i] = value = MINUS_INFINITY;
        }
        work[row + id] = value;
        best = Larger()(best, rank_key(value, id));
        if (value != value) bad = 1;
    }
    best = over_block<CHUNK_THREADS>(best, Larger());
    bad = over_block<CHUNK_THREADS>(bad, Larger());
    if (threadIdx.x == 0) {
        Part& part = parts[output * gridDim.x + blockIdx.x];
        part.best = best;
        part.bad = bad;
    }
    if ((draw.flags & DRAW_GREEDY) || draws_from_all(draw)) return;
    write_run(values, first, end, runs + (static_cast<u64>(output) * gridDim.x + blockIdx.x) * CHUNK, CHUNK);
}

// What the chunks of an adjusted row say together.
struct Best {
    u64 key;
    u32 fault;
    float value;  // what is not finite
};

template <u32 THREADS> __device__ Best best_of(const Part* parts, u32 chunks) {
    u64 key = 0;
    u32 bad = 0;
    for (u32 chunk = threadIdx.x; chunk < chunks; chunk += THREADS) {
        key = Larger()(key, parts[chunk].best);
        bad |= parts[chunk].bad;
    }
    Best best;
    best.key = over_block<THREADS>(key, Larger());
    bad = over_block<THREADS>(bad, Larger());
    best.fault = DRAW_FAULT_NONE;
    best.value = key_logit(best.key);
    if (bad) {
        best.fault = DRAW_FAULT_NOT_FINITE;
        best.value = __uint_as_float(0x7fc00000u);
    } else if (!(best.value > MINUS_INFINITY)) {
        best.fault = DRAW_FAULT_NOTHING_LEFT;
    } else if (!(best.value < INFINITE)) {
        best.fault = DRAW_FAULT_NOT_FINITE;
    }
    return best;
}

// Grid (chunks, outputs). Sums of weights of SUM_BLOCK tokens each, to `sums` [outputs, 2 chunks], where they are needed.
KERNEL(256) sample_weigh(const Ask* asks, const Draw* draws, const Answer* answers, const float* work, const Part* parts,
                         double* sums, u32 vocab) {
    // Distance of the sum blocks: lanes of two of them use different banks.
    const u32 stride = SUM_BLOCK + LANES;
    __shared__ float weights[CHUNK / SUM_BLOCK * stride];
    __shared__ float lanes[CHUNK / SUM_BLOCK * LANES];
    u32 output = blockIdx.y;
    Ask ask = asks[output];
    Draw draw = draws[output];
    u32 real = real_ids(ask, vocab);
    u32 first = blockIdx.x * CHUNK;
    if (!is_adjusted(ask, draw, answers[output]) || (draw.flags & DRAW_GREEDY) || draw.top_k != 0 || first >= real) return;
    Best best = best_of<CHUNK_THREADS>(parts + output * gridDim.x, (real + CHUNK - 1) / CHUNK);
    if (best.fault != DRAW_FAULT_NONE) return;
    Scale scale = make_scale(best.value, draw);
    const float* row = work + static_cast<u64>(output) * vocab;
    for (u32 i = threadIdx.x; i < CHUNK; i += CHUNK_THREADS) {
        weights[i / SUM_BLOCK * stride + i % SUM_BLOCK] = first + i < real ? weigh(scale, row[first + i]) : 0.0f;
    }
    __syncthreads();
    if (threadIdx.x < CHUNK / SUM_BLOCK * LANES) {
        const float* own = weights + threadIdx.x / LANES * stride + threadIdx.x % LANES;
        float sum = 0.0f;
        for (u32 i = 0; i < SUM_BLOCK; i += LANES) sum = __fadd_rn(sum, own[i]);
        lanes[threadIdx.x] = sum;
    }
    __syncthreads();
    if (threadIdx.x < CHUNK / SUM_BLOCK) {
        double sum = 0.0;
        for (u32 lane = 0; lane < LANES; ++lane) sum += static_cast<double>(lanes[threadIdx.x * LANES + lane]);
        sums[(output * gridDim.x + blockIdx.x) * (CHUNK / SUM_BLOCK) + threadIdx.x] = sum;
    }
}

// A token by rank: it, its number counted from 1, and the running weight.
struct Place {
    double mass;
    u32 rank;
    u32 token;
};

// What the threads of a block share while they draw.
struct Table {
    union {
        u64 keys[ROUND_MAX];     // of the round at hand, by rank
        double sums[ROUND_MAX];  // of sum blocks
    };
    float weights[ROUND_MAX];
    // Of finished rounds: lowest key, running weight and number of tokens at the end.
    u64 ends[ROUNDS];
    double masses[ROUNDS];
    u32 ranks[ROUNDS];
    // What the first thread found.
    Place place;
    u32 stop;
};

// The partial sums of a row as shared memory; returns their sum.
__device__ double load_sums(Table& table, const double* sums, u32 count) {
    for (u32 i = threadIdx.x; i < count; i += ROW_THREADS) table.sums[i] = sums[i];
    __syncthreads();
    if (threadIdx.x == 0) {
        double total = 0.0;
        for (u32 i = 0; i < count; ++i) total += table.sums[i];
        table.place.mass = total;
    }
    __syncthreads();
    double total = table.place.mass;
    __syncthreads();
    return total;
}

// Inverse transform sampling over all tokens in the order of their ids: finds the sum block, then the token in it.
__device__ u32 pick_from_all(Table& table, const Scale& scale, const float* row, u32 real, double left) {
    u32 count = (real + SUM_BLOCK - 1) / SUM_BLOCK;
    u32 last = NONE;
    for (u32 block = 0;; ++block) {
        // Only the first thread's `left` and `last` mean anything.
        if (threadIdx.x == 0) {
            for (; block < count && left >= table.sums[block]; ++block) left -= table.sums[block];
            table.place.rank = block;
        }
        __syncthreads();
        block = table.place.rank;
        if (block >= count) break;
        u32 first = block * SUM_BLOCK;
        u32 len = real - first < SUM_BLOCK ? real - first : SUM_BLOCK;
        for (u32 i = threadIdx.x; i < len; i += ROW_THREADS) table.weights[i] = weigh(scale, row[first + i]);
        __syncthreads();
        if (threadIdx.x == 0) {
            table.stop = 0;
            for (u32 i = 0; i < len; ++i) {
                double weight = static_cast<double>(table.weights[i]);
                if (weight > 0.0) last = first + i;
                if (left < weight) {
                    table.stop = 1;
                    break;
                }
                left -= weight;
            }
        }
        __syncthreads();
        if (table.stop) break;
    }
    if (threadIdx.x == 0) table.place.token = last;
    __syncthreads();
    return table.place.token;
}

// Tokens by rank with their running weight.
struct Walk {
    Run run;
    Scale scale;
    u32 loaded;    // the round in shared memory, or NONE
    u32 count;     // its tokens
    u32 finished;  // rounds whose ends are known
};

__device__ void load_round(Table& table, Walk& walk, u32 round) {
    __syncthreads();
    u64 end = round > 0 ? table.ends[round - 1] : KEY_END;
    walk.count = next_ranks(walk.run, end, round > 0 ? ROUND_MIN : SCAN_MAX, table.keys);
    for (u32 i = threadIdx.x; i < walk.count; i += ROW_THREADS) {
        table.weights[i] = weigh(walk.scale, key_logit(table.keys[i]));
    }
    __syncthreads();
    walk.loaded = round;
}

__device__ __forceinline__ bool reaches(double mass, double goal, bool beyond) {
    return beyond ? mass > goal : mass >= goal;
}

// Walks from the first token to that at which the running weight reaches the goal, or goes beyond it, but to the token of
// rank `limit` at most, which exists.
__device__ Place walk_to(Table& table, Walk& walk, double goal, bool beyond, u32 limit) {
    for (u32 round = 0;; ++round) {
        if (round < walk.finished && table.ranks[round] < limit && !reaches(table.masses[round], goal, beyond)) continue;
        if (walk.loaded != round) load_round(table, walk, round);
        if (threadIdx.x == 0) {
            double mass = round > 0 ? table.masses[round - 1] : 0.0;
            u32 rank = round > 0 ? table.ranks[round - 1] : 0;
            u32 i = 0;
            table.stop = 0;
            while (!table.stop && i < walk.count) {
                mass += static_cast<double>(table.weights[i++]);
                table.stop = ++rank == limit || reaches(mass, goal, beyond);
            }
            table.place = {mass, rank, key_id(table.keys[i - 1])};
            if (!table.stop) {
                table.masses[round] = mass;
                table.ranks[round] = rank;
                table.ends[round] = table.keys[i - 1];
            }
        }
        __syncthreads();
        bool stop = table.stop;
        Place place = table.place;
        __syncthreads();
        if (stop) return place;
        if (walk.finished <= round) walk.finished = round + 1;
    }
}

// Draws by rank from what min-p, top-k and top-p leave.
__device__ u32 pick_by_rank(Table& table, Walk walk, const Draw& draw, const double* sums, u32 real) {
    u32 weighty = over_block<ROW_THREADS>(walk.run.len, Plus());
    u32 limit = draw.top_k > 0 && draw.top_k < weighty ? draw.top_k : weighty;
    bool cut = !(draw.top_p >= 1.0f);
    Place last = {0.0, limit, NONE};
    // The weight of all, the token that ends top-p, the token that is drawn.
    for (u32 step = 0; step < 3; ++step) {
        if (step == 0 && cut && draw.top_k == 0 && weighty >= SCAN_MAX) {
            last.mass = load_sums(table, sums, (real + SUM_BLOCK - 1) / SUM_BLOCK);
        } else if (step != 1 || cut) {
            // No weight is beyond infinity: to the end.
            double goal = static_cast<double>(INFINITE);
            if (step == 1) goal = static_cast<double>(draw.top_p) * last.mass;
            if (step == 2) goal = draw.unit * last.mass;
            last = walk_to(table, walk, goal, step != 1, last.rank);
        }
    }
    return last.token;
}

// Grid (outputs). Draws; `chunks` is at most ROW_THREADS.
KERNEL(512, 1) sample_draw(const float* logits, const Ask* asks, const Draw* draws, const float* work, const Part* parts,
                           const u64* runs, const double* sums, Answer* answers, u32 vocab, u32 chunks) {
    __shared__ Table table;
    u32 output = blockIdx.x;
    Ask ask = asks[output];
    Draw draw = draws[output];
    Answer& answer = answers[output];
    if (!(ask.flags & ASK_PRESENT)) return;
    u64 row = static_cast<u64>(output) * vocab;
    Best best = {0, DRAW_FAULT_NONE, 0.0f};
    u32 token = answer.fault == FAULT_NONE ? answer.argmax : 0;
    if (is_adjusted(ask, draw, answer)) {
        u32 real = real_ids(ask, vocab);
        u32 used = (real + CHUNK - 1) / CHUNK;
        best = best_of<ROW_THREADS>(parts + output * chunks, used);
        token = best.fault == DRAW_FAULT_NONE ? key_id(best.key) : 0;
        if (best.fault == DRAW_FAULT_NONE && !(draw.flags & DRAW_GREEDY)) {
            Scale scale = make_scale(best.value, draw);
            const double* own = sums + output * chunks * (CHUNK / SUM_BLOCK);
            u32 drawn;
            if (draws_from_all(draw)) {
                double total = load_sums(table, own, (real + SUM_BLOCK - 1) / SUM_BLOCK);
                drawn = pick_from_all(table, scale, work + row, real, draw.unit * total);
            } else {
                Run run = {runs + (static_cast<u64>(output) * chunks + threadIdx.x) * CHUNK, 0};
                u32 first = threadIdx.x * CHUNK;
                u32 len = first >= real ? 0 : real - first < CHUNK ? real - first : CHUNK;
                run.len = count_from(run.keys, lowest_key(scale.floor), 0, len);
                drawn = pick_by_rank(table, {run, scale, NONE, 0, 0}, draw, own, real);
            }
            if (drawn != NONE) token = drawn;
        }
    }
    if (threadIdx.x != 0) return;
    answer.token = token;
    answer.token_logit = logits[row + token];
    answer.draw_fault = best.fault;
    answer.draw_value = best.fault == DRAW_FAULT_NONE ? 0.0f : best.value;
}
