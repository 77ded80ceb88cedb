//! All post-processors that requests of a model can name.

use std::path::Path;
use std::sync::Arc;

use crate::built_in::BUILT_IN;
use crate::library;
use crate::library_request::LibraryProcessor;
use crate::processed_request::ProcessedRequest;
use inflight_base::{LoadError, RequestError, nearest_name};
use inflight_sampling::LogitsProcessor;

/// The post-processors of a model by name: the built-in ones and a library's.
#[derive(Default)]
pub struct PostProcessors {
    from_library: Vec<Arc<LibraryProcessor>>,
}

impl PostProcessors {
    /// The built-in post-processors and the ones in a user's shared library. The library must follow
    /// `include/inflight_logits_processor.h`. It runs in this process with all of its permissions, and stays open until
    /// the last request that uses it has ended.
    ///
    /// # Errors
    /// The library cannot be opened or has another version, or two post-processors have the same name.
    pub fn with_library(path: &Path) -> Result<Self, LoadError> {
        let error = |reason| LoadError::File {
            path: path.to_owned(),
            reason: format!("logits_post_processor_library: {reason}"),
        };
        let mut processors = Self::default();
        for processor in library::open(path).map_err(error)? {
            let name = processor.name();
            if processors.names().any(|other| other == name) {
                return Err(error(format!(
                    "there is already a processor '{name}'; rename the library's processor"
                )));
            }
            let processor = Arc::new(LibraryProcessor::new(processor));
            processors.from_library.push(processor);
        }
        Ok(processors)
    }

    /// Starts the post-processor `name` for a request. The post-processor defines the format of `arguments`.
    ///
    /// # Errors
    /// The name is unknown, or the post-processor rejects the arguments.
    pub fn start(
        &self,
        name: &str,
        arguments: &str,
        request: ProcessedRequest<'_>,
    ) -> Result<LogitsProcessor, RequestError> {
        if let Some(built_in) = BUILT_IN.iter().find(|built_in| built_in.name == name) {
            let made = (built_in.start)(arguments, request.vocab_size);
            return made.map_err(|reason| RequestError::Option {
                name: "logits_post_processor_args".to_owned(),
                value: shortened(arguments),
                expected: format!(
                    "valid for '{name}', which takes {}: {reason}",
                    built_in.arguments
                ),
            });
        }
        if let Some(processor) = self.from_library.iter().find(|it| it.name() == name) {
            let started = processor.start(arguments, request).map_err(|reason| {
                RequestError::Invalid(format!(
                    "option 'logits_post_processor_args': rejected by '{name}': {reason}"
                ))
            });
            return started.map(|request| LogitsProcessor(Arc::new(request)));
        }
        Err(self.unknown(name))
    }

    fn names(&self) -> impl Iterator<Item = &str> {
        let from_library = self.from_library.iter().map(|processor| processor.name());
        let built_in = BUILT_IN.iter().map(|built_in| built_in.name);
        built_in.chain(from_library)
    }

    fn unknown(&self, name: &str) -> RequestError {
        let way_out = match nearest_name(name, self.names()) {
            Some(nearest) => format!("did you mean '{nearest}'?"),
            None => format!(
                "the names are '{}'",
                self.names().collect::<Vec<_>>().join("', '")
            ),
        };
        RequestError::Invalid(format!(
            "option 'logits_post_processor_name': this model has no post-processor '{}'; {way_out}",
            shortened(name)
        ))
    }
}

/// A client's text cut to a length suitable for an error.
fn shortened(text: &str) -> String {
    const MAX_CHARS: usize = 80;
    match text.char_indices().nth(MAX_CHARS) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use inflight_base::SequenceId;

    const REQUEST: ProcessedRequest<'_> = ProcessedRequest {
        id: SequenceId(1),
        client_request_id: None,
        client_id: None,
        vocab_size: 10,
    };

    fn error_of(name: &str, arguments: &str) -> String {
        let started = PostProcessors::default().start(name, arguments, REQUEST);
        started.expect_err("refused").to_string()
    }

    #[test]
    fn rejects_an_unknown_name_and_suggests_the_nearest_or_lists_all() {
        let error = error_of("force_token", "");
        assert!(error.ends_with("no post-processor 'force_token'; did you mean 'force_tokens'?"));
        let error = error_of(&"x".repeat(200), "");
        assert!(
            error.contains("xxx...'; the names are 'force_tokens', "),
            "{error}"
        );
    }

    #[test]
    fn rejects_bad_arguments_and_shows_the_expected_form() {
        for (arguments, words) in [
            ("", "EOF"),
            ("[]", "invalid length"),
            ("{}", "missing field `tokens`"),
            (
                r#"{"tokens": [1], "strat": 1}"#,
                "unknown field `strat`, expected `tokens` or `start`",
            ),
            (r#"{"tokens": [-1]}"#, "invalid value"),
            (r#"{"tokens": []}"#, "'tokens' is empty"),
            (
                r#"{"tokens": [3, 10]}"#,
                "token 10 is not in the vocabulary, 0 to 9",
            ),
        ] {
            let error = error_of("force_tokens", arguments);
            let beginning = format!(
                "option 'logits_post_processor_args': {arguments} is not valid for 'force_tokens', which takes {{\"tokens\":"
            );
            assert!(
                error.starts_with(&beginning) && error.contains(words),
                "{error}"
            );
        }
        let error = error_of("ban_first_tokens", r#"{"tokens": [1], "count": 0}"#);
        assert!(error.contains("'count' is 0"), "{error}");
    }
}
