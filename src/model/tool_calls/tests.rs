//! Tool calls and reasoning are read from replies, however they are cut.

use super::*;
use crate::model::tokenizer::testing;
use proptest::prelude::*;
use std::collections::HashMap;

fn call(name: &str, arguments: &str) -> Piece {
    Piece::Call(ToolCall {
        name: name.into(),
        arguments: arguments.into(),
    })
}

fn text(text: &str) -> Piece {
    Piece::Text(text.into())
}

/// Pieces with neighbours of one kind joined, and the number of malformed calls.
fn parse_in(
    pieces: &[&str],
    format: Option<Arc<dyn ToolCallFormat>>,
    tools: &[Value],
    thinking: Thinking,
) -> (Vec<Piece>, u32) {
    let mut parser = ReplyParser::new(format, tools.to_vec(), thinking);
    let mut all: Vec<Piece> = pieces.iter().flat_map(|piece| parser.push(piece)).collect();
    all.extend(parser.finish());
    let mut joined: Vec<Piece> = Vec::new();
    for piece in all {
        match (joined.last_mut(), piece) {
            (Some(Piece::Text(a)), Piece::Text(b)) | (Some(Piece::Reasoning(a)), Piece::Reasoning(b)) => {
                a.push_str(&b)
            }
            (_, piece) => joined.push(piece),
        }
    }
    (joined, parser.malformed())
}

fn hermes(text: &str) -> (Vec<Piece>, u32) {
    parse_in(&[text], Some(Arc::new(Hermes)), &[], Thinking::None)
}

#[test]
fn hermes_calls_content_and_malformed_ones() {
    let one =
        "<tool_call>\n{\"name\": \"run\", \"arguments\": {\"cmd\": \"ls </tool_call> \\\"é\\\"\"}}\n</tool_call>";
    let run = || call("run", "{\"cmd\":\"ls </tool_call> \\\"é\\\"\"}");
    assert_eq!(
        hermes(&format!("Look.\n{one}\n{one}\n")),
        (vec![text("Look.\n"), run(), run()], 0)
    );
    assert_eq!(hermes("just text"), (vec![text("just text")], 0));
    // The closing tag may be missing; arguments may be null or JSON text of an object.
    assert_eq!(
        hermes("<tool_call>{\"name\":\"a\",\"arguments\":{}}").0,
        [call("a", "{}")]
    );
    assert_eq!(
        hermes("<tool_call>{\"name\":\"a\",\"arguments\":{}}\n<tool_call>{\"name\":\"b\",\"arguments\":{}}</tool_call>").0,
        [call("a", "{}"), call("b", "{}")]
    );
    assert_eq!(
        hermes(r#"<tool_call>{"name":"a","arguments":"{\"x\": 1}"}</tool_call>"#).0,
        [call("a", "{\"x\": 1}")]
    );
    assert_eq!(
        hermes("<tool_call>{\"name\":\"a\",\"arguments\":null}").0,
        [call("a", "{}")]
    );
    for bad in [
        "<tool_call>{\"name\": \"run\"}</tool_call>",
        "<tool_call>{\"name\": \"run\", \"parameters\": {\"cmd\": \"ls\"}}</tool_call>",
        "<tool_call>{\"name\": \"run\", \"arguments\": null, \"parameters\": {\"cmd\": \"ls\"}}</tool_call>",
        "a<tool_call>{\"name\": \"run\", </tool_call>",
        "<tool_call></tool_call>",
        "<tool_call>",
        "<tool_call>{\"arguments\": {}}</tool_call>",
        "<tool_call>{\"name\": \"\", \"arguments\": {}}</tool_call>",
        "<tool_call>{\"name\": \"x\", \"arguments\": [1]}</tool_call>",
        "<tool_call>{\"name\": \"x\", \"arguments\": {}} tail</tool_call>",
        "<tool_call>{\"name\": \"x\", \"arguments\": {\"a\": \"cut off",
    ] {
        assert_eq!(hermes(bad), (vec![text(bad)], 1), "{bad}");
    }
    // What can be read is still a call.
    assert_eq!(
        hermes("<tool_call>{\"name\": \"x\", \"arguments\": {}}</tool_call>\n<tool_call>nonsense</tool_call> end"),
        (
            vec![call("x", "{}"), text("<tool_call>nonsense</tool_call> end")],
            1
        )
    );
}

fn coder_tools() -> Vec<Value> {
    vec![
        json!({"type": "function", "function": {"name": "edit", "parameters": {"type": "object", "properties": {
        "path": {"type": "string"}, "line": {"type": "integer"}, "scale": {"type": "number"},
        "all": {"type": "boolean"}, "map": {"type": "object"}, "list": {"type": ["array", "null"]},
        "either": {"anyOf": [{"type": "integer"}, {"type": "string"}]}}}}}),
    ]
}

fn coder(text: &str) -> (Vec<Piece>, u32) {
    parse_in(
        &[text],
        Some(Arc::new(Qwen3Coder)),
        &coder_tools(),
        Thinking::None,
    )
}

#[test]
fn xml_values_take_the_types_of_the_schema() {
    let parameter = |key: &str, value: &str| format!("<parameter={key}>\n{value}\n</parameter>\n");
    let reply = format!(
        "I edit.\n\n<tool_call>\n<function=edit>\n{}{}{}{}{}{}{}{}</function>\n</tool_call>",
        parameter("path", "\n  5 <b>\n"),
        parameter("line", "12"),
        parameter("scale", "1.5"),
        parameter("all", "True"),
        parameter("map", "{\"a\": [1]}"),
        parameter("list", "null"),
        parameter("either", "x7"),
        parameter("unknown", "7"),
    );
    let arguments = r#"{"path":"\n  5 <b>\n","line":12,"scale":1.5,"all":true,"map":{"a":[1]},"list":null,"either":"x7","unknown":"7"}"#;
    assert_eq!(
        coder(&reply),
        (vec![text("I edit.\n\n"), call("edit", arguments)], 0)
    );
    // Text that does not fit its type stays a string.
    let wrong = "<function=edit><parameter=line>many</parameter><parameter=map>[1]</parameter></function>";
    assert_eq!(coder(wrong).0, [call("edit", r#"{"line":"many","map":"[1]"}"#)]);
}

#[test]
fn xml_marks_that_are_missing_or_wrong() {
    let one = call("edit", r#"{"line":1,"path":"a"}"#);
    for good in [
        "<tool_call>\n<function=edit>\n<parameter=line>\n1\n<parameter=path>\na\n</parameter>\n</function>\n</tool_call>",
        "<function=edit>\n<parameter=line>1</parameter>\n<parameter=path>a\n</function>",
        "<tool_call><function=edit><parameter=line>1</parameter><parameter=path>a</parameter></function>",
    ] {
        assert_eq!(coder(good), (vec![one.clone()], 0), "{good}");
    }
    for bad in [
        "<tool_call>\n<function=edit>\n<parameter=line>\n1\n</parameter>",
        "<tool_call>\n<function=>\n</function>\n</tool_call>",
        "<tool_call>{\"name\": \"edit\"}</tool_call>",
        "<function=edit> text </function>",
        "<function=edit",
    ] {
        assert_eq!(coder(bad), (vec![text(bad)], 1), "{bad}");
    }
}

#[test]
fn reasoning_is_told_apart_and_ends_with_a_call() {
    let parse = |text: &str, thinking| parse_in(&[text], Some(Arc::new(Hermes)), &[], thinking).0;
    let thought = |t: &str| Piece::Reasoning(t.into());
    assert_eq!(
        parse("<think>\nhm. so\n</think>\n\nDone.", Thinking::Possible),
        [thought("hm. so"), text("Done.")]
    );
    assert_eq!(
        parse(
            "hm\n</think>\n\n<tool_call>{\"name\":\"a\",\"arguments\":{}}</tool_call>",
            Thinking::Open
        ),
        [thought("hm"), call("a", "{}")]
    );
    assert_eq!(
        parse(
            "hm\n<tool_call>{\"name\":\"a\",\"arguments\":{}}</tool_call>",
            Thinking::Open
        ),
        [thought("hm"), call("a", "{}")]
    );
    // A call among the thoughts is a thought, also where the text comes character by character.
    let inside =
        "<think>a <tool_call>{\"name\":\"f\",\"arguments\":{}}</tool_call>\n</think>z<tool_call>{\"name\":\"b\",\"arguments\":{}}</tool_call>";
    let want = [
        thought("a <tool_call>{\"name\":\"f\",\"arguments\":{}}</tool_call>"),
        text("z"),
        call("b", "{}"),
    ];
    assert_eq!(parse(inside, Thinking::Possible), want);
    assert_eq!(parse(&inside["<think>".len()..], Thinking::Open), want);
    let characters: Vec<String> = inside.chars().map(String::from).collect();
    let characters: Vec<&str> = characters.iter().map(String::as_str).collect();
    let format: Arc<dyn ToolCallFormat> = Arc::new(Hermes);
    assert_eq!(
        parse_in(&characters, Some(format), &[], Thinking::Possible).0,
        want
    );
    assert_eq!(parse("\n\nplain", Thinking::Possible), [text("\n\nplain")]);
    assert_eq!(parse("cut off", Thinking::Open), [thought("cut off")]);
    assert_eq!(parse("<think>\n\n</think>\n\nx", Thinking::Possible), [text("x")]);
    assert_eq!(
        parse("<think>x</think>", Thinking::None),
        [text("<think>x</think>")]
    );
}

fn template(source: &str) -> ChatTemplate {
    ChatTemplate::from_source(source.into(), "t.jinja", HashMap::new()).unwrap()
}

#[test]
fn the_parser_is_chosen_by_name_or_by_what_the_template_writes() {
    let hermes = template(testing::TEMPLATE);
    let name = |name: &str, template: &ChatTemplate| format_by_name(name, template).map(|f| f.name());
    assert_eq!(name("qwen3_coder", &hermes), Ok("qwen3_coder"));
    assert_eq!(name("auto", &hermes), Ok("hermes"));
    let xml = template(
        "{% for m in messages %}{% for c in m.tool_calls %}<tool_call>\n<function={{ c.function.name }}>\n{% for k, v in c.function.arguments|items %}<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}{% endfor %}",
    );
    assert_eq!(name("auto", &xml), Ok("qwen3_coder"));
    let error = name("herems", &hermes).unwrap_err().to_string();
    assert!(error.contains("herems") && error.contains("hermes"), "{error}");
    let error = name(
        "auto",
        &template("{{ messages[1].tool_calls[0].function.name }}!"),
    )
    .unwrap_err();
    assert!(error.to_string().contains("probe_name!"), "{error}");
}

/// `LEGORL_FUZZ_CASES` sets the number of inputs of each property; a long run takes a million.
fn cases() -> ProptestConfig {
    let cases = std::env::var("LEGORL_FUZZ_CASES").map_or(2000, |n| n.parse().expect("LEGORL_FUZZ_CASES"));
    ProptestConfig::with_cases(cases)
}

fn fragments() -> impl Strategy<Value = Vec<String>> {
    let marks = prop::sample::select(vec![
        "<tool_call>",
        "</tool_call>",
        "<tool",
        "_call>",
        "<",
        "{\"name\": \"f\"",
        ", \"arguments\": {\"a\": \"<tool_call>\"}}",
        "}",
        "\n",
        "é",
        "{\"name\": \"f\", \"arguments\": {}}",
        "<function=f>",
        "</function>",
        "<parameter=a>",
        "</parameter>",
        "<function=",
        "<think>",
        "</think>",
        "</",
    ]);
    prop::collection::vec(
        prop_oneof![6 => marks.prop_map(str::to_owned), 1 => ".{0,5}".prop_map(|s| s)],
        0..16,
    )
}

proptest! {
    #![proptest_config(cases())]
    #[test]
    fn pieces_do_not_depend_on_how_the_text_was_cut(
        pieces in fragments(), format in 0..3, thinking in 0usize..3, by_char in any::<bool>(),
    ) {
        let format: Option<Arc<dyn ToolCallFormat>> = match format {
            0 => None,
            1 => Some(Arc::new(Hermes)),
            _ => Some(Arc::new(Qwen3Coder)),
        };
        let thinking = [Thinking::None, Thinking::Possible, Thinking::Open][thinking];
        let whole = pieces.concat();
        let cut: Vec<String> = if by_char { whole.chars().map(String::from).collect() } else { pieces };
        let cut: Vec<&str> = cut.iter().map(String::as_str).collect();
        let want = parse_in(&[&whole], format.clone(), &coder_tools(), thinking);
        prop_assert_eq!(&parse_in(&cut, format.clone(), &coder_tools(), thinking), &want);
        for piece in &want.0 {
            if let Piece::Call(call) = piece {
                prop_assert!(serde_json::from_str::<serde_json::Map<String, Value>>(&call.arguments).is_ok());
            }
        }
        if format.is_none() && thinking == Thinking::None {
            prop_assert_eq!(want.0, if whole.is_empty() { vec![] } else { vec![text(&whole)] });
        }
    }
}
