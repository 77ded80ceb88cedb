//! Whether an instance can serve.

use std::cell::Cell;
use std::fmt::{self, Display};
use std::sync::Arc;

use parking_lot::Mutex;

use super::{Error, ErrorCode};

/// Whether an instance can serve, or why not. Its threads and Triton's share it.
#[derive(Clone, Default)]
pub struct Health(Arc<Mutex<State>>);

/// What is called with whether the instance has failed, when that changes.
type OnChange = Box<dyn FnMut(bool) + Send>;

#[derive(Default)]
struct State {
    /// The error for its requests, if it serves none.
    error: Option<Error>,
    on_change: Option<OnChange>,
}

impl Health {
    /// Has `on_change` called with whether the instance has failed, when that changes.
    pub fn watch(&self, on_change: impl FnMut(bool) + Send + 'static) {
        self.0.lock().on_change = Some(Box::new(on_change));
    }

    /// Says that the instance has failed, and serves no more. Only the first reason counts. `remedy` says what helps.
    pub fn fail(&self, reason: &impl Display, remedy: &str) {
        let mut state = self.0.lock();
        if state.error.is_some() {
            return;
        }
        state.error = Some(Error::new(
            ErrorCode::Unavailable,
            format!("the model instance has failed, {remedy}: {reason}"),
        ));
        state.tell(true);
    }

    /// Says that a failed instance serves again.
    pub fn recover(&self) {
        let mut state = self.0.lock();
        if state.error.take().is_some() {
            state.tell(false);
        }
    }

    /// Says that the instance serves no more because its model is unloaded. That is no failure.
    pub fn retire(&self, reason: &impl Display) {
        let mut state = self.0.lock();
        state.error = Some(Error::new(ErrorCode::Unavailable, reason.to_string()));
        state.tell(false);
        state.on_change = None;
    }

    /// Why the instance does not serve, if it does not: the error for its requests.
    pub fn failure(&self) -> Option<Error> {
        self.0.lock().error.clone()
    }
}

impl State {
    fn tell(&mut self, has_failed: bool) {
        if let Some(on_change) = &mut self.on_change {
            on_change(has_failed);
        }
    }
}

impl fmt::Debug for Health {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Health").field(&self.failure()).finish()
    }
}

thread_local! {
    static IS_ASKING: Cell<bool> = const { Cell::new(false) };
}

/// Asks the server about a model. Servers since 25.12 then ask its instances, all of which say that they are ready: the
/// question is whether the model is loaded, not whether an instance of it has failed.
pub(super) fn ask_for_model<T>(ask: impl FnOnce() -> T) -> T {
    IS_ASKING.set(true);
    let answer = ask();
    IS_ASKING.set(false);
    answer
}

/// Whether the question that an instance is asked comes from [`ask_for_model`].
pub(super) fn is_own_question() -> bool {
    IS_ASKING.get()
}
