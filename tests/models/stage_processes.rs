//! One model whose layers are in stages, on ranks that are processes, and two micro-batches that the stages compute at
//! a time.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use inflight_base::{SequenceId, StepError, Tokens};
use inflight_collective::Grid;
use inflight_engine::{Engine, EngineConfig, Event, NewRequest, Step, StepOutput};
use inflight_machines::{LeadingRunner, RankLimits};
use inflight_manager::BatchManager;
use inflight_runner::Runner;

use crate::batching;
use crate::devices::{requests, setups};
use crate::rank_processes::{PATIENT, PROGRAM, Script, compute, load};
use crate::ranks::{assert_same, together};
use crate::schedules::{
    assert_happened, beams, grid, pausing_with_host_memory, requests_with_outputs,
};
use crate::support::{Request, Served, Setup, fixture, new_request, serve};

/// 3 layers.
const MODEL: &str = "qwen3-windows";

fn load_stages(setup: &Setup, grid: Grid) -> LeadingRunner {
    let runner = load(Path::new(PROGRAM), &fixture(MODEL), setup, grid, PATIENT);
    runner.expect("it loads")
}

#[test]
fn stages_that_are_processes_change_nothing() {
    let cases = setups()
        .into_iter()
        .map(|(what, setup)| (what, setup, requests()));
    let pauses = ("pauses", pausing_with_host_memory(), batching::requests());
    let dir = fixture(MODEL);
    for (what, setup, requests) in cases.chain([pauses, beams()]) {
        let (alone, happened) = serve(&mut setup.load(MODEL), &setup, &requests);
        assert_happened(what, &happened);
        for grid in [grid(2, 1), grid(3, 1), grid(2, 2)] {
            let (served, _) = serve(&mut load_stages(&setup, grid), &setup, &requests);
            let what = format!("{what}, processes of {grid:?}");
            match grid.ranks_per_stage {
                1 => assert_same(&what, &alone, &served),
                num_ranks => {
                    let expected = together(&dir, &setup, &requests, num_ranks);
                    assert_same(&what, &expected, &served);
                }
            }
        }
    }
}

/// Serves requests in two micro-batches, with all that they can ask for. Logits are those that they ask for.
pub fn serve_overlapped(
    runner: Box<dyn Runner>,
    setup: &Setup,
    requests: &[Request],
) -> Vec<Served> {
    let config = EngineConfig {
        num_micro_batches: 2,
        ..setup.engine_config()
    };
    let mut manager = BatchManager::new(config, runner).expect("a batch manager");
    let mut served = vec![Served::default(); requests.len()];
    let (mut num_steps, mut num_added) = (0, 0);
    let mut events = Vec::new();
    while num_added < requests.len() || !manager.is_idle() {
        for (index, request) in requests.iter().enumerate() {
            if request.arrival == num_steps {
                manager
                    .add(new_request(index, request))
                    .expect("a valid request");
                num_added += 1;
            }
        }
        manager.launch().expect("the step is launched");
        manager.land(&mut events).expect("the step lands");
        for event in events.drain(..) {
            match event {
                Event::Token(id, token) => served[id.index()].tokens.push(token),
                Event::ExtraOutputs(id, outputs) => {
                    let served = &mut served[id.index()];
                    served.log_probs.extend(outputs.log_probs.clone());
                    served.context_logits.extend(&outputs.context_logits);
                    served.generation_logits.extend(&outputs.generation_logits);
                }
                Event::Hypotheses(id, found) => served[id.index()].hypotheses = found.to_vec(),
                _ => {}
            }
        }
        num_steps += 1;
        assert!(num_steps < 100_000, "the requests do not end");
    }
    served
}

#[test]
fn micro_batches_in_different_stages_change_nothing() {
    let asked = requests_with_outputs();
    for (what, setup) in setups() {
        let (mut alone, _) = serve(&mut setup.load(MODEL), &setup, &asked);
        for served in &mut alone {
            assert!(!served.generation_logits.is_empty());
            served.logits.clear();
            // With micro-batches, tokens of beams are none until the end.
            if !served.hypotheses.is_empty() {
                served.tokens.clear();
            }
        }
        for grid in [grid(2, 1), grid(3, 1)] {
            let leader = Box::new(load_stages(&setup, grid));
            let served = serve_overlapped(leader, &setup, &asked);
            assert_same(&format!("{what}, overlapped in {grid:?}"), &alone, &served);
        }
    }
}

/// A script that is a rank, and notes its process.
fn noting_script() -> Script {
    Script::new(r#"echo $$ > "FOLDER/$1"; exec PROGRAM "$@""#)
}

fn signal(script: &Script, rank: usize, signal: &str) {
    let id = fs::read_to_string(script.0.path(&format!("rank={rank}"))).expect("its process");
    let sent = Command::new("kill").args([signal, id.trim()]).status();
    assert!(sent.expect("kill").success());
    // On a busy machine its threads may go on computing for a while.
    while signal == "-STOP" && !is_stopped(id.trim()) {
        thread::sleep(Duration::from_millis(1));
    }
}

/// Whether all threads of a process are stopped.
fn is_stopped(process: &str) -> bool {
    let threads = fs::read_dir(format!("/proc/{process}/task")).expect("its threads");
    threads.flatten().all(|thread| {
        let stat = fs::read_to_string(thread.path().join("stat"));
        // "id (name) T ..."; a thread may have ended.
        stat.map_or(true, |stat| {
            stat.rsplit(") ")
                .next()
                .is_some_and(|it| it.starts_with('T'))
        })
    })
}

/// Steps of two micro-batches, with a request in each.
fn two_steps(setup: &Setup) -> (Engine, [Step; 2]) {
    let mut engine = Engine::new(EngineConfig {
        num_micro_batches: 2,
        ..setup.engine_config()
    });
    for id in 0..2 {
        let prompt = (3..20 + id as u32).collect();
        let request = NewRequest::new(SequenceId(id), prompt, Tokens(9));
        engine.add(request).expect("a valid request");
    }
    let steps = [(); 2].map(|()| engine.schedule());
    assert!(steps.iter().all(|step| step.sequences().len() == 1));
    (engine, steps)
}

#[test]
fn a_stage_computes_the_second_call_before_the_next_stage_has_computed_the_first() {
    let script = noting_script();
    let setup = Setup::default();
    let runner = load(
        &script.program(),
        script.0.dir(),
        &setup,
        grid(2, 1),
        PATIENT,
    );
    let mut runner = runner.expect("it loads");
    assert!(runner.has_stages());
    let (_, steps) = two_steps(&setup);
    // Until it continues, the second stage computes nothing: only a call that does not wait for it returns.
    signal(&script, 1, "-STOP");
    for step in &steps {
        for plan in step.plans() {
            runner.launch(&plan).expect("the first stage computes it");
        }
    }
    signal(&script, 1, "-CONT");
    let (mut ours, mut theirs) = (StepOutput::default(), StepOutput::default());
    let mut alone = setup.load("llama3");
    for step in &steps {
        for plan in step.plans() {
            runner.collect(&plan, &mut ours).expect("both compute it");
            alone.run(plan, &mut theirs).expect("it runs");
            assert_eq!(runner.logits(), alone.logits());
        }
    }
    assert_eq!(ours.sampled.len(), 2);
    assert_eq!(ours.sampled, theirs.sampled);
}

#[test]
fn a_rank_of_the_last_stage_that_is_killed_is_named() {
    let script = noting_script();
    let setup = Setup::default();
    let runner = load(
        &script.program(),
        &fixture(MODEL),
        &setup,
        grid(3, 1),
        PATIENT,
    );
    let mut runner = runner.expect("it loads");
    let watch = runner.watch();
    compute(&mut runner, &setup).expect("all live");
    let started = Instant::now();
    signal(&script, 2, "-KILL");
    let error = compute(&mut runner, &setup).expect_err("rank 2 has ended");
    assert!(
        error.0.contains("rank 2") && error.0.contains("signal: 9 (SIGKILL)"),
        "{error}"
    );
    assert!(started.elapsed() < PATIENT.step / 2);
    let ended = watch.check().expect_err("it has ended").to_string();
    assert!(ended.contains("rank 2 has ended (signal: 9"), "{ended}");
    assert_eq!(compute(&mut runner, &setup), Err(error), "it stays so");
}

/// The error of two micro-batches of which none is collected before both are launched.
fn launch_two(runner: &mut LeadingRunner, setup: &Setup) -> Result<(), StepError> {
    let (_, steps) = two_steps(setup);
    let mut output = StepOutput::default();
    for step in &steps {
        step.plans().try_for_each(|plan| runner.launch(&plan))?;
    }
    for step in &steps {
        let mut plans = step.plans();
        plans.try_for_each(|plan| runner.collect(&plan, &mut output))?;
    }
    Ok(())
}

#[test]
fn a_rank_of_any_stage_that_is_stopped_is_an_error_in_time() {
    for stopped in [1, 2] {
        let script = noting_script();
        let setup = Setup::default();
        let limits = RankLimits {
            step: Duration::from_secs(3),
            ..PATIENT
        };
        let runner = load(
            &script.program(),
            &fixture(MODEL),
            &setup,
            grid(3, 1),
            limits,
        );
        let mut runner = runner.expect("it loads");
        let started = Instant::now();
        signal(&script, stopped, "-STOP");
        let error = launch_two(&mut runner, &setup).expect_err("it is stopped");
        assert!(
            error.0.contains(&format!("for rank {stopped} for 3s")),
            "{error}"
        );
        assert!(started.elapsed() < PATIENT.step / 2);
    }
}
