// The activations of feed-forward blocks, functions of one element.
#pragma once
#include "common.cuh"

// x * sigmoid(x): 0 for large negative numbers, where e^-x is infinity.
struct Silu {
    static __device__ __forceinline__ float of(float x) { return x / (1.0f + __expf(-x)); }
};

// x times the standard normal distribution function at x (Hendrycks and Gimpel, arXiv:1606.08415).
struct Gelu {
    static __device__ __forceinline__ float of(float x) { return 0.5f * x * erfcf(-0.70710678f * x); }
};

// x / 2 * (1 + tanh(u)), u = sqrt(2 / pi) * (x + 0.044715 * x^3): half of one plus tanh(u) is the sigmoid of 2u.
struct GeluTanh {
    static __device__ __forceinline__ float of(float x) {
        return x / (1.0f + __expf(-1.5957691f * (x + 0.044715f * x * x * x)));
    }
};

// NaN stays NaN.
struct Relu {
    static __device__ __forceinline__ float of(float x) { return x < 0.0f ? 0.0f : x; }
};

// So et al., arXiv:2109.08668.
struct SquaredRelu {
    static __device__ __forceinline__ float of(float x) { return Relu::of(x) * Relu::of(x); }
};

// Gating, by its number: those of the activations, and the clamped one. crates/device-cuda/src/experts.rs has the same
// numbers.
__device__ __forceinline__ float gated(int gating, float gate, float up, float alpha, float limit) {
    switch (gating) {
        case 0: return Silu::of(gate) * up;
        case 1: return Gelu::of(gate) * up;
        case 2: return GeluTanh::of(gate) * up;
        case 3: return Relu::of(gate) * up;
        case 4: return SquaredRelu::of(gate) * up;
        default: {
            const float bounded = fminf(gate, limit);
            return bounded / (1.0f + __expf(-alpha * bounded)) * (fmaxf(-limit, fminf(up, limit)) + 1.0f);
        }
    }
}

// Experts without gates have the number of their activation behind this one.
constexpr int WITHOUT_GATES = 8;

__device__ __forceinline__ float without_gate(int gating, float x) {
    switch (gating - WITHOUT_GATES) {
        case 0: return Silu::of(x);
        case 1: return Gelu::of(x);
        case 2: return GeluTanh::of(x);
        case 3: return Relu::of(x);
        default: return SquaredRelu::of(x);
    }
}
