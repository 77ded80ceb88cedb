//! The CPU operations against float64 references, on every instruction set, and bit for bit against
//! themselves in other company.

#[path = "../../../tests/support/missing.rs"]
mod missing;

mod kernels {
    mod adapters;
    mod attention;
    mod elementwise;
    mod gated;
    mod gemm;
    mod indexer;
    mod latent;
    mod quantised;
    mod support;
}
