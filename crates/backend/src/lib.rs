//! `libtriton_inflight.so`: the library that tritonserver loads. It exports the functions of `src/entry.rs`.

extern crate library as _;
