//! The implementation of the exported entry points, generic over a backend.
//!
//! An entry point returns null or an error object, and never unwinds. A panic becomes an error; in Execute, where
//! the requests are ours, it becomes an error response to each of them, and the instance has failed: its state is
//! unknown, so it is dropped and never entered again.
//!
//! ```text
//! model_initialize     box a model into Triton's            model_finalize     drop it
//! instance_initialize  box an instance into Triton's        instance_finalize  drop it
//! instance_execute     wrap the requests, run, answer the requests that are left
//! instance_ready       whether the instance has not failed
//! batcher_initialize, batch_initialize, batch_includes    the strategy by which Triton forms batches of a model
//! ```

use std::any::TypeId;
use std::collections::BTreeSet;
use std::ffi::c_void;
use std::mem::ManuallyDrop;
use std::ptr::{self, NonNull};
use std::slice;

use parking_lot::Mutex;

use inflight_base::catch_panic;

use super::health::is_own_question;
use super::process_exit::{self, LoadedInstance};
use super::{BackendAttributes, Error, ErrorCode, Health, Instance, Model, Request, sys};

/// A backend: the types of its models and instances, and how they are loaded and executed.
pub trait Implementation: 'static {
    /// A loaded model, shared by its instances.
    type Model: Send + Sync;
    /// A loaded instance. Triton loads and executes it on different threads.
    type Instance: Send;

    /// Prepares the process, once.
    fn initialize() -> Result<(), Error>;

    /// Tells Triton how to load models.
    fn attributes(attributes: BackendAttributes) -> Result<(), Error>;

    /// Loads a model.
    fn load_model(model: Model) -> Result<Self::Model, Error>;

    /// Loads an instance of a model. One that fails between two Execute calls tells `health`.
    fn load_instance(
        model: &Self::Model,
        instance: Instance,
        health: Health,
    ) -> Result<Self::Instance, Error>;

    /// Executes requests. Those left in `requests` are answered with an error. After an error or a panic here the
    /// instance has failed, and is dropped.
    fn execute(instance: &mut Self::Instance, requests: &mut Vec<Request>) -> Result<(), Error>;

    /// Begins a batch of requests that Triton forms for a model. A batch that was begun before is sent or given up.
    fn begin_batch(model: &Self::Model);

    /// Whether a request joins the batch that was begun last. If not, the batch is sent without it. The request is
    /// Triton's.
    fn joins_batch(model: &Self::Model, request: &Request) -> Result<bool, Error>;
}

/// `TRITONBACKEND_Initialize`.
pub fn initialize<B: Implementation>() -> *mut sys::TRITONSERVER_Error {
    guard("TRITONBACKEND_Initialize", || {
        process_exit::come_first();
        B::initialize()
    })
}

/// `TRITONBACKEND_GetBackendAttribute`.
///
/// # Safety
/// `attributes` is null or alive during the call.
pub unsafe fn attributes<B: Implementation>(
    attributes: *mut sys::TRITONBACKEND_BackendAttribute,
) -> *mut sys::TRITONSERVER_Error {
    guard("TRITONBACKEND_GetBackendAttribute", || {
        let raw = non_null(attributes)?;
        // SAFETY: alive during the call.
        B::attributes(unsafe { BackendAttributes::from_raw(raw) })
    })
}

/// `TRITONBACKEND_ModelInitialize`.
///
/// # Safety
/// `model` is null or alive until [`model_finalize`].
pub unsafe fn model_initialize<B: Implementation>(
    model: *mut sys::TRITONBACKEND_Model,
) -> *mut sys::TRITONSERVER_Error {
    guard("TRITONBACKEND_ModelInitialize", || {
        let raw = non_null(model)?;
        // SAFETY: alive until ModelFinalize, which drops what `load_model` makes of it.
        let loaded = Box::new(B::load_model(unsafe { Model::from_raw(raw) })?);
        // SAFETY: alive during the call.
        let handle = unsafe { Model::from_raw(raw) };
        let key = model_key::<B>(NonNull::from(&*loaded));
        give(loaded, |state| handle.set_state(state))?;
        MODELS.lock().insert(key);
        Ok(())
    })
}

/// `TRITONBACKEND_ModelFinalize`. Triton calls it for a model that failed to load, too.
///
/// # Safety
/// `model` is null or alive during the call, and was given to [`model_initialize`] of the same `B`.
pub unsafe fn model_finalize<B: Implementation>(
    model: *mut sys::TRITONBACKEND_Model,
) -> *mut sys::TRITONSERVER_Error {
    guard("TRITONBACKEND_ModelFinalize", || {
        // SAFETY: alive during the call.
        let handle = unsafe { Model::from_raw(non_null(model)?) };
        // SAFETY: ModelInitialize stored a boxed B::Model or nothing.
        let state = unsafe { handle.state::<B::Model>() }?;
        handle.set_state::<B::Model>(None)?;
        if let Some(state) = state {
            MODELS.lock().remove(&model_key::<B>(state));
        }
        // SAFETY: it came out of a box, and the pointer to it has been cleared.
        drop(state.map(|state| unsafe { Box::from_raw(state.as_ptr()) }));
        Ok(())
    })
}

/// `TRITONBACKEND_ModelInstanceInitialize`.
///
/// # Safety
/// `instance` is null or alive until [`instance_finalize`], and its model was given to
/// [`model_initialize`] of the same `B`.
pub unsafe fn instance_initialize<B: Implementation>(
    instance: *mut sys::TRITONBACKEND_ModelInstance,
) -> *mut sys::TRITONSERVER_Error {
    guard("TRITONBACKEND_ModelInstanceInitialize", || {
        let raw = non_null(instance)?;
        // SAFETY: alive during the call.
        let handle = unsafe { Instance::from_raw(raw) };
        // SAFETY: the model outlives its instances; the handle is gone at the end of the call.
        let model = unsafe { handle.model() }?;
        // SAFETY: ModelInitialize stored a boxed B::Model or nothing.
        let model = unsafe { model.state::<B::Model>() }?
            .ok_or_else(|| Error::internal("the instance's model is not loaded"))?;
        // SAFETY: the model stays until ModelFinalize, which Triton calls after its instances are
        // gone, and is only ever shared.
        let model = unsafe { model.as_ref() };
        // SAFETY: alive until ModelInstanceFinalize, which drops what `load_instance` makes of it.
        let raw = unsafe { Instance::from_raw(raw) };
        let health = Health::default();
        let loaded = B::load_instance(model, raw, health.clone())?;
        let state = Box::new(InstanceState::<B>::new(loaded, health));
        give(state, |state| handle.set_state(state))
    })
}

/// `TRITONBACKEND_ModelInstanceFinalize`. Triton calls it for an instance that failed to load, too.
///
/// # Safety
/// `instance` is null or alive during the call, and was given to [`instance_initialize`] of the same
/// `B`; no other call for the instance is in progress.
pub unsafe fn instance_finalize<B: Implementation>(
    instance: *mut sys::TRITONBACKEND_ModelInstance,
) -> *mut sys::TRITONSERVER_Error {
    guard("TRITONBACKEND_ModelInstanceFinalize", || {
        // SAFETY: alive during the call.
        let handle = unsafe { Instance::from_raw(non_null(instance)?) };
        // SAFETY: ModelInstanceInitialize stored a boxed InstanceState<B> or nothing.
        let state = unsafe { handle.state::<InstanceState<B>>() }?;
        handle.set_state::<InstanceState<B>>(None)?;
        // SAFETY: it came out of a box, and the pointer to it has been cleared.
        drop(state.map(|state| unsafe { Box::from_raw(state.as_ptr()) }));
        Ok(())
    })
}

/// `TRITONBACKEND_ModelInstanceExecute`.
///
/// # Safety
/// `instance` is null or alive, and was given to [`instance_initialize`] of the same `B`. `requests`
/// points to `count` requests, which are ours if null is returned.
pub unsafe fn instance_execute<B: Implementation>(
    instance: *mut sys::TRITONBACKEND_ModelInstance,
    requests: *mut *mut sys::TRITONBACKEND_Request,
    count: u32,
) -> *mut sys::TRITONSERVER_Error {
    let found = guarded("TRITONBACKEND_ModelInstanceExecute", || {
        non_null(requests)?;
        // SAFETY: alive during the call.
        let handle = unsafe { Instance::from_raw(non_null(instance)?) };
        // SAFETY: ModelInstanceInitialize stored a boxed InstanceState<B> or nothing.
        unsafe { handle.state::<InstanceState<B>>() }?.ok_or_else(not_loaded)
    });
    let state = match found {
        Ok(state) => state,
        Err(error) => return error.into_raw(),
    };
    // ---- From here on the requests are ours: Triton gets success, whatever happens, and every error becomes a
    // response.
    // SAFETY: `requests` points to `count` requests.
    let requests = unsafe { slice::from_raw_parts(requests, count as usize) };
    // SAFETY: the state stays until ModelInstanceFinalize and is only ever shared.
    let state = unsafe { state.as_ref() };
    // SAFETY: the requests are alive, and nobody else answers or releases them.
    if let Err(panic) = catch_panic(|| unsafe { state.execute(requests) }) {
        log::error!("requests could not be answered: {panic}");
    }
    ptr::null_mut()
}

/// `TRITONBACKEND_ModelInstanceReady`, which servers since 25.12 call, from any thread, if it exists.
///
/// # Safety
/// `instance` is null or alive, and was given to [`instance_initialize`] of the same `B`.
pub unsafe fn instance_ready<B: Implementation>(
    instance: *mut sys::TRITONBACKEND_ModelInstance,
) -> *mut sys::TRITONSERVER_Error {
    guard("TRITONBACKEND_ModelInstanceReady", || {
        if is_own_question() {
            return Ok(());
        }
        // SAFETY: alive during the call.
        let handle = unsafe { Instance::from_raw(non_null(instance)?) };
        // SAFETY: ModelInstanceInitialize stored a boxed InstanceState<B> or nothing.
        let state = unsafe { handle.state::<InstanceState<B>>() }?.ok_or_else(not_loaded)?;
        // SAFETY: the state stays until ModelInstanceFinalize and is only ever shared.
        match unsafe { state.as_ref() }.health.failure() {
            Some(failure) => Err(failure),
            None => Ok(()),
        }
    })
}

/// `TRITONBACKEND_ModelBatcherInitialize`. The batcher is the model's state, which outlives it.
///
/// # Safety
/// `batcher` is null or points to a variable; `model` is null or alive during the call.
pub unsafe fn batcher_initialize<B: Implementation>(
    batcher: *mut *mut sys::TRITONBACKEND_Batcher,
    model: *mut sys::TRITONBACKEND_Model,
) -> *mut sys::TRITONSERVER_Error {
    guard("TRITONBACKEND_ModelBatcherInitialize", || {
        let batcher = non_null(batcher)?;
        // SAFETY: alive during the call.
        let handle = unsafe { Model::from_raw(non_null(model)?) };
        // SAFETY: the pointer is not used before it is known to be a B::Model of this library.
        let state = unsafe { handle.state::<B::Model>() }?;
        let ours = |state: &NonNull<B::Model>| MODELS.lock().contains(&model_key::<B>(*state));
        let state = state.filter(ours).ok_or_else(|| {
            Error::invalid(
                "this batch strategy belongs to the library that serves the model: make batchstrategy.so a link to \
                 the backend's library, not a copy",
            )
        })?;
        // SAFETY: it points to a variable of this type.
        unsafe { batcher.write(state.as_ptr().cast()) };
        Ok(())
    })
}

/// `TRITONBACKEND_ModelBatchInitialize`. The batch is the batcher: Triton forms one batch of a model at a time.
///
/// # Safety
/// `batcher` is null, or what [`batcher_initialize`] of the same `B` wrote, and its model has not been finalised;
/// `batch` is null or points to a variable.
pub unsafe fn batch_initialize<B: Implementation>(
    batcher: *const sys::TRITONBACKEND_Batcher,
    batch: *mut *mut c_void,
) -> *mut sys::TRITONSERVER_Error {
    guard("TRITONBACKEND_ModelBatchInitialize", || {
        let batch = non_null(batch)?;
        // SAFETY: null, or a B::Model that is only ever shared.
        if let Some(model) = unsafe { batcher.cast::<B::Model>().as_ref() } {
            B::begin_batch(model);
        }
        // SAFETY: it points to a variable of this type.
        unsafe { batch.write(batcher.cast_mut().cast()) };
        Ok(())
    })
}

/// `TRITONBACKEND_ModelBatchIncludeRequest`. After an error the request is included: Triton would look at it again and
/// again if a batch had none.
///
/// # Safety
/// `request` is null or alive during the call; `batch` is null, or what [`batch_initialize`] of the same `B` wrote, and
/// its model has not been finalised; `includes` is null or points to a variable.
pub unsafe fn batch_includes<B: Implementation>(
    request: *mut sys::TRITONBACKEND_Request,
    batch: *mut c_void,
    includes: *mut bool,
) -> *mut sys::TRITONSERVER_Error {
    guard("TRITONBACKEND_ModelBatchIncludeRequest", || {
        let includes = non_null(includes)?;
        // SAFETY: it points to a variable of this type.
        unsafe { includes.write(true) };
        // SAFETY: null, or a B::Model that is only ever shared.
        let Some(model) = (unsafe { batch.cast::<B::Model>().as_ref() }) else {
            return Ok(());
        };
        // SAFETY: alive during the call. It is only borrowed, and not dropped: Triton answers and releases it.
        let request = ManuallyDrop::new(unsafe { Request::from_raw(non_null(request)?) });
        let joins = B::joins_batch(model, &request)?;
        // SAFETY: as above.
        unsafe { includes.write(joins) };
        Ok(())
    })
}

/// The models that this library has loaded.
static MODELS: Mutex<BTreeSet<(TypeId, usize)>> = Mutex::new(BTreeSet::new());

fn model_key<B: Implementation>(state: NonNull<B::Model>) -> (TypeId, usize) {
    (TypeId::of::<B>(), state.addr().get())
}

/// What helps a failed instance.
const RELOAD: &str = "unload the model and load it again";

/// The state that Triton's instance holds.
struct InstanceState<B: Implementation> {
    /// Only Execute locks it, and Triton executes one batch at a time.
    running: Mutex<Running<B>>,
    /// Why the instance has failed; outside the lock, so that `ready` need not wait.
    health: Health,
    _loaded: LoadedInstance,
}

struct Running<B: Implementation> {
    /// `None` once it has failed.
    instance: Option<B::Instance>,
    /// The batch. Empty between calls, and kept for its allocation.
    requests: Vec<Request>,
}

impl<B: Implementation> InstanceState<B> {
    fn new(instance: B::Instance, health: Health) -> Self {
        Self {
            running: Mutex::new(Running {
                instance: Some(instance),
                requests: Vec::new(),
            }),
            health,
            _loaded: LoadedInstance::new(),
        }
    }

    /// Executes a batch, and answers all requests that the backend has left in it.
    ///
    /// # Safety
    /// The requests are alive, and nobody else answers or releases them.
    unsafe fn execute(&self, raw: &[*mut sys::TRITONBACKEND_Request]) {
        let mut running = self.running.lock();
        let Running { instance, requests } = &mut *running;
        requests.extend(raw.iter().filter_map(|&request| {
            // SAFETY: the caller's promise.
            NonNull::new(request).map(|request| unsafe { Request::from_raw(request) })
        }));
        if let Some(live) = instance {
            let failure = match catch_panic(|| B::execute(live, requests)) {
                Ok(Ok(())) => None,
                Ok(Err(error)) => Some(error.to_string()),
                Err(panic) => Some(panic),
            };
            if let Some(failure) = failure {
                log::error!("the instance has failed: {failure}");
                self.health.fail(&failure, RELOAD);
                // The instance is dropped first, so that what it still sends goes out before the errors.
                if let Err(panic) = catch_panic(|| drop(instance.take())) {
                    log::error!("the failed instance could not be dropped: {panic}");
                }
            }
        }
        match self.health.failure() {
            Some(failure) => requests
                .drain(..)
                .for_each(|request| request.fail(failure.clone())),
            None => requests.clear(),
        }
    }
}

/// Runs the body of an entry point and gives Triton its outcome.
fn guard(name: &str, body: impl FnOnce() -> Result<(), Error>) -> *mut sys::TRITONSERVER_Error {
    match guarded(name, body) {
        Ok(()) => ptr::null_mut(),
        Err(error) => error.into_raw(),
    }
}

/// Runs the body of an entry point; a panic becomes an error.
fn guarded<T>(name: &str, body: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
    catch_panic(body).unwrap_or_else(|panic| Err(Error::internal(format!("{name}: {panic}"))))
}

/// Stores a boxed state; if Triton refuses, it is dropped.
fn give<T>(
    state: Box<T>,
    store: impl FnOnce(Option<NonNull<T>>) -> Result<(), Error>,
) -> Result<(), Error> {
    let raw = NonNull::from(Box::leak(state));
    store(Some(raw)).inspect_err(|_| {
        // SAFETY: it was a box a line ago, and Triton has not taken it.
        drop(unsafe { Box::from_raw(raw.as_ptr()) });
    })
}

fn non_null<T>(raw: *mut T) -> Result<NonNull<T>, Error> {
    NonNull::new(raw).ok_or_else(|| Error::internal("Triton gave a null pointer"))
}

fn not_loaded() -> Error {
    Error::new(ErrorCode::Unavailable, "the instance is not loaded")
}
