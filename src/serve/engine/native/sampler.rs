//! Drawing a token from a row of log-probabilities.
//!
//! Every request has its own counter-based stream: the uniform number of its n-th token is a function of
//! the request's seed and n, so neither the batch nor an interruption changes what is drawn.

use crate::base::SamplingParams;

/// A drawn token and its log-probability before `top_k` and `top_p`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Draw {
    pub id: u32,
    pub logprob: f32,
}

/// Number in `[0, 1)` of the `index`-th token of a request: two rounds of the SplitMix64 finaliser
/// (Steele, Lea, Flood, 2014) over seed and counter.
pub(super) fn uniform(seed: u64, index: u64) -> f64 {
    let mixed =
        finalise(finalise(seed.wrapping_add(GOLDEN)) ^ index.wrapping_mul(GOLDEN).wrapping_add(GOLDEN));
    (mixed >> 11) as f64 / (1u64 << 53) as f64
}

const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

fn finalise(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// What the logits are divided by before the log-softmax.
pub(super) fn divisor(params: &SamplingParams) -> f32 {
    if params.temperature == 0.0 {
        1.0
    } else {
        params.temperature
    }
}

/// Draws from `logprobs` (log-softmax of the logits over the divisor, whole vocabulary) at `uniform` in
/// `[0, 1)`. None when the row holds no finite number or a NaN.
///
/// `top_k` cuts first, then `top_p` on what is left and rescaled: the smallest set of most likely tokens
/// that reaches it. Equal probabilities are ordered by id.
pub(super) fn draw(logprobs: &[f32], params: &SamplingParams, uniform: f64) -> Option<Draw> {
    let mut best = 0;
    for (i, l) in logprobs.iter().enumerate() {
        if l.is_nan() {
            return None;
        }
        if *l > logprobs[best] {
            best = i;
        }
    }
    let at = |i: usize| Draw {
        id: i as u32,
        logprob: logprobs[i],
    };
    if !logprobs.get(best)?.is_finite() {
        return None;
    }
    if params.temperature == 0.0 {
        return Some(at(best));
    }
    let everything = params.top_p >= 1.0 && (params.top_k == 0 || params.top_k as usize >= logprobs.len());
    if everything {
        let total: f64 = logprobs.iter().map(|l| f64::from(l.exp())).sum();
        let ids = 0..logprobs.len();
        return Some(at(invert(
            ids.map(|i| (i, f64::from(logprobs[i].exp()))),
            uniform * total,
        )?));
    }
    let mut order: Vec<usize> = (0..logprobs.len()).collect();
    order.sort_unstable_by(|a, b| logprobs[*b].total_cmp(&logprobs[*a]).then(a.cmp(b)));
    if params.top_k > 0 {
        order.truncate(params.top_k as usize);
    }
    let mut kept: Vec<(usize, f64)> = order
        .iter()
        .map(|i| (*i, f64::from(logprobs[*i]).exp()))
        .collect();
    if params.top_p < 1.0 {
        let target = f64::from(params.top_p) * kept.iter().map(|(_, p)| p).sum::<f64>();
        let mut sum = 0.0;
        let reaches = |(_, p): &(usize, f64)| {
            sum += p;
            sum >= target
        };
        let last = kept.iter().position(reaches).unwrap_or(kept.len() - 1);
        kept.truncate(last + 1);
    }
    // In the order of ids, as without cuts, so that a cut that removes nothing changes nothing.
    kept.sort_unstable_by_key(|(i, _)| *i);
    let total: f64 = kept.iter().map(|(_, p)| p).sum();
    Some(at(invert(kept.into_iter(), uniform * total)?))
}

/// First item at which the running sum exceeds `target`; rounding at the end gives the last likely one.
fn invert(items: impl Iterator<Item = (usize, f64)>, target: f64) -> Option<usize> {
    let mut sum = 0.0;
    let mut last = None;
    for (i, p) in items {
        sum += p;
        if p > 0.0 {
            last = Some(i);
            if sum > target {
                break;
            }
        }
    }
    last
}
