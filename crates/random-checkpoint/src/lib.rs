//! Checkpoints for measurements: of given shapes with random weights, and of another one's layers.
//!
//! The output is noise, but the cost is real. Weights are random with mean 0 and standard deviation 0.02, and
//! norms are one, so that activations stay finite at any depth. The same shape gives the same bytes. The weights of
//! large shapes repeat themselves, so that they are written as fast as files are.

mod layers;

pub use layers::with_layers;

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::Path;

use serde_json::{Map, Value, json};

/// What goes wrong while a checkpoint is written.
pub type Error = Box<dyn std::error::Error>;

type Result<T> = std::result::Result<T, Error>;

/// The shape of a checkpoint.
struct Shape {
    name: &'static str,
    hidden: usize,
    layers: usize,
    heads: usize,
    kv_heads: usize,
    inter: usize,
    /// Experts of a layer, if it has some, and how many of them a token has.
    experts: Option<[usize; 2]>,
    vocab: usize,
    tied: bool,
    theta: f64,
    /// The factor of Llama 3's scaling of rotary frequencies, if it uses that.
    llama3_rope: Option<f64>,
    positions: usize,
    /// Whether a block of random weights is repeated.
    repeats: bool,
}

const SHAPES: [Shape; 5] = [
    // Small enough for a GPU that is computed on the CPU.
    Shape {
        name: "tiny",
        hidden: 64,
        layers: 2,
        heads: 4,
        kv_heads: 2,
        inter: 128,
        experts: None,
        vocab: 512,
        tied: false,
        theta: 10_000.0,
        llama3_rope: None,
        positions: 1024,
        repeats: false,
    },
    // JackFram/llama-160m, except for its grouped key and value heads.
    Shape {
        name: "llama-160m",
        hidden: 768,
        layers: 12,
        heads: 12,
        kv_heads: 4,
        inter: 3072,
        experts: None,
        vocab: 32_000,
        tied: false,
        theta: 10_000.0,
        llama3_rope: None,
        positions: 4096,
        repeats: false,
    },
    // The same with 8 experts in each layer, as a Mixtral.
    Shape {
        name: "llama-160m-experts",
        hidden: 768,
        layers: 12,
        heads: 12,
        kv_heads: 4,
        inter: 3072,
        experts: Some([8, 2]),
        vocab: 32_000,
        tied: false,
        theta: 10_000.0,
        llama3_rope: None,
        positions: 4096,
        repeats: true,
    },
    // meta-llama/Llama-3.2-1B.
    Shape {
        name: "llama-3.2-1b",
        hidden: 2048,
        layers: 16,
        heads: 32,
        kv_heads: 8,
        inter: 8192,
        experts: None,
        vocab: 128_256,
        tied: true,
        theta: 500_000.0,
        llama3_rope: Some(32.0),
        positions: 131_072,
        repeats: false,
    },
    // meta-llama/Llama-3.1-8B.
    Shape {
        name: "llama-3.1-8b",
        hidden: 4096,
        layers: 32,
        heads: 32,
        kv_heads: 8,
        inter: 14_336,
        experts: None,
        vocab: 128_256,
        tied: false,
        theta: 500_000.0,
        llama3_rope: Some(8.0),
        positions: 131_072,
        repeats: true,
    },
];

const BEGIN_ID: usize = 0;
const END_ID: usize = 1;
/// The first tokens of every vocabulary, in order of id.
const SPECIAL_TOKENS: [&str; 2] = ["<s>", "</s>"];

/// The names of the shapes.
pub fn shapes() -> impl Iterator<Item = &'static str> {
    SHAPES.iter().map(|shape| shape.name)
}

/// Writes a checkpoint of the named shape into `dir`, which is created if it is missing; returns the bytes of its
/// weights.
///
/// # Errors
/// If the shape is unknown, or a file cannot be written.
pub fn write(shape: &str, dir: &Path) -> Result<usize> {
    let Some(shape) = SHAPES.iter().find(|known| known.name == shape) else {
        let known: Vec<_> = shapes().collect();
        let known = known.join(", ");
        return Err(format!("unknown shape '{shape}'; known shapes: {known}").into());
    };
    fs::create_dir_all(dir)?;
    write_json(&dir.join("config.json"), &config(shape))?;
    write_json(&dir.join("generation_config.json"), &generation_config())?;
    write_json(&dir.join("tokenizer.json"), &tokenizer(shape.vocab)?)?;
    write_json(&dir.join("tokenizer_config.json"), &tokenizer_config())?;
    write_weights(&dir.join("model.safetensors"), shape)
}

fn config(shape: &Shape) -> Value {
    let rope_scaling = shape.llama3_rope.map(|factor| {
        json!({
            "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        })
    });
    let (class, model_type) = match shape.experts {
        Some(_) => ("MixtralForCausalLM", "mixtral"),
        None => ("LlamaForCausalLM", "llama"),
    };
    let mut config = json!({
        "architectures": [class],
        "model_type": model_type,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.hidden / shape.heads,
        "intermediate_size": shape.inter,
        "vocab_size": shape.vocab,
        "tie_word_embeddings": shape.tied,
        "rope_theta": shape.theta,
        "rope_scaling": rope_scaling,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "max_position_embeddings": shape.positions,
        "attention_bias": false,
        "mlp_bias": false,
        "torch_dtype": "bfloat16",
        "bos_token_id": BEGIN_ID,
        "eos_token_id": END_ID,
    });
    if let Some([num_experts, num_chosen]) = shape.experts {
        config["num_local_experts"] = json!(num_experts);
        config["num_experts_per_tok"] = json!(num_chosen);
    }
    config
}

fn generation_config() -> Value {
    json!({"bos_token_id": BEGIN_ID, "eos_token_id": END_ID, "do_sample": false})
}

fn tokenizer_config() -> Value {
    json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[BEGIN_ID],
        "eos_token": SPECIAL_TOKENS[END_ID],
        "clean_up_tokenization_spaces": false,
    })
}

/// A byte-level BPE with exactly `vocab` tokens that encodes any text without loss: the special tokens, the
/// 256 bytes, all pairs of lower-case letters, then pairs of these pairs until the vocabulary is full.
fn tokenizer(vocab: usize) -> Result<Value> {
    let bytes: Vec<char> = (0..=u8::MAX).map(byte_char).collect();
    let letters: Vec<char> = ('a'..='z').collect();
    let space = byte_char(b' ');
    // Words may start with a space; no token ends with one.
    let firsts = [&[space], letters.as_slice()].concat();
    let pairs: Vec<[String; 2]> = firsts
        .iter()
        .flat_map(|a| letters.iter().map(|b| [a.to_string(), b.to_string()]))
        .collect();
    let quads = pairs.iter().flat_map(|a| {
        let inner = pairs.iter().skip(letters.len());
        inner.map(|b| [a.concat(), b.concat()])
    });
    let num_single = SPECIAL_TOKENS.len() + bytes.len();
    let Some(num_merges) = vocab.checked_sub(num_single) else {
        return Err(format!(
            "a vocabulary of {vocab} tokens is smaller than the minimum of {num_single}"
        )
        .into());
    };
    let merges: Vec<[String; 2]> = pairs
        .iter()
        .cloned()
        .chain(quads)
        .take(num_merges)
        .collect();
    if merges.len() < num_merges {
        let most = num_single + merges.len();
        return Err(
            format!("a vocabulary of {vocab} tokens is larger than the maximum of {most}").into(),
        );
    }
    let tokens = SPECIAL_TOKENS
        .iter()
        .map(|token| token.to_string())
        .chain(bytes.iter().map(char::to_string))
        .chain(merges.iter().map(|merge| merge.concat()));
    let vocab: Map<String, Value> = tokens.zip((0..).map(Value::from)).collect();
    let added_tokens: Vec<Value> = SPECIAL_TOKENS
        .iter()
        .enumerate()
        .map(|(id, content)| {
            json!({
                "id": id, "content": content, "single_word": false, "lstrip": false,
                "rstrip": false, "normalized": false, "special": true,
            })
        })
        .collect();
    let byte_level = json!({
        "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true,
    });
    Ok(json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added_tokens,
        "normalizer": null,
        "pre_tokenizer": byte_level,
        "post_processor": null,
        "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
            "ignore_merges": false, "vocab": vocab, "merges": merges,
        },
    }))
}

/// The character for a byte in a byte-level vocabulary (GPT-2): the byte's own character if it is printable,
/// otherwise the next one from U+0100.
fn byte_char(byte: u8) -> char {
    let is_printable = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    if is_printable(byte) {
        return char::from(byte);
    }
    let num_before = (0..byte).filter(|&before| !is_printable(before)).count();
    char::from_u32(0x100 + num_before as u32).expect("a character")
}

/// Initial values of a tensor.
#[derive(Clone, Copy, PartialEq)]
enum Fill {
    Random,
    Ones,
}

/// Name, dimensions and initial values of every tensor, in file order.
fn tensors(shape: &Shape) -> Vec<(String, Vec<usize>, Fill)> {
    let (hidden, inter) = (shape.hidden, shape.inter);
    let kv = hidden / shape.heads * shape.kv_heads;
    let matrix = |name: &str, rows, columns| (name.to_owned(), vec![rows, columns], Fill::Random);
    let norm = |name: &str| (name.to_owned(), vec![hidden], Fill::Ones);
    let mut tensors = vec![matrix("model.embed_tokens.weight", shape.vocab, hidden)];
    for layer in 0..shape.layers {
        let name = |part: &str| format!("model.layers.{layer}.{part}.weight");
        tensors.extend([
            norm(&name("input_layernorm")),
            matrix(&name("self_attn.q_proj"), hidden, hidden),
            matrix(&name("self_attn.k_proj"), kv, hidden),
            matrix(&name("self_attn.v_proj"), kv, hidden),
            matrix(&name("self_attn.o_proj"), hidden, hidden),
            norm(&name("post_attention_layernorm")),
        ]);
        let Some([num_experts, _]) = shape.experts else {
            tensors.extend([
                matrix(&name("mlp.gate_proj"), inter, hidden),
                matrix(&name("mlp.up_proj"), inter, hidden),
                matrix(&name("mlp.down_proj"), hidden, inter),
            ]);
            continue;
        };
        tensors.push(matrix(&name("block_sparse_moe.gate"), num_experts, hidden));
        for expert in 0..num_experts {
            let name = |part: &str| name(&format!("block_sparse_moe.experts.{expert}.{part}"));
            tensors.extend([
                matrix(&name("w1"), inter, hidden),
                matrix(&name("w2"), hidden, inter),
                matrix(&name("w3"), inter, hidden),
            ]);
        }
    }
    tensors.push(norm("model.norm.weight"));
    if !shape.tied {
        tensors.push(matrix("lm_head.weight", shape.vocab, hidden));
    }
    tensors
}

/// Writes the weights as safetensors; returns their number of bytes. The file gets its final name when it is
/// complete.
fn write_weights(path: &Path, shape: &Shape) -> Result<usize> {
    let tensors = tensors(shape);
    let mut header = Map::new();
    let mut num_bytes = 0;
    for (name, dimensions, _) in &tensors {
        let start = num_bytes;
        num_bytes += 2 * dimensions.iter().product::<usize>();
        let entry = json!({
            "dtype": "BF16", "shape": dimensions, "data_offsets": [start, num_bytes],
        });
        header.insert(name.clone(), entry);
    }
    let mut header = Value::Object(header).to_string();
    while !header.len().is_multiple_of(8) {
        header.push(' ');
    }

    let part = path.with_extension("part");
    let mut file = BufWriter::with_capacity(1 << 20, File::create(&part)?);
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(header.as_bytes())?;
    let mut weights = Weights::new(shape.repeats);
    for (_, dimensions, fill) in &tensors {
        let num_bytes = 2 * dimensions.iter().product::<usize>();
        match fill {
            Fill::Random => weights.write(num_bytes, &mut file)?,
            Fill::Ones => file.write_all(&bf16_bits(1.0).to_le_bytes().repeat(num_bytes / 2))?,
        }
    }
    file.into_inner()?.sync_all()?;
    fs::rename(part, path)?;
    Ok(num_bytes)
}

/// A stream of random weights.
struct Weights {
    random: Random,
    /// The weights that are written next, from `position` on.
    block: Vec<u8>,
    position: usize,
    repeats: bool,
}

impl Weights {
    /// No multiple of a row's bytes in any shape, so that rows differ.
    const BLOCK_BYTES: usize = (16 << 20) + 2 * 641;

    fn new(repeats: bool) -> Self {
        Self {
            random: Random(0x5eed),
            block: vec![0; Self::BLOCK_BYTES],
            position: Self::BLOCK_BYTES,
            repeats,
        }
    }

    fn write(&mut self, mut num_bytes: usize, out: &mut impl Write) -> Result<()> {
        while num_bytes > 0 {
            if self.position == self.block.len() {
                self.refill();
            }
            let rest = &self.block[self.position..];
            let part = &rest[..rest.len().min(num_bytes)];
            out.write_all(part)?;
            self.position += part.len();
            num_bytes -= part.len();
        }
        Ok(())
    }

    fn refill(&mut self) {
        self.position = 0;
        let is_filled = self.random.0 != 0x5eed;
        if is_filled && self.repeats {
            return;
        }
        for weight in self.block.as_chunks_mut::<2>().0 {
            *weight = bf16_bits(self.random.normal() * 0.02).to_le_bytes();
        }
    }
}

/// Rounds a finite value to bf16, ties to even.
fn bf16_bits(value: f32) -> u16 {
    let bits = value.to_bits();
    ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) as u16
}

/// splitmix64 (Steele, Lea, Flood, 2014): small, fast, the same everywhere.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    /// Approximately normal with mean 0 and standard deviation 1: the sum of four uniform numbers.
    fn normal(&mut self) -> f32 {
        const MEAN: f32 = 2.0 * 65_535.0;
        // The standard deviation of one of them is 65536 / sqrt(12).
        const DEVIATION: f32 = 2.0 * 65_536.0 / 3.464_101_6;
        let bits = self.next();
        let sum: u64 = (0..4).map(|i| (bits >> (16 * i)) & 0xffff).sum();
        (sum as f32 - MEAN) / DEVIATION
    }
}

fn write_json(path: &Path, value: &Value) -> Result<()> {
    fs::write(path, value.to_string())?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_have_the_number_of_parameters_in_their_names() {
        for (shape, num_parameters) in SHAPES.iter().zip([
            139_584,
            152_980_224,
            747_596_544,
            1_235_814_400,
            8_030_261_248,
        ]) {
            let num_elements: usize = tensors(shape)
                .iter()
                .map(|(_, dimensions, _)| dimensions.iter().product::<usize>())
                .sum();
            assert_eq!(num_elements, num_parameters, "{}", shape.name);
        }
    }

    #[test]
    fn vocabularies_have_the_right_size_and_every_merge_is_a_token() {
        for shape in &SHAPES {
            let tokenizer = tokenizer(shape.vocab).expect("a tokenizer");
            let vocab = tokenizer["model"]["vocab"].as_object().expect("a map");
            assert_eq!(vocab.len(), shape.vocab, "no two tokens are the same");
            for merge in tokenizer["model"]["merges"].as_array().expect("a list") {
                let [a, b] = [0, 1].map(|i| merge[i].as_str().expect("text"));
                assert!(vocab.contains_key(a) && vocab.contains_key(b));
                assert!(vocab.contains_key(&format!("{a}{b}")));
            }
        }
        assert!(tokenizer(100).is_err());
        assert!(tokenizer(1 << 20).is_err());
    }

    #[test]
    fn repeated_weights_begin_as_others_do_and_go_on() {
        let written = |repeats, num_bytes| {
            let mut out = Vec::new();
            let mut weights = Weights::new(repeats);
            weights.write(6, &mut out).expect("memory");
            weights.write(num_bytes - 6, &mut out).expect("memory");
            out
        };
        let (block, more) = (Weights::BLOCK_BYTES, 1000);
        let [repeated, other] = [true, false].map(|repeats| written(repeats, block + more));
        assert_eq!(repeated[..block], other[..block]);
        assert_eq!(repeated[block..], repeated[..more]);
        assert_ne!(other[block..], other[..more]);
    }

    #[test]
    fn random_weights_have_mean_zero_and_deviation_one() {
        let mut random = Random(1);
        let values: Vec<f64> = (0..100_000).map(|_| f64::from(random.normal())).collect();
        let mean = values.iter().sum::<f64>() / 1e5;
        let variance = values.iter().map(|x| x * x).sum::<f64>() / 1e5;
        assert!(
            mean.abs() < 0.02 && (variance - 1.0).abs() < 0.02,
            "{mean} {variance}"
        );
    }
}
