//! Sampled tokens from a tensor of logits, where that tensor is.

use super::sampler::{self, Draw};
use crate::{base::SamplingParams, model::net::Device};
use tch::{Kind, Tensor};

/// Draws from the rows of `logits [R,V]`. Plain sampling and the most likely token are found on the
/// device; with `top_k` or `top_p` the rows go to the host.
pub(super) fn draw_rows(logits: &Tensor, samples: &[(SamplingParams, f64)]) -> Vec<Option<Draw>> {
    let (device, vocabulary) = (logits.device(), logits.size()[1]);
    let column = |values: Vec<f32>| Tensor::from_slice(&values).to_device(device).unsqueeze(-1);
    let logprobs = if samples.iter().all(|(p, _)| sampler::divisor(p) == 1.0) {
        logits.log_softmax(-1, Kind::Float)
    } else {
        let divisors = samples.iter().map(|(p, _)| sampler::divisor(p)).collect();
        (logits / column(divisors)).log_softmax(-1, Kind::Float)
    };
    let greedy = |p: &SamplingParams| p.temperature == 0.0;
    let plain = |p: &SamplingParams| p.top_p >= 1.0 && (p.top_k == 0 || i64::from(p.top_k) >= vocabulary);
    if samples.iter().any(|(p, _)| !greedy(p) && !plain(p)) {
        return draw_on_host(&logprobs, samples);
    }
    let (best, likeliest) = logprobs.max_dim(-1, false);
    let mut chosen = likeliest;
    if samples.iter().any(|(p, _)| !greedy(p)) {
        // The first token at which the running sum exceeds the uniform number times the whole sum.
        let sums = logprobs.exp().cumsum(-1, Kind::Double);
        let uniforms: Vec<f64> = samples.iter().map(|(_, u)| *u).collect();
        let targets =
            sums.narrow(1, vocabulary - 1, 1) * Tensor::from_slice(&uniforms).to_device(device).unsqueeze(-1);
        let drawn = sums
            .le_tensor(&targets)
            .sum_dim_intlist(-1, false, Kind::Int64)
            .clamp_max(vocabulary - 1);
        let is_greedy: Vec<bool> = samples.iter().map(|(p, _)| greedy(p)).collect();
        chosen = chosen.where_self(&Tensor::from_slice(&is_greedy).to_device(device), &drawn);
    }
    let of_chosen = logprobs.gather(-1, &chosen.unsqueeze(-1), false).squeeze_dim(-1);
    let answer = Tensor::stack(
        &[
            chosen.to_kind(Kind::Double),
            of_chosen.to_kind(Kind::Double),
            best.to_kind(Kind::Double),
        ],
        0,
    );
    let count = samples.len();
    let mut numbers = vec![0.0f64; 3 * count];
    let answer = answer.to_device(Device::Cpu).contiguous();
    answer.copy_data(&mut numbers, 3 * count);
    (0..count)
        .map(|i| {
            // A NaN anywhere in a row is its maximum.
            numbers[2 * count + i].is_finite().then(|| Draw {
                id: numbers[i] as u32,
                logprob: numbers[count + i] as f32,
            })
        })
        .collect()
}

fn draw_on_host(logprobs: &Tensor, samples: &[(SamplingParams, f64)]) -> Vec<Option<Draw>> {
    let (rows, width) = (samples.len(), logprobs.size()[1] as usize);
    let mut values = vec![0.0f32; rows * width];
    let logprobs = logprobs.to_device(Device::Cpu).contiguous();
    logprobs.copy_data(&mut values, rows * width);
    let rows = values.chunks_exact(width).zip(samples);
    rows.map(|(row, (params, uniform))| sampler::draw(row, params, *uniform))
        .collect()
}
