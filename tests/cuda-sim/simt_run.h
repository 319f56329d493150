// Runs one block of a kernel on the CPU: a fiber per thread, switched by hand at barriers and warp-collectives.
// Owner: tests/cuda-sim. Part of simt.h; everything here lives once in each compiled kernel file.
// Invariant: a block ends with all threads returned, or with a report that names the kernel; it never hangs.
#pragma once
#include "simt_types.h"
#include <link.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <utility>
#if defined(__x86_64__) && !defined(SIMT_UCONTEXT)
#define SIMT_SWITCH_BY_HAND 1
#else
#include <ucontext.h>
#endif

#define SIMT_HIDDEN __attribute__((visibility("hidden")))
// The scheduler itself is not what is checked.
#define SIMT_PLAIN __attribute__((no_sanitize("undefined")))

SIMT_HIDDEN uint3 threadIdx, blockIdx;
SIMT_HIDDEN dim3 blockDim, gridDim;

namespace simt {
constexpr unsigned LANES = 32, MAX_THREADS = 1024, MAX_WARPS = MAX_THREADS / LANES;
constexpr size_t PAGE = 4096, STACK = 64 * 1024, DYNAMIC_MAX = 232 * 1024;
constexpr int LAUNCH_FAILED = 719;

enum Collective { SYNCWARP, SHUFFLE, VOTE, MMA };
inline const char* collective_name(int kind) {
    static const char* const names[] = {"__syncwarp", "__shfl_*_sync", "__ballot_sync/__any_sync/__all_sync", "mma"};
    return names[kind];
}

inline bool other_file(const char* a, const char* b) { return a != b && strcmp(a, b) != 0; }

struct Warp {
    unsigned lanes, runnable, exited, at_barrier, arrived;
    int kind, line;
    const char* file;
    unsigned turn;                       // which half of `slot` is in use
    unsigned long long slot[2][LANES];   // what the lanes handed in
    unsigned fragment[6][LANES];         // a[4], b[2] of an mma
    float product[2][16 * 8];
    void (*finish)(Warp&);               // run by the last lane that arrives
};

SIMT_HIDDEN __thread char shared_anchor; // in the block that holds all __shared__ variables
SIMT_HIDDEN char* shared_begin;          // of the thread that runs now
SIMT_HIDDEN size_t shared_bytes, shared_offset;

struct State {
    const simt_launch* launch;
    Warp warps[MAX_WARPS];
    unsigned warp_count, current, live, waiting;
    const char* barrier_file;
    int barrier_line;
    unsigned long long random;
    int code;
    char* stacks;
    unsigned stack_count;
    char* dynamic_end;
    char* dynamic;
#ifdef SIMT_SWITCH_BY_HAND
    void* sp[MAX_THREADS];
    void* main_sp;
#else
    ucontext_t context[MAX_THREADS], main_context;
#endif
};
SIMT_HIDDEN State state;

#ifdef SIMT_SWITCH_BY_HAND
extern "C" SIMT_HIDDEN void simt_switch(void** save, void* load);
asm(R"(
.text
.hidden simt_switch
.globl simt_switch
.type simt_switch,@function
simt_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size simt_switch,.-simt_switch
)");
inline void leave(unsigned from) { simt_switch(&state.sp[from], state.main_sp); }
inline void enter(unsigned to) { simt_switch(&state.main_sp, state.sp[to]); }
inline void jump(unsigned from, unsigned to) { simt_switch(&state.sp[from], state.sp[to]); }
#else
inline void leave(unsigned from) { swapcontext(&state.context[from], &state.main_context); }
inline void enter(unsigned to) { swapcontext(&state.main_context, &state.context[to]); }
inline void jump(unsigned from, unsigned to) { swapcontext(&state.context[from], &state.context[to]); }
#endif

SIMT_PLAIN inline void place(unsigned thread) {
    state.current = thread;
    threadIdx.x = thread % blockDim.x;
    threadIdx.y = thread / blockDim.x % blockDim.y;
    threadIdx.z = thread / blockDim.x / blockDim.y;
}

// Ends the block with a report; the fiber that calls it is never resumed.
__attribute__((noinline, noreturn, format(printf, 1, 2))) SIMT_HIDDEN void fail(const char* format, ...) {
    State& s = state;
    const simt_launch& l = *s.launch;
    int used = snprintf(l.report, l.report_bytes, "kernel %s, block (%u,%u,%u), thread (%u,%u,%u): ", l.entry->name,
                        blockIdx.x, blockIdx.y, blockIdx.z, threadIdx.x, threadIdx.y, threadIdx.z);
    if (used > 0 && size_t(used) < l.report_bytes) {
        va_list args;
        va_start(args, format);
        vsnprintf(l.report + used, l.report_bytes - used, format, args);
        va_end(args);
    }
    s.code = LAUNCH_FAILED;
    leave(s.current);
    __builtin_unreachable();
}

inline unsigned long long next_random() {
    unsigned long long x = state.random;
    x ^= x << 13;
    x ^= x >> 7;
    x ^= x << 17;
    return state.random = x;
}

// A runnable thread in warps first..last (step +-1), or MAX_THREADS.
SIMT_PLAIN inline unsigned first_runnable(unsigned from_warp, unsigned mask) {
    State& s = state;
    bool reverse = s.launch->schedule == 1;
    for (unsigned n = 0, w = from_warp; n <= s.warp_count; n++) {
        unsigned ready = s.warps[w].runnable & (n == 0 ? mask : ~0u);
        if (ready) return w * LANES + (reverse ? 31 - __builtin_clz(ready) : __builtin_ctz(ready));
        w = reverse ? (w == 0 ? s.warp_count - 1 : w - 1) : (w + 1 == s.warp_count ? 0 : w + 1);
    }
    return MAX_THREADS;
}

// The next thread to run after `thread` in the schedule; from the start of the order if `thread` is MAX_THREADS.
SIMT_PLAIN inline unsigned next_runnable(unsigned thread) {
    State& s = state;
    if (s.launch->schedule > 1) {
        unsigned long long r = next_random();
        return first_runnable(unsigned(r >> 32) % s.warp_count, ~0u << (r & 31));
    }
    bool reverse = s.launch->schedule == 1;
    if (thread == MAX_THREADS) return first_runnable(reverse ? s.warp_count - 1 : 0, ~0u);
    unsigned lane = thread % LANES;
    return first_runnable(thread / LANES, reverse ? (1u << lane) - 1 : ~(~0u >> (31 - lane)));
}

// Says why nothing can run: who waits where.
__attribute__((noinline, noreturn)) SIMT_HIDDEN void fail_stuck() {
    State& s = state;
    for (unsigned w = 0; w < s.warp_count; w++) {
        Warp& warp = s.warps[w];
        if (!warp.arrived) continue;
        fail("%s at %s:%d reached by lanes %08x of warp %u only (%08x are at a barrier, %08x have returned)",
             collective_name(warp.kind), warp.file, warp.line, warp.arrived, w, warp.at_barrier, warp.exited);
    }
    fail("__syncthreads at %s:%d reached by %u of %u live threads", s.barrier_file, s.barrier_line, s.waiting, s.live);
}

// Lets others run until this thread is runnable again.
__attribute__((noinline)) SIMT_HIDDEN SIMT_PLAIN void yield(unsigned after) {
    State& s = state;
    unsigned self = s.current, next = next_runnable(after);
    if (next == MAX_THREADS) fail_stuck();
    if (next == self) return;
    place(next);
    jump(self, next);
}

SIMT_PLAIN inline void release_barrier() {
    State& s = state;
    for (unsigned w = 0; w < s.warp_count; w++) {
        s.warps[w].runnable |= s.warps[w].at_barrier;
        s.warps[w].at_barrier = 0;
    }
    s.waiting = 0;
}

__attribute__((noinline)) SIMT_HIDDEN SIMT_PLAIN void barrier(const char* file, int line) {
    State& s = state;
    if (s.waiting == 0) {
        s.barrier_file = file;
        s.barrier_line = line;
    } else if (s.barrier_line != line || other_file(s.barrier_file, file)) {
        fail("divergent barrier: __syncthreads at %s:%d while others wait at %s:%d", file, line, s.barrier_file,
             s.barrier_line);
    }
    Warp& warp = s.warps[s.current / LANES];
    unsigned bit = 1u << (s.current % LANES);
    warp.runnable &= ~bit;
    warp.at_barrier |= bit;
    if (++s.waiting == s.live) {
        release_barrier();
        yield(MAX_THREADS);
    } else {
        yield(s.current);
    }
}

// All lanes of the warp meet; the last one runs `finish`. Returns the warp, whose results stay until the next meeting
// but one.
__attribute__((noinline)) SIMT_HIDDEN SIMT_PLAIN Warp& meet(Collective kind, unsigned mask, const char* file, int line) {
    State& s = state;
    Warp& warp = s.warps[s.current / LANES];
    unsigned bit = 1u << (s.current % LANES);
    if (mask != ~0u) fail("%s at %s:%d with mask %08x: only the full mask", collective_name(kind), file, line, mask);
    if (warp.exited) fail("%s at %s:%d, but lanes %08x have returned", collective_name(kind), file, line, warp.exited);
    if (warp.arrived == 0) {
        warp.kind = kind;
        warp.file = file;
        warp.line = line;
    } else if (warp.kind != kind || warp.line != line || other_file(warp.file, file)) {
        fail("divergent warp: %s at %s:%d while lanes %08x wait in %s at %s:%d", collective_name(kind), file, line,
             warp.arrived, collective_name(warp.kind), warp.file, warp.line);
    }
    warp.arrived |= bit;
    if (warp.arrived == warp.lanes) {
        if (warp.finish) warp.finish(warp);
        warp.finish = nullptr;
        warp.arrived = 0;
        warp.runnable = warp.lanes;
        warp.turn ^= 1;
    } else {
        warp.runnable &= ~bit;
        yield(s.current);
    }
    asm volatile("" ::: "memory");
    return warp;
}

inline void thread_main() {
    State& s = state;
    s.launch->entry->invoke(s.launch->params);
    unsigned self = s.current, bit = 1u << (self % LANES);
    Warp& warp = s.warps[self / LANES];
    warp.runnable &= ~bit;
    warp.exited |= bit;
    if (warp.arrived)
        fail("returned while lanes %08x of the warp wait in %s at %s:%d", warp.arrived, collective_name(warp.kind),
             warp.file, warp.line);
    if (--s.live == 0) leave(self);
    if (s.waiting == s.live) release_barrier();
    yield(self);
}

// Stacks for `threads` fibers, a page without access below each; kept for the next launches.
inline bool make_stacks(unsigned threads) {
    State& s = state;
    if (s.stack_count >= threads) return true;
    if (s.stacks) munmap(s.stacks, s.stack_count * STACK);
    s.stack_count = 0;
    void* at = mmap(nullptr, threads * STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    s.stacks = at == MAP_FAILED ? nullptr : static_cast<char*>(at);
    if (!s.stacks) return false;
    for (unsigned i = 0; i < threads; i++) mprotect(s.stacks + i * STACK, PAGE, PROT_NONE);
    s.stack_count = threads;
    return true;
}

// Dynamic shared memory ends at a page without access.
inline bool make_dynamic(size_t bytes) {
    State& s = state;
    if (bytes > DYNAMIC_MAX) return false;
    if (!s.dynamic_end) {
        size_t room = (DYNAMIC_MAX + PAGE - 1) / PAGE * PAGE;
        void* at = mmap(nullptr, room + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (at == MAP_FAILED) return false;
        s.dynamic_end = static_cast<char*>(at) + room;
        mprotect(s.dynamic_end, PAGE, PROT_NONE);
    }
    s.dynamic = s.dynamic_end - (bytes + 15) / 16 * 16;
    return true;
}

// When the module is unloaded; a process can have only so many mappings.
__attribute__((destructor)) SIMT_HIDDEN void unmap_all() {
    State& s = state;
    if (s.stacks) munmap(s.stacks, s.stack_count * STACK);
    if (s.dynamic_end) munmap(s.dynamic_end - (DYNAMIC_MAX + PAGE - 1) / PAGE * PAGE, (DYNAMIC_MAX + PAGE - 1) / PAGE * PAGE + PAGE);
}

// Finds the thread-local block of this file in this thread. `dl_phdr_info` is asked once.
inline void find_shared() {
    if (!shared_bytes) {
        dl_iterate_phdr(
            [](dl_phdr_info* info, size_t, void*) {
                for (int i = 0; i < info->dlpi_phnum; i++) {
                    size_t bytes = info->dlpi_phdr[i].p_memsz;
                    size_t offset = &shared_anchor - static_cast<char*>(info->dlpi_tls_data);
                    if (info->dlpi_phdr[i].p_type != PT_TLS || !info->dlpi_tls_data || offset >= bytes) continue;
                    shared_bytes = bytes;
                    shared_offset = offset;
                }
                return 0;
            },
            nullptr);
    }
    shared_begin = &shared_anchor - shared_offset;
}

SIMT_PLAIN inline void prepare(unsigned thread) {
    State& s = state;
    // Tops of stacks at different cache lines of a page, so that they do not evict each other.
    char* top = s.stacks + (thread + 1) * STACK - thread * 320 % PAGE;
#ifdef SIMT_SWITCH_BY_HAND
    void** sp = reinterpret_cast<void**>(reinterpret_cast<size_t>(top) & ~size_t(63));
    *--sp = nullptr;
    *--sp = reinterpret_cast<void*>(&thread_main);
    sp -= 6;
    s.sp[thread] = sp;
#else
    getcontext(&s.context[thread]);
    s.context[thread].uc_stack.ss_sp = s.stacks + thread * STACK + PAGE;
    s.context[thread].uc_stack.ss_size = top - (s.stacks + thread * STACK + PAGE);
    s.context[thread].uc_link = nullptr;
    makecontext(&s.context[thread], thread_main, 0);
#endif
}

SIMT_PLAIN inline void run_block(unsigned threads) {
    State& s = state;
    memset(shared_begin, 0xFF, shared_bytes);
    memset(s.dynamic, 0xFF, s.dynamic_end - s.dynamic);
    s.warp_count = (threads + LANES - 1) / LANES;
    s.live = threads;
    s.waiting = 0;
    for (unsigned w = 0; w < s.warp_count; w++) {
        Warp& warp = s.warps[w];
        unsigned lanes = threads - w * LANES;
        warp.lanes = warp.runnable = lanes >= LANES ? ~0u : (1u << lanes) - 1;
        warp.exited = warp.at_barrier = warp.arrived = warp.turn = 0;
        warp.finish = nullptr;
    }
    for (unsigned i = 0; i < threads; i++) prepare(i);
    unsigned first = next_runnable(MAX_THREADS);
    place(first);
    enter(first);
}

// Runs all blocks of a launch. Returns 0, or 719 with a report.
inline int run(const simt_launch& launch) {
    State& s = state;
    s.launch = &launch;
    s.code = 0;
    s.random = 0x9E3779B97F4A7C15ull * (launch.schedule + 1) | 1;
    gridDim = launch.grid;
    blockDim = launch.block;
    unsigned long long threads = 1ull * blockDim.x * blockDim.y * blockDim.z;
    unsigned long long blocks = 1ull * gridDim.x * gridDim.y * gridDim.z;
    if (threads == 0 || threads > MAX_THREADS || !make_stacks(threads) || !make_dynamic(launch.dynamic_bytes)) {
        snprintf(launch.report, launch.report_bytes, "kernel %s: cannot run %llu threads, %zu bytes of shared memory",
                 launch.entry->name, threads, launch.dynamic_bytes);
        return LAUNCH_FAILED;
    }
    find_shared();
    unsigned long long start = launch.schedule > 1 ? next_random() % blocks : 0;
    for (unsigned long long i = 0; i < blocks && s.code == 0; i++) {
        unsigned long long b = launch.schedule == 1 ? blocks - 1 - i : (i + start) % blocks;
        blockIdx.x = b % gridDim.x;
        blockIdx.y = b / gridDim.x % gridDim.y;
        blockIdx.z = b / gridDim.x / gridDim.y;
        run_block(unsigned(threads));
    }
    return s.code;
}

inline void where(unsigned at[6]) {
    const unsigned now[6] = {blockIdx.x, blockIdx.y, blockIdx.z, threadIdx.x, threadIdx.y, threadIdx.z};
    memcpy(at, now, sizeof now);
}

template <class... A, size_t... I>
inline void unpack(void (*kernel)(A...), void** params, std::index_sequence<I...>) {
    kernel(*static_cast<std::remove_cv_t<A>*>(params[I])...);
    (void)params;
}
template <auto KERNEL_FUNCTION> struct Signature;
template <class... A, void (*KERNEL_FUNCTION)(A...)> struct Signature<KERNEL_FUNCTION> {
    static void invoke(void** params) { unpack(KERNEL_FUNCTION, params, std::index_sequence_for<A...>{}); }
    static constexpr unsigned count = sizeof...(A);
    static constexpr unsigned sizes[sizeof...(A) + 1] = {unsigned(sizeof(A))..., 0};
    static constexpr bool pointers[sizeof...(A) + 1] = {std::is_pointer_v<A>..., false};
};
} // namespace simt

// The table row of a kernel.
#define SIMT_ENTRY(kernel, threads)                                                                                  \
    simt_entry {                                                                                                      \
        #kernel, simt::Signature<&kernel>::invoke, simt::Signature<&kernel>::sizes,                                   \
            simt::Signature<&kernel>::pointers, simt::Signature<&kernel>::count, unsigned(threads)                    \
    }
