// The parts of the software CUDA driver: contexts, memory, streams, events, modules, graphs.
// Owner: tests/cuda-sim (libcuda.so.1). Invariant: handles are numbers that are never given twice, so one that was
// destroyed is known as such; everything of a context is used under its lock.
#pragma once
#include "cudasim.h"
#include "simt_types.h"
#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string.h>
#include <string>
#include <unordered_map>
#include <vector>

typedef int CUresult;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef struct CUopaque* CUhandle;

enum : CUresult {
    OK = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
    ILLEGAL_ADDRESS = 700,
    OUT_OF_RESOURCES = 701,
    CONTEXT_DESTROYED = 709,
    ALREADY_REGISTERED = 712,
    NOT_REGISTERED = 713,
    MISALIGNED = 716,
    LAUNCH_FAILED = 719,
    CAPTURE_UNSUPPORTED = 900,
    CAPTURE_INVALIDATED = 901,
    CAPTURE_UNMATCHED = 903,
    CAPTURE_UNJOINED = 904,
    CAPTURE_ISOLATION = 905,
    CAPTURED_EVENT = 907,
    CAPTURE_WRONG_THREAD = 908,
};

namespace sim {
struct Context;
struct Stream;
struct Graph;

struct Settings {
    std::atomic<int> devices, driver, major, minor;
    std::atomic<unsigned long long> memory;
    std::atomic<unsigned> schedule, streams, poison, seconds;
    std::atomic<bool> initialised{false};
    std::mutex mutex; // of the report
    std::string report;
};
Settings& settings();

// Objects by handle.
template <class T> class Table {
  public:
    CUhandle add(std::shared_ptr<T> object) {
        std::lock_guard<std::mutex> lock(mutex);
        uint64_t handle = (next += 16);
        objects[handle] = std::move(object);
        return reinterpret_cast<CUhandle>(handle);
    }
    std::shared_ptr<T> get(CUhandle handle) {
        std::lock_guard<std::mutex> lock(mutex);
        auto found = objects.find(reinterpret_cast<uint64_t>(handle));
        return found == objects.end() ? nullptr : found->second;
    }
    void remove(CUhandle handle) {
        std::shared_ptr<T> last; // destroyed after the lock
        std::lock_guard<std::mutex> lock(mutex);
        auto found = objects.find(reinterpret_cast<uint64_t>(handle));
        if (found == objects.end()) return;
        last = std::move(found->second);
        objects.erase(found);
    }
    template <class F> void remove_if(F which) {
        std::vector<std::shared_ptr<T>> last;
        std::lock_guard<std::mutex> lock(mutex);
        for (auto at = objects.begin(); at != objects.end();) {
            if (!which(*at->second)) {
                ++at;
                continue;
            }
            last.push_back(std::move(at->second));
            at = objects.erase(at);
        }
    }
    size_t size() {
        std::lock_guard<std::mutex> lock(mutex);
        return objects.size();
    }
    explicit Table(uint64_t kind) : next(kind << 40) {}

  private:
    std::mutex mutex;
    uint64_t next;
    std::unordered_map<uint64_t, std::shared_ptr<T>> objects;
};

// Something queued on a stream. `host` is the host memory that it reads or writes.
struct Op {
    std::string what;
    std::function<CUresult(Context&)> run;
    cudasim_range host{0, 0};
};

struct Capture {
    std::shared_ptr<Graph> graph;
    Stream* origin;
    int mode;
    size_t thread;
    bool invalid = false;
};

struct Stream {
    ~Stream(); // ends what it captures
    Context* context;
    bool blocking;
    std::deque<Op> queue;
    uint64_t queued = 0, done = 0; // operations ever
    bool asked = false;            // cuStreamQuery since the last operation
    bool running = false;
    std::shared_ptr<Capture> capture;
    uint64_t captured = 0, joined = 0; // operations in the capture, and how many of them the origin waits for
};

struct Event {
    Context* context;
    bool timing;
    std::shared_ptr<Stream> stream; // where it was recorded last
    uint64_t position = 0;          // done when the stream has done so many
    bool recorded = false, asked = false;
    double time = 0;
    std::shared_ptr<Capture> capture;
    uint64_t captured = 0;
};

struct Graph {
    Context* context;
    std::vector<Op> ops;
};

struct Module {
    Context* context;
    void* library = nullptr;
    const simt_module_table* table = nullptr;
    bool alive = true;
    std::string path;
    ~Module();
};

struct Function {
    std::shared_ptr<Module> module;
    const simt_entry* entry;
    int dynamic_max = 48 * 1024;
};

struct Allocation {
    uint64_t at;
    size_t bytes;
    char* map; // null for memory that the program only registered
    size_t map_bytes;
    Context* context;
};

struct Context {
    uint64_t number; // never given twice
    std::recursive_mutex mutex;
    bool alive = true;
    CUresult lost = OK;
    std::map<uint64_t, Allocation> memory;
    unsigned long long used = 0;
    char *addresses = nullptr, *addresses_end = nullptr; // still to be given
    std::vector<std::weak_ptr<Stream>> streams;
    std::shared_ptr<Stream> null_stream;
    ~Context();
};

Table<Context>& contexts();
Table<Stream>& streams();
Table<Event>& events();
Table<Module>& modules();
Table<Function>& functions();
Table<Graph>& graphs();
Table<Graph>& execs();

// Whether a context can be used after this error.
bool survives(CUresult code);
void report(const char* format, ...) __attribute__((format(printf, 1, 2)));

// One function of the driver: counted, and made to fail when a test asked for it.
class Site {
  public:
    explicit Site(const char* name) : name(name) {}
    CUresult enter() const;

  private:
    const char* name;
};
// Counts a call of this name; the code that a test asked for, or 0.
CUresult count_call(const char* name);

// The current context of the thread, locked; `code` says why it cannot be used.
struct Here {
    std::shared_ptr<Context> context;
    std::unique_lock<std::recursive_mutex> lock;
    CUresult code;
    Here();
};
std::shared_ptr<Context> current_context();

// memory.cpp
const Allocation* find(Context& context, uint64_t at, size_t bytes);
bool is_pinned(uint64_t at, size_t bytes);
// Whose memory it is where no kernel of this context has access, whatever it does there; null if not so.
const char* foreign(Context& context, uint64_t at);
CUresult check_zones(Context& context, const char* when);
// Unmaps all memory of a context, pinned memory too.
void free_all(Context& context);
std::string describe(Context& context, uint64_t address);
size_t pinned_count();

// stream.cpp
std::shared_ptr<Stream> stream_of(Context& context, CUhandle handle);
CUresult enqueue(const std::shared_ptr<Stream>& stream, Op op);
CUresult run_until(Stream& stream, uint64_t position);
CUresult drain(Stream& stream);
CUresult drain_all(Context& context);
CUresult lose(Context& context, CUresult code);
// Whether a call that no capture allows is made while one goes on; invalidates it.
CUresult forbid_in_capture();
bool in_use(Context& context, cudasim_range host, std::string& by);

// fault.cpp
// Runs `body`; a signal in it becomes a code and a report that begins with `what`.
CUresult guarded(Context& context, const std::string& what, const Module* module, const std::function<CUresult()>& body);
} // namespace sim

#define EXPORT extern "C" __attribute__((visibility("default")))
// Begins a function of the driver.
#define ENTER(name)                                                                                                   \
    static const sim::Site site(name);                                                                                \
    if (CUresult code = site.enter()) return code
#define ENTER_CONTEXT(name)                                                                                           \
    ENTER(name);                                                                                                      \
    sim::Here here;                                                                                                   \
    if (here.code) return here.code
