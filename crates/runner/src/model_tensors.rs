//! The weights of a model by transformers' names, whatever format its checkpoint has.

use super::families::GgufArchitecture;
use super::module_names::ModuleNames;
use super::spec::{Linear, ModelSpec, Module, StackedLayout};
use inflight_base::LoadError;
use inflight_checkpoint::{Matrix, RowOrder, RowSelection, Store, Tensor};

/// Finds weights, and checks their shapes. Rows come in transformers' order.
pub(super) struct ModelTensors<'a> {
    spec: &'a ModelSpec,
    store: Store<'a>,
    /// The architecture of GGUF files, which have their own names and row order.
    gguf: Option<GgufArchitecture>,
    /// What modules are called in safetensors.
    names: Option<ModuleNames>,
}

impl<'a> ModelTensors<'a> {
    pub(super) fn new(
        spec: &'a ModelSpec,
        store: Store<'a>,
        gguf: Option<GgufArchitecture>,
    ) -> Self {
        let names = gguf
            .is_none()
            .then(|| ModuleNames::find(spec, |module| store.has(&format!("{module}.weight"))));
        Self {
            spec,
            store,
            gguf,
            names,
        }
    }

    /// The weights of a head of a model in the same safetensors: the names of both begin alike.
    pub(super) fn of_head(spec: &'a ModelSpec, model: &ModelSpec, store: Store<'a>) -> Self {
        let names = ModuleNames::find(model, |module| store.has(&format!("{module}.weight")));
        Self {
            spec,
            store,
            gguf: None,
            names: Some(names),
        }
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

    /// The weights of a linear layer with `num_inputs` inputs: of its module, the rows that are its own.
    ///
    /// # Errors
    /// As [`ModelTensors::matrix`].
    pub(super) fn linear(
        &self,
        module: Module,
        part: &Linear,
        num_inputs: usize,
    ) -> Result<Matrix<'a>, LoadError> {
        let num_rows = part.num_module_outputs();
        // Converters to GGUF transpose such weights.
        let matrix = match part.is_transposed && self.gguf.is_none() {
            true => {
                let name = self.stored_name(module);
                self.store.transposed_matrix(&name, num_rows, num_inputs)?
            }
            false => self.matrix(module, num_rows, num_inputs)?,
        };
        let columns = self.gguf.as_ref();
        let columns = columns.and_then(|gguf| gguf.column_order(module, self.spec));
        let matrix = match columns {
            Some((order, head_dim)) => matrix.with_columns_in(order, head_dim),
            None => matrix,
        };
        Ok(match part.selected_rows() {
            Some(rows) => matrix.select(rows),
            None => matrix,
        })
    }

    /// The weights of a linear layer of one of `num` that are alike, such as those of experts, `[part.num_outputs,
    /// num_inputs]`. With a layout, the tensor of its name has the weights of all, as it has in GGUF files.
    ///
    /// # Errors
    /// As [`ModelTensors::matrix`].
    pub(super) fn one_of_linears(
        &self,
        module: Module,
        part: &Linear,
        num_inputs: usize,
        num: usize,
        layout: Option<StackedLayout>,
    ) -> Result<Matrix<'a>, LoadError> {
        let num_rows = part.num_module_outputs();
        let stacked_name = match self.gguf {
            Some(gguf) => gguf
                .module_name(module)
                .map(|name| format!("{name}.weight")),
            None => layout.map(|_| self.stored_name(module)),
        };
        let Some(name) = stacked_name else {
            return self.linear(module, part, num_inputs);
        };
        let shape = [num, num_rows, num_inputs];
        let index = module.index.unwrap_or(0);
        if layout == Some(StackedLayout::Rows) {
            let is_by_inputs = part.is_transposed;
            return self.store.one_of_rows(&name, shape, index, is_by_inputs);
        }
        let rows = RowSelection {
            first: part.fused.map_or(0, |fused| fused.first),
            len: part.num_outputs,
            order: part.row_order,
            runs: part.fused.and_then(|fused| fused.runs),
        };
        let by_inputs = [StackedLayout::Inputs, StackedLayout::InputsInParts];
        if layout.is_some_and(|layout| by_inputs.contains(&layout)) {
            return self.store.one_of_transposed(&name, shape, index, rows);
        }
        self.store.one_of_stacked(&name, shape, index, rows)
    }

    /// The biases of a linear layer of one of `num_experts` experts, `[part.num_outputs]`, from a tensor with those of
    /// all.
    ///
    /// # Errors
    /// As [`ModelTensors::matrix`].
    pub(super) fn expert_bias(
        &self,
        module: Module,
        part: &Linear,
        num_experts: usize,
    ) -> Result<Tensor<'a>, LoadError> {
        let len = part.num_module_outputs();
        let separator = if self.gguf.is_some() { '.' } else { '_' };
        let name = format!("{}{separator}bias", self.stored_name(module));
        let all = self.store.stacked_vectors(&name, [num_experts, len])?;
        let first = part.fused.map_or(0, |fused| fused.first);
        Ok(all.flattened().select(RowSelection {
            first: module.index.unwrap_or(0) * len + first,
            len: part.num_outputs,
            order: part.row_order,
            runs: part.fused.and_then(|fused| fused.runs),
        }))
    }

    /// The rows of learned positions, `[num_rows, num_columns]`: the weights of an embedding, or a parameter, `[1,
    /// num_rows, num_columns]`.
    ///
    /// # Errors
    /// As [`ModelTensors::matrix`].
    pub(super) fn position_rows(
        &self,
        module: Module,
        num_rows: usize,
        num_columns: usize,
    ) -> Result<Matrix<'a>, LoadError> {
        match self.has_tensor(module) {
            true => {
                let shape = [1, num_rows, num_columns];
                self.store
                    .stacked_matrices(&self.stored_name(module), shape)
            }
            false => self.matrix(module, num_rows, num_columns),
        }
    }

    /// The weights of equal linear layers in one tensor, `[num_matrices, num_rows, num_columns]`, all rows below one
    /// another. `None` if there is no tensor of this name.
    ///
    /// # Errors
    /// They have another shape or a type that is not supported.
    pub(super) fn stacked_matrices(
        &self,
        module: Module,
        shape: [usize; 3],
    ) -> Result<Option<Matrix<'a>>, LoadError> {
        let name = format!("{}.weight", self.stored_name(module));
        match self.store.has(&name) {
            true => self.store.stacked_matrices(&name, shape).map(Some),
            false => Ok(None),
        }
    }

    /// The weights of a convolution of each channel, `[num_channels, 1, kernel_len]`, as `[num_channels, kernel_len]`.
    ///
    /// # Errors
    /// As [`ModelTensors::matrix`].
    pub(super) fn convolution(
        &self,
        module: Module,
        num_channels: usize,
        kernel_len: usize,
    ) -> Result<Matrix<'a>, LoadError> {
        let name = format!("{}.weight", self.stored_name(module));
        if self.gguf.is_some() {
            // llama.cpp's converter gives Kimi Linear's four dimensions, of which its quantiser writes three.
            let shapes = [
                &[1, num_channels, 1, kernel_len][..],
                &[num_channels, 1, kernel_len],
            ];
            let mut shapes = shapes.into_iter();
            return match shapes.find(|shape| self.store.has_shape(&name, shape)) {
                Some(shape) => self.store.matrix_of_shape(&name, shape),
                None => self.matrix(module, num_channels, kernel_len),
            };
        }
        self.store
            .stacked_matrices(&name, [num_channels, 1, kernel_len])
    }

    /// The kernels of a convolution of images, `[num_outputs, ...dimensions]`, as rows. Only in safetensors.
    ///
    /// # Errors
    /// As [`ModelTensors::matrix`].
    pub(super) fn kernels(
        &self,
        module: Module,
        num_outputs: usize,
        dimensions: &[usize],
    ) -> Result<Matrix<'a>, LoadError> {
        let name = format!("{}.weight", self.stored_name(module));
        let shape: Vec<_> = std::iter::once(num_outputs)
            .chain(dimensions.iter().copied())
            .collect();
        self.store.kernels(&name, &shape)
    }

    /// Whether the rates of recurrences are stored negated, and not their logarithms, as llama.cpp's converter does.
    pub(super) fn has_negated_rates(&self) -> bool {
        self.gguf.is_some()
    }

    /// Whether this module has weights.
    pub(super) fn has_weight(&self, module: Module) -> bool {
        self.store
            .has(&format!("{}.weight", self.stored_name(module)))
    }

    /// Whether there is a tensor with the name of this module.
    pub(super) fn has_tensor(&self, module: Module) -> bool {
        self.store.has(&self.stored_name(module))
    }

    /// Whether there is a tensor with the name of this module, and of this shape. Only in safetensors.
    pub(super) fn has_shape(&self, module: Module, shape: &[usize]) -> bool {
        self.store.has_shape(&self.stored_name(module), shape)
    }

    /// The weight of a norm, `[len]`.
    ///
    /// # Errors
    /// As [`ModelTensors::matrix`].
    pub(super) fn norm(&self, module: Module, len: usize) -> Result<Tensor<'a>, LoadError> {
        self.vector(module, "weight", len)
    }

    /// The weight of a norm of `num_groups` groups of elements, `[len]`, which GGUF files store as `[num_groups, len /
    /// num_groups]`.
    ///
    /// # Errors
    /// As [`ModelTensors::matrix`].
    pub(super) fn grouped_norm(
        &self,
        module: Module,
        len: usize,
        num_groups: usize,
    ) -> Result<Tensor<'a>, LoadError> {
        if self.gguf.is_none() {
            return self.norm(module, len);
        }
        let name = format!("{}.weight", self.stored_name(module));
        let shape = [num_groups, len / num_groups];
        Ok(self.store.stacked_vectors(&name, shape)?.flattened())
    }

    /// The weights of the norms of heads, `[head_dim]` each in this order: from a tensor of each, or from one of all.
    ///
    /// # Errors
    /// As [`ModelTensors::matrix`].
    pub(super) fn head_norms(
        &self,
        layer: usize,
        name: &'static str,
        [num_heads, head_dim]: [usize; 2],
        order: RowOrder,
    ) -> Result<Vec<Tensor<'a>>, LoadError> {
        let of_head = |head| Module::one_of(layer, head, name);
        let rows = |first| RowSelection {
            first,
            len: head_dim,
            order,
            runs: None,
        };
        if name.contains("{}") && self.gguf.is_none() {
            let norms = (0..num_heads).map(|head| self.norm(of_head(head), head_dim));
            return norms.map(|norm| Ok(norm?.select(rows(0)))).collect();
        }
        let stored = format!("{}.weight", self.stored_name(of_head(0)));
        let all = self.store.stacked_vectors(&stored, [num_heads, head_dim])?;
        let all = all.flattened();
        let heads = 0..num_heads;
        Ok(heads
            .map(|head| all.select(rows(head * head_dim)))
            .collect())
    }

    /// The bias of a linear layer, `[len]`.
    ///
    /// # Errors
    /// As [`ModelTensors::matrix`].
    pub(super) fn bias(&self, module: Module, len: usize) -> Result<Tensor<'a>, LoadError> {
        self.vector(module, "bias", len)
    }

    /// A parameter that is no weight or bias of a module, `[len]`.
    ///
    /// # Errors
    /// As [`ModelTensors::matrix`].
    pub(super) fn parameter(&self, name: Module, len: usize) -> Result<Tensor<'a>, LoadError> {
        let mut stored = self.stored_name(name);
        // Some of llama.cpp's names have no end, and what is called a bias may end as a weight.
        if self.gguf.is_some() && !self.store.has(&stored) {
            let ends = match name.name.ends_with("bias") {
                true => [".bias", ".weight"],
                false => [".weight", ".bias"],
            };
            let mut found = ends.into_iter();
            let found = found.find(|end| self.store.has(&format!("{stored}{end}")));
            stored += found.unwrap_or(ends[0]);
        }
        let vector = self.store.vector(&stored, len, self.row_order(name));
        // ERNIE has the only row of a matrix, and llama.cpp the only column for state spaces.
        vector.or_else(|error| {
            if self.row_order(name) != RowOrder::Same {
                return Err(error);
            }
            let mut shapes = [[1, len], [len, 1]].into_iter();
            let found = shapes.find_map(|shape| self.store.stacked_vectors(&stored, shape).ok());
            // Kimi Linear has a number for each head, and InternVL a class token, in the shape that they compute with.
            let as_computed = || {
                let shapes: [&[usize]; 2] = [&[1, 1, len, 1], &[1, 1, len]];
                let mut shapes = shapes.into_iter();
                shapes.find_map(|shape| self.store.flattened(&stored, shape).ok())
            };
            let found = found.map(Tensor::flattened).or_else(as_computed);
            found.ok_or(error)
        })
    }

    /// A parameter that is no weight or bias of a module, `[rows, columns]`.
    ///
    /// # Errors
    /// As [`ModelTensors::matrix`].
    pub(super) fn parameters(
        &self,
        name: Module,
        [rows, columns]: [usize; 2],
    ) -> Result<Matrix<'a>, LoadError> {
        let mut stored = self.stored_name(name);
        if self.gguf.is_some() && !self.store.has(&stored) {
            stored += ".weight";
        }
        let all = self.store.stacked_vectors(&stored, [rows, columns])?;
        Ok(Matrix::Float(all))
    }

    pub(super) fn store(&self) -> &Store<'a> {
        &self.store
    }

    fn vector(&self, module: Module, parameter: &str, len: usize) -> Result<Tensor<'a>, LoadError> {
        let module_name = self.stored_name(module);
        let name = format!("{module_name}.{parameter}");
        // What the first checkpoints of BERT, from TensorFlow, call those of their norms; transformers reads them too.
        let older = match parameter {
            "weight" => format!("{module_name}.gamma"),
            _ => format!("{module_name}.beta"),
        };
        let stored = match self.store.has(&name) {
            true => &name,
            false if self.store.has(&older) => &older,
            // Some of llama.cpp's names have no end.
            false if self.gguf.is_some() && self.store.has(&module_name) => &module_name,
            false => &name,
        };
        self.store.vector(stored, len, self.row_order(module))
    }

    /// The name of a module in the checkpoint.
    pub(super) fn stored_name(&self, module: Module) -> String {
        let gguf = self.gguf.and_then(|gguf| gguf.module_name(module));
        gguf.unwrap_or_else(|| {
            let path = self.spec.module_path(module);
            match &self.names {
                Some(names) => names.stored(path),
                None => path,
            }
        })
    }

    fn row_order(&self, module: Module) -> RowOrder {
        let gguf = self.gguf.as_ref();
        gguf.map_or(RowOrder::Same, |gguf| gguf.row_order(module, self.spec))
    }
}
