//! `sequence_batching` or `dynamic_batching`: defaults, checks and warnings for the settings of Triton's schedulers.

use std::ops::RangeInclusive;

use serde_json::{Value, json};

use crate::parameters::is_of_batch_strategy;
use crate::pbtxt::{
    AutoComplete, config_error, field, is_empty, is_true, optional_input, unsigned,
};
use inflight_base::LoadError;

/// Triton's idle limit includes the duration of a step, and a sequence that exceeds it is dropped without a response to
/// its client. Triton's default of one second is shorter than the step of a long context.
const MIN_IDLE_US: u64 = 60_000_000;
const DEFAULT_IDLE_US: u64 = 3600 * 1_000_000;

/// Triton's own default.
const TRITON_IDLE_US: u64 = 1_000_000;

/// Which of Triton's schedulers brings the requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scheduling {
    /// `sequence_batching` with iterative sequences: each Execute call is a step.
    Iterative {
        /// Triton drops a sequence after this long without a step.
        max_sequence_idle_us: u64,
        /// The `oldest` strategy, whose batcher keeps the slot of a request that is cancelled in its queue.
        is_oldest: bool,
    },
    /// `dynamic_batching`: requests wait in Triton's queue until the engine could start them.
    Queued,
    /// `sequence_batching` without iterative sequences: a sequence is a conversation, and each request is a turn.
    Conversations {
        /// Sequences that Triton has slots for.
        max_sequences: u32,
        /// Triton ends a sequence after this long without a request.
        max_sequence_idle_us: u64,
    },
}

/// The default scheduling of models that Triton can batch: iterative sequences with the strategy `direct`.
pub(super) fn default_scheduling() -> Value {
    json!({
        "iterative_sequence": true,
        "max_sequence_idle_microseconds": DEFAULT_IDLE_US,
        "direct": {},
    })
}

/// Number of candidate sequences of `oldest`.
///
/// # Errors
/// The number is missing.
pub(super) fn num_candidates(config: &Value) -> Result<u64, LoadError> {
    let path = "/sequence_batching/oldest/max_candidate_sequences";
    let slots = unsigned(config.pointer(path)).unwrap_or(0);
    match slots {
        0 => Err(config_error(
            "max_batch_size is 0, which gives Triton's direct strategy a single slot",
            "leave sequence_batching out, or write max_batch_size: 64",
        )),
        slots => Ok(slots),
    }
}

/// A warning about valid settings that slow down every token, including the delay.
///
/// Triton forms a new batch for every step, so a delay of the batch delays every token. Measured on
/// server 2.51: `direct` waits only if both of its limits are set, `oldest` whenever a delay is set.
pub fn delays(config: &Value) -> Option<String> {
    if let Some(batching) = config.get("dynamic_batching") {
        return queue_delays(batching);
    }
    let limit = |path: &str| unsigned(config.pointer(path)).unwrap_or(0);
    let direct = limit("/sequence_batching/direct/max_queue_delay_microseconds");
    let utilization = config
        .pointer("/sequence_batching/direct/minimum_slot_utilization")
        .and_then(Value::as_f64)
        .unwrap_or(0.0);
    let oldest = limit("/sequence_batching/oldest/max_queue_delay_microseconds");
    let is_oldest = config.pointer("/sequence_batching/oldest").is_some();
    if let Some(batching) = conversations(config) {
        return interruptions(batching);
    }
    if !is_oldest && let Some(name) = optional_input(config) {
        return Some(format!(
            "config.pbtxt: input '{name}' is optional; with the direct strategy, Triton holds a request \
             back until all requests with different inputs have ended; write dynamic_batching {{ }} in place of \
             sequence_batching"
        ));
    }
    if direct > 0 && utilization > 0.0 {
        Some(format!(
            "config.pbtxt: sequence_batching {{ direct {{ minimum_slot_utilization: {utilization} \
             max_queue_delay_microseconds: {direct} }} }} delays every step, and so every token, by up \
             to {direct} us while fewer slots are in use; leave both out: requests join a running batch \
             without them"
        ))
    } else if oldest > 0 {
        Some(format!(
            "config.pbtxt: sequence_batching {{ oldest {{ max_queue_delay_microseconds: {oldest} }} }} \
             delays every step, and so every token, by up to {oldest} us while fewer sequences are in \
             flight than the preferred batch size; leave it out: requests join a running batch \
             without it"
        ))
    } else {
        None
    }
}

/// A warning about settings of `dynamic_batching` that hold requests or responses back.
fn queue_delays(batching: &Value) -> Option<String> {
    let delay = unsigned(batching.get("max_queue_delay_microseconds")).unwrap_or(0);
    if is_true(batching, "preserve_ordering") {
        return Some(
            "config.pbtxt: dynamic_batching { preserve_ordering: true } holds back every response until all \
             requests before it have ended, and so every stream; leave it out unless clients need it"
                .to_owned(),
        );
    }
    (delay > 0).then(|| {
        format!(
            "config.pbtxt: dynamic_batching {{ max_queue_delay_microseconds: {delay} }} delays requests by up \
             to {delay} us although one could start; leave it out: requests join a running batch without it"
        )
    })
}

/// `sequence_batching` of conversations: it is not iterative.
fn conversations(config: &Value) -> Option<&Value> {
    let batching = config.get("sequence_batching")?;
    (!is_true(batching, "iterative_sequence")).then_some(batching)
}

/// A warning about settings that end conversations early, or hold their answers back.
fn interruptions(batching: &Value) -> Option<String> {
    let idle = idle_us(batching);
    if idle < MIN_IDLE_US {
        return Some(format!(
            "config.pbtxt: sequence_batching {{ max_sequence_idle_microseconds: {idle} }} ends a conversation {idle} us \
             after the beginning of a turn, unless the next has arrived; write {DEFAULT_IDLE_US}, unless clients need \
             no longer"
        ));
    }
    batching
        .pointer("/oldest/preserve_ordering")
        .and_then(Value::as_bool)
        .unwrap_or(false)
        .then(|| {
            "config.pbtxt: sequence_batching { oldest { preserve_ordering: true } } holds back every response until \
             all requests before it have ended, and so every stream; leave it out unless clients need it"
                .to_owned()
        })
}

/// How long Triton keeps a sequence without a request.
fn idle_us(batching: &Value) -> u64 {
    match unsigned(batching.get("max_sequence_idle_microseconds")) {
        None | Some(0) => TRITON_IDLE_US,
        Some(idle) => idle,
    }
}

/// The input tensors that Triton adds to each request of a sequence: `START`, `END`, `READY`, `CORRID`.
pub(super) fn controls(config: &Value) -> Vec<String> {
    let controls = config
        .pointer("/sequence_batching/control_input")
        .and_then(Value::as_array);
    let names = controls
        .into_iter()
        .flatten()
        .map(|input| field(input, "name"));
    names.map(str::to_owned).collect()
}

/// Checks the scheduling.
pub(super) fn check_scheduling(
    config: &Value,
    auto_complete: AutoComplete,
    allow_iterative_oldest: bool,
) -> Result<Scheduling, LoadError> {
    if config.get("dynamic_batching").is_some() {
        return check_queue(config);
    }
    if let Some(key) = batch_strategy_parameter(config) {
        return Err(config_error(
            &format!("parameter '{key}' is for a batch strategy, and sequence_batching has none"),
            "leave it out, or write dynamic_batching { } and max_batch_size",
        ));
    }
    let remedy = &auto_complete.or_leave_out(
        "write sequence_batching { iterative_sequence: true \
         max_sequence_idle_microseconds: 3600000000 }",
    );
    let Some(batching) = config.get("sequence_batching") else {
        return Err(config_error("sequence_batching is missing", remedy));
    };
    if !is_empty(batching.get("state")) {
        return Err(config_error(
            "sequence_batching has state",
            "leave it out: the state of a sequence is its tokens and their KV cache blocks, which the backend keeps",
        ));
    }
    if let Some(batching) = conversations(config) {
        return check_conversations(config, batching);
    }
    if batching
        .pointer("/oldest/preserve_ordering")
        .and_then(Value::as_bool)
        .unwrap_or(false)
    {
        return Err(config_error(
            "sequence_batching { oldest { preserve_ordering: true } } would hold back every request that is rescheduled",
            "leave preserve_ordering out",
        ));
    }
    let is_oldest = batching.get("oldest").is_some();
    if is_oldest && !allow_iterative_oldest {
        return Err(config_error(
            "sequence_batching { iterative_sequence: true oldest { } } loses slots when clients leave, and on servers since \
             25.10 (2.62) Triton's batcher then crashes or hangs",
            "write direct { } in place of oldest, or dynamic_batching { } in place of sequence_batching if inputs are \
             optional; the parameter allow_iterative_oldest: true accepts the risk",
        ));
    }
    let idle = unsigned(batching.get("max_sequence_idle_microseconds")).unwrap_or(0);
    if idle < MIN_IDLE_US {
        return Err(config_error(
            &format!(
                "max_sequence_idle_microseconds is {idle}: it includes the duration of a step, and Triton \
                 drops a sequence that exceeds it"
            ),
            &format!("write {MIN_IDLE_US} or more, preferably {DEFAULT_IDLE_US}"),
        ));
    }
    Ok(Scheduling::Iterative {
        max_sequence_idle_us: idle,
        is_oldest,
    })
}

/// Whether config.pbtxt says which scheduler there is.
pub(super) fn has_scheduler(config: &Value) -> bool {
    let schedulers = ["sequence_batching", "dynamic_batching"];
    schedulers.iter().any(|key| config.get(*key).is_some())
}

/// Servers of these versions (25.09 to 26.07) keep a place for every response of a request, and send none of a stream
/// that has more or fewer.
const LOSES_ORDERED_STREAMS: RangeInclusive<(u32, u32)> = (2, 61)..=(2, 71);

/// Refuses what a server of this version, major and minor, does not survive.
///
/// # Errors
/// What to write instead.
pub fn check_server(config: &Value, version: (u32, u32)) -> Result<(), LoadError> {
    let is_decoupled = config
        .pointer("/model_transaction_policy/decoupled")
        .and_then(Value::as_bool)
        .unwrap_or(false);
    let paths = ["/dynamic_batching", "/sequence_batching/oldest"];
    let mut batchers = paths.iter().filter_map(|path| config.pointer(path));
    let keeps_order = batchers.any(|it| is_true(it, "preserve_ordering"));
    match is_decoupled && keeps_order && LOSES_ORDERED_STREAMS.contains(&version) {
        false => Ok(()),
        true => Err(config_error(
            &format!(
                "preserve_ordering: true with decoupled: true: a stream never ends on server {}.{}",
                version.0, version.1
            ),
            "leave preserve_ordering out, write model_transaction_policy { decoupled: false }, or take server 2.72 (26.08)",
        )),
    }
}

/// A parameter for a batch strategy.
fn batch_strategy_parameter(config: &Value) -> Option<&str> {
    let parameters = config.get("parameters")?.as_object()?;
    let mut keys = parameters.keys().map(String::as_str);
    keys.find(|key| is_of_batch_strategy(key))
}

/// Checks a model with `dynamic_batching`. Triton has checked its fields.
fn check_queue(config: &Value) -> Result<Scheduling, LoadError> {
    if unsigned(config.get("max_batch_size")).unwrap_or(0) == 0 {
        return Err(config_error(
            "max_batch_size is 0, and dynamic_batching forms batches",
            "write max_batch_size: 64, or leave dynamic_batching out",
        ));
    }
    Ok(Scheduling::Queued)
}

/// Checks a model whose sequences are conversations. Triton has checked its fields.
fn check_conversations(config: &Value, batching: &Value) -> Result<Scheduling, LoadError> {
    let max_batch_size = unsigned(config.get("max_batch_size")).unwrap_or(0);
    if max_batch_size == 0 {
        return Err(config_error(
            "max_batch_size is 0, and a sequence_batching without iterative_sequence: true needs slots for conversations",
            "write max_batch_size: 64, or iterative_sequence: true",
        ));
    }
    let candidates = unsigned(batching.pointer("/oldest/max_candidate_sequences")).unwrap_or(0);
    let max_sequences = match candidates {
        0 => max_batch_size,
        candidates => candidates,
    };
    Ok(Scheduling::Conversations {
        max_sequences: u32::try_from(max_sequences).unwrap_or(u32::MAX),
        max_sequence_idle_us: idle_us(batching),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error_of(config: &Value) -> String {
        let checked = check_scheduling(config, AutoComplete::Enabled, false);
        checked.expect_err("must be rejected").to_string()
    }

    fn with(field: &str, value: Value) -> Value {
        let mut config = json!({ "sequence_batching": default_scheduling() });
        config["sequence_batching"][field] = value;
        config
    }

    #[test]
    fn default_scheduling_is_accepted_without_warnings() {
        let config = json!({ "sequence_batching": default_scheduling() });
        let scheduling =
            check_scheduling(&config, AutoComplete::Disabled, false).expect("accepted");
        let max_sequence_idle_us = DEFAULT_IDLE_US;
        assert_eq!(
            (scheduling, delays(&config)),
            (
                Scheduling::Iterative {
                    max_sequence_idle_us,
                    is_oldest: false,
                },
                None
            )
        );
    }

    #[test]
    fn dynamic_batching_needs_a_batch_dimension() {
        let config =
            |max_batch_size| json!({ "dynamic_batching": {}, "max_batch_size": max_batch_size });
        let checked = check_scheduling(&config(1), AutoComplete::Disabled, false);
        assert_eq!(checked.expect("accepted"), Scheduling::Queued);
        let error = error_of(&config(0));
        assert!(error.contains("max_batch_size: 64"), "{error}");
    }

    #[test]
    fn sequences_have_no_batch_strategy() {
        let mut config = json!({ "sequence_batching": default_scheduling() });
        config["parameters"] = json!({ "TRITON_BATCH_STRATEGY_PATH": { "string_value": "x" } });
        let error = error_of(&config);
        assert!(
            error.contains("'TRITON_BATCH_STRATEGY_PATH'") && error.contains("dynamic_batching {"),
            "{error}"
        );
        let queued = json!({
            "dynamic_batching": {}, "max_batch_size": 1, "parameters": config["parameters"],
        });
        assert!(check_scheduling(&queued, AutoComplete::Disabled, false).is_ok());
    }

    #[test]
    fn warns_of_delays_in_the_queue() {
        for (batching, words) in [
            (
                json!({ "max_queue_delay_microseconds": "70" }),
                Some("up to 70 us"),
            ),
            (
                json!({ "preserve_ordering": true }),
                Some("preserve_ordering"),
            ),
            (
                json!({ "priority_levels": 3, "max_queue_delay_microseconds": "0" }),
                None,
            ),
        ] {
            let config = json!({ "dynamic_batching": batching, "input": [{ "name": "n", "optional": true }] });
            let warning = delays(&config);
            assert_eq!(warning.is_some(), words.is_some(), "{warning:?}");
            assert!(
                warning
                    .unwrap_or_default()
                    .contains(words.unwrap_or_default())
            );
        }
    }

    #[test]
    fn rejects_scheduling_that_drops_or_delays_sequences() {
        for (config, words) in [
            (
                json!({}),
                ["sequence_batching is missing", "iterative_sequence: true"],
            ),
            (
                with("iterative_sequence", json!(false)),
                ["max_batch_size is 0", "iterative_sequence: true"],
            ),
            (
                with("max_sequence_idle_microseconds", json!("1000000")),
                ["is 1000000", "3600000000"],
            ),
            (
                with("state", json!([{ "input_name": "KV" }])),
                ["has state", "KV cache blocks, which the backend keeps"],
            ),
            (
                with("oldest", json!({ "preserve_ordering": true })),
                ["preserve_ordering", "out"],
            ),
            (
                with("oldest", json!({ "max_candidate_sequences": 8 })),
                ["write direct { }", "allow_iterative_oldest: true"],
            ),
        ] {
            let error = error_of(&config);
            for word in words {
                assert!(error.contains(word), "'{error}' does not contain '{word}'");
            }
        }
    }

    #[test]
    fn sequences_that_are_not_iterative_are_conversations() {
        let conversations = |max_sequences, max_sequence_idle_us| Scheduling::Conversations {
            max_sequences,
            max_sequence_idle_us,
        };
        let controls = json!([{ "name": "START" }, { "name": "CORRID" }]);
        for (batching, expected, words) in [
            (json!({}), conversations(8, 1_000_000), Some("1000000 us")),
            (
                json!({ "direct": {}, "max_sequence_idle_microseconds": "60000000" }),
                conversations(8, 60_000_000),
                None,
            ),
            (
                json!({
                    "oldest": { "max_candidate_sequences": 100, "preserve_ordering": true },
                    "max_sequence_idle_microseconds": "60000000",
                    "control_input": controls,
                }),
                conversations(100, 60_000_000),
                Some("preserve_ordering: true"),
            ),
        ] {
            let config = json!({ "max_batch_size": 8, "sequence_batching": batching });
            let checked =
                check_scheduling(&config, AutoComplete::Disabled, false).expect("accepted");
            assert_eq!(checked, expected);
            let warning = delays(&config);
            assert_eq!(warning.is_some(), words.is_some(), "{warning:?}");
            let warning = warning.unwrap_or_default();
            assert!(warning.contains(words.unwrap_or_default()), "{warning}");
        }
        let config = json!({ "sequence_batching": { "control_input": controls } });
        assert_eq!(super::controls(&config), ["START", "CORRID"]);
        assert!(super::controls(&json!({})).is_empty());
    }

    #[test]
    fn warns_of_delays_to_every_token() {
        let both =
            json!({ "minimum_slot_utilization": 0.5, "max_queue_delay_microseconds": "3000" });
        let direct = delays(&with("direct", both)).expect("a delay");
        assert!(direct.contains("minimum_slot_utilization: 0.5"), "{direct}");
        assert!(direct.contains("every token, by up to 3000 us"), "{direct}");
        let oldest = with("oldest", json!({ "max_queue_delay_microseconds": 70 }));
        let oldest = delays(&oldest).expect("a delay");
        assert!(
            oldest.contains("oldest { max_queue_delay_microseconds: 70"),
            "{oldest}"
        );
    }

    #[test]
    fn warns_of_optional_inputs_with_the_direct_strategy() {
        let mut config = with("direct", json!({}));
        config["input"] = json!([{ "name": "text_input" }, { "name": "stream", "optional": true }]);
        let warning = delays(&config).expect("a delay");
        assert!(
            warning.contains("'stream'") && warning.contains("dynamic_batching { }"),
            "{warning}"
        );
        config["sequence_batching"]["oldest"] = json!({ "max_candidate_sequences": 64 });
        assert_eq!(delays(&config), None);
    }

    #[test]
    fn a_risk_that_is_accepted_by_name_is_taken() {
        let config = with("oldest", json!({ "max_candidate_sequences": 8 }));
        let checked = check_scheduling(&config, AutoComplete::Disabled, true);
        assert!(matches!(
            checked,
            Ok(Scheduling::Iterative {
                is_oldest: true,
                ..
            })
        ));
    }

    #[test]
    fn streams_in_order_are_refused_where_servers_lose_them() {
        let ordered = json!({ "preserve_ordering": true });
        for (batcher, decoupled) in [
            (json!({ "dynamic_batching": ordered }), true),
            (json!({ "sequence_batching": { "oldest": ordered } }), true),
            (json!({ "dynamic_batching": ordered }), false),
            (json!({ "dynamic_batching": {} }), true),
        ] {
            let mut config = batcher.clone();
            config["model_transaction_policy"] = json!({ "decoupled": decoupled });
            let is_lost = decoupled && batcher != json!({ "dynamic_batching": {} });
            for (version, loses) in [
                ((2, 51), false),
                ((2, 60), false),
                ((2, 61), true),
                ((2, 71), true),
                ((2, 72), false),
                ((3, 0), false),
            ] {
                let checked = check_server(&config, version);
                assert_eq!(checked.is_err(), is_lost && loses, "{config} {version:?}");
            }
        }
    }

    #[test]
    fn does_not_warn_of_limits_that_triton_ignores() {
        for direct in [
            json!({ "max_queue_delay_microseconds": "3000" }),
            json!({ "minimum_slot_utilization": 1.0 }),
        ] {
            assert_eq!(delays(&with("direct", direct)), None);
        }
    }
}
