//! Options that come as input tensors, as clients of TensorRT-LLM's and of vLLM's backends send them.

use serde_json::Value;

use inflight_config::client_inputs::client_input;
use inflight_triton::{DataType, Element, Error, OwnedInput, strings};

/// The value that a tensor gives to the option of its name: one value, or a list where the models that
/// have it take a list. A tensor without elements gives null, which is no value.
///
/// # Errors
/// The tensor's bytes do not fit its data type and shape.
pub fn option_of(input: &OwnedInput) -> Result<Value, Error> {
    let mut values = match input.data_type() {
        DataType::Bool => bools(input)?,
        DataType::Int32 => numbers::<i32>(input)?,
        DataType::Int64 => numbers::<i64>(input)?,
        DataType::Uint32 => numbers::<u32>(input)?,
        DataType::Uint64 => numbers::<u64>(input)?,
        DataType::Fp32 => floats(input)?,
        DataType::Bytes => texts(input)?,
        other => {
            return Err(Error::invalid(format!(
                "input '{}' has type {other}, which no option has",
                input.name()
            )));
        }
    };
    let is_list = client_input(input.name()).is_some_and(|known| known.dims == [-1]);
    Ok(match values.len() {
        0 => Value::Null,
        1 if !is_list => values.remove(0),
        _ => Value::Array(values),
    })
}

fn bools(input: &OwnedInput) -> Result<Vec<Value>, Error> {
    let bytes = input.bytes();
    Ok(bytes.iter().map(|byte| Value::Bool(*byte != 0)).collect())
}

fn numbers<T: Element + Into<Value>>(input: &OwnedInput) -> Result<Vec<Value>, Error> {
    let elements: Vec<T> = input.elements()?;
    Ok(elements.into_iter().map(Into::into).collect())
}

fn floats(input: &OwnedInput) -> Result<Vec<Value>, Error> {
    let elements: Vec<f32> = input.elements()?;
    // JSON has no infinity: as a text it is refused by the option, with its range.
    let value = |number: f32| match number.is_finite() {
        true => Value::from(number),
        false => Value::String(number.to_string()),
    };
    Ok(elements.into_iter().map(value).collect())
}

fn texts(input: &OwnedInput) -> Result<Vec<Value>, Error> {
    let bytes = input.bytes();
    let text = |text: &[u8]| match std::str::from_utf8(text) {
        Ok(text) => Ok(Value::from(text)),
        Err(error) => Err(Error::invalid(format!(
            "input '{}' is not valid UTF-8 from byte {} on",
            input.name(),
            error.valid_up_to()
        ))),
    };
    strings::decode(bytes)?.into_iter().map(text).collect()
}
