//! TRITONSERVER_* functions for requests that a backend sends itself, and for the state of its model.

use std::ffi::{CString, c_char, c_void};
use std::ptr;

use inflight_triton::sys::{self, *};

use super::Correlation;
use super::server::{export, text};
use super::world::{FakeRequest, Submitted, handle, id, world};

/// A reply to the library: success.
const OK: *mut TRITONSERVER_Error = ptr::null_mut();

export! {
    fn TRITONBACKEND_ModelServer(
        _model: *mut TRITONBACKEND_Model,
        server: *mut *mut TRITONSERVER_Server,
    ) -> *mut TRITONSERVER_Error {
        server.write(handle(1));
        OK
    }

    fn TRITONSERVER_ServerModelIsReady(
        _server: *mut TRITONSERVER_Server,
        _name: *const c_char,
        _version: i64,
        ready: *mut bool,
    ) -> *mut TRITONSERVER_Error {
        // A backend is asked without the fake's lock.
        let (ask, instances, is_unloading) = {
            let mut world = world();
            if world.is_stopping {
                let code = TRITONSERVER_errorcode_enum::TRITONSERVER_ERROR_UNAVAILABLE;
                return world.error(code, "Server not ready");
            }
            let instances: Vec<_> = world.instances.keys().copied().collect();
            (world.asks_instances, instances, world.is_unloading)
        };
        let is_ready = |instance: usize| ask.is_none_or(|ask| {
            let error = ask(handle(instance));
            let is_ready = error.is_null();
            if !is_ready {
                sys::TRITONSERVER_ErrorDelete(error);
            }
            is_ready
        });
        ready.write(!is_unloading && instances.into_iter().all(is_ready));
        OK
    }

    fn TRITONSERVER_ServerMetadata(
        _server: *mut TRITONSERVER_Server,
        metadata: *mut *mut TRITONSERVER_Message,
    ) -> *mut TRITONSERVER_Error {
        let mut world = world();
        let made = world.new_id();
        let text = c"{\"name\":\"triton\",\"version\":\"2.51.0\"}";
        world.messages.insert(made, text.to_owned());
        metadata.write(handle(made));
        OK
    }

    fn TRITONSERVER_ServerInferAsync(
        _server: *mut TRITONSERVER_Server,
        request: *mut TRITONSERVER_InferenceRequest,
        _trace: *mut TRITONSERVER_InferenceTrace,
    ) -> *mut TRITONSERVER_Error {
        let mut world = world();
        let submitted = world.unsent.remove(&id(request)).expect("a request of the library's");
        if submitted.release.is_none() || submitted.answer.is_none() {
            world.violation("a request was sent without its callbacks");
        }
        world.submitted.insert(id(request), submitted);
        OK
    }

    fn TRITONSERVER_InferenceRequestNew(
        request: *mut *mut TRITONSERVER_InferenceRequest,
        _server: *mut TRITONSERVER_Server,
        _name: *const c_char,
        _version: i64,
    ) -> *mut TRITONSERVER_Error {
        let mut world = world();
        let (made, stream) = (world.new_id(), world.new_id());
        world.streams.insert(stream, Default::default());
        let fake = FakeRequest::new(CString::default(), stream, Vec::new());
        world.requests.insert(made, fake);
        world.unsent.insert(made, Submitted::default());
        request.write(handle(made));
        OK
    }

    fn TRITONSERVER_InferenceRequestDelete(
        request: *mut TRITONSERVER_InferenceRequest,
    ) -> *mut TRITONSERVER_Error {
        let mut world = world();
        let is_known = world.unsent.remove(&id(request)).or(world.submitted.remove(&id(request)));
        if is_known.is_none() {
            world.violation("delete of no request of the library's");
        }
        OK
    }

    fn TRITONSERVER_InferenceRequestSetId(
        request: *mut TRITONSERVER_InferenceRequest,
        name: *const c_char,
    ) -> *mut TRITONSERVER_Error {
        let name = CString::new(text(name)).expect("no NUL");
        world().requests.get_mut(&id(request)).expect("a request").client_id = name;
        OK
    }

    fn TRITONSERVER_InferenceRequestSetFlags(
        request: *mut TRITONSERVER_InferenceRequest,
        flags: u32,
    ) -> *mut TRITONSERVER_Error {
        world().requests.get_mut(&id(request)).expect("a request").flags = flags;
        OK
    }

    fn TRITONSERVER_InferenceRequestSetCorrelationId(
        request: *mut TRITONSERVER_InferenceRequest,
        number: u64,
    ) -> *mut TRITONSERVER_Error {
        let correlation = Correlation::Number(number);
        world().requests.get_mut(&id(request)).expect("a request").correlation = correlation;
        OK
    }

    fn TRITONSERVER_InferenceRequestSetCorrelationIdString(
        request: *mut TRITONSERVER_InferenceRequest,
        name: *const c_char,
    ) -> *mut TRITONSERVER_Error {
        let correlation = Correlation::Text(CString::new(text(name)).expect("no NUL"));
        world().requests.get_mut(&id(request)).expect("a request").correlation = correlation;
        OK
    }

    fn TRITONSERVER_InferenceRequestAddInput(
        request: *mut TRITONSERVER_InferenceRequest,
        name: *const c_char,
        _data_type: TRITONSERVER_DataType,
        shape: *const i64,
        num_dims: u64,
    ) -> *mut TRITONSERVER_Error {
        let shape = std::slice::from_raw_parts(shape, num_dims as usize).to_vec();
        let input = (text(name), shape);
        world().unsent.get_mut(&id(request)).expect("unsent").inputs.push(input);
        OK
    }

    fn TRITONSERVER_InferenceRequestAppendInputData(
        _request: *mut TRITONSERVER_InferenceRequest,
        _name: *const c_char,
        _base: *const c_void,
        byte_size: usize,
        _memory: TRITONSERVER_MemoryType,
        _device: i64,
    ) -> *mut TRITONSERVER_Error {
        if byte_size != 4 {
            world().violation("an id, or the length of a text, has 4 bytes");
        }
        OK
    }

    fn TRITONSERVER_InferenceRequestSetReleaseCallback(
        request: *mut TRITONSERVER_InferenceRequest,
        release: TRITONSERVER_InferenceRequestReleaseFn_t,
        _user: *mut c_void,
    ) -> *mut TRITONSERVER_Error {
        world().unsent.get_mut(&id(request)).expect("unsent").release = release;
        OK
    }

    fn TRITONSERVER_InferenceRequestSetResponseCallback(
        request: *mut TRITONSERVER_InferenceRequest,
        allocator: *mut TRITONSERVER_ResponseAllocator,
        _allocator_user: *mut c_void,
        answer: TRITONSERVER_InferenceResponseCompleteFn_t,
        _user: *mut c_void,
    ) -> *mut TRITONSERVER_Error {
        let mut world = world();
        if allocator.is_null() {
            world.violation("a request without an allocator");
        }
        world.unsent.get_mut(&id(request)).expect("unsent").answer = answer;
        OK
    }

    fn TRITONSERVER_InferenceResponseDelete(
        _response: *mut TRITONSERVER_InferenceResponse,
    ) -> *mut TRITONSERVER_Error {
        world().violation("nothing is answered with a response here");
        OK
    }

    fn TRITONSERVER_ResponseAllocatorNew(
        allocator: *mut *mut TRITONSERVER_ResponseAllocator,
        _allocate: TRITONSERVER_ResponseAllocatorAllocFn_t,
        _release: TRITONSERVER_ResponseAllocatorReleaseFn_t,
        _start: TRITONSERVER_ResponseAllocatorStartFn_t,
    ) -> *mut TRITONSERVER_Error {
        allocator.write(handle(1));
        OK
    }
}
