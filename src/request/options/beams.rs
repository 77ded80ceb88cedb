//! The options of beam search, by the names of both backends.

use super::RequestOptions;
use inflight_base::RequestError;
use inflight_sampling::{BeamSearch, EarlyStopping};

/// The options of beam search that a request gives.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct BeamOptions {
    pub(super) beam_width: Option<u32>,
    /// vLLM's: as many beams as `best_of`, or `n`.
    pub(super) use_beam_search: Option<bool>,
    pub(super) length_penalty: Option<f32>,
    pub(super) early_stopping: Option<EarlyStopping>,
    pub(super) diversity_rate: f32,
}

impl RequestOptions {
    /// The beam search of the request; `None` without one, or with one beam. A model has at most `max_beam_width`
    /// beams.
    ///
    /// # Errors
    /// More beams than that; options that contradict each other, or that do not work with beams.
    pub fn beam_search(&self, max_beam_width: u32) -> Result<Option<BeamSearch>, RequestError> {
        let beams = &self.beams;
        let name = match beams.use_beam_search {
            Some(true) if beams.beam_width.is_none() => "use_beam_search",
            _ => "beam_width",
        };
        let by_vllm = self.num_generated.or(self.num_returned);
        let width = match beams.beam_width {
            None if name == "use_beam_search" => by_vllm.unwrap_or(1),
            None => 1,
            Some(width) => width,
        };
        let refuse = |name: &str, value: String, expected: String| {
            let name = name.to_owned();
            Err(RequestError::Option {
                name,
                value,
                expected,
            })
        };
        if width == 1 {
            return Ok(None);
        }
        if beams.use_beam_search == Some(false) {
            return refuse(
                "use_beam_search",
                "false".to_owned(),
                format!("true, while beam_width is {width}; leave one of them out"),
            );
        }
        if width > max_beam_width {
            return refuse(
                name,
                format!("{width} beams"),
                format!(
                    "at most max_beam_width, which is {max_beam_width} in the model's config.pbtxt"
                ),
            );
        }
        if let Some(best_of) = self.num_generated.filter(|&best_of| best_of != width) {
            return refuse(
                "best_of",
                best_of.to_string(),
                format!("the number of beams, which is {width}; leave it out"),
            );
        }
        // The defaults of vLLM and of TensorRT-LLM.
        let default = if name == "beam_width" { width } else { 1 };
        let num_returned = self.num_returned.unwrap_or(default);
        if num_returned > width {
            return refuse(
                "n",
                num_returned.to_string(),
                format!("at most the number of beams, which is {width}"),
            );
        }
        self.check_beside_beams(name)?;
        Ok(Some(BeamSearch {
            width,
            num_returned,
            length_penalty: beams.length_penalty.unwrap_or(1.0),
            early_stopping: beams.early_stopping.unwrap_or(EarlyStopping::Likely),
            diversity_rate: beams.diversity_rate,
        }))
    }

    /// Whether the request asks for a beam search.
    pub(super) fn searches(&self) -> bool {
        self.beams.use_beam_search == Some(true)
            || self.beams.beam_width.is_some_and(|width| width > 1)
    }

    /// Refuses options that have no effect with beams.
    fn check_beside_beams(&self, name: &str) -> Result<(), RequestError> {
        let temperature = self.temperature.unwrap_or(0.0);
        let problem = if temperature != 0.0 && temperature != 1.0 {
            "beams are not sampled; leave out 'temperature', or set it to 1"
        } else if self.guide != Default::default() {
            "beams cannot be guided; leave out one of the two"
        } else {
            return Ok(());
        };
        let text = format!("option '{name}': {problem}");
        Err(RequestError::Invalid(text))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn search(parameters: &[(&str, Value)]) -> Result<Option<BeamSearch>, RequestError> {
        let options = RequestOptions::parse(parameters.to_vec())?;
        options.beam_search(8)
    }

    fn widths(parameters: &[(&str, Value)]) -> (u32, u32) {
        let search = search(parameters).expect("good options").expect("beams");
        (search.width, search.num_returned)
    }

    #[test]
    fn both_backends_names_say_how_many_beams_there_are_and_how_many_are_returned() {
        assert_eq!(search(&[]), Ok(None));
        for alone in ["beam_width", "num_return_sequences"] {
            assert_eq!(search(&[(alone, json!(1))]), Ok(None));
        }
        assert_eq!(search(&[("use_beam_search", json!(true))]), Ok(None));
        assert_eq!(search(&[("best_of", json!(4))]), Ok(None), "drawn");
        assert_eq!(widths(&[("beam_width", json!(4))]), (4, 4));
        let some = [("beam_width", json!(4)), ("num_return_sequences", json!(2))];
        assert_eq!(widths(&some), (4, 2));
        let nested = json!({ "use_beam_search": true, "best_of": 5 });
        assert_eq!(widths(&[("sampling_parameters", nested)]), (5, 1));
        let all = [("use_beam_search", json!(true)), ("n", json!(3))];
        assert_eq!(widths(&all), (3, 3));
    }

    #[test]
    fn what_a_search_does_is_as_in_transformers_unless_the_request_says_otherwise() {
        let of = |parameters: &[(&str, Value)]| {
            let all = [&[("beam_width", json!(2))], parameters].concat();
            search(&all).expect("good options").expect("beams")
        };
        let plain = of(&[]);
        assert_eq!((plain.length_penalty, plain.diversity_rate), (1.0, 0.0));
        assert_eq!(plain.early_stopping, EarlyStopping::Likely);
        assert_eq!(of(&[("len_penalty", json!(-0.5))]).length_penalty, -0.5);
        let diverse = of(&[("beam_search_diversity_rate", json!(0.5))]);
        assert_eq!(diverse.diversity_rate, 0.5);
        for (value, expected) in [
            (json!(true), EarlyStopping::Always),
            (json!("True"), EarlyStopping::Always),
            (json!(1), EarlyStopping::Always),
            (json!(false), EarlyStopping::Likely),
            (json!(0), EarlyStopping::Likely),
            (json!("never"), EarlyStopping::Never),
            (json!(2), EarlyStopping::Never),
        ] {
            assert_eq!(of(&[("early_stopping", value)]).early_stopping, expected);
        }
    }

    #[test]
    fn what_beams_cannot_do_is_refused_with_what_to_leave_out() {
        for (name, value, words) in [
            ("beam_width", json!(9), "at most max_beam_width, which is 8"),
            ("use_beam_search", json!(false), "leave one of them out"),
            ("n", json!(5), "at most the number of beams, which is 4"),
            ("best_of", json!(3), "the number of beams, which is 4"),
            ("temperature", json!(0.5), "leave out 'temperature'"),
            ("guided_regex", json!("a+"), "cannot be guided"),
        ] {
            let mut parameters = vec![(name, value)];
            if name != "beam_width" {
                parameters.push(("beam_width", json!(4)));
            }
            let error = search(&parameters).expect_err(name).to_string();
            assert!(error.contains(words), "'{error}' does not say '{words}'");
        }
    }
}
