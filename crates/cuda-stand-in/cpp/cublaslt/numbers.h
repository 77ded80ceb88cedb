// Elements of matrices in memory, as f32.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>

#include "api.h"

namespace stand_in::lt {

inline size_t bytes_of(cudaDataType_t type) {
    switch (type) {
        case CUDA_R_32F: return 4;
        case CUDA_R_16F:
        case CUDA_R_16BF: return 2;
        case CUDA_R_8F_E4M3: return 1;
    }
    return 0;
}

inline float from_bits(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline uint32_t to_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float from_bf16(uint16_t bits) { return from_bits(static_cast<uint32_t>(bits) << 16); }

// To nearest, ties to even.
inline uint16_t to_bf16(float value) {
    const uint32_t bits = to_bits(value);
    if (std::isnan(value)) return 0x7fff;
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline float from_f16(uint16_t bits) {
    const float sign = bits & 0x8000 ? -1.0f : 1.0f;
    const int exponent = bits >> 10 & 0x1f;
    const int fraction = bits & 0x3ff;
    if (exponent == 0x1f) return fraction == 0 ? sign * INFINITY : NAN;
    if (exponent == 0) return sign * std::ldexp(static_cast<float>(fraction), -24);
    return sign * std::ldexp(static_cast<float>(fraction + 0x400), exponent - 25);
}

// To nearest, ties to even: nearbyint rounds so, and the units of f16 are powers of two.
inline uint16_t to_f16(float value) {
    const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
    if (std::isnan(value)) return sign | 0x7fff;
    const float size = std::fabs(value);
    if (size == 0.0f) return sign;
    int exponent = 0;
    std::frexp(size, &exponent);
    const int unit = std::max(exponent - 11, -24);  // the power of two of the last bit
    const float rounded = std::nearbyint(std::ldexp(size, -unit));
    if (std::ldexp(rounded, unit) >= 65520.0f) return sign | 0x7c00;
    if (unit == -24)
        return sign | static_cast<uint16_t>(rounded);  // up to 1024 units, which is the smallest normal number
    return static_cast<uint16_t>(sign | (((unit + 24) << 10) + static_cast<int>(rounded)));
}

// One sign, four exponent and three fraction bits, without infinity. https://arxiv.org/abs/2209.05433, table 1
inline float from_e4m3(uint8_t bits) {
    const float sign = bits & 0x80 ? -1.0f : 1.0f;
    const int exponent = bits >> 3 & 0xf;
    const int fraction = bits & 7;
    if (exponent == 0xf && fraction == 7) return NAN;
    if (exponent == 0) return sign * std::ldexp(static_cast<float>(fraction), -9);
    return sign * std::ldexp(static_cast<float>(fraction + 8), exponent - 10);
}

inline float load(cudaDataType_t type, const void* elements, size_t at) {
    switch (type) {
        case CUDA_R_32F: return static_cast<const float*>(elements)[at];
        case CUDA_R_16F: return from_f16(static_cast<const uint16_t*>(elements)[at]);
        case CUDA_R_16BF: return from_bf16(static_cast<const uint16_t*>(elements)[at]);
        case CUDA_R_8F_E4M3: return from_e4m3(static_cast<const uint8_t*>(elements)[at]);
    }
    return NAN;
}

// Elements first, first + step, ...
inline void load_all(cudaDataType_t type, const void* elements, size_t first, size_t step, size_t len, float* out) {
    switch (type) {
        case CUDA_R_32F:
            for (size_t i = 0; i < len; ++i) out[i] = static_cast<const float*>(elements)[first + i * step];
            break;
        case CUDA_R_16BF:
            for (size_t i = 0; i < len; ++i)
                out[i] = from_bf16(static_cast<const uint16_t*>(elements)[first + i * step]);
            break;
        default:
            for (size_t i = 0; i < len; ++i) out[i] = load(type, elements, first + i * step);
    }
}

inline void store(cudaDataType_t type, void* elements, size_t at, float value) {
    switch (type) {
        case CUDA_R_32F: static_cast<float*>(elements)[at] = value; break;
        case CUDA_R_16F: static_cast<uint16_t*>(elements)[at] = to_f16(value); break;
        case CUDA_R_16BF: static_cast<uint16_t*>(elements)[at] = to_bf16(value); break;
        case CUDA_R_8F_E4M3: break;  // no supported multiplication writes it
    }
}

}  // namespace stand_in::lt
