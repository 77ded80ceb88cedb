//! Conversations: the sequences of a model with `sequence_batching` that are not iterative.
//!
//! ```text
//! client    START "a b"            "c"                        END "d"
//! prompt    a b                    a b x y c                  a b x y c z d
//! answer          x y                        z                              w
//! kept            a b x y                    a b x y c z                    nothing
//! ```
//!
//! Each request of a sequence is a turn: its prompt is what the turns before it have said, and what is new. Between two
//! turns the tokens are kept here, and the blocks with their keys and values are retained in the KV cache.
//!
//! One turn of a conversation runs at a time. Triton orders the others with `oldest`; with `direct` it hands them over,
//! and they wait here. Nor does Triton report that it has ended a sequence: an idle one is forgotten here by the same
//! limit.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use crate::driver::correlation::CorrelationKey;
use crate::driver::step_driver::{Batch, StepDriver};
use crate::driver::turn::{EndedTurn, Turn};
use inflight_engine::RetainedPrefix;
use inflight_triton::{Error, ErrorCode, Request};

/// The most turns of one conversation that wait for the one before them.
const MAX_WAITING_TURNS: usize = 16;

/// How many conversations are kept, and for how long.
#[derive(Clone, Copy, Debug)]
pub struct ConversationLimits {
    /// How many may be between two turns: as many as Triton has slots for sequences.
    pub max_open: usize,
    /// For how long one is kept after a turn.
    pub max_idle: Duration,
}

/// The conversations of one instance.
pub struct Conversations {
    // Clients choose the keys: the map is one whose hashes they cannot know.
    open: HashMap<CorrelationKey, Conversation>,
    limits: ConversationLimits,
    /// When the first of them may have been idle for too long.
    next_expiry: Option<Instant>,
}

struct Conversation {
    /// What has been said, and its blocks.
    said: Option<RetainedPrefix>,
    /// The turn that is in flight.
    turn: Option<InTurn>,
    /// The turns behind it.
    waiting: VecDeque<Request>,
    last_turn: Instant,
}

struct InTurn {
    is_last: bool,
}

impl Conversations {
    /// No conversations.
    pub fn new(limits: ConversationLimits) -> Self {
        Self {
            open: HashMap::new(),
            limits,
            next_expiry: None,
        }
    }

    /// Takes a request in: the next turn of its conversation, once those before it have ended.
    pub fn accept(
        &mut self,
        mut request: Request,
        steps: &mut StepDriver,
        batch: &mut Batch,
        now: Instant,
    ) {
        if request.only_ends_its_sequence() {
            return request.dismiss();
        }
        let key = request
            .correlation_id()
            .map(|id| (!id.is_none()).then(|| CorrelationKey::from(id)));
        let key = match key {
            Err(error) => return steps.refuse(request, error),
            // Of a warm-up, which has no sequences.
            Ok(None) => {
                request.belongs_to_warm_up();
                return steps.admit_alone(request, batch, now);
            }
            Ok(Some(key)) => key,
        };
        match self.open.get_mut(&key) {
            Some(conversation) if conversation.turn.is_some() => {
                if conversation.waiting.len() >= MAX_WAITING_TURNS {
                    return steps.refuse(request, too_many_turns());
                }
                conversation.waiting.push_back(request);
            }
            _ => self.begin_turn(key, request, steps, batch, now),
        }
        self.end_turns(steps, batch, now);
    }

    /// Takes in what the turns that have ended have said, begins the next turns, and forgets the conversations that
    /// have been idle for too long.
    pub fn continue_after_step(&mut self, steps: &mut StepDriver, batch: &mut Batch, now: Instant) {
        self.end_turns(steps, batch, now);
        if self.next_expiry.is_some_and(|expiry| expiry <= now) {
            self.forget_the_idle(steps, now);
        }
    }

    /// Ends the conversations that have no turn, because the server stops: it waits for their sequences to end.
    pub fn end_the_idle(&mut self, steps: &mut StepDriver) {
        let idle = self
            .open
            .extract_if(|key, it| it.turn.is_none() && steps.close_sequence(key));
        let ended: Vec<_> = idle.map(|(_, it)| it.said).collect();
        if !ended.is_empty() {
            let num_ended = ended.len();
            log::info!("the server stops: {num_ended} open conversations are ended");
        }
        for said in ended {
            release(said, steps);
        }
    }

    /// When the next conversation may have been idle for too long.
    pub fn next_expiry(&self) -> Option<Instant> {
        self.next_expiry
    }

    /// Takes the turns that wait for others, to be refused.
    pub fn take_waiting(&mut self) -> Vec<Request> {
        let conversations = self.open.values_mut();
        conversations.flat_map(|it| it.waiting.drain(..)).collect()
    }

    /// Begins a turn of a conversation that has none in flight.
    fn begin_turn(
        &mut self,
        key: CorrelationKey,
        request: Request,
        steps: &mut StepDriver,
        batch: &mut Batch,
        now: Instant,
    ) {
        let flags = match request.flags() {
            Ok(flags) => flags,
            Err(error) => return steps.refuse(request, error),
        };
        if flags.is_start() {
            self.start(&key, steps, now);
        }
        let Some(conversation) = self.open.get_mut(&key) else {
            return steps.refuse(request, has_ended());
        };
        let said = conversation.said.as_ref();
        let said = said.map_or_else(|| [].into(), |said| said.tokens().clone());
        conversation.turn = Some(InTurn {
            is_last: flags.is_end(),
        });
        let turn = Turn::new(key, said, flags);
        steps.admit_turn(request, turn, batch, now);
    }

    /// Starts a conversation, in place of one that had the same key.
    fn start(&mut self, key: &CorrelationKey, steps: &mut StepDriver, now: Instant) {
        if let Some(conversation) = self.open.get_mut(key) {
            release(conversation.said.take(), steps);
            return;
        }
        self.forget_the_least_recent(steps);
        let conversation = Conversation {
            said: None,
            turn: None,
            waiting: VecDeque::new(),
            last_turn: now,
        };
        self.open.insert(key.clone(), conversation);
    }

    /// Takes in what the ended turns have said, and begins the next ones, some of which may end at once.
    fn end_turns(&mut self, steps: &mut StepDriver, batch: &mut Batch, now: Instant) {
        while let Some(ended) = steps.take_ended_turn() {
            let key = ended.conversation.clone();
            let next = self.end_turn(ended, steps, now);
            if let Some(next) = next {
                self.begin_turn(key, next, steps, batch, now);
            }
        }
    }

    /// Takes in what a turn has said. A turn that has failed, or was cancelled, has said nothing. Returns the next
    /// turn.
    fn end_turn(
        &mut self,
        ended: EndedTurn,
        steps: &mut StepDriver,
        now: Instant,
    ) -> Option<Request> {
        let conversation = self.open.get_mut(&ended.conversation)?;
        conversation.last_turn = now;
        let is_last = conversation.turn.take().is_some_and(|turn| turn.is_last);
        if let Some(said) = ended.said.filter(|_| !is_last) {
            // Before the release, so that what both have stays where it is.
            let retained = steps.manager.retain(said.tokens, said.salt);
            release(conversation.said.replace(retained), steps);
        }
        if is_last {
            release(conversation.said.take(), steps);
        }
        let next = conversation.waiting.pop_front();
        if is_last && next.is_none() {
            self.open.remove(&ended.conversation);
        } else if next.is_none() {
            let expiry = now.checked_add(self.limits.max_idle);
            self.next_expiry = self.next_expiry.or(expiry);
        }
        next
    }

    fn forget_the_idle(&mut self, steps: &mut StepDriver, now: Instant) {
        let max_idle = self.limits.max_idle;
        let idle = self.open.extract_if(|_, it| {
            it.turn.is_none() && now.saturating_duration_since(it.last_turn) >= max_idle
        });
        for (_, gone) in idle {
            log::debug!("a conversation was forgotten after {max_idle:?} without a turn");
            release(gone.said, steps);
        }
        let resting = self.open.values().filter(|it| it.turn.is_none());
        let first = resting.map(|it| it.last_turn).min();
        self.next_expiry = first.and_then(|last_turn| last_turn.checked_add(max_idle));
    }

    /// Makes room for another conversation: forgets the one whose last turn ended first, if as many as Triton has slots
    /// are between two turns. Triton has ended its sequence, because it has given a slot to the other. Those with a
    /// turn do not count: it may be their last, for which `direct` frees the slot before it has ended.
    fn forget_the_least_recent(&mut self, steps: &mut StepDriver) {
        let is_resting = |it: &&Conversation| it.turn.is_none();
        let max_open = self.limits.max_open;
        if self.open.len() < max_open || self.open.values().filter(is_resting).count() < max_open {
            return;
        }
        let resting = self.open.iter().filter(|(_, it)| it.turn.is_none());
        let least_recent = resting.min_by_key(|(_, it)| it.last_turn);
        let Some(key) = least_recent.map(|(key, _)| key.clone()) else {
            return;
        };
        if let Some(gone) = self.open.remove(&key) {
            release(gone.said, steps);
        }
    }
}

/// Gives up what a conversation has kept in the KV cache.
fn release(said: Option<RetainedPrefix>, steps: &mut StepDriver) {
    if let Some(said) = said {
        steps.manager.release_retained(&said);
    }
}

fn has_ended() -> Error {
    Error::invalid(
        "the conversation of this request has ended, or was idle for longer than max_sequence_idle_microseconds: \
         start it again with sequence_start and all of its text as the prompt",
    )
}

fn too_many_turns() -> Error {
    Error::new(
        ErrorCode::Unavailable,
        format!(
            "{MAX_WAITING_TURNS} turns of this conversation wait already: send the next turn when the one before it \
             has been answered"
        ),
    )
}
