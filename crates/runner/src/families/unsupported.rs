//! Families that are not supported: what is near to them, and what differs.
//!
//! Sources: the classes of transformers and of the models' own code, the architectures of llama.cpp.

use super::family::Family;
use inflight_base::nearest_name;

/// A family that people ask for.
struct Unsupported {
    /// Its class, which config.json names under `architectures`.
    class: &'static str,
    /// Its name in GGUF files.
    gguf: Option<&'static str>,
    /// The class of the nearest supported family; `None` if none is near.
    nearest: Option<&'static str>,
    differs: &'static str,
}

const STATE_SPACE: &str =
    "its layers, or most of them, have a recurrent state instead of attention";
const IMAGES: &str = "it also takes images, which the backend does not";
const ENCODER: &str = "it encodes a text instead of generating one: set task to embed";
const ENCODER_DECODER: &str = "it has an encoder, which its decoder attends to";
const SPARSE_BLOCKS: &str =
    "its attention is sparse: an indexer chooses blocks of keys and values that a query sees";
const LIGHTNING: &str = "most of its layers have lightning attention, a recurrent state";
const HYPER: &str = "its layers mix several residual streams by hyper-connections";
const SHARED_ATTENTION: &str = "several of its layers share the weights of one attention block";

const FAMILIES: &[Unsupported] = &[
    converted(
        "IQuestLoopCoderForCausalLM",
        "IQuestCoderForCausalLM",
        "it runs its layers several times for a token",
    ),
    decoder(
        "DeciLMForCausalLM",
        "deci",
        "LlamaForCausalLM",
        "its layers differ in their numbers of heads, and some have no attention",
    ),
    alone(
        "DogeForCausalLM",
        "its scores have biases that are made of values, and the experts of a token depend on the tokens around it",
    ),
    converted(
        "AXK2ForCausalLM",
        "DeepseekV32ForCausalLM",
        "its attention and its norms have gates",
    ),
    decoder(
        "DeepseekV4ForCausalLM",
        "deepseek4",
        "DeepseekV3ForCausalLM",
        HYPER,
    ),
    converted(
        "Glm5NextForConditionalGeneration",
        "DeepseekV3ForCausalLM",
        HYPER,
    ),
    converted(
        "Dots3NoteForCausalLM",
        "DeepseekV32ForCausalLM",
        "its attention has gates, and layers differ in their latents",
    ),
    converted(
        "MistralLarge4ForConditionalGeneration",
        "GlmMoeDsaForCausalLM",
        "its layers share keys and values, scores have factors by position, and it also takes images",
    ),
    converted(
        "LongcatFlashNgramForCausalLM",
        "LongcatFlashForCausalLM",
        "embeddings of the last few tokens are added to the embedding of a token",
    ),
    decoder(
        "BailingHybridForCausalLM",
        "bailingmoe3",
        "KimiLinearForCausalLM",
        "its attention has gates, and its decays have a lower bound",
    ),
    converted(
        "BailingMoeLinearV2ForCausalLM",
        "BailingMoeV2ForCausalLM",
        LIGHTNING,
    ),
    converted(
        "BailingMoeV2_5ForCausalLM",
        "BailingMoeV2ForCausalLM",
        LIGHTNING,
    ),
    converted(
        "MiMoV2ForCausalLM",
        "MiMoV2FlashForCausalLM",
        "its queries, keys and values are fused in shares of ranks, and it also takes images and sound",
    ),
    far("MiniMaxForCausalLM", "minimax-01", LIGHTNING),
    decoder(
        "MiniMaxM3SparseForConditionalGeneration",
        "minimax-m3",
        "MiniMaxM2ForCausalLM",
        SPARSE_BLOCKS,
    ),
    converted(
        "MiniMaxM3VLForCausalLM",
        "MiniMaxM2ForCausalLM",
        SPARSE_BLOCKS,
    ),
    decoder("HYV4ForCausalLM", "hy_v4", "HYV3ForCausalLM", HYPER),
    converted("Qwen4ExpForCausalLM", "Qwen3_5MoeForCausalLM", HYPER),
    converted(
        "Qwen4ExpForConditionalGeneration",
        "Qwen3_5MoeForCausalLM",
        HYPER,
    ),
    converted(
        "BeamForCausalLM",
        "Qwen3MoeForCausalLM",
        "its attention has gates with biases, and it chooses experts as DeepSeek-V3 does",
    ),
    converted(
        "MuseGlimmerForConditionalGeneration",
        "AfmoeForCausalLM",
        "it also takes images, and has norms of queries and keys without weights and a factor of their own",
    ),
    alone(
        "DoryForCausalLM",
        "its residual stream stays on a sphere, and layers move it by learned shares",
    ),
    alone(
        "HrmTextForCausalLM",
        "it runs two stacks of layers several times for a token",
    ),
    alone(
        "InklingForCausalLM",
        "its scores have biases by distance that are made of the query",
    ),
    alone(
        "Inkling2ForCausalLM",
        "its scores have biases by distance that are made of the query",
    ),
    converted(
        "DiffLlamaForCausalLM",
        "LlamaForCausalLM",
        "its attention is the difference of two",
    ),
    converted(
        "Gemma4UnifiedForConditionalGeneration",
        "Gemma4ForConditionalGeneration",
        "its embedder takes images and sound without an encoder",
    ),
    converted(
        "JetMoeForCausalLM",
        "MixtralForCausalLM",
        "its attention has experts, too",
    ),
    converted("ZambaForCausalLM", "BambaForCausalLM", SHARED_ATTENTION),
    converted("Zamba2ForCausalLM", "BambaForCausalLM", SHARED_ATTENTION),
    alone(
        "ZayaForCausalLM",
        "its queries, keys and values are convolved, and a network of its own chooses experts",
    ),
    alone("RecurrentGemmaForCausalLM", STATE_SPACE),
    alone("xLSTMForCausalLM", STATE_SPACE),
    alone(
        "BltForCausalLM",
        "it reads bytes, which it groups into patches",
    ),
    converted("MllamaForConditionalGeneration", "LlamaForCausalLM", IMAGES),
    converted("Phi3VForCausalLM", "Phi3ForCausalLM", IMAGES),
    converted(
        "Phi4MMForCausalLM",
        "Phi3ForCausalLM",
        "it also takes images and sound, which the backend does not",
    ),
    far("Mamba2ForCausalLM", "mamba2", STATE_SPACE),
    far("RwkvForCausalLM", "rwkv6", STATE_SPACE),
    far("T5ForConditionalGeneration", "t5", ENCODER_DECODER),
    far("BertModel", "bert", ENCODER),
    far("ModernBertModel", "modern-bert", ENCODER),
];

/// Why models of a class are refused: the nearest family, and what differs. `None` if nothing is known of it.
pub(super) fn class_hint(class: &str, known: &[Family]) -> Option<String> {
    let mut unsupported = FAMILIES.iter();
    match unsupported.find(|family| family.class == class) {
        Some(family) => Some(family.hint()),
        None => {
            let base = |class| str::strip_suffix(class, "ForCausalLM").unwrap_or(class);
            let bases = known.iter().map(|family| base(family.class));
            let nearest = nearest_name(base(class), bases)?;
            let mut known = known.iter().map(|family| family.class);
            let nearest = known.find(|class| base(class) == nearest)?;
            Some(format!("did you mean {nearest}?"))
        }
    }
}

/// Architectures of supported families whose GGUF files are not read.
const ONLY_SAFETENSORS: &[&str] = &["bitnet", "bitnet-b1.58", "deepseek32", "glm-dsa", "gptj"];

/// Why GGUF files of an architecture are refused.
pub(super) fn gguf_hint(architecture: &str) -> Option<String> {
    if ONLY_SAFETENSORS.contains(&architecture) {
        return Some("serve the checkpoint of safetensors".to_owned());
    }
    let mut unsupported = FAMILIES.iter();
    let family = unsupported.find(|family| family.gguf == Some(architecture));
    family.map(Unsupported::hint)
}

impl Unsupported {
    fn hint(&self) -> String {
        match self.nearest {
            Some(nearest) => format!(
                "the nearest supported family is {nearest}, but {}",
                self.differs
            ),
            None => self.differs.to_owned(),
        }
    }
}

/// A family that llama.cpp supports, too.
const fn decoder(
    class: &'static str,
    gguf: &'static str,
    nearest: &'static str,
    differs: &'static str,
) -> Unsupported {
    Unsupported {
        class,
        gguf: Some(gguf),
        nearest: Some(nearest),
        differs,
    }
}

/// A family that llama.cpp converts to another one's architecture.
const fn converted(
    class: &'static str,
    nearest: &'static str,
    differs: &'static str,
) -> Unsupported {
    Unsupported {
        class,
        gguf: None,
        nearest: Some(nearest),
        differs,
    }
}

/// A family that no supported one is near to, and whose GGUF files have no name of their own.
const fn alone(class: &'static str, differs: &'static str) -> Unsupported {
    Unsupported {
        class,
        gguf: None,
        nearest: None,
        differs,
    }
}

/// A family that no supported one is near to.
const fn far(class: &'static str, gguf: &'static str, differs: &'static str) -> Unsupported {
    Unsupported {
        class,
        gguf: Some(gguf),
        nearest: None,
        differs,
    }
}

#[cfg(test)]
mod tests {
    use super::super::FAMILIES as SUPPORTED;
    use super::*;

    #[test]
    fn hints_name_supported_families_only() {
        let is_supported = |class| SUPPORTED.iter().any(|family| family.class == class);
        for family in FAMILIES {
            assert!(!is_supported(family.class), "{}", family.class);
            assert!(family.nearest.is_none_or(is_supported), "{}", family.class);
        }
        let mut classes: Vec<_> = FAMILIES.iter().map(|family| family.class).collect();
        classes.sort_unstable();
        assert!(classes.is_sorted_by(|a, b| a < b), "each class once");
    }

    #[test]
    fn only_a_name_that_is_nearly_the_same_is_suggested() {
        let hint = |class| class_hint(class, &SUPPORTED);
        for (class, meant) in [
            ("LLamaForCausalLM", "LlamaForCausalLM"),
            ("Gemma3ForCausualLM", "Gemma3ForCausalLM"),
            ("GPT2LMHead", "GPT2LMHeadModel"),
        ] {
            assert_eq!(hint(class), Some(format!("did you mean {meant}?")));
        }
        // They only end as others do.
        for class in ["FuyuForCausalLM", "BlenderbotForCausalLM"] {
            assert_eq!(hint(class), None, "{class}");
        }
    }
}
