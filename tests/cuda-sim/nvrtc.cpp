// libnvrtc for the software device: preprocesses a .cu file after simt.h, appends the table of its kernels, compiles it
// with the C++ compiler of the machine ($CXX or c++) to a shared object, which plays the cubin.
// Owner: tests/cuda-sim. Invariant: the same text, options and compiler give the same image; images are kept next to this
// library by a hash of all of it.
#include "cudasim.h"
#include <dlfcn.h>
#include <fcntl.h>
#include <fstream>
#include <iterator>
#include <set>
#include <sstream>
#include <string>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

namespace {
enum Result { OK, OUT_OF_MEMORY, PROGRAM_CREATION, INVALID_INPUT, INVALID_PROGRAM, INVALID_OPTION, COMPILATION };

struct Program {
    std::string source, name, log, image;
    std::vector<std::pair<std::string, std::string>> headers;
};

std::string library_folder() {
    Dl_info found;
    if (!dladdr(reinterpret_cast<void*>(&library_folder), &found)) return ".";
    std::string path = found.dli_fname;
    size_t slash = path.rfind('/');
    return slash == std::string::npos ? "." : path.substr(0, slash);
}

std::string read_file(const std::string& path) {
    std::ifstream in(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
}
bool write_file(const std::string& path, const std::string& text) {
    std::ofstream out(path, std::ios::binary);
    out << text;
    return bool(out.flush());
}

std::string quoted(const std::string& text) {
    std::string out = "'";
    for (char c : text) out += c == '\'' ? std::string("'\\''") : std::string(1, c);
    return out + "'";
}

// FNV-1a, twice with different starts.
std::string hash(const std::string& text) {
    char out[33];
    unsigned long long a = 0xCBF29CE484222325ull, b = 0x9AE16A3B2F90404Full;
    for (unsigned char c : text) {
        a = (a ^ c) * 0x100000001B3ull;
        b = (b ^ c) * 0x100000001B3ull;
        b ^= b >> 29;
    }
    snprintf(out, sizeof out, "%016llx%016llx", a, b);
    return out;
}

struct Kernel {
    std::string name, threads;
};

// The text in the parentheses that open at `at`; moves `at` behind them.
std::string enclosed(const std::string& text, size_t& at) {
    size_t begin = at + 1;
    int depth = 0;
    for (; at < text.size(); at++) {
        depth += text[at] == '(' ? 1 : text[at] == ')' ? -1 : 0;
        if (depth == 0) return text.substr(begin, at++ - begin);
    }
    return "";
}

// Entry points in preprocessed text: simt.h turns __launch_bounds__(n) into __attribute__((simt_bounds(n))), and the name
// of the kernel follows.
std::vector<Kernel> kernels_in(const std::string& text) {
    static const char MARK[] = "__attribute__((simt_bounds(";
    std::vector<Kernel> found;
    std::set<std::string> seen;
    for (size_t at = text.find(MARK); at != std::string::npos; at = text.find(MARK, at)) {
        at += sizeof MARK - 2;
        std::string threads = enclosed(text, at);
        size_t open = text.find('(', at);
        if (open == std::string::npos) break;
        size_t end = text.find_last_not_of(" \t\n", open - 1), begin = end;
        while (begin > 0 && (isalnum(text[begin - 1]) || text[begin - 1] == '_')) begin--;
        std::string name = text.substr(begin, end + 1 - begin);
        if (seen.insert(name).second) found.push_back({name, threads.substr(0, threads.find(','))});
    }
    return found;
}

std::string table_of(const std::vector<Kernel>& kernels) {
    std::ostringstream out;
    out << "\nstatic const simt_entry simt_entries[] = {\n";
    for (const Kernel& k : kernels)
        out << "    {\"" << k.name << "\", simt::Signature<&" << k.name << ">::invoke, simt::Signature<&" << k.name
            << ">::sizes, simt::Signature<&" << k.name << ">::pointers, simt::Signature<&" << k.name
            << ">::count, unsigned(" << k.threads << ")},\n";
    out << "    {nullptr, nullptr, nullptr, nullptr, 0, 0}};\n"
        << "extern \"C\" __attribute__((visibility(\"default\"))) const simt_module_table simt_module = {" << kernels.size()
        << ", simt_entries, simt::run, simt::where};\n";
    return out.str();
}

// Runs a command of the shell; its messages are added to the log.
bool run(const std::string& command, const std::string& messages, std::string& log) {
    int status = system((command + " 2>" + quoted(messages)).c_str());
    log += read_file(messages);
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

std::string compiler() {
    const char* chosen = getenv("CXX");
    return chosen && *chosen ? chosen : "c++";
}

const char FLAGS[] = " -O2 -g1 -std=c++17 -fPIC -fvisibility=hidden -fno-gnu-unique -U_FORTIFY_SOURCE -fno-stack-protector"
                     " -fno-exceptions -fno-rtti -fno-asynchronous-unwind-tables -ffp-contract=off -Wno-attributes"
                     " -Wno-unknown-pragmas -fsanitize=alignment,bounds,shift-exponent,integer-divide-by-zero"
                     " -fsanitize-undefined-trap-on-error";

// Compiles in `folder`, which is private to this call.
bool compile(Program& p, const std::string& defines, const std::string& folder) {
    std::string home = quoted(library_folder()), messages = folder + "/messages", unit = folder + "/unit.ii";
    std::string begin = "cd " + quoted(folder) + " && " + compiler() + FLAGS;
    bool written = write_file(folder + "/" + p.name, p.source);
    for (auto& [name, text] : p.headers) written &= write_file(folder + "/" + name, text);
    std::string preprocess = " -DSIMT -DSIMT_STRICT -include simt.h -I " + home + " -I ." + defines + " -E -x c++ " + quoted(p.name);
    if (!written || !run(begin + preprocess + " -o unit.ii", messages, p.log)) return false;
    std::string text = read_file(unit);
    if (!write_file(unit, text + table_of(kernels_in(text)))) return false;
    std::string link = " -shared -Wl,-Bsymbolic -x c++-cpp-output unit.ii -o image.so";
    if (!run(begin + link, messages, p.log)) return false;
    p.image = read_file(folder + "/image.so");
    return !p.image.empty();
}

// The image kept from before, or a new one.
Result make(Program& p, const std::string& defines) {
    std::string all = compiler() + FLAGS + defines + '\0' + p.name + '\0' + p.source;
    for (auto& [name, text] : p.headers) all += '\0' + name + '\0' + text;
    std::string kept = library_folder() + "/images/" + hash(all) + ".so";
    p.image = read_file(kept);
    if (!p.image.empty()) return OK;
    const char* temporary = getenv("TMPDIR");
    std::string folder = std::string(temporary && *temporary ? temporary : P_tmpdir) + "/cuda-sim.XXXXXX";
    if (!mkdtemp(&folder[0])) return OUT_OF_MEMORY;
    bool made = compile(p, defines, folder);
    std::string unused;
    run("rm -rf " + quoted(folder), "/dev/null", unused);
    if (!made) return COMPILATION;
    mkdir((library_folder() + "/images").c_str(), 0777);
    std::string moving = kept + "." + hash(folder);
    if (write_file(moving, p.image)) rename(moving.c_str(), kept.c_str());
    return OK;
}

Program* program(void* handle) { return static_cast<Program*>(handle); }
Result size_of(const std::string& text, size_t* bytes, size_t more) { return *bytes = text.size() + more, OK; }
} // namespace

CUDASIM_EXPORT int nvrtcVersion(int* major, int* minor) {
    *major = 12;
    *minor = 99; // no real compiler: what it makes is never taken for the code of one
    return OK;
}
CUDASIM_EXPORT int nvrtcCreateProgram(void** out, const char* source, const char* name, int headers, const char* const* texts,
                                      const char* const* names) {
    if (!out || !source || headers < 0) return INVALID_INPUT;
    Program* p = new Program;
    p->source = source;
    p->name = name && *name ? name : "default_program";
    for (char& c : p->name)
        if (c == '/') c = '_';
    for (int i = 0; i < headers; i++) p->headers.emplace_back(names[i], texts[i]);
    *out = p;
    return OK;
}
CUDASIM_EXPORT int nvrtcDestroyProgram(void** handle) {
    if (!handle || !*handle) return INVALID_PROGRAM;
    delete program(*handle);
    *handle = nullptr;
    return OK;
}
// Definitions and names of architectures are understood; what concerns only the real compiler is passed over.
CUDASIM_EXPORT int nvrtcCompileProgram(void* handle, int count, const char* const* options) {
    if (!handle) return INVALID_PROGRAM;
    Program& p = *program(handle);
    std::string defines;
    for (int i = 0; i < count; i++) {
        std::string option = options[i], value = i + 1 < count ? options[i + 1] : "";
        if (option.rfind("-D", 0) == 0 && option.size() > 2) defines += " " + quoted(option);
        else if (option.rfind("--define-macro=", 0) == 0) defines += " " + quoted("-D" + option.substr(15));
        else if ((option == "-D" || option == "--define-macro") && i + 1 < count) defines += " " + quoted("-D" + value), i++;
        else if (option == "-arch" || option == "-std") i++;
        else if (option.empty() || option[0] != '-') {
            p.log = "nvrtc: error: unrecognized option " + option + "\n";
            return INVALID_OPTION;
        }
    }
    return make(p, defines);
}
CUDASIM_EXPORT int nvrtcGetCUBINSize(void* p, size_t* bytes) { return p ? size_of(program(p)->image, bytes, 0) : INVALID_PROGRAM; }
CUDASIM_EXPORT int nvrtcGetPTXSize(void* p, size_t* bytes) { return p ? size_of(program(p)->image, bytes, 0) : INVALID_PROGRAM; }
CUDASIM_EXPORT int nvrtcGetProgramLogSize(void* p, size_t* bytes) { return p ? size_of(program(p)->log, bytes, 1) : INVALID_PROGRAM; }
CUDASIM_EXPORT int nvrtcGetCUBIN(void* p, char* to) {
    if (!p) return INVALID_PROGRAM;
    memcpy(to, program(p)->image.data(), program(p)->image.size());
    return OK;
}
CUDASIM_EXPORT int nvrtcGetPTX(void* p, char* to) { return nvrtcGetCUBIN(p, to); }
CUDASIM_EXPORT int nvrtcGetProgramLog(void* p, char* to) {
    if (!p) return INVALID_PROGRAM;
    memcpy(to, program(p)->log.c_str(), program(p)->log.size() + 1);
    return OK;
}
CUDASIM_EXPORT const char* nvrtcGetErrorString(int code) {
    static const char* const names[] = {"NVRTC_SUCCESS",
                                        "NVRTC_ERROR_OUT_OF_MEMORY",
                                        "NVRTC_ERROR_PROGRAM_CREATION_FAILURE",
                                        "NVRTC_ERROR_INVALID_INPUT",
                                        "NVRTC_ERROR_INVALID_PROGRAM",
                                        "NVRTC_ERROR_INVALID_OPTION",
                                        "NVRTC_ERROR_COMPILATION"};
    return code >= 0 && code <= COMPILATION ? names[code] : "NVRTC_ERROR unknown";
}
