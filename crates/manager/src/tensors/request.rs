//! Reading a request's tensors.

use std::num::NonZeroU32;
use std::sync::Arc;

use super::inputs::{Draft, INPUTS, UNSUPPORTED};
use super::model::{TensorModel, TensorRequest};
use crate::Submission;
use inflight_base::{RequestError, Tokens, nearest_name};
use inflight_engine::{DraftOptions, NewRequest};
use inflight_sampling::{BeamSearch, StopRule, TopPDecay};

/// A request that has been read, and how its responses are written.
pub(super) struct ReadRequest {
    pub(super) submission: Submission,
    pub(super) pad_id: i32,
    pub(super) beam_width: usize,
}

/// Reads a request.
///
/// # Errors
/// A tensor is unknown, missing or invalid.
pub(super) fn read(
    request: &TensorRequest,
    model: &TensorModel,
) -> Result<ReadRequest, RequestError> {
    let invalid = |text: String| RequestError::Invalid(text);
    let mut draft = Draft::new(model);
    for (name, tensor) in &request.tensors {
        let Some((_, set)) = INPUTS.iter().find(|(known, _)| known == name) else {
            return Err(invalid(unknown(name)));
        };
        let max_bytes = model.max_seq_len.index().saturating_mul(size_of::<i32>());
        let is_list = ["input_ids", "draft_input_ids"].contains(&name.as_str());
        if is_list && tensor.bytes.len() > max_bytes {
            return Err(invalid(format!(
                "tensor '{name}' is longer than max_seq_len = {}",
                model.max_seq_len
            )));
        }
        set(&mut draft, tensor, model)
            .map_err(|reason| invalid(format!("tensor '{name}' {reason}")))?;
    }
    let Some(max_new_tokens) = draft.max_new_tokens else {
        return Err(invalid("tensor 'request_output_len' is missing".to_owned()));
    };
    if let Some(length) = draft.input_length {
        if length > draft.prompt.len() {
            return Err(invalid(format!(
                "tensor 'input_lengths' is {length}, and 'input_ids' has {} token ids",
                draft.prompt.len()
            )));
        }
        draft.prompt.truncate(length);
    }
    draft.settle_sampling(request.tensors.contains_key("temperature"));
    draft.settle_beams(request.is_streaming).map_err(invalid)?;
    let end_id = draft.sampling.end_ids.first().map_or(0, |id| *id as i32);
    draft.draft_tokens.truncate(max_new_tokens as usize);
    Ok(ReadRequest {
        pad_id: draft.pad_id.unwrap_or(end_id),
        beam_width: draft.beam_width as usize,
        submission: Submission {
            request: NewRequest {
                client_id: request.client_id,
                stop: StopRule {
                    max_new_tokens: Tokens(max_new_tokens),
                    stop_words: draft.stop_words.into(),
                },
                outputs: draft.outputs,
                sampling: Arc::new(draft.sampling),
                drafts: DraftOptions {
                    max_draft_tokens: None,
                    expected: draft.draft_tokens.into(),
                },
                ..NewRequest::new(request.id, draft.prompt, Tokens(max_new_tokens))
            },
            is_streaming: request.is_streaming,
        },
    })
}

impl Draft {
    /// The sampling options that depend on several tensors.
    fn settle_sampling(&mut self, has_temperature: bool) {
        let sampling = &mut self.sampling;
        // Without these options a request is greedy; with one of them it is sampled.
        let is_truncated = sampling.top_k > 0
            || sampling.top_p < 1.0
            || sampling.min_p > 0.0
            || sampling.typical_p < 1.0;
        if is_truncated && !has_temperature {
            sampling.temperature = 1.0;
        }
        if sampling.top_p == 0.0 {
            // As in TensorRT-LLM: no limit beside a top-k, else the most likely token.
            sampling.top_k = sampling.top_k.max(1);
            sampling.top_p = 1.0;
        }
        if self.top_p_decay.is_some() || self.top_p_min.is_some() {
            sampling.top_p_decay = Some(TopPDecay {
                factor: self.top_p_decay.unwrap_or(1.0),
                min: self.top_p_min.unwrap_or(TopPDecay::DEFAULT_MIN),
                reset_ids: std::mem::take(&mut self.top_p_reset_ids),
            });
        }
    }

    /// The beam search, if there is one.
    fn settle_beams(&mut self, is_streaming: bool) -> Result<(), String> {
        let width = self.beam_width;
        let num_returned = self.num_returned.unwrap_or(width);
        if num_returned > width {
            return Err(format!(
                "tensor 'num_return_sequences' is {num_returned}, and must be at most beam_width = {width}; \
                 for several samples, send a request for each, with a seed of its own"
            ));
        }
        if width > 1 {
            self.sampling.beam_search = Some(BeamSearch {
                width,
                num_returned,
                length_penalty: self.length_penalty,
                early_stopping: self.early_stopping,
                diversity_rate: self.diversity_rate,
            });
            // Hypotheses carry their own.
            self.outputs.log_probs = None;
            if is_streaming {
                self.outputs.beams = Some(NonZeroU32::MIN);
            }
        }
        Ok(())
    }
}

/// The error for a tensor of an unknown name.
fn unknown(name: &str) -> String {
    if let Some((_, reason)) = UNSUPPORTED.iter().find(|(known, _)| *known == name) {
        return format!("tensor '{name}' {reason}");
    }
    let names = || INPUTS.iter().map(|(name, _)| *name);
    let hint = nearest_name(name, names()).map_or_else(
        || format!("there are {}", names().collect::<Vec<_>>().join(", ")),
        |nearest| format!("did you mean '{nearest}'?"),
    );
    format!("unknown tensor '{name}'; {hint}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensors::tensor::{Element, HostTensor, HostTensors};
    use inflight_base::SequenceId;
    use inflight_config::client_inputs::TENSORRT_LLM;
    use inflight_sampling::EarlyStopping;

    fn model() -> TensorModel {
        TensorModel {
            vocab_size: 100,
            max_seq_len: Tokens(32),
            end_ids: vec![2],
        }
    }

    fn row<T: Element>(elements: &[T]) -> HostTensor {
        HostTensor::of(&[1, elements.len()], elements.iter().copied())
    }

    /// The words 11 12 and 13.
    fn two_words() -> HostTensor {
        HostTensor::of(&[1, 2, 4], [11, 12, 13, 0, 2, 3, -1, -1])
    }

    fn read_with(tensors: &[(&str, HostTensor)]) -> Result<NewRequest, String> {
        let mut all = HostTensors::from([
            ("input_ids".to_owned(), row(&[5, 6, 7])),
            ("request_output_len".to_owned(), row(&[9])),
        ]);
        let own = tensors.iter().cloned();
        all.extend(own.map(|(name, tensor)| (name.to_owned(), tensor)));
        let request = TensorRequest {
            id: SequenceId(1),
            client_id: None,
            is_streaming: true,
            tensors: all,
        };
        let read = read(&request, &model()).map_err(|error| error.to_string());
        read.map(|read| read.submission.request)
    }

    /// Every tensor with what it sets. Tensors of beam search are given with two beams, tensors of nucleus sampling
    /// with a nucleus.
    #[test]
    fn every_tensor_sets_its_field() {
        let words = vec![vec![11, 12], vec![13]];
        type Check<'a> = Box<dyn Fn(&NewRequest) -> bool + 'a>;
        let cases: Vec<(&str, HostTensor, Check<'_>)> = vec![
            (
                "input_ids",
                row(&[8, 9]),
                Box::new(|it| it.prompt[..] == [8, 9]),
            ),
            (
                "input_lengths",
                row(&[2]),
                Box::new(|it| it.prompt[..] == [5, 6]),
            ),
            (
                "request_output_len",
                row(&[4]),
                Box::new(|it| it.stop.max_new_tokens.0 == 4),
            ),
            (
                "stop_words_list",
                two_words(),
                Box::new(|it| it.stop.stop_words[..] == words),
            ),
            (
                "bad_words_list",
                two_words(),
                Box::new(|it| it.sampling.bad_words[..] == words),
            ),
            (
                "draft_input_ids",
                row(&[1, 2]),
                Box::new(|it| it.drafts.expected[..] == [1, 2]),
            ),
            (
                "end_id",
                row(&[3]),
                Box::new(|it| it.sampling.end_ids == [3]),
            ),
            (
                "beam_width",
                row(&[3]),
                Box::new(|it| it.sampling.beam_width() == 3),
            ),
            (
                "num_return_sequences",
                row(&[1]),
                Box::new(|it| {
                    it.sampling
                        .beam_search
                        .is_some_and(|it| it.num_returned == 1)
                }),
            ),
            (
                "temperature",
                row(&[0.5f32]),
                Box::new(|it| it.sampling.temperature == 0.5),
            ),
            (
                "runtime_top_k",
                row(&[7]),
                Box::new(|it| it.sampling.top_k == 7),
            ),
            (
                "runtime_top_p",
                row(&[0.5f32]),
                Box::new(|it| it.sampling.top_p == 0.5),
            ),
            (
                "runtime_top_p_min",
                row(&[0.25f32]),
                Box::new(|it| {
                    it.sampling
                        .top_p_decay
                        .as_ref()
                        .is_some_and(|it| it.min == 0.25)
                }),
            ),
            (
                "runtime_top_p_decay",
                row(&[0.75f32]),
                Box::new(|it| {
                    it.sampling
                        .top_p_decay
                        .as_ref()
                        .is_some_and(|it| it.factor == 0.75)
                }),
            ),
            (
                "runtime_top_p_reset_ids",
                row(&[4]),
                Box::new(|it| {
                    it.sampling
                        .top_p_decay
                        .as_ref()
                        .is_some_and(|it| it.reset_ids == [4])
                }),
            ),
            (
                "min_p",
                row(&[0.25f32]),
                Box::new(|it| it.sampling.min_p == 0.25),
            ),
            (
                "typical_p",
                row(&[0.5f32]),
                Box::new(|it| it.sampling.typical_p == 0.5),
            ),
            ("seed", row(&[7u64]), Box::new(|it| it.sampling.seed == 7)),
            (
                "random_seed",
                row(&[7u64]),
                Box::new(|it| it.sampling.seed == 7),
            ),
            (
                "min_tokens",
                row(&[3]),
                Box::new(|it| it.sampling.min_tokens == 3),
            ),
            (
                "min_length",
                row(&[3]),
                Box::new(|it| it.sampling.min_tokens == 3),
            ),
            (
                "repetition_penalty",
                row(&[2f32]),
                Box::new(|it| it.sampling.repetition_penalty == 2.0),
            ),
            (
                "presence_penalty",
                row(&[2f32]),
                Box::new(|it| it.sampling.presence_penalty == 2.0),
            ),
            (
                "frequency_penalty",
                row(&[2f32]),
                Box::new(|it| it.sampling.frequency_penalty == 2.0),
            ),
            (
                "prompt_ignore_length",
                row(&[2]),
                Box::new(|it| it.sampling.prompt_ignore_length == 2),
            ),
            (
                "no_repeat_ngram_size",
                row(&[2]),
                Box::new(|it| it.sampling.no_repeat_ngram_size == 2),
            ),
            (
                "len_penalty",
                row(&[2f32]),
                Box::new(|it| {
                    it.sampling
                        .beam_search
                        .is_some_and(|it| it.length_penalty == 2.0)
                }),
            ),
            (
                "early_stopping",
                row(&[true]),
                Box::new(|it| {
                    it.sampling
                        .beam_search
                        .is_some_and(|it| it.early_stopping == EarlyStopping::Always)
                }),
            ),
            (
                "early_stopping",
                row(&[2]),
                Box::new(|it| {
                    it.sampling
                        .beam_search
                        .is_some_and(|it| it.early_stopping == EarlyStopping::Never)
                }),
            ),
            (
                "beam_search_diversity_rate",
                row(&[2f32]),
                Box::new(|it| {
                    it.sampling
                        .beam_search
                        .is_some_and(|it| it.diversity_rate == 2.0)
                }),
            ),
            (
                "embedding_bias",
                HostTensor::of(
                    &[100],
                    (0..100).map(|n| if n == 3 { f32::NEG_INFINITY } else { 0.0 }),
                ),
                Box::new(|it| it.sampling.logit_bias[..] == [(3, f32::NEG_INFINITY)]),
            ),
            (
                "return_log_probs",
                row(&[true]),
                Box::new(|it| it.outputs.log_probs == Some(0)),
            ),
            (
                "return_context_logits",
                row(&[true]),
                Box::new(|it| it.outputs.context_logits),
            ),
            (
                "return_generation_logits",
                row(&[true]),
                Box::new(|it| it.outputs.generation_logits),
            ),
            (
                "return_perf_metrics",
                row(&[true]),
                Box::new(|it| it.outputs.kv_blocks && it.outputs.drafts),
            ),
        ];
        for (name, tensor, is_set) in &cases {
            let mut tensors = vec![(*name, tensor.clone())];
            match *name {
                "num_return_sequences"
                | "len_penalty"
                | "early_stopping"
                | "beam_search_diversity_rate" => {
                    tensors.push(("beam_width", row(&[2])));
                }
                "runtime_top_p_reset_ids" => tensors.push(("runtime_top_p_min", row(&[0.5f32]))),
                _ => {}
            }
            let with = read_with(&tensors).expect(name);
            assert!(is_set(&with), "{name}");
            let without = read_with(&tensors[1..]).expect("the others");
            assert!(!is_set(&without), "{name} is set without the tensor");
        }
        for (name, _) in INPUTS {
            let has_case = cases.iter().any(|(other, ..)| other == name);
            // The padding is seen in the responses.
            assert!(has_case || *name == "pad_id", "no case for {name}");
        }
    }

    #[test]
    fn every_tensor_of_tensorrt_llm_is_read_or_refused_with_a_reason() {
        for input in TENSORRT_LLM {
            let is_read = INPUTS.iter().any(|(name, _)| *name == input.name);
            let is_refused = UNSUPPORTED.iter().any(|(name, _)| *name == input.name);
            assert!(is_read != is_refused, "{}", input.name);
        }
        let error = read_with(&[("lora_task_id", row(&[1u64]))]).expect_err("an adapter");
        assert!(
            error.contains("'lora_task_id' is not supported: merge"),
            "{error}"
        );
    }

    #[test]
    fn options_that_depend_on_each_other_are_those_of_tensorrt_llm() {
        let sampling = |tensors: &[(&str, HostTensor)]| {
            let request = read_with(tensors).expect("good tensors");
            (
                request.sampling.temperature,
                request.sampling.top_k,
                request.sampling.top_p,
            )
        };
        assert_eq!(sampling(&[]), (0.0, 0, 1.0));
        assert_eq!(sampling(&[("runtime_top_k", row(&[-1]))]), (0.0, 0, 1.0));
        assert_eq!(sampling(&[("runtime_top_k", row(&[5]))]), (1.0, 5, 1.0));
        // A top-p of 0 alone is the most likely token, whatever the temperature; beside a top-k it is no limit.
        let none = ("runtime_top_p", row(&[0f32]));
        let hot = ("temperature", row(&[2f32]));
        assert_eq!(sampling(&[none.clone(), hot.clone()]), (2.0, 1, 1.0));
        assert_eq!(
            sampling(&[none, hot, ("runtime_top_k", row(&[5]))]),
            (2.0, 5, 1.0)
        );
        // A stream of beams has the current ones after every step.
        let beams = read_with(&[
            ("beam_width", row(&[2])),
            ("return_log_probs", row(&[true])),
        ]);
        let outputs = beams.expect("good tensors").outputs;
        assert_eq!(
            (outputs.beams, outputs.log_probs),
            (NonZeroU32::new(1), None)
        );
    }

    #[test]
    fn invalid_tensors_are_refused_with_what_they_must_be() {
        let long = 1 + model().max_seq_len.index();
        for (name, tensor, words) in [
            (
                "input_lengths",
                row(&[4]),
                "is 4, and 'input_ids' has 3 token ids",
            ),
            ("input_lengths", row(&[0]), "is 0, and must be at least 1"),
            (
                "stop_words_list",
                row(&[1, -1]),
                "has the shape [1, 2], and must have [1, 2, n]",
            ),
            (
                "stop_words_list",
                HostTensor::of(&[2, 2, 2], [1; 8]),
                "must have [1, 2, n]",
            ),
            (
                "stop_words_list",
                HostTensor::of(&[1, 2, 1], [1, 2]),
                "of at most 64 words",
            ),
            (
                "bad_words_list",
                HostTensor::of(&[2, 1], [100, 1]),
                "has 100, which is not a token id",
            ),
            (
                "draft_input_ids",
                row(&vec![1; long]),
                "is longer than max_seq_len = 32",
            ),
            ("num_return_sequences", row(&[2]), "at most beam_width = 1"),
            ("runtime_top_k", row(&[-2]), "is -2, and must be at least 0"),
            ("runtime_top_p_decay", row(&[0f32]), "is 0, and must be"),
            (
                "runtime_top_p_reset_ids",
                row(&[1; 17]),
                "may have at most 16",
            ),
            ("no_repeat_ngram_size", row(&[65]), "must be at most 64"),
            ("early_stopping", row(&[1f32]), "is FP32, and must be BOOL"),
        ] {
            let error = read_with(&[(name, tensor)]).expect_err(words);
            assert!(
                error.contains(&format!("'{name}' ")) && error.contains(words),
                "{error}"
            );
        }
        let bias = HostTensor::of(&[100], [f32::INFINITY; 100]);
        let error = read_with(&[("embedding_bias", bias)]).expect_err("not finite");
        assert!(error.contains("for token 0, and must be finite"), "{error}");
    }
}
