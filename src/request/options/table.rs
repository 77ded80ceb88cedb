//! Every option: its names, its values, its effect, and the field that it sets.

use std::fmt::Write as _;

use serde_json::Value;

use super::values::{
    MAX_COUNT, MAX_DRAFT_IDS, MAX_END_IDS, MAX_PROMPT_IDS, MAX_WORD_BYTES, all_biases, allowed_ids,
    biases, early_stopping, end_ids, flag, id_words, ids, image_texts, integer, number, seed, set,
    share, signed, token_types, unsigned, weights, words,
};
use super::{RequestOptions, Truncation};
use inflight_base::ClientId;
use inflight_config::OutputKind;

/// The values of lists of words.
const WORDS: &str = "a text of at most 256 bytes, or a JSON list of at most 64 (put a text that begins with [ into a list)";
/// The values of lists of words as token ids.
const ID_WORDS: &str = "a JSON list of two lists: the ids of at most 64 words of at most 256 each, and where each word \
                        ends among them, padded with -1";

/// One option of a request.
pub(super) struct RequestOption {
    /// Its name.
    pub name: &'static str,
    /// Other names that clients of other backends use.
    pub aliases: &'static [&'static str],
    /// Its values, worded to follow "is not".
    pub expected: &'static str,
    /// Its default.
    pub default: &'static str,
    /// Its effect, for the documentation.
    pub doc: &'static str,
    /// Sets the field; `None` if the value is not accepted.
    pub set: fn(&mut RequestOptions, &Value) -> Option<()>,
}

/// The most alternatives listed for each token: vLLM's default `max_logprobs`.
const MAX_LOGPROBS: u32 = 20;

/// Bounded because every position of the sequence is compared with its end, once per token.
const MAX_NGRAM_SIZE: u32 = 64;

/// Every option, in the order of the documentation.
pub(super) const OPTIONS: &[RequestOption] = &[
    RequestOption {
        name: "max_tokens",
        aliases: &["request_output_len"],
        expected: "an integer of 1 or more",
        default: "the model's `default_max_tokens`",
        doc: "The most tokens to generate. Never more than fit into `max_seq_len` after the prompt.",
        set: |o, v| set(&mut o.max_tokens, integer(v, 1..=MAX_COUNT).map(Some)),
    },
    RequestOption {
        name: "min_tokens",
        aliases: &["min_length"],
        expected: "an integer of 0 or more",
        default: "0",
        doc: "End ids and `stop_token_ids` cannot be chosen before this many tokens.",
        set: |o, v| set(&mut o.min_tokens, integer(v, 0..=MAX_COUNT)),
    },
    RequestOption {
        name: "n",
        aliases: &["num_return_sequences"],
        expected: "an integer of 1 or more",
        default: "1",
        doc: "Sequences to return, at most `max_batch_size`. Each is what the request would get alone with a seed \
              of its own: the first with `seed`, the second with `seed` + 1, and so on. They share the blocks of \
              the prompt.",
        set: |o, v| set(&mut o.num_returned, integer(v, 1..=MAX_COUNT).map(Some)),
    },
    RequestOption {
        name: "best_of",
        aliases: &[],
        expected: "an integer of 1 or more",
        default: "`n`",
        doc: "Sequences to generate, at most `max_batch_size`. If there are more than `n`, the `n` with the \
              highest `cum_log_probs` are returned, best first; not while streaming.",
        set: |o, v| set(&mut o.num_generated, integer(v, 1..=MAX_COUNT).map(Some)),
    },
    RequestOption {
        name: "beam_width",
        aliases: &[],
        expected: "an integer of 1 or more",
        default: "1: no search",
        doc: "Beam search with this many beams, at most the model's `max_beam_width`, as in Hugging Face \
              transformers. Returns the best `n` hypotheses, by default all, best first. `cum_log_probs` is the sum \
              of a hypothesis' log-probabilities, including penalties and biases. Nothing is sampled: `top_k`, \
              `top_p`, and the like have no effect. Not with a guide. See [Beam search](sequences.md#beam-search).",
        set: |o, v| set(&mut o.beams.beam_width, integer(v, 1..=MAX_COUNT).map(Some)),
    },
    RequestOption {
        name: "use_beam_search",
        aliases: &[],
        expected: "true or false",
        default: "false",
        doc: "Beam search as requested in vLLM: as many beams as `best_of`, or `n`, of which `n`, by default 1, \
              are returned.",
        set: |o, v| set(&mut o.beams.use_beam_search, flag(v).map(Some)),
    },
    RequestOption {
        name: "length_penalty",
        aliases: &["len_penalty"],
        expected: "a number from -10 to 10",
        default: "1",
        doc: "Hypotheses are ranked by the sum of log-probabilities divided by `length ^ length_penalty`: above 0 \
              favours longer texts, below 0 shorter ones.",
        set: |o, v| {
            let penalty = number(v, -10.0..=10.0).map(Some);
            set(&mut o.beams.length_penalty, penalty)
        },
    },
    RequestOption {
        name: "early_stopping",
        aliases: &[],
        expected: "true, false or \"never\"",
        default: "false",
        doc: "When a beam search that has as many hypotheses as beams ends: `true`, at once; `false`, when the \
              best running beam as it is now would not be among them; `never`, when no running beam can still \
              become better, however long it gets.",
        set: |o, v| set(&mut o.beams.early_stopping, early_stopping(v).map(Some)),
    },
    RequestOption {
        name: "beam_search_diversity_rate",
        aliases: &[],
        expected: "a number from 0 to 100",
        default: "0: off",
        doc: "Subtracted from the score of a continuation for each better continuation of the same beam, so that \
              beams differ more.",
        set: |o, v| set(&mut o.beams.diversity_rate, number(v, 0.0..=100.0)),
    },
    RequestOption {
        name: "pad_id",
        aliases: &[],
        expected: "an integer from -2147483648 to 2147483647",
        default: "the first end id, or 0",
        doc: "Pads the `output_ids` of the shorter ones of several sequences.",
        set: |o, v| set(&mut o.pad_id, signed(v).map(Some)),
    },
    RequestOption {
        name: "temperature",
        aliases: &[],
        expected: "a number from 0 to 100",
        default: "0 (greedy); 1 if `top_k`, `top_p`, `min_p` or `typical_p` is given",
        doc: "Divides the logits; 0 always takes the most likely token.",
        set: |o, v| set(&mut o.temperature, number(v, 0.0..=100.0).map(Some)),
    },
    RequestOption {
        name: "top_k",
        aliases: &["runtime_top_k"],
        expected: "an integer of -1 or more",
        default: "0: all",
        doc: "Keeps the `top_k` most likely tokens; 0 or -1 keeps all.",
        set: |o, v| {
            let all = (v.as_i64() == Some(-1)).then_some(0);
            set(
                &mut o.top_k,
                all.or_else(|| integer(v, 0..=MAX_COUNT)).map(Some),
            )
        },
    },
    RequestOption {
        name: "top_p",
        aliases: &["runtime_top_p"],
        expected: "a number from 0 to 1",
        default: "1: all",
        doc: "Keeps the most likely tokens whose probabilities reach this sum. `0` means what it means in \
              TensorRT-LLM: 1 beside a `top_k`, otherwise only the most likely token.",
        set: |o, v| set(&mut o.top_p, number(v, 0.0..=1.0).map(Some)),
    },
    RequestOption {
        name: "top_p_decay",
        aliases: &["runtime_top_p_decay"],
        expected: "a number above 0, up to 1",
        default: "1: off",
        doc: "After each token, `top_p` is multiplied by this.",
        set: |o, v| set(&mut o.top_p_decay, share(v).map(Some)),
    },
    RequestOption {
        name: "top_p_min",
        aliases: &["runtime_top_p_min"],
        expected: "a number from 0 to 1",
        default: "0.000001",
        doc: "The lowest value of `top_p`, from the second token on.",
        set: |o, v| set(&mut o.top_p_min, number(v, 0.0..=1.0).map(Some)),
    },
    RequestOption {
        name: "top_p_reset_ids",
        aliases: &["runtime_top_p_reset_ids"],
        expected: "a token id, or a JSON list of at most 16",
        default: "none",
        doc: "After one of these tokens, `top_p` returns to what the request gave.",
        set: |o, v| set(&mut o.top_p_reset_ids, ids(v, MAX_END_IDS)),
    },
    RequestOption {
        name: "min_p",
        aliases: &[],
        expected: "a number from 0 to 1",
        default: "0: all",
        doc: "Keeps tokens that are at least this fraction as likely as the most likely one.",
        set: |o, v| set(&mut o.min_p, number(v, 0.0..=1.0).map(Some)),
    },
    RequestOption {
        name: "typical_p",
        aliases: &[],
        expected: "a number above 0, up to 1",
        default: "1: all",
        doc: "Locally typical sampling: keeps the tokens whose information is closest to the expected information, \
              until their probabilities reach this sum. Applied after the options above.",
        set: |o, v| set(&mut o.typical_p, share(v).map(Some)),
    },
    RequestOption {
        name: "seed",
        aliases: &["random_seed"],
        expected: "an integer from 0 to 18446744073709551615, or -1",
        default: "0",
        doc: "Same seed, same text, whatever else runs. -1, which clients of other servers send, is as if no seed were given.",
        set: |o, v| set(&mut o.seed, seed(v)),
    },
    RequestOption {
        name: "repetition_penalty",
        aliases: &[],
        expected: "a number above 0, up to 100",
        default: "1: off",
        doc: "Makes tokens of prompt and output less likely (above 1) or more likely (below 1).",
        set: |o, v| {
            let penalty = number(v, 0.0..=100.0).filter(|penalty| *penalty > 0.0);
            set(&mut o.repetition_penalty, penalty.map(Some))
        },
    },
    RequestOption {
        name: "presence_penalty",
        aliases: &[],
        expected: "a number from -100 to 100",
        default: "0: off",
        doc: "Subtracted from the logit of every token that occurs in the output.",
        set: |o, v| set(&mut o.presence_penalty, number(v, -100.0..=100.0)),
    },
    RequestOption {
        name: "frequency_penalty",
        aliases: &[],
        expected: "a number from -100 to 100",
        default: "0: off",
        doc: "The same, once per occurrence.",
        set: |o, v| set(&mut o.frequency_penalty, number(v, -100.0..=100.0)),
    },
    RequestOption {
        name: "prompt_ignore_length",
        aliases: &[],
        expected: "an integer of 0 or more",
        default: "the whole prompt, as OpenAI and vLLM define the penalties",
        doc: "How many tokens at the beginning of the prompt `presence_penalty` and `frequency_penalty` ignore; \
              later prompt tokens count like the output. 0 is how TensorRT-LLM defines the penalties.",
        set: |o, v| {
            set(
                &mut o.prompt_ignore_length,
                integer(v, 0..=MAX_COUNT).map(Some),
            )
        },
    },
    RequestOption {
        name: "no_repeat_ngram_size",
        aliases: &[],
        expected: "an integer from 0 to 64",
        default: "0: off",
        doc: "No n-gram of this size occurs twice in prompt and output. If that leaves no token, the output ends \
              with `finish_reason` `length`.",
        set: |o, v| set(&mut o.no_repeat_ngram_size, integer(v, 0..=MAX_NGRAM_SIZE)),
    },
    RequestOption {
        name: "logit_bias",
        aliases: &[],
        expected: "a JSON object of at most 1024 tokens, each with a number from -1000 to 1000",
        default: "none",
        doc: "Added to the logits of single tokens: `{\"50256\": -100}`.",
        set: |o, v| set(&mut o.logit_bias, biases(v)),
    },
    RequestOption {
        name: "embedding_bias",
        aliases: &[],
        expected: "a number up to 1000, or minus infinity, for each token of the vocabulary",
        default: "none",
        doc: "Added to the logits like `logit_bias`: a list of numbers, one per token. Minus infinity (in JSON \
              `\"-inf\"`) forbids the token.",
        set: |o, v| set(&mut o.embedding_bias, all_biases(v)),
    },
    RequestOption {
        name: "embedding_bias_words",
        aliases: &[],
        expected: WORDS,
        default: "none",
        doc: "Texts to the logits of whose tokens `embedding_bias_weights` are added, like `logit_bias`.",
        set: |o, v| set(&mut o.embedding_bias_words, words(v)),
    },
    RequestOption {
        name: "embedding_bias_weights",
        aliases: &[],
        expected: "a number from -1000 to 1000, or a JSON list of at most 64",
        default: "none",
        doc: "One number for each of `embedding_bias_words`.",
        set: |o, v| set(&mut o.embedding_bias_weights, weights(v)),
    },
    RequestOption {
        name: "allowed_token_ids",
        aliases: &[],
        expected: "a JSON list of 1 to 65536 token ids",
        default: "all",
        doc: "No other token can be chosen. End ids are not included by themselves.",
        set: |o, v| set(&mut o.allowed_token_ids, allowed_ids(v).map(Some)),
    },
    RequestOption {
        name: "end_id",
        aliases: &["end_ids"],
        expected: "a token id, or a JSON list of at most 16",
        default: "the model's end ids",
        doc: "Tokens that end the output, instead of the model's. -1 means none, like `ignore_eos`.",
        set: |o, v| set(&mut o.end_ids, end_ids(v).map(Some)),
    },
    RequestOption {
        name: "ignore_eos",
        aliases: &[],
        expected: "true or false",
        default: "false",
        doc: "No end id ends the output; `stop_token_ids` and `stop` still do.",
        set: |o, v| set(&mut o.ignore_eos, flag(v)),
    },
    RequestOption {
        name: "stop_token_ids",
        aliases: &[],
        expected: "a token id, or a JSON list of at most 16",
        default: "none",
        doc: "Tokens that end the output in addition to the end ids, like a stop word: the token is in \
              `output_ids`, but not in `text_output`.",
        set: |o, v| set(&mut o.stop_token_ids, ids(v, MAX_END_IDS)),
    },
    RequestOption {
        name: "priority",
        aliases: &["request_priority"],
        expected: "an integer from -2147483648 to 2147483647",
        default: "0",
        doc: "Order inside the backend: smaller numbers first, equal ones by arrival. The request with the largest \
              number is paused first. (Over gRPC and in HTTP's `/infer`, Triton keeps `priority` to itself: write \
              `request_priority` there. Requests that wait for a slot in Triton's sequence batcher are in order of \
              arrival.)",
        set: |o, v| set(&mut o.priority, signed(v)),
    },
    RequestOption {
        name: "kv_cache_reuse",
        aliases: &[],
        expected: "true or false",
        default: "true",
        doc: "`false`: uses no blocks of earlier requests and leaves none to later ones.",
        set: |o, v| set(&mut o.reuse.enabled, flag(v)),
    },
    RequestOption {
        name: "cache_salt",
        aliases: &[],
        expected: "a text of 1 to 256 bytes",
        default: "none",
        doc: "Blocks are shared only with requests of the same salt, so that tenants cannot infer from latency \
              what others have asked.",
        set: |o, v| {
            // With a NUL begin the salts of adapters.
            let salt = v.as_str().filter(|salt| {
                (1..=MAX_WORD_BYTES).contains(&salt.len()) && !salt.starts_with('\0')
            });
            set(&mut o.reuse.salt, salt.map(|salt| Some(salt.into())))
        },
    },
    RequestOption {
        name: "lora_name",
        aliases: &[],
        expected: "a text of 1 to 256 bytes",
        default: "none",
        doc: "The LoRA adapter to compute the answer with: a name in the model's `multi_lora.json`, or of a folder in \
              its `lora_dir`. Requests with different adapters are computed in the same steps. See \
              [Adapters](adapters.md).",
        set: |o, v| {
            let name = v
                .as_str()
                .filter(|name| (1..=MAX_WORD_BYTES).contains(&name.len()));
            set(&mut o.lora_name, name.map(|name| Some(name.to_owned())))
        },
    },
    RequestOption {
        name: "lora_task_id",
        aliases: &[],
        expected: "an integer from 0 to 18446744073709551615",
        default: "none",
        doc: "The same, for an adapter whose name is a number, that is in a folder of that number in `lora_prefetch_dir`, or \
              that a request has brought under it.",
        set: |o, v| set(&mut o.lora_task_id, v.as_u64().map(Some)),
    },
    RequestOption {
        name: "stop",
        aliases: &["stop_words"],
        expected: WORDS,
        default: "none",
        doc: "Texts that end the output; `text_output` stops before them. A list is written as a JSON string: \
              `\"[\\\"\\\\n\\\", \\\"END\\\"]\"`. `stop: true` makes this a stop request: it ends the request in \
              flight with the same request id, and generates nothing itself.",
        set: |o, v| set(&mut o.stop, words(v)),
    },
    RequestOption {
        name: "include_stop_str_in_output",
        aliases: &[],
        expected: "true or false",
        default: "false",
        doc: "`text_output` ends with the stop word, or with the text of the token, that ended it.",
        set: |o, v| set(&mut o.text.include_stop, flag(v)),
    },
    RequestOption {
        name: "bad_words",
        aliases: &[],
        expected: WORDS,
        default: "none",
        doc: "Texts whose tokens the output must not contain, with or without a space before them.",
        set: |o, v| set(&mut o.bad_words, words(v)),
    },
    RequestOption {
        name: "stop_words_list",
        aliases: &[],
        expected: ID_WORDS,
        default: "none",
        doc: "Stop words as token ids: `[[11, 12, 13], [2, 3, -1]]` are the words 11 12 and 13. The output ends \
              with the word, as in TensorRT-LLM.",
        set: |o, v| set(&mut o.stop_ids, id_words(v)),
    },
    RequestOption {
        name: "bad_words_list",
        aliases: &[],
        expected: ID_WORDS,
        default: "none",
        doc: "Words that the output must not contain, as token ids in the form of `stop_words_list`.",
        set: |o, v| set(&mut o.bad_ids, id_words(v)),
    },
    RequestOption {
        name: "guided_decoding_guide_type",
        aliases: &[],
        expected: "'json', 'json_schema', 'regex', 'ebnf_grammar' or 'structural_tag'",
        default: "none: the output is free",
        doc: "The kind of `guided_decoding_guide`. `json` is any JSON object or array, and needs no guide. Every \
              output conforms to its guide unless `max_tokens` or a stop word cuts it short; it ends with an end id \
              where the guide allows the end. See [Guided decoding](guided-decoding.md).",
        set: |o, v| o.guide.set_type(v),
    },
    RequestOption {
        name: "guided_decoding_guide",
        aliases: &[],
        expected: "a text",
        default: "none",
        doc: "The JSON schema, the regular expression (syntax of Rust's `regex`; the whole output must match), or \
              the grammar: EBNF with rules `root ::= ...`, as in llama.cpp and XGrammar, or Lark with rules `start: \
              ...`; or the structural tag.",
        set: |o, v| o.guide.set_guide(v),
    },
    RequestOption {
        name: "structured_outputs",
        aliases: &["guided_decoding"],
        expected: "a JSON object with one of 'json', 'regex', 'choice', 'grammar', 'structural_tag' and 'json_object'",
        default: "none",
        doc: "The same in vLLM's form: `{\"json\": {...}}` is a schema, `{\"choice\": [\"yes\", \"no\"]}` a list \
              of texts, `{\"json_object\": true}` any JSON object.",
        set: |o, v| o.guide.add_structured_outputs(v),
    },
    RequestOption {
        name: "guided_json",
        aliases: &[],
        expected: "a JSON schema: an object, true or false",
        default: "none",
        doc: "The output is JSON that conforms to the schema.",
        set: |o, v| o.guide.add_json(v),
    },
    RequestOption {
        name: "guided_regex",
        aliases: &[],
        expected: "a regular expression",
        default: "none",
        doc: "The whole output matches it.",
        set: |o, v| o.guide.add_regex(v),
    },
    RequestOption {
        name: "guided_choice",
        aliases: &[],
        expected: "a JSON list of 1 to 1024 texts",
        default: "none",
        doc: "The output is one of the texts.",
        set: |o, v| o.guide.add_choice(v),
    },
    RequestOption {
        name: "guided_grammar",
        aliases: &[],
        expected: "a grammar",
        default: "none",
        doc: "The output conforms to the grammar, in EBNF or in Lark's syntax.",
        set: |o, v| o.guide.add_grammar(v),
    },
    RequestOption {
        name: "structural_tag",
        aliases: &[],
        expected: "a JSON object",
        default: "none",
        doc: "Free text with parts of a given form: a structural tag of XGrammar, vLLM or OpenAI. See [Structural \
              tags](guided-decoding.md#structural-tags).",
        set: |o, v| o.guide.add_structure(v),
    },
    RequestOption {
        name: "logits_post_processor_name",
        aliases: &[],
        expected: "a text of at most 256 bytes",
        default: "none",
        doc: "Changes the logits before anything else does: one of the [Logits \
              post-processors](logits-processors.md).",
        set: |o, v| o.post_processor.set_name(v),
    },
    RequestOption {
        name: "logits_post_processor_args",
        aliases: &[],
        expected: "a text of at most 65536 bytes, or a JSON object",
        default: "none",
        doc: "Arguments of the post-processor, in its own syntax; the built-in ones take a JSON object.",
        set: |o, v| o.post_processor.set_arguments(v),
    },
    RequestOption {
        name: "client_id",
        aliases: &[],
        expected: "an integer from 0 to 18446744073709551615",
        default: "none",
        doc: "Identifies the client to the logits post-processor, and to nothing else. Any number of requests in \
              flight may share it; the request id is what must be unique.",
        set: |o, v| set(&mut o.client_id, unsigned(v).map(ClientId).map(Some)),
    },
    RequestOption {
        name: "stream",
        aliases: &["streaming"],
        expected: "true or false",
        default: "false",
        doc: "Responses while the output is generated, each with what is new: one per token, or per \
              `stream_interval` tokens, instead of one at the end.",
        set: |o, v| set(&mut o.stream, flag(v)),
    },
    RequestOption {
        name: "stream_interval",
        aliases: &[],
        expected: "an integer of 1 or more",
        default: "the model's `stream_interval`",
        doc: "Tokens per response of a stream. The first response has the first token, at once, and the last has \
              whatever is left. With several sequences, at least one of them has this many new tokens. A response \
              leaves earlier if it would otherwise become so large that the steps of others had to wait for it: at \
              600 tokens of text, or 300 entries of `logprobs`, over all its sequences.",
        set: |o, v| set(&mut o.stream_interval, integer(v, 1..=MAX_COUNT).map(Some)),
    },
    RequestOption {
        name: "exclude_input_in_output",
        aliases: &["exclude_input_from_output"],
        expected: "true or false",
        default: "the model's `exclude_input_in_output`",
        doc: "Whether a full answer leaves out the prompt.",
        set: |o, v| set(&mut o.exclude_input_in_output, flag(v).map(Some)),
    },
    RequestOption {
        name: "detokenize",
        aliases: &[],
        expected: "true or false",
        default: "true",
        doc: "`false`: tokens are not turned into text; `text_output` is empty except for the prompt.",
        set: |o, v| set(&mut o.text.detokenize, flag(v)),
    },
    RequestOption {
        name: "skip_special_tokens",
        aliases: &[],
        expected: "true or false",
        default: "the model's `skip_special_tokens`",
        doc: "Whether special tokens are left out of `text_output`.",
        set: |o, v| set(&mut o.text.skip_special_tokens, flag(v).map(Some)),
    },
    RequestOption {
        name: "spaces_between_special_tokens",
        aliases: &[],
        expected: "true or false",
        default: "true",
        doc: "`false`: consecutive special tokens are written without the space that some tokenizers put between \
              tokens.",
        set: |o, v| set(&mut o.text.spaces_between_special_tokens, flag(v)),
    },
    RequestOption {
        name: "messages",
        aliases: &[],
        expected: "a JSON list of objects",
        default: "none",
        doc: "A conversation as a JSON string, `[{\"role\": \"user\", \"content\": \"...\"}]`; the model's chat \
              template turns it into the prompt. `text_input` is empty then.",
        set: |o, v| o.chat.set_messages(v),
    },
    RequestOption {
        name: "images",
        aliases: &["image", "image_bytes_input", "image_url_input", "image_url"],
        expected: "base64 or a data URL, or a JSON list of them",
        default: "none",
        doc: "The [images](images.md) of the prompt in order, each as base64 or as a `data:` URL. As an input tensor of type BYTES each \
              element may also be the file itself. Decoded images come in the input tensor `image_pixels`. Images may also be in \
              `messages`.",
        set: |o, v| set(&mut o.images, image_texts(v)),
    },
    RequestOption {
        name: "tools",
        aliases: &[],
        expected: "a JSON list of at most 128 objects",
        default: "none",
        doc: "Functions that the model may call, in OpenAI's form: `[{\"type\": \"function\", \"function\": {\"name\": \
              ..., \"description\": ..., \"parameters\": {...}}}]`, where the parameters are a JSON schema. The chat \
              template describes them to the model. See [Chat](chat.md).",
        set: |o, v| o.chat.set_tools(v),
    },
    RequestOption {
        name: "tool_choice",
        aliases: &[],
        expected: "'none', 'auto', 'required' or a JSON object {\"type\": \"function\", \"function\": {\"name\": ...}} or {\"type\": \
                   \"allowed_tools\", \"allowed_tools\": {\"mode\": \"auto\", \"tools\": [...]}}",
        default: "auto",
        doc: "Which of the `tools` the model calls: `auto` leaves it to the model, `required` is at least one, an object the one of \
              this name, or those that it allows, and `none` hides them from the model. A call that must be is well-formed, because a guide makes it so: \
              see [Chat](chat.md#calls-that-are-well-formed).",
        set: |o, v| o.chat.set_tool_choice(v),
    },
    RequestOption {
        name: "parallel_tool_calls",
        aliases: &[],
        expected: "true or false",
        default: "true",
        doc: "`false`: no more than one call in a reply, where a guide can tell calls from text.",
        set: |o, v| o.chat.set_parallel_tool_calls(v),
    },
    RequestOption {
        name: "documents",
        aliases: &[],
        expected: "a JSON list of objects",
        default: "none",
        doc: "Texts for the chat template, `[{\"title\": ..., \"text\": ...}]`, if it reads any.",
        set: |o, v| o.chat.set_documents(v),
    },
    RequestOption {
        name: "chat_template",
        aliases: &[],
        expected: "a text of 1 to 256 bytes",
        default: "`tool_use` if there are tools and such a template, else `default`",
        doc: "The name of one of the checkpoint's chat templates. (The text of a template is not accepted.)",
        set: |o, v| o.chat.set_template(v),
    },
    RequestOption {
        name: "chat_template_kwargs",
        aliases: &[],
        expected: "a JSON object without messages, tools, documents, add_generation_prompt and continue_final_message, which \
                   are options",
        default: "none",
        doc: "Variables for the chat template, such as `{\"enable_thinking\": false}`.",
        set: |o, v| o.chat.set_variables(v),
    },
    RequestOption {
        name: "add_generation_prompt",
        aliases: &[],
        expected: "true or false",
        default: "true, without `continue_final_message`",
        doc: "`false`: the prompt ends behind the last message, and not where the assistant's answer begins.",
        set: |o, v| o.chat.set_generation_prompt(v),
    },
    RequestOption {
        name: "continue_final_message",
        aliases: &[],
        expected: "true, false, 'content' or 'reasoning_content'",
        default: "false",
        doc: "The prompt ends within the last message, behind its `content` or the field that is named, so that the answer \
              continues it.",
        set: |o, v| o.chat.set_continued(v),
    },
    RequestOption {
        name: "dimensions",
        aliases: &[],
        expected: "an integer of 1 or more",
        default: "all",
        doc: "With `task: embed`: how many elements of the embedding are returned, from the first. They are normalised by \
              themselves. For models that are trained for that (Matryoshka).",
        set: |o, v| set(&mut o.dimensions, integer(v, 1..=MAX_COUNT).map(Some)),
    },
    RequestOption {
        name: "normalize",
        aliases: &[],
        expected: "true or false",
        default: "the model's `normalize`",
        doc: "With `task: embed`: whether the embedding is divided by its length.",
        set: |o, v| set(&mut o.normalize, flag(v).map(Some)),
    },
    RequestOption {
        name: "text_pair",
        aliases: &[],
        expected: "a text",
        default: "none",
        doc: "With `task: score` or `classify`: the second text of a pair, such as the document whose relevance to the query in \
              `text_input` is wanted. The tokenizer joins them.",
        set: |o, v| {
            set(
                &mut o.text_pair,
                v.as_str().map(|text| Some(text.to_owned())),
            )
        },
    },
    RequestOption {
        name: "token_type_ids",
        aliases: &[],
        expected: "a JSON list of a 0 for each token of a first text, and then a 1 for each of a second",
        default: "0 for all tokens",
        doc: "The types of the tokens in `input_ids` or `prompt_token_ids`, for encoders that tell the texts of a pair apart (BERT). The \
              tokenizer gives those of texts.",
        set: |o, v| set(&mut o.token_types, token_types(v, MAX_PROMPT_IDS).map(Some)),
    },
    RequestOption {
        name: "raw_scores",
        aliases: &[],
        expected: "true or false",
        default: "false",
        doc: "With `task: score` or `classify`: whether the model's own numbers are returned, before they become probabilities.",
        set: |o, v| set(&mut o.raw_scores, flag(v)),
    },
    RequestOption {
        name: "prompt_token_ids",
        aliases: &[],
        expected: "a JSON list of at most 65536 token ids",
        default: "none",
        doc: "The prompt as tokens, for models that take text; `text_input` is empty. No special tokens are added.",
        set: |o, v| set(&mut o.prompt_token_ids, ids(v, MAX_PROMPT_IDS)),
    },
    RequestOption {
        name: "prompt_only",
        aliases: &[],
        expected: "true or false",
        default: "false",
        doc: "`true`: nothing is computed. The answer is the prompt, its text (a conversation as the chat template renders it) \
              in `text_output` and its tokens in `output_ids`, without an output token, whatever \
              `exclude_input_in_output` says. Models that embed, score or classify have it too.",
        set: |o, v| set(&mut o.prompt_only, flag(v)),
    },
    RequestOption {
        name: "truncate_prompt_tokens",
        aliases: &[],
        expected: "an integer of 1 or more, or -1",
        default: "the whole prompt",
        doc: "Keeps this many tokens at the end of the prompt; where nothing is generated, at its beginning, with the special tokens \
              around it. -1: as many as fit into `max_seq_len`, in front of `max_tokens` tokens of output, or of one.",
        set: |o, v| {
            let kept = match signed(v) {
                Some(-1) => Some(Truncation::ToRoom),
                _ => integer(v, 1..=MAX_COUNT).map(Truncation::To),
            };
            set(&mut o.truncate_prompt_tokens, kept.map(Some))
        },
    },
    RequestOption {
        name: "input_lengths",
        aliases: &[],
        expected: "an integer of 1 or more",
        default: "the length of `input_ids`",
        doc: "How many of `input_ids` are the prompt; the rest is padding.",
        set: |o, v| set(&mut o.input_length, integer(v, 1..=MAX_COUNT).map(Some)),
    },
    RequestOption {
        name: "timeout",
        aliases: &[],
        expected: "an integer of 0 or more, in microseconds",
        default: "0: none",
        doc: "Ends the request, with what it has, this long after it reached the backend. (Over gRPC and in HTTP's \
              `/infer` this is Triton's own `timeout`, which also applies while the request waits for a slot.)",
        set: |o, v| set(&mut o.timeout_us, unsigned(v)),
    },
    RequestOption {
        name: "return_finish_reason",
        aliases: &[],
        expected: "true or false",
        default: "true",
        doc: "`false` leaves out the output `finish_reason`.",
        set: |o, v| o.want(OutputKind::FinishReason, v),
    },
    RequestOption {
        name: "return_num_input_tokens",
        aliases: &[],
        expected: "true or false",
        default: "true",
        doc: "`false` leaves out the output `num_input_tokens`.",
        set: |o, v| o.want(OutputKind::NumInputTokens, v),
    },
    RequestOption {
        name: "return_num_output_tokens",
        aliases: &[],
        expected: "true or false",
        default: "true",
        doc: "`false` leaves out the output `num_output_tokens`.",
        set: |o, v| o.want(OutputKind::NumOutputTokens, v),
    },
    RequestOption {
        name: "return_output_ids_json",
        aliases: &[],
        expected: "true or false",
        default: "false",
        doc: "Adds the output `output_ids_json`: the ids of `output_ids` as JSON text, `[[12,5,7]]`, one list per \
              sequence, without padding. It is always a list of lists, even over `/generate`, where Triton writes \
              the `output_ids` of one token as a number and those of several sequences as one list.",
        set: |o, v| o.ask("return_output_ids_json", &[OutputKind::OutputIdsJson], v),
    },
    RequestOption {
        name: "return_log_probs",
        aliases: &[],
        expected: "true or false",
        default: "false",
        doc: "Adds the outputs `output_log_probs` and `cum_log_probs`.",
        set: |o, v| {
            const OUTPUTS: &[OutputKind] = &[OutputKind::OutputLogProbs, OutputKind::CumLogProbs];
            o.ask("return_log_probs", OUTPUTS, v)
        },
    },
    RequestOption {
        name: "return_cumulative_logprob",
        aliases: &[],
        expected: "true or false",
        default: "false",
        doc: "Adds the output `cumulative_logprob`.",
        set: |o, v| {
            o.ask(
                "return_cumulative_logprob",
                &[OutputKind::CumulativeLogprob],
                v,
            )
        },
    },
    RequestOption {
        name: "logprobs",
        aliases: &[],
        expected: "an integer from 0 to 20",
        default: "0, with `return_logprobs`",
        doc: "Adds the output `logprobs`, with this many of the most likely tokens at each position, and the token \
              itself.",
        set: |o, v| {
            set(&mut o.num_logprobs, integer(v, 0..=MAX_LOGPROBS).map(Some))?;
            o.ask("logprobs", &[OutputKind::Logprobs], &Value::Bool(true))
        },
    },
    RequestOption {
        name: "return_logprobs",
        aliases: &[],
        expected: "true or false",
        default: "true, with `logprobs`",
        doc: "Adds the output `logprobs`; `false` leaves it out.",
        set: |o, v| match flag(v)? {
            true => o.ask("return_logprobs", &[OutputKind::Logprobs], v),
            false => o.want(OutputKind::Logprobs, v),
        },
    },
    RequestOption {
        name: "prompt_logprobs",
        aliases: &[],
        expected: "an integer from 0 to 20",
        default: "none",
        doc: "Adds the output `prompt_logprobs`: the same for the tokens of the prompt. The whole prompt is computed, whatever \
              is in the cache.",
        set: |o, v| {
            set(
                &mut o.num_prompt_logprobs,
                integer(v, 0..=MAX_LOGPROBS).map(Some),
            )?;
            o.ask(
                "prompt_logprobs",
                &[OutputKind::PromptLogprobs],
                &Value::Bool(true),
            )
        },
    },
    RequestOption {
        name: "return_context_logits",
        aliases: &[],
        expected: "true or false",
        default: "false",
        doc: "Adds the output `context_logits`. The whole prompt is computed, whatever is in the cache.",
        set: |o, v| o.ask("return_context_logits", &[OutputKind::ContextLogits], v),
    },
    RequestOption {
        name: "return_generation_logits",
        aliases: &[],
        expected: "true or false",
        default: "false",
        doc: "Adds the output `generation_logits`.",
        set: |o, v| {
            o.ask(
                "return_generation_logits",
                &[OutputKind::GenerationLogits],
                v,
            )
        },
    },
    RequestOption {
        name: "return_stop_reason",
        aliases: &[],
        expected: "true or false",
        default: "false",
        doc: "Adds the output `stop_reason`.",
        set: |o, v| o.ask("return_stop_reason", &[OutputKind::StopReason], v),
    },
    RequestOption {
        name: "return_reasoning_content",
        aliases: &["separate_reasoning"],
        expected: "true or false",
        default: "true, for `messages` of a model with a `reasoning_parser`",
        doc: "Adds the output `reasoning_content`: what the model thought before it answered, which `text_output` then leaves \
              out. `false` leaves it in `text_output`. See [Chat](chat.md#the-parts-of-a-reply).",
        set: |o, v| match flag(v)? {
            true => o.ask(
                "return_reasoning_content",
                &[OutputKind::ReasoningContent],
                v,
            ),
            false => o.want(OutputKind::ReasoningContent, v),
        },
    },
    RequestOption {
        name: "thinking_token_budget",
        aliases: &[],
        expected: "an integer of 0 or more",
        default: "no limit",
        doc: "The most tokens of the reasoning that a reply begins with. Behind them its end mark is forced, and the model \
              answers. `0`: a reply that begins with the mark of a thought ends the thought at once.",
        set: |o, v| {
            set(
                &mut o.thinking_token_budget,
                integer(v, 0..=MAX_COUNT).map(Some),
            )
        },
    },
    RequestOption {
        name: "return_tool_calls",
        aliases: &[],
        expected: "true or false",
        default: "true, for `tools` of a model with a `tool_call_parser`",
        doc: "Adds the output `tool_calls`: the functions that the model calls, which `text_output` then leaves out. `false` \
              leaves them in `text_output`.",
        set: |o, v| match flag(v)? {
            true => o.ask("return_tool_calls", &[OutputKind::ToolCalls], v),
            false => o.want(OutputKind::ToolCalls, v),
        },
    },
    RequestOption {
        name: "return_perf_metrics",
        aliases: &[],
        expected: "true or false",
        default: "false",
        doc: "Adds the outputs `kv_cache_alloc_new_blocks`, `kv_cache_reused_blocks`, \
              `kv_cache_alloc_total_blocks`, `arrival_time_ns`, `first_scheduled_time_ns`, `first_token_time_ns`, \
              `last_token_time_ns`, and, for draft tokens, `acceptance_rate`, `total_accepted_draft_tokens`, and \
              `total_draft_tokens` to the last response.",
        set: |o, v| o.ask("return_perf_metrics", OutputKind::PERF_METRICS, v),
    },
    RequestOption {
        name: "num_draft_tokens",
        aliases: &[],
        expected: "an integer of 0 or more",
        default: "the model's `max_draft_tokens`",
        doc: "The most draft tokens per step for this request, if the model has `speculation`; never more than its \
              `max_draft_tokens`. `0` means none. The answer is the same with any number.",
        set: |o, v| set(&mut o.num_draft_tokens, integer(v, 0..=MAX_COUNT).map(Some)),
    },
    RequestOption {
        name: "draft_input_ids",
        aliases: &[],
        expected: "a JSON list of at most 65536 token ids",
        default: "none",
        doc: "The expected beginning of the output, right after the prompt. As long as it is right, several tokens \
              are verified in one step, if the model has `speculation`. The answer is the same with any list.",
        set: |o, v| set(&mut o.draft_input_ids, ids(v, MAX_DRAFT_IDS)),
    },
    RequestOption {
        name: "draft_text",
        aliases: &[],
        expected: "a text",
        default: "none",
        doc: "The expected beginning of the output, as text, in the place of `draft_input_ids`. Special tokens in it are \
              tokens; the chat template adds none.",
        set: |o, v| {
            set(
                &mut o.draft_text,
                v.as_str().map(|text| Some(text.to_owned())),
            )
        },
    },
    RequestOption {
        name: "return_usage",
        aliases: &[],
        expected: "true or false",
        default: "false",
        doc: "Adds the parameter `usage` to the last response, a JSON object with the numbers of tokens `num_cached_tokens` \
              (of the prompt, found in the KV cache), `num_reasoning_tokens`, and, of `draft_text` or `draft_input_ids`, \
              `num_draft_tokens` and `num_accepted_draft_tokens`. The first response of a stream has `num_cached_tokens`.",
        set: |o, v| set(&mut o.return_usage, flag(v)),
    },
    RequestOption {
        name: "return_error_code",
        aliases: &[],
        expected: "true or false",
        default: "false",
        doc: "As a parameter of the request: the message of an error begins with its code, `INVALID_ARG: ...`, `NOT_FOUND`, \
              `UNAVAILABLE`, `ALREADY_EXISTS`, `UNSUPPORTED`, `CANCELLED`, `INTERNAL`, or `UNKNOWN`. Errors of gRPC's streams have no other \
              code.",
        // The response reads it, as errors may come before the options are read.
        set: |_, v| flag(v).map(drop),
    },
    RequestOption {
        name: "sampling_parameters",
        aliases: &[],
        expected: "a JSON object of options",
        default: "none",
        doc: "Any of the options above in one JSON string, in the form of vLLM's backend; lists and objects are \
              written as they are.",
        // Its members are options themselves: `RequestOptions::parse` unfolds it.
        set: |_, _| None,
    },
];

/// The table of all options in `docs/src/request-options.md`.
pub fn reference_table() -> String {
    let mut table =
        String::from("| option | value | default | what it does |\n|---|---|---|---|\n");
    for RequestOption {
        name,
        aliases,
        expected,
        default,
        doc,
        ..
    } in OPTIONS
    {
        let names = std::iter::once(name)
            .chain(*aliases)
            .map(|name| format!("`{name}`"));
        let names = names.collect::<Vec<_>>().join(", ");
        // Writing to a String cannot fail.
        let _ = writeln!(table, "| {names} | {expected} | {default} | {doc} |");
    }
    table
}

impl RequestOptions {
    fn ask(
        &mut self,
        option: &'static str,
        outputs: &'static [OutputKind],
        value: &Value,
    ) -> Option<()> {
        if flag(value)? && !self.asked.contains(&(option, outputs)) {
            self.asked.push((option, outputs));
        }
        Some(())
    }

    fn want(&mut self, output: OutputKind, value: &Value) -> Option<()> {
        let list = match flag(value)? {
            true => &mut self.wanted,
            false => &mut self.omitted,
        };
        if !list.contains(&output) {
            list.push(output);
        }
        Some(())
    }
}
