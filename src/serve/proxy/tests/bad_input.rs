//! What must not break a session: other sessions' secrets, broken text, templates that refuse, tokenizers that
//! lack tokens, replicas that die while they speak.

use super::*;

#[test]
fn another_sessions_secret_opens_nothing_and_leaves_nothing() {
    let s = setup(vec![text_reply("hello<|im_end|>")]);
    let (mine, other) = (s.open("task__1"), s.open("task__2"));
    let body = json!({"messages": [user("go")]}).to_string();
    let path = format!("/sess/{}~{}/v1/chat/completions", mine.session, other.secret);
    assert_eq!(s.post_raw(&path, &[], body.as_bytes()).0, 401);
    let path = format!("/sess/{}/v1/chat/completions", mine.session);
    for header in [
        ("authorization", format!("Bearer {}", other.secret)),
        ("x-api-key", other.secret.clone()),
    ] {
        assert_eq!(
            s.post_raw(&path, &[(header.0, &header.1)], body.as_bytes()).0,
            401
        );
    }
    // The path's secret counts where both are given.
    let path = format!("/sess/{}~{}/v1/chat/completions", mine.session, other.secret);
    assert_eq!(
        s.post_raw(&path, &[("x-api-key", &mine.secret)], body.as_bytes())
            .0,
        401
    );
    assert!(s.engine.requests().is_empty());
    for session in [mine, other] {
        let captured = s.close(&session);
        assert_eq!((captured.requests, captured.branches.len()), (0, 0));
    }
}

#[test]
fn half_a_surrogate_pair_ends_no_session_and_broken_utf8_is_refused() {
    let s = setup(vec![text_reply("one<|im_end|>"), text_reply("two<|im_end|>")]);
    let session = s.open("task__1");
    let path = format!("{}/v1/chat/completions", session.path);
    // As JavaScript writes a text that it cut inside of an emoji.
    let cut = r#"{"messages": [{"role": "user", "content": "cut \ud83d"}], "user": "\ude00"}"#;
    assert_eq!(s.post_raw(&path, &[], cut.as_bytes()).0, 200);
    let next = r#"{"messages": [{"role": "user", "content": "cut \ud83d"}, {"role": "assistant", "content": "one"},
                  {"role": "user", "content": "\ud83d\ude00"}]}"#;
    assert_eq!(s.post_raw(&path, &[], next.as_bytes()).0, 200);
    let wrong = [
        b"{\"messages\": [{\"role\": \"user\", \"content\": \"cut ".as_slice(),
        b"\xf0\x9f",
        b"\"}]}",
    ]
    .concat();
    let (status, text) = s.post_raw(&path, &[], &wrong);
    assert!(status == 400 && text.contains("line 1 column"), "{text}");
    let captured = s.close(&session);
    assert_eq!(
        captured.branches.len(),
        1,
        "the second request continued the first"
    );
    let text = s.text(&captured.branches[0].tokens, false);
    assert!(
        text.contains("cut \u{fffd}") && text.contains('\u{1f600}'),
        "{text}"
    );
}

#[test]
fn repeated_keys_count_once_the_last_time() {
    let s = setup(vec![text_reply("hello<|im_end|>")]);
    let session = s.open("task__1");
    let path = format!("{}/v1/chat/completions", session.path);
    let body = r#"{"messages": [{"role": "user", "content": "old"}], "n": 4, "max_tokens": 0,
                   "messages": [{"role": "user", "role": "user", "content": "x", "content": "new"}], "n": 1, "max_tokens": 9}"#;
    let (status, text) = s.post_raw(&path, &[], body.as_bytes());
    assert_eq!(status, 200, "{text}");
    let prompt = s.tokenizer.decode_with_special(&s.engine.requests()[0].prompt);
    assert!(
        prompt.contains("new") && !prompt.contains("old") && !prompt.contains('x'),
        "{prompt}"
    );
}

#[test]
fn fields_that_mean_nothing_are_refused_by_name_in_every_api() {
    let s = setup(vec![text_reply("one<|im_end|>")]);
    let session = s.open("task__1");
    let good = |api: &str| match api {
        "responses" => json!({"input": "go"}),
        _ => json!({"messages": [user("go")], "max_tokens": 5}),
    };
    let post = |api: &str, body: &Value| {
        let path = format!("{}/v1/{api}", session.path);
        s.post_raw(&path, &[], body.to_string().as_bytes())
    };
    let mut refused = 0;
    for api in ["chat/completions", "messages", "responses"] {
        let list = if api == "responses" { "input" } else { "messages" };
        for (field, value, named) in [
            ("tools", json!([5]), "`tools[0]`"),
            ("tools", json!([{}]), "`tools[0]."),
            ("temperature", json!(-1), "`temperature`"),
            ("temperature", json!("hot"), "`temperature`"),
            ("stream", json!("yes"), "`stream`"),
            (list, json!([{"role": "xx", "content": "go"}]), "`role`"),
        ] {
            let mut body = good(api);
            body[field] = value;
            let (status, text) = post(api, &body);
            assert!(
                status == 400 && text.contains(named),
                "{api} {body} {status} {text}"
            );
            refused += 1;
        }
    }
    let calls = json!([user("go"), {"role": "assistant", "content": "", "tool_calls": "a"}, user("on")]);
    let (status, text) = post("chat/completions", &json!({"messages": calls}));
    assert!(status == 400 && text.contains("`tool_calls`"), "{status} {text}");
    // What agents send beside, and whole numbers with a point.
    let mut body = good("chat/completions");
    body["n"] = json!(1.0);
    body["temperature"] = json!(0);
    body["betas"] = json!({"new": [1]});
    let (status, text) = post("chat/completions", &body);
    assert_eq!(status, 200, "{text}");
    assert_eq!(s.close(&session).refused, refused + 1);
}

/// A template of one's own with a rule in it.
fn setup_template(replies: Vec<ScriptedReply>, rule: &str) -> Setup {
    setup_configured(ScriptedEngine::replies(replies).recording(), |config| {
        let path = config.model_dir.join("chat_template.jinja");
        let source = std::fs::read_to_string(&path).unwrap();
        std::fs::write(path, format!("{rule}{source}")).unwrap();
    })
}

#[test]
fn a_template_that_raises_is_quoted_and_the_session_goes_on() {
    let rule = "{%- for m in messages %}{%- if 'forbidden' in m.content %}{{- raise_exception('no ' + m.role + ' may say it') }}{%- endif %}{%- endfor %}";
    let s = setup_template(
        vec![text_reply("one<|im_end|>"), text_reply("two<|im_end|>")],
        rule,
    );
    let session = s.open("task__1");
    let mut messages = vec![user("go")];
    assert_eq!(s.chat(&session, json!({"messages": messages})).0, 200);
    messages.push(json!({"role": "assistant", "content": "one"}));
    // As the first message and as a later one, in two protocols.
    for bad in [
        vec![user("forbidden")],
        [messages.clone(), vec![user("a forbidden word")]].concat(),
    ] {
        let (status, answer) = s.chat(&session, json!({"messages": bad}));
        let text = answer["error"]["message"].as_str().unwrap().to_owned();
        assert!(
            status == 400 && text.contains("no user may say it"),
            "{status} {text}"
        );
        let path = format!("{}/v1/messages", session.path);
        let body = json!({"messages": bad, "max_tokens": 5}).to_string();
        let (status, text) = s.post_raw(&path, &[], body.as_bytes());
        assert!(status == 400 && text.contains("invalid_request_error"), "{text}");
    }
    messages.push(user("more"));
    assert_eq!(s.chat(&session, json!({"messages": messages})).0, 200);
    let captured = s.close(&session);
    assert_eq!(
        (captured.turns, captured.branches.len(), captured.refused),
        (2, 1, 4)
    );
    assert_eq!(captured.engine_failure, None, "the engine did nothing wrong");
}

#[test]
fn a_tokenizer_that_lacks_a_token_is_refused_at_the_start_by_name() {
    let refused = |edit: &dyn Fn(&mut Value, &mut Value)| {
        let dir = tempfile::tempdir().unwrap();
        testing::write_folder(dir.path());
        let read = |name: &str| -> Value {
            serde_json::from_slice(&std::fs::read(dir.path().join(name)).unwrap()).unwrap()
        };
        let (mut tokenizer, mut config) = (read("tokenizer.json"), read("tokenizer_config.json"));
        edit(&mut tokenizer, &mut config);
        let write =
            |name: &str, value: Value| std::fs::write(dir.path().join(name), value.to_string()).unwrap();
        write("tokenizer.json", tokenizer);
        write("tokenizer_config.json", config);
        let config = ProxyConfig::new(dir.path().join("p.sock"), "policy".into(), dir.path().to_owned());
        let router = Arc::new(Router::new(RouterConfig::default()));
        Proxy::start(config, router)
            .err()
            .expect("it is refused")
            .to_string()
    };
    let without = |tokenizer: &mut Value, token: &str| {
        let added = tokenizer["added_tokens"].as_array_mut().unwrap();
        added.retain(|t| t["content"] != token);
    };
    let text = refused(&|tokenizer, _| without(tokenizer, "<|im_end|>"));
    assert!(
        text.contains("eos_token `<|im_end|>`") && text.contains("tokenizer.json"),
        "{text}"
    );
    // No file names the end of a turn any more: the template's is no token.
    let text = refused(&|tokenizer, config| {
        without(tokenizer, "<|im_end|>");
        *config = json!({});
    });
    assert!(
        text.contains("<|im_end|>") && text.contains("stop tokens"),
        "{text}"
    );
    let text = refused(&|tokenizer, _| {
        tokenizer["model"]["vocab"].as_object_mut().unwrap().remove("Q");
    });
    assert!(text.contains("0x51") && text.contains("tokenizer.json"), "{text}");
}

#[test]
fn a_replica_that_dies_in_mid_stream_is_replaced_and_every_token_is_recorded_once() {
    let dying = ScriptedReply {
        token_delay: Duration::from_millis(1),
        failure: Some((9, EngineError::ReplicaLost("node down".into()))),
        ..text_reply(CALL)
    };
    let s = setup_with(ScriptedEngine::replies(vec![dying]).recording(), 1 << 20);
    let rest: Vec<u32> = ids(&s.tokenizer, CALL).split_off(9);
    let second = Arc::new(ScriptedEngine::replies(vec![rest.clone().into()]).recording());
    s.proxy.router().join(ReplicaId(1), second.clone());
    let session = s.open("task__1");
    let path = format!("{}/v1/chat/completions", session.path);
    let body = json!({"messages": [user("go")], "tools": tools(), "stream": true, "return_token_ids": true});
    let (status, text) = s.post_raw(&path, &[], body.to_string().as_bytes());
    assert_eq!(status, 200);
    let events = events(&text);
    assert!(events.last().unwrap().is_null(), "the stream is whole: {text}");
    let of = |name: &str| -> Vec<Value> {
        let lists = events
            .iter()
            .filter_map(|e| e["choices"][0][name].as_array().cloned());
        lists.flatten().collect()
    };
    assert_eq!(json!(of("token_ids")), json!(ids(&s.tokenizer, CALL)));
    assert_eq!(
        s.proxy
            .router()
            .stats()
            .replicas
            .keys()
            .copied()
            .collect::<Vec<_>>(),
        [ReplicaId(1)]
    );
    assert_eq!(
        second.requests()[0].prompt.len(),
        s.engine.requests()[0].prompt.len() + 9
    );
    let captured = s.close(&session);
    let tokens = &captured.branches[0].tokens;
    assert_eq!(s.text(tokens, true), CALL);
    let start = tokens.token_ids.len() - ids(&s.tokenizer, CALL).len();
    // Each log-prob is the one of the engine that sampled the token, at its place in that engine's reply.
    let first = ids(&s.tokenizer, CALL)[..9].to_vec();
    let want: Vec<f32> = [first, rest]
        .iter()
        .flat_map(|reply| reply.iter().enumerate().map(|(i, id)| scripted_logprob(*id, i)))
        .collect();
    assert_eq!(tokens.logprobs[start..], want);
}

#[test]
fn a_last_replica_that_dies_ends_the_stream_with_an_error_and_the_retry_is_sampled_anew() {
    let dying = ScriptedReply {
        token_delay: Duration::from_millis(1),
        failure: Some((3, EngineError::ReplicaLost("node down".into()))),
        ..text_reply(CALL)
    };
    let s = setup(vec![dying]);
    let session = s.open("task__1");
    let path = format!("{}/v1/chat/completions", session.path);
    let body = json!({"messages": [user("go")], "tools": tools(), "stream": true}).to_string();
    let (status, text) = s.post_raw(&path, &[], body.as_bytes());
    assert_eq!(status, 200, "headers came before");
    assert!(
        text.contains("no engine replica is up") && !text.contains("[DONE]"),
        "{text}"
    );
    let fresh = Arc::new(ScriptedEngine::replies(vec![text_reply(CALL)]));
    s.proxy.router().join(ReplicaId(7), fresh);
    let (status, _) = s.post_raw(&path, &[], body.as_bytes());
    assert_eq!(status, 200);
    let captured = s.close(&session);
    assert_eq!((captured.turns, captured.branches.len()), (1, 1));
    assert_eq!(s.text(&captured.branches[0].tokens, true), CALL);
    assert!(captured.engine_failure.unwrap().contains("no engine replica"));
}
