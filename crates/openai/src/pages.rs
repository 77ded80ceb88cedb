//! Lists that are read in pages.

use serde_json::{Value, json};

use crate::Error;
use crate::body::wrong;
use crate::response_store::{Page, PageQuery};

/// The most items of a page, and those of one that does not say.
const MAX_PAGE: usize = 100;
const DEFAULT_PAGE: usize = 20;

/// The items that the query of an address asks for.
///
/// # Errors
/// A number or a word that is none of those.
pub fn page_query(query: &str) -> Result<PageQuery, Error> {
    let mut found = PageQuery {
        after: None,
        max_items: DEFAULT_PAGE,
        is_descending: true,
    };
    for (name, value) in query.split('&').filter_map(|pair| pair.split_once('=')) {
        match name {
            "after" => found.after = Some(value.to_owned()),
            "limit" => {
                let number = value.parse().ok();
                let number = number.filter(|number| (1..=MAX_PAGE).contains(number));
                let expected = format!("a whole number from 1 to {MAX_PAGE}");
                found.max_items = number.ok_or_else(|| wrong(name, &json!(value), &expected))?;
            }
            "order" if value == "asc" || value == "desc" => found.is_descending = value == "desc",
            "order" => return Err(wrong(name, &json!(value), "'asc' or 'desc'")),
            // Other parameters, such as `include`, ask for fields that items here do not have.
            _ => {}
        }
    }
    Ok(found)
}

/// A page in OpenAI's form.
pub fn list_of(page: Page) -> Value {
    let id = |item: Option<&Value>| item.and_then(|item| item.get("id")).cloned();
    json!({
        "object": "list",
        "first_id": id(page.items.first()),
        "last_id": id(page.items.last()),
        "has_more": page.has_more,
        "data": page.items,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_described_by_a_query() {
        let query = |after: Option<&str>, max_items, is_descending| PageQuery {
            after: after.map(str::to_owned),
            max_items,
            is_descending,
        };
        for (text, expected) in [
            ("", query(None, 20, true)),
            ("limit=100&order=asc", query(None, 100, false)),
            (
                "include[]=x&after=msg-1&order=desc",
                query(Some("msg-1"), 20, true),
            ),
        ] {
            assert_eq!(page_query(text), Ok(expected), "{text}");
        }
        for (text, param) in [
            ("limit=0", "limit"),
            ("limit=101", "limit"),
            ("order=up", "order"),
        ] {
            let error = page_query(text).expect_err(text);
            assert_eq!(error.param.as_deref(), Some(param));
        }
    }
}
