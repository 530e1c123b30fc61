use super::*;
use proptest::prelude::*;

fn call(name: &str, arguments: &str) -> ToolCall {
    ToolCall {
        name: name.into(),
        arguments: arguments.into(),
    }
}

#[test]
fn hermes_calls_content_and_malformed_ones() {
    let parse = |text: &str| Hermes.parse(text, None);
    let one =
        "<tool_call>\n{\"name\": \"run\", \"arguments\": {\"cmd\": \"ls </x> \\\"é\\\"\"}}\n</tool_call>";
    assert_eq!(
        parse(&format!("Look.\n{one}\n{one}")),
        ParsedReply {
            content: "Look.\n".into(),
            calls: vec![call("run", "{\"cmd\":\"ls </x> \\\"é\\\"\"}"); 2],
            malformed: false
        }
    );
    assert_eq!(parse("just text").content, "just text");
    assert!(!parse("just text").malformed);
    // The closing tag may be missing; arguments may be missing or JSON text of an object.
    assert_eq!(parse("<tool_call>{\"name\":\"a\"}").calls, [call("a", "{}")]);
    assert_eq!(
        parse(r#"<tool_call>{"name":"a","arguments":"{\"x\": 1}"}</tool_call>"#).calls,
        [call("a", "{\"x\": 1}")]
    );
    for bad in [
        "a<tool_call>{\"name\": \"run\", </tool_call>",
        "<tool_call></tool_call>",
        "<tool_call>{\"arguments\": {}}</tool_call>",
        "<tool_call>{\"name\": \"\", \"arguments\": {}}</tool_call>",
        "<tool_call>{\"name\": \"x\", \"arguments\": [1]}</tool_call>",
        "<tool_call>{\"name\": \"x\", \"arguments\": {}} tail</tool_call>",
        "<tool_call>{\"name\": \"x\"}</tool_call> and <tool_call>nonsense",
    ] {
        let got = parse(bad);
        assert_eq!(
            (got.content.as_str(), got.calls.len(), got.malformed),
            (bad, 0, true),
            "{bad}"
        );
    }
}

#[test]
fn the_parser_is_chosen_by_name() {
    assert_eq!(format_by_name("hermes").unwrap().name(), "hermes");
    let error = format_by_name("herems").err().unwrap().to_string();
    assert!(error.contains("herems") && error.contains("hermes"), "{error}");
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
    ]);
    prop::collection::vec(
        prop_oneof![4 => marks.prop_map(str::to_owned), 1 => ".{0,5}".prop_map(|s| s)],
        0..14,
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]
    #[test]
    fn a_stream_gives_what_the_whole_text_gives(pieces in fragments(), tools in any::<bool>()) {
        let format: Option<&dyn ToolCallFormat> = if tools { Some(&Hermes) } else { None };
        let text = pieces.concat();
        let mut parser = StreamParser::new();
        let mut content = String::new();
        for piece in &pieces {
            content.push_str(&parser.push(format, piece));
        }
        let end = parser.finish(format, None);
        content.push_str(&end.content);
        let want = match format {
            Some(format) => format.parse(&text, None),
            None => ParsedReply { content: text.clone(), ..ParsedReply::default() },
        };
        prop_assert_eq!(&content, &want.content);
        prop_assert_eq!(&end.calls, &want.calls);
        prop_assert_eq!(end.malformed, want.malformed);
        prop_assert!(!want.malformed || (want.content == text && want.calls.is_empty()));
        for call in &want.calls {
            prop_assert!(serde_json::from_str::<serde_json::Map<String, Value>>(&call.arguments).is_ok());
        }
    }
}
