// What the software driver and a compiled kernel file know of each other.
// Owner: tests/cuda-sim. Invariant: plain data, the same in both.
#pragma once
#include <stddef.h>

struct uint3 {
    unsigned x, y, z;
};
struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

// One entry point of a kernel file. `sizes` holds the bytes of each argument.
struct simt_entry {
    const char* name;
    void (*invoke)(void** params);
    const unsigned* sizes;
    const bool* pointers; // which arguments are pointers
    unsigned count;
    unsigned threads; // of __launch_bounds__
};
// What a compiled kernel file offers, by the symbol `simt_module`.
struct simt_launch;
struct simt_module_table {
    unsigned count;
    const simt_entry* entries;
    int (*run)(const simt_launch&);
    void (*where)(unsigned at[6]); // block and thread that run now
};
// One launch. `schedule`: 0 forward, 1 reverse, others seed a random order.
struct simt_launch {
    const simt_entry* entry;
    dim3 grid, block;
    size_t dynamic_bytes;
    unsigned schedule;
    void** params;
    char* report;
    size_t report_bytes;
};
