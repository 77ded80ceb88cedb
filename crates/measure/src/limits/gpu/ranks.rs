//! Steps on several GPUs, on paper.
//!
//! ```text
//! tensor parallel   each GPU has a part of the heads, of the inner activations and of the vocabulary;
//!                   2 sums of [sequences, hidden] in f32 over all GPUs in a layer, and one of the embedding
//! stages            the hosts have half of the layers each; two micro-batches, each with half of the sequences
//! ```

use super::steps::{Numbers, prompt_step, seconds_of, step_time};
use super::{Gpu, Shape};

/// The connections of a GPU with others.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Links {
    /// Bytes that a GPU receives in a second, while it sends as many.
    pub bytes_per_s: f64,
    /// Until the first byte has come, and all know that all has come.
    pub seconds_per_round: f64,
}

/// NVLink 4 through NVSwitch: 450 GB/s each way, of which kernels reach some 350. The time of a round is a guess.
pub const NVLINK: Links = Links {
    bytes_per_s: 350e9,
    seconds_per_round: 6e-6,
};

/// An InfiniBand adapter of 400 Gbit/s for each GPU, of which some 45 GB/s are reached. The time of a round is a guess.
pub const INFINIBAND: Links = Links {
    bytes_per_s: 45e9,
    seconds_per_round: 12e-6,
};

/// Where the ranks of a model are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// Tensor parallel on the GPUs of one host.
    OneHost,
    /// Tensor parallel on the GPUs of two hosts.
    TwoHosts,
    /// Tensor parallel on the GPUs of each of two hosts, each of which is a stage.
    TwoStages,
}

/// The time of a generation step on several GPUs, in seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RankStepTime {
    /// The kernels of a GPU.
    pub compute: f64,
    /// Sums, and messages between stages.
    pub communication: f64,
    /// Tokens that all sequences generate in a second.
    pub tokens_per_s: f64,
}

/// The time of a step in which each of `batch` sequences generates a token, on `num_gpus` GPUs of each host.
pub fn rank_step_time(
    gpu: &Gpu,
    shape: &Shape,
    numbers: Numbers,
    (batch, context): (usize, usize),
    num_gpus: usize,
    placement: Placement,
) -> RankStepTime {
    // Both stages compute all the time, each for the other micro-batch.
    let (num_rows, num_ranks) = match placement {
        Placement::OneHost => (batch, num_gpus),
        Placement::TwoHosts => (batch, 2 * num_gpus),
        Placement::TwoStages => (batch.div_ceil(2), num_gpus),
    };
    let share = share_of(shape, num_ranks);
    let compute = step_time(gpu, &share, numbers, num_rows, context).expected;
    let message = (4 * num_rows * shape.hidden) as f64;
    let sum = match placement {
        Placement::OneHost | Placement::TwoStages => all_reduce_seconds(num_gpus, message),
        Placement::TwoHosts => two_host_seconds(num_gpus, message),
    };
    let sums = (2 * shape.layers + 1) as f64 * sum;
    // Logits come to the first GPU.
    let logits = (4 * num_rows * shape.vocab) as f64 * (1.0 - 1.0 / num_ranks as f64);
    let links = match placement {
        Placement::OneHost => NVLINK,
        Placement::TwoHosts | Placement::TwoStages => INFINIBAND,
    };
    let gathered = match num_ranks {
        1 => 0.0,
        _ => NVLINK.seconds_per_round + logits / NVLINK.bytes_per_s,
    };
    let between_stages = match placement {
        Placement::OneHost | Placement::TwoHosts => 0.0,
        // States to the second stage, and tokens back.
        Placement::TwoStages => 2.0 * links.seconds_per_round + message / links.bytes_per_s,
    };
    let communication = sums + gathered + between_stages;
    RankStepTime {
        compute,
        communication,
        tokens_per_s: batch as f64 / (compute + communication),
    }
}

/// The time of a step that computes a prompt on the GPUs of a host, in seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RankPromptTime {
    /// The kernels of a GPU.
    pub compute: f64,
    /// Its sums.
    pub sums: f64,
    /// Of these, what is left beside products whose rows are cut into pieces.
    pub left: f64,
}

/// The time of a step that computes a prompt of `len` tokens on `num_gpus` GPUs of a host. The rows of a product and
/// its sum are cut into `num_pieces`, and a piece is summed while the next one is multiplied:
///
/// ```text
/// products   | 1 | 2 | 3 | 4 |
/// sums           |  1  |  2  |  3  |  4  |
///                            |   left    |
/// ```
pub fn rank_prompt_time(
    gpu: &Gpu,
    shape: &Shape,
    numbers: Numbers,
    len: usize,
    num_gpus: usize,
    num_pieces: usize,
) -> RankPromptTime {
    let kernels = prompt_step(&share_of(shape, num_gpus), numbers, len);
    let num_calls: usize = kernels.iter().map(|kernel| kernel.calls).sum();
    let compute = seconds_of(gpu, &kernels) + num_calls as f64 * gpu.seconds_per_kernel;
    let message = (4 * len * shape.hidden) as f64;
    let (whole, pieces) = (all_reduce_seconds(num_gpus, message), num_pieces as f64);
    let sum_of_piece = all_reduce_seconds(num_gpus, message / pieces);
    let summed = kernels.iter().filter(|it| ["o", "down"].contains(&it.name));
    let left_of_product = |product: f64| {
        let product_of_piece = product / pieces;
        let begun = product_of_piece + (pieces - 1.0) * product_of_piece.max(sum_of_piece);
        begun + sum_of_piece - product
    };
    let left = summed.map(|it| it.calls as f64 * left_of_product(it.seconds(gpu)));
    RankPromptTime {
        compute,
        sums: (2 * shape.layers + 1) as f64 * whole,
        // The sum of the embeddings follows no product.
        left: left.sum::<f64>() + whole,
    }
}

/// The seconds of a sum of messages of this many bytes over the GPUs of a host.
///
/// ```text
/// one-shot   each reads the messages of all others                     r + (n - 1) b / w
/// split      each sums a part, and reads the sums of the other parts   2 (r + (n - 1) / n b / w)
/// ```
pub fn all_reduce_seconds(num_gpus: usize, message: f64) -> f64 {
    let others = num_gpus as f64 - 1.0;
    if others == 0.0 {
        return 0.0;
    }
    let Links {
        bytes_per_s,
        seconds_per_round,
    } = NVLINK;
    let one_shot = seconds_per_round + others * message / bytes_per_s;
    let split = 2.0 * (seconds_per_round + others / num_gpus as f64 * message / bytes_per_s);
    one_shot.min(split)
}

/// The same over two hosts: each GPU sums a part within its host, exchanges it with its partner, and reads the other
/// sums.
fn two_host_seconds(num_gpus: usize, message: f64) -> f64 {
    let part = message / num_gpus as f64;
    let within = NVLINK.seconds_per_round + (message - part) / NVLINK.bytes_per_s;
    2.0 * within + INFINIBAND.seconds_per_round + part / INFINIBAND.bytes_per_s
}

/// The sizes that one of several GPUs computes.
fn share_of(shape: &Shape, num_ranks: usize) -> Shape {
    Shape {
        heads: shape.heads.div_ceil(num_ranks),
        kv_heads: shape.kv_heads.div_ceil(num_ranks),
        inter: shape.inter.div_ceil(num_ranks),
        vocab: shape.vocab.div_ceil(num_ranks),
        ..*shape
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::gpu::{H200, LLAMA_8B, LLAMA_70B};

    #[test]
    fn one_gpu_needs_no_sums() {
        let one = rank_step_time(
            &H200,
            &LLAMA_8B,
            Numbers::Bf16,
            (32, 1024),
            1,
            Placement::OneHost,
        );
        let alone = step_time(&H200, &LLAMA_8B, Numbers::Bf16, 32, 1024);
        assert_eq!((one.compute, one.communication), (alone.expected, 0.0));
    }

    #[test]
    fn small_messages_are_summed_at_once_and_large_ones_in_parts() {
        let round = NVLINK.seconds_per_round;
        assert!(all_reduce_seconds(8, 1e3) < 1.1 * round);
        // 64 MiB: 7 times the message in one shot, 1.75 times in parts.
        let large = all_reduce_seconds(8, f64::from(1 << 26));
        let bytes = 1.75 * f64::from(1 << 26) / NVLINK.bytes_per_s;
        assert!((large - 2.0 * round - bytes).abs() < 1e-9);
    }

    #[test]
    fn sums_beside_products_take_no_less_than_the_longer_of_both() {
        for num_gpus in [2, 4, 8] {
            let time = |pieces| {
                let numbers = Numbers::Bf16;
                rank_prompt_time(&H200, &LLAMA_70B, numbers, 8192, num_gpus, pieces)
            };
            let (whole, cut) = (time(1), time(4));
            assert!(
                (whole.left - whole.sums).abs() < 1e-9 * whole.sums,
                "{whole:?}"
            );
            assert_eq!((cut.compute, cut.sums), (whole.compute, whole.sums));
            // One piece of four is always left.
            assert!(
                cut.left > 0.25 * cut.sums && cut.left < 0.9 * cut.sums,
                "{cut:?}"
            );
        }
    }

    #[test]
    fn shares_add_up_to_the_weights() {
        let num_weights = |shape: &Shape| {
            let q = shape.heads * shape.head_dim;
            let kv = shape.kv_heads * shape.head_dim;
            shape.layers * shape.hidden * (2 * q + 2 * kv + 3 * shape.inter)
                + shape.vocab * shape.hidden
        };
        for num_ranks in [2, 4, 8] {
            let share = num_weights(&share_of(&LLAMA_70B, num_ranks));
            assert_eq!(num_ranks * share, num_weights(&LLAMA_70B));
        }
    }

    #[test]
    fn more_gpus_compute_less_each() {
        for placement in [
            Placement::OneHost,
            Placement::TwoHosts,
            Placement::TwoStages,
        ] {
            let time = |num_gpus| {
                rank_step_time(
                    &H200,
                    &LLAMA_70B,
                    Numbers::Bf16,
                    (32, 1024),
                    num_gpus,
                    placement,
                )
            };
            assert!(time(8).compute < time(4).compute && time(4).compute < time(2).compute);
        }
    }
}
