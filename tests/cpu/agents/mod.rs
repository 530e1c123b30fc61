//! Real agents, unmodified, in real sandboxes, through the real proxy.
//!
//! ```text
//! agent in a sandbox ── Recorder (bytes on the wire) ── Proxy ── Router ── Recorded (tokens) ── engine
//!        └─ the task's own verifier gives the reward
//! ```
//!
//! The policy is a script: a function from the prompt to the reply ([`script`]), tokenised with Qwen3's own
//! tokenizer. What the proxy captured is then compared, token by token, with what the engine was asked and
//! sent and with what the agent received ([`check`]); nothing of the proxy's code takes part in that.
//!
//! An agent's runtime comes from `setup/runtimes.sh`. Tests of `cc` and `oc` fail without it, unless
//! LEGORL_OFFLINE is set; tests of the others are in the long list, or run by name where the runtime is there.

mod bench;
mod cc;
mod check;
mod custom;
mod oc;
mod oh;
mod ohsdk;
mod python;
mod script;
mod terminus2;
mod wire;

use bench::{run, scripted, tokenizer_dir, Limits, Outcome};
use legorl::{
    base::StopReason,
    model::net::{Device, Policy},
    rollout::{scaffold::Scaffold, trial::AttemptEnd},
    serve::engine::native::{NativeEngine, NativeEngineConfig},
};
use safetensors::{tensor::TensorView, Dtype, SafeTensors};
use script::{Markup, Turn};
use std::{path::Path, sync::Arc, time::Duration};

/// A word by which scripts recognise a conversation that was summed up.
const SUMMARY: &str = "SUMMARY-OF-THE-POLICY";

/// The commands of a demo task's own solution in its working folder, in one line.
fn solution(task: &str) -> String {
    let path = crate::support::root()
        .join("jobs/demo/tasks")
        .join(task)
        .join("solution/solve.sh");
    let text = std::fs::read_to_string(path).unwrap();
    let lines: Vec<_> = text.lines().skip(3).collect();
    lines.join(" && ")
}

/// The verifier is content, and every token is the engine's.
fn solved(outcome: &Outcome) {
    assert_eq!(outcome.reward(), 1.0, "{}", outcome.story());
    check::check(outcome);
}

fn stop(outcome: &Outcome) -> StopReason {
    match &outcome.end {
        AttemptEnd::Finished(trajectory) => trajectory.outcome.stop,
        other => panic!("{other:?}\n{}", outcome.story()),
    }
}

/// An agent that would go on for ever: the proxy answers six calls, then a notice, and the agent ends by itself.
fn endless(scaffold: Arc<dyn Scaffold>, turn: impl Fn(usize) -> Turn + Send + Sync + 'static) {
    let limits = Limits {
        max_turns: 6,
        ..Limits::default()
    };
    let outcome = scripted("copy-01", scaffold, Markup::Hermes, &limits, move |asked| {
        turn(asked.replies())
    });
    assert_eq!(stop(&outcome), StopReason::MaxTurnsReached, "{}", outcome.story());
    assert_eq!(outcome.reward(), 0.0);
    assert_eq!(outcome.captured.turns, 6, "{}", outcome.story());
    check::check(&outcome);
}

/// Qwen3's layers with few dimensions and random weights, under Qwen3's own tokenizer.
fn random_policy(dir: &Path) {
    const VOCABULARY: usize = 151_936;
    let fixture = crate::support::root().join("tests/fixtures/models/qwen3");
    let mut config: serde_json::Value =
        serde_json::from_slice(&std::fs::read(fixture.join("config.json")).unwrap()).unwrap();
    config["vocab_size"] = VOCABULARY.into();
    config["max_position_embeddings"] = 65_536.into();
    config["eos_token_id"] = 151_645.into();
    std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(tokenizer_dir().join(name), dir.join(name)).unwrap();
    }
    let bytes = std::fs::read(fixture.join("model.safetensors")).unwrap();
    let given = SafeTensors::deserialize(&bytes).unwrap();
    let width = config["hidden_size"].as_u64().unwrap() as usize;
    // A linear congruential generator: all that matters is that no token is likely.
    let mut state = 1u64;
    let mut next = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        ((state >> 40) as f32 / (1u64 << 24) as f32 - 0.5) * 0.1
    };
    let embedding: Vec<u8> = (0..VOCABULARY * width)
        .flat_map(|_| next().to_le_bytes())
        .collect();
    let name = "model.embed_tokens.weight";
    let mut tensors: Vec<(String, TensorView<'_>)> = given
        .tensors()
        .into_iter()
        .filter(|(known, _)| known != name)
        .collect();
    let view = TensorView::new(Dtype::F32, vec![VOCABULARY, width], &embedding).unwrap();
    tensors.push((name.into(), view));
    safetensors::serialize_to_file(tensors, None, &dir.join("model.safetensors")).unwrap();
}

/// A policy of random weights: whatever the agent makes of it, the trial ends with a reason.
fn nonsense(scaffold: Arc<dyn Scaffold>) {
    let dir = tempfile::tempdir().unwrap();
    random_policy(dir.path());
    let policy = Policy::load(dir.path(), Device::Cpu).unwrap();
    let config = NativeEngineConfig {
        max_num_seqs: 4,
        max_model_len: 60_000,
        kv_cache_tokens: 120_000,
        num_threads: 2,
        ..NativeEngineConfig::default()
    };
    let engine = NativeEngine::from_policy(config, &policy).unwrap();
    let limits = Limits {
        max_turns: 3,
        context: 60_000,
        reply: 40,
        // Prefill of the whole prompt, with optimisation off, beside other tests.
        time: Duration::from_secs(240),
    };
    let outcome = run(
        "copy-01",
        scaffold,
        engine,
        Arc::default(),
        dir.path(),
        Markup::Hermes,
        &limits,
    );
    assert!(!outcome.calls.is_empty(), "{}", outcome.story());
    let end = stop(&outcome);
    eprintln!("ended as {end:?} after {} replies", outcome.captured.turns);
    assert_ne!(end, StopReason::Timeout, "{}", outcome.story());
    assert_eq!(outcome.reward(), 0.0);
    check::check_tokens(&outcome);
}
