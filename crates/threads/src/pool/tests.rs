use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Barrier, Mutex};
use std::thread;

use super::*;
use crate::affinity::cpus_of_caller;

/// As many threads as there are cpus, two at least, so that there is one team of them.
fn all_threads() -> usize {
    thread::available_parallelism().map_or(2, |n| n.get().max(2))
}

#[test]
fn every_task_runs_once_on_any_number_of_threads() {
    for num_threads in [1, 2, 3, 7] {
        let mut pool = Pool::new(num_threads).expect("threads");
        let mut counts = vec![0_u64; num_threads];
        let hits: Vec<_> = (0..97).map(|_| AtomicUsize::new(0)).collect();
        for run in 1..=50 {
            pool.for_each(&mut counts, hits.len(), |count, task| {
                *count += 1;
                hits[task].fetch_add(1, Ordering::Relaxed);
            });
            assert!(hits.iter().all(|hit| hit.load(Ordering::Relaxed) == run));
        }
        assert_eq!(counts.iter().sum::<u64>(), 97 * 50);
    }
}

#[test]
fn a_thread_that_is_done_helps_one_that_is_not() {
    let mut pool = Pool::new(2).expect("threads");
    let mut slow_tasks = [0, 0];
    // The first half is one thread's share, and each of its tasks takes a while.
    pool.for_each(&mut slow_tasks, 40, |count, task| {
        if task < 20 {
            thread::sleep(Duration::from_millis(5));
            *count += 1;
        }
    });
    assert_eq!(slow_tasks.iter().sum::<i32>(), 20);
    assert!(slow_tasks.iter().all(|&count| count > 0), "{slow_tasks:?}");
}

#[test]
fn a_panic_reaches_the_caller_and_the_pool_lives_on() {
    let mut pool = Pool::new(3).expect("threads");
    for round in 0..50 {
        let caught = catch_unwind(AssertUnwindSafe(|| {
            let _turn = (round % 2 == 0).then(|| pool.turn());
            pool.for_each(&mut [(); 3], 64, |(), task| assert_ne!(task, round));
        }));
        assert!(caught.is_err());
        let done = AtomicUsize::new(0);
        pool.for_each(&mut [(); 3], 8, |(), _| {
            done.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(done.into_inner(), 8);
    }
}

#[test]
fn sleeping_workers_wake_for_the_next_run() {
    let mut pool = Pool::new(3).expect("threads");
    for pause in [0, 1, 20, 49, 50, 51, 60, 200, 1000, 3000] {
        for _ in 0..20 {
            let done = AtomicUsize::new(0);
            pool.for_each(&mut [(); 3], 3, |(), _| {
                done.fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(done.into_inner(), 3);
            thread::sleep(Duration::from_micros(pause));
        }
    }
}

#[test]
fn a_caller_sleeps_while_a_task_is_long() {
    let mut pool = Pool::new(2).expect("threads");
    pool.for_each(&mut [(); 2], 2, |(), task| {
        thread::sleep(Duration::from_millis(5 * task as u64));
    });
}

/// The report of each thread of a pool: the tasks wait for each other, so each thread has one.
fn ask_all<T: Send>(pool: &mut Pool, question: impl Fn() -> T + Sync) -> Vec<T> {
    let num_threads = pool.num_threads();
    let barrier = Barrier::new(num_threads);
    let answers = Mutex::new(Vec::new());
    pool.for_each(&mut vec![(); num_threads], num_threads, |(), _| {
        barrier.wait();
        answers.lock().expect("no panic").push(question());
    });
    answers.into_inner().expect("no panic")
}

#[test]
fn pools_of_all_threads_share_them() {
    let workers = |pool: &mut Pool| -> HashSet<_> {
        let caller = thread::current().id();
        let all = ask_all(pool, || thread::current().id());
        all.into_iter().filter(|&id| id != caller).collect()
    };
    let mut first = Pool::new(all_threads()).expect("threads");
    let mut second = Pool::new(all_threads()).expect("threads");
    assert_eq!(workers(&mut first).len(), all_threads() - 1);
    assert_eq!(workers(&mut first), workers(&mut second));
    let before = workers(&mut second);
    drop(first);
    assert_eq!(workers(&mut second), before);
}

#[test]
fn threads_keep_to_cpus_of_their_own_where_there_is_one_for_each() {
    let num_cpus = cpus_of_caller().cpus().len();
    let caller = thread::current().id();
    for num_threads in [num_cpus, num_cpus + 1] {
        let mut pool = Pool::new(num_threads).expect("threads");
        let cpus = ask_all(&mut pool, || (thread::current().id(), cpus_of_caller()));
        let cpus: Vec<_> = cpus.into_iter().filter(|(id, _)| *id != caller).collect();
        if num_threads == num_cpus {
            let own: HashSet<_> = cpus.iter().map(|(_, cpus)| cpus.cpus()[0]).collect();
            assert!(
                cpus.iter().all(|(_, cpus)| cpus.cpus().len() == 1),
                "{cpus:?}"
            );
            assert_eq!(own.len(), num_threads - 1, "{cpus:?}");
        } else {
            assert!(
                cpus.iter().all(|(_, cpus)| cpus.cpus().len() == num_cpus),
                "{cpus:?}"
            );
        }
    }
    assert_eq!(
        cpus_of_caller().cpus().len(),
        num_cpus,
        "the caller stays free"
    );
}

#[test]
fn a_pool_with_cpus_and_its_caller_use_no_others_during_a_turn() {
    let all = cpus_of_caller();
    let last = *all.cpus().last().expect("a CPU");
    let own: CpuSet = [last].into_iter().collect();
    for num_threads in [1, 3] {
        let num_threads = NonZeroUsize::new(num_threads);
        let mut pool = Pool::of_device(num_threads, Some(&own)).expect("threads");
        // Some turns are interrupted by turns of another pool.
        let mut other = Pool::of_device(num_threads, Some(&own)).expect("threads");
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    other.for_each(&mut vec![(); other.num_threads()], 2, |(), _| {});
                }
            });
            for _ in 0..20 {
                let _turn = pool.turn();
                let cpus = ask_all(&mut pool, cpus_of_caller);
                assert!(cpus.iter().all(|cpus| *cpus == own), "{cpus:?}");
                thread::sleep(TURN);
                let cpus = ask_all(&mut pool, cpus_of_caller);
                assert!(cpus.iter().all(|cpus| *cpus == own), "{cpus:?}");
            }
            stop.store(true, Ordering::Relaxed);
        });
        assert_eq!(cpus_of_caller(), all, "the caller is free again");
    }
    let by_default = Pool::of_device(None, Some(&own)).expect("threads");
    assert_eq!(by_default.num_threads(), 1, "a thread for each CPU");
}

#[test]
fn pools_together_never_compute_on_more_threads_than_there_are() {
    let num_threads = all_threads();
    let (busy, most) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let compute = |with_turns: bool| {
        let mut pool = Pool::new(num_threads).expect("threads");
        let mut units = vec![(); num_threads];
        for _ in 0..100 {
            let _turn = with_turns.then(|| pool.turn());
            for _ in 0..10 {
                pool.for_each(&mut units, 4 * num_threads, |(), _| {
                    most.fetch_max(busy.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                    thread::yield_now();
                    busy.fetch_sub(1, Ordering::SeqCst);
                });
            }
        }
    };
    thread::scope(|scope| {
        for with_turns in [true, true, false, false] {
            scope.spawn(move || compute(with_turns));
        }
    });
    assert!(most.into_inner() <= num_threads);
}

#[test]
fn a_long_turn_gives_way_to_whoever_waits() {
    let mut pool = Pool::new(all_threads()).expect("threads");
    let _turn = pool.turn();
    let is_done = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut other = Pool::new(all_threads()).expect("threads");
            let _turn = other.turn();
            other.for_each(&mut vec![(); all_threads()], all_threads(), |(), _| {});
            is_done.store(true, Ordering::SeqCst);
        });
        let started = Instant::now();
        while !is_done.load(Ordering::SeqCst) {
            assert!(
                started.elapsed() < Duration::from_secs(60),
                "it never had its turn"
            );
            pool.for_each(&mut vec![(); all_threads()], all_threads(), |(), _| {});
        }
    });
}

#[test]
fn pools_of_one_thread_take_turns_without_a_team() {
    let mut pools: Vec<_> = (0..3).map(|_| Pool::new(1).expect("no thread")).collect();
    for pool in &mut pools {
        let turn = pool.turn();
        let mut sum = [0];
        pool.for_each(&mut sum, 10, |sum, task| *sum += task);
        assert_eq!(sum, [45]);
        drop(turn);
    }
    drop(pools.remove(1));
    let turn = pools[0].turn();
    // A turn may outlive its pool.
    drop(pools);
    drop(turn);
}

#[test]
fn dropping_ends_the_threads_awake_or_asleep() {
    for pause_us in [0, 500] {
        let team = ThreadTeam::start(4, &cpus_of_caller()).expect("threads");
        thread::sleep(Duration::from_micros(pause_us));
        let shared = team.shared();
        drop(team);
        assert_eq!(shared.strong_count(), 0);
    }
}
