//! Work that takes longer than streams may wait.

use tokio::sync::Semaphore;

/// Work on the bytes of a larger body takes milliseconds.
const LARGE_BODY_BYTES: usize = 64 << 10;

/// Works on a body of so many bytes. If it is large, the thread's streams move to another one for that time.
pub async fn beside_streams<T>(num_bytes: usize, work: impl FnOnce() -> T) -> T {
    // One at a time: several would take the processor from the streams.
    static TURN: Semaphore = Semaphore::const_new(1);
    if num_bytes > LARGE_BODY_BYTES {
        let _turn = TURN.acquire().await;
        tokio::task::block_in_place(work)
    } else {
        work()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use tokio::runtime::Builder;

    use super::*;

    #[test]
    fn streams_go_on_beside_work_on_a_large_body() {
        let runtime = Builder::new_multi_thread()
            .worker_threads(1)
            .build()
            .expect("a thread");
        let (sender, receiver) = mpsc::channel();
        let work = move || receiver.recv_timeout(Duration::from_secs(5)).is_ok();
        let request = async move {
            tokio::spawn(async move { sender.send(()) });
            beside_streams(LARGE_BODY_BYTES + 1, work).await
        };
        let task = runtime.spawn(request);
        assert!(
            runtime.block_on(task).expect("no panic"),
            "it waits for the body"
        );
    }
}
