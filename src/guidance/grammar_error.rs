//! What is wrong with a grammar.

/// Why a grammar cannot be used, in words that continue "the guide".
pub(super) type GrammarError = String;
