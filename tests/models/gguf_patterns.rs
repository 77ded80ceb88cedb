//! Which layers of a model in a GGUF file have a window or a rotation, where llama.cpp's code decides it or the
//! metadata do.
//!
//! The files of tests have fewer layers than a pattern, so that their metadata are made to tell of more. Only the
//! description is read here: the tensors of those layers are not there.

use std::fs;

use inflight_runner::{ModelSource, ModelSpec};

use crate::family_gguf::gguf;

/// More than two of the longest pattern.
const NUM_LAYERS: u8 = 13;
const PATTERN: &str = "attention.sliding_window_pattern";
/// Types of metadata.
const U32: u8 = 4;
const BOOL: u8 = 7;
const ARRAY: u8 = 9;

/// The file of a family with more layers, whose metadata have another pattern of layers or none.
fn bytes(name: &str, pattern: Option<&[u8]>) -> Vec<u8> {
    let mut bytes = fs::read(gguf(name).path("model.gguf")).expect("the file");
    let end_of = |bytes: &[u8], text: &str| {
        let mut places = bytes.windows(text.len());
        let place = places.position(|it| it == text.as_bytes());
        place.map(|place| place + text.len())
    };
    let key = format!("{name}.block_count");
    let value = end_of(&bytes, &key).expect("the key") + 4;
    bytes[value] = NUM_LAYERS;
    if let Some(end) = end_of(&bytes, PATTERN) {
        // Another key, of nothing that is computed.
        bytes[end - PATTERN.len()] = b'_';
    }
    if let Some(pattern) = pattern {
        let key = format!("{name}.{PATTERN}");
        let mut entry = (key.len() as u64).to_le_bytes().to_vec();
        entry.extend(key.as_bytes());
        entry.extend(pattern);
        // The number of entries is in front of them.
        bytes[16] += 1;
        bytes.splice(24..24, entry);
        // Tensors end further behind.
        bytes.resize(bytes.len() + 64, 0);
    }
    bytes
}

fn open(name: &str, pattern: Option<&[u8]>) -> Result<ModelSpec, String> {
    let copy = gguf(name);
    fs::write(copy.path("model.gguf"), bytes(name, pattern)).expect("written");
    let source = ModelSource::open(copy.dir()).map_err(|error| error.to_string())?;
    Ok(source.spec().clone())
}

fn number(interval: u8) -> [u8; 8] {
    [U32, 0, 0, 0, interval, 0, 0, 0]
}

fn list(layers: &str) -> Vec<u8> {
    let mut list = vec![ARRAY, 0, 0, 0, BOOL, 0, 0, 0];
    list.extend((layers.len() as u64).to_le_bytes());
    list.extend(layers.chars().map(|layer| u8::from(layer == 'L')));
    list
}

/// L for layers with a window, G for those without.
fn windows(spec: &ModelSpec) -> String {
    let windows = spec.windows();
    let layers = windows.map(|window| if window.is_some() { 'L' } else { 'G' });
    layers.collect()
}

/// R for layers whose heads are rotated.
fn rotations(spec: &ModelSpec) -> String {
    let layers = spec.layers.iter();
    let is_rotated = layers.map(|layer| layer.attention.rope.rotary_dim > 0);
    is_rotated.map(|is| if is { 'R' } else { '-' }).collect()
}

const EVERY_SECOND: &str = "LGLGLGLGLGLGL";
const EVERY_FOURTH: &str = "LLLGLLLGLLLGL";
const ALL: &str = "RRRRRRRRRRRRR";
const ROTATED_WITH_A_WINDOW: &str = "RRR-RRR-RRR-R";

#[test]
fn patterns_of_layers_are_those_of_llama_cpp() {
    for (name, expected, rotated) in [
        ("gemma2", EVERY_SECOND, ALL),
        ("gemma3", "LLLLLGLLLLLGL", ALL),
        ("cohere2", EVERY_FOURTH, ROTATED_WITH_A_WINDOW),
        ("exaone4", EVERY_FOURTH, ROTATED_WITH_A_WINDOW),
        ("gpt-oss", EVERY_SECOND, ALL),
        ("smollm3", "GGGGGGGGGGGGG", ROTATED_WITH_A_WINDOW),
    ] {
        let spec = open(name, None).expect("it opens");
        assert_eq!(windows(&spec), expected, "{name}");
        assert_eq!(rotations(&spec), rotated, "{name}");
        for layer in &spec.layers {
            let is_local = layer.attention.window.is_some();
            let has_local_base = layer.attention.rope.theta == 50.0;
            assert_eq!(has_local_base, is_local && name == "gemma3", "{name}");
        }
    }
}

/// llama.cpp reads a list of layers, or the interval of those without a window; 0 is none of these.
#[test]
fn a_pattern_of_layers_in_the_metadata_takes_their_place() {
    const OWN: &str = "GLLGGGLGGGGLG";
    for name in ["gemma2", "gemma3", "cohere2", "exaone4", "gpt-oss"] {
        for (pattern, expected) in [
            (list(OWN), OWN),
            (number(3).into(), "LLGLLGLLGLLGL"),
            (number(1).into(), "GGGGGGGGGGGGG"),
            (number(0).into(), "LLLLLLLLLLLLL"),
        ] {
            let spec = open(name, Some(&pattern)).expect("it opens");
            assert_eq!(windows(&spec), expected, "{name}");
        }
    }
}

#[test]
fn a_pattern_of_something_else_is_refused() {
    for (pattern, words) in [
        (list("LG"), "layer_types"),
        (vec![BOOL, 0, 0, 0, 1], "neither a number nor a list"),
    ] {
        let error = open("gemma3", Some(&pattern)).expect_err("refused");
        assert!(error.contains(words), "{error}");
    }
}
