//! Everything that a network computes for given tokens, for comparison with another implementation.
//!
//! Names and shapes are those that transformers would give for `input_ids [B,T]`:
//!
//! | Tensor | Shape | Content |
//! |---|---|---|
//! | `input_ids` | `[B,T]` i64 | as given |
//! | `logits` | `[B,T,V]` f32 | |
//! | `logprobs` | `[B,T-1]` f32 | of the tokens that follow, at temperature 1 |
//! | `hidden` | `[(L+1)·B,T,H]` f32 | embeddings, the outputs of all layers but the last, final norm |
//! | `topk` | `[S,B·T,k]` i64 | experts by sparse layer, most likely first |
//! | `topk_w` | `[S,B·T,k]` f32 | their weights |

use super::{PackedLayout, Policy};
use tch::{no_grad, Device, Kind, Tensor};

/// A tensor in host memory, row-major, little-endian.
#[derive(Clone, Debug, PartialEq)]
pub struct PlainTensor {
    /// Name in the file.
    pub name: String,
    /// Shape.
    pub shape: Vec<usize>,
    /// Elements.
    pub values: PlainValues,
}

/// Elements of a [`PlainTensor`].
#[derive(Clone, Debug, PartialEq)]
pub enum PlainValues {
    /// i64.
    Integers(Vec<i64>),
    /// f32.
    Floats(Vec<f32>),
}

impl PlainTensor {
    fn new(name: &str, tensor: &Tensor) -> Self {
        let flat = tensor.detach().to_device(Device::Cpu).contiguous().view(-1);
        let numel = flat.numel();
        let values = if flat.kind() == Kind::Int64 {
            let mut values = vec![0i64; numel];
            flat.copy_data(&mut values, numel);
            PlainValues::Integers(values)
        } else {
            let mut values = vec![0f32; numel];
            flat.to_kind(Kind::Float).copy_data(&mut values, numel);
            PlainValues::Floats(values)
        };
        Self {
            name: name.to_owned(),
            shape: tensor.size().iter().map(|n| *n as usize).collect(),
            values,
        }
    }
}

/// The table above for `rows` of equal length, each a sequence of its own; `rows` is not empty and no
/// token is outside the vocabulary.
pub fn trace(policy: &Policy, rows: &[Vec<i64>]) -> Vec<PlainTensor> {
    let _guard = tch::no_grad_guard();
    let (batch, length) = (rows.len() as i64, rows[0].len() as i64);
    let device = policy.device();
    let ids = Tensor::from_slice(&rows.concat()).to_device(device);
    let layout = PackedLayout::new(&vec![length as usize; rows.len()], device);
    layout.start_recording();
    let mut x = policy.embed(&ids);
    let mut hidden = vec![x.shallow_clone()];
    for block in policy.blocks() {
        x = block.forward(&x, &layout);
        hidden.push(x.shallow_clone());
    }
    let normed = policy.final_norm(&x);
    if let Some(last) = hidden.last_mut() {
        *last = normed.shallow_clone();
    }
    let by_row = |t: &Tensor| t.reshape([batch, length, -1]);
    let logits = by_row(&policy.logits(&normed));
    let ids = ids.view([batch, length]);
    let logprobs = logits
        .narrow(1, 0, length - 1)
        .log_softmax(-1, None::<Kind>)
        .gather(-1, &ids.narrow(1, 1, length - 1).unsqueeze(-1), false)
        .squeeze_dim(-1);
    let hidden: Vec<Tensor> = hidden.iter().map(by_row).collect();
    let mut tensors = vec![
        PlainTensor::new("input_ids", &ids),
        PlainTensor::new("logits", &logits),
        PlainTensor::new("logprobs", &logprobs),
        PlainTensor::new("hidden", &Tensor::cat(&hidden, 0)),
    ];
    let routing = layout.recorded();
    if !routing.is_empty() {
        let stack = |f: &dyn Fn(&super::Routing) -> Tensor| {
            Tensor::stack(&routing.iter().map(f).collect::<Vec<_>>(), 0)
        };
        tensors.push(PlainTensor::new("topk", &stack(&|r| r.experts.shallow_clone())));
        tensors.push(PlainTensor::new("topk_w", &stack(&|r| r.weights.shallow_clone())));
    }
    tensors
}

/// The most likely continuation of `prompt`, one token after the other, each over the whole text: no
/// cache. `count` tokens, whatever they are.
pub fn greedy_without_cache(policy: &Policy, prompt: &[i64], count: usize) -> Vec<i64> {
    let mut text = prompt.to_vec();
    no_grad(|| {
        for _ in 0..count {
            let ids = Tensor::from_slice(&text).to_device(policy.device());
            let layout = PackedLayout::single(text.len(), policy.device());
            let last = policy
                .forward_hidden(&ids, &layout)
                .narrow(0, text.len() as i64 - 1, 1);
            text.push(policy.logits(&last).argmax(-1, false).int64_value(&[0]));
        }
    });
    text.split_off(prompt.len())
}
