//! GGUF files of model families, written by llama.cpp's own converter from the checkpoints of other fixtures: see
//! tests/fixtures/make_family_gguf_fixtures.py.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;

use inflight_engine::OutputOptions;
use inflight_numbers::CodeBits;
use inflight_runner::{ModelSource, WeightPrecision};
use serde_json::Value;

use crate::copy::Copy;
use crate::devices::{
    assert_near, assert_near_by_cost, assert_same_bits, largest_first_error, requests,
};
use crate::families::{FAMILIES, ON_CPUS, RECURRENT, WITH_GATES};
use crate::gguf::{add_keys, unsigned};
use crate::support::{Request, Served, Setup, fixture, serve};

fn file(name: &str, extension: &str) -> PathBuf {
    fixture("family-gguf").join(format!("{name}.{extension}"))
}

/// The fixture as the GGUF file has it: llama.cpp's code decides some values of its config.
fn checkpoint(name: &str) -> Copy {
    let changes = fs::read(file(name, "json")).expect("the file");
    let changes: Value = serde_json::from_slice(&changes).expect("JSON");
    let copy = Copy::of(name).config(changes);
    let changed_weights = file(name, "safetensors");
    if changed_weights.exists() {
        fs::copy(changed_weights, copy.path("model.safetensors")).expect("a copy");
    }
    copy
}

/// The same, with the GGUF file in place of its weights.
pub fn gguf_with_config(name: &str) -> Copy {
    let copy = checkpoint(name);
    fs::remove_file(copy.path("model.safetensors")).expect("the file");
    fs::copy(file(name, "gguf"), copy.path("model.gguf")).expect("a copy");
    copy
}

/// The GGUF file alone.
pub fn gguf(name: &str) -> Copy {
    let copy = gguf_with_config(name);
    fs::remove_file(copy.path("config.json")).expect("the file");
    copy
}

fn served(copy: &Copy) -> Vec<Served> {
    served_with(&Setup::default(), copy)
}

fn served_with(setup: &Setup, copy: &Copy) -> Vec<Served> {
    let requests: Vec<_> = requests()
        .into_iter()
        .map(|request| Request {
            outputs: OutputOptions {
                generation_logits: true,
                ..request.outputs
            },
            ..request
        })
        .collect();
    let (served, _) = serve(&mut setup.load_from(copy.dir()), setup, &requests);
    served
}

fn has_the_bits_of_its_checkpoint(name: &str) {
    let expected = served(&checkpoint(name));
    for copy in [gguf(name), gguf_with_config(name)] {
        for (expected, found) in expected.iter().zip(&served(&copy)) {
            assert_same_bits(name, expected, found);
        }
    }
}

/// Metadata are f32, so that a factor or an epsilon of the config may be rounded.
fn is_near_its_checkpoint(name: &str) {
    let expected = served(&checkpoint(name));
    for copy in [gguf(name), gguf_with_config(name)] {
        assert_near(name, &expected, &served(&copy), 0.05);
    }
}

crate::transformers::agree! {
    has_the_bits_of_its_checkpoint;
    a_gemma_2_has_the_bits_of_its_checkpoint: "gemma2",
    a_gemma_3_has_the_bits_of_its_checkpoint: "gemma3",
    a_phi_3_has_the_bits_of_its_checkpoint: "phi3",
    an_olmo_2_has_the_bits_of_its_checkpoint: "olmo2",
    an_olmo_3_has_the_bits_of_its_checkpoint: "olmo3",
    an_olmo_has_the_bits_of_its_checkpoint: "olmo",
    a_phi_2_has_the_bits_of_its_checkpoint: "phi",
    a_star_coder_has_the_bits_of_its_checkpoint: "gpt-bigcode",
    a_jais_2_has_the_bits_of_its_checkpoint: "jais2",
    an_arcee_has_the_bits_of_its_checkpoint: "arcee",
    a_gemma_has_the_bits_of_its_checkpoint: "gemma",
    a_starcoder_2_has_the_bits_of_its_checkpoint: "starcoder2",
    a_qwen_2_vl_has_the_bits_of_its_checkpoint: "qwen2-vl",
    a_qwen_3_vl_has_the_bits_of_its_checkpoint: "qwen3-vl",
    a_smollm_3_has_the_bits_of_its_checkpoint: "smollm3",
    a_seed_oss_has_the_bits_of_its_checkpoint: "seed-oss",
    an_exaone_4_has_the_bits_of_its_checkpoint: "exaone4",
    an_ernie_4_5_has_the_bits_of_its_checkpoint: "ernie4-5",
    a_command_r_has_the_bits_of_its_checkpoint: "cohere",
    a_command_r_plus_has_the_bits_of_its_checkpoint: "cohere-plus",
    a_command_r7b_has_the_bits_of_its_checkpoint: "cohere2",
    a_stablelm_has_the_bits_of_its_checkpoint: "stablelm",
    a_stablelm_2_12b_has_the_bits_of_its_checkpoint: "stablelm-12b",
    a_bloom_has_the_bits_of_its_checkpoint: "bloom",
    a_gpt_2_has_the_bits_of_its_checkpoint: "gpt2",
    a_gpt_neox_has_the_bits_of_its_checkpoint: "gpt-neox",
    a_nemotron_has_the_bits_of_its_checkpoint: "nemotron",
    a_glm_has_the_bits_of_its_checkpoint: "glm",
    a_glm_4_has_the_bits_of_its_checkpoint: "glm4",
    a_gpt_oss_has_the_bits_of_its_checkpoint: "gpt-oss",
    a_gpt_oss_in_mxfp4_has_the_bits_of_its_checkpoint: "gpt-oss-mxfp4",
    a_falcon_has_the_bits_of_its_checkpoint: "falcon",
    a_falcon_with_key_heads_has_the_bits_of_its_checkpoint: "falcon-grouped",
    a_deepseek_v2_has_the_bits_of_its_checkpoint: "deepseek-v2",
    a_deepseek_v2_lite_of_an_older_converter_has_the_bits_of_its_checkpoint: "deepseek-v2-lite",
    a_deepseek_v3_has_the_bits_of_its_checkpoint: "deepseek-v3",
    a_deepseek_moe_has_the_bits_of_its_checkpoint: "deepseek",
    an_olmoe_has_the_bits_of_its_checkpoint: "olmoe",
    a_phi_3_5_moe_has_the_bits_of_its_checkpoint: "phimoe",
    an_lfm_2_has_the_bits_of_its_checkpoint: "lfm2",
    an_lfm_2_with_experts_has_the_bits_of_its_checkpoint: "lfm2-moe",
    a_glm_4_5_has_the_bits_of_its_checkpoint: "glm4-moe",
    a_solar_open_has_the_bits_of_its_checkpoint: "solar-open",
    an_ernie_4_5_with_experts_has_the_bits_of_its_checkpoint: "ernie4-5-moe",
    a_hunyuan_with_experts_has_the_bits_of_its_checkpoint: "hunyuan-moe",
    a_dots_llm_1_has_the_bits_of_its_checkpoint: "dots1",
    a_minimax_m2_has_the_bits_of_its_checkpoint: "minimax-m2",
    a_k_exaone_has_the_bits_of_its_checkpoint: "exaone-moe",
    an_afmoe_has_the_bits_of_its_checkpoint: "afmoe",
    a_llama_4_has_the_bits_of_its_checkpoint: "llama4",
    a_granite_swash_has_the_bits_of_its_checkpoint: "granite-swa",
    a_granite_swash_with_experts_has_the_bits_of_its_checkpoint: "granite-moe-swa",
    a_gemma_4_has_the_bits_of_its_checkpoint: "gemma4",
    a_gemma_4_with_experts_has_the_bits_of_its_checkpoint: "gemma4-moe",
    a_gemma_4_whose_keys_are_values_has_the_bits_of_its_checkpoint: "gemma4-vl",
    a_gemma_3n_has_the_bits_of_its_checkpoint: "gemma3n",
    an_internlm_2_has_the_bits_of_its_checkpoint: "internlm2",
    a_ling_1_has_the_bits_of_its_checkpoint: "ling-lite",
    a_ling_2_has_the_bits_of_its_checkpoint: "ling",
    a_qwen_1_has_the_bits_of_its_checkpoint: "qwen",
    a_baichuan_2_has_the_bits_of_its_checkpoint: "baichuan2",
    a_chatglm_has_the_bits_of_its_checkpoint: "chatglm",
    an_earlier_bitnet_has_the_bits_of_its_checkpoint: "bitnet-3b",
    a_minicpm_3_has_the_bits_of_its_checkpoint: "minicpm3",
    an_mpt_has_the_bits_of_its_checkpoint: "mpt",
    an_mpt_that_clips_has_the_bits_of_its_checkpoint: "mpt-clip",
    a_dbrx_has_the_bits_of_its_checkpoint: "dbrx",
    a_command_a_plus_has_the_bits_of_its_checkpoint: "cohere2-moe",
    a_laguna_has_the_bits_of_its_checkpoint: "laguna",
    a_mimo_v2_has_the_bits_of_its_checkpoint: "mimo-v2",
    a_step_3_5_has_the_bits_of_its_checkpoint: "step3p5",
}

crate::transformers::agree! {
    is_near_its_checkpoint;
    a_phi_4_mini_is_near_its_checkpoint: "phi4-mini",
    a_granite_is_near_its_checkpoint: "granite",
    an_exaone_3_is_near_its_checkpoint: "exaone",
    // The converter stores rates, rounded to f32, in place of their logarithms.
    a_qwen_3_next_is_near_its_checkpoint: "qwen3-next",
    a_qwen_3_5_is_near_its_checkpoint: "qwen3-5",
    a_qwen_3_5_with_experts_is_near_its_checkpoint: "qwen3-5-moe",
    a_granite_4_is_near_its_checkpoint: "granite4",
    a_granite_4_without_experts_is_near_its_checkpoint: "granite4-dense",
    a_granite_with_experts_is_near_its_checkpoint: "granite-moe",
    a_granite_with_a_shared_expert_is_near_its_checkpoint: "granite-moe-shared",
    a_ministral_3_is_near_its_checkpoint: "ministral3",
    a_hunyuan_is_near_its_checkpoint: "hunyuan",
    an_apertus_is_near_its_checkpoint: "apertus",
    a_nemotron_h_is_near_its_checkpoint: "nemotron-h",
    a_nemotron_h_with_experts_is_near_its_checkpoint: "nemotron-h-moe",
    a_minicpm_is_near_its_checkpoint: "minicpm",
    a_mamba_is_near_its_checkpoint: "mamba",
    a_falcon_mamba_is_near_its_checkpoint: "falcon-mamba",
    a_jamba_is_near_its_checkpoint: "jamba",
    a_falcon_h1_is_near_its_checkpoint: "falcon-h1",
    a_falcon_h1_with_a_norm_is_near_its_checkpoint: "falcon-h1-norm",
    a_kimi_linear_is_near_its_checkpoint: "kimi-linear",
}

/// Families without a file: llama.cpp's converter does not know them, makes a llama of them (Mistral, InternLM 3,
/// IQuest-Coder), or the backend does not read the file.
const WITHOUT_FILE: [&str; 35] = [
    "AXK1ForCausalLM",
    "BambaForCausalLM",
    "BioGptForCausalLM",
    "BitNetForCausalLM",
    "CodeGenForCausalLM",
    "CwmForCausalLM",
    "DeepseekV32ForCausalLM",
    "FlexOlmoForCausalLM",
    "FlintForCausalLM",
    "GPTJForCausalLM",
    "GPTNeoForCausalLM",
    "Glm4MoeLiteForCausalLM",
    "GlmMoeDsaForCausalLM",
    "HYV3ForCausalLM",
    "HeliumForCausalLM",
    "HyperCLOVAXForCausalLM",
    "IQuestCoderForCausalLM",
    "InternLM3ForCausalLM",
    "InternLMForCausalLM",
    "Kolibri1ForCausalLM",
    "LaraMiniForCausalLM",
    "Lfm3ForCausalLM",
    "LongcatFlashForCausalLM",
    "MellumForCausalLM",
    "MinistralForCausalLM",
    "Mistral4ForCausalLM",
    "MistralForCausalLM",
    "NanoChatForCausalLM",
    "OlmoHybridForCausalLM",
    "OPTForCausalLM",
    "PersimmonForCausalLM",
    "SarvamMLAForCausalLM",
    "SarvamMoEForCausalLM",
    "VaultGemmaForCausalLM",
    "YoutuForCausalLM",
];

#[test]
fn each_family_that_llama_cpp_converts_has_a_gguf_file() {
    let files = |folder: &str| {
        let entries = fs::read_dir(fixture(folder)).expect("the folder");
        let names = entries.map(|it| it.expect("a name").file_name().into_string());
        let names = names.map(|name| name.expect("UTF-8"));
        names.collect::<Vec<_>>()
    };
    let family = |name: &str| -> &'static str {
        let source = ModelSource::open(&fixture(name)).expect("the fixture opens");
        source.spec().family
    };
    let converted = files("family-gguf");
    let converted = converted
        .iter()
        .filter_map(|file| file.strip_suffix(".gguf"))
        // With other types.
        .filter(|name| !name.contains('.'))
        .map(family);
    let others = ["", "quantised"].map(|folder| {
        let names = files(folder).into_iter();
        let names = names.filter(|name| name.contains("gguf") && !name.contains('.'));
        let names = names.filter(|name| !["family-gguf", "gguf-tokenizers"].contains(&&name[..]));
        names.map(move |name| format!("{folder}/{name}"))
    });
    let others = others.into_iter().flatten();
    let others = others.map(|name| family(name.trim_start_matches('/')));
    let found = converted.chain(others).chain(WITHOUT_FILE);
    // The language models of these are of families in the list.
    let found = found.filter(|class| !class.ends_with("ForConditionalGeneration"));
    let found: BTreeSet<_> = found.collect();
    let others = RECURRENT.into_iter().chain(WITH_GATES).chain(ON_CPUS);
    let all = FAMILIES.into_iter().chain(others);
    let all: BTreeSet<_> = all.map(|(name, _)| family(name)).collect();
    assert_eq!(found, all);
}

/// The converter writes them for models that they do not change.
#[test]
fn metadata_that_change_nothing_are_read() {
    let of_granite = source("granite");
    let width = of_granite.spec().layers[0].feed_forward.width() as u32;
    for (name, keys) in [
        (
            "granite",
            &[
                ("granite.expert_shared_feed_forward_length", width),
                ("granite.ssm.conv_kernel", 4),
                ("granite.ssm.inner_size", 120),
            ][..],
        ),
        ("granite-moe", &[("granitemoe.ssm.inner_size", 120)]),
        (
            "afmoe",
            &[
                ("afmoe.expert_group_count", 1),
                ("afmoe.expert_group_used_count", 1),
            ],
        ),
        ("mpt", &[("mpt.attention.clamp_kqv", 0)]),
    ] {
        let keys: Vec<_> = keys
            .iter()
            .map(|&(key, value)| (key, unsigned(&[value])))
            .collect();
        let copy = add_keys(gguf(name), "model.gguf", &keys);
        let found = ModelSource::open(copy.dir()).expect("it opens");
        assert_eq!(found.spec(), source(name).spec(), "{name}");
    }
}

/// Weights of 8 bits are rounded, and so is what they multiply. The backend's own rounding, which has a scale for more
/// of them, costs no less.
#[test]
fn a_gemma_4_in_8_bits_is_as_near_its_checkpoint_as_with_rounded_weights() {
    let name = "gemma4";
    let copy = gguf(name);
    fs::copy(file(name, "q8_0.gguf"), copy.path("model.gguf")).expect("a copy");
    let exact = served(&checkpoint(name));
    let rounding = Setup {
        weights: Some(WeightPrecision::new(CodeBits::Eight)),
        ..Setup::default()
    };
    let rounded = served_with(&rounding, &checkpoint(name));
    let cost = largest_first_error(&rounded, &exact);
    assert_near_by_cost(name, &served(&copy), &exact, cost);
}

fn source(name: &str) -> ModelSource {
    ModelSource::open(gguf(name).dir()).expect("it opens")
}

#[test]
fn metadata_that_contradict_others_are_refused_naming_both() {
    for (name, key, value, parts) in [
        (
            "qwen3-5",
            "qwen35.ssm.inner_size",
            &[27][..],
            ["ssm.inner_size: 27", "qwen35.ssm.time_step_rank 4"],
        ),
        (
            "qwen3-next",
            "qwen3next.ssm.group_count",
            &[1],
            ["blk.0.attn_qkv.weight", "calls for [48, 64]"],
        ),
        (
            "lfm2",
            "lfm2.shortconv.l_cache",
            &[5],
            ["blk.0.shortconv.conv.weight", "calls for [60, 5]"],
        ),
        (
            "glm4-moe",
            "glm4moe.nextn_predict_layers",
            &[9],
            ["nextn_predict_layers: 9", "glm4moe.block_count 5"],
        ),
        (
            "granite",
            "granite.expert_shared_feed_forward_length",
            &[7],
            [
                "expert_shared_feed_forward_length: 7",
                "feed_forward_length",
            ],
        ),
        (
            "minimax-m2",
            "minimax-m2.expert_gating_func",
            &[1],
            ["expert_gating_func: 1", "not supported in this family"],
        ),
        (
            "gemma4",
            "gemma4.attention.value_length_swa",
            &[12],
            ["value_length_swa: 12", "layers with a window"],
        ),
        (
            "gemma4",
            "gemma4.feed_forward_length",
            &[44, 44, 50, 88, 88],
            ["feed_forward_length", "twice as much"],
        ),
        (
            "gemma4",
            "gemma4.attention.head_count_kv",
            &[3, 3],
            ["attention.head_count_kv", "2 elements for 5 layers"],
        ),
        (
            "gemma4-vl",
            "gemma4.attention.head_count_kv",
            &[3, 4, 3, 2],
            ["layers have 4 key and value heads", "divide 6"],
        ),
        (
            "gemma3n",
            "gemma3n.activation_sparsity_scale",
            &[1, 1, 1],
            ["activation_sparsity_scale", "3 elements for 5 layers"],
        ),
        (
            "minicpm",
            "minicpm.logit_scale",
            &[0],
            ["logit_scale: 0", "not above 0"],
        ),
        (
            "jamba",
            "jamba.attention.head_count_kv",
            &[3, 3, 0, 0],
            ["attention.head_count_kv", "irregular distances"],
        ),
        (
            "kimi-linear",
            "kimi-linear.kda.head_dim",
            &[11],
            ["blk.0.attn_q.weight", "calls for [33, 52]"],
        ),
        (
            "mpt",
            "mpt.attention.max_alibi_bias",
            &[4],
            ["attn_config.alibi_bias_max: 4", "only 8 is"],
        ),
        (
            "cohere2-moe",
            "cohere2moe.expert_shared_feed_forward_length",
            &[35],
            [
                "expert_shared_feed_forward_length: 35",
                "expert_shared_count 2 times",
            ],
        ),
        (
            "laguna",
            "laguna.attention.head_count",
            &[9, 9, 9, 3],
            [
                "attention.head_count",
                "blk.0.attn_gate.weight, which has 6 rows",
            ],
        ),
    ] {
        let copy = add_keys(gguf(name), "model.gguf", &[(key, unsigned(value))]);
        copy.refused(&parts);
    }
}
