// What a test may ask of the software CUDA device beyond the driver's own calls, and what libcublasLt needs of it.
// Owner: tests/cuda-sim. Invariant: names of calls are those of the driver without _v2.
#pragma once
#include <stddef.h>
#include <stdint.h>

#define CUDASIM_EXPORT extern "C" __attribute__((visibility("default")))

// The nth call of that name from now on (1 = the next) returns `code`; "kernel" stands for the running of a kernel. A
// code that no context survives makes the current context lost.
CUDASIM_EXPORT void cudasim_fail(const char* call, unsigned nth, int code);
// Calls of that name since the counters were reset. Besides the driver's names: "kernel", "pageable copy".
CUDASIM_EXPORT unsigned long long cudasim_calls(const char* call);
// Counters to zero, failures asked for and not met yet forgotten.
CUDASIM_EXPORT void cudasim_reset_counters();
// Everything in the context of a device returns `code` until it is reset.
CUDASIM_EXPORT void cudasim_lose(int device, int code);
// How many of "memory", "pinned", "stream", "event", "module", "graph", "context" exist.
CUDASIM_EXPORT unsigned long long cudasim_live(const char* what);
// What the last failure was: kernel, block, thread, address. Returns the bytes of the text, writes at most `bytes`.
CUDASIM_EXPORT size_t cudasim_last_report(char* to, size_t bytes);

// Order of threads and blocks: 0 forward, 1 reverse, others seed a random order.
CUDASIM_EXPORT void cudasim_schedule(unsigned schedule);
// When streams run: 0 as late as possible, 1 at once, 2 late, but others before the one that is waited for.
CUDASIM_EXPORT void cudasim_streams(unsigned mode);
// Fresh memory is filled with this byte (255 unless told).
CUDASIM_EXPORT void cudasim_poison(unsigned byte);
// A kernel that runs for so many seconds is broken off (60 unless told).
CUDASIM_EXPORT void cudasim_seconds(unsigned seconds);
CUDASIM_EXPORT void cudasim_devices(int count);
CUDASIM_EXPORT void cudasim_memory(unsigned long long bytes);
CUDASIM_EXPORT void cudasim_driver(int version);
CUDASIM_EXPORT void cudasim_capability(int major, int minor);

struct cudasim_range {
    uint64_t at;
    size_t bytes;
};
// Queues a call on a stream (or adds it to the graph being captured): `data` is copied, `ranges` must lie in device memory.
CUDASIM_EXPORT int cudasim_enqueue(void* stream, const char* what, void (*call)(const void* data), const void* data,
                                   size_t bytes, const cudasim_range* ranges, unsigned count);
