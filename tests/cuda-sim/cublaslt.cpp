// libcublasLt for the software device: D = alpha op(A) op(B) + beta C for 16-bit A and B, f32 sums, column-major.
// Owner: tests/cuda-sim. Invariant: the product is queued on its stream like a kernel, and every range is checked when it runs.
#include "cudasim.h"
#include <string.h>
#include <vector>

namespace {
enum Status { OK = 0, NOT_INITIALIZED = 1, INVALID_VALUE = 7, EXECUTION_FAILED = 13, NOT_SUPPORTED = 15 };
enum Type { F32 = 0, F16 = 2, BF16 = 14 };
constexpr int COMPUTE_32F = 68;
constexpr size_t SCRATCH = 4096; // bytes of workspace that a product wants

struct Layout {
    int type;
    uint64_t rows, cols;
    int64_t ld;
    int order = 0;
    int batch = 1;
};
struct Description {
    int compute, scale, transpose_a = 0, transpose_b = 0, pointer_mode = 0, epilogue = 1;
};
struct Preference {
    uint64_t workspace = 0;
};
struct Algorithm {
    uint64_t data[8];
};
struct Heuristic {
    Algorithm algorithm;
    size_t workspace;
    int state;
    float waves;
    int reserved[4];
};
constexpr uint64_t ALGORITHM_MARK = 0x51D7;

struct Product {
    Layout a, b, c, d;
    bool transpose_a, transpose_b;
    float alpha, beta;
    const void *pa, *pb, *pc;
    void *pd, *workspace;
    size_t workspace_bytes;
};

size_t width(int type) { return type == F32 ? 4 : 2; }

float from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
float load(const void* at, size_t i, int type) {
    if (type == F32) return static_cast<const float*>(at)[i];
    uint16_t half = static_cast<const uint16_t*>(at)[i];
    if (type == BF16) return from_bits(uint32_t(half) << 16);
    _Float16 value;
    memcpy(&value, &half, sizeof value);
    return float(value);
}
void store(void* at, size_t i, int type, float value) {
    if (type == F32) {
        static_cast<float*>(at)[i] = value;
        return;
    }
    uint16_t half;
    if (type == F16) {
        _Float16 rounded = static_cast<_Float16>(value);
        memcpy(&half, &rounded, sizeof half);
    } else {
        uint32_t bits;
        memcpy(&bits, &value, sizeof bits);
        bool nan = (bits & 0x7FFFFFFF) > 0x7F800000;
        half = uint16_t(nan ? bits >> 16 | 0x40 : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
    }
    static_cast<uint16_t*>(at)[i] = half;
}

typedef float Lanes __attribute__((vector_size(32), aligned(4)));

// Both padded with zeros to whole lanes.
float dot(const float* x, const float* y, size_t padded) {
    Lanes even = {}, odd = {};
    for (size_t i = 0; i < padded; i += 16) {
        even += *reinterpret_cast<const Lanes*>(x + i) * *reinterpret_cast<const Lanes*>(y + i);
        odd += *reinterpret_cast<const Lanes*>(x + i + 8) * *reinterpret_cast<const Lanes*>(y + i + 8);
    }
    Lanes sum = even + odd;
    return ((sum[0] + sum[4]) + (sum[2] + sum[6])) + ((sum[1] + sum[5]) + (sum[3] + sum[7]));
}

void multiply(const void* data) {
    const Product& p = *static_cast<const Product*>(data);
    size_t m = p.d.rows, n = p.d.cols, k = p.transpose_a ? p.a.rows : p.a.cols, padded = (k + 15) / 16 * 16;
    if (p.workspace_bytes >= SCRATCH) memset(p.workspace, 0xA5, SCRATCH);
    std::vector<float> row(padded), columns(padded * n);
    for (size_t j = 0; j < n; j++)
        for (size_t i = 0; i < k; i++)
            columns[j * padded + i] = load(p.pb, p.transpose_b ? j + i * p.b.ld : i + j * p.b.ld, p.b.type);
    for (size_t i = 0; i < m; i++) {
        for (size_t l = 0; l < k; l++) row[l] = load(p.pa, p.transpose_a ? l + i * p.a.ld : i + l * p.a.ld, p.a.type);
        for (size_t j = 0; j < n; j++) {
            float value = p.alpha * dot(row.data(), &columns[j * padded], padded);
            if (p.beta != 0) value += p.beta * load(p.pc, i + j * p.c.ld, p.c.type);
            store(p.pd, i + j * p.d.ld, p.d.type, value);
        }
    }
}

cudasim_range range(const void* at, const Layout& layout) {
    size_t values = layout.cols ? (layout.cols - 1) * layout.ld + layout.rows : 0;
    return {reinterpret_cast<uint64_t>(at), values * width(layout.type)};
}

bool halves(int type) { return type == F16 || type == BF16; }

// Whether this product is one of those that are offered here, and its shapes agree.
Status check(const Description* what, const Layout* a, const Layout* b, const Layout* c, const Layout* d) {
    if (!what || !a || !b || !c || !d) return INVALID_VALUE;
    bool offered = what->compute == COMPUTE_32F && what->scale == F32 && what->pointer_mode == 0 && what->epilogue == 1 &&
                   halves(a->type) && b->type == a->type && c->type == d->type && (d->type == F32 || d->type == a->type);
    for (const Layout* layout : {a, b, c, d}) {
        offered &= layout->order == 0 && layout->batch == 1;
        if (layout->ld < int64_t(layout->rows) || !layout->rows || !layout->cols) return INVALID_VALUE;
    }
    if (!offered) return NOT_SUPPORTED;
    uint64_t m = what->transpose_a ? a->cols : a->rows, k = what->transpose_a ? a->rows : a->cols;
    uint64_t n = what->transpose_b ? b->rows : b->cols, kb = what->transpose_b ? b->cols : b->rows;
    bool fits = k == kb && d->rows == m && d->cols == n && c->rows == m && c->cols == n;
    return fits ? OK : INVALID_VALUE;
}

template <class T> Status take(T& field, const void* from, size_t bytes) {
    if (bytes != sizeof field) return INVALID_VALUE;
    memcpy(&field, from, bytes);
    return OK;
}
} // namespace

CUDASIM_EXPORT int cublasLtCreate(void** out) { return *out = new int(1), OK; }
CUDASIM_EXPORT int cublasLtDestroy(void* handle) { return delete static_cast<int*>(handle), OK; }

CUDASIM_EXPORT int cublasLtMatrixLayoutCreate(Layout** out, int type, uint64_t rows, uint64_t cols, int64_t ld) {
    *out = new Layout{type, rows, cols, ld};
    return OK;
}
CUDASIM_EXPORT int cublasLtMatrixLayoutDestroy(Layout* layout) { return delete layout, OK; }
CUDASIM_EXPORT int cublasLtMatrixLayoutSetAttribute(Layout* layout, int which, const void* from, size_t bytes) {
    switch (which) {
    case 0: return take(layout->type, from, bytes);
    case 1: return take(layout->order, from, bytes);
    case 2: return take(layout->rows, from, bytes);
    case 3: return take(layout->cols, from, bytes);
    case 4: return take(layout->ld, from, bytes);
    case 5: return take(layout->batch, from, bytes);
    default: return NOT_SUPPORTED;
    }
}
CUDASIM_EXPORT int cublasLtMatmulDescCreate(Description** out, int compute, int scale) {
    *out = new Description{compute, scale};
    return OK;
}
CUDASIM_EXPORT int cublasLtMatmulDescDestroy(Description* what) { return delete what, OK; }
CUDASIM_EXPORT int cublasLtMatmulDescSetAttribute(Description* what, int which, const void* from, size_t bytes) {
    switch (which) {
    case 2: return take(what->pointer_mode, from, bytes);
    case 3: return take(what->transpose_a, from, bytes);
    case 4: return take(what->transpose_b, from, bytes);
    case 7: return take(what->epilogue, from, bytes);
    default: return NOT_SUPPORTED;
    }
}
CUDASIM_EXPORT int cublasLtMatmulPreferenceCreate(Preference** out) { return *out = new Preference, OK; }
CUDASIM_EXPORT int cublasLtMatmulPreferenceDestroy(Preference* preference) { return delete preference, OK; }
// Alignments and masks are accepted: the product here needs none of them.
CUDASIM_EXPORT int cublasLtMatmulPreferenceSetAttribute(Preference* preference, int which, const void* from, size_t bytes) {
    return which == 1 ? take(preference->workspace, from, bytes) : which <= 13 ? OK : NOT_SUPPORTED;
}

CUDASIM_EXPORT int cublasLtMatmulAlgoGetHeuristic(void* handle, const Description* what, const Layout* a, const Layout* b,
                                                  const Layout* c, const Layout* d, const Preference* preference, int wanted,
                                                  Heuristic* results, int* count) {
    *count = 0;
    if (!handle) return NOT_INITIALIZED;
    if (!preference || wanted < 1) return INVALID_VALUE;
    if (Status status = check(what, a, b, c, d)) return status;
    Heuristic result = {};
    result.workspace = preference->workspace < SCRATCH ? 0 : SCRATCH;
    result.algorithm.data[0] = ALGORITHM_MARK;
    result.algorithm.data[1] = result.workspace;
    result.waves = 1;
    results[0] = result;
    *count = 1;
    return OK;
}

CUDASIM_EXPORT int cublasLtMatmul(void* handle, const Description* what, const float* alpha, const void* pa, const Layout* a,
                                  const void* pb, const Layout* b, const float* beta, const void* pc, const Layout* c, void* pd,
                                  const Layout* d, const Algorithm* algorithm, void* workspace, size_t workspace_bytes,
                                  void* stream) {
    if (!handle) return NOT_INITIALIZED;
    if (Status status = check(what, a, b, c, d)) return status;
    if (!alpha || !beta || !pa || !pb || !pd || (*beta != 0 && !pc)) return INVALID_VALUE;
    if (algorithm && (algorithm->data[0] != ALGORITHM_MARK || algorithm->data[1] > workspace_bytes)) return INVALID_VALUE;
    if (workspace_bytes && reinterpret_cast<uint64_t>(workspace) % 16) return INVALID_VALUE;
    bool scratch = algorithm && algorithm->data[1];
    Product p{*a, *b, *c, *d, what->transpose_a == 1, what->transpose_b == 1, *alpha, *beta, pa, pb, pc, pd, workspace,
              scratch ? workspace_bytes : 0};
    std::vector<cudasim_range> used = {range(pa, *a), range(pb, *b), range(pd, *d)};
    if (*beta != 0) used.push_back(range(pc, *c));
    if (scratch) used.push_back({reinterpret_cast<uint64_t>(workspace), workspace_bytes});
    int code = cudasim_enqueue(stream, "cublasLtMatmul", multiply, &p, sizeof p, used.data(), unsigned(used.size()));
    return code ? EXECUTION_FAILED : OK;
}
