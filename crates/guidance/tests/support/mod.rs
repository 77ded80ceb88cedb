//! Guides for the demo model's tokenizer, and random outputs that they allow.

#[path = "../../../../tests/support/guided_output.rs"]
mod guided_output;

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use inflight_base::RequestError;
use inflight_guidance::{Compiler, GrammarGuide, GuideSpec, MAX_GUIDE_BYTES};
use inflight_text::Tokenizer;

pub use guided_output::Output;
use guided_output::{END_ID, VOCAB_SIZE};

/// A compiler of guides.
pub fn compiler() -> Compiler {
    compiler_with_memory(MAX_GUIDE_BYTES)
}

/// A compiler whose guides have so much memory together.
pub fn compiler_with_memory(max_bytes: usize) -> Compiler {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../model_repository/stories/1");
    let tokenizer = Tokenizer::load(&dir).expect("the demo model's tokenizer");
    Compiler::with_memory(Arc::new(tokenizer), VOCAB_SIZE, max_bytes)
}

/// The guide of `spec`.
pub fn guide(compiler: &Compiler, spec: GuideSpec) -> Result<GrammarGuide, RequestError> {
    let compilation = compiler.compile(spec, vec![END_ID], Instant::now())?;
    compiler.wait(|| compilation.is_done(), Duration::from_secs(60));
    compilation.poll_grammar(Instant::now()).expect("in time")
}
