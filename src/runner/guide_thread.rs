//! A thread that asks guides what may come next while the model computes.
//!
//! ```text
//! runner's threads  |-------- forward pass --------|-- choose tokens: masks that are not ready are
//! this thread       |- mask -|- mask -|- mask -|       worked out there, each by whoever comes first
//! ```

use std::io;
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use parking_lot::{Condvar, Mutex};

use crate::base::TokenId;
use crate::sampling::{Guide, SamplingInput};

/// The thread. It starts with the first guide that it is given, and ends when this is dropped.
#[derive(Default)]
pub(super) struct GuideThread {
    shared: Arc<GuideThreadShared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct GuideThreadShared {
    state: Mutex<GuideQueue>,
    /// There is something to do, or nothing ever again.
    work: Condvar,
}

#[derive(Default)]
struct GuideQueue {
    /// What is to be asked, the next one last.
    questions: Vec<Question>,
    /// Questions that were answered, for their buffers.
    spare: Vec<Vec<TokenId>>,
    is_closed: bool,
}

struct Question {
    guide: Guide,
    generated: Vec<TokenId>,
}

impl GuideThread {
    /// Has the guides of sequences that are about to sample asked, for those that have one.
    pub(super) fn ask<'a>(&mut self, inputs: impl Iterator<Item = SamplingInput<'a>>) {
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
            state.questions.push(Question {
                guide: guide.clone(),
                generated,
            });
        }
        drop(state);
        self.shared.work.notify_one();
    }

    /// Leaves what has not been asked yet to those that need it now.
    pub(super) fn stop_asking(&mut self) {
        if self.thread.is_none() {
            return;
        }
        let mut state = self.shared.state.lock();
        while let Some(question) = state.questions.pop() {
            state.take_back(question);
        }
    }

    /// Without a thread the masks are worked out when they are needed.
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
            // A guide that panicked has been heard of by the request that asked it too.
            let _ = thread.join();
        }
    }
}

impl GuideQueue {
    fn take_back(&mut self, question: Question) {
        let mut generated = question.generated;
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
            let Some(question) = state.questions.pop() else {
                shared.work.wait(&mut state);
                continue;
            };
            drop(state);
            question.guide.0.prepare(&question.generated);
            state = shared.state.lock();
            state.take_back(question);
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

    /// Counts what it is asked, and holds its first answer back until it is let go.
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
    fn guides_are_asked_about_the_output_and_no_more_once_it_is_needed() {
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
        thread.ask([input(&free, &[1, 2, 3][..])].into_iter());
        assert!(thread.thread.is_none(), "nobody needs it yet");

        let hold = counting.holds.lock();
        thread.ask([input(&guided, &[1, 2][..]), input(&free, &[1, 2, 3])].into_iter());
        until(|| counting.num_begun.load(Ordering::SeqCst) == 1);
        thread.ask(
            [
                input(&guided, &[1, 2, 3, 4][..]),
                input(&guided, &[5, 6, 7]),
            ]
            .into_iter(),
        );
        thread.stop_asking();
        drop(hold);
        thread.ask([input(&guided, &[1, 2, 9][..])].into_iter());
        until(|| counting.asked.lock().len() == 2);
        drop(thread);
        assert_eq!(*counting.asked.lock(), [vec![], vec![9]]);
        assert_eq!(
            Arc::strong_count(&counting),
            2,
            "nothing is kept but `guided`"
        );
    }
}
