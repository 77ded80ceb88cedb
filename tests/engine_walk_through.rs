//! The walk-through of the founding documents, step by step, as its statistics tell it. `xtask` draws the
//! same two runs for the documentation.

mod walk_through;

use serde_json::Value;

/// The columns of a table: the statistics' own names, shortened above.
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

/// A row for each record: the step, the fields, and what each request did: `c5` computes 5 tokens of its
/// context, `g` generates, `w` waits, `.` has ended.
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
        stage => panic!("request {id} is {stage}, and there is room for everybody"),
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
    // In step 1 there are two tokens left, too few for R3. In step 2 the two that generate and two
    // contexts make twelve; R5 would be a fifth request. When R1 has ended, R5 takes its place.
    assert_table(
        &walk_through::statistics_file(false),
        "
        step  active scheduled context generation tokens paused waiting blocks | R1 R2 R3 R4 R5
           1       5         2       2          0     10      0       3      6 | c5 c5  w  w  w
           2       5         4       2          2     10      0       1     12 |  g  g c5 c5  w
           3       5         4       0          4      0      0       1     14 |  g  g  g  g  w
           4       4         4       1          3      5      0       0     15 |  .  g  g  g c5
           5       4         4       0          4      0      0       0     16 |  .  g  g  g  g
           6       3         3       0          3      0      0       0     14 |  .  .  g  g  g
           7       1         1       0          1      0      0       0      4 |  .  .  .  .  g
           8       1         1       0          1      0      0       0      5 |  .  .  .  .  g
        ",
    );
}

#[test]
fn with_chunked_context() {
    // The two tokens that are left in step 1 are a block: R3 starts with them, and has three to go.
    assert_table(
        &walk_through::statistics_file(true),
        "
        step  active scheduled context generation tokens paused waiting blocks | R1 R2 R3 R4 R5
           1       5         3       3          0     12      0       2      9 | c5 c5 c2  w  w
           2       5         4       2          2      8      0       1     12 |  g  g c3 c5  w
           3       5         4       0          4      0      0       1     14 |  g  g  g  g  w
           4       4         4       1          3      5      0       0     15 |  .  g  g  g c5
           5       4         4       0          4      0      0       0     16 |  .  g  g  g  g
           6       3         3       0          3      0      0       0     14 |  .  .  g  g  g
           7       1         1       0          1      0      0       0      4 |  .  .  .  .  g
           8       1         1       0          1      0      0       0      5 |  .  .  .  .  g
        ",
    );
}
