//! Templates render as in Python and transformers, and bad ones are refused by file.

use super::*;
use crate::model::tokenizer::testing;
use serde_json::json;
use std::io::Write as _;

fn template(source: &str) -> ChatTemplate {
    ChatTemplate::from_source(source.to_owned(), "test.jinja", HashMap::new()).unwrap()
}

#[test]
fn json_is_written_as_python_writes_it() {
    let t = template("{{ tools[0] | tojson }}|{{ tools[0] | tojson(indent=2) }}");
    let tools = [json!({"a": [1, 2.0, "é<b>&'\""], "e": {}, "n": null, "t": true})];
    // Expected: json.dumps(tool, ensure_ascii=False) and the same with indent=2, CPython 3.11.
    let want = "{\"a\": [1, 2.0, \"é<b>&'\\\"\"], \"e\": {}, \"n\": null, \"t\": true}|{\n  \"a\": [\n    1,\n    2.0,\n    \"é<b>&'\\\"\"\n  ],\n  \"e\": {},\n  \"n\": null,\n  \"t\": true\n}";
    assert_eq!(t.render(&[], Some(&tools), false).unwrap(), want);
}

#[test]
fn content_parts_null_content_and_argument_text_are_one_form() {
    let t = template(
        "{% for m in messages %}[{{ m.content }}{% for c in m.tool_calls %}{{ c.function.arguments.a }}{% endfor %}]{% endfor %}",
    );
    let messages = [
        json!({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}),
        json!({"role": "assistant", "content": null,
               "tool_calls": [{"function": {"name": "f", "arguments": "{\"a\": 7}"}}]}),
    ];
    assert_eq!(t.render(&messages, None, false).unwrap(), "[ab][7]");
}

#[test]
fn exceptions_of_the_template_and_bad_templates_say_what_is_wrong() {
    let t = template("{{ raise_exception('roles must alternate') }}");
    let error = t.render(&[], None, false).unwrap_err();
    assert!(
        matches!(&error, TemplateError::Raised(m) if m == "roles must alternate"),
        "{error}"
    );
    let error = ChatTemplate::from_source("x\n{% if %}".into(), "bad.jinja", HashMap::new())
        .err()
        .unwrap();
    assert!(
        error.to_string().contains("bad.jinja") && error.to_string().contains("line 2"),
        "{error}"
    );
    let image = json!({"role": "user", "content": [{"type": "image_url", "image_url": {}}]});
    let error = template("x")
        .render(&[image], None, false)
        .unwrap_err()
        .to_string();
    assert!(error.contains("image_url"), "{error}");
}

#[test]
fn a_folder_gives_its_template_and_one_without_says_so() {
    let dir = tempfile::tempdir().unwrap();
    testing::write_folder(dir.path());
    let t = ChatTemplate::from_dir(dir.path()).unwrap();
    let text = t
        .render(&[json!({"role": "user", "content": "hi"})], None, true)
        .unwrap();
    assert_eq!(text, "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n");
    let empty = tempfile::tempdir().unwrap();
    assert!(matches!(
        ChatTemplate::from_dir(empty.path()),
        Err(TemplateError::Missing { .. })
    ));
}

#[test]
fn dates_are_those_of_the_calendar() {
    // `date -u -d @1709164799` and two seconds later.
    assert_eq!(
        date::strftime("%d %b %Y %H:%M:%S %A", 1_709_164_799),
        "28 Feb 2024 23:59:59 Wednesday"
    );
    assert_eq!(date::strftime("%Y-%m-%d", 1_709_164_801), "2024-02-29");
}

/// Renders conversations through transformers and through us. Runs where `LEGORL_TEST_TRANSFORMERS`
/// names a Python with transformers, and `LEGORL_TEST_TEMPLATES` a folder of `*.jinja` files.
#[test]
fn templates_render_as_in_transformers() {
    let (Ok(python), Ok(folder)) = (
        std::env::var("LEGORL_TEST_TRANSFORMERS"),
        std::env::var("LEGORL_TEST_TEMPLATES"),
    ) else {
        eprintln!("SKIPPED templates_render_as_in_transformers: set LEGORL_TEST_TRANSFORMERS and LEGORL_TEST_TEMPLATES");
        return;
    };
    let cases = conversations();
    let script = r#"
import json, sys, glob, os
from transformers.utils.chat_template_utils import _compile_jinja_template
folder, cases = sys.argv[1], json.load(sys.stdin)
out = {}
for path in sorted(glob.glob(os.path.join(folder, "*.jinja"))):
    rows = []
    for c in cases:
        try:
            t = _compile_jinja_template(open(path).read())
            rows.append({"text": t.render(messages=c["messages"], tools=c["tools"], documents=None, add_generation_prompt=c["add_generation_prompt"], bos_token="<s>", eos_token="</s>", **c["variables"])})
        except Exception as e:
            rows.append({"error": str(e)})
    out[os.path.basename(path)] = rows
json.dump(out, sys.stdout)
"#;
    let mut child = std::process::Command::new(python)
        .args(["-c", script, &folder])
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    child
        .stdin
        .take()
        .unwrap()
        .write_all(json!(cases).to_string().as_bytes())
        .unwrap();
    let output = child.wait_with_output().unwrap();
    let reference: Value = serde_json::from_slice(&output.stdout).unwrap();
    let (mut agree, mut refused, mut wrong) = (0, Vec::new(), Vec::new());
    for (name, rows) in reference.as_object().unwrap() {
        let source = std::fs::read_to_string(Path::new(&folder).join(name)).unwrap();
        let named = [("bos_token", "<s>"), ("eos_token", "</s>")];
        let named = named.map(|(k, v)| (k.to_owned(), v.to_owned())).into();
        let template = match ChatTemplate::from_source(source, name, named) {
            Ok(template) => template,
            Err(error) => {
                refused.push(error.to_string());
                continue;
            }
        };
        let mut ok = true;
        for (i, (case, want)) in cases.iter().zip(rows.as_array().unwrap()).enumerate() {
            let got = template.render_with(
                case["messages"].as_array().unwrap(),
                case["tools"].as_array().map(Vec::as_slice),
                case["add_generation_prompt"].as_bool().unwrap(),
                case["variables"].as_object().unwrap(),
            );
            let same = match (&got, want["text"].as_str()) {
                (Ok(got), Some(want)) => got == want,
                (Err(_), None) => true,
                _ => false,
            };
            if !same {
                ok = false;
                wrong.push(format!("{name} case {i}: want {want}\n  got {got:?}"));
            }
        }
        agree += usize::from(ok);
    }
    println!("{agree} templates agree; refused:\n{}", refused.join("\n"));
    assert!(
        wrong.is_empty(),
        "{} differences:\n{}",
        wrong.len(),
        wrong.join("\n")
    );
    assert!(agree >= 6);
}

/// Conversations in the form that templates share: string content, mapping arguments.
fn conversations() -> Vec<Value> {
    let tools = json!([{"type": "function", "function": {"name": "run", "description": "Runs é \"x\" <b>",
        "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}, "n": {"type": "integer", "default": 1.5}}, "required": ["cmd"]}}}]);
    let call = |cmd: &str| json!({"type": "function", "id": "call_1", "function": {"name": "run", "arguments": {"cmd": cmd, "n": 3, "f": 2.0, "ok": true, "l": [1, null]}}});
    let loop_ = json!([
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "List <files> & 'more' \"now\" \u{1F600}"},
        {"role": "assistant", "content": "Sure.", "tool_calls": [call("ls -l"), call("echo é")]},
        {"role": "tool", "tool_call_id": "call_1", "name": "run", "content": "a\nb"},
        {"role": "tool", "tool_call_id": "call_1", "name": "run", "content": "é"},
        {"role": "assistant", "content": "Done: 2 files"},
        {"role": "user", "content": "  and again "},
    ]);
    let reasoning = json!([
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "reasoning_content": "think\nhard", "tool_calls": [call("x")]},
        {"role": "tool", "tool_call_id": "call_1", "name": "run", "content": "r"},
        {"role": "assistant", "content": "<think>\nmore\n</think>\n\nanswer"},
        {"role": "user", "content": "q2"},
    ]);
    let mut out = Vec::new();
    for (messages, tools) in [
        (json!([{"role": "user", "content": "hi"}]), Value::Null),
        (
            json!([{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]),
            tools.clone(),
        ),
        (loop_.clone(), tools.clone()),
        (loop_, Value::Null),
        (reasoning, tools),
    ] {
        for generation in [true, false] {
            for variables in [json!({}), json!({"enable_thinking": false})] {
                out.push(json!({"messages": messages, "tools": tools, "add_generation_prompt": generation, "variables": variables}));
            }
        }
    }
    out
}

/// A template from anywhere is loaded on a login node: what it may do there is bounded.
#[test]
fn a_template_without_an_end_is_refused_by_file() {
    let loops = "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}";
    let error = template(loops).render(&[], None, false).unwrap_err();
    assert!(matches!(error, TemplateError::Endless { .. }), "{error}");
    assert!(error.to_string().contains("`test.jinja`"), "{error}");
}
