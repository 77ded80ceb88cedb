//! The kinds of parameter values: how each is parsed from config.pbtxt, described and displayed.

use std::fmt::Display;
use std::num::{NonZeroU32, NonZeroUsize};
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::str::FromStr;

use super::choices::RankCpus;
use inflight_base::{BlockSize, CpuSet};

/// Maximum of all counts: the largest value that a client's INT32 tensor can hold.
pub(super) const MAX_COUNT: u32 = i32::MAX as u32;

/// The largest value of `max_state_snapshots`: each that is taken looks through all of them.
pub const MAX_STATE_SNAPSHOTS: u32 = 1 << 12;

/// More GPUs than any machine has.
const MAX_GPU: u32 = 1023;

/// Parses a value. Returns None if the text is not an accepted value.
pub(super) type Read<T> = dyn Fn(&str) -> Option<T>;

/// A kind of parameter value.
pub(super) struct Kind<T> {
    /// The accepted values, worded to follow "is not".
    pub(super) expected: String,
    pub(super) read: Box<Read<T>>,
    /// Formats a value for the reference.
    pub(super) show: Box<dyn Fn(&T) -> String>,
}

impl<T: 'static> Kind<T> {
    fn new(
        expected: impl Into<String>,
        read: impl Fn(&str) -> Option<T> + 'static,
        show: impl Fn(&T) -> String + 'static,
    ) -> Self {
        Self {
            expected: expected.into(),
            read: Box::new(read),
            show: Box::new(show),
        }
    }

    /// The same accepted texts, as values of another type.
    fn convert<U: 'static>(
        self,
        to: impl Fn(T) -> Option<U> + 'static,
        back: impl Fn(&U) -> T + 'static,
    ) -> Kind<U> {
        let Self {
            expected,
            read,
            show,
        } = self;
        Kind::new(
            expected,
            move |text| to(read(text)?),
            move |value| show(&back(value)),
        )
    }
}

/// An optional value. `default` describes the default in the reference.
pub(super) fn optional<T: 'static>(kind: Kind<T>, default: &'static str) -> Kind<Option<T>> {
    let Kind {
        expected,
        read,
        show,
    } = kind;
    Kind::new(
        expected,
        move |text| read(text).map(Some),
        move |value| value.as_ref().map_or(default.to_owned(), &show),
    )
}

/// One of several names, case-insensitive. If a value has two names, the first is displayed.
pub(super) fn choice<T: Clone + PartialEq>(names: &'static [(&'static str, T)]) -> Kind<T> {
    let quoted: Vec<_> = names.iter().map(|(name, _)| format!("'{name}'")).collect();
    let expected = match &quoted[..] {
        [others @ .., last] if !others.is_empty() => format!("{} or {last}", others.join(", ")),
        names => names.concat(),
    };
    Kind::new(
        expected,
        |text| {
            let named = names
                .iter()
                .find(|(name, _)| name.eq_ignore_ascii_case(text));
            named.map(|(_, value)| value.clone())
        },
        |value| {
            let named = names.iter().find(|(_, other)| other == value);
            named.map_or(String::new(), |(name, _)| format!("`{name}`"))
        },
    )
}

/// `true` or `false`.
pub(super) fn flag() -> Kind<bool> {
    choice(&[("true", true), ("false", false)])
}

/// An integer in a range.
pub(super) fn integer<T>(range: RangeInclusive<T>) -> Kind<T>
where
    T: FromStr + PartialOrd + Display + 'static,
{
    Kind::new(
        format!("an integer from {} to {}", range.start(), range.end()),
        move |text| T::from_str(text).ok().filter(|count| range.contains(count)),
        T::to_string,
    )
}

/// A count in a range.
pub(super) fn count(range: RangeInclusive<u32>) -> Kind<u32> {
    integer(range)
}

/// Number of positions in a KV cache block.
pub(super) fn block_size() -> Kind<BlockSize> {
    count(1..=1024).convert(BlockSize::new, |size| size.tokens().0)
}

/// The most threads of a pool.
pub const MAX_THREADS: u32 = 1024;

/// Number of threads in a pool.
pub(super) fn num_threads() -> Kind<NonZeroUsize> {
    count(1..=MAX_THREADS).convert(
        |count| NonZeroUsize::new(count as usize),
        |threads| threads.get() as u32,
    )
}

/// The index of a GPU.
pub(super) fn gpus() -> Kind<Vec<u32>> {
    Kind::new(
        format!(
            "an integer from 0 to {MAX_GPU}, a list with one per rank, such as '0,1', or empty"
        ),
        |text| {
            if text.is_empty() {
                return Some(Vec::new());
            }
            let one = count(0..=MAX_GPU);
            let gpus = text.split(',').map(|gpu| (one.read)(gpu.trim()));
            gpus.collect()
        },
        |gpus: &Vec<u32>| match gpus.is_empty() {
            true => "none".to_owned(),
            false => gpus
                .iter()
                .map(u32::to_string)
                .collect::<Vec<_>>()
                .join(","),
        },
    )
}

/// The CPUs of each rank.
pub(super) fn rank_cpus() -> Kind<RankCpus> {
    Kind::new(
        "`auto`, `any`, or a list of CPUs for each rank, such as '0-15;16-31'",
        |text| match text {
            "auto" => Some(RankCpus::Auto),
            "any" => Some(RankCpus::Any),
            _ => {
                let sets = text.split([';', '|']).map(str::parse::<CpuSet>);
                sets.collect::<Result<_, _>>().ok().map(RankCpus::Sets)
            }
        },
        |cpus| format!("`{cpus}`"),
    )
}

/// An optional value; an empty text, as in a template whose placeholder is filled with nothing, is none.
pub(super) fn or_empty<T: 'static>(kind: Kind<T>) -> Kind<Option<T>> {
    let Kind {
        expected,
        read,
        show,
    } = optional(kind, "none");
    Kind::new(
        format!("{expected}, or empty"),
        move |text| {
            if text.is_empty() {
                Some(None)
            } else {
                read(text)
            }
        },
        show,
    )
}

/// Two tokens.
pub(super) fn two_tokens() -> Kind<[String; 2]> {
    Kind::new(
        "a JSON list of two different tokens, such as '[\"no\", \"yes\"]'",
        |text| {
            let tokens: [String; 2] = serde_json::from_str(text).ok()?;
            let is_empty = tokens.iter().any(String::is_empty);
            (!is_empty && tokens[0] != tokens[1]).then_some(tokens)
        },
        |[first, second]| format!("`[\"{first}\", \"{second}\"]`"),
    )
}

/// Number of weights that share a scale.
pub(super) fn group_size() -> Kind<u32> {
    Kind {
        expected: "a multiple of 32, up to 1048576".to_owned(),
        ..count(32..=1 << 20).convert(|size| size.is_multiple_of(32).then_some(size), |size| *size)
    }
}

/// One attention window for all layers, or a list with one per layer. Surrounding brackets are optional.
pub(super) fn windows() -> Kind<Vec<NonZeroU32>> {
    Kind::new(
        format!(
            "an integer from 1 to {MAX_COUNT}, or a list with one per layer, such as '4096,1024'"
        ),
        |text| {
            let one = count(1..=MAX_COUNT);
            let text = text.trim_matches(['[', ']', '{', '}']);
            let window = |size: &str| NonZeroU32::new((one.read)(size.trim())?);
            text.split([',', ';']).map(window).collect()
        },
        |windows: &Vec<NonZeroU32>| {
            let sizes: Vec<_> = windows.iter().map(NonZeroU32::to_string).collect();
            match sizes.is_empty() {
                true => "the model's own windows".to_owned(),
                false => sizes.join(","),
            }
        },
    )
}

/// A fraction above 0.
pub(super) fn fraction() -> Kind<f64> {
    Kind::new(
        "a number above 0, up to 1",
        |text| number(text).filter(|fraction| *fraction > 0.0 && *fraction <= 1.0),
        f64::to_string,
    )
}

/// A duration in microseconds, up to 10 seconds.
pub(super) fn microseconds() -> Kind<f64> {
    Kind::new(
        "a number from 0 to 10000000",
        |text| number(text).filter(|us| (0.0..=1e7).contains(us)),
        f64::to_string,
    )
}

fn number(text: &str) -> Option<f64> {
    f64::from_str(text).ok().filter(|number| number.is_finite())
}

/// The path of a folder.
pub(super) fn folder() -> Kind<PathBuf> {
    path("a folder")
}

/// The path of a file.
pub(super) fn file() -> Kind<PathBuf> {
    path("a file")
}

/// A path. Rejects unfilled `${...}` placeholders.
fn path(expected: &str) -> Kind<PathBuf> {
    Kind::new(
        expected,
        |text| (!text.is_empty() && !text.contains("${")).then(|| PathBuf::from(text)),
        |path| path.display().to_string(),
    )
}

/// The name of a set of CPU kernels; None is the best set that the CPU supports.
pub(super) fn instruction_set() -> Kind<Option<String>> {
    const NAMES: &[(&str, &str)] = &[
        ("auto", "auto"),
        ("amx_bf16", "amx_bf16"),
        ("avx512_bf16", "avx512_bf16"),
        ("avx2", "avx2"),
        ("portable", "portable"),
    ];
    Kind::new(
        choice(NAMES).expected,
        |text| {
            Some((choice(NAMES).read)(text)?).map(|name| (name != "auto").then(|| name.to_owned()))
        },
        |name| format!("`{}`", name.as_deref().unwrap_or("auto")),
    )
}
