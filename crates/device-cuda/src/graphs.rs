//! Generation steps as CUDA graphs: recorded once for a shape, and launched as a whole from then on.
//!
//! A graph replays the same kernels on the same addresses. What differs between steps of one shape is read from memory:
//! tokens, positions, slots, block tables, tiles of attention, sampling.
//!
//! ```text
//! step of a shape   first: eager                 second: recorded, launched     later: launched
//!                   the driver loads kernels,    nothing runs meanwhile         operations do nothing
//!                   cuBLASLt chooses algorithms
//!
//! The first two are computed when the model is loaded, for as many shapes as there is room: `first_steps`.
//! ```
//!
//! A step has as many rows as its matrix products are rounded up to, so that there are few shapes: those beyond its
//! tokens have no slots, no tiles and no sampling. So bits are the same as without graphs.

use std::collections::HashMap;

use cudarc::driver::CudaGraph;
use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};

use super::Cuda;
use super::attention_tiles::SPLIT_LEN;
use super::gemm::rounded_rows;
use inflight_base::StepError;
use inflight_device::{FirstStep, StepCapacity};

/// What the launches of a generation step depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct GraphShape {
    /// Rows, rounded up.
    pub num_rows: usize,
    /// Whether results of attention are merged.
    pub has_several_splits: bool,
}

/// How a step is computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum StepMode {
    /// Operations are launched one by one.
    #[default]
    Eager,
    /// Operations are recorded.
    Recording(GraphShape),
    /// Operations have been recorded.
    Replaying(GraphShape),
}

/// The steps that record the graphs of a device of this capacity, at most `max_graphs`: those of few rows first, which
/// gain most.
pub(super) fn first_steps(capacity: &StepCapacity, max_graphs: usize) -> Vec<FirstStep> {
    let most = capacity.max_num_sequences.min(capacity.max_num_tokens);
    // The largest number of each that is rounded up to the same.
    let nums = (1..=most).filter(|&num| num == most || rounded_rows(num) == num);
    let kv_lens = [SPLIT_LEN + 1, 1].into_iter();
    let kv_lens = kv_lens.filter(|&kv_len| kv_len <= capacity.max_seq_len);
    let shapes = nums.flat_map(|num_sequences| {
        kv_lens.clone().map(move |kv_len| FirstStep {
            num_sequences,
            kv_len,
        })
    });
    // Each is computed, and then recorded.
    let shapes = shapes.take(max_graphs);
    shapes.flat_map(|shape| [shape, shape]).collect()
}

/// The graphs of an instance.
pub(super) struct Graphs {
    max_graphs: usize,
    shapes: HashMap<GraphShape, Entry>,
    /// The graph of the last step, if it was launched as one.
    last: Option<GraphShape>,
}

struct Entry {
    graph: Option<Graph>,
    /// When it was used last.
    step: u64,
}

struct Graph(CudaGraph);

// SAFETY: a graph may be used by any thread, by one at a time, and its owner is used by one at a time.
unsafe impl Send for Graph {}

impl Graphs {
    /// Room for some graphs. With 0, none is recorded.
    pub fn new(max_graphs: usize) -> Self {
        Self {
            max_graphs,
            shapes: HashMap::new(),
            last: None,
        }
    }

    /// Graphs that there is room for.
    pub fn max_graphs(&self) -> usize {
        self.max_graphs
    }

    /// Whether there is room for any.
    pub fn is_enabled(&self) -> bool {
        self.max_graphs > 0
    }

    /// How a step of this shape is computed.
    pub fn mode(&mut self, shape: GraphShape, step: u64) -> StepMode {
        match self.shapes.get_mut(&shape) {
            None => {
                self.shapes.insert(shape, Entry { graph: None, step });
                StepMode::Eager
            }
            Some(entry) => {
                entry.step = step;
                match entry.graph {
                    None => StepMode::Recording(shape),
                    Some(_) => StepMode::Replaying(shape),
                }
            }
        }
    }

    /// Keeps a graph, in the place of the one that was not used for longest if there is no room.
    pub fn insert(&mut self, shape: GraphShape, graph: CudaGraph) {
        let recorded = self
            .shapes
            .values_mut()
            .filter(|entry| entry.graph.is_some());
        let mut recorded: Vec<_> = recorded.collect();
        if recorded.len() >= self.max_graphs
            && let Some(oldest) = recorded.iter_mut().min_by_key(|entry| entry.step)
        {
            oldest.graph = None;
        }
        if let Some(entry) = self.shapes.get_mut(&shape) {
            entry.graph = Some(Graph(graph));
        }
    }

    /// The graph of a shape.
    pub fn get(&self, shape: GraphShape) -> Option<&CudaGraph> {
        let graph = self.shapes.get(&shape)?.graph.as_ref();
        graph.map(|graph| &graph.0)
    }

    /// Notes which graph the last step was launched as, if it was.
    pub fn set_last(&mut self, shape: Option<GraphShape>) {
        self.last = shape;
    }

    /// The graph of the last step.
    pub fn last(&self) -> Option<&CudaGraph> {
        self.get(self.last?)
    }
}

impl Cuda {
    /// Begins to record a step, or leaves its operations to a graph.
    pub(super) fn begin_graph(&mut self, shape: Option<GraphShape>) {
        let Some(shape) = shape else {
            return;
        };
        self.padded_rows = Some(shape.num_rows);
        self.mode = self.graphs.mode(shape, self.num_steps);
        if let StepMode::Recording(_) = self.mode {
            // Other threads may use the driver meanwhile, for models of their own.
            let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
            let begun = self.stream.begin_capture(mode);
            self.record("recording a step", begun);
        }
    }

    /// Launches the graph of a step that has one.
    pub(super) fn end_graph(&mut self) {
        self.padded_rows = None;
        let mode = std::mem::take(&mut self.mode);
        self.graphs.set_last(None);
        if let StepMode::Recording(shape) = mode {
            // After an operation has failed, too: the stream must not stay captured.
            let graph = self.stream.end_capture(CUgraphInstantiate_flags(0));
            if let Some(Some(graph)) = self.record("recording a step", graph) {
                self.graphs.insert(shape, graph);
            }
        }
        if let StepMode::Recording(shape) | StepMode::Replaying(shape) = mode
            && self.failure.is_none()
            && let Some(graph) = self.graphs.get(shape)
        {
            let launched = graph.launch();
            self.record("launching a step", launched);
            self.graphs.set_last(Some(shape));
        }
    }

    /// Launches the graph of the last step again, some times one after the other, and waits for all: what a step takes
    /// without the host. It computes what it has computed. Gives whether there is such a graph.
    ///
    /// # Errors
    ///
    /// An operation has failed.
    pub fn repeat_step(&mut self, num_times: u32) -> Result<bool, StepError> {
        self.check()?;
        let Some(graph) = self.graphs.last() else {
            return Ok(false);
        };
        let launched = (0..num_times).try_for_each(|_| graph.launch());
        let ended = launched.and_then(|()| self.stream.synchronize());
        ended.map_err(|error| self.step_failed(&error))?;
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_shape_is_computed_and_recorded_before_the_first_request() {
        let capacity = |max_num_sequences, max_num_tokens, max_seq_len| StepCapacity {
            max_num_tokens,
            max_num_sequences,
            max_seq_len,
            max_blocks_per_sequence: 8,
            num_layer_groups: 1,
            num_q_heads: 8,
            has_slopes: false,
            adapters: Default::default(),
        };
        let steps = |capacity: &StepCapacity, max_graphs| -> Vec<_> {
            let steps = first_steps(capacity, max_graphs).into_iter();
            steps.map(|it| (it.num_sequences, it.kv_len)).collect()
        };
        let short = capacity(20, 512, 200);
        let nums = [1, 2, 3, 4, 5, 6, 7, 8, 16, 20];
        let twice = nums.iter().flat_map(|&num| [(num, 1); 2]);
        assert_eq!(steps(&short, 64), twice.collect::<Vec<_>>());
        assert_eq!(steps(&short, 1), [(1, 1); 2]);
        assert_eq!(steps(&short, 0), []);
        // Long sequences have shapes of their own; a step never has more tokens than it may.
        let long = capacity(20, 2, 1000);
        let expected = [(1, 257), (1, 1), (2, 257), (2, 1)];
        let expected: Vec<_> = expected.into_iter().flat_map(|it| [it; 2]).collect();
        assert_eq!(steps(&long, 64), expected);
    }
}
