//! The weights of an adapter, packed for the places of a model.
//!
//! A place is one of the model's [projections](ModelSpec::projections), its embedding, or its output layer. A
//! projection may hold several linear layers, each with weights of its own, and a linear layer may be a part of a
//! larger module, whose outputs the adapter is for.
//!
//! With DoRA (Liu et al., arXiv:2402.09353) a row of the changed weights has a length of its own. So the model's
//! weights are read when such an adapter is loaded: the factor of an output is that length over the length of `W +
//! scale * B * A`.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

use half::bf16;

use super::adapter_parts::AdapterParts;
use super::model_source::ModelSource;
use super::model_tensors::ModelTensors;
use super::module_names::{all_names, is_of_encoders};
use super::spec::{FeedForward, Linear, ModelSpec, Module};
use inflight_base::LoadError;
use inflight_checkpoint::{
    AdaptedModule, AdapterFiles, LowRankModule, Matrix, ModuleRows, PeftAdapter, RowModule,
    RowOrder, RowSelection, Tensor,
};
use inflight_device::{AdapterWeights, DenseRows, LowRank};

/// An adapter whose files have been opened and compared with the model. Its weights are not read yet.
pub struct PreparedAdapter<'a> {
    adapter: &'a AdapterFiles,
    source: &'a ModelSource,
    num_places: usize,
    parts: Vec<PreparedPart<'a>>,
}

/// The largest factor of an output: above all that are trained, and far from overflow.
const MAX_FACTOR: f32 = 65536.0;

/// What is changed of one linear layer, or of the embedding.
struct PreparedPart<'a> {
    place: usize,
    /// Outputs of the whole place.
    num_place_outputs: usize,
    /// Its own among them.
    outputs: Range<usize>,
    low_rank: Option<PreparedLowRank<'a>>,
    factors: Option<Factors<'a>>,
    /// The new bias, and that of the model.
    bias: Option<[Tensor<'a>; 2]>,
    replacement: Option<Tensor<'a>>,
}

/// What is added to its weights: `scale * B * A`.
struct PreparedLowRank<'a> {
    rank: usize,
    scale: f32,
    a: Matrix<'a>,
    b: Matrix<'a>,
    /// Has the factor, too.
    bias: Option<Tensor<'a>>,
}

/// The factors of outputs.
enum Factors<'a> {
    /// These lengths over those of the rows of these weights, changed.
    OfLengths(Box<(Tensor<'a>, Matrix<'a>)>),
    Given(Vec<f32>),
}

/// A module of the model, or a part of one.
struct Place<'a> {
    index: usize,
    module: Module,
    /// The linear layer, if it is one of a layer.
    linear: Option<&'a Linear>,
    is_embedding: bool,
    num_inputs: usize,
    num_outputs: usize,
    has_bias: bool,
    num_place_outputs: usize,
    first_output: usize,
}

/// An adapter as requests hold it: what they are computed with, and what happens when the last of them has ended.
pub struct UsedAdapter {
    parts: Arc<AdapterParts>,
    when_unused: Box<dyn Fn() + Send + Sync>,
}

impl UsedAdapter {
    /// An adapter in use. `when_unused` is called when this is dropped.
    pub fn new(parts: Arc<AdapterParts>, when_unused: impl Fn() + Send + Sync + 'static) -> Self {
        Self {
            parts,
            when_unused: Box::new(when_unused),
        }
    }

    pub(super) fn parts(&self) -> &Arc<AdapterParts> {
        &self.parts
    }
}

impl Drop for UsedAdapter {
    fn drop(&mut self) {
        (self.when_unused)();
    }
}

impl<'a> PreparedAdapter<'a> {
    /// Compares an adapter with a model. Where the adapter holds a copy of the model's own embedding or output layer,
    /// that is read, and left out.
    ///
    /// # Errors
    /// It has a module that the model lacks, or that adapters cannot change, or whose matrices have other widths.
    pub fn new(adapter: &'a AdapterFiles, source: &'a ModelSource) -> Result<Self, LoadError> {
        let parts = match adapter {
            AdapterFiles::Peft(files) => parts_of_modules(files, source)?,
            AdapterFiles::Rows(rows) => parts_of_rows(rows, source.spec())?,
        };
        Ok(Self {
            adapter,
            source,
            num_places: source.spec().num_places(),
            parts,
        })
    }

    /// Bytes of the packed weights.
    pub fn num_bytes(&self) -> u64 {
        self.parts.iter().map(PreparedPart::num_bytes).sum()
    }

    /// Reads and packs the weights, rounded to bf16.
    ///
    /// # Errors
    /// A weight is not finite in bf16, a file that is read has changed since it was opened, or memory is short.
    pub fn load(self) -> Result<AdapterWeights, LoadError> {
        let mut weights = AdapterWeights::new(self.num_places);
        let mut has_read_model = false;
        for part in self.parts {
            has_read_model |= part.factors.is_some() || part.bias.is_some();
            part.load(&mut weights)?;
        }
        self.adapter.check()?;
        if has_read_model {
            self.source.tensors()?.store().check()?;
        }
        weights.gather()?;
        Ok(weights)
    }
}

impl<'a> PreparedPart<'a> {
    fn new(
        adapter: &PeftAdapter,
        spec: &ModelSpec,
        tensors: &ModelTensors<'a>,
        place: &Place<'_>,
        module: AdaptedModule<'a>,
    ) -> Result<Self, LoadError> {
        let AdaptedModule {
            low_rank,
            magnitudes,
            weight,
            bias,
        } = module;
        let num_module_outputs = place.num_module_outputs();
        if let Some(LowRankModule {
            rank, a, b, bias, ..
        }) = &low_rank
        {
            let ranked = format!("the model and rank {rank}");
            check_shape(a, &[*rank, place.num_inputs], &ranked)?;
            check_shape(b, &[num_module_outputs, *rank], &ranked)?;
            if let Some(bias) = bias {
                check_shape(bias, &[num_module_outputs], "the model")?;
            }
        }
        let is_outside = place.module.layer.is_none();
        let replacement = match weight {
            None => None,
            Some(weight) if is_outside => {
                check_shape(
                    &weight,
                    &[spec.vocab_size, spec.embedding_width()],
                    "the model",
                )?;
                let own = own_matrix(spec, tensors, place)?;
                (!are_equal(&weight, &own)?).then_some(weight)
            }
            Some(weight) => {
                return Err(weight.location().error(format!(
                    "replaces the weights of a projection (modules_to_save); only those of {} and {} can be replaced: \
                     merge the adapter into the checkpoint",
                    spec.modules.embedding, spec.modules.output_layer
                )));
            }
        };
        let bias = match bias {
            None => None,
            Some(bias) if place.has_bias => {
                check_shape(&bias, &[num_module_outputs], "the model")?;
                let own = tensors.bias(place.module, num_module_outputs)?;
                Some([bias, own].map(|bias| place.select(bias)))
            }
            Some(bias) => {
                return Err(bias.location().error(format!(
                    "is a bias, and {} of the model has none: the adapter was trained for another model",
                    spec.module_path(place.module)
                )));
            }
        };
        let factors = match magnitudes {
            None => None,
            Some(magnitudes) => {
                check_shape(&magnitudes, &[num_module_outputs], "the model")?;
                let weights = match replacement {
                    Some(weight) => Matrix::Float(weight),
                    None => own_matrix(spec, tensors, place)?,
                };
                let of_lengths = Box::new((place.select(magnitudes), weights));
                Some(Factors::OfLengths(of_lengths))
            }
        };
        if low_rank.is_none() && factors.is_none() && bias.is_none() && weight.is_none() {
            return Err(adapter.error(format!(
                "changes nothing of {}",
                spec.module_path(place.module)
            )));
        }
        let first = place.first_output;
        Ok(Self {
            place: place.index,
            num_place_outputs: place.num_place_outputs,
            outputs: first..first + place.num_outputs,
            low_rank: low_rank.map(|low_rank| PreparedLowRank {
                rank: low_rank.rank,
                scale: low_rank.scale,
                a: Matrix::Float(low_rank.a),
                b: Matrix::Float(place.select(low_rank.b)),
                bias: low_rank.bias.map(|bias| place.select(bias)),
            }),
            factors,
            bias,
            replacement,
        })
    }

    fn num_bytes(&self) -> u64 {
        let low_rank = self
            .low_rank
            .as_ref()
            .map_or(0, |PreparedLowRank { rank, a, .. }| {
                LowRank::num_bytes_of(*rank, a.columns(), self.outputs.len())
            });
        let has_bias =
            self.bias.is_some() || self.low_rank.as_ref().is_some_and(|it| it.bias.is_some());
        let num_vectors = usize::from(self.factors.is_some()) + usize::from(has_bias);
        let vectors = num_vectors * self.num_place_outputs * size_of::<f32>();
        let replacement = self.replacement.as_ref();
        let replacement = replacement.map_or(0, |rows| {
            DenseRows::num_bytes_of(rows.rows(), rows.columns())
        });
        low_rank + vectors as u64 + replacement
    }

    fn load(self, weights: &mut AdapterWeights) -> Result<(), LoadError> {
        let Self {
            place,
            num_place_outputs,
            outputs,
            low_rank,
            factors,
            bias,
            replacement,
        } = self;
        let first = outputs.start;
        let packed = match &low_rank {
            None => None,
            Some(PreparedLowRank {
                rank, scale, a, b, ..
            }) => {
                let mut packed = LowRank::new(*rank, a.columns(), outputs.clone(), *scale)?;
                read_rows(a, *rank, |index, row| packed.set_rank(index, row))?;
                read_rows(b, outputs.len(), |index, row| packed.set_output(index, row))?;
                Some(packed)
            }
        };
        if let Some(factors) = factors {
            let factors = match factors {
                Factors::OfLengths(of_lengths) => {
                    let (lengths, own) = *of_lengths;
                    factors_of(lengths, &own, packed.as_ref())?
                }
                Factors::Given(factors) => factors,
            };
            weights.set_factors(place, num_place_outputs, first, &factors);
        }
        if let Some(PreparedLowRank {
            scale,
            bias: Some(bias),
            ..
        }) = low_rank
        {
            let scaled: Vec<_> = bias.to_f32()?.iter().map(|bias| scale * bias).collect();
            weights.add_bias(place, num_place_outputs, first, &scaled);
        }
        if let Some([new, own]) = bias {
            let (new, own) = (new.to_f32()?, own.to_f32()?);
            let change: Vec<_> = new.iter().zip(&own).map(|(new, own)| new - own).collect();
            weights.add_bias(place, num_place_outputs, first, &change);
        }
        if let Some(packed) = packed {
            weights.push(place, packed);
        }
        if let Some(replacement) = replacement {
            let (rows, columns) = (replacement.rows(), replacement.columns());
            let mut dense = DenseRows::new(rows, columns)?;
            read_rows(&Matrix::Float(replacement), rows, |index, row| {
                dense.row_mut(index).copy_from_slice(row);
            })?;
            weights.replace(place, dense);
        }
        Ok(())
    }
}

impl Place<'_> {
    /// Outputs of its module.
    fn num_module_outputs(&self) -> usize {
        self.linear
            .map_or(self.num_outputs, Linear::num_module_outputs)
    }

    /// Selects the rows of its module that are its own.
    fn select<'t>(&self, rows: Tensor<'t>) -> Tensor<'t> {
        match self.linear.and_then(Linear::selected_rows) {
            Some(selected) => rows.select(selected),
            None => rows,
        }
    }
}

/// What an adapter as PEFT saves it changes.
fn parts_of_modules<'a>(
    adapter: &'a PeftAdapter,
    source: &'a ModelSource,
) -> Result<Vec<PreparedPart<'a>>, LoadError> {
    let spec = source.spec();
    let tensors = source.tensors()?;
    let mut parts = Vec::new();
    // A module has several parts where it is fused.
    let mut found = BTreeSet::new();
    for place in places(spec) {
        let path = spec.module_path(place.module);
        let names = all_names(spec, &path);
        let Some(name) = names.iter().find(|name| adapter.has_module(name)) else {
            continue;
        };
        let Some(module) = adapter.module(name, place.is_embedding)? else {
            continue;
        };
        parts.push(PreparedPart::new(adapter, spec, &tensors, &place, module)?);
        found.insert(path);
    }
    // Texts do not reach the image encoder.
    let num_of_images = match spec.family.ends_with("ForConditionalGeneration") {
        true => adapter
            .module_names()
            .filter(|name| is_of_encoders(name))
            .count(),
        false => 0,
    };
    match found.len() + num_of_images < adapter.num_modules() {
        true => Err(unknown_module(adapter, spec)),
        false if parts.is_empty() => Err(adapter
            .error("changes nothing but the image encoder, which texts do not reach".to_owned())),
        false => Ok(parts),
    }
}

/// What an adapter in rows changes.
fn parts_of_rows<'a>(
    rows: &'a ModuleRows,
    spec: &ModelSpec,
) -> Result<Vec<PreparedPart<'a>>, LoadError> {
    let places = places(spec);
    let mut parts: Vec<PreparedPart<'a>> = Vec::new();
    for (row, module) in rows.modules().iter().enumerate() {
        let RowModule { rank, .. } = *module;
        let linears = linears_of(module, spec).ok_or_else(|| {
            rows.error(
                row,
                format!(
                    "is for a module that the model does not have ({} with {} layers): the adapter was trained for \
                     another model",
                    spec.family,
                    spec.num_layers()
                ),
            )
        })?;
        let own = places.iter().filter(|place| {
            let mut linears = linears.iter();
            let is_own = |linear: &Linear| linears.any(|own| std::ptr::eq(*own, linear));
            place.linear.is_some_and(is_own)
        });
        let own: Vec<_> = own.collect();
        let num_inputs = own.first().map_or(0, |place| place.num_inputs);
        let num_outputs = own.iter().map(|place| place.num_outputs).sum();
        rows.check_width(row, num_inputs, num_outputs)?;
        let first_factor = rank * (num_inputs + num_outputs);
        let mut first = 0;
        for place in own {
            let selection = RowSelection {
                first,
                len: place.num_outputs,
                order: place
                    .linear
                    .map_or(RowOrder::Same, |linear| linear.row_order),
                runs: None,
            };
            first += place.num_outputs;
            let outputs = place.first_output..place.first_output + place.num_outputs;
            let mut others = parts.iter().filter(|part| part.place == place.index);
            if others.any(|part| part.outputs == outputs) {
                return Err(
                    rows.error(row, "is for a module that a row before has, too".to_owned())
                );
            }
            let factors = module.has_factors.then(|| {
                let all = rows.values(row, first_factor, num_outputs);
                let own = (0..place.num_outputs).map(|output| all[selection.stored_row(output)]);
                own.collect::<Vec<_>>()
            });
            let is_odd = |factor: &&f32| !factor.is_finite() || factor.abs() > MAX_FACTOR;
            if let Some(factor) = factors.iter().flatten().find(is_odd) {
                return Err(rows.error(
                    row,
                    format!("has the DoRA factor {factor}; at most {MAX_FACTOR} is possible"),
                ));
            }
            let b = rows.matrix(row, rank * num_inputs, num_outputs, rank);
            parts.push(PreparedPart {
                place: place.index,
                num_place_outputs: place.num_place_outputs,
                outputs,
                low_rank: Some(PreparedLowRank {
                    rank,
                    scale: 1.0,
                    a: rows.matrix(row, 0, rank, num_inputs),
                    b: b.select(selection),
                    bias: None,
                }),
                factors: factors.map(Factors::Given),
                bias: None,
                replacement: None,
            });
        }
    }
    Ok(parts)
}

/// The linear layers that a row is for; `None` if the model does not have them.
fn linears_of<'s>(module: &RowModule, spec: &'s ModelSpec) -> Option<Vec<&'s Linear>> {
    let layer = spec.layers.get(module.layer)?;
    let (up, down) = match layer.feed_forward_block() {
        Some(FeedForward::Gated { gate_up, down, .. }) => (Some(&gate_up.parts), Some(&down.parts)),
        Some(FeedForward::Plain { up, down, .. }) => (Some(&up.parts), Some(&down.parts)),
        Some(FeedForward::Experts(_)) | None => (None, None),
    };
    let attention = &layer.attention;
    let qkv = &attention.qkv.parts;
    let mut gates = attention
        .gate
        .iter()
        .flat_map(|gate| &gate.projection.parts);
    let one = match module.id {
        0..=4 if layer.attention_block().is_none() => None,
        0..=3 if attention.latent.is_some() => None,
        0..=4 if attention.recurrence.is_some() => None,
        // Queries share a module with their gates.
        0..=4 if gates.any(|part| part.module == qkv[0].module) => None,
        // Keys and values are another layer's, or one module.
        0 | 2 | 3 if qkv.len() < 3 || qkv[1] == qkv[2] => None,
        0 => return Some(qkv.iter().collect()),
        id @ 1..=3 => qkv.get(id - 1),
        4 => layer.attention.o.parts.first(),
        5 => up?.first(),
        6 => down?.first(),
        _ => up?.get(1),
    };
    one.map(|linear| vec![linear])
}

/// All that adapters can change, place by place.
fn places(spec: &ModelSpec) -> Vec<Place<'_>> {
    let mut places = Vec::new();
    for (index, (layer, projection)) in spec.projections().enumerate() {
        let mut first_output = 0;
        let num_place_outputs = projection.parts.iter().map(|part| part.num_outputs).sum();
        for linear in &projection.parts {
            places.push(Place {
                index,
                module: Module::of_layer(layer, linear.module),
                linear: Some(linear),
                is_embedding: false,
                num_inputs: projection.num_inputs,
                num_outputs: linear.num_outputs,
                has_bias: projection.has_bias,
                num_place_outputs,
                first_output,
            });
            first_output += linear.num_outputs;
        }
    }
    let (vocab, width) = (spec.vocab_size, spec.embedding_width());
    let modules = &spec.modules;
    for (index, name, is_embedding, num_inputs, num_outputs) in [
        (
            spec.embedding_place(),
            modules.embedding,
            true,
            vocab,
            width,
        ),
        (
            spec.output_place(),
            modules.output_layer,
            false,
            width,
            vocab,
        ),
    ] {
        places.push(Place {
            index,
            module: Module::of_model(name),
            linear: None,
            is_embedding,
            num_inputs,
            num_outputs,
            has_bias: false,
            num_place_outputs: num_outputs,
            first_output: 0,
        });
    }
    places
}

/// The model's weights of a linear layer, of the embedding, or of the output layer.
fn own_matrix<'a>(
    spec: &ModelSpec,
    tensors: &ModelTensors<'a>,
    place: &Place<'_>,
) -> Result<Matrix<'a>, LoadError> {
    if let Some(linear) = place.linear {
        return tensors.linear(place.module, linear, place.num_inputs);
    }
    let name = match spec.tied_embeddings {
        true => spec.modules.embedding,
        false => place.module.name,
    };
    tensors.matrix(
        Module::of_model(name),
        spec.vocab_size,
        spec.embedding_width(),
    )
}

/// The factors of outputs: `magnitudes / |W + scale * B * A|`, row by row.
fn factors_of(
    magnitudes: Tensor<'_>,
    own: &Matrix<'_>,
    low_rank: Option<&LowRank>,
) -> Result<Vec<f32>, LoadError> {
    let location = magnitudes.location();
    let mut factors = magnitudes.to_f32()?;
    own.preload()?;
    let num_inputs = own.columns();
    let ranks: Vec<Vec<f32>> = low_rank.map_or_else(Vec::new, |low_rank| {
        let row = |rank| (0..num_inputs).map(move |input| low_rank.a(rank, input).to_f32());
        (0..low_rank.rank())
            .map(|rank| row(rank).collect())
            .collect()
    });
    let mut row = vec![0.0; num_inputs];
    for (output, factor) in factors.iter_mut().enumerate() {
        own.read_row(output, &mut row);
        for (rank, a) in ranks.iter().enumerate() {
            let b = low_rank.map_or(0.0, |it| it.scale() * it.b(output, rank).to_f32());
            for (weight, a) in row.iter_mut().zip(a) {
                *weight += b * a;
            }
        }
        let squares: f64 = row.iter().map(|&weight| f64::from(weight).powi(2)).sum();
        let length = squares.sqrt();
        *factor = (f64::from(*factor) / length) as f32;
        if !factor.is_finite() || factor.abs() > MAX_FACTOR {
            return Err(location.error(format!(
                "gives output {output} the factor {factor}, for the row of its weights has the length {length}; at most \
                 {MAX_FACTOR} is possible"
            )));
        }
    }
    Ok(factors)
}

/// Whether two matrices are the same in bf16.
fn are_equal(tensor: &Tensor<'_>, own: &Matrix<'_>) -> Result<bool, LoadError> {
    own.preload()?;
    let mut rows = [0; 2].map(|_| vec![0.0; own.columns()]);
    for index in 0..own.rows() {
        let [theirs, ours] = &mut rows;
        tensor.read_row(index, theirs);
        own.read_row(index, ours);
        let are_same = |(a, b): (&f32, &f32)| bf16::from_f32(*a) == bf16::from_f32(*b);
        if !theirs.iter().zip(&*ours).all(are_same) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Calls `set(index, row)` with each row in bf16.
fn read_rows(
    tensor: &Matrix<'_>,
    num_rows: usize,
    mut set: impl FnMut(usize, &[bf16]),
) -> Result<(), LoadError> {
    let mut values = vec![0.0; tensor.columns()];
    let mut row = vec![bf16::ZERO; tensor.columns()];
    for index in 0..num_rows {
        tensor.read_row(index, &mut values);
        for (rounded, value) in row.iter_mut().zip(&values) {
            *rounded = bf16::from_f32(*value);
            if !rounded.is_finite() {
                return Err(tensor.location().not_finite(index));
            }
        }
        set(index, &row);
    }
    Ok(())
}

/// `called_for_by` names what expects the shape.
fn check_shape(
    tensor: &Tensor<'_>,
    expected: &[usize],
    called_for_by: &str,
) -> Result<(), LoadError> {
    match tensor.shape() == expected {
        true => Ok(()),
        false => Err(tensor.location().error(format!(
            "has shape {:?}; {called_for_by} call for {expected:?}: the adapter was trained for another model",
            tensor.shape()
        ))),
    }
}

/// The kind of a module that models have, and that adapters cannot change.
fn unadaptable(module: &str) -> Option<&'static str> {
    const KINDS: [(&str, &str); 11] = [
        (".g_proj", "the gate of attention"),
        (".experts", "of the experts"),
        (".shared_expert.", "a shared expert"),
        (".shared_experts.", "a shared expert"),
        (".shared_expert_gate", "the gate of a shared expert"),
        (".gate", "the router of experts"),
        (".router", "the router of experts"),
        (".kv_b_proj", "what heads make of latents"),
        (".q_b_proj", "what heads make of latents"),
        ("norm", "a norm"),
        ("embed_positions", "the embedding of positions"),
    ];
    let is_of = |part: &str| match part {
        ".gate" | ".router" => module.ends_with(part),
        "norm" => module.ends_with(part) || module.ends_with("layernorm"),
        _ => module.contains(part),
    };
    let mut kinds = KINDS.iter();
    kinds.find(|(part, _)| is_of(part)).map(|(_, what)| *what)
}

/// The error about a module that is at no place.
fn unknown_module(adapter: &PeftAdapter, spec: &ModelSpec) -> LoadError {
    let places = places(spec);
    let paths: BTreeSet<_> = places
        .iter()
        .flat_map(|place| all_names(spec, &spec.module_path(place.module)))
        .collect();
    let mut modules = adapter.module_names();
    let unknown = modules.find(|name| !paths.contains(*name) && !is_of_encoders(name));
    let unknown = unknown.unwrap_or_default();
    if let Some(what) = unadaptable(unknown) {
        return adapter.error(format!(
            "changes the module {unknown}, {what}, which adapters cannot change here: merge it into the checkpoint \
             (merge_and_unload of peft)"
        ));
    }
    adapter.error(format!(
        "changes the module {unknown}, which the model does not have as a linear layer, embedding or output layer ({} with {} \
         layers): the adapter was trained for another model, or has to be merged into the checkpoint",
        spec.family,
        spec.num_layers()
    ))
}
