//! Log-probabilities as vLLM's backend writes them: one JSON list, an object for each token.

use serde_json::{Map, Value, json};

use crate::sampling::{TokenLogProb, TokenLogProbs};
use crate::text::Tokenizer;

/// What stands for a token that is impossible, because JSON has no infinity; vLLM's API writes the same.
const IMPOSSIBLE: f32 = -9999.0;

/// `[{"<id>": {"logprob": -0.1, "rank": 1, "decoded_token": " a"}, ...}, ...]`: of each token the chosen
/// one first, then the most likely ones in the order of their ranks.
pub fn json<'a>(
    tokens: impl IntoIterator<Item = &'a TokenLogProbs>,
    tokenizer: Option<&Tokenizer>,
) -> String {
    let entry = |it: &TokenLogProb| {
        let value = json!({
            "logprob": f64::from(it.log_prob.max(IMPOSSIBLE)),
            "rank": it.rank,
            "decoded_token": tokenizer.map(|tokenizer| tokenizer.text_of(it.token)),
        });
        (it.token.to_string(), value)
    };
    let object = |token: &TokenLogProbs| -> Map<String, Value> {
        let others = token.top.iter().filter(|it| it.token != token.chosen.token);
        std::iter::once(&token.chosen)
            .chain(others)
            .map(entry)
            .collect()
    };
    let tokens = tokens.into_iter();
    let objects: Vec<_> = tokens.map(object).map(Value::Object).collect();
    Value::Array(objects).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ranked(token: u32, log_prob: f32, rank: u32) -> TokenLogProb {
        TokenLogProb {
            token,
            log_prob,
            rank,
        }
    }

    #[test]
    fn the_chosen_token_comes_first_and_once() {
        let tokens = [
            TokenLogProbs {
                chosen: ranked(7, -0.5, 2),
                top: vec![ranked(9, -0.25, 1), ranked(7, -0.5, 2)],
            },
            TokenLogProbs {
                chosen: ranked(3, f32::NEG_INFINITY, 8),
                top: vec![],
            },
        ];
        assert_eq!(
            json(&tokens, None),
            r#"[{"7":{"logprob":-0.5,"rank":2,"decoded_token":null},"9":{"logprob":-0.25,"rank":1,"decoded_token":null}},{"3":{"logprob":-9999.0,"rank":8,"decoded_token":null}}]"#
        );
        assert_eq!(json(&[], None), "[]");
        let unknown = [TokenLogProbs {
            chosen: ranked(3, f32::NAN, 1),
            top: vec![],
        }];
        assert!(json(&unknown, None).contains("-9999.0"));
    }
}
