//! How much of the checks and tests a run has.

use std::sync::LazyLock;

use sha2::{Digest, Sha256};

use super::step::Step;
use crate::library::Build;
use crate::process::{command, output};
use crate::workspace;

/// The number of parts into which what the quick tier leaves out is divided.
pub const NUM_PARTS: u32 = 10;

/// The quick tier has one of so many tests of models on the stand-in for a GPU.
const TESTS_PER_SAMPLE: u8 = 12;

/// Stages run one after the other; the rows of each run beside each other, so that one computes while another waits for
/// the network, a linker or a server.
type Stages = &'static [&'static [&'static [Step]]];

/// How much of the checks and tests a run has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tier {
    /// Every kind of test, and of tests with many variants some, chosen by the commit.
    Quick,
    /// All tests of the steps that are named, except those of the library as it ships.
    Step,
    /// One part of what the quick tier leaves out.
    Part(u32),
    /// Everything, with the library as it ships.
    All,
}

/// Kernels come before what embeds them. No stage compiles behind those before the tests: a build would keep commands
/// that tests give to cargo waiting. The limits of the server's clients are a minute and more, so that they hold on two
/// cores that the other rows share.
const QUICK: Stages = &[
    &[&[Step::Kernels], &[Step::Fmt, Step::Setup, Step::Clippy]],
    &[&[Step::Build]],
    &[
        &[Step::Models],
        &[Step::Driver, Step::Unit],
        &[Step::Server],
        &[Step::OtherServer, Step::Gpus],
    ],
];

const ALL: Stages = &[
    &[
        &[Step::Kernels],
        &[Step::Fmt, Step::Setup, Step::Deny, Step::Book],
    ],
    &[
        &[Step::Clippy, Step::Doc, Step::Build],
        &[
            Step::Release,
            Step::Fuzz,
            Step::Mutants,
            Step::Coverage,
            Step::Sanitize,
        ],
    ],
    &[
        &[Step::Models, Step::Pages],
        &[Step::Driver, Step::Unit],
        &[Step::Server],
        &[Step::OtherServer, Step::Gpus],
    ],
    &[&[Step::Soak]],
];

/// Each part has its share of the tests of the server.
const PARTS: [Stages; NUM_PARTS as usize] = [
    &[&[&[Step::Doc]], SERVER],
    &[&[
        &[Step::Deny, Step::Book],
        &[Step::Server],
        &[Step::OtherServer, Step::Gpus],
    ]],
    &[&[
        &[Step::Fuzz],
        &[Step::Server],
        &[Step::OtherServer, Step::Gpus],
    ]],
    &[SERVER, &[&[Step::Pages]]],
    &[
        &[&[Step::Kernels]],
        &[&[Step::Release]],
        &[
            &[Step::Shipped],
            &[Step::Server],
            &[Step::OtherServer, Step::Gpus],
        ],
    ],
    &[&[
        &[Step::Models],
        &[Step::Server],
        &[Step::OtherServer, Step::Gpus],
    ]],
    &[SERVER],
    &[SERVER],
    &[SERVER],
    &[&[
        &[Step::Mutants, Step::Coverage],
        &[Step::Server],
        &[Step::OtherServer, Step::Gpus],
    ]],
];

const SERVER: &[&[Step]] = &[&[Step::Server], &[Step::OtherServer, Step::Gpus]];

impl Tier {
    /// The steps of a run that names none.
    pub fn stages(self) -> Stages {
        match self {
            Self::Quick | Self::Step => QUICK,
            Self::Part(part) => PARTS[part as usize],
            Self::All => ALL,
        }
    }

    /// The option of `cargo xtask test`.
    pub fn option(self) -> Option<String> {
        match self {
            Self::Quick | Self::Step => None,
            Self::Part(part) => Some(format!("--rotation={part}")),
            Self::All => Some("--all".to_owned()),
        }
    }

    /// How the library that server tests load is compiled.
    pub fn build(self) -> Build {
        match self {
            Self::All => Build::Shipped,
            Self::Quick | Self::Step | Self::Part(_) => Build::Tested,
        }
    }

    /// The options that choose tests of the server (tools/harness/tiers.py).
    pub fn pytest_options(self) -> Vec<String> {
        let seed = || format!("--seed={}", seed_of_commit());
        match self {
            Self::Quick => vec!["--tier=quick".to_owned(), seed()],
            Self::Step => vec!["--tier=tested".to_owned()],
            Self::Part(part) => vec!["--tier=rest".to_owned(), format!("--part={part}"), seed()],
            Self::All => vec!["--tier=all".to_owned()],
        }
    }

    /// The share of a step in the tests of the server (tools/harness/tiers.py).
    pub fn share_of_server_tests(self, step: Step) -> &'static str {
        match (step, self) {
            (Step::Gpus, _) => "gpu",
            (Step::OtherServer, _) => "odd",
            // Who names the step wants all tests.
            (_, Self::Step) => "all",
            _ => "even",
        }
    }

    /// Whether a run has a test of the step `models`. The stand-in for a GPU and tests of all families take most of the
    /// time, so the quick tier has one in [`TESTS_PER_SAMPLE`] tests on the stand-in, and one share of the families.
    pub fn has_test_of_models(self, name: &str) -> bool {
        let seed = seed_of_commit();
        let is_on_stand_in = name.starts_with("cuda");
        match share(name) {
            _ if self != Self::Quick => true,
            Some((number, num_shares)) => seed % num_shares == number,
            None => !is_on_stand_in || is_in_sample(name, seed, TESTS_PER_SAMPLE),
        }
    }

    /// The variables that give random tests their seed. Without them each run has a fresh one, which a failing test
    /// prints: in a run of everything, since a rare fault must not refuse a change that has nothing to do with it.
    pub fn seeds(self) -> Vec<(&'static str, String)> {
        let names: &[_] = match self {
            Self::Quick | Self::Part(_) => &["PROPTEST_RNG_SEED", "KERNEL_SEED", "INFLIGHT_SEED"],
            Self::Step | Self::All => &[],
        };
        names
            .iter()
            .map(|&name| (name, seed_of_commit().to_string()))
            .collect()
    }
}

/// Why the quick tier leaves out a test of the step `models`.
pub fn left_out_models() -> String {
    format!(
        "left out of the quick tier, which has one in {TESTS_PER_SAMPLE} tests on the stand-in for a GPU, and one share \
         of the families"
    )
}

/// The number and the count of a share in the name of a test: 3 and 8 of `everything_at_once::share_3_of_8`.
fn share(name: &str) -> Option<(u32, u32)> {
    let (_, share) = name.rsplit_once("::share_")?;
    let (number, num_shares) = share.split_once("_of_")?;
    Some((number.parse().ok()?, num_shares.parse().ok()?))
}

/// Whether a name is among one in `num` that a seed chooses.
fn is_in_sample(name: &str, seed: u32, num: u8) -> bool {
    let hash = Sha256::digest(format!("{seed} {name}"));
    // Of a hash of 256 bits, the first byte is enough for a few.
    hash[0] % num == 0
}

/// A number that the commit determines. One where the sources are no checkout.
pub(super) fn seed_of_commit() -> u32 {
    static SEED: LazyLock<u32> = LazyLock::new(read_seed_of_commit);
    *SEED
}

fn read_seed_of_commit() -> u32 {
    let commit = output(command("git").current_dir(workspace::root()).args([
        "rev-parse",
        "--short=8",
        "HEAD",
    ]));
    let number = commit
        .ok()
        .and_then(|commit| u32::from_str_radix(commit.trim().get(..7)?, 16).ok());
    number.unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use clap::ValueEnum;

    use super::*;

    /// Steps that are in no part, because they take longer than one may.
    const ONLY_IN_ALL: &[Step] = &[Step::Sanitize, Step::Soak];

    fn steps(stages: Stages) -> Vec<Step> {
        let rows = stages.iter().copied().flatten();
        rows.copied().flatten().copied().collect()
    }

    #[test]
    fn every_step_is_in_a_run_of_all_and_in_the_quick_tier_or_a_part() {
        let all = steps(ALL);
        let parts = PARTS.iter().flat_map(|part| steps(part));
        let quick_or_part: Vec<Step> = steps(QUICK).into_iter().chain(parts).collect();
        for step in Step::value_variants() {
            // In a run of all, the step `server` has the tests of `shipped`.
            let times = all.iter().filter(|other| *other == step).count();
            assert_eq!(times, usize::from(*step != Step::Shipped), "{step:?}");
            let is_only_in_all = ONLY_IN_ALL.contains(step);
            assert_eq!(quick_or_part.contains(step), !is_only_in_all, "{step:?}");
        }
    }

    #[test]
    fn samples_of_many_seeds_have_every_name_about_equally_often() {
        let names: Vec<_> = (0..40)
            .map(|number| format!("cuda::test_{number}"))
            .collect();
        for name in &names {
            let times = (0..600).filter(|&seed| is_in_sample(name, seed, TESTS_PER_SAMPLE));
            assert!((25..=80).contains(&times.count()), "{name}");
        }
    }

    #[test]
    fn only_the_quick_tier_leaves_tests_on_the_stand_in_out() {
        let names: Vec<_> = (0..40)
            .map(|number| format!("cuda_ranks::test_{number}"))
            .collect();
        let num_tests = |tier: Tier| {
            names
                .iter()
                .filter(|name| tier.has_test_of_models(name))
                .count()
        };
        assert!((1..40).contains(&num_tests(Tier::Quick)));
        for tier in [Tier::Step, Tier::Part(5), Tier::All] {
            assert_eq!(num_tests(tier), 40);
        }
        assert!(Tier::Quick.has_test_of_models("simd::a_test"));
    }

    #[test]
    fn the_quick_tier_has_one_share() {
        let has_share = |tier: Tier, number: u32| {
            tier.has_test_of_models(&format!("batching::all::share_{number}_of_8"))
        };
        let num_shares = |tier| (0..8).filter(|&number| has_share(tier, number)).count();
        assert_eq!(num_shares(Tier::Quick), 1);
        assert_eq!(num_shares(Tier::Step), 8);
        assert_eq!(share("batching::a_share_of_memory"), None);
    }

    #[test]
    fn kernels_come_before_what_embeds_them() {
        for stages in [QUICK, ALL] {
            let early = steps(&stages[..1]);
            assert!(early.contains(&Step::Kernels));
            for step in [Step::Doc, Step::Build, Step::Release, Step::Fuzz] {
                assert!(!early.contains(&step), "{step:?}");
            }
        }
    }
}
