//! Our kernels: the images that the build has embedded, and their functions on one GPU.

use std::sync::Arc;

use cudarc::driver::sys::CUfunction_attribute;
use cudarc::driver::{CudaContext, CudaFunction, CudaModule, LaunchConfig};
use cudarc::nvrtc::Ptx;

use super::gpu::load_error;
use inflight_base::LoadError;
use inflight_device::Activation;

/// Elements that a thread of most kernels computes at a time.
pub(super) const VECTOR: usize = 8;

// `IMAGES`, written by build.rs. Empty if no kernels were compiled.
include!(concat!(env!("OUT_DIR"), "/kernel_images.rs"));

/// A file of `kernels/`, compiled for one kind of GPU.
struct Image {
    /// The file's name without its suffix.
    name: &'static str,
    /// The compute capability, 90 for 9.0.
    capability: u32,
    /// Whether the driver compiles it.
    is_ptx: bool,
    bytes: &'static [u8],
}

/// The lowest compute capability whose tensor cores multiply FP8.
const MIN_FP8_CAPABILITY: u32 = 89;

/// Threads of a block of the kernels whose blocks share the elements of a row.
const ROW_THREADS: u32 = 256;

/// Whether the build has embedded kernels.
pub fn has_kernels() -> bool {
    !IMAGES.is_empty()
}

/// The functions of `kernels/*.cu`, except those of attention.
pub(super) struct Kernels {
    context: Arc<CudaContext>,
    capability: u32,
    pub embed: CudaFunction,
    pub embed_part: CudaFunction,
    pub rms_norm: CudaFunction,
    pub add_rms_norm: CudaFunction,
    pub layer_norm: CudaFunction,
    pub add_layer_normed: CudaFunction,
    pub replace_layer_normed: CudaFunction,
    pub add_rms_normed: CudaFunction,
    pub round_rows: CudaFunction,
    pub add_rows: CudaFunction,
    pub scale_rows: CudaFunction,
    pub add_positions: CudaFunction,
    pub place_columns: CudaFunction,
    pub sum_ranks: CudaFunction,
    pub add_bias: CudaFunction,
    pub gated: Activations,
    pub plain: Activations,
    pub xielu: CudaFunction,
    pub quick_gelu: CudaFunction,
    pub transform_logits: CudaFunction,
    pub qk_norm: CudaFunction,
    pub qk_layer_norm: CudaFunction,
    pub qk_squares: CudaFunction,
    pub qk_norm_of_squares: CudaFunction,
    pub rope_and_store_bf16: CudaFunction,
    pub rope_and_store_int8: CudaFunction,
    pub rope_and_store_fp8: CudaFunction,
    pub gather_rows: CudaFunction,
    pub gather_rows_4: CudaFunction,
    pub copy_positions: CudaFunction,
    pub gate_attention: CudaFunction,
}

/// A kernel for each activation.
pub(super) struct Activations {
    silu: CudaFunction,
    gelu: CudaFunction,
    gelu_tanh: CudaFunction,
    relu: CudaFunction,
    squared_relu: CudaFunction,
}

impl Activations {
    fn load(module: &Arc<CudaModule>, suffix: &str) -> Result<Self, LoadError> {
        let load = |name: &str| load_function(module, &format!("{name}{suffix}"));
        Ok(Self {
            silu: load("silu")?,
            gelu: load("gelu")?,
            gelu_tanh: load("gelu_tanh")?,
            relu: load("relu")?,
            squared_relu: load("squared_relu")?,
        })
    }

    pub fn of(&self, activation: Activation) -> &CudaFunction {
        match activation {
            Activation::Silu => &self.silu,
            Activation::Gelu => &self.gelu,
            Activation::GeluTanh => &self.gelu_tanh,
            Activation::Relu => &self.relu,
            Activation::SquaredRelu => &self.squared_relu,
        }
    }
}

impl Kernels {
    /// Loads the image for a GPU.
    ///
    /// # Errors
    ///
    /// The library was built without kernels, or none of them runs on this GPU.
    pub fn load(context: &Arc<CudaContext>) -> Result<Self, LoadError> {
        let (major, minor) = context
            .compute_capability()
            .map_err(|error| load_error("asking for the compute capability", &error))?;
        let capability = 10 * major.unsigned_abs() + minor.unsigned_abs();
        let embed = load_module(context, capability, "embed")?;
        let rms_norm = load_module(context, capability, "rms_norm")?;
        let layer_norm = load_module(context, capability, "layer_norm")?;
        let rows = load_module(context, capability, "rows")?;
        let qk_norm = load_module(context, capability, "qk_norm")?;
        let qk_norm_over_ranks = load_module(context, capability, "qk_norm_over_ranks")?;
        let rope_and_store = load_module(context, capability, "rope_and_store")?;
        let gather_rows = load_module(context, capability, "gather_rows")?;
        let activate = load_module(context, capability, "activate")?;
        let recurrent_gates = load_module(context, capability, "recurrent_gates")?;
        let only = |name| load_function(&load_module(context, capability, name)?, name);
        Ok(Self {
            embed: load_function(&embed, "embed")?,
            embed_part: load_function(&embed, "embed_part")?,
            rms_norm: load_function(&rms_norm, "rms_norm")?,
            add_rms_norm: load_function(&rms_norm, "add_rms_norm")?,
            layer_norm: load_function(&layer_norm, "layer_norm")?,
            add_layer_normed: load_function(&layer_norm, "add_layer_normed")?,
            replace_layer_normed: load_function(&layer_norm, "replace_layer_normed")?,
            add_rms_normed: load_function(&layer_norm, "add_rms_normed")?,
            round_rows: load_function(&rows, "round_rows")?,
            add_rows: load_function(&rows, "add_rows")?,
            scale_rows: load_function(&rows, "scale_rows")?,
            add_positions: load_function(&rows, "add_positions")?,
            place_columns: load_function(&rows, "place_columns")?,
            sum_ranks: load_function(&rows, "sum_ranks")?,
            add_bias: only("add_bias")?,
            gated: Activations::load(&load_module(context, capability, "gated")?, "_mul")?,
            plain: Activations::load(&activate, "")?,
            xielu: load_function(&activate, "xielu")?,
            quick_gelu: load_function(&activate, "quick_gelu")?,
            transform_logits: only("transform_logits")?,
            qk_norm: load_function(&qk_norm, "qk_norm")?,
            qk_layer_norm: load_function(&qk_norm, "qk_layer_norm")?,
            qk_squares: load_function(&qk_norm_over_ranks, "qk_squares")?,
            qk_norm_of_squares: load_function(&qk_norm_over_ranks, "qk_norm_of_squares")?,
            rope_and_store_bf16: load_function(&rope_and_store, "rope_and_store_bf16")?,
            rope_and_store_int8: load_function(&rope_and_store, "rope_and_store_int8")?,
            rope_and_store_fp8: load_function(&rope_and_store, "rope_and_store_fp8")?,
            gather_rows: load_function(&gather_rows, "gather_rows")?,
            gather_rows_4: load_function(&gather_rows, "gather_rows_4")?,
            copy_positions: only("copy_positions")?,
            gate_attention: load_function(&recurrent_gates, "gate_attention")?,
            capability,
            context: Arc::clone(context),
        })
    }

    /// The compute capability, 90 for 9.0.
    pub fn capability(&self) -> u32 {
        self.capability
    }

    /// # Errors
    ///
    /// The GPU does not multiply FP8.
    pub fn check_fp8(&self, gpu: usize) -> Result<(), LoadError> {
        match self.capability {
            MIN_FP8_CAPABILITY.. => Ok(()),
            capability => Err(LoadError::Config {
                problem: format!(
                    "fp8_activations is true, and GPU {gpu} has compute capability {}.{}: products of FP8 need {}.{}",
                    capability / 10,
                    capability % 10,
                    MIN_FP8_CAPABILITY / 10,
                    MIN_FP8_CAPABILITY % 10
                ),
                remedy: "leave it out: activations are bf16 then".to_owned(),
            }),
        }
    }

    /// A function of the file `file`, with room for `shared_bytes` of dynamic shared memory.
    ///
    /// # Errors
    ///
    /// The GPU has less shared memory.
    pub fn function(
        &self,
        file: &str,
        name: &str,
        shared_bytes: u32,
    ) -> Result<CudaFunction, LoadError> {
        let function = load_function(&load_module(&self.context, self.capability, file)?, name)?;
        let most = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        function
            .set_attribute(most, shared_bytes as i32)
            .map_err(|error| {
                load_error(
                    &format!("{name}: {shared_bytes} bytes of shared memory"),
                    &error,
                )
            })?;
        Ok(function)
    }
}

/// One block for each row.
pub(super) fn row_grid(num_rows: usize, threads: u32) -> LaunchConfig {
    LaunchConfig {
        grid_dim: (num_rows as u32, 1, 1),
        block_dim: (threads, 1, 1),
        shared_mem_bytes: 0,
    }
}

/// Blocks that share the rows' `num_units` units: one for each 256 of them, and fewer where there are many rows.
///
/// ```text
/// row 0   | block (0, 0): units 0 to 255 | block (0, 1): 256 to 511 | ...
/// row 1   | block (1, 0)                 | block (1, 1)             | ...
/// ```
pub(super) fn shared_row_grid(num_rows: usize, num_units: usize) -> LaunchConfig {
    /// Enough blocks for any GPU.
    const MANY_BLOCKS: usize = 4096;
    let most = (MANY_BLOCKS / num_rows.max(1)).max(1);
    let blocks = num_units.div_ceil(ROW_THREADS as usize).clamp(1, most);
    LaunchConfig {
        grid_dim: (num_rows as u32, blocks as u32, 1),
        block_dim: (ROW_THREADS, 1, 1),
        shared_mem_bytes: 0,
    }
}

fn load_module(
    context: &Arc<CudaContext>,
    capability: u32,
    name: &str,
) -> Result<Arc<CudaModule>, LoadError> {
    let image = image_for(name, capability)?;
    context
        .load_module(Ptx::from_binary(image.to_vec()))
        .map_err(|error| load_error(&format!("loading {name}.cu"), &error))
}

fn load_function(module: &Arc<CudaModule>, name: &str) -> Result<CudaFunction, LoadError> {
    module
        .load_function(name)
        .map_err(|error| load_error(&format!("the kernel {name}"), &error))
}

/// The image of a file for a compute capability: a binary for the same major version and at most this minor one, or
/// else PTX for an older capability.
fn image_for(name: &str, capability: u32) -> Result<&'static [u8], LoadError> {
    if !has_kernels() {
        return Err(LoadError::Resource(
            "this library was built without CUDA kernels: build it after `cargo xtask kernels`, or serve the model with \
             KIND_CPU"
                .to_owned(),
        ));
    }
    let fits = |image: &&Image| {
        let is_same = image.is_ptx || image.capability / 10 == capability / 10;
        image.name == name && image.capability <= capability && is_same
    };
    let best = IMAGES
        .iter()
        .filter(fits)
        .max_by_key(|image| (!image.is_ptx, image.capability));
    match best {
        Some(image) => Ok(image.bytes),
        None => Err(LoadError::Resource(format!(
            "the GPU has compute capability {}.{}, and the kernels need 8.0: use a newer GPU, or serve the model with \
             KIND_CPU",
            capability / 10,
            capability % 10
        ))),
    }
}

/// Launches a kernel on the device's stream, unless an operation has failed before, or a graph of the step has it.
///
/// The caller writes the arguments as the head of the kernel's file lists them.
macro_rules! launch {
    ($cuda:expr, $kernel:expr, $name:literal, $config:expr, $($argument:expr),+ $(,)?) => {
        if $cuda.is_launching() {
            let config = $config;
            // SAFETY: the arguments are those of the kernel, and address buffers of the sizes that it accesses.
            let launched = unsafe {
                $cuda.stream.launch_builder(&$kernel)$(.arg(&$argument))+.launch(config)
            };
            $cuda.record($name, launched);
        }
    };
}
pub(super) use launch;
