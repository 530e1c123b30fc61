//! The training loop: fresh transcripts every step, packed into one row, cross-entropy on the
//! assistant's tokens.

use super::{
    conversation::{encode, Conversation, TokenStream},
    families::{Draft, Family},
    muon::Optimizer,
    transcripts::{Habits, Transcript},
    unseen::Unseen,
    InitError, InitProgress,
};
use crate::model::{
    chat_template::ChatTemplate,
    net::{PackedLayout, Policy},
    tokenizer::Tokenizer,
};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use tch::{Device, Kind, Reduction, Tensor};

/// Transcripts of one step.
const TRANSCRIPTS_PER_STEP: usize = 32;
/// Steps over which the rates rise.
const WARM_UP_STEPS: f64 = 20.0;
/// Share of the steps, at the end, over which the rates fall to zero.
const DECAY_SHARE: f64 = 0.4;
/// Share of the steps, at the beginning, that leave out the system block. It is the same in every
/// conversation and half of its tokens, and names are copied from elsewhere.
const HEADLESS_SHARE: f64 = 0.75;
const MUON_RATE: f64 = 0.02;
const ADAM_RATE: f64 = 6e-3;

/// What the loop needs.
pub(super) struct Fit<'a> {
    pub(super) policy: &'a Policy,
    pub(super) tokenizer: &'a Tokenizer,
    pub(super) template: &'a ChatTemplate,
    pub(super) unseen: &'a Unseen,
    pub(super) habits: Habits,
    pub(super) steps: u32,
    pub(super) seed: u64,
}

/// What it did.
pub(super) struct FitReport {
    pub(super) transcripts: u64,
    pub(super) tokens: u64,
    pub(super) last_loss: f64,
}

impl Fit<'_> {
    pub(super) fn run(&self, progress: &mut dyn FnMut(&InitProgress)) -> Result<FitReport, InitError> {
        let mut rng = ChaCha8Rng::seed_from_u64(self.seed);
        let mut optimizer = Optimizer::new(self.policy.parameters());
        let mut report = FitReport {
            transcripts: 0,
            tokens: 0,
            last_loss: f64::NAN,
        };
        let steps = f64::from(self.steps);
        for step in 0..self.steps {
            let done = f64::from(step);
            let with_head = done >= steps * HEADLESS_SHARE;
            let streams = self.draw(with_head, &mut rng)?;
            let rise = ((done + 1.0) / WARM_UP_STEPS).min(1.0);
            let fall = ((steps - done) / (steps * DECAY_SHARE)).min(1.0);
            let loss = self.loss(&streams);
            loss.backward();
            optimizer.step(MUON_RATE * rise * fall, ADAM_RATE * rise * fall);
            report.last_loss = loss.double_value(&[]);
            if !report.last_loss.is_finite() {
                return Err(InitError::Diverged { step: step + 1 });
            }
            report.transcripts += streams.len() as u64;
            report.tokens += streams.iter().map(|s| s.ids.len() as u64).sum::<u64>();
            progress(&InitProgress {
                step: step + 1,
                steps: self.steps,
                loss: report.last_loss,
                tokens: report.tokens,
            });
        }
        Ok(report)
    }

    fn draw(&self, with_head: bool, rng: &mut ChaCha8Rng) -> Result<Vec<TokenStream>, InitError> {
        let conversation = Conversation::new(self.template)?;
        let mut streams = Vec::with_capacity(TRANSCRIPTS_PER_STEP);
        while streams.len() < TRANSCRIPTS_PER_STEP {
            let family = Family::ALL[rng.random_range(0..Family::ALL.len())];
            let draft = Draft::draw(family, rng);
            if !self.unseen.admits(&draft) {
                continue;
            }
            let transcript = Transcript::draw(&draft, &self.habits, rng);
            self.unseen.check(&transcript)?;
            let text = conversation.render(&transcript)?;
            streams.push(encode(self.tokenizer, &text, with_head)?);
        }
        Ok(streams)
    }

    /// Mean cross-entropy of the sampled tokens, each predicted from the token before it.
    fn loss(&self, streams: &[TokenStream]) -> Tensor {
        let lengths: Vec<usize> = streams.iter().map(|s| s.ids.len()).collect();
        let ids: Vec<i64> = streams
            .iter()
            .flat_map(|s| &s.ids)
            .map(|id| i64::from(*id))
            .collect();
        let (mut places, mut targets) = (Vec::new(), Vec::new());
        let sampled = streams.iter().flat_map(|s| &s.sampled);
        for (at, _) in sampled.enumerate().filter(|(_, sampled)| **sampled) {
            // A stream never starts with a sampled token.
            places.push(at as i64 - 1);
            targets.push(ids[at]);
        }
        let layout = PackedLayout::new(&lengths, Device::Cpu);
        let hidden = self.policy.forward_hidden(&Tensor::from_slice(&ids), &layout);
        let chosen = hidden.index_select(0, &Tensor::from_slice(&places));
        let logits = self.policy.logits(&chosen);
        logits.log_softmax(-1, None::<Kind>).g_nll_loss::<&Tensor>(
            &Tensor::from_slice(&targets),
            None,
            Reduction::Mean,
            -100,
        )
    }
}
