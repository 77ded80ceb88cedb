//! Sums and messages between ranks: threads of this process, and processes that share memory.

use std::io::{self, BufRead, BufReader, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::process::{Child, Command, Stdio};
use std::sync::Barrier;
use std::thread;
use std::time::Duration;

use inflight_collective::{
    Channel as _, Collective, CollectiveError, Grid, Link, Local, Shm, ShmWorld,
};
use proptest::prelude::*;

/// Longer than any operation of these tests takes.
const PATIENT: Duration = Duration::from_secs(60);

/// How the ranks of a test are connected.
#[derive(Clone, Copy, Debug)]
enum Kind {
    Local,
    Shm,
}

const KINDS: [Kind; 2] = [Kind::Local, Kind::Shm];

fn world(kind: Kind, grid: impl Into<Grid>, time_limit: Duration) -> Vec<Box<dyn Collective>> {
    let grid = grid.into();
    let boxed = |rank| -> Box<dyn Collective> { rank };
    match kind {
        Kind::Local => {
            let ranks = Local::world(grid, time_limit).into_iter();
            ranks.map(|rank| boxed(Box::new(rank))).collect()
        }
        Kind::Shm => {
            let world = ShmWorld::new(grid).expect("shared memory");
            let ranks = (0..grid.num_ranks()).map(|rank| world.attach(rank, time_limit));
            ranks
                .map(|rank| boxed(Box::new(rank.expect("a free place"))))
                .collect()
        }
    }
}

/// Calls `body` for each rank in a thread of its own, and collects the results.
fn on_ranks<R: Send>(
    ranks: Vec<Box<dyn Collective>>,
    body: impl Fn(&mut dyn Collective) -> R + Sync,
) -> Vec<R> {
    let body = &body;
    thread::scope(|scope| {
        let threads: Vec<_> = ranks
            .into_iter()
            .map(|mut rank| scope.spawn(move || body(rank.as_mut())))
            .collect();
        let results = threads.into_iter().map(|thread| thread.join());
        results.map(|result| result.expect("no panic")).collect()
    })
}

/// A value that depends on its rank, its operation and its place; sums of it are rounded.
fn value(rank: usize, operation: usize, index: usize) -> f32 {
    let seed = (rank * 7919 + operation * 104_729 + index * 31) % 10_007;
    (seed as f32 - 5000.0) * 0.37
}

fn values(rank: usize, operation: usize, len: usize) -> Vec<f32> {
    (0..len)
        .map(|index| value(rank, operation, index))
        .collect()
}

/// The sum in pairs, by its definition.
fn sum(values: &[f32]) -> f32 {
    match values {
        [one] => *one,
        _ => {
            let pairs = values
                .chunks(2)
                .map(|pair| pair.iter().copied().reduce(|a, b| a + b));
            sum(&pairs.flatten().collect::<Vec<_>>())
        }
    }
}

/// An operation of all ranks, with the lengths of what each of them has.
#[derive(Clone, Debug)]
enum Call {
    AllReduce(usize),
    /// To this rank.
    Gather(usize, Vec<usize>),
    Broadcast(usize, usize),
    /// Once through all stages.
    Send(usize),
}

/// Lengths up to a few messages.
fn len() -> impl Strategy<Value = usize> {
    prop_oneof![0..40_usize, 65_000..66_000_usize, 131_000..140_000_usize]
}

fn call(num_ranks: usize) -> impl Strategy<Value = Call> {
    prop_oneof![
        len().prop_map(Call::AllReduce),
        (0..num_ranks, prop::collection::vec(len(), num_ranks),)
            .prop_map(|(root, lens)| Call::Gather(root, lens)),
        (0..num_ranks, len()).prop_map(|(root, len)| Call::Broadcast(root, len)),
        len().prop_map(Call::Send),
    ]
}

fn calls() -> impl Strategy<Value = (Grid, Vec<Call>, Vec<u64>)> {
    let grid = prop_oneof![
        (1..=5_usize).prop_map(Grid::from),
        (2..=3_usize, 1..=2_usize).prop_map(|(num_stages, ranks_per_stage)| Grid {
            num_stages,
            ranks_per_stage,
        }),
    ];
    grid.prop_flat_map(|grid| {
        (
            Just(grid),
            prop::collection::vec(call(grid.ranks_per_stage), 1..8),
            prop::collection::vec(0..400_u64, 5),
        )
    })
}

/// Makes one call as a rank, and compares its result with the definition.
fn make_call(collective: &mut dyn Collective, index: usize, call: &Call) {
    let (rank, num_ranks) = (collective.rank(), collective.num_ranks());
    let step = index as u64;
    // Other values in each stage.
    let own = index * collective.grid().num_stages + collective.stage();
    match call {
        Call::AllReduce(len) => {
            let mut sums = values(rank, own, *len);
            collective.all_reduce(step, &mut sums).expect("a sum");
            for (place, got) in sums.iter().enumerate() {
                let all: Vec<_> = (0..num_ranks).map(|rank| value(rank, own, place)).collect();
                assert_eq!(got.to_bits(), sum(&all).to_bits(), "sum {place} of {len}");
            }
        }
        Call::Gather(root, lens) => {
            let mut got: Vec<_> = lens.iter().map(|&len| vec![f32::NAN; len]).collect();
            let values_of = |rank: usize| values(rank, own, lens[rank]);
            let mut write = |rank: usize, first: usize, piece: &[f32]| {
                got[rank][first..][..piece.len()].copy_from_slice(piece);
            };
            let gathered = collective.gather(step, *root, &values_of(rank), lens, &mut write);
            gathered.expect("all values");
            for (other, got) in got.iter().enumerate() {
                match rank == *root {
                    true => assert!(*got == values_of(other), "values of {other}"),
                    false => assert!(got.iter().all(|value| value.is_nan()), "no values"),
                }
            }
        }
        Call::Broadcast(root, len) => {
            let words = |rank: usize| (0..*len).map(move |word| (word * 3 + rank + own) as u32);
            let mut got: Vec<_> = words(rank).collect();
            collective.broadcast(step, *root, &mut got).expect("words");
            assert!(got.into_iter().eq(words(*root)), "words of {root}");
        }
        Call::Send(len) => {
            let Grid {
                num_stages,
                ranks_per_stage,
            } = collective.grid();
            if num_stages == 1 {
                return;
            }
            // What each rank has depends on its stage and on its place there.
            let of_stage = |stage| values(stage * ranks_per_stage + rank, index, *len);
            let stage = collective.stage();
            let own = of_stage(stage);
            if stage == 0 {
                collective.send(step, &own).expect("the next stage");
            }
            let mut got = vec![f32::NAN; *len];
            collective.receive(step, &mut got).expect("values");
            let previous = (stage + num_stages - 1) % num_stages;
            assert!(got == of_stage(previous), "values of stage {previous}");
            if stage > 0 {
                collective.send(step, &own).expect("the next stage");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn operations_do_what_they_say_whatever_their_lengths_and_delays((grid, calls, delays) in calls()) {
        for kind in KINDS {
            on_ranks(world(kind, grid, PATIENT), |collective| {
                for (index, call) in calls.iter().enumerate() {
                    let delay = delays[(index + collective.rank()) % delays.len()];
                    thread::sleep(Duration::from_micros(delay));
                    make_call(collective, index, call);
                }
            });
        }
    }
}

#[test]
fn many_rounds_mix_up_no_messages() {
    for kind in KINDS {
        on_ranks(world(kind, 3, PATIENT), |collective| {
            for round in 0..5000 {
                make_call(collective, round, &Call::AllReduce(5));
            }
        });
    }
}

#[test]
fn a_rank_that_is_late_is_an_error_in_time() {
    // Long enough for ranks 0 and 1 to meet on a busy machine.
    let limit = Duration::from_secs(2);
    for kind in KINDS {
        let have_waited = Barrier::new(3);
        let results = on_ranks(world(kind, 3, limit), |collective| {
            if collective.rank() == 2 {
                // Alive all the time that the others wait.
                have_waited.wait();
                return collective.all_reduce(0, &mut [1.0]).expect_err("too late");
            }
            let error = collective.all_reduce(0, &mut [1.0]).expect_err("late");
            have_waited.wait();
            error
        });
        for error in &results {
            assert!(!matches!(error, CollectiveError::Ended { .. }), "{error}");
        }
        let timed_out = |rank| CollectiveError::TimedOut {
            rank,
            missing: 2,
            limit,
        };
        let [first, second, _] = &results[..] else {
            unreachable!("three ranks")
        };
        // Who notices first tells the other one.
        assert!(
            [first, second]
                .into_iter()
                .zip(0..)
                .any(|(error, rank)| *error == timed_out(rank)),
            "{results:?}"
        );
    }
}

#[test]
fn a_rank_that_has_ended_is_an_error_at_once() {
    for kind in KINDS {
        let errors = on_ranks(world(kind, 3, PATIENT), |collective| {
            collective.all_reduce(0, &mut [1.0]).expect("all are there");
            match collective.rank() {
                1 => None,
                _ => Some(
                    collective
                        .all_reduce(1, &mut [1.0])
                        .expect_err("rank 1 has ended"),
                ),
            }
        });
        let errors: Vec<_> = errors.into_iter().flatten().collect();
        assert_eq!(errors.len(), 2);
        for error in errors {
            assert!(error.to_string().contains("rank 1 has ended"), "{error}");
        }
    }
}

#[test]
fn a_rank_that_fails_tells_the_others_why() {
    for kind in KINDS {
        let results = on_ranks(world(kind, 4, PATIENT), |collective| {
            if collective.rank() == 3 {
                thread::sleep(Duration::from_millis(30));
                collective.abort("its disk is full");
            }
            let first = collective.all_reduce(0, &mut [1.0]).expect_err("rank 3");
            let second = collective.broadcast(1, 0, &mut [1]).expect_err("still");
            assert_eq!(first, second);
            first
        });
        let expected = CollectiveError::Aborted {
            by: 3,
            reason: "its disk is full".to_owned(),
        };
        assert_eq!(results, vec![expected; 4]);
    }
}

#[test]
fn ranks_that_do_different_things_notice_it() {
    for kind in KINDS {
        for what in ["operation", "step", "length"] {
            let results = on_ranks(world(kind, 2, PATIENT), |collective| {
                match (collective.rank(), what) {
                    (1, "operation") => collective.broadcast(0, 0, &mut [1]),
                    (1, "step") => collective.all_reduce(1, &mut [1.0]),
                    (1, _) => collective.all_reduce(0, &mut [1.0; 2]),
                    _ => collective.all_reduce(0, &mut [1.0]),
                }
            });
            for result in results {
                let error = result.expect_err("they differ").to_string();
                assert!(error.contains("different steps"), "{what}: {error}");
            }
        }
    }
}

const STAGES: Grid = Grid {
    num_stages: 3,
    ranks_per_stage: 1,
};

#[test]
fn a_stage_does_not_wait_for_the_next_one_until_it_is_two_messages_ahead() {
    let limit = Duration::from_millis(50);
    for kind in KINDS {
        let mut ranks = world(kind, STAGES, limit);
        // All on this thread: nobody receives in the meantime.
        for step in 0..2 {
            let sent = ranks[0].send(step, &[step as f32; 5]);
            sent.expect("there is room");
        }
        for step in 0..2 {
            let mut got = [f32::NAN; 5];
            ranks[1].receive(step, &mut got).expect("it was sent");
            assert_eq!(got, [step as f32; 5]);
        }
        let all = vec![1.5; ranks[0].max_unread()];
        ranks[0].send(2, &all).expect("there is room for all");
        let expected = CollectiveError::TimedOut {
            rank: 0,
            missing: 1,
            limit,
        };
        assert_eq!(ranks[0].send(3, &[1.0]), Err(expected));
    }
}

#[test]
fn messages_longer_than_there_is_room_arrive() {
    for kind in KINDS {
        on_ranks(world(kind, STAGES, PATIENT), |collective| {
            let len = collective.max_unread() + 5;
            make_call(collective, 0, &Call::Send(len));
            make_call(collective, 1, &Call::Send(3));
        });
    }
}

#[test]
fn a_stage_that_has_ended_is_an_error_of_all_others() {
    for kind in KINDS {
        let errors = on_ranks(world(kind, STAGES, PATIENT), |collective| {
            make_call(collective, 0, &Call::Send(3));
            match collective.stage() {
                1 => None,
                // The last one waits for it, the first one for the last one.
                _ => collective.receive(1, &mut [0.0]).err(),
            }
        });
        let errors: Vec<_> = errors.into_iter().flatten().collect();
        assert_eq!(errors.len(), 2);
        for error in errors {
            assert!(error.to_string().contains("rank 1 has ended"), "{error}");
        }
    }
}

#[test]
fn stages_that_compute_different_steps_notice_it() {
    for kind in KINDS {
        for (step, len) in [(1, 1), (0, 2)] {
            let mut ranks = world(kind, STAGES, PATIENT);
            ranks[0].send(0, &[1.0]).expect("there is room");
            let error = ranks[1].receive(step, &mut [0.0; 2][..len]);
            let error = error.expect_err("it is another one").to_string();
            assert!(error.contains("different steps"), "{error}");
            let told = ranks[2].receive(0, &mut [0.0]).expect_err("rank 1 failed");
            assert!(matches!(told, CollectiveError::Aborted { by: 1, .. }));
        }
    }
}

#[test]
fn memory_that_is_none_of_ranks_is_refused() {
    let fail = |memory, rank| match Shm::attach(memory, rank, PATIENT) {
        Ok(_) => panic!("it is refused"),
        Err(error) => error.to_string(),
    };
    let file = std::fs::File::open("/dev/null").expect("/dev/null");
    assert!(fail(file.as_fd(), 0).contains("not memory of"));
    let world = ShmWorld::new(2).expect("shared memory");
    assert!(fail(world.as_fd(), 2).contains("is not below 2"));
    let first = world.attach(0, PATIENT).expect("a free place");
    assert!(fail(world.as_fd(), 0).contains("another process is this rank"));
    drop(first);
    assert!(fail(world.as_fd(), 0).contains("has been taken before"));
    assert!(ShmWorld::new(0).is_err() && ShmWorld::new(17).is_err());
    let too_many = Grid {
        num_stages: 3,
        ranks_per_stage: 6,
    };
    assert!(ShmWorld::new(too_many).is_err());
}

/// Where a process that a test starts finds its memory.
const MEMORY: &str = "INFLIGHT_TEST_RANK_MEMORY";

/// The line that it writes when it has its place in the memory.
const ATTACHED: &str = "rank 1 is attached";

/// Rank 1 of the tests below, in a process of its own: sums until it is killed, or until the step that it is told.
#[test]
fn rank_1() {
    let Some(path) = std::env::var_os(MEMORY) else {
        return;
    };
    let memory = std::fs::File::options().read(true).write(true).open(path);
    let memory = memory.expect("the memory of the test");
    let mut rank = Shm::attach(memory.as_fd(), 1, PATIENT).expect("a free place");
    writeln!(io::stdout(), "{ATTACHED}").expect("the test reads it");
    for step in 0.. {
        let call = Call::AllReduce(1 + step % 3000);
        let mut end = [0];
        rank.broadcast(step as u64, 0, &mut end).expect("rank 0");
        if end == [1] {
            return;
        }
        make_call(&mut rank, step, &call);
    }
}

fn start_rank_1(world: &ShmWorld) -> Child {
    let id = std::process::id();
    let path = format!("/proc/{id}/fd/{}", world.as_fd().as_raw_fd());
    let program = std::env::current_exe().expect("this test");
    let mut command = Command::new(program);
    command.args(["--exact", "rank_1"]).env(MEMORY, path);
    command.stdout(Stdio::piped()).spawn().expect("a process")
}

fn wait_until_attached(child: &mut Child) {
    let lines = BufReader::new(child.stdout.as_mut().expect("a pipe")).lines();
    let mut lines = lines.map(|line| line.expect("a line"));
    assert!(lines.any(|line| line.ends_with(ATTACHED)));
}

#[test]
fn two_processes_sum() {
    let world = ShmWorld::new(2).expect("shared memory");
    let mut child = start_rank_1(&world);
    let mut rank = world.attach(0, PATIENT).expect("a free place");
    for step in 0..2000 {
        rank.broadcast(step as u64, 0, &mut [0]).expect("rank 1");
        make_call(&mut rank, step, &Call::AllReduce(1 + step % 3000));
    }
    rank.broadcast(2000, 0, &mut [1]).expect("rank 1");
    assert!(child.wait().expect("it ends").success());
}

#[test]
fn a_process_that_is_killed_is_an_error_before_the_time_limit() {
    for num_steps in [1, 300] {
        let world = ShmWorld::new(2).expect("shared memory");
        let mut child = start_rank_1(&world);
        // Longer than a test may take.
        let mut rank = world
            .attach(0, Duration::from_secs(3600))
            .expect("a free place");
        let error = (0..).find_map(|step| {
            if step == num_steps {
                child.kill().expect("a process");
            }
            let mut sums = values(0, step, 1 + step % 3000);
            let result = rank.broadcast(step as u64, 0, &mut [0]);
            result
                .and_then(|()| rank.all_reduce(step as u64, &mut sums))
                .err()
        });
        let expected = CollectiveError::Ended {
            rank: 0,
            missing: 1,
        };
        assert_eq!(error, Some(expected));
        child.wait().expect("it has ended");
    }
}

#[test]
fn a_process_that_is_stopped_is_an_error_in_time() {
    let world = ShmWorld::new(2).expect("shared memory");
    let mut child = start_rank_1(&world);
    wait_until_attached(&mut child);
    let limit = Duration::from_secs(2);
    let mut rank = world.attach(0, limit).expect("a free place");
    // Where the machine has no core for the first step as long as that, the error is already this one.
    let error = (0..).find_map(|step| {
        if step == 1 {
            let mut stop = Command::new("kill");
            stop.args(["-STOP", &child.id().to_string()]);
            assert!(stop.status().expect("kill").success());
        }
        let mut sums = values(0, step, 1 + step % 3000);
        let result = rank.broadcast(step as u64, 0, &mut [0]);
        let result = result.and_then(|()| rank.all_reduce(step as u64, &mut sums));
        result.err()
    });
    let expected = CollectiveError::TimedOut {
        rank: 0,
        missing: 1,
        limit,
    };
    assert_eq!(error, Some(expected));
    child.kill().expect("a process");
    child.wait().expect("it has ended");
}

#[test]
fn a_link_carries_messages_and_files_in_order() {
    let (mut here, mut there) = Link::pair().expect("a connection");
    let mut message = vec![7; 3];
    for len in [0, 1, 5000] {
        here.send(&vec![len as u8; len]).expect("it is sent");
    }
    let world = ShmWorld::new(2).expect("shared memory");
    let zero = world.attach(0, Duration::from_secs(60)).expect("a place");
    for len in [0, 1, 5000] {
        assert!(there.receive(&mut message).expect("a message"));
        assert_eq!(message, vec![len as u8; len]);
    }
    here.send_file(world.as_fd()).expect("it is sent");
    let memory = there.receive_file().expect("a file");
    drop(world);
    let one = Shm::attach(memory.as_fd(), 1, Duration::from_secs(60)).expect("a place");
    let ranks: [Box<dyn Collective>; 2] = [Box::new(zero), Box::new(one)];
    thread::scope(|scope| {
        for mut rank in ranks {
            scope.spawn(move || {
                let mut values = [1.0, 2.0];
                rank.all_reduce(1, &mut values).expect("both take part");
                assert_eq!(values, [2.0, 4.0]);
            });
        }
    });
    // A message where a file is expected.
    here.send(b"text").expect("it is sent");
    assert!(there.receive_file().is_err());
}

#[test]
fn a_link_ends_with_either_side_and_waits_no_longer_than_allowed() {
    let (here, mut there) = Link::pair().expect("a connection");
    let mut message = Vec::new();
    there
        .set_time_limit(Some(Duration::from_millis(20)))
        .expect("a limit");
    assert!(there.receive(&mut message).is_err(), "nothing comes");
    // Nobody reads: at some length it does not fit.
    assert!((0..1000).any(|_| there.send(&[0; 1 << 16]).is_err()));
    let watched = there.try_clone().expect("a second handle");
    let watch = thread::spawn(move || watched.wait_for_end());
    drop(here);
    watch.join().expect("no panic");
    assert!(!there.receive(&mut message).expect("the end"));
    assert!(there.send(&[0; 8]).is_err(), "and no signal");
}
