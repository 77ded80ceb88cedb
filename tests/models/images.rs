//! Models with images, against transformers: see tests/fixtures/make_image_fixtures.py.

use std::fs;
use std::sync::Arc;

use half::bf16;
use inflight_base::{TokenId, Tokens};
use inflight_device_cpu::Cpu;
use inflight_engine::{
    BlockReuse, CapacityPolicy, Event, Image as PromptImage, ImageLimits, ImageSpan, PromptImages,
};
use inflight_images::{ImagePatches, Picture, RowLayout, TileGrid};
use inflight_manager::{BatchManager, ManagerOptions};
use inflight_reference_device::{Reference, ReferenceOptions};
use inflight_runner::{ModelSource, Runner};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::copy::Copy;
use crate::embeddings::cosine;
use crate::errors::largest_error;
use crate::support::{
    CallRunner, Request, Served, Setup, TestedDevice, fixture, new_request, serve, serve_alone,
    simds,
};
use crate::transformers::Prompt;

const NAMES: [&str; 15] = [
    "images/smolvlm",
    "images/idefics3",
    "images/llava",
    "images/internvl",
    "images/internvl-6b",
    "images/llava-siglip",
    "images/llava-next",
    "images/llava-onevision",
    "images/qwen2-vl",
    "images/qwen2-5-vl",
    "images/qwen3-vl",
    "images/qwen3-5-vl",
    "images/gemma3",
    "images/pixtral",
    "images/mistral3",
];
const IMAGE_TOKEN: TokenId = 7;

/// The results of transformers for a fixture.
#[derive(Deserialize)]
struct Expected {
    images: Vec<Image>,
    prompts: Vec<ImagePrompt>,
}

#[derive(Deserialize)]
struct ImagePrompt {
    images: Vec<usize>,
    #[serde(flatten)]
    prompt: Prompt,
}

#[derive(Deserialize)]
struct Image {
    tiles: Vec<[usize; 2]>,
    picture: Option<TilesOfPicture>,
    values: Vec<f32>,
    rows: Vec<f32>,
    exact: Vec<f32>,
    bf16_cost: f32,
}

#[derive(Clone, Copy, Deserialize)]
struct TilesOfPicture {
    tiles: (usize, usize),
    kept: (usize, usize),
    resampled: (usize, usize),
}

impl From<TilesOfPicture> for Picture {
    fn from(picture: TilesOfPicture) -> Self {
        let TilesOfPicture {
            tiles,
            kept,
            resampled,
        } = picture;
        Self {
            tiles,
            kept,
            resampled,
        }
    }
}

impl Expected {
    fn read(name: &str) -> Self {
        let path = fixture(name).join("expected.json");
        let text = fs::read_to_string(path).expect("expected.json");
        serde_json::from_str(&text).expect("expected.json")
    }
}

impl Image {
    fn patches(&self, row_width: usize) -> ImagePatches {
        let tiles = self.tiles.iter();
        ImagePatches {
            values: self.values.clone(),
            tiles: tiles
                .map(|&[rows, columns]| TileGrid { rows, columns })
                .collect(),
            num_tokens: self.rows.len() / row_width,
            row_layout: match self.picture {
                Some(picture) => RowLayout::Picture(picture.into()),
                None => RowLayout::Tiles,
            },
        }
    }
}

/// The images with these numbers, wherever the prompt has image tokens.
fn images_of(name: &str, prompt: &[TokenId], numbers: &[usize]) -> PromptImages {
    let expected = Expected::read(name);
    let source = open(name);
    let (tower, width) = (source.tower().expect("a tower"), source.spec().hidden_size);
    let mut end = 0;
    let mut spans = Vec::new();
    for &number in numbers {
        let patches = expected.images[number].patches(width);
        let num_tokens = patches.num_tokens;
        let num_positions = Tokens(tower.num_positions(&patches));
        let image = PromptImage::new(number as u128, Tokens(num_tokens as u32), Arc::new(patches));
        let image = image.at_positions(num_positions);
        let mut first_row = 0;
        while first_row < num_tokens {
            let start = prompt[end..].iter().position(|&token| token == IMAGE_TOKEN);
            let position = end + start.expect("a token for each row");
            let run = prompt[position..].iter().take(num_tokens - first_row);
            let run_len = run.take_while(|&&token| token == IMAGE_TOKEN).count();
            spans.push(ImageSpan {
                position: Tokens(position as u32),
                image: image.clone(),
                first_row: Tokens(first_row as u32),
                num_tokens: Tokens(run_len as u32),
            });
            first_row += run_len;
            end = position + run_len;
        }
    }
    PromptImages::new(spans)
}

fn image_request(
    name: &str,
    prompt: &[TokenId],
    numbers: &[usize],
    max_new_tokens: u32,
) -> Request {
    Request {
        images: images_of(name, prompt, numbers),
        ..Request::greedy(prompt, max_new_tokens)
    }
}

/// Room for all images of a model.
fn setup(name: &str) -> Setup {
    Setup {
        max_seq_len: 128,
        images: Some(limits(name, 1000, 1000)),
        ..Setup::default()
    }
}

fn limits(name: &str, max_num_tokens: u32, max_cached_tokens: u32) -> ImageLimits {
    ImageLimits {
        max_num_tokens: Tokens(max_num_tokens),
        max_cached_tokens: Tokens(max_cached_tokens),
        has_whole_images: open(name).spec().has_whole_images,
    }
}

fn open(name: &str) -> ModelSource {
    let source = ModelSource::open(&fixture(name)).expect("the checkpoint opens");
    let tower = source.find_tower().expect("it has a tower");
    source.with_tower(tower.with_max_tokens(24))
}

fn load_on<D: TestedDevice>(name: &str, setup: &Setup, options: &D::Options) -> Box<dyn Runner> {
    D::load(&open(name), setup.runner_limits(), options).expect("the checkpoint loads")
}

fn load(name: &str, setup: &Setup) -> Box<dyn Runner> {
    load_on::<Cpu>(name, setup, &setup.cpu_options())
}

fn encode(runner: &mut dyn Runner, image: &ImagePatches) -> Vec<f32> {
    let rows = runner.encode_image(image).expect("the image is encoded");
    rows.into_iter().map(bf16::to_f32).collect()
}

fn tower_agrees(name: &str, runner: &mut dyn Runner) {
    let expected = Expected::read(name);
    let width = open(name).spec().hidden_size;
    let mut all = Vec::new();
    for image in &expected.images {
        let rows = encode(runner, &image.patches(width));
        let cost = image.bf16_cost;
        println!(
            "{name}: largest error {:.6}, bf16 costs {cost}",
            largest_error(&rows, &image.rows)
        );
        for (ours, theirs) in rows.iter().zip(&image.rows) {
            // Sums in another order, and then rows that are rounded to the next number in bf16.
            let tolerance = 0.7 * cost + theirs.abs() / 128.0;
            assert!(
                (ours - theirs).abs() <= tolerance,
                "{name}: {ours}, not {theirs}"
            );
        }
        for (row, exact) in rows.chunks(width).zip(image.exact.chunks(width)) {
            let cosine = cosine(row, exact);
            assert!(cosine > 0.9999, "{name}: cosine {cosine}");
        }
        all.push(rows);
    }
    let other = cosine(&all[0][..width], &all[1][..width]);
    assert!(other < 0.995, "they would agree with anything: {other}");
}

#[test]
fn towers_agree_with_transformers() {
    for name in NAMES {
        for simd in simds() {
            let setup = Setup {
                simd: Some(simd),
                ..Setup::default()
            };
            tower_agrees(name, &mut *load(name, &setup));
        }
        let setup = Setup::default();
        let mut reference = load_on::<Reference>(name, &setup, &ReferenceOptions::default());
        tower_agrees(name, &mut *reference);
    }
}

/// Rows of an image have the bits that they have alone after other images, and on any number of threads.
#[test]
fn rows_of_an_image_depend_on_nothing_else() {
    for name in NAMES {
        let width = open(name).spec().hidden_size;
        let images = Expected::read(name).images;
        let images: Vec<_> = images.iter().map(|it| it.patches(width)).collect();
        let setup = Setup::default();
        let alone = images.iter().map(|it| encode(&mut *load(name, &setup), it));
        let alone: Vec<_> = alone.collect();
        let mut runner = load(
            name,
            &Setup {
                num_threads: 3,
                ..setup
            },
        );
        for index in [1, 0, 1, 1, 0] {
            let rows = encode(&mut *runner, &images[index]);
            assert_eq!(rows, alone[index], "{name}");
        }
    }
}

#[test]
fn images_that_a_tower_does_not_read_are_refused() {
    let name = NAMES[0];
    let setup = Setup::default();
    let width = open(name).spec().hidden_size;
    let image = Expected::read(name).images[0].patches(width);
    let mut runner = load(name, &setup);
    let mut refused = |change: fn(&mut ImagePatches), reason: &str| {
        let mut image = image.clone();
        change(&mut image);
        let error = runner.encode_image(&image).expect_err("it is refused");
        assert!(error.to_string().ends_with(reason), "{error}");
    };
    refused(
        |it| it.tiles[0].rows = 5,
        "a tile of 5 x 6 patches; SmolVLMForConditionalGeneration reads tiles of 6 x 6",
    );
    refused(
        |it| it.values.truncate(7),
        "7 values of an image of 1 tiles, which has 1728",
    );
    refused(
        |it| it.num_tokens = 8,
        "8 tokens for an image of 1 tiles, which becomes 9 rows",
    );
    let mut text_only = setup.load(name);
    let error = text_only.encode_image(&image).expect_err("no tower");
    let expected = "an image for a model that was loaded without its vision tower";
    assert!(error.to_string().ends_with(expected), "{error}");
}

/// One of several images is one tile, whose rows end as a line does.
#[test]
fn rows_of_a_line_are_those_of_its_tile_and_an_end() {
    let name = "images/llava-onevision";
    let width = open(name).spec().hidden_size;
    let image = Expected::read(name).images[0].patches(width);
    let mut runner = load(name, &Setup::default());
    let picture = encode(&mut *runner, &image);
    let tile_len = image.values.len() / image.tiles.len();
    let line = ImagePatches {
        values: image.values[..tile_len].to_vec(),
        tiles: image.tiles[..1].to_vec(),
        num_tokens: 5,
        row_layout: RowLayout::Line,
    };
    let rows = encode(&mut *runner, &line);
    let (tile, end) = rows.split_at(4 * width);
    assert_eq!(tile, &picture[..4 * width]);
    assert_eq!(end, &picture[picture.len() - width..]);
}

#[test]
fn pictures_that_a_tower_does_not_read_are_refused() {
    let name = "images/llava-next";
    let width = open(name).spec().hidden_size;
    let image = Expected::read(name).images[0].patches(width);
    let RowLayout::Picture(picture) = image.row_layout else {
        panic!("{name} has pictures");
    };
    let mut runner = load(name, &Setup::default());
    let mut refused = |row_layout: RowLayout, num_tokens: usize, reason: &str| {
        let image = ImagePatches {
            row_layout,
            num_tokens,
            ..image.clone()
        };
        let error = runner.encode_image(&image).expect_err("it is refused");
        assert!(error.to_string().contains(reason), "{error}");
    };
    let num_tokens = image.num_tokens;
    refused(
        RowLayout::Tiles,
        12,
        "rows without the ends of lines, which LlavaNext",
    );
    refused(
        image.row_layout,
        num_tokens - 1,
        "13 tokens for an image of 3 tiles, which becomes 14 rows",
    );
    let wrong = [
        Picture {
            tiles: (2, 2),
            ..picture
        },
        Picture {
            tiles: (usize::MAX, 4),
            ..picture
        },
        Picture {
            kept: (4, 4),
            ..picture
        },
        Picture {
            kept: (1, 4),
            ..picture
        },
        Picture {
            resampled: (2, 5),
            ..picture
        },
    ];
    for picture in wrong {
        refused(RowLayout::Picture(picture), num_tokens, "of 3 tiles");
    }
    let text = "images/smolvlm";
    let image = Expected::read(text).images[0].patches(width);
    let image = ImagePatches {
        row_layout: RowLayout::Line,
        ..image
    };
    let error = load(text, &Setup::default()).encode_image(&image);
    let error = error.expect_err("it is refused").to_string();
    assert!(
        error.contains("rows with ends of lines, which SmolVLM"),
        "{error}"
    );
}

#[test]
fn models_without_a_known_tower_take_no_images() {
    let source = ModelSource::open(&fixture("exaone4-5")).expect("the checkpoint opens");
    let error = source.with_images().err().expect("it is refused");
    let error = error.to_string();
    assert!(error.contains("the model is a Exaone4_5_"), "{error}");
    assert!(error.contains("serve it for text only"), "{error}");
}

#[test]
fn a_damaged_tower_is_an_error_only_with_images() {
    let vision = json!({"hidden_size": 36, "num_hidden_layers": 4, "num_attention_heads": 3,
        "intermediate_size": 52, "image_size": 24, "patch_size": 4});
    let copy = Copy::of(NAMES[0]).config(json!({"vision_config": vision}));
    let source = ModelSource::open(copy.dir()).expect("the language model is whole");
    let error = source.with_images().err().expect("a layer is missing");
    let name = "model.vision_model.encoder.layers.3.";
    assert!(error.to_string().contains(name), "{error}");
    let copy = Copy::of(NAMES[0]).config(json!({"scale_factor": 4}));
    let source = ModelSource::open(copy.dir()).expect("the language model is whole");
    let error = source.with_images().err().expect("6 is no multiple of 4");
    let expected = "vision_config.image_size: 24 is not";
    assert!(error.to_string().contains(expected), "{error}");
}

/// The error of a tower whose config has other values.
fn error_with(name: &str, config: Value) -> String {
    let copy = Copy::of(name).config(config);
    let source = ModelSource::open(copy.dir()).expect("the language model is whole");
    let error = source.with_images().err().expect("it is refused");
    error.to_string()
}

#[test]
fn parts_of_llava_that_are_not_computed_are_refused_by_name() {
    let refused = |config: Value, expected: &str| {
        let error = error_with("images/llava", config);
        assert!(error.contains(expected), "{error}");
        assert!(error.contains("without max_num_image_tokens"), "{error}");
    };
    refused(
        json!({"vision_feature_select_strategy": "full"}),
        "vision_feature_select_strategy: 'full'",
    );
    refused(
        json!({"vision_feature_layer": [-2, -1]}),
        "vision_feature_layer: [-2,-1]",
    );
    refused(
        json!({"vision_feature_layer": 5}),
        "vision_feature_layer: 5 is not one layer of 4",
    );
    refused(
        json!({"vision_config": {"model_type": "dinov2"}}),
        "vision_config.model_type: 'dinov2'",
    );
    let siglip = json!({"model_type": "siglip_vision_model", "patch_size": 14});
    refused(
        json!({"vision_config": siglip, "vision_feature_select_strategy": "default"}),
        "vision_feature_select_strategy: 'default' is not 'full'",
    );
}

/// A section of a fixture's config with another value.
fn section(name: &str, section: &str, key: &str, value: Value) -> Value {
    let text = fs::read_to_string(fixture(name).join("config.json")).expect("config.json");
    let mut config: Value = serde_json::from_str(&text).expect("config.json");
    config[section][key] = value;
    json!({section: config[section]})
}

#[test]
fn parts_of_pixtral_that_are_not_computed_are_refused_by_name() {
    let refused = |name: &str, config: Value, expected: &str| {
        let error = error_with(name, config);
        assert!(error.contains(expected), "{error}");
    };
    let of_vision = |key: &str, value: Value, expected: &str| {
        let name = "images/mistral3";
        refused(name, section(name, "vision_config", key, value), expected);
    };
    of_vision(
        "num_attention_heads",
        json!(6),
        "vision_config.num_attention_heads: 6 is not such that heads of",
    );
    of_vision("patch_size", json!(4096), "vision_config.patch_size: 4096");
    of_vision(
        "rope_parameters",
        json!({"rope_type": "yarn", "rope_theta": 50.0}),
        "rope_type: 'yarn' is not 'axial'",
    );
    of_vision(
        "model_type",
        json!("siglip_vision_model"),
        "vision_config.model_type: 'siglip_vision_model' is not 'pixtral'",
    );
    refused(
        "images/mistral3",
        json!({"spatial_merge_size": 3000}),
        "spatial_merge_size: 3000 is not such that",
    );
    refused(
        "images/mistral3",
        json!({"spatial_merge_size": 3}),
        "multi_modal_projector.patch_merger.merging_layer.weight",
    );
    let eps = section(
        "images/mistral3",
        "text_config",
        "rms_norm_eps",
        json!(1e-6),
    );
    refused(
        "images/mistral3",
        eps,
        "text_config.rms_norm_eps: 0.000001 is not 0.00001",
    );
    refused(
        "images/pixtral",
        json!({"vision_feature_select_strategy": "default"}),
        "vision_feature_select_strategy: 'default' is not 'full'",
    );
}

#[test]
fn contradictions_in_configs_of_qwen_are_refused_by_name() {
    let refused = |name: &str, config: Value, expected: &str| {
        let error = error_with(name, config);
        assert!(error.contains(expected), "{error}");
    };
    let of_vision = |name: &str, key: &str, value: Value, expected: &str| {
        refused(name, section(name, "vision_config", key, value), expected);
    };
    let name = "images/qwen3-vl";
    of_vision(
        name,
        "out_hidden_size",
        json!(64),
        "vision_config.out_hidden_size: 64 is not 32, the width of the language model",
    );
    of_vision(
        name,
        "num_heads",
        json!(6),
        "vision_config.num_heads: 6 is not such that heads of hidden_size have a multiple of 4",
    );
    of_vision(
        name,
        "deepstack_visual_indexes",
        json!([0, 3]),
        "vision_config.deepstack_visual_indexes: [0,3] is not an ascending list of layers below 3",
    );
    of_vision(
        name,
        "deepstack_visual_indexes",
        json!([1, 0]),
        "is not an ascending list",
    );
    of_vision(
        name,
        "deepstack_visual_indexes",
        json!([0, 1, 2]),
        "model.visual.deepstack_merger_list.2.norm.weight",
    );
    of_vision(
        name,
        "num_position_embeddings",
        json!(26),
        "vision_config.num_position_embeddings: 26 is not a square number",
    );
    of_vision(
        name,
        "num_position_embeddings",
        json!(36),
        "model.visual.pos_embed.weight",
    );
    of_vision(
        name,
        "spatial_merge_size",
        json!(3000),
        "vision_config.spatial_merge_size: 3000",
    );
    of_vision(
        name,
        "patch_size",
        json!(16_384),
        "vision_config.patch_size",
    );
    of_vision(
        "images/qwen2-5-vl",
        "window_size",
        json!(7),
        "vision_config.window_size: 7 is not at least 8, the side of a token",
    );
    of_vision(
        "images/qwen2-vl",
        "hidden_size",
        json!(36),
        "vision_config.hidden_size: 36 is not 32",
    );
    let sections = |sections: Value| {
        let parameters =
            json!({"rope_type": "default", "rope_theta": 50.0, "mrope_section": sections});
        section(
            "images/qwen2-vl",
            "text_config",
            "rope_parameters",
            parameters,
        )
    };
    let expected =
        "mrope_section: [1,2,2] is not three numbers with the sum 4, the rotated pairs of a head";
    refused("images/qwen2-vl", sections(json!([1, 2, 2])), expected);
    let expected = "mrope_section: [2,2] is not three numbers";
    refused("images/qwen2-vl", sections(json!([2, 2])), expected);
}

#[test]
fn images_of_other_sizes_than_a_tower_reads_are_refused() {
    let name = "images/qwen2-5-vl";
    let setup = Setup::default();
    let width = open(name).spec().hidden_size;
    let image = Expected::read(name).images[0].patches(width);
    let mut runner = load(name, &setup);
    let mut refused = |change: fn(&mut ImagePatches), reason: &str| {
        let mut image = image.clone();
        change(&mut image);
        let error = runner.encode_image(&image).expect_err("it is refused");
        assert!(error.to_string().ends_with(reason), "{error}");
    };
    refused(
        |it| it.tiles[0].rows = 5,
        "a tile of 5 x 4 patches; Qwen2_5_VLForConditionalGeneration reads tiles of up to 96 patches, with rows and \
         columns that are multiples of 2",
    );
    refused(
        |it| it.tiles[0].columns = 26,
        "reads tiles of up to 96 patches, with rows and columns that are multiples of 2",
    );
    refused(
        |it| it.tiles = vec![it.tiles[0]; 2],
        "an image of 2 tiles; Qwen2_5_VLForConditionalGeneration reads images of one",
    );
    refused(
        |it| it.values.truncate(9),
        "9 values of an image of 1 tiles, which has 1536",
    );
}

/// The positions of tokens follow from the patches.
#[test]
fn a_batch_manager_refuses_images_at_other_positions() {
    let name = "images/qwen3-vl";
    let request = requests(name).remove(0);
    let mut manager = manager(
        name,
        &json!({"max_num_image_tokens": 9, "max_image_tokens": 24}),
    );
    let mut new = new_request(0, &request);
    let spans = request.images.spans().iter().map(|span| ImageSpan {
        image: span.image.clone().at_positions(span.num_tokens),
        ..span.clone()
    });
    new.images = PromptImages::new(spans.collect());
    let error = manager.add(new).expect_err("it is refused").to_string();
    assert!(error.contains("another number of positions"), "{error}");
    let mut new = new_request(0, &request);
    let [first, ..] = request.images.spans() else {
        panic!("{name} has images");
    };
    let part = |first_row: u32, num_tokens: u32| ImageSpan {
        position: first.position + Tokens(first_row + first_row / 2),
        first_row: Tokens(first_row),
        num_tokens: Tokens(num_tokens),
        ..first.clone()
    };
    new.images = PromptImages::new(vec![part(0, 2), part(2, 2)]);
    let error = manager.add(new).expect_err("it is refused").to_string();
    assert!(error.contains("are in several spans"), "{error}");
    manager
        .add(new_request(0, &request))
        .expect("the others are read");
}

#[test]
fn parts_of_internvl_that_are_not_computed_are_refused_by_name() {
    let refused = |config: Value, expected: &str| {
        let error = error_with("images/internvl", config);
        assert!(error.contains(expected), "{error}");
    };
    let of_vision = |key: &str, value: Value, expected: &str| {
        refused(json!({"vision_config": {key: value}}), expected);
    };
    refused(
        json!({"vision_feature_select_strategy": "full"}),
        "vision_feature_select_strategy: 'full' is not 'default': without max_num_image_tokens",
    );
    refused(
        json!({"vision_feature_layer": [-1]}),
        "vision_feature_layer: [-1]",
    );
    refused(
        json!({"downsample_ratio": 0.4}),
        "downsample_ratio: 0.4 is not 1 divided by a whole number",
    );
    refused(
        json!({"downsample_ratio": 0.125}),
        "a multiple of 1 / downsample_ratio = 8",
    );
    of_vision(
        "norm_type",
        json!("batch_norm"),
        "vision_config.norm_type: 'batch_norm'",
    );
    of_vision(
        "use_mean_pooling",
        json!(false),
        "vision_config.use_mean_pooling: false",
    );
    of_vision(
        "use_absolute_position_embeddings",
        json!(false),
        "vision_config.use_absolute_position_embeddings: false",
    );
    of_vision(
        "image_size",
        json!([16, 20]),
        "vision_config.image_size: [16,20] is not two equal sides",
    );
    of_vision(
        "patch_size",
        json!([]),
        "vision_config.patch_size: [] is not two equal sides",
    );
}

#[test]
fn squares_of_patches_that_make_no_tokens_are_refused_by_name() {
    for (num_tokens, expected) in [
        (8, "mm_tokens_per_image: 8 is not the square of a number"),
        (
            16,
            "16 is not the square of a number that divides the 6 patches",
        ),
    ] {
        let copy = Copy::of("images/gemma3").config(json!({"mm_tokens_per_image": num_tokens}));
        let source = ModelSource::open(copy.dir()).expect("the language model is whole");
        let error = source.with_images().err().expect("it is refused");
        assert!(error.to_string().contains(expected), "{error}");
    }
}

/// Checkpoints of LLaVA by its authors have another module around the encoder.
#[test]
fn a_tower_has_other_names_in_older_checkpoints() {
    let names = NAMES.iter().filter(|name| name.contains("llava"));
    for name in names {
        let copy = Copy::of(name)
            .renamed(|name| name.replace("vision_tower.", "vision_tower.vision_model."));
        let source = ModelSource::open(copy.dir()).expect("the checkpoint opens");
        let source = source.with_images().expect("it has a tower");
        let bytes = |source: &ModelSource| source.num_weight_bytes(None).expect("they are there");
        assert_eq!(bytes(&source), bytes(&open(name)), "{name}");
    }
}

/// The memory estimate of a model counts its tower.
#[test]
fn the_weights_of_a_tower_count() {
    let bytes = |source: &ModelSource| source.num_weight_bytes(None).expect("they are there");
    let name = NAMES[0];
    let text_only = ModelSource::open(&fixture(name)).expect("the checkpoint opens");
    let layer = 4 * 36 * 36 + 2 * 36 * 52;
    let [patches, positions, projector] = [48 * 36, 36 * 36, 144 * 32];
    let num_weights = 3 * layer + patches + positions + projector;
    assert_eq!(bytes(&open(name)) - bytes(&text_only), 2 * num_weights);
}

fn prompts_agree(name: &str, runner: &mut impl CallRunner, setup: &Setup) {
    for ImagePrompt { images, prompt } in Expected::read(name).prompts {
        let request = image_request(name, &prompt.prompt, &images, prompt.greedy.len() as u32);
        let served = serve_alone(runner, setup, &request);
        assert_eq!(served.tokens, prompt.greedy, "{name}");
        for (ours, theirs) in served.logits.iter().zip(&prompt.logits) {
            let error = largest_error(ours, theirs);
            println!(
                "{name}: largest error {error:.6}, bf16 costs {}",
                prompt.bf16_cost
            );
            assert!(error <= 0.7 * prompt.bf16_cost, "{name}: {error}");
        }
        // The images are what makes the difference.
        let blind = serve_alone(runner, setup, &Request::greedy(&prompt.prompt, 1));
        let moved = largest_error(&blind.logits[0], &served.logits[0]);
        assert!(moved > 5.0 * prompt.bf16_cost, "{name}: {moved}");
    }
}

#[test]
fn prompts_with_images_agree_with_transformers() {
    for name in NAMES {
        for simd in simds() {
            let setup = Setup {
                simd: Some(simd),
                ..setup(name)
            };
            prompts_agree(name, &mut setup.load(name), &setup);
        }
        let options = ReferenceOptions::default();
        let mut reference = setup(name).load_on::<Reference>(&fixture(name), &options);
        prompts_agree(name, &mut reference, &setup(name));
    }
}

/// Prompts with the images in different places, twice and not at all.
fn requests(name: &str) -> Vec<Request> {
    let prompt = Expected::read(name).prompts.remove(0);
    let ids = prompt.prompt.prompt;
    let images = images_of(name, &ids, &prompt.images);
    // With what is between lines of its rows.
    let tokens_of = |number: usize| {
        let spans = images.spans().iter();
        let spans: Vec<_> = spans
            .filter(|it| it.image.hash() == number as u128)
            .collect();
        ids[spans[0].position.index()..spans[spans.len() - 1].end().index()].to_vec()
    };
    let text = |len: u32, factor: u32| (0..len).map(move |it| 10 + it * factor % 140);
    let (of_first, of_second) = (tokens_of(0), tokens_of(1));
    let twice: Vec<_> = of_first
        .iter()
        .copied()
        .chain(of_first.clone())
        .chain(text(9, 3))
        .collect();
    let behind: Vec<_> = text(21, 5)
        .chain(of_second.clone())
        .chain(text(3, 7))
        .collect();
    // They begin alike, with another image.
    let other: Vec<_> = text(21, 5).chain(of_first).chain(text(30, 7)).collect();
    let all = [
        image_request(name, &ids, &prompt.images, 12),
        image_request(name, &twice, &[0, 0], 10),
        image_request(name, &behind, &[1], 14),
        image_request(name, &other, &[0], 9),
        Request::greedy(&text(33, 11).collect::<Vec<_>>(), 20),
        image_request(name, &ids, &prompt.images, 7),
    ];
    let arrivals = all.into_iter().zip([0, 1, 1, 3, 4, 40]);
    arrivals
        .map(|(request, arrival)| Request { arrival, ..request })
        .collect()
}

/// Whatever else is in the batch, however contexts are cut, paused and reused, and whenever images are encoded.
#[test]
fn schedules_change_no_bit_of_answers_about_images() {
    for name in NAMES {
        let requests = requests(name);
        let alone: Vec<Served> = requests
            .iter()
            .map(|request| serve_alone(&mut setup(name).load(name), &setup(name), request))
            .collect();
        let sizes = requests[0].images.spans().iter();
        let sizes = sizes.filter(|span| span.first_row == Tokens::ZERO);
        let sizes: Vec<_> = sizes.map(|span| span.image.num_tokens().0).collect();
        // Room for two prompts, and hardly for their outputs.
        let blocks = requests[..2].iter().map(|it| it.prompt.len().div_ceil(4));
        let prompts_of_two = blocks.sum::<usize>() as u32 + 1;
        let chunks = Setup {
            enable_chunked_context: true,
            max_num_tokens: 11,
            block_size: 4,
            num_blocks: 256,
            // One image at a time.
            images: Some(limits(name, sizes[0], sizes[1])),
            num_threads: 2,
            ..setup(name)
        };
        let has_states = open(name).spec().recurrence().is_some();
        let reuse = Setup {
            reuse: match has_states {
                true => BlockReuse::WholeBlocks,
                false => BlockReuse::PartialBlocks,
            },
            num_state_snapshots: if has_states { 30 } else { 0 },
            state_snapshot_interval: 4,
            ..chunks.clone()
        };
        let pauses = Setup {
            policy: CapacityPolicy::MaxUtilization,
            max_seq_len: 76,
            num_blocks: prompts_of_two.max(20),
            ..chunks.clone()
        };
        let setups = [
            ("batch", setup(name)),
            ("chunks", chunks),
            ("reuse", reuse),
            ("pauses", pauses),
        ];
        for (what, setup) in setups {
            let (served, happened) = serve(&mut setup.load(name), &setup, &requests);
            println!("{name}, {what}: {happened:?}");
            assert_eq!(served, alone, "{name}, {what}");
            assert!(happened.max_sequences > 1, "{name}, {what}: {happened:?}");
            assert!(match what {
                "batch" => happened.num_encoded == 2,
                "chunks" => happened.num_chunks > 10 && happened.num_encoded > 4,
                "reuse" => happened.num_reused > if has_states { 10 } else { 40 },
                _ => happened.num_pauses > 0,
            });
        }
    }
}

/// Of a model whose image tokens see each other, where blocks outside of windows are given back.
#[test]
fn windows_change_no_bit_of_answers_about_images() {
    let name = "images/gemma3";
    let requests = requests(name);
    let alone = |request| serve_alone(&mut setup(name).load(name), &setup(name), request);
    let alone: Vec<Served> = requests.iter().map(alone).collect();
    for reuse in [BlockReuse::WholeBlocks, BlockReuse::PartialBlocks] {
        let setup = Setup {
            enable_chunked_context: true,
            max_num_tokens: 14,
            block_size: 4,
            num_blocks: 256,
            groups_of: Some(name),
            reuse,
            ..setup(name)
        };
        let (served, happened) = serve(&mut setup.load(name), &setup, &requests);
        println!("{reuse:?}: {happened:?}");
        assert_eq!(served, alone, "{reuse:?}");
        assert!(
            happened.num_reused > 20 && happened.num_chunks > 10,
            "{happened:?}"
        );
    }
}

/// A batch manager of a fixture, with these further options.
fn manager(name: &str, more: &Value) -> BatchManager {
    let mut options = json!({"gpt_model_path": fixture(name), "num_threads": 1});
    let all = options.as_object_mut().expect("an object");
    all.extend(more.as_object().expect("an object").clone());
    let options = ManagerOptions::parse(&options.to_string()).expect("they are valid");
    options.load().expect("the checkpoint loads").0
}

#[test]
fn a_batch_manager_answers_about_images() {
    for name in NAMES {
        let requests = requests(name);
        let alone =
            |request| serve_alone(&mut setup(name).load(name), &setup(name), request).tokens;
        let alone: Vec<_> = requests.iter().map(alone).collect();
        for overlaps in [false, true] {
            let mut manager = manager(
                name,
                &json!({"max_num_image_tokens": 9, "max_cached_image_tokens": 18, "max_num_tokens": 40,
                    "enable_trt_overlap": overlaps}),
            );
            for (index, request) in requests.iter().enumerate() {
                manager.add(new_request(index, request)).expect("it fits");
            }
            let (mut tokens, mut events) = (vec![Vec::new(); requests.len()], Vec::new());
            while !manager.is_idle() {
                manager.launch().expect("the step runs");
                manager.land(&mut events).expect("the step runs");
                for event in events.drain(..) {
                    if let Event::Token(id, token) = event {
                        tokens[id.index()].push(token);
                    }
                }
            }
            assert_eq!(tokens, alone, "{name}, overlaps: {overlaps}");
        }
    }
}

/// An image that would fail a step fails its request alone.
#[test]
fn a_batch_manager_refuses_images_that_its_tower_does_not_read() {
    let name = NAMES[0];
    let request = requests(name).remove(0);
    let [span, _] = request.images.spans() else {
        panic!("{name} has two images in its prompt");
    };
    let refused = |manager: &mut BatchManager, image: PromptImage| {
        let span = ImageSpan::of(span.position, image);
        let mut new = new_request(0, &request);
        new.images = PromptImages::new(vec![span]);
        let error = manager.add(new).expect_err("it is refused");
        error.to_string()
    };
    let mut text_only = manager(name, &json!({}));
    let error = refused(&mut text_only, span.image.clone());
    assert!(error.contains("it was loaded for text only"), "{error}");
    let mut manager = manager(name, &json!({"max_num_image_tokens": 9}));
    let patches = span
        .image
        .contents::<ImagePatches>()
        .expect("patches")
        .clone();
    let other_tile = ImagePatches {
        tiles: vec![TileGrid {
            rows: 6,
            columns: 5,
        }],
        ..patches.clone()
    };
    let image =
        |hash, num_tokens, patches| PromptImage::new(hash, Tokens(num_tokens), Arc::new(patches));
    for (image, expected) in [
        (
            PromptImage::new(1, Tokens(9), Arc::new(7)),
            "its contents are no patches",
        ),
        (image(2, 9, other_tile), "a tile of 6 x 5 patches"),
        (
            image(3, 8, patches),
            "another number of tokens than its patches",
        ),
    ] {
        let error = refused(&mut manager, image);
        assert!(error.contains(expected), "{error}");
    }
    manager
        .add(new_request(0, &request))
        .expect("the others are read");
}
