//! Forwards the batch manager's callbacks to the application's C functions.

use std::ffi::c_void;

use inflight_base::{RequestError, SequenceId};
use inflight_manager::{HostTensors, TensorCallbacks, TensorRequest};

use crate::abi::{Batch, Callbacks, Stops};
use crate::responses::{BorrowedTensors, c_text};

/// The application's callbacks. The required ones are not null.
pub(crate) struct CCallbacks {
    functions: Callbacks,
    /// The application has said that there will be no more requests.
    has_last: bool,
}

// SAFETY: by the header, callbacks are called on the manager's thread.
unsafe impl Send for CCallbacks {}

impl CCallbacks {
    /// # Safety
    /// The functions must conform to the header and, like their context, outlive this value.
    pub(crate) unsafe fn new(callbacks: Callbacks) -> Result<Self, String> {
        for (name, is_set) in [
            ("get_requests", callbacks.get_requests.is_some()),
            ("send_response", callbacks.send_response.is_some()),
        ] {
            if !is_set {
                return Err(format!("{name} may not be NULL"));
            }
        }
        Ok(Self {
            functions: callbacks,
            has_last: false,
        })
    }

    fn context(&self) -> *mut c_void {
        self.functions.context
    }
}

impl TensorCallbacks for CCallbacks {
    fn get_requests(
        &mut self,
        max_num_requests: usize,
        _is_idle: bool,
    ) -> Option<Vec<TensorRequest>> {
        let get = self.functions.get_requests.filter(|_| !self.has_last)?;
        let max = i32::try_from(max_num_requests).unwrap_or(i32::MAX);
        let mut batch = Batch::default();
        // SAFETY: the function conforms to the header; the batch is valid during the call.
        self.has_last = unsafe { get(self.context(), max, &mut batch) } != 0;
        (!self.has_last || !batch.0.is_empty()).then_some(batch.0)
    }

    fn send_response(
        &mut self,
        id: SequenceId,
        tensors: &HostTensors,
        is_final: bool,
        error: &str,
    ) {
        let Some(send) = self.functions.send_response else {
            return;
        };
        let tensors = BorrowedTensors::of(tensors);
        let error = c_text(error);
        // SAFETY: the function conforms to the header; all pointers are valid during the call.
        unsafe {
            send(
                self.context(),
                id.0,
                tensors.as_ptr(),
                tensors.len(),
                is_final.into(),
                error.as_ptr(),
            );
        }
    }

    fn reject_duplicate(&mut self, duplicate: TensorRequest) {
        match self.functions.reject_duplicate {
            // SAFETY: the function conforms to the header.
            Some(reject) => unsafe { reject(self.context(), duplicate.id.0) },
            None => {
                let error = RequestError::InFlight(duplicate.id.to_string()).to_string();
                self.send_response(duplicate.id, &HostTensors::new(), true, &error);
            }
        }
    }

    fn poll_stop_signals(&mut self) -> Vec<SequenceId> {
        let mut stops = Stops::default();
        if let Some(poll) = self.functions.poll_stop_signals {
            // SAFETY: the function conforms to the header; `stops` is valid during the call.
            unsafe { poll(self.context(), &mut stops) };
        }
        stops.0
    }

    fn return_stats(&mut self, json: &str) {
        if let Some(return_stats) = self.functions.return_stats {
            let json = c_text(json);
            // SAFETY: the function conforms to the header; the text is valid during the call.
            unsafe { return_stats(self.context(), json.as_ptr()) };
        }
    }
}
