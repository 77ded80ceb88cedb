//! The numbers and texts of a branch, as sets of texts.

use serde_json::{Value, json};

use super::branches::Branch;
use super::decimal::{self, Decimal};
use super::text::Texts;

/// The most multiples that are written out one by one.
const MAX_MULTIPLES: i128 = 256;

/// The largest multiple where there is no bound.
const MAX_SHORT: f64 = 1e12;

/// The numbers of a branch.
pub(super) enum Numbers {
    Texts(Texts),
    /// Multiples of a number, as a schema that the parser's library has an automaton for.
    Multiples(Value),
    /// The same, of a step that has none: all numbers otherwise.
    AnySteps(Texts),
}

impl Branch<'_> {
    /// Its numbers, apart from `multipleOf`.
    pub fn number_texts(&self) -> Texts {
        let is_plain =
            self.minimum.is_none() && self.maximum.is_none() && self.multiples.is_empty();
        let form = match (self.is_integer, self.is_fraction) {
            (true, true) => return Texts::Any(Vec::new()),
            (true, false) => decimal::INTEGER,
            (false, true) => decimal::FRACTION,
            (false, false) if is_plain && self.excluded.is_empty() => decimal::NUMBER,
            (false, false) => decimal::PLAIN,
        };
        let mut all = vec![Texts::unquoted(form.to_owned())];
        all.extend(
            self.minimum
                .as_ref()
                .map(|it| Texts::unquoted(decimal::from(it))),
        );
        all.extend(
            self.maximum
                .as_ref()
                .map(|it| Texts::unquoted(decimal::up_to(it))),
        );
        for number in self
            .excluded
            .iter()
            .filter_map(|it| it.as_number())
            .filter_map(Decimal::of)
        {
            all.push(Texts::Not(Box::new(Texts::unquoted(number.spellings()))));
        }
        match all.len() {
            1 => all.remove(0),
            _ => Texts::All(all),
        }
    }

    /// All of its numbers.
    pub fn numbers(&self) -> Numbers {
        let texts = self.number_texts();
        let Some(first) = self.multiples.first() else {
            return Numbers::Texts(texts);
        };
        let Some((step, num_decimals)) = self.common_step() else {
            return Numbers::AnySteps(texts);
        };
        // Programs that read numbers as doubles cannot tell the multiples among long ones.
        let short = Texts::All(vec![
            texts.clone(),
            Texts::unquoted(decimal::SHORT.to_owned()),
        ]);
        let texts = if short.has_any() == Some(true) {
            short
        } else {
            texts
        };
        let with = |more: Texts| Numbers::Texts(Texts::All(vec![texts.clone(), more]));
        // A power of ten limits the digits behind the point, or the zeros before it.
        if let Some(power) = (0..=18u32).find(|it| 10i128.pow(*it) == step) {
            let num_decimals = num_decimals as u32;
            return match power.cmp(&num_decimals) {
                std::cmp::Ordering::Less => with(Texts::unquoted(decimal::with_decimals(
                    (num_decimals - power) as usize,
                ))),
                std::cmp::Ordering::Equal => {
                    with(Texts::unquoted(r"-?(?:0|[1-9][0-9]*)(?:\.0+)?".to_owned()))
                }
                std::cmp::Ordering::Greater => {
                    let zeros = power - num_decimals;
                    with(Texts::unquoted(format!(
                        r"(?:0|-?[1-9][0-9]*0{{{zeros}}})(?:\.0+)?"
                    )))
                }
            };
        }
        if let Some((from, to)) = self.multiples_within(step, num_decimals) {
            let numbers = (from..=to).filter_map(|it| Decimal::of_scaled(it * step, num_decimals));
            let numbers = numbers.map(|it| Texts::unquoted(it.spellings()));
            return with(Texts::Any(numbers.collect()));
        }
        match self.automaton(first) {
            Some(schema)
                if self.multiples.len() == 1 && self.excluded.is_empty() && !self.is_fraction =>
            {
                Numbers::Multiples(schema)
            }
            _ => Numbers::AnySteps(texts),
        }
    }

    /// The first and the last multiple of a step that may be within its bounds, if there are few.
    fn multiples_within(&self, step: i128, num_decimals: usize) -> Option<(i128, i128)> {
        let multiple = |bound: &decimal::Bound| {
            let places = num_decimals.max(bound.value.num_decimals());
            let value = bound.value.scaled(places)?;
            let unit = 10i128.checked_pow((places - num_decimals) as u32)?;
            Some(value.div_euclid(step.checked_mul(unit)?))
        };
        let from = multiple(self.minimum.as_ref()?)?;
        let to = multiple(self.maximum.as_ref()?)? + 1;
        (to - from <= MAX_MULTIPLES).then_some((from, to))
    }

    /// The least common multiple of its steps, and of 1 if it has integers only, times `10^num_decimals`.
    fn common_step(&self) -> Option<(i128, usize)> {
        let num_decimals = self.multiples.iter().map(Decimal::num_decimals).max()?;
        let one = self.is_integer.then(|| Decimal::parse("1")).flatten();
        let mut common = 1i128;
        for step in self.multiples.iter().chain(&one) {
            let step = step.scaled(num_decimals)?;
            let divisor = greatest_divisor(common, step);
            common = common.checked_mul(step / divisor)?;
        }
        // Without a first step, 1 would be one.
        Some((common, num_decimals)).filter(|(step, _)| *step > 0 && *step < 10i128.pow(18))
    }

    /// The schema of multiples of a step. Its numbers are doubles.
    fn automaton(&self, step: &Decimal) -> Option<Value> {
        let exact = |it: &Decimal| {
            let number: f64 = it.text().parse().ok()?;
            (Decimal::of(&serde_json::Number::from_f64(number)?)? == *it).then_some(number)
        };
        let mut schema = json!({
            "type": if self.is_integer { "integer" } else { "number" },
            "multipleOf": exact(step).filter(|_| step.scaled(step.num_decimals()).is_some_and(|it| it < 1 << 31))?,
            "x-guidance": {"whitespace_flexible": false},
        });
        for (bound, inclusive, exclusive) in [
            (&self.minimum, "minimum", "exclusiveMinimum"),
            (&self.maximum, "maximum", "exclusiveMaximum"),
        ] {
            let (name, value) = match bound {
                None if inclusive == "minimum" => (inclusive, -MAX_SHORT),
                None => (inclusive, MAX_SHORT),
                Some(bound) if bound.is_exclusive => (exclusive, exact(&bound.value)?),
                Some(bound) => (inclusive, exact(&bound.value)?),
            };
            schema[name] = json!(value);
        }
        // The library multiplies by 10 until there is no fraction, which rounding can prevent.
        let mut number = exact(step)?;
        for _ in 0..step.num_decimals() {
            number *= 10.0;
        }
        (number.fract() == 0.0).then_some(schema)
    }

    /// Its texts. `None` if the bounds of their length are too large.
    pub fn string_texts(&self) -> Option<Texts> {
        let mut all = self.texts.clone();
        if self.min_length > 0 || self.max_length.is_some() {
            if self.max_length.is_some_and(|max| max < self.min_length) {
                return Some(Texts::Any(Vec::new()));
            }
            all.push(Texts::of_length(self.min_length, self.max_length)?);
        }
        for text in self.excluded.iter().filter_map(|it| it.as_str()) {
            all.push(Texts::Not(Box::new(Texts::literal(text))));
        }
        Some(match all.len() {
            0 => Texts::any(),
            1 if !matches!(all[0], Texts::Not(_)) => all.remove(0),
            _ => Texts::All(all),
        })
    }
}

fn greatest_divisor(mut one: i128, mut other: i128) -> i128 {
    while other != 0 {
        (one, other) = (other, one % other);
    }
    one
}
