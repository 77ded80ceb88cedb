//! Every architecture against Hugging Face transformers: see tests/fixtures/make_fixtures.py.

use std::fs;

use inflight_base::TokenId;
use inflight_engine::OutputOptions;
use inflight_sampling::TokenLogProbs;
use serde::Deserialize;

use inflight_runner::Runner;

use crate::errors::largest_error;
use crate::support::{Request, Served, Setup, fixture, serve, simds};
use inflight_reference_device::{Reference, ReferenceOptions};

/// The results of transformers for a fixture.
#[derive(Deserialize)]
struct Expected {
    prompts: Vec<Prompt>,
}

/// A prompt, what follows it, and the logits of each step. `bf16_cost` is how much rounding changes them.
#[derive(Deserialize)]
pub struct Prompt {
    pub prompt: Vec<TokenId>,
    pub greedy: Vec<TokenId>,
    pub logits: Vec<Vec<f32>>,
    pub bf16_cost: f32,
}

/// The two prompts of a fixture.
pub fn prompts(name: &str) -> Vec<Prompt> {
    let text = fs::read_to_string(fixture(name).join("expected.json")).expect("expected.json");
    let expected: Expected = serde_json::from_str(&text).expect("expected.json");
    assert_eq!(expected.prompts.len(), 2);
    expected.prompts
}

/// The most that rounding to bf16 changes a logit of a fixture.
pub fn bf16_cost(name: &str) -> f32 {
    let prompts = prompts(name);
    let costs = prompts.iter().map(|prompt| prompt.bf16_cost);
    costs.fold(0.0, f32::max)
}

/// Compares tokens and logits. `logits` are transformers', rounded where we round. The remaining differences
/// are sums in another order that fall on the other side of a rounding boundary: a fraction of the cost of
/// rounding.
fn agrees_with_transformers(name: &str) {
    agrees_within(name, 0.5);
}

/// The same for quantised weights. There a number that falls on the other side may be the largest of its 32 neighbours,
/// which all are rounded anew then, so what remains is as if both had been rounded at random: up to twice what the
/// rounding costs. (The weights themselves are compared one by one in crates/runner/src/model_source.rs.)
pub fn quantised_agrees_with_transformers(name: &str) {
    agrees_within(&format!("quantised/{name}"), 1.5);
}

/// Compares tokens and logits on every instruction set; logits may differ by a share of the cost of rounding.
pub fn agrees_within(name: &str, share_of_cost: f32) {
    for simd in simds() {
        let setup = Setup {
            simd: Some(simd),
            ..Setup::default()
        };
        let load = || setup.load(name);
        agrees_on(
            &format!("{name}, {simd}"),
            name,
            &setup,
            load,
            share_of_cost,
        );
    }
}

/// The same on the reference device, with the residual add in the projections and as a separate operation. It rounds in
/// the same places as transformers were made to, and adds in f64, so hardly any number is rounded differently.
fn reference_agrees_with_transformers(name: &str) {
    for has_whole_sums in [true, false] {
        let setup = Setup::default();
        let options = ReferenceOptions {
            has_whole_sums,
            ..ReferenceOptions::default()
        };
        let load = || setup.load_on::<Reference>(&fixture(name), &options);
        let share_of_cost = match name {
            // PyTorch rounds frequencies and angles to f32, which moves one number that is rounded to bf16 afterwards.
            "gemma4" | "gemma4-vl" => 0.5,
            // Sums in another order move a number across a rounding boundary in most runs of transformers, too.
            "laguna" => 0.5,
            _ => 0.1,
        };
        let what = format!("{name}, {options:?}");
        agrees_on(&what, name, &setup, load, share_of_cost);
    }
}

fn agrees_on(
    what: &str,
    name: &str,
    setup: &Setup,
    load: impl Fn() -> Box<dyn Runner>,
    share_of_cost: f32,
) {
    let prompts = prompts(name);
    let requests: Vec<_> = prompts
        .iter()
        .map(|expected| Request {
            outputs: OutputOptions {
                log_probs: Some(5),
                generation_logits: true,
                ..OutputOptions::default()
            },
            ..Request::greedy(&expected.prompt, expected.greedy.len() as u32)
        })
        .collect();
    let (served, _) = serve(&mut load(), setup, &requests);
    for (served, expected) in served.iter().zip(&prompts) {
        compare(what, served, expected, share_of_cost);
    }
    // The same logits again, as those of a prompt's last tokens.
    let contexts: Vec<_> = prompts.iter().map(all_as_prompt).collect();
    let (of_contexts, _) = serve(&mut load(), setup, &contexts);
    for ((served, of_context), expected) in served.iter().zip(&of_contexts).zip(&prompts) {
        let vocab_size = expected.logits[0].len();
        let rows: Vec<_> = of_context.context_logits.chunks(vocab_size).collect();
        assert_eq!(
            rows.len(),
            expected.prompt.len() + expected.greedy.len() - 1
        );
        let known = expected.prompt.len() - 1;
        assert_eq!(rows[known..].concat(), served.logits.concat());
        // The log-probabilities of generated tokens are the same where these are of the prompt.
        let of_prompt = &of_context.prompt_log_probs;
        assert_eq!(of_prompt.len(), rows.len() - 1, "none of the first token");
        let num_generated = expected.greedy.len() - 1;
        assert_eq!(of_prompt[known..], served.log_probs[..num_generated]);
        let prompt = expected.prompt[1..].iter();
        for ((row, token), ours) in rows.iter().zip(prompt).zip(of_prompt) {
            assert_eq!(ours.chosen.token, *token, "{what}");
            check_log_probs(what, ours, row, 1e-5);
        }
    }
}

/// A request for the logits of a prompt and all of its greedy tokens but the last, given as one prompt.
pub fn all_as_prompt(expected: &Prompt) -> Request {
    let (_, known) = expected.greedy.split_last().expect("tokens");
    Request {
        outputs: OutputOptions {
            context_logits: true,
            prompt_log_probs: Some(5),
            ..OutputOptions::default()
        },
        ..Request::greedy(&[&expected.prompt[..], known].concat(), 1)
    }
}

fn compare(what: &str, served: &Served, expected: &Prompt, share_of_cost: f32) {
    let error = largest_error(&served.logits.concat(), &expected.logits.concat());
    let (len, cost) = (expected.prompt.len(), expected.bf16_cost);
    println!("{what}, {len} tokens of context: largest error {error:.6}, bf16 costs {cost}");
    assert_eq!(served.tokens, expected.greedy, "{what}: greedy tokens");
    assert!(
        error <= cost * share_of_cost,
        "{what}: logits differ by {error}; all of bf16 costs {cost}"
    );
    assert_eq!(served.generation_logits, served.logits.concat(), "{what}");
    assert_eq!(served.log_probs.len(), expected.greedy.len());
    for (step, ours) in served.log_probs.iter().enumerate() {
        // Those of the logits that we had are exact, and theirs are as far off as the logits.
        let of_theirs = cost * 2.0 * share_of_cost;
        for (logits, tolerance) in [
            (&served.logits[step], 1e-5),
            (&expected.logits[step], of_theirs),
        ] {
            check_log_probs(what, ours, logits, tolerance);
        }
        assert_eq!(
            (ours.chosen.rank, ours.top[0]),
            (1, ours.chosen),
            "{what}: greedy"
        );
        assert!(
            ours.top.is_sorted_by(|a, b| a.log_prob >= b.log_prob),
            "{what}"
        );
    }
}

/// Checks log-probabilities against logits.
fn check_log_probs(what: &str, ours: &TokenLogProbs, logits: &[f32], tolerance: f32) {
    let theirs = log_softmax(logits);
    for it in std::iter::once(&ours.chosen).chain(&ours.top) {
        let (ours, theirs) = (f64::from(it.log_prob), theirs[it.token as usize]);
        assert!(
            (ours - theirs).abs() <= f64::from(tolerance),
            "{what}: {ours}, {theirs}"
        );
    }
}

/// By definition.
fn log_softmax(logits: &[f32]) -> Vec<f64> {
    let total: f64 = logits.iter().map(|&logit| f64::from(logit).exp()).sum();
    logits
        .iter()
        .map(|&logit| f64::from(logit) - total.ln())
        .collect()
}

/// Tests that call a function with the name of a fixture.
macro_rules! agree {
    ($agrees:path; $($test:ident: $name:literal,)*) => {
        $(#[test]
        fn $test() {
            $agrees($name);
        })*
    };
}
pub(crate) use agree;

agree! {
    agrees_with_transformers;
    llama_2_agrees_with_transformers: "llama2",
    llama_3_with_its_rope_scaling_and_tied_embeddings_agrees_with_transformers: "llama3",
    llama_with_linear_rope_scaling_agrees_with_transformers: "llama-linear",
    llama_with_yarn_agrees_with_transformers: "llama-yarn",
    llama_with_all_biases_agrees_with_transformers: "llama-biases",
    mistral_agrees_with_transformers: "mistral",
    qwen_2_agrees_with_transformers: "qwen2",
    qwen_3_agrees_with_transformers: "qwen3",
    mistral_with_a_window_agrees_with_transformers: "mistral-window",
    qwen_2_with_a_window_in_its_last_layer_agrees_with_transformers: "qwen2-windows",
    qwen_3_with_windows_by_layer_types_agrees_with_transformers: "qwen3-windows",
    smol_lm_3_agrees_with_transformers: "smollm3",
    seed_oss_agrees_with_transformers: "seed-oss",
    ministral_agrees_with_transformers: "ministral",
    phi_3_agrees_with_transformers: "phi3",
    phi_4_mini_agrees_with_transformers: "phi4-mini",
    glm_agrees_with_transformers: "glm",
    glm_4_agrees_with_transformers: "glm4",
    ernie_4_5_agrees_with_transformers: "ernie4-5",
    helium_agrees_with_transformers: "helium",
    arcee_agrees_with_transformers: "arcee",
    gemma_agrees_with_transformers: "gemma",
    gemma_2_agrees_with_transformers: "gemma2",
    gemma_3_agrees_with_transformers: "gemma3",
    olmo_2_agrees_with_transformers: "olmo2",
    olmo_3_agrees_with_transformers: "olmo3",
    granite_agrees_with_transformers: "granite",
    exaone_4_agrees_with_transformers: "exaone4",
    gpt_neox_agrees_with_transformers: "gpt-neox",
    opt_agrees_with_transformers: "opt",
    opt_350m_agrees_with_transformers: "opt-350m",
    gpt_2_agrees_with_transformers: "gpt2",
    cohere_agrees_with_transformers: "cohere",
    command_r_plus_agrees_with_transformers: "cohere-plus",
    cohere_2_agrees_with_transformers: "cohere2",
    stable_lm_agrees_with_transformers: "stablelm",
    stable_lm_2_12b_agrees_with_transformers: "stablelm-12b",
    nemotron_agrees_with_transformers: "nemotron",
    starcoder_2_agrees_with_transformers: "starcoder2",
    falcon_agrees_with_transformers: "falcon",
    falcon_with_grouped_queries_agrees_with_transformers: "falcon-grouped",
    falcon_with_linear_biases_agrees_with_transformers: "falcon-rw",
    bloom_agrees_with_transformers: "bloom",
    phi_2_agrees_with_transformers: "phi",
    gpt_j_agrees_with_transformers: "gptj",
    codegen_agrees_with_transformers: "codegen",
    olmo_agrees_with_transformers: "olmo",
    star_coder_agrees_with_transformers: "gpt-bigcode",
    star_coder_with_a_key_head_for_each_query_head_agrees_with_transformers: "gpt-bigcode-heads",
    vault_gemma_agrees_with_transformers: "vaultgemma",
    hyper_clova_x_agrees_with_transformers: "hyperclovax",
    jais_2_agrees_with_transformers: "jais2",
    granite_with_windows_agrees_with_transformers: "granite-swa",
    exaone_3_agrees_with_transformers: "exaone",
    cwm_agrees_with_transformers: "cwm",
    apertus_agrees_with_transformers: "apertus",
    flex_olmo_agrees_with_transformers: "flex-olmo",
    llama_4_agrees_with_transformers: "llama4",
    llama_4_with_images_agrees_with_transformers: "llama4-vl",
    hunyuan_agrees_with_transformers: "hunyuan",
    hunyuan_with_experts_agrees_with_transformers: "hunyuan-moe",
    ministral_3_agrees_with_transformers: "ministral3",
    ministral_3_with_images_agrees_with_transformers: "mistral3-ministral3",
    qwen_2_vl_agrees_with_transformers: "qwen2-vl",
    qwen_2_5_vl_agrees_with_transformers: "qwen2-5-vl",
    qwen_3_vl_agrees_with_transformers: "qwen3-vl",
    mistral_3_with_images_agrees_with_transformers: "mistral3",
    llava_agrees_with_transformers: "llava",
    lfm2_agrees_with_transformers: "lfm2",
    lfm2_moe_agrees_with_transformers: "lfm2-moe",
    lfm3_agrees_with_transformers: "lfm3",
    lfm3_with_images_agrees_with_transformers: "lfm3-vl",
    qwen_3_next_agrees_with_transformers: "qwen3-next",
    qwen_3_5_agrees_with_transformers: "qwen3-5",
    qwen_3_5_with_experts_agrees_with_transformers: "qwen3-5-moe",
    qwen_3_5_with_images_agrees_with_transformers: "qwen3-5-vl",
    qwen_3_5_with_experts_and_images_agrees_with_transformers: "qwen3-5-moe-vl",
    granite_4_agrees_with_transformers: "granite4",
    granite_4_without_experts_agrees_with_transformers: "granite4-dense",
    bamba_agrees_with_transformers: "bamba",
    nemotron_h_agrees_with_transformers: "nemotron-h",
    nemotron_h_with_experts_agrees_with_transformers: "nemotron-h-moe",
    falcon_h1_agrees_with_transformers: "falcon-h1",
    falcon_h1_with_norms_of_states_agrees_with_transformers: "falcon-h1-norm",
    lara_4_mini_agrees_with_transformers: "lara-mini",
    olmo_hybrid_agrees_with_transformers: "olmo-hybrid",
    kimi_linear_agrees_with_transformers: "kimi-linear",
    jamba_agrees_with_transformers: "jamba",
    mamba_agrees_with_transformers: "mamba",
    falcon_mamba_agrees_with_transformers: "falcon-mamba",
    mixtral_agrees_with_transformers: "mixtral",
    mixtral_with_all_experts_in_one_tensor_agrees_with_transformers: "mixtral-stacked",
    qwen_2_moe_agrees_with_transformers: "qwen2-moe",
    qwen_3_moe_agrees_with_transformers: "qwen3-moe",
    olmoe_agrees_with_transformers: "olmoe",
    phi_3_5_moe_agrees_with_transformers: "phimoe",
    glm_4_5_agrees_with_transformers: "glm4-moe",
    dots_1_agrees_with_transformers: "dots1",
    gemma_4_agrees_with_transformers: "gemma4",
    gemma_4_with_experts_agrees_with_transformers: "gemma4-moe",
    gemma_4_with_images_agrees_with_transformers: "gemma4-vl",
    granite_with_experts_agrees_with_transformers: "granite-moe",
    granite_with_a_shared_expert_agrees_with_transformers: "granite-moe-shared",
    ernie_4_5_with_experts_agrees_with_transformers: "ernie4-5-moe",
    minimax_m2_agrees_with_transformers: "minimax-m2",
    glm_4_7_flash_agrees_with_transformers: "glm4-moe-lite",
    solar_open_agrees_with_transformers: "solar-open",
    k_exaone_agrees_with_transformers: "exaone-moe",
    afmoe_agrees_with_transformers: "afmoe",
    gpt_oss_agrees_with_transformers: "gpt-oss",
    deepseek_moe_agrees_with_transformers: "deepseek",
    deepseek_v2_agrees_with_transformers: "deepseek-v2",
    deepseek_v2_lite_agrees_with_transformers: "deepseek-v2-lite",
    deepseek_v3_agrees_with_transformers: "deepseek-v3",
    ax_k1_agrees_with_transformers: "axk1",
    deepseek_v3_2_agrees_with_transformers: "deepseek-v32",
    glm_5_agrees_with_transformers: "glm-moe-dsa",
    kimi_k2_5_agrees_with_transformers: "kimi-k2-5",
    youtu_agrees_with_transformers: "youtu",
    mellum_2_agrees_with_transformers: "mellum",
    flint_agrees_with_transformers: "flint",
    kolibri_1_agrees_with_transformers: "kolibri1",
    laguna_agrees_with_transformers: "laguna",
    mimo_v2_agrees_with_transformers: "mimo-v2",
    longcat_flash_agrees_with_transformers: "longcat-flash",
    internlm_agrees_with_transformers: "internlm",
    ling_2_agrees_with_transformers: "ling",
    ling_1_agrees_with_transformers: "ling-lite",
    sarvam_105b_agrees_with_transformers: "sarvam-mla",
    sarvam_30b_agrees_with_transformers: "sarvam-moe",
    bitnet_3b_agrees_with_transformers: "bitnet-3b",
    qwen_1_agrees_with_transformers: "qwen",
    baichuan_2_agrees_with_transformers: "baichuan2",
    baichuan_13b_agrees_with_transformers: "baichuan-13b",
    chatglm_agrees_with_transformers: "chatglm",
    persimmon_agrees_with_transformers: "persimmon",
    step_3_5_agrees_with_transformers: "step3p5",
    step_3_7_agrees_with_transformers: "step3p7",
    hy3_agrees_with_transformers: "hy3",
    granite_with_experts_and_windows_agrees_with_transformers: "granite-moe-swa",
    qwen_3_vl_with_experts_agrees_with_transformers: "qwen3-vl-moe",
    exaone_4_5_agrees_with_transformers: "exaone4-5",
    gemma_3n_with_images_agrees_with_transformers: "gemma3n-vl",
    nanochat_agrees_with_transformers: "nanochat",
    gpt_neo_agrees_with_transformers: "gpt-neo",
    mpt_agrees_with_transformers: "mpt",
    bitnet_agrees_with_transformers: "bitnet",
    an_olmo_that_clips_agrees_with_transformers: "olmo-clip",
    an_mpt_that_clips_agrees_with_transformers: "mpt-clip",
    dbrx_agrees_with_transformers: "dbrx",
    cohere_2_with_experts_agrees_with_transformers: "cohere2-moe",
    internlm_2_agrees_with_transformers: "internlm2",
    internlm_3_agrees_with_transformers: "internlm3",
    iquest_coder_agrees_with_transformers: "iquest-coder",
    minicpm_agrees_with_transformers: "minicpm",
    minicpm_3_agrees_with_transformers: "minicpm3",
    mistral_4_agrees_with_transformers: "mistral4",
    a_sharded_checkpoint_agrees_with_transformers: "sharded",
    a_checkpoint_stored_in_f16_agrees_with_transformers: "stored-f16",
    a_checkpoint_stored_in_f32_agrees_with_transformers: "stored-f32",
}

/// One number that is rounded to the other side becomes as much as the whole cost in these, while the reference device
/// has transformers' logits.
#[test]
fn families_that_amplify_rounding_agree_with_transformers() {
    for name in ["biogpt", "gemma3n"] {
        agrees_within(name, 1.0);
    }
}

#[test]
fn the_reference_device_agrees_with_transformers() {
    for name in [
        "llama2",
        "llama3",
        "llama-yarn",
        "llama-biases",
        "mistral-window",
        "qwen2",
        "qwen3-windows",
        "smollm3",
        "glm",
        "gemma2",
        "gemma3",
        "olmo2",
        "olmo3",
        "granite",
        "gpt-neox",
        "opt",
        "opt-350m",
        "gpt2",
        "cohere2",
        "stablelm",
        "stablelm-12b",
        "nemotron",
        "starcoder2",
        "falcon-grouped",
        "falcon-rw",
        "bloom",
        "phi",
        "olmo",
        "gptj",
        "codegen",
        "gpt-bigcode",
        "granite-swa",
        "ministral3",
        "hunyuan",
        "hunyuan-moe",
        "llama4",
        "llama4-vl",
        "apertus",
        "lfm2",
        "lfm2-moe",
        "lfm3",
        "qwen3-next",
        "qwen3-5",
        "granite4",
        "glm4-moe",
        "nanochat",
        "bitnet",
        "olmo-clip",
        "dbrx",
        "cohere2-moe",
        "mistral4",
        "gpt-neo",
        "biogpt",
        "mpt",
        "gemma3n",
        "gemma3n-vl",
        "gemma4",
        "gemma4-vl",
        "gemma4-moe",
        "ernie4-5-moe",
        "minimax-m2",
        "bamba",
        "nemotron-h",
        "nemotron-h-moe",
        "falcon-h1",
        "falcon-h1-norm",
        "olmo-hybrid",
        "kimi-linear",
        "jamba",
        "mamba",
        "falcon-mamba",
        "afmoe",
        "laguna",
        "kolibri1",
        "mixtral",
        "mixtral-stacked",
        "phimoe",
        "gpt-oss",
        "deepseek-v2",
        "deepseek-v2-lite",
        "deepseek-v3",
        "deepseek-v32",
        "glm-moe-dsa",
        "mimo-v2",
        "step3p5",
        "persimmon",
        "longcat-flash",
        "lara-mini",
    ] {
        reference_agrees_with_transformers(name);
    }
}
