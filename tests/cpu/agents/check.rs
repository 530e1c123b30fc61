//! Compares what the proxy captured with what the engine was asked and sent, and with what the agent
//! received. Texts are decoded by the `tokenizers` library.

use super::{
    bench::{Call, Outcome},
    wire,
};
use legorl::base::CapturedBranch;

/// The sampled spans of a branch: where the mask begins and ends.
fn spans(branch: &CapturedBranch) -> Vec<(usize, usize)> {
    let mask = &branch.tokens.loss_mask;
    let mut found = Vec::new();
    let mut at = 0;
    while let Some(start) = (at..mask.len()).find(|&i| mask[i]) {
        let end = (start..mask.len()).find(|&i| !mask[i]).unwrap_or(mask.len());
        found.push((start, end));
        at = end;
    }
    found
}

/// Panics at the first difference:
///
/// 1. every masked span is the whole reply of one call, id by id, with log-prob (bit by bit) and version;
/// 2. what stands before the span is the prompt that the engine was asked with;
/// 3. every call is one span of one branch, so that the mask covers exactly what was sampled;
/// 4. what is not masked has log-prob 0; weights of trained branches sum to one;
/// 5. the agent received, reply by reply, the reasoning, text and calls that were sampled.
pub fn check(outcome: &Outcome) {
    check_tokens(outcome);
    check_wire(outcome);
}

/// Points 1 to 4 alone, for a policy without a script.
pub fn check_tokens(outcome: &Outcome) {
    let mut used = vec![0; outcome.calls.len()];
    for (number, branch) in outcome.captured.branches.iter().enumerate() {
        let tokens = &branch.tokens;
        tokens.check().unwrap();
        for (start, end) in spans(branch) {
            let what = format!("branch {number} ({:?}), tokens {start}..{end}", branch.kind);
            let fits = |call: &Call| {
                call.prompt[..] == tokens.token_ids[..start]
                    && call.tokens.len() == end - start
                    && call
                        .tokens
                        .iter()
                        .zip(&tokens.token_ids[start..])
                        .all(|(t, id)| t.id == *id)
            };
            let Some(at) = (0..used.len()).find(|&i| used[i] == 0 && fits(&outcome.calls[i])) else {
                panic!(
                    "{what}: no call of the engine has this prompt and this reply:\n{}",
                    outcome.decode(&tokens.token_ids[start..end])
                );
            };
            used[at] += 1;
            for (offset, token) in outcome.calls[at].tokens.iter().enumerate() {
                let i = start + offset;
                assert_eq!(
                    (tokens.logprobs[i].to_bits(), tokens.versions[i]),
                    (token.logprob.to_bits(), token.version.0),
                    "{what}: log-prob and version of token {i}"
                );
            }
        }
        for (i, masked) in tokens.loss_mask.iter().enumerate() {
            assert!(
                *masked || tokens.logprobs[i] == 0.0,
                "branch {number}: token {i} was not sampled"
            );
        }
    }
    for (call, used) in outcome.calls.iter().zip(&used) {
        assert!(
            *used == 1,
            "a reply is in {used} spans:\n{}",
            outcome.decode_sampled(call)
        );
    }
    let trained: Vec<_> = outcome.captured.branches.iter().filter(|b| b.trainable).collect();
    let weights: f32 = trained.iter().map(|b| b.tokens.weight).sum();
    assert!(
        trained.is_empty() || (weights - 1.0).abs() < 1e-5,
        "weights sum to {weights}"
    );
    assert_eq!(trained.len(), outcome.captured.sequences.len());
}

/// Every reply on the wire is one that was sampled, and every sampled one was on the wire.
fn check_wire(outcome: &Outcome) {
    let mut left: Vec<&Call> = outcome.calls.iter().collect();
    for exchange in outcome
        .exchanges
        .iter()
        .filter(|e| e.generates() && e.status == 200)
    {
        let got = wire::received(exchange);
        if got.text.contains("limit of this session") {
            continue;
        }
        let same = |call: &&Call| {
            let Some(turn) = &call.turn else { return false };
            turn.think.trim() == got.think.trim()
                && turn.text.trim() == got.text.trim()
                && turn.calls == got.calls
        };
        let Some(at) = left.iter().position(same) else {
            panic!("the agent received what was not sampled: {got:#?}");
        };
        let decoded = outcome.decode_sampled(left[at]);
        let turn = left[at].turn.as_ref().unwrap();
        assert_eq!(decoded, turn.render(outcome.markup));
        left.remove(at);
    }
    let texts: Vec<_> = left.iter().map(|call| outcome.decode_sampled(call)).collect();
    assert!(texts.is_empty(), "the agent did not receive: {texts:#?}");
}
