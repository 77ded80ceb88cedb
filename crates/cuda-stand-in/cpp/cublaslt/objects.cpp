#include "objects.h"

#include <cstdarg>
#include <cstdio>
#include <cstring>

namespace stand_in::lt {
namespace {

template <class Object, class Handle>
std::unique_ptr<const Object> copy_of(const Handles<Object, Handle>& handles, Handle handle) {
    std::lock_guard lock(library().mutex);
    const auto found = handles.find(handle);
    return found == nullptr ? nullptr : std::make_unique<const Object>(*found);
}

// Where an attribute is stored.
struct Place {
    void* at = nullptr;
    size_t num_bytes = 0;
};

template <class Value>
Place place(Value& value) {
    return {&value, sizeof value};
}

Place attribute(Layout& layout, int number) {
    switch (number) {
        case CUBLASLT_MATRIX_LAYOUT_TYPE: return place(layout.type);
        case CUBLASLT_MATRIX_LAYOUT_ORDER: return place(layout.order);
        case CUBLASLT_MATRIX_LAYOUT_ROWS: return place(layout.rows);
        case CUBLASLT_MATRIX_LAYOUT_COLS: return place(layout.cols);
        case CUBLASLT_MATRIX_LAYOUT_LD: return place(layout.ld);
        case CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT: return place(layout.batch_count);
        case CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET: return place(layout.batch_stride);
        default: return {};
    }
}

Place attribute(Operation& operation, int number) {
    switch (number) {
        case CUBLASLT_MATMUL_DESC_COMPUTE_TYPE: return place(operation.compute_type);
        case CUBLASLT_MATMUL_DESC_SCALE_TYPE: return place(operation.scale_type);
        case CUBLASLT_MATMUL_DESC_POINTER_MODE: return place(operation.pointer_mode);
        case CUBLASLT_MATMUL_DESC_TRANSA: return place(operation.op_a);
        case CUBLASLT_MATMUL_DESC_TRANSB: return place(operation.op_b);
        case CUBLASLT_MATMUL_DESC_TRANSC: return place(operation.op_c);
        case CUBLASLT_MATMUL_DESC_EPILOGUE: return place(operation.epilogue);
        case CUBLASLT_MATMUL_DESC_BIAS_POINTER: return place(operation.bias);
        case CUBLASLT_MATMUL_DESC_BIAS_BATCH_STRIDE: return place(operation.bias_batch_stride);
        case CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE: return place(operation.bias_type);
        case CUBLASLT_MATMUL_DESC_A_SCALE_POINTER: return place(operation.a_scale);
        case CUBLASLT_MATMUL_DESC_B_SCALE_POINTER: return place(operation.b_scale);
        case CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET: return place(operation.sm_count_target);
        case CUBLASLT_MATMUL_DESC_FAST_ACCUM: return place(operation.fast_accum);
        default: return {};
    }
}

Place attribute(Preference& preference, int number) {
    switch (number) {
        case CUBLASLT_MATMUL_PREF_SEARCH_MODE: return place(preference.search_mode);
        case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES: return place(preference.max_workspace_bytes);
        case CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK: return place(preference.reduction_scheme_mask);
        case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES: return place(preference.min_alignment_bytes[0]);
        case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES: return place(preference.min_alignment_bytes[1]);
        case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES: return place(preference.min_alignment_bytes[2]);
        case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES: return place(preference.min_alignment_bytes[3]);
        case CUBLASLT_MATMUL_PREF_MAX_WAVES_COUNT: return place(preference.max_num_waves);
        default: return {};
    }
}

template <class Object, class Handle>
cublasStatus_t set(const Handles<Object, Handle>& handles, Handle handle, int number, const void* value, size_t size) {
    std::lock_guard lock(library().mutex);
    const auto object = handles.find(handle);
    if (object == nullptr || value == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
    const Place place = attribute(*object, number);
    if (place.at == nullptr) return refuse(CUBLAS_STATUS_NOT_SUPPORTED, "attribute %d is not implemented", number);
    if (place.num_bytes != size) {
        return refuse(CUBLAS_STATUS_INVALID_VALUE, "attribute %d has %zu bytes, not %zu", number, place.num_bytes,
                      size);
    }
    std::memcpy(place.at, value, size);
    return CUBLAS_STATUS_SUCCESS;
}

template <class Object, class Handle>
cublasStatus_t get(const Handles<Object, Handle>& handles, Handle handle, int number, void* value, size_t size,
                   size_t* num_written) {
    std::lock_guard lock(library().mutex);
    const auto object = handles.find(handle);
    if (object == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
    const Place place = attribute(*object, number);
    if (place.at == nullptr) return CUBLAS_STATUS_NOT_SUPPORTED;
    if (num_written != nullptr) *num_written = place.num_bytes;
    if (size == 0) return CUBLAS_STATUS_SUCCESS;
    if (value == nullptr || size < place.num_bytes) return CUBLAS_STATUS_INVALID_VALUE;
    std::memcpy(value, place.at, place.num_bytes);
    return CUBLAS_STATUS_SUCCESS;
}

template <class Object, class Handle>
cublasStatus_t create(Handles<Object, Handle>& handles, Handle* handle, Object object) {
    if (handle == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
    std::lock_guard lock(library().mutex);
    *handle = handles.insert(std::make_shared<Object>(std::move(object)));
    return CUBLAS_STATUS_SUCCESS;
}

template <class Object, class Handle>
cublasStatus_t destroy(Handles<Object, Handle>& handles, Handle handle) {
    std::lock_guard lock(library().mutex);
    return handles.remove(handle) == nullptr ? CUBLAS_STATUS_INVALID_VALUE : CUBLAS_STATUS_SUCCESS;
}

}  // namespace

Library& library() {
    static Library* library = new Library;
    return *library;
}

std::unique_ptr<const Layout> find_layout(cublasLtMatrixLayout_t handle) { return copy_of(library().layouts, handle); }

std::unique_ptr<const Operation> find_operation(cublasLtMatmulDesc_t handle) {
    return copy_of(library().operations, handle);
}

std::unique_ptr<const Preference> find_preference(cublasLtMatmulPreference_t handle) {
    return copy_of(library().preferences, handle);
}

cublasStatus_t refuse(cublasStatus_t status, const char* format, ...) {
    char line[512];
    va_list values;
    va_start(values, format);
    std::vsnprintf(line, sizeof line, format, values);
    va_end(values);
    std::fprintf(stderr, "cuda-stand-in: cuBLASLt: %s\n", line);
    return status;
}

}  // namespace stand_in::lt

using namespace stand_in::lt;

API size_t cublasLtGetVersion() { return 120405; }

// A handle belongs to the context of the thread that makes it, and needs none here.
API cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) { return create(library().handles, handle, 0); }

API cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) { return destroy(library().handles, handle); }

API cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* handle, cudaDataType_t type, uint64_t rows,
                                              uint64_t cols, int64_t ld) {
    Layout layout;
    layout.type = type;
    layout.rows = rows;
    layout.cols = cols;
    layout.ld = ld;
    return create(library().layouts, handle, layout);
}

API cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t handle) {
    return destroy(library().layouts, handle);
}

API cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t handle, int number, const void* value,
                                                    size_t size) {
    return set(library().layouts, handle, number, value, size);
}

API cublasStatus_t cublasLtMatrixLayoutGetAttribute(cublasLtMatrixLayout_t handle, int number, void* value, size_t size,
                                                    size_t* num_written) {
    return get(library().layouts, handle, number, value, size, num_written);
}

API cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* handle, cublasComputeType_t compute_type,
                                            cudaDataType_t scale_type) {
    Operation operation;
    operation.compute_type = compute_type;
    operation.scale_type = scale_type;
    return create(library().operations, handle, operation);
}

API cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t handle) {
    return destroy(library().operations, handle);
}

API cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t handle, int number, const void* value,
                                                  size_t size) {
    return set(library().operations, handle, number, value, size);
}

API cublasStatus_t cublasLtMatmulDescGetAttribute(cublasLtMatmulDesc_t handle, int number, void* value, size_t size,
                                                  size_t* num_written) {
    return get(library().operations, handle, number, value, size, num_written);
}

API cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* handle) {
    return create(library().preferences, handle, Preference{});
}

API cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t handle) {
    return destroy(library().preferences, handle);
}

API cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t handle, int number,
                                                        const void* value, size_t size) {
    return set(library().preferences, handle, number, value, size);
}

API cublasStatus_t cublasLtMatmulPreferenceGetAttribute(cublasLtMatmulPreference_t handle, int number, void* value,
                                                        size_t size, size_t* num_written) {
    return get(library().preferences, handle, number, value, size, num_written);
}
