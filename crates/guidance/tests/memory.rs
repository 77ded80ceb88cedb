//! The memory of guides has a limit, and is what the crate counts. A test binary of its own, because it replaces the
//! allocator.

mod support;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use inflight_guidance::{Compiler, GuideSpec};
use inflight_sampling::GuideTokens;
use serde_json::{Map, Value, json};

use support::Output;

/// Bytes that are allocated now.
static NUM_BYTES: AtomicUsize = AtomicUsize::new(0);

struct CountingAllocator;

// SAFETY: every call goes to the system's allocator as it is; counting touches no memory of it.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        NUM_BYTES.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller keeps the contract of `alloc`, which is the system's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        NUM_BYTES.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller keeps the contract of `dealloc`, which is the system's.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// Guides that have much in memory for their size.
fn large_guides() -> Vec<GuideSpec> {
    let properties: Map<String, Value> = (0..900)
        .map(|index| (format!("p{index}"), json!({"type": "string"})))
        .collect();
    let list: Vec<String> = (0..2800)
        .map(|index| format!("{:a<12}", index * 7919))
        .collect();
    let alternatives: String = (0..1200).map(|index| format!("| \"{index}\" s ")).collect();
    vec![
        GuideSpec::JsonSchema(json!({"type": "object", "properties": properties})),
        GuideSpec::JsonSchema(json!({"enum": list})),
        GuideSpec::Choice(list),
        GuideSpec::Grammar(format!("root ::= s\ns ::= \"a\" {alternatives}")),
        GuideSpec::Regex(r"(\w|\p{L}|\d){1,5000}".to_owned()),
    ]
}

/// Bytes allocated and bytes counted since `before`.
fn grown(compiler: &Compiler, before: (usize, usize)) -> (usize, usize) {
    let now = now(compiler);
    (
        now.0.saturating_sub(before.0),
        now.1.saturating_sub(before.1),
    )
}

fn now(compiler: &Compiler) -> (usize, usize) {
    (
        NUM_BYTES.load(Ordering::Relaxed),
        compiler.num_guide_bytes(),
    )
}

/// One test, because others would allocate at the same time.
#[test]
fn guides_have_no_more_memory_than_is_counted_and_all_together_no_more_than_their_limit() {
    let compiler = support::compiler();
    // The vocabulary is read with the first guide.
    support::guide(&compiler, GuideSpec::Regex("a".to_owned())).expect("it compiles");
    for spec in large_guides() {
        let name: String = format!("{spec:?}").chars().take(40).collect();
        let before = now(&compiler);
        let found = support::guide(&compiler, spec).expect("it compiles");
        let (has, counted) = grown(&compiler, before);
        assert!(has <= counted, "{name}: {has} bytes, counted {counted}");
        let before = now(&compiler);
        let mut output = Output::new(1);
        // An ambiguous grammar ends with an error.
        for _ in 0..20 {
            if output.grow(&found).is_err() {
                break;
            }
        }
        let (has, counted) = grown(&compiler, before);
        assert!(has <= counted, "{name}: {has} bytes, counted {counted}");
    }

    // Together, 64 sequences of this guide want more than they may have, and get the masks that one alone gets.
    const MAX_BYTES: usize = 8 << 20;
    const NUM_TOKENS: usize = 12;
    let words = (0..120u8).map(|index| {
        let letter = char::from(b'a' + index % 26);
        format!(".*{letter}.{{{}}}", index + 20)
    });
    let spec = GuideSpec::Regex(words.collect::<Vec<_>>().join("|"));
    let limited = support::compiler_with_memory(MAX_BYTES);
    let first = support::guide(&limited, spec.clone()).expect("it compiles");
    let alone = support::guide(&compiler, spec).expect("it compiles");
    let before = now(&limited);
    let guides: Vec<_> = (0..64).map(|_| first.fresh()).collect();
    let mut outputs: Vec<_> = (0..64).map(Output::new).collect();
    let (mut largest, mut is_reached) = (0, false);
    for _ in 0..NUM_TOKENS {
        for (guide, output) in guides.iter().zip(&mut outputs) {
            output.grow(&*guide.0).expect("a mask");
            let (has, counted) = grown(&limited, before);
            let total = limited.num_guide_bytes();
            assert!(total <= MAX_BYTES, "{total} bytes");
            // Besides parsers, a sequence has its mask and its tokens.
            assert!(has <= counted + 64 * 4096, "{has} bytes, counted {counted}");
            is_reached |= total > MAX_BYTES / 2;
            largest = largest.max(has);
        }
    }
    assert!(is_reached, "they had {largest} bytes at most");
    for (seed, output) in outputs.iter().enumerate().take(4) {
        let mut expected = Output::new(seed as u64);
        for _ in 0..NUM_TOKENS {
            expected.grow(&alone).expect("a mask");
        }
        assert_eq!(output.tokens, expected.tokens);
    }
}
