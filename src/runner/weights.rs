//! The weights of a decoder: found and checked all together, then packed.
//!
//! Nothing is packed before every tensor that config.json calls for has been found with its shape, so
//! sizes that a config makes up cost no memory, and a bad checkpoint fails at once.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use bytemuck::allocation::try_zeroed_vec;
use half::bf16;
use half::slice::HalfFloatSliceExt;

use super::model_source::{ModelSource, ModelTensors};
use super::packer::{Form, Packer};
use super::precision::WeightPrecision;
use super::progress::Progress;
use super::spec::ModelSpec;
use super::weight_cache::WeightCache;
use crate::base::LoadError;
use crate::checkpoint::{Matrix, Tensor};
use crate::device::{Device, EmbeddingTable, Linear, PackedWeights, Stacking};

/// All weights of a model, on a device.
pub(super) struct Weights<D: Device> {
    /// `None` if `lm_head` has its rows.
    embedding: Option<D::Embedding>,
    pub(super) layers: Vec<Layer<D>>,
    /// `[hidden_size]`.
    pub(super) final_norm: D::Vector,
    /// `[vocab_size, hidden_size]`.
    pub(super) lm_head: D::Matrix,
}

/// One decoder layer.
pub(super) struct Layer<D: Device> {
    /// `[hidden_size]`.
    pub(super) attention_norm: D::Vector,
    /// Queries, keys and values in one: `[q_width + 2 * kv_width, hidden_size]`.
    pub(super) qkv: Linear<D>,
    /// The norms of query and key heads, `[head_dim]` each.
    pub(super) qk_norm: Option<[D::Vector; 2]>,
    /// `[hidden_size, q_width]`.
    pub(super) o: Linear<D>,
    /// `[hidden_size]`.
    pub(super) mlp_norm: D::Vector,
    /// Gate and up interleaved: `[2 * intermediate_size, hidden_size]`.
    pub(super) gate_up: Linear<D>,
    /// `[hidden_size, intermediate_size]`.
    pub(super) down: Linear<D>,
}

impl<D: Device> Layer<D> {
    /// In the order in which they are packed.
    fn matrices(&self) -> [&D::Matrix; 4] {
        let Self {
            qkv,
            o,
            gate_up,
            down,
            ..
        } = self;
        [&qkv.matrix, &o.matrix, &gate_up.matrix, &down.matrix]
    }
}

impl<D: Device> Weights<D> {
    /// Finds, checks and packs all of them.
    pub(super) fn load(
        source: &ModelSource,
        precision: Option<WeightPrecision>,
        device: &mut D,
    ) -> Result<Self, LoadError> {
        let started = Instant::now();
        let spec = source.spec();
        let tensors = source.tensors()?;
        let store = tensors.store();
        let sources = Sources::find(&tensors, spec)?;
        let cache = WeightCache::of::<D>(source, precision);
        let mut packer = Packer::new(device, precision, cache);

        let mut layers = Vec::with_capacity(spec.num_layers);
        let mut progress = Progress::new(spec.num_layers);
        // What a layer has read is given back with it.
        for source in sources.layers {
            layers.push(source.load(&mut packer)?);
            store.check()?;
            progress.report(layers.len());
        }
        let lm_head_source = sources.lm_head.as_ref().unwrap_or(&sources.embedding);
        let lm_head = packer.pack_output_layer(lm_head_source)?;
        store.check()?;
        let packed = layers.iter().flat_map(Layer::matrices);
        packer.keep(packed.chain([&lm_head]));
        let num_rounded_anew = packer.num_rounded_anew();
        let is_embedding = sources.lm_head.is_none() && lm_head.has_rows();
        let embedding = match is_embedding {
            true => None,
            false => Some(load_embedding(device, &sources.embedding)?),
        };
        let final_norm = device.upload_vector(sources.final_norm.to_f32()?)?;
        store.check()?;
        let weights = Self {
            embedding,
            layers,
            final_norm,
            lm_head,
        };
        if num_rounded_anew > 0 {
            log::info!(
                "{num_rounded_anew} projections are kept as int8 in groups of 32: no kernel has the codes that they are \
                 stored in, or their parts are stored in different ways"
            );
        }
        log::info!(
            "loaded {} of {:.1} MB in {:.1} s; computing with {}",
            spec.architecture.name(),
            store.num_bytes() as f64 / 1e6,
            started.elapsed().as_secs_f64(),
            device.description()
        );
        Ok(weights)
    }

    /// The rows of the token embedding, `[vocab_size, hidden_size]`.
    pub(super) fn embedding(&self) -> EmbeddingTable<'_, D> {
        match &self.embedding {
            Some(embedding) => EmbeddingTable::Own(embedding),
            None => EmbeddingTable::Tied(&self.lm_head),
        }
    }
}

/// Bytes of all weights once they are loaded, without padding.
pub(super) fn num_weight_bytes(
    source: &ModelSource,
    precision: Option<WeightPrecision>,
) -> Result<u64, LoadError> {
    let sources = Sources::find(&source.tensors()?, source.spec())?;
    let output_layer = std::slice::from_ref(sources.lm_head());
    let form = Form::of_output_layer(output_layer, precision);
    let embedding_bytes = match (&form, &sources.lm_head) {
        (Form::Floats(_), None) => 0,
        _ => 2 * (sources.embedding.rows() * sources.embedding.columns()) as u64,
    };
    let layers = sources.layers.iter().flat_map(|layer| {
        let linears = [&layer.qkv, &layer.o, &layer.gate_up, &layer.down];
        linears.map(|linear| Form::of(&linear.matrices, precision).num_bytes(&linear.matrices))
    });
    Ok(embedding_bytes + form.num_bytes(output_layer) + layers.sum::<u64>())
}

/// Where all weights of a model lie in its checkpoint, their shapes checked.
struct Sources<'a> {
    embedding: Matrix<'a>,
    layers: Vec<LayerSource<'a>>,
    final_norm: Tensor<'a>,
    /// None where it is the embedding.
    lm_head: Option<Matrix<'a>>,
}

impl<'a> Sources<'a> {
    fn find(tensors: &ModelTensors<'a>, spec: &ModelSpec) -> Result<Self, LoadError> {
        let (vocab, hidden) = (spec.vocab_size, spec.hidden_size);
        let embedding = tensors.matrix("model.embed_tokens", vocab, hidden)?;
        let lm_head = match spec.tied_embeddings {
            true => None,
            false => Some(tensors.matrix("lm_head", vocab, hidden)?),
        };
        Ok(Self {
            embedding,
            layers: (0..spec.num_layers)
                .map(|index| LayerSource::find(tensors, spec, index))
                .collect::<Result<_, _>>()?,
            final_norm: tensors.vector("model.norm", "weight", hidden)?,
            lm_head,
        })
    }

    fn lm_head(&self) -> &Matrix<'a> {
        self.lm_head.as_ref().unwrap_or(&self.embedding)
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
    fn find(tensors: &ModelTensors<'a>, spec: &ModelSpec, index: usize) -> Result<Self, LoadError> {
        let hidden = spec.hidden_size;
        let (q, kv, inter) = (spec.q_width(), spec.kv_width(), spec.intermediate_size);
        let vector = |name: &str, len: usize| {
            tensors.vector(&format!("model.layers.{index}.{name}"), "weight", len)
        };
        // Name and outputs of each part; all have `inputs` inputs.
        let linear = |parts: &[(&str, usize)], inputs: usize, bias: bool| {
            let mut source = LinearSource::default();
            for &(part, outputs) in parts {
                let module = format!("model.layers.{index}.{part}");
                source
                    .matrices
                    .push(tensors.matrix(&module, outputs, inputs)?);
                if bias {
                    let bias = tensors.vector(&module, "bias", outputs)?;
                    source.biases.push(bias);
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

    fn load<D: Device>(&self, packer: &mut Packer<'_, D>) -> Result<Layer<D>, LoadError> {
        Ok(Layer {
            attention_norm: packer.upload(&self.attention_norm)?,
            qkv: self.qkv.load(packer, Stacking::Concatenated)?,
            qk_norm: match &self.qk_norm {
                Some([q, k]) => Some([packer.upload(q)?, packer.upload(k)?]),
                None => None,
            },
            o: self.o.load(packer, Stacking::Concatenated)?,
            mlp_norm: packer.upload(&self.mlp_norm)?,
            gate_up: self.gate_up.load(packer, Stacking::Interleaved)?,
            down: self.down.load(packer, Stacking::Concatenated)?,
        })
    }
}

/// Where a projection's matrices and biases lie; no biases, or one for each matrix.
#[derive(Default)]
struct LinearSource<'a> {
    matrices: Vec<Matrix<'a>>,
    biases: Vec<Tensor<'a>>,
}

impl LinearSource<'_> {
    fn load<D: Device>(
        &self,
        packer: &mut Packer<'_, D>,
        stacking: Stacking,
    ) -> Result<Linear<D>, LoadError> {
        Ok(Linear {
            bias: match self.biases.is_empty() {
                true => None,
                false => Some(packer.upload_bias(&self.biases)?),
            },
            matrix: packer.pack(&self.matrices, stacking)?,
        })
    }
}

/// A copy in bf16: the file may go away, and the rows are read one by one.
fn load_embedding<D: Device>(
    device: &mut D,
    source: &Matrix<'_>,
) -> Result<D::Embedding, LoadError> {
    source.preload()?;
    let hidden_size = source.columns();
    let len = source.rows() * hidden_size;
    let mut rows = try_zeroed_vec::<bf16>(len)
        .map_err(|()| LoadError::Resource(format!("no memory for an embedding of {len} bf16")))?;
    let threads = device.host_threads();
    let mut rows_f32 = vec![vec![0.0; hidden_size]; threads.num_threads()];
    let bad_row = AtomicUsize::new(usize::MAX);
    threads.for_each_row(
        &mut rows_f32,
        &mut rows,
        hidden_size,
        |row_f32, index, row| {
            source.read_row(index, row_f32);
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
        usize::MAX => device.upload_embedding(rows, hidden_size),
        row => Err(source.not_finite(row)),
    }
}
