//! The server around the batch manager: Triton's slots and backlog, the clients, the clock.
//!
//! ```text
//! client --latency--> backlog --free slot--> engine      up to `num_slots` requests are in the engine
//!        <--latency-- the last token, when its step has landed
//!        <--latency-- any other token, during the next step
//! ```
//!
//! As measured on server 2.51 with the direct strategy: a step carries every request that has a slot, and a
//! slot freed by a step is refilled from the backlog before the next step.

use std::collections::VecDeque;
use std::io::Write;

use inflight_engine::{EngineConfig, Event};

use crate::Result;
use crate::cost::CostModel;
use crate::record::write_record;
use crate::step_loop::{Landed, StepLoop};
use crate::time::Time;
use crate::workload::{Request, Workload};

/// The simulated server.
#[derive(Clone, Debug)]
pub struct Setup {
    /// The engine's limits.
    pub engine: EngineConfig,
    /// Maximum number of requests that Triton passes to the backend at a time.
    pub num_slots: usize,
    /// The cost of a step.
    pub cost: CostModel,
    /// One-way network latency between client and server.
    pub latency: Time,
    /// Length of the prefix that all prompts share.
    pub num_shared_tokens: u32,
}

/// The life of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestLog {
    /// The request; `sent` is the time at which it was really sent.
    pub request: Request,
    /// When its client received the first token.
    pub first_token: Time,
    /// When its client received the last token.
    pub last_token: Time,
    /// Tokens returned. Fewer than requested if `max_seq_len` leaves no room, none if the request was
    /// rejected.
    pub num_tokens: u32,
    /// Number of times it was paused.
    pub num_pauses: u32,
}

/// One step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepLog {
    /// Start of the model call.
    pub began: Time,
    /// End of the model call.
    pub ended: Time,
    /// Sequences in the step.
    pub num_scheduled: u32,
    /// Tokens in the step.
    pub num_tokens: u32,
    /// Requests at the server, including the backlog.
    pub num_active: u32,
    /// KV cache blocks in use.
    pub num_used_blocks: u32,
}

/// Everything that happened in a simulation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// The requests, in the workload's order.
    pub requests: Vec<RequestLog>,
    /// The steps, in order.
    pub steps: Vec<StepLog>,
}

/// Serves `workload` to its end. Writes the record of every step to `statistics` if it is given.
///
/// # Errors
/// If a record cannot be written.
pub fn run(
    setup: &Setup,
    workload: &Workload,
    mut statistics: Option<&mut dyn Write>,
) -> Result<Outcome> {
    let engine = EngineConfig {
        record_requests: statistics.is_some(),
        // The acceptance rate of speculation depends on the text, and a simulation has no texts.
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
        steps.launch(now)?;
        let Some(landed) = steps.land(&mut events)? else {
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

    /// The final response carries the last token, before the stream would deliver it.
    fn ended_at(&mut self, time: Time) {
        self.last_token = time;
        if self.num_tokens == 1 {
            self.first_token = time;
        }
    }
}

struct Server<'a> {
    setup: &'a Setup,
    /// Requests that have not arrived: time and index.
    upcoming: VecDeque<(Time, usize)>,
    /// Requests of a closed loop that wait for a client.
    unsent: VecDeque<usize>,
    /// Requests without a slot.
    backlog: VecDeque<usize>,
    num_in_slots: usize,
    /// Index of the request, by the engine's id.
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

    /// Moves the requests that have arrived by `now` to the backlog.
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

    /// Delivers a step's events to the clients: the last tokens of requests leave at `ended`, the others at
    /// `streamed`.
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
                Event::Admitted(..) | Event::ExtraOutputs(..) | Event::Hypotheses(..) => {}
            }
        }
    }

    /// Logs a step and returns its number of sequences.
    fn log_step(&mut self, landed: &Landed) -> u32 {
        let stats = &landed.stats;
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
