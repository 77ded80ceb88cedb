//! The processors of checkpoints, compared with transformers (tests/fixtures/make_images.py).

use std::collections::BTreeSet;
use std::fs;

use inflight_images::{ImageLimits, ImageProcessor, Pixels, PromptPiece, RowLayout};
use serde::Deserialize;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::fixtures::{TempFolder, hex, pattern, processor_folder, processor_names, read};

/// A line of processed.json.
#[derive(Deserialize)]
struct Case {
    processor: String,
    shape: (usize, usize),
    seed: u64,
    num_images: usize,
    tiles: Vec<(usize, usize)>,
    prompt: Vec<Piece>,
    num_values: usize,
    sha256: String,
    values: Vec<(usize, f32)>,
}

#[derive(Debug, Deserialize, PartialEq)]
#[serde(untagged)]
enum Piece {
    ImageTokens(usize),
    Text(String),
}

impl From<&PromptPiece> for Piece {
    fn from(piece: &PromptPiece) -> Self {
        match piece {
            PromptPiece::Text(text) => Self::Text(text.clone()),
            PromptPiece::ImageTokens(num_tokens) => Self::ImageTokens(*num_tokens),
        }
    }
}

#[test]
fn images_become_what_transformers_makes_of_them() {
    let cases: Vec<Case> = read("processed.json");
    let mut tested = BTreeSet::new();
    for case in cases {
        let name = format!("{} {:?} of {}", case.processor, case.shape, case.num_images);
        let processor = ImageProcessor::open(&processor_folder(&case.processor));
        let processor = processor.unwrap_or_else(|error| panic!("{name}: {error}"));
        let (height, width) = case.shape;
        let values = pattern(height, width, case.seed);
        let image = Pixels::from_tensor(&[height, width, 3], &values, &ImageLimits::default());
        let processed = processor.process(&image.expect("an image"), case.num_images);
        let processed = processed.unwrap_or_else(|error| panic!("{name}: {error}"));
        let patches = &processed.patches;
        let tiles: Vec<_> = patches
            .tiles
            .iter()
            .map(|tile| (tile.rows, tile.columns))
            .collect();
        assert_eq!(tiles, case.tiles, "{name}");
        let pieces: Vec<Piece> = processed.prompt.pieces().iter().map(Piece::from).collect();
        assert_eq!(pieces, case.prompt, "{name}");
        assert_eq!(
            patches.num_tokens,
            processed.prompt.num_image_tokens(),
            "{name}"
        );
        if let RowLayout::Picture(picture) = patches.row_layout {
            let num_tiles = picture.tiles.0 * picture.tiles.1 + 1;
            assert_eq!(num_tiles, tiles.len(), "{name}");
            let num_rows = tiles[0].0 * tiles[0].1 + picture.num_rows();
            assert_eq!(num_rows, patches.num_tokens, "{name}");
        }
        assert_eq!(patches.values.len(), case.num_values, "{name}");
        for &(place, value) in &case.values {
            assert_eq!(patches.values[place], value, "{name} at {place}");
        }
        let bytes: Vec<u8> = patches
            .values
            .iter()
            .flat_map(|value| value.to_le_bytes())
            .collect();
        assert_eq!(hex(&Sha256::digest(bytes)), case.sha256, "{name}");
        tested.insert(case.processor);
    }
    let folders = processor_names();
    assert_eq!(tested, folders);
}

/// The error of a processor with a field of one of its files changed.
fn error_with(processor: &str, file: &str, field: &str, value: Value) -> String {
    let folder = TempFolder::copy_of(&processor_folder(processor));
    let path = folder.path().join(file);
    let text = fs::read_to_string(&path).expect("a file of the processor");
    let mut fields: Value = serde_json::from_str(&text).expect("JSON");
    fields[field] = value;
    fs::write(&path, fields.to_string()).expect("the file is written");
    let error = ImageProcessor::open(folder.path()).expect_err("a wrong field");
    error.to_string()
}

#[test]
fn what_a_processor_does_not_know_is_refused_by_name() {
    let image = "preprocessor_config.json";
    let processor_config = "processor_config.json";
    let wrong = [
        (
            "idefics3",
            image,
            "image_processor_type",
            json!("ViTImageProcessor"),
            "'ViTImageProcessor' is unknown",
        ),
        (
            "idefics3",
            image,
            "image_processor_type",
            json!(3),
            "'image_processor_type': 3 is not a text",
        ),
        (
            "idefics3",
            image,
            "resample",
            json!(0),
            "'resample': 0 is not 1 (Lanczos)",
        ),
        (
            "idefics3",
            image,
            "do_resize",
            json!(false),
            "'do_resize': false",
        ),
        (
            "idefics3",
            image,
            "do_rescale",
            json!(false),
            "'do_rescale': false",
        ),
        (
            "idefics3",
            image,
            "image_mean",
            json!([0.5, 0.5]),
            "'image_mean': [0.5,0.5] is not a number for each",
        ),
        (
            "idefics3",
            image,
            "image_std",
            json!([0.5, 0.0, 0.5]),
            "image_std and rescale_factor",
        ),
        (
            "idefics3",
            image,
            "size",
            json!({"shortest_edge": 4}),
            "'size.longest_edge' is missing",
        ),
        (
            "idefics3",
            image,
            "size",
            json!({"longest_edge": 1e9}),
            "'size.longest_edge': 1000000000.0 is not",
        ),
        (
            "idefics3",
            image,
            "do_sharpen",
            json!(true),
            "'do_sharpen' with true is unknown",
        ),
        (
            "idefics3",
            processor_config,
            "image_seq_len",
            json!(5),
            "image_seq_len is 5",
        ),
        (
            "idefics3",
            "processor_config.json",
            "extra",
            json!("x"),
            "'extra' with \"x\" is unknown",
        ),
        (
            "idefics3",
            "config.json",
            "model_type",
            json!("llama"),
            "model type 'llama' is unknown",
        ),
        (
            "internvl",
            image,
            "max_patches",
            json!(1000),
            "max_patches is 1000",
        ),
        (
            "internvl",
            image,
            "size",
            json!({"height": 70, "width": 56}),
            "image_seq_length is 4",
        ),
        (
            "qwen2-vl",
            image,
            "min_pixels",
            json!(1 << 20),
            "1048576, is above the largest",
        ),
        (
            "gemma3",
            image,
            "do_pan_and_scan",
            json!(true),
            "'do_pan_and_scan': true",
        ),
        (
            "gemma3",
            "config.json",
            "mm_tokens_per_image",
            json!(64),
            "in config.json is 64",
        ),
        (
            "llama4",
            image,
            "size",
            json!({"height": 56, "width": 84}),
            "size is 56 x 84",
        ),
        (
            "llama4",
            image,
            "do_normalize",
            json!(false),
            "'do_normalize': false",
        ),
        (
            "llama4",
            image,
            "max_patches",
            json!(65),
            "max_patches is 65",
        ),
        ("llava", image, "do_pad", json!(true), "'do_pad': true"),
        (
            "llava",
            image,
            "do_center_crop",
            json!(false),
            "has no bound",
        ),
        (
            "llava",
            processor_config,
            "patch_size",
            json!(16),
            "patch_size is 16",
        ),
        (
            "llava",
            processor_config,
            "vision_feature_select_strategy",
            json!("last"),
            "\"last\" is not",
        ),
        (
            "llava-next",
            image,
            "aspect_ratio_setting",
            json!("pad"),
            "\"pad\" is not 'anyres'",
        ),
        (
            "llava-next",
            image,
            "crop_size",
            json!(112),
            "not the sides of one square",
        ),
        (
            "llava-onevision",
            image,
            "image_grid_pinpoints",
            json!([[56, 57]]),
            "'image_grid_pinpoints' is not",
        ),
        (
            "llava-onevision",
            image,
            "image_grid_pinpoints",
            json!([[5600, 56000]]),
            "'image_grid_pinpoints' is not",
        ),
        (
            "llava-onevision",
            image,
            "image_grid_pinpoints",
            json!([]),
            "'image_grid_pinpoints' is not",
        ),
        (
            "llava-onevision",
            processor_config,
            "num_image_tokens",
            json!(9),
            "num_image_tokens is not 16",
        ),
        (
            "llava-onevision",
            processor_config,
            "vision_aspect_ratio",
            json!("pad"),
            "\"pad\" is not",
        ),
        (
            "pixtral",
            processor_config,
            "patch_size",
            json!(14),
            "patch_size is 14",
        ),
    ];
    for (processor, file, field, value, expected) in wrong {
        let error = error_with(processor, file, field, value);
        assert!(
            error.contains(expected) && error.contains(".json"),
            "{error}"
        );
    }
}

#[test]
fn an_image_of_a_wrong_shape_is_refused_with_the_way_out() {
    let wrong = [
        ("qwen2-vl", (1, 201), 1, "more than 200 times"),
        ("pixtral", (1, 150), 1, "too thin to fit into 96 x 96"),
        ("llava-padded", (1, 8193), 1, "too long to be padded"),
        ("llava-onevision", (8193, 1), 2, "too long to be padded"),
    ];
    for (name, size, num_images, expected) in wrong {
        let processor = ImageProcessor::open(&processor_folder(name)).expect("a processor");
        let error = processor
            .prompt(size, num_images)
            .expect_err("a wrong shape")
            .to_string();
        let (height, width) = size;
        let start = format!("{height} x {width} pixels are ");
        assert!(
            error.starts_with(&start) && error.contains(expected),
            "{error}"
        );
        assert!(
            error.contains("; cut the image") || error.contains("; make the image"),
            "{error}"
        );
    }
}

#[test]
fn a_file_that_is_missing_is_named() {
    for name in ["config.json", "preprocessor_config.json"] {
        let folder = TempFolder::copy_of(&processor_folder("idefics3"));
        fs::remove_file(folder.path().join(name)).expect("the file was there");
        let error = ImageProcessor::open(folder.path()).expect_err("a missing file");
        assert!(
            error
                .to_string()
                .contains(&format!("{name}: the file is missing")),
            "{error}"
        );
    }
    let folder = TempFolder::copy_of(&processor_folder("gemma4"));
    fs::remove_file(folder.path().join("tokenizer_config.json")).expect("the file was there");
    let error = ImageProcessor::open(folder.path())
        .expect_err("no tokens")
        .to_string();
    assert!(
        error.contains("the special token 'image_token' is missing"),
        "{error}"
    );
}
