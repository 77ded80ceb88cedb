//! Runs the post-processors of a user's library for requests.

use std::any::Any;
use std::ffi::CString;
use std::ptr;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};

use crate::guarded_logits::GuardedLogits;
use crate::library::{ForeignProcessor, Ids, Row, State};
use crate::processed_request::ProcessedRequest;
use inflight_base::{ClientId, SequenceId};
use inflight_sampling::{BatchRow, ProcessBatch, ProcessLogits, SampleError, SamplingInput};

/// A processor of a library, with a pool of buffers.
pub(super) struct LibraryProcessor {
    processor: Arc<ForeignProcessor>,
    /// Unused buffers. The pool grows to the largest number in use at the same time.
    spare: Mutex<Vec<GuardedLogits>>,
}

impl LibraryProcessor {
    pub(super) fn new(processor: Arc<ForeignProcessor>) -> Self {
        Self {
            processor,
            spare: Mutex::default(),
        }
    }

    pub(super) fn name(&self) -> &str {
        self.processor.name()
    }

    /// Starts the processor for a request.
    pub(super) fn start(
        self: &Arc<Self>,
        arguments: &str,
        request: ProcessedRequest<'_>,
    ) -> Result<LibraryRequest, String> {
        let c_text =
            |text: &str| CString::new(text).map_err(|_| "it contains a zero byte".to_owned());
        let client_request_id = request.client_request_id.map(c_text).transpose()?;
        let ids = Ids {
            sequence: request.id,
            client_request: client_request_id.as_deref(),
            client: request.client_id,
        };
        let arguments = c_text(arguments)?;
        let state = self.processor.create(ids, &arguments, request.vocab_size)?;
        Ok(LibraryRequest {
            library: Arc::clone(self),
            sequence_id: request.id,
            client_request_id,
            client_id: request.client_id,
            inner: Mutex::new(RequestState {
                state,
                prepared: Vec::new(),
                failure: None,
            }),
        })
    }

    /// A copy of the logits, in a pooled buffer if possible.
    fn copy_of(&self, logits: &[f32]) -> GuardedLogits {
        let spare = self.spare.lock().pop();
        let fitting = spare.filter(|copy| copy.get().len() == logits.len());
        let mut copy = fitting.unwrap_or_else(|| GuardedLogits::new(logits.len()));
        copy.copy_from(logits);
        copy
    }

    /// Checks the result of a call and copies its logits back if they are valid.
    fn accept(&self, processed: Processed, logits: &mut [f32]) -> Result<(), String> {
        let Processed { copy, result } = processed;
        if !copy.is_intact() {
            return Err("it wrote outside of the logits".to_owned());
        }
        if result.is_ok() {
            check_numbers(copy.get(), logits)?;
            logits.copy_from_slice(copy.get());
        }
        self.recycle(copy);
        result
    }

    /// Returns a buffer to the pool, unless its guards were overwritten.
    fn recycle(&self, copy: GuardedLogits) {
        if copy.is_intact() {
            self.spare.lock().push(copy);
        }
    }
}

impl ProcessBatch for LibraryProcessor {
    fn prepare(&self, rows: &[BatchRow<'_>]) {
        let mut requests = Vec::<(&LibraryRequest, MutexGuard<'_, RequestState>)>::new();
        // The index in `requests` of each row's request. A request may have several rows.
        let mut owners = Vec::with_capacity(rows.len());
        let mut copies = Vec::with_capacity(rows.len());
        for row in rows {
            let Some(request) = (row.processor as &dyn Any).downcast_ref::<LibraryRequest>() else {
                continue;
            };
            let known = requests
                .iter()
                .position(|(other, _)| ptr::eq(*other, request));
            owners.push(known.unwrap_or(requests.len()));
            if known.is_none() {
                let mut locked = request.inner.lock();
                // Left over from tokens that were not sampled.
                let unused = locked.prepared.drain(..);
                unused.for_each(|(_, unused)| self.recycle(unused.copy));
                requests.push((request, locked));
            }
            copies.push((row, self.copy_of(row.logits)));
        }
        let entries = owners.iter().zip(&mut copies).map(|(&owner, (row, copy))| {
            let (request, inner) = &requests[owner];
            request.row(&inner.state, copy, row.input)
        });
        let results = self
            .processor
            .process_batch(&mut entries.collect::<Vec<_>>());
        for ((owner, (row, copy)), result) in owners.into_iter().zip(copies).zip(results) {
            let address = row.logits.as_ptr().addr();
            let processed = Processed { copy, result };
            requests[owner].1.prepared.push((address, processed));
        }
    }
}

/// Checks that the processor did not turn a valid logit of `old` into NaN or `+inf`. If the old logit was already
/// invalid, the model is at fault, and the sampler reports it.
fn check_numbers(new: &[f32], old: &[f32]) -> Result<(), String> {
    let is_number = |logit: f32| logit < f32::INFINITY;
    // Checks whole chunks, which vectorises; a search for the first invalid logit would not.
    let are_numbers = |logits: &[f32]| logits.iter().fold(true, |all, &it| all & is_number(it));
    if new.chunks(1024).all(are_numbers) {
        return Ok(());
    }
    let damaged = new
        .iter()
        .zip(old)
        .position(|(&new, &old)| !is_number(new) && is_number(old));
    damaged.map_or(Ok(()), |token| {
        Err(format!(
            "it set the logit of token {token} to {}; a logit must be finite or -inf",
            new[token]
        ))
    })
}

/// The post-processor of one request.
pub(super) struct LibraryRequest {
    library: Arc<LibraryProcessor>,
    sequence_id: SequenceId,
    client_request_id: Option<CString>,
    client_id: Option<ClientId>,
    /// Locked while the processor runs: it handles one call at a time for a request.
    inner: Mutex<RequestState>,
}

struct RequestState {
    state: State,
    /// The results prepared in this step, each with the address of its source logits.
    prepared: Vec<(usize, Processed)>,
    /// Why the processor failed.
    failure: Option<String>,
}

/// The result of processing a token's logits.
struct Processed {
    copy: GuardedLogits,
    result: Result<(), String>,
}

impl LibraryRequest {
    fn row<'a>(
        &'a self,
        state: &'a State,
        logits: &'a mut GuardedLogits,
        input: SamplingInput<'a>,
    ) -> Row<'a> {
        Row {
            ids: Ids {
                sequence: self.sequence_id,
                client_request: self.client_request_id.as_deref(),
                client: self.client_id,
            },
            beam: input.beam,
            num_prompt_tokens: input.num_prompt_tokens,
            tokens: input.tokens,
            logits,
            state,
        }
    }

    fn process_now(
        &self,
        inner: &RequestState,
        logits: &[f32],
        input: SamplingInput<'_>,
    ) -> Processed {
        let mut copy = self.library.copy_of(logits);
        let row = self.row(&inner.state, &mut copy, input);
        let result = self.library.processor.process(row);
        Processed { copy, result }
    }
}

impl ProcessLogits for LibraryRequest {
    fn process(&self, logits: &mut [f32], input: SamplingInput<'_>) -> Result<(), SampleError> {
        let address = logits.as_ptr().addr();
        let mut inner = self.inner.lock();
        let prepared = inner
            .prepared
            .iter()
            .position(|(other, _)| *other == address);
        let processed = match prepared {
            Some(prepared) => inner.prepared.swap_remove(prepared).1,
            None => self.process_now(&inner, logits, input),
        };
        let taken = self.library.accept(processed, logits);
        taken.map_err(|reason| {
            let name = self.library.name();
            inner.failure = Some(format!("logits post-processor '{name}': {reason}"));
            SampleError::ProcessorFailed
        })
    }

    fn batch(&self) -> Option<&dyn ProcessBatch> {
        let is_batched = self.library.processor.is_batched();
        is_batched.then_some(&*self.library)
    }

    fn failure(&self) -> Option<String> {
        self.inner.lock().failure.clone()
    }
}
