// Runs a kernel from a program written by hand (try.sh), without a driver.
// Owner: tests/cuda-sim. Invariant: arguments have exactly the sizes of the kernel's.
#pragma once
#include "simt_run.h"

// Runs a kernel from a program written by hand; prints the report of a failure and returns its code.
template <auto KERNEL_FUNCTION, class... A>
inline int simt_try(const char* name, dim3 grid, dim3 block, size_t dynamic_bytes, unsigned schedule, A... args) {
    using S = simt::Signature<KERNEL_FUNCTION>;
    static_assert(sizeof...(A) == S::count, "number of arguments");
    void* params[] = {static_cast<void*>(&args)..., nullptr};
    for (unsigned i = 0, sizes[] = {unsigned(sizeof(A))..., 0}; i < S::count; i++)
        if (sizes[i] != S::sizes[i]) return fprintf(stderr, "%s: argument %u has another size\n", name, i), 1;
    char report[512] = "";
    simt_entry entry{name, S::invoke, S::sizes, S::pointers, S::count, 0};
    int code = simt::run({&entry, grid, block, dynamic_bytes, schedule, params, report, sizeof report});
    if (code) fprintf(stderr, "%s\n", report);
    return code;
}
#define SIMT_TRY(kernel, grid, block, dynamic_bytes, schedule, ...)                                                   \
    simt_try<&kernel>(#kernel, grid, block, dynamic_bytes, schedule, ##__VA_ARGS__)
