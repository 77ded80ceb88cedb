//! `cargo xtask mutants`: changes the code of rooms, one place at a time, and runs the room's tests, which should
//! notice (`.cargo/mutants.toml`).

use std::fs;
use std::process::Command;

use clap::Args;

use crate::process::{command, output, run as run_command};
use crate::room::Room;
use crate::{Result, setup, workspace};

/// The rooms that decide, and read what clients send.
const DEFAULT: &[&str] = &["engine", "sampling", "text", "driver"];

/// Files of which every mutant is caught, or explained in `.cargo/mutants.toml`: what `cargo xtask test` has.
const EXAMINED: &[(&str, &[&str])] = &[
    (
        "engine",
        &[
            "acceptance.rs",
            "active.rs",
            "adapter.rs",
            "adapter_pages.rs",
            "apply.rs",
            "budget.rs",
            "capacity.rs",
            "config.rs",
            "draft_prices.rs",
            "drafts_to_make.rs",
            "engine.rs",
            "extra_outputs.rs",
            "kv/config.rs",
            "kv/groups.rs",
            "kv/kept.rs",
            "kv/lookup.rs",
            "kv/manager.rs",
            "kv/next_block.rs",
            "kv/pool.rs",
            "kv/prefix.rs",
            "kv/retained.rs",
            "kv/roots.rs",
            "kv/snapshots.rs",
            "kv/table.rs",
            "kv/tiers.rs",
            "kv/usage.rs",
            "kv/window.rs",
            "lockstep.rs",
            "micro_batches.rs",
            "model_drafts.rs",
            "output.rs",
            "plan.rs",
            "queue.rs",
            "request.rs",
            "room.rs",
            "sequence_table.rs",
            "sequence_tokens.rs",
            "stats.rs",
            "step_cost.rs",
            "table_rows.rs",
        ],
    ),
    (
        "text",
        &[
            "bounded_normalizer.rs",
            "byte_alphabet.rs",
            "chat_template_files.rs",
            "chat_templates.rs",
            "conversation.rs",
            "coverage.rs",
            "declared_tokens.rs",
            "detokenizer.rs",
            "encoder.rs",
            "gguf_vocabulary.rs",
            "growth.rs",
            "guarded.rs",
            "judge_prompt.rs",
            "reply/blocks.rs",
            "reply/call.rs",
            "reply/deepseek.rs",
            "reply/formats.rs",
            "reply/function_names.rs",
            "reply/glm.rs",
            "reply/granite.rs",
            "reply/harmony.rs",
            "reply/hermes.rs",
            "reply/json_end.rs",
            "reply/kimi.rs",
            "reply/llama.rs",
            "reply/mark.rs",
            "reply/marked_arguments.rs",
            "reply/marked_block.rs",
            "reply/mistral.rs",
            "reply/mod.rs",
            "reply/parameter_types.rs",
            "reply/pieces.rs",
            "reply/python.rs",
            "reply/pythonic.rs",
            "reply/qwen_coder.rs",
            "reply/sections.rs",
            "reply/thought.rs",
            "stop_words.rs",
            "strftime.rs",
            "token_cover.rs",
            "tokenizer.rs",
            "vocabulary.rs",
            "word_splits.rs",
        ],
    ),
];

/// About as many mutants as two cores test in five minutes.
const MUTANTS_PER_SHARD: usize = 20;

#[derive(Args)]
pub struct Options {
    /// The rooms, each a crate's folder or `driver` [default: engine, sampling, text, driver]
    rooms: Vec<Room>,
    /// Only one of N shards of a room's mutants, from 0 to N-1
    #[arg(long, value_name = "K/N")]
    shard: Option<String>,
    /// Only mutants of these files, by their path in the room's folder
    #[arg(long = "file", value_name = "FILE")]
    files: Vec<String>,
}

/// Tests the mutants of the rooms one after the other; fails if one survives, or its tests do not end.
pub fn run(options: &Options) -> Result<()> {
    let rooms = match options.rooms.is_empty() {
        true => Room::all(DEFAULT),
        false => options.rooms.clone(),
    };
    let mut failed = Vec::new();
    for room in &rooms {
        let files = files(room, options.files.iter().map(String::as_str));
        if let Err(error) = test(room, &files, options.shard.as_deref()) {
            eprintln!("error: {error}");
            failed.push(room.name());
        }
    }
    match failed.is_empty() {
        true => Ok(()),
        false => Err(format!("failed: {}", failed.join(", ")).into()),
    }
}

/// Tests a shard of the mutants of examined files, which a number chooses.
pub fn run_shard(number: usize) -> Result<()> {
    let (room, examined) = EXAMINED[number % EXAMINED.len()];
    let room: Room = room.parse()?;
    let files = files(&room, examined.iter().copied());
    let list = output(mutants(&room, &files)?.arg("--list"))?;
    let shard = shard(list.lines().count(), number / EXAMINED.len());
    test(&room, &files, Some(&shard))
}

/// The shard of so many mutants that a number chooses, as cargo-mutants takes it.
fn shard(num_mutants: usize, number: usize) -> String {
    let num_shards = num_mutants.div_ceil(MUTANTS_PER_SHARD).max(1);
    format!("{}/{num_shards}", number % num_shards)
}

/// The paths of a room's files from the root of the checkout; without names, a pattern for all of them.
fn files<'a>(room: &Room, names: impl Iterator<Item = &'a str>) -> Vec<String> {
    let sources = room.sources();
    let mut files: Vec<_> = names.map(|name| format!("{sources}{name}")).collect();
    if files.is_empty() {
        files.push(format!("{sources}**"));
    }
    files
}

fn test(room: &Room, files: &[String], shard: Option<&str>) -> Result<()> {
    let mut command = mutants(room, files)?;
    if let Some(shard) = shard {
        // Each shard has mutants of every file.
        command.args(["--sharding=round-robin", "--shard", shard]);
    }
    run_command(&mut command)
}

/// cargo-mutants on a room's files. It copies the checkout without what git ignores, and writes its lists and logs to
/// `target/mutants/ROOM/mutants.out/`.
fn mutants(room: &Room, files: &[String]) -> Result<Command> {
    let folder = workspace::target("mutants");
    let reports = folder.join(room.name());
    fs::create_dir_all(&reports)?;
    let mut command = command(setup::cargo_mutants()?);
    command
        .args(["mutants", "--output"])
        .arg(reports)
        .arg(format!("--package={}", room.package()))
        .args(files.iter().map(|file| format!("--file={file}")))
        .args(
            room.tests()
                .iter()
                .map(|argument| format!("--cargo-arg={argument}")),
        )
        // Dependencies are compiled once, and not for each copy.
        .env("CARGO_TARGET_DIR", folder.join("build"))
        // A mutant is compiled once, and its tests run for seconds.
        .env("CARGO_PROFILE_DEV_OPT_LEVEL", "1")
        .env("CARGO_PROFILE_DEV_DEBUG", "0")
        .env("CARGO_INCREMENTAL", "1")
        // Random tests are repeatable, and one failing case is enough.
        .env("PROPTEST_RNG_SEED", "1")
        .env("PROPTEST_MAX_SHRINK_ITERS", "0");
    Ok(command)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn examined_files_exist() {
        for (room, examined) in EXAMINED {
            let room: Room = room.parse().expect("a room");
            for file in files(&room, examined.iter().copied()) {
                assert!(workspace::root().join(&file).is_file(), "{file}");
            }
        }
    }

    #[test]
    fn without_names_all_files_of_a_room_are_meant() {
        let room: Room = "driver".parse().expect("a room");
        assert_eq!(files(&room, [].into_iter()), ["src/driver/**"]);
        assert_eq!(
            files(&room, ["turn.rs"].into_iter()),
            ["src/driver/turn.rs"]
        );
    }

    #[test]
    fn numbers_choose_every_shard() {
        let shards: Vec<_> = (0..4).map(|number| shard(41, number)).collect();
        assert_eq!(shards, ["0/3", "1/3", "2/3", "0/3"]);
        assert_eq!(shard(20, 7), "0/1");
        assert_eq!(shard(0, 7), "0/1");
    }
}
