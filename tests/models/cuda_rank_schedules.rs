//! Ways to schedule requests, and sizes that do not divide, on several GPUs that share each layer: stand-ins.

use std::path::Path;

use inflight_cuda_stand_in::StandIn;

use crate::batching::{self, roomy};
use crate::cuda::on_stand_in;
use crate::cuda_ranks::{load, options, serve_dir_on};
use crate::devices::{assert_near, requests, setups};
use crate::ranks::{PATIENT, Sizes, assert_same, on_ranks, random_llama};
use crate::schedules::{assert_happened, beams, pausing, schedules};
use crate::support::{Happened, Request, Served, Setup, fixture, serve};

/// What the first of two GPUs has served, whose sums do not depend on the batch.
fn on_two_gpus(
    dir: &Path,
    setup: &Setup,
    requests: &[Request],
    max_graphs: usize,
) -> (Vec<Served>, Happened) {
    let mut results = on_ranks(2, |rank| {
        let options = options(rank.rank, true, max_graphs);
        let runner = load(dir, setup, &options, rank, PATIENT);
        serve(&mut runner.expect("it loads"), setup, requests)
    });
    results.swap_remove(0)
}

/// The oracle is one request after the other, in a cache that has room for it.
#[test]
fn two_gpus_change_nothing_however_requests_are_scheduled() {
    let test = "cuda_rank_schedules::two_gpus_change_nothing_however_requests_are_scheduled";
    on_stand_in(StandIn::new().set("DEVICES", 2), test, || {
        let dir = fixture("llama3");
        let pauses = ("pauses", pausing(), batching::requests());
        for (what, setup, requests) in schedules().into_iter().chain([pauses, beams()]) {
            let (together, happened) = on_two_gpus(&dir, &setup, &requests, 4);
            assert_happened(what, &happened);
            let one_by_one = Setup {
                max_num_requests: 1,
                ..roomy(&setup)
            };
            let (alone, _) = on_two_gpus(&dir, &one_by_one, &requests, 0);
            assert_same(what, &alone, &together);
        }
    });
}

/// Heads, key heads, widths and vocabularies that divide by no number of GPUs.
#[test]
fn sizes_that_do_not_divide_are_cut_over_gpus() {
    let test = "cuda_rank_schedules::sizes_that_do_not_divide_are_cut_over_gpus";
    on_stand_in(StandIn::new().set("DEVICES", 4), test, || {
        let (what, setup) = setups().swap_remove(0);
        for (num_gpus, (num_heads, num_kv_heads, head_dim), intermediate_size, vocab_size) in [
            (2, (5, 5, 6), 30, 97),
            (3, (7, 1, 8), 45, 131),
            (4, (10, 2, 2), 65, 99),
            (4, (9, 9, 4), 95, 103),
        ] {
            let sizes = Sizes {
                num_heads,
                num_kv_heads,
                head_dim,
                intermediate_size,
                vocab_size,
            };
            let copy = random_llama(sizes, 2);
            let what = format!("{what}, {sizes:?}, {num_gpus} GPUs");
            let (on_cpu, _) = serve(&mut setup.load_from(copy.dir()), &setup, &requests());
            let how = (true, 64);
            let together = serve_dir_on(copy.dir(), &setup, &requests(), num_gpus, how);
            assert_near(&what, &on_cpu, &together, 0.1);
            let alone = serve_dir_on(copy.dir(), &setup, &requests()[1..2], num_gpus, how);
            assert_same(&what, &alone, &together[1..2]);
        }
    });
}
