//! A thread that computes the masks of guides during the forward pass.
//!
//! ```text
//! the device        |-------- forward pass --------|-- sampling: masks that are not ready are computed
//! this thread       |- mask -|- mask -|- mask -|       there, each by the thread that samples the row
//! ```

use std::io;
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use parking_lot::{Condvar, Mutex};

use crate::base::TokenId;
use crate::sampling::{Guide, SamplingInput};

/// The thread. It starts with the first guide, and ends when this is dropped.
#[derive(Default)]
pub(super) struct GuideThread {
    shared: Arc<GuideThreadShared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct GuideThreadShared {
    state: Mutex<GuideQueue>,
    /// Signals new requests, or the end.
    work: Condvar,
}

#[derive(Default)]
struct GuideQueue {
    /// Masks to compute, the next one last.
    requests: Vec<MaskRequest>,
    /// Buffers of requests that are done.
    spare: Vec<Vec<TokenId>>,
    is_closed: bool,
}

struct MaskRequest {
    guide: Guide,
    generated: Vec<TokenId>,
}

impl GuideThread {
    /// Requests the masks of the sequences that are about to sample and have a guide.
    pub(super) fn request<'a>(&mut self, inputs: impl Iterator<Item = SamplingInput<'a>>) {
        let mut inputs = inputs
            .filter_map(|input| Some((input.params.guide.as_ref()?, input.generated())))
            .peekable();
        if inputs.peek().is_none() || !self.is_started() {
            return;
        }
        let mut state = self.shared.state.lock();
        for (guide, tokens) in inputs {
            let mut generated = state.spare.pop().unwrap_or_default();
            generated.extend_from_slice(tokens);
            state.requests.push(MaskRequest {
                guide: guide.clone(),
                generated,
            });
        }
        drop(state);
        self.shared.work.notify_one();
    }

    /// Drops the requests that have not begun: sampling computes those masks itself.
    pub(super) fn cancel_pending(&mut self) {
        if self.thread.is_none() {
            return;
        }
        let mut state = self.shared.state.lock();
        while let Some(request) = state.requests.pop() {
            state.recycle(request);
        }
    }

    /// Without a thread, masks are computed when they are needed.
    fn is_started(&mut self) -> bool {
        if self.thread.is_none() {
            self.thread = start(Arc::clone(&self.shared)).ok();
        }
        self.thread.is_some()
    }
}

impl Drop for GuideThread {
    fn drop(&mut self) {
        self.shared.state.lock().is_closed = true;
        self.shared.work.notify_one();
        if let Some(thread) = self.thread.take() {
            // If a guide has panicked, sampling with it reports that too.
            let _ = thread.join();
        }
    }
}

impl GuideQueue {
    fn recycle(&mut self, request: MaskRequest) {
        let mut generated = request.generated;
        generated.clear();
        self.spare.push(generated);
    }
}

fn start(shared: Arc<GuideThreadShared>) -> io::Result<JoinHandle<()>> {
    let work = move || {
        let mut state = shared.state.lock();
        loop {
            if state.is_closed {
                return;
            }
            let Some(request) = state.requests.pop() else {
                shared.work.wait(&mut state);
                continue;
            };
            drop(state);
            request.guide.0.prepare(&request.generated);
            state = shared.state.lock();
            state.recycle(request);
        }
    };
    let thread = thread::Builder::new().name("inflight-guides".into());
    thread.spawn(work)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::sampling::{GuideTokens, Owner, SampleError, SamplingParams};

    /// Records the requests, and computes only while `holds` is not locked.
    #[derive(Default)]
    struct Counting {
        asked: Mutex<Vec<Vec<TokenId>>>,
        holds: Mutex<()>,
        num_begun: AtomicUsize,
    }

    impl GuideTokens for Counting {
        fn fresh(&self) -> Guide {
            Guide(Arc::new(Self::default()))
        }

        fn prepare(&self, generated: &[TokenId]) {
            self.num_begun.fetch_add(1, Ordering::SeqCst);
            drop(self.holds.lock());
            self.asked.lock().push(generated.to_vec());
        }

        fn restrict(&self, _: &mut [f32], _: &[TokenId]) -> Result<(), SampleError> {
            Ok(())
        }
    }

    fn until(done: impl Fn() -> bool) {
        while !done() {
            thread::yield_now();
        }
    }

    #[test]
    fn masks_are_computed_ahead_until_they_are_cancelled() {
        let counting = Arc::new(Counting::default());
        let guided = SamplingParams {
            guide: Some(Guide(counting.clone())),
            ..SamplingParams::default()
        };
        let free = SamplingParams::default();
        let input = |params, tokens| SamplingInput {
            params,
            tokens,
            num_prompt_tokens: 2,
            beam: 0,
            owner: Owner::default(),
        };
        let mut thread = GuideThread::default();
        thread.request([input(&free, &[1, 2, 3][..])].into_iter());
        assert!(thread.thread.is_none(), "no guide, no thread");

        let hold = counting.holds.lock();
        thread.request([input(&guided, &[1, 2][..]), input(&free, &[1, 2, 3])].into_iter());
        until(|| counting.num_begun.load(Ordering::SeqCst) == 1);
        thread.request(
            [
                input(&guided, &[1, 2, 3, 4][..]),
                input(&guided, &[5, 6, 7]),
            ]
            .into_iter(),
        );
        thread.cancel_pending();
        drop(hold);
        thread.request([input(&guided, &[1, 2, 9][..])].into_iter());
        until(|| counting.asked.lock().len() == 2);
        drop(thread);
        assert_eq!(*counting.asked.lock(), [vec![], vec![9]]);
        assert_eq!(Arc::strong_count(&counting), 2, "only `guided` keeps it");
    }
}
