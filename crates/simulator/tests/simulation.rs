//! The simulator's clock and slots, and the conservation of requests, tokens and blocks.

use inflight_base::{BlockSize, Blocks, Tokens};
use inflight_engine::{BatchingScheme, BlockReuse, CapacityPolicy, EngineConfig};
use inflight_simulator::cost::CostModel;
use inflight_simulator::fit::fit;
use inflight_simulator::report::Report;
use inflight_simulator::simulation::{Outcome, Setup, run};
use inflight_simulator::time::Time;
use inflight_simulator::trace;
use inflight_simulator::workload::{Arrivals, Lengths, Workload};
use inflight_step_records::read;

const COST: CostModel = CostModel {
    step_us: 1000.0,
    token_us: 100.0,
    sequence_us: 0.0,
    position_us: 0.0,
    overhead_us: 100.0,
    overhead_sequence_us: 0.0,
};

/// Two slots, eight tokens a step, chunks of four.
fn small() -> Setup {
    let block_size = BlockSize::new(4).expect("not zero");
    Setup {
        engine: EngineConfig {
            max_num_requests: 2,
            max_seq_len: Tokens(32),
            max_num_tokens: Tokens(8),
            block_size,
            chunk_unit: block_size,
            num_blocks: Blocks(16),
            reuse: BlockReuse::Off,
            ..EngineConfig::default()
        },
        num_slots: 2,
        cost: COST,
        latency: Time::ZERO,
        num_shared_tokens: 0,
    }
}

fn simulate(setup: &Setup, workload: &Workload) -> Outcome {
    run(setup, workload, None).expect("nothing is written")
}

#[test]
fn three_requests_take_the_time_computed_by_hand() {
    let trace = "arrival,input,output\n0,4,3\n0,6,2\n0.0012,3,1\n";
    let workload = trace::read(trace).expect("a trace");
    let outcome = simulate(&small(), &workload);
    // ms    model         in the step                          slots
    // 0.0   1.0 + 8*0.1   R1: 4 of 4, R2: 4 of 6               both taken, R3 comes at 1.2
    // 1.9   1.0 + 3*0.1   R1: 2nd token, R2: 2 of 6
    // 3.3   1.0 + 2*0.1   R1: 3rd token, R2: 2nd token         both free
    // 4.6   1.0 + 3*0.1   R3: 3 of 3
    let us = |time: Time| time.0 / 1000;
    let steps: Vec<_> = outcome
        .steps
        .iter()
        .map(|s| {
            (
                us(s.began),
                us(s.ended),
                s.num_tokens,
                s.num_scheduled,
                s.num_active,
            )
        })
        .collect();
    assert_eq!(
        steps,
        [
            (0, 1800, 8, 2, 2),
            (1900, 3200, 3, 2, 3),
            (3300, 4500, 2, 2, 3),
            (4600, 5900, 3, 1, 1),
        ]
    );
    let requests: Vec<_> = outcome
        .requests
        .iter()
        .map(|r| {
            (
                us(r.request.sent),
                us(r.first_token),
                us(r.last_token),
                r.num_tokens,
            )
        })
        .collect();
    assert_eq!(
        requests,
        [
            (0, 1900, 4500, 3),
            (0, 3300, 4500, 2),
            (1200, 5900, 5900, 1)
        ]
    );

    let report = Report::new(&small(), &outcome);
    assert_eq!((report.num_requests, report.num_output_tokens), (3, 6));
    assert_eq!(report.duration_s, 0.0059);
    assert_eq!(report.time_to_first_token_ms.mean, (1.9 + 3.3 + 4.7) / 3.0);
    assert_eq!(
        report.time_per_output_token_ms.mean,
        (2.6 / 2.0 + 1.2) / 2.0
    );
    assert_eq!(report.end_to_end_ms.p99, 4.7);
    assert_eq!((report.batch.peak, report.batch.max), (2, 2));
}

#[test]
fn network_latency_delays_the_request_and_its_tokens() {
    let setup = Setup {
        latency: Time::from_us(50.0),
        ..small()
    };
    let workload = trace::read("arrival,input,output\n0,4,2\n").expect("a trace");
    let outcome = simulate(&setup, &workload);
    let log = &outcome.requests[0];
    // Sent at 0, received at 0.05, computed at 1.45, streamed at 1.55, delivered at 1.6; the second token is
    // computed at 2.65 and delivered at 2.7.
    assert_eq!(
        (log.first_token, log.last_token),
        (Time(1_600_000), Time(2_700_000))
    );
}

#[test]
fn two_micro_batches_keep_the_model_busy_while_the_host_works() {
    let mut setup = small();
    setup.cost.overhead_us = 500.0;
    let workload = trace::read("arrival,input,output\n0,4,9\n0,4,9\n").expect("a trace");
    let busy = |setup: &Setup| Report::new(setup, &simulate(setup, &workload)).model_share;
    let alone = busy(&setup);
    setup.engine.num_micro_batches = 2;
    let overlapped = busy(&setup);
    assert!(alone < 0.75 && overlapped > 0.95, "{alone}, {overlapped}");
}

/// Setups of every scheme and policy, with little memory.
fn setups() -> Vec<Setup> {
    use BatchingScheme::{Inflight, InflightFused, V1};
    use CapacityPolicy::{GuaranteedNoEvict, MaxUtilization, StaticBatch};
    let mut setups = Vec::new();
    for (scheme, policy, num_micro_batches) in [
        (InflightFused, GuaranteedNoEvict, 1),
        (InflightFused, MaxUtilization, 1),
        (InflightFused, MaxUtilization, 2),
        (InflightFused, StaticBatch, 1),
        (Inflight, MaxUtilization, 1),
        (V1, GuaranteedNoEvict, 1),
    ] {
        for reuse in [BlockReuse::Off, BlockReuse::PartialBlocks] {
            let mut setup = small();
            setup.engine = EngineConfig {
                scheme,
                policy,
                num_micro_batches,
                reuse,
                max_num_requests: 8,
                max_num_tokens: Tokens(32),
                ..setup.engine
            };
            setup.num_slots = 12;
            setups.push(setup);
        }
    }
    setups
}

fn random(arrivals: Arrivals, seed: u64) -> Workload {
    let lengths = [Lengths::Uniform(1, 28), Lengths::Uniform(1, 9)];
    Workload::random(300, arrivals, lengths, seed)
}

#[test]
fn every_request_gets_its_tokens_and_every_token_was_computed() {
    for setup in setups() {
        for seed in 0..3 {
            let rate = Arrivals::Open {
                rate: 150.0,
                burst: 5,
            };
            for arrivals in [rate, Arrivals::Closed { concurrency: 20 }] {
                let what = format!("{:?}, {arrivals:?}, seed {seed}", setup.engine);
                let outcome = simulate(&setup, &random(arrivals, seed));
                assert_conserved(&setup, &outcome, &what);
            }
        }
    }
}

fn assert_conserved(setup: &Setup, outcome: &Outcome, what: &str) {
    let engine = &setup.engine;
    let mut least_work = 0;
    for log in &outcome.requests {
        let asked = log.request;
        let room = engine.max_seq_len.0 - asked.num_input_tokens;
        assert_eq!(
            log.num_tokens,
            asked.num_output_tokens.min(room),
            "{what}: {log:?}"
        );
        let in_order = asked.sent < log.first_token && log.first_token <= log.last_token;
        assert!(in_order, "{what}: {log:?}");
        // The last token is never computed.
        least_work += u64::from(asked.num_input_tokens + log.num_tokens - 1);
    }
    let mut work = 0;
    let mut free_at = Time::ZERO;
    for step in &outcome.steps {
        assert!(
            free_at <= step.began && step.began <= step.ended,
            "{what}: {step:?}"
        );
        free_at = step.ended;
        assert!(
            step.num_scheduled <= engine.max_num_requests,
            "{what}: {step:?}"
        );
        assert!(
            step.num_tokens <= engine.max_num_tokens.0,
            "{what}: {step:?}"
        );
        assert!(
            step.num_used_blocks <= engine.num_blocks.0,
            "{what}: {step:?}"
        );
        work += u64::from(step.num_tokens);
    }
    let pauses: u64 = outcome
        .requests
        .iter()
        .map(|log| u64::from(log.num_pauses))
        .sum();
    if pauses == 0 && engine.reuse == BlockReuse::Off {
        assert_eq!(work, least_work, "{what}");
    } else if engine.reuse == BlockReuse::Off {
        assert!(work > least_work, "{what}: paused work is computed again");
    }
    if engine.policy != CapacityPolicy::MaxUtilization {
        assert_eq!(pauses, 0, "{what}");
    }
}

#[test]
fn only_max_utilization_pauses_requests_when_blocks_run_out() {
    let pauses = |setup: &Setup| {
        let outcome = simulate(setup, &random(Arrivals::Closed { concurrency: 20 }, 1));
        Report::new(setup, &outcome).num_pauses
    };
    for setup in setups() {
        let expected = setup.engine.policy == CapacityPolicy::MaxUtilization;
        assert_eq!(pauses(&setup) > 0, expected, "{:?}", setup.engine);
    }
}

#[test]
fn the_same_seed_gives_the_same_outcome_with_and_without_records() {
    for setup in setups() {
        let workload = random(
            Arrivals::Open {
                rate: 150.0,
                burst: 1,
            },
            7,
        );
        let outcome = simulate(&setup, &workload);
        let mut file = Vec::new();
        let watched = run(&setup, &workload, Some(&mut file)).expect("memory can be written");
        assert_eq!(outcome, watched, "{:?}", setup.engine);
    }
}

#[test]
fn slots_and_clients_limit_the_requests_at_the_server() {
    let setup = Setup {
        num_slots: 1,
        ..small()
    };
    let outcome = simulate(&setup, &random(Arrivals::Closed { concurrency: 5 }, 2));
    assert!(outcome.steps.iter().all(|step| step.num_scheduled == 1));
    assert_eq!(
        outcome.steps.iter().map(|step| step.num_active).max(),
        Some(5)
    );
}

#[test]
fn a_request_that_never_fits_is_rejected_and_the_others_finish() {
    let trace = "arrival,input,output\n0,32,1\n0,4,100\n";
    for concurrency in [None, Some(1)] {
        let workload = Workload {
            concurrency,
            ..trace::read(trace).expect("a trace")
        };
        let outcome = simulate(&small(), &workload);
        let report = Report::new(&small(), &outcome);
        assert_eq!((report.num_refused, report.num_requests), (1, 1));
        assert_eq!(report.num_output_tokens, 28, "what max_seq_len leaves");
    }
}

#[test]
fn a_shared_prompt_prefix_is_computed_once() {
    let mut setup = small();
    setup.engine.reuse = BlockReuse::PartialBlocks;
    let trace = "arrival,input,output\n0,24,1\n1,24,1\n2,24,1\n";
    let workload = trace::read(trace).expect("a trace");
    let computed = |setup: &Setup| -> u32 {
        let outcome = simulate(setup, &workload);
        outcome.steps.iter().map(|step| step.num_tokens).sum()
    };
    assert_eq!(computed(&setup), 72);
    setup.num_shared_tokens = 16;
    assert_eq!(computed(&setup), 24 + 8 + 8);
}

#[test]
fn the_cost_model_can_be_fitted_to_the_records_of_a_simulation() {
    let setup = small();
    let workload = random(Arrivals::Closed { concurrency: 6 }, 3);
    let mut file = Vec::new();
    let outcome = run(&setup, &workload, Some(&mut file)).expect("memory can be written");
    let records = read(file.as_slice()).expect("a statistics file");
    assert_eq!(records.len(), outcome.steps.len());
    let found = fit(&records).expect("enough steps").cost;
    for (found, expected) in [
        (found.step_us, COST.step_us),
        (found.token_us, COST.token_us),
        (found.overhead_us, COST.overhead_us),
    ] {
        assert!((found - expected).abs() < 0.01, "{found} is not {expected}");
    }
}
