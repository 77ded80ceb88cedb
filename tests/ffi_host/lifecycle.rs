//! The entry points, with a backend that fails on request.

use std::ffi::{CStr, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicUsize, Ordering};

use inflight_triton::lifecycle::{self, Implementation};
use inflight_triton::{
    BackendAttributes, Completion, Error, Health, Instance, Model, Request, ResponseFactory,
    check_api_version, sys,
};
use parking_lot::Mutex;

use crate::fake_triton::{Host, Spec, Where};
use crate::{Failure, INTERNAL, INVALID, UNAVAILABLE, error_codes, outcome};

/// The place where the backend fails, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    Error(&'static str),
    Panic(&'static str),
    /// A panic whose payload is not a text.
    Odd(&'static str),
}

static FAULTS: Mutex<Vec<Fault>> = Mutex::new(Vec::new());
static NUM_EXECUTED: AtomicUsize = AtomicUsize::new(0);
static NUM_BATCHES: AtomicUsize = AtomicUsize::new(0);
static NUM_LOADED: AtomicUsize = AtomicUsize::new(0);

fn set_faults(faults: &[Fault]) {
    *FAULTS.lock() = faults.to_vec();
}

fn fault_at(place: &'static str) -> Result<(), Error> {
    let faults = FAULTS.lock().clone();
    if faults.contains(&Fault::Panic(place)) {
        panic!("told to panic in {place}");
    }
    if faults.contains(&Fault::Odd(place)) {
        std::panic::panic_any(7);
    }
    if faults.contains(&Fault::Error(place)) {
        return Err(Error::invalid(format!("told to fail in {place}")));
    }
    Ok(())
}

struct Scripted;

/// Counts loaded objects, so that a missing drop is noticed.
struct Loaded<T> {
    handle: T,
    /// Factories as a responder thread would hold them for the sequences in flight.
    factories: Vec<ResponseFactory>,
}

impl<T> Loaded<T> {
    fn new(handle: T) -> Self {
        NUM_LOADED.fetch_add(1, Ordering::Relaxed);
        let factories = Vec::new();
        Self { handle, factories }
    }
}

impl<T> Drop for Loaded<T> {
    fn drop(&mut self) {
        NUM_LOADED.fetch_sub(1, Ordering::Relaxed);
        for factory in &self.factories {
            // Fails if the request has been answered.
            let _ = factory
                .new_response()
                .and_then(|response| response.send(Completion::Partial));
        }
        let _ = fault_at("drop");
    }
}

impl Implementation for Scripted {
    type Model = Loaded<Model>;
    type Instance = Loaded<Instance>;

    fn initialize() -> Result<(), Error> {
        fault_at("initialize")?;
        check_api_version()
    }

    fn attributes(attributes: BackendAttributes) -> Result<(), Error> {
        fault_at("attributes")?;
        attributes.prefer_cpu_instances(1)
    }

    fn load_model(model: Model) -> Result<Self::Model, Error> {
        fault_at("load_model")?;
        Ok(Loaded::new(model))
    }

    fn load_instance(
        model: &Self::Model,
        instance: Instance,
        _: Health,
    ) -> Result<Self::Instance, Error> {
        assert_eq!(model.handle.name(), Ok("m"));
        fault_at("load_instance")?;
        Ok(Loaded::new(instance))
    }

    fn begin_batch(_: &Self::Model) {
        NUM_BATCHES.fetch_add(1, Ordering::Relaxed);
    }

    fn joins_batch(_: &Self::Model, request: &Request) -> Result<bool, Error> {
        fault_at("joins_batch")?;
        Ok(request.client_id()? != Some("alone"))
    }

    fn execute(instance: &mut Self::Instance, requests: &mut Vec<Request>) -> Result<(), Error> {
        NUM_EXECUTED.fetch_add(1, Ordering::Relaxed);
        assert_eq!(instance.handle.name(), Ok("m_0_0"));
        // One request is left in the batch, one is being processed at the time of the fault, the others are
        // done.
        let in_hand = requests.pop();
        for request in requests.drain(1.min(requests.len())..) {
            request.dismiss();
        }
        for request in requests.iter_mut() {
            instance.factories.push(request.response_factory()?);
        }
        if let Some(mut request) = in_hand {
            instance.factories.push(request.response_factory()?);
            fault_at("execute")?;
            request.dismiss();
        }
        Ok(())
    }
}

/// A loaded backend with one model and one instance; unloaded again by `unload`.
struct Stage {
    host: Host,
    model: *mut sys::TRITONBACKEND_Model,
    instance: *mut sys::TRITONBACKEND_ModelInstance,
}

impl Stage {
    fn empty() -> Self {
        let host = Host::start();
        set_faults(&[]);
        NUM_EXECUTED.store(0, Ordering::Relaxed);
        NUM_LOADED.store(0, Ordering::Relaxed);
        let model = host.model("m", "{}");
        let instance = host.instance(model);
        Self {
            host,
            model,
            instance,
        }
    }

    fn loaded() -> Self {
        let stage = Self::empty();
        stage.load().expect("loaded");
        stage
    }

    /// Loads as Triton does, stopping at the first error.
    fn load(&self) -> Result<(), Failure> {
        // SAFETY: the handles are alive to the end of the test.
        unsafe {
            outcome(lifecycle::initialize::<Scripted>())?;
            outcome(lifecycle::attributes::<Scripted>(self.host.attributes()))?;
            outcome(lifecycle::model_initialize::<Scripted>(self.model))?;
            outcome(lifecycle::instance_initialize::<Scripted>(self.instance))
        }
    }

    /// Unloads as Triton does, including what failed to load.
    fn unload(&self) -> [Result<(), Failure>; 2] {
        // SAFETY: as above, and both were given to their initialisation.
        unsafe {
            [
                outcome(lifecycle::instance_finalize::<Scripted>(self.instance)),
                outcome(lifecycle::model_finalize::<Scripted>(self.model)),
            ]
        }
    }

    fn execute(&self, requests: &[*mut sys::TRITONBACKEND_Request]) -> Result<(), Failure> {
        let mut requests = requests.to_vec();
        let count = requests.len() as u32;
        let list = requests.as_mut_ptr();
        // SAFETY: the instance is alive, and the backend owns the requests.
        unsafe {
            outcome(lifecycle::instance_execute::<Scripted>(
                self.instance,
                list,
                count,
            ))
        }
    }

    fn ready(&self) -> Result<(), Failure> {
        // SAFETY: the instance is alive.
        unsafe { outcome(lifecycle::instance_ready::<Scripted>(self.instance)) }
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            assert_eq!(
                NUM_LOADED.load(Ordering::Relaxed),
                0,
                "an object was not dropped"
            );
        }
    }
}

#[test]
fn a_backend_loads_executes_and_unloads() {
    let stage = Stage::loaded();
    assert_eq!(stage.ready(), Ok(()));
    let requests = [(); 4].map(|()| stage.host.request(Spec::default()));
    assert_eq!(stage.execute(&requests), Ok(()));
    for (index, request) in requests.into_iter().enumerate() {
        assert_eq!(stage.host.place(request), Where::Released);
        // Only the request that the backend left in the batch is answered with an error.
        let sent = stage.host.sent(request);
        assert_eq!(sent[0].error.is_some(), index == 0, "{index}: {sent:?}");
    }
    assert_eq!(stage.ready(), Ok(()));
    assert_eq!(stage.unload(), [Ok(()), Ok(())]);
    assert_eq!(stage.ready().expect_err("unloaded").0, UNAVAILABLE);
}

#[test]
fn an_error_while_loading_is_returned_to_triton_and_leaks_nothing() {
    for place in ["initialize", "attributes", "load_model", "load_instance"] {
        let stage = Stage::empty();
        set_faults(&[Fault::Error(place)]);
        let failure = (INVALID, format!("told to fail in {place}"));
        assert_eq!(stage.load(), Err(failure));
        assert_eq!(stage.unload(), [Ok(()), Ok(())]);
    }
}

#[test]
fn a_panic_while_loading_becomes_an_error_and_leaks_nothing() {
    for (place, entry) in [
        ("initialize", "TRITONBACKEND_Initialize"),
        ("attributes", "TRITONBACKEND_GetBackendAttribute"),
        ("load_model", "TRITONBACKEND_ModelInitialize"),
        ("load_instance", "TRITONBACKEND_ModelInstanceInitialize"),
    ] {
        let stage = Stage::empty();
        set_faults(&[Fault::Panic(place)]);
        let failure = (
            INTERNAL,
            format!("{entry}: panic: told to panic in {place}"),
        );
        assert_eq!(stage.load(), Err(failure));
        assert_eq!(stage.unload(), [Ok(()), Ok(())]);
    }
}

#[test]
fn a_panic_while_unloading_becomes_an_error() {
    let stage = Stage::loaded();
    set_faults(&[Fault::Panic("drop")]);
    for failure in stage.unload() {
        assert_eq!(failure.expect_err("a panic").0, INTERNAL);
    }
    assert_eq!(stage.unload(), [Ok(()), Ok(())]);
}

/// Checks the requests of a batch in which the backend fails, and of the next batch.
fn check_that_the_instance_fails(fault: Fault, says: &str) {
    let stage = Stage::loaded();
    set_faults(&[fault]);
    let requests = [(); 4].map(|()| stage.host.request(Spec::default()));
    assert_eq!(stage.execute(&requests), Ok(()), "the requests were ours");
    for request in [requests[0], requests[3]] {
        let sent = stage.host.sent(request);
        let last = sent.last().expect("an answer");
        assert!(last.is_final && last.error.is_some());
        assert_eq!(stage.host.place(request), Where::Released);
    }
    let (code, message) = stage.host.sent(requests[0])[1]
        .error
        .clone()
        .expect("an error");
    assert_eq!(code, UNAVAILABLE);
    assert!(message.contains(says), "{message}");
    assert_eq!(stage.ready(), Err((code, message.clone())));

    // The fault is gone, but the instance's state is unknown.
    set_faults(&[]);
    let later = stage.host.request(Spec::default());
    assert_eq!(stage.execute(&[later]), Ok(()));
    assert_eq!(stage.host.sent(later)[0].error, Some((code, message)));
    assert_eq!(NUM_EXECUTED.load(Ordering::Relaxed), 1);
    assert_eq!(stage.unload(), [Ok(()), Ok(())]);
}

#[test]
fn a_panic_in_execute_answers_every_request_and_fails_the_instance() {
    check_that_the_instance_fails(Fault::Panic("execute"), "panic: told to panic in execute");
}

#[test]
fn a_panic_without_a_text_is_caught_too() {
    check_that_the_instance_fails(Fault::Odd("execute"), "panic without a message");
}

#[test]
fn an_error_from_execute_answers_every_request_and_fails_the_instance() {
    check_that_the_instance_fails(Fault::Error("execute"), "told to fail in execute");
}

#[test]
fn a_second_panic_while_the_failed_instance_is_dropped_has_no_effect() {
    let stage = Stage::loaded();
    set_faults(&[Fault::Panic("execute"), Fault::Panic("drop")]);
    let requests = [(); 2].map(|()| stage.host.request(Spec::default()));
    assert_eq!(stage.execute(&requests), Ok(()));
    set_faults(&[]);
    for request in requests {
        assert_eq!(stage.host.place(request), Where::Released);
    }
    assert_eq!(stage.unload(), [Ok(()), Ok(())]);
}

#[test]
fn a_failed_instance_sends_pending_responses_before_its_requests_get_errors() {
    let stage = Stage::loaded();
    set_faults(&[Fault::Panic("execute")]);
    let requests = [(); 2].map(|()| stage.host.request(Spec::default()));
    assert_eq!(stage.execute(&requests), Ok(()));
    let codes = error_codes(&stage.host, requests[0]);
    assert_eq!(codes, [None, Some(UNAVAILABLE)]);
    // The request being processed was answered during the panic, and gets nothing more.
    let codes = error_codes(&stage.host, requests[1]);
    assert_eq!(codes, [Some(INTERNAL)]);
    assert_eq!(stage.unload(), [Ok(()), Ok(())]);
}

#[test]
fn requests_for_an_instance_that_is_not_loaded_still_belong_to_triton() {
    let stage = Stage::empty();
    let request = stage.host.request(Spec::default());
    assert_eq!(
        stage.execute(&[request]).expect_err("not loaded").0,
        UNAVAILABLE
    );
    assert_eq!(stage.host.place(request), Where::InBackend);
    // The fake server's own way to take it back.
    stage.load().expect("loaded");
    assert_eq!(stage.execute(&[request]), Ok(()));
    assert_eq!(stage.unload(), [Ok(()), Ok(())]);
}

#[test]
fn null_pointers_become_errors() {
    let _host = Host::start();
    // SAFETY: null is allowed everywhere.
    let outcomes = unsafe {
        [
            outcome(lifecycle::attributes::<Scripted>(null_mut())),
            outcome(lifecycle::model_initialize::<Scripted>(null_mut())),
            outcome(lifecycle::model_finalize::<Scripted>(null_mut())),
            outcome(lifecycle::instance_initialize::<Scripted>(null_mut())),
            outcome(lifecycle::instance_finalize::<Scripted>(null_mut())),
            outcome(lifecycle::instance_ready::<Scripted>(null_mut())),
            outcome(lifecycle::instance_execute::<Scripted>(
                null_mut(),
                null_mut(),
                0,
            )),
            outcome(lifecycle::batcher_initialize::<Scripted>(
                null_mut(),
                null_mut(),
            )),
            outcome(lifecycle::batch_initialize::<Scripted>(
                null_mut(),
                null_mut(),
            )),
            outcome(lifecycle::batch_includes::<Scripted>(
                null_mut(),
                null_mut(),
                null_mut(),
            )),
        ]
    };
    for outcome in outcomes {
        assert_eq!(outcome.expect_err("null").0, INTERNAL);
    }
}

/// Asks whether a request joins a batch.
fn includes(request: *mut sys::TRITONBACKEND_Request, batch: *mut c_void) -> (bool, Option<u32>) {
    let mut includes = false;
    // SAFETY: the request is alive; the batch is null or of the model of this test, which is loaded.
    let asked = unsafe { lifecycle::batch_includes::<Scripted>(request, batch, &raw mut includes) };
    // SAFETY: what an entry point returned.
    let error = unsafe { outcome(asked) }.err();
    (includes, error.map(|(code, _)| code))
}

#[test]
fn the_batch_strategy_sees_the_model_and_borrows_requests() {
    let stage = Stage::loaded();
    let (mut batcher, mut batch) = (null_mut(), null_mut());
    let num_batches = NUM_BATCHES.load(Ordering::Relaxed);
    // SAFETY: the model is loaded, and the pointers are variables.
    unsafe {
        let made = lifecycle::batcher_initialize::<Scripted>(&raw mut batcher, stage.model);
        assert_eq!(outcome(made), Ok(()));
        let begun = lifecycle::batch_initialize::<Scripted>(batcher, &raw mut batch);
        assert_eq!(outcome(begun), Ok(()));
    }
    assert_eq!(NUM_BATCHES.load(Ordering::Relaxed), num_batches + 1);
    let named = |name: &CStr| {
        stage.host.request(Spec {
            client_id: name.to_owned(),
            ..Spec::default()
        })
    };
    let (joins, alone) = (named(c"joins"), named(c"alone"));
    assert_eq!(includes(joins, batch), (true, None));
    assert_eq!(includes(alone, batch), (false, None));
    // Triton would look at a request again and again if a batch had none.
    set_faults(&[Fault::Error("joins_batch")]);
    assert_eq!(includes(alone, batch), (true, Some(INVALID)));
    set_faults(&[Fault::Panic("joins_batch")]);
    assert_eq!(includes(alone, batch), (true, Some(INTERNAL)));
    set_faults(&[]);
    // Triton clears the batcher before it stops to form batches.
    assert_eq!(includes(alone, null_mut()), (true, None));
    // SAFETY: as above.
    let begun = unsafe { lifecycle::batch_initialize::<Scripted>(null_mut(), &raw mut batch) };
    // SAFETY: what an entry point returned.
    assert_eq!(unsafe { outcome(begun) }, Ok(()));
    assert!(batch.is_null());
    assert_eq!(stage.execute(&[joins, alone]), Ok(()));
    assert_eq!(stage.unload(), [Ok(()), Ok(())]);
}

#[test]
fn a_batch_strategy_for_a_model_that_the_library_has_not_loaded_is_refused() {
    let stage = Stage::empty();
    let mut batcher = null_mut();
    // SAFETY: the model is alive, and the pointer a variable.
    let made = unsafe {
        outcome(lifecycle::batcher_initialize::<Scripted>(
            &raw mut batcher,
            stage.model,
        ))
    };
    let (code, message) = made.expect_err("not a model of this library");
    assert_eq!(code, INVALID);
    assert!(
        message.contains("a link to the backend's library, not a copy"),
        "{message}"
    );
    assert!(batcher.is_null());
}
