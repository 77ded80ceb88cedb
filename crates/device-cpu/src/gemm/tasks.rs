//! How a product is divided into tasks, so that all threads have equal work.
//!
//! A task is a panel of outputs, or one of each part, for a block of rows. If their number is not a multiple of the
//! number of threads, each of the remaining ones is divided among all threads:
//!
//! ```text
//!                5 panels of 32 rows             tasks
//! thread 0       | 0 | 1 | 4: rows 0..16  |      0 1 2
//! thread 1       | 2 | 3 | 4: rows 16..32 |      3 4 5
//! ```

use std::ops::Range;

/// The most rows of a task: their activations for a chunk and their sums stay in the L2 cache.
pub(super) const MAX_ROWS: usize = 256;
/// The fewest rows of a piece: each piece reads all weights of its panel.
const MIN_PIECE_ROWS: usize = 8;

/// The tasks of one product.
#[derive(Clone, Copy)]
pub(super) struct Tasks {
    num_rows: usize,
    num_blocks: usize,
    num_threads: usize,
    /// Undivided tasks per thread.
    num_whole: usize,
    /// The remaining tasks, which are divided.
    num_cut: usize,
}

impl Tasks {
    pub fn new(num_panels: usize, num_rows: usize, num_threads: usize) -> Self {
        let num_blocks = num_rows.div_ceil(MAX_ROWS);
        let num_tasks = num_panels * num_blocks;
        Self {
            num_rows,
            num_blocks,
            num_threads,
            num_whole: num_tasks / num_threads,
            num_cut: num_tasks % num_threads,
        }
    }

    /// The number of tasks, equal for all threads and ordered by thread.
    pub fn num_tasks(self) -> usize {
        (self.num_whole + self.num_cut) * self.num_threads
    }

    /// The panel and the rows of a task, which may be empty.
    pub fn task(self, index: usize) -> (usize, Range<usize>) {
        let num_own = self.num_whole + self.num_cut;
        let (thread, index) = (index / num_own, index % num_own);
        let Some(cut) = index.checked_sub(self.num_whole) else {
            return self.whole(thread * self.num_whole + index);
        };
        let (panel, rows) = self.whole(self.num_threads * self.num_whole + cut);
        // If there are few rows, another thread gets them each time.
        let piece = (thread + cut) % self.num_threads;
        let bound = |piece: usize| match piece == self.num_threads {
            true => rows.end,
            false => {
                let even = piece * rows.len() / self.num_threads;
                rows.start + even / MIN_PIECE_ROWS * MIN_PIECE_ROWS
            }
        };
        (panel, bound(piece)..bound(piece + 1))
    }

    fn whole(self, index: usize) -> (usize, Range<usize>) {
        let bound = |block| block * self.num_rows / self.num_blocks;
        let block = index % self.num_blocks;
        (index / self.num_blocks, bound(block)..bound(block + 1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_of_every_panel_is_in_one_task() {
        for (num_panels, num_rows, num_threads) in [
            (5, 32, 2),
            (43, 513, 2),
            (1, 1, 1),
            (1, 1, 8),
            (16, 32, 32),
            (27, 20, 4),
            (2673, 1, 3),
            (3, 0, 2),
        ] {
            let tasks = Tasks::new(num_panels, num_rows, num_threads);
            let mut seen = vec![0; num_panels * num_rows];
            for index in 0..tasks.num_tasks() {
                let (panel, rows) = tasks.task(index);
                assert!(rows.len() <= MAX_ROWS);
                for row in rows {
                    seen[panel * num_rows + row] += 1;
                }
            }
            assert!(seen.iter().all(|&times| times == 1), "{seen:?}");
        }
    }

    #[test]
    fn threads_have_even_shares() {
        for (num_panels, num_rows, num_threads) in
            [(5, 32, 2), (43, 32, 2), (16, 32, 32), (7, 64, 4)]
        {
            let tasks = Tasks::new(num_panels, num_rows, num_threads);
            let num_own = tasks.num_tasks() / num_threads;
            let share = |thread| -> usize {
                let own = thread * num_own..(thread + 1) * num_own;
                own.map(|index| tasks.task(index).1.len()).sum()
            };
            let shares: Vec<_> = (0..num_threads).map(share).collect();
            assert_eq!(
                shares,
                vec![num_panels * num_rows / num_threads; num_threads]
            );
        }
    }
}
