//! The records: every object that the fake server has created, by its number.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::ptr;

use inflight_triton::{DataType, sys};
use parking_lot::{Mutex, MutexGuard};

use super::{Correlation, Input, Parameter};

/// The owner of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Where {
    InBackend,
    InQueue,
    Released,
}

/// One response, or the final flag alone, as received by the client.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sent {
    /// Name, type, shape and bytes.
    pub outputs: Vec<(String, DataType, Vec<i64>, Vec<u8>)>,
    /// Texts beside the outputs, by name.
    pub parameters: Vec<(String, String)>,
    /// Error code and message.
    pub error: Option<(u32, String)>,
    pub is_final: bool,
    /// Whether it is a flag without a response.
    pub is_flag: bool,
    /// Whether the request had already been released.
    pub after_release: bool,
}

/// Request, success, and the four timestamps.
pub type RequestStatistics = (usize, bool, [u64; 4]);

/// Memory kind, device and bytes.
pub type MemoryReport = (u32, i64, usize);

#[derive(Clone, Debug, PartialEq)]
pub struct Family {
    pub kind: u32,
    pub name: String,
    pub help: String,
    pub metrics: Vec<Metric>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Metric {
    pub labels: Vec<(String, String)>,
    pub buckets: Vec<f64>,
    pub value: f64,
    pub observed: Vec<f64>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct LogRecord {
    pub level: u32,
    pub file: String,
    pub line: i32,
    pub message: String,
}

pub struct FakeRequest {
    pub place: Where,
    pub client_id: CString,
    pub correlation: Correlation,
    pub flags: u32,
    pub timeout_us: u64,
    /// Boxed, because the library gets pointers to the values.
    pub parameters: Vec<(CString, Box<Parameter>)>,
    pub inputs: Vec<usize>,
    pub outputs: Vec<CString>,
    pub stream: usize,
}

/// The responses that a request's client receives; outlives the request.
#[derive(Default)]
pub struct Stream {
    pub cancelled: bool,
    pub released: bool,
    pub sent: Vec<Sent>,
}

/// A request that the backend itself has created.
#[derive(Default)]
pub struct Submitted {
    /// Name and shape.
    pub inputs: Vec<(String, Vec<i64>)>,
    pub release: sys::TRITONSERVER_InferenceRequestReleaseFn_t,
    pub answer: sys::TRITONSERVER_InferenceResponseCompleteFn_t,
}

pub struct FakeInput {
    pub name: CString,
    pub data_type: u32,
    pub shape: Vec<i64>,
    pub buffers: Vec<Vec<u8>>,
    pub on_gpu: bool,
}

pub struct FakeResponse {
    pub stream: usize,
    pub outputs: Vec<usize>,
    pub parameters: Vec<(String, String)>,
}

pub struct FakeOutput {
    pub name: String,
    pub data_type: DataType,
    pub shape: Vec<i64>,
    pub buffer: Vec<u8>,
}

pub struct FakeModel {
    pub name: CString,
    pub config: String,
    pub state: *mut std::ffi::c_void,
}

pub struct FakeInstance {
    pub model: usize,
    pub state: *mut std::ffi::c_void,
    /// Its GPU, if it is of KIND_GPU.
    pub gpu: Option<i32>,
}

// SAFETY: the state pointers are stored for the library and never dereferenced here.
unsafe impl Send for World {}

/// The entry point that says whether an instance is ready.
pub type AskInstance =
    unsafe fn(*mut sys::TRITONBACKEND_ModelInstance) -> *mut sys::TRITONSERVER_Error;

#[derive(Default)]
pub struct World {
    last_id: usize,
    pub errors: BTreeMap<usize, (u32, CString)>,
    pub messages: BTreeMap<usize, CString>,
    pub models: BTreeMap<usize, FakeModel>,
    pub instances: BTreeMap<usize, FakeInstance>,
    pub requests: BTreeMap<usize, FakeRequest>,
    pub inputs: BTreeMap<usize, FakeInput>,
    pub streams: BTreeMap<usize, Stream>,
    /// Requests that the backend creates, before and after it has sent them.
    pub unsent: BTreeMap<usize, Submitted>,
    pub submitted: BTreeMap<usize, Submitted>,
    /// The request that is cancelled in the middle of its release.
    pub cancelled_in_release: Option<usize>,
    pub is_stopping: bool,
    /// How a question for a model is passed on to its instances, as servers since 25.12 do.
    pub asks_instances: Option<AskInstance>,
    pub is_unloading: bool,
    /// Factory to stream.
    pub factories: BTreeMap<usize, usize>,
    pub responses: BTreeMap<usize, FakeResponse>,
    pub outputs: BTreeMap<usize, FakeOutput>,
    /// Family to its index in `families_seen`.
    pub families: BTreeMap<usize, usize>,
    /// Metric to its family and its index there.
    pub metrics: BTreeMap<usize, (usize, usize)>,
    pub families_seen: Vec<Family>,
    pub labels: BTreeMap<usize, (String, String)>,
    pub metric_arguments: BTreeMap<usize, Vec<f64>>,
    pub buffer_attributes: BTreeMap<usize, MemoryReport>,
    pub memory: Vec<MemoryReport>,
    pub preferred_groups: Vec<(u32, u64)>,
    pub request_statistics: Vec<RequestStatistics>,
    pub batch_statistics: Vec<[u64; 5]>,
    pub log: Vec<LogRecord>,
    pub verbose: bool,
    pub no_metrics: bool,
    pub refuse_reschedule: bool,
    /// The stream whose responses are blocked.
    pub held_stream: Option<usize>,
    pub gpu_buffers: bool,
    pub violations: Vec<String>,
}

static WORLD: Mutex<Option<World>> = Mutex::new(None);

/// Locks the records.
pub fn world() -> parking_lot::MappedMutexGuard<'static, World> {
    MutexGuard::map(WORLD.lock(), |world| world.get_or_insert_default())
}

/// The handle with this number. It is not memory: only the records know the object.
pub fn handle<T>(id: usize) -> *mut T {
    ptr::without_provenance_mut(id)
}

pub fn id<T>(handle: *const T) -> usize {
    handle.addr()
}

impl World {
    /// A new number, never zero, so that it is not a null pointer.
    pub fn new_id(&mut self) -> usize {
        self.last_id += 16;
        self.last_id
    }

    pub fn violation(&mut self, text: impl Into<String>) {
        self.violations.push(text.into());
    }

    /// Creates an error object for the library.
    pub fn error(
        &mut self,
        code: sys::TRITONSERVER_Error_Code,
        message: &str,
    ) -> *mut sys::TRITONSERVER_Error {
        let error = self.new_id();
        let message = CString::new(message).expect("no NUL in the fake's own messages");
        self.errors.insert(error, (code.0, message));
        handle(error)
    }

    pub fn invalid(&mut self, message: &str) -> *mut sys::TRITONSERVER_Error {
        self.error(
            sys::TRITONSERVER_Error_Code::TRITONSERVER_ERROR_INVALID_ARG,
            message,
        )
    }

    pub fn add_input(&mut self, input: FakeInput) -> usize {
        let id = self.new_id();
        self.inputs.insert(id, input);
        id
    }

    /// The request, if the backend owns it and so may use it.
    pub fn request(
        &mut self,
        request: *mut sys::TRITONBACKEND_Request,
        what: &str,
    ) -> &mut FakeRequest {
        let known = self.requests.get(&id(request)).map(|request| request.place);
        if known != Some(Where::InBackend) {
            self.violation(format!("{what} of a request that is {known:?}"));
        }
        self.requests
            .get_mut(&id(request))
            .expect("a request of this test")
    }

    pub fn stream_of(&mut self, request: usize) -> &mut Stream {
        let stream = self.requests[&request].stream;
        self.streams
            .get_mut(&stream)
            .expect("a request has a stream")
    }

    /// The objects that a test has not released, in words.
    pub fn left_over(&self) -> Vec<String> {
        let mut left = Vec::new();
        for (count, what) in [
            (self.errors.len(), "errors"),
            (self.messages.len(), "messages"),
            (self.factories.len(), "response factories"),
            (self.responses.len(), "responses"),
            (self.families.len(), "metric families"),
            (self.metrics.len(), "metrics"),
            (self.labels.len(), "metric labels"),
            (self.metric_arguments.len(), "metric arguments"),
            (self.buffer_attributes.len(), "buffer attributes"),
            (self.unsent.len(), "requests of the backend's own, unsent"),
            (self.submitted.len(), "requests of the backend's own"),
        ] {
            if count > 0 {
                left.push(format!("{count} {what}"));
            }
        }
        for request in self.requests.values() {
            let finals = self.streams[&request.stream]
                .sent
                .iter()
                .filter(|sent| sent.is_final)
                .count();
            match (request.place, finals) {
                (Where::Released, 1) | (Where::InQueue, 0) => {}
                (place, finals) => left.push(format!("a request {place:?} with {finals} finals")),
            }
        }
        let states = self.models.values().map(|model| model.state);
        let states = states.chain(self.instances.values().map(|instance| instance.state));
        if states.filter(|state| !state.is_null()).count() > 0 {
            left.push("the state of a model or an instance".to_owned());
        }
        left
    }
}

impl FakeRequest {
    pub fn new(client_id: CString, stream: usize, inputs: Vec<usize>) -> Self {
        Self {
            place: Where::InBackend,
            client_id,
            correlation: Correlation::Number(0),
            flags: 0,
            timeout_us: 0,
            parameters: Vec::new(),
            inputs,
            outputs: Vec::new(),
            stream,
        }
    }

    pub fn set_parameters(&mut self, parameters: Vec<(CString, Parameter)>) {
        self.parameters = parameters
            .into_iter()
            .map(|(name, value)| (name, Box::new(value)))
            .collect();
    }
}

impl FakeModel {
    pub fn new(name: &str, config: &str) -> Self {
        Self {
            name: CString::new(name).expect("no NUL"),
            config: config.to_owned(),
            state: ptr::null_mut(),
        }
    }
}

impl FakeInstance {
    pub fn new(model: usize) -> Self {
        Self {
            model,
            state: ptr::null_mut(),
            gpu: None,
        }
    }
}

impl From<Input> for FakeInput {
    fn from(input: Input) -> Self {
        Self {
            name: input.name,
            data_type: raw_type(input.data_type),
            shape: input.shape,
            buffers: input.buffers,
            on_gpu: input.on_gpu,
        }
    }
}

/// Triton's number of a type; `DataType` lists them in Triton's order, from 1.
fn raw_type(data_type: DataType) -> u32 {
    data_type as u32 + 1
}
