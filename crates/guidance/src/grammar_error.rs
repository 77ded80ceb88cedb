//! Errors in a grammar.

/// Why a grammar cannot be used. Shown after "the guide cannot be used:".
pub(super) type GrammarError = String;
