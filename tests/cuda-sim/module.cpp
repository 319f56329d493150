// Modules, kernels, graphs. An image is the shared object that the software compiler made of a .cu file.
// Owner: tests/cuda-sim (libcuda.so.1). Invariant: arguments are copied when a launch is queued or captured; no
// pointer among them leads to the host or to another context.
#include "sim.h"
#include <dlfcn.h>
#include <elf.h>
#include <sys/mman.h>
#include <unistd.h>

namespace sim {
Module::~Module() {
    if (library) dlclose(library);
    size_t slash = path.rfind('/');
    if (slash != std::string::npos) close(atoi(path.c_str() + slash + 1));
}

namespace {
constexpr int DYNAMIC_MAX = 227 * 1024;

// Size of a shared object in memory: the table of sections is its end.
size_t image_bytes(const void* image) {
    const Elf64_Ehdr* head = static_cast<const Elf64_Ehdr*>(image);
    if (memcmp(head->e_ident, ELFMAG, SELFMAG) || head->e_type != ET_DYN) return 0;
    if (head->e_ident[EI_CLASS] != ELFCLASS64 || (head->e_machine != EM_X86_64 && head->e_machine != EM_AARCH64)) return 0;
    return head->e_shoff + size_t(head->e_shnum) * head->e_shentsize;
}

struct Launch {
    std::shared_ptr<Function> function;
    dim3 grid, block;
    unsigned dynamic;
    std::vector<char> arguments;
};

CUresult run_kernel(Context& context, const Launch& launch) {
    const simt_entry& entry = *launch.function->entry;
    const Module& module = *launch.function->module;
    if (CUresult code = count_call("kernel")) {
        report("kernel %s: made to fail by the test", entry.name);
        return code;
    }
    if (!module.alive) {
        report("kernel %s runs after its module was unloaded", entry.name);
        return LAUNCH_FAILED;
    }
    std::vector<void*> params(entry.count + 1);
    std::vector<char> arguments = launch.arguments; // aligned by the allocator; a kernel may change its parameters
    size_t at = 0;
    for (unsigned i = 0; i < entry.count; i++, at += 8) {
        params[i] = &arguments[at];
        uint64_t pointer;
        memcpy(&pointer, params[i], sizeof pointer);
        const char* whose = entry.pointers[i] && pointer ? foreign(context, pointer) : nullptr;
        if (!whose) continue;
        report("kernel %s: argument %u points to %s", entry.name, i, whose);
        return ILLEGAL_ADDRESS;
    }
    char text[512] = "";
    simt_launch run{&entry, launch.grid, launch.block, launch.dynamic, settings().schedule, params.data(), text, sizeof text};
    CUresult code = guarded(context, entry.name, &module, [&] { return module.table->run(run); });
    if (code && text[0]) report("%s", text);
    return code;
}

std::shared_ptr<Graph> graph_of(Table<Graph>& table, Context& context, CUhandle handle) {
    auto graph = table.get(handle);
    return graph && graph->context == &context ? graph : nullptr;
}
} // namespace
} // namespace sim

using namespace sim;

EXPORT CUresult cuModuleLoadData(CUhandle* out, const void* image) {
    ENTER_CONTEXT("cuModuleLoadData");
    if (CUresult code = forbid_in_capture()) return code;
    size_t bytes = image ? image_bytes(image) : 0;
    if (!bytes) return report("this image was not made by the software compiler"), INVALID_IMAGE;
    int file = memfd_create("kernels", MFD_CLOEXEC);
    if (file < 0) return OUT_OF_MEMORY;
    auto module = std::make_shared<Module>();
    module->context = here.context.get();
    module->path = "/proc/" + std::to_string(getpid()) + "/fd/" + std::to_string(file);
    for (size_t done = 0; done < bytes;) {
        ssize_t wrote = write(file, static_cast<const char*>(image) + done, bytes - done);
        if (wrote <= 0) return OUT_OF_MEMORY;
        done += wrote;
    }
    module->library = dlopen(module->path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (module->library) module->table = static_cast<const simt_module_table*>(dlsym(module->library, "simt_module"));
    if (!module->table) return report("cannot load an image: %s", dlerror()), INVALID_IMAGE;
    *out = modules().add(module);
    return OK;
}
EXPORT CUresult cuModuleUnload(CUhandle handle) {
    ENTER_CONTEXT("cuModuleUnload");
    auto module = modules().get(handle);
    if (!module || module->context != here.context.get()) return INVALID_HANDLE;
    if (CUresult code = forbid_in_capture()) return code;
    CUresult code = drain_all(*here.context);
    module->alive = false;
    modules().remove(handle);
    functions().remove_if([&](const Function& f) { return f.module == module; });
    return code;
}
EXPORT CUresult cuModuleGetFunction(CUhandle* out, CUhandle handle, const char* name) {
    ENTER_CONTEXT("cuModuleGetFunction");
    auto module = modules().get(handle);
    if (!module || module->context != here.context.get()) return INVALID_HANDLE;
    for (unsigned i = 0; i < module->table->count; i++) {
        const simt_entry& entry = module->table->entries[i];
        if (strcmp(entry.name, name)) continue;
        auto function = std::make_shared<Function>();
        function->module = module;
        function->entry = &entry;
        *out = functions().add(function);
        return OK;
    }
    report("no kernel %s in the module", name);
    return NOT_FOUND;
}

namespace {
std::shared_ptr<Function> function_of(Here& here, CUhandle handle) {
    auto function = functions().get(handle);
    return function && function->module->alive && function->module->context == here.context.get() ? function : nullptr;
}
} // namespace

// CU_FUNC_ATTRIBUTE_*: 0 most threads, 4 registers, 5 and 6 versions, 8 most dynamic shared memory; others 0.
EXPORT CUresult cuFuncGetAttribute(int* out, int attribute, CUhandle handle) {
    ENTER_CONTEXT("cuFuncGetAttribute");
    auto function = function_of(here, handle);
    if (!function) return INVALID_HANDLE;
    int arch = settings().major * 10 + settings().minor;
    switch (attribute) {
    case 0: *out = int(function->entry->threads); return OK;
    case 4: *out = 32; return OK;
    case 5: case 6: *out = arch; return OK;
    case 8: *out = function->dynamic_max; return OK;
    default: *out = 0; return attribute < 0 || attribute > 15 ? INVALID_VALUE : OK;
    }
}
EXPORT CUresult cuFuncSetAttribute(CUhandle handle, int attribute, int value) {
    ENTER_CONTEXT("cuFuncSetAttribute");
    auto function = function_of(here, handle);
    if (!function) return INVALID_HANDLE;
    if (attribute == 9) return value >= -1 && value <= 100 ? OK : INVALID_VALUE;
    if (attribute != 8 || value < 0 || value > DYNAMIC_MAX) return INVALID_VALUE;
    function->dynamic_max = value;
    return OK;
}

EXPORT CUresult cuLaunchKernel(CUhandle handle, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                               unsigned bz, unsigned dynamic, CUhandle stream_handle, void** params, void** extra) {
    ENTER_CONTEXT("cuLaunchKernel");
    auto function = function_of(here, handle);
    auto stream = stream_of(*here.context, stream_handle);
    if (!function || !stream) return INVALID_HANDLE;
    const simt_entry& entry = *function->entry;
    unsigned long long threads = 1ull * bx * by * bz;
    if (extra || (entry.count && !params)) return INVALID_VALUE;
    if (!gx || !gy || !gz || gx > 0x7FFFFFFF || gy > 65535 || gz > 65535 || !threads || bz > 64) {
        report("kernel %s: grid (%u,%u,%u), block (%u,%u,%u)", entry.name, gx, gy, gz, bx, by, bz);
        return INVALID_VALUE;
    }
    if (threads > entry.threads || int(dynamic) > function->dynamic_max) {
        report("kernel %s: %llu threads (at most %u), %u bytes of dynamic shared memory (at most %d)", entry.name, threads,
               entry.threads, dynamic, function->dynamic_max);
        return INVALID_VALUE;
    }
    Launch launch{function, dim3(gx, gy, gz), dim3(bx, by, bz), dynamic, std::vector<char>(entry.count * 8 + 8)};
    for (unsigned i = 0; i < entry.count; i++) memcpy(&launch.arguments[i * 8], params[i], entry.sizes[i]);
    return enqueue(stream, {entry.name, [launch](Context& c) { return run_kernel(c, launch); }});
}

CUDASIM_EXPORT int cudasim_enqueue(void* stream_handle, const char* what, void (*call)(const void*), const void* data,
                                   size_t bytes, const cudasim_range* ranges, unsigned count) {
    ENTER_CONTEXT(what);
    auto stream = stream_of(*here.context, static_cast<CUhandle>(stream_handle));
    if (!stream) return INVALID_HANDLE;
    std::vector<char> copy(static_cast<const char*>(data), static_cast<const char*>(data) + bytes);
    std::vector<cudasim_range> used(ranges, ranges + count);
    std::string name = what;
    auto run = [=](Context& c) -> CUresult {
        for (const cudasim_range& range : used) {
            if (find(c, range.at, range.bytes)) continue;
            report("%s: %zu bytes at %s", name.c_str(), range.bytes, describe(c, range.at).c_str());
            return ILLEGAL_ADDRESS;
        }
        return guarded(c, name, nullptr, [&] { return call(copy.data()), OK; });
    };
    return enqueue(stream, {name, run});
}

EXPORT CUresult cuGraphInstantiateWithFlags(CUhandle* out, CUhandle handle, unsigned long long) {
    ENTER_CONTEXT("cuGraphInstantiateWithFlags");
    auto graph = graph_of(graphs(), *here.context, handle);
    if (!graph) return INVALID_HANDLE;
    *out = execs().add(std::make_shared<Graph>(*graph));
    return OK;
}
EXPORT CUresult cuGraphDestroy(CUhandle handle) {
    ENTER_CONTEXT("cuGraphDestroy");
    if (!graph_of(graphs(), *here.context, handle)) return INVALID_HANDLE;
    graphs().remove(handle);
    return OK;
}
EXPORT CUresult cuGraphExecDestroy(CUhandle handle) {
    ENTER_CONTEXT("cuGraphExecDestroy");
    if (!graph_of(execs(), *here.context, handle)) return INVALID_HANDLE;
    execs().remove(handle);
    return OK;
}
EXPORT CUresult cuGraphUpload(CUhandle handle, CUhandle stream_handle) {
    ENTER_CONTEXT("cuGraphUpload");
    auto stream = stream_of(*here.context, stream_handle);
    if (!stream || !graph_of(execs(), *here.context, handle)) return INVALID_HANDLE;
    if (stream->capture) return stream->capture->invalid = true, CAPTURE_UNSUPPORTED;
    return OK;
}
EXPORT CUresult cuGraphLaunch(CUhandle handle, CUhandle stream_handle) {
    ENTER_CONTEXT("cuGraphLaunch");
    auto stream = stream_of(*here.context, stream_handle);
    auto graph = graph_of(execs(), *here.context, handle);
    if (!stream || !graph) return INVALID_HANDLE;
    if (stream->capture) return stream->capture->invalid = true, CAPTURE_UNSUPPORTED;
    return enqueue(stream, {"graph", [graph](Context& c) -> CUresult {
                                for (const Op& op : graph->ops)
                                    if (CUresult code = op.run(c)) return code;
                                return OK;
                            }});
}
