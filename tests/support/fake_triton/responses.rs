//! TRITONBACKEND_* of response factories and responses.

use std::ffi::{c_char, c_void};
use std::ptr;

use inflight_triton::DataType;
use inflight_triton::sys::{self, *};

use super::server::{export, text};
use super::world::{FakeOutput, FakeRequest, FakeResponse, Sent, Where, World, handle, id, world};

/// A reply to the library: success.
const OK: *mut TRITONSERVER_Error = ptr::null_mut();

export! {
    fn TRITONBACKEND_ResponseFactoryNew(
        factory: *mut *mut TRITONBACKEND_ResponseFactory,
        request: *mut TRITONBACKEND_Request,
    ) -> *mut TRITONSERVER_Error {
        let mut world = world();
        let stream = world.request(request, "factory").stream;
        let made = world.new_id();
        world.factories.insert(made, stream);
        factory.write(handle(made));
        OK
    }

    fn TRITONBACKEND_ResponseFactoryDelete(
        factory: *mut TRITONBACKEND_ResponseFactory,
    ) -> *mut TRITONSERVER_Error {
        let mut world = world();
        if world.factories.remove(&id(factory)).is_none() {
            world.violation("delete of no response factory");
        }
        OK
    }

    fn TRITONBACKEND_ResponseFactoryIsCancelled(
        factory: *mut TRITONBACKEND_ResponseFactory,
        is_cancelled: *mut bool,
    ) -> *mut TRITONSERVER_Error {
        let world = world();
        is_cancelled.write(world.streams[&world.factories[&id(factory)]].cancelled);
        OK
    }

    fn TRITONBACKEND_ResponseFactorySendFlags(
        factory: *mut TRITONBACKEND_ResponseFactory,
        flags: u32,
    ) -> *mut TRITONSERVER_Error {
        let mut world = world();
        let stream = world.factories[&id(factory)];
        deliver(&mut world, stream, flags, Sent { is_flag: true, ..Sent::default() });
        OK
    }

    fn TRITONBACKEND_ResponseNewFromFactory(
        response: *mut *mut TRITONBACKEND_Response,
        factory: *mut TRITONBACKEND_ResponseFactory,
    ) -> *mut TRITONSERVER_Error {
        let mut world = world();
        let stream = world.factories[&id(factory)];
        let made = world.new_id();
        world.responses.insert(made, FakeResponse { stream, outputs: Vec::new(), parameters: Vec::new() });
        response.write(handle(made));
        OK
    }

    fn TRITONBACKEND_ResponseDelete(
        response: *mut TRITONBACKEND_Response,
    ) -> *mut TRITONSERVER_Error {
        let mut world = world();
        match world.responses.remove(&id(response)) {
            Some(response) => response.outputs.iter().for_each(|output| {
                world.outputs.remove(output);
            }),
            None => world.violation("delete of no response"),
        }
        OK
    }

    fn TRITONBACKEND_ResponseSetStringParameter(
        response: *mut TRITONBACKEND_Response,
        name: *const c_char,
        value: *const c_char,
    ) -> *mut TRITONSERVER_Error {
        let parameter = (text(name), text(value));
        let mut world = world();
        world.responses.get_mut(&id(response)).expect("a response").parameters.push(parameter);
        OK
    }

    fn TRITONBACKEND_ResponseOutput(
        response: *mut TRITONBACKEND_Response,
        output: *mut *mut TRITONBACKEND_Output,
        name: *const c_char,
        data_type: TRITONSERVER_DataType,
        shape: *const i64,
        num_dims: u32,
    ) -> *mut TRITONSERVER_Error {
        let name = text(name);
        let shape = std::slice::from_raw_parts(shape, num_dims as usize).to_vec();
        let data_type = data_type_of(data_type);
        let mut world = world();
        let made = world.new_id();
        world.outputs.insert(made, FakeOutput { name, data_type, shape, buffer: Vec::new() });
        world.responses.get_mut(&id(response)).expect("a response").outputs.push(made);
        output.write(handle(made));
        OK
    }

    fn TRITONBACKEND_OutputBuffer(
        output: *mut TRITONBACKEND_Output,
        buffer: *mut *mut c_void,
        byte_size: u64,
        memory: *mut TRITONSERVER_MemoryType,
        _device: *mut i64,
    ) -> *mut TRITONSERVER_Error {
        let mut world = world();
        if world.gpu_buffers {
            memory.write(TRITONSERVER_MemoryType::TRITONSERVER_MEMORY_GPU);
        }
        let output = world.outputs.get_mut(&id(output)).expect("an output");
        // Not zero, so that bytes that the library does not write are noticed.
        output.buffer = vec![0xa5; byte_size as usize];
        buffer.write(output.buffer.as_mut_ptr().cast());
        OK
    }

    fn TRITONBACKEND_ResponseSend(
        response: *mut TRITONBACKEND_Response,
        flags: u32,
        error: *mut TRITONSERVER_Error,
    ) -> *mut TRITONSERVER_Error {
        let mut world = world();
        while let Some(held) = world.held_stream
            && world.responses.get(&id(response)).is_some_and(|it| it.stream == held)
        {
            drop(world);
            std::thread::yield_now();
            world = self::world();
        }
        let Some(response) = world.responses.remove(&id(response)) else {
            world.violation("send of no response");
            return OK;
        };
        let mut sent = Sent { parameters: response.parameters, ..Sent::default() };
        for output in response.outputs {
            let output = world.outputs.remove(&output).expect("an output");
            sent.outputs.push((output.name, output.data_type, output.shape, output.buffer));
        }
        // The library keeps ownership of the error.
        sent.error = world.errors.get(&id(error)).map(|(code, message)| {
            (*code, message.to_string_lossy().into_owned())
        });
        deliver(&mut world, response.stream, flags, sent);
        OK
    }
}

fn deliver(world: &mut World, stream: usize, flags: u32, mut sent: Sent) {
    // Triton may delete a released request at any time; a later response would use memory that the frontend
    // has freed.
    let in_queue =
        |request: &FakeRequest| request.stream == stream && request.place == Where::InQueue;
    if world.requests.values().any(in_queue) {
        world.violation("a response to a request that Triton has back");
    }
    let stream = world.streams.get_mut(&stream).expect("a stream");
    let ended = stream.sent.iter().any(|sent| sent.is_final);
    sent.is_final =
        flags == TRITONSERVER_ResponseCompleteFlag::TRITONSERVER_RESPONSE_COMPLETE_FINAL.0;
    sent.after_release = stream.released;
    stream.sent.push(sent);
    if ended {
        world.violation("a response after the final one");
    }
}

fn data_type_of(raw: TRITONSERVER_DataType) -> DataType {
    match raw {
        TRITONSERVER_DataType::TRITONSERVER_TYPE_INT32 => DataType::Int32,
        TRITONSERVER_DataType::TRITONSERVER_TYPE_INT64 => DataType::Int64,
        TRITONSERVER_DataType::TRITONSERVER_TYPE_FP32 => DataType::Fp32,
        TRITONSERVER_DataType::TRITONSERVER_TYPE_BYTES => DataType::Bytes,
        other => panic!("no test writes outputs of type {other:?}"),
    }
}
