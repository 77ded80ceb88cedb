//! The prompts of a load that measures throughput: all of them are computed, whatever a cache of prefixes holds.

/// Prompt and output lengths of a load's requests, which are sent at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Case {
    /// The number of requests.
    pub num_requests: usize,
    /// Tokens of each prompt.
    pub input: usize,
    /// Tokens that each request generates.
    pub output: usize,
}

const fn case(num_requests: usize, input: usize, output: usize) -> Case {
    Case {
        num_requests,
        input,
        output,
    }
}

/// The loads of a server, in order.
pub fn cases(is_quick: bool) -> &'static [Case] {
    match is_quick {
        true => const { &[case(3, 8, 6), case(2, 40, 4)] },
        false => {
            const {
                &[
                    case(1024, 128, 128),
                    case(256, 1000, 1000),
                    case(192, 2048, 2048),
                ]
            }
        }
    }
}

/// The prompt of the request with this number among all of a server. No other prompt begins with its first token, so
/// that none finds a part of itself in a cache.
pub fn prompt(number: usize, num_tokens: usize) -> Vec<usize> {
    /// Tokens that every vocabulary has besides the special ones: one for each byte.
    const NUM_BYTES: usize = 256;
    const NUM_SPECIAL: usize = 2;
    let first = NUM_SPECIAL + number;
    let others = (1..num_tokens).map(|i| NUM_SPECIAL + (number * 31 + i * 7) % NUM_BYTES);
    std::iter::once(first)
        .chain(others)
        .take(num_tokens)
        .collect()
}

#[cfg(test)]
mod tests {
    use inflight_base::{BlockSize, Blocks, SequenceId, TokenId, Tokens};
    use inflight_engine::{BlockReuse, Engine, EngineConfig, NewRequest, StepOutput};
    use inflight_runner::{RunnerLimits, SyntheticOptions, SyntheticRunner};

    use super::*;

    /// The smallest vocabulary that the loads are meant for: the `tiny` shape's if they are quick.
    const fn vocab_size(is_quick: bool) -> u32 {
        if is_quick { 512 } else { 32_000 }
    }

    fn prompts(is_quick: bool) -> Vec<Vec<TokenId>> {
        let lengths = cases(is_quick)
            .iter()
            .flat_map(|case| std::iter::repeat_n(case.input, case.num_requests));
        let of = |(number, len)| prompt(number, len).into_iter().map(|id| id as TokenId);
        lengths.enumerate().map(|it| of(it).collect()).collect()
    }

    /// How many tokens an engine finds in its cache that computes these prompts, in blocks that it may reuse in part.
    fn num_reused_tokens(prompts: &[Vec<TokenId>], vocab_size: u32) -> u64 {
        let block_size = BlockSize::new(32).expect("not zero");
        let blocks =
            |prompt: &Vec<TokenId>| Tokens(prompt.len() as u32 + 1).blocks_ceil(block_size);
        let config = EngineConfig {
            max_num_requests: 2,
            max_num_active: prompts.len() as u32,
            max_seq_len: Tokens(2049),
            max_num_tokens: Tokens(8192),
            block_size,
            chunk_unit: block_size,
            // Nothing is evicted.
            num_blocks: Blocks(128 + prompts.iter().map(|prompt| blocks(prompt).0).sum::<u32>()),
            reuse: BlockReuse::PartialBlocks,
            ..EngineConfig::default()
        };
        let options = SyntheticOptions {
            vocab_size,
            step_base_us: 0.0,
            step_per_token_us: 0.0,
        };
        let mut runner = SyntheticRunner::new(options, &RunnerLimits::of(&config)).expect("memory");
        let mut engine = Engine::new(config);
        for (id, prompt) in (0..).zip(prompts) {
            let request = NewRequest::new(SequenceId(id), prompt.clone(), Tokens(1));
            engine.add(request).expect("a request within the limits");
        }
        let mut num_reused = 0;
        while !engine.is_idle() {
            let step = engine.schedule();
            let mut output = StepOutput::default();
            for plan in step.plans() {
                runner.run(plan, &mut output).expect("a step");
            }
            engine.apply(step, &mut output, &mut Vec::new());
            num_reused = engine
                .stats()
                .map_or(num_reused, |it| it.reuse.num_reused_tokens);
        }
        num_reused
    }

    #[test]
    fn no_prompt_of_a_load_meets_a_cache() {
        for is_quick in [true, false] {
            let prompts = prompts(is_quick);
            let num_cases = cases(is_quick).len();
            assert!(prompts.len() > num_cases, "{} prompts", prompts.len());
            let largest = prompts.iter().flatten().max();
            assert!(largest < Some(&vocab_size(is_quick)), "{largest:?}");
            assert_eq!(num_reused_tokens(&prompts, vocab_size(is_quick)), 0);
        }
    }

    /// Shows that the count of the test above can fail: repeated prompts are found in the cache.
    #[test]
    fn prompts_that_repeat_meet_a_cache() {
        let prompts: Vec<_> = [0, 1, 0].map(|number| prompt(number, 40)).into();
        let ids = |prompt: Vec<usize>| prompt.into_iter().map(|id| id as TokenId).collect();
        let prompts: Vec<Vec<TokenId>> = prompts.into_iter().map(ids).collect();
        // The block that the prompt fills.
        assert_eq!(num_reused_tokens(&prompts, 512), 32);
    }
}
