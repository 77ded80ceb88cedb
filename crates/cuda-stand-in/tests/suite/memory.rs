//! Device memory and pinned memory: what is in it, and what nobody may do with it.

use std::ffi::c_void;

use crate::support::{POISON, context, ended_by, error, kernel, scale_add};
use cudarc::driver::sys::{self, CUresult};
use cudarc::driver::{CudaSlice, DevicePtr, DevicePtrMut, LaunchConfig, PushKernelArg, result};
use inflight_cuda_stand_in::StandIn;

const ONE_WARP: LaunchConfig = LaunchConfig {
    grid_dim: (1, 1, 1),
    block_dim: (32, 1, 1),
    shared_mem_bytes: 0,
};

#[test]
fn memory_is_full_of_nan_until_it_is_written() {
    StandIn::new().run("memory::memory_is_full_of_nan_until_it_is_written", || {
        let stream = context().new_stream().unwrap();
        for len in [1, 1000, 10_000_000] {
            // SAFETY: poison has every type.
            let fresh = unsafe { stream.alloc::<f32>(len) }.unwrap();
            let values = stream.clone_dtoh(&fresh).unwrap();
            assert!(values.iter().all(|x| x.to_bits() == POISON && x.is_nan()));
        }
        // Memory that was in use is as new.
        let mut used = stream.alloc_zeros::<u32>(1000).unwrap();
        stream.memset_zeros(&mut used).unwrap();
        drop(used);
        // SAFETY: as above.
        let fresh = unsafe { stream.alloc::<u32>(1000) }.unwrap();
        assert_eq!(stream.clone_dtoh(&fresh).unwrap(), [POISON; 1000]);
    });
}

#[test]
fn memory_is_counted_and_ends() {
    let options = StandIn::new().set("MEMORY_BYTES", 1 << 20);
    options.run("memory::memory_is_counted_and_ends", || {
        const HALF: usize = 1 << 19;
        let context = context();
        let stream = context.new_stream().unwrap();
        assert_eq!(context.mem_get_info().unwrap(), (2 * HALF, 2 * HALF));
        assert_eq!(context.total_mem().unwrap(), 2 * HALF);
        // SAFETY: nobody reads it.
        let allocate = |len| unsafe { stream.alloc::<u8>(len) };
        let half = allocate(HALF).unwrap();
        assert_eq!(context.mem_get_info().unwrap(), (HALF, 2 * HALF));
        assert_eq!(
            error(allocate(HALF + 1)),
            CUresult::CUDA_ERROR_OUT_OF_MEMORY
        );
        let rest = allocate(HALF).unwrap();
        assert_eq!(error(allocate(1)), CUresult::CUDA_ERROR_OUT_OF_MEMORY);
        // Memory that a stream is about to free is there for the next allocation.
        drop((half, rest));
        allocate(2 * HALF).unwrap();
    });
}

#[test]
fn allocations_fail_on_purpose() {
    let options = StandIn::new()
        .set("FAIL_ALLOCATION", 2)
        .set("FAIL_HOST_ALLOCATION", 1);
    options.run("memory::allocations_fail_on_purpose", || {
        let context = context();
        let stream = context.new_stream().unwrap();
        let oom = CUresult::CUDA_ERROR_OUT_OF_MEMORY;
        assert_eq!(error(stream.alloc_zeros::<u8>(1)), CUresult::CUDA_SUCCESS);
        assert_eq!(error(stream.alloc_zeros::<u8>(1)), oom);
        assert_eq!(error(stream.alloc_zeros::<u8>(1)), CUresult::CUDA_SUCCESS);
        // SAFETY: nobody reads it.
        let pinned = || error(unsafe { context.alloc_pinned::<u8>(1) });
        assert_eq!((pinned(), pinned()), (oom, CUresult::CUDA_SUCCESS));
    });
}

#[test]
fn copies_beyond_an_allocation_are_refused() {
    StandIn::new().run("memory::copies_beyond_an_allocation_are_refused", || {
        let stream = context().new_stream().unwrap();
        let mut data = stream.alloc_zeros::<u8>(100).unwrap();
        let address = data.device_ptr_mut(&stream).0;
        let mut host = [0u8; 200];
        // SAFETY: the stand-in checks all addresses; that is what the test is about.
        unsafe {
            let copy = |from: u64, len: usize, host: &mut [u8]| {
                error(result::memcpy_dtoh_async(
                    &mut host[..len],
                    from,
                    stream.cu_stream(),
                ))
            };
            assert_eq!(copy(address, 100, &mut host), CUresult::CUDA_SUCCESS);
            assert_eq!(copy(address + 99, 1, &mut host), CUresult::CUDA_SUCCESS);
            let invalid = CUresult::CUDA_ERROR_INVALID_VALUE;
            assert_eq!(copy(address, 101, &mut host), invalid);
            assert_eq!(copy(address + 100, 1, &mut host), invalid);
            assert_eq!(copy(address - 1, 2, &mut host), invalid);
            assert_eq!(copy(host.as_ptr() as u64, 1, &mut [0u8; 1]), invalid);
            let fill = result::memset_d8_async(address + 50, 0, 51, stream.cu_stream());
            assert_eq!(error(fill), invalid);
            let overlap = result::memcpy_dtod_async(address, address + 10, 20, stream.cu_stream());
            assert_eq!(error(overlap), invalid);
            let device_as_host = std::slice::from_raw_parts(address as *const u8, 1);
            let confused = result::memcpy_htod_async(address, device_as_host, stream.cu_stream());
            assert_eq!(error(confused), invalid);
        }
    });
}

#[test]
fn memory_is_freed_once() {
    StandIn::new().run("memory::memory_is_freed_once", || {
        let context = context();
        let invalid = CUresult::CUDA_ERROR_INVALID_VALUE;
        // SAFETY: the stand-in checks all addresses; that is what the test is about.
        unsafe {
            let address = result::malloc_sync(64).unwrap();
            assert_eq!(error(result::free_sync(address + 1)), invalid);
            result::free_sync(address).unwrap();
            assert_eq!(error(result::free_sync(address)), invalid);
            assert_eq!(error(result::malloc_sync(0)), invalid);
            let pinned = result::malloc_host(64, 0).unwrap();
            result::free_host(pinned).unwrap();
            assert_eq!(error(result::free_host(pinned)), invalid);
            let local = 5u32;
            assert_eq!(
                error(result::free_host((&raw const local).cast_mut().cast())),
                invalid
            );
        }
        drop(context);
    });
}

#[test]
fn other_host_memory_can_be_pinned() {
    StandIn::new().run("memory::other_host_memory_can_be_pinned", || {
        let stream = context().new_stream().unwrap();
        let mut host = vec![1u32; 1024];
        let address: *mut c_void = host.as_mut_ptr().cast();
        // SAFETY: the memory stays where it is until it is no longer pinned.
        unsafe {
            sys::cuMemHostRegister_v2(address, 4096, 0)
                .result()
                .unwrap();
            let twice = sys::cuMemHostRegister_v2(address, 4096, 0);
            assert_eq!(twice, CUresult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
            let target = stream.clone_htod(&host).unwrap();
            // The copy runs later, as only those of pinned memory do.
            host.as_mut_ptr().write_volatile(2);
            stream.synchronize().unwrap();
            assert_eq!(stream.clone_dtoh(&target).unwrap()[..2], [2, 1]);
            sys::cuMemHostUnregister(address).result().unwrap();
            let twice = sys::cuMemHostUnregister(address);
            assert_eq!(twice, CUresult::CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
        }
    });
}

#[test]
fn the_host_cannot_touch_device_memory() {
    let output = StandIn::new().output("memory::the_host_cannot_touch_device_memory", || {
        let stream = context().new_stream().unwrap();
        let data = stream.alloc_zeros::<u8>(100).unwrap();
        stream.synchronize().unwrap();
        let address = data.device_ptr(&stream).0 as *const u8;
        // SAFETY: it is not safe.
        let byte = unsafe { address.add(7).read_volatile() };
        println!("{byte}");
    });
    if let Some(output) = output {
        let said = ended_by(libc::SIGSEGV, &output);
        let expected = "the host touches byte 7 of allocation 1 of 100 bytes in memory of device 0";
        assert!(said.contains(expected), "{said}");
    }
}

#[test]
fn the_host_cannot_touch_pinned_memory_that_is_freed() {
    let output = StandIn::new().output(
        "memory::the_host_cannot_touch_pinned_memory_that_is_freed",
        || {
            let _context = context();
            // SAFETY: it is not safe.
            unsafe {
                let pinned: *mut u8 = result::malloc_host(64, 0).unwrap().cast();
                pinned.write_volatile(1);
                result::free_host(pinned.cast()).unwrap();
                pinned.write_volatile(2);
            }
        },
    );
    if let Some(output) = output {
        let said = ended_by(libc::SIGSEGV, &output);
        let expected =
            "the host touches byte 0 of freed allocation 1 of 64 bytes in pinned host memory";
        assert!(said.contains(expected), "{said}");
    }
}

/// Frees memory that work still needs.
fn free_early(slice: CudaSlice<f32>) {
    let address = slice.leak();
    // SAFETY: it is not safe.
    unsafe { result::free_sync(address) }.unwrap();
}

#[test]
fn a_copy_of_freed_memory_ends_the_process() {
    let output = StandIn::new().output("memory::a_copy_of_freed_memory_ends_the_process", || {
        let context = context();
        let stream = context.new_stream().unwrap();
        let data = stream.alloc_zeros::<f32>(8).unwrap();
        stream.synchronize().unwrap();
        // SAFETY: nobody reads it.
        let mut pinned = unsafe { context.alloc_pinned::<f32>(8) }.unwrap();
        stream.memcpy_dtoh(&data, &mut pinned).unwrap();
        free_early(data);
        stream.synchronize().unwrap();
    });
    if let Some(output) = output {
        let said = ended_by(libc::SIGABRT, &output);
        let expected = "cuMemcpyDtoHAsync_v2: 32 bytes from byte 0 of freed allocation 1 of 32 bytes in memory of \
                        device 0 are no longer allocated";
        assert!(said.contains(expected), "{said}");
    }
}

#[test]
fn a_kernel_on_freed_memory_ends_the_process() {
    let output = StandIn::new().output("memory::a_kernel_on_freed_memory_ends_the_process", || {
        let context = context();
        let stream = context.new_stream().unwrap();
        let kernel = kernel(&context, "stand_in_scale_add");
        let x = stream.clone_htod(&[1.0f32; 8]).unwrap();
        let mut out = stream.alloc_zeros::<f32>(8).unwrap();
        stream.synchronize().unwrap();
        scale_add(&stream, &kernel, &mut out, &x, 1.0).unwrap();
        free_early(x);
        stream.synchronize().unwrap();
    });
    if let Some(output) = output {
        let said = ended_by(libc::SIGABRT, &output);
        let expected =
            "stand_in_scale_add: argument 1 points to byte 0 of freed allocation 1 of 32 bytes";
        assert!(said.contains(expected), "{said}");
    }
}

#[test]
fn a_kernel_gets_no_pageable_memory_but_pinned() {
    let output = StandIn::new().output(
        "memory::a_kernel_gets_no_pageable_memory_but_pinned",
        || {
            let context = context();
            let stream = context.new_stream().unwrap();
            let kernel = kernel(&context, "stand_in_write_at");
            let launch = |address: u64| {
                let mut launch = stream.launch_builder(&kernel);
                launch.arg(&address).arg(&3i64);
                // SAFETY: the first address has room, and the second is not safe.
                unsafe { launch.launch(ONE_WARP) }.unwrap();
                stream.synchronize().unwrap();
            };
            // SAFETY: it is read after it is written.
            let mut pinned = unsafe { context.alloc_pinned::<f32>(4) }.unwrap();
            launch(pinned.as_mut_ptr().unwrap() as u64);
            assert_eq!(pinned.as_slice().unwrap()[3], 1.0);
            let pageable = [0.0f32; 4];
            launch(pageable.as_ptr() as u64);
        },
    );
    if let Some(output) = output {
        let said = ended_by(libc::SIGABRT, &output);
        assert!(said.contains("stand_in_write_at: argument 0, 0x"), "{said}");
        assert!(
            said.contains("is neither device memory nor pinned"),
            "{said}"
        );
    }
}

#[test]
fn memory_is_there_only_after_its_allocation_in_stream_order() {
    let name = "memory::memory_is_there_only_after_its_allocation_in_stream_order";
    let output = StandIn::new().output(name, || {
        let context = context();
        let [first, second] = [(); 2].map(|()| context.new_stream().unwrap());
        for _ in 0..64 {
            // SAFETY: the other stream should wait for the allocation.
            let mut data = unsafe { first.alloc::<u8>(8) }.unwrap();
            second.memset_zeros(&mut data).unwrap();
            second.synchronize().unwrap();
            first.synchronize().unwrap();
        }
    });
    if let Some(output) = output {
        let said = ended_by(libc::SIGABRT, &output);
        let expected = "cuMemsetD8Async runs before the allocation in stream order of allocation";
        assert!(said.contains(expected), "{said}");
    }
}

/// Lets a kernel write an element that is `index` elements from the beginning of 25.
fn write_at(index: i64) {
    let context = context();
    let stream = context.new_stream().unwrap();
    let kernel = kernel(&context, "stand_in_write_at");
    let mut out = stream.alloc_zeros::<f32>(25).unwrap();
    let mut launch = stream.launch_builder(&kernel);
    launch.arg(&mut out).arg(&index);
    // SAFETY: it is not safe.
    unsafe { launch.launch(ONE_WARP) }.unwrap();
    stream.synchronize().unwrap();
    drop(out);
    stream.synchronize().unwrap();
}

#[test]
fn a_kernel_far_beyond_its_memory_is_caught_at_once() {
    let output = StandIn::new().output(
        "memory::a_kernel_far_beyond_its_memory_is_caught_at_once",
        || write_at(64),
    );
    if let Some(output) = output {
        let said = ended_by(libc::SIGSEGV, &output);
        let expected =
            "stand_in_write_at touches byte 256 of allocation 1 of 100 bytes in memory of device 0";
        assert!(said.contains(expected), "{said}");
    }
}

#[test]
fn a_kernel_just_beyond_its_memory_is_caught_when_it_is_freed() {
    let name = "memory::a_kernel_just_beyond_its_memory_is_caught_when_it_is_freed";
    let output = StandIn::new().output(name, || write_at(25));
    if let Some(output) = output {
        let said = ended_by(libc::SIGABRT, &output);
        let expected =
            "somebody wrote beyond an allocation: to byte 100 of allocation 1 of 100 bytes";
        assert!(said.contains(expected), "{said}");
    }
}

#[test]
fn what_was_not_freed_is_listed() {
    let options = StandIn::new().set("REPORT_LEAKS", 1);
    let output = options.output("memory::what_was_not_freed_is_listed", || {
        let context = context();
        let stream = context.new_stream().unwrap();
        let freed = stream.alloc_zeros::<u8>(10).unwrap();
        let kept = stream.alloc_zeros::<u8>(20).unwrap();
        // SAFETY: nobody reads it.
        let pinned = unsafe { result::malloc_host(30, 0) }.unwrap();
        assert!(!pinned.is_null());
        drop(freed);
        kept.leak();
    });
    if let Some(output) = output {
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{said}");
        assert!(
            said.contains("allocation 2 of 20 bytes in memory of device 0 was never freed"),
            "{said}"
        );
        assert!(
            said.contains("allocation 1 of 30 bytes in pinned host memory was never freed"),
            "{said}"
        );
        assert!(said.contains("2 allocations were never freed"), "{said}");
    }
}
