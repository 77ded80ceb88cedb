//! Messages between the hosts of ranks.

use std::hash::Hasher;
use std::time::Duration;

use rustc_hash::FxHasher;

use super::StepInputs;
use inflight_base::{LoadError, StepError};
use inflight_collective::{Collective, CollectiveError, Grid, MAX_RANKS};

/// The rank of a stage that gets the logits of all.
const ROOT: usize = 0;

/// How long ranks whose hosts have found each other may take to meet.
const MEETING_LIMIT: Duration = Duration::from_secs(60);

/// A rank's connection to the others, if there are others. Alone, it sums and sends nothing.
pub struct RankHost {
    /// `None` if it is alone.
    collective: Option<Box<dyn Collective>>,
    grid: Grid,
    stage: usize,
    rank: usize,
    time_limit: Duration,
    /// A hash of the current step, which is the same on all ranks.
    step: u64,
    /// What went wrong first. Nothing is sent after that.
    failure: Option<CollectiveError>,
}

impl RankHost {
    /// The rank of this process, or of this thread.
    pub fn new(collective: Box<dyn Collective>) -> Self {
        Self {
            grid: collective.grid(),
            stage: collective.stage(),
            rank: collective.rank(),
            // One rank has nobody to agree with.
            collective: Some(collective).filter(|it| it.grid().num_ranks() > 1),
            ..Self::alone()
        }
    }

    /// The only rank.
    pub fn alone() -> Self {
        Self {
            collective: None,
            grid: 1.into(),
            stage: 0,
            rank: 0,
            time_limit: MEETING_LIMIT,
            step: 0,
            failure: None,
        }
    }

    /// Waits until all ranks have come this far. No later operation takes longer than `time_limit`.
    ///
    /// # Errors
    ///
    /// One has failed, or does not come in time.
    pub fn meet(&mut self, time_limit: Duration) -> Result<(), LoadError> {
        self.time_limit = time_limit;
        let Some(collective) = &mut self.collective else {
            return Ok(());
        };
        let met = meet(collective.as_mut());
        collective.set_time_limit(time_limit);
        met.map_err(|error| LoadError::Resource(error.to_string()))
    }

    /// The longest that an operation between ranks may take.
    pub fn time_limit(&self) -> Duration {
        self.time_limit
    }

    /// Whether a product on this rank is a whole sum.
    pub fn has_whole_sums(&self) -> bool {
        self.num_ranks() == 1
    }

    /// The current step.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// Begins a step, whose plan all ranks must have.
    pub fn begin_step(&mut self, inputs: &StepInputs<'_>) {
        if self.collective.is_some() {
            self.step = hash_of(inputs, self.step);
        }
    }

    /// What went wrong.
    ///
    /// # Errors
    ///
    /// Something did.
    pub fn check(&self) -> Result<(), StepError> {
        match &self.failure {
            None => Ok(()),
            Some(error) => Err(StepError(error.to_string())),
        }
    }

    /// Compares what the ranks of the stage compute with: `own` and what the first one has are told by `describe`.
    ///
    /// # Errors
    ///
    /// It is something else, which `remedy` changes, or something went wrong.
    pub fn check_alike(
        &mut self,
        own: u32,
        describe: impl Fn(u32) -> String,
        remedy: &str,
    ) -> Result<(), LoadError> {
        let mut of_first = [own];
        let failed = |error: StepError| LoadError::Resource(error.0);
        self.take_first(&mut of_first).map_err(failed)?;
        if of_first == [own] {
            // No rank goes on before all have compared.
            self.all_reduce(&mut [0.0]);
            return self.check().map_err(failed);
        }
        // Among those of all stages.
        let first = self.stage * self.grid.ranks_per_stage;
        let rank = first + self.rank;
        let problem = format!(
            "rank {rank} has {}, and rank {first} {}: each chooses the experts of a row by itself, and could choose others",
            describe(own),
            describe(of_first[0])
        );
        self.abort(&problem);
        Err(LoadError::Config {
            problem,
            remedy: remedy.to_owned(),
        })
    }

    /// Where all ranks are.
    pub fn grid(&self) -> Grid {
        self.grid
    }

    /// This rank, of those of its stage.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// The ranks of its stage.
    pub fn num_ranks(&self) -> usize {
        self.grid.ranks_per_stage
    }

    /// Whether it gets the logits of its stage: it samples from them, or sends them to the first stage.
    pub fn gets_logits(&self) -> bool {
        let stage = self.stage();
        self.rank() == ROOT && (stage == 0 || stage + 1 == self.num_stages())
    }

    /// Replaces words by those of rank 0.
    ///
    /// # Errors
    ///
    /// Something went wrong.
    pub fn take_first(&mut self, words: &mut [u32]) -> Result<(), StepError> {
        self.run(|collective, step| collective.broadcast(step, 0, words));
        self.check()
    }

    /// Waits until all ranks of the stage have come this far in the same step.
    ///
    /// # Errors
    ///
    /// Something went wrong.
    pub fn come_together(&mut self) -> Result<(), StepError> {
        self.take_first(&mut [0])
    }

    /// Whether the others live and have not failed.
    ///
    /// # Errors
    ///
    /// One has.
    pub fn check_others(&mut self) -> Result<(), StepError> {
        let others = self.collective.as_mut();
        let checked = others.map_or(Ok(()), |collective| collective.check());
        checked.map_err(|error| StepError(error.to_string()))
    }

    /// Tells the others that this rank has failed.
    pub fn abort(&mut self, reason: &str) {
        if let Some(collective) = &mut self.collective {
            collective.abort(reason);
        }
    }

    /// Sums values over all ranks of the stage.
    pub fn all_reduce(&mut self, values: &mut [f32]) {
        self.run(|collective, step| collective.all_reduce(step, values));
    }

    /// Sums values over all ranks of the stage, which `write` writes into the message to the others, see
    /// [`Collective::all_reduce_of`]. After a failure it may not be called.
    pub fn all_reduce_of(&mut self, sums: &mut [f32], mut write: impl FnMut(&mut [f32])) {
        match self.collective {
            None => write(sums),
            Some(_) => {
                self.run(|collective, step| collective.all_reduce_of(step, sums, &mut write));
            }
        }
    }

    /// Collects the columns of a matrix from all ranks of the stage: `widths` are the numbers of their columns, `part`
    /// has this one's. Row `r` becomes row `place(r)` of `out`. On a rank that gets no logits, `out` is left as it is.
    pub fn gather_columns(
        &mut self,
        widths: &[usize],
        part: &[f32],
        out: &mut [f32],
        place: impl Fn(usize) -> usize,
    ) {
        let width: usize = widths.iter().sum();
        let num_rows = part.len() / widths[self.rank];
        assert!(
            !self.gets_logits() || out.len() >= num_rows * width,
            "out is at least [m, {width}]"
        );
        let mut lens = [0; MAX_RANKS];
        for (len, width) in lens.iter_mut().zip(widths) {
            *len = num_rows * width;
        }
        let lens = &lens[..widths.len()];
        let mut write = |rank: usize, first: usize, mut values: &[f32]| {
            let first_column: usize = widths[..rank].iter().sum();
            let (mut row, mut column) = (first / widths[rank], first % widths[rank]);
            while !values.is_empty() {
                let len = (widths[rank] - column).min(values.len());
                let (copied, rest) = values.split_at(len);
                let start = place(row) * width + first_column + column;
                out[start..start + len].copy_from_slice(copied);
                (values, row, column) = (rest, row + 1, 0);
            }
        };
        self.run(|collective, step| collective.gather(step, ROOT, part, lens, &mut write));
    }

    /// Collects the values of all ranks of the stage, of which each has equally many, one rank after the other. Returns
    /// whether this rank gets them.
    pub fn gather_values(&mut self, own: &[f32], out: &mut Vec<f32>) -> bool {
        let num_ranks = self.num_ranks();
        let lens = &[own.len(); MAX_RANKS][..num_ranks];
        out.clear();
        if self.gets_logits() {
            out.resize(num_ranks * own.len(), 0.0);
        }
        let mut write = |rank: usize, first: usize, values: &[f32]| {
            let start = rank * own.len() + first;
            out[start..start + values.len()].copy_from_slice(values);
        };
        self.run(|collective, step| collective.gather(step, ROOT, own, lens, &mut write));
        self.gets_logits()
    }

    /// Sends values to the next stage.
    pub fn send(&mut self, values: &[f32]) {
        self.run(|collective, step| collective.send(step, values));
    }

    /// Sends values that do not belong to the rows between stages.
    ///
    /// # Errors
    ///
    /// Something went wrong.
    pub fn send_results(&mut self, values: &[f32]) -> Result<(), StepError> {
        self.send(values);
        self.check()
    }

    /// Whether all ranks of all stages go on with something: whether rank 0 does.
    ///
    /// # Errors
    ///
    /// Something went wrong.
    pub fn agree(&mut self, goes_on: bool) -> Result<bool, StepError> {
        let mut word = [u32::from(goes_on)];
        let (stage, num_stages) = (self.stage(), self.num_stages());
        if stage == 0 {
            self.take_first(&mut word)?;
        } else {
            self.receive(bytemuck::cast_slice_mut(&mut word));
        }
        if stage + 1 < num_stages {
            self.send(bytemuck::cast_slice(&word));
        }
        self.check()?;
        Ok(word != [0])
    }

    /// Its stage.
    pub fn stage(&self) -> usize {
        self.stage
    }

    /// All stages.
    pub fn num_stages(&self) -> usize {
        self.grid.num_stages
    }

    /// Waits for values of the previous stage.
    pub fn receive(&mut self, values: &mut [f32]) {
        self.run(|collective, step| collective.receive(step, values));
    }

    /// The most values that are sent without waiting for the next stage.
    pub fn max_unread(&self) -> usize {
        let collective = self.collective.as_ref();
        collective.map_or(usize::MAX, |collective| collective.max_unread())
    }

    /// Waits for values of the last stage, from `step`.
    ///
    /// # Errors
    ///
    /// Something went wrong.
    pub fn receive_results(&mut self, step: u64, values: &mut [f32]) -> Result<(), StepError> {
        self.run(|collective, _| collective.receive(step, values));
        self.check()
    }

    fn run(
        &mut self,
        operation: impl FnOnce(&mut dyn Collective, u64) -> Result<(), CollectiveError>,
    ) {
        if let (Some(collective), None) = (&mut self.collective, &self.failure) {
            self.failure = operation(collective.as_mut(), self.step).err();
        }
    }
}

/// Waits until the ranks of all stages have come this far.
fn meet(collective: &mut dyn Collective) -> Result<(), CollectiveError> {
    collective.broadcast(0, 0, &mut [0])?;
    if collective.grid().num_stages == 1 {
        return Ok(());
    }
    // After one round through all stages, the first stage knows that all are up. The second round tells the others.
    for _ in 0..2 {
        if collective.stage() == 0 {
            collective.send(0, &[0.0])?;
        }
        collective.receive(0, &mut [0.0])?;
        if collective.stage() > 0 {
            collective.send(0, &[0.0])?;
        }
    }
    Ok(())
}

/// A hash of the plan of a step, and of the steps before it. Of the block tables, only what the sequences have is in
/// it.
fn hash_of(inputs: &StepInputs<'_>, earlier: u64) -> u64 {
    let mut hasher = FxHasher::default();
    hasher.write_u64(earlier);
    let mut write = |values: &mut dyn Iterator<Item = u32>| {
        let mut len = 0;
        for value in values {
            hasher.write_u32(value);
            len += 1;
        }
        hasher.write_usize(len);
    };
    write(&mut inputs.token_ids.iter().copied());
    for span in inputs.spans {
        write(&mut [span.tokens.end, span.kv_len].into_iter());
        let blocks = span.block_table.start as usize..span.block_table.end as usize;
        write(&mut inputs.block_tables[blocks].iter().map(|block| block.0));
    }
    write(&mut inputs.state_slots.iter().copied());
    let saved = inputs.saved_states.iter();
    write(&mut saved.flat_map(|saved| [saved.token, saved.slot]));
    write(&mut inputs.kept_rows.iter().copied());
    write(&mut inputs.sampled_rows.iter().copied());
    hasher.finish()
}
