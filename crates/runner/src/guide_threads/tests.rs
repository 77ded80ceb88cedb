//! Guides that compute while the test lets them.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use super::*;
use inflight_sampling::{GuideCost, GuideTokens, SampleError};

/// Computes only while `holds` is not locked, and records what for.
#[derive(Default)]
struct Held {
    done: Mutex<Vec<Vec<TokenId>>>,
    holds: Arc<Mutex<()>>,
    cost: GuideCost,
    num_begun: AtomicUsize,
    is_given_up: AtomicBool,
}

impl GuideTokens for Held {
    fn fresh(&self) -> Guide {
        Guide(Arc::new(Self::default()))
    }

    fn prepare(&self, generated: &[TokenId], _: &[TokenId]) {
        self.num_begun.fetch_add(1, Ordering::SeqCst);
        drop(self.holds.lock());
        self.done.lock().push(generated.to_vec());
    }

    fn is_ready(&self, generated: &[TokenId]) -> bool {
        self.done.lock().iter().any(|done| done == generated)
    }

    fn cost(&self) -> GuideCost {
        self.cost
    }

    fn give_up(&self) {
        self.is_given_up.store(true, Ordering::SeqCst);
    }

    fn restrict(&self, _: &mut [f32], _: &[TokenId]) -> Result<(), SampleError> {
        Ok(())
    }
}

fn held(cost: Duration) -> Arc<Held> {
    Arc::new(Held {
        cost: GuideCost {
            total: cost,
            last: cost,
        },
        ..Held::default()
    })
}

fn until(done: impl Fn() -> bool) {
    while !done() {
        thread::yield_now();
    }
}

fn request(threads: &mut GuideThreads, guide: &Arc<Held>, generated: &[TokenId]) {
    let guide = Guide(guide.clone());
    let request = MaskRequest {
        guide: &guide,
        generated,
        drafts: &[],
    };
    threads.request([request].into_iter()).expect("threads");
}

#[test]
fn slow_guides_do_not_hold_quick_ones_and_a_guide_is_computed_once_at_a_time() {
    let mut threads = GuideThreads::default();
    let slow: Vec<_> = (0..4).map(|_| held(Duration::from_secs(1))).collect();
    let holds: Vec<_> = slow.iter().map(|guide| guide.holds.lock()).collect();
    for guide in &slow {
        request(&mut threads, guide, &[1]);
        request(&mut threads, guide, &[1]);
    }
    let begun = || slow.iter().map(|it| it.num_begun.load(Ordering::SeqCst));
    until(|| begun().sum::<usize>() == NUM_THREADS - 1);
    let quick = held(Duration::ZERO);
    for generated in [&[1][..], &[1, 2], &[1, 2, 3]] {
        request(&mut threads, &quick, generated);
        until(|| quick.is_ready(generated));
    }
    assert_eq!(begun().sum::<usize>(), NUM_THREADS - 1);
    drop(holds);
    until(|| slow.iter().all(|guide| guide.is_ready(&[1])));
    assert!(begun().all(|num| num == 1));
}

#[test]
fn what_nobody_waits_for_is_given_up() {
    let mut threads = GuideThreads::default();
    let holds = Arc::new(Mutex::new(()));
    let guide = Arc::new(Held {
        holds: Arc::clone(&holds),
        ..Held::default()
    });
    let observer = Arc::downgrade(&guide);
    let hold = holds.lock();
    request(&mut threads, &guide, &[1]);
    until(|| guide.num_begun.load(Ordering::SeqCst) == 1);
    drop(guide);
    request(&mut threads, &held(Duration::ZERO), &[2]);
    let left = observer.upgrade().expect("it is being computed");
    assert!(left.is_given_up.load(Ordering::SeqCst));
    drop(hold);
}

#[test]
fn a_step_for_slow_guides_alone_waits_for_the_first() {
    let mut threads = GuideThreads::default();
    let guides: Vec<_> = (0..2).map(|_| held(Duration::from_secs(1))).collect();
    let holds: Vec<_> = guides.iter().map(|guide| guide.holds.lock()).collect();
    for guide in &guides {
        request(&mut threads, guide, &[1]);
    }
    let handles: Vec<_> = guides.iter().map(|guide| Guide(guide.clone())).collect();
    let wait = |is_alone| {
        let requests = handles.iter().map(|guide| MaskRequest {
            guide,
            generated: &[1],
            drafts: &[],
        });
        threads.wait(requests, is_alone);
    };
    // Nobody waits for a slow guide beside others, nor without end.
    for is_alone in [false, true] {
        wait(is_alone);
        assert!(!guides.iter().any(|guide| guide.is_ready(&[1])));
    }
    let [first, second]: [_; 2] = holds.try_into().expect("two");
    drop(first);
    until(|| {
        wait(true);
        guides[0].is_ready(&[1])
    });
    assert!(!guides[1].is_ready(&[1]));
    drop(second);
}
