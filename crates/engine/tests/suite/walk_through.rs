//! The walk-through of the documentation, checked step by step by its statistics. `xtask` draws the same two runs for
//! the documentation.

use serde_json::Value;

use crate::documented_runs;

/// The columns of a table: field names of the statistics, with their abbreviations.
const FIELDS: [&str; 8] = [
    "Active Request Count",
    "Scheduled Requests",
    "Context Requests",
    "Generation Requests",
    "Total Context Tokens",
    "Paused Requests",
    "Waiting Requests",
    "Used KV cache blocks",
];

/// One row per record: the step, the fields, and the stage of each request: `c5` computes 5 tokens of its context,
/// `g` generates, `w` waits, `.` has ended.
fn table(statistics_file: &str) -> String {
    let records = statistics_file.lines();
    let row = |line: &str| {
        let record: Value = serde_json::from_str(line).expect("a JSON object a line");
        let number = |field: &str| {
            record[field]
                .as_u64()
                .unwrap_or_else(|| panic!("no {field}"))
        };
        let mut cells = vec![number("Iteration Counter").to_string()];
        cells.extend(FIELDS.map(|field| number(field).to_string()));
        cells.push("|".into());
        cells.extend((1..=5).map(|id| stage(&record["Requests"], id)));
        cells.join(" ")
    };
    records.map(row).collect::<Vec<_>>().join("\n")
}

fn stage(requests: &Value, id: u64) -> String {
    let requests = requests.as_array().expect("an array");
    let Some(request) = requests.iter().find(|request| request["id"] == id) else {
        return ".".into();
    };
    match request["stage"].as_str().expect("a name") {
        "context" => format!("c{}", request["tokens"]),
        "generation" => "g".into(),
        "waiting" => "w".into(),
        stage => panic!("request {id} is {stage}, although there is room for all"),
    }
}

fn assert_table(statistics_file: &str, expected: &str) {
    let found = table(statistics_file);
    let words = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
    let expected: Vec<_> = expected.trim().lines().skip(1).map(words).collect();
    assert_eq!(found.lines().collect::<Vec<_>>(), expected, "{found}");
}

#[test]
fn without_chunked_context() {
    // Iteration 1: two tokens of the budget are left, too few for R3.
    // Iteration 2: R1 and R2 generate, R3 and R4 join; R5 would be a fifth request.
    // Iteration 3: R1's second token was its stop token, and R5 takes its place.
    assert_table(
        &documented_runs::statistics_file(false),
        "
        step  active scheduled context generation tokens paused waiting blocks | R1 R2 R3 R4 R5
           1       5         2       2          0     10      0       3      6 | c5 c5  w  w  w
           2       5         4       2          2      6      0       1     10 |  g  g c3 c3  w
           3       4         4       1          3      4      0       0     10 |  .  g  g  g c4
           4       4         4       0          4      0      0       0     13 |  .  g  g  g  g
           5       4         4       0          4      0      0       0     14 |  .  g  g  g  g
           6       3         3       0          3      0      0       0     12 |  .  .  g  g  g
           7       1         1       0          1      0      0       0      4 |  .  .  .  .  g
        ",
    );
}

#[test]
fn with_chunked_context() {
    // The two tokens left in iteration 1 are one block: R3 starts with them, and one token of its context remains.
    assert_table(
        &documented_runs::statistics_file(true),
        "
        step  active scheduled context generation tokens paused waiting blocks | R1 R2 R3 R4 R5
           1       5         3       3          0     12      0       2      8 | c5 c5 c2  w  w
           2       5         4       2          2      4      0       1     10 |  g  g c1 c3  w
           3       4         4       1          3      4      0       0     10 |  .  g  g  g c4
           4       4         4       0          4      0      0       0     13 |  .  g  g  g  g
           5       4         4       0          4      0      0       0     14 |  .  g  g  g  g
           6       3         3       0          3      0      0       0     12 |  .  .  g  g  g
           7       1         1       0          1      0      0       0      4 |  .  .  .  .  g
        ",
    );
}

#[test]
fn in_the_second_iteration_the_fifth_request_waits_for_a_slot_and_not_for_tokens() {
    for enable_chunked_context in [false, true] {
        let file = documented_runs::statistics_file(enable_chunked_context);
        let second: Value =
            serde_json::from_str(file.lines().nth(1).expect("two steps")).expect("JSON");
        let number = |field: &str| second[field].as_u64().expect("a number");
        let num_tokens = number("Total Context Tokens") + number("Generation Requests");
        let prompt = u64::from(documented_runs::NUM_PROMPT_TOKENS[4]);
        assert!(num_tokens + prompt <= u64::from(documented_runs::MAX_NUM_TOKENS.0));
        assert_eq!(
            number("Scheduled Requests"),
            u64::from(documented_runs::MAX_NUM_REQUESTS)
        );
        assert_eq!(stage(&second["Requests"], 5), "w");
    }
}
