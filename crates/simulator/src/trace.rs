//! Workloads from CSV files with the columns `arrival` (seconds), `input` and `output` (tokens), in any
//! order.

use std::collections::BTreeMap;

use crate::Result;
use crate::time::Time;
use crate::workload::{Request, Workload};

const COLUMNS: [&str; 3] = ["arrival", "input", "output"];

/// Reads a trace. Rows may be in any order; requests with the same arrival time are sent in file order.
///
/// # Errors
/// The line and the column that cannot be read.
pub fn read(text: &str) -> Result<Workload> {
    let mut lines = text
        .lines()
        .enumerate()
        .filter(|(_, line)| !line.trim().is_empty());
    let (_, header) = lines.next().ok_or("the trace is empty")?;
    let names: BTreeMap<_, _> = header
        .split(',')
        .enumerate()
        .map(|(place, name)| (name.trim(), place))
        .collect();
    let place = |column| {
        let place = names.get(column).copied();
        place.ok_or_else(|| format!("line 1: missing column '{column}': {}", COLUMNS.join(",")))
    };
    let [arrival, input, output] = [place(COLUMNS[0])?, place(COLUMNS[1])?, place(COLUMNS[2])?];

    let mut requests = Vec::new();
    for (index, line) in lines {
        let cells: Vec<_> = line.split(',').map(str::trim).collect();
        let cell = |place: usize| cells.get(place).copied().unwrap_or_default();
        let wrong = |column: &str, place: usize, expected: &str| {
            format!(
                "line {}: {column} '{}' is not {expected}",
                index + 1,
                cell(place)
            )
        };
        let seconds: f64 = cell(arrival).parse().unwrap_or(f64::NAN);
        if !(0.0..1e9).contains(&seconds) {
            return Err(wrong(COLUMNS[0], arrival, "a time in seconds").into());
        }
        let length = |column: &str, place: usize| match cell(place).parse() {
            Ok(length @ 1..=0x7fff_ffff) => Ok(length),
            _ => Err(wrong(column, place, "a number of tokens")),
        };
        requests.push(Request {
            sent: Time::from_s(seconds),
            num_input_tokens: length(COLUMNS[1], input)?,
            num_output_tokens: length(COLUMNS[2], output)?,
        });
    }
    requests.sort_by_key(|request| request.sent);
    Ok(Workload {
        requests,
        concurrency: None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_found_by_name_and_requests_sorted_by_arrival() {
        let text = "input,arrival, output ,note\n5,0.5,3,x\n\n7,0.25,1,y\n9,0.5,2,z\n";
        let workload = read(text).expect("a trace");
        let request = |ms: u64, num_input_tokens, num_output_tokens| Request {
            sent: Time(ms * 1_000_000),
            num_input_tokens,
            num_output_tokens,
        };
        let expected = [request(250, 7, 1), request(500, 5, 3), request(500, 9, 2)];
        assert_eq!(
            (workload.requests.as_slice(), workload.concurrency),
            (&expected[..], None)
        );
    }

    #[test]
    fn errors_name_the_line_and_the_column() {
        for (text, expected) in [
            ("", "the trace is empty"),
            (
                "arrival,input\n",
                "line 1: missing column 'output': arrival,input,output",
            ),
            (
                "arrival,input,output\n0,1,1\nx,1,1",
                "line 3: arrival 'x' is not a time in seconds",
            ),
            (
                "arrival,input,output\n-1,1,1",
                "line 2: arrival '-1' is not a time in seconds",
            ),
            (
                "arrival,input,output\n0,0,1",
                "line 2: input '0' is not a number of tokens",
            ),
            (
                "arrival,input,output\n0,1",
                "line 2: output '' is not a number of tokens",
            ),
        ] {
            assert_eq!(read(text).expect_err(text).to_string(), expected);
        }
    }
}
