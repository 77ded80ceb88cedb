//! Rows of logits, and how several ranks collect them.
//!
//! ```text
//! rows of a step        greedy   other   greedy   other
//! sent by each rank     (largest, token) of the greedy rows;  then its columns of the others
//! ```

use super::Cpu;
use super::rows::Rows;
use inflight_base::{LoadError, TokenId};
use inflight_device::{DeviceSample, RankHost, StepResults};
use inflight_sampling::Largest;

/// Rows of logits.
pub struct CpuLogits {
    rows: Rows<f32>,
    /// The tokens of greedy rows whose logits were not collected; empty if there are none.
    samples: Vec<DeviceSample>,
    /// The largest logits of greedy rows.
    largest: Vec<Largest>,
    /// The same as numbers, of all ranks.
    gathered: Vec<f32>,
}

impl CpuLogits {
    /// Reserves `[max_rows, width]` logits.
    ///
    /// # Errors
    ///
    /// There is not enough memory.
    pub(super) fn new(max_rows: usize, width: usize) -> Result<Self, LoadError> {
        Ok(Self {
            rows: Rows::new(max_rows, width)?,
            samples: Vec::new(),
            largest: Vec::new(),
            gathered: Vec::new(),
        })
    }

    /// The logits of a new step, to be written.
    pub(super) fn begin(&mut self, num_rows: usize) -> &mut [f32] {
        self.samples.clear();
        self.rows.first_mut(num_rows)
    }

    /// The first rows.
    pub(super) fn first_mut(&mut self, num_rows: usize) -> &mut [f32] {
        self.rows.first_mut(num_rows)
    }

    /// The results of a step.
    pub(super) fn results(&mut self, num_rows: usize) -> StepResults<'_> {
        StepResults {
            logits: self.rows.first_mut(num_rows),
            samples: &self.samples,
        }
    }
}

impl Cpu {
    /// Collects the largest logits of the `greedy_rows`, and all logits of the other rows; see
    /// [`RankOps::gather_logits`](inflight_device::RankOps::gather_logits).
    pub(super) fn gather_greedy_logits(
        &mut self,
        host: &mut RankHost,
        num_rows: usize,
        greedy_rows: &[u32],
        widths: &[usize],
        part: &mut CpuLogits,
        out: &mut CpuLogits,
    ) {
        let rank = host.rank();
        let (width, first_token) = (widths[rank], widths[..rank].iter().sum::<usize>());
        let CpuLogits {
            rows,
            largest,
            gathered,
            ..
        } = part;
        let rows = rows.first_mut(num_rows);
        largest.clear();
        largest.resize(greedy_rows.len(), Largest::NONE);
        self.pool
            .for_each_row(&mut self.workers, largest, 1, |_, index, largest| {
                let start = greedy_rows[index] as usize * width;
                largest[0] = Largest::of(&rows[start..start + width], first_token as TokenId);
            });
        gathered.clear();
        gathered.extend(largest.iter().flat_map(|one| one.to_values()));
        let CpuLogits {
            rows: all,
            samples,
            gathered: of_all,
            ..
        } = out;
        samples.clear();
        let has_all = host.gather_values(gathered, of_all);
        if greedy_rows.len() < num_rows {
            let others = (0..num_rows as u32).filter(|row| greedy_rows.binary_search(row).is_err());
            let others: Vec<usize> = others.map(|row| row as usize).collect();
            for (to, &from) in others.iter().enumerate() {
                rows.copy_within(from * width..(from + 1) * width, to * width);
            }
            let own = &rows[..others.len() * width];
            host.gather_columns(widths, own, all.first_mut(num_rows), |row| others[row]);
        }
        if has_all {
            samples.resize(num_rows, DeviceSample::Skipped);
            for (index, &row) in greedy_rows.iter().enumerate() {
                let of_ranks = of_all.chunks_exact(2 * greedy_rows.len());
                let of_ranks = of_ranks.map(|of_rank| {
                    Largest::from_values([of_rank[2 * index], of_rank[2 * index + 1]])
                });
                let token = of_ranks.fold(Largest::NONE, Largest::or).token();
                samples[row as usize] = DeviceSample::Sampled(token);
            }
        }
    }
}
