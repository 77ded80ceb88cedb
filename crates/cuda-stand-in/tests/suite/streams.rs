//! The order of work: what waits, and what goes wrong without.

use crate::support::{POISON, context, error, kernel, scale_add};
use cudarc::driver::sys::{self, CUevent_flags, CUresult};
use inflight_cuda_stand_in::StandIn;

/// Runs a test with several seeds, each in a process of its own.
fn with_seeds(name: &str, body: impl Fn()) {
    for seed in 0..8 {
        StandIn::new().set("SEED", seed).run(name, &body);
    }
}

/// How many of many tries, with orders that differ, give a wrong result.
fn num_wrong(attempt: impl Fn() -> bool) -> usize {
    (0..64).filter(|_| !attempt()).count()
}

#[test]
fn a_stream_runs_only_when_somebody_waits() {
    with_seeds("streams::a_stream_runs_only_when_somebody_waits", || {
        let context = context();
        let stream = context.new_stream().unwrap();
        // SAFETY: the memory is read before anything was written to it, which is what this is about.
        let mut pinned = unsafe { context.alloc_pinned::<u32>(4) }.unwrap();
        let source = stream.clone_htod(&[1u32, 2, 3, 4]).unwrap();
        let host = pinned.as_mut_ptr().unwrap();
        stream.memcpy_dtoh(&source, &mut pinned).unwrap();
        // SAFETY: nobody writes on another thread.
        let before = unsafe { host.read_volatile() };
        assert_eq!(before, POISON);
        stream.synchronize().unwrap();
        assert_eq!(pinned.as_slice().unwrap(), [1, 2, 3, 4]);
    });
}

#[test]
fn a_staging_buffer_that_is_used_again_too_early_gives_wrong_data() {
    with_seeds(
        "streams::a_staging_buffer_that_is_used_again_too_early_gives_wrong_data",
        || {
            let context = context();
            let stream = context.new_stream().unwrap();
            // SAFETY: it is written at once.
            let mut staging = unsafe { context.alloc_pinned::<u32>(1) }.unwrap();
            let host = staging.as_mut_ptr().unwrap();
            let mut target = stream.alloc_zeros::<u32>(1).unwrap();
            // SAFETY: the second write is the mistake.
            unsafe { host.write_volatile(1) };
            stream.memcpy_htod(&staging, &mut target).unwrap();
            // SAFETY: the stand-in reads it on this thread, but later: this is the mistake.
            unsafe { host.write_volatile(2) };
            assert_eq!(stream.clone_dtoh(&target).unwrap(), [2]);
        },
    );
}

#[test]
fn pageable_memory_is_copied_by_the_call() {
    with_seeds("streams::pageable_memory_is_copied_by_the_call", || {
        let stream = context().new_stream().unwrap();
        let mut source = vec![7u32; 1000];
        let target = stream.clone_htod(&source).unwrap();
        source.fill(8);
        drop(source);
        assert_eq!(stream.clone_dtoh(&target).unwrap(), [7; 1000]);
    });
}

#[test]
fn a_missing_event_gives_wrong_results_and_an_event_right_ones() {
    with_seeds(
        "streams::a_missing_event_gives_wrong_results_and_an_event_right_ones",
        || {
            let context = context();
            let (producer, consumer) =
                (context.new_stream().unwrap(), context.new_stream().unwrap());
            let kernel = kernel(&context, "stand_in_scale_add");
            let ones = producer.clone_htod(&[1.0f32; 64]).unwrap();
            let mut sums = producer.alloc_zeros::<f32>(64).unwrap();
            producer.synchronize().unwrap();
            // Another factor in each try, so that the results of the last one are wrong.
            let mut factor = 0.0;
            let mut attempt = |is_ordered: bool| {
                factor += 1.0;
                producer.memset_zeros(&mut sums).unwrap();
                for _ in 0..3 {
                    scale_add(&producer, &kernel, &mut sums, &ones, factor).unwrap();
                }
                if is_ordered {
                    consumer.join(&producer).unwrap();
                }
                let mut read = vec![0.0f32; 64];
                consumer.memcpy_dtoh(&sums, &mut read).unwrap();
                producer.synchronize().unwrap();
                read == [3.0 * factor; 64]
            };
            let tries = |attempt: &mut dyn FnMut(bool) -> bool, is_ordered| {
                (0..32).filter(|_| !attempt(is_ordered)).count()
            };
            assert_eq!(tries(&mut attempt, true), 0);
            let wrong = tries(&mut attempt, false);
            assert!(
                wrong >= 16,
                "only {wrong} of 32 tries show the missing event"
            );
        },
    );
}

#[test]
fn a_missing_event_before_memory_is_overwritten_shows_too() {
    with_seeds(
        "streams::a_missing_event_before_memory_is_overwritten_shows_too",
        || {
            let context = context();
            let (reader, writer) = (context.new_stream().unwrap(), context.new_stream().unwrap());
            let kernel = kernel(&context, "stand_in_scale_add");
            let wrong = num_wrong(|| {
                let mut data = reader.clone_htod(&[1.0f32; 64]).unwrap();
                let mut sums = reader.alloc_zeros::<f32>(64).unwrap();
                reader.synchronize().unwrap();
                scale_add(&reader, &kernel, &mut sums, &data, 1.0).unwrap();
                writer.memset_zeros(&mut data).unwrap();
                writer.synchronize().unwrap();
                reader.clone_dtoh(&sums).unwrap() == [1.0; 64]
            });
            assert!(
                wrong >= 16,
                "only {wrong} of 64 tries show the missing event"
            );
        },
    );
}

#[test]
fn an_event_stands_for_its_last_record_before_the_wait() {
    with_seeds(
        "streams::an_event_stands_for_its_last_record_before_the_wait",
        || {
            let context = context();
            let (first, second) = (context.new_stream().unwrap(), context.new_stream().unwrap());
            let event = context.new_event(None).unwrap();
            let mut data = first.alloc_zeros::<u32>(1).unwrap();
            event.record(&first).unwrap();
            second.wait(&event).unwrap();
            // What comes after the wait does not count.
            event.record(&second).unwrap();
            first.wait(&event).unwrap();
            first.memcpy_htod(&[5], &mut data).unwrap();
            second.synchronize().unwrap();
            assert!(event.is_complete());
            assert_eq!(first.clone_dtoh(&data).unwrap(), [5]);
            // An event that nobody has recorded holds up nothing.
            let unused = context.new_event(None).unwrap();
            first.wait(&unused).unwrap();
            unused.synchronize().unwrap();
            first.synchronize().unwrap();
        },
    );
}

#[test]
fn asking_again_and_again_makes_progress() {
    with_seeds("streams::asking_again_and_again_makes_progress", || {
        let context = context();
        let stream = context.new_stream().unwrap();
        let mut data = stream.alloc_zeros::<u32>(1).unwrap();
        stream.memset_zeros(&mut data).unwrap();
        let event = context.new_event(None).unwrap();
        event.record(&stream).unwrap();
        let num_asked = (1..100).find(|_| event.try_is_complete().unwrap());
        assert!(num_asked.is_some_and(|asked| asked > 1), "{num_asked:?}");
    });
}

#[test]
fn the_time_between_events_is_measured() {
    StandIn::new().run("streams::the_time_between_events_is_measured", || {
        let context = context();
        let stream = context.new_stream().unwrap();
        let event = || {
            context
                .new_event(Some(CUevent_flags::CU_EVENT_DEFAULT))
                .unwrap()
        };
        let (start, end, untimed) = (event(), event(), context.new_event(None).unwrap());
        start.record(&stream).unwrap();
        end.record(&stream).unwrap();
        untimed.record(&stream).unwrap();
        assert!(start.elapsed_ms(&end).unwrap() >= 0.0);
        assert_eq!(
            error(start.elapsed_ms(&untimed)),
            CUresult::CUDA_ERROR_INVALID_HANDLE
        );
    });
}

#[test]
fn the_default_stream_waits_for_blocking_streams_and_they_for_it() {
    with_seeds(
        "streams::the_default_stream_waits_for_blocking_streams_and_they_for_it",
        || {
            use cudarc::driver::result::stream::{StreamKind, create};
            let context = context();
            let kernel = kernel(&context, "stand_in_scale_add");
            let default = context.default_stream();
            // SAFETY: the stream lives as long as the process.
            let blocking =
                unsafe { context.wrap_borrowed_stream(create(StreamKind::Default).unwrap()) };
            for _ in 0..8 {
                let ones = default.clone_htod(&[1.0f32; 8]).unwrap();
                let mut sums = blocking.alloc_zeros::<f32>(8).unwrap();
                for stream in [&blocking, &default, &blocking, &default, &blocking] {
                    scale_add(stream, &kernel, &mut sums, &ones, 1.0).unwrap();
                    // Doubles the sums, so that the order counts.
                    let copy = stream.clone_dtod(&sums).unwrap();
                    scale_add(stream, &kernel, &mut sums, &copy, 1.0).unwrap();
                }
                assert_eq!(default.clone_dtoh(&sums).unwrap(), [62.0; 8]);
            }
        },
    );
}

#[test]
fn threads_use_streams_of_their_own_at_once() {
    with_seeds("streams::threads_use_streams_of_their_own_at_once", || {
        let context = context();
        std::thread::scope(|scope| {
            for thread in 0..4u8 {
                let context = &context;
                scope.spawn(move || {
                    let stream = context.new_stream().unwrap();
                    let kernel = kernel(context, "stand_in_scale_add");
                    let x = stream.clone_htod(&[f32::from(thread); 300]).unwrap();
                    for _ in 0..6 {
                        let mut sums = stream.alloc_zeros::<f32>(300).unwrap();
                        for _ in 0..5 {
                            scale_add(&stream, &kernel, &mut sums, &x, 1.0).unwrap();
                        }
                        let sum = 5.0 * f32::from(thread);
                        assert_eq!(stream.clone_dtoh(&sums).unwrap(), [sum; 300]);
                    }
                });
            }
        });
    });
}

#[test]
fn work_runs_of_its_own_accord_if_that_is_asked_for() {
    let options = StandIn::new().set("RUN_AFTER_MS", 1);
    options.run(
        "streams::work_runs_of_its_own_accord_if_that_is_asked_for",
        || {
            let context = context();
            let stream = context.new_stream().unwrap();
            // SAFETY: it is written at once.
            let mut pinned = unsafe { context.alloc_pinned::<u32>(1) }.unwrap();
            let host = pinned.as_mut_ptr().unwrap();
            let source = stream.clone_htod(&[7u32]).unwrap();
            stream.memcpy_dtoh(&source, &mut pinned).unwrap();
            // SAFETY: whole words are read and written.
            while unsafe { host.read_volatile() } != 7 {
                std::thread::yield_now();
            }
        },
    );
}

#[test]
fn a_callback_runs_in_order_and_may_not_use_the_driver() {
    StandIn::new().run(
        "streams::a_callback_runs_in_order_and_may_not_use_the_driver",
        || {
            use std::sync::atomic::{AtomicI32, Ordering};
            let context = context();
            let stream = context.new_stream().unwrap();
            let seen = AtomicI32::new(0);
            unsafe extern "C" fn callback(seen: *mut std::ffi::c_void) {
                let result = cudarc::driver::result::device::get_count();
                // SAFETY: it is the number below.
                unsafe { &*seen.cast::<AtomicI32>() }.store(error(result) as i32, Ordering::SeqCst);
            }
            let argument = (&raw const seen).cast_mut().cast();
            // SAFETY: the number outlives the callback.
            unsafe { sys::cuLaunchHostFunc(stream.cu_stream(), Some(callback), argument) }
                .result()
                .unwrap();
            assert_eq!(seen.load(Ordering::SeqCst), 0);
            stream.synchronize().unwrap();
            let not_permitted = CUresult::CUDA_ERROR_NOT_PERMITTED as i32;
            assert_eq!(seen.load(Ordering::SeqCst), not_permitted);
        },
    );
}
