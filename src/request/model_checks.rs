//! Options that do not fit the model.

use crate::request::admission::Admission;
use crate::request::options::{NumSequences, RequestOptions};
use inflight_base::RequestError;
use inflight_config::{ClientCompatibility, InputKind, OutputKind, Task};
use inflight_sampling::SamplingParams;

impl Admission {
    /// Refuses options that the model cannot serve.
    pub(super) fn check(&self, options: &RequestOptions) -> Result<(), RequestError> {
        let invalid = |text: &str| Err(RequestError::Invalid(text.to_owned()));
        if options.stream && self.config.settings.gpt_model_type.is_lockstep() {
            return invalid(
                "option 'stream': with gpt_model_type V1 answers are sent when the whole batch has ended; use \
                 inflight_fused_batching to stream",
            );
        }
        if options.stream && !self.config.decoupled {
            return invalid(
                "option 'stream': this model sends one response per request; to stream, write \
                 model_transaction_policy { decoupled: true } in its config.pbtxt",
            );
        }
        let compatibility = self.config.settings.client_compatibility;
        if options.stream
            && options.exclude_input_in_output == Some(false)
            && !compatibility.ignores_input_in_streams()
        {
            return invalid(
                "option 'exclude_input_in_output': a stream never repeats the prompt; leave the \
                 option out, or 'stream'",
            );
        }
        for (name, outputs) in &options.asked {
            let mut outputs_of_model = self.config.outputs.iter();
            if !outputs_of_model.any(|output| outputs.contains(output)) {
                if *name == "prompt_logprobs" && compatibility == ClientCompatibility::Vllm {
                    // vLLM's backend takes it, and has no output for it.
                    continue;
                }
                let outputs: Vec<_> = outputs.iter().map(|output| output.name()).collect();
                return Err(RequestError::Invalid(format!(
                    "option '{name}': this model has no output '{}'; name it in the model's \
                     config.pbtxt, or name no outputs there to have them all",
                    outputs.join("' or '")
                )));
            }
            let needs_logits = outputs.iter().any(|output| output.needs_logits());
            if needs_logits && !self.has_logits {
                return Err(RequestError::Invalid(format!(
                    "option '{name}': the synthetic runner has no logits; leave the option out"
                )));
            }
        }
        self.check_pooling(options)?;
        if options.post_processor.is_given() {
            if self.config.settings.gpt_model_type.is_lockstep() {
                return invalid(
                    "option 'logits_post_processor_name': with gpt_model_type V1 there are no logits \
                     post-processors; inflight_fused_batching has them",
                );
            }
            if !self.has_logits {
                return invalid(
                    "option 'logits_post_processor_name': the synthetic runner has no logits; leave the \
                     option out",
                );
            }
        }
        if !options.text.detokenize && !options.stop.is_empty() {
            return invalid(
                "option 'detokenize': a stop word is found in the text; leave out 'stop', or \
                 detokenize: false",
            );
        }
        if options.chat.is_given() && self.config.input == InputKind::Ids {
            return invalid("option 'messages': this model takes input_ids, not text");
        }
        if !options.prompt_token_ids.is_empty() {
            if self.config.input == InputKind::Ids {
                return invalid(
                    "option 'prompt_token_ids': this model takes input_ids; write the tokens to them",
                );
            }
            if options.chat.is_given() || options.text_pair.is_some() {
                return invalid(
                    "option 'prompt_token_ids': the tokens are the whole prompt; leave out 'messages' and 'text_pair'",
                );
            }
        }
        if options.prompt_only && options.asks(OutputKind::PromptLogprobs) {
            return invalid(
                "option 'prompt_only': nothing is computed, so the prompt has no log-probabilities; leave out \
                 'prompt_logprobs', or ask for one token",
            );
        }
        if options.prompt_only && options.stream {
            return invalid(
                "option 'prompt_only': a stream never repeats the prompt; leave out 'stream'",
            );
        }
        if self.encoder.text.is_none() {
            let needs_text = [
                ("stop", !options.stop.is_empty()),
                ("bad_words", !options.bad_words.is_empty()),
                (
                    "embedding_bias_words",
                    !options.embedding_bias_words.is_empty(),
                ),
            ];
            if let Some((name, _)) = needs_text.iter().find(|(_, given)| *given) {
                return Err(RequestError::Invalid(format!(
                    "option '{name}': this model has no tokenizer, it only knows token ids"
                )));
            }
        }
        Ok(())
    }

    /// Refuses options of embeddings where text is generated, and what has several outputs, or parts of one, where a
    /// prompt becomes an embedding. Options of sampling have no effect there.
    fn check_pooling(&self, options: &RequestOptions) -> Result<(), RequestError> {
        let invalid = |text: String| Err(RequestError::Invalid(text));
        let settings = &self.config.settings;
        let task = settings.task.name();
        let embeds = settings.task == Task::Embed;
        let has_classes = matches!(settings.task, Task::Classify | Task::Score);
        for (name, is_given, is_possible, of) in [
            ("dimensions", options.dimensions.is_some(), embeds, "embed"),
            ("normalize", options.normalize.is_some(), embeds, "embed"),
            (
                "text_pair",
                options.text_pair.is_some(),
                has_classes,
                "score or classify",
            ),
            (
                "raw_scores",
                options.raw_scores,
                has_classes,
                "score or classify",
            ),
        ] {
            if is_given && !is_possible {
                return invalid(format!(
                    "option '{name}': the task of this model is {task}, and the option is for task: {of}; leave it out"
                ));
            }
        }
        if options.token_types.is_some() {
            let is_of_text =
                self.config.input == InputKind::Text && options.prompt_token_ids.is_empty();
            let problem = match self.has_token_types {
                false => "this model has no types of tokens",
                true if is_of_text => "the tokenizer gives the types of a text's tokens",
                true => "",
            };
            if !problem.is_empty() {
                return invalid(format!("option 'token_type_ids': {problem}; leave it out"));
            }
        }
        if options.text_pair.is_some() {
            let (problem, remedy) = match self.config.input {
                InputKind::Ids => ("this model takes input_ids, not text", "write both to them"),
                InputKind::Text if options.chat.is_given() => {
                    ("a conversation is given beside it", "leave out 'messages'")
                }
                InputKind::Text => ("", ""),
            };
            if !problem.is_empty() {
                return invalid(format!("option 'text_pair': {problem}; {remedy}"));
            }
        }
        if self.pooling.is_none() {
            return Ok(());
        }
        let given = [
            ("stream", options.stream),
            (
                "logits_post_processor_name",
                options.post_processor.is_given(),
            ),
            ("n", options.says_num_sequences()),
            ("guided_...", options.guide.spec()?.is_some()),
        ];
        if let Some((name, _)) = given.iter().find(|(_, is_given)| *is_given) {
            return invalid(format!(
                "option '{name}': this is a pooling model, whose task is {task}; leave the option out"
            ));
        }
        match options.dimensions {
            Some(num) if num as usize > self.hidden_size => invalid(format!(
                "option 'dimensions' is {num}, and the embeddings of this model have {}: ask for at most that many",
                self.hidden_size
            )),
            _ => Ok(()),
        }
    }

    /// How many sequences the request generates and returns.
    pub(super) fn num_sequences(
        &self,
        options: &RequestOptions,
        sampling: &SamplingParams,
    ) -> Result<NumSequences, RequestError> {
        let num_sequences = options.num_sequences(self.config.max_batch_size)?;
        let NumSequences {
            generated,
            returned,
        } = num_sequences;
        let invalid = |text: String| Err(RequestError::Invalid(text));
        let may_repeat = self
            .config
            .settings
            .client_compatibility
            .repeats_greedy_sequences();
        if generated > 1 && sampling.is_greedy() && !may_repeat {
            let name = if returned > 1 { "n" } else { "best_of" };
            return invalid(format!(
                "option '{name}': the {generated} sequences of a greedy request are all the same; give a \
                 temperature above 0, and no top_k of 1, or leave '{name}' out"
            ));
        }
        if generated > returned && !self.has_logits {
            return invalid(
                "option 'best_of': the synthetic runner has no logits, so that no sequence is the best; leave the \
                 option out"
                    .to_owned(),
            );
        }
        Ok(num_sequences)
    }
}
