// Devices, contexts, errors, and what a test may ask for. Settings come from the environment (CUDASIM_DEVICES,
// CUDASIM_MEMORY, CUDASIM_DRIVER, CUDASIM_CAPABILITY, CUDASIM_FAIL, CUDASIM_SCHEDULE, CUDASIM_STREAMS, CUDASIM_POISON, CUDASIM_SECONDS).
// Owner: tests/cuda-sim (libcuda.so.1). Invariant: a context that was reset never comes back; its handle stays invalid.
#include "sim.h"
#include <stdlib.h>

namespace sim {
namespace {
unsigned long long number(const char* name, unsigned long long otherwise) {
    const char* text = getenv(name);
    return text && *text ? strtoull(text, nullptr, 0) : otherwise;
}

struct Count {
    unsigned long long calls = 0;
    std::map<unsigned long long, CUresult> fail; // at which call
};
std::mutex counts_mutex;
std::map<std::string, Count> counts;

// CUDASIM_FAIL=call:nth:code,...
void read_failures() {
    const char* text = getenv("CUDASIM_FAIL");
    std::string rest = text ? text : "";
    while (!rest.empty()) {
        std::string one = rest.substr(0, rest.find(','));
        rest = one.size() < rest.size() ? rest.substr(one.size() + 1) : "";
        char call[64];
        unsigned nth;
        int code;
        if (sscanf(one.c_str(), "%63[^:]:%u:%d", call, &nth, &code) == 3) counts[call].fail[nth] = code;
    }
}

struct Device {
    std::shared_ptr<Context> context;
    CUhandle handle = nullptr;
    int retained = 0;
};
std::mutex devices_mutex;
std::map<int, Device> devices;

thread_local CUhandle current = nullptr;

// Destroys what belongs to a context; its memory is unmapped.
void destroy(Device& device) {
    auto context = std::move(device.context);
    contexts().remove(device.handle);
    device = Device();
    std::lock_guard<std::recursive_mutex> lock(context->mutex);
    context->alive = false;
    lose(*context, CONTEXT_DESTROYED);
    auto mine = [&](const auto& object) { return object.context == context.get(); };
    functions().remove_if([&](const Function& f) { return f.module->context == context.get(); });
    events().remove_if(mine);
    graphs().remove_if(mine);
    execs().remove_if(mine);
    streams().remove_if(mine);
    modules().remove_if([&](Module& m) { return mine(m) && (m.alive = false, true); });
    free_all(*context);
}

bool known(CUdevice device) { return device >= 0 && device < settings().devices; }
} // namespace

Settings& settings() {
    static Settings s;
    static std::once_flag once;
    std::call_once(once, [] {
        s.devices = int(number("CUDASIM_DEVICES", 1));
        s.driver = int(number("CUDASIM_DRIVER", 12080));
        s.memory = number("CUDASIM_MEMORY", 1ull << 30);
        unsigned long long capability = number("CUDASIM_CAPABILITY", 90);
        s.major = int(capability / 10);
        s.minor = int(capability % 10);
        s.schedule = unsigned(number("CUDASIM_SCHEDULE", 0));
        s.streams = unsigned(number("CUDASIM_STREAMS", 0));
        s.poison = unsigned(number("CUDASIM_POISON", 0xFF));
        s.seconds = unsigned(number("CUDASIM_SECONDS", 60));
        read_failures();
    });
    return s;
}

// Never destroyed: threads may still call when the process ends.
#define TABLE(name, type, kind)                                                                                       \
    Table<type>& name() {                                                                                             \
        static Table<type>& table = *new Table<type>(kind);                                                           \
        return table;                                                                                                 \
    }
TABLE(contexts, Context, 1)
TABLE(streams, Stream, 2)
TABLE(events, Event, 3)
TABLE(modules, Module, 4)
TABLE(functions, Function, 5)
TABLE(graphs, Graph, 6)
TABLE(execs, Graph, 7)

Context::~Context() { free_all(*this); }

std::shared_ptr<Context> current_context() { return contexts().get(current); }

Here::Here() {
    if (!settings().initialised) {
        code = NOT_INITIALIZED;
        return;
    }
    context = current_context();
    if (!context) {
        code = INVALID_CONTEXT;
        return;
    }
    lock = std::unique_lock<std::recursive_mutex>(context->mutex);
    code = !context->alive ? CONTEXT_DESTROYED : context->lost;
}

CUresult count_call(const char* name) {
    std::lock_guard<std::mutex> lock(counts_mutex);
    Count& count = counts[name];
    count.calls++;
    auto found = count.fail.find(count.calls);
    if (found == count.fail.end()) return OK;
    CUresult code = found->second;
    count.fail.erase(found);
    return code;
}

CUresult Site::enter() const {
    settings();
    CUresult code = count_call(name);
    if (code && !survives(code)) {
        if (auto context = current_context()) {
            std::lock_guard<std::recursive_mutex> lock(context->mutex);
            report("%s: made to fail by the test", name);
            lose(*context, code);
        }
    }
    return code;
}
} // namespace sim

using namespace sim;

EXPORT CUresult cuInit(unsigned) {
    ENTER("cuInit");
    if (settings().devices == 0) return NO_DEVICE;
    settings().initialised = true;
    return OK;
}
EXPORT CUresult cuDriverGetVersion(int* version) {
    ENTER("cuDriverGetVersion");
    *version = settings().driver;
    return OK;
}
EXPORT CUresult cuDeviceGetCount(int* count) {
    ENTER("cuDeviceGetCount");
    if (!settings().initialised) return NOT_INITIALIZED;
    *count = settings().devices;
    return OK;
}
EXPORT CUresult cuDeviceGet(CUdevice* device, int ordinal) {
    ENTER("cuDeviceGet");
    if (!settings().initialised) return NOT_INITIALIZED;
    if (!known(ordinal)) return INVALID_DEVICE;
    *device = ordinal;
    return OK;
}
EXPORT CUresult cuDeviceGetName(char* name, int bytes, CUdevice device) {
    ENTER("cuDeviceGetName");
    if (!known(device)) return INVALID_DEVICE;
    snprintf(name, bytes, "Software Device %d", device);
    return OK;
}
EXPORT CUresult cuDeviceTotalMem_v2(size_t* bytes, CUdevice device) {
    ENTER("cuDeviceTotalMem");
    if (!known(device)) return INVALID_DEVICE;
    *bytes = settings().memory;
    return OK;
}
// CU_DEVICE_ATTRIBUTE_*, those of an H200 where they matter.
EXPORT CUresult cuDeviceGetAttribute(int* value, int attribute, CUdevice device) {
    ENTER("cuDeviceGetAttribute");
    if (!known(device)) return INVALID_DEVICE;
    static const std::map<int, int> values = {
        {1, 1024}, {2, 1024}, {3, 1024}, {4, 64}, {5, 0x7FFFFFFF}, {6, 65535}, {7, 65535}, // threads, block, grid
        {8, 48 * 1024}, {10, 32}, {12, 65536}, {13, 1980000}, {16, 132}, {31, 1}, {36, 3201000}, {37, 6144},
        {38, 60 << 20}, {39, 2048}, {41, 1}, {81, 233472}, {82, 65536}, {97, 232448}, {106, 32},
    };
    auto found = values.find(attribute);
    *value = found != values.end() ? found->second : 0;
    if (attribute == 75) *value = settings().major;
    if (attribute == 76) *value = settings().minor;
    return OK;
}

EXPORT CUresult cuDevicePrimaryCtxRetain(CUhandle* out, CUdevice ordinal) {
    ENTER("cuDevicePrimaryCtxRetain");
    if (!settings().initialised) return NOT_INITIALIZED;
    if (!known(ordinal)) return INVALID_DEVICE;
    std::lock_guard<std::mutex> lock(devices_mutex);
    Device& device = devices[ordinal];
    if (!device.context) {
        device.context = std::make_shared<Context>();
        static uint64_t contexts_made = 0;
        device.context->number = ++contexts_made;
        device.context->null_stream = std::make_shared<Stream>();
        device.context->null_stream->context = device.context.get();
        device.context->null_stream->blocking = true;
        device.context->streams.push_back(device.context->null_stream);
        device.handle = contexts().add(device.context);
    }
    device.retained++;
    *out = device.handle;
    return OK;
}
EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice ordinal) {
    ENTER("cuDevicePrimaryCtxRelease");
    if (!known(ordinal)) return INVALID_DEVICE;
    std::lock_guard<std::mutex> lock(devices_mutex);
    Device& device = devices[ordinal];
    if (device.context && --device.retained == 0) destroy(device);
    return OK; // also after a reset
}
EXPORT CUresult cuDevicePrimaryCtxReset_v2(CUdevice ordinal) {
    ENTER("cuDevicePrimaryCtxReset");
    if (!known(ordinal)) return INVALID_DEVICE;
    std::lock_guard<std::mutex> lock(devices_mutex);
    Device& device = devices[ordinal];
    if (device.context) destroy(device);
    return OK;
}
EXPORT CUresult cuCtxSetCurrent(CUhandle context) {
    ENTER("cuCtxSetCurrent");
    if (!settings().initialised) return NOT_INITIALIZED;
    if (context && !contexts().get(context)) return INVALID_CONTEXT;
    current = context;
    return OK;
}
EXPORT CUresult cuCtxGetCurrent(CUhandle* context) {
    ENTER("cuCtxGetCurrent");
    if (!settings().initialised) return NOT_INITIALIZED;
    *context = current;
    return OK;
}

namespace {
struct Name {
    CUresult code;
    const char *name, *text;
};
const Name NAMES[] = {
    {0, "CUDA_SUCCESS", "no error"},
    {1, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {3, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {101, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {200, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {201, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {214, "CUDA_ERROR_ECC_UNCORRECTABLE", "uncorrectable ECC error encountered"},
    {400, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {401, "CUDA_ERROR_ILLEGAL_STATE", "the operation cannot be performed in the present state"},
    {500, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {600, "CUDA_ERROR_NOT_READY", "device not ready"},
    {700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {701, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "too many resources requested for launch"},
    {709, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "context is destroyed"},
    {712, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", "part or all of the requested memory range is already mapped"},
    {713, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", "pointer does not correspond to a registered memory region"},
    {716, "CUDA_ERROR_MISALIGNED_ADDRESS", "misaligned address"},
    {719, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing"},
    {901, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "operation failed due to a previous error during capture"},
    {903, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED", "capture was not ended in the same stream as it began"},
    {904, "CUDA_ERROR_STREAM_CAPTURE_UNJOINED", "capturing stream has unjoined work"},
    {905, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION", "dependency created on uncaptured work in another stream"},
    {907, "CUDA_ERROR_CAPTURED_EVENT", "operation not permitted on an event last recorded in a capturing stream"},
    {908, "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD", "attempt to terminate a thread-local capture sequence from another thread"},
    {999, "CUDA_ERROR_UNKNOWN", "unknown error"},
};
CUresult name_of(CUresult code, const char** out, const char* Name::*which) {
    *out = nullptr;
    for (const Name& name : NAMES)
        if (name.code == code) return *out = name.*which, OK;
    return INVALID_VALUE;
}
} // namespace
EXPORT CUresult cuGetErrorName(CUresult code, const char** out) { return name_of(code, out, &Name::name); }
EXPORT CUresult cuGetErrorString(CUresult code, const char** out) { return name_of(code, out, &Name::text); }

CUDASIM_EXPORT void cudasim_fail(const char* call, unsigned nth, int code) {
    std::lock_guard<std::mutex> lock(counts_mutex);
    counts[call].fail[counts[call].calls + nth] = code;
}
CUDASIM_EXPORT unsigned long long cudasim_calls(const char* call) {
    std::lock_guard<std::mutex> lock(counts_mutex);
    return counts[call].calls;
}
CUDASIM_EXPORT void cudasim_reset_counters() {
    settings();
    std::lock_guard<std::mutex> lock(counts_mutex);
    counts.clear();
}
CUDASIM_EXPORT void cudasim_lose(int ordinal, int code) {
    std::shared_ptr<Context> context;
    {
        std::lock_guard<std::mutex> lock(devices_mutex);
        context = devices[ordinal].context;
    }
    if (!context) return;
    std::lock_guard<std::recursive_mutex> lock(context->mutex);
    report("device %d was lost because the test asked for it", ordinal);
    lose(*context, code);
}
CUDASIM_EXPORT unsigned long long cudasim_live(const char* what) {
    std::string kind = what;
    if (kind == "pinned") return pinned_count();
    if (kind == "stream") return streams().size();
    if (kind == "event") return events().size();
    if (kind == "module") return modules().size();
    if (kind == "graph") return graphs().size() + execs().size();
    if (kind == "context") return contexts().size();
    if (kind != "memory") return 0;
    std::lock_guard<std::mutex> lock(devices_mutex);
    unsigned long long live = 0;
    for (auto& [ordinal, device] : devices) {
        if (!device.context) continue;
        std::lock_guard<std::recursive_mutex> inner(device.context->mutex);
        live += device.context->memory.size();
    }
    return live;
}
CUDASIM_EXPORT size_t cudasim_last_report(char* to, size_t bytes) {
    Settings& s = settings();
    std::lock_guard<std::mutex> lock(s.mutex);
    if (bytes) snprintf(to, bytes, "%s", s.report.c_str());
    return s.report.size();
}
CUDASIM_EXPORT void cudasim_schedule(unsigned schedule) { settings().schedule = schedule; }
CUDASIM_EXPORT void cudasim_streams(unsigned mode) { settings().streams = mode; }
CUDASIM_EXPORT void cudasim_poison(unsigned byte) { settings().poison = byte; }
CUDASIM_EXPORT void cudasim_seconds(unsigned seconds) { settings().seconds = seconds; }
CUDASIM_EXPORT void cudasim_devices(int count) { settings().devices = count; }
CUDASIM_EXPORT void cudasim_memory(unsigned long long bytes) { settings().memory = bytes; }
CUDASIM_EXPORT void cudasim_driver(int version) { settings().driver = version; }
CUDASIM_EXPORT void cudasim_capability(int major, int minor) {
    settings().major = major;
    settings().minor = minor;
}
