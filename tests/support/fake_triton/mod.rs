//! An in-process fake tritonserver: it defines the C functions that the library imports, so that test
//! executables link, and tracks every object.
//!
//! Objects are numbers known only to the fake's records, never memory. So a use after delete, a double
//! delete, or a response after the final one is found and recorded, where the real server might or might not
//! crash. Objects that remain at the end of a test are leaks.
//!
//! [`Host::start`] starts the records of one test at a time; dropping the host checks them.

#![allow(
    unsafe_op_in_unsafe_fn,
    reason = "every function here is called by the library under test with pointers to its variables"
)]
#![allow(dead_code, reason = "each test executable uses a part")]

mod models;
mod own_requests;
mod requests;
mod responses;
mod server;
mod world;

use std::ffi::CString;
use std::thread;

use inflight_triton::{DataType, sys};
use parking_lot::{Mutex, MutexGuard};

pub use world::{AskInstance, Family, LogRecord, MemoryReport, RequestStatistics, Sent, Where};
use world::{FakeInput, FakeInstance, FakeModel, FakeRequest, Submitted, World, handle, id, world};

/// The fake server, for one test at a time.
pub struct Host {
    _turn: MutexGuard<'static, ()>,
}

/// A request to be created. The default is the first one of sequence 1, without inputs or parameters.
pub struct Spec {
    pub client_id: CString,
    pub correlation: Correlation,
    pub flags: u32,
    pub timeout_us: u64,
    pub parameters: Vec<(CString, Parameter)>,
    pub inputs: Vec<Input>,
    pub outputs: Vec<CString>,
}

/// A request that the backend itself has sent.
pub struct Submission {
    pub request: *mut sys::TRITONBACKEND_Request,
    pub correlation: Correlation,
    /// Name and shape.
    pub inputs: Vec<(String, Vec<i64>)>,
}

#[derive(Debug, PartialEq)]
pub enum Correlation {
    Number(u64),
    Text(CString),
}

#[derive(Clone)]
pub enum Parameter {
    Bool(bool),
    Int(i64),
    Double(f64),
    String(CString),
    Bytes,
}

/// An input tensor, with its data in any number of buffers.
pub struct Input {
    pub name: CString,
    pub data_type: DataType,
    pub shape: Vec<i64>,
    pub buffers: Vec<Vec<u8>>,
    pub on_gpu: bool,
}

impl Input {
    /// A request's text.
    pub fn text(text: &str) -> Self {
        let num_bytes = (text.len() as u32).to_le_bytes();
        Self {
            name: c"text_input".to_owned(),
            data_type: DataType::Bytes,
            shape: vec![1, 1],
            buffers: vec![[&num_bytes[..], text.as_bytes()].concat()],
            on_gpu: false,
        }
    }
}

impl Default for Spec {
    fn default() -> Self {
        Self {
            client_id: CString::default(),
            correlation: Correlation::Number(1),
            flags: START,
            timeout_us: 0,
            parameters: Vec::new(),
            inputs: Vec::new(),
            outputs: Vec::new(),
        }
    }
}

/// The flag of a sequence's first request.
pub const START: u32 = sys::TRITONSERVER_RequestFlag::TRITONSERVER_REQUEST_FLAG_SEQUENCE_START.0;

static TURN: Mutex<()> = Mutex::new(());

impl Host {
    /// Waits for its turn and starts empty records.
    pub fn start() -> Self {
        let turn = TURN.lock();
        *world() = World::default();
        Self { _turn: turn }
    }

    pub fn attributes(&self) -> *mut sys::TRITONBACKEND_BackendAttribute {
        handle(world().new_id())
    }

    pub fn model(&self, name: &str, config: &str) -> *mut sys::TRITONBACKEND_Model {
        let mut world = world();
        let model = world.new_id();
        world.models.insert(model, FakeModel::new(name, config));
        handle(model)
    }

    pub fn instance(
        &self,
        model: *mut sys::TRITONBACKEND_Model,
    ) -> *mut sys::TRITONBACKEND_ModelInstance {
        let mut world = world();
        let instance = world.new_id();
        world
            .instances
            .insert(instance, FakeInstance::new(id(model)));
        handle(instance)
    }

    /// Gives an instance a GPU, as one of `KIND_GPU` has.
    pub fn give_gpu(&self, instance: *mut sys::TRITONBACKEND_ModelInstance, gpu: i32) {
        let mut world = world();
        let instance = world.instances.get_mut(&id(instance));
        instance.expect("an instance").gpu = Some(gpu);
    }

    /// Creates a request and passes it to the backend.
    pub fn request(&self, spec: Spec) -> *mut sys::TRITONBACKEND_Request {
        let mut world = world();
        let request = world.new_id();
        let stream = world.new_id();
        world.streams.insert(stream, Default::default());
        let inputs: Vec<_> = spec.inputs.into_iter().map(FakeInput::from).collect();
        let inputs = inputs
            .into_iter()
            .map(|input| world.add_input(input))
            .collect();
        world
            .requests
            .insert(request, FakeRequest::new(spec.client_id, stream, inputs));
        let made = world.requests.get_mut(&request).expect("just inserted");
        made.correlation = spec.correlation;
        made.flags = spec.flags;
        made.timeout_us = spec.timeout_us;
        made.outputs = spec.outputs;
        made.set_parameters(spec.parameters);
        handle(request)
    }

    /// Passes a rescheduled request to the backend again.
    pub fn again(&self, request: *mut sys::TRITONBACKEND_Request) {
        let mut world = world();
        let request = world.requests.get_mut(&id(request)).expect("a request");
        assert_eq!(
            request.place,
            Where::InQueue,
            "the request was not rescheduled"
        );
        request.place = Where::InBackend;
        request.flags = 0;
    }

    /// The client disconnects.
    pub fn cancel(&self, request: *mut sys::TRITONBACKEND_Request) {
        world().stream_of(id(request)).cancelled = true;
    }

    /// The client disconnects while the backend releases the request: after the backend's check, before
    /// Triton's.
    pub fn cancel_in_release(&self, request: *mut sys::TRITONBACKEND_Request) {
        world().cancelled_in_release = Some(id(request));
    }

    /// The requests that the backend itself has sent, with the shapes of their inputs; the backend owns them
    /// now.
    pub fn submitted(&self) -> Vec<Submission> {
        let world = world();
        let one = |(request, submitted): (&usize, &Submitted)| Submission {
            request: handle(*request),
            correlation: match &world.requests[request].correlation {
                Correlation::Number(number) => Correlation::Number(*number),
                Correlation::Text(text) => Correlation::Text(text.clone()),
            },
            inputs: submitted.inputs.clone(),
        };
        world.submitted.iter().map(one).collect()
    }

    /// Sets whether the server is unloading the model.
    pub fn unload_model(&self, on: bool) {
        world().is_unloading = on;
    }

    /// The server shuts down.
    pub fn stop_server(&self) {
        world().is_stopping = true;
    }

    /// From now on the server passes questions for a model on to its instances, as servers since 25.12 do.
    pub fn ask_instances(&self, ask: AskInstance) {
        world().asks_instances = Some(ask);
    }

    /// What the server's health endpoint says of a model.
    pub fn is_model_ready(&self) -> bool {
        let mut is_ready = false;
        // SAFETY: the fake server reads no pointer but the last, which is that of a variable.
        let error = unsafe {
            sys::TRITONSERVER_ServerModelIsReady(
                std::ptr::null_mut(),
                c"m".as_ptr(),
                1,
                &raw mut is_ready,
            )
        };
        assert!(error.is_null());
        is_ready
    }

    /// Whether a request has been cancelled, by its client or by the backend.
    pub fn is_cancelled(&self, request: *mut sys::TRITONBACKEND_Request) -> bool {
        world().stream_of(id(request)).cancelled
    }

    /// Blocks the sending of responses to this request from now on; `None` unblocks them.
    pub fn hold_responses(&self, request: Option<*mut sys::TRITONBACKEND_Request>) {
        let mut world = world();
        world.held_stream = request.map(|request| world.requests[&id(request)].stream);
    }

    /// Sets whether Triton refuses to reschedule, as it does for a sequence that has idled out.
    pub fn refuse_reschedule(&self, on: bool) {
        world().refuse_reschedule = on;
    }

    /// From now on, allocates outputs in GPU memory only.
    pub fn give_gpu_buffers(&self) {
        world().gpu_buffers = true;
    }

    /// Makes the server one without metrics.
    pub fn disable_metrics(&self) {
        world().no_metrics = true;
    }

    /// Sets the verbose log.
    pub fn set_verbose(&self, on: bool) {
        world().verbose = on;
    }

    /// The location of a request.
    pub fn place(&self, request: *mut sys::TRITONBACKEND_Request) -> Where {
        world().requests[&id(request)].place
    }

    /// The responses sent to a request's client.
    pub fn sent(&self, request: *mut sys::TRITONBACKEND_Request) -> Vec<Sent> {
        world().stream_of(id(request)).sent.clone()
    }

    /// Number of response factories that the backend still holds.
    pub fn num_factories(&self) -> usize {
        world().factories.len()
    }

    /// Number of existing metrics.
    pub fn num_metrics(&self) -> usize {
        world().metrics.len()
    }

    /// The reported statistics of requests and of batches.
    pub fn statistics(&self) -> (Vec<RequestStatistics>, Vec<[u64; 5]>) {
        let world = world();
        (
            world.request_statistics.clone(),
            world.batch_statistics.clone(),
        )
    }

    /// The configuration that the backend set last.
    pub fn config(&self, model: *mut sys::TRITONBACKEND_Model) -> String {
        world().models[&id(model)].config.clone()
    }

    /// Preferred instance groups: kind and count.
    pub fn preferred_groups(&self) -> Vec<(u32, u64)> {
        world().preferred_groups.clone()
    }

    /// The reported memory.
    pub fn memory(&self) -> Vec<MemoryReport> {
        world().memory.clone()
    }

    /// Every metric family ever created, with its metrics.
    pub fn families(&self) -> Vec<Family> {
        world().families_seen.clone()
    }

    pub fn log(&self) -> Vec<LogRecord> {
        world().log.clone()
    }

    /// Takes the list of violations: calls that the real server would not survive.
    pub fn take_violations(&self) -> Vec<String> {
        std::mem::take(&mut world().violations)
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        if !thread::panicking() {
            let world = world();
            assert_eq!(world.violations, Vec::<String>::new(), "misuse of the API");
            assert_eq!(world.left_over(), Vec::<String>::new(), "leaked");
        }
    }
}
