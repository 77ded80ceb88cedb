//! The second responder formats and frees large answers, so that neither a step nor a small answer waits for them.
//!
//! It handles answers whose requests are released: only their own clients wait for them, so they are sent in order.
//! Their memory is bounded by the slots of Triton's batcher and, where they are large, by
//! [`AnswerMemory`](crate::response::answer_memory::AnswerMemory), which is released when they are sent.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use crate::model_anchor::ModelAnchor;
use crate::response::answer::Answer;
use inflight_base::LoadError;
use inflight_threads::yield_to_others;

/// Work on one answer.
pub enum HeavyWork {
    /// Send its final response.
    Send(Box<Answer>),
    /// Drop it: its request was cancelled, and its logits can take a gigabyte.
    Drop(Box<Answer>),
}

/// A handle to the thread, which ends when the last handle is dropped and its queue is empty.
#[derive(Clone)]
pub struct HeavyResponder(Sender<HeavyWork>);

impl HeavyResponder {
    /// Starts the thread of the instance `name`.
    ///
    /// # Errors
    /// The system cannot start a thread.
    pub fn start(name: &str) -> Result<(Self, JoinHandle<()>), LoadError> {
        let (work, inbox) = channel();
        let thread = std::thread::Builder::new()
            .name("inflight-heavy".to_owned())
            .spawn(move || run(&inbox))
            .map_err(|e| LoadError::Resource(format!("{name}: no thread for responses: {e}")))?;
        Ok((Self(work), thread))
    }

    /// Queues work for the thread; if the thread is gone, does the work here.
    pub fn take(&self, work: HeavyWork) {
        if let Err(refused) = self.0.send(work) {
            serve(refused.0, &mut ModelAnchor::default());
        }
    }
}

fn run(inbox: &Receiver<HeavyWork>) {
    // The threads that compute steps come first.
    yield_to_others();
    let mut anchor = ModelAnchor::default();
    while let Some(work) = anchor.receive(inbox) {
        serve(work, &mut anchor);
    }
}

fn serve(work: HeavyWork, anchor: &mut ModelAnchor) {
    match work {
        HeavyWork::Send(answer) => anchor.hold((*answer).send_last()),
        HeavyWork::Drop(answer) => {
            let factory = answer.factory.clone();
            drop(answer);
            anchor.hold(factory);
        }
    }
}
