//! The weights of an adapter, packed for the places of a model.
//!
//! A place is one of the model's [projections](ModelSpec::projections). It may hold several linear layers, each with
//! weights of its own, and a linear layer may be a part of a larger module, whose outputs the adapter is for.

use std::sync::Arc;

use half::bf16;

use super::spec::{Linear, ModelSpec, Module, Projection};
use crate::base::LoadError;
use crate::checkpoint::{LowRankModule, PeftAdapter, Tensor};
use crate::device::{AdapterWeights, LowRank};

/// An adapter whose files have been opened and compared with the model. Its weights are not read yet.
pub struct PreparedAdapter<'a> {
    adapter: &'a PeftAdapter,
    num_places: usize,
    parts: Vec<PreparedPart<'a>>,
}

/// What is added to one linear layer.
struct PreparedPart<'a> {
    place: usize,
    module: LowRankModule<'a>,
    linear: Linear,
    /// Its first output among those of the projection.
    first_output: usize,
}

/// An adapter as requests hold it: what they are computed with, and what happens when the last of them has ended.
pub struct UsedAdapter {
    weights: Arc<AdapterWeights>,
    when_unused: Box<dyn Fn() + Send + Sync>,
}

impl UsedAdapter {
    /// An adapter in use. `when_unused` is called when this is dropped.
    pub fn new(
        weights: Arc<AdapterWeights>,
        when_unused: impl Fn() + Send + Sync + 'static,
    ) -> Self {
        Self {
            weights,
            when_unused: Box::new(when_unused),
        }
    }

    pub(super) fn weights(&self) -> &Arc<AdapterWeights> {
        &self.weights
    }
}

impl Drop for UsedAdapter {
    fn drop(&mut self) {
        (self.when_unused)();
    }
}

impl<'a> PreparedAdapter<'a> {
    /// Compares an adapter with a model.
    ///
    /// # Errors
    /// It has a module that the model lacks, or that adapters cannot change, or whose matrices have other widths.
    pub fn new(adapter: &'a PeftAdapter, spec: &ModelSpec) -> Result<Self, LoadError> {
        let mut parts = Vec::new();
        let mut num_found = 0;
        let mut last_found = None;
        for (place, (layer, projection)) in spec.projections().enumerate() {
            let mut first_output = 0;
            for linear in &projection.parts {
                let path = spec.module_path(Module::of_layer(layer, linear.module));
                if let Some(module) = adapter.module(&path)? {
                    check_widths(&module, projection, linear)?;
                    parts.push(PreparedPart {
                        place,
                        module,
                        linear: *linear,
                        first_output,
                    });
                    // The parts of a module follow one another.
                    num_found += usize::from(last_found.as_ref() != Some(&path));
                    last_found = Some(path);
                }
                first_output += linear.num_outputs;
            }
        }
        if num_found < adapter.num_modules() {
            return Err(unknown_module(adapter, spec));
        }
        Ok(Self {
            adapter,
            num_places: spec.projections().count(),
            parts,
        })
    }

    /// Bytes of the packed weights.
    pub fn num_bytes(&self) -> u64 {
        let parts = self.parts.iter();
        parts
            .map(|part| {
                let LowRankModule { rank, a, .. } = &part.module;
                LowRank::num_bytes_of(*rank, a.columns(), part.linear.num_outputs)
            })
            .sum()
    }

    /// Reads and packs the weights, rounded to bf16.
    ///
    /// # Errors
    /// A weight is not finite in bf16, a file has changed since it was opened, or memory is short.
    pub fn load(self) -> Result<AdapterWeights, LoadError> {
        let mut weights = AdapterWeights::new(self.num_places);
        for part in self.parts {
            let place = part.place;
            weights.push(place, part.load()?);
        }
        self.adapter.check()?;
        Ok(weights)
    }
}

impl PreparedPart<'_> {
    fn load(self) -> Result<LowRank, LoadError> {
        let LowRankModule { rank, scale, a, b } = self.module;
        let num_outputs = self.linear.num_outputs;
        let outputs = self.first_output..self.first_output + num_outputs;
        let mut weights = LowRank::new(rank, a.columns(), outputs, scale)?;
        let b = match self.linear.selected_rows() {
            Some(rows) => b.select(rows),
            None => b,
        };
        read_rows(&a, rank, |index, row| weights.set_rank(index, row))?;
        read_rows(&b, num_outputs, |index, row| weights.set_output(index, row))?;
        Ok(weights)
    }
}

/// Calls `set(index, row)` with each row in bf16.
fn read_rows(
    tensor: &Tensor<'_>,
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

fn check_widths(
    module: &LowRankModule<'_>,
    projection: &Projection,
    linear: &Linear,
) -> Result<(), LoadError> {
    let LowRankModule { rank, a, b, .. } = module;
    for (tensor, given, expected) in [
        (a, [a.rows(), a.columns()], [*rank, projection.num_inputs]),
        (
            b,
            [b.rows(), b.columns()],
            [linear.num_module_outputs(), *rank],
        ),
    ] {
        if given != expected {
            return Err(tensor.location().error(format!(
                "has shape {given:?}; the model and rank {rank} call for {expected:?}: the adapter was trained for \
                 another model"
            )));
        }
    }
    Ok(())
}

/// The error about a module that is in no projection.
fn unknown_module(adapter: &PeftAdapter, spec: &ModelSpec) -> LoadError {
    let paths: Vec<_> = spec
        .projections()
        .flat_map(|(layer, projection)| {
            let parts = projection.parts.iter();
            parts.map(move |part| spec.module_path(Module::of_layer(layer, part.module)))
        })
        .collect();
    let mut modules = adapter.module_names();
    let unknown = modules.find(|name| !paths.iter().any(|path| path == name));
    let unknown = unknown.unwrap_or_default();
    let outside = [spec.modules.embedding, spec.modules.output_layer];
    adapter.error(match outside.contains(&unknown) {
        true => format!(
            "changes the module {unknown}; only the projections of layers can have adapters: train one without it, or \
             merge the adapter into the checkpoint"
        ),
        false => format!(
            "changes the module {unknown}, which the model does not have ({} with {} layers): the adapter was trained \
             for another model",
            spec.family,
            spec.num_layers()
        ),
    })
}
