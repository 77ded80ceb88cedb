//! The weights of a decoder: found and checked all together, then packed.
//!
//! Nothing is packed before every tensor that config.json calls for has been found with its shape, so
//! sizes that a config makes up cost no memory, and a bad checkpoint fails at once.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use bytemuck::allocation::try_zeroed_vec;
use half::bf16;
use half::slice::HalfFloatSliceExt;

use super::checkpoint::Checkpoint;
use super::spec::ModelSpec;
use super::tensors::{Tensor, Tensors};
use crate::base::LoadError;
use crate::device::cpu::{Cpu, Dtype, PackedMatrix, RawMatrix};

/// A load that takes longer says how far it is, this often.
const PROGRESS_PERIOD: Duration = Duration::from_secs(5);

/// All weights of a model, in the form in which they are computed with.
pub(super) struct Weights {
    pub(super) embedding: Embedding,
    pub(super) layers: Vec<Layer>,
    /// `[hidden_size]`.
    pub(super) final_norm: Vec<f32>,
    /// `[vocab_size, hidden_size]`.
    pub(super) lm_head: PackedMatrix,
}

/// One decoder layer.
pub(super) struct Layer {
    /// `[hidden_size]`.
    pub(super) attention_norm: Vec<f32>,
    /// Queries, keys and values in one: `[q_width + 2 * kv_width, hidden_size]`.
    pub(super) qkv: Linear,
    /// The norms of query and key heads, `[head_dim]` each.
    pub(super) qk_norm: Option<[Vec<f32>; 2]>,
    /// `[hidden_size, q_width]`.
    pub(super) o: Linear,
    /// `[hidden_size]`.
    pub(super) mlp_norm: Vec<f32>,
    /// Gate and up in one: `[2 * intermediate_size, hidden_size]`.
    pub(super) gate_up: Linear,
    /// `[hidden_size, intermediate_size]`.
    pub(super) down: Linear,
}

/// A projection, or several that share their input, one below the other.
pub(super) struct Linear {
    pub(super) matrix: PackedMatrix,
    pub(super) bias: Option<Vec<f32>>,
}

/// The rows that tokens begin with, `[vocab_size, hidden_size]`.
pub(super) struct Embedding {
    rows: Vec<bf16>,
    hidden_size: usize,
}

impl Embedding {
    pub(super) fn matrix(&self) -> RawMatrix<'_> {
        let num_rows = self.rows.len() / self.hidden_size;
        let bytes = bytemuck::cast_slice(&self.rows);
        RawMatrix::new(Dtype::Bf16, num_rows, self.hidden_size, bytes)
    }
}

impl Weights {
    /// Finds, checks and packs all of them.
    pub(super) fn load(checkpoint: &Checkpoint, cpu: &mut Cpu) -> Result<Self, LoadError> {
        let started = Instant::now();
        let spec = checkpoint.spec();
        let tensors = checkpoint.tensors();
        let sources = Sources::find(tensors, spec)?;

        let mut layers = Vec::with_capacity(spec.num_layers);
        let mut last_report = started;
        for source in &sources.layers {
            layers.push(source.load(cpu)?);
            if last_report.elapsed() >= PROGRESS_PERIOD {
                last_report = Instant::now();
                log::info!("loaded {} of {} layers", layers.len(), spec.num_layers);
            }
        }
        let weights = Self {
            embedding: load_embedding(cpu, &sources.embedding)?,
            layers,
            final_norm: sources.final_norm.to_f32()?,
            lm_head: pack(cpu, &[sources.lm_head])?,
        };
        log::info!(
            "loaded {} of {:.1} MB in {:.1} s; computing with {} on {} threads",
            spec.architecture.name(),
            tensors.num_bytes() as f64 / 1e6,
            started.elapsed().as_secs_f64(),
            cpu.simd(),
            cpu.num_threads()
        );
        Ok(weights)
    }
}

/// Where all weights of a model lie in its checkpoint, their shapes checked.
struct Sources<'a> {
    embedding: Tensor<'a>,
    layers: Vec<LayerSource<'a>>,
    final_norm: Tensor<'a>,
    lm_head: Tensor<'a>,
}

impl<'a> Sources<'a> {
    fn find(tensors: &'a Tensors, spec: &ModelSpec) -> Result<Self, LoadError> {
        let hidden = spec.hidden_size;
        let embedding = tensors.get("model.embed_tokens.weight", &[spec.vocab_size, hidden])?;
        let lm_head = match spec.tied_embeddings {
            true => embedding,
            false => tensors.get("lm_head.weight", &[spec.vocab_size, hidden])?,
        };
        Ok(Self {
            embedding,
            layers: (0..spec.num_layers)
                .map(|index| LayerSource::find(tensors, spec, index))
                .collect::<Result<_, _>>()?,
            final_norm: tensors.get("model.norm.weight", &[hidden])?,
            lm_head,
        })
    }
}

/// Where a layer's weights lie.
struct LayerSource<'a> {
    attention_norm: Tensor<'a>,
    qkv: LinearSource<'a>,
    qk_norm: Option<[Tensor<'a>; 2]>,
    o: LinearSource<'a>,
    mlp_norm: Tensor<'a>,
    gate_up: LinearSource<'a>,
    down: LinearSource<'a>,
}

impl<'a> LayerSource<'a> {
    fn find(tensors: &'a Tensors, spec: &ModelSpec, index: usize) -> Result<Self, LoadError> {
        let hidden = spec.hidden_size;
        let (q, kv, inter) = (spec.q_width(), spec.kv_width(), spec.intermediate_size);
        let vector = |name: &str, len: usize| {
            tensors.get(&format!("model.layers.{index}.{name}.weight"), &[len])
        };
        // Name and outputs of each part; all have `inputs` inputs.
        let linear = |parts: &[(&str, usize)], inputs: usize, bias: bool| {
            let name = |part: &str| format!("model.layers.{index}.{part}");
            let mut source = LinearSource::default();
            for &(part, outputs) in parts {
                let weight = format!("{}.weight", name(part));
                source
                    .matrices
                    .push(tensors.get(&weight, &[outputs, inputs])?);
                if bias {
                    let bias = format!("{}.bias", name(part));
                    source.biases.push(tensors.get(&bias, &[outputs])?);
                }
            }
            Ok::<_, LoadError>(source)
        };
        let qkv = [
            ("self_attn.q_proj", q),
            ("self_attn.k_proj", kv),
            ("self_attn.v_proj", kv),
        ];
        let gate_up = [("mlp.gate_proj", inter), ("mlp.up_proj", inter)];
        Ok(Self {
            attention_norm: vector("input_layernorm", hidden)?,
            qkv: linear(&qkv, hidden, spec.qkv_bias)?,
            qk_norm: match spec.qk_norm {
                true => Some([
                    vector("self_attn.q_norm", spec.head_dim)?,
                    vector("self_attn.k_norm", spec.head_dim)?,
                ]),
                false => None,
            },
            o: linear(&[("self_attn.o_proj", hidden)], q, spec.o_bias)?,
            mlp_norm: vector("post_attention_layernorm", hidden)?,
            gate_up: linear(&gate_up, hidden, spec.mlp_bias)?,
            down: linear(&[("mlp.down_proj", hidden)], inter, spec.mlp_bias)?,
        })
    }

    fn load(&self, cpu: &mut Cpu) -> Result<Layer, LoadError> {
        Ok(Layer {
            attention_norm: self.attention_norm.to_f32()?,
            qkv: self.qkv.load(cpu)?,
            qk_norm: match &self.qk_norm {
                Some([q, k]) => Some([q.to_f32()?, k.to_f32()?]),
                None => None,
            },
            o: self.o.load(cpu)?,
            mlp_norm: self.mlp_norm.to_f32()?,
            gate_up: self.gate_up.load(cpu)?,
            down: self.down.load(cpu)?,
        })
    }
}

/// Where a projection's matrices and biases lie; no biases, or one for each matrix.
#[derive(Default)]
struct LinearSource<'a> {
    matrices: Vec<Tensor<'a>>,
    biases: Vec<Tensor<'a>>,
}

impl LinearSource<'_> {
    fn load(&self, cpu: &mut Cpu) -> Result<Linear, LoadError> {
        let mut bias = Vec::new();
        for part in &self.biases {
            bias.extend(part.to_f32()?);
        }
        Ok(Linear {
            matrix: pack(cpu, &self.matrices)?,
            bias: (!bias.is_empty()).then_some(bias),
        })
    }
}

fn pack(cpu: &mut Cpu, parts: &[Tensor<'_>]) -> Result<PackedMatrix, LoadError> {
    let matrices: Vec<_> = parts.iter().map(Tensor::matrix).collect();
    cpu.pack(&matrices)?
        .map_err(|bad| parts[bad.part].not_finite(bad.row))
}

/// A copy in bf16: the file may go away, and the rows are read one by one.
fn load_embedding(cpu: &mut Cpu, source: &Tensor<'_>) -> Result<Embedding, LoadError> {
    let matrix = source.matrix();
    let hidden_size = matrix.columns();
    let len = matrix.rows() * hidden_size;
    let mut rows = try_zeroed_vec::<bf16>(len)
        .map_err(|()| LoadError::Resource(format!("no memory for an embedding of {len} bf16")))?;
    let mut rows_f32 = vec![vec![0.0; hidden_size]; cpu.num_threads()];
    let bad_row = AtomicUsize::new(usize::MAX);
    cpu.for_each_row(
        &mut rows_f32,
        &mut rows,
        hidden_size,
        |row_f32, index, row| {
            matrix.row_to_f32(index, row_f32);
            row.convert_from_f32_slice(row_f32);
            // A fold and not a search: it is vectorised, and bad values are the exception.
            if !row
                .iter()
                .fold(true, |finite, value| finite & value.is_finite())
            {
                bad_row.fetch_min(index, Ordering::Relaxed);
            }
        },
    );
    match bad_row.into_inner() {
        usize::MAX => Ok(Embedding { rows, hidden_size }),
        row => Err(source.not_finite(row)),
    }
}
