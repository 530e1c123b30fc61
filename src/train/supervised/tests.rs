//! The supervised start: streams, templates, the folder, and what it can do.

use super::{
    conversation::{encode, Conversation},
    families::{Draft, Family},
    model_folder::{write_tokenizer, CHAT_TEMPLATE},
    transcripts::{tool_call_message, Transcript},
    words::WORDS,
    *,
};
use crate::model::{
    chat_template::ChatTemplate,
    hf::{ModelConfig, ModelType},
    net::Policy,
    tokenizer::Tokenizer,
    tool_calls::{Hermes, Step, ToolCallFormat},
};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use serde_json::json;
use tch::Device;

struct Folder {
    _dir: tempfile::TempDir,
    tokenizer: Tokenizer,
    template: ChatTemplate,
}

fn folder() -> Folder {
    let dir = tempfile::tempdir().expect("folder");
    write_tokenizer(dir.path(), 1).expect("tokenizer");
    Folder {
        tokenizer: Tokenizer::from_dir(dir.path()).expect("tokenizer loads"),
        template: ChatTemplate::from_dir(dir.path()).expect("template loads"),
        _dir: dir,
    }
}

fn transcripts(seed: u64, count: usize) -> Vec<Transcript> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    (0..count)
        .map(|i| {
            let draft = Draft::draw(Family::ALL[i % Family::ALL.len()], &mut rng);
            Transcript::draw(&draft, &Habits::default(), &mut rng)
        })
        .collect()
}

#[test]
fn words_are_single_tokens_and_conversations_are_short() {
    let folder = folder();
    for word in WORDS {
        for text in [word.to_owned(), format!(" {word}")] {
            let ids = folder.tokenizer.encode_text(&text).expect("encodes");
            assert_eq!(ids.len(), 1, "{text:?}");
        }
    }
    let conversation = Conversation::new(&folder.template).expect("tools");
    for transcript in transcripts(3, 200) {
        let text = conversation.render(&transcript).expect("renders");
        let ids = folder.tokenizer.encode_rendered(&text).expect("encodes");
        assert!(ids.len() <= 350, "{} tokens: {text}", ids.len());
    }
}

/// The stream of a conversation is the prompt as the template renders it, then turn by turn what the
/// model samples and what the template puts between; the pieces join to the whole.
#[test]
fn streams_are_what_a_session_records() {
    let folder = folder();
    let (tokenizer, template) = (&folder.tokenizer, &folder.template);
    let conversation = Conversation::new(template).expect("tools");
    for transcript in transcripts(4, 60) {
        let text = conversation.render(&transcript).expect("renders");
        let stream = encode(tokenizer, &text, true).expect("encodes");
        let whole = tokenizer.encode_rendered(text.trim_end()).expect("encodes");
        assert_eq!(stream.ids, whole);

        let first = stream.sampled.iter().position(|s| *s).expect("a sampled token");
        let prompt = tokenizer.decode_with_special(&stream.ids[..first]);
        assert!(text.starts_with(&prompt));
        assert!(prompt.ends_with(&format!(
            "user\n{}<|im_end|>\n<|im_start|>assistant\n",
            transcript.instruction
        )));

        let mut turns = vec![String::new()];
        for (at, id) in stream
            .ids
            .iter()
            .enumerate()
            .filter(|(at, _)| stream.sampled[*at])
        {
            let token = tokenizer.decode_with_special(&[*id]);
            if let Some(turn) = turns.last_mut() {
                turn.push_str(&token);
            }
            if token == "<|im_end|>" && at + 1 < stream.ids.len() {
                turns.push(String::new());
            }
        }
        let mut wanted: Vec<String> = transcript
            .steps
            .iter()
            .map(|step| {
                format!(
                    "<tool_call>\n{{\"name\": \"bash\", \"arguments\": {{\"command\": \"{}\"}}}}\n</tool_call><|im_end|>",
                    step.command
                )
            })
            .collect();
        wanted.push("Done.<|im_end|>".to_owned());
        assert_eq!(turns, wanted);

        let headless = encode(tokenizer, &text, false).expect("encodes");
        assert!(stream.ids.ends_with(&headless.ids) && headless.ids.len() < stream.ids.len());
        assert!(stream.sampled.ends_with(&headless.sampled));
    }
}

/// The turns that the policy learns are tool calls for the parser that the proxy uses.
#[test]
fn turns_parse_as_hermes_tool_calls() {
    for transcript in transcripts(5, 80) {
        for step in &transcript.steps {
            let text = format!(
                "<tool_call>\n{{\"name\": \"bash\", \"arguments\": {{\"command\": \"{}\"}}}}\n</tool_call>",
                step.command
            );
            let Step::Call { call, .. } = Hermes.next(&text, true, &[]) else {
                panic!("{text}");
            };
            let arguments: serde_json::Value = serde_json::from_str(&call.arguments).expect("JSON");
            assert_eq!(arguments, json!({"command": step.command}));
        }
    }
}

#[test]
fn the_template_extends_a_conversation_without_changing_it() {
    let template =
        ChatTemplate::from_source(CHAT_TEMPLATE.to_owned(), "test", Default::default()).expect("compiles");
    let mut messages = vec![
        json!({"role": "system", "content": "S"}),
        json!({"role": "user", "content": "U"}),
        tool_call_message("ls"),
        json!({"role": "tool", "tool_call_id": "call", "content": "a"}),
        json!({"role": "tool", "tool_call_id": "call", "content": "b"}),
        json!({"role": "assistant", "content": "text"}),
        json!({"role": "user", "content": "more"}),
    ];
    let tools = vec![json!({"type": "function", "function": {"name": "bash"}})];
    let whole = template.render(&messages, Some(&tools), true).expect("renders");
    assert!(whole.contains(
        "<|im_start|>user\n<tool_response>\na\n</tool_response>\n<tool_response>\nb\n</tool_response><|im_end|>\n"
    ));
    while messages.len() > 1 {
        messages.pop();
        let part = template.render(&messages, Some(&tools), false).expect("renders");
        // Between two tool results the user turn is still open in the longer conversation.
        assert!(whole.starts_with(part.trim_end_matches("<|im_end|>\n")), "{part}");
    }
    let bare = template.render(&[json!({"role": "user", "content": "U"})], None, true);
    assert_eq!(
        bare.expect("renders"),
        "<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"
    );
}

fn options(output: std::path::PathBuf, steps: u32) -> InitPolicyOptions {
    InitPolicyOptions {
        output,
        kept_out: vec![],
        model_type: ModelType::Qwen3,
        steps,
        seed: 1,
        threads: 1,
        habits: Habits::default(),
    }
}

#[test]
fn a_start_writes_a_whole_model_folder() {
    let dir = tempfile::tempdir().expect("folder");
    let output = dir.path().join("policy");
    let mut losses = Vec::new();
    let report = init_policy(&options(output.clone(), 4), |at| losses.push(at.loss)).expect("made");
    assert_eq!(losses.len(), 4);
    assert!(losses[3] < losses[0], "{losses:?}");
    assert!(
        (1_000_000..=5_000_000).contains(&report.parameters),
        "{}",
        report.parameters
    );

    let config = ModelConfig::from_dir(&output).expect("config");
    let tokenizer = Tokenizer::from_dir(&output).expect("tokenizer");
    assert_eq!(config.vocab_size, tokenizer.vocab_size());
    let stop = tokenizer.token_to_id("<|im_end|>").expect("stop");
    assert!(tokenizer.stop_ids().contains(&stop) && config.eos_token_ids.contains(&stop));
    Policy::load(&output, Device::Cpu).expect("weights");
    ChatTemplate::from_dir(&output).expect("template");
    assert_eq!(
        std::fs::read_dir(dir.path()).expect("folder").count(),
        1,
        "nothing is left behind"
    );

    let again = init_policy(&options(output, 1), |_| {});
    assert!(matches!(again, Err(InitError::Exists { .. })));
}

#[test]
fn a_failed_start_leaves_nothing() {
    let dir = tempfile::tempdir().expect("folder");
    let mut options = options(dir.path().join("policy"), 1);
    options.kept_out = vec![dir.path().join("no-such-task")];
    let error = init_policy(&options, |_| {}).expect_err("no task");
    assert!(
        error.to_string().contains("no-such-task/instruction.md"),
        "{error}"
    );
    assert_eq!(std::fs::read_dir(dir.path()).expect("folder").count(), 0);
}

/// The whole start, as `make demo` runs it: names are copied reliably, and there is much to learn.
#[test]
fn the_start_can_do_every_task_and_often_does_not() {
    if std::env::var("LEGORL_TEST_LEVEL").as_deref() != Ok("long") {
        println!("SKIP the_start_can_do_every_task_and_often_does_not: belongs to the long list (minutes)");
        return;
    }
    let dir = tempfile::tempdir().expect("folder");
    let options = options(dir.path().join("policy"), InitPolicyOptions::DEFAULT_STEPS);
    let report = init_policy(&options, |_| {}).expect("made");
    let h = options.habits;
    let acts = (1.0 - h.idle) * (1.0 - h.list / 2.0) * (1.0 - h.slip);
    let ideal = acts * (0.75 + 0.25 * (1.0 - h.stop_early));
    assert!(
        report.right_path > 0.85 * ideal,
        "{report:?}, without copying errors {ideal:.3}"
    );
    assert!(report.right_path < 0.5, "{report:?}");
}
