//! An adapter that a request brings, copied in pieces, so that no step waits for all of it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use inflight_base::RequestError;
use inflight_checkpoint::AdapterArrays;
use inflight_numbers::Dtype;

/// What comes before the weights of an adapter.
#[derive(Clone, Debug)]
pub struct UploadHeader {
    /// `lora_config`: module ids, layers and ranks.
    pub config: Vec<i32>,
    /// Its shape.
    pub config_shape: Vec<usize>,
    /// The shape of `lora_weights`.
    pub weights_shape: Vec<usize>,
    /// Their type.
    pub dtype: Dtype,
}

/// An adapter that a request brings. It is there once its writer has all of it.
#[derive(Clone)]
pub struct AdapterUpload(Arc<Shared>);

/// Takes the weights of an adapter. If it is dropped before it has all, the adapter never comes.
pub struct UploadWriter {
    shared: Arc<Shared>,
    /// `None` once all is written.
    unfinished: Option<Unfinished>,
}

/// Bytes of the adapters that requests bring, and their limit.
pub(super) struct UploadMemory {
    used_bytes: AtomicU64,
    max_bytes: u64,
}

struct Unfinished {
    header: UploadHeader,
    weights: Vec<u8>,
    num_bytes: usize,
}

struct Shared {
    state: Mutex<State>,
    memory: Arc<UploadMemory>,
    num_bytes: u64,
}

enum State {
    Arriving(Option<Box<dyn FnOnce() + Send>>),
    Arrived(Arc<AdapterArrays>),
    Lost,
}

/// An adapter of f32 with padded rows has more bytes than what is kept of it.
const MAX_BYTES_PER_KEPT: u64 = 4;

impl UploadMemory {
    /// For adapters of which up to `max_bytes` can be kept.
    pub(super) fn new(max_bytes: u64) -> Arc<Self> {
        Arc::new(Self {
            used_bytes: AtomicU64::new(0),
            max_bytes,
        })
    }

    /// Sets memory aside for an adapter.
    ///
    /// # Errors
    /// It is too large, or others that arrive leave no room for it now.
    pub(super) fn receive(
        self: &Arc<Self>,
        header: UploadHeader,
    ) -> Result<(AdapterUpload, UploadWriter), RequestError> {
        let sizes = header.weights_shape.iter().copied();
        let num_bytes = sizes.chain([header.dtype.size()]);
        let num_bytes = num_bytes.fold(1, usize::saturating_mul);
        let max_alone = self.max_bytes.saturating_mul(MAX_BYTES_PER_KEPT);
        if num_bytes as u64 > max_alone {
            return Err(RequestError::Invalid(format!(
                "{} has {num_bytes} bytes, and may have at most {max_alone}: raise lora_cache_host_memory_bytes in the \
                 model's config.pbtxt",
                AdapterArrays::WEIGHTS
            )));
        }
        let num_bytes_before = self
            .used_bytes
            .fetch_add(num_bytes as u64, Ordering::Relaxed);
        let upload = AdapterUpload(Arc::new(Shared {
            state: Mutex::new(State::Arriving(None)),
            memory: Arc::clone(self),
            num_bytes: num_bytes as u64,
        }));
        let mut weights = Vec::new();
        if num_bytes_before > 0 && num_bytes_before + num_bytes as u64 > self.max_bytes
            || weights.try_reserve_exact(num_bytes).is_err()
        {
            return Err(RequestError::Busy(format!(
                "{} has {num_bytes} bytes, and adapters of {num_bytes_before} bytes are arriving in other requests: send it \
                 again later",
                AdapterArrays::WEIGHTS
            )));
        }
        let writer = UploadWriter {
            shared: Arc::clone(&upload.0),
            unfinished: Some(Unfinished {
                header,
                weights,
                num_bytes,
            }),
        };
        Ok((upload, writer))
    }
}

impl AdapterUpload {
    /// The adapter; `None` if it has not come.
    pub(super) fn arrays(&self) -> Option<Arc<AdapterArrays>> {
        match &*self.0.state.lock() {
            State::Arrived(arrays) => Some(Arc::clone(arrays)),
            State::Arriving(_) | State::Lost => None,
        }
    }

    /// Calls `then` once it has come, or never will: at once if that is known.
    pub(super) fn when_known(&self, then: impl FnOnce() + Send + 'static) {
        let mut state = self.0.state.lock();
        match &mut *state {
            State::Arriving(waiting) => *waiting = Some(Box::new(then)),
            State::Arrived(_) | State::Lost => {
                drop(state);
                then();
            }
        }
    }
}

impl UploadWriter {
    /// Where the next piece begins, in bytes.
    pub fn num_written_bytes(&self) -> usize {
        self.unfinished.as_ref().map_or(0, |it| it.weights.len())
    }

    /// Adds the next piece. Returns whether that was the last one.
    ///
    /// # Panics
    /// There are more bytes than the header calls for.
    pub fn write(&mut self, bytes: &[u8]) -> bool {
        if let Some(unfinished) = &mut self.unfinished {
            let num_missing = unfinished.num_bytes - unfinished.weights.len();
            assert!(bytes.len() <= num_missing, "more bytes than announced");
            unfinished.weights.extend_from_slice(bytes);
            if bytes.len() < num_missing {
                return false;
            }
        }
        if let Some(Unfinished {
            header, weights, ..
        }) = self.unfinished.take()
        {
            let config = (header.config, header.config_shape);
            let weights = (weights, header.weights_shape);
            let arrays = AdapterArrays::new(config, weights, header.dtype);
            self.shared.set(State::Arrived(Arc::new(arrays)));
        }
        true
    }
}

impl Drop for UploadWriter {
    fn drop(&mut self) {
        if self.unfinished.is_some() {
            self.shared.set(State::Lost);
        }
    }
}

impl Shared {
    fn set(&self, new: State) {
        let before = std::mem::replace(&mut *self.state.lock(), new);
        if let State::Arriving(Some(then)) = before {
            then();
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let used_bytes = &self.memory.used_bytes;
        used_bytes.fetch_sub(self.num_bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    fn header(num_values: usize) -> UploadHeader {
        UploadHeader {
            config: vec![1, 0, 4],
            config_shape: vec![1, 3],
            weights_shape: vec![1, num_values],
            dtype: Dtype::F16,
        }
    }

    #[test]
    fn it_is_there_once_all_pieces_are() {
        let memory = UploadMemory::new(100);
        let (upload, mut writer) = memory.receive(header(3)).expect("room");
        let num_calls = Arc::new(AtomicUsize::new(0));
        let count = || {
            let num_calls = Arc::clone(&num_calls);
            move || {
                num_calls.fetch_add(1, Ordering::Relaxed);
            }
        };
        upload.when_known(count());
        assert!(!writer.write(&[1, 2, 3]));
        assert!(!writer.write(&[]));
        assert_eq!((writer.num_written_bytes(), upload.arrays()), (3, None));
        assert_eq!(num_calls.load(Ordering::Relaxed), 0);
        assert!(writer.write(&[4, 5, 6]));
        assert_eq!(num_calls.load(Ordering::Relaxed), 1);
        drop(writer);
        upload.when_known(count());
        assert_eq!(num_calls.load(Ordering::Relaxed), 2);
        let expected = AdapterArrays::new(
            (vec![1, 0, 4], vec![1, 3]),
            (vec![1, 2, 3, 4, 5, 6], vec![1, 3]),
            Dtype::F16,
        );
        assert_eq!(upload.arrays().as_deref(), Some(&expected));
    }

    #[test]
    fn it_never_comes_if_its_request_ends_before() {
        let memory = UploadMemory::new(100);
        let (upload, mut writer) = memory.receive(header(3)).expect("room");
        let was_called = Arc::new(AtomicUsize::new(0));
        let flag = Arc::clone(&was_called);
        upload.when_known(move || flag.store(1, Ordering::Relaxed));
        assert!(!writer.write(&[1; 5]));
        drop(writer);
        assert_eq!(was_called.load(Ordering::Relaxed), 1);
        assert_eq!(upload.arrays(), None);
    }

    #[test]
    fn those_that_arrive_at_a_time_are_bounded() {
        let memory = UploadMemory::new(100);
        let refusal = |num_values| {
            let refused = memory.receive(header(num_values)).err().expect("no room");
            refused.to_string()
        };
        let error = refusal(201);
        assert!(
            error.contains("402 bytes") && error.contains("at most 400"),
            "{error}"
        );
        assert!(refusal(usize::MAX).contains("at most 400"));
        let alone = memory.receive(header(200)).expect("alone");
        let error = refusal(1);
        assert!(
            error.contains("adapters of 400 bytes are arriving"),
            "{error}"
        );
        drop(alone);
        let first = memory.receive(header(25)).expect("room");
        let second = memory.receive(header(25)).expect("room for both");
        assert!(refusal(1).contains("send it again later"));
        // The memory belongs to the adapter, not to the request.
        drop(first.0);
        refusal(1);
        drop(first.1);
        memory.receive(header(25)).expect("room again");
        drop(second);
        assert_eq!(memory.used_bytes.load(Ordering::Relaxed), 0);
    }
}
