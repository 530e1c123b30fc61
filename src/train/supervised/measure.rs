//! What the finished policy would earn, without running anything: the probability that it takes the
//! right path, by one forward pass over right transcripts.

use super::{
    conversation::{encode, Conversation},
    families::{Draft, Family, Step},
    transcripts::{Habits, Transcript},
    InitError,
};
use crate::model::{
    chat_template::ChatTemplate,
    net::{PackedLayout, Policy},
    tokenizer::Tokenizer,
};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use tch::{no_grad, Device, Kind, Tensor};

/// Mean over `per_family` fresh tasks of every family of the probability, at temperature 1, that the
/// policy runs the solution: straight away, or after listing the folder. Other right ways are not
/// counted, so this is a lower bound of the expected reward.
pub(super) fn right_path_probability(
    policy: &Policy,
    tokenizer: &Tokenizer,
    template: &ChatTemplate,
    per_family: usize,
    seed: u64,
) -> Result<f64, InitError> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let conversation = Conversation::new(template)?;
    let mut total = 0.0;
    for family in Family::ALL {
        let mut streams = Vec::new();
        for _ in 0..per_family {
            let draft = Draft::draw(family, &mut rng);
            let straight = Transcript::draw(&draft, &Habits::CAREFUL, &mut rng);
            let mut listed = straight.clone();
            listed.steps.insert(
                0,
                Step {
                    command: "ls".to_owned(),
                    output: draft.listing(),
                },
            );
            for transcript in [straight, listed] {
                streams.push(encode(tokenizer, &conversation.render(&transcript)?, true)?);
            }
        }
        let lengths: Vec<usize> = streams.iter().map(|s| s.ids.len()).collect();
        let ids: Vec<i64> = streams
            .iter()
            .flat_map(|s| &s.ids)
            .map(|id| i64::from(*id))
            .collect();
        let (mut places, mut targets, mut start) = (Vec::new(), Vec::new(), 0);
        for stream in &streams {
            // The last sampled turn is the farewell; by then the task is done.
            let farewell = stream.sampled.iter().rposition(|s| !s).map_or(0, |at| at + 1);
            for at in (0..farewell).filter(|at| stream.sampled[*at]) {
                places.push((start + at - 1) as i64);
                targets.push(ids[start + at]);
            }
            start += stream.ids.len();
        }
        let layout = PackedLayout::new(&lengths, Device::Cpu);
        let mut logprobs = vec![0f64; targets.len()];
        no_grad(|| {
            let hidden = policy.forward_hidden(&Tensor::from_slice(&ids), &layout);
            let chosen = hidden.index_select(0, &Tensor::from_slice(&places));
            let all = policy.logits(&chosen).log_softmax(-1, Kind::Double);
            let picked = all.gather(1, &Tensor::from_slice(&targets).unsqueeze(1), false);
            picked.contiguous().copy_data(&mut logprobs, targets.len());
        });
        let mut next = logprobs.iter();
        for stream in &streams {
            let farewell = stream.sampled.iter().rposition(|s| !s).map_or(0, |at| at + 1);
            let tokens = stream.sampled[..farewell].iter().filter(|s| **s).count();
            let sum: f64 = next.by_ref().take(tokens).sum();
            total += sum.exp();
        }
    }
    Ok(total / (per_family * Family::ALL.len()) as f64)
}
