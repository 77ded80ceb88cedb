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

/// Rooms with the files of which mutants may survive. Every mutant of any other file is caught, or explained in
/// `.cargo/mutants.toml`: `cargo xtask test` has those. The driver's files are tested in the fake Triton host, which a
/// shard has no time to compile for each mutant.
const OPEN: &[(&str, &[&str])] = &[
    ("engine", &[]),
    ("sampling", &[]),
    ("text", &[]),
    (
        "driver",
        &[
            "conversations.rs",
            "in_flight.rs",
            "iterative.rs",
            "queued.rs",
            "step_driver/**",
            "watched.rs",
        ],
    ),
];

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
        let files = files(room, &options.files);
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

/// Tests a shard of the mutants of files that are not open, which a number chooses.
pub fn run_shard(number: usize) -> Result<()> {
    let (room, open) = OPEN[number % OPEN.len()];
    let room: Room = room.parse()?;
    let open = open.iter().map(|name| path(&room, name));
    let open: Vec<_> = open.map(|path| format!("--exclude={path}")).collect();
    let files = files(&room, &[]);
    let list = output(mutants(&room, &files)?.args(&open).arg("--list"))?;
    let num_mutants = list.lines().count();
    let shard = shard(num_mutants, mutants_per_shard(&room), number / OPEN.len());
    test(&room, &[files, open].concat(), Some(&shard))
}

/// About as many mutants as two cores test in five minutes. For each of the driver, the whole backend is compiled.
fn mutants_per_shard(room: &Room) -> usize {
    match room.name() {
        "driver" => 5,
        _ => 20,
    }
}

/// The shard of so many mutants that a number chooses, as cargo-mutants takes it.
fn shard(num_mutants: usize, per_shard: usize, number: usize) -> String {
    let num_shards = num_mutants.div_ceil(per_shard).max(1);
    format!("{}/{num_shards}", number % num_shards)
}

/// The options that choose files of a room; without names, all of them.
fn files(room: &Room, names: &[String]) -> Vec<String> {
    let all = ["**".to_owned()];
    let names = if names.is_empty() { &all } else { names };
    let paths = names.iter().map(|name| path(room, name));
    paths.map(|path| format!("--file={path}")).collect()
}

/// The path of a room's file, or of a pattern, from the root of the checkout.
fn path(room: &Room, name: &str) -> String {
    format!("{}{name}", room.sources())
}

fn test(room: &Room, choice: &[String], shard: Option<&str>) -> Result<()> {
    let mut command = mutants(room, choice)?;
    if let Some(shard) = shard {
        // Each shard has mutants of every file.
        command.args(["--sharding=round-robin", "--shard", shard]);
    }
    run_command(&mut command)
}

/// cargo-mutants on files of a room, which options choose. It copies the checkout without what git ignores, and writes
/// its lists and logs to `target/mutants/ROOM/mutants.out/`.
fn mutants(room: &Room, choice: &[String]) -> Result<Command> {
    let folder = workspace::target("mutants");
    let reports = folder.join(room.name());
    fs::create_dir_all(&reports)?;
    let mut command = command(setup::cargo_mutants()?);
    command
        .args(["mutants", "--output"])
        .arg(reports)
        .arg(format!("--package={}", room.package()))
        .args(choice)
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
    fn open_files_exist() {
        for (room, open) in OPEN {
            let room: Room = room.parse().expect("a room");
            for name in *open {
                let file = path(&room, name.trim_end_matches("**"));
                assert!(workspace::root().join(&file).exists(), "{file}");
            }
        }
    }

    #[test]
    fn without_names_all_files_of_a_room_are_chosen() {
        let room: Room = "driver".parse().expect("a room");
        assert_eq!(files(&room, &[]), ["--file=src/driver/**"]);
        assert_eq!(
            files(&room, &["turn.rs".to_owned()]),
            ["--file=src/driver/turn.rs"]
        );
    }

    #[test]
    fn numbers_choose_every_shard() {
        let shards: Vec<_> = (0..4).map(|number| shard(41, 20, number)).collect();
        assert_eq!(shards, ["0/3", "1/3", "2/3", "0/3"]);
        assert_eq!(shard(20, 20, 7), "0/1");
        assert_eq!(shard(0, 20, 7), "0/1");
    }
}
