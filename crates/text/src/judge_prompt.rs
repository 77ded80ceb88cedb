//! The prompt in which Qwen3-Reranker judges whether a document answers a query: the next token is "yes" or "no".
//!
//! Source: the model card of Qwen3-Reranker-0.6B, which encodes the three parts by themselves and cuts the one in the
//! middle.

use super::{EncodedTexts, LengthLimit, Tokenizer};
use inflight_base::RequestError;

const BEFORE: &str = "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct \
                      provided. Note that the answer can only be \"yes\" or \"no\".<|im_end|>\n<|im_start|>user\n";
const INSTRUCTION: &str =
    "Given a web search query, retrieve relevant passages that answer the query";
const BEHIND: &str = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n";

impl Tokenizer {
    /// The tokens of the prompt that asks Qwen3-Reranker whether `document` answers `query`. What is more than
    /// [`LengthLimit::Cut`] allows is left out at the end of the document.
    ///
    /// # Errors
    /// The tokenizer cannot encode the texts, they are too long, or there is no room for a token of them.
    pub fn encode_judgement(
        &self,
        query: &str,
        document: &str,
        limit: LengthLimit,
    ) -> Result<EncodedTexts, RequestError> {
        let texts = format!("<Instruct>: {INSTRUCTION}\n<Query>: {query}\n<Document>: {document}");
        let [before, behind] = [BEFORE, BEHIND].map(|text| self.encode(text, false));
        let (before, behind) = (before?, behind?);
        let inner = match limit {
            LengthLimit::Cut(_) => LengthLimit::None,
            limit => limit,
        };
        let mut inner = self.encode_texts(&texts, None, false, inner)?.ids;
        let num_around = before.len() + behind.len();
        if let LengthLimit::Cut(max_tokens) = limit {
            if max_tokens <= num_around {
                return Err(RequestError::Invalid(format!(
                    "a prompt of {max_tokens} tokens, of which {num_around} are around the query and the document, has no token \
                     of them; allow at least {}",
                    num_around + 1
                )));
            }
            inner.truncate(max_tokens - num_around);
        }
        Ok(EncodedTexts {
            ids: [before, inner, behind].concat(),
            second_text: None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::toys;

    #[test]
    fn a_judgement_is_asked_in_three_parts_and_cut_in_the_middle() {
        let tokenizer = toys::byte_level();
        let encode = |text: &str| tokenizer.encode(text, false).expect("tokens");
        let (before, behind) = (encode(BEFORE), encode(BEHIND));
        let inner = encode(&format!(
            "<Instruct>: {INSTRUCTION}\n<Query>: the\n<Document>: a the"
        ));
        let judged = |limit| {
            let encoded = tokenizer.encode_judgement("the", "a the", limit);
            encoded
                .map(|encoded| encoded.ids)
                .map_err(|error| error.to_string())
        };
        let whole = [&before[..], &inner, &behind].concat();
        assert_eq!(judged(LengthLimit::None).as_ref(), Ok(&whole));
        assert_eq!(
            judged(LengthLimit::Refuse(inner.len())).as_ref(),
            Ok(&whole)
        );
        let error = judged(LengthLimit::Refuse(inner.len() - 1)).expect_err("refused");
        assert!(error.contains("shorten the prompt"), "{error}");
        assert_eq!(judged(LengthLimit::Cut(whole.len())), Ok(whole));
        let num_around = before.len() + behind.len();
        for num_kept in [1, inner.len() - 1] {
            assert_eq!(
                judged(LengthLimit::Cut(num_around + num_kept)),
                Ok([&before[..], &inner[..num_kept], &behind].concat())
            );
        }
        let error = judged(LengthLimit::Cut(num_around)).expect_err("refused");
        let remedy = format!("allow at least {}", num_around + 1);
        assert!(error.ends_with(&remedy), "{error}");
    }
}
