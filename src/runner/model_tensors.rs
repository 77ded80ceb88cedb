//! The weights of a model by transformers' names, whatever format its checkpoint has.

use super::families::{GgufArchitecture, gguf_name};
use super::spec::{Linear, ModelSpec, Module};
use crate::base::LoadError;
use crate::checkpoint::{Matrix, RowOrder, RowSelection, Store, Tensor};

/// Finds weights, and checks their shapes. Rows come in transformers' order.
pub(super) struct ModelTensors<'a> {
    spec: &'a ModelSpec,
    store: Store<'a>,
    /// The architecture of GGUF files, which have their own names and row order.
    gguf: Option<GgufArchitecture>,
}

impl<'a> ModelTensors<'a> {
    pub(super) fn new(
        spec: &'a ModelSpec,
        store: Store<'a>,
        gguf: Option<GgufArchitecture>,
    ) -> Self {
        Self { spec, store, gguf }
    }

    /// The weights of a linear layer or of the embedding, `[num_rows, num_columns]`.
    ///
    /// # Errors
    /// They are missing, or have another shape or a type that is not supported.
    pub(super) fn matrix(
        &self,
        module: Module,
        num_rows: usize,
        num_columns: usize,
    ) -> Result<Matrix<'a>, LoadError> {
        let name = self.stored_name(module);
        let row_order = self.row_order(module);
        self.store.matrix(&name, num_rows, num_columns, row_order)
    }

    /// The weights of a linear layer of one of `num_experts` experts, `[part.num_outputs, num_inputs]`. `is_stacked` if the
    /// tensor of its name has those of all experts, as it has in GGUF files.
    ///
    /// # Errors
    /// As [`ModelTensors::matrix`].
    pub(super) fn expert_matrix(
        &self,
        module: Module,
        part: &Linear,
        num_inputs: usize,
        num_experts: usize,
        is_stacked: bool,
    ) -> Result<Matrix<'a>, LoadError> {
        let num_rows = part.num_module_outputs();
        let stacked_name = match self.gguf {
            Some(_) => gguf_name(module).map(|name| format!("{name}.weight")),
            None => is_stacked.then(|| self.spec.module_path(module)),
        };
        let Some(name) = stacked_name else {
            let matrix = self.matrix(module, num_rows, num_inputs)?;
            return Ok(match part.selected_rows() {
                Some(rows) => matrix.select(rows),
                None => matrix,
            });
        };
        let shape = [num_experts, num_rows, num_inputs];
        let all = self.store.stacked_matrices(&name, shape)?;
        Ok(all.select(RowSelection {
            first: module.expert.unwrap_or(0) * num_rows
                + part.fused.map_or(0, |fused| fused.first),
            len: part.num_outputs,
            order: part.row_order,
        }))
    }

    /// Whether there is a tensor with the name of this module.
    pub(super) fn has_tensor(&self, module: Module) -> bool {
        self.store.has(&self.spec.module_path(module))
    }

    /// The weight of a norm, `[len]`.
    ///
    /// # Errors
    /// As [`ModelTensors::matrix`].
    pub(super) fn norm(&self, module: Module, len: usize) -> Result<Tensor<'a>, LoadError> {
        self.vector(module, "weight", len)
    }

    /// The bias of a linear layer, `[len]`.
    ///
    /// # Errors
    /// As [`ModelTensors::matrix`].
    pub(super) fn bias(&self, module: Module, len: usize) -> Result<Tensor<'a>, LoadError> {
        self.vector(module, "bias", len)
    }

    pub(super) fn store(&self) -> &Store<'a> {
        &self.store
    }

    fn vector(&self, module: Module, parameter: &str, len: usize) -> Result<Tensor<'a>, LoadError> {
        let name = format!("{}.{parameter}", self.stored_name(module));
        self.store.vector(&name, len, self.row_order(module))
    }

    fn stored_name(&self, module: Module) -> String {
        let gguf = self.gguf.and_then(|_| gguf_name(module));
        gguf.unwrap_or_else(|| self.spec.module_path(module))
    }

    fn row_order(&self, module: Module) -> RowOrder {
        let gguf = self.gguf.as_ref();
        gguf.map_or(RowOrder::Same, |gguf| {
            gguf.row_order(module, self.spec.head_dim)
        })
    }
}
