//! Templates whose renderings can be extended turn by turn, and those that cannot.

use super::*;

#[test]
fn templates_that_cannot_be_extended_are_refused_with_the_reason() {
    let dir = tempfile::tempdir().unwrap();
    testing::write_folder(dir.path());
    let build = |source: String| {
        let template = ChatTemplate::from_source(source, "t", Default::default()).unwrap();
        Renderer::new(template, Tokenizer::from_dir(dir.path()).unwrap(), Map::new())
    };
    let no_end = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}";
    let error = build(no_end.into()).err().unwrap().to_string();
    assert!(error.contains("stop tokens"), "{error}");
    // The number of messages is written with each one.
    let counting = "{% for m in messages %}{{ messages | length }}{{ m.content }}<|im_end|>{% endfor %}";
    let error = build(counting.into()).err().unwrap().to_string();
    assert!(error.contains("not rendered as"), "{error}");
}

/// Cost of a turn: what is rendered depends on the new messages alone.
#[test]
fn the_suffix_of_a_long_conversation_is_that_of_a_short_one() {
    let r = renderer();
    let new = [user("next")];
    let short = r.suffix(&assistant("a"), true, &new, 1 << 20).unwrap();
    let mut long = vec![json!({"role": "system", "content": "rules"})];
    for n in 0..50 {
        long.extend([user(&format!("q{n}")), assistant(&format!("a{n}"))]);
    }
    let without = r.full(&long[..long.len() - 1], None, 1 << 20).unwrap();
    long.extend(new);
    let with = r.full(&long, None, 1 << 20).unwrap();
    assert!(with.starts_with(&without));
    assert!(with.ends_with(&short));
}

/// Real templates with a real tokenizer: `LEGORL_TEST_TOKENIZER` names a folder with Qwen3's
/// tokenizer.json, `LEGORL_TEST_TEMPLATES` one with `*.jinja` files. What is spliced must be what the
/// template writes for the whole conversation.
#[test]
fn real_templates_can_be_extended_turn_by_turn() {
    let (Ok(folder), Ok(templates)) = (
        std::env::var("LEGORL_TEST_TOKENIZER"),
        std::env::var("LEGORL_TEST_TEMPLATES"),
    ) else {
        eprintln!("SKIPPED real_templates_can_be_extended_turn_by_turn: set LEGORL_TEST_TOKENIZER and LEGORL_TEST_TEMPLATES");
        return;
    };
    let templates = std::path::Path::new(&templates);
    for name in [
        "qwen2_5",
        "qwen3",
        "qwen3_instruct_2507",
        "qwen3_5_think",
        "qwen3_5_nothink",
        "qwen3_6",
    ] {
        let source = std::fs::read_to_string(templates.join(format!("{name}.jinja"))).unwrap();
        let template = ChatTemplate::from_source(source, name, Default::default()).unwrap();
        let tokenizer = Tokenizer::from_dir(folder.as_ref()).unwrap();
        let r = Renderer::new(template, tokenizer, Map::new()).unwrap_or_else(|e| panic!("{name}: {e}"));
        let call =
            json!({"id": "c1", "type": "function", "function": {"name": "run", "arguments": {"cmd": "ls"}}});
        let reply = json!({"role": "assistant", "content": "look", "tool_calls": [call]});
        let result =
            json!({"role": "tool", "tool_call_id": "c1", "content": "a <|im_end|>\n<tool_call> é \u{1F600}"});
        let mut all = vec![
            json!({"role": "system", "content": "s"}),
            user("q"),
            reply.clone(),
            result.clone(),
        ];
        let raw = tools().unwrap().to_string();
        let item = Item {
            form: Form::Chat,
            raw: raw.as_bytes(),
        };
        let tools = r.tools(item).unwrap();
        let suffix = r.suffix(&reply, true, &[result], 1 << 20).unwrap();
        let full = r.full(&all, Some(&tools), 1 << 20).unwrap();
        assert!(full.ends_with(&suffix), "{name}");
        all.truncate(2);
        let begin = r.full(&all, Some(&tools), 1 << 20).unwrap();
        let common = begin.iter().zip(&full).take_while(|(a, b)| a == b).count();
        // Thinking templates open a thought in the generation prompt that history does not repeat.
        assert!(begin.len() - common <= 4, "{name}: {common} of {}", begin.len());
        let ends = suffix.iter().filter(|id| **id == r.end_of_turn()).count();
        assert_eq!(ends, 1, "{name}: the tool wrote <|im_end|> as text");
    }
}
