//! Translates option names in the backend's errors to the field names of the client's request.

use crate::Error;

/// The code of a prompt that is too long, as OpenAI's clients look for it.
const TOO_LONG: &str = "context_length_exceeded";

/// The fields of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Names {
    /// The field with the prompt.
    prompt: &'static str,
    /// Options that are called differently in the request, and their fields.
    others: Vec<(&'static str, &'static str)>,
}

impl Names {
    /// Names of a request whose prompt is in a field of this name.
    pub fn of(prompt: &'static str) -> Self {
        Self {
            prompt,
            others: vec![("prompt_token_ids", prompt)],
        }
    }

    /// Says that an option is made of a field.
    pub fn add(&mut self, option: &'static str, field: &'static str) {
        self.others.push((option, field));
    }

    /// The names in an endpoint whose fields are called differently.
    pub fn renamed(mut self, words: Words) -> Self {
        // An option without an entry has the name of its field.
        self.others.push(("messages", self.prompt));
        self.prompt = words.field(self.prompt);
        for (_, field) in &mut self.others {
            *field = words.field(field);
        }
        for (option, field) in words.0 {
            if self.others.iter().all(|(name, _)| name != option) {
                self.others.push((option, field));
            }
        }
        self
    }

    /// A refusal of the backend in the words of the request, with the field that it is about.
    pub fn apply(&self, error: Error) -> Error {
        if !error.status.is_client_error() || error.param.is_some() {
            return error;
        }
        let about_prompt = [
            "the prompt",
            "the conversation",
            "the text cannot",
            "text_input",
        ];
        let about_prompt = about_prompt.iter().any(|it| error.message.starts_with(it));
        let param = match self.first_option(&error.message) {
            Some(option) => Some(self.field(option).to_owned()),
            None => about_prompt.then(|| self.prompt.to_owned()),
        };
        Error {
            code: error
                .code
                .or(is_too_long(&error.message).then_some(TOO_LONG)),
            message: self.told(&error.message),
            param,
            ..error
        }
    }

    /// The field that an option is made of.
    fn field<'a>(&self, option: &'a str) -> &'a str
    where
        Self: 'a,
    {
        let mut others = self.others.iter();
        let other = others.find(|(name, _)| *name == option);
        other.map_or(option, |(_, field)| field)
    }

    /// The option that a message is about: the first that it calls one, or else that it quotes and that a field became.
    fn first_option<'a>(&self, message: &'a str) -> Option<&'a str> {
        let called = ["option '", "options '"].into_iter().filter_map(|start| {
            let begin = message.find(start)? + start.len();
            Some((begin, message[begin..].split('\'').next()?))
        });
        let first = called.min_by_key(|(begin, _)| *begin);
        let quoted = || {
            let mut quoted = message.split('\'').skip(1).step_by(2);
            quoted.find(|name| self.others.iter().any(|(option, _)| option == name))
        };
        first.map(|(_, name)| name).or_else(quoted)
    }

    /// A message with the names of fields in place of options' names.
    fn told(&self, message: &str) -> String {
        let prompt = format!("'{}'", self.prompt);
        let mut message = message
            .replace("unknown option '", "unknown field '")
            .replace("the options '", "'")
            .replace("options '", "'")
            .replace("the option '", "'")
            .replace("option '", "'")
            // Conversations are no texts, so that it is another endpoint's way out.
            .replace("write the prompt to text_input", "use /v1/completions")
            .replace("text_input", &prompt);
        for (option, field) in &self.others {
            message = message.replace(&format!("'{option}'"), &format!("'{field}'"));
        }
        message
    }
}

/// Fields of conversations, and what an endpoint calls them.
#[derive(Clone, Copy, Debug)]
pub struct Words(pub &'static [(&'static str, &'static str)]);

impl Words {
    /// The name that a conversation's field has in the endpoint.
    pub fn field<'a>(&self, field: &'a str) -> &'a str {
        let mut words = self.0.iter();
        let found = words.find(|(name, _)| *name == field);
        found.map_or(field, |(_, here)| here)
    }

    /// The refusal of a conversation in the words of the endpoint.
    pub fn error(&self, error: Error) -> Error {
        let mut message = error.message;
        for (name, here) in self.0 {
            message = message.replace(&format!("'{name}'"), &format!("'{here}'"));
        }
        Error {
            param: error.param.map(|param| self.field(&param).to_owned()),
            message,
            ..error
        }
    }
}

/// Whether a message says that there is no room for a prompt.
fn is_too_long(message: &str) -> bool {
    let has = |words: &str| message.contains(words);
    let is_of_prompt =
        has("the prompt has ") || has("the conversation has ") || has("'prompt_token_ids' has ");
    is_of_prompt
        && (has("max_seq_len") || has("shorten the prompt") || has("shorten the conversation"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chat() -> Names {
        let mut names = Names::of("messages");
        names.add("guided_json", "response_format");
        names
    }

    fn check(names: &Names, message: &str, told: &str, param: Option<&str>) {
        let error = names.apply(Error::invalid(message));
        assert_eq!((&error.message[..], error.param.as_deref()), (told, param));
    }

    #[test]
    fn fields_have_the_names_that_the_client_gave_them() {
        let completions = Names::of("prompt");
        for (names, message, told, param) in [
            (
                chat(),
                "option 'guided_json': no type 'x'; leave out the option 'stop'",
                "'response_format': no type 'x'; leave out 'stop'",
                Some("response_format"),
            ),
            (
                chat(),
                "more than one guide is given; a request has one of 'guided_regex', 'guided_json'",
                "more than one guide is given; a request has one of 'guided_regex', 'response_format'",
                Some("response_format"),
            ),
            (
                chat(),
                "options 'n' and 'best_of' differ",
                "'n' and 'best_of' differ",
                Some("n"),
            ),
            (
                chat(),
                "option 'messages': the checkpoint has no chat template; write the prompt to text_input",
                "'messages': the checkpoint has no chat template; use /v1/completions",
                Some("messages"),
            ),
            (
                completions.clone(),
                "option 'prompt_token_ids': -1 is not an id",
                "'prompt': -1 is not an id",
                Some("prompt"),
            ),
            (
                completions.clone(),
                "text_input is empty; a prompt has at least one token",
                "'prompt' is empty; a prompt has at least one token",
                Some("prompt"),
            ),
            (
                completions.clone(),
                "unknown option 'tempo'; did you mean 'temperature'?",
                "unknown field 'tempo'; did you mean 'temperature'?",
                Some("tempo"),
            ),
            (completions, "no room", "no room", None),
        ] {
            check(&names, message, told, param);
        }
    }

    #[test]
    fn an_endpoint_of_other_names_has_its_own() {
        let words = Words(&[
            ("messages", "input"),
            ("response_format", "text"),
            ("stop", "stop_sequences"),
        ]);
        let names = chat().renamed(words);
        check(
            &names,
            "option 'guided_json': no",
            "'text': no",
            Some("text"),
        );
        check(
            &names,
            "option 'messages': no",
            "'input': no",
            Some("input"),
        );
        check(
            &names,
            "option 'stop': no",
            "'stop_sequences': no",
            Some("stop_sequences"),
        );
        check(&names, "option 'seed': no", "'seed': no", Some("seed"));
    }

    #[test]
    fn a_prompt_that_is_too_long_has_a_code_for_it() {
        for (message, is_code) in [
            (
                "the prompt has 9 tokens, and max_seq_len = 8: shorten the prompt",
                true,
            ),
            (
                "option 'prompt_token_ids' has 9 tokens, and max_seq_len = 8: shorten the prompt",
                true,
            ),
            (
                "option 'messages': chat template: the prompt has more than 9 bytes; shorten the conversation",
                true,
            ),
            (
                "the prompt has 9 tokens, more than a step can carry (max_num_tokens = 8): shorten the prompt",
                true,
            ),
            (
                "the log-probabilities of 9 tokens are asked for; shorten the prompt",
                false,
            ),
            ("option 'max_tokens': 0 is not a number above 0", false),
        ] {
            let error = chat().apply(Error::invalid(message));
            assert_eq!(error.code, is_code.then_some(TOO_LONG), "{message}");
            let param = if message.contains("max_tokens'") {
                "max_tokens"
            } else {
                "messages"
            };
            let param = (is_code || message.contains('\'')).then_some(param);
            assert_eq!(error.param.as_deref(), param, "{message}");
        }
    }

    #[test]
    fn what_is_no_mistake_of_the_client_stays() {
        let error = Error::bad_response("no option 'a'");
        assert_eq!(chat().apply(error.clone()), error);
        let error = Error::unknown_model("option 'a'");
        assert_eq!(chat().apply(error.clone()), error);
    }
}
