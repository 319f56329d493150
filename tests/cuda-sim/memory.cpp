// Device and pinned memory: every allocation ends at a page without access and is filled with a pattern.
// Owner: tests/cuda-sim (libcuda.so.1). Invariant: bytes around an allocation keep their pattern, or it is reported.
#include "sim.h"
#include <sys/mman.h>

namespace sim {
namespace {
constexpr uint64_t PAGE = 4096, ALIGN = 16, ACCOUNT = 256;
constexpr unsigned char ZONE = 0xFD;
constexpr size_t ZONE_CHECKED = 64; // bytes in front that are looked at each time

std::mutex pinned_mutex;
std::map<uint64_t, Allocation> pinned;

uint64_t up(uint64_t value, uint64_t to) { return (value + to - 1) / to * to; }

// All addresses of devices and of pinned memory come from here, none twice: a stale one never meets other memory. A
// context takes chunks.
constexpr uint64_t ARENA = 1ull << 44, CHUNK = 1ull << 30;
std::mutex arena_mutex;
char* arena = nullptr;
std::vector<uint64_t> owners; // of chunks

// Addresses without access; null when there are no more.
char* take(Context& context, size_t bytes) {
    if (bytes > size_t(context.addresses_end - context.addresses)) {
        std::lock_guard<std::mutex> lock(arena_mutex);
        if (!arena) {
            void* at = mmap(nullptr, ARENA, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
            if (at == MAP_FAILED) return nullptr;
            arena = static_cast<char*>(at);
        }
        uint64_t first = owners.size(), count = up(bytes, CHUNK) / CHUNK;
        if (first + count > ARENA / CHUNK) return nullptr;
        owners.resize(first + count, context.number);
        context.addresses = arena + first * CHUNK;
        context.addresses_end = context.addresses + count * CHUNK;
    }
    context.addresses += bytes;
    return context.addresses - bytes;
}

// Gives the memory back; the addresses stay without access.
void unmap(const Allocation& a) {
    mmap(a.map, a.map_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}

// [page without access][zone][bytes][zone of < 16 bytes][page without access]
bool map(Context& context, size_t bytes, Allocation& made) {
    size_t room = up(up(bytes, ALIGN) + ZONE_CHECKED, PAGE);
    char* at = bytes < ARENA ? take(context, room + 2 * PAGE) : nullptr;
    if (!at) return false;
    char* begin = at + PAGE;
    if (mprotect(begin, room, PROT_READ | PROT_WRITE)) return false;
    char* data = begin + room - up(bytes, ALIGN);
    memset(begin, ZONE, data - begin);
    memset(data, settings().poison, bytes);
    memset(data + bytes, ZONE, begin + room - (data + bytes));
    made = {reinterpret_cast<uint64_t>(data), bytes, at, room + 2 * PAGE, &context};
    return true;
}

// Bytes of the zones that were written: looks at `front` bytes before the allocation.
bool zones_hold(const Allocation& a, size_t front) {
    const unsigned char* data = reinterpret_cast<const unsigned char*>(a.at);
    const unsigned char* end = reinterpret_cast<const unsigned char*>(a.map + a.map_bytes - PAGE);
    static const std::string pattern(PAGE + ZONE_CHECKED, char(ZONE));
    if (!memcmp(data - front, pattern.data(), front) && !memcmp(data + a.bytes, pattern.data(), end - data - a.bytes))
        return true;
    for (size_t i = 1; i <= front; i++)
        if (data[-ptrdiff_t(i)] != ZONE) return report("%zu bytes at %#lx: byte %zu in front of them was written",
                                                       a.bytes, a.at, i), false;
    for (const unsigned char* p = data + a.bytes; p < end; p++)
        if (*p != ZONE) return report("%zu bytes at %#lx: byte %zu behind their end was written", a.bytes, a.at,
                                      size_t(p - data - a.bytes)), false;
    return true;
}

const Allocation* find_in(const std::map<uint64_t, Allocation>& all, uint64_t at, size_t bytes) {
    auto next = all.upper_bound(at);
    if (next == all.begin()) return nullptr;
    const Allocation& a = std::prev(next)->second;
    return at - a.at <= a.bytes && bytes <= a.bytes - (at - a.at) ? &a : nullptr;
}
} // namespace

const Allocation* find(Context& context, uint64_t at, size_t bytes) { return find_in(context.memory, at, bytes); }

bool is_pinned(uint64_t at, size_t bytes) {
    std::lock_guard<std::mutex> lock(pinned_mutex);
    return find_in(pinned, at, bytes) != nullptr;
}

const char* foreign(Context& context, uint64_t at) {
    if (is_pinned(at, 0)) return nullptr;
    std::lock_guard<std::mutex> lock(arena_mutex);
    uint64_t offset = at - reinterpret_cast<uint64_t>(arena);
    if (!arena || offset >= ARENA) return "memory of the host that is not pinned";
    return offset / CHUNK < owners.size() && owners[offset / CHUNK] == context.number ? nullptr : "memory of another context";
}

size_t pinned_count() {
    std::lock_guard<std::mutex> lock(pinned_mutex);
    return pinned.size();
}

CUresult check_zones(Context& context, const char* when) {
    for (auto& [at, a] : context.memory) {
        if (zones_hold(a, ZONE_CHECKED)) continue;
        std::string what = settings().report;
        report("%s (found at %s)", what.c_str(), when);
        return lose(context, ILLEGAL_ADDRESS);
    }
    return OK;
}

void free_all(Context& context) {
    for (auto& [at, a] : context.memory) unmap(a);
    context.memory.clear();
    context.used = 0;
    std::lock_guard<std::mutex> lock(pinned_mutex);
    for (auto at = pinned.begin(); at != pinned.end();) {
        const Allocation& a = at->second;
        if (a.context == &context && a.map) unmap(a);
        at = a.context == &context ? pinned.erase(at) : std::next(at);
    }
}

// Where an address lies with respect to the allocations.
std::string describe(Context& context, uint64_t address) {
    char text[160];
    auto next = context.memory.upper_bound(address);
    if (next != context.memory.begin()) {
        const Allocation& a = std::prev(next)->second;
        uint64_t behind = address - a.at - a.bytes;
        if (address >= a.at + a.bytes && behind < 1 << 20) {
            snprintf(text, sizeof text, "%#lx, %lu bytes behind an allocation of %zu bytes", address, behind, a.bytes);
            return text;
        }
    }
    if (next != context.memory.end() && next->second.at - address < 1 << 20) {
        const Allocation& a = next->second;
        snprintf(text, sizeof text, "%#lx, %lu bytes before an allocation of %zu bytes", address, a.at - address, a.bytes);
        return text;
    }
    snprintf(text, sizeof text, "%#lx, in no allocation", address);
    return text;
}
} // namespace sim

using namespace sim;

EXPORT CUresult cuMemAlloc_v2(CUdeviceptr* out, size_t bytes) {
    ENTER_CONTEXT("cuMemAlloc");
    if (!out || bytes == 0) return INVALID_VALUE;
    if (CUresult code = forbid_in_capture()) return code;
    Context& c = *here.context;
    Allocation made;
    uint64_t cost = up(bytes, ACCOUNT);
    if (cost < bytes || c.used + cost > settings().memory || !map(c, bytes, made)) return OUT_OF_MEMORY;
    c.used += cost;
    c.memory[made.at] = made;
    *out = made.at;
    return OK;
}

// Waits for the device, as the driver does.
EXPORT CUresult cuMemFree_v2(CUdeviceptr at) {
    ENTER_CONTEXT("cuMemFree");
    if (CUresult code = forbid_in_capture()) return code;
    Context& c = *here.context;
    auto found = c.memory.find(at);
    if (found == c.memory.end()) {
        report("cuMemFree of %#llx, which is no allocation of this context", at);
        return INVALID_VALUE;
    }
    if (CUresult code = drain_all(c)) return code;
    Allocation a = found->second;
    bool sound = zones_hold(a, a.at - reinterpret_cast<uint64_t>(a.map) - PAGE);
    c.used -= up(a.bytes, ACCOUNT);
    c.memory.erase(found);
    unmap(a);
    return sound ? OK : lose(c, ILLEGAL_ADDRESS);
}

EXPORT CUresult cuMemGetInfo_v2(size_t* free, size_t* total) {
    ENTER_CONTEXT("cuMemGetInfo");
    *total = settings().memory;
    *free = here.context->used < *total ? *total - here.context->used : 0;
    return OK;
}

EXPORT CUresult cuMemHostAlloc(void** out, size_t bytes, unsigned) {
    ENTER_CONTEXT("cuMemHostAlloc");
    if (!out || bytes == 0) return INVALID_VALUE;
    if (CUresult code = forbid_in_capture()) return code;
    Allocation made;
    if (!map(*here.context, bytes, made)) return OUT_OF_MEMORY;
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned[made.at] = made;
    *out = reinterpret_cast<void*>(made.at);
    return OK;
}

EXPORT CUresult cuMemHostRegister_v2(void* at, size_t bytes, unsigned) {
    ENTER_CONTEXT("cuMemHostRegister");
    uint64_t begin = reinterpret_cast<uint64_t>(at);
    if (!at || bytes == 0) return INVALID_VALUE;
    if (CUresult code = forbid_in_capture()) return code;
    std::lock_guard<std::mutex> lock(pinned_mutex);
    auto next = pinned.lower_bound(begin + bytes);
    if (next != pinned.begin() && std::prev(next)->second.at + std::prev(next)->second.bytes > begin) {
        report("cuMemHostRegister of memory that is pinned already");
        return ALREADY_REGISTERED;
    }
    pinned[begin] = {begin, bytes, nullptr, 0, here.context.get()};
    return OK;
}

namespace {
// Does not wait: letting go what a queued copy still uses is an error.
CUresult unpin(Here& here, const char* what, void* at, bool registered) {
    if (CUresult code = forbid_in_capture()) return code;
    std::unique_lock<std::mutex> lock(pinned_mutex);
    auto found = pinned.find(reinterpret_cast<uint64_t>(at));
    if (found == pinned.end() || !found->second.map != registered) {
        report("%s of %p, which is no such memory", what, at);
        return registered ? NOT_REGISTERED : INVALID_VALUE;
    }
    Allocation a = found->second;
    std::string by;
    if (in_use(*here.context, {a.at, a.bytes}, by)) {
        report("%s of memory that a queued %s uses", what, by.c_str());
        return INVALID_VALUE;
    }
    bool sound = registered || zones_hold(a, ZONE_CHECKED);
    pinned.erase(found);
    if (a.map) unmap(a);
    return sound ? OK : INVALID_VALUE;
}
} // namespace

EXPORT CUresult cuMemFreeHost(void* at) {
    ENTER_CONTEXT("cuMemFreeHost");
    return unpin(here, "cuMemFreeHost", at, false);
}
EXPORT CUresult cuMemHostUnregister(void* at) {
    ENTER_CONTEXT("cuMemHostUnregister");
    return unpin(here, "cuMemHostUnregister", at, true);
}

namespace {
CUresult missing(const char* what, uint64_t at, size_t bytes) {
    report("%s: %zu bytes at %#lx are not in an allocation of this context", what, bytes, at);
    return INVALID_VALUE;
}

// Checks now and when it runs that `device` ranges are allocated; then copies.
CUresult copy(Here& here, CUhandle stream, const char* what, void* to, const void* from, size_t bytes, bool to_device,
              bool from_device) {
    auto queue = stream_of(*here.context, stream);
    if (!queue) return INVALID_HANDLE;
    cudasim_range host{reinterpret_cast<uint64_t>(to_device ? from : to), to_device && from_device ? 0 : bytes};
    auto check = [=](Context& c) -> CUresult {
        if (to_device && !find(c, reinterpret_cast<uint64_t>(to), bytes))
            return missing(what, reinterpret_cast<uint64_t>(to), bytes);
        if (from_device && !find(c, reinterpret_cast<uint64_t>(from), bytes))
            return missing(what, reinterpret_cast<uint64_t>(from), bytes);
        return OK;
    };
    if (CUresult code = check(*here.context)) return code;
    bool pageable = host.bytes && !is_pinned(host.at, host.bytes);
    if (pageable) count_call("pageable copy");
    if (pageable && queue->capture) return queue->capture->invalid = true, CAPTURE_UNSUPPORTED;
    std::string name = what;
    return enqueue(queue, {name, [=](Context& c) -> CUresult {
                               if (check(c)) return ILLEGAL_ADDRESS;
                               return guarded(c, name, nullptr, [=] { return memmove(to, from, bytes), OK; });
                           }, host});
}

// On the null stream: behind all streams that block, and done when it returns.
CUresult copy_now(Here& here, const char* what, void* to, const void* from, size_t bytes, bool to_device) {
    if (CUresult code = forbid_in_capture()) return code;
    if (CUresult code = copy(here, nullptr, what, to, from, bytes, to_device, !to_device)) return code;
    return drain(*here.context->null_stream);
}
void* pointer(CUdeviceptr at) { return reinterpret_cast<void*>(at); }
} // namespace

EXPORT CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, size_t bytes, CUhandle stream) {
    ENTER_CONTEXT("cuMemcpyHtoDAsync");
    return copy(here, stream, "cuMemcpyHtoDAsync", pointer(to), from, bytes, true, false);
}
EXPORT CUresult cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, size_t bytes, CUhandle stream) {
    ENTER_CONTEXT("cuMemcpyDtoHAsync");
    return copy(here, stream, "cuMemcpyDtoHAsync", to, pointer(from), bytes, false, true);
}
EXPORT CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUhandle stream) {
    ENTER_CONTEXT("cuMemcpyDtoDAsync");
    return copy(here, stream, "cuMemcpyDtoDAsync", pointer(to), pointer(from), bytes, true, true);
}
EXPORT CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void* from, size_t bytes) {
    ENTER_CONTEXT("cuMemcpyHtoD");
    return copy_now(here, "cuMemcpyHtoD", pointer(to), from, bytes, true);
}
EXPORT CUresult cuMemcpyDtoH_v2(void* to, CUdeviceptr from, size_t bytes) {
    ENTER_CONTEXT("cuMemcpyDtoH");
    return copy_now(here, "cuMemcpyDtoH", to, pointer(from), bytes, false);
}

namespace {
template <class T> CUresult fill(Here& here, const char* what, CUdeviceptr to, T value, size_t count, CUhandle stream) {
    auto queue = stream_of(*here.context, stream);
    if (!queue) return INVALID_HANDLE;
    if (to % sizeof(T)) return INVALID_VALUE;
    if (!find(*here.context, to, count * sizeof(T))) return missing(what, to, count * sizeof(T));
    std::string name = what;
    return enqueue(queue, {name, [=](Context& c) -> CUresult {
                               if (!find(c, to, count * sizeof(T)))
                                   return missing(name.c_str(), to, count * sizeof(T)), ILLEGAL_ADDRESS;
                               std::fill_n(static_cast<T*>(pointer(to)), count, value);
                               return OK;
                           }});
}
} // namespace

EXPORT CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t count, CUhandle stream) {
    ENTER_CONTEXT("cuMemsetD8Async");
    return fill(here, "cuMemsetD8Async", to, value, count, stream);
}
EXPORT CUresult cuMemsetD32Async(CUdeviceptr to, unsigned value, size_t count, CUhandle stream) {
    ENTER_CONTEXT("cuMemsetD32Async");
    return fill(here, "cuMemsetD32Async", to, value, count, stream);
}
