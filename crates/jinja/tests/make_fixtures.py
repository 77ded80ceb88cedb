#!/usr/bin/env python3
"""Renders the templates of fixtures/templates.json with transformers into fixtures/rendered.json.

Run by hand, with transformers 5.24 and Jinja2 3.1.6: python make_fixtures.py
"""
import json
import pathlib

import jinja2
from transformers.utils import chat_template_utils

FIXTURES = pathlib.Path(__file__).parent / "fixtures"
CALL = {"city": "Oslo", "n": 3, "f": 1.0, "e": 1e-7, "big": 1e20, "l": [1, None, True], "z": {}}
VARIABLES = {
    "messages": [
        {"role": "system", "content": "Be <b>brief</b> & 'kind'."},
        {"role": "user", "content": 'Hi, "you"!\nHow é?'},
        {
            "role": "assistant",
            "content": "ok",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "w", "arguments": CALL}}],
        },
        {"role": "tool", "tool_call_id": "c1", "name": "w", "content": '{"t": 5}'},
        {"role": "user", "content": [{"type": "text", "text": "part 'one'"}, {"type": "text", "text": "two"}]},
    ],
    "tools": [
        {
            "type": "function",
            "function": {
                "name": "w",
                "description": "Weather <now>",
                "parameters": {
                    "type": "object",
                    "properties": {
                        "city": {"type": "string", "description": "City's"},
                        "n": {"type": "integer", "default": 3, "minimum": 1e-7},
                    },
                    "required": ["city"],
                },
            },
        }
    ],
    "documents": None,
    "add_generation_prompt": True,
    "bos_token": "<s>",
    "eos_token": "</s>",
    "keys": {"items": 1, "keys": [2], "get": "g", "update": "u", "name": "n", "_x": 3, "__class__": 4, "": 5, "a b": 6},
    "numbers": [3, 1.5, -2, 0, 1e300, 7],
    "words": ["pear", "Apple", "fig", "apple", "Fig"],
}


def rendered(source):
    try:
        compiled = chat_template_utils._compile_jinja_template(source)
        text = compiled.render(**json.loads(json.dumps(VARIABLES)))
        text.encode()
        return {"raised": "a text with an address"} if " at 0x" in text else {"text": text}
    except jinja2.TemplateSyntaxError as error:
        return {"raised": f"{type(error).__name__}: {error.message}"}
    except Exception as error:
        return {"raised": f"{type(error).__name__}: {error}"}


def main():
    templates = json.loads((FIXTURES / "templates.json").read_text())
    cases = [{"source": source, **rendered(source)} for source in templates]
    lines = ",\n".join(json.dumps(case, ensure_ascii=False) for case in cases)
    variables = json.dumps(VARIABLES, ensure_ascii=False)
    text = f'{{"variables": {variables},\n"cases": [\n{lines}\n]}}\n'
    (FIXTURES / "rendered.json").write_text(text)
    print(f"{len(cases)} templates, {sum('raised' in case for case in cases)} of which raise")


if __name__ == "__main__":
    main()
