//! Sessions over HTTP.

use super::*;

fn admin() -> AdminConfig {
    AdminConfig {
        secret: "open sesame".into(),
        sampling: SamplingParams::default(),
        max_turns: 5,
        max_total_tokens: 4000,
        max_tokens_per_turn: 50,
        max_time: Duration::from_secs(600),
    }
}

#[test]
fn a_session_is_opened_used_and_closed_over_http() {
    let s = setup_configured(
        ScriptedEngine::replies(vec![text_reply(CALL), text_reply("hello<|im_end|>")]).recording(),
        |config| config.admin = Some(admin()),
    );
    let bearer = [("authorization", "Bearer open sesame")];
    for headers in [&[][..], &[("authorization", "Bearer no")]] {
        let (status, text) = s.post_raw("/admin/sessions", headers, b"");
        assert!(
            status == 401 && text.contains("admin secret") && text.contains("LEGORL_ADMIN_SECRET"),
            "{text}"
        );
    }
    for (body, word) in [
        ("{\"max_turn\": 3}", "max_turn"),
        ("{\"name\": \"a/b\"}", "a/b"),
        ("{\"max_seconds\": -1}", "max_seconds"),
    ] {
        let (status, text) = s.post_raw("/admin/sessions", &bearer, body.as_bytes());
        assert!(status == 400 && text.contains(word), "{text}");
    }
    let (status, text) = s.post_raw("/admin/sessions", &bearer, b"{\"name\": \"one\", \"seed\": 3}");
    assert_eq!(status, 201, "{text}");
    let opened: Value = serde_json::from_str(&text).unwrap();
    let base = opened["base_url"].as_str().unwrap();
    assert_eq!(
        base,
        format!(
            "http://{}/sess/one~{}",
            s.proxy.tcp().unwrap(),
            opened["secret"].as_str().unwrap()
        )
    );
    assert_eq!(
        s.post_raw("/admin/sessions", &bearer, b"{\"name\": \"one\"}").0,
        400
    );
    let path = format!(
        "/sess/one~{}/v1/chat/completions",
        opened["secret"].as_str().unwrap()
    );
    let body = json!({"messages": [user("go")], "tools": tools()}).to_string();
    assert_eq!(s.post_raw(&path, &[], body.as_bytes()).0, 200);
    assert_eq!(s.post_raw(&path, &[], b"{}").0, 400);
    assert_eq!(s.get("DELETE", "/admin/sessions/one", &[]).0, 401);
    let (status, text) = s.get("DELETE", "/admin/sessions/one", &bearer);
    assert_eq!(status, 200, "{text}");
    let record: Value = serde_json::from_str(&text).unwrap();
    assert_eq!((&record["requests"], &record["refused"]), (&json!(2), &json!(1)));
    let branch = &record["branches"][0];
    let request = &s.engine.requests()[0];
    let sampled = ids(&s.tokenizer, CALL);
    let start = request.prompt.len();
    assert_eq!(
        branch["token_ids"],
        json!([&request.prompt[..], &sampled].concat())
    );
    let mask = branch["mask"].as_array().unwrap();
    assert_eq!(mask.iter().filter(|m| **m == 1).count(), sampled.len());
    assert_eq!((&mask[start - 1], &mask[start]), (&json!(0), &json!(1)));
    for (i, id) in sampled.iter().enumerate() {
        let logprob = branch["logprobs"][start + i].as_f64().unwrap() as f32;
        assert_eq!(logprob, scripted_logprob(*id, i));
    }
    assert_eq!(
        (
            &branch["kind"],
            &branch["trainable"],
            &branch["weight"],
            &branch["parent"]
        ),
        (&json!("main"), &json!(true), &json!(1.0), &Value::Null)
    );
    let (status, text) = s.get("DELETE", "/admin/sessions/one", &bearer);
    let again: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(
        (status, &again["error"]["code"]),
        (404, &json!("session_not_open"))
    );
    assert_eq!(again["error"]["message"], "session `one` is not open");
    assert_eq!(s.post_raw(&path, &[], body.as_bytes()).0, 404);
    assert_eq!(s.proxy.shared.open_sessions(), 0);
}

#[test]
fn without_an_admin_secret_there_is_no_admin_and_caps_end_a_session_cleanly() {
    let s = setup_configured(
        ScriptedEngine::new(1 << 20, Box::new(|_, _| text_reply("hello<|im_end|>"))),
        |config| config.max_session_tokens = Some(3),
    );
    assert_eq!(
        s.post_raw("/admin/sessions", &[("authorization", "Bearer x")], b"")
            .0,
        404
    );
    let session = s.open("task__1");
    let ask = |text: &str| s.chat(&session, json!({"messages": [user(text)]}));
    let said = |answer: &Value| {
        answer["choices"][0]["message"]["content"]
            .as_str()
            .unwrap()
            .to_owned()
    };
    assert_eq!(said(&ask("a").1), "hello");
    assert_eq!(said(&ask("b").1), "hello");
    assert_eq!(said(&ask("c").1), TOKEN_LIMIT_NOTICE);
    let answers: Vec<u16> = (0..30).map(|n| ask(&format!("d{n}")).0).collect();
    assert_eq!(
        (answers[0], answers[29]),
        (200, 403),
        "notices do not go on for ever"
    );
    let captured = s.close(&session);
    assert_eq!((captured.turns, captured.token_limit_hit), (2, true));
    // Past its deadline a session gets notices, and what runs is cut off.
    let s = setup(vec![ScriptedReply {
        token_delay: Duration::from_millis(20),
        ..text_reply(&"hello ".repeat(90))
    }]);
    let mut short = spec("task__2");
    short.limits.deadline = Instant::now() + Duration::from_millis(400);
    let session = s.proxy.open(short).unwrap();
    let (_, answer) = s.chat(&session, json!({"messages": [user("a")]}));
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    let (_, answer) = s.chat(&session, json!({"messages": [user("b")]}));
    assert_eq!(said(&answer), TIME_LIMIT_NOTICE);
    let captured = s.close(&session);
    assert_eq!((captured.turns, captured.length_finishes), (1, 1));
    assert!(captured.sequences[0].sampled() > 1);
}
