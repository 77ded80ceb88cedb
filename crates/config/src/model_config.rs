//! Triton's own fields of config.pbtxt: fills in missing fields and rejects unsupported ones.

use serde_json::{Value, json};

use crate::choices::Task;
use crate::client_compatibility::ClientCompatibility;
use crate::client_inputs::{ClientInput, client_input};
use crate::outputs::OutputKind;
use crate::parameters::ignored_parameters;
use crate::pbtxt::{
    AutoComplete, config_error, dims, field, is_empty, is_true, optional_input, unsigned,
};
use crate::scheduling::{
    Scheduling, check_scheduling, controls, default_scheduling, delays, has_scheduler,
    num_candidates,
};
use crate::settings::Settings;
use inflight_base::LoadError;

/// `max_batch_size` of a model that does not set it.
const DEFAULT_MAX_BATCH_SIZE: u32 = 64;

/// The input tensor that holds a request's prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InputKind {
    /// `text_input`, one string.
    Text,
    /// `input_ids`, a row of INT32.
    Ids,
}

impl InputKind {
    /// The input tensor's name.
    pub const fn name(self) -> &'static str {
        match self {
            InputKind::Text => "text_input",
            InputKind::Ids => "input_ids",
        }
    }

    /// The input tensor's data type, as spelled in config.pbtxt.
    const fn data_type(self) -> &'static str {
        match self {
            InputKind::Text => "TYPE_STRING",
            InputKind::Ids => "TYPE_INT32",
        }
    }

    /// The input tensor's dimension: 1 for one string, -1 for any number of ids.
    const fn dim(self) -> i64 {
        match self {
            InputKind::Text => 1,
            InputKind::Ids => -1,
        }
    }
}

/// A model's checked configuration.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// Number of requests that Triton holds in slots.
    pub max_batch_size: u32,
    /// Whether tensors have a batch dimension. Its size is always 1.
    pub has_batch_dim: bool,
    /// Whether a request may have several responses.
    pub decoupled: bool,
    /// The input tensor that holds the prompt.
    pub input: InputKind,
    /// The declared output tensors.
    pub outputs: Vec<OutputKind>,
    /// Which of Triton's schedulers brings the requests.
    pub scheduling: Scheduling,
    /// The input tensors that Triton adds to requests of sequences.
    pub controls: Vec<String>,
    /// Whether requests may bring adapters: the inputs `lora_weights` and `lora_config` are declared.
    pub takes_adapters: bool,
    /// Requests of the warm-up that Triton sends to each instance before all others.
    pub num_warm_ups: u64,
    /// The backend's parameters.
    pub settings: Settings,
}

impl ModelConfig {
    /// `config` with its missing fields filled in. None if nothing is missing.
    ///
    /// Fills in only the fields that Triton lets a backend set: `max_batch_size`, `input`, `output`,
    /// `sequence_batching`, `model_transaction_policy`.
    pub fn complete(config: &Value, has_tokenizer: bool) -> Option<Value> {
        let mut completed = config.clone();
        // `parse` rejects bad parameters.
        let settings = Self::settings(config).unwrap_or_default();
        let compatibility = settings.client_compatibility;
        let fields = completed.as_object_mut()?;
        let written = unsigned(fields.get("max_batch_size")).unwrap_or(0);
        let has_batch_dim = written > 0 || !compatibility.allows_missing_batch_dim();
        if written == 0 && has_batch_dim {
            fields.insert("max_batch_size".into(), json!(DEFAULT_MAX_BATCH_SIZE));
        }
        if is_empty(fields.get("input")) {
            let kind = if has_tokenizer {
                InputKind::Text
            } else {
                InputKind::Ids
            };
            let options = compatibility.inputs(has_tokenizer).iter();
            let options = options.filter(|input| InputKind::named(input.name).is_none());
            let inputs = std::iter::once(input_field(kind, has_batch_dim))
                .chain(options.map(|input| option_field(input, has_batch_dim)));
            fields.insert("input".into(), inputs.collect());
        }
        let input = InputKind::of(fields.get("input"));
        if is_empty(fields.get("output")) {
            let takes_text = has_tokenizer && input != Some(InputKind::Ids);
            let kinds = match settings.task {
                Task::Generate => compatibility.outputs(),
                Task::Embed | Task::Classify | Task::Score => &OutputKind::ALL,
            };
            let kinds = kinds.iter().filter(|kind| kind.is_of(settings.task));
            let kinds = kinds.filter(|kind| takes_text || !kind.is_text());
            let outputs = kinds.map(|kind| output_field(*kind, compatibility));
            fields.insert("output".into(), outputs.collect());
        }
        // Without a batch dimension Triton hands requests over one at a time, as they arrive, if it has no other
        // scheduler.
        if !has_scheduler(&completed) && has_batch_dim {
            let splits = optional_input(&completed).is_some();
            let fields = completed.as_object_mut()?;
            match splits {
                true => fields.insert("dynamic_batching".into(), json!({})),
                false => fields.insert("sequence_batching".into(), default_scheduling()),
            };
        }
        let fields = completed.as_object_mut()?;
        // One response can be had over any endpoint.
        fields
            .entry("model_transaction_policy")
            .or_insert_with(|| json!({ "decoupled": !settings.task.is_pooling() }));
        (completed != *config).then_some(completed)
    }

    /// Parses and checks a complete configuration.
    ///
    /// # Errors
    /// All unsupported fields and values, with what to write instead. With `auto_complete`, leaving a field out is
    /// suggested too.
    pub fn parse(config: &Value, auto_complete: AutoComplete) -> Result<Self, LoadError> {
        let mut errors = Vec::new();
        let settings = ok_or_record(Self::settings(config), &mut errors);
        let compatibility = settings
            .as_ref()
            .map(|settings| settings.client_compatibility)
            .unwrap_or_default();
        let written = unsigned(config.get("max_batch_size")).unwrap_or(0);
        let has_batch_dim = written > 0;
        if !has_batch_dim && !compatibility.allows_missing_batch_dim() {
            errors.push(config_error(
                "max_batch_size is 0",
                &auto_complete.or_leave_out("write max_batch_size: 64"),
            ));
        }
        let input = check_inputs(config, auto_complete, &mut errors);
        let task = settings
            .as_ref()
            .map_or(Task::Generate, |settings| settings.task);
        let outputs = check_outputs(
            config,
            input,
            (task, compatibility),
            auto_complete,
            &mut errors,
        );
        let allows_oldest = settings
            .as_ref()
            .is_some_and(|settings| settings.allow_iterative_oldest);
        let batches = has_batch_dim || !compatibility.allows_missing_batch_dim();
        let (scheduling, max_batch_size) = match batches || has_scheduler(config) {
            true => {
                let checked = check_scheduling(config, auto_complete, allows_oldest);
                // Without a batch dimension, a slot is a candidate sequence of `oldest`; `direct` has only one slot
                // then.
                let slots = match batches {
                    true => Ok(written),
                    false => num_candidates(config),
                };
                (
                    ok_or_record(checked, &mut errors),
                    ok_or_record(slots, &mut errors),
                )
            }
            false => (
                Some(Scheduling::Queued),
                Some(DEFAULT_MAX_BATCH_SIZE.into()),
            ),
        };
        LoadError::combine(errors)?;
        // Cannot fail: each missing value has recorded an error.
        let (Some(settings), Some(input), Some(scheduling), Some(max_batch_size)) =
            (settings, input, scheduling, max_batch_size)
        else {
            return Err(config_error(
                "it cannot be parsed",
                "write it as in docs/src/quick-start.md",
            ));
        };
        Ok(Self {
            max_batch_size: u32::try_from(max_batch_size).unwrap_or(u32::MAX),
            has_batch_dim,
            decoupled: config
                .pointer("/model_transaction_policy/decoupled")
                .and_then(Value::as_bool)
                .unwrap_or(false),
            input,
            outputs,
            scheduling,
            controls: controls(config),
            takes_adapters: ["lora_weights", "lora_config"]
                .iter()
                .all(|name| inputs(config).iter().any(|it| field(it, "name") == *name)),
            num_warm_ups: num_warm_ups(config),
            settings,
        })
    }

    /// Parses only the parameters, on which [`ModelConfig::complete`] depends.
    ///
    /// # Errors
    /// Unknown keys and values outside their range.
    pub fn settings(config: &Value) -> Result<Settings, LoadError> {
        Settings::parse(parameters(config))
    }

    /// Warnings about ignored parameters and settings that delay requests, one each.
    pub fn warnings(config: &Value) -> Vec<String> {
        let ignored = ignored_parameters(parameters(config).map(|(key, _)| key));
        let ignored = ignored
            .map(|(key, why)| format!("config.pbtxt: parameter '{key}' has no effect here: {why}"));
        ignored.chain(delays(config)).collect()
    }
}

/// The backend's parameters: keys and string values.
fn parameters(config: &Value) -> impl Iterator<Item = (&str, &str)> {
    let parameters = config.get("parameters").and_then(Value::as_object);
    parameters.into_iter().flatten().map(|(key, value)| {
        let text = value.get("string_value").and_then(Value::as_str);
        (key.as_str(), text.unwrap_or_default())
    })
}

/// Requests of `model_warmup`: each sample is a batch, sent `count` times and at least once.
fn num_warm_ups(config: &Value) -> u64 {
    let samples = config.get("model_warmup").and_then(Value::as_array);
    let num_requests = samples.into_iter().flatten().map(|sample| {
        let count = unsigned(sample.get("count")).unwrap_or(0).max(1);
        unsigned(sample.get("batch_size"))
            .unwrap_or(0)
            .saturating_mul(count)
    });
    num_requests.fold(0, u64::saturating_add)
}

/// The value of `result`. Records an error in `errors`, to be reported together with the others.
fn ok_or_record<T>(result: Result<T, LoadError>, errors: &mut Vec<LoadError>) -> Option<T> {
    result.map_err(|error| errors.push(error)).ok()
}

impl InputKind {
    fn of(inputs: Option<&Value>) -> Option<Self> {
        let inputs = inputs?.as_array()?;
        inputs.iter().find_map(Self::of_one)
    }

    /// The kind of the input. None if it is not a prompt.
    fn of_one(input: &Value) -> Option<Self> {
        Self::named(field(input, "name"))
    }

    fn named(name: &str) -> Option<Self> {
        [InputKind::Text, InputKind::Ids]
            .into_iter()
            .find(|kind| kind.name() == name)
    }
}

fn input_field(kind: InputKind, has_batch_dim: bool) -> Value {
    let ragged = kind == InputKind::Ids && has_batch_dim;
    json!({
        "name": kind.name(),
        "data_type": kind.data_type(),
        "dims": [kind.dim()],
        "allow_ragged_batch": ragged,
    })
}

fn option_field(input: &ClientInput, has_batch_dim: bool) -> Value {
    json!({
        "name": input.name,
        "data_type": input.data_type,
        "dims": input.dims,
        "optional": true,
        "allow_ragged_batch": has_batch_dim && input.dims.contains(&-1),
    })
}

fn output_field(kind: OutputKind, compatibility: ClientCompatibility) -> Value {
    let data_type = kind.data_type(compatibility.has_unsigned_counts());
    json!({ "name": kind.name(), "data_type": data_type, "dims": kind.dims() })
}

/// The declared inputs.
fn inputs(config: &Value) -> &[Value] {
    let inputs = config.get("input").and_then(Value::as_array);
    inputs.map_or(&[], Vec::as_slice)
}

fn check_inputs(
    config: &Value,
    auto_complete: AutoComplete,
    errors: &mut Vec<LoadError>,
) -> Option<InputKind> {
    let remedy = auto_complete.or_leave_out(
        "request options are request parameters, not inputs; write input [{ name: \"text_input\" \
         data_type: TYPE_STRING dims: [ 1 ] }] or input [{ name: \"input_ids\" data_type: TYPE_INT32 \
         dims: [ -1 ] allow_ragged_batch: true }]",
    );
    let (prompts, options): (Vec<_>, Vec<_>) = inputs(config)
        .iter()
        .partition(|input| InputKind::of_one(input).is_some());
    for input in options {
        ok_or_record(
            check_option_input(input, &remedy, must_be_ragged(config)),
            errors,
        );
    }
    let [input] = prompts[..] else {
        let problem = format!(
            "the model has {} inputs for a prompt, instead of 1",
            prompts.len()
        );
        errors.push(config_error(&problem, &remedy));
        return None;
    };
    let kind = InputKind::of_one(input)?;
    let checked = check_tensor(
        input,
        kind.data_type(),
        &[kind.dim()],
        &remedy,
        must_be_ragged(config),
    );
    ok_or_record(checked, errors);
    Some(kind)
}

/// Other types and shapes of the inputs of adapters: the weights have the model's type, and DoRA a fourth column.
const ADAPTER_VARIANTS: &[(&str, &str, &[i64])] = &[
    ("lora_weights", "TYPE_BF16", &[-1, -1]),
    ("lora_weights", "TYPE_FP32", &[-1, -1]),
    ("lora_config", "TYPE_INT32", &[-1, 4]),
    ("lora_config", "TYPE_INT32", &[-1, -1]),
];

/// Checks an input that carries a request option, as sent by clients of other backends.
fn check_option_input(input: &Value, remedy: &str, must_be_ragged: bool) -> Result<(), LoadError> {
    let name = field(input, "name");
    let Some(known) = client_input(name) else {
        return Err(config_error(
            &format!("unknown input '{name}'"),
            &format!("use only the inputs listed in docs/src/clients.md; {remedy}"),
        ));
    };
    let (data_type, dims) = match ADAPTER_VARIANTS.iter().find(|(own, data_type, dims)| {
        *own == name && field(input, "data_type") == *data_type && self::dims(input) == *dims
    }) {
        Some((_, data_type, dims)) => (*data_type, *dims),
        None => (known.data_type, known.dims),
    };
    let remedy = format!("write data_type: {data_type} dims: {dims:?}");
    check_tensor(input, data_type, dims, &remedy, must_be_ragged)
}

/// Whether inputs must be ragged. With the direct strategy, Triton holds a request with another input shape back until
/// all others have ended.
fn must_be_ragged(config: &Value) -> bool {
    let batches = unsigned(config.get("max_batch_size")).unwrap_or(0) > 0;
    let splits = config.get("dynamic_batching").is_some()
        || config.pointer("/sequence_batching/oldest").is_some();
    batches && !splits
}

/// Checks an input's data type and dimensions and, if its length varies, that it may be ragged. Otherwise Triton
/// batches only inputs of equal shape, and requests wait for each other.
fn check_tensor(
    input: &Value,
    data_type: &str,
    expected: &[i64],
    remedy: &str,
    must_be_ragged: bool,
) -> Result<(), LoadError> {
    let name = field(input, "name");
    if field(input, "data_type") != data_type || dims(input) != expected {
        let found = format!(
            "input '{name}' is {} {:?}",
            field(input, "data_type"),
            dims(input)
        );
        return Err(config_error(&found, remedy));
    }
    if must_be_ragged && expected.contains(&-1) && !is_true(input, "allow_ragged_batch") {
        return Err(config_error(
            &format!(
                "input '{name}' lacks allow_ragged_batch: true, without which Triton does not batch requests of different \
                 lengths"
            ),
            "add it",
        ));
    }
    Ok(())
}

fn check_outputs(
    config: &Value,
    input: Option<InputKind>,
    model: (Task, ClientCompatibility),
    auto_complete: AutoComplete,
    errors: &mut Vec<LoadError>,
) -> Vec<OutputKind> {
    let outputs = config
        .get("output")
        .and_then(Value::as_array)
        .map_or(&[][..], Vec::as_slice);
    if outputs.is_empty() {
        errors.push(config_error(
            "the model has no output",
            &auto_complete.or_leave_out(
                "write for example output [{ name: \"output_ids\" data_type: TYPE_INT32 dims: [ -1, -1 ] }]",
            ),
        ));
    }
    let check = |output| check_output(output, input, model);
    let kinds = outputs
        .iter()
        .filter_map(|output| ok_or_record(check(output), errors));
    kinds.collect()
}

fn check_output(
    output: &Value,
    input: Option<InputKind>,
    (task, compatibility): (Task, ClientCompatibility),
) -> Result<OutputKind, LoadError> {
    let name = field(output, "name");
    let kinds = || OutputKind::ALL.into_iter();
    let Some(kind) = kinds().find(|kind| kind.name() == name && kind.is_of(task)) else {
        if OutputKind::from_name(name).is_some() {
            let known: Vec<_> = kinds()
                .filter(|kind| kind.is_of(task))
                .map(OutputKind::name)
                .collect();
            return Err(config_error(
                &format!("models with task: {} have no output '{name}'", task.name()),
                &format!(
                    "remove it, or write another task; this one has {}",
                    known.join(", ")
                ),
            ));
        }
        let known: Vec<_> = kinds().map(OutputKind::name).collect();
        return Err(config_error(
            &format!("unknown output '{name}'"),
            &format!("the known outputs are {}", known.join(", ")),
        ));
    };
    // A config may declare [ 1 ] for an output with one value per sequence. Triton does not compare it with the
    // response, which has one value for each requested sequence in any case.
    let fits = dims(output) == kind.dims() || kind.dims() == [-1] && dims(output) == [1];
    let data_type = kind.data_type(compatibility.has_unsigned_counts());
    if field(output, "data_type") != data_type || !fits {
        let found = format!(
            "output '{name}' is {} {:?}",
            field(output, "data_type"),
            dims(output)
        );
        let dims: Vec<_> = kind.dims().iter().map(i64::to_string).collect();
        let remedy = format!("write data_type: {data_type} dims: [ {} ]", dims.join(", "));
        return Err(config_error(&found, &remedy));
    }
    if kind.is_text() && input == Some(InputKind::Ids) {
        return Err(config_error(
            &format!("the model has input_ids as its input, but {name} among its outputs"),
            &format!("remove {name}, or use text_input"),
        ));
    }
    Ok(kind)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A minimal config.pbtxt as Triton passes it to the backend.
    fn minimal() -> Value {
        json!({ "name": "m", "backend": "inflight", "max_batch_size": 0, "input": [], "output": [] })
    }

    fn completed() -> Value {
        ModelConfig::complete(&minimal(), true).expect("fields are missing")
    }

    #[test]
    fn completes_a_minimal_config() {
        let config = ModelConfig::parse(&completed(), AutoComplete::Enabled).expect("complete");
        assert_eq!(config.max_batch_size, DEFAULT_MAX_BATCH_SIZE);
        assert_eq!(config.input, InputKind::Text);
        assert!(config.decoupled);
        let max_sequence_idle_us = 3_600_000_000;
        let iterative = Scheduling::Iterative {
            max_sequence_idle_us,
            is_oldest: false,
        };
        assert_eq!((config.scheduling, config.num_warm_ups), (iterative, 0));
        assert_eq!(
            ModelConfig::complete(&completed(), true),
            None,
            "nothing is missing"
        );
    }

    #[test]
    fn the_tensors_of_adapters_are_declared_in_the_type_of_their_weights() {
        let parse = |inputs: &[(&str, &str, &[i64])]| {
            let mut config = completed();
            let declared = config["input"].as_array_mut().expect("a list");
            declared.extend(inputs.iter().map(|(name, data_type, dims)| {
                json!({ "name": name, "data_type": data_type, "dims": dims, "optional": true,
                    "allow_ragged_batch": true })
            }));
            ModelConfig::parse(&config, AutoComplete::Enabled)
                .map(|config| config.takes_adapters)
                .map_err(|error| error.to_string())
        };
        let config: (_, _, &[i64]) = ("lora_config", "TYPE_INT32", &[-1, 3]);
        for data_type in ["TYPE_FP16", "TYPE_BF16", "TYPE_FP32"] {
            let weights: (_, _, &[i64]) = ("lora_weights", data_type, &[-1, -1]);
            assert_eq!(parse(&[weights, config]), Ok(true), "{data_type}");
            assert_eq!(parse(&[weights]), Ok(false), "one alone");
            for columns in [4, -1] {
                let wider: (_, _, &[i64]) = ("lora_config", "TYPE_INT32", &[-1, columns]);
                assert_eq!(parse(&[weights, wider]), Ok(true));
            }
        }
        let error = parse(&[("lora_weights", "TYPE_FP64", &[-1, -1]), config]);
        let error = error.expect_err("no weights are of this type");
        assert!(error.contains("write data_type: TYPE_FP16"), "{error}");
        let error = parse(&[("lora_config", "TYPE_INT32", &[-1, 5])]);
        assert!(error.expect_err("five columns").contains("[-1, 3]"));
    }

    #[test]
    fn a_model_without_tokenizer_gets_input_ids_and_no_text_output() {
        let config = ModelConfig::complete(&minimal(), false).expect("fields are missing");
        assert_eq!(
            ModelConfig::parse(&config, AutoComplete::Enabled)
                .expect("complete")
                .input,
            InputKind::Ids
        );
        assert!(
            config["output"]
                .as_array()
                .expect("filled")
                .iter()
                .all(|o| o["name"] != "text_output")
        );
    }

    #[test]
    fn each_sample_of_the_warm_up_is_sent_at_least_once() {
        let mut config = completed();
        config["model_warmup"] = json!([
            { "name": "a", "batch_size": 2 },
            { "name": "b", "batch_size": 3, "count": 4 },
            { "name": "left out by Triton", "batch_size": 0, "count": 9 },
        ]);
        let config = ModelConfig::parse(&config, AutoComplete::Enabled).expect("complete");
        assert_eq!(config.num_warm_ups, 2 + 3 * 4);
    }

    #[test]
    fn completing_keeps_what_the_user_wrote() {
        let mut config = minimal();
        config["max_batch_size"] = json!(3);
        config["model_transaction_policy"] = json!({ "decoupled": false });
        config["input"] = json!([input_field(InputKind::Ids, true)]);
        let config = ModelConfig::complete(&config, true).expect("fields are missing");
        let parsed = ModelConfig::parse(&config, AutoComplete::Enabled).expect("complete");
        assert_eq!((parsed.max_batch_size, parsed.decoupled), (3, false));
        assert_eq!(parsed.input, InputKind::Ids);
    }

    #[test]
    fn per_sequence_outputs_may_be_declared_with_dims_1() {
        let kinds = OutputKind::ALL.into_iter();
        let kinds = kinds.filter(|kind| kind.is_of(Task::Generate));
        for (i, kind) in kinds.enumerate() {
            let mut config = completed();
            config["output"][i]["dims"] = json!([1]);
            let parsed = ModelConfig::parse(&config, AutoComplete::Enabled);
            assert_eq!(parsed.is_ok(), kind.dims().len() == 1, "{}", kind.name());
        }
    }

    /// A change to a good config, and words that the error must contain.
    type Case = (fn(&mut Value), &'static [&'static str]);

    #[test]
    fn rejects_unsupported_configs_with_a_remedy() {
        let cases: &[Case] = &[
            (
                |c| c["max_batch_size"] = json!(0),
                &["max_batch_size is 0", "64"],
            ),
            (
                |c| c["input"][0]["name"] = json!("prompt"),
                &["'prompt'", "text_input"],
            ),
            (
                |c| c["input"][0]["data_type"] = json!("TYPE_FP32"),
                &["TYPE_FP32", "TYPE_STRING"],
            ),
            (
                |c| c["input"][0]["dims"] = json!([-1]),
                &["[-1]", "dims: [ 1 ]"],
            ),
            (
                |c| {
                    c["input"] = json!([
                        input_field(InputKind::Text, true),
                        input_field(InputKind::Ids, true)
                    ])
                },
                &["2 inputs for a prompt", "request parameter"],
            ),
            (
                |c| {
                    c["input"] =
                        json!([{ "name": "stream", "data_type": "TYPE_BOOL", "dims": [1] }])
                },
                &["0 inputs for a prompt", "text_input"],
            ),
            (
                |c| {
                    let option =
                        json!({ "name": "stream", "data_type": "TYPE_INT32", "dims": [1] });
                    c["input"] = json!([input_field(InputKind::Text, true), option])
                },
                &["'stream' is TYPE_INT32", "data_type: TYPE_BOOL dims: [1]"],
            ),
            (
                |c| {
                    let option =
                        json!({ "name": "bad_words", "data_type": "TYPE_STRING", "dims": [-1] });
                    c["input"] = json!([input_field(InputKind::Text, true), option])
                },
                &["'bad_words' lacks allow_ragged_batch: true", "add it"],
            ),
            (
                |c| c["output"][0]["name"] = json!("txt"),
                &["'txt'", "text_output"],
            ),
            (
                |c| c["output"][1]["dims"] = json!([3]),
                &["output_ids", "dims: [ -1, -1 ]"],
            ),
            (
                |c| c["parameters"] = json!({ "x": { "string_value": "1" } }),
                &["'x'"],
            ),
        ];
        for (change, words) in cases {
            let mut config = completed();
            change(&mut config);
            let error = ModelConfig::parse(&config, AutoComplete::Enabled)
                .expect_err("must be rejected")
                .to_string();
            for word in *words {
                assert!(error.contains(word), "'{error}' does not contain '{word}'");
            }
        }
    }

    #[test]
    fn suggests_leaving_a_field_out_only_with_auto_complete() {
        for field in ["max_batch_size", "input", "output", "sequence_batching"] {
            let mut config = completed();
            config.as_object_mut().expect("an object").remove(field);
            let refusal = |auto_complete| {
                let refused = ModelConfig::parse(&config, auto_complete);
                refused.expect_err("must be rejected").to_string()
            };
            let enabled = refusal(AutoComplete::Enabled);
            assert!(enabled.contains("or leave it out"), "{enabled}");
            let disabled = refusal(AutoComplete::Disabled);
            assert!(!disabled.contains("or leave it out"), "{disabled}");
            assert!(disabled.contains("auto-complete is disabled"), "{disabled}");
        }
    }
}
