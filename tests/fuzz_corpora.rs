//! Runs the code of the fuzz targets (tests/fuzz) on the committed inputs. `cargo xtask fuzz` derives others from
//! those.

#[path = "fuzz/src/inputs/mod.rs"]
mod inputs;

use std::collections::BTreeSet;
use std::fs;

use inputs::Input;

/// The code of a target.
type Target = fn(&[u8]) -> Input;

/// The targets, by name.
const TARGETS: [(&str, Target); 10] = [
    ("chat_template", inputs::chat_template::run),
    ("config_json", inputs::config_json::run),
    ("detokenizer", inputs::detokenizer::run),
    ("ebnf", inputs::ebnf::run),
    ("gguf", inputs::gguf::run),
    ("guide", inputs::guide::run),
    ("images", inputs::images::run),
    ("replies", inputs::replies::run),
    ("request_options", inputs::request_options::run),
    ("safetensors", inputs::safetensors::run),
];

#[test]
fn every_committed_input_is_handled() {
    let corpora = inputs::repository().join("tests/fuzz/corpus");
    for (target, run) in TARGETS {
        let mut num_useful = 0;
        for entry in fs::read_dir(corpora.join(target)).expect("a corpus") {
            let path = entry.expect("an entry").path();
            // The name of an input that fails stands before its panic.
            println!("{}", path.display());
            let input = fs::read(&path).expect("an input");
            num_useful += usize::from(run(&input) == Input::Useful);
        }
        assert!(num_useful > 0, "{target}");
    }
}

#[test]
fn every_target_is_run() {
    let folder = inputs::repository().join("tests/fuzz/targets");
    let files = fs::read_dir(folder).expect("the targets");
    let files: BTreeSet<String> = files
        .map(|entry| entry.expect("an entry").path())
        .filter_map(|path| Some(path.file_stem()?.to_str()?.to_owned()))
        .collect();
    let run: BTreeSet<String> = TARGETS.iter().map(|(name, _)| (*name).to_owned()).collect();
    assert_eq!(run, files);
}
