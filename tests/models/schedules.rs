//! Ways to schedule requests, which change no bit of an answer, whatever computes it.

use inflight_collective::Grid;
use inflight_engine::{BlockReuse, CapacityPolicy, OutputOptions, PromptLookup, Speculation};

use crate::batching;
use crate::devices::{requests, setups};
use crate::support::{Happened, Request, Setup};

/// Stages of as many ranks each.
pub const fn grid(num_stages: usize, ranks_per_stage: usize) -> Grid {
    Grid {
        num_stages,
        ranks_per_stage,
    }
}

/// So few blocks that sequences pause.
pub fn pausing() -> Setup {
    Setup {
        policy: CapacityPolicy::MaxUtilization,
        enable_chunked_context: true,
        max_num_tokens: 16,
        block_size: 8,
        num_blocks: 14,
        num_threads: 2,
        ..Setup::default()
    }
}

/// The same with host memory, from which blocks come back.
pub fn pausing_with_host_memory() -> Setup {
    Setup {
        num_host_blocks: 64,
        reuse: BlockReuse::PartialBlocks,
        ..pausing()
    }
}

/// So few snapshots that most states are found in host memory, as are the blocks.
pub fn states_in_host_memory() -> Setup {
    Setup {
        reuse: BlockReuse::WholeBlocks,
        num_state_snapshots: 2,
        num_host_state_snapshots: 12,
        num_blocks: 24,
        ..pausing_with_host_memory()
    }
}

/// Sequences that pause and reuse states, with drafts of which some are rejected.
pub fn pausing_with_drafts() -> Setup {
    Setup {
        reuse: BlockReuse::WholeBlocks,
        num_state_snapshots: 12,
        speculation: Some(Speculation {
            max_draft_tokens: 3,
            prompt_lookup: Some(PromptLookup { min: 1, max: 3 }),
            has_draft_model: false,
            recomputes_drafts: false,
        }),
        ..pausing()
    }
}

/// Contexts and generation in calls of their own, and a cache whose blocks move.
fn separate_calls() -> Setup {
    Setup {
        separate_calls: true,
        moves_blocks: true,
        block_size: 5,
        num_blocks: 256,
        num_runner_blocks: Some(512),
        ..Setup::default()
    }
}

/// Requests that arrive a second time, when others have taken their blocks.
pub fn twice(mut all: Vec<Request>) -> Vec<Request> {
    let later = all.iter().map(|request| Request {
        arrival: request.arrival + 120,
        ..request.clone()
    });
    let later: Vec<_> = later.collect();
    all.extend(later);
    all
}

/// All of them but beams, each with its name and requests.
pub fn schedules() -> Vec<(&'static str, Setup, Vec<Request>)> {
    let mut all: Vec<_> = setups()
        .into_iter()
        .map(|(what, setup)| (what, setup, requests()))
        .collect();
    all.extend([
        (
            "host memory",
            pausing_with_host_memory(),
            twice(batching::requests()),
        ),
        ("separate calls", separate_calls(), batching::requests()),
    ]);
    all
}

/// The schedule of beams.
pub fn beams() -> (&'static str, Setup, Vec<Request>) {
    ("beams", Setup::for_beams(), batching::requests_with_beams())
}

/// What a schedule is there for has happened.
pub fn assert_happened(what: &str, happened: &Happened) {
    let has_happened = match what {
        "chunks" => happened.num_chunks > 0,
        "copies and drafts" => happened.num_copies > 0 && happened.drafts.num_accepted > 0,
        "windows and sinks" => happened.num_holes > 0,
        "pauses" => happened.num_pauses > 0,
        "host memory" => happened.num_pauses > 0 && happened.num_onboarded > 0,
        "separate calls" => happened.num_moves > 50,
        "beams" => happened.num_copies > 10,
        _ => true,
    };
    assert!(has_happened, "{what}: {happened:?}");
}

/// Requests of all kinds, with log-probabilities and logits.
pub fn requests_with_outputs() -> Vec<Request> {
    let mut all = requests();
    all.extend(batching::requests());
    for request in &mut all {
        request.outputs = OutputOptions {
            log_probs: Some(2),
            generation_logits: true,
            ..request.outputs
        };
    }
    all
}

/// Requests for models that may have only 64 tokens.
pub fn requests_of_few_tokens() -> Vec<Request> {
    let mut all = requests();
    let prompts = all.iter_mut().flat_map(|request| &mut request.prompt);
    prompts.for_each(|token| *token %= 64);
    all
}
