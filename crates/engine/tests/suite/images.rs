//! Images in prompts: what steps encode, what they keep, and which blocks prompts with images share.
//!
//! Images with the hashes 0, 1, 2 and 3 have 1, 4, 7 and 3 tokens (`num_image_tokens`). Image 6 has 3 tokens, a token
//! of text, and 4 tokens (`num_rows_of_first_span`).

use std::ops::Range;
use std::sync::Arc;

use inflight_base::{BlockSize, Blocks, SequenceId, Tokens};
use inflight_engine::{BlockReuse, EngineConfig, Image, ImageLimits, ImageSpan, PromptImages};

use crate::support::{TestRequest, World, num_spanned_tokens, wide_config};

fn config(max_num_tokens: u32, max_cached_tokens: u32) -> EngineConfig {
    EngineConfig {
        images: Some(ImageLimits {
            max_num_tokens: Tokens(max_num_tokens),
            max_cached_tokens: Tokens(max_cached_tokens),
            has_whole_images: false,
        }),
        block_size: BlockSize::new(4).expect("not zero"),
        chunk_unit: BlockSize::new(4).expect("not zero"),
        num_blocks: Blocks(64),
        enable_chunked_context: true,
        ..wide_config()
    }
}

/// A prompt of `len` tokens with images at these positions, which generates two tokens.
fn request(len: u32, images: &[(u32, u128)]) -> TestRequest {
    let mut request = TestRequest::of_lengths(len, 2);
    let mut end = 0;
    let gaps = images.iter().map(|&(position, hash)| {
        let gap = position - end;
        end = position + num_spanned_tokens(hash);
        (gap, hash)
    });
    request.place_images(&gaps.collect::<Vec<_>>());
    assert_eq!(request.images, images);
    request
}

/// For each step until nothing is active, the images that it encodes, and the tokens of its first sequence.
fn steps(world: &mut World) -> Vec<(Vec<u128>, usize)> {
    let mut steps = Vec::new();
    while world.active().next().is_some() {
        let planned = world.step();
        let num_tokens = planned.first().map_or(0, |planned| planned.tokens.len());
        steps.push((world.encoded.clone(), num_tokens));
    }
    steps
}

#[test]
fn images_are_encoded_in_the_step_that_computes_their_tokens() {
    let mut world = World::new(config(100, 100));
    world.add(request(20, &[(2, 1), (10, 2)])).expect("it fits");
    // Both, and then a token of the output.
    assert_eq!(steps(&mut world), [(vec![1, 2], 20), (vec![], 1)]);
    // They are still there.
    world.add(request(12, &[(1, 2)])).expect("it fits");
    assert_eq!(steps(&mut world), [(vec![], 12), (vec![], 1)]);
}

#[test]
fn a_chunk_ends_in_front_of_an_image_that_the_step_may_not_encode() {
    // Image 1 has 4 tokens at 2, image 2 has 7 at 10, image 3 has 3 at 18.
    let images = [(2, 1), (10, 2), (18, 3)];
    let mut world = World::new(config(4, 100));
    world.add(request(24, &images)).expect("it fits");
    // The second chunk would end at 10, and ends with a block. One image of any size is encoded where no other is.
    let expected = [(vec![1], 8), (vec![2], 8), (vec![3], 8), (vec![], 1)];
    assert_eq!(steps(&mut world), expected);
    let mut world = World::new(config(11, 100));
    world.add(request(24, &images)).expect("it fits");
    assert_eq!(
        steps(&mut world),
        [(vec![1, 2], 16), (vec![3], 8), (vec![], 1)]
    );
}

#[test]
fn a_chunk_may_end_within_an_image_whose_rows_are_kept() {
    let mut world = World::new(EngineConfig {
        max_num_tokens: Tokens(8),
        ..config(100, 7)
    });
    world.add(request(20, &[(4, 2)])).expect("it fits");
    assert_eq!(
        steps(&mut world),
        [(vec![2], 8), (vec![], 8), (vec![], 4), (vec![], 1)]
    );
}

/// A model whose image tokens see each other computes all of an image in a step.
fn config_of_whole_images(max_num_tokens: u32) -> EngineConfig {
    let config = EngineConfig {
        max_num_tokens: Tokens(max_num_tokens),
        ..config(100, 100)
    };
    let images = config.images.map(|limits| ImageLimits {
        has_whole_images: true,
        ..limits
    });
    EngineConfig { images, ..config }
}

#[test]
fn no_chunk_ends_within_a_whole_image() {
    for (max_num_tokens, position, expected) in [
        (8, 5, vec![(vec![], 5), (vec![2], 7), (vec![], 8)]),
        (12, 5, vec![(vec![2], 12), (vec![], 8)]),
        (13, 6, vec![(vec![2], 13), (vec![], 7)]),
        (12, 6, vec![(vec![], 6), (vec![2], 10), (vec![], 4)]),
    ] {
        let mut world = World::new(config_of_whole_images(max_num_tokens));
        world.add(request(20, &[(position, 2)])).expect("it fits");
        let mut steps = steps(&mut world);
        assert_eq!(steps.pop(), Some((vec![], 1)), "a token of the output");
        assert_eq!(steps, expected, "{max_num_tokens} tokens");
    }
}

/// A long image waits until those that generate leave it enough of a step.
#[test]
fn a_whole_image_waits_for_room_in_a_step() {
    let mut world = World::new(config_of_whole_images(8));
    for _ in 0..2 {
        world.add(TestRequest::of_lengths(1, 6)).expect("it fits");
    }
    let waiting = world.add(request(9, &[(0, 2)])).expect("it fits");
    let later = world.add(TestRequest::of_lengths(1, 1)).expect("it fits");
    while !world.streams[&waiting].admitted {
        world.step();
        let admitted = |id| world.streams[id].admitted;
        assert!(admitted(&waiting) || !admitted(&later), "it overtakes");
    }
    world.run_to_end();
}

#[test]
fn a_whole_image_longer_than_a_step_or_in_two_spans_is_refused() {
    let mut world = World::new(EngineConfig {
        max_num_requests: 4,
        ..config_of_whole_images(6)
    });
    world.add(request(20, &[(5, 1)])).expect("it fits");
    for (image, expected) in [
        (
            2,
            "an image of 7 tokens that see each other, so that a step computes all; max_num_tokens = 6 is less",
        ),
        (6, "3 tokens of an image of 7 and text behind them"),
    ] {
        let refused = world.add(request(20, &[(5, image)]));
        let error = refused.expect_err("it is refused");
        assert!(error.to_string().contains(expected), "{error}");
    }
    world.run_to_end();
}

/// All of a reused image was seen by what is reused, and the rest of it is computed in one step.
#[test]
fn a_reused_prefix_may_end_within_a_whole_image() {
    let mut world = World::new(EngineConfig {
        reuse: BlockReuse::WholeBlocks,
        ..config_of_whole_images(8)
    });
    world.add(request(24, &[(6, 2)])).expect("it fits");
    world.run_to_end();
    let mut other = request(24, &[(6, 2)]);
    // Behind the image.
    other.prompt[13] += 1;
    world.add(other).expect("it fits");
    let planned = world.step();
    assert_eq!((planned[0].tokens.len(), planned[0].kv_len), (8, 20));
    world.run_to_end();
}

/// Of an image in two spans, each row is where its token is, and the token between them is one of text.
#[test]
fn the_spans_of_an_image_are_encoded_once() {
    let mut world = World::new(config(100, 100));
    world.add(request(20, &[(2, 6), (10, 6)])).expect("it fits");
    assert_eq!(steps(&mut world), [(vec![6], 20), (vec![], 1)]);
    // A chunk ends where the first span does.
    let mut world = World::new(EngineConfig {
        max_num_tokens: Tokens(8),
        ..config(100, 7)
    });
    world.add(request(20, &[(5, 6)])).expect("it fits");
    assert_eq!(
        steps(&mut world),
        [(vec![6], 8), (vec![], 8), (vec![], 4), (vec![], 1)]
    );
}

#[test]
fn what_was_used_longest_ago_makes_room_but_nothing_that_the_step_needs() {
    let mut world = World::new(config(100, 8));
    let mut encoded = |images: &[(u32, u128)]| {
        world.add(request(16, images)).expect("it fits");
        let steps = steps(&mut world);
        steps
            .into_iter()
            .flat_map(|(encoded, _)| encoded)
            .collect::<Vec<_>>()
    };
    assert_eq!(encoded(&[(0, 1), (5, 3)]), [1, 3]);
    assert_eq!(encoded(&[(3, 1)]), [0; 0]);
    // 4 + 3 are kept, and 7 more take the place of both; then of one.
    assert_eq!(encoded(&[(3, 2)]), [2]);
    assert_eq!(encoded(&[(3, 0)]), [0]);
    assert_eq!(encoded(&[(5, 2)]), [0; 0]);
    // Both do not fit into a step: the second one waits for the next.
    assert_eq!(encoded(&[(0, 1), (8, 2)]), [1, 2]);
}

#[test]
fn a_context_that_is_not_cut_has_all_its_images_in_its_step() {
    let mut world = World::new(EngineConfig {
        enable_chunked_context: false,
        max_num_tokens: Tokens(64),
        ..config(4, 14)
    });
    world.add(request(20, &[(2, 1), (10, 2)])).expect("it fits");
    world.add(request(20, &[(2, 2), (12, 3)])).expect("it fits");
    world.add(request(20, &[(2, 0)])).expect("it fits");
    // The rows of three images are kept, and the one row of image 0 would be too many.
    assert_eq!(world.step().len(), 2);
    assert_eq!(world.encoded, [1, 2, 3]);
    world.step();
    assert_eq!(world.encoded, [0]);
    world.run_to_end();
}

#[test]
fn a_request_whose_image_has_no_room_waits_in_the_queue() {
    for enable_chunked_context in [false, true] {
        let mut world = World::new(EngineConfig {
            enable_chunked_context,
            max_num_tokens: Tokens(64),
            ..config(4, 7)
        });
        world.add(request(20, &[(0, 1)])).expect("it fits");
        let second = world.add(request(20, &[(0, 2)])).expect("it fits");
        world.step();
        assert!(!world.streams[&second].admitted, "it would hold blocks");
        world.step();
        assert!(world.streams[&second].admitted);
        world.run_to_end();
    }
}

#[test]
fn prompts_share_blocks_with_equal_images_only() {
    let reused = |first: &[(u32, u128)], second: &[(u32, u128)], reuse| {
        let mut world = World::new(EngineConfig {
            reuse,
            ..config(100, 100)
        });
        world.add(request(24, first)).expect("it fits");
        world.run_to_end();
        world.add(request(24, second)).expect("it fits");
        let planned = world.step();
        world.run_to_end();
        planned[0].kv_len - planned[0].tokens.len() as u32
    };
    let whole = BlockReuse::WholeBlocks;
    assert_eq!(reused(&[(2, 1)], &[(2, 1)], whole), 20);
    // 5 and 1 have equally many tokens.
    assert_eq!(reused(&[(2, 1)], &[(2, 5)], whole), 0);
    assert_eq!(reused(&[(2, 1)], &[(2, 5)], BlockReuse::PartialBlocks), 2);
    assert_eq!(reused(&[(9, 1)], &[(9, 5)], whole), 8);
    assert_eq!(reused(&[(9, 1)], &[(9, 5)], BlockReuse::PartialBlocks), 9);
    assert_eq!(reused(&[], &[(9, 1)], BlockReuse::PartialBlocks), 9);
    // One after the other, and then another one.
    let [same, other] = [[(2, 1), (6, 1)], [(2, 1), (6, 5)]];
    assert_eq!(reused(&same, &same, whole), 20);
    assert_eq!(reused(&same, &other, whole), 4);
    assert_eq!(reused(&same, &other, BlockReuse::PartialBlocks), 6);
    // An image in two spans, and another one with as many tokens in two spans.
    assert_eq!(reused(&[(2, 6)], &[(2, 6)], whole), 20);
    assert_eq!(reused(&[(2, 6)], &[(2, 10)], BlockReuse::PartialBlocks), 2);
}

/// Numbers of images mean nothing to another engine.
#[test]
fn blocks_with_images_are_not_kept_beyond_an_engine() {
    let kept = |images: &[(u32, u128)]| {
        let mut world = World::new(EngineConfig {
            num_host_blocks: Blocks(16),
            reuse: BlockReuse::WholeBlocks,
            ..config(100, 100)
        });
        world.add(request(24, images)).expect("it fits");
        world.run_to_end();
        world.engine.keep().1.len()
    };
    assert_eq!(kept(&[]), 6);
    // Neither is what is behind them.
    assert_eq!(kept(&[(9, 1)]), 2);
}

#[test]
fn images_that_never_fit_are_refused() {
    let refused = |config: &EngineConfig, images: &[(u32, u128)]| {
        let mut world = World::new(config.clone());
        let error = world.add(request(20, images)).expect_err("it is refused");
        error.to_string()
    };
    let text_only = EngineConfig {
        images: None,
        ..config(1, 1)
    };
    let cases = [
        (
            text_only,
            vec![(0, 0)],
            "the model was loaded for text only",
        ),
        (
            config(100, 6),
            vec![(0, 2)],
            "an image of 7 tokens, more than the 6 that are kept",
        ),
        (
            EngineConfig {
                enable_chunked_context: false,
                max_num_tokens: Tokens(64),
                ..config(100, 10)
            },
            vec![(0, 1), (8, 2)],
            "images of 11 tokens, which a step needs all",
        ),
    ];
    for (config, images, expected) in cases {
        let error = refused(&config, &images);
        assert!(error.contains(expected), "{error}");
    }
    let image = |hash, num_tokens| Image::new(hash, Tokens(num_tokens), Arc::new(()));
    let span = |position, num_tokens| ImageSpan::of(Tokens(position), image(1, num_tokens));
    let part = |position, hash, rows: Range<u32>| ImageSpan {
        position: Tokens(position),
        image: image(hash, 6),
        first_row: Tokens(rows.start),
        num_tokens: Tokens(rows.end - rows.start),
    };
    for spans in [
        vec![span(18, 3)],
        vec![span(2, 0)],
        vec![span(2, 3), span(4, 2)],
        vec![span(u32::MAX, u32::MAX)],
        // Rows that are missing, in another order, twice, too many, or with another image between them.
        vec![part(2, 1, 0..5)],
        vec![part(2, 1, 1..6)],
        vec![part(2, 1, 0..3), part(6, 1, 4..6)],
        vec![part(2, 1, 0..3), part(6, 1, 0..3)],
        vec![part(2, 1, 3..6), part(6, 1, 0..3)],
        vec![part(2, 1, 0..7)],
        vec![part(2, 1, 0..3), part(6, 2, 3..6)],
        vec![part(2, 1, 0..3), part(6, 2, 0..6), part(13, 1, 3..6)],
        vec![part(2, 1, 0..3), part(6, 1, 3..u32::MAX)],
    ] {
        let mut world = World::new(config(100, 100));
        let mut request = TestRequest::of_lengths(20, 2).to_request(SequenceId(1));
        request.images = PromptImages::new(spans);
        let error = world.engine.add(request).expect_err("it is refused");
        assert!(error.to_string().contains("image"), "{error}");
        world.engine.check_integrity();
    }
}

#[test]
fn limits_that_allow_no_image_are_refused() {
    for config in [config(0, 10), config(10, 0)] {
        let error = config.check().expect_err("it is refused");
        assert!(error.to_string().contains("take no images"), "{error}");
    }
}
