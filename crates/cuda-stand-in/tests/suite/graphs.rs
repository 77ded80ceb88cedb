//! Captured streams and graphs.

use std::sync::Arc;

use crate::support::{context, error, kernel, scale_add};
use cudarc::driver::sys::{
    self, CUgraphInstantiate_flags, CUresult, CUstreamCaptureMode_enum as Mode,
};
use cudarc::driver::{CudaFunction, CudaGraph, CudaSlice, CudaStream, DriverError};
use inflight_cuda_stand_in::StandIn;

const NO_FLAGS: CUgraphInstantiate_flags = CUgraphInstantiate_flags(0);

/// Captures what `body` puts into a stream.
fn captured(stream: &Arc<CudaStream>, body: impl FnOnce()) -> Result<CudaGraph, DriverError> {
    stream.begin_capture(Mode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)?;
    body();
    stream
        .end_capture(NO_FLAGS)
        .map(|graph| graph.expect("a graph"))
}

/// `out = out + x`, in a graph.
fn add_in_graph(
    stream: &Arc<CudaStream>,
    kernel: &CudaFunction,
    out: &mut CudaSlice<f32>,
    x: &CudaSlice<f32>,
    factor: f32,
) -> CudaGraph {
    captured(stream, || {
        scale_add(stream, kernel, out, x, factor).unwrap()
    })
    .unwrap()
}

#[test]
fn a_graph_runs_again_with_what_is_in_memory_then() {
    StandIn::new().run(
        "graphs::a_graph_runs_again_with_what_is_in_memory_then",
        || {
            let context = context();
            let stream = context.new_stream().unwrap();
            let kernel = kernel(&context, "stand_in_scale_add");
            let mut x = stream.clone_htod(&[1.0f32; 4]).unwrap();
            let mut out = stream.alloc_zeros::<f32>(4).unwrap();
            let graph = add_in_graph(&stream, &kernel, &mut out, &x, 1.0);
            // Nothing has run while the stream was captured.
            assert_eq!(stream.clone_dtoh(&out).unwrap(), [0.0; 4]);
            graph.upload().unwrap();
            graph.launch().unwrap();
            graph.launch().unwrap();
            stream.memcpy_htod(&[10.0f32; 4], &mut x).unwrap();
            graph.launch().unwrap();
            assert_eq!(stream.clone_dtoh(&out).unwrap(), [12.0; 4]);
        },
    );
}

#[test]
fn branches_of_a_graph_join_through_events() {
    for seed in 0..8 {
        StandIn::new().set("SEED", seed).run(
            "graphs::branches_of_a_graph_join_through_events",
            || {
                let context = context();
                let [stream, side] = [(); 2].map(|()| context.new_stream().unwrap());
                let kernel = kernel(&context, "stand_in_scale_add");
                let x = stream.clone_htod(&[1.0f32; 4]).unwrap();
                let [mut left, mut right] = [(); 2].map(|()| stream.alloc_zeros::<f32>(4).unwrap());
                stream.synchronize().unwrap();
                let graph = captured(&stream, || {
                    scale_add(&stream, &kernel, &mut left, &x, 1.0).unwrap();
                    side.join(&stream).unwrap();
                    scale_add(&side, &kernel, &mut right, &left, 2.0).unwrap();
                    stream.join(&side).unwrap();
                    scale_add(&stream, &kernel, &mut left, &right, 1.0).unwrap();
                });
                graph.unwrap().launch().unwrap();
                assert_eq!(stream.clone_dtoh(&left).unwrap(), [3.0; 4]);
            },
        );
    }
}

#[test]
fn branches_that_nothing_orders_show_it() {
    StandIn::new().run("graphs::branches_that_nothing_orders_show_it", || {
        let context = context();
        let [stream, side] = [(); 2].map(|()| context.new_stream().unwrap());
        let kernel = kernel(&context, "stand_in_scale_add");
        let mut middle = stream.alloc_zeros::<f32>(4).unwrap();
        let mut out = stream.alloc_zeros::<f32>(4).unwrap();
        let x = stream.clone_htod(&[1.0f32; 4]).unwrap();
        let graph = captured(&stream, || {
            side.join(&stream).unwrap();
            scale_add(&stream, &kernel, &mut middle, &x, 1.0).unwrap();
            // Reads `middle`, for which it should wait.
            scale_add(&side, &kernel, &mut out, &middle, 1.0).unwrap();
            stream.join(&side).unwrap();
        });
        let graph = graph.unwrap();
        let mut sums = Vec::new();
        for _ in 0..32 {
            stream.memset_zeros(&mut middle).unwrap();
            stream.memset_zeros(&mut out).unwrap();
            graph.launch().unwrap();
            sums.push(stream.clone_dtoh(&out).unwrap()[0]);
        }
        assert!(sums.contains(&0.0) && sums.contains(&1.0), "{sums:?}");
    });
}

#[test]
fn a_graph_can_be_updated_to_one_of_the_same_shape() {
    StandIn::new().run(
        "graphs::a_graph_can_be_updated_to_one_of_the_same_shape",
        || {
            let context = context();
            let stream = context.new_stream().unwrap();
            let kernel = kernel(&context, "stand_in_scale_add");
            let x = stream.clone_htod(&[1.0f32; 4]).unwrap();
            let mut out = stream.alloc_zeros::<f32>(4).unwrap();
            let graph = add_in_graph(&stream, &kernel, &mut out, &x, 1.0);
            let other = add_in_graph(&stream, &kernel, &mut out, &x, 100.0);
            let longer = captured(&stream, || {
                for _ in 0..2 {
                    scale_add(&stream, &kernel, &mut out, &x, 1.0).unwrap();
                }
            });
            let filled = captured(&stream, || stream.memset_zeros(&mut out).unwrap());
            let update = |from: &CudaGraph| {
                let mut info: sys::CUgraphExecUpdateResultInfo = sys::CUgraphExecUpdateResultInfo {
                    result: sys::CUgraphExecUpdateResult_enum::CU_GRAPH_EXEC_UPDATE_ERROR,
                    errorNode: std::ptr::null_mut(),
                    errorFromNode: std::ptr::null_mut(),
                };
                // SAFETY: both graphs live.
                let result = unsafe {
                    sys::cuGraphExecUpdate_v2(graph.cu_graph_exec(), from.cu_graph(), &mut info)
                };
                (result, info.result)
            };
            use sys::CUgraphExecUpdateResult_enum as Update;
            graph.launch().unwrap();
            let done = (CUresult::CUDA_SUCCESS, Update::CU_GRAPH_EXEC_UPDATE_SUCCESS);
            assert_eq!(update(&other), done);
            graph.launch().unwrap();
            assert_eq!(stream.clone_dtoh(&out).unwrap(), [101.0; 4]);
            let failed = CUresult::CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE;
            let topology = Update::CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED;
            assert_eq!(update(&longer.unwrap()), (failed, topology));
            let kind = Update::CU_GRAPH_EXEC_UPDATE_ERROR_NODE_TYPE_CHANGED;
            assert_eq!(update(&filled.unwrap()), (failed, kind));
        },
    );
}

#[test]
fn copies_of_pinned_memory_are_captured_and_of_other_memory_refused() {
    let name = "graphs::copies_of_pinned_memory_are_captured_and_of_other_memory_refused";
    StandIn::new().run(name, || {
        let context = context();
        let stream = context.new_stream().unwrap();
        // SAFETY: it is written before it is read.
        let staging = unsafe { context.alloc_pinned::<u32>(1) }.unwrap();
        let host = staging.as_ptr().unwrap().cast_mut();
        let mut target = stream.alloc_zeros::<u32>(1).unwrap();
        let address = {
            use cudarc::driver::DevicePtrMut;
            target.device_ptr_mut(&stream).0
        };
        let copy = || {
            // SAFETY: both live until the graph has run.
            unsafe { sys::cuMemcpyHtoDAsync_v2(address, host.cast(), 4, stream.cu_stream()) }
                .result()
        };
        let graph = captured(&stream, || copy().unwrap()).unwrap();
        for value in [3, 4] {
            // SAFETY: nothing runs now.
            unsafe { host.write_volatile(value) };
            graph.launch().unwrap();
            assert_eq!(stream.clone_dtoh(&target).unwrap(), [value]);
        }
        let unsupported = CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        let refused = captured(&stream, || {
            assert_eq!(error(stream.memcpy_htod(&[1u32], &mut target)), unsupported);
        });
        assert_eq!(
            error(refused),
            CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
        );
        // The stream works again.
        stream.memcpy_htod(&[9u32], &mut target).unwrap();
        assert_eq!(stream.clone_dtoh(&target).unwrap(), [9]);
    });
}

/// Captures a stream in a mode while `forbidden` runs, and returns the error of that and of the end of the capture.
fn errors_in_capture(
    mode: Mode,
    forbidden: impl FnOnce(&Arc<CudaStream>) -> Result<(), DriverError>,
) -> (CUresult, CUresult) {
    let stream = context().new_stream().unwrap();
    stream.begin_capture(mode).unwrap();
    let first = error(forbidden(&stream));
    let end = error(stream.end_capture(NO_FLAGS));
    (first, end)
}

#[test]
fn what_a_capture_forbids_is_refused_and_ends_it() {
    StandIn::new().run(
        "graphs::what_a_capture_forbids_is_refused_and_ends_it",
        || {
            use cudarc::driver::result;
            let unsupported = (
                CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
                CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED,
            );
            let local = Mode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
            assert_eq!(
                errors_in_capture(local, |stream| stream.synchronize()),
                unsupported
            );
            assert_eq!(
                errors_in_capture(local, |stream| stream.context().synchronize()),
                unsupported
            );
            assert_eq!(
                errors_in_capture(local, |stream| stream.alloc_zeros::<u8>(1).map(|_| ())),
                unsupported
            );
            // SAFETY: the address is not used.
            let allocate = |_: &Arc<CudaStream>| unsafe { result::malloc_sync(64) }.map(|_| ());
            assert_eq!(errors_in_capture(local, allocate), unsupported);
            let relaxed = Mode::CU_STREAM_CAPTURE_MODE_RELAXED;
            let fine = (CUresult::CUDA_SUCCESS, CUresult::CUDA_SUCCESS);
            assert_eq!(errors_in_capture(relaxed, allocate), fine);
            // A capture of another thread counts only in the mode GLOBAL.
            let on_another_thread = |mode| {
                errors_in_capture(mode, |stream| {
                    let context = stream.context();
                    std::thread::scope(|scope| {
                        let thread = scope.spawn(|| {
                            context.bind_to_thread()?;
                            allocate(stream)
                        });
                        thread.join().unwrap()
                    })
                })
            };
            assert_eq!(on_another_thread(local), fine);
            assert_eq!(
                on_another_thread(Mode::CU_STREAM_CAPTURE_MODE_GLOBAL),
                unsupported
            );
        },
    );
}

#[test]
fn captures_that_do_not_hang_together_are_refused() {
    StandIn::new().run(
        "graphs::captures_that_do_not_hang_together_are_refused",
        || {
            let context = context();
            let [stream, side] = [(); 2].map(|()| context.new_stream().unwrap());
            let begin = |stream: &Arc<CudaStream>| {
                stream
                    .begin_capture(Mode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
                    .unwrap();
            };
            let end = |stream: &Arc<CudaStream>| error(stream.end_capture(NO_FLAGS));
            let mut data = stream.alloc_zeros::<u8>(1).unwrap();
            stream.synchronize().unwrap();

            // Not capturing, or twice.
            assert_eq!(end(&stream), CUresult::CUDA_ERROR_ILLEGAL_STATE);
            begin(&stream);
            let twice = stream.begin_capture(Mode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
            assert_eq!(error(twice), CUresult::CUDA_ERROR_ILLEGAL_STATE);
            assert_eq!(end(&stream), CUresult::CUDA_SUCCESS);
            // A branch that never comes back.
            begin(&stream);
            side.join(&stream).unwrap();
            side.memset_zeros(&mut data).unwrap();
            assert_eq!(end(&side), CUresult::CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
            assert_eq!(
                end(&stream),
                CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
            );
            begin(&stream);
            side.join(&stream).unwrap();
            side.memset_zeros(&mut data).unwrap();
            assert_eq!(end(&stream), CUresult::CUDA_ERROR_STREAM_CAPTURE_UNJOINED);
            // An event from outside.
            let event = context.new_event(None).unwrap();
            event.record(&side).unwrap();
            begin(&stream);
            assert_eq!(
                error(stream.wait(&event)),
                CUresult::CUDA_ERROR_STREAM_CAPTURE_ISOLATION
            );
            assert_eq!(
                end(&stream),
                CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
            );
            // Two captures, and an event of a capture.
            begin(&stream);
            begin(&side);
            assert_eq!(
                error(side.join(&stream)),
                CUresult::CUDA_ERROR_STREAM_CAPTURE_MERGE
            );
            assert_eq!(
                end(&stream),
                CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
            );
            assert_eq!(end(&side), CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
            begin(&stream);
            event.record(&stream).unwrap();
            assert_eq!(
                error(event.synchronize()),
                CUresult::CUDA_ERROR_CAPTURED_EVENT
            );
            assert_eq!(
                end(&stream),
                CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
            );
            // The default stream.
            let default = context.default_stream();
            let refused = default.begin_capture(Mode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
            assert_eq!(
                error(refused),
                CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
            );
            // A stream that is destroyed.
            let lost = context.new_stream().unwrap();
            begin(&lost);
            drop(lost);
            stream.synchronize().unwrap();
            // Another thread ends it.
            begin(&stream);
            let ended = std::thread::scope(|scope| scope.spawn(|| end(&stream)).join().unwrap());
            assert_eq!(ended, CUresult::CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
            assert_eq!(end(&stream), CUresult::CUDA_SUCCESS);
        },
    );
}

#[test]
fn work_in_the_default_stream_ends_captures_of_blocking_streams() {
    let name = "graphs::work_in_the_default_stream_ends_captures_of_blocking_streams";
    StandIn::new().run(name, || {
        use cudarc::driver::result::stream::{StreamKind, create};
        let context = context();
        let default = context.default_stream();
        let mut data = default.alloc_zeros::<u8>(1).unwrap();
        let independent = context.new_stream().unwrap();
        // SAFETY: the stream lives as long as the process.
        let blocking =
            unsafe { context.wrap_borrowed_stream(create(StreamKind::Default).unwrap()) };
        let implicit = CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
        for (stream, first, end) in [
            (&independent, CUresult::CUDA_SUCCESS, CUresult::CUDA_SUCCESS),
            (
                &blocking,
                implicit,
                CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED,
            ),
        ] {
            stream
                .begin_capture(Mode::CU_STREAM_CAPTURE_MODE_RELAXED)
                .unwrap();
            assert_eq!(error(default.memset_zeros(&mut data)), first);
            assert_eq!(error(stream.end_capture(NO_FLAGS)), end);
        }
    });
}

#[test]
fn a_graph_that_is_destroyed_still_runs_what_was_launched() {
    StandIn::new().run(
        "graphs::a_graph_that_is_destroyed_still_runs_what_was_launched",
        || {
            let context = context();
            let stream = context.new_stream().unwrap();
            let kernel = kernel(&context, "stand_in_scale_add");
            let x = stream.clone_htod(&[1.0f32; 4]).unwrap();
            let mut out = stream.alloc_zeros::<f32>(4).unwrap();
            let graph = add_in_graph(&stream, &kernel, &mut out, &x, 1.0);
            graph.launch().unwrap();
            let (handle, stream_handle) = (graph.cu_graph_exec(), stream.cu_stream());
            drop(graph);
            // SAFETY: the stand-in knows that the handle is stale.
            let again = unsafe { sys::cuGraphLaunch(handle, stream_handle) };
            assert_eq!(again, CUresult::CUDA_ERROR_INVALID_VALUE);
            assert_eq!(stream.clone_dtoh(&out).unwrap(), [1.0; 4]);
            context.check_err().unwrap();
        },
    );
}
