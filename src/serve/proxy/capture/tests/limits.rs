//! What is read and kept of long requests, and when they are refused.

use super::*;

fn chat_item(raw: &str) -> Item<'_> {
    Item {
        form: Form::Chat,
        raw: raw.as_bytes(),
    }
}

/// A tool list of about so many bytes, unlike those with another number.
fn long_tools(number: usize, bytes: usize) -> String {
    let description = format!("{number} {}", "x1 ".repeat(bytes / 3));
    json!([{"type": "function", "function": {"name": "run", "description": description}}]).to_string()
}

fn place_with(renderer: &Renderer, tools: &str, limit: usize) -> Result<Place, CaptureError> {
    let message = user("go").to_string();
    let asked = Asked {
        items: &[chat_item(&message)],
        tools: Some(chat_item(tools)),
        options: 0,
        sub_agent: None,
        limit,
    };
    Tree::default().place(renderer, &asked)
}

#[test]
fn a_tool_list_is_read_once_and_forms_are_told_apart() {
    let r = renderer();
    let raw = r#"[{"type": "function", "name": "run", "function": {"name": "run"}, "input_schema": {"type": "object"}}]"#;
    let read = |form| {
        let item = Item {
            form,
            raw: raw.as_bytes(),
        };
        let list = r.tools(item).unwrap();
        r.remember_tools(item, list.clone());
        list
    };
    let (chat, anthropic) = (read(Form::Chat), read(Form::Anthropic));
    assert_ne!(chat.list, anthropic.list);
    for n in 0..20 {
        let other = format!("[{{\"type\": \"function\", \"function\": {{\"name\": \"f{n}\"}}}}]");
        let other = Item {
            form: Form::Chat,
            raw: other.as_bytes(),
        };
        let list = r.tools(other).unwrap();
        assert_eq!(list.list[0]["function"]["name"], format!("f{n}"));
        r.remember_tools(other, list);
    }
    assert!(Arc::ptr_eq(&chat, &read(Form::Chat)) && Arc::ptr_eq(&anthropic, &read(Form::Anthropic)));
    let wrong = Item {
        form: Form::Chat,
        raw: b"{}",
    };
    assert!(r.tools(wrong).is_err() && r.tools(wrong).is_err());
}

#[test]
fn megabytes_beyond_the_window_are_refused_with_a_count() {
    let r = renderer();
    let text = "hello world ".repeat(1 << 20);
    let error = r.full(&[user(&text)], None, 10_000).unwrap_err();
    assert!(
        matches!(error, RenderError::TooLong { at_least, limit: 10_000 } if at_least > 10_000),
        "{error}"
    );
}

#[test]
fn tool_lists_of_refused_requests_are_not_kept_and_kept_ones_are_bounded() {
    let renderer = renderer();
    let too_long = |result: Result<Place, CaptureError>| {
        matches!(result, Err(CaptureError::Render(RenderError::TooLong { .. })))
    };
    // Refused from the bytes alone.
    for number in 0..3 {
        assert!(too_long(place_with(
            &renderer,
            &long_tools(number, 2 << 20),
            1000
        )));
    }
    // Placed and then refused by the session, since the prompt is as long as the window.
    assert!(place_with(&renderer, &long_tools(9, 3000), 100).is_ok());
    assert_eq!(renderer.remembered_tools(), (0, 0));
    // Too long to be kept, though it fits.
    assert!(place_with(&renderer, &long_tools(9, 3 << 19), 4 << 20).is_ok());
    assert_eq!(renderer.remembered_tools(), (0, 0));
    // Many that are kept.
    for number in 0..20 {
        assert!(place_with(&renderer, &long_tools(number, 900_000), 4 << 20).is_ok());
        let (lists, bytes) = renderer.remembered_tools();
        assert!(
            lists == (number + 1).min(9) && bytes <= 8 << 20,
            "{lists} {bytes}"
        );
    }
    let last = long_tools(19, 900_000);
    let list = renderer.tools(chat_item(&last)).unwrap();
    assert!(
        Arc::ptr_eq(&list, &renderer.tools(chat_item(&last)).unwrap()),
        "read once"
    );
    for number in 0..40 {
        assert!(place_with(&renderer, &long_tools(number, 30), 1 << 20).is_ok());
    }
    assert_eq!(renderer.remembered_tools().0, 32);
}

#[test]
fn long_tools_and_messages_that_fit_are_never_refused_early() {
    let renderer = renderer();
    let escaped = "\\u0041".repeat(400_000);
    let indented = format!("[{}{{\"type\":\"function\",", " ".repeat(2 << 20));
    let blank = "\\n ".repeat(1 << 20);
    for raw in [
        format!(r#"[{{"type": "function", "function": {{"name": "run", "description": "{escaped}"}}}}]"#),
        format!(r#"{indented} "function": {{"name": "run"}}}}]"#),
        format!(r#"[{{"type": "function", "function": {{"name": "run", "description": "{blank}"}}}}]"#),
    ] {
        let Place::New { prompt, .. } = place_with(&renderer, &raw, usize::MAX).unwrap() else {
            panic!("the request was known");
        };
        assert!(place_with(&renderer, &raw, prompt.len()).is_ok());
    }
    let place = |message: &str, limit: usize| {
        let asked = Asked {
            items: &[chat_item(message)],
            tools: None,
            options: 0,
            sub_agent: None,
            limit,
        };
        Tree::default().place(&renderer, &asked)
    };
    let long = json!("word hello 12 ".repeat(200_000));
    for message in [
        format!(r#"{{"role": "user", "content": "{escaped}"}}"#),
        format!(r#"{{"role": "assistant", "content": "x", "reasoning_content": {long}}}"#),
        format!(r#"{{"role": "user", "content": {long}}}"#),
        format!(r#"{{"role": "user", "content": [{{"type": "text", "text": {long}}}]}}"#),
    ] {
        let Place::New { prompt, .. } = place(&message, usize::MAX).unwrap() else {
            panic!("the request was known");
        };
        assert!(place(&message, prompt.len()).is_ok());
        let refused = place(&message, prompt.len() / 2);
        assert!(prompt.len() < 1000 || refused.is_err(), "{}", prompt.len());
    }
    // Refused while it is read: what follows is not even looked at.
    let message = format!(r#"{{"role": "user", "content": {long}}}"#);
    let items = [chat_item(&message), chat_item("not read")];
    let mut tree = Tree::default();
    let asked = Asked {
        items: &items,
        tools: None,
        options: 0,
        sub_agent: None,
        limit: 1000,
    };
    let error = tree.place(&renderer, &asked).unwrap_err();
    assert!(
        matches!(error, CaptureError::Render(RenderError::TooLong { .. })),
        "{error}"
    );
}
