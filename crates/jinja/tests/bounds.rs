//! Whatever a template and its variables are, a rendering neither panics nor overflows the stack, and takes no more
//! work, memory and output than its limits allow.

use inflight_jinja::{Bound, Limits, RenderError, Template};
use serde_json::{Value, json};

/// Stack of the threads that render here: less than threads of programs have.
const STACK: usize = 1 << 20;

fn rendered(source: &str, variables: &Value) -> Result<String, RenderError> {
    let template = Template::compile(source).unwrap_or_else(|error| panic!("{source}: {error}"));
    let variables = variables.as_object().expect("an object");
    let clock = |_: &str| Err("no clock".to_owned());
    let variables = variables.iter().map(|(name, value)| (name.as_str(), value));
    template.render(variables, &Limits::default(), &clock)
}

/// The bound that a template exceeds, none if it fails otherwise or renders; on a small stack.
fn bound(source: &str) -> Option<Bound> {
    let source = source.to_owned();
    let rendering = std::thread::Builder::new()
        .stack_size(STACK)
        .spawn(move || {
            let variables = json!({"text": "x".repeat(1_000_000), "long": vec![1; 100_000]});
            match rendered(&source, &variables) {
                Err(RenderError::OutOfBudget(bound)) => Some(bound),
                _ => None,
            }
        });
    rendering.expect("a thread").join().expect("no panic")
}

#[test]
fn texts_are_not_made_that_do_not_fit() {
    for source in [
        "{{ 'x' * 10**10 }}",
        "{{ 10**10 * 'x' }}",
        "{{ [1] * 10**10 }}",
        "{{ (1, 2) * 10**30 }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (10**10, 1) }}",
        "{{ '%.1000000000d' % 1 }}",
        "{{ '%1000000000s' % 'a' }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ '{:{}}'.format('a', 10**9) }}",
        "{{ '{:>1000000000}'.format('a') }}",
        "{{ 'a'.center(10**9) }}",
        "{{ 'a'.ljust(10**18) }}",
        "{{ 'a'.rjust(10**38) }}",
        "{{ 'a'.zfill(10**10) }}",
        "{{ 'a'|center(10**9) }}",
        "{{ 'a'|indent(10**9) }}",
        "{{ 'a\\tb'.expandtabs(10**9) }}",
        "{{ 'a'|indent(10**38) }}",
        "{{ text.replace('', text) }}",
        "{{ text|replace('x', text) }}",
        "{{ text|list|join(text) }}",
        "{{ text.join(text) }}",
        "{{ text.translate({120: text}) }}",
        "{{ long|tojson(indent=10**9) }}",
        "{{ long|tojson(indent=10**7) }}",
        "{{ long|tojson(separators=(text, text)) }}",
        "{{ text|list|map('upper')|join(text) }}",
        "{{ text|wordwrap(1, wrapstring=text) }}",
        "{{ [1]|batch(10**10, 0)|list }}",
        "{{ [1]|slice(10**9)|list }}",
        "{{ 'a{}'.format(text * 100) * 100 }}",
        "{% set ns = namespace(a='xx') %}{% for i in range(200) %}{% set ns.a = ns.a + ns.a %}{% endfor %}",
        "{% set ns = namespace(a='xx') %}{% for i in range(200) %}{% set ns.a = ns.a ~ ns.a %}{% endfor %}",
        "{% set ns = namespace(a='xx') %}{% for i in range(200) %}{% set ns.a %}{{ ns.a }}{{ ns.a }}{% endset %}{% endfor %}",
        "{% set ns = namespace(a=[1]) %}{% for i in range(200) %}{% set ns.a = ns.a + ns.a %}{% endfor %}",
        "{% set ns = namespace(a='{0}{0}') %}{% for i in range(60) %}{% set ns.a = ns.a.format(ns.a) %}{% endfor %}",
        "{% set ns = namespace(a='%s') %}{% for i in range(60) %}{% set ns.a = (ns.a ~ '%s')|replace('%s', ns.a) %}{% endfor %}",
        "{% for i in range(300) %}{% set a = text|upper %}{% endfor %}",
        "{% for i in range(1000) %}{% set a = text[1:] %}{% endfor %}",
        "{% for i in range(1000) %}{% set a = [text]|string %}{% endfor %}",
        "{% for i in range(1000) %}{% set a = text.split('x') %}{% endfor %}",
        "{% macro f() %}{{ text }}{% endmacro %}{% for i in range(1000) %}{% set a = f() %}{% endfor %}",
        // Values in each other twice, whose text has no end.
        "{% set ns = namespace(a=['x']) %}{% for i in range(90) %}{% set ns.a = [ns.a, ns.a] %}{% endfor %}{{ ns.a }}",
        "{% set ns = namespace(a=['x']) %}{% for i in range(90) %}{% set ns.a = [ns.a, ns.a] %}{% endfor %}{{ ns.a|tojson }}",
        "{% set ns = namespace(a=('x',)) %}{% for i in range(90) %}{% set ns.a = (ns.a, ns.a) %}{% endfor %}{{ {ns.a: 1} }}",
    ] {
        let found = bound(source);
        assert!(
            matches!(found, Some(Bound::Bytes | Bound::Output | Bound::Steps)),
            "{source}: {found:?}"
        );
    }
}

#[test]
fn work_ends() {
    let nested = "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}";
    for source in [
        nested,
        "{% for i in range(100000) %}{% set a = 'y' in text %}{% endfor %}",
        "{% for i in range(100000) %}{% set a = text.find('y') %}{% endfor %}",
        "{% for i in range(100000) %}{% set a = text.count('y') %}{% endfor %}",
        "{% for i in range(100000) %}{% set a = text == text ~ '' %}{% endfor %}",
        "{% for i in range(100000) %}{% set a = 2 in long %}{% endfor %}",
        "{% for i in range(100000) %}{% set a = long.count(2) %}{% endfor %}",
        "{% for i in range(100000) %}{% set a = long|sum %}{% endfor %}",
        "{% for i in range(100000) %}{% set a = long|max %}{% endfor %}",
        "{% for i in range(1000) %}{% set a = long|sort %}{% endfor %}",
        "{% for i in range(100000) %}{% set a = long == long %}{% endfor %}",
        "{% for i in range(100000) %}{% set a = text.isalpha() %}{% endfor %}",
        "{% for i in range(100000) %}{% set a = text|wordcount %}{% endfor %}",
        "{% for i in range(100000) %}{% set a = text.strip('x') %}{% endfor %}",
        "{% for i in range(100000) %}{% set a = {text: 1} %}{% endfor %}",
        "{% for i in range(100000) %}{% set a = (text ~ 'é')|length %}{% endfor %}",
        "{% for i in range(100000) %}{% set a = text|map('upper')|select('eq', 'a')|list %}{% endfor %}",
        "{% set ns = namespace(a=['x']) %}{% for i in range(90) %}{% set ns.a = [ns.a, ns.a] %}{% endfor %}{{ ns.a == ns.a }}",
        "{% for i in [1] recursive %}{% for j in range(100000) %}{{ loop.index }}{% endfor %}{{ loop([1, 1, 1]) }}{% endfor %}",
    ] {
        assert!(bound(source).is_some(), "{source}");
    }
}

#[test]
fn output_is_bounded() {
    let wide = "{% for i in range(100) %}{{ text }}{% endfor %}";
    assert_eq!(bound(wide), Some(Bound::Output));
    let wide = "{% for i in range(100) %}{{ range(100000) | list }}{% endfor %}";
    assert!(bound(wide).is_some());
}

#[test]
fn recursion_is_bounded() {
    for source in [
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% macro f() %}{% call f() %}{% endcall %}{{ caller }}{% endmacro %}{{ f() }}",
        "{% macro f(x) %}{{ ([1]|map(attribute=0)|list, f(x))|string|upper|trim }}{% endmacro %}{{ f(1) }}",
        "{% macro f() %}{% if 1 %}{% for i in [1] %}{% with %}{% filter upper %}{% set a %}{{ f() }}{% endset %}{% endfilter %}{% endwith %}{% endfor %}{% endif %}{% endmacro %}{{ f() }}",
        "{% for i in [1] recursive %}{{ loop([1]) }}{% endfor %}",
        "{% block a %}{{ self.a() }}{% endblock %}",
        "{% set ns = namespace(a=[]) %}{% for i in range(100000) %}{% set ns.a = [ns.a] %}{% endfor %}",
        "{% set ns = namespace(a={}) %}{% for i in range(100000) %}{% set ns.a = {'a': ns.a} %}{% endfor %}",
        "{% set ns = namespace(a=()) %}{% for i in range(100000) %}{% set ns.a = (ns.a,) %}{% endfor %}",
        "{% set ns = namespace(a=[]) %}{% for i in range(100000) %}{% set ns.a = [ns.a.count] %}{% endfor %}",
        "{% set ns = namespace(a=[1]) %}{% for i in range(10000) %}{% set ns.a = ns.a|map('string') %}{% endfor %}{{ ns.a|list }}",
        "{% set ns = namespace(a=none) %}{% for i in range(50000) %}{% set ns.a = cycler(ns.a) %}{% endfor %}",
        "{% set ns = namespace(a=none) %}{% for i in range(50000) %}{% set ns.a = joiner(ns.a) %}{% endfor %}",
        "{% set ns = namespace() %}{% set ns.ns = ns %}{{ ns }}",
        "{% set ns = namespace(x=none) %}{% for i in range(10000) %}{% set ns.x = namespace(x=ns.x) %}{% endfor %}{{ ns }}",
    ] {
        assert_eq!(bound(source), Some(Bound::Recursion), "{source}");
    }
}

/// Reference cycles and long chains are freed without recursion.
#[test]
fn long_chains_are_freed() {
    for source in [
        "{% set ns = namespace(a=[1]) %}{% for i in range(50000) %}{% set ns.a = ns.a|map('string') %}{% endfor %}",
        "{% set ns = namespace(a=none) %}{% for i in range(50000) %}{% set ns.a = namespace(a=ns.a) %}{% endfor %}",
        "{% set ns = namespace(a=none) %}{% for i in range(50000) %}{% for j in [ns.a] %}{% set ns.a = loop %}{% endfor %}{% endfor %}",
        "{% set ns = namespace(a=none) %}{% for i in range(20000) %}{% set p = ns.a %}{% macro f() %}{{ p }}{% endmacro %}{% set ns.a = f %}{% endfor %}",
        "{% macro f(p, n) %}{% macro g() %}{{ p }}{% endmacro %}{% set n.a = g %}{% endmacro %}{% set ns = namespace(a=0) %}{% for i in range(9000) %}{{ f(ns.a, ns) }}{% endfor %}",
    ] {
        assert_eq!(bound(source), None, "{source}");
    }
}

#[test]
fn templates_cannot_nest_without_end() {
    let deep = |open: &str, middle: &str, close: &str| {
        let (open, close) = (open.repeat(100_000), close.repeat(100_000));
        format!("{{{{ {open}{middle}{close} }}}}")
    };
    let sources = vec![
        deep("(", "1", ")"),
        deep("[", "1", "]"),
        deep("{1:", "1", "}"),
        deep("not ", "1", ""),
        deep("- ", "1", ""),
        deep("", "1", "+1"),
        deep("", "1", "|abs"),
        deep("", "x", ".y"),
        deep("", "x", "[0]"),
        deep("", "x", "()"),
        deep("", "1", " is odd"),
        deep("", "1", " and 1"),
        deep("", "1", " or 1"),
        deep("1 if 1 else ", "1", ""),
        deep("", "1", " if 1"),
        deep("f(", "1", ")"),
        deep("x[", "1", "]"),
        deep("1|default(", "1", ")"),
        "{% if 1 %}".repeat(100_000),
        "{% for i in x %}".repeat(100_000),
        "{% set x %}".repeat(100_000),
        "{% macro f() %}".repeat(100_000),
        format!(
            "{{% for {}a{} in x %}}{{% endfor %}}",
            "(".repeat(100_000),
            ")".repeat(100_000)
        ),
    ];
    for source in sources {
        let start = source[..40].to_owned();
        let compiling = std::thread::Builder::new().stack_size(STACK);
        let compiling = compiling.spawn(move || Template::compile(&source).map(drop));
        let error = compiling.expect("a thread").join().expect("no panic");
        assert!(error.is_err(), "{start}");
    }
}

/// The deepest nesting that the limits allow fits the stack.
#[test]
fn the_deepest_templates_fit_the_stack() {
    let deepest = |nested: &dyn Fn(usize) -> String| {
        let deepest = (1..300)
            .rev()
            .map(nested)
            .find(|source| Template::compile(source).is_ok());
        deepest.expect("one compiles")
    };
    for source in [
        deepest(&|n| format!("{{{{ {}1{} }}}}", "[".repeat(n), "]".repeat(n))),
        deepest(&|n| format!("{{{{ 1{} }}}}", "+1".repeat(n))),
        deepest(&|n| {
            format!(
                "{{{{ {}1{} }}}}",
                "[1]|map('default', ".repeat(n),
                ")|list".repeat(n)
            )
        }),
        deepest(&|n| format!("{}x{}", "{% if 1 %}".repeat(n), "{% endif %}".repeat(n))),
        deepest(&|n| {
            format!(
                "{}x{}",
                "{% for i in [1] %}".repeat(n),
                "{% endfor %}".repeat(n)
            )
        }),
        deepest(&|n| {
            format!(
                "{}x{}",
                "{% filter upper %}".repeat(n),
                "{% endfilter %}".repeat(n)
            )
        }),
    ] {
        let found = bound(&source);
        assert!(
            found.is_none_or(|bound| bound == Bound::Recursion),
            "{source}: {found:?}"
        );
    }
}

#[test]
fn deep_variables_are_rendered_or_refused() {
    let nested = |levels: usize| {
        let mut value = json!("x");
        for _ in 0..levels {
            value = json!([value]);
        }
        json!({"deep": value})
    };
    let found = rendered(
        "{{ deep }}{{ deep|tojson }}{{ deep == deep }}",
        &nested(127),
    )
    .expect("rendered");
    assert!(found.starts_with(&"[".repeat(127)));
    let refused = std::thread::spawn(move || {
        let deep = nested(1000);
        let found = rendered("{{ deep }}", &deep);
        // serde_json frees nested values by recursion.
        std::mem::forget(deep);
        found
    });
    assert_eq!(
        refused.join().expect("no panic"),
        Err(RenderError::OutOfBudget(Bound::Recursion))
    );
}
