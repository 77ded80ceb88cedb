//! The server around the batch manager: Triton's slots and backlog, the clients, the clock.
//!
//! ```text
//! client --latency--> backlog --free slot--> engine      at most `num_slots` requests are in the engine
//!        <--latency-- the last token, when its step has landed
//!        <--latency-- any other token, beside the next step
//! ```
//!
//! As measured on server 2.51 with the direct strategy: a step carries everything that is in a slot, and a
//! slot that a step frees is taken from the backlog before the next one.

use std::collections::VecDeque;
use std::io::Write;

use triton_inflight::engine::{EngineConfig, Event};

use crate::Result;
use crate::cost::CostModel;
use crate::record::write_record;
use crate::step_loop::{Landed, StepLoop};
use crate::time::Time;
use crate::workload::{Request, Workload};

/// What is simulated.
#[derive(Clone, Debug)]
pub struct Setup {
    /// The engine's limits.
    pub engine: EngineConfig,
    /// Requests that Triton hands over to the backend, at most.
    pub num_slots: usize,
    /// How long a step takes.
    pub cost: CostModel,
    /// From a client to the server, or back.
    pub latency: Time,
    /// Tokens that all prompts begin with.
    pub num_shared_tokens: u32,
}

/// What happened to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestLog {
    /// What was asked for; `sent` is when it was sent.
    pub request: Request,
    /// When its client had the first token.
    pub first_token: Time,
    /// When its client had the last token.
    pub last_token: Time,
    /// Tokens that came back. Fewer than were asked for where `max_seq_len` left no room, none where the
    /// request was refused.
    pub num_tokens: u32,
    /// How often it was paused.
    pub num_pauses: u32,
}

/// A step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepLog {
    /// When its model call began.
    pub began: Time,
    /// When its model call had ended.
    pub ended: Time,
    /// Sequences in it.
    pub num_scheduled: u32,
    /// Tokens in it.
    pub num_tokens: u32,
    /// Requests at the server, in the backlog or not.
    pub num_active: u32,
    /// Blocks of the KV cache in use.
    pub num_used_blocks: u32,
}

/// What came of a simulation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// The requests, in the workload's order.
    pub requests: Vec<RequestLog>,
    /// The steps, in order.
    pub steps: Vec<StepLog>,
}

/// Serves `workload` to its end. The record of every step goes to `statistics`, where there is one.
///
/// # Errors
/// The records cannot be written.
pub fn run(
    setup: &Setup,
    workload: &Workload,
    mut statistics: Option<&mut dyn Write>,
) -> Result<Outcome> {
    let engine = EngineConfig {
        record_requests: statistics.is_some(),
        // How many guesses are right is a matter of texts, of which there are none here.
        speculation: None,
        ..setup.engine.clone()
    };
    let mut steps = StepLoop::new(engine, setup.cost, setup.num_shared_tokens);
    let mut server = Server::new(setup, workload);
    let mut events = Vec::new();
    let mut now = Time::ZERO;
    loop {
        server.arrive(now);
        server.fill_slots(&mut steps, now);
        if steps.is_idle() {
            match server.upcoming.front() {
                Some(&(arrival, _)) => now = arrival,
                None => break,
            }
            continue;
        }
        steps.launch(now);
        let Some(landed) = steps.land(&mut events) else {
            now += setup.cost.overhead(0);
            continue;
        };
        if let Some(statistics) = &mut statistics {
            write_record(*statistics, &landed)?;
        }
        let num_scheduled = server.log_step(&landed) as usize;
        let ended = now.max(landed.ended);
        now = ended + setup.cost.overhead(num_scheduled);
        server.hear(&mut events, ended, now);
    }
    Ok(server.outcome)
}

impl RequestLog {
    fn token_at(&mut self, time: Time) {
        self.num_tokens += 1;
        self.last_token = time;
        if self.num_tokens == 1 {
            self.first_token = time;
        }
    }

    /// Its last token came earlier than the stream would have brought it: with the final response.
    fn ended_at(&mut self, time: Time) {
        self.last_token = time;
        if self.num_tokens == 1 {
            self.first_token = time;
        }
    }
}

struct Server<'a> {
    setup: &'a Setup,
    /// Requests that come later: when, and which.
    upcoming: VecDeque<(Time, usize)>,
    /// Requests of a closed loop that wait for a client.
    unsent: VecDeque<usize>,
    /// Requests without a slot.
    backlog: VecDeque<usize>,
    num_in_slots: usize,
    /// By the engine's id: which request.
    by_id: Vec<usize>,
    outcome: Outcome,
}

impl<'a> Server<'a> {
    fn new(setup: &'a Setup, workload: &Workload) -> Self {
        let requests = workload.requests.iter().map(|&request| RequestLog {
            request,
            first_token: Time::ZERO,
            last_token: Time::ZERO,
            num_tokens: 0,
            num_pauses: 0,
        });
        let mut server = Self {
            setup,
            upcoming: VecDeque::new(),
            unsent: VecDeque::new(),
            backlog: VecDeque::new(),
            num_in_slots: 0,
            by_id: Vec::with_capacity(workload.requests.len()),
            outcome: Outcome {
                requests: requests.collect(),
                steps: Vec::new(),
            },
        };
        let all = 0..workload.requests.len();
        match workload.concurrency {
            None => {
                let sent = |n: usize| workload.requests[n].sent + setup.latency;
                server.upcoming = all.map(|n| (sent(n), n)).collect();
            }
            Some(concurrency) => {
                server.unsent = all.collect();
                for request in workload.requests.iter().take(concurrency) {
                    server.send_next(request.sent);
                }
            }
        }
        server
    }

    /// In a closed loop, a client that has its answer sends the next request.
    fn send_next(&mut self, now: Time) {
        if let Some(next) = self.unsent.pop_front() {
            self.outcome.requests[next].request.sent = now;
            self.upcoming.push_back((now + self.setup.latency, next));
        }
    }

    /// What has come by `now` is in the backlog.
    fn arrive(&mut self, now: Time) {
        while let Some((_, next)) = self.upcoming.pop_front_if(|(arrival, _)| *arrival <= now) {
            self.backlog.push_back(next);
        }
    }

    fn fill_slots(&mut self, steps: &mut StepLoop, now: Time) {
        while self.num_in_slots < self.setup.num_slots
            && let Some(next) = self.backlog.pop_front()
        {
            let request = self.outcome.requests[next].request;
            match steps.add(request.num_input_tokens, request.num_output_tokens) {
                Some(id) => {
                    debug_assert_eq!(id.index(), self.by_id.len(), "ids count up");
                    self.by_id.push(next);
                    self.num_in_slots += 1;
                }
                None => self.send_next(now + self.setup.latency),
            }
        }
    }

    /// What a step has brought reaches the clients: the last tokens of requests leave at `ended`, the
    /// others at `streamed`.
    fn hear(&mut self, events: &mut Vec<Event>, ended: Time, streamed: Time) {
        for event in events.drain(..) {
            let which = self.by_id[event.sequence_id().index()];
            let log = &mut self.outcome.requests[which];
            match event {
                Event::Token(..) => log.token_at(streamed + self.setup.latency),
                Event::Paused(_) => log.num_pauses += 1,
                Event::Finished(..) => {
                    log.ended_at(ended + self.setup.latency);
                    self.num_in_slots -= 1;
                    self.send_next(ended + self.setup.latency);
                }
                Event::Admitted(_) | Event::ExtraOutputs(..) | Event::Hypotheses(..) => {}
            }
        }
    }

    /// Writes a step down; how many sequences it had.
    fn log_step(&mut self, landed: &Landed) -> u32 {
        let Some(stats) = &landed.stats else {
            return 0;
        };
        let num_scheduled = stats.num_scheduled as u32;
        self.outcome.steps.push(StepLog {
            began: landed.began,
            ended: landed.ended,
            num_scheduled,
            num_tokens: landed.num_tokens,
            num_active: (stats.num_active + self.backlog.len()) as u32,
            num_used_blocks: stats.kv.num_used.0,
        });
        num_scheduled
    }
}
