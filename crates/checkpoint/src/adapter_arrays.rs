//! The two arrays of an adapter that a request brings, in memory.

use std::hash::{BuildHasher, RandomState};
use std::sync::LazyLock;

use twox_hash::XxHash3_128;

use inflight_numbers::Dtype;

/// The rows of an adapter as TensorRT-LLM's clients send them. See [`ModuleRows`](super::ModuleRows).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdapterArrays {
    /// Module id, layer and rank of each row.
    pub(super) config: Vec<i32>,
    pub(super) config_shape: Vec<usize>,
    /// Little-endian values.
    pub(super) weights: Vec<u8>,
    pub(super) weights_shape: Vec<usize>,
    pub(super) dtype: Dtype,
}

impl AdapterArrays {
    /// The tensor with module ids, layers and ranks.
    pub const CONFIG: &str = "lora_config";
    /// The tensor with the weights.
    pub const WEIGHTS: &str = "lora_weights";

    /// Arrays of these shapes, whose weights are read as `dtype`.
    ///
    /// # Panics
    /// An array does not have as many values as its shape calls for.
    pub fn new(
        (config, config_shape): (Vec<i32>, Vec<usize>),
        (weights, weights_shape): (Vec<u8>, Vec<usize>),
        dtype: Dtype,
    ) -> Self {
        let num_values = |shape: &[usize]| shape.iter().product::<usize>();
        assert_eq!(config.len(), num_values(&config_shape), "the config array");
        let num_bytes = num_values(&weights_shape) * dtype.size();
        assert_eq!(weights.len(), num_bytes, "the weights");
        Self {
            config,
            config_shape,
            weights,
            weights_shape,
            dtype,
        }
    }

    /// A digest of everything in them. It differs from process to process, so that nobody can prepare two adapters with
    /// the same.
    pub(super) fn digest(&self) -> u128 {
        static SEED: LazyLock<u64> = LazyLock::new(|| RandomState::new().hash_one(0));
        let mut hasher = XxHash3_128::with_seed(*SEED);
        let mut add = |bytes: &[u8]| hasher.write(bytes);
        for shape in [&self.config_shape, &self.weights_shape] {
            shape.iter().for_each(|size| add(&size.to_le_bytes()));
            add(b";");
        }
        add(&[self.dtype as u8]);
        add(bytemuck::cast_slice(&self.config));
        add(&self.weights);
        hasher.finish_128()
    }
}
