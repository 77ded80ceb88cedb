//! The page of the book.

use std::fmt::Write;

use super::steps::{seconds_of, step_time};
use super::{
    Gpu, H200, LAUNCHES, LLAMA_8B, LLAMA_70B, Numbers, Placement, Shape, generation_step,
    other_kernels, prompt_step, rank_prompt_time, rank_step_time,
};

/// `docs/src/gpu-figures.md`.
pub fn page() -> String {
    let (gpu, shape) = (&H200, &LLAMA_8B);
    let mut page = String::from(INTRODUCTION);
    write_kernels(&mut page, gpu, shape);
    write_steps(&mut page, gpu, shape);
    write_prompts(&mut page, gpu, shape);
    write_ranks(&mut page, gpu);
    write_other_kernels(&mut page, gpu, shape);
    write_launches(&mut page, gpu);
    page
}

const BATCHES: [usize; 4] = [1, 32, 128, 256];

const INTRODUCTION: &str = "\
# Expected on a GPU

**Nothing on this page was measured on a GPU**, unlike [the figures of an H100](results-gpus.md#on-an-h100). It says what a step of Llama 3.1 8B must read and compute, kernel by kernel, and how
long an H200 needs for that at least. `crates/measure/src/limits/gpu/` computes it, and `UPDATE_DOCS=1 cargo test -p inflight-measure page`
writes this page.

Assumed are 4.3 TB/s, of 4.8 that the data sheet promises; 790 TFLOP/s in bf16, of 989; 1580 in FP8, of 1979; 250 in attention over
a context and in products with quantised weights, which caches bound; 50 GB/s to the host; and 2 µs for each kernel besides its
work. The last four are guesses.

`FP8` means weights of an FP8 checkpoint, `fp8_activations` and `kv_cache_dtype: fp8`; the output layer is bf16.
";

fn write_kernels(page: &mut String, gpu: &Gpu, shape: &Shape) {
    const CONTEXT: usize = 1024;
    for (title, numbers) in [("bf16", Numbers::Bf16), ("FP8", Numbers::Fp8)] {
        let _ = writeln!(
            page,
            "\n## Kernels of a generation step in {title}, 1024 positions in each sequence\n"
        );
        *page += "MB and GFLOP of one call, and its least time, by the number of sequences.\n\n";
        *page += "| kernel | calls | 1: MB | GFLOP | µs | 32: MB | GFLOP | µs | 256: MB | GFLOP | µs |\n";
        *page += "|---|---|---|---|---|---|---|---|---|---|---|\n";
        let steps = [1, 32, 256].map(|batch| generation_step(shape, numbers, batch, CONTEXT));
        for (index, kernel) in steps[0].iter().enumerate() {
            let _ = write!(page, "| {} | {} |", kernel.name, kernel.calls);
            for step in &steps {
                let kernel = &step[index];
                let _ = write!(
                    page,
                    " {} | {} | {} |",
                    digits(kernel.bytes as f64 / 1e6),
                    digits(kernel.operations as f64 / 1e9),
                    digits(1e6 * kernel.seconds(gpu))
                );
            }
            *page += "\n";
        }
    }
    *page += "\nProjections compute in f32 and write f32, which is counted: `gate_up` of 256 rows writes 29 MB, and \
              `silu_mul` reads them again. In FP8, `round_to_fp8` and `scale_sums` stand before and after their product.\n";
}

fn write_steps(page: &mut String, gpu: &Gpu, shape: &Shape) {
    *page += "\n## Steps\n\n";
    *page += "`roofline`: weights, keys and values are read once, or the products are computed, whichever takes longer. \
              `kernels`: the sum of the least times above. `expected`: with 2 µs for each kernel. `logits`: what copying \
              all logits to the host adds, if it samples.\n\n";
    *page += "| numbers | sequences | positions | roofline ms | kernels ms | expected ms | tokens/s | share of roofline | logits ms |\n";
    *page += "|---|---|---|---|---|---|---|---|---|\n";
    for (title, numbers) in [("bf16", Numbers::Bf16), ("FP8", Numbers::Fp8)] {
        for (context, batch) in [192, 1024, 2048]
            .into_iter()
            .flat_map(|context| BATCHES.map(|batch| (context, batch)))
        {
            let time = step_time(gpu, shape, numbers, batch, context);
            let _ = writeln!(
                page,
                "| {title} | {batch} | {context} | {} | {} | {} | {} | {:.0} % | {} |",
                digits(1e3 * time.least),
                digits(1e3 * time.kernels),
                digits(1e3 * time.expected),
                digits(batch as f64 / time.expected),
                100.0 * time.least / time.expected,
                digits(1e3 * time.logits)
            );
        }
    }
    *page += "\nWith few sequences, the time between kernels decides whether 85 % of the roofline are reached; with many, \
              the f32 results of projections. Copying logits to the host takes a third of the step of 256 sequences \
              with 192 positions.\n";
}

/// What a prompt takes until its first token.
fn write_prompts(page: &mut String, gpu: &Gpu, shape: &Shape) {
    *page += "\n## Prompts\n\n";
    *page += "A prompt computed in one step: the least times of its kernels in ms, and their sum with 2 µs for each kernel: the \
              time to the first token, without the host.\n\n";
    *page += "| numbers | tokens | products | attention | rounding and scaling | other kernels | sum |\n|---|---|---|---|---|---|---|\n";
    for (title, numbers) in [("bf16", Numbers::Bf16), ("FP8", Numbers::Fp8)] {
        for len in [1024, 8192] {
            let step = prompt_step(shape, numbers, len);
            let of = |is_one: &dyn Fn(&str) -> bool| {
                1e3 * seconds_of(gpu, step.iter().filter(|kernel| is_one(kernel.name)))
            };
            let is_product =
                |name: &str| ["qkv", "o", "gate_up", "down", "lm_head"].contains(&name);
            let is_attention = |name: &str| name == "paged_attention_context";
            let is_rounding = |name: &str| ["round_to_fp8", "scale_sums"].contains(&name);
            let parts = [
                of(&is_product),
                of(&is_attention),
                of(&is_rounding),
                of(&|name| !is_product(name) && !is_attention(name) && !is_rounding(name)),
            ];
            let calls: usize = step.iter().map(|kernel| kernel.calls).sum();
            let sum = parts.iter().sum::<f64>() + 1e3 * calls as f64 * gpu.seconds_per_kernel;
            let [products, attention, rounding, others] = parts.map(digits);
            let _ = writeln!(
                page,
                "| {title} | {len} | {products} | {attention} | {rounding} | {others} | {} |",
                digits(sum)
            );
        }
    }
    *page += "\nOf the scaling two thirds follow `gate_up`, where the activation could apply the scales instead.\n";
}

/// Generation steps on several GPUs.
fn write_ranks(page: &mut String, gpu: &Gpu) {
    *page += SEVERAL_GPUS;
    let placements = [
        ("2", 2, Placement::OneHost),
        ("4", 4, Placement::OneHost),
        ("8", 8, Placement::OneHost),
        ("2 x 8", 8, Placement::TwoHosts),
        ("2 x 8, stages", 8, Placement::TwoStages),
    ];
    for (name, shape) in [("8B", &LLAMA_8B), ("70B", &LLAMA_70B)] {
        for (gpus, num_gpus, placement) in placements {
            let _ = write!(page, "| {name} | {gpus} |");
            for batch in [1, 32, 256] {
                let time = rank_step_time(
                    gpu,
                    shape,
                    Numbers::Bf16,
                    (batch, 1024),
                    num_gpus,
                    placement,
                );
                let step = time.compute + time.communication;
                let _ = write!(
                    page,
                    " {} | {:.0} % | {} |",
                    digits(1e3 * step),
                    100.0 * time.communication / step,
                    digits(time.tokens_per_s)
                );
            }
            *page += "\n";
        }
    }
    *page += "\nThe time of rounds decides: in a model of 80 layers, 161 of them take a millisecond, and over two hosts four. Two hosts \
              serve more sequences as stages, which exchange two messages in a step, than as one group.\n";
    *page += PROMPTS_ON_SEVERAL_GPUS;
    for (name, shape) in [("8B", &LLAMA_8B), ("70B", &LLAMA_70B)] {
        for num_gpus in [2, 4, 8] {
            let time = rank_prompt_time(gpu, shape, Numbers::Bf16, 8192, num_gpus, 4);
            let [apart, beside] = [time.sums, time.left].map(|sums| time.compute + sums);
            let _ = writeln!(
                page,
                "| {name} | {num_gpus} | {} | {} | {} | {} | {:.2} |",
                digits(1e3 * time.compute),
                digits(1e3 * time.sums),
                digits(1e3 * apart),
                digits(1e3 * beside),
                apart / beside
            );
        }
    }
}

const PROMPTS_ON_SEVERAL_GPUS: &str = "
A step that computes a prompt of 8192 tokens in bf16, by the same assumptions. Its rows are cut into four pieces, and each piece of `o` and `down` is
summed while the next one is multiplied. That NCCL's kernels then take multiprocessors from the products is not counted.

    apart   = kernels of a share + (2 layers + 1) sum
    beside  = the same, where for o and down: product / 4 + 3 max(product, sum) / 4 + sum / 4

| model | GPUs | kernels: ms | sums: ms | apart: ms | beside: ms | ratio |
|---|---|---|---|---|---|---|
";

const SEVERAL_GPUS: &str = "
## Several GPUs

Generation steps in bf16 with 1024 positions in each sequence, on `n` GPUs of a host (NVLink 4), and on two hosts of 8, with an
InfiniBand adapter for each GPU. See [ranks](ranks.md#gpus) for what is there: several GPUs of one host. Assumed are `w` = 350 GB/s and `r` = 6 µs for a round
between the GPUs of a host, 45 GB/s and 12 µs between hosts. `b` is a message: 4 bytes for each hidden element of each sequence.

    step        = kernels of a share + (2 layers + 1) sum + gather
    sum         = min(r + (n - 1) b / w, 2 (r + (n - 1) / n b / w))            one host: one-shot or split
    sum         = 2 (r + (n - 1) / n b / w) + 12 µs + b / n / 45 GB/s          two hosts
    gather      = r + (1 - 1 / ranks) 4 vocabulary sequences / w               logits to the first GPU
    stages      = step of half of the sequences on n GPUs + 24 µs + b / 45 GB/s

| model | GPUs | 1: ms | sums | tokens/s | 32: ms | sums | tokens/s | 256: ms | sums | tokens/s |
|---|---|---|---|---|---|---|---|---|---|---|
";

fn write_other_kernels(page: &mut String, gpu: &Gpu, shape: &Shape) {
    *page += "\n## Other kernels\n\n";
    *page += "Kernels that these steps do not launch, or launch otherwise, each in one case of Llama 3.1 8B. Counts come from the \
              head of each file in `kernels/`.\n\n";
    *page += "| kernel | case | MB | GFLOP | µs | bound by |\n|---|---|---|---|---|---|\n";
    for case in other_kernels(shape) {
        let kernel = case.kernel;
        let seconds = kernel.seconds(gpu);
        let is_memory = seconds <= kernel.bytes as f64 / gpu.bytes_per_s;
        let _ = writeln!(
            page,
            "| {} | {} | {} | {} | {} | {} |",
            kernel.name,
            case.what,
            digits(kernel.bytes as f64 / 1e6),
            digits(kernel.operations as f64 / 1e9),
            digits(1e6 * seconds),
            if is_memory { "memory" } else { "operations" }
        );
    }
    *page += "\n`sample` has one block for each row, however few rows there are: an H100 takes 21 µs for one, and 93 to draw from all. \
              `change_logits` counts in the L2 cache.\n";
}

fn write_launches(page: &mut String, gpu: &Gpu) {
    *page += "\n## Occupancy\n\n";
    let _ = writeln!(
        page,
        "Registers as NVRTC 12.4 reports them for sm_90, without spills; blocks and warps that one of the {} \
         multiprocessors runs at once.\n",
        gpu.num_multiprocessors
    );
    *page += "| kernel | registers | threads | shared bytes | blocks | warps of 64 |\n|---|---|---|---|---|---|\n";
    for launch in &LAUNCHES {
        let _ = writeln!(
            page,
            "| {} | {} | {} | {} | {} | {} |",
            launch.name,
            launch.registers,
            launch.threads,
            launch.shared_bytes,
            launch.blocks(),
            launch.blocks() * launch.threads / 32
        );
    }
    *page += "\nNorms have a block for each row: one sequence keeps one multiprocessor busy, and is bound by latency.\n";
}

/// Three significant digits, and at most three decimals.
fn digits(number: f64) -> String {
    if number == 0.0 {
        return "0".to_owned();
    }
    let decimals = (2 - number.abs().log10().floor() as i32).clamp(0, 3) as usize;
    format!("{number:.decimals$}")
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;

    #[test]
    fn the_page_in_the_book_is_this_one() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/src/gpu-figures.md");
        if std::env::var_os("UPDATE_DOCS").is_some() {
            fs::write(&path, page()).expect("docs/ can be written");
        }
        let written = fs::read_to_string(&path).expect("the page is there");
        assert_eq!(written, page(), "UPDATE_DOCS=1 writes it");
    }
}
