//! TRITONBACKEND_* of requests and their inputs.

use std::ffi::{c_char, c_void};
use std::ptr;

use inflight_triton::sys::{self, *};

use super::server::export;
use super::world::{Where, handle, id, world};
use super::{Correlation, Parameter};

/// A reply to the library: success.
const OK: *mut TRITONSERVER_Error = ptr::null_mut();

export! {
    fn TRITONBACKEND_RequestId(
        request: *mut TRITONBACKEND_Request,
        client_id: *mut *const c_char,
    ) -> *mut TRITONSERVER_Error {
        client_id.write(world().request(request, "id").client_id.as_ptr());
        OK
    }

    fn TRITONBACKEND_RequestCorrelationId(
        request: *mut TRITONBACKEND_Request,
        number: *mut u64,
    ) -> *mut TRITONSERVER_Error {
        let mut world = world();
        match world.request(request, "correlation id").correlation {
            Correlation::Number(value) => number.write(value),
            Correlation::Text(_) => {
                return world.invalid("correlation ID in request is not an unsigned int");
            }
        }
        OK
    }

    fn TRITONBACKEND_RequestCorrelationIdString(
        request: *mut TRITONBACKEND_Request,
        text: *mut *const c_char,
    ) -> *mut TRITONSERVER_Error {
        let mut world = world();
        match &world.request(request, "correlation id").correlation {
            Correlation::Text(value) => text.write(value.as_ptr()),
            Correlation::Number(_) => {
                return world.invalid("correlation ID in request is not a string");
            }
        }
        OK
    }

    fn TRITONBACKEND_RequestFlags(
        request: *mut TRITONBACKEND_Request,
        flags: *mut u32,
    ) -> *mut TRITONSERVER_Error {
        flags.write(world().request(request, "flags").flags);
        OK
    }

    fn TRITONBACKEND_InferenceRequestTimeoutMicroseconds(
        request: *mut TRITONBACKEND_Request,
        timeout: *mut u64,
    ) -> *mut TRITONSERVER_Error {
        timeout.write(world().request(request, "timeout").timeout_us);
        OK
    }

    fn TRITONBACKEND_RequestIsCancelled(
        request: *mut TRITONBACKEND_Request,
        is_cancelled: *mut bool,
    ) -> *mut TRITONSERVER_Error {
        let mut world = world();
        world.request(request, "cancellation");
        is_cancelled.write(world.stream_of(id(request)).cancelled);
        OK
    }

    fn TRITONSERVER_InferenceRequestCancel(
        request: *mut TRITONSERVER_InferenceRequest,
    ) -> *mut TRITONSERVER_Error {
        let mut world = world();
        world.request(request.cast(), "cancel");
        world.stream_of(id(request)).cancelled = true;
        OK
    }

    fn TRITONBACKEND_RequestParameterCount(
        request: *mut TRITONBACKEND_Request,
        count: *mut u32,
    ) -> *mut TRITONSERVER_Error {
        count.write(world().request(request, "parameters").parameters.len() as u32);
        OK
    }

    fn TRITONBACKEND_RequestParameter(
        request: *mut TRITONBACKEND_Request,
        index: u32,
        key: *mut *const c_char,
        kind: *mut TRITONSERVER_ParameterType,
        value: *mut *const c_void,
    ) -> *mut TRITONSERVER_Error {
        use TRITONSERVER_ParameterType as Kind;
        let mut world = world();
        let (name, parameter) = &world.request(request, "parameter").parameters[index as usize];
        key.write(name.as_ptr());
        let (of_kind, at): (_, *const c_void) = match &**parameter {
            Parameter::Bool(value) => {
                (Kind::TRITONSERVER_PARAMETER_BOOL, ptr::from_ref(value).cast())
            }
            Parameter::Int(value) => {
                (Kind::TRITONSERVER_PARAMETER_INT, ptr::from_ref(value).cast())
            }
            Parameter::Double(value) => {
                (Kind::TRITONSERVER_PARAMETER_DOUBLE, ptr::from_ref(value).cast())
            }
            Parameter::String(value) => {
                (Kind::TRITONSERVER_PARAMETER_STRING, value.as_ptr().cast())
            }
            Parameter::Bytes => (Kind::TRITONSERVER_PARAMETER_BYTES, c"".as_ptr().cast()),
        };
        kind.write(of_kind);
        value.write(at);
        OK
    }

    fn TRITONBACKEND_RequestInputCount(
        request: *mut TRITONBACKEND_Request,
        count: *mut u32,
    ) -> *mut TRITONSERVER_Error {
        count.write(world().request(request, "inputs").inputs.len() as u32);
        OK
    }

    fn TRITONBACKEND_RequestInputByIndex(
        request: *mut TRITONBACKEND_Request,
        index: u32,
        input: *mut *mut TRITONBACKEND_Input,
    ) -> *mut TRITONSERVER_Error {
        input.write(handle(world().request(request, "input").inputs[index as usize]));
        OK
    }

    fn TRITONBACKEND_RequestOutputCount(
        request: *mut TRITONBACKEND_Request,
        count: *mut u32,
    ) -> *mut TRITONSERVER_Error {
        count.write(world().request(request, "outputs").outputs.len() as u32);
        OK
    }

    fn TRITONBACKEND_RequestOutputName(
        request: *mut TRITONBACKEND_Request,
        index: u32,
        name: *mut *const c_char,
    ) -> *mut TRITONSERVER_Error {
        name.write(world().request(request, "output").outputs[index as usize].as_ptr());
        OK
    }

    fn TRITONBACKEND_InputProperties(
        input: *mut TRITONBACKEND_Input,
        name: *mut *const c_char,
        data_type: *mut TRITONSERVER_DataType,
        shape: *mut *const i64,
        num_dims: *mut u32,
        byte_size: *mut u64,
        num_buffers: *mut u32,
    ) -> *mut TRITONSERVER_Error {
        let world = world();
        let input = &world.inputs[&id(input)];
        name.write(input.name.as_ptr());
        data_type.write(TRITONSERVER_datatype_enum(input.data_type));
        shape.write(input.shape.as_ptr());
        num_dims.write(input.shape.len() as u32);
        byte_size.write(input.buffers.iter().map(|buffer| buffer.len() as u64).sum());
        num_buffers.write(input.buffers.len() as u32);
        OK
    }

    fn TRITONBACKEND_InputBuffer(
        input: *mut TRITONBACKEND_Input,
        index: u32,
        buffer: *mut *const c_void,
        byte_size: *mut u64,
        memory: *mut TRITONSERVER_MemoryType,
        device: *mut i64,
    ) -> *mut TRITONSERVER_Error {
        let world = world();
        let input = &world.inputs[&id(input)];
        let data = &input.buffers[index as usize];
        buffer.write(data.as_ptr().cast());
        byte_size.write(data.len() as u64);
        memory.write(if input.on_gpu {
            TRITONSERVER_MemoryType::TRITONSERVER_MEMORY_GPU
        } else {
            TRITONSERVER_MemoryType::TRITONSERVER_MEMORY_CPU
        });
        device.write(0);
        OK
    }

    fn TRITONBACKEND_RequestRelease(
        request: *mut TRITONBACKEND_Request,
        flags: u32,
    ) -> *mut TRITONSERVER_Error {
        use TRITONSERVER_RequestReleaseFlag as Flag;
        let mut world = world();
        world.request(request, "release");
        let place = match tritonserver_requestreleaseflag_enum(flags) {
            Flag::TRITONSERVER_REQUEST_RELEASE_ALL => Where::Released,
            Flag::TRITONSERVER_REQUEST_RELEASE_RESCHEDULE if world.refuse_reschedule => {
                return world.invalid(
                    "inference request for sequence 1 to model 'm' must specify the START flag on the \
                     first request of the sequence",
                );
            }
            Flag::TRITONSERVER_REQUEST_RELEASE_RESCHEDULE => Where::InQueue,
            other => {
                world.violation(format!("release with flags {other:?}"));
                return OK;
            }
        };
        world.request(request, "release").place = place;
        if place == Where::Released {
            world.stream_of(id(request)).released = true;
            if world.cancelled_in_release == Some(id(request)) {
                world.stream_of(id(request)).cancelled = true;
            }
            if let Some(release) = world.submitted.get(&id(request)).and_then(|own| own.release) {
                drop(world);
                release(request.cast(), flags, ptr::null_mut());
            }
        }
        OK
    }
}
