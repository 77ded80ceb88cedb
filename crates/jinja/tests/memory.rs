//! The budget of bytes is an account of the memory that is used. The only test of its program: it looks at all memory.

use inflight_jinja::{Limits, Template};
use serde_json::json;

/// The most memory that this program has held.
fn peak_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux");
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmHWM:"))
        .expect("a line");
    line.trim()
        .trim_end_matches(" kB")
        .parse()
        .expect("a number")
}

#[test]
fn memory_stays_within_the_budget() {
    let text = "x".repeat(1_000_000);
    let variables = json!({"text": text, "long": vec![1; 100_000], "words": "a ".repeat(500_000)});
    let variables = variables.as_object().expect("an object");
    for source in [
        "{% set ns = namespace(a='xx') %}{% for i in range(200) %}{% set ns.a = ns.a + ns.a %}{% endfor %}",
        "{% set ns = namespace(a=[1]) %}{% for i in range(200) %}{% set ns.a = ns.a + ns.a %}{% endfor %}",
        "{% set ns = namespace(a=[]) %}{% for i in range(100000) %}{% set ns.a = ns.a + [i] %}{% endfor %}",
        "{% set ns = namespace(a={}) %}{% for i in range(100000) %}{% set ns.a = dict(ns.a, **{i|string: i}) %}{% endfor %}",
        "{% set ns = namespace(a=[]) %}{% for i in range(1000) %}{% set ns.a = [ns.a, words.split()] %}{% if i % 90 == 0 %}{% set ns.a = [] %}{% endif %}{% endfor %}",
        "{% set ns = namespace(a='') %}{% for i in range(1000) %}{% set ns.a = [text|list, ns.a]|string %}{% endfor %}",
        "{% for i in range(1000) %}{% set a = text.title() ~ text|title ~ text|capitalize %}{% endfor %}",
        "{% for i in range(1000) %}{% set a = words|wordwrap(3) %}{% endfor %}",
        "{% for i in range(1000) %}{% set a = words|indent(1) ~ words|urlencode ~ words|e ~ words|striptags %}{% endfor %}",
        "{% for i in range(1000) %}{% set a = long|batch(1)|list %}{% set b = long|groupby(0)|list %}{% endfor %}",
        "{% for i in range(1000) %}{% set a = long|tojson(indent=100) %}{% endfor %}",
        "{% for i in range(1000) %}{% set a = long|map('string')|unique|list|sort %}{% endfor %}",
        "{% set ns = namespace(a=[]) %}{% for i in range(100000) %}{% set ns.a = ns.a + [namespace(a=i, b=i)] %}{% endfor %}",
        "{% set ns = namespace() %}{% for i in range(100000) %}{% macro f(a) %}{% endmacro %}{{ f(i) }}{% for j in [1] %}{% endfor %}{% endfor %}",
    ] {
        let template = Template::compile(source).expect("compiles");
        let variables = variables.iter().map(|(name, value)| (name.as_str(), value));
        drop(template.render(variables, &Limits::default(), &|_| Err(String::new())));
        // Growing a vector holds the old and the new one.
        let most = peak_kib();
        assert!(most < 512 << 10, "{source}: {most} KiB");
    }
}
