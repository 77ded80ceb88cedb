//! Errors of a GPU on purpose: while a model is loaded, and in a step.

use inflight_base::{LoadError, SequenceId, StepError, TokenId, Tokens};
use inflight_cuda_stand_in::{StandIn, count, set};
use inflight_device_cuda::{CudaOptions, free_memory_bytes, has_kernels};
use inflight_engine::{Engine, Event, NewRequest, StepOutput};
use inflight_machines::load_on_gpu;
use inflight_runner::{ModelSource, Runner};

use crate::cuda::on_stand_in;
use crate::missing::present_or_reported;
use crate::support::{Setup, fixture};

#[test]
fn a_model_without_memory_is_refused_and_leaves_nothing() {
    let test = "cuda_faults::a_model_without_memory_is_refused_and_leaves_nothing";
    without_leaks(test, || {
        let free = free_bytes();
        for (fault, named) in [
            ("FAIL_ALLOCATION", "bytes of GPU memory"),
            ("FAIL_HOST_ALLOCATION", "pinned host memory"),
        ] {
            let before = count(fault);
            drop(load().expect("there is enough memory"));
            let num_allocations = count(fault) - before;
            assert!(num_allocations > 0);
            for failing in 1..=num_allocations {
                set(fault, failing);
                let error = load().err().expect("memory is missing").to_string();
                assert!(error.contains(named), "{error}");
                assert!(error.contains("CUDA_ERROR_OUT_OF_MEMORY"), "{error}");
                assert!(error.contains("lower max_"), "{error}");
                assert_eq!(free_bytes(), free, "allocation {failing} of {fault}");
            }
        }
    });
}

#[test]
fn cublaslt_of_cuda_13_serves_as_well() {
    let stand_in = StandIn::new().only(&["libcuda.so.1", "libcublasLt.so.13"]);
    let test = "cuda_faults::cublaslt_of_cuda_13_serves_as_well";
    on_stand_in(stand_in, test, || {
        let mut runner = load().expect("the model loads");
        serve(&mut *runner).expect("nothing fails");
    });
}

#[test]
fn a_failing_launch_fails_its_step_and_the_model_can_be_loaded_again() {
    let test = "cuda_faults::a_failing_launch_fails_its_step_and_the_model_can_be_loaded_again";
    without_leaks(test, || {
        let free = free_bytes();
        let mut runner = load().expect("the model loads");
        let before = count("FAIL_LAUNCH");
        let expected = serve(&mut *runner).expect("nothing fails");
        let num_launches = count("FAIL_LAUNCH") - before;
        drop(runner);
        for failing in some_of(num_launches) {
            let mut runner = load().expect("the model loads");
            set("FAIL_LAUNCH", failing);
            let StepError(error) = serve(&mut *runner).expect_err("a launch fails");
            assert!(error.starts_with("GPU 0: "), "{error}");
            assert!(error.contains("LAUNCH_OUT_OF_RESOURCES"), "{error}");
            // What the GPU holds now is unknown, so the runner stays as it is.
            assert_eq!(serve(&mut *runner), Err(StepError(error)));
            drop(runner);
            assert_eq!(free_bytes(), free, "launch {failing}");
        }
        let mut runner = load().expect("the model loads");
        assert_eq!(serve(&mut *runner), Ok(expected));
    });
}

#[test]
fn a_lost_gpu_is_an_error_wherever_it_is_noticed() {
    on_stand_in(
        StandIn::new(),
        "cuda_faults::a_lost_gpu_is_an_error_wherever_it_is_noticed",
        || {
            let free = free_bytes();
            let before = count("LOSE_DEVICE");
            let mut runner = load().expect("the model loads");
            let num_at_load = count("LOSE_DEVICE") - before;
            let expected = serve(&mut *runner).expect("nothing fails");
            let num_operations = count("LOSE_DEVICE") - before;
            drop(runner);
            for failing in some_of(num_operations) {
                set("LOSE_DEVICE", failing);
                let error = match load() {
                    Err(error) => error.to_string(),
                    Ok(mut runner) => {
                        assert!(failing > num_at_load, "operation {failing} of a load");
                        serve(&mut *runner).expect_err("the GPU is lost").0
                    }
                };
                assert!(error.contains("GPU") || error.contains("CUDA"), "{error}");
                assert!(error.contains("ILLEGAL_ADDRESS"), "{error}");
                // Everything has been dropped, and with it the context; a new one works.
                assert_eq!(free_bytes(), free, "operation {failing}");
            }
            let mut runner = load().expect("the model loads");
            assert_eq!(serve(&mut *runner), Ok(expected));
        },
    );
}

/// Runs the body of a test, whose path is given, on the stand-in, in a process of its own, which must leave no
/// allocation behind.
pub fn without_leaks(test: &str, body: impl FnOnce()) {
    if !present_or_reported(&"CUDA kernels (`cargo xtask kernels`)", has_kernels()) {
        return;
    }
    let stand_in = StandIn::new().set("REPORT_LEAKS", 1);
    if let Some(output) = stand_in.output(test, body) {
        let [out, err] =
            [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
        assert!(output.status.success(), "{out}{err}");
        assert!(err.contains("0 allocations were never freed"), "{out}{err}");
    }
}

/// Free memory of the GPU while no model is loaded.
fn free_bytes() -> u64 {
    free_memory_bytes(0).expect("there is a GPU")
}

fn setup() -> Setup {
    Setup {
        num_blocks: 24,
        block_size: 8,
        max_num_tokens: 24,
        enable_chunked_context: true,
        ..Setup::default()
    }
}

fn load() -> Result<Box<dyn Runner>, LoadError> {
    let source = ModelSource::open(&fixture("llama3")).expect("the checkpoint opens");
    load_on_gpu(&source, setup().runner_limits(), &CudaOptions::default())
}

/// Two requests, whose contexts are computed in chunks beside generation; returns the tokens in the order of their
/// arrival, or the error of the first step that fails.
fn serve(runner: &mut dyn Runner) -> Result<Vec<TokenId>, StepError> {
    let mut engine = Engine::new(setup().engine_config());
    for (id, len) in [(0, 7), (1, 30)] {
        let prompt = (0..len).map(|i| (i * 37 + 11) % 90 + 3).collect();
        let request = NewRequest::new(SequenceId(id), prompt, Tokens(4));
        engine.add(request).expect("a valid request");
    }
    let mut output = StepOutput::default();
    let mut events = Vec::new();
    while !engine.is_idle() {
        let step = engine.schedule();
        output.clear();
        for plan in step.plans() {
            runner.run(plan, &mut output)?;
        }
        engine.apply(step, &mut output, &mut events);
    }
    let tokens = events.iter().filter_map(|event| match event {
        Event::Token(_, token) => Some(*token),
        _ => None,
    });
    Ok(tokens.collect())
}

/// The first of `num` events one by one, some of those after them, and the last.
fn some_of(num: u64) -> impl Iterator<Item = u64> {
    const FIRST: u64 = 12;
    let first = 1..=FIRST.min(num);
    let others = (FIRST + 1..num).step_by((num as usize / 24).max(1));
    first.chain(others).chain((num > FIRST).then_some(num))
}
