//! Collective operations of several devices.

use std::ffi::{CStr, c_int, c_void};
use std::mem::transmute;
use std::sync::Arc;
use std::thread;

use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode_enum as Mode};
use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr};
use inflight_cuda_stand_in::StandIn;

const FLOAT_32: c_int = 7;
const INVALID_ARGUMENT: c_int = 4;
const INVALID_USAGE: c_int = 5;

#[repr(C)]
#[derive(Clone, Copy)]
struct UniqueId([u8; 128]);

/// A function of the library, by its name.
fn function(name: &CStr) -> *mut c_void {
    // SAFETY: both are C strings.
    let found = unsafe {
        let library = libc::dlopen(c"libnccl.so.2".as_ptr(), libc::RTLD_NOW);
        assert!(!library.is_null(), "the stand-in for NCCL");
        libc::dlsym(library, name.as_ptr())
    };
    assert!(!found.is_null(), "{name:?}");
    found
}

fn unique_id() -> UniqueId {
    let mut id = UniqueId([0; 128]);
    // SAFETY: the function of this name has this type.
    unsafe {
        let get: extern "C" fn(*mut UniqueId) -> c_int = transmute(function(c"ncclGetUniqueId"));
        assert_eq!(get(&raw mut id), 0);
    }
    id
}

/// A rank on the device of its number.
struct Rank {
    comm: *mut c_void,
    stream: Arc<CudaStream>,
}

impl Rank {
    fn join(id: UniqueId, rank: usize, num_ranks: usize) -> Self {
        let context = CudaContext::new(rank).expect("a device");
        // SAFETY: each slice is used in one stream.
        unsafe { context.disable_event_tracking() };
        let mut comm = std::ptr::null_mut();
        // SAFETY: as above.
        unsafe {
            let init: extern "C" fn(*mut *mut c_void, c_int, UniqueId, c_int) -> c_int =
                transmute(function(c"ncclCommInitRank"));
            let joined = init(&raw mut comm, num_ranks as c_int, id, rank as c_int);
            assert_eq!(joined, 0);
        }
        let stream = context.new_stream().expect("a stream");
        Self { comm, stream }
    }

    fn sum(&self, values: &CudaSlice<f32>, len: usize) -> c_int {
        let (address, _guard) = values.device_ptr(&self.stream);
        // SAFETY: as above.
        unsafe {
            type Sum =
                extern "C" fn(u64, u64, usize, c_int, c_int, *mut c_void, *mut c_void) -> c_int;
            let sum: Sum = transmute(function(c"ncclAllReduce"));
            let stream = self.stream.cu_stream().cast();
            sum(address, address, len, FLOAT_32, 0, self.comm, stream)
        }
    }

    fn async_error(&self) -> c_int {
        let mut error = 0;
        // SAFETY: as above.
        unsafe {
            let get: extern "C" fn(*mut c_void, *mut c_int) -> c_int =
                transmute(function(c"ncclCommGetAsyncError"));
            assert_eq!(get(self.comm, &raw mut error), 0);
        }
        error
    }

    fn abort(self) {
        // SAFETY: as above.
        unsafe {
            let abort: extern "C" fn(*mut c_void) -> c_int = transmute(function(c"ncclCommAbort"));
            assert_eq!(abort(self.comm), 0);
        }
        self.stream.synchronize().expect("the work has ended");
    }
}

/// Runs something on each of three ranks.
fn on_ranks(body: impl Fn(usize, Rank) + Sync) {
    let id = unique_id();
    thread::scope(|scope| {
        for rank in 0..3 {
            let body = &body;
            scope.spawn(move || body(rank, Rank::join(id, rank, 3)));
        }
    });
}

#[test]
fn ranks_sum_in_streams_and_in_graphs() {
    let stand_in = StandIn::new().set("DEVICES", 3);
    stand_in.run("nccl::ranks_sum_in_streams_and_in_graphs", || {
        on_ranks(|rank, own| {
            let values = own.stream.clone_htod(&[rank as f32, 1.0]).unwrap();
            assert_eq!(own.sum(&values, 2), 0);
            assert_eq!(own.stream.clone_dtoh(&values).unwrap(), [3.0, 3.0]);
            let begun = own
                .stream
                .begin_capture(Mode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
            begun.unwrap();
            assert_eq!(own.sum(&values, 2), 0);
            let graph = own.stream.end_capture(CUgraphInstantiate_flags(0));
            let graph = graph.unwrap().expect("a graph");
            for _ in 0..4 {
                graph.launch().unwrap();
            }
            assert_eq!(own.stream.clone_dtoh(&values).unwrap(), [243.0, 243.0]);
            own.abort();
        });
    });
}

#[test]
fn other_counts_are_an_error_and_a_missing_rank_is_waited_for_until_the_end() {
    let stand_in = StandIn::new().set("DEVICES", 3);
    let test = "nccl::other_counts_are_an_error_and_a_missing_rank_is_waited_for_until_the_end";
    stand_in.run(test, || {
        on_ranks(|rank, own| {
            let values = own.stream.clone_htod(&[1.0, 1.0]).unwrap();
            assert_eq!(own.sum(&values, 3), INVALID_ARGUMENT, "beyond the memory");
            assert_eq!(own.sum(&values, if rank == 1 { 1 } else { 2 }), 0);
            own.stream.synchronize().unwrap();
            assert_eq!(own.async_error(), INVALID_USAGE);
            assert_eq!(own.stream.clone_dtoh(&values).unwrap(), [1.0, 1.0]);
            own.abort();
        });
        on_ranks(|rank, own| {
            let values = own.stream.clone_htod(&[1.0, 1.0]).unwrap();
            if rank < 2 {
                assert_eq!(own.sum(&values, 2), 0);
            }
            own.abort();
        });
    });
}
