//! The second responder formats and frees large answers, so that neither a step nor a small answer waits for them.
//!
//! It is for answers whose requests are released: nobody waits for them but their own clients, so they are served
//! in their order. What they may hold together is bounded by the slots of Triton's batcher and, where they are
//! large, by [`AnswerMemory`](crate::backend::response::answer_memory::AnswerMemory), which they give back when they are sent.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use crate::backend::model_anchor::ModelAnchor;
use crate::backend::response::answer::Answer;
use crate::base::LoadError;
use crate::device::yield_to_others;

/// Work on one answer.
pub enum HeavyWork {
    /// To send its final response.
    Send(Box<Answer>),
    /// To drop it: its request was given up, and what it holds can be a gigabyte.
    Drop(Box<Answer>),
}

/// A handle of the thread. It ends when there is none left, with all that was given to it.
#[derive(Clone)]
pub struct HeavyResponder(Sender<HeavyWork>);

impl HeavyResponder {
    /// Starts the thread of the instance `name`.
    ///
    /// # Errors
    /// The machine has no thread to give.
    pub fn start(name: &str) -> Result<(Self, JoinHandle<()>), LoadError> {
        let (work, inbox) = channel();
        let thread = std::thread::Builder::new()
            .name("inflight-heavy".to_owned())
            .spawn(move || run(&inbox))
            .map_err(|e| LoadError::Resource(format!("{name}: no thread for responses: {e}")))?;
        Ok((Self(work), thread))
    }

    /// Gives it something to do. If it is gone, that is done here.
    pub fn take(&self, work: HeavyWork) {
        if let Err(refused) = self.0.send(work) {
            serve(refused.0, &mut ModelAnchor::default());
        }
    }
}

fn run(inbox: &Receiver<HeavyWork>) {
    // A step's threads come first.
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
