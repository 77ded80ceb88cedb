//! An adapter that a request brings in two input tensors, as TensorRT-LLM's clients send it.

use inflight_base::RequestError;
use inflight_checkpoint::AdapterArrays;
use inflight_manager::{AdapterStore, AdapterUpload, UploadHeader, UploadWriter};
use inflight_numbers::Dtype;
use inflight_triton::{DataType, Error, Input, Request};

/// Bytes of `lora_config`: more modules than any model has.
const MAX_CONFIG_BYTES: usize = 1 << 20;

/// Whether an input belongs to an adapter.
pub(super) fn is_adapter_tensor(name: &str) -> bool {
    [AdapterArrays::WEIGHTS, AdapterArrays::CONFIG].contains(&name)
}

/// Begins to receive the adapter that a request brings, if it brings one. The weights are copied later, by
/// [`copy_piece`].
///
/// # Errors
/// One of the tensors is missing or has another type, or the adapter is too large.
pub(super) fn receive(
    request: &Request,
    store: &AdapterStore,
) -> Result<Option<(AdapterUpload, UploadWriter)>, Error> {
    let [weights, config] = [
        find(request, AdapterArrays::WEIGHTS)?,
        find(request, AdapterArrays::CONFIG)?,
    ];
    let (weights, config) = match (weights, config) {
        (None, None) => return Ok(None),
        (Some(weights), Some(config)) => (weights, config),
        (weights, _) => {
            let (given, missing) = match weights {
                Some(_) => (AdapterArrays::WEIGHTS, AdapterArrays::CONFIG),
                None => (AdapterArrays::CONFIG, AdapterArrays::WEIGHTS),
            };
            return Err(Error::invalid(format!(
                "the request has {given} and no {missing}: send both, or neither if the adapter has been sent before"
            )));
        }
    };
    let dtype = match weights.data_type() {
        DataType::Fp16 => Dtype::F16,
        DataType::Bf16 => Dtype::Bf16,
        DataType::Fp32 => Dtype::F32,
        other => {
            return Err(Error::invalid(format!(
                "input '{}' has type {other}; FP16, BF16 and FP32 are supported",
                weights.name()
            )));
        }
    };
    if config.num_bytes() > MAX_CONFIG_BYTES {
        return Err(Error::invalid(format!(
            "input '{}' has {} bytes, and may have at most {MAX_CONFIG_BYTES}",
            config.name(),
            config.num_bytes()
        )));
    }
    let num_numbers = config.num_elements::<i32>()?;
    let header = UploadHeader {
        config: config.elements_in(0..num_numbers)?,
        config_shape: config.shape(size_of::<i32>())?,
        weights_shape: weights.shape(dtype.size())?,
        dtype,
    };
    Ok(Some(store.receive(header)?))
}

/// Copies at most `max_bytes` more of the weights. Returns how many, and whether these were the last.
///
/// # Errors
/// They are in GPU memory.
pub fn copy_piece(
    request: &Request,
    writer: &mut UploadWriter,
    max_bytes: usize,
) -> Result<(usize, bool), Error> {
    let gone = || {
        RequestError::Internal(format!(
            "input '{}' has fewer bytes than before",
            AdapterArrays::WEIGHTS
        ))
    };
    let weights = find(request, AdapterArrays::WEIGHTS)?.ok_or_else(gone)?;
    let mut num_copied = 0;
    loop {
        let bytes = weights.bytes_from(writer.num_written_bytes())?;
        if bytes.is_empty() {
            return Err(gone().into());
        }
        let bytes = &bytes[..bytes.len().min(max_bytes - num_copied)];
        num_copied += bytes.len();
        let is_complete = writer.write(bytes);
        if is_complete || num_copied == max_bytes {
            return Ok((num_copied, is_complete));
        }
    }
}

/// The input of this name, unless it is empty.
fn find<'request>(
    request: &'request Request,
    name: &str,
) -> Result<Option<Input<'request>>, Error> {
    let mut inputs = request.inputs()?.into_iter();
    Ok(inputs.find(|input| input.name() == name && input.num_bytes() > 0))
}
