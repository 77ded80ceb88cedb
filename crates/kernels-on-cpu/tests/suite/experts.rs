//! Mixtures of experts: the choice of experts, the order of rows, the experts' products, and the sums of what they
//! give.

use half::{bf16, f16};
use inflight_kernels_on_cpu::{Arg, Dims};

use crate::support::quantised_matrix::{Format, Kind, Matrix};
use crate::support::{
    BF16_ROUNDING, F32_ROUNDING, Random, assert_close, bits, cases, unwritten, unwritten_bf16,
};

/// A number that no row, place or expert has.
const UNWRITTEN_WORD: u32 = 0xdead_beef;
const TILE_ROWS: [usize; 4] = [8, 16, 32, 64];

// ------------------------------------------------------------------------------------------- the choice

/// Scores of the kernel.
const SOFTMAX: i32 = 0;
const SIGMOID: i32 = 1;
const SIGMOID_OF_LOGIT: i32 = 2;

#[derive(Clone, Copy, Debug)]
enum Rule {
    Softmax {
        is_normalised: bool,
    },
    SparseMixer {
        jitter: f32,
    },
    Grouped {
        scores: i32,
        num_groups: usize,
        num_chosen_groups: usize,
        num_group_scores: usize,
        is_normalised: bool,
        scale: f32,
    },
}

#[derive(Clone, Copy, Debug)]
struct Routing {
    num_experts: usize,
    num_chosen: usize,
    has_shared_gate: bool,
    rule: Rule,
}

impl Routing {
    fn random(random: &mut Random) -> Self {
        let num_groups = random.one_of(&[1, 2, 4, 8]);
        let group_len = random.between(1, 24);
        let num_experts = num_groups * group_len;
        let num_chosen_groups = random.between(1, num_groups);
        let most = (num_chosen_groups * group_len).min(8);
        let rule = match random.between(0, 2) {
            0 => Rule::Softmax {
                is_normalised: random.coin(),
            },
            1 => Rule::SparseMixer {
                jitter: random.one_of(&[0.01, 0.1]),
            },
            _ => Rule::Grouped {
                scores: random.one_of(&[SOFTMAX, SIGMOID, SIGMOID_OF_LOGIT]),
                num_groups,
                num_chosen_groups,
                num_group_scores: random.between(1, group_len.min(2)),
                is_normalised: random.coin(),
                scale: random.one_of(&[1.0, 2.5]),
            },
        };
        Self {
            num_experts,
            num_chosen: random.between(1, most),
            has_shared_gate: random.coin(),
            rule,
        }
    }

    fn num_logits(&self) -> usize {
        self.num_experts + usize::from(self.has_shared_gate)
    }
}

/// The experts of rows, largest first.
#[derive(Debug)]
struct Chosen {
    experts: Vec<u32>,
    weights: Vec<f32>,
    shared_weights: Vec<f32>,
}

fn route(
    random: &mut Random,
    routing: &Routing,
    logits: &[f32],
    correction: Option<&[f32]>,
    num_present: Option<u32>,
) -> Chosen {
    let num_rows = logits.len() / routing.num_logits();
    let mut chosen = Chosen {
        experts: vec![UNWRITTEN_WORD; num_rows * routing.num_chosen],
        weights: unwritten(num_rows * routing.num_chosen),
        shared_weights: unwritten(num_rows),
    };
    let mut args = vec![
        Arg::from(&mut chosen.experts[..]),
        Arg::from(&mut chosen.weights[..]),
        Arg::from(&mut chosen.shared_weights[..]),
        Arg::from(logits),
    ];
    if let Rule::Grouped { .. } = routing.rule {
        args.push(Arg::from(correction));
    }
    // A GPU reaches no operand on the stack.
    let num_present = num_present.map(|num| vec![num]);
    args.push(Arg::from(num_present.as_deref()));
    let sizes = [
        routing.num_experts,
        routing.num_chosen,
        routing.num_logits(),
    ];
    args.extend(sizes.map(|size| Arg::from(size as i32)));
    let mut dims = Dims::new(num_rows, 1, 32);
    let kernel = match routing.rule {
        Rule::Softmax { is_normalised } => {
            args.push(i32::from(is_normalised).into());
            "route_softmax"
        }
        Rule::SparseMixer { jitter } => {
            args.push(jitter.into());
            "route_sparse_mixer"
        }
        Rule::Grouped {
            scores,
            num_groups,
            num_chosen_groups,
            num_group_scores,
            is_normalised,
            scale,
        } => {
            args.push(scores.into());
            let sizes = [num_groups, num_chosen_groups, num_group_scores];
            args.extend(sizes.map(|size| Arg::from(size as i32)));
            args.push(i32::from(is_normalised).into());
            args.push(scale.into());
            dims.shared_bytes = 4 * (routing.num_experts + num_groups);
            "route_grouped"
        }
    };
    // SAFETY: all buffers have a row for each block.
    unsafe { random.launch(kernel, dims, &mut args) };
    chosen
}

/// The indices of the `num` largest numbers, the first one first if they are equal.
fn largest(numbers: &[f64], among: impl Iterator<Item = usize>, num: usize) -> Vec<usize> {
    let mut all: Vec<_> = among.collect();
    all.sort_by(|&a, &b| numbers[b].total_cmp(&numbers[a]).then(a.cmp(&b)));
    all.truncate(num);
    all
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// The experts of a row and their weights, in f64.
fn expected(routing: &Routing, logits: &[f32], correction: Option<&[f32]>) -> Vec<(usize, f64)> {
    let logits: Vec<_> = logits.iter().copied().map(f64::from).collect();
    let logits = &logits[..routing.num_experts];
    let all = 0..routing.num_experts;
    let softmax = |of: &[usize]| -> Vec<f64> {
        let total: f64 = of.iter().map(|&expert| logits[expert].exp()).sum();
        logits.iter().map(|logit| logit.exp() / total).collect()
    };
    let every: Vec<_> = all.clone().collect();
    match routing.rule {
        Rule::Softmax { is_normalised } => {
            let chosen = largest(logits, all, routing.num_chosen);
            let shares = softmax(if is_normalised { &chosen } else { &every });
            chosen.iter().map(|&it| (it, shares[it])).collect()
        }
        Rule::SparseMixer { jitter } => {
            let mut rest = every;
            let pick = |_| {
                let expert = largest(logits, rest.iter().copied(), 1)[0];
                let logit = logits[expert];
                let near = |other: f64| {
                    (logit - other) / other.abs().max(logit) <= 2.0 * f64::from(jitter)
                };
                let near: f64 = rest
                    .iter()
                    .map(|&other| logits[other])
                    .filter(|&other| other == logit || near(other))
                    .map(|other| (other - logit).exp())
                    .sum();
                rest.retain(|&other| other != expert);
                (expert, 1.0 / near)
            };
            (0..routing.num_chosen).map(pick).collect()
        }
        Rule::Grouped {
            scores: kind,
            num_groups,
            num_chosen_groups,
            num_group_scores,
            is_normalised,
            scale,
        } => {
            let scores = match kind {
                SOFTMAX => softmax(&every),
                _ => logits.iter().copied().map(sigmoid).collect(),
            };
            let corrected = match kind {
                SIGMOID_OF_LOGIT => logits,
                _ => &scores[..],
            };
            let corrected: Vec<_> = corrected
                .iter()
                .enumerate()
                .map(|(it, score)| score + correction.map_or(0.0, |values| f64::from(values[it])))
                .collect();
            let group_len = routing.num_experts / num_groups;
            let members = |group: usize| group * group_len..(group + 1) * group_len;
            let group_scores: Vec<f64> = (0..num_groups)
                .map(|group| {
                    let best = largest(&corrected, members(group), num_group_scores);
                    best.iter().map(|&expert| corrected[expert]).sum()
                })
                .collect();
            let groups = largest(&group_scores, 0..num_groups, num_chosen_groups);
            let among = groups.iter().flat_map(|&group| members(group));
            let chosen = largest(&corrected, among, routing.num_chosen);
            let total = match is_normalised {
                true => chosen.iter().map(|&expert| scores[expert]).sum(),
                false => 1.0,
            };
            let weight = |expert: usize| scores[expert] / total * f64::from(scale);
            chosen.iter().map(|&it| (it, weight(it))).collect()
        }
    }
}

/// Numbers of a coarse grid: some are equal, and no two others near each other. None is 0, which is near everything.
fn coarse(random: &mut Random, len: usize) -> Vec<f32> {
    let number = |_| (2.0 * random.between(0, 30) as f32 - 29.0) / 8.0;
    (0..len).map(number).collect()
}

#[test]
fn the_experts_of_a_row_are_those_of_the_rule() {
    let random = &mut Random::new();
    for _ in cases(120) {
        let routing = Routing::random(random);
        let num_rows = random.between(1, 5);
        let logits = coarse(random, num_rows * routing.num_logits());
        let correction = random.coin().then(|| coarse(random, routing.num_experts));
        let correction = correction.as_deref();
        let num_present = random.coin().then(|| random.between(1, num_rows) as u32);
        let chosen = route(random, &routing, &logits, correction, num_present);
        let num_chosen = routing.num_chosen;
        for (row, logits) in logits.chunks(routing.num_logits()).enumerate() {
            let ranks = row * num_chosen..(row + 1) * num_chosen;
            let (experts, weights) = (&chosen.experts[ranks.clone()], &chosen.weights[ranks]);
            if num_present.is_some_and(|num| row >= num as usize) {
                assert!(experts.iter().all(|&it| it as usize == routing.num_experts));
                continue;
            }
            let expected = expected(&routing, logits, correction);
            let (of, shares): (Vec<_>, Vec<_>) = expected.into_iter().unzip();
            assert!(
                experts.iter().map(|&it| it as usize).eq(of.iter().copied()),
                "{routing:?}: {experts:?}, not {of:?}, of {logits:?} and {correction:?}"
            );
            assert_close(weights, &shares, 10.0 * F32_ROUNDING, 1e-6);
            let gate = logits.get(routing.num_experts);
            let gate = gate.map_or(1.0, |&gate| sigmoid(f64::from(gate)));
            assert_close(
                &chosen.shared_weights[row..=row],
                &[gate],
                F32_ROUNDING,
                0.0,
            );
        }
    }
}

#[test]
fn whatever_the_logits_are_the_experts_of_a_row_differ() {
    let random = &mut Random::new();
    for _ in cases(40) {
        let routing = Routing::random(random);
        let special = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, 1.0];
        let logits = (0..routing.num_logits()).map(|_| random.one_of(&special));
        let logits: Vec<_> = logits.collect();
        let mut experts = route(random, &routing, &logits, None, None).experts;
        experts.sort_unstable();
        experts.dedup();
        assert_eq!(experts.len(), routing.num_chosen);
        assert!(
            experts
                .iter()
                .all(|&it| (it as usize) < routing.num_experts)
        );
    }
}

// --------------------------------------------------------------------------------------------- the order

/// Rows in the order of their experts.
#[derive(Debug, PartialEq, Eq)]
struct Sorted {
    sorted: Vec<u32>,
    places: Vec<u32>,
    /// Expert, first place, number of places, 0.
    tiles: Vec<[u32; 4]>,
}

fn sort(
    random: &mut Random,
    experts: &[u32],
    num_chosen: usize,
    num_experts: usize,
    tile_rows: usize,
) -> Sorted {
    let num_tiles = experts.len() / tile_rows + num_experts;
    let mut sorted = vec![UNWRITTEN_WORD; experts.len()];
    let mut places = sorted.clone();
    let mut tiles = vec![UNWRITTEN_WORD; 4 * num_tiles];
    let mut args = [
        Arg::from(&mut sorted[..]),
        Arg::from(&mut places[..]),
        Arg::from(&mut tiles[..]),
        Arg::from(experts),
        (experts.len() as i32).into(),
        (num_chosen as i32).into(),
        (tile_rows as i32).into(),
        (num_tiles as i32).into(),
    ];
    let dims = Dims::new(num_experts, 1, random.block(4));
    // SAFETY: there is room for all pairs, and for as many tiles as the kernel's head says.
    unsafe { random.launch("sort_experts", dims, &mut args) };
    Sorted {
        sorted,
        places,
        tiles: bytemuck::cast_slice(&tiles).to_vec(),
    }
}

/// The different experts of some rows, of which some may be rows without.
fn random_experts(
    random: &mut Random,
    num_rows: usize,
    num_chosen: usize,
    num_experts: usize,
) -> Vec<u32> {
    // Often few of them have all rows.
    let num_touched = match random.coin() {
        true => num_chosen,
        false => random.between(num_chosen, num_experts),
    };
    let touched = random.different(num_touched, num_experts);
    let mut experts = Vec::new();
    for _ in 0..num_rows {
        let of_row = random.different(num_chosen, num_touched);
        experts.extend(of_row.iter().map(|&index| touched[index as usize]));
    }
    experts
}

#[test]
fn rows_are_sorted_by_their_experts_and_tiles_have_each_of_them_once() {
    let random = &mut Random::new();
    for _ in cases(60) {
        let num_experts = random.between(1, 20);
        let num_chosen = random.between(1, num_experts.min(8));
        let num_rows = random.between(1, 70);
        let tile_rows = random.one_of(&TILE_ROWS);
        let mut experts = random_experts(random, num_rows, num_chosen, num_experts);
        let num_absent = random.between(0, 3).min(num_rows);
        let present = (num_rows - num_absent) * num_chosen;
        experts[present..].fill(num_experts as u32);
        let sorted = sort(random, &experts, num_chosen, num_experts, tile_rows);

        let mut order: Vec<_> = (0..present).collect();
        order.sort_by_key(|&pair| experts[pair]);
        for (place, &pair) in order.iter().enumerate() {
            assert_eq!(sorted.sorted[place], (pair / num_chosen) as u32);
            assert_eq!(sorted.places[pair], place as u32);
        }
        let rest = sorted.sorted[present..].iter();
        let mut rest = rest.chain(&sorted.places[present..]);
        assert!(rest.all(|&word| word == UNWRITTEN_WORD));

        let mut next = 0;
        for &[expert, first, len, zero] in &sorted.tiles {
            assert!((expert as usize) < num_experts && len as usize <= tile_rows && zero == 0);
            if len > 0 {
                assert_eq!(first, next);
                next += len;
            }
            for place in first..first + len {
                assert_eq!(experts[order[place as usize]], expert);
            }
        }
        assert_eq!(next as usize, present);
        // Only the last tile of an expert has room left.
        let filled: Vec<_> = sorted.tiles.iter().filter(|tile| tile[2] > 0).collect();
        for pair in filled.windows(2) {
            assert!(pair[0][0] != pair[1][0] || pair[0][2] as usize == tile_rows);
        }
    }
}

// ------------------------------------------------------------------------------------------ the products

/// A function of one number.
type Function = fn(f64) -> f64;

/// The gatings by their numbers: the functions of the gate, and behind them the clamped one. Without gates, functions
/// have their numbers from [`WITHOUT_GATES`] on.
const ACTIVATIONS: [Function; 5] = [
    |x| x * sigmoid(x),
    |x| x * normal_distribution(x),
    |x| {
        let u = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x);
        0.5 * x * (1.0 + u.tanh())
    },
    |x| x.max(0.0),
    |x| x.max(0.0).powi(2),
];
const CLAMPED: usize = ACTIVATIONS.len();
const WITHOUT_GATES: usize = 8;
const ALPHA: f32 = 1.702;
const LIMIT: f32 = 1.5;

fn random_gating(random: &mut Random) -> usize {
    match random.coin() {
        true => random.between(0, CLAMPED),
        false => WITHOUT_GATES + random.between(0, ACTIVATIONS.len() - 1),
    }
}

/// Rows of weights for each inner activation: gate and up, or up alone.
fn rows_of_inner(gating: usize) -> usize {
    if gating < WITHOUT_GATES { 2 } else { 1 }
}

/// The grid of a product with gate and up.
fn gate_up_dims(gating: usize, inner_size: usize, num_tiles: usize) -> Dims {
    let block_outputs = 128 / rows_of_inner(gating);
    Dims::new(inner_size.div_ceil(block_outputs), num_tiles, 128)
}

fn gated(gating: usize, gate: f64, up: f64) -> f64 {
    if let Some(activation) = ACTIVATIONS.get(gating % WITHOUT_GATES) {
        return activation(gate) * up;
    }
    let (alpha, limit) = (f64::from(ALPHA), f64::from(LIMIT));
    let gate = gate.min(limit);
    gate * sigmoid(alpha * gate) * (up.clamp(-limit, limit) + 1.0)
}

fn random_size(random: &mut Random) -> usize {
    match random.between(0, 2) {
        0 => 8 * random.between(1, 16),
        1 => random.between(1, 130),
        _ => random.one_of(&[16, 31, 32, 33, 64, 65, 128, 129]),
    }
}

/// The weights of all experts.
struct Experts {
    num_experts: usize,
    hidden_size: usize,
    inner_size: usize,
    gating: usize,
    gate_up: Vec<bf16>,
    gate_up_bias: Option<Vec<f32>>,
    down: Vec<bf16>,
    down_bias: Option<Vec<f32>>,
}

impl Experts {
    fn random(random: &mut Random) -> Self {
        let (num_experts, hidden_size, inner_size) = (
            random.between(1, 9),
            random_size(random),
            random_size(random),
        );
        let has_bias = random.coin();
        let len = num_experts * hidden_size * inner_size;
        let gating = random_gating(random);
        let num_rows = rows_of_inner(gating);
        let bias = |random: &mut Random, len| has_bias.then(|| random.floats(len, 1.0));
        Self {
            num_experts,
            hidden_size,
            inner_size,
            gating,
            gate_up: random.bf16s(num_rows * len, 1.0),
            gate_up_bias: bias(random, num_rows * num_experts * inner_size),
            down: random.bf16s(len, 1.0),
            down_bias: bias(random, num_experts * hidden_size),
        }
    }

    /// What the products of rows in this order give: the inner activations, and the sums.
    fn multiply(
        &self,
        random: &mut Random,
        x: &[bf16],
        sorted: &Sorted,
        tile_rows: usize,
    ) -> (Vec<bf16>, Vec<f32>) {
        let num_places = sorted.sorted.len();
        let mut inner = unwritten_bf16(num_places * self.inner_size);
        let tiles: &[u32] = bytemuck::cast_slice(&sorted.tiles);
        let mut args = [
            Arg::from(&mut inner[..]),
            Arg::from(x),
            Arg::from(&sorted.sorted[..]),
            Arg::from(tiles),
            Arg::from(&self.gate_up[..]),
            Arg::from(self.gate_up_bias.as_deref()),
            (self.inner_size as i32).into(),
            (self.hidden_size as i32).into(),
            (self.gating as i32).into(),
            ALPHA.into(),
            LIMIT.into(),
        ];
        let dims = gate_up_dims(self.gating, self.inner_size, sorted.tiles.len());
        let kernel = format!("expert_gate_up_m{tile_rows}");
        // SAFETY: tiles and places are those of the rows of `x`, and weights have the shapes that the kernel's head
        // says.
        unsafe { random.launch(&kernel, dims, &mut args) };

        let mut sums = unwritten(num_places * self.hidden_size);
        let mut args = [
            Arg::from(&mut sums[..]),
            Arg::from(&inner[..]),
            Arg::from(tiles),
            Arg::from(&self.down[..]),
            Arg::from(self.down_bias.as_deref()),
            (self.hidden_size as i32).into(),
            (self.inner_size as i32).into(),
        ];
        let block_outputs = if tile_rows == 64 { 128 } else { 64 };
        let dims = Dims::new(
            self.hidden_size.div_ceil(block_outputs),
            sorted.tiles.len(),
            128,
        );
        // SAFETY: as above.
        unsafe { random.launch(&format!("expert_down_m{tile_rows}"), dims, &mut args) };
        (inner, sums)
    }

    /// A product with a row of weights, in f64: the sum, and what its rounding is relative to.
    fn product(weights: &[bf16], bias: Option<&Vec<f32>>, row: usize, x: &[bf16]) -> [f64; 2] {
        let bias = bias.map_or(0.0, |bias| f64::from(bias[row]));
        let products = weights[row * x.len()..]
            .iter()
            .zip(x)
            .map(|(weight, x)| weight.to_f64() * x.to_f64());
        products.fold([bias, bias.abs()], |[sum, size], product| {
            [sum + product, size + product.abs()]
        })
    }

    fn check(&self, x: &[bf16], expert: usize, inner: &[bf16], sums: &[f32]) {
        let first = rows_of_inner(self.gating) * expert * self.inner_size;
        let bias = self.gate_up_bias.as_ref();
        check_inner(self.gating, inner, |is_up, output| {
            let row = first + usize::from(is_up) * self.inner_size + output;
            Self::product(&self.gate_up, bias, row, x)
        });
        check_sums(sums, |output| {
            let row = expert * self.hidden_size + output;
            Self::product(&self.down, self.down_bias.as_ref(), row, inner)
        });
    }
}

/// Checks the inner activations of an expert. `product` is that with a row of gate, or of up: the sum, and what its
/// rounding is relative to. Without gates, up has the first rows, and a factor of 1 takes its place.
fn check_inner(gating: usize, inner: &[bf16], product: impl Fn(bool, usize) -> [f64; 2]) {
    for (output, inner) in inner.iter().enumerate() {
        let [gate, gate_size] = product(false, output);
        let [up, up_size] = match rows_of_inner(gating) {
            1 => [1.0, 0.0],
            _ => product(true, output),
        };
        let expected = gated(gating, gate, up);
        // No activation is steeper than this, and none is larger.
        let steepness = (2.0 * gate.abs() + 2.0) * (up.abs() + 1.0);
        let height = (gate.abs() + 1.0) * (gate.abs() + 1.0);
        let rounding = F32_ROUNDING * (steepness * gate_size + height * up_size);
        let tolerance = BF16_ROUNDING * expected.abs() + 4.0 * rounding + 1e-6;
        let error = (inner.to_f64() - expected).abs();
        assert!(error <= tolerance, "{inner}, not {expected} +- {tolerance}");
    }
}

/// Checks what an expert gives.
fn check_sums(sums: &[f32], product: impl Fn(usize) -> [f64; 2]) {
    for (output, sum) in sums.iter().enumerate() {
        let [expected, size] = product(output);
        let error = (f64::from(*sum) - expected).abs();
        assert!(error <= 4.0 * F32_ROUNDING * size, "{sum}, not {expected}");
    }
}

#[test]
fn products_are_those_of_each_row_with_its_experts() {
    let random = &mut Random::new();
    for _ in cases(24) {
        let experts = Experts::random(random);
        let num_rows = random.between(1, 70);
        let num_chosen = random.between(1, experts.num_experts.min(8));
        let chosen = random_experts(random, num_rows, num_chosen, experts.num_experts);
        let x = random.bf16s(num_rows * experts.hidden_size, 1.0);
        let tile_rows = random.one_of(&TILE_ROWS);
        let sorted = sort(random, &chosen, num_chosen, experts.num_experts, tile_rows);
        let (inner, sums) = experts.multiply(random, &x, &sorted, tile_rows);
        for (pair, &expert) in chosen.iter().enumerate() {
            let (place, row) = (sorted.places[pair] as usize, pair / num_chosen);
            experts.check(
                &x[row * experts.hidden_size..][..experts.hidden_size],
                expert as usize,
                &inner[place * experts.inner_size..][..experts.inner_size],
                &sums[place * experts.hidden_size..][..experts.hidden_size],
            );
        }
    }
}

/// A row has the same bits in tiles of each of these sizes, and alone. `multiply` is that of experts.
fn check_bits(
    random: &mut Random,
    (num_experts, hidden_size): (usize, usize),
    tiles: &[usize],
    multiply: impl Fn(&mut Random, &[bf16], &Sorted, usize) -> (Vec<bf16>, Vec<f32>),
) {
    let num_rows = random.between(2, 40);
    let num_chosen = random.between(1, num_experts.min(4));
    let chosen = random_experts(random, num_rows, num_chosen, num_experts);
    let x = random.bf16s(num_rows * hidden_size, 1.0);
    let sorted = sort(random, &chosen, num_chosen, num_experts, tiles[0]);
    let (_, all) = multiply(random, &x, &sorted, tiles[0]);
    for &tile_rows in &tiles[1..] {
        let sorted = sort(random, &chosen, num_chosen, num_experts, tile_rows);
        let (_, sums) = multiply(random, &x, &sorted, tile_rows);
        assert_eq!(bits(&sums), bits(&all), "tiles of {tile_rows}");
    }
    let row = random.between(0, num_rows - 1);
    let pairs = row * num_chosen..(row + 1) * num_chosen;
    let alone = sort(random, &chosen[pairs.clone()], num_chosen, num_experts, 8);
    let x = &x[row * hidden_size..][..hidden_size];
    let (_, sums) = multiply(random, x, &alone, 8);
    for (rank, pair) in pairs.enumerate() {
        let [place, among_all] = [alone.places[rank], sorted.places[pair]];
        let of =
            |sums: &[f32], place: u32| bits(&sums[place as usize * hidden_size..][..hidden_size]);
        assert_eq!(of(&sums, place), of(&all, among_all));
    }
}

#[test]
fn a_row_has_the_same_bits_alone_and_in_tiles_of_any_size() {
    let random = &mut Random::new();
    for _ in cases(8) {
        let experts = Experts::random(random);
        let sizes = (experts.num_experts, experts.hidden_size);
        check_bits(random, sizes, &TILE_ROWS, |random, x, sorted, tile_rows| {
            experts.multiply(random, x, sorted, tile_rows)
        });
    }
}

// ---------------------------------------------------------------------------------- with quantised weights

/// The kinds of codes, as the kernels number them.
const KINDS: [Kind; 4] = [Kind::Int4, Kind::Int8, Kind::Fp8, Kind::E2m1];

/// Quantised matrices of experts, one after the other.
struct ExpertMatrices {
    matrices: Vec<Matrix>,
    packed: Vec<u32>,
    scales: Vec<f16>,
    offsets: Option<Vec<f16>>,
    bias: Option<Vec<f32>>,
}

impl ExpertMatrices {
    fn random(random: &mut Random, kinds: &[Kind], num: usize, n: usize, k: usize) -> Self {
        let format = Format::random(random, kinds, k);
        let matrices: Vec<_> = (0..num)
            .map(|_| Matrix::new(random, format, n, k))
            .collect();
        let bias = random.coin().then(|| random.floats(num * n, 1.0));
        Self::new(matrices, bias)
    }

    fn new(matrices: Vec<Matrix>, bias: Option<Vec<f32>>) -> Self {
        let offsets: Option<Vec<_>> = matrices.iter().map(|it| it.offsets.as_deref()).collect();
        Self {
            packed: matrices.iter().flat_map(|it| it.packed.clone()).collect(),
            scales: matrices.iter().flat_map(|it| it.scales.clone()).collect(),
            offsets: offsets.map(|offsets| offsets.concat()),
            bias,
            matrices,
        }
    }

    /// Those of e2m1 numbers, as integers of 8 bits.
    fn in_eight_bits(&self) -> Self {
        let matrices = self.matrices.iter().map(Matrix::in_eight_bits);
        Self::new(matrices.collect(), self.bias.clone())
    }

    /// Kind, codes, scales, offsets and bias.
    fn args(&self) -> [Arg<'_>; 5] {
        let kind = self.matrices[0].format.kind;
        let number = KINDS.iter().position(|it| *it == kind);
        [
            (number.expect("a kind of codes") as i32).into(),
            Arg::from(&self.packed[..]),
            Arg::from(&self.scales[..]),
            Arg::from(self.offsets.as_deref()),
            Arg::from(self.bias.as_deref()),
        ]
    }

    fn sizes(&self) -> [Arg<'_>; 3] {
        let matrix = &self.matrices[0];
        [matrix.n, matrix.k, matrix.format.group_size].map(|size| Arg::from(size as i32))
    }

    /// A product with a row of a matrix, in f64: the sum, and what its rounding is relative to.
    fn product(&self, index: usize, row: usize, x: &[bf16]) -> [f64; 2] {
        let matrix = &self.matrices[index];
        let bias = self.bias.as_ref();
        let bias = bias.map_or(0.0, |bias| f64::from(bias[index * matrix.n + row]));
        x.iter()
            .enumerate()
            .fold([bias, bias.abs()], |[sum, size], (column, x)| {
                let [scaled, offset] = matrix.parts(row, column);
                let x = x.to_f64();
                // The parts are added up by themselves, and may cancel.
                let part = (scaled.abs() + offset.abs()) * x.abs();
                [sum + (scaled + offset) * x, size + part]
            })
    }
}

/// The quantised weights of all experts.
struct QuantisedExperts {
    num_experts: usize,
    hidden_size: usize,
    inner_size: usize,
    gating: usize,
    gate_up: ExpertMatrices,
    down: ExpertMatrices,
}

impl QuantisedExperts {
    fn random(random: &mut Random, kinds: &[Kind]) -> Self {
        let (num_experts, hidden_size, inner_size) = (
            random.between(1, 9),
            random_size(random),
            random_size(random),
        );
        let gating = random_gating(random);
        Self {
            num_experts,
            hidden_size,
            inner_size,
            gating,
            gate_up: ExpertMatrices::random(
                random,
                kinds,
                rows_of_inner(gating) * num_experts,
                inner_size,
                hidden_size,
            ),
            down: ExpertMatrices::random(random, kinds, num_experts, hidden_size, inner_size),
        }
    }

    fn multiply(
        &self,
        random: &mut Random,
        x: &[bf16],
        sorted: &Sorted,
        tile_rows: usize,
    ) -> (Vec<bf16>, Vec<f32>) {
        let num_places = sorted.sorted.len();
        let tiles: &[u32] = bytemuck::cast_slice(&sorted.tiles);
        let mut inner = unwritten_bf16(num_places * self.inner_size);
        let mut args = vec![
            Arg::from(&mut inner[..]),
            Arg::from(x),
            Arg::from(&sorted.sorted[..]),
            Arg::from(tiles),
        ];
        args.extend(self.gate_up.args());
        args.extend(self.gate_up.sizes());
        args.extend([(self.gating as i32).into(), ALPHA.into(), LIMIT.into()]);
        let dims = gate_up_dims(self.gating, self.inner_size, sorted.tiles.len());
        let kernel = format!("quantised_expert_gate_up_m{tile_rows}");
        // SAFETY: tiles and places are those of the rows of `x`, and weights are packed as the kernel's head says.
        unsafe { random.launch(&kernel, dims, &mut args) };

        let mut sums = unwritten(num_places * self.hidden_size);
        let mut args = vec![
            Arg::from(&mut sums[..]),
            Arg::from(&inner[..]),
            Arg::from(tiles),
        ];
        args.extend(self.down.args());
        args.extend(self.down.sizes());
        let dims = Dims::new(self.hidden_size.div_ceil(128), sorted.tiles.len(), 128);
        let kernel = format!("quantised_expert_down_m{tile_rows}");
        // SAFETY: as above.
        unsafe { random.launch(&kernel, dims, &mut args) };
        (inner, sums)
    }
}

#[test]
fn products_with_codes_are_those_of_each_row_with_its_experts() {
    let random = &mut Random::new();
    for _ in cases(16) {
        let experts = QuantisedExperts::random(random, &KINDS);
        let (num_experts, hidden_size) = (experts.num_experts, experts.hidden_size);
        let num_rows = random.between(1, 50);
        let num_chosen = random.between(1, num_experts.min(4));
        let chosen = random_experts(random, num_rows, num_chosen, num_experts);
        let x = random.bf16s(num_rows * hidden_size, 1.0);
        let sorted = sort(random, &chosen, num_chosen, num_experts, 32);
        let (inner, sums) = experts.multiply(random, &x, &sorted, 32);
        for (pair, &expert) in chosen.iter().enumerate() {
            let (place, row) = (sorted.places[pair] as usize, pair / num_chosen);
            let expert = expert as usize;
            let x = &x[row * hidden_size..][..hidden_size];
            let inner = &inner[place * experts.inner_size..][..experts.inner_size];
            check_inner(experts.gating, inner, |is_up, output| {
                let matrix = rows_of_inner(experts.gating) * expert + usize::from(is_up);
                experts.gate_up.product(matrix, output, x)
            });
            check_sums(&sums[place * hidden_size..][..hidden_size], |output| {
                experts.down.product(expert, output, inner)
            });
        }
    }
}

#[test]
fn a_row_has_the_same_bits_with_codes_alone_and_in_tiles_of_any_size() {
    let random = &mut Random::new();
    for _ in cases(16) {
        let experts = QuantisedExperts::random(random, &KINDS);
        let sizes = (experts.num_experts, experts.hidden_size);
        check_bits(random, sizes, &[32, 8], |random, x, sorted, tile_rows| {
            experts.multiply(random, x, sorted, tile_rows)
        });
    }
}

#[test]
fn floats_of_four_bits_have_the_bits_of_integers_of_eight() {
    let random = &mut Random::new();
    for _ in cases(6) {
        let floats = QuantisedExperts::random(random, &[Kind::E2m1]);
        let integers = QuantisedExperts {
            gate_up: floats.gate_up.in_eight_bits(),
            down: floats.down.in_eight_bits(),
            ..floats
        };
        let num_rows = random.between(1, 20);
        let chosen = random_experts(random, num_rows, 1, floats.num_experts);
        let x = random.bf16s(num_rows * floats.hidden_size, 1.0);
        let sorted = sort(random, &chosen, 1, floats.num_experts, 8);
        let (inner, sums) = floats.multiply(random, &x, &sorted, 8);
        let (same_inner, same_sums) = integers.multiply(random, &x, &sorted, 8);
        assert_eq!(inner, same_inner);
        assert_eq!(bits(&sums), bits(&same_sums));
    }
}

// ---------------------------------------------------------------------------------------------- the sums

#[test]
fn what_experts_give_is_added_up_by_its_weight() {
    let random = &mut Random::new();
    for _ in cases(30) {
        let (num_experts, width, num_rows) =
            (random.between(1, 9), random.width(), random.between(1, 5));
        let num_chosen = random.between(1, num_experts.min(8));
        let mut experts = random_experts(random, num_rows, num_chosen, num_experts);
        let num_present = random.between(1, num_rows);
        experts[num_present * num_chosen..].fill(num_experts as u32);
        let num_places = num_rows * num_chosen;
        let places = random.different(num_places, num_places);
        let sums = random.floats(num_places * width, 2.0);
        let weights = random.floats(num_places, 1.0);
        let shared = random.coin().then(|| random.floats(num_rows * width, 2.0));
        let shared_weights = random.floats(num_rows, 1.0);
        let is_added = random.coin();
        let before = random.floats(num_rows * width, 1.0);
        let mut out = before.clone();
        let mut args = [
            Arg::from(&mut out[..]),
            Arg::from(&sums[..]),
            Arg::from(&places[..]),
            Arg::from(&weights[..]),
            Arg::from(&experts[..]),
            Arg::from(shared.as_deref()),
            Arg::from(&shared_weights[..]),
            (num_experts as i32).into(),
            (num_chosen as i32).into(),
            (width as i32).into(),
            i32::from(is_added).into(),
        ];
        let dims = Dims::new(num_rows, random.between(1, 3), random.block(3));
        // SAFETY: the places are those of `sums`, and all others have a row for each block.
        unsafe { random.launch("add_experts", dims, &mut args) };
        for (at, out) in out.iter().enumerate() {
            let (row, column) = (at / width, at % width);
            if row >= num_present {
                assert_eq!(*out, before[at], "rows without experts stay");
                continue;
            }
            let pairs = row * num_chosen..(row + 1) * num_chosen;
            let given = pairs.map(|pair| {
                let sum = sums[places[pair] as usize * width + column];
                f64::from(weights[pair]) * f64::from(sum)
            });
            let shared = shared.as_ref().map_or(0.0, |sums| {
                f64::from(shared_weights[row]) * f64::from(sums[at])
            });
            let start = if is_added { f64::from(before[at]) } else { 0.0 };
            let expected = given.sum::<f64>() + shared + start;
            assert_close(&[*out], &[expected], 4.0 * F32_ROUNDING, 4.0);
        }
    }
}

include!("../../../../tests/support/normal_distribution.rs");
