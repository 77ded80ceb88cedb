//! The lines of a batch: requests, and their results.

use std::collections::HashSet;

use serde_json::{Value, json};

use crate::body::short;
use crate::ids;

/// The most lines of a file, as in OpenAI's API.
const MAX_LINES: usize = 50_000;
/// The most problems that are named.
const MAX_PROBLEMS: usize = 20;
/// The longest id of a line.
const MAX_ID_CHARS: usize = 512;

/// The request of a line.
#[derive(Clone, Debug, PartialEq)]
pub struct Line {
    /// Its index among the lines that are not empty.
    pub index: usize,
    /// The client's id.
    pub custom_id: String,
    /// The body of the request, as JSON: the values of all lines would take many times the file's memory.
    pub body: String,
}

/// The requests in a file for this path.
///
/// # Errors
/// The problems of lines, in OpenAI's form.
pub fn requests(content: &[u8], endpoint: &str) -> Result<Vec<Line>, Vec<Value>> {
    let problem = |line: Option<usize>, message: String| json!({"code": "invalid_request", "message": message, "line": line, "param": null});
    let Ok(content) = std::str::from_utf8(content) else {
        return Err(vec![problem(
            None,
            "the file is no text in UTF-8".to_owned(),
        )]);
    };
    let lines = content.lines().enumerate();
    let lines = lines.filter(|(_, line)| !line.trim().is_empty());
    let (mut requests, mut problems) = (Vec::new(), Vec::new());
    let mut ids = HashSet::new();
    for (number, text) in lines {
        let read = match requests.len() {
            MAX_LINES => Err(format!(
                "the file has more than {MAX_LINES} lines; divide it"
            )),
            index => read(text, index, endpoint),
        };
        let mut is_new = |line: &Line| match ids.insert(line.custom_id.clone()) {
            true => Ok(()),
            false => Err(format!(
                "'custom_id': '{}' is the id of an earlier line",
                line.custom_id
            )),
        };
        match read.and_then(|line| is_new(&line).map(|()| line)) {
            Ok(line) => requests.push(line),
            Err(message) => problems.push(problem(Some(number + 1), message)),
        }
        if problems.len() == MAX_PROBLEMS {
            break;
        }
    }
    if requests.is_empty() && problems.is_empty() {
        problems.push(problem(None, "the file has no lines".to_owned()));
    }
    match problems.is_empty() {
        true => Ok(requests),
        false => Err(problems),
    }
}

fn read(text: &str, index: usize, endpoint: &str) -> Result<Line, String> {
    let mut line: Value =
        serde_json::from_str(text).map_err(|error| format!("the line is not JSON: {error}"))?;
    let wrong = |name: &str, value: &Value, expected: &str| {
        Err(format!("'{name}': {} is not {expected}", short(value)))
    };
    if !line.is_object() {
        return Err("the line is no JSON object".to_owned());
    }
    let custom_id = match &line["custom_id"] {
        Value::String(id) if id.chars().nth(MAX_ID_CHARS).is_none() => id.clone(),
        other => return wrong("custom_id", other, "a text of at most 512 characters"),
    };
    if line["method"] != "POST" {
        return wrong("method", &line["method"], "POST");
    }
    if line["url"] != endpoint {
        return wrong(
            "url",
            &line["url"],
            &format!("{endpoint}, the endpoint of the batch"),
        );
    }
    let body = line["body"].take();
    match body.as_object() {
        None => wrong("body", &body, "an object"),
        Some(fields)
            if ["stream", "background"]
                .iter()
                .any(|name| fields.get(*name) == Some(&json!(true))) =>
        {
            Err("'stream' and 'background' have no use in a batch; leave them out".to_owned())
        }
        Some(_) => Ok(Line {
            index,
            custom_id,
            body: body.to_string(),
        }),
    }
}

/// The result of a line, as a line of a file.
pub fn result(custom_id: &str, status: u16, request_id: &str, body: &Value) -> String {
    let result = json!({
        "id": ids::id("batch_req-"),
        "custom_id": custom_id,
        "response": {"status_code": status, "request_id": request_id, "body": body},
        "error": null,
    });
    result.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATH: &str = "/v1/completions";

    fn line(id: &str) -> Value {
        json!({"custom_id": id, "method": "POST", "url": PATH, "body": {"model": "m"}})
    }

    fn requests_of(lines: &[Value]) -> Result<Vec<Line>, Vec<Value>> {
        let lines: Vec<_> = lines.iter().map(Value::to_string).collect();
        requests(lines.join("\n\n").as_bytes(), PATH)
    }

    #[test]
    fn each_line_is_a_request() {
        let lines = requests_of(&[line("a"), line("b")]).expect("sound");
        assert_eq!((lines[1].index, &lines[1].custom_id[..]), (1, "b"));
        assert_eq!(lines[0].body, r#"{"model":"m"}"#);
    }

    #[test]
    fn lines_that_are_wrong_are_named() {
        let with = |field: &str, value: Value| {
            let mut line = line("b");
            line[field] = value;
            line
        };
        for (wrong, words) in [
            (json!([]), "no JSON object"),
            (with("custom_id", json!(1)), "'custom_id'"),
            (with("custom_id", json!("x".repeat(513))), "'custom_id'"),
            (with("custom_id", json!("a")), "an earlier line"),
            (with("method", json!("GET")), "'method'"),
            (with("url", json!("/v1/files")), "'url'"),
            (with("body", json!("{}")), "'body'"),
            (with("body", json!({"stream": true})), "'stream'"),
        ] {
            let problems = requests_of(&[line("a"), wrong]).expect_err(words);
            let message = problems[0]["message"].as_str().expect("a text");
            assert!(
                message.contains(words) && problems[0]["line"] == 3,
                "{message}"
            );
        }
        assert_eq!(requests(b"{", PATH).expect_err("no JSON").len(), 1);
        for content in [&b""[..], b"\n\n", b"\xff"] {
            assert_eq!(requests(content, PATH).expect_err("no lines").len(), 1);
        }
        let many: Vec<_> = (0..50).map(|_| json!(1)).collect();
        assert_eq!(
            requests_of(&many).expect_err("no objects").len(),
            MAX_PROBLEMS
        );
    }
}
