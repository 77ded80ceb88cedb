//! Kernels on the stand-in: arguments, limits, errors.

use crate::support::{context, error, kernel, scale_add};
use cudarc::driver::sys::CUfunction_attribute_enum as Attribute;
use cudarc::driver::sys::CUresult;
use cudarc::driver::{DeviceRepr, LaunchConfig, PushKernelArg};
use inflight_cuda_stand_in::StandIn;

const ONE_WARP: LaunchConfig = LaunchConfig {
    grid_dim: (1, 1, 1),
    block_dim: (32, 1, 1),
    shared_mem_bytes: 0,
};

#[test]
fn a_kernel_computes() {
    StandIn::new().run("launches::a_kernel_computes", || {
        let context = context();
        let stream = context.new_stream().unwrap();
        let kernel = kernel(&context, "stand_in_scale_add");
        let x: Vec<f32> = (0..1000u16).map(f32::from).collect();
        let x_on_device = stream.clone_htod(&x).unwrap();
        let mut out = stream.alloc_zeros::<f32>(x.len()).unwrap();
        scale_add(&stream, &kernel, &mut out, &x_on_device, 2.0).unwrap();
        scale_add(&stream, &kernel, &mut out, &x_on_device, 0.5).unwrap();
        let expected: Vec<f32> = x.iter().map(|x| x * 2.5).collect();
        assert_eq!(stream.clone_dtoh(&out).unwrap(), expected);
    });
}

#[repr(C)]
#[derive(Clone, Copy)]
struct InStruct {
    out: u64,
    byte: u8,
    half: u16,
    sum: u64,
}

// SAFETY: it has the layout of the kernel's struct.
unsafe impl DeviceRepr for InStruct {}

#[test]
fn arguments_of_all_kinds_arrive_as_they_were_when_the_launch_was_made() {
    let name = "launches::arguments_of_all_kinds_arrive_as_they_were_when_the_launch_was_made";
    StandIn::new().run(name, || {
        use cudarc::driver::DevicePtrMut;
        let context = context();
        let stream = context.new_stream().unwrap();
        let kernel = kernel(&context, "stand_in_arguments");
        let mut out = stream.alloc_zeros::<f32>(1).unwrap();
        let mut in_struct = InStruct {
            out: out.device_ptr_mut(&stream).0,
            byte: 1,
            half: 20,
            sum: 300,
        };
        let (a, b, mut c, d) = (-4i8, 50i16, 600i32, -7000i64);
        let (e, f, g) = (0.5f32, 0.25f64, true);
        let mut launch = stream.launch_builder(&kernel);
        launch.arg(&in_struct).arg(&a).arg(&b).arg(&c).arg(&d);
        launch.arg(&e).arg(&f).arg(&g);
        // SAFETY: these are the arguments of the kernel.
        unsafe { launch.launch(ONE_WARP) }.unwrap();
        (in_struct.out, c) = (0, 0);
        assert_eq!((in_struct.out, c), (0, 0));
        let sum = 1.0 + 20.0 + 300.0 - 4.0 + 50.0 + 600.0 - 7000.0 + 0.5 + 0.25 + 1.0;
        assert_eq!(stream.clone_dtoh(&out).unwrap(), [sum]);
    });
}

#[test]
fn grids_and_blocks_have_limits() {
    StandIn::new().run("launches::grids_and_blocks_have_limits", || {
        let context = context();
        let stream = context.new_stream().unwrap();
        let kernel = kernel(&context, "stand_in_shared");
        let out = stream.alloc_zeros::<f32>(1).unwrap();
        let try_it = |grid_dim, block_dim| {
            let mut launch = stream.launch_builder(&kernel);
            launch.arg(&out).arg(&0i32);
            let config = LaunchConfig {
                grid_dim,
                block_dim,
                shared_mem_bytes: 64,
            };
            // SAFETY: every one of them is refused.
            error(unsafe { launch.launch(config) })
        };
        for (grid, block) in [
            ((0, 1, 1), (32, 1, 1)),
            ((1, 65536, 1), (32, 1, 1)),
            ((1, 1, 65536), (32, 1, 1)),
            ((1 << 31, 1, 1), (32, 1, 1)),
            ((1, 1, 1), (0, 1, 1)),
            ((1, 1, 1), (1056, 1, 1)),
            ((1, 1, 1), (1, 1, 96)),
            ((1, 1, 1), (64, 1, 1)),
        ] {
            assert_eq!(
                try_it(grid, block),
                CUresult::CUDA_ERROR_INVALID_VALUE,
                "{grid:?} {block:?}"
            );
        }
    });
}

#[test]
fn dynamic_shared_memory_must_be_allowed_above_48_kib() {
    StandIn::new().run(
        "launches::dynamic_shared_memory_must_be_allowed_above_48_kib",
        || {
            let context = context();
            let stream = context.new_stream().unwrap();
            let kernel = kernel(&context, "stand_in_shared");
            let mut out = stream.alloc_zeros::<f32>(1).unwrap();
            let mut last = |num_bytes: u32| {
                let len = (num_bytes / 4) as i32;
                let mut launch = stream.launch_builder(&kernel);
                launch.arg(&mut out).arg(&len);
                let config = LaunchConfig {
                    shared_mem_bytes: num_bytes,
                    ..ONE_WARP
                };
                // SAFETY: the kernel uses as much shared memory as it has.
                let launched = unsafe { launch.launch(config) };
                launched.map(|_| stream.clone_dtoh(&out).unwrap()[0])
            };
            const KIB: u32 = 1 << 10;
            assert_eq!(last(48 * KIB), Ok(12287.0));
            assert_eq!(
                error(last(48 * KIB + 4)),
                CUresult::CUDA_ERROR_INVALID_VALUE
            );
            let attribute = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            let too_much = kernel.set_attribute(attribute, 227 * KIB as i32 + 1);
            assert_eq!(error(too_much), CUresult::CUDA_ERROR_INVALID_VALUE);
            kernel.set_attribute(attribute, 227 * KIB as i32).unwrap();
            assert_eq!(last(227 * KIB), Ok(58111.0));
        },
    );
}

#[test]
fn functions_are_found_by_name_and_end_with_their_module() {
    StandIn::new().run(
        "launches::functions_are_found_by_name_and_end_with_their_module",
        || {
            use cudarc::driver::{result, sys};
            let context = context();
            let image = b"an image".as_ptr().cast();
            // SAFETY: the calls get what they expect, but for the null and the unloaded function, which are refused.
            unsafe {
                let module = result::module::load_data(image).unwrap();
                let name = |name: &str| std::ffi::CString::new(name).unwrap();
                let missing = result::module::get_function(module, name("stand_in_missing"));
                assert_eq!(error(missing), CUresult::CUDA_ERROR_NOT_FOUND);
                let function =
                    result::module::get_function(module, name("stand_in_shared")).unwrap();
                result::module::unload(module).unwrap();
                for function in [function, std::ptr::null_mut()] {
                    let launched = sys::cuLaunchKernel(
                        function,
                        1,
                        1,
                        1,
                        32,
                        1,
                        1,
                        0,
                        std::ptr::null_mut(),
                        [].as_mut_ptr(),
                        std::ptr::null_mut(),
                    );
                    assert_eq!(launched, CUresult::CUDA_ERROR_INVALID_HANDLE);
                }
                assert!(result::module::unload(module).is_err());
            }
            drop(context);
        },
    );
}

#[test]
fn all_work_is_listed_with_the_arguments_of_kernels() {
    let options = StandIn::new().set("PRINT_WORK", 1);
    let output = options.output(
        "launches::all_work_is_listed_with_the_arguments_of_kernels",
        || {
            let context = context();
            let stream = context.new_stream().unwrap();
            let kernel = kernel(&context, "stand_in_scale_add");
            let x = stream.clone_htod(&[1.0f32; 8]).unwrap();
            let mut out = stream.alloc_zeros::<f32>(8).unwrap();
            scale_add(&stream, &kernel, &mut out, &x, 1.0).unwrap();
            stream.synchronize().unwrap();
        },
    );
    if let Some(output) = output {
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{said}");
        let start = "cuda-stand-in: work of device 0: stand_in_scale_add <1 1 1 x ";
        let launched = said.lines().filter(|line| line.starts_with(start));
        let launched: Vec<_> = launched.collect();
        // The factor, as bits of a float, and the length.
        let has_arguments = |line: &&str| line.ends_with(" 3f800000 8");
        assert!(
            launched.len() == 1 && launched.iter().all(has_arguments),
            "{said}"
        );
    }
}

#[test]
fn a_launch_fails_on_purpose() {
    StandIn::new()
        .set("FAIL_LAUNCH", 2)
        .run("launches::a_launch_fails_on_purpose", || {
            let context = context();
            let stream = context.new_stream().unwrap();
            let kernel = kernel(&context, "stand_in_scale_add");
            let x = stream.clone_htod(&[1.0f32; 8]).unwrap();
            let mut out = stream.alloc_zeros::<f32>(8).unwrap();
            let mut launch = || error(scale_add(&stream, &kernel, &mut out, &x, 1.0));
            assert_eq!(launch(), CUresult::CUDA_SUCCESS);
            assert_eq!(launch(), CUresult::CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES);
            assert_eq!(launch(), CUresult::CUDA_SUCCESS);
            assert_eq!(stream.clone_dtoh(&out).unwrap(), [2.0; 8]);
        });
}
