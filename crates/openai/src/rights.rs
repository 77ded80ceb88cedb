//! The rights of a key: its requests and tokens a minute, its models, and its options.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use axum::http::StatusCode;

use crate::{Error, adapters};

/// The rights of a key. Without limits by default.
#[derive(Debug, Default)]
pub struct Rights {
    requests: Option<Bucket>,
    tokens: Option<Bucket>,
    /// `MODEL`, with all its adapters, or `MODEL:ADAPTER`.
    models: Option<Vec<String>>,
    options: Option<Vec<String>>,
}

/// A token bucket: it fills up within a minute, and may be overdrawn.
#[derive(Debug)]
struct Bucket {
    per_minute: f64,
    level: Mutex<Level>,
}

#[derive(Debug)]
struct Level {
    value: f64,
    at: Instant,
}

impl Rights {
    /// The rights in words such as `requests=60`, at `now`.
    ///
    /// # Errors
    /// The word that is wrong, and what it may be.
    pub fn parse<'a>(words: impl Iterator<Item = &'a str>, now: Instant) -> Result<Self, String> {
        let mut rights = Self::default();
        for word in words {
            let problem = |expected: &str| format!("'{word}' is not {expected}");
            let expected = "requests=N, tokens=N, models=NAME,... or options=NAME,...";
            let (name, value) = word.split_once('=').ok_or_else(|| problem(expected))?;
            let number = || match value.parse::<u32>() {
                Ok(number) if number > 0 => Ok(Some(Bucket::new(number, now))),
                _ => Err(problem("a whole number from 1")),
            };
            let names = || match value.split(',').map(str::to_owned).collect::<Vec<_>>() {
                names if names.iter().any(String::is_empty) => Err(problem("a list of names")),
                names => Ok(Some(names)),
            };
            match name {
                "requests" => rights.requests = number()?,
                "tokens" => rights.tokens = number()?,
                "models" => rights.models = names()?,
                "options" => rights.options = names()?,
                _ => return Err(problem(expected)),
            }
        }
        Ok(rights)
    }

    /// Counts a request, if there is room for one.
    ///
    /// # Errors
    /// The limit that is reached, and how long to wait.
    pub fn admit(&self, now: Instant) -> Result<(), (Error, Duration)> {
        // Tokens are counted as they are computed: what a request will need is not known.
        for (bucket, least, what) in [
            (&self.tokens, 1.0, "tokens"),
            (&self.requests, 1.0, "requests"),
        ] {
            if let Some(bucket) = bucket
                && let Some(wait) = bucket.wait(least, now)
            {
                let problem = format!(
                    "the key has used its {} {what} a minute; wait {} s",
                    bucket.per_minute,
                    wait.as_secs_f64().ceil()
                );
                let error = Error {
                    code: Some("rate_limit_exceeded"),
                    ..Error::new(StatusCode::TOO_MANY_REQUESTS, problem)
                };
                return Err((error, wait));
            }
        }
        if let Some(bucket) = &self.requests {
            bucket.take(1.0, now);
        }
        Ok(())
    }

    /// Counts tokens that were computed.
    pub fn charge(&self, num_tokens: u32, now: impl FnOnce() -> Instant) {
        if let Some(bucket) = &self.tokens {
            bucket.take(f64::from(num_tokens), now());
        }
    }

    /// Whether a model, or `MODEL:ADAPTER`, may be used.
    pub fn has_model(&self, name: &str) -> bool {
        let (model, _) = adapters::split(name);
        let is_listed = |models: &Vec<String>| models.iter().any(|it| it == name || it == model);
        self.models.as_ref().is_none_or(is_listed)
    }

    /// Whether all models may be used.
    pub fn has_all_models(&self) -> bool {
        self.models.is_none()
    }

    /// The options that may be used besides the APIs' fields; `None` if the key has no list of its own.
    pub fn options(&self) -> Option<&[String]> {
        self.options.as_deref()
    }
}

impl Bucket {
    fn new(per_minute: u32, now: Instant) -> Self {
        let value = f64::from(per_minute);
        Self {
            per_minute: value,
            level: Mutex::new(Level { value, at: now }),
        }
    }

    /// How long it takes until there is as much as `least`; `None` if there is.
    fn wait(&self, least: f64, now: Instant) -> Option<Duration> {
        let missing = least - self.filled(now, 0.0);
        (missing > 0.0).then(|| Duration::from_secs_f64(missing * 60.0 / self.per_minute))
    }

    fn take(&self, amount: f64, now: Instant) {
        self.filled(now, amount);
    }

    /// Takes an amount; returns what there was before.
    fn filled(&self, now: Instant, amount: f64) -> f64 {
        let mut level = self.level.lock().unwrap_or_else(PoisonError::into_inner);
        let elapsed = now.saturating_duration_since(level.at).as_secs_f64();
        let value = (level.value + elapsed * self.per_minute / 60.0).min(self.per_minute);
        *level = Level {
            value: value - amount,
            at: now.max(level.at),
        };
        value
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rights(words: &str, now: Instant) -> Rights {
        Rights::parse(words.split_whitespace(), now).expect("sound")
    }

    #[test]
    fn requests_of_a_minute_come_back_one_after_the_other() {
        let start = Instant::now();
        let rights = rights("requests=3", start);
        let at = |seconds| start + Duration::from_secs(seconds);
        for _ in 0..3 {
            assert!(rights.admit(at(0)).is_ok());
        }
        let (error, wait) = rights.admit(at(0)).expect_err("three are used");
        assert_eq!((error.status.as_u16(), wait.as_secs()), (429, 20));
        assert!(
            error.message.contains("3 requests a minute"),
            "{}",
            error.message
        );
        assert!(rights.admit(at(19)).is_err());
        assert!(rights.admit(at(20)).is_ok() && rights.admit(at(20)).is_err());
        for _ in 0..3 {
            assert!(rights.admit(at(600)).is_ok(), "no more than a minute's");
        }
        assert!(rights.admit(at(600)).is_err());
    }

    #[test]
    fn tokens_may_be_overdrawn_and_are_paid_back() {
        let start = Instant::now();
        let rights = rights("tokens=60 requests=1000", start);
        let at = |seconds| start + Duration::from_secs(seconds);
        assert!(rights.admit(at(0)).is_ok());
        rights.charge(90, || at(0));
        let (_, wait) = rights.admit(at(0)).expect_err("30 too many");
        assert_eq!(wait.as_secs(), 31, "until there is one");
        assert!(rights.admit(at(30)).is_err());
        assert!(rights.admit(at(32)).is_ok());
    }

    #[test]
    fn models_are_listed_with_all_their_adapters_or_with_some() {
        let now = Instant::now();
        let all = Rights::default();
        assert!(all.has_model("a") && all.has_all_models() && all.options().is_none());
        let some = rights("models=a,b:x options=top_k", now);
        for (name, expected) in [
            ("a", true),
            ("a:y", true),
            ("b:x", true),
            ("b", false),
            ("b:y", false),
            ("c", false),
        ] {
            assert_eq!(some.has_model(name), expected, "{name}");
        }
        assert!(!some.has_all_models());
        assert_eq!(some.options(), Some(&["top_k".to_owned()][..]));
    }

    #[test]
    fn a_wrong_word_is_named() {
        for word in [
            "requests",
            "requests=0",
            "requests=x",
            "models=",
            "models=a,,b",
            "speed=9",
        ] {
            let error = Rights::parse([word].into_iter(), Instant::now()).expect_err(word);
            assert!(error.contains(&format!("'{word}'")), "{error}");
        }
    }
}
