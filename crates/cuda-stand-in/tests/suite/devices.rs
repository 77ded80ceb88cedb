//! Devices, contexts, and devices that are missing, too old, or lost.

use std::process::Command;

use crate::support::{context, ended_by, error, kernel, scale_add};
use cudarc::driver::sys::CUresult;
use cudarc::driver::{CudaContext, sys};
use cudarc::nvrtc::Ptx;
use inflight_cuda_stand_in::StandIn;

#[test]
fn a_device_is_described() {
    StandIn::new().run("devices::a_device_is_described", || {
        let context = context();
        assert_eq!(CudaContext::device_count().unwrap(), 1);
        assert_eq!(context.compute_capability().unwrap(), (9, 0));
        assert!(context.name().unwrap().starts_with("stand-in for a GPU"));
        assert_eq!(context.total_mem().unwrap(), 2 << 30);
        use sys::CUdevice_attribute_enum as Attribute;
        for (attribute, value) in [
            (Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 132),
            (
                Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK,
                48 << 10,
            ),
            (
                Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
                227 << 10,
            ),
            (Attribute::CU_DEVICE_ATTRIBUTE_WARP_SIZE, 32),
        ] {
            assert_eq!(
                context.attribute(attribute).unwrap(),
                value,
                "{attribute:?}"
            );
        }
        let mut version = 0;
        // SAFETY: the number has room.
        unsafe { sys::cuDriverGetVersion(&mut version) }
            .result()
            .unwrap();
        assert_eq!(version, 12040);
    });
}

#[test]
fn devices_have_their_own_memory_and_streams() {
    let options = StandIn::new()
        .set("DEVICES", 2)
        .set("MEMORY_BYTES", 1 << 20)
        .set("OTHER_MEMORY_BYTES", 3 << 20);
    options.run("devices::devices_have_their_own_memory_and_streams", || {
        let [first, second] = [0, 1].map(|ordinal| CudaContext::new(ordinal).unwrap());
        assert_eq!(CudaContext::device_count().unwrap(), 2);
        assert_eq!(
            error(CudaContext::new(2)),
            CUresult::CUDA_ERROR_INVALID_DEVICE
        );
        assert_ne!(first.uuid().unwrap().bytes, second.uuid().unwrap().bytes);
        let [a, b] = [&first, &second].map(|context| context.new_stream().unwrap());
        let on_first = a.clone_htod(&[1u8; 1 << 19]).unwrap();
        assert_eq!(first.mem_get_info().unwrap(), (1 << 19, 1 << 20));
        assert_eq!(second.mem_get_info().unwrap(), (3 << 20, 3 << 20));
        // Copies go from one to the other.
        let mut on_second = b.alloc_zeros::<u8>(1 << 19).unwrap();
        b.memcpy_dtod(&on_first, &mut on_second).unwrap();
        assert_eq!(b.clone_dtoh(&on_second).unwrap(), [1; 1 << 19]);
        // A kernel runs on the device that it was loaded for.
        let kernel = kernel(&second, "stand_in_scale_add");
        let x = a.alloc_zeros::<f32>(1).unwrap();
        let mut out = a.alloc_zeros::<f32>(1).unwrap();
        let wrong = scale_add(&a, &kernel, &mut out, &x, 1.0);
        assert_eq!(error(wrong), CUresult::CUDA_ERROR_INVALID_HANDLE);
    });
}

#[test]
fn a_kernel_cannot_reach_another_device() {
    let options = StandIn::new().set("DEVICES", 2);
    let output = options.output("devices::a_kernel_cannot_reach_another_device", || {
        let first = context();
        let second = CudaContext::new(1).unwrap();
        let x = first.new_stream().unwrap().alloc_zeros::<f32>(8).unwrap();
        first.synchronize().unwrap();
        let stream = second.new_stream().unwrap();
        let mut out = stream.alloc_zeros::<f32>(8).unwrap();
        let kernel = kernel(&second, "stand_in_scale_add");
        let mut launch = stream.launch_builder(&kernel);
        use cudarc::driver::PushKernelArg;
        launch.arg(&mut out).arg(&x).arg(&1.0f32).arg(&8i32);
        let config = cudarc::driver::LaunchConfig {
            grid_dim: (1, 1, 1),
            block_dim: (32, 1, 1),
            shared_mem_bytes: 0,
        };
        // SAFETY: it is not safe.
        unsafe { launch.launch(config) }.unwrap();
        stream.synchronize().unwrap();
    });
    if let Some(output) = output {
        let said = ended_by(libc::SIGABRT, &output);
        assert!(
            said.contains("argument 1 is in memory of device 0, which device 1 cannot reach"),
            "{said}"
        );
    }
}

#[test]
fn machines_without_a_device_or_with_a_driver_that_does_not_fit() {
    let name = "devices::machines_without_a_device_or_with_a_driver_that_does_not_fit";
    for (option, value) in [("DEVICES", 0), ("INIT_ERROR", 100), ("INIT_ERROR", 803)] {
        StandIn::new().set(option, value).run(name, || {
            let expected = match std::env::var("CUDA_STAND_IN_INIT_ERROR").as_deref() {
                Ok("803") => CUresult::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH,
                _ => CUresult::CUDA_ERROR_NO_DEVICE,
            };
            assert_eq!(error(CudaContext::new(0)), expected);
        });
    }
}

#[test]
fn a_module_that_the_driver_does_not_know_is_refused() {
    let options = StandIn::new()
        .set("MODULE_ERROR", 222)
        .set("DRIVER_VERSION", 11080);
    options.run(
        "devices::a_module_that_the_driver_does_not_know_is_refused",
        || {
            let refused = context().load_module(Ptx::from_binary(vec![1]));
            assert_eq!(error(refused), CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION);
        },
    );
}

#[test]
fn a_lost_device_stays_lost_until_its_context_ends() {
    let options = StandIn::new().set("LOSE_DEVICE", 3).set("DEVICES", 2);
    options.run(
        "devices::a_lost_device_stays_lost_until_its_context_ends",
        || {
            let lost = CUresult::CUDA_ERROR_ILLEGAL_ADDRESS;
            let context = context();
            let other = CudaContext::new(1).unwrap();
            {
                let stream = context.new_stream().unwrap();
                let mut data = stream.alloc_zeros::<u8>(8).unwrap();
                let mut read = [0u8; 8];
                stream.memset_zeros(&mut data).unwrap();
                // The calls that enqueue the work that is lost succeed.
                stream.memset_zeros(&mut data).unwrap();
                assert_eq!(error(stream.synchronize()), lost);
                assert_eq!(error(stream.memcpy_dtoh(&data, &mut read)), lost);
                assert_eq!(error(stream.alloc_zeros::<u8>(1)), lost);
                assert_eq!(error(context.mem_get_info()), lost);
                assert_eq!(error(context.synchronize()), lost);
            }
            // Another device goes on.
            let stream = other.new_stream().unwrap();
            assert_eq!(
                stream
                    .clone_dtoh(&stream.clone_htod(&[1u8]).unwrap())
                    .unwrap(),
                [1]
            );
            drop(context);
            let again = crate::support::context();
            let stream = again.new_stream().unwrap();
            assert_eq!(
                stream
                    .clone_dtoh(&stream.clone_htod(&[1u8]).unwrap())
                    .unwrap(),
                [1]
            );
        },
    );
}

#[test]
fn options_can_be_set_while_the_program_runs() {
    StandIn::new().run("devices::options_can_be_set_while_the_program_runs", || {
        let context = context();
        let stream = context.new_stream().unwrap();
        let kernel = kernel(&context, "stand_in_scale_add");
        let x = stream.clone_htod(&[1.0f32]).unwrap();
        let mut out = stream.alloc_zeros::<f32>(1).unwrap();
        let mut launch = || error(scale_add(&stream, &kernel, &mut out, &x, 1.0));
        assert_eq!(launch(), CUresult::CUDA_SUCCESS);
        inflight_cuda_stand_in::set("FAIL_LAUNCH", 2);
        assert_eq!(inflight_cuda_stand_in::count("FAIL_LAUNCH"), 1);
        assert_eq!(launch(), CUresult::CUDA_SUCCESS);
        assert_eq!(launch(), CUresult::CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES);
    });
}

#[test]
fn options_that_are_not_understood_end_the_process() {
    let name = "devices::options_that_are_not_understood_end_the_process";
    let output = StandIn::new()
        .set("SEEDS", 1)
        .output(name, || drop(context()));
    if let Some(output) = output {
        let said = ended_by(libc::SIGABRT, &output);
        assert!(
            said.contains("there is no option CUDA_STAND_IN_SEEDS=1"),
            "{said}"
        );
    }
}

#[test]
fn a_program_finds_both_libraries_under_their_names() {
    let mut command = Command::new("python3");
    command.args([
        "-c",
        "import ctypes, sys; [ctypes.CDLL(name) for name in sys.argv[1:]]",
    ]);
    command.args(["libcuda.so.1", "libcublasLt.so.12", "libcublasLt.so.13"]);
    let output = StandIn::new().apply(&mut command).output().unwrap();
    assert!(output.status.success(), "{output:?}");
}
