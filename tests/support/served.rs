//! The real backend in the fake server: a loaded model, its requests, and their clients' responses.

use std::ffi::{CStr, CString};
use std::time::{Duration, Instant};

use inflight_base::TokenId;
use inflight_runner::next_token;
use inflight_triton::{DataType, lifecycle, sys};
use serde_json::{Value, json};
use triton_inflight::Inflight;

use crate::fake_triton::{Correlation, Host, Input, Parameter, Sent, Spec, Where};

pub type RawRequest = *mut sys::TRITONBACKEND_Request;
pub type RawInstance = *mut sys::TRITONBACKEND_ModelInstance;

/// Error code and message.
pub type Failure = (u32, String);

/// Handles an entry point's return value as Triton does: reads the error and deletes it.
///
/// # Safety
/// `error` is null or an error object whose ownership is passed on.
pub unsafe fn outcome(error: *mut sys::TRITONSERVER_Error) -> Result<(), Failure> {
    if error.is_null() {
        return Ok(());
    }
    // SAFETY: an entry point returns null or an error object that the caller owns.
    unsafe {
        let code = sys::TRITONSERVER_ErrorCode(error).0;
        let message = CStr::from_ptr(sys::TRITONSERVER_ErrorMessage(error));
        let message = message.to_string_lossy().into_owned();
        sys::TRITONSERVER_ErrorDelete(error);
        Err((code, message))
    }
}

const VOCAB_SIZE: u32 = 64;

/// A loaded model with one instance.
pub struct Server {
    pub host: Host,
    pub model: *mut sys::TRITONBACKEND_Model,
    instance: RawInstance,
    num_requests: u64,
}

/// A client's request.
#[derive(Clone)]
pub struct ClientRequest {
    pub prompt: Vec<TokenId>,
    pub max_tokens: usize,
    pub stream: bool,
    pub num_sequences: usize,
}

impl Server {
    pub fn load(parameters: &[(&str, &str)]) -> Self {
        let mut all = serde_json::Map::new();
        let vocab_size = VOCAB_SIZE.to_string();
        let common = [
            ("runner", "synthetic"),
            ("synthetic_vocab_size", &vocab_size),
        ];
        for (key, value) in common.iter().chain(parameters) {
            all.insert((*key).to_owned(), json!({ "string_value": value }));
        }
        Self::load_config(&json!({
            "name": "m", "backend": "inflight", "max_batch_size": 8,
            "input": [], "output": [], "parameters": all,
        }))
    }

    /// Loads a model with this configuration.
    pub fn load_config(config: &Value) -> Self {
        let host = Host::start();
        let model = host.model("m", &config.to_string());
        let instance = host.instance(model);
        // SAFETY: both handles are alive until `unload`.
        unsafe {
            outcome(lifecycle::model_initialize::<Inflight>(model)).expect("the model loads");
            outcome(lifecycle::instance_initialize::<Inflight>(instance))
                .expect("the instance loads");
        }
        Self {
            host,
            model,
            instance,
            num_requests: 0,
        }
    }

    /// A new request with its own sequence.
    pub fn request(&mut self, content: &ClientRequest) -> RawRequest {
        let spec = self.spec(content);
        self.host.request(spec)
    }

    /// A new request's specification, to be changed before it is sent.
    pub fn spec(&mut self, content: &ClientRequest) -> Spec {
        self.num_requests += 1;
        spec(content, Correlation::Number(self.num_requests))
    }

    pub fn request_as(&self, content: &ClientRequest, correlation: Correlation) -> RawRequest {
        self.host.request(spec(content, correlation))
    }

    /// Loads another instance of the model.
    pub fn load_instance(&self) -> RawInstance {
        let instance = self.host.instance(self.model);
        // SAFETY: the handle is alive until `unload_instance`.
        let loaded = unsafe { outcome(lifecycle::instance_initialize::<Inflight>(instance)) };
        loaded.expect("the instance loads");
        instance
    }

    /// Unloads an instance that was loaded besides.
    pub fn unload_instance(&self, instance: RawInstance) {
        // SAFETY: it was initialised, and no other call is in progress.
        let unloaded = unsafe { outcome(lifecycle::instance_finalize::<Inflight>(instance)) };
        assert_eq!(unloaded, Ok(()));
    }

    /// One Execute call with requests that the backend or Triton owns.
    pub fn execute(&self, batch: &[RawRequest]) -> Result<(), Failure> {
        self.execute_on(self.instance, batch)
    }

    /// One Execute call of an instance.
    pub fn execute_on(&self, instance: RawInstance, batch: &[RawRequest]) -> Result<(), Failure> {
        for &request in batch {
            if self.host.place(request) == Where::InQueue {
                self.host.again(request);
            }
        }
        let mut batch = batch.to_vec();
        let (list, count) = (batch.as_mut_ptr(), batch.len() as u32);
        // SAFETY: the instance is alive, and the backend owns the requests.
        unsafe {
            outcome(lifecycle::instance_execute::<Inflight>(
                instance, list, count,
            ))
        }
    }

    /// Executes others until the backend has left a cancelled request, which it keeps for a moment, to Triton.
    pub fn assert_left_to_triton(&self, cancelled: RawRequest, others: &[RawRequest]) {
        // One more step is enough, but not before that moment has passed.
        std::thread::sleep(Duration::from_millis(10));
        assert_eq!(self.execute(others), Ok(()));
        assert_eq!(self.host.place(cancelled), Where::InQueue);
    }

    /// Executes until the backend has released all of these requests.
    pub fn finish(&self, requests: &[RawRequest]) {
        for _ in 0..1000 {
            let left: Vec<_> = requests
                .iter()
                .copied()
                .filter(|request| self.host.place(*request) != Where::Released)
                .collect();
            if left.is_empty() {
                return;
            }
            assert_eq!(self.execute(&left), Ok(()));
        }
        panic!("a request did not end");
    }

    /// Waits for the last response of a released request, which the responder sends.
    pub fn wait_for_final(&self, request: RawRequest) {
        let is_final = |sent: &Sent| sent.is_final;
        self.wait_until("the final response", || {
            self.host.sent(request).last().is_some_and(is_final)
        });
    }

    /// Waits for a condition that another thread of the backend causes.
    pub fn wait_until(&self, what: &str, is_so: impl Fn() -> bool) {
        let deadline = Instant::now() + Duration::from_secs(30);
        while !is_so() {
            assert!(Instant::now() < deadline, "timed out: {what}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Number of used KV cache blocks, from the metrics.
    pub fn num_used_blocks(&self) -> f64 {
        self.gauge("nv_trt_llm_kv_cache_block_metrics", "used")
    }

    /// The gauge of a family with this label.
    pub fn gauge(&self, family: &str, label: &str) -> f64 {
        let families = self.host.families();
        let found = families.iter().find(|found| found.name == family);
        let has_label = |(_, value): &(String, String)| value == label;
        let mut metrics = found.expect("the family").metrics.iter();
        let found = metrics.find(|metric| metric.labels.iter().any(has_label));
        found.expect("the gauge").value
    }

    /// Whether the instance reports that it is ready.
    pub fn ready(&self) -> Result<(), Failure> {
        // SAFETY: the instance is alive.
        unsafe { outcome(lifecycle::instance_ready::<Inflight>(self.instance)) }
    }

    /// Unloads, which sends all pending responses.
    pub fn unload(&self) {
        // SAFETY: both were initialised, and no other call is in progress.
        unsafe {
            let instance = lifecycle::instance_finalize::<Inflight>(self.instance);
            assert_eq!(outcome(instance), Ok(()));
            assert_eq!(
                outcome(lifecycle::model_finalize::<Inflight>(self.model)),
                Ok(())
            );
        }
    }
}

fn spec(content: &ClientRequest, correlation: Correlation) -> Spec {
    let ids = content
        .prompt
        .iter()
        .flat_map(|id| (*id as i32).to_le_bytes())
        .collect();
    let mut parameters = vec![(
        c"max_tokens".to_owned(),
        Parameter::Int(content.max_tokens as i64),
    )];
    parameters.push(match content.stream {
        true => (c"stream".to_owned(), Parameter::Bool(true)),
        false => (c"exclude_input_in_output".to_owned(), Parameter::Bool(true)),
    });
    if content.num_sequences > 1 {
        // The synthetic runner does not sample, but a greedy request has only one sequence.
        parameters.push((c"temperature".to_owned(), Parameter::Double(1.0)));
        let n = Parameter::Int(content.num_sequences as i64);
        parameters.push((c"n".to_owned(), n));
    }
    let outputs = ["output_ids", "finish_reason", "num_output_tokens"];
    Spec {
        correlation,
        parameters,
        inputs: vec![Input {
            name: c"input_ids".to_owned(),
            data_type: DataType::Int32,
            shape: vec![1, content.prompt.len() as i64],
            buffers: vec![ids],
            on_gpu: false,
        }],
        outputs: outputs
            .map(|name| CString::new(name).expect("a name"))
            .into(),
        ..Spec::default()
    }
}

impl ClientRequest {
    pub fn of_lengths(prompt: usize, max_tokens: usize, stream: bool) -> Self {
        let prompt = (0..prompt).map(|i| (i * 7 % 64) as TokenId).collect();
        Self {
            prompt,
            max_tokens,
            stream,
            num_sequences: 1,
        }
    }

    pub fn of_sequences(self, num_sequences: usize) -> Self {
        Self {
            num_sequences,
            ..self
        }
    }

    /// The whole output of the synthetic runner.
    pub fn expected(&self) -> Vec<TokenId> {
        let mut tokens = self.prompt.clone();
        for _ in 0..self.max_tokens {
            tokens.push(next_token(&tokens, VOCAB_SIZE));
        }
        tokens.split_off(self.prompt.len())
    }
}

/// The tokens of an answer with one sequence, over all its responses.
pub fn output_ids(sent: &[Sent]) -> Vec<TokenId> {
    rows(sent, 1).remove(0)
}

/// The tokens of each row of an answer, over all its responses, without padding.
pub fn rows(sent: &[Sent], num_rows: usize) -> Vec<Vec<TokenId>> {
    let mut rows = vec![Vec::new(); num_rows];
    for sent in sent.iter().filter(|sent| !sent.outputs.is_empty()) {
        let (shape, ids) = numbers(sent, "output_ids");
        let (count_shape, counts) = numbers(sent, "num_output_tokens");
        assert_eq!(shape[..2], [1, num_rows as i64]);
        assert_eq!(count_shape, [1, num_rows as i64]);
        let width = shape[2] as usize;
        for (i, (row, count)) in rows.iter_mut().zip(counts).enumerate() {
            let num_new = count as usize - row.len();
            let ids = &ids[i * width..(i + 1) * width];
            row.extend(ids[..num_new].iter().map(|id| *id as TokenId));
            assert!(ids[num_new..].iter().all(|id| *id == 0), "the padding");
        }
    }
    rows
}

/// Shape and values of an output.
pub fn numbers(sent: &Sent, output: &str) -> (Vec<i64>, Vec<i32>) {
    let found = sent.outputs.iter().find(|(name, ..)| name == output);
    let (.., shape, bytes) = found.expect("the output is there");
    let (numbers, _) = bytes.as_chunks::<4>();
    let numbers = numbers.iter().map(|bytes| i32::from_le_bytes(*bytes));
    (shape.clone(), numbers.collect())
}

pub fn error_code(sent: &[Sent]) -> Option<u32> {
    sent.last()?.error.as_ref().map(|(code, _)| *code)
}

impl Drop for Server {
    /// Even a failed test leaves no thread of the backend to the next.
    fn drop(&mut self) {
        if std::thread::panicking() {
            // SAFETY: both were initialised, no other call is in progress, and unloading twice has no effect.
            unsafe {
                let _ = outcome(lifecycle::instance_finalize::<Inflight>(self.instance));
                let _ = outcome(lifecycle::model_finalize::<Inflight>(self.model));
            }
        }
    }
}
