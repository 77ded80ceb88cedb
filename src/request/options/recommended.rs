//! The options that a checkpoint's generation_config.json recommends.

use super::RequestOptions;
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;

/// Its keys, and the options that they are.
const KEYS: [(&str, &str); 7] = [
    ("max_new_tokens", "max_tokens"),
    ("repetition_penalty", "repetition_penalty"),
    ("temperature", "temperature"),
    ("top_k", "top_k"),
    ("top_p", "top_p"),
    ("min_p", "min_p"),
    ("typical_p", "typical_p"),
];

impl RequestOptions {
    /// The options in generation_config.json, by the names of transformers' `GenerationConfig`. As there, those that
    /// choose among tokens count only with `do_sample: true`. Other keys are not read.
    ///
    /// # Errors
    /// A value that a request could not have either.
    pub fn recommended(file: &JsonFile) -> Result<Self, LoadError> {
        let given = KEYS.iter().filter_map(|&(key, option)| {
            let value = file.get(key)?;
            Some((option, value.clone()))
        });
        let options = Self::parse(given).map_err(|error| file.error(error.to_string()))?;
        Ok(match file.bool_or("do_sample", false)? {
            true => options,
            false => Self {
                max_tokens: options.max_tokens,
                repetition_penalty: options.repetition_penalty,
                ..Self::default()
            },
        })
    }

    /// Takes the recommended options that the request does not give. A beam search draws no tokens.
    pub fn take_recommended(&mut self, recommended: &Self) {
        let Self {
            max_tokens,
            repetition_penalty,
            temperature,
            top_k,
            top_p,
            min_p,
            typical_p,
            ..
        } = recommended;
        self.max_tokens = self.max_tokens.or(*max_tokens);
        self.repetition_penalty = self.repetition_penalty.or(*repetition_penalty);
        if self.searches() {
            return;
        }
        self.temperature = self.temperature.or(*temperature);
        self.top_k = self.top_k.or(*top_k);
        self.top_p = self.top_p.or(*top_p);
        self.min_p = self.min_p.or(*min_p);
        self.typical_p = self.typical_p.or(*typical_p);
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::{Value, json};

    use super::*;
    use inflight_sampling::SamplingParams;

    /// As Qwen2.5's checkpoints have it.
    fn qwen() -> Value {
        json!({
            "bos_token_id": 151643, "do_sample": true, "eos_token_id": [151645, 151643], "pad_token_id": 151643,
            "repetition_penalty": 1.05, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": null,
            "transformers_version": "4.43.1",
        })
    }

    fn recommended(config: &Value) -> Result<RequestOptions, LoadError> {
        let object = config.as_object().expect("an object").clone();
        let file = JsonFile::new(Path::new("generation_config.json"), "", object);
        RequestOptions::recommended(&file)
    }

    fn options(config: &Value, request: &[(&str, Value)]) -> RequestOptions {
        let mut options = RequestOptions::parse(request.to_vec()).expect("good options");
        options.take_recommended(&recommended(config).expect("a good file"));
        options
    }

    fn sampling(config: &Value, request: &[(&str, Value)]) -> SamplingParams {
        let options = options(config, request);
        options.sampling(&[], Vec::new(), 100).expect("in range")
    }

    #[test]
    fn a_request_takes_what_it_does_not_give() {
        let of = |params: SamplingParams| {
            let SamplingParams {
                temperature,
                top_k,
                top_p,
                repetition_penalty,
                ..
            } = params;
            (temperature, top_k, top_p, repetition_penalty)
        };
        assert_eq!(of(sampling(&qwen(), &[])), (0.7, 20, 0.8, 1.05));
        let own = [("temperature", json!(0.2)), ("top_k", json!(0))];
        assert_eq!(of(sampling(&qwen(), &own)), (0.2, 0, 0.8, 1.05));
        assert!(sampling(&qwen(), &[("temperature", json!(0))]).is_greedy());
        let config = json!({ "max_new_tokens": 7 });
        assert_eq!(options(&config, &[]).max_tokens_or(16), Ok(7));
        let own = [("max_tokens", json!(3))];
        assert_eq!(options(&config, &own).max_tokens_or(16), Ok(3));
    }

    #[test]
    fn without_do_sample_a_request_stays_greedy() {
        for do_sample in [json!(false), Value::Null] {
            let mut config = qwen();
            config["do_sample"] = do_sample;
            let params = sampling(&config, &[]);
            assert!(params.is_greedy());
            assert_eq!(params.repetition_penalty, 1.05);
        }
    }

    #[test]
    fn a_beam_search_is_not_sampled() {
        for search in [
            [("beam_width", json!(2))].as_slice(),
            &[("use_beam_search", json!(true)), ("n", json!(2))],
        ] {
            let options = options(&qwen(), search);
            assert!(options.beam_search(4).expect("no temperature").is_some());
        }
    }

    #[test]
    fn a_value_that_no_request_could_have_names_file_and_key() {
        let mut config = qwen();
        config["temperature"] = json!("hot");
        let error = recommended(&config).expect_err("a text").to_string();
        assert!(error.contains("generation_config.json"), "{error}");
        assert!(error.contains("'temperature'"), "{error}");
    }
}
