//! Numbers in decimal, with all of their digits, and the texts of numbers within bounds as regular expressions.

use std::cmp::Ordering;

use serde_json::Number;

/// The largest exponent of a number in a schema, which becomes as many digits.
const MAX_EXPONENT: i64 = 400;

/// A number: its sign, and digits without zeros at the outer ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Decimal {
    is_negative: bool,
    /// At least one digit.
    whole: String,
    fraction: String,
}

/// A bound of a range.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Bound {
    pub value: Decimal,
    pub is_exclusive: bool,
}

impl Decimal {
    /// A number of a schema. `None` if it has digits that were lost when it was read, or is far too large.
    pub fn of(number: &Number) -> Option<Self> {
        // An integer beyond 64 bits is read as the nearest floating-point number. One that is larger still was meant as
        // such.
        const LOSING: std::ops::Range<f64> = 9e15..1e30;
        let decimal = Self::parse(&number.to_string())?;
        let is_rounded = number.is_f64() && LOSING.contains(&number.as_f64()?.abs());
        let num_digits = decimal.whole.trim_end_matches('0').len();
        (!is_rounded || num_digits < 17).then_some(decimal)
    }

    /// Whether all numbers that are generated are smaller, apart from their signs.
    pub fn is_beyond_all(&self) -> bool {
        self.whole.len() > 200
    }

    pub fn is_negative(&self) -> bool {
        self.is_negative
    }

    /// Reads the form of JSON.
    pub fn parse(text: &str) -> Option<Self> {
        let (is_negative, text) = match text.strip_prefix('-') {
            Some(rest) => (true, rest),
            None => (false, text),
        };
        let (mantissa, exponent) = text.split_once(['e', 'E']).unwrap_or((text, "0"));
        let exponent: i64 = exponent.parse().ok()?;
        if exponent.abs() > MAX_EXPONENT {
            return None;
        }
        let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
        let digits = format!("{whole}{fraction}");
        let point = whole.len() as i64 + exponent;
        let zeros = |num: i64| "0".repeat(num.max(0) as usize);
        let digits = format!(
            "{}{digits}{}",
            zeros(1 - point),
            zeros(point - digits.len() as i64)
        );
        let (whole, fraction) = digits.split_at(point.max(1) as usize);
        let whole = whole.trim_start_matches('0');
        let fraction = fraction.trim_end_matches('0');
        let is_zero = whole.is_empty() && fraction.is_empty();
        Some(Self {
            is_negative: is_negative && !is_zero,
            whole: if whole.is_empty() { "0" } else { whole }.to_owned(),
            fraction: fraction.to_owned(),
        })
    }

    pub fn is_integer(&self) -> bool {
        self.fraction.is_empty()
    }

    pub fn is_zero(&self) -> bool {
        self.whole == "0" && self.fraction.is_empty()
    }

    /// All of its digits, without an exponent.
    pub fn text(&self) -> String {
        let sign = if self.is_negative { "-" } else { "" };
        match self.fraction.is_empty() {
            true => format!("{sign}{}", self.whole),
            false => format!("{sign}{}.{}", self.whole, self.fraction),
        }
    }

    /// Digits behind the point.
    pub fn num_decimals(&self) -> usize {
        self.fraction.len()
    }

    /// The number times `10^num_decimals` as an integer, if that is small enough.
    pub fn scaled(&self, num_decimals: usize) -> Option<i128> {
        let zeros = num_decimals.checked_sub(self.fraction.len())?;
        if self.whole.len() + num_decimals > 36 {
            return None;
        }
        let digits = format!("{}{}{}", self.whole, self.fraction, "0".repeat(zeros));
        let value: i128 = digits.parse().ok()?;
        Some(if self.is_negative { -value } else { value })
    }

    /// An integer divided by `10^num_decimals`.
    pub fn of_scaled(value: i128, num_decimals: usize) -> Option<Self> {
        Self::parse(&format!("{value}e-{num_decimals}"))
    }

    /// The texts that mean this number, without an exponent.
    pub fn spellings(&self) -> String {
        let sign = match (self.is_zero(), self.is_negative) {
            (true, _) => "-?",
            (_, true) => "-",
            _ => "",
        };
        let fraction = match self.fraction.is_empty() {
            true => r"(?:\.0+)?".to_owned(),
            false => format!(r"\.{}0*", self.fraction),
        };
        format!("{sign}{}{fraction}", self.whole)
    }

    fn size(&self) -> (usize, &str, &str) {
        (self.whole.len(), &self.whole, &self.fraction)
    }
}

impl PartialOrd for Decimal {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Decimal {
    fn cmp(&self, other: &Self) -> Ordering {
        match (self.is_negative, other.is_negative) {
            (false, false) => self.size().cmp(&other.size()),
            (true, true) => other.size().cmp(&self.size()),
            (true, false) => Ordering::Less,
            (false, true) => Ordering::Greater,
        }
    }
}

/// Texts of integers. With more digits, and exponents, numbers could become larger than any that programs read.
pub(super) const INTEGER: &str = "(?:0|-?[1-9][0-9]{0,99})";

/// Texts of numbers without an exponent.
pub(super) const PLAIN: &str = r"-?(?:0|[1-9][0-9]{0,99})(?:\.[0-9]{1,100})?";

/// Texts of numbers.
pub(super) const NUMBER: &str =
    r"-?(?:0|[1-9][0-9]{0,99})(?:\.[0-9]{1,100})?(?:[eE][+\-]?[0-9]{1,2})?";

/// Texts of numbers that are no integers.
pub(super) const FRACTION: &str = r"-?(?:0|[1-9][0-9]{0,99})\.[0-9]{0,49}[1-9][0-9]{0,49}";

/// Texts of numbers of few enough digits that a double has them all.
pub(super) const SHORT: &str = r"-?(?:0|[1-9][0-9]{0,11})(?:\.[0-9]{1,12})?";

/// Texts of numbers with at most this many digits behind the point, other than zeros.
pub(super) fn with_decimals(num: usize) -> String {
    format!(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]{{1,{num}}}0*)?")
}

/// Texts of numbers that are at least, or more than, the bound.
pub(super) fn from(bound: &Bound) -> String {
    let Bound {
        value,
        is_exclusive,
    } = bound;
    match value.is_negative {
        false => upwards(value, *is_exclusive),
        true => format!("(?:{UNSIGNED}|-(?:{}))", downwards(value, *is_exclusive)),
    }
}

/// Texts of numbers that are at most, or less than, the bound.
pub(super) fn up_to(bound: &Bound) -> String {
    let Bound {
        value,
        is_exclusive,
    } = bound;
    match value.is_negative {
        false => {
            let own = downwards(value, *is_exclusive);
            let below = match value.is_zero() && *is_exclusive {
                true => upwards(value, true),
                false => UNSIGNED.to_owned(),
            };
            format!("(?:{own}|-(?:{below}))")
        }
        true => format!("-(?:{})", upwards(value, *is_exclusive)),
    }
}

const UNSIGNED: &str = r"(?:0|[1-9][0-9]*)(?:\.[0-9]+)?";

/// Unsigned texts of at least, or more than, the size of a number.
fn upwards(value: &Decimal, is_exclusive: bool) -> String {
    let mut all = vec![format!(r"(?:{})(?:\.[0-9]+)?", wholes_above(&value.whole))];
    let fraction = &value.fraction;
    let mut fractions = Vec::new();
    for (i, digit) in fraction.bytes().enumerate() {
        if digit < b'9' {
            fractions.push(format!(
                "{}[{}-9][0-9]*",
                &fraction[..i],
                char::from(digit + 1)
            ));
        }
    }
    fractions.push(format!("{fraction}[0-9]*[1-9][0-9]*"));
    if !is_exclusive {
        fractions.push(match fraction.is_empty() {
            true => "0+".to_owned(),
            false => format!("{fraction}0*"),
        });
    }
    let is_optional = !is_exclusive && fraction.is_empty();
    let optional = if is_optional { "?" } else { "" };
    all.push(format!(
        r"{}(?:\.(?:{})){optional}",
        value.whole,
        fractions.join("|")
    ));
    format!("(?:{})", all.join("|"))
}

/// Unsigned texts of at most, or less than, the size of a number. May match nothing.
fn downwards(value: &Decimal, is_exclusive: bool) -> String {
    let mut all: Vec<String> = wholes_below(&value.whole)
        .into_iter()
        .map(|whole| format!(r"{whole}(?:\.[0-9]+)?"))
        .collect();
    let fraction = &value.fraction;
    let mut fractions = Vec::new();
    for (i, digit) in fraction.bytes().enumerate() {
        if digit > b'0' {
            fractions.push(format!(
                "{}[0-{}][0-9]*",
                &fraction[..i],
                char::from(digit - 1)
            ));
        }
        if i > 0 {
            fractions.push(fraction[..i].to_owned());
        }
    }
    if !is_exclusive {
        fractions.push(match fraction.is_empty() {
            true => "0+".to_owned(),
            false => format!("{fraction}0*"),
        });
    }
    if !fractions.is_empty() {
        all.push(format!(
            r"{}(?:\.(?:{}))?",
            value.whole,
            fractions.join("|")
        ));
    }
    match all.is_empty() {
        // No text.
        true => super::text::NO_CHAR.to_owned(),
        false => format!("(?:{})", all.join("|")),
    }
}

/// Integers above one.
fn wholes_above(whole: &str) -> String {
    let len = whole.len();
    let mut all = vec![format!("[1-9][0-9]{{{len},}}")];
    for (i, digit) in whole.bytes().enumerate() {
        if digit < b'9' {
            let next = char::from(digit + 1);
            all.push(format!("{}[{next}-9][0-9]{{{}}}", &whole[..i], len - i - 1));
        }
    }
    all.join("|")
}

/// Integers below one that is not negative.
fn wholes_below(whole: &str) -> Vec<String> {
    let len = whole.len();
    let mut all = Vec::new();
    if whole != "0" {
        all.push("0".to_owned());
    }
    if len > 1 {
        all.push(format!("[1-9][0-9]{{0,{}}}", len - 2));
    }
    for (i, digit) in whole.bytes().enumerate() {
        let first = if i == 0 { b'1' } else { b'0' };
        if digit > first {
            let (first, last) = (char::from(first), char::from(digit - 1));
            all.push(format!(
                "{}[{first}-{last}][0-9]{{{}}}",
                &whole[..i],
                len - i - 1
            ));
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decimal(text: &str) -> Decimal {
        Decimal::parse(text).unwrap_or_else(|| panic!("{text}"))
    }

    #[test]
    fn every_digit_of_a_number_is_kept() {
        for (text, expected) in [
            ("9007199254740993", "9007199254740993"),
            ("-18446744073709551615", "-18446744073709551615"),
            ("1e2", "100"),
            ("1.50e-3", "0.0015"),
            ("120E-1", "12"),
            ("-0.0", "0"),
            ("0012", "12"),
            ("0.1", "0.1"),
        ] {
            assert_eq!(decimal(text).text(), expected);
        }
        assert_eq!(Decimal::parse("1e999"), None);
        let number = |text: &str| serde_json::from_str::<Number>(text).expect("a number");
        assert_eq!(
            Decimal::of(&number("123456789012345678901")),
            None,
            "it was rounded"
        );
        assert_eq!(
            Decimal::of(&number("1e300")).map(|it| it.text().len()),
            Some(301)
        );
    }

    /// Numbers around borders of digits, as integers of thousandths.
    fn samples() -> Vec<i64> {
        let near = |center: i64| (center - 12..=center + 12).step_by(1);
        let centers = [
            0, 5, 10, 90, 100, 125, 900, 1000, 1250, 9990, 10_000, 99_990, 100_000, 123_450,
        ];
        centers
            .iter()
            .flat_map(|&it| near(it).chain(near(-it)))
            .collect()
    }

    #[test]
    fn bounds_are_those_of_arithmetic() {
        let text = |thousandths: i64| decimal(&format!("{thousandths}e-3")).text();
        let samples = samples();
        for &bound in samples.iter().step_by(3) {
            for is_exclusive in [false, true] {
                let value = decimal(&text(bound));
                let bound_of = Bound {
                    value,
                    is_exclusive,
                };
                let matcher =
                    |regex: String| regex::Regex::new(&format!("^(?:{regex})$")).expect("good");
                let (lower, upper) = (matcher(from(&bound_of)), matcher(up_to(&bound_of)));
                for &number in &samples {
                    let spelled = text(number);
                    let padded = match spelled.contains('.') {
                        true => format!("{spelled}00"),
                        false => format!("{spelled}.00"),
                    };
                    for spelled in [spelled, padded] {
                        let is_equal = number == bound && !is_exclusive;
                        assert_eq!(
                            lower.is_match(&spelled),
                            number > bound || is_equal,
                            "{spelled} from {bound_of:?}"
                        );
                        assert_eq!(
                            upper.is_match(&spelled),
                            number < bound || is_equal,
                            "{spelled} up to {bound_of:?}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn bounds_keep_digits_beyond_those_of_a_double() {
        let value = decimal("9007199254740993");
        let bound = Bound {
            value,
            is_exclusive: false,
        };
        let lower = regex::Regex::new(&format!("^{}$", from(&bound))).expect("good");
        let upper = regex::Regex::new(&format!("^{}$", up_to(&bound))).expect("good");
        for (text, is_lower, is_upper) in [
            ("9007199254740992", false, true),
            ("9007199254740993", true, true),
            ("9007199254740994", true, false),
        ] {
            assert_eq!(lower.is_match(text), is_lower, "{text}");
            assert_eq!(upper.is_match(text), is_upper, "{text}");
        }
    }
}
