//! Responses that are computed in the background.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::task::AbortHandle;

/// How often the end of all work is looked for.
const POLL: Duration = Duration::from_millis(20);

/// The work on each response, by its id.
#[derive(Clone, Debug, Default)]
pub struct Background(Arc<Mutex<HashMap<String, AbortHandle>>>);

impl Background {
    /// Starts the work on a response.
    pub fn start(&self, id: String, work: impl Future<Output = ()> + Send + 'static) {
        let all = self.clone();
        // It ends behind its place in the table, however soon it does.
        let mut table = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let key = id.clone();
        let task = tokio::spawn(async move {
            work.await;
            all.remove(&key);
        });
        table.insert(id, task.abort_handle());
    }

    /// Waits until no work is left, for `max_time` at most, and stops the rest.
    pub async fn ended_within(&self, max_time: Duration) {
        let end = Instant::now() + max_time;
        while !self.is_empty() && Instant::now() < end {
            tokio::time::sleep(POLL).await;
        }
        let mut table = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for (_, task) in table.drain() {
            task.abort();
        }
    }

    fn is_empty(&self) -> bool {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .is_empty()
    }

    /// Stops the work on a response. Returns whether there was any.
    pub fn stop(&self, id: &str) -> bool {
        let task = self.remove(id);
        task.inspect(AbortHandle::abort).is_some()
    }

    fn remove(&self, id: &str) -> Option<AbortHandle> {
        let mut table = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        table.remove(id)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::runtime::Builder;
    use tokio::sync::oneshot;

    use super::*;

    #[test]
    fn work_ends_or_is_stopped_once() {
        let runtime = Builder::new_multi_thread()
            .worker_threads(1)
            .enable_time()
            .build()
            .expect("a thread");
        let background = Background::default();
        runtime.block_on(async {
            let (done, is_done) = oneshot::channel();
            background.start("a".to_owned(), async {
                done.send(()).expect("somebody waits")
            });
            is_done.await.expect("it ends");
            while background.0.lock().expect("no panic").contains_key("a") {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            assert!(!background.stop("a"), "it has ended");
            let (held, is_dropped) = oneshot::channel::<()>();
            background.start("b".to_owned(), async move {
                std::future::pending::<()>().await;
                drop(held);
            });
            assert!(background.stop("b") && !background.stop("b"));
            assert!(is_dropped.await.is_err(), "its future is dropped");
            background.start("c".to_owned(), std::future::pending());
            background.ended_within(Duration::from_millis(50)).await;
            assert!(!background.stop("c"), "it was stopped");
        });
    }
}
