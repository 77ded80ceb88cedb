//! cuBLASLt on the stand-in, compared with sums in f64.

use std::ffi::c_void;
use std::sync::Arc;

use crate::support::context;
use cudarc::cublaslt::result::CublasError;
use cudarc::cublaslt::{CudaBlasLT, Matmul, MatmulConfig, result, sys};
use cudarc::driver::{CudaSlice, CudaStream, DevicePtr, DevicePtrMut, DeviceRepr, ValidAsZeroBits};
use half::{bf16, f16};
use inflight_cuda_stand_in::StandIn;
use sys::cublasLtMatmulDescAttributes_t as DescAttribute;
use sys::cublasLtMatmulPreferenceAttributes_t as PreferenceAttribute;
use sys::cublasLtMatrixLayoutAttribute_t as LayoutAttribute;
use sys::cudaDataType_t as Type;

/// Small numbers that all types represent.
fn numbers(seed: usize, len: usize) -> Vec<f32> {
    (0..len)
        .map(|i| ((i * 7 + seed * 13) % 17) as f32 / 8.0 - 1.0)
        .collect()
}

/// A matrix in memory: element (row, col) is at `row * row_step + col * col_step`.
#[derive(Clone, Copy)]
struct Steps {
    row: usize,
    col: usize,
}

/// `op(A) op(B)` in f64, as rows of D.
fn product(
    a: &[f32],
    a_steps: Steps,
    b: &[f32],
    b_steps: Steps,
    (m, n, k): (usize, usize, usize),
) -> Vec<Vec<f64>> {
    let dot = |row: usize, col: usize| {
        let term = |i: usize| {
            let a = a[row * a_steps.row + i * a_steps.col];
            f64::from(a) * f64::from(b[i * b_steps.row + col * b_steps.col])
        };
        (0..k).map(term).sum::<f64>()
    };
    (0..m)
        .map(|row| (0..n).map(|col| dot(row, col)).collect())
        .collect()
}

fn assert_near(got: f32, expected: f64, what: &str) {
    let bound = 0.01 * (1.0 + expected.abs());
    assert!(
        (f64::from(got) - expected).abs() <= bound,
        "{what}: {got}, not {expected}"
    );
}

/// Through cudarc's own wrapper: `D = 2 op(A) op(B) + 0.5 C + bias` in two batches, in columns.
fn check_type<T>(stream: &Arc<CudaStream>, from: fn(f32) -> T, to: fn(T) -> f32)
where
    T: DeviceRepr + ValidAsZeroBits + Copy,
    CudaBlasLT: Matmul<T>,
{
    let blas = CudaBlasLT::new(stream.clone()).unwrap();
    let (m, n, k) = (24, 5, 40);
    let upload = |values: &[f32]| {
        let values: Vec<T> = values.iter().copied().map(from).collect();
        stream.clone_htod(&values).unwrap()
    };
    for (transa, transb) in [(false, false), (true, false), (false, true), (true, true)] {
        let (a, b, c) = (
            numbers(1, 2 * m * k),
            numbers(2, 2 * n * k),
            numbers(3, 2 * m * n),
        );
        let bias = numbers(4, m);
        let mut d = upload(&c);
        let config = MatmulConfig {
            transa,
            transb,
            transc: false,
            m: m as u64,
            n: n as u64,
            k: k as u64,
            alpha: 2.0,
            lda: if transa { k } else { m } as i64,
            ldb: if transb { n } else { k } as i64,
            beta: 0.5,
            ldc: m as i64,
            stride_a: Some((m * k) as i64),
            stride_b: Some((n * k) as i64),
            stride_c: Some((m * n) as i64),
            stride_bias: None,
            batch_size: Some(2),
        };
        // SAFETY: the shapes are those of the slices.
        unsafe {
            blas.matmul(
                config,
                &upload(&a),
                &upload(&b),
                &mut d,
                Some(&upload(&bias)),
                None,
            )
        }
        .unwrap();
        let got: Vec<f32> = stream.clone_dtoh(&d).unwrap().into_iter().map(to).collect();
        let a_steps = if transa {
            Steps { row: k, col: 1 }
        } else {
            Steps { row: 1, col: m }
        };
        let b_steps = if transb {
            Steps { row: n, col: 1 }
        } else {
            Steps { row: 1, col: k }
        };
        for batch in 0..2 {
            let sums = product(
                &a[batch * m * k..],
                a_steps,
                &b[batch * n * k..],
                b_steps,
                (m, n, k),
            );
            for (row, sums) in sums.iter().enumerate() {
                for (col, sum) in sums.iter().enumerate() {
                    let at = batch * m * n + col * m + row;
                    let expected = 2.0 * sum + 0.5 * f64::from(c[at]) + f64::from(bias[row]);
                    assert_near(
                        got[at],
                        expected,
                        &format!("{transa} {transb} [{batch}][{row}][{col}]"),
                    );
                }
            }
        }
    }
}

#[test]
fn all_transpositions_batches_and_a_bias_in_all_types() {
    StandIn::new().run(
        "matmul::all_transpositions_batches_and_a_bias_in_all_types",
        || {
            let stream = context().new_stream().unwrap();
            check_type::<f32>(&stream, |x| x, |x| x);
            check_type::<bf16>(&stream, bf16::from_f32, bf16::to_f32);
            check_type::<f16>(&stream, f16::from_f32, f16::to_f32);
        },
    );
}

/// A multiplication through the C functions, as a plan cache makes it: `D [n][m] = B [n][k] A [m][k]^T`, rows of
/// activations times rows of weights.
struct Plan {
    operation: sys::cublasLtMatmulDesc_t,
    layouts: [sys::cublasLtMatrixLayout_t; 3],
    found: Vec<sys::cublasLtMatmulHeuristicResult_t>,
}

struct Shape {
    m: usize,
    n: usize,
    k: usize,
    input: Type,
    output: Type,
}

fn bytes_of<T>(value: &T) -> (*const c_void, usize) {
    (std::ptr::from_ref(value).cast(), size_of::<T>())
}

impl Plan {
    fn new(
        handle: sys::cublasLtHandle_t,
        shape: &Shape,
        alignment: u32,
    ) -> Result<Self, CublasError> {
        Self::with_op(handle, shape, alignment, 1)
    }

    fn with_op(
        handle: sys::cublasLtHandle_t,
        shape: &Shape,
        alignment: u32,
        op_a: i32,
    ) -> Result<Self, CublasError> {
        let (m, n, k) = (shape.m as u64, shape.n as u64, shape.k as u64);
        let (a_rows, a_cols) = if op_a == 1 { (k, m) } else { (m, k) };
        let a = result::create_matrix_layout(shape.input, a_rows, a_cols, a_rows as i64)?;
        let b = result::create_matrix_layout(shape.input, k, n, k as i64)?;
        let d = result::create_matrix_layout(shape.output, m, n, m as i64)?;
        let compute = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        let operation = result::create_matmul_desc(compute, Type::CUDA_R_32F)?;
        let preference = result::create_matmul_pref()?;
        let mut found = Vec::with_capacity(8);
        let mut num_found = 0;
        // SAFETY: every pointer is to what the function expects, and the list has room for 8.
        unsafe {
            let (value, size) = bytes_of(&op_a);
            let attribute = DescAttribute::CUBLASLT_MATMUL_DESC_TRANSA;
            result::set_matmul_desc_attribute(operation, attribute, value, size)?;
            let (value, size) = bytes_of(&(1usize << 20));
            let attribute = PreferenceAttribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
            result::set_matmul_pref_attribute(preference, attribute, value, size)?;
            for attribute in [
                PreferenceAttribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
                PreferenceAttribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                PreferenceAttribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
                PreferenceAttribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
            ] {
                let (value, size) = bytes_of(&alignment);
                result::set_matmul_pref_attribute(preference, attribute, value, size)?;
            }
            let list: *mut sys::cublasLtMatmulHeuristicResult_t = found.as_mut_ptr();
            sys::cublasLtMatmulAlgoGetHeuristic(
                handle,
                operation,
                a,
                b,
                d,
                d,
                preference,
                8,
                list,
                &mut num_found,
            )
            .result()?;
            found.set_len(num_found as usize);
            result::destroy_matmul_pref(preference)?;
        }
        let layouts = [a, b, d];
        Ok(Self {
            operation,
            layouts,
            found,
        })
    }

    fn set(&self, attribute: DescAttribute, pointer: u64) {
        let (value, size) = bytes_of(&pointer);
        // SAFETY: the attribute is a device pointer.
        unsafe { result::set_matmul_desc_attribute(self.operation, attribute, value, size) }
            .unwrap();
    }

    /// Multiplies with one of the algorithms that were found.
    fn run(
        &self,
        handle: sys::cublasLtHandle_t,
        stream: &CudaStream,
        [a, b, d]: [u64; 3],
        workspace: &mut CudaSlice<u8>,
        which: usize,
    ) -> Result<(), CublasError> {
        let [layout_a, layout_b, layout_d] = self.layouts;
        let one = 1.0f32;
        let zero = 0.0f32;
        let (alpha, beta) = (bytes_of(&one).0, bytes_of(&zero).0);
        let [a, b, d] = [a, b, d].map(|address| address as *mut c_void);
        let workspace_len = workspace.len();
        let workspace = workspace.device_ptr_mut(stream).0 as *mut c_void;
        // SAFETY: the layouts are those of the memory, and the stand-in checks all ranges.
        unsafe {
            result::matmul(
                handle,
                self.operation,
                alpha,
                beta,
                a,
                layout_a,
                b,
                layout_b,
                d,
                layout_d,
                d,
                layout_d,
                &self.found[which].algo,
                workspace,
                workspace_len,
                stream.cu_stream().cast(),
            )
        }
    }
}

#[test]
fn algorithms_round_differently_and_depend_on_the_number_of_rows() {
    let name = "matmul::algorithms_round_differently_and_depend_on_the_number_of_rows";
    StandIn::new().run(name, || {
        let context = context();
        let stream = context.new_stream().unwrap();
        let handle = result::create_handle().unwrap();
        let (m, k) = (8, 333);
        let values = |seed: usize, len: usize| -> Vec<bf16> {
            // Of different magnitudes, so that sums in f32 round.
            let value = |i: usize| {
                let mantissa = ((i * 31 + seed * 7) % 101) as f32 / 37.0 - 1.3;
                bf16::from_f32(mantissa * (-((i % 11) as f32)).exp2())
            };
            (0..len).map(value).collect()
        };
        let a = stream.clone_htod(&values(1, m * k)).unwrap();
        let mut workspace = stream.alloc_zeros::<u8>(1 << 20).unwrap();
        let mut first_rows = Vec::new();
        for n in [1, 17, 65] {
            let shape = Shape {
                m,
                n,
                k,
                input: Type::CUDA_R_16BF,
                output: Type::CUDA_R_32F,
            };
            let plan = Plan::new(handle, &shape, 256).unwrap();
            assert_eq!(plan.found.len(), 3, "algorithms");
            let b_values = values(2, n * k);
            let b = stream.clone_htod(&b_values).unwrap();
            let mut results = Vec::new();
            for which in 0..plan.found.len() {
                let mut d = stream.alloc_zeros::<f32>(m * n).unwrap();
                let addresses = [
                    a.device_ptr(&stream).0,
                    b.device_ptr(&stream).0,
                    d.device_ptr_mut(&stream).0,
                ];
                plan.run(handle, &stream, addresses, &mut workspace, which)
                    .unwrap();
                let row = stream.clone_dtoh(&d).unwrap()[..m].to_vec();
                let floats =
                    |values: &[bf16]| values.iter().map(|x| x.to_f32()).collect::<Vec<_>>();
                let steps = Steps { row: k, col: 1 };
                let b_steps = Steps { row: 1, col: k };
                let sums = product(
                    &floats(&values(1, m * k)),
                    steps,
                    &floats(&b_values),
                    b_steps,
                    (m, 1, k),
                );
                for (got, sum) in row.iter().zip(&sums) {
                    assert!((f64::from(*got) - sum[0]).abs() < 1e-3, "{got} {}", sum[0]);
                }
                results.push(row);
            }
            assert_ne!(results[0], results[1]);
            assert_ne!(results[1], results[2]);
            first_rows.push(results.swap_remove(0));
        }
        assert_ne!(first_rows[0], first_rows[1]);
        assert_ne!(first_rows[1], first_rows[2]);
    });
}

#[test]
fn fp8_is_scaled_and_needs_a_transposed() {
    StandIn::new().run("matmul::fp8_is_scaled_and_needs_a_transposed", || {
        let context = context();
        let stream = context.new_stream().unwrap();
        let handle = result::create_handle().unwrap();
        let (m, n, k) = (16, 3, 32);
        let shape = Shape {
            m,
            n,
            k,
            input: Type::CUDA_R_8F_E4M3,
            output: Type::CUDA_R_16BF,
        };
        let refused = Plan::with_op(handle, &shape, 16, 0).err();
        assert_eq!(
            refused,
            Some(CublasError(
                sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED
            ))
        );
        let plan = Plan::new(handle, &shape, 16).unwrap();
        // 0x38 is 1, 0xb4 -0.75, 0x01 the smallest subnormal number: 2^-9.
        let a = stream.clone_htod(&[0x38u8; 16 * 32]).unwrap();
        let mut b_bytes = [0xb4u8; 3 * 32];
        b_bytes[0] = 0x01;
        let b = stream.clone_htod(&b_bytes).unwrap();
        let scales = stream.clone_htod(&[4.0f32, 0.5]).unwrap();
        let address = scales.device_ptr(&stream).0;
        plan.set(DescAttribute::CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, address);
        plan.set(
            DescAttribute::CUBLASLT_MATMUL_DESC_B_SCALE_POINTER,
            address + 4,
        );
        let mut d = stream.alloc_zeros::<bf16>(m * n).unwrap();
        let mut workspace = stream.alloc_zeros::<u8>(1 << 20).unwrap();
        let addresses = [
            a.device_ptr(&stream).0,
            b.device_ptr(&stream).0,
            d.device_ptr_mut(&stream).0,
        ];
        plan.run(handle, &stream, addresses, &mut workspace, 0)
            .unwrap();
        let got = stream.clone_dtoh(&d).unwrap();
        let first = 2.0 * (31.0 * -0.75 + 1.0 / 512.0);
        assert_near(got[0].to_f32(), first, "with the subnormal number");
        assert_eq!(got[m], bf16::from_f32(2.0 * 32.0 * -0.75));
    });
}

#[test]
fn rows_are_an_order_too() {
    StandIn::new().run("matmul::rows_are_an_order_too", || {
        let context = context();
        let stream = context.new_stream().unwrap();
        let handle = result::create_handle().unwrap();
        let (m, n, k) = (4, 3, 5);
        let shape = Shape {
            m,
            n,
            k,
            input: Type::CUDA_R_32F,
            output: Type::CUDA_R_32F,
        };
        // The same memory, as k x m in columns and as m x k in rows.
        let columns = Plan::new(handle, &shape, 4).unwrap();
        let rows = Plan::with_op(handle, &shape, 4, 0).unwrap();
        let row_order = sys::cublasLtOrder_t::CUBLASLT_ORDER_ROW;
        // SAFETY: order and distance have the types that the attributes have.
        unsafe {
            let (value, size) = bytes_of(&row_order);
            let attribute = LayoutAttribute::CUBLASLT_MATRIX_LAYOUT_ORDER;
            result::set_matrix_layout_attribute(rows.layouts[0], attribute, value, size).unwrap();
            let distance = k as i64;
            let (value, size) = bytes_of(&distance);
            let attribute = LayoutAttribute::CUBLASLT_MATRIX_LAYOUT_LD;
            result::set_matrix_layout_attribute(rows.layouts[0], attribute, value, size).unwrap();
        }
        let a = stream.clone_htod(&numbers(5, m * k)).unwrap();
        let b = stream.clone_htod(&numbers(6, n * k)).unwrap();
        let mut workspace = stream.alloc_zeros::<u8>(1024).unwrap();
        let mut outputs = [&columns, &rows].map(|plan| {
            let mut d = stream.alloc_zeros::<f32>(m * n).unwrap();
            let addresses = [
                a.device_ptr(&stream).0,
                b.device_ptr(&stream).0,
                d.device_ptr_mut(&stream).0,
            ];
            plan.run(handle, &stream, addresses, &mut workspace, 0)
                .unwrap();
            stream.clone_dtoh(&d).unwrap()
        });
        assert!(outputs[0].iter().any(|x| *x != 0.0));
        assert_eq!(outputs[0], outputs[1]);
        outputs[0].clear();
    });
}

#[test]
fn alignment_workspace_and_ranges_are_checked() {
    StandIn::new().run("matmul::alignment_workspace_and_ranges_are_checked", || {
        let invalid = Err(CublasError(
            sys::cublasStatus_t::CUBLAS_STATUS_INVALID_VALUE,
        ));
        let context = context();
        let stream = context.new_stream().unwrap();
        let handle = result::create_handle().unwrap();
        let shape = Shape {
            m: 16,
            n: 2,
            k: 64,
            input: Type::CUDA_R_16BF,
            output: Type::CUDA_R_16BF,
        };
        let a = stream.alloc_zeros::<bf16>(16 * 64).unwrap();
        let b = stream.alloc_zeros::<bf16>(3 * 64).unwrap();
        let d = stream.alloc_zeros::<bf16>(16 * 2).unwrap();
        let [a, b, d] = [&a, &b, &d].map(|slice| slice.device_ptr(&stream).0);
        let mut workspace = stream.alloc_zeros::<u8>(1 << 20).unwrap();
        let mut too_small = stream.alloc_zeros::<u8>(16).unwrap();
        let strict = Plan::new(handle, &shape, 256).unwrap();
        let loose = Plan::new(handle, &shape, 16).unwrap();
        let second_row = b + 128;
        assert_eq!(
            strict.run(handle, &stream, [a, second_row, d], &mut workspace, 0),
            invalid
        );
        assert_eq!(
            loose.run(handle, &stream, [a, second_row, d], &mut workspace, 0),
            Ok(())
        );
        assert_eq!(
            loose.run(handle, &stream, [a, second_row + 128, d], &mut workspace, 0),
            invalid
        );
        assert_eq!(
            loose.run(handle, &stream, [a, b, d], &mut too_small, 0),
            invalid
        );
        stream.synchronize().unwrap();
    });
}
