//! Stop requests whose targets other instances of their model may have: Triton gives a stop request to any instance.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

/// Stops that an instance has not read. An instance with requests reads them in each step; one without drops them all.
const MAX_UNREAD: usize = 4096;

/// The mailboxes of all instances of a model.
#[derive(Default)]
pub struct StopBoard {
    mailboxes: Mutex<Vec<Arc<Mailbox>>>,
}

/// The end of one instance.
pub struct Stops {
    board: Arc<StopBoard>,
    own: Arc<Mailbox>,
}

#[derive(Default)]
struct Mailbox {
    has_mail: AtomicBool,
    /// Request ids of clients.
    ids: Mutex<Vec<String>>,
}

impl StopBoard {
    /// Adds an instance.
    pub fn join(self: &Arc<Self>) -> Stops {
        let own = Arc::<Mailbox>::default();
        self.mailboxes.lock().push(Arc::clone(&own));
        Stops {
            board: Arc::clone(self),
            own,
        }
    }
}

impl Stops {
    /// Has all other instances stop the request that a client calls `id`.
    pub fn send(&self, id: &str) {
        for mailbox in self.board.mailboxes.lock().iter() {
            if Arc::ptr_eq(mailbox, &self.own) {
                continue;
            }
            let mut ids = mailbox.ids.lock();
            if ids.len() == MAX_UNREAD {
                ids.clear();
            }
            ids.push(id.to_owned());
            mailbox.has_mail.store(true, Ordering::Release);
        }
    }

    /// The ids of requests that other instances were asked to stop since the last call.
    pub fn take(&self) -> Vec<String> {
        match self.own.has_mail.load(Ordering::Acquire) {
            true => {
                let mut ids = self.own.ids.lock();
                self.own.has_mail.store(false, Ordering::Release);
                std::mem::take(&mut ids)
            }
            false => Vec::new(),
        }
    }
}

impl Drop for Stops {
    fn drop(&mut self) {
        let mut mailboxes = self.board.mailboxes.lock();
        mailboxes.retain(|mailbox| !Arc::ptr_eq(mailbox, &self.own));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stop_reaches_every_other_instance_once() {
        let board = Arc::<StopBoard>::default();
        let [one, two, three] = [(); 3].map(|()| board.join());
        one.send("a");
        three.send("b");
        assert_eq!(one.take(), ["b"]);
        assert_eq!(two.take(), ["a", "b"]);
        assert_eq!(three.take(), ["a"]);
        assert!(two.take().is_empty());
    }

    #[test]
    fn an_instance_that_reads_nothing_has_a_bounded_mailbox_and_one_that_is_gone_has_none() {
        let board = Arc::<StopBoard>::default();
        let [one, two, three] = [(); 3].map(|()| board.join());
        for index in 0..=MAX_UNREAD {
            one.send(&index.to_string());
        }
        assert_eq!(two.take(), [MAX_UNREAD.to_string()]);
        drop(two);
        assert_eq!(board.mailboxes.lock().len(), 2);
        one.send("a");
        assert_eq!(three.take(), [MAX_UNREAD.to_string(), "a".to_owned()]);
    }
}
