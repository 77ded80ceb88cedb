use super::values::{MAX_ALLOWED_IDS, MAX_DRAFT_IDS, MAX_END_IDS, MAX_WORD_BYTES, MAX_WORDS};
use super::*;
use serde_json::json;

fn parse(parameters: &[(&str, Value)]) -> Result<RequestOptions, RequestError> {
    RequestOptions::parse(
        parameters
            .iter()
            .map(|(name, value)| (*name, value.clone())),
    )
}

fn sampling(parameters: &[(&str, Value)]) -> SamplingParams {
    parse(parameters)
        .expect("good options")
        .sampling(&[2], Vec::new(), 100)
        .expect("in range")
}

#[test]
fn a_request_that_says_nothing_is_greedy_and_ends_with_the_models_end_ids() {
    let params = sampling(&[]);
    assert_eq!(
        params,
        SamplingParams {
            end_ids: vec![2],
            ..SamplingParams::default()
        }
    );
}

#[test]
fn any_sampling_option_makes_it_sampled_and_temperature_zero_greedy_again() {
    assert_eq!(sampling(&[("top_k", json!(5))]).temperature, 1.0);
    assert_eq!(sampling(&[("top_p", json!("0.5"))]).top_p, 0.5);
    assert!(sampling(&[("top_k", json!(-1)), ("temperature", json!(0))]).is_greedy());
}

#[test]
fn a_prompt_is_cut_to_a_number_of_tokens_or_to_what_fits_in_front_of_the_output() {
    let kept = |options: &[(&str, Value)], has_output| {
        let options = parse(options).expect("good options");
        options.max_kept(100, has_output)
    };
    let to_room = ("truncate_prompt_tokens", json!(-1));
    assert_eq!(kept(&[], true), None);
    assert_eq!(kept(&[("truncate_prompt_tokens", json!(7))], true), Some(7));
    assert_eq!(kept(std::slice::from_ref(&to_room), false), Some(100));
    assert_eq!(kept(std::slice::from_ref(&to_room), true), Some(99));
    let with_max = |max: u32| kept(&[to_room.clone(), ("max_tokens", json!(max))], true);
    assert_eq!(with_max(30), Some(70));
    assert_eq!(with_max(100), Some(1), "the prompt has one token at least");
}

#[test]
fn end_ids_are_the_requests_own_or_none() {
    assert_eq!(sampling(&[("end_id", json!(7))]).end_ids, [7]);
    assert_eq!(sampling(&[("end_id", json!("[7, 8]"))]).end_ids, [7, 8]);
    assert_eq!(sampling(&[("end_id", json!(-1))]).end_ids, [0; 0]);
    assert_eq!(sampling(&[("ignore_eos", json!(true))]).end_ids, [0; 0]);
}

#[test]
fn stop_token_ids_add_to_the_end_ids_and_outlive_ignore_eos() {
    let stop = ("stop_token_ids", json!("[7, 8]"));
    let both = sampling(std::slice::from_ref(&stop));
    assert_eq!((both.end_ids, both.stop_token_ids), (vec![2], vec![7, 8]));
    let alone = sampling(&[stop, ("ignore_eos", json!(true))]);
    assert_eq!((alone.end_ids, alone.stop_token_ids), (vec![], vec![7, 8]));
}

#[test]
fn top_p_decays_where_a_factor_or_a_minimum_is_given() {
    assert_eq!(sampling(&[("top_p", json!(0.9))]).top_p_decay, None);
    let decay = sampling(&[
        ("runtime_top_p_decay", json!(0.5)),
        ("runtime_top_p_reset_ids", json!(7)),
    ]);
    let expected = TopPDecay {
        factor: 0.5,
        min: 1e-6,
        reset_ids: vec![7],
    };
    assert_eq!(decay.top_p_decay, Some(expected));
    let risen = sampling(&[("top_p_min", json!(0.5))]).top_p_decay;
    assert_eq!(
        risen.map(|decay| (decay.factor, decay.min)),
        Some((1.0, 0.5))
    );
}

#[test]
fn allowed_ids_are_sorted_and_in_the_vocabulary() {
    let params = sampling(&[("allowed_token_ids", json!("[9, 3, 9, 99]"))]);
    assert_eq!(params.allowed_token_ids.as_deref(), Some(&[3, 9, 99][..]));
    for name in [
        "allowed_token_ids",
        "stop_token_ids",
        "top_p_reset_ids",
        "end_id",
    ] {
        let options = parse(&[(name, json!("[3, 100]"))]).expect("parses");
        let error = options
            .sampling(&[], Vec::new(), 100)
            .expect_err("out of range")
            .to_string();
        assert!(error.contains(name) && error.contains("0 to 99"), "{error}");
    }
}

#[test]
fn what_an_output_is_expected_to_begin_with_is_bounded_by_its_length() {
    let options = parse(&[
        ("draft_input_ids", json!("[5, 6, 7, 8]")),
        ("num_draft_tokens", json!("3")),
    ]);
    let options = options.expect("good options");
    let drafts = options.drafts(None, 2);
    assert_eq!(drafts.max_draft_tokens, Some(3));
    assert_eq!(*drafts.expected, [5, 6]);
    assert_eq!(*options.drafts(None, 9).expected, [5, 6, 7, 8]);
    assert_eq!(
        RequestOptions::default().drafts(None, 9),
        DraftOptions::default()
    );
    let error = options
        .sampling(&[], Vec::new(), 8)
        .expect_err("8 is not in the vocabulary")
        .to_string();
    assert!(error.contains("draft_input_ids"), "{error}");
}

#[test]
fn vllms_json_of_options_unfolds() {
    let nested = r#"{"temperature": 0.5, "stop": ["a", "b"], "logit_bias": {"9": -1, "3": 2}}"#;
    let options = parse(&[("sampling_parameters", json!(nested))]).expect("good options");
    assert_eq!(options.stop, ["a", "b"]);
    assert_eq!(options.logit_bias, [(3, 2.0), (9, -1.0)]);
}

#[test]
fn a_word_is_a_text_or_a_list_in_json() {
    assert_eq!(
        parse(&[("stop", json!("END"))]).expect("a word").stop,
        ["END"]
    );
    assert_eq!(
        parse(&[("stop", json!(r#"["x", " [y"]"#))])
            .expect("two")
            .stop,
        ["x", " [y"]
    );
    for none in [json!("[]"), json!(""), json!(r#"[""]"#)] {
        let options = parse(&[("stop_words", none)]);
        assert_eq!(options.expect("none").stop, [""; 0]);
    }
}

#[test]
fn words_of_ids_are_two_rows_in_one_list_or_in_two() {
    let words = |value: Value| {
        let options = parse(&[("stop_words_list", value.clone())]).expect("words");
        let bad = parse(&[("bad_words_list", value)]).expect("words");
        assert_eq!(options.stop_ids, bad.bad_ids);
        options.stop_ids
    };
    let expected = [vec![11, 12], vec![13]];
    assert_eq!(words(json!("[[11, 12, 13], [2, 3, -1]]")), expected);
    assert_eq!(words(json!([11, 12, 13, 2, 3, -1])), expected);
    assert_eq!(words(json!([11, 12, 13, 3, -1, -1])), [[11, 12, 13]]);
    for none in [json!([0, -1]), json!("[[], []]"), json!([0, 0, -1, -1])] {
        assert_eq!(words(none), [[0; 0]; 0]);
    }
    assert_eq!(words(json!([5, 6, 0, 1])), [[5]], "no word is empty");
}

#[test]
fn a_bias_for_each_token_is_added_to_those_of_single_ones() {
    let biased = |bias: &str| {
        let asked = [
            ("embedding_bias", json!(bias)),
            ("logit_bias", json!(r#"{"1": 2, "2": 5}"#)),
        ];
        let options = parse(&asked).expect("in range");
        let mut sampling = options
            .sampling(&[], Vec::new(), 4)
            .expect("in the vocabulary");
        let result = options.add_embedding_bias(&mut sampling, 4);
        result.map(|()| sampling.logit_bias)
    };
    let sums = vec![(0, 1.0), (2, 4.5), (3, f32::NEG_INFINITY)];
    assert_eq!(biased(r#"[1, -2, -0.5, "-inf"]"#), Ok(sums.into()));
    let error = biased("[1, 2, 3]").expect_err("too few").to_string();
    assert!(
        error.contains("'embedding_bias': a list of 3 is not one of 4, a number for"),
        "{error}"
    );
}

#[test]
fn every_option_refuses_what_it_cannot_be_and_says_what_it_can() {
    let long = "x".repeat(MAX_WORD_BYTES + 1);
    let bad = [
        ("max_tokens", json!(0)),
        ("max_tokens", json!(-5)),
        ("max_tokens", json!(1u64 << 31)),
        ("max_tokens", json!("many")),
        ("max_tokens", json!(true)),
        ("max_tokens", json!(1.5)),
        ("min_tokens", json!(-1)),
        ("n", json!(0)),
        ("best_of", json!("all")),
        ("pad_id", json!(1u64 << 31)),
        ("beam_width", json!(0)),
        ("use_beam_search", json!("maybe")),
        ("length_penalty", json!(10.5)),
        ("early_stopping", json!("often")),
        ("beam_search_diversity_rate", json!(-1)),
        ("temperature", json!(-0.1)),
        ("temperature", json!("hot")),
        ("temperature", json!("nan")),
        ("temperature", json!(1e30)),
        ("top_k", json!(-2)),
        ("top_p", json!(-0.1)),
        ("top_p", json!(1.01)),
        ("top_p_decay", json!(0)),
        ("top_p_min", json!(-0.1)),
        ("top_p_reset_ids", json!(-1)),
        ("min_p", json!(2)),
        ("typical_p", json!(0)),
        ("typical_p", json!(1.1)),
        ("seed", json!(-2)),
        ("seed", json!("-1.0")),
        ("seed", json!(-1.0)),
        ("repetition_penalty", json!(0)),
        ("presence_penalty", json!(1e9)),
        ("frequency_penalty", json!("inf")),
        ("prompt_ignore_length", json!(-1)),
        ("no_repeat_ngram_size", json!(65)),
        ("allowed_token_ids", json!("[]")),
        ("allowed_token_ids", json!("[-1]")),
        ("allowed_token_ids", json!(vec![1; MAX_ALLOWED_IDS + 1])),
        ("stop_token_ids", json!(-1)),
        ("stop_token_ids", json!(vec![1; MAX_END_IDS + 1])),
        ("include_stop_str_in_output", json!(1)),
        ("detokenize", json!("no")),
        ("skip_special_tokens", json!(0)),
        ("spaces_between_special_tokens", json!(2)),
        ("logit_bias", json!("[1]")),
        ("logit_bias", json!(r#"{"x": 1}"#)),
        ("logit_bias", json!(r#"{"1": 1e9}"#)),
        ("logit_bias", json!(r#"{"1": 1, "01": 2}"#)),
        ("end_id", json!(-2)),
        ("end_id", json!("[1, \"a\"]")),
        ("ignore_eos", json!(1)),
        ("priority", json!(1u64 << 31)),
        ("priority", json!("high")),
        ("kv_cache_reuse", json!(2)),
        ("cache_salt", json!("")),
        ("cache_salt", json!(long)),
        ("cache_salt", json!("\0poet")),
        ("lora_name", json!("")),
        ("lora_name", json!(7)),
        ("lora_task_id", json!(-1)),
        ("lora_task_id", json!("7")),
        ("stop", json!(true)),
        ("stop", json!("[1]")),
        ("stop", json!("[\"a\"")),
        ("stop", json!(long)),
        ("bad_words", json!(vec!["x"; MAX_WORDS + 1])),
        ("stop_words_list", json!("[]x")),
        ("stop_words_list", json!([1, 2, 1])),
        ("stop_words_list", json!("[[1, 2], [1]]")),
        ("stop_words_list", json!([1, 2, 1, 3])),
        ("stop_words_list", json!([1, 2, 2, 1])),
        ("stop_words_list", json!([1, -2])),
        ("stop_words_list", json!([-1, 1])),
        ("bad_words_list", json!("text")),
        ("bad_words_list", json!([vec![1; 257], vec![257; 257]])),
        ("embedding_bias", json!(1)),
        ("embedding_bias", json!("[1e9]")),
        ("embedding_bias", json!("[\"nan\"]")),
        ("embedding_bias_words", json!(vec!["x"; MAX_WORDS + 1])),
        ("embedding_bias_weights", json!("[\"x\"]")),
        ("embedding_bias_weights", json!(1e9)),
        ("embedding_bias_weights", json!(vec![1; MAX_WORDS + 1])),
        ("truncate_prompt_tokens", json!(0)),
        ("truncate_prompt_tokens", json!(-2)),
        ("dimensions", json!(0)),
        ("normalize", json!("l2")),
        ("text_pair", json!(["a"])),
        ("token_type_ids", json!("[0, 1, 0]")),
        ("token_type_ids", json!([0, 2])),
        ("token_type_ids", json!("ab")),
        ("raw_scores", json!("sigmoid")),
        ("input_lengths", json!(0)),
        ("guided_decoding_guide_type", json!("xml")),
        ("guided_decoding_guide", json!(5)),
        ("structured_outputs", json!("{}")),
        ("structured_outputs", json!({"json": {}, "regex": "a"})),
        ("structured_outputs", json!({"structural_tag": "x"})),
        ("guided_json", json!("{")),
        ("guided_json", json!("[]")),
        ("guided_regex", json!("")),
        ("guided_choice", json!("[]")),
        ("guided_choice", json!(vec!["x"; 1025])),
        ("guided_grammar", json!(1)),
        ("logits_post_processor_name", json!(long)),
        ("logits_post_processor_args", json!([1])),
        ("stream", json!("perhaps")),
        ("stream_interval", json!(0)),
        ("exclude_input_in_output", json!(0)),
        ("images", json!(1)),
        ("images", json!("[1]")),
        ("images", json!("[")),
        ("messages", json!("{}")),
        ("messages", json!("[]")),
        ("messages", json!("[1]")),
        ("structural_tag", json!("[]")),
        ("tool_choice", json!("any")),
        ("tool_choice", json!({"function": "f"})),
        ("parallel_tool_calls", json!("no")),
        ("tools", json!("{}")),
        ("tools", json!(vec![json!({}); 129])),
        ("documents", json!("[\"a\"]")),
        ("chat_template", json!("")),
        ("chat_template", json!(long)),
        ("chat_template_kwargs", json!("[]")),
        ("chat_template_kwargs", json!(r#"{"tools": []}"#)),
        ("add_generation_prompt", json!("no")),
        ("continue_final_message", json!("role")),
        ("timeout", json!(-1)),
        ("return_finish_reason", json!("no")),
        ("return_log_probs", json!(1)),
        ("return_cumulative_logprob", json!("sum")),
        ("logprobs", json!(-1)),
        ("logprobs", json!(21)),
        ("logprobs", json!(true)),
        ("return_logprobs", json!(2)),
        ("prompt_logprobs", json!(-1)),
        ("prompt_logprobs", json!(21)),
        ("prompt_logprobs", json!(true)),
        ("return_context_logits", json!("all")),
        ("return_generation_logits", json!(3)),
        ("return_stop_reason", json!("why")),
        ("return_reasoning_content", json!("yes")),
        ("return_tool_calls", json!(1)),
        ("return_error_code", json!("yes")),
        ("return_output_ids_json", json!("yes")),
        ("client_id", json!(-1)),
        ("return_perf_metrics", json!(0.5)),
        ("num_draft_tokens", json!(-1)),
        ("draft_input_ids", json!("[5, -1]")),
        ("draft_input_ids", json!(vec![5; MAX_DRAFT_IDS + 1])),
        ("draft_text", json!([5])),
        ("thinking_token_budget", json!(-1)),
        ("return_usage", json!("yes")),
        ("prompt_token_ids", json!("[5, -1]")),
        ("prompt_token_ids", json!(vec![5; MAX_DRAFT_IDS + 1])),
        ("prompt_only", json!(2)),
        ("sampling_parameters", json!("[]")),
        ("sampling_parameters", json!("{")),
        ("sampling_parameters", json!({ "sampling_parameters": {} })),
    ];
    for (name, value) in &bad {
        let error = parse(&[(name, value.clone())]).expect_err("must be refused");
        let RequestError::Option {
            name: named,
            expected,
            ..
        } = &error
        else {
            panic!("{name}={value}: {error:?}");
        };
        assert_eq!(named, name);
        let option = OPTIONS
            .iter()
            .find(|o| o.name == *name)
            .expect("a known name");
        // For text that looks like JSON and is not, the error says so as well.
        assert!(expected.starts_with(option.expected), "{expected}");
        assert!(error.to_string().len() < 350, "{error}");
    }
    let untested = OPTIONS
        .iter()
        .filter(|o| bad.iter().all(|(name, _)| *name != o.name));
    let untested: Vec<_> = untested.map(|o| o.name).collect();
    assert_eq!(
        untested,
        ["return_num_input_tokens", "return_num_output_tokens"]
    );
}

#[test]
fn an_unknown_option_is_refused_with_the_nearest_one() {
    let error = parse(&[("temprature", json!(1))])
        .expect_err("unknown")
        .to_string();
    assert_eq!(
        error,
        "unknown option 'temprature'; did you mean 'temperature'?"
    );
}

#[test]
fn a_top_p_of_zero_is_what_tensorrt_llm_takes_it_for() {
    let zero = ("top_p", json!(0.0));
    let alone = sampling(std::slice::from_ref(&zero));
    assert!(alone.is_greedy());
    let beside = sampling(&[zero, ("top_k", json!(5))]);
    assert_eq!((beside.top_k, beside.top_p), (5, 1.0));
    assert!(!beside.is_greedy());
}

#[test]
fn only_clients_of_tensorrt_llm_get_the_most_likely_token_at_any_temperature() {
    use ClientCompatibility::{None, TensorrtLlm, Vllm};
    let is_greedy = |compatibility, more: &[(&str, Value)]| {
        let given = [&[("temperature", json!(0.7))][..], more].concat();
        let mut options = parse(&given).expect("good options");
        options.take_defaults_of(compatibility);
        let params = options.sampling(&[], Vec::new(), 100).expect("in range");
        params.is_greedy()
    };
    assert!(is_greedy(TensorrtLlm, &[]));
    for draws in [[("top_p", json!(0.9))], [("top_k", json!(5))]] {
        assert!(!is_greedy(TensorrtLlm, &draws));
    }
    assert!(!is_greedy(None, &[]) && !is_greedy(Vllm, &[]));
}

#[test]
fn an_option_given_under_two_names_is_refused() {
    let not_a_stop = [("stop", json!(false)), ("stop_words", json!("b"))];
    assert_eq!(parse(&not_a_stop).expect("both").stop, ["b"]);
    let alike = [("stop", json!("a")), ("stop_words", json!(["a"]))];
    assert_eq!(parse(&alike).expect("the same").stop, ["a"]);
    let omitted = ("return_finish_reason", json!(false));
    assert!(parse(&[omitted.clone(), omitted]).is_ok());
    let twice = [("stop", json!("a")), ("stop_words", json!("b"))];
    assert_eq!(
        parse(&twice).expect_err("twice").to_string(),
        "option 'stop' is given twice, as 'stop' and as 'stop_words', with two values; give it once"
    );
    let nested = [
        ("max_tokens", json!(5)),
        ("sampling_parameters", json!({ "max_tokens": 6 })),
    ];
    let error = parse(&nested).expect_err("twice").to_string();
    assert!(
        error.contains("as 'max_tokens' and as 'max_tokens' in sampling_parameters"),
        "{error}"
    );
}

#[test]
fn a_null_is_an_option_that_is_not_given() {
    let nested = r#"{"seed": null, "stop": null, "max_tokens": 7, "n": null}"#;
    let options = parse(&[("sampling_parameters", json!(nested))]).expect("good options");
    assert_eq!(options.max_tokens_or(16), Ok(7));
}

#[test]
fn a_seed_of_minus_one_is_none() {
    let seed = |parameters: &[(&str, Value)]| {
        let options = parse(parameters).expect("good options");
        options
            .sampling(&[], Vec::new(), 100)
            .expect("in range")
            .seed
    };
    let nested = json!({ "seed": -1, "temperature": 0.5 });
    for parameters in [
        vec![],
        vec![("seed", json!(-1))],
        vec![("seed", json!("-1"))],
        vec![("random_seed", json!(-1))],
        vec![("sampling_parameters", nested)],
        vec![("sampling_parameters", json!(r#"{"seed": -1}"#))],
    ] {
        assert_eq!(seed(&parameters), 0, "{parameters:?}");
    }
    assert_eq!(seed(&[("seed", json!(u64::MAX))]), u64::MAX);
}

#[test]
fn the_llm_apis_names_are_understood() {
    let options = parse(&[
        ("sampling_param_max_tokens", json!(7)),
        ("sampling_param_stop", json!(["a"])),
        ("sampling_param_exclude_input_from_output", json!(true)),
    ])
    .expect("good options");
    assert_eq!(options.max_tokens_or(16), Ok(7));
    assert_eq!(options.stop, ["a"]);
    assert_eq!(options.exclude_input_in_output, Some(true));
}

#[test]
fn words_are_biased_by_their_tokens_and_add_to_the_logit_biases() {
    let options = parse(&[
        ("logit_bias", json!(r#"{"7": 1, "1": 2}"#)),
        ("embedding_bias_words", json!(["a", "b"])),
        ("embedding_bias_weights", json!([0.5, -3])),
    ])
    .expect("good options");
    let mut params = options.sampling(&[], Vec::new(), 100).expect("in range");
    let tokens = [vec![7, 9], vec![9]];
    assert_eq!(options.add_word_biases(&mut params, &tokens), Ok(()));
    assert_eq!(*params.logit_bias, [(1, 2.0), (7, 1.5), (9, -2.5)]);
    let many: Vec<Vec<TokenId>> = vec![(0..1025).collect()];
    let error = options.add_word_biases(&mut params, &many);
    assert!(error.is_err_and(|error| error.to_string().contains("at most 1024")));
    let error = parse(&[("embedding_bias_words", json!(["a", "b"]))]);
    let error = error.expect_err("no weights").to_string();
    assert!(error.contains("one number for each"), "{error}");
}

#[test]
fn options_must_fit_each_other_and_the_vocabulary() {
    let options = parse(&[("min_tokens", json!(17))]).expect("parses");
    let error = options.max_tokens_or(16).expect_err("17 > 16");
    assert!(
        error.to_string().contains("max_tokens, which is 16"),
        "{error}"
    );
    let options = parse(&[("logit_bias", json!(r#"{"100": 1}"#))]).expect("parses");
    let error = options
        .sampling(&[], Vec::new(), 100)
        .expect_err("out of range");
    assert!(error.to_string().contains("0 to 99"), "{error}");
}

#[test]
fn one_sequence_is_generated_unless_more_are_asked_for() {
    let of = |parameters: &[(&str, Value)]| {
        let options = parse(parameters).expect("good options");
        options.num_sequences(8)
    };
    let num = |generated, returned| {
        Ok(NumSequences {
            generated,
            returned,
        })
    };
    assert_eq!(of(&[]), num(1, 1));
    assert_eq!(of(&[("n", json!(3))]), num(3, 3));
    assert_eq!(of(&[("num_return_sequences", json!("8"))]), num(8, 8));
    assert_eq!(of(&[("best_of", json!(4))]), num(4, 1));
    let nested = json!({ "n": 2, "best_of": 5 });
    assert_eq!(of(&[("sampling_parameters", nested)]), num(5, 2));
    let streamed = [
        ("n", json!(2)),
        ("best_of", json!(2)),
        ("stream", json!(true)),
    ];
    assert_eq!(of(&streamed), num(2, 2));
}

#[test]
fn sequences_that_cannot_be_had_are_refused_with_what_can() {
    type Case = (&'static [(&'static str, i64)], &'static [&'static str]);
    let cases: &[Case] = &[
        (
            &[("n", 9)],
            &["'n': 9", "at most max_batch_size, which is 8"],
        ),
        (&[("best_of", 9)], &["'best_of': 9", "max_batch_size"]),
        (
            &[("n", 3), ("best_of", 2)],
            &["'best_of': 2", "at least n, which is 3"],
        ),
    ];
    for (parameters, words) in cases {
        let parameters: Vec<_> = parameters
            .iter()
            .map(|(name, value)| (*name, json!(value)))
            .collect();
        let options = parse(&parameters).expect("each in its range");
        let error = options.num_sequences(8).expect_err("refused").to_string();
        for word in *words {
            assert!(error.contains(word), "'{error}' does not say '{word}'");
        }
    }
    let streamed =
        parse(&[("best_of", json!(2)), ("stream", json!(true))]).expect("each in its range");
    let error = streamed.num_sequences(8).expect_err("refused").to_string();
    assert!(
        error.contains("'best_of'") && error.contains("leave out 'stream'"),
        "{error}"
    );
    for value in [
        json!(0),
        json!(-1),
        json!(1.5),
        json!("two"),
        json!(true),
        json!([2]),
    ] {
        for name in ["n", "num_return_sequences", "best_of"] {
            assert!(parse(&[(name, value.clone())]).is_err(), "{name}: {value}");
        }
    }
}

#[test]
fn padding_is_the_requests_own_or_the_end_id() {
    let pad_id = |parameters: &[(&str, Value)]| parse(parameters).expect("good").pad_id(&[2, 7]);
    assert_eq!(pad_id(&[]), 2);
    assert_eq!(pad_id(&[("pad_id", json!(-1))]), -1);
    assert_eq!(RequestOptions::default().pad_id(&[]), 0);
}
