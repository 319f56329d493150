// Signals in kernels and copies become error codes with a report; a lost context stays lost.
// Owner: tests/cuda-sim (libcuda.so.1). Invariant: a signal outside of `guarded` goes where it went before.
#include "sim.h"
#include <algorithm>
#include <dlfcn.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <ucontext.h>
#include <unistd.h>

namespace sim {
namespace {
struct Fault {
    sigjmp_buf back;
    volatile bool active = false;
    int signal = 0;
    uint64_t address = 0, instruction = 0;
    bool write = false, general = false;
    // For the watchdog: the number of what runs now, 0 = nothing.
    std::atomic<uint64_t> running{0};
    uint64_t seen = 0;
    unsigned seconds = 0;
    pthread_t thread;
    Fault();
    ~Fault();
};

// Never destroyed: the watchdog runs until the process ends.
struct Watched {
    std::mutex mutex;
    std::vector<Fault*> threads;
};
Watched& watched() {
    static Watched& all = *new Watched;
    return all;
}
Fault::Fault() : thread(pthread_self()) {
    std::lock_guard<std::mutex> lock(watched().mutex);
    watched().threads.push_back(this);
}
Fault::~Fault() {
    std::lock_guard<std::mutex> lock(watched().mutex);
    auto& all = watched().threads;
    all.erase(std::remove(all.begin(), all.end(), this), all.end());
}
thread_local Fault fault;

constexpr int SIGNALS[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
const int TOO_LONG = SIGRTMIN + 7;
struct sigaction before[128];

// Interrupts what runs for longer than the settings allow.
void* watch(void*) {
    for (;;) {
        sleep(1);
        std::lock_guard<std::mutex> lock(watched().mutex);
        for (Fault* f : watched().threads) {
            uint64_t now = f->running;
            f->seconds = now && now == f->seen ? f->seconds + 1 : 0;
            f->seen = now;
            if (f->seconds >= settings().seconds) pthread_kill(f->thread, TOO_LONG);
        }
    }
    return nullptr;
}

void on_signal(int number, siginfo_t* info, void* context) {
    if (!fault.active && number == TOO_LONG) return;
    if (!fault.active) {
        // Not ours: as before this library came.
        struct sigaction& old = before[number];
        if (old.sa_flags & SA_SIGINFO) return old.sa_sigaction(number, info, context);
        sigaction(number, &old, nullptr);
        return;
    }
    fault.active = false;
    fault.signal = number;
    fault.address = reinterpret_cast<uint64_t>(info->si_addr);
#if defined(__x86_64__)
    const greg_t* regs = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
    fault.instruction = regs[REG_RIP];
    fault.write = regs[REG_ERR] & 2;
    fault.general = number == SIGSEGV && regs[REG_TRAPNO] == 13;
#endif
    siglongjmp(fault.back, 1);
}

void install() {
    static std::once_flag once;
    std::call_once(once, [] {
        struct sigaction action = {};
        action.sa_sigaction = on_signal;
        action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
        for (int number : SIGNALS) sigaction(number, &action, &before[number]);
        sigaction(TOO_LONG, &action, &before[TOO_LONG]);
        pthread_t watchdog;
        if (!pthread_create(&watchdog, nullptr, watch, nullptr)) pthread_detach(watchdog);
    });
    // A kernel may run out of stack: the handler needs its own in every thread.
    static thread_local std::unique_ptr<char[]> own;
    stack_t stack;
    if (own || sigaltstack(nullptr, &stack) || !(stack.ss_flags & SS_DISABLE)) return;
    constexpr size_t BYTES = 64 * 1024;
    own.reset(new char[BYTES]);
    stack = {};
    stack.ss_sp = own.get();
    stack.ss_size = BYTES;
    sigaltstack(&stack, nullptr);
}

// File and line of an instruction in a kernel file, if addr2line finds them.
std::string source_of(const Module& module, uint64_t instruction) {
    Dl_info found;
    if (!dladdr(reinterpret_cast<void*>(instruction), &found)) return "";
    char command[256], line[512] = "";
    snprintf(command, sizeof command, "addr2line -e %s %#lx 2>/dev/null", module.path.c_str(),
             instruction - reinterpret_cast<uint64_t>(found.dli_fbase));
    FILE* pipe = popen(command, "r");
    if (!pipe) return "";
    bool read = fgets(line, sizeof line, pipe) != nullptr;
    pclose(pipe);
    std::string text = read ? line : "";
    text = text.substr(0, text.find_first_of(" \n"));
    text = text.substr(text.rfind('/') + 1);
    return text.empty() || text[0] == '?' ? "" : " at " + text;
}

CUresult explain(Context& context, const std::string& what, const Module* module) {
    std::string place;
    if (module) {
        unsigned at[6];
        char text[160];
        module->table->where(at);
        snprintf(text, sizeof text, ", block (%u,%u,%u), thread (%u,%u,%u)", at[0], at[1], at[2], at[3], at[4], at[5]);
        place = text + source_of(*module, fault.instruction);
    }
    auto tell = [&](const std::string& problem) {
        report("%s%s%s: %s", module ? "kernel " : "", what.c_str(), place.c_str(), problem.c_str());
    };
    if (fault.signal == TOO_LONG) return tell("runs for too long; an endless loop?"), LAUNCH_FAILED;
    if (fault.signal == SIGFPE) return tell("division by zero"), LAUNCH_FAILED;
    if (fault.signal == SIGILL)
        return tell("misaligned address, index outside of an array, shift by too many bits or division by zero"),
               MISALIGNED;
    if (fault.general) return tell("misaligned address"), MISALIGNED;
    tell(std::string(fault.write ? "write to " : "read of ") + describe(context, fault.address));
    return ILLEGAL_ADDRESS;
}
} // namespace

void report(const char* format, ...) {
    char text[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    Settings& s = settings();
    std::lock_guard<std::mutex> lock(s.mutex);
    s.report = text;
    if (getenv("CUDASIM_TRACE")) fprintf(stderr, "cuda-sim: %s\n", text);
}

bool survives(CUresult code) {
    switch (code) {
    case OK: case INVALID_VALUE: case OUT_OF_MEMORY: case 34: case 100: case 101: case 102: case 200: case 209:
    case 218: case 400: case 401: case 500: case 600: case 701: case 704: case 705: case 706: case 712: case 713:
    case 801:
        return true;
    default:
        return (code >= 221 && code <= 225) || (code >= 300 && code <= 304) || (code >= 900 && code <= 911);
    }
}

CUresult lose(Context& context, CUresult code) {
    if (!context.lost) context.lost = code;
    for (auto& weak : context.streams) {
        auto stream = weak.lock();
        if (!stream) continue;
        stream->queue.clear();
        stream->done = stream->queued;
        if (stream->capture) stream->capture->invalid = true;
    }
    return context.lost;
}

CUresult guarded(Context& context, const std::string& what, const Module* module,
                 const std::function<CUresult()>& body) {
    install();
    static std::atomic<uint64_t> count{0};
    volatile CUresult code = OK;
    if (sigsetjmp(fault.back, 0) == 0) {
        fault.running = ++count;
        fault.active = true;
        code = body();
        fault.active = false;
        fault.running = 0;
        return code;
    }
    fault.running = 0;
    return explain(context, what, module);
}
} // namespace sim
